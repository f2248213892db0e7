"""megatron-core: with a frozen embedding, layers that are recomputed silently get no gradient at all.

Two ranks, CPU. Exit code 0: defect present (no gradient, no error and no warning), and the remedy gives the same
gradient as training without recomputation. 1: gone. See megatron-frozen-embedding.md.
"""

import warnings
from typing import Any

import megatron_on_cpu as on_cpu
import torch
from megatron.core import parallel_state, tensor_parallel

ROWS, HIDDEN, VOCABULARY = 32, 16, 64


def recompute_states() -> None:
    """Replaces the restoring of CUDA's generator, which a machine without CUDA lacks; no op here is random."""
    random: Any = tensor_parallel.random
    random._get_cuda_rng_state = random._set_cuda_rng_state = lambda *_, **__: None


def gradient(*, recomputed: bool, remedy: bool = False) -> tuple[torch.Tensor | None, list[str]]:
    """The gradient of a layer between a frozen embedding and a trained head, and the warnings about it."""
    torch.manual_seed(0)
    embedding, layer = torch.nn.Embedding(VOCABULARY, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)
    head = torch.nn.Linear(HIDDEN, VOCABULARY)
    embedding.requires_grad_(False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        x = embedding(torch.arange(ROWS))
        if remedy:
            x.requires_grad_()
        x = tensor_parallel.checkpoint(layer, False, x) if recomputed else layer(x)
        torch.nn.functional.cross_entropy(head(torch.tanh(x)), torch.arange(ROWS).flip(0)).backward()
    assert head.weight.grad is not None
    return layer.weight.grad, [str(warning.message) for warning in said]


def present(rank: int) -> bool:
    parallel_state.initialize_model_parallel()
    recompute_states()
    (right, _), (lost, said) = gradient(recomputed=False), gradient(recomputed=True)
    mended, _ = gradient(recomputed=True, remedy=True)
    assert right is not None
    assert mended is not None
    if rank == 0:
        print(f"gradient of the layer: {right.norm():.4f} without recomputation, with it", end=" ")
        print(f"{'none' if lost is None else lost.norm()}; warnings: {len(said)};", end=" ")
        print(f"REMEDY {on_cpu.error(mended, right):.1e} off", flush=True)
    return lost is None and not said and on_cpu.error(mended, right) < 1e-6


if __name__ == "__main__":
    on_cpu.two_ranks(present)
