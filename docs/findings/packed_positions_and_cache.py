"""transformers: packed position_ids are ignored, without an error, unless ``use_cache=False`` (and no attention_mask).

Documents packed into one row are told apart by position_ids that start again at 0. The mask that keeps them apart is
made only if there is no cache, and the default configuration makes one, in training mode too. Exit code 0: defect
present. 1: gone. See packed-positions-and-cache.md.
"""

import sys
from typing import Any

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

LENGTHS, VOCAB = (20, 12, 16), 96


def build(attention: str) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.1,
        attn_implementation=attention,
    )
    return Qwen3ForCausalLM(config).double().train()


def log_probs(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """The log-prob of each token, given the tokens before it in the row."""
    logits = model(input_ids=ids, **inputs).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]  # type: ignore[no-any-return]


def gradient(model: Any, logp: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    (-logp.mean()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def measure(attention: str) -> dict[str, float]:
    model = build(attention)
    documents = [torch.randint(0, VOCAB, (1, n), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    row, positions = torch.cat(documents, dim=1), torch.cat([torch.arange(n) for n in LENGTHS])[None]
    first = torch.cat([torch.arange(n) for n in LENGTHS])[1:] == 0  # a document's first token: predicted from another
    right = torch.cat([log_probs(model, d) for d in documents])
    right_gradient = gradient(model, right)
    ways: dict[str, dict[str, Any]] = {
        "position_ids": {},
        "position_ids, use_cache=False, mask of ones": {"use_cache": False, "attention_mask": torch.ones_like(row)},
        "position_ids, use_cache=False": {"use_cache": False},
    }
    errors = {}
    print(f"{attention} attention: right loss {-right.mean().item():.6f}")
    for name, inputs in ways.items():
        logp = log_probs(model, row, position_ids=positions, **inputs)[~first]
        errors[name] = (logp - right).abs().max().item()
        error = ((gradient(model, logp) - right_gradient).norm() / right_gradient.norm()).item()
        print(f"  {name:43}: loss {-logp.mean().item():.6f}, ratio {(logp.mean() / right.mean()).item():.6f}", end="; ")
        print(f"log-probs off by up to {errors[name]:.1e}, gradient by {error:.1e}")
    return errors


if __name__ == "__main__":
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, Qwen3, float64, documents {LENGTHS}")
    present = True
    for attention in ("eager", "sdpa"):
        shipped, masked, right = measure(attention).values()
        present &= shipped > 1e-3 and masked > 1e-3 and right < 1e-5
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
