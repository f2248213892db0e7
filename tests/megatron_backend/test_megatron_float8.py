"""Float8 of TransformerEngine in Megatron: who claims it, what Megatron is told, what evidence is taken of products.

TransformerEngine needs a GPU, so cells run on GPU machines only, at the end of this file.
"""

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cells import BACKENDS, cell_of
from torch import Tensor
from torch.nn import functional as F

from conformance.backends.faults import catalogue
from conformance.backends.protocol import Unsupported
from conformance.core.host import FIXTURES
from conformance.core.packages import is_installed
from conformance.judge.work_evidence import CASTS
from conformance.judge.work_evidence import _te_casts as te_claims
from conformance.matrix.cell import Cell
from conformance.models.synthetic import with_skeleton
from conformance.runner.placement import SessionConfig
from conformance.runner.preflight import Refusals
from conformance.runner.session import Session
from conformance.runtime import gpu_inventory
from conformance.runtime.gpu_inventory import Gpu, gpus_of_host, shares_of
from conformance.spec.layout import Float8Recipe, Layout
from conformance.spec.precision import PRECISIONS, PrecisionName
from conformance.spec.scenario import load_scenario
from conformance.worker.evidence import HISTORIES, TRANSFORMER_ENGINE, Watch
from conformance.worker.operators import DelayedScales, te_cast, te_product_error
from impl.faults.float8 import FLOAT8_FAULTS
from impl.megatron import float8
from impl.megatron.float8 import RECIPES, float8_refused
from impl.megatron.model_config import read_shape, stages

GPUS = torch.cuda.device_count()
NAMES = [fault.name for fault in FLOAT8_FAULTS if "megatron" in fault.cells.layouts]


def cell(
    layout: str,
    precision: PrecisionName = "fp32",
    *faults: str,
    scenario: str = "sft-packed",
    model: str = "llama-even",
) -> Cell:
    file = FIXTURES / "scenarios" / f"{scenario}.toml"
    found = load_scenario(file, model=with_skeleton(f"models/{model}"), precision=precision)
    return Cell.single(
        scenario=replace(found, steps=2), backend=BACKENDS["megatron"], layout=Layout.parse(layout), faults=faults
    )


@pytest.mark.parametrize(
    ("scenario", "layout", "precision", "changes", "advice"),
    [
        ("sft-packed", "dp2.fp8tensor", "fp32", {}, "use te with fp8tensor, fp8delayed, fp8block, or fsdp2"),
        ("sft-packed", "dp2.te.fp8row", "fp32", {}, "use te with fp8tensor, fp8delayed, fp8block, or fsdp2"),
        ("grpo", "dp2.te.fp8tensor", "bf16", {}, "supervised fine-tuning without adapters"),
        ("sft-packed", "dp2.te.fp8tensor", "fp16", {}, "use bf16"),
        ("sft-packed", "pp2.te.fp8block", "fp32", {}, ""),
        ("sft-packed", "pp2.te.fp8block.fp8ends", "fp32", {}, "of two stages, which is not built in; use pp1"),
        ("sft-packed", "pp2.vpp2.te.fp8block", "fp32", {}, "only dp, tp, pp and zero are built .*; leave other axes"),
        (
            "sft-packed",
            "dp2.tp2.te.fp8block",
            "fp32",
            {},
            "16, also on each of 2 ranks, .* has intermediate_size=336; use",
        ),
        ("sft-packed", "dp2.tp2.te.fp8block", "fp32", {"ffn": 352}, ""),
        ("sft-packed", "tp2.te.fp8block.seqpar", "fp32", {"ffn": 352}, "seqpar is not built into"),
        ("sft-packed", "dp2.te.fp8tensor.ckpt", "fp32", {}, "ckpt is not built into this backend beside fp8tensor"),
        ("sft-packed", "dp2.te.fp8block", "fp32", {"ffn": 56}, "multiples of 16, .* has intermediate_size=56; use"),
        ("sft-packed", "dp2.te.fp8block", "fp32", {"fused": True}, "keeps apart only; leave it out"),
        ("sft-packed", "dp2.te.fp8block", "fp32", {"qkv_bias": True}, "biases in float32 to bfloat16; use bf16"),
        ("sft-packed", "dp2.te.fp8block", "bf16", {"qkv_bias": True}, ""),
        ("sft-packed", "dp2.te.fp8tensor.fp8ends", "fp32", {}, "the model has no other; leave it out"),
        ("sft-packed", "dp2.te.fp8delayed.fp8ends", "fp32", {}, "leave fp8ends out, or use fp8tensor"),
        ("sft-packed", "dp2.zero1.te.fp8tensor.overlap", "fp32", {}, ""),
        ("sft-packed", "dp2.te", "fp32", {"ffn": 56}, ""),
    ],
)
def test_refusals_name_the_way_out(
    scenario: str, layout: str, precision: PrecisionName, changes: dict[str, Any], advice: str
) -> None:
    shape = replace(read_shape(FIXTURES / "models" / "llama-even"), **changes)
    asked = cell(layout, precision, scenario=scenario)
    found = float8_refused(asked.scenario, asked.phases[0].layout, shape)
    assert re.search(advice, found) if advice else not found


