"""Observes TransformerEngine in one training step: products, how operands are cast, scales and histories, and updates.

No dispatch mode sees the products of TransformerEngine, so the calls of its compiled functions are counted, in the
order in which its layers make them. What a layer has cast is judged by conformance.judge.work_evidence.
"""

import hashlib
import math
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.worker.operators import PART, Collective, dtype_name, product_distance, sums_of_tensor, tensors_in

HISTORIES = "transformer_engine.pytorch.fp8"  # the module of TransformerEngine's delayed scaling
TRANSFORMER_ENGINE = "transformer_engine_torch"  # the module of TransformerEngine's compiled functions
FUSED_ADAM = "transformer_engine.pytorch.optimizers.fused_adam"
_MASTERS = 4  # the list of masters, behind those of gradients, parameters and two moments, in an update of FusedAdam
_BIAS, _GRADIENT = 3, 7  # arguments of ``generic_gemm`` behind the operands: a bias, and whether it is its gradient
_LEAVE = ("autocast_exit", "fp8_autocast_exit")  # methods that end a forward pass, by release
_BLOCK = 128  # numbers of a block that has a scale
SCALE_ERROR = 2.0**-20  # scales, their inverses and magnitudes are float32 numbers
AMAXES_KEPT = 512
_FORMATS = {"forward": torch.float8_e4m3fn, "backward": torch.float8_e5m2}  # of delayed scaling


def float8_state() -> dict[str, list[list[float]]]:
    """Returns the scales and histories of TransformerEngine's delayed scaling by direction, see DelayedScales.state;
    empty if this process has none."""
    module = sys.modules.get(HISTORIES)
    if module is None or not (delayed := DelayedScales(module.FP8GlobalStateManager)).is_used:
        return {}
    return {direction: delayed.state(direction) for direction in ("forward", "backward")}


class Counts(Protocol):
    """Lists the part of conformance.worker.evidence.Watch that is needed here."""

    def library_product(self, dtype: torch.dtype, *, of_forward: bool, work: int) -> str:
        """Counts a product of this many multiplications, and returns its phase; empty while the suite reads."""
        ...

    def float8_product(self, error: float) -> None:
        """Counts a product of operands in float8, this far from that of its operands."""
        ...

    def reading(self) -> AbstractContextManager[None]: ...


