"""Runs megatron-core on the rank's own device; the library requests CUDA by name in a hundred places.

On a CPU rank, CUDA means the CPU inside ``placed`` (conformance.backends.on_cpu). Everything is restored on exit.
No computed number changes but the gradient norm (tests/megatron_backend/test_megatron_placement.py). Without Apex and
TransformerEngine, the library computes it with torch's norm, which loses digits on a CPU. The library also reads the
norm of every gradient separately, and the host waits for the GPU each time. So its norm is replaced on CPUs and GPUs.
The exact tier needs one more replacement,
on GPUs as well: the library checks dtypes by names such as ``torch.cuda.FloatTensor``, so double must pass as float.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.utils import local_multi_tensor_l2_norm

from conformance.backends.on_cpu import cuda_is_cpu, replaced, set_cpu_rng_state
from impl.engine.optimizers import sums_of_squares

_MUON = "emerging_optimizers.orthogonalized_optimizers.muon_utils"  # imported only for a training by Muon


@contextlib.contextmanager
def on_device(device: str, *, exact: bool) -> Iterator[None]:
    """Redirects CUDA requests to ``device`` and computes what megatron-core computes. It may be nested."""
    on_cpu = device == "cpu"
    with contextlib.ExitStack() as stack:
        if on_cpu:
            stack.enter_context(cuda_is_cpu())
            for owner, replacements in _REPLACEMENTS:
                stack.enter_context(replaced(owner, replacements))
        if exact:
            for module in filter(None, (param_and_grad_buffer, sys.modules.get(_MUON))):
                stack.enter_context(replaced(module, {"torch": _Widened()}))
        if on_cpu or exact:
            stack.enter_context(_dtype_names(on_cpu=on_cpu, exact=exact))
        yield


@contextlib.contextmanager
def placed(device: str, *, exact: bool) -> Iterator[None]:
    """Enters ``on_device`` with the gradient norm replaced; enter it around every call into megatron-core."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(on_device(device, exact=exact))
        if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
            stack.enter_context(replaced(clip_grads, {"l2_norm_impl": _l2_norm}))
        yield


class _Widened:
    """Stands for the module torch in code that names float32: float64 in the exact tier."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def _dtype_names(*, on_cpu: bool, exact: bool) -> Iterator[None]:
    """Replaces the names that ``Tensor.type`` returns. A mode would be called for each attribute of a tensor."""

    def named(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:  # a conversion
            return torch._C.TensorBase.type(tensor, *args, **kwargs)
        with torch._C.DisableTorchFunction():  # modes are given this function, and would call it again
            name = torch._C.TensorBase.type(tensor)
        name = name.replace("torch.", "torch.cuda.", 1) if on_cpu else name
        return name.replace("Double", "Float") if exact else name

    kind: Any = torch.Tensor  # which inherits the method
    before = vars(kind).get("type")
    kind.type = named
    try:
        yield
    finally:
        if before is None:
            del kind.type
        else:
            kind.type = before


def _l2_norm(
    _chunk: int, _flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], *_: Any
) -> tuple[torch.Tensor, None]:
    """Returns the 2-norm of all tensors together, (1,) in float32 on their device, and None.

    It replaces ``local_multi_tensor_l2_norm`` (docs/findings/torch-norm-on-cpus.md).
    """
    squares = torch.stack([square for tensors in tensor_lists for square in sums_of_squares(tensors)])
    return squares.sum().sqrt().to(torch.float).view(1), None


def _moved_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Returns the sizes of a token exchange as the library does on a GPU: tensors become numpy arrays on request."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


_GATHER, _REDUCE_SCATTER = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim


def _gather(own: torch.Tensor, group: Any, sizes: Sequence[int] | None = None, use_global_buffer: bool = False) -> Any:
    """Gathers as the library does; pads tensors of different lengths to the longest, because gloo needs equal ones."""
    if sizes is None or len(sizes) == 1:
        return _GATHER(own, group, sizes, use_global_buffer)
    pieces = _GATHER(_padded(own, max(sizes)), group).split(max(sizes))
    return torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])


def _reduce_scatter(
    whole: torch.Tensor, group: Any, sizes: Sequence[int] | None = None, use_global_buffer: bool = False
) -> Any:
    """Reduces and scatters as the library does, with the same padding as ``_gather``."""
    if sizes is None or len(sizes) == 1:
        return _REDUCE_SCATTER(whole, group, sizes, use_global_buffer)
    pieces = [_padded(piece, max(sizes)) for piece in whole.split([*sizes])]
    return _REDUCE_SCATTER(torch.cat(pieces), group)[: sizes[group.rank()]]


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])


_REPLACEMENTS: tuple[tuple[Any, dict[str, Any]], ...] = (
    # The backward passes of exchanges ask for it as well, where no mode replaces arguments.
    (torch.cuda, {"current_device": lambda: torch.device("cpu")}),
    (megatron_random, {"_set_cuda_rng_state": set_cpu_rng_state}),
    (mappings, {"_gather_along_first_dim": _gather, "_reduce_scatter_along_first_dim": _reduce_scatter}),
    (token_dispatcher, {"maybe_move_tensor_to_cpu": _moved_to_cpu}),
)
