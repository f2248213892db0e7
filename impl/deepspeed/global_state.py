"""Sets up DeepSpeed's global state when the first context enters, and restores it when the last one leaves.

A rank runs one cell after another. An engine changes global state of DeepSpeed, torch and transformers that decides how
later engines behave; docs/findings/deepspeed-global-state.md lists the changes and their effects. Several contexts may
be open at a time, so they are counted.

Ulysses (Jacobs et al., arXiv 2309.14509) is set up here, too: ranks exchange slices of the sequence for heads in
attention. DeepSpeed's own module does the exchange. The ring layer computes attention, on a ring of one rank if the
layout has none: unlike ``sdpa`` it needs no mask for documents and windows, and Ulysses drops masks
(docs/findings/deepspeed-ulysses-sdpa.md).
"""

import contextlib
import gc
import inspect
import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.module_inject import set_autotp_mode
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.runtime.zero import parameter_offload, partition_parameters
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.sequence import layer
from deepspeed.utils import groups, nvtx
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from conformance.core.errors import UsageError
from conformance.spec.layout import Layout
from impl.context_parallel.ring_attention import NAME
from impl.deepspeed import global_state
from impl.engine.optimizers import sums_of_squares

_open: list[Layout] = []  # of each open context: what decides about process groups
_undo = contextlib.ExitStack()  # the calls to make when the last context leaves


def enter(device: str, layout: Layout) -> None:
    """Makes DeepSpeed use the initialised default process group, on ``device``.

    Raises UsageError if a context with another tp, ulysses or hpz is open, because DeepSpeed has one set of process
    groups.
    """
    cut = Layout(dp=layout.hpz, tp=layout.tp, ulysses=layout.ulysses, hpz=layout.hpz)
    if any(known != cut for known in _open):
        axes = ("tp", "ulysses", "hpz")
        other, own = (".".join(f"{axis}{getattr(one, axis)}" for axis in axes) for one in (_open[0], cut))
        raise UsageError(
            f"DeepSpeed keeps its process groups in globals, and a context with {other} is open; tear it down before "
            f"you set up {own}, or use the same tp, ulysses and hpz"
        )
    if not _open:
        _set_up(device)
    _open.append(cut)


def group_second_copies(layout: Layout) -> None:
    """Groups ``hpz`` ranks with the same part of tensor parallelism, for ZeRO++'s second copies of weights; collective.

    DeepSpeed takes the group that is there. With AutoTP it would group ranks that follow each other, which have
    different parts, and an engine without an optimizer cannot make groups (docs/findings/deepspeed-hpz-autotp.md).
    """
    for first in range(0, dist.get_world_size(), layout.hpz * layout.tp):
        for part in range(layout.tp):
            ranks = list(range(first + part, first + layout.hpz * layout.tp, layout.tp))
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = group


def leave() -> None:
    """Restores the global state if this is the last context. Its engines must be destroyed before."""
    _open.pop()
    if not _open:
        _undo.close()
        gc.collect()


def when_left(undo: Callable[[], None]) -> None:
    """Registers ``undo`` to be called when the last context leaves."""
    assert _open
    _undo.callback(undo)


def _set_up(device: str) -> None:
    # torch 2.13 deprecates names that DeepSpeed calls, and would warn in two lines per collective.
    deprecated = r".*\b(all_gather_into_tensor|reduce_scatter_tensor)\b.*"
    warnings.filterwarnings("ignore", category=FutureWarning, message=deprecated)
    _undo.callback(deepspeed.logger.setLevel, deepspeed.logger.level)
    deepspeed.logger.setLevel(logging.WARNING)
    _undo.callback(_forget_groups)
    _replace(torch.nn.functional, "linear", torch.nn.functional.linear)  # zero.Init puts its own there
    # A fifth of ZeRO-3's function calls in a step open and close ranges for NVIDIA's profilers. DeepSpeed itself
    # disables them for compiled modules. Remove this line to see them in a profile.
    _replace(nvtx, "enable_nvtx", False)
    if device == "cpu":
        set_accelerator(CPU_Accelerator())
        # Declare no op compatible, so that none is compiled: shared-memory inference alone would take half a minute.
        _replace(deepspeed.ops, "__compatible_ops__", defaultdict(bool))
        # DeepSpeed asks oneDNN, which supports float16 only on CPUs with AVX512-FP16 or AMX. torch's own kernels, which
        # then run instead, support it on any CPU (docs/findings/deepspeed-cpu-fp16.md).
        _replace(get_accelerator(), "is_fp16_supported", lambda: True)
        _replace(torch.Tensor, "norm", _norm)
    else:
        # For ops that are compiled at first use: DeepSpeed's builder cannot parse "9.0a" here (DeepSpeed#8619).
        name, capability = "TORCH_CUDA_ARCH_LIST", torch.cuda.get_device_capability(device)
        known = os.environ.get(name)
        _undo.callback(os.environ.pop, name) if known is None else _undo.callback(os.environ.update, {name: known})
        os.environ[name] = "{}.{}".format(*capability)
        # DeepSpeed needs GPU numbers, but ranks have UUIDs (docs/findings/deepspeed-visible-uuids.md).
        _replace(get_accelerator(), "available_memory", lambda index=None: torch.cuda.mem_get_info(index)[0])
    accelerator = get_accelerator()
    assert accelerator.device_name() == torch.device(device).type
    # ZeRO-0 reduces gradients of the listed dtypes only, and float64 is not among them.
    dtypes = [*accelerator.supported_dtypes(), torch.float64]
    _replace(accelerator, "supported_dtypes", lambda: dtypes)
    deepspeed.init_distributed(dist_backend=dist.get_backend())