class TransformerEngineWatch:
    """Counts inside ``patches`` what TransformerEngine multiplies and casts.

    te: number of products of linear layers in forward passes.
    casts: number of operands of products, by operand, what te_cast returns (with delayed scaling whether the scale is
        one that updates gave), and whether a forward product had the same numbers.
    delayed: see DelayedScales. parts: ranks that gather parts of the sequence after they have cast them. What such a
        rank has cast of an operand that it gathered as bytes is its part, and of all others the whole.
    gathered: for each group of ranks the scales of the operands that they have gathered, in order, and their number.
    left_out: dimensions, elements, sum and norm of each weight that is multiplied in the precision of the cell in a
        forward pass, if ``leaves_out``, as where layers are left out of float8.
    updated: number of elements that TransformerEngine's AdamW has updated, by the dtypes of parameters and of masters.
        Remainders, which complete parameters to masters, are int16.
    """

    def __init__(self, counts: Counts, *, parts: int = 1, leaves_out: bool = False) -> None:
        self._counts, self._parts, self._leaves_out = counts, parts, leaves_out
        self.te = 0
        self.delayed: DelayedScales | None = None
        self.updated: Counter[tuple[str, str]] = Counter()
        self.casts: Counter[tuple[str, str, str, bool | None, bool, bool]] = Counter()
        self.gathered: dict[tuple[int, ...], list[Any]] = {}  # by group: a digest and a number
        self._left_out: dict[int, tuple[tuple[int, int], Tensor]] = {}  # by address of the weight
        # Of storages of gathered bytes: the ranks that gathered them, and which part is this rank's.
        self._parts_of: dict[int, tuple[weakref.ref[torch.UntypedStorage], tuple[int, ...], int]] = {}
        self._forward_numbers: set[bytes] = set()  # digests of what was multiplied in forward passes
        self._scales = hashlib.sha256()

    def patches(self) -> Iterator[AbstractContextManager[Any]]:
        """Yields the patches of those parts of TransformerEngine that this process has imported."""
        if (library := sys.modules.get(TRANSFORMER_ENGINE)) is not None:
            yield mock.patch.object(library, "generic_gemm", partial(self._product, library.generic_gemm))
        if (histories := sys.modules.get(HISTORIES)) is not None:
            self.delayed = DelayedScales(manager := histories.FP8GlobalStateManager)
            noted = partial(self._scales_updated, manager.reduce_and_update_fp8_tensors)
            yield mock.patch.object(manager, "reduce_and_update_fp8_tensors", noted)
            for name in _LEAVE:
                if (leave := getattr(manager, name, None)) is not None:
                    yield mock.patch.object(manager, name, partial(self._pass_ends, leave))
        if (update := sys.modules.get(FUSED_ADAM)) is not None:
            noted = partial(self._fused_update, update.multi_tensor_applier)
            yield mock.patch.object(update, "multi_tensor_applier", noted)

    def _product(self, own: Any, a: Any, flipped: bool, b: Any, b_flipped: bool, *rest: Any, **more: Any) -> Any:
        """Wraps ``generic_gemm``, which runs in autograd functions and records no graph. Recomputed products are
        recognised by their operands: in forward passes the first matrix, the weight, is transposed and the second is
        not."""
        found = own(a, flipped, b, b_flipped, *rest, **more)
        of_forward = flipped and not b_flipped
        # The numbers of elements of three matrices, multiplied, are the square of the multiplications.
        work = math.isqrt(math.prod(a.size()) * math.prod(b.size()) * found[0].numel())
        if phase := self._counts.library_product(found[0].dtype, of_forward=of_forward, work=work):
            self.te += phase == "forward"
            with self._counts.reading():
                if hasattr(a, "_fp8_dtype") and hasattr(b, "_fp8_dtype"):
                    bias = None if rest[_GRADIENT] else rest[_BIAS]  # which is an output in a backward pass
                    self._counts.float8_product(te_product_error(a, flipped, b, b_flipped, bias, found[0]))
                    self._te_casts(a, flipped, b, b_flipped, again=phase == "recomputed")
                elif self._leaves_out and phase == "forward" and a.data_ptr() not in self._left_out:
                    self._left_out[a.data_ptr()] = sums_of_tensor(a)
        return found

    def _te_casts(self, a: Any, flipped: bool, b: Any, b_flipped: bool, *, again: bool) -> None:
        """Notes how operands are cast: a weight and an input, a weight and a gradient, or an input and a gradient.

        With one scale for a tensor, or for squares of it, the backward pass multiplies by a transposed copy of what the
        forward pass multiplied by.
        """
        first, second = ("input" if b_flipped else "weight"), ("input" if flipped else "gradient")
        for operand, x, columns in ((first, a, not flipped), (second, b, b_flipped)):
            format, kind, powers, own = te_cast(x, columns=columns)
            digest = hashlib.sha256(te_numbers(x, columns=columns)).digest()
            # A weight is cast once a step, and another operand for its first product, along its rows.
            is_new = digest not in self._forward_numbers if operand == "weight" and flipped else operand != "weight"
            if self.delayed is not None and self.delayed.is_used:
                direction = "backward" if operand == "gradient" else "forward"
                largest = self._largest(x, operand) if is_new and not columns else None
                own = self.delayed.gave(x._scale_inv, direction, largest=largest, again=again)
            if flipped:
                self._forward_numbers.add(digest)
            same = operand == "gradient" or kind == "rows" or digest in self._forward_numbers
            self.casts[operand, format, kind, powers, own, same] += 1
            if hasattr(x, "_scale_inv"):
                shown = repr(float(x._scale_inv)).encode()
                self._scales.update(shown)
                if operand != "weight" and (gathered := self._gathered_of(x)):
                    scales, count = self.gathered.get(gathered[0], (hashlib.sha256(), 0))
                    scales.update(shown)
                    self.gathered[gathered[0]] = [scales, count + 1]

    def _largest(self, x: Any, operand: str) -> Tensor:
        """Returns the largest magnitude in float8 of what this rank has cast of an operand."""
        gathered = self._gathered_of(x) if operand != "weight" else None
        return te_largest(x, part=gathered[1], parts=self._parts) if gathered else te_largest(x)

    def _gathered_of(self, x: Any) -> tuple[tuple[int, ...], int] | None:
        """Returns the ranks that have gathered an operand as bytes, and which part was this rank's; None if it is
        none."""
        if x._data is None:
            return None
        storage = x._data.untyped_storage()
        kept, ranks, part = self._parts_of.get(storage._cdata, (None, (), 0))
        return (ranks, part) if kept is not None and kept() is storage else None

    def _fused_update(self, own: Any, kernel: Any, flag: Any, lists: Any, *rest: Any) -> Any:
        """Wraps the call of a kernel of TransformerEngine's AdamW."""
        masters = lists[_MASTERS] if len(lists) > _MASTERS else lists[1]
        for parameter, master in zip(lists[1], masters, strict=True):
            self.updated[dtype_name(parameter.dtype), dtype_name(master.dtype)] += parameter.numel()
        return own(kernel, flag, lists, *rest)

    def _pass_ends(self, own: Any, *args: Any, **options: Any) -> None:
        """Wraps what TransformerEngine does behind a forward pass: with gradients, it updates histories."""
        own(*args, **options)
        if self.delayed is not None and self.delayed.is_used:
            with self._counts.reading():
                self.delayed.end_pass()

    def _scales_updated(self, own: Any, forward: bool = True) -> None:
        """Wraps TransformerEngine's update of histories and scales, which reduces magnitudes over ranks."""
        direction = "forward" if forward else "backward"
        if self.delayed is None or not self.delayed.is_used:
            own(forward)
            return
        with self._counts.reading():
            self.delayed.begin_update(direction)
        own(forward)
        with self._counts.reading():
            self.delayed.end_update(direction)

    def collective(self, found: Collective, values: Iterable[Any]) -> None:
        """Notes bytes that the ranks of a sequence have gathered, among the values of a collective."""
        if found.kind == "all_gather" and found.dtype.itemsize == 1 and len(found.ranks) == self._parts:
            whole = max(tensors_in(values), key=Tensor.numel)
            if whole.numel() == self._parts * math.prod(found.shape):
                storage = whole.untyped_storage()
                part = found.ranks.index(dist.get_rank())
                self._parts_of[storage._cdata] = weakref.ref(storage), found.ranks, part

    def to_json(self) -> dict[str, Any]:
        """Returns the part of Watch.to_json that is known here."""
        delayed = self.delayed
        left_out = [(*size, *sums.tolist()) for size, sums in self._left_out.values()]
        return {
            "te": self.te,
            "float8_casts": [[*cast, count] for cast, count in sorted(self.casts.items(), key=str)],
            "float8_scales": self._scales.hexdigest() if self.casts else "",
            **({"float8_scale_ratios": delayed.ratios} if delayed and delayed.ratios else {}),
            **({"float8_amaxes": delayed.amaxes} if delayed and delayed.amaxes else {}),
            **({"float8_updates": delayed.updates} if delayed and delayed.updates else {}),
            **({"float8_moved": delayed.moved} if delayed and delayed.moved else {}),
            **({"float8_gathered": self._gathered_json()} if self.gathered else {}),
            **({"float8_left_out": left_out} if left_out else {}),
            **({"updated": [[*key, count] for key, count in sorted(self.updated.items())]} if self.updated else {}),
        }

    def _gathered_json(self) -> list[tuple[list[int], str, int]]:
        return [([*ranks], digest.hexdigest(), count) for ranks, (digest, count) in sorted(self.gathered.items())]


