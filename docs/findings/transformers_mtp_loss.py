"""transformers: MtpModel, the modules for multi-token prediction, fails if it is given labels.

One process, CPU, a DeepSeek-V3 with one module and random weights. The remedy runs the module by ``forward_layer`` and
takes the loss outside. Exit code 0: defect present, and the remedy trains the module. 1: gone.
See transformers-mtp-loss.md.
"""

import sys

import torch
import transformers
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel

VOCAB, LENGTH = 64, 12


def build() -> tuple[DeepseekV3ForCausalLM, MtpModel]:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=0, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8, num_nextn_predict_layers=1,
    )  # fmt: skip
    main = DeepseekV3ForCausalLM(config)
    return main, MtpModel(main, 1)


def main() -> int:
    model, modules = build()
    ids = torch.randint(1, VOCAB, (1, LENGTH + 2), generator=torch.Generator().manual_seed(1))
    hidden = model.model(ids[:, :LENGTH], use_cache=False).last_hidden_state
    ahead, labels = ids[:, 1 : LENGTH + 1], ids[:, 2:]
    places = torch.arange(LENGTH)[None]
    try:
        modules(ahead, hidden, None, places, None, labels=labels)
        found = "none"
    except TypeError as error:
        found = str(error)
    logits = modules.shared_head(modules.forward_layer(0, hidden, places, None, input_ids=ahead))
    torch.nn.functional.cross_entropy(logits[0], labels[0]).backward()
    missed = [name for name, parameter in modules.layers.named_parameters() if parameter.grad is None]
    missed = [name for name in missed if "correction" not in name and "experts" not in name]
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    print(f"forward with labels: {found}; REMEDY: {len(missed)} parameters of the module without a gradient")
    return 0 if "NoneType" in found and not missed else 1


if __name__ == "__main__":
    sys.exit(main())