_NORM = torch.Tensor.norm


def _norm(tensor: torch.Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Replaces torch's method, by which DeepSpeed clips: on a CPU it is inaccurate for large tensors.

    See docs/findings/torch-norm-on-cpus.md.
    """
    if p not in ("fro", 2) or not (dim is dtype is None) or not tensor.is_floating_point() or tensor.requires_grad:
        return _NORM(tensor, p, dim, keepdim, dtype)
    return sums_of_squares([tensor])[0].sqrt().to(tensor.dtype)


def _replace(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute until the last context leaves; then restores its old value, or removes it if it had none."""
    if name in vars(owner):
        _undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        _undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def _forget_groups() -> None:
    """Drops DeepSpeed's references to process groups, which the suite destroys, and resets its tensor-parallel mode."""
    groups._release_process_group_references()
    layer._all_to_all_groups.clear()  # groups of Ulysses; a referenced group keeps its sockets and threads
    set_autotp_mode(training=False)


def forget_model(model: torch.nn.Module) -> None:
    """Drops DeepSpeed's references to a model that ZeRO-3 has partitioned. Its engine must be destroyed before."""
    own = set(model.modules())  # also its layers: recomputation stops inside their forward passes
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module not in own]
    # The cache of a decorated method keeps all engines and modules alive from their second forward pass on. Engines
    # that are still in use fill it again.
    decorated: Any = vars(PartitionedParameterCoordinator)["_PartitionedParameterCoordinator__params_to_release"]
    inspect.getclosurevars(decorated).nonlocals["func"].cache_clear()


@contextlib.contextmanager
def any_dtype() -> Iterator[None]:
    """Lets ZeRO-3 partition parameters of any dtype.

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
    """Lets AutoTP descend into peft's layers.

    AutoTP treats a module with a two-dimensional ``weight`` as a linear layer. A layer of peft has a property of this
    name, so AutoTP would replace it by its own linear layer, without the adapter
    (docs/findings/deepspeed-autotp-adapters.md).
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
    """Keeps engines from broadcasting all parameters of the first rank; all ranks have the same ones already.

    The broadcast would write to the parameters, and thus allocate their memory beside the buffers that they are copied
    to.
    """
    original = deepspeed.DeepSpeedEngine._broadcast_model
    deepspeed.DeepSpeedEngine._broadcast_model = lambda engine: None
    try:
        yield
    finally:
        deepspeed.DeepSpeedEngine._broadcast_model = original


ROWS = 1  # rows of a rank's part of a micro-batch, in which documents are concatenated


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Holds the shape of an exchange: numbers of query and of key-value heads, and the size of a head."""

    query: int
    key_value: int
    size: int


# Shape and mpu of the exchange. A process has at most one, because transformers has one attention function for NAME.
_exchanging: tuple[Heads, Any] | None = None


def exchange_heads(model: transformers.PreTrainedModel, *, size: int, tp: int, group: dist.ProcessGroup) -> Any:
    """Wraps the attention of ``model`` in the exchange; returns the ``mpu`` for ``deepspeed.initialize``.

    With tensor parallelism the result is None, because AutoTP takes the place of the mpu; ZeRO then treats the Ulysses
    ranks as data ranks. Models with the same heads share the exchange until the last context leaves the process. Raises
    UsageError for a model with other heads.
    """
    global _exchanging
    config = model.config.get_text_config()
    if getattr(config, "num_key_value_heads", None) is None:  # DeepSpeed reads it, but some models do not group heads
        config.num_key_value_heads = config.num_attention_heads
    heads = Heads(
        query=config.num_attention_heads,
        key_value=config.num_key_value_heads,
        size=getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
    )
    if _exchanging is None:
        layers = config.num_hidden_layers
        if tp == 1:
            _exchanging = heads, _around_model(model, size)
        else:
            _around_shards(heads, layers=layers, tp=tp, group=group)
            _exchanging = heads, None
        global_state.when_left(_withdraw)
    known, mpu = _exchanging
    if heads != known:
        raise UsageError(
            f"Ulysses supports one shape of attention heads in a process: {known} is in use, but this model has "
            f"{heads}; use models with the same heads, or context parallelism (sp2) instead of ulysses2"
        )
    return mpu


def _around_model(model: transformers.PreTrainedModel, size: int) -> Any:
    return UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation=NAME, sequence_parallel_size=size, micro_batch_size=ROWS
    )


def _around_shards(heads: Heads, *, layers: int, tp: int, group: dist.ProcessGroup) -> None:
    """Sets up the exchange for the heads that AutoTP leaves to a rank."""
    ALL_ATTENTION_FUNCTIONS[NAME] = UlyssesSPAttentionHF(
        attn=ALL_ATTENTION_FUNCTIONS[NAME],
        batch_size=ROWS,
        attn_head_count=heads.query // tp,
        attn_head_size=heads.size,
        kv_head_count=heads.key_value // tp,
        num_hidden_layers=layers,
        process_group=group,
        seq_length_is_variable=True,
    )


def _withdraw() -> None:
    """Removes the exchange, which restores transformers' attention function for NAME."""
    global _exchanging
    _exchanging = None
    del ALL_ATTENTION_FUNCTIONS[NAME]