@pytest.mark.parametrize(
    ("layout", "release", "capabilities", "visible", "advice"),
    [
        ("dp2.te.fp8block", "2.10.0", [(9, 0)], None, ""),
        ("dp2.te.fp8tensor", "2.10.0", [(8, 9)], None, ""),
        ("dp2.te.fp8tensor", "2.10.0", [(9, 0), (8, 0)], None, r"8\.9 or higher, and GPU1 has 8\.0; use te without"),
        ("dp2.te.fp8tensor", "2.10.0", [(9, 0), (8, 0)], "0", ""),
        ("dp2.te.fp8block", "2.10.0", [(8, 9)], None, r"9\.0 or higher, and GPU0 has 8\.9; use te without fp8block"),
        ("dp2.te.fp8block", "2.10.0", [None], None, ""),  # NVML does not say
        ("dp2.te", "2.10.0", [(8, 0)], None, ""),
        ("dp2.te.fp8block", "2.2.0", [(9, 0)], None, r"2\.2\.0 has no fp8block; run: pip install .*>=2\.3', or leave"),
        ("dp2.te.fp8tensor", "2.1.1+cu12", [(9, 0)], None, r"2\.1\.1\+cu12 has no fp8tensor; run: .*>=2\.2'"),
        ("dp2.te.fp8delayed", "2.1.1", [], None, ""),
    ],
)
def test_machines_without_float8_are_refused_before_a_process_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    release: str,
    capabilities: list[tuple[int, int] | None],
    visible: str | None,
    advice: str,
) -> None:
    (info := tmp_path / f"transformer_engine-{release}.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {release}\n")
    monkeypatch.syspath_prepend(tmp_path)
    gpus = [Gpu(uuid=f"GPU-{n}", name=f"GPU{n}", capability=one) for n, one in enumerate(capabilities)]
    monkeypatch.setattr(float8, "installed_gpus", lambda: gpus)
    monkeypatch.setattr(gpu_inventory, "installed_gpus", lambda: gpus)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    asked = cell(layout)
    answer = BACKENDS["megatron"].load().supports(asked.scenario, asked.phases[0].layout)
    assert isinstance(answer, Unsupported) is bool(advice)
    assert re.search(advice, str(answer))


@pytest.mark.parametrize(("layout", "is_refused"), [("dp2.te.fp8tensor", True), ("dp2.te", False)])
def test_a_resume_in_float8_is_refused(layout: str, is_refused: bool) -> None:
    asked = cell_of("megatron", "sft-warmup", "llama", layout, "fp32")
    found = Refusals("cpu")._handover_refusal(asked, *asked.phases)
    assert ("use a cell of one phase, or leave te and float8 out" in found.reason if found else False) is is_refused


