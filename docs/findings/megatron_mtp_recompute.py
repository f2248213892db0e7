"""megatron-core: full recomputation of modules for multi-token prediction fails with packed sequences.

Two ranks, CPU, the library's own method on a function that doubles its input. The remedy passes activations alone to
it. Exit code 0: defect present, and with the remedy the gradient is right. 1: gone. See megatron-mtp-recompute.md.
"""

from types import SimpleNamespace
from typing import Any

import megatron_on_cpu as on_cpu
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

CONFIG = SimpleNamespace(
    fp8=None, recompute_method="uniform", recompute_num_layers=1, distribute_saved_activations=False
)


def doubled(hidden_states: torch.Tensor, packed_seq_params: Any = None) -> torch.Tensor:
    return 2 * hidden_states


def recomputed(function: Any, **inputs: Any) -> torch.Tensor:
    layer: Any = SimpleNamespace(config=CONFIG)
    output: torch.Tensor = MultiTokenPredictionLayer._checkpointed_forward(layer, function, **inputs)
    return output


def present(rank: int) -> bool:
    parallel_state.initialize_model_parallel()
    random._get_cuda_rng_state = random._set_cuda_rng_state = lambda *_, **__: None
    documents, x = PackedSeqParams(), torch.ones(3, requires_grad=True)
    try:
        recomputed(doubled, hidden_states=x, packed_seq_params=documents)
        found = "none"
    except TypeError as error:
        found = str(error)
    recomputed(lambda hidden: doubled(hidden, documents), hidden_states=x).sum().backward()
    assert x.grad is not None
    if rank == 0:
        print(f"recomputing with packed sequences: {found}; REMEDY: gradient {x.grad[0]:.0f} of 2", flush=True)
    return "save_for_backward" in found and bool((x.grad == 2).all())


if __name__ == "__main__":
    on_cpu.two_ranks(present)
