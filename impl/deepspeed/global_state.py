"""DeepSpeed's global state in a process: set up when the first context enters, restored when the last one leaves.

A rank runs one cell after another, and an engine changes global state of DeepSpeed, torch and transformers that decides
how later engines behave; docs/findings/deepspeed-global-state.md lists the changes and their effects. Several contexts
may be open at a time, so they are counted.
"""

import contextlib
import gc
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.module_inject import set_autotp_mode
from deepspeed.runtime.zero import parameter_offload, partition_parameters
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.sequence import layer
from deepspeed.utils import groups, nvtx

from conformance.core.errors import UsageError
from conformance.spec.layout import Layout
from impl.engine.optimizers import sums_of_squares

_open: list[tuple[int, int]] = []  # (tp, ulysses) of each context that has entered and not left
_undo = contextlib.ExitStack()  # the calls to make when the last context leaves


def enter(device: str, layout: Layout) -> None:
    """Make DeepSpeed use the initialised default process group, on ``device``.

    Raises UsageError if a context with another tp or ulysses is open, because DeepSpeed has one set of process groups.
    """
    cut = (layout.tp, layout.ulysses)
    if any(other != cut for other in _open):
        raise UsageError(
            f"DeepSpeed keeps its process groups in globals, and a context with tp{_open[0][0]}.ulysses{_open[0][1]} "
            f"is open; tear it down before you set up tp{cut[0]}.ulysses{cut[1]}, or use the same tp and ulysses"
        )
    if not _open:
        _set_up(device)
    _open.append(cut)


def leave() -> None:
    """Restore the global state if this is the last context. Its engines have to be destroyed before."""
    _open.pop()
    if not _open:
        _undo.close()
        gc.collect()


def when_left(undo: Callable[[], None]) -> None:
    """Call ``undo`` when the last context leaves."""
    assert _open
    _undo.callback(undo)


def _set_up(device: str) -> None:
    # Two lines per collective otherwise: torch 2.13 deprecates names that DeepSpeed calls.
    deprecated = r".*\b(all_gather_into_tensor|reduce_scatter_tensor)\b.*"
    warnings.filterwarnings("ignore", category=FutureWarning, message=deprecated)
    _undo.callback(deepspeed.logger.setLevel, deepspeed.logger.level)
    deepspeed.logger.setLevel(logging.WARNING)
    _undo.callback(_forget_groups)
    _replace(torch.nn.functional, "linear", torch.nn.functional.linear)  # zero.Init puts its own there
    # A fifth of the functions that ZeRO-3 calls in a step open and close ranges for NVIDIA's profilers, and DeepSpeed
    # itself turns them off for compiled modules. Leave this line out to see them in a profile.
    _replace(nvtx, "enable_nvtx", False)
    if device == "cpu":
        set_accelerator(CPU_Accelerator())
        # No op is compatible, so none is compiled: the first, shared-memory inference, would take half a minute.
        _replace(deepspeed.ops, "__compatible_ops__", {})
        # It asks oneDNN, which has float16 on CPUs with AVX512-FP16 or AMX only. torch's own kernels, which compute
        # instead then, have it on any CPU (docs/findings/deepspeed-cpu-fp16.md).
        _replace(get_accelerator(), "is_fp16_supported", lambda: True)
        _replace(torch.Tensor, "norm", _norm)
    else:
        # For ops that are compiled at first use. Its builder cannot read "9.0a" in this variable (DeepSpeed#8619).
        name, capability = "TORCH_CUDA_ARCH_LIST", torch.cuda.get_device_capability(device)
        known = os.environ.get(name)
        _undo.callback(os.environ.pop, name) if known is None else _undo.callback(os.environ.update, {name: known})
        os.environ[name] = "{}.{}".format(*capability)
        # It wants GPUs by number, and ranks have theirs by UUID (docs/findings/deepspeed-visible-uuids.md).
        _replace(get_accelerator(), "available_memory", lambda index=None: torch.cuda.mem_get_info(index)[0])
    accelerator = get_accelerator()
    assert accelerator.device_name() == torch.device(device).type
    # ZeRO-0 reduces gradients of the listed dtypes only, and float64 is not among them.
    dtypes = [*accelerator.supported_dtypes(), torch.float64]
    _replace(accelerator, "supported_dtypes", lambda: dtypes)
    deepspeed.init_distributed(dist_backend=dist.get_backend())


_NORM = torch.Tensor.norm


def _norm(tensor: torch.Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """In the place of torch's method, by which DeepSpeed clips: of a large tensor it is off on a CPU
    (docs/findings/torch-norm-on-cpus.md)."""
    if p not in ("fro", 2) or not (dim is dtype is None) or not tensor.is_floating_point() or tensor.requires_grad:
        return _NORM(tensor, p, dim, keepdim, dtype)
    return sums_of_squares([tensor])[0].sqrt().to(tensor.dtype)


def _replace(owner: Any, name: str, value: Any) -> None:
    """Set an attribute until the last context leaves; then restore its old value, or remove it if it had none."""
    if name in vars(owner):
        _undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        _undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def _forget_groups() -> None:
    """Drop DeepSpeed's references to process groups, which the suite destroys, and reset its tensor-parallel mode."""
    groups._release_process_group_references()
    layer._all_to_all_groups.clear()  # of Ulysses; a group that is held keeps its sockets and threads
    set_autotp_mode(training=False)


def forget_model(model: torch.nn.Module) -> None:
    """Drop DeepSpeed's references to a model that ZeRO-3 has partitioned. Its engine has to be destroyed before."""
    own = set(model.modules())  # also its layers: recomputation stops inside their forward passes
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module not in own]
    # The cache of a decorated method keeps all engines and modules alive from their second forward pass on. Engines
    # that are still in use fill it again.
    decorated: Any = vars(PartitionedParameterCoordinator)["_PartitionedParameterCoordinator__params_to_release"]
    inspect.getclosurevars(decorated).nonlocals["func"].cache_clear()


@contextlib.contextmanager
def any_dtype() -> Iterator[None]:
    """Let ZeRO-3 partition parameters of any dtype.

    ZeRO-3 asserts that they are float16, bfloat16 or float32, but uses the dtype only to decide which buffers of a
    half-precision model stay in float32.
    """
    checked = partition_parameters.InsertPostInitMethodToModuleSubClasses
    original = checked._set_dtype

    def as_float32(self: Any, settings: Any, dtype: Any) -> None:
        self.dtype = torch.float32

    checked._set_dtype = as_float32
    try:
        yield
    finally:
        checked._set_dtype = original


@contextlib.contextmanager
def adapted_layers_opened() -> Iterator[None]:
    """Let AutoTP go into the layers of peft.

    It takes what has a two-dimensional ``weight`` for a linear layer, as a layer of peft with its property of this name
    does, and puts its own linear layer there, without the adapter (docs/findings/deepspeed-autotp-adapters.md).
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    original = BaseTunerLayer.weight
    del BaseTunerLayer.weight
    try:
        yield
    finally:
        setattr(BaseTunerLayer, "weight", original)  # noqa: B010 (a type checker takes it for a method)


@contextlib.contextmanager
def equal_on_all_ranks() -> Iterator[None]:
    """Let engines begin without sending all parameters of the first rank to the others, which have the same ones.

    What they hold would be written to, and would take memory beside the buffers that it is copied to.
    """
    original = deepspeed.DeepSpeedEngine._broadcast_model
    deepspeed.DeepSpeedEngine._broadcast_model = lambda engine: None
    try:
        yield
    finally:
        deepspeed.DeepSpeedEngine._broadcast_model = original
