"""Keeps float64 computations in float64 (the exact tier), and applies the settings of lower precisions.

No tolerance may hide a bug (docs/principles.md). But libraries compute parts of a model in float32: norms, rotary
tables, softmax, losses, gradient norms. For a float64 model these are *down*casts, which cause errors of 1e-6 in its
gradients.
``exact_tier()`` replaces a requested lower dtype by float64, and changes nothing else.

What is replaced, for arguments that are float64, integer or bool, and for factories without a tensor argument:

* below autograd (a TorchDispatchMode): any op that requests a lower dtype, above all ``aten._to_copy``, in which
  ``.float()``, ``.half()``, ``.to(...)``, ``.type(...)``, ``.type_as(...)`` and ``softmax(dtype=)`` all end;
* in Python (a TorchFunctionMode): ``dtype`` arguments of all torch functions, before numbers are rounded on their way
  in (``torch.tensor([...], dtype=)``, ``new_tensor``), and the casts ``.float()``, ``.half()`` and ``.bfloat16()``. All
  that torch.compile compiles is lifted here, because the other mode takes no part in it. torch leaves this mode before
  a backward pass and would not lift compiled code that the pass runs again (recomputation), so it is entered again;
* the old constructors (``torch.FloatTensor([...])``), replaced as attributes of torch;
* the default dtype is float64, so that factories without a dtype make float64.

What is not changed: integer and bool results; tensors that already are float32, bfloat16 or float16, such as weights
from a file, whose digits are lost already; reinterpreted memory (``view(dtype)``, ``frombuffer``, unpickling).

What is not detected: kernels that compute in lower precision inside; values that reach torch as float32 (numpy arrays,
``torch.asarray([...], dtype=)``); ``to(other)`` and ``type_as(other)`` in inference mode and in compiled code;
complex64; other Python threads (modes belong to a thread, and to the threads of its backward passes); code that sets
the default dtype itself; types imported by name beforehand (``from torch import FloatTensor``). LeakWatch shows most of
these, but not what compiled code does in one kernel.

On a GPU, a cell in the exact tier or in fp32 should give the same numbers twice (``settings_of``). So kernels are
deterministic where torch has deterministic ones (otherwise torch writes a warning to the rank's log), and TF32 is off,
because fp32 does not mean TF32. Half precision is judged as libraries run it, so no setting changes there. The record's
environment holds the settings that were in force.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

from conformance.spec.precision import PRECISIONS, PrecisionName

LOW = frozenset((torch.float32, torch.float16, torch.bfloat16))
_OLD_CONSTRUCTORS = ("FloatTensor", "HalfTensor", "BFloat16Tensor")
# These read memory as another dtype; they do not convert.
_REINTERPRET = frozenset((Tensor.view, torch.asarray, torch.ops.aten.view.dtype))
# Unpickling makes an empty tensor of the stored dtype and then attaches the stored bytes to it.
_EMPTY = {torch.empty: (0,), torch.ops.aten.empty.memory_format: [0]}
# DTensor computes shapes and dtypes with fake tensors, which therefore have to be treated like plain tensors.
PLAIN = frozenset((Tensor, torch.nn.Parameter, FakeTensor))
# Below autograd these are ``aten._to_copy`` like other casts; but torch.compile goes by what Python calls.
_CASTS = frozenset((Tensor.float, Tensor.half, Tensor.bfloat16))
_PASS_OVER = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)

# Their kernels for GPUs read the sixth argument, the counts of updates, as float32, whatever it is.
_FUSED = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name in ("_fused_adam_", "_fused_adamw_")
    for overload in ("default", "tensor_lr")
)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@contextmanager
def exact_tier() -> Iterator[None]:
    """Enters both modes and makes float64 the default dtype. Everything is restored on exit, also after an exception.

    Enter it around building the model and around every step, in the thread that runs them. The default dtype and the
    old constructors belong to the whole process, so no other thread may compute in a lower precision meanwhile. May be
    nested.
    """
    default, engine = torch.get_default_dtype(), torch.autograd._engine_run_backward
    old = [(module, name, getattr(module, name)) for module in (torch, torch.cuda) for name in _OLD_CONSTRUCTORS]
    torch.set_default_dtype(torch.float64)
    for module, name, _ in old:
        setattr(module, name, module.DoubleTensor)
    torch.autograd._engine_run_backward = _lifting_in_python(engine)
    try:
        with _LiftInPython(), _LiftBelowAutograd():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(default)
        torch.autograd._engine_run_backward = engine
        for module, name, constructor in old:
            setattr(module, name, constructor)


class _LiftInPython(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if not kwargs and len(args) == 1 and func not in _CASTS and isinstance(args[0], Tensor):
            return func(args[0])  # without further checks, as for each read of an attribute
        kwargs = kwargs or {}
        if func in _CASTS and args[0].dtype not in LOW:
            lifted = args[0].double(**kwargs)
            # To another dtype these two would have copied, so that the caller may write into the result.
            return lifted.clone() if lifted is args[0] and func is not Tensor.float else lifted
        args, kwargs = _lifted(func, args, kwargs) or (args, kwargs)
        return func(*args, **kwargs)


def _lifting_in_python(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    def lifting(*args: Any, **kwargs: Any) -> Any:
        with _LiftInPython():
            return run_backward(*args, **kwargs)

    return lifting


class EagerMode(TorchDispatchMode):
    """Base of dispatch modes that do not change what torch.compile compiles, and that are not compiled themselves.

    Code that is compiled outside of the mode is also compiled inside of it, so that a watched step runs the same code
    as any other step. In compiled code the mode gets the operators that inductor calls, such as matrix products. It
    does not get operators that inductor has fused into its own kernels. Higher-order operators, such as the one that
    makes compiled code draw the same random numbers again, go through ``__torch_dispatch__``; the operators that they
    call do not.

    ``__torch_dispatch__`` is never compiled. By default, torch wraps every call of a mode for this purpose. The
    wrapper costs as much time as the mode itself, and imports torch._dynamo, which takes a second. Here the code object
    is marked to be skipped instead, including everything that it calls.
    """

    supports_higher_order_operators = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]
        set_code_exec_strategy(cls.__torch_dispatch__.__code__, _PASS_OVER)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _LiftBelowAutograd(EagerMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        is_plain = not types or PLAIN.issuperset(types)
        lifted = (lifted_below if is_plain else _lifted)(func, args, kwargs)
        if lifted is None and not is_plain:
            # A tensor subclass such as DTensor goes first, so that the ops on its local tensors come here as well.
            return NotImplemented
        args, kwargs = lifted or (args, kwargs)
        with torch._C.DisableTorchFunction():  # in a backward pass _LiftInPython would be called again, by this call
            return func(*args, **kwargs)


class InPlaceOfLifting(EagerMode):
    """Base of modes that take the place of the exact tier's mode below autograd, and so have to use ``lifted_below``
    where ``lifts`` is true: two modes cost an operator twice as much as one."""

    lifts = False

    def __enter__(self) -> Self:
        self.lifts = isinstance(_get_current_dispatch_mode(), _LiftBelowAutograd)
        if self.lifts:
            self._replaced: TorchDispatchMode = _pop_mode()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if self.lifts:
            _push_mode(self._replaced)


def may_be_lifted(func: Any) -> bool:
    """Tells whether an operator may need ``lifted_below``: whether it takes a dtype."""
    if isinstance(func, HigherOrderOperator) or func in _FUSED:
        return True
    return any("ScalarType" in str(argument.real_type) for argument in func._schema.arguments)


def lifted_below(func: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Returns the arguments of an operator on plain tensors, below autograd, with lower dtypes replaced by float64;
    None if nothing changes."""
    if len(args) > 5 and func in _FUSED:
        counts = [count.to(torch.float32) for count in args[5]]
        return (*args[:5], counts, *args[6:]), kwargs
    return _lifted(func, args, kwargs)