def test_megatron_is_told_the_recipe() -> None:
    from impl.megatron.gpt_model import transformer_config

    shape = replace(read_shape(FIXTURES / "models" / "llama-even"), layers=3)
    told = {}
    for layout in ("dp2.te", *(f"dp2.te.{name}" for name in RECIPES), "dp2.te.fp8block.fp8ends"):
        config = transformer_config(
            shape, Layout.parse(layout), PRECISIONS["fp32"], stages(layers=shape.layers, pp=1, vpp=1)
        )
        told[layout.removeprefix("dp2.")] = (config.fp8, config.fp8_recipe, config.first_last_layers_bf16)
        assert not config.fp8_param
        assert not config.fp8_dot_product_attention
    assert (config.num_layers_at_start_in_bf16, config.num_layers_at_end_in_bf16) == (1, 1)
    assert told == {
        "te": (None, "delayed", False),
        "te.fp8tensor": ("hybrid", "tensorwise", False),
        "te.fp8delayed": ("hybrid", "delayed", False),
        "te.fp8block": ("e4m3", "blockwise", False),
        "te.fp8block.fp8ends": ("e4m3", "blockwise", True),
    }
    delayed = transformer_config(
        shape, Layout.parse("dp2.te.fp8delayed"), PRECISIONS["fp32"], stages(layers=3, pp=1, vpp=1)
    )
    assert (delayed.fp8_margin, delayed.fp8_amax_history_len, delayed.fp8_amax_compute_algo) == (0, 4, "max")


