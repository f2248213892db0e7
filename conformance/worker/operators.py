"""Tells what an operator of torch does: which collective it issues, whether it multiplies, looks up or draws.

A step calls thousands of operators, so each is described once (``operator_of``).
"""

import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload

from conformance.numerics.float64_tier import may_be_lifted

# The kind of a collective by the prefix of the operator's name, for torch.distributed and its functional variants.
COLLECTIVE_KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "send": "send",
}
_STEMS = sorted(COLLECTIVE_KINDS, key=len, reverse=True)
_WHOLE = [stem for stem in _STEMS if stem not in ("broadcast", "reduce", "send")]  # in the name of a library's operator
COLLECTIVE_SPACES = ("c10d", "_c10d_functional")  # namespaces of torch's operators
LINEAR = ("mm", "addmm", "linear", "_scaled_mm")  # the last one in float8
_PRODUCTS = (*LINEAR, "bmm", "baddbmm")
_LOOKUPS = ("embedding", "index")  # operators by which libraries look up the rows of an embedding
_READ_WEIGHTS = ("mm", "addmm", "mul", "add")  # beside norms: operators that read a whole matrix or vector of a model
PART = 256  # rows and columns of a product in float8 that are multiplied again
_OVERWRITE = ("zero_", "fill_")  # operators that read none of their tensor's numbers, as where gradients are cleared
_INDUCTOR = str(Path(torch.__file__).parent / "_inductor")


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """What is known of an operator before it is called. A step calls thousands, so it is looked up once for each.

    kind: of the collective that it issues; None for other operators. is_counted: it is none of torch's collectives.
    is_reading: it reads its tensors' numbers.
    """

    func: Any  # keeps the object, and so its id, which OPERATORS is indexed by
    call: Any  # the same without torch's function in Python around it
    name: str
    kind: str | None
    is_counted: bool
    draws: bool
    may_be_lifted: bool
    is_product: bool
    is_reading: bool
    multiplies_factors: bool
    looks_up: bool
    reads_weights: bool


OPERATORS: dict[int, Operator] = {}


def operator_of(func: Any) -> Operator:
    """Describes an operator. A higher-order one, which calls another, has no name."""
    space, name, draws = "", "", False
    if not isinstance(func, HigherOrderOperator):
        space, _, name = func._schema.name.partition("::")
        draws = torch.Tag.nondeterministic_seeded in func.tags
    found = OPERATORS[id(func)] = Operator(
        func=func,
        call=func._op if type(func) is OpOverload else func,
        name=name,
        kind=_kind_of(space, name.strip("_")),
        is_counted=space not in COLLECTIVE_SPACES,
        draws=draws,
        may_be_lifted=may_be_lifted(func),
        is_product=name in _PRODUCTS,
        is_reading=name not in _OVERWRITE,
        multiplies_factors=name.rstrip("_") == "mul",
        looks_up=name in _LOOKUPS,
        reads_weights=name in _READ_WEIGHTS or "_norm" in name,
    )
    return found


def _kind_of(space: str, name: str) -> str | None:
    """Returns the kind of collective that an operator issues; None for other operators. A library's own operator hides
    the collective inside of it, and is recognised by its name."""
    if space in COLLECTIVE_SPACES:
        return next((COLLECTIVE_KINDS[stem] for stem in _STEMS if name.startswith(stem)), None)
    return None if space in ("aten", "prims") else next((COLLECTIVE_KINDS[s] for s in _WHOLE if s in name), None)


@dataclass(frozen=True)
class Collective:
    """A collective of at least two ranks. elements: of its input or output on this rank, whichever is larger. shape: of
    the smallest tensor of both."""

    kind: str
    ranks: tuple[int, ...]
    dtype: torch.dtype
    elements: int
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.ranks)


def collective_of(func: Any, args: tuple[Any, ...]) -> Collective | None:
    """Returns the collective that an operator with these arguments issues; None for other operators."""
    kind, tensor = (OPERATORS.get(id(func)) or operator_of(func)).kind, next(tensors_in(args), None)
    if kind is None or tensor is None or len(ranks := _group_ranks(args)) < 2:
        return None
    elements = max(sum(t.numel() for t in tensors_in([value])) for value in args)
    smallest = min(tensors_in(args), key=Tensor.numel)
    return Collective(kind, ranks, tensor.dtype, elements, tuple(smallest.shape))


def product_error(args: tuple[Any, ...], result: Tensor) -> float:
    """Returns how far a scaled product is from that of its operands (M, K) and (K, N), of which a part is multiplied;
    infinity if it is not known, as of NaN and scales of blocks.

    args: both operands, both scales, which are single numbers, or (M, 1) and (1, N), and maybe a bias (N).
    """
    a, b, *scales = args[:4]
    if not result.numel():
        return 0.0
    by_row = (len(a), 1), (1, b.shape[1])
    if any(scale.numel() != 1 and scale.shape != known for scale, known in zip(scales, by_row, strict=True)):
        return math.inf
    scale_a, scale_b = (scale if scale.numel() == 1 else scale[:PART, :PART] for scale in scales)
    wide_a, wide_b = a[:PART].double() * scale_a, b[:, :PART].double() * scale_b
    return product_distance(wide_a, wide_b, args[4] if len(args) > 4 else None, result)


def product_distance(a: Tensor, b: Tensor, bias: Tensor | None, result: Tensor) -> float:
    """Returns how far the first rows and columns of a product are from a (M, K) times b (K, N) plus bias (N)."""
    added = torch.zeros_like(b[0]) if bias is None else bias[:PART].double()
    distance = (result[:PART, :PART].double() - a @ b - added).abs()
    magnitudes = a.abs() @ b.abs() + added.abs()
    error = float((distance / magnitudes.clamp(min=torch.finfo(torch.float64).tiny)).max())
    return math.inf if math.isnan(error) else error


def sums_of_tensor(tensor: Tensor) -> tuple[tuple[int, int], Tensor]:
    """Returns dimensions and elements of a tensor, and its sum and norm (2)."""
    wide = tensor.detach().double()
    return (tensor.ndim, tensor.numel()), torch.stack([wide.sum(), wide.norm()])


def in_compiled_code() -> bool:
    """Whether code of torch's inductor is running. Its matrix products write into preallocated tensors, and a library's
    may as well; so the frames are inspected for such products only."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_INDUCTOR):
        frame = frame.f_back
    return frame is not None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensors_in(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def _group_ranks(args: tuple[Any, ...]) -> tuple[int, ...]:
    for value in args:
        group = value
        with contextlib.suppress(Exception):
            if isinstance(value, torch._C.ScriptObject):
                group = dist.ProcessGroup.unbox(value)
            elif isinstance(value, str):
                group = dist.distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]
            if isinstance(group, dist.ProcessGroup):
                return tuple(dist.get_process_group_ranks(group))
    return ()
