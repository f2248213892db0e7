"""Lets frameworks that were written for GPUs import, set up and train on a machine without one.

They name the device ``cuda`` in a hundred places, ask it for memory statistics, streams and random states, and import
CUDA-only packages. Inside ``on_cpu`` these requests mean the CPU, and no computed number changes.
"""

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

_CPU = torch.device("cpu")


@contextlib.contextmanager
def on_cpu(*, stand_ins: Sequence[str] = ()) -> Iterator[None]:
    """Makes the CPU answer for ``cuda``; enter it around imports of a framework, and from ``setup`` to ``teardown``.

    stand_ins: packages that the framework imports and does not need here. They and ``flash_attn``, if they are not
    installed, are importable inside; their names raise an error when they are called. flash_attn's padding works.

    Where CUDA is available only the absent packages are replaced. May be nested; everything is restored on exit.
    """
    on_cpu = contextlib.nullcontext() if torch.cuda.is_available() else cuda_is_cpu()
    with on_cpu, _stand_ins(("flash_attn", *stand_ins)):
        yield


@contextlib.contextmanager
def float64_for(owner: Any, name: str) -> Iterator[None]:
    """Lets a framework's own dtypes follow the exact tier: float64 where ``owner.name`` gives float32.

    owner.name: a table of dtypes by name, or a function or static method that returns a dtype. Enter it in ``setup``,
    on CPUs and GPUs. Does nothing unless the default dtype is float64. Everything is restored on exit.
    """
    if torch.get_default_dtype() != torch.float64:
        yield
        return

    def widened(dtype: Any) -> Any:
        return torch.float64 if dtype == torch.float32 else dtype

    given = getattr(owner, name)
    if isinstance(given, Mapping):  # the table itself changes, because modules import it by its name
        before = dict(given)
        given.update({key: widened(dtype) for key, dtype in before.items()})  # type: ignore[attr-defined]
        try:
            yield
        finally:
            given.update(before)  # type: ignore[attr-defined]
        return

    @functools.wraps(given)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return widened(given(*args, **kwargs))

    with replaced(owner, {name: staticmethod(answer) if isinstance(owner, type) else answer}):
        yield


@contextlib.contextmanager
def replaced(owner: Any, replacements: Mapping[str, Any]) -> Iterator[None]:
    """Replaces attributes of ``owner``, and restores them on exit."""
    before = {name: vars(owner)[name] for name in replacements}
    for name, value in replacements.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


# --- devices in arguments ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cuda_is_cpu() -> Iterator[None]:
    """Lets torch.cuda answer for the CPU, and replaces ``cuda`` in arguments of this thread's torch functions.

    Also where CUDA is available. May be nested; everything is restored on exit.
    """
    mode = _Placing()
    _push_mode(mode)
    try:
        with contextlib.ExitStack() as stack:
            for owner, replacements in _REPLACEMENTS:
                stack.enter_context(replaced(owner, replacements))
            yield
    finally:  # a mode that was entered later may still be active, as where a rank fails
        above: list[TorchFunctionMode] = []
        while (top := _pop_mode()) is not mode:
            above.append(top)
        for one in reversed(above):
            _push_mode(one)


_STAYING = frozenset((torch.Tensor.cuda, torch.Tensor.pin_memory))
_MOVING = frozenset((torch.Tensor.to, torch._C._nn._parse_to))


class _Placing(TorchFunctionMode):
    """Replaces devices in the arguments of torch functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _STAYING:
            return args[0]
        if func in _MOVING:
            args = tuple(_CPU if _is_cuda(arg) else arg for arg in args)
        if not kwargs:  # as for each read of an attribute
            return func(*args)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    """Tells whether an argument means a GPU; torch takes a number for the GPU of this index."""
    if isinstance(device, str | torch.device):
        return str(device).startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _of_cpu(initialize: Callable[..., None]) -> Callable[..., None]:
    """Wraps a constructor whose first parameter is ``device_type``."""

    @functools.wraps(initialize)
    def initialize_on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        initialize(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    return initialize_on_cpu


# --- torch.cuda -------------------------------------------------------------------------------------------------------


class _Done:
    """Replaces torch.cuda.Stream and Event by no-ops, because CPU operations are synchronous."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def nothing(self, *_: Any, **__: Any) -> None:
        pass

    wait_stream = wait_event = wait = record = synchronize = nothing

    def record_event(self, *_: Any) -> "_Done":
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def set_cpu_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


