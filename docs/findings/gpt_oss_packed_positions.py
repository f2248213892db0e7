"""transformers: gpt-oss attends across packed documents: its masks are made without ``position_ids``.

Exit code 0: defect present. 1: gone. See gpt-oss-packed-positions.md.
"""

import sys
from typing import Any

import torch
import transformers
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

LENGTHS, VOCAB = (20, 12, 16), 96


def build() -> Any:
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return GptOssForCausalLM(config).double().train()


def log_probs(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """The log-prob of each token, given the tokens before it in the row."""
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]  # type: ignore[no-any-return]


def gradient(model: Any, logp: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    (-logp.mean()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def masks(model: Any, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    embeddings = torch.empty(*positions.shape, 1, dtype=torch.float64)
    wanted = {"config": model.config, "inputs_embeds": embeddings, "attention_mask": None, "past_key_values": None}
    full = create_causal_mask(**wanted, position_ids=positions)
    return {
        "full_attention": full,
        "sliding_attention": create_sliding_window_causal_mask(**wanted, position_ids=positions),
    }


if __name__ == "__main__":
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, gpt-oss, float64, documents {LENGTHS}")
    model = build()
    documents = [torch.randint(0, VOCAB, (1, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    row, positions = torch.cat(documents, dim=1), torch.cat([torch.arange(n) for n in LENGTHS])[None]
    inside = positions[0, 1:] > 0  # the first token of a document is predicted from another one
    right = torch.cat([log_probs(model, d) for d in documents])
    right_gradient = gradient(model, right)
    ways: dict[str, dict[str, Any]] = {
        "position_ids": {},
        "REMEDY: masks of position_ids": {"attention_mask": masks(model, positions)},
    }
    errors = {}
    for name, inputs in ways.items():
        logp = log_probs(model, row, position_ids=positions, **inputs)[inside]
        errors[name] = (logp - right).abs().max().item()
        error = ((gradient(model, logp) - right_gradient).norm() / right_gradient.norm()).item()
        print(f"{name:30}: loss {-logp.mean().item():.6f} (right: {-right.mean().item():.6f}); ", end="")
        print(f"log-probs off by up to {errors[name]:.1e}, gradient by {error:.1e}")
    shipped, remedied = errors.values()
    present = shipped > 1e-3 and remedied < 1e-5
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