def _lifted(func: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Returns the arguments with lower dtypes replaced by float64; None if nothing changes."""
    # Every op of a step calls this function, and nearly all return here: this is the main cost of the tier.
    # Not by arg.__class__, which torch 2.11 and 2.12 compile wrongly (docs/findings/compiled-class-of-constants.md).
    for arg in args:
        if isinstance(arg, torch.dtype) and arg in LOW:
            break
    else:
        if not kwargs or kwargs.get("dtype") not in LOW:
            return None
    if func in _REINTERPRET or (func in _EMPTY and args and args[0] == _EMPTY[func]):
        return None
    if any(isinstance(value, Tensor) and value.dtype in LOW for value in (*args, *kwargs.values())):
        return None
    lift = dict.fromkeys(LOW, torch.float64)
    new_args = tuple(lift.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
    return new_args, {k: lift.get(v, v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}


@dataclass(frozen=True)
class Leak:
    """Describes an op that returned a float32, bfloat16 or float16 tensor ``count`` times.

    ``where``: the innermost Python line outside torch, as ``file:line in function``. In a backward pass this is a line
    of a custom autograd function, or otherwise the call of ``backward()``.
    """

    op: str
    where: str
    count: int


class LeakWatch(InPlaceOfLifting):
    """Records the ops inside a ``with`` block that return a tensor of a lower precision; the exact tier expects none.

    May be entered inside or around ``exact_tier()``. It sees each op that reaches the kernels, also in backward passes;
    for DTensors, it sees the ops on their local tensors. Views and in-place ops count as well. ``leaks`` is in the
    order of first appearance, so a cause comes before its consequences.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts: dict[tuple[str, str], int] = {}

    @property
    def leaks(self) -> tuple[Leak, ...]:
        return tuple(Leak(op, where, count) for (op, where), count in self._counts.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if not PLAIN.issuperset(types):
            return NotImplemented
        with torch._C.DisableTorchFunction():  # as in _LiftBelowAutograd
            kwargs = kwargs or {}
            lifted = lifted_below(func, args, kwargs) if self.lifts else None
            args, kwargs = lifted or (args, kwargs)
            result = func(*args, **kwargs)
            self.see(func, result)
            return result

    def see(self, func: Any, result: Any) -> None:
        """Counts the result of an op if its dtype is low.

        Another mode that gets every op may call this method instead of entering the watch, because each mode costs an
        op as much as a small kernel.
        """
        if type(result) is Tensor and result.dtype not in LOW:
            return
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.dtype in LOW:
                key = (str(func), _caller())
                self._counts[key] = self._counts.get(key, 0) + 1


_NOT_THE_CALLER = (
    str(Path(torch.__file__).parent),
    __file__,
    str(Path(__file__).parents[1] / "worker" / "evidence.py"),
    str(Path(__file__).parents[1] / "backends" / "on_cpu.py"),
    "<",
)


def _caller() -> str:
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
        if frame.f_back is None:
            return "(no Python code: a thread of torch)"
        frame = frame.f_back
    file = frame.f_code.co_filename.rpartition("site-packages/")[2]
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # ranks begin with it (conformance.runtime.preload_server)


@contextmanager
def settings_of(precision: PrecisionName, device: str) -> Iterator[dict[str, str]]:
    """Applies the settings of the precision on a GPU and yields the settings in force. Restores them on exit."""
    before = _deterministic()
    utils: Any = torch.utils.deterministic
    fills = utils.fill_uninitialized_memory
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    if device != "cpu" and not PRECISIONS[precision].is_half:
        utils.fill_uninitialized_memory = False  # it costs time and repairs what reads too early
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield {
            "deterministic": "yes" if torch.are_deterministic_algorithms_enabled() else "no",
            "tf32": "yes" if torch.backends.cuda.matmul.allow_tf32 else "no",
            WORKSPACE: os.environ.get(WORKSPACE, ""),
        }
    finally:
        utils.fill_uninitialized_memory = fills
        if _deterministic() != before:  # the function imports torch._inductor, which takes seconds
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


def _deterministic() -> tuple[bool, bool]:
    """Returns whether torch uses deterministic kernels, and whether it only warns if a kernel has none."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
