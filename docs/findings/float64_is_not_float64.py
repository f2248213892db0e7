"""transformers: a model in float64 computes its norms, rotary tables and softmax in float32.

``.to(torch.float32)`` is an upcast for bfloat16 and a downcast for float64. Gradients of a "float64 reference" are
good to six or seven digits. The judge here is a central difference of the loss. Exit code 0: defect present. 1: gone.
See float64-is-not-float64.md.
"""

import contextlib
import sys
from typing import Any

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from conformance.numerics.float64_tier import LeakWatch, exact_tier


def build() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.1,
        attn_implementation="eager",
    )
    return Qwen3ForCausalLM(config).double()


def loss_of(model: Any) -> torch.Tensor:
    ids = torch.randint(0, 96, (4, 32), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    assert logits.dtype == torch.float64
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def gradients(model: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return [p.grad.clone() for p in model.parameters()]


def slope(model: Any, direction: list[torch.Tensor], step: float = 2e-4) -> float:
    """Derivative of the loss along ``direction``, from five-point central differences."""
    total, at = 0.0, 0.0
    for point, weight in ((-2, 1), (-1, -8), (1, 8), (2, -1)):
        torch._foreach_add_(list(model.parameters()), direction, alpha=(point - at) * step)
        total, at = total + weight * loss_of(model).item(), point
    torch._foreach_add_(list(model.parameters()), direction, alpha=-at * step)
    return total / (12 * step)


def norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.stack([t.norm() for t in tensors]).norm())


def measure(weights: dict[str, torch.Tensor], *, exact: bool) -> tuple[float, list[torch.Tensor], int]:
    with exact_tier() if exact else contextlib.nullcontext():
        model = build()
        model.load_state_dict(weights)
        with LeakWatch() as watch:
            found = gradients(model)
        with torch.no_grad():
            difference = slope(model, [g / norm(found) for g in found])
            loss = loss_of(model).item()
    by_autograd, leaks = norm(found), sum(leak.count for leak in watch.leaks)
    print(f"{'exact_tier' if exact else 'as shipped'}: loss {loss:.15f}, ops that give float32: {leaks}")
    print(f"  slope along the gradient: {by_autograd:.15f}, by differences {difference:.15f}", end=", ")
    print(f"ratio - 1 = {by_autograd / difference - 1:.1e}")
    return by_autograd / difference - 1, found, leaks


if __name__ == "__main__":
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, Qwen3, model.double(), eager attention")
    weights = build().state_dict()
    _, shipped, leaks = measure(weights, exact=False)
    slope_error, right, no_leaks = measure(weights, exact=True)
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(shipped, right, strict=True)]
    ratio = norm(shipped) / norm(right) - 1
    print(f"gradients as shipped: off by {min(errors):.1e} to {max(errors):.1e} per parameter; norm off by {ratio:.1e}")
    present = leaks > 0 and no_leaks == 0 and 1e-9 < max(errors) < 1e-3 and abs(slope_error) < 1e-9
    print("defect present" if present else "defect not as described")
    sys.exit(0 if present else 1)
