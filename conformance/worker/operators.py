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
from torch._ops import HigherOrderOperator

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
_BLOCK = 128  # numbers of a block that TransformerEngine gives a scale
_PART = 256  # rows and columns of a product in float8 that are multiplied again
SCALE_ERROR = 2.0**-20  # scales, their inverses and magnitudes are float32 numbers
AMAXES_KEPT = 512
_FORMATS = {"forward": torch.float8_e4m3fn, "backward": torch.float8_e5m2}  # of delayed scaling
_OVERWRITE = ("zero_", "fill_")  # operators that read none of their tensor's numbers, as where gradients are cleared
_INDUCTOR = str(Path(torch.__file__).parent / "_inductor")


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """What is known of an operator before it is called. A step calls thousands, so it is looked up once for each.

    kind: of the collective that it issues; None for other operators. is_counted: it is none of torch's collectives.
    is_reading: it reads its tensors' numbers.
    """

    func: Any  # keeps the object, and so its id, which OPERATORS is indexed by
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
    scale_a, scale_b = (scale if scale.numel() == 1 else scale[:_PART, :_PART] for scale in scales)
    wide_a, wide_b = a[:_PART].double() * scale_a, b[:, :_PART].double() * scale_b
    return _distance(wide_a, wide_b, args[4] if len(args) > 4 else None, result)


def _distance(a: Tensor, b: Tensor, bias: Tensor | None, result: Tensor) -> float:
    """Returns how far the first rows and columns of a product are from a (M, K) times b (K, N) plus bias (N)."""
    added = torch.zeros_like(b[0]) if bias is None else bias[:_PART].double()
    distance = (result[:_PART, :_PART].double() - a @ b - added).abs()
    magnitudes = a.abs() @ b.abs() + added.abs()
    error = float((distance / magnitudes.clamp(min=torch.finfo(torch.float64).tiny)).max())
    return math.inf if math.isnan(error) else error


def te_product_error(a: Any, flipped: bool, b: Any, b_flipped: bool, bias: Tensor | None, result: Tensor) -> float:
    """Returns how far TransformerEngine's product of operands in float8 is from that of its operands.

    A matrix in float8 is multiplied along its rows, so that another copy, the transposed one, is multiplied along its
    columns. ``flipped``: the first operand is multiplied along its rows, and ``b_flipped``: the second along its
    columns.
    """
    result = result.reshape(-1, result.shape[-1])
    if not result.numel():
        return 0.0
    return _distance(_te_rows(b, columns=b_flipped), _te_rows(a, columns=not flipped).T, bias, result)