_PROPERTIES = SimpleNamespace(
    name="cpu", total_memory=2**34, major=8, minor=0, multi_processor_count=1, gcnArchName="cpu"
)
_RNG_STATES = {
    "get_rng_state": _rng_state,
    "set_rng_state": set_cpu_rng_state,
    "get_rng_state_all": lambda: [_rng_state()],
    "set_rng_state_all": lambda states: set_cpu_rng_state(states[0]),
    "manual_seed": torch.default_generator.manual_seed,
    "manual_seed_all": torch.default_generator.manual_seed,
}
_NOTHING = ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats")
_MEMORY = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_REPLACEMENTS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (
        torch.cuda,
        {
            # Each name has an object of its own, because torch.compile knows the names of torch.cuda by their objects.
            **{name: _answer(None) for name in _NOTHING},
            **{name: _answer(0) for name in _MEMORY},
            **_RNG_STATES,
            "is_initialized": _answer(True),
            "current_device": _answer(0),
            "device_count": _answer(1),
            "mem_get_info": _answer((2**34, 2**34)),
            "memory_stats": lambda *_: {},
            "get_device_name": _answer("cpu"),
            "get_device_properties": _answer(_PROPERTIES),
            "get_device_capability": _answer((8, 0)),
            "current_stream": lambda *_: _Done(),
            "default_stream": lambda *_: _Done(),
            "stream": lambda _: contextlib.nullcontext(),
            "Stream": _Done,
            "Event": type("Event", (_Done,), {}),
            "is_current_stream_capturing": _answer(False),
        },
    ),
    # As builds of torch for CPUs answer. From 2.13 on, steps of optimizers ask the accelerator for its stream.
    (torch.accelerator, {"current_accelerator": _answer(None)}),
    (torch.cuda.random, _RNG_STATES),
    (torch.cuda.nvtx, {"range_push": _answer(None), "range_pop": _answer(None)}),
    (DeviceMesh, {"__init__": _of_cpu(DeviceMesh.__init__)}),
    (torch.autocast, {"__init__": _of_cpu(torch.autocast.__init__)}),
)


# --- packages that are not installed ----------------------------------------------------------------------------------


def index_first_axis(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns the rows of ``tensor`` that ``indices`` names, as flash_attn.bert_padding."""
    return tensor[indices]


def unpad_input(
    tensor: torch.Tensor, mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Lays the tokens of padded rows end to end, as flash_attn.bert_padding.

    tensor: (rows, length, ...). mask: (rows, length), 1 for tokens; unused_mask: 1 for tokens that are laid out and not
    attended to. Returns the tokens, their indices in the flattened rows, where rows begin (rows + 1,), the longest
    length, and the lengths that are attended to.
    """
    laid = mask if unused_mask is None else mask + unused_mask
    lengths = laid.sum(-1, dtype=torch.int32)
    indices = laid.flatten().nonzero().flatten()
    starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return tensor.flatten(0, 1)[indices], indices, starts, int(lengths.max()), mask.sum(-1, dtype=torch.int32)


def pad_input(tensor: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Reverses ``unpad_input``; padding is 0."""
    flat = tensor.new_zeros(batch * seqlen, *tensor.shape[1:]).index_copy(0, indices, tensor)
    padded: torch.Tensor = flat.unflatten(0, (batch, seqlen))
    return padded


def rearrange(*args: Any, **kwargs: Any) -> Any:
    """Calls einops.rearrange, which flash_attn.bert_padding hands on; frameworks that use it have einops."""
    function: Any = vars(import_module("einops"))["rearrange"]
    return function(*args, **kwargs)


_WORKING = {"flash_attn.bert_padding": (index_first_axis, unpad_input, pad_input, rearrange)}


class _Stood(type):
    """Makes classes whose attributes are such classes, too: annotations name ``package.module.Class``."""

    def __getattr__(cls, name: str) -> Any:
        return _stood(cls.__module__, f"{cls.__qualname__}.{name}")


def _stood(module: str, name: str) -> type:
    """Returns a class that stands in for ``name`` of an absent module, and cannot be made."""
    if name.rpartition(".")[2].startswith("__"):
        raise AttributeError(name)

    def raise_error(*_: Any, **__: Any) -> None:
        package = module.partition(".")[0]
        raise ImportError(
            f"{module}.{name} was called, and {package} is not installed: parity.on_cpu lets it be imported only; "
            f"choose a path of the framework without it"
        )

    return _Stood(name, (), {"__init__": raise_error, "__module__": module, "__qualname__": name})


class _StandIn(ModuleType):
    """A module whose every name is a class that cannot be made."""

    def __getattr__(self, name: str) -> Any:
        made = _stood(self.__name__, name)
        setattr(self, name, made)
        return made


class _StandInFinder(MetaPathFinder, Loader):
    """Finds the packages ``names`` and all their modules."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def has(self, module: str) -> bool:
        return module.partition(".")[0] in self.names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if self.has(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for function in _WORKING.get(module.__name__, ()):
            setattr(module, function.__name__, function)


@contextlib.contextmanager
def _stand_ins(names: Sequence[str]) -> Iterator[None]:
    """Lets absent packages be imported; ``importlib.util.find_spec`` still says that they are not installed."""
    find_spec = importlib.util.find_spec
    finder = _StandInFinder([name for name in names if sys.modules.get(name) is None and find_spec(name) is None])
    modules: Any = sys.modules
    hidden = [name for name in finder.names if name in modules]  # as None, with which an import fails
    for name in hidden:
        del modules[name]

    def found(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if finder.has(name) else find_spec(name, package)

    sys.meta_path.append(finder)
    try:
        with replaced(importlib.util, {"find_spec": found}):
            yield
    finally:
        sys.meta_path.remove(finder)
        for module in [module for module in modules if finder.has(module)]:
            del modules[module]
        modules.update(dict.fromkeys(hidden))