def te_product_error(a: Any, flipped: bool, b: Any, b_flipped: bool, bias: Tensor | None, result: Tensor) -> float:
    """Returns how far TransformerEngine's product of operands in float8 is from that of its operands.

    A matrix in float8 is multiplied along its rows, so that another copy, the transposed one, is multiplied along its
    columns. ``flipped``: the first operand is multiplied along its rows, and ``b_flipped``: the second along its
    columns.
    """
    result = result.reshape(-1, result.shape[-1])
    if not result.numel():
        return 0.0
    return product_distance(_te_rows(b, columns=b_flipped), _te_rows(a, columns=not flipped).T, bias, result)


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
    rows = data[:PART].double()
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
    numbers = data[:PART].float().abs()
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
    return (numbers.T if columns else numbers)[:PART, :PART].contiguous().cpu().numpy().tobytes()


class DelayedScales:
    """Watches the scales and histories of TransformerEngine's delayed scaling in one step.

    ``manager``: its FP8GlobalStateManager, which holds them in ``quantization_state`` from release 2.15 on: for each
    direction ("forward", "backward") and layer a history (micro-batches, operands), whose first row the casts of this
    rank fill, and the operands' scales. An update reduces this row over ranks, and keeps it as the last one. An operand
    whose magnitude is 0 on all ranks, as that of a weight which is not cast again, keeps history and scale.

    ratios: the least and the largest scale after an update, in parts of the one that follows from the history, infinite
    if the history has lost a magnitude, also that of a cast since the last update.
    amaxes: the largest magnitude on this rank, and that of all ranks, of the first operands that an update scales.
    updates: by direction, the largest number of updates that moved the history of one operand. moved: the number of
        operands whose history they moved.
    began: by direction, what ``state`` returned before the first update.
    """

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._before: dict[str, list[Tensor]] = {"forward": [], "backward": []}  # scales before each update
        self._noted: dict[str, Tensor] = {}  # magnitudes since the last update, as of the latest cast
        self._kept: dict[str, Tensor] = {}  # magnitudes at the end of the pass before
        self._moved: dict[str, Tensor] = {}  # updates of each operand's history
        self.ratios: list[float] = []
        self.amaxes: list[tuple[float, float]] = []
        self.began: dict[str, list[list[float]]] = {}

    @property
    def updates(self) -> dict[str, int]:
        return {direction: int(moved.max()) for direction, moved in self._moved.items()}

    @property
    def moved(self) -> dict[str, int]:
        return {direction: int((moved > 0).sum()) for direction, moved in self._moved.items()}

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
        are replaced by those of now when the layer has ended. A history may hold the larger magnitude of a pass before
        that has ended without an update, as one over a rollout does.
        """
        histories, scales = self._now(direction)
        if largest is None:
            scales = torch.cat([scales, *self._before[direction]])
            return bool(((inverse.double() * scales - 1).abs() < SCALE_ERROR).any())
        kept = self._kept.get(direction, histories[0, :0])
        held = torch.nn.functional.pad(kept, (0, len(scales) - len(kept)))
        if not again:
            self._noted[direction] = histories[0]
        format = _FORMATS[direction]
        least, most = (
            (histories[0] * scales * (1 + error)).clamp(max=torch.finfo(format).max).float().to(format).double()
            for error in (-SCALE_ERROR, SCALE_ERROR)
        )
        is_noted = ((least <= largest) | ((held > 0) & (histories[0] == held))) & (largest <= most)
        return bool((is_noted & ((inverse.double() * scales - 1).abs() < SCALE_ERROR)).any())

    def end_pass(self) -> None:
        """Keeps the magnitudes of a forward pass, which an update may have moved."""
        self._kept["forward"] = self._now("forward")[0][0]

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