def _te_copy(x: Any, *, columns: bool) -> tuple[Tensor, Tensor]:
    """Returns what TransformerEngine multiplies along the rows of a matrix, or along its columns as rows, in float8;
    and its scale, or those of its blocks, as rows."""
    has_blocks = not hasattr(x, "_scale_inv")
    data = x._columnwise_data if has_blocks and columns else x._rowwise_data if has_blocks else x._data
    if columns and not has_blocks:  # a tensor with one scale may have either copy
        data = x._transpose if x._transpose is not None else data.reshape(-1, data.shape[-1]).T
    dtype = torch.float8_e5m2 if "E5M2" in str(x._fp8_dtype) else torch.float8_e4m3fn
    rows: Tensor = data.reshape(len(data), -1) if columns else data.reshape(-1, data.shape[-1])
    if not has_blocks:
        return rows.view(dtype), x._scale_inv
    scales = x._columnwise_scale_inv if columns else x._rowwise_scale_inv
    # Scales of blocks of rows are stored as columns; both are filled up to multiples of 4.
    kept = scales[:, : -(-rows.shape[1] // _BLOCK)] if x._is_2D_scaled else scales[:, : len(rows)].T
    return rows.view(dtype), kept


def _te_rows(x: Any, *, columns: bool) -> Tensor:
    """Returns the first rows of what TransformerEngine multiplies, or the first columns as rows, in float64."""
    data, scale = _te_copy(x, columns=columns)
    rows = data[:_PART].double()
    if not hasattr(x, "_scale_inv"):
        of_rows = scale.repeat_interleave(_BLOCK, 0) if x._is_2D_scaled else scale
        scale = of_rows[: len(rows)].repeat_interleave(_BLOCK, 1)[:, : rows.shape[1]]
    return rows * scale


def te_cast(x: Any, *, columns: bool) -> tuple[str, str, bool | None, bool]:
    """Returns how TransformerEngine has cast an operand: the format, what has a scale of its own (tensor, rows of
    blocks or squares), whether all scales are powers of two (None for zeros, whose scale is 1), and whether each scale
    is that of these numbers: their largest is the end of the format, or of a block at least half of it."""
    data, scale = _te_copy(x, columns=columns)
    end = torch.finfo(data.dtype).max
    is_zero = not data.view(torch.uint8).bitwise_and(127).any()
    powers = None if is_zero else bool((torch.frexp(scale).mantissa == 0.5).all())
    name = dtype_name(data.dtype).removeprefix("float8_")
    if hasattr(x, "_scale_inv"):
        largest = float(data.float().abs().max())
        return name, "tensor", powers, largest in (0.0, end)
    numbers = data[:_PART].float().abs()
    blocks = _padded(numbers, 1).unflatten(1, (-1, _BLOCK)).amax(-1)
    if x._is_2D_scaled:
        blocks = _padded(blocks, 0).unflatten(0, (-1, _BLOCK)).amax(1)
    return name, "squares" if x._is_2D_scaled else "rows", powers, bool(((blocks == 0) | (blocks >= end / 2)).all())


def te_largest(x: Any, *, part: int = 0, parts: int = 1) -> Tensor:
    """Returns the largest magnitude () in float8, unscaled, of an operand that TransformerEngine multiplies along rows,
    or of one of ``parts`` equal parts of its rows."""
    return _te_copy(x, columns=False)[0].tensor_split(parts)[part].float().abs().double().amax()


def _padded(x: Tensor, dim: int) -> Tensor:
    rest = -x.shape[dim] % _BLOCK
    return torch.nn.functional.pad(x, (0, rest) if dim == 1 else (0, 0, 0, rest))


def te_numbers(x: Any, *, columns: bool) -> bytes:
    """Returns the first numbers of what TransformerEngine multiplies, as they lie in the matrix, of either copy."""
    data, _ = _te_copy(x, columns=columns)
    numbers = data.view(torch.uint8)
    return (numbers.T if columns else numbers)[:_PART, :_PART].contiguous().cpu().numpy().tobytes()


class DelayedScales:
    """Watches the scales and histories of TransformerEngine's delayed scaling in one step.

    ``manager``: its FP8GlobalStateManager, which holds them in ``quantization_state`` from release 2.15 on: for each
    direction ("forward", "backward") and layer a history (micro-batches, operands), whose first row the casts of this
    rank fill, and the operands' scales. An update reduces this row over ranks, and keeps it as the last one. An operand
    whose magnitude is 0 on all ranks, as that of a weight which is not cast again, keeps history and scale.

    ratios: the least and the largest scale after an update, in parts of the one that follows from the history, infinite
    if the history has lost a magnitude, also that of a cast since the last update.
    amaxes: the largest magnitude on this rank, and that of all ranks, of the first operands that an update scales.
    updates: by direction, the largest number of updates that moved the history of one operand.
    began: by direction, what ``state`` returned before the first update.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._before: dict[str, list[Tensor]] = {"forward": [], "backward": []}  # scales before each update
        self._noted: dict[str, Tensor] = {}  # magnitudes since the last update, as of the latest cast
        self._moved: dict[str, Tensor] = {}  # updates of each operand's history
        self.ratios: list[float] = []
        self.amaxes: list[tuple[float, float]] = []
        self.began: dict[str, list[list[float]]] = {}

    @property
    def updates(self) -> dict[str, int]:
        return {direction: int(moved.max()) for direction, moved in self._moved.items()}

    def state(self, direction: str) -> list[list[float]]:
        """Returns the scale of each operand, and its history without the micro-batch that has not ended."""
        histories, scales = self._now(direction)
        return torch.cat([scales[None], histories[1:]]).T.tolist()

    @property
    def is_used(self) -> bool:
        return bool(self._buffers.global_scale_buffer)

    @property
    def _buffers(self) -> Any:
        return getattr(self._manager, "quantization_state", self._manager)

    def _now(self, direction: str) -> tuple[Tensor, Tensor]:
        """Returns histories and scales of all layers, of as many micro-batches (L, N) and (N)."""
        keys = [key for key in self._buffers.global_scale_buffer if key.startswith(direction)]
        histories = [one for key in keys for one in self._buffers.global_amax_history_buffer[key]]
        scales = [one for key in keys for one in self._buffers.global_scale_buffer[key]]
        return torch.cat(histories, 1).double(), torch.cat(scales).double()

    def gave(self, inverse: Tensor, direction: str, *, largest: Tensor | None, again: bool = False) -> bool:
        """Tells whether 1 / ``inverse`` is the scale of some operand now, whose history holds the magnitude of a cast.

        ``largest``: the largest magnitude in float8 of what this rank has cast of an operand now, where larger ones
        become the end of the format; None of one that was cast earlier in this step, whose scale may be an earlier one.
        ``again``: it was cast again, to recompute a layer, with the history and the scale of the forward pass, which
        are replaced by those of now when the layer has ended.
        """
        histories, scales = self._now(direction)
        if largest is None:
            scales = torch.cat([scales, *self._before[direction]])
            return bool(((inverse.double() * scales - 1).abs() < SCALE_ERROR).any())
        if not again:
            self._noted[direction] = histories[0]
        format = _FORMATS[direction]
        least, most = (
            (histories[0] * scales * (1 + error)).clamp(max=torch.finfo(format).max).float().to(format).double()
            for error in (-SCALE_ERROR, SCALE_ERROR)
        )
        is_noted = (least <= largest) & (largest <= most)
        return bool((is_noted & ((inverse.double() * scales - 1).abs() < SCALE_ERROR)).any())

    def begin_update(self, direction: str) -> None:
        self._history, scales = self._now(direction)
        known = self.began.setdefault(direction, [])
        if len(known) < len(scales):  # the operands of another chunk of the model come later
            known += self.state(direction)[len(known) :]
        self._before[direction].append(scales)
        noted = self._noted.pop(direction, scales[:0]).sort(descending=True).values
        now = self._history[0].sort(descending=True).values  # magnitudes grow, and other layers' are added
        self._is_lost = (now[: len(noted)] < noted[: len(now)]).any()

    def end_update(self, direction: str) -> None:
        history, scales = self._history, self._before[direction][-1]
        after, new = self._now(direction)
        is_left = (history[0] == 0) & (after == history).all(0)
        of_ranks = torch.where(is_left, 0, after[-1])
        largest = torch.cat([history[1:], of_ranks[None]]).amax(0)
        end = torch.finfo(_FORMATS[direction]).max
        moved = self._moved.get(direction, torch.zeros(0, dtype=torch.int))
        self._moved[direction] = torch.nn.functional.pad(moved, (0, len(is_left) - len(moved))) + ~is_left.cpu()
        ratios = new / torch.where(is_left, scales, end / largest)
        is_kept = is_left | (after[1:-1] == history[2:]).all(0)
        ratios = torch.where(is_kept & ~self._is_lost, ratios, torch.inf)
        self.ratios = [min([*self.ratios[:1], float(ratios.min())]), max([*self.ratios[1:], float(ratios.max())])]
        pairs = zip(history[0].tolist(), of_ranks.tolist(), strict=True)
        self.amaxes += [*pairs][: AMAXES_KEPT - len(self.amaxes)]


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