def test_a_convention_is_in_force_with_a_recipe_only() -> None:
    (found,) = [one for one in BACKENDS["megatron"].load().conventions if type(one).__name__ == "Float8Products"]  # type: ignore[attr-defined]
    assert found.in_cell(cell("dp2").scenario, Layout.parse("dp2.te")) is None
    one = found.in_cell(cell("dp2").scenario, Layout.parse("dp2.te.fp8block"))
    assert (one.recipe, one.transformer_engine, one.multiple, one.data_ranks, one.micro_batches) == (
        "fp8block",
        True,
        16,
        2,
        3,
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
    foreign = [cast[0] for cast in watch.casts.elements() if not cast[4]]
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


def casts(
    recipe: str,
    *,
    changes: dict[str, str] | None = None,
    powers: bool | None = None,
    own: bool = True,
    same: bool = True,
    counts: dict[str, int] | None = None,
) -> Any:
    """What a rank's evidence says of operands of four products forward and eight backward. ``changes``: a format or a
    kind of scale, and what is in its place. ``counts``: other numbers of operands."""
    by_power = recipe == "fp8block" if powers is None else powers
    numbers = {"input": 8, "weight": 8, "gradient": 8} | (counts or {})
    found = [[*cast, by_power, own, same, numbers[cast[0]]] for cast in sorted(CASTS[recipe])]
    return [
        [(changes or {}).get(value, value) if isinstance(value, str) else value for value in cast] for cast in found
    ]


def mostly_by_powers(recipe: str) -> Any:
    """Of eight operands of a kind one has another scale."""
    return [[*cast[:6], 7 if cast[3] else 1] for powers in (False, True) for cast in casts(recipe, powers=powers)]


def with_zeros(recipe: str) -> Any:
    """Of eight gradients six are zero."""
    found = [[*cast, 2 if cast[0] == "gradient" else count] for *cast, count in casts(recipe)]
    return [*found, *([*cast[:3], None, *cast[4:-1], 6] for cast in found if cast[0] == "gradient")]


# Of a rank with four products forward, and histories of two operands in which another rank had the larger second one.
ONE = {"float8_scales": "same", "float8_scale_ratios": [1.0, 1.0], "float8_amaxes": [[3.0, 3.0], [1.0, 2.0]], "te": 4}
OTHER = ONE | {"float8_amaxes": [[2.0, 3.0], [2.0, 2.0]]}


@pytest.mark.parametrize(
    ("recipe", "rank", "wrong"),
    [
        *((recipe, {}, set()) for recipe in RECIPES),
        ("fp8tensor", {"float8_casts": []}, {"operands are cast as the recipe says"}),
        ("fp8tensor", {"float8_casts": casts("fp8tensor", changes={"e5m2": "e4m3fn"})}, {"operands are cast"}),
        ("fp8block", {"float8_casts": casts("fp8block", changes={"squares": "rows"})}, {"operands are cast"}),
        ("fp8tensor", {"float8_casts": casts("fp8tensor", powers=True)}, {"scales are not rounded to powers"}),
        ("fp8block", {"float8_casts": casts("fp8block", powers=False)}, {"scales are rounded to powers"}),
        (
            "fp8tensor",
            {"float8_casts": mostly_by_powers("fp8tensor")},
            {"scales are not rounded to powers"},
        ),
        *(
            (recipe, {"float8_casts": with_zeros(recipe)}, set())  # of a micro-batch without targets
            for recipe in RECIPES
        ),
        ("fp8tensor", {"float8_casts": casts("fp8tensor", own=False)}, {"scales are those of the operands"}),
        *(
            (recipe, {"float8_casts": casts(recipe, same=False)}, {"backward products multiply by the numbers"})
            for recipe in RECIPES
        ),
        ("fp8delayed", {"float8_casts": casts("fp8delayed", own=False)}, {"scales are those that updates gave"}),
        ("fp8delayed", {"float8_scales": "other"}, {"ranks scale alike", "histories hold the largest"}),
        *(
            ("fp8delayed", {"float8_scale_ratios": ratios}, {"scales follow from the histories"})
            for ratios in ([0.5, 1.0], [1.0, 1.01], [1.0, math.nan], ["nan", 1.0], [])
        ),
        ("fp8delayed", {"float8_scale_ratios": [1 - 2.0**-22, 1 + 2.0**-22]}, set()),
        *(
            ("fp8delayed", {"float8_amaxes": amaxes}, {"histories hold the largest magnitudes of all"})
            for amaxes in ([[3.0, 3.0], [1.0, 1.0]], [[3.0, 3.0], [3.0, 2.0]], [[3.0, 3.0]], [])
        ),
        # Gradients of weights, or of inputs, are multiplied in high precision
        ("fp8tensor", {"float8_casts": casts("fp8tensor", counts={"input": 4, "gradient": 4})}, {"products for grad"}),
        ("fp8block", {"float8_casts": casts("fp8block", counts={"weight": 4, "gradient": 4})}, {"products for grad"}),
        ("fp8tensor", {"te": 5}, {"forward products of these layers", "products for grad"}),  # one in high precision
        # Layers are recomputed, in float8 or not
        ("fp8block", {"float8_casts": casts("fp8block", counts={"input": 12, "weight": 12}), "again": 4}, set()),
        ("fp8block", {"again": 4}, {"forward products of these layers"}),
    ],
)
def test_casts_are_those_of_the_recipe(recipe: Float8Recipe, rank: dict[str, Any], wrong: set[str]) -> None:
    found = broken(recipe, [ONE | {"float8_casts": casts(recipe)} | rank, OTHER | {"float8_casts": casts(recipe)}])
    due = {claim for claim in found if any(claim.startswith(start) for start in wrong)}
    if rank.get("float8_casts") != []:  # of which other claims do not hold either
        assert found == due
    assert len(due) == len(wrong)


def broken(
    recipe: str,
    ranks: list[dict[str, Any]],
    *,
    kept: Fraction = Fraction(1),
    frozen: bool = False,
    stages: int = 1,
) -> set[str]:
    claims = te_claims(recipe, ranks, kept=kept, frozen=frozen, stages=stages)
    return {claim for claim, holds, _ in claims if not holds}


def test_stages_have_scales_of_their_own() -> None:
    cast = {"float8_casts": casts("fp8delayed")}
    first, second = [ONE | cast, OTHER | cast], [one | cast | {"float8_scales": "of 2"} for one in (ONE, OTHER)]
    assert not broken("fp8delayed", [*first, *second], stages=2)
    assert broken("fp8delayed", [*first, *second]) == {"ranks scale alike"}
    assert broken("fp8delayed", [*first, *first], stages=2) == {"ranks scale alike"}
    assert broken("fp8delayed", [*first, second[0], second[1] | {"float8_scales": "of 3"}], stages=2) == {
        "ranks scale alike",
        "histories hold the largest magnitudes of all ranks",
    }
    larger = second[0] | {"float8_amaxes": [[3.5, 3.0], [1.0, 2.0]]}
    assert broken("fp8delayed", [*first, larger, second[1]], stages=2) == {
        "histories hold the largest magnitudes of all ranks"
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_rank_multiplies_in_float8_itself(recipe: Float8Recipe) -> None:
    one = ONE | {"float8_casts": casts(recipe), "float8_amaxes": [[3.0, 3.0]]}
    assert "forward products of these layers are in float8" in broken(recipe, [one, one | {"float8_casts": []}])
    assert not broken(recipe, [one | {"te": 12}], kept=Fraction(1, 3))  # fp8ends, of three layers
    assert broken(recipe, [one | {"te": 12}])
    part = casts(recipe, counts={"input": 4, "gradient": 4})
    assert not broken(recipe, [one | {"float8_casts": part}], frozen=True)


def test_histories_that_were_not_seen_hold_no_claim() -> None:
    one = {"float8_casts": casts("fp8delayed"), "te": 4}
    unseen = {"ranks scale alike", "scales follow from the histories"}
    assert broken("fp8delayed", [one]) == {*unseen, "histories hold the largest magnitudes of all ranks"}


def test_histories_end_with_their_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine holds those of all models of a process, with process groups that are gone."""
    from impl.megatron import context

    ended: list[str] = []
    manager = SimpleNamespace(reset=lambda: ended.append("histories"))
    monkeypatch.setitem(sys.modules, HISTORIES, SimpleNamespace(FP8GlobalStateManager=manager))
    monkeypatch.setattr(context.MODEL_PARALLEL, "leave", lambda: ended.append("groups"))
    one = object.__new__(context.MegatronContext)
    one.config, one.ring = SimpleNamespace(device="cpu", tier=PRECISIONS["fp32"]), None  # type: ignore[assignment]
    one.teardown()
    assert ended == ["groups", "histories"]


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
        assert (watch.float8, watch.te) == (1, 1)
        assert watch.float8_error < 1e-6
        assert watch.linear == {"float32": 1}, "what the suite multiplies is not counted"
        assert watch.casts == {(one, "e4m3fn", "tensor", False, True, True): 1 for one in ("input", "weight")}


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
    assert {cast[-1]: count for cast, count in watch.casts.items() if cast[0] == "weight"} == {True: 2, False: 1}


def test_every_fault_has_a_place() -> None:
    assert {Layout.parse(catalogue()[name].cells.layouts["megatron"]).float8 for name in NAMES} == {*RECIPES}
    refused = cell_of("megatron", "sft-packed", "llama", "dp2.te.fp8tensor", "fp32")
    answer = BACKENDS["megatron"].load().supports(refused.scenario, refused.phases[0].layout)
    assert "use another model" in str(answer)


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    per_gpu = 1 if GPUS > 1 else 2
    gpus = shares_of(gpus_of_host()[:2], per_gpu)
    config = SessionConfig(out=tmp_path_factory.mktemp("float8"), device="cuda", gpus=gpus, ranks_per_gpu=per_gpu)
    with Session(config) as session:
        yield session


needs_te = pytest.mark.skipif(
    not (GPUS and is_installed("transformer-engine")), reason="needs TransformerEngine and a GPU"
)


@pytest.mark.exhaustive
@needs_te
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_conform(on_gpus: Session, recipe: str) -> None:
    verdict = on_gpus.run(cell(f"dp2.te.{recipe}")).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.exhaustive
@needs_te
@pytest.mark.parametrize("name", NAMES)
def test_fault_is_caught_at_the_predicted_stage(on_gpus: Session, name: str) -> None:
    of = catalogue()[name].cells
    verdict = on_gpus.run(cell(of.layouts["megatron"], "fp32", name, model=of.model)).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", catalogue()[name].stage), verdict.reason
