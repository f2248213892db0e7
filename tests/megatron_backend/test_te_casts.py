"""What is observed of TransformerEngine's float8 on CPUs: casts, products, scales, histories; of made-up operands."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cells import ranks_of
from torch import Tensor
from torch.nn import functional as F

from conformance.runtime import Pool
from conformance.worker.evidence import Watch
from conformance.worker.transformer_engine import (
    HISTORIES,
    TRANSFORMER_ENGINE,
    DelayedScales,
    float8_state,
    te_cast,
    te_largest,
    te_product_error,
)


def drawn(*shape: int) -> Tensor:
    """Numbers of many sizes, so that some are too small for the scale of their block."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator) * torch.exp(4 * torch.randn(*shape, generator=generator))


def with_one_scale(x: Tensor, *, keeps: str) -> Any:
    """A tensor as TransformerEngine keeps it, of which it may drop either copy."""
    scale = x.abs().max() / 448
    data = (x / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    copies = {"_data": data if keeps != "_transpose" else None, "_transpose": data.T.contiguous()}
    copies["_transpose"] = copies["_transpose"] if keeps != "_data" else None
    return (
        SimpleNamespace(**copies, _scale_inv=scale, _fp8_dtype="DType.kFloat8E4M3", size=lambda: x.shape),
        data,
        scale,
    )


def in_blocks(x: Tensor, *, square: bool) -> tuple[Any, Tensor, Tensor]:
    """A tensor as TransformerEngine keeps it with scales of blocks, and the numbers along rows and along columns."""

    def copy(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns = x.shape
        tiles = F.pad(x, (0, -columns % 128, 0, -rows % 128)).abs()
        tiles = tiles.unflatten(1, (-1, 128)).amax(-1)  # (rows, blocks)
        if square:
            tiles = tiles.unflatten(0, (-1, 128)).amax(1)  # (blocks, blocks)
        scales = torch.exp2(torch.ceil(torch.log2(tiles.clamp(min=1e-9) / 448)))
        each = (scales.repeat_interleave(128, 0) if square else scales)[:rows].repeat_interleave(128, 1)[:, :columns]
        data = (x / each).to(torch.float8_e4m3fn)
        kept = scales[: rows if not square else None]
        kept = kept if square else kept.T  # the side of rows is filled up to a multiple of 4
        return data.view(torch.uint8), F.pad(kept, (0, -kept.shape[1] % 4)), data.double() * each

    (data, scales, along_rows), (other, others, along_columns) = copy(x), copy(x.T)
    kept = SimpleNamespace(
        _rowwise_data=data,
        _rowwise_scale_inv=scales,
        _columnwise_data=other,
        _columnwise_scale_inv=others,
        _is_2D_scaled=square,
        _fp8_dtype="DType.kFloat8E4M3",
        size=lambda: x.shape,
    )
    return kept, along_rows, along_columns.T


@pytest.mark.parametrize("keeps", ["both", "_data", "_transpose"])
def test_a_product_with_scales_of_tensors_is_that_of_its_operands(keeps: str) -> None:
    (x, a, s), (w, b, t) = with_one_scale(drawn(48, 64), keeps=keeps), with_one_scale(drawn(80, 64), keeps=keeps)
    wide_x, wide_w = (data.view(torch.float8_e4m3fn).double() * scale for data, scale in ((a, s), (b, t)))
    result = (wide_x @ wide_w.T).float()
    if keeps != "_transpose":
        assert te_product_error(w, True, x, False, None, result) < 1e-6
        assert te_product_error(w, True, x, False, None, 1.02 * result) > 2.0**-7
    (g, c, u) = with_one_scale(drawn(48, 80), keeps="both")
    wide_g = c.view(torch.float8_e4m3fn).double() * u
    assert te_product_error(w, False, g, False, None, (wide_g @ wide_w).float()) < 1e-6
    assert te_product_error(x, False, g, True, None, (wide_g.T @ wide_x).float()) < 1e-6


def test_a_product_with_scales_of_blocks_is_that_of_its_operands() -> None:
    """Where an operand is multiplied along its columns, it is another cast."""
    (x, x_rows, x_columns), (w, w_rows, w_columns) = (
        in_blocks(drawn(272, 192), square=False),
        in_blocks(drawn(336, 192), square=True),
    )
    g, g_rows, g_columns = in_blocks(drawn(272, 336), square=False)
    assert torch.equal(w_rows, w_columns)
    assert not torch.equal(x_rows, x_columns)
    bias = drawn(336)
    assert te_product_error(w, True, x, False, bias, (x_rows @ w_rows.T + bias).float()) < 1e-6
    assert te_product_error(w, False, g, False, None, (g_rows @ w_columns).float()) < 1e-6
    assert te_product_error(x, False, g, True, None, (g_columns.T @ x_columns).float()) < 1e-6
    assert te_product_error(x, False, g, True, None, (g_columns.T @ x_rows).float()) > 1e-4


def test_a_cast_is_told_by_its_format_scales_and_largest_number() -> None:
    x, *_ = with_one_scale(drawn(48, 64), keeps="both")
    assert te_cast(x, columns=False) == te_cast(x, columns=True) == ("e4m3fn", "tensor", False, True)
    late = SimpleNamespace(
        **vars(x) | {"_data": (x._data.view(torch.float8_e4m3fn).float() / 2).to(torch.float8_e4m3fn)}
    )
    late._data, late._scale_inv = late._data.view(torch.uint8), torch.tensor(0.25)
    assert te_cast(late, columns=False) == ("e4m3fn", "tensor", True, False)
    zeros = SimpleNamespace(_data=-torch.zeros(48, 64), _transpose=None, _scale_inv=torch.ones(1), _fp8_dtype="E4M3")
    zeros._data = zeros._data.to(torch.float8_e4m3fn).view(torch.uint8)
    assert te_cast(zeros, columns=False) == ("e4m3fn", "tensor", None, True)
    for square, what in ((False, "rows"), (True, "squares")):
        y, *_ = in_blocks(drawn(272, 192), square=square)
        assert te_cast(y, columns=False) == te_cast(y, columns=True) == ("e4m3fn", what, True, True)
        y._rowwise_scale_inv = y._rowwise_scale_inv * 3
        y._columnwise_data = (y._columnwise_data.view(torch.float8_e4m3fn).float() / 4).to(torch.float8_e4m3fn)
        y._columnwise_data = y._columnwise_data.view(torch.uint8)
        assert te_cast(y, columns=False) == ("e4m3fn", what, False, True)
        assert te_cast(y, columns=True) == ("e4m3fn", what, True, False)


def test_products_in_float8_are_counted_with_their_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    (x, a, s), (w, b, t) = with_one_scale(drawn(48, 64), keeps="both"), with_one_scale(drawn(80, 64), keeps="both")
    product = (a.view(torch.float8_e4m3fn).double() * s) @ (b.view(torch.float8_e4m3fn).double() * t).T
    rest = (None, None, None, bias := drawn(80), None, False, None)  # the bias is behind an output, a quantizer, a type
    results = {False: product + bias, True: product}  # of a gradient the bias is an output

    def gemm(a: Any, flipped: bool, b: Any, b_flipped: bool, *rest: Any) -> list[Tensor]:
        with torch._C._DisableTorchDispatch():
            return [results[rest[-1]].float()]

    library: Any = SimpleNamespace(generic_gemm=gemm)
    monkeypatch.setitem(sys.modules, TRANSFORMER_ENGINE, library)
    for is_gradient in (False, True):
        watch = Watch()
        with watch.step():
            library.generic_gemm(w, True, x, False, *rest, is_gradient)
        assert (watch.float8, watch.library.te) == (1, 1)
        assert watch.float8_error < 1e-6
        assert watch.linear == {"float32": 1}, "what the suite multiplies is not counted"
        assert watch.library.casts == {(one, "e4m3fn", "tensor", False, True, True): 1 for one in ("input", "weight")}


@pytest.mark.parametrize("keeps", ["_transpose", "both"])
def test_a_transposed_copy_of_other_numbers_is_counted(monkeypatch: pytest.MonkeyPatch, keeps: str) -> None:
    """As where the weight was cast again after an update, and its copy was not."""
    library: Any = SimpleNamespace(generic_gemm=lambda a, flipped, *_: [torch.zeros(48, a.size()[not flipped])])
    monkeypatch.setitem(sys.modules, TRANSFORMER_ENGINE, library)
    rest, watch = (None, None, None, None, None, False, None, True), Watch()
    x, w, g = (with_one_scale(drawn(*sizes), keeps="both")[0] for sizes in ((48, 64), (80, 64), (48, 80)))
    stale = with_one_scale(drawn(80, 64).roll(1), keeps=keeps)[0]
    stale._data = w._data if keeps == "both" else None
    with watch.step():
        library.generic_gemm(w, True, x, False, *rest[:-1], False)
        for weight in (w, stale):
            library.generic_gemm(weight, False, g, False, *rest)
    assert {cast[-1]: count for cast, count in watch.library.casts.items() if cast[0] == "weight"} == {
        True: 2,
        False: 1,
    }


class Delayed:
    """Delayed scaling as in TransformerEngine's FP8GlobalStateManager, of an input and a weight, and a gradient."""

    def __init__(self, *, of_ranks: float = 0.0) -> None:
        """``of_ranks``: the magnitude on other ranks."""
        self.histories, self.scales = (
            {"forward_x": torch.zeros(4, 2), "backward_x": torch.zeros(4, 1)},
            {
                "forward_x": torch.ones(2),
                "backward_x": torch.ones(1),
            },
        )
        self.global_amax_history_buffer = {key: [one] for key, one in self.histories.items()}
        self.global_scale_buffer = {key: [one] for key, one in self.scales.items()}
        self._of_ranks = of_ranks

    def cast(self, *magnitudes: float) -> None:
        """Casts an input, a weight and a gradient of these largest magnitudes."""
        for key, own in zip(self.histories, (magnitudes[:2], magnitudes[2:]), strict=True):
            self.histories[key][0] = torch.tensor(own)

    def update(self, forward: bool = True) -> None:
        key, end = ("forward_x", 448.0) if forward else ("backward_x", 57344.0)
        history = self.histories[key]
        history[0] = history[0].clamp(min=self._of_ranks)
        has_own = history[0] > 0
        self.scales[key].copy_(torch.where(has_own, end / history.amax(0), self.scales[key]))
        history.copy_(torch.where(has_own, history.roll(-1, 0), history))
        history[0] = 0


def test_an_operand_that_is_not_cast_keeps_history_and_scale() -> None:
    """Its largest magnitude has left the history already, and is that of the scale still."""
    library = Delayed()
    watched = DelayedScales(library)
    for own in (9.0, 1.0, 1.0, 1.0, 0.0, 0.0, 2.0):
        library.cast(own, own, own)
        watched.begin_update("forward")
        library.update()
        watched.end_update("forward")
    assert watched.ratios == pytest.approx([1, 1])
    assert watched.amaxes[::2] == [(one, one) for one in (9, 1, 1, 1, 0, 0, 2)]
    watched.begin_update("forward")
    library.histories["forward_x"][2] = 0
    library.update()
    watched.end_update("forward")
    assert watched.ratios[1] == math.inf


@pytest.mark.parametrize("factor", [1.0, 0.5, 1.01])
def test_scales_are_compared_with_their_histories(factor: float) -> None:
    library = Delayed(of_ranks=2.0)

    watched = DelayedScales(library)
    for own in ((3.0, 1.0, 9.0), (1.0, 0.0, 8.0), *[(1.0, 1.0, 1.0)] * 4):  # the largest leave the histories
        library.cast(*own)
        for direction in ("forward", "backward"):
            watched.begin_update(direction)
            library.update(forward=direction == "forward")
            library.scales["forward_x"][1] *= factor if direction == "forward" else 1
            watched.end_update(direction)
    assert watched.ratios == pytest.approx([min(1, factor), max(1, factor)], rel=2.0**-22)
    assert watched.amaxes[:6] == [(3, 3), (1, 2), (9, 9), (1, 2), (0, 2), (8, 8)]
    assert DelayedScales(SimpleNamespace(quantization_state=library)).is_used  # as from release 2.15 on
    assert not DelayedScales(SimpleNamespace(global_scale_buffer={})).is_used


def test_updates_of_scales_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Delayed()

    class Manager:
        quantization_state = library

        @classmethod
        def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
            library.update(forward)

    monkeypatch.setitem(sys.modules, HISTORIES, SimpleNamespace(FP8GlobalStateManager=Manager))
    (x, *_), (w, *_) = (with_one_scale(drawn(*sizes), keeps="both") for sizes in ((48, 64), (80, 64)))
    monkeypatch.setitem(sys.modules, TRANSFORMER_ENGINE, SimpleNamespace(generic_gemm=lambda *_: [torch.zeros(48, 80)]))
    watch, first = Watch(), with_one_scale(drawn(48, 64), keeps="both")[0]
    first._data = (x._data.view(torch.float8_e4m3fn).float() * 3 / 448).to(torch.float8_e4m3fn).view(torch.uint8)
    with watch.step():
        library.cast(3.0, 448.0, 9.0)
        for number, scale in enumerate(
            (1.0, 1.0, 448 / 3, 7.0)
        ):  # of all at first, of the weight, of the input, of none
            operand = x if number else first
            operand._scale_inv = w._scale_inv = torch.tensor(1 / scale)
            sys.modules[TRANSFORMER_ENGINE].generic_gemm(w, True, operand, False, *[None] * 7, False)
            if number == 0:
                Manager.reduce_and_update_fp8_tensors(forward=True)
                Manager.reduce_and_update_fp8_tensors(forward=False)
            library.cast(3.0, 0.0, 0.0)  # the weight is not cast again
    foreign = [cast[0] for cast in watch.library.casts.elements() if not cast[4]]
    assert sorted(foreign) == ["input", "input", "weight"], "an input is cast anew, a weight once a step"
    assert watch.to_json()["float8_amaxes"] == [(3, 3), (448, 448), (9, 9)]
    assert watch.to_json()["float8_scale_ratios"] == pytest.approx([1, 1])
    Manager.reduce_and_update_fp8_tensors()
    assert len(watch.to_json()["float8_amaxes"]) == 3, "outside of the step nothing is watched"


@pytest.mark.parametrize(
    ("direction", "factor", "is_noted"),
    [
        *(
            (direction, factor, abs(factor - 1) < 1e-6)
            for direction in ("forward", "backward")
            for factor in (1.0, 1 + 2.0**-22, 0.0, 0.5, 0.7, 2.0)
        ),
        ("forward", 1.08, False),
    ],
)
def test_histories_hold_the_magnitudes_of_casts(direction: str, factor: float, is_noted: bool) -> None:
    """As a backend that notes none, or smaller ones, has histories which are its own scales' as well."""
    library, noted = Delayed(), []
    watched = DelayedScales(library)
    format, end = (torch.float8_e4m3fn, 448.0) if direction == "forward" else (torch.float8_e5m2, 57344.0)
    for magnitude in (3e-4, 3.0, 2.5, 7.0, 0.0, 1.0):  # it saturates where larger than those before
        scale = float(library.scales[f"{direction}_x"][0])
        library.cast(*[factor * magnitude] * 3)
        largest = torch.tensor(magnitude * scale).clamp(max=end).to(format).double()
        noted.append(watched.gave(torch.tensor(1 / scale), direction, largest=largest))
        watched.begin_update(direction)
        library.update(forward=direction == "forward")
        watched.end_update(direction)
    assert watched.ratios == pytest.approx([1, 1])
    assert all(noted) is is_noted


def test_a_magnitude_that_is_lost_before_the_update_is_none_of_zeros() -> None:
    library = Delayed()
    watched = DelayedScales(library)
    for is_lost in (False, True):
        library.cast(3.0, 2.0, 9.0)
        scale = library.scales["forward_x"][0]
        largest = (3 * scale).to(torch.float8_e4m3fn).double()
        assert watched.gave(1 / scale, "forward", largest=largest)
        library.cast(*[0.0] * 3 if is_lost else (3.0, 2.5, 9.0))  # another layer's is larger
        watched.begin_update("forward")
        library.update()
        watched.end_update("forward")
        assert math.isinf(watched.ratios[1]) is is_lost


def test_operands_are_compared_with_scales_of_their_time() -> None:
    library = Delayed()
    watched = DelayedScales(library)
    library.cast(3.0, 2.0, 9.0)
    watched.begin_update("forward")
    library.update()
    watched.end_update("forward")
    library.cast(3.0, 1.0, 9.0)
    assert watched.gave(torch.tensor(2 / 448), "forward", largest=torch.tensor(224.0))
    assert not watched.gave(torch.tensor(1.0), "forward", largest=torch.tensor(1.0))
    assert watched.gave(torch.tensor(1.0), "forward", largest=None)  # as of a weight, which is cast once a step
    assert not watched.gave(torch.tensor(1 / 448), "forward", largest=None)
    assert watched.gave(torch.tensor(1.0), "backward", largest=torch.tensor(8.0))  # rounded


def test_a_layer_that_is_recomputed_is_no_lost_magnitude_and_no_second_update() -> None:
    """It is cast with the history and the scale of then, whose places get those of now back."""
    library = Delayed()
    watched = DelayedScales(library)

    def one_pass(*magnitudes: float) -> None:
        library.cast(*magnitudes)
        scale = library.scales["forward_x"][0].clone()
        largest = (magnitudes[0] * scale).clamp(max=448).to(torch.float8_e4m3fn).double()
        assert watched.gave(1 / scale, "forward", largest=largest)
        forward = library.histories["forward_x"].clone(), library.scales["forward_x"].clone()
        watched.begin_update("forward")
        library.update()
        watched.end_update("forward")
        now = library.histories["forward_x"].clone(), library.scales["forward_x"].clone()
        for place, kept in zip((library.histories, library.scales), forward, strict=True):
            place["forward_x"].copy_(kept)
        assert watched.gave(1 / scale, "forward", largest=largest, again=True)
        if not is_counted:
            for place, kept in zip((library.histories, library.scales), now, strict=True):
                place["forward_x"].copy_(kept)
        watched.begin_update("forward")
        library.update()
        watched.end_update("forward")

    is_counted = False
    for magnitudes in ((3.0, 2.0, 9.0), (2.0, 0.0, 9.0), (5.0, 0.0, 9.0)):
        one_pass(*magnitudes)
    assert watched.ratios == pytest.approx([1, 1])
    assert watched.updates == {"forward": 3}
    is_counted = True
    one_pass(4.0, 0.0, 9.0)
    assert watched.updates == {"forward": 5}


def test_a_history_may_hold_a_pass_before_that_no_update_ended() -> None:
    """As of a rollout, but not the larger magnitude of another operand of the same pass."""
    watched, one = DelayedScales(library := Delayed()), torch.ones(1)

    def passes(magnitude: float) -> bool:
        return watched.gave(one, "forward", largest=torch.tensor(magnitude, dtype=torch.float64))

    library.cast(4.0, 0.0, 0.0)
    assert passes(4.0)
    assert not passes(2.0)
    watched.end_pass()
    assert passes(2.0)
    assert passes(4.0)
    assert not passes(8.0), "the history lacks it"
    library.cast(8.0, 0.0, 0.0)
    assert passes(8.0)
    assert not passes(2.0), "this pass has noted another"


def test_parts_of_the_sequence_have_magnitudes_of_their_own(pool: Pool, tmp_path: Path) -> None:
    """A rank notes that of the part that it has cast, and multiplies by the parts of all ranks."""
    x = drawn(48, 64)
    kept, *_ = with_one_scale(x, keeps="both")
    first, second = (float(te_largest(kept, part=part, parts=2)) for part in range(2))
    assert te_largest(kept) == 448 == max(first, second)
    assert min(first, second) == pytest.approx(
        float(min(x[:24].abs().max(), x[24:].abs().max()) * 448 / x.abs().max()), rel=0.1
    )
    for parts, own in ((2, [[2], [8]]), (1, [[8], [8]])):
        outcome = pool.run(
            key="megatron",
            config=ranks_of("megatron", 2),
            task="megatron_tasks:magnitudes_that_pass",
            kwargs={"parts": parts},
            log_dir=tmp_path / str(parts),
            budget_s=60.0,
        )
        assert outcome.state == "done", outcome.reason
        of_whole = {"input": [8], "weight": [8], "gathered weight": [8]}
        assert outcome.results == [{"gathered input": mine, **of_whole} for mine in own]


def test_the_state_of_a_resume_is_that_before_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Delayed()
    for magnitudes in ((3.0, 2.0, 9.0), (2.0, 0.0, 8.0)):
        library.cast(*magnitudes)
        library.update()
        library.update(forward=False)
    monkeypatch.setitem(sys.modules, HISTORIES, SimpleNamespace(FP8GlobalStateManager=library))
    saved = float8_state()
    assert saved == {
        "forward": [[pytest.approx(448 / 3), 0, 3, 2], [224, 0, 0, 2]],
        "backward": [[pytest.approx(57344 / 9), 0, 9, 8]],
    }
    resumed = DelayedScales(library)
    for magnitudes in ((7.0, 2.0, 9.0), (2.0, 0.0, 8.0)):
        library.cast(*magnitudes)
        for direction in ("forward", "backward"):
            resumed.begin_update(direction)
            library.update(forward=direction == "forward")
            resumed.end_update(direction)
    assert resumed.began == saved
    assert float8_state() != saved
    monkeypatch.setitem(
        sys.modules, HISTORIES, SimpleNamespace(FP8GlobalStateManager=SimpleNamespace(global_scale_buffer={}))
    )
    assert float8_state() == {}


def test_another_chunk_of_a_model_begins_with_its_own_state() -> None:
    """Its operands come with its first forward pass, after the first update of the chunk before."""
    library = Delayed()
    watched = DelayedScales(library)
    library.cast(3.0, 2.0, 9.0)
    watched.begin_update("forward")
    library.update()
    watched.end_update("forward")
    library.global_amax_history_buffer["forward_x"].append(torch.tensor([[0.0], [5.0], [6.0], [4.0]]))
    library.global_scale_buffer["forward_x"].append(torch.tensor([7.0]))
    watched.begin_update("forward")
    assert watched.began["forward"] == [[1, 0, 0, 0], [1, 0, 0, 0], [7, 5, 6, 4]]
