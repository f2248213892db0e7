"""Which cells an expected difference is about: by options, sizes, precision, architecture and scenario."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import make_cell

from conformance.backends.protocol import BackendEntry, find_backend
from conformance.core.errors import UsageError
from conformance.matrix.cell import Cell, Phase
from conformance.matrix.profile import Overrides, expand, load_profile
from conformance.runner.preflight import Refusals
from conformance.spec.known_defects import Defect, DividedGradients, ExpectedDifference, Unmodelled
from conformance.spec.layout import Layout
from conformance.spec.precision import PrecisionName
from impl.fsdp2.adapter import Fsdp2Backend

DEFECT: tuple[Defect, ...] = (DividedGradients(by=2),)


def about(layout: str, precision: PrecisionName = "exact", *, model: str = "llama", **fields: Any) -> bool:
    """Of sft-packed, which has three micro-batches, on a backend whose ZeRO stage is 3."""
    scenario = make_cell("sft-packed", model, layout, precision).scenario
    expected = ExpectedDifference(reason="a bug", link="x", defects=lambda *_: DEFECT, **fields)
    return expected.is_about(scenario, Layout.parse(layout), default_zero=3)


@pytest.mark.parametrize(
    ("fields", "one", "other"),
    [
        ({"options": ("ring", "shipped")}, "sp2.ring.shipped", "sp2.ring"),
        ({"options": ("shipped",)}, "dp2.ckpt.shipped", "dp2.ckpt"),
        ({"at_least": {"tp": 2}}, "tp4", "dp2"),
        ({"at_most": {"tp": 1}}, "dp2", "dp2.tp2"),
        ({"at_least": {"zero": 3}}, "dp2", "dp2.zero2"),
        ({"at_most": {"zero": 0}}, "dp2.zero0", "dp2"),
        ({"at_least": {"ranks": 4}}, "dp2.tp2", "dp2"),
        ({"at_least": {"sp": 2, "dp": 2}}, "dp2.sp2", "sp4"),
    ],
)
def test_a_layout_has_all_that_is_asked_for(fields: dict[str, Any], one: str, other: str) -> None:
    assert about(one, **fields)
    assert not about(other, **fields)


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({}, True),
        ({"precisions": ("exact", "fp32")}, True),
        ({"precisions": ("bf16",)}, False),
        ({"architectures": ("llama",)}, True),
        ({"architectures": ("qwen3", "gemma3_text")}, False),
        ({"objectives": ("sft",)}, True),
        ({"objectives": ("grpo", "ppo")}, False),
        ({"scenarios": ("sft-packed",)}, True),
        ({"scenarios": ("sft-padded",)}, False),
        ({"packed": True}, True),
        ({"packed": False}, False),
        ({"at_least": {"accumulation": 3}}, True),
        ({"at_least": {"accumulation": 4}}, False),
    ],
)
def test_a_scenario_is_one_of_those_that_are_named(fields: dict[str, Any], fits: bool) -> None:
    assert about("dp2", **fields) == fits


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": ("shiped",)}, "names shiped; known are plan, seqpar"),
        ({"at_least": {"dps": 2}}, "names dps; known are dp, rep"),
        ({"at_most": {"zero1": 0}}, "names zero1; known are dp"),
        ({"precisions": ("bf61",)}, "names bf61; known are exact"),
        ({"unmodelled": lambda *_: None}, "needs exactly one of defects and unmodelled"),
        ({"defects": None}, "needs exactly one of defects and unmodelled"),
    ],
)
def test_an_expectation_that_could_be_about_no_cell_is_an_error(fields: dict[str, Any], message: str) -> None:
    whole: dict[str, Any] = {"reason": "a bug", "link": "x", "defects": lambda *_: DEFECT}
    with pytest.raises(UsageError, match=message):
        ExpectedDifference(**whole | fields)


class Known:
    """What is asked of a backend."""

    expected = (
        ExpectedDifference(
            reason="one bug",
            link="x",
            defects=lambda _, layout: (DividedGradients(by=layout.tp),),
            options=("shipped",),
        ),
        ExpectedDifference(
            reason="another", link="y", unmodelled=lambda *_: Unmodelled(stage="loss", tensors=("loss",))
        ),
        ExpectedDifference(reason="none for these cells", link="z", defects=lambda *_: ()),
        ExpectedDifference(reason="nor for these", link="z", unmodelled=lambda *_: None),
    )

    describe, supports = Fsdp2Backend.describe, Fsdp2Backend.supports


KNOWN = BackendEntry(name="known", target="test_expectation:Known")


def reasons(cell: Cell) -> list[str]:
    return [known.reason for known in Refusals("cpu").known(cell)]


def test_a_cell_has_all_that_is_known_of_it() -> None:
    shipped = make_cell("sft-packed", "llama", "tp2.shipped", "exact", backend=KNOWN)
    assert reasons(shipped) == ["one bug", "another"]
    assert Refusals("cpu").known(shipped)[0].defects == DEFECT
    assert reasons(make_cell("sft-packed", "llama", "tp2", "exact", backend=KNOWN)) == ["another"]
    assert reasons(make_cell("sft-warmup", "llama", "tp2", "exact", backend=KNOWN)) == ["another"], "both phases alike"


def test_nothing_is_known_of_a_planted_fault_nor_of_phases_that_are_not_alike() -> None:
    planted = make_cell("sft-packed", "llama", "tp2", "exact", backend=KNOWN, faults=("local-token-mean",))
    assert reasons(planted) == []
    scenario = make_cell("sft-warmup", "llama", "tp2", "exact", backend=KNOWN).scenario
    first = Phase(backend=KNOWN, layout=Layout(tp=2), steps=2, save="checkpoint")
    phases = (first, Phase(backend=KNOWN, layout=Layout(dp=2), steps=scenario.steps - 2))
    assert reasons(Cell(scenario=scenario, phases=phases, program="resume")) == []


@pytest.mark.parametrize(
    ("named", "counted", "advice"),
    [
        (("*",), ["one bug", "another"], ""),
        (("x", "y"), ["one bug", "another"], ""),
        (("x",), ["one bug"], 'add to the profile\'s file: [expected] known = ["y"]'),
        ((), [], "one bug (x); another (y). That counts only if the profile names it; if you agree, add to the"),
    ],
)
def test_only_a_difference_that_the_profile_names_counts(
    named: tuple[str, ...], counted: list[str], advice: str
) -> None:
    cell = make_cell("sft-packed", "llama", "tp2.shipped", "exact", backend=KNOWN, expected=named)
    assert reasons(cell) == counted
    told = Refusals("cpu").unnamed(cell)
    assert advice in told
    assert bool(told) == bool(advice)


def test_the_findings_of_the_suites_own_backends_count() -> None:
    options: Any = {"expected": (), "backend": find_backend("megatron")}
    assert reasons(make_cell("sft-packed", "llama", "tp2.shipped", "exact", **options))
    same = replace(options["backend"], name="other")
    assert not reasons(make_cell("sft-packed", "llama", "tp2.shipped", "exact", **options | {"backend": same}))


def test_a_profile_names_expected_differences_by_backend(tmp_path: Path) -> None:
    (file := tmp_path / "mine.toml").write_text(
        'description = "x"\nexpected = { known = ["y"] }\n[[cells]]\nscenarios = ["sft-packed"]\nmodels = ["llama"]\n'
        'layouts = ["tp2.shipped"]\nprecisions = ["exact"]\n'
    )
    cells = expand(load_profile(str(file)), [KNOWN, replace(KNOWN, name="other")], Overrides())
    assert [reasons(cell) for cell in cells] == [["another"], []]
