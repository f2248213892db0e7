"""transformers: states of recurrent layers run on from one packed document into the next.

Exit code 0: defect present. 1: gone. See recurrent-packed-states.md.
"""

import sys
from typing import Any

import torch
import transformers

LENGTHS = (9, 11)
DELTA: dict[str, Any] = {
    **{"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12},
    **{"head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Next": {**DELTA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Qwen3_5Text": DELTA,
    "OlmoHybrid": DELTA,
    "GraniteMoeHybrid": {
        **{"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96, **MAMBA},
        **{"layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
    },
    "Bamba": {"attn_layer_indices": [1], **MAMBA},
    "FalconH1": {"mamba_d_ssm": 96, "mamba_d_head": 24, **MAMBA},
    "NemotronH": {
        **{"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 24, "head_dim": 12},
        **{"n_groups": 1, "ssm_state_size": 8, "chunk_size": 16},
    },
    "Zamba2": {"n_mamba_heads": 4, "mamba_ngroups": 1, "mamba_d_state": 8, "layers_block_type": ["mamba", "hybrid"]},
    "Jamba": {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
}
SIZES = {
    **{"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def build(family: str) -> Any:
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.12 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(1 + noise if name.endswith("norm.weight") else noise)
    return model


def off(model: Any, documents: list[torch.Tensor], **inputs: Any) -> str:
    """Compares the second document in a row with the same document alone."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    alone = model(documents[1], use_cache=False).logits
    try:
        row = model(torch.cat(documents, dim=1), position_ids=positions, use_cache=False, **inputs).logits
    except ValueError as error:
        return f"refused: {str(error)[:52]}"
    return f"{((row[:, LENGTHS[0] :] - alone).abs().max() / alone.abs().max()).item():.1e}"


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, float64, without fla and mamba_ssm")
    documents = [torch.randint(3, 96, (1, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    numbers = torch.tensor([[0] * LENGTHS[0] + [1] * LENGTHS[1]], dtype=torch.int32)
    starts = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32)
    present = []
    with torch.no_grad():
        for family in FAMILIES:
            model = build(family)
            shipped = off(model, documents)
            kernels = off(model, documents, seq_idx=numbers, cu_seq_lens_q=starts, cu_seq_lens_k=starts)
            padded = torch.zeros(2, max(LENGTHS), dtype=torch.int64)
            for row, document in enumerate(documents):
                padded[row, : document.shape[1]] = document
            right = model(documents[0], use_cache=False).logits
            error = (model(padded, use_cache=False).logits[:1, : LENGTHS[0]] - right).abs().max() / right.abs().max()
            print(f"{family:17} position_ids: {shipped}; seq_idx, cu_seq_lens: {kernels}; REMEDY padded: {error:.0e}")
            present.append(not shipped.startswith("refused") and float(shipped) > 1e-3 and error < 1e-6)
    print("defect present" if all(present) else "defect not as described")
    sys.exit(0 if all(present) else 1)
