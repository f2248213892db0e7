"""First inputs: AutoTP's check that tensor-parallel ranks get the same ones, on copies in host memory.

It sends the first rank's inputs to the others as pickled objects. Tensors of a GPU are unpickled on the same GPU, so
every rank would open the first one's, for the rest of its life (docs/findings/deepspeed-autotp-context.md).
"""

from typing import Any

import torch
from torch.utils._pytree import tree_map


def compare_in_host_memory(engine: Any) -> None:
    """Replace the check of an engine that has been initialised with tensor parallelism, before its first forward."""
    own = engine.first_dataloader_check
    check = engine.module._forward_pre_hooks[own.id]
    own.remove()

    def of_copies(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        check(module, *tree_map(_copy, (args, kwargs)))  # it removes engine.first_dataloader_check at its end

    engine.first_dataloader_check = engine.module.register_forward_pre_hook(of_copies, prepend=True, with_kwargs=True)


def _copy(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value
