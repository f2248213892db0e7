"""The mutation score: how faults are counted, and that the command which plants them does so."""

import dataclasses
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from conformance.backends.faults import catalogue
from conformance.core.host import FIXTURES
from conformance.matrix.options import Selection
from conformance.matrix.profile import select_cells
from conformance.spec.precision import PRECISIONS
from conformance.spec.scenario import load_scenario

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from mutation_score import written_rows  # noqa: E402
from mutation_table import BLANK, JSON, QUICK, Row, Score, read_score, to_markdown, write_score  # noqa: E402

FACTS: dict[str, object] = {"date": "2026-11-22", "torch": "2.13.0"}
HONEST = Row(
    fault="",
    predicted="",
    backend="fsdp2",
    tier="bf16",
    cell="s/m/fsdp2/dp2/bf16",
    state="conforms",
    norm=(0.0, 0.02),
    margins={"loss": 0.1, "gradients": 0.2},
)
CLIP = Row(
    fault="clip-never",
    predicted="clipped update",
    backend="fsdp2",
    tier="bf16",
    cell="s/m/fsdp2/dp2/bf16/fault-clip-never",
    state="differs",
    stage="clipped update",
    loss=(0.0, 0.03),
    norm=(0.0, 0.02),
)
HONEST_MEAN = dataclasses.replace(
    HONEST, backend="megatron", cell="s/m/megatron/dp2/bf16", norm=(0.0, 0.0), margins={"gradients": 0.4}
)
MISSED = dataclasses.replace(
    CLIP, tier="exact", cell="s/m/fsdp2/dp2/exact/fault-clip-never", state="conforms", stage="", reason="all agree"
)
LATE = dataclasses.replace(
    CLIP,
    fault="mean",
    predicted="loss",
    backend="megatron",
    cell="s/m/megatron/dp2/bf16/fault-mean",
    stage="gradients",
    loss=(0.08, float("inf")),
)
BLANKED = dataclasses.replace(LATE, tier="exact", state=BLANK, reason="nothing is rounded", loss=None, norm=None)
IN_QUICK = dataclasses.replace(CLIP, tier=QUICK, loss=None, norm=None)
NOT_IN_QUICK = dataclasses.replace(LATE, tier=QUICK, state="conforms", stage="", loss=None, norm=None)
ROWS = (HONEST, HONEST_MEAN, CLIP, MISSED, LATE, BLANKED, IN_QUICK, NOT_IN_QUICK)

LINES = (
    "2 faults, planted 3 times.",
    "Of 2 pairs of fault and backend, 1 are caught at the predicted stage in at least one tier.",
    "Of 2 cells without a fault that were judged, 2 conform.",
    "| bf16 | 2 | 0 | 0 | 0 | 0 | gradients 0.40 (`s/m/megatron/dp2/bf16`); loss 0.10 (`s/m/fsdp2/dp2/bf16`) |",
    "* missed in exact: `clip-never` (fsdp2)\n",
    "date 2026-11-22, torch 2.13.0",
    "| fsdp2 | exact | 1 | 0 | 0 | 1 | 0 | 1 |",
    "| fsdp2 | bf16 | 1 | 1 | 1 | 1 | 0 | 0 |",
    "| fsdp2 | any | 1 | 1 | 1 | 1 | 0 | 1 |",
    "| megatron | any | 1 | 1 | 0 | 1 | 1 | 1 |",
    "| all | bf16 | 2 | 2 | 1 | 2 | 1 | 1 |",
    "* fsdp2: 1 of 1 faults are caught by one of its cells\n",
    "* megatron: 0 of 1 faults are caught by one of its cells; missed: `mean`\n",
    "* `s/m/fsdp2/dp2/exact/fault-clip-never`: conforms, all agree; predicted: clipped update\n",
    "* `s/m/megatron/dp2/bf16/fault-mean`: differs, gradients; predicted: loss\n",
    "* nothing is rounded: `mean` (exact)\n",
    "| `clip-never` | fsdp2 | exact | no |  | clipped update | 0.0e+00 | 3.0e-02 | 0.0e+00 | 2.0e-02 | yes | no |",
    "| `mean` | megatron | exact | - | - | - | - | - | - | - | - | - | - |",
    "| `mean` | megatron | quick | no |  | loss |  |  |  |  |  |  |  |",
)


@pytest.mark.parametrize("line", LINES)
def test_the_table_says_what_was_caught_where_and_what_a_gate_sees(line: str) -> None:
    assert line in to_markdown(Score(ROWS), FACTS)


def test_every_fault_has_to_be_caught_at_its_stage_in_some_tier() -> None:
    assert Score(ROWS).never_caught == [("mean", "megatron")]
    assert not Score(ROWS).holds
    assert Score([HONEST, CLIP, MISSED, NOT_IN_QUICK]).holds


@pytest.mark.parametrize("state", ["differs", "infrastructure"])
def test_a_cell_without_a_fault_has_to_conform(state: str) -> None:
    assert not Score([dataclasses.replace(HONEST, state=state), CLIP]).holds


@pytest.mark.parametrize("honest", [None, "differs", "expected_difference", "infrastructure"])
def test_a_fault_in_a_cell_that_does_not_conform_without_it_is_not_caught(honest: str | None) -> None:
    rows = [CLIP, IN_QUICK, *([dataclasses.replace(HONEST, state=honest)] if honest else [])]
    score = Score(rows)
    assert not score.caught(CLIP)
    assert score.never_caught == [("clip-never", "fsdp2")]
    told = to_markdown(score, FACTS)
    assert "0 of 1 faults are caught by one of its cells; missed: `clip-never`" in told
    assert "predicted: clipped update, and the same cell without the fault does not conform" in told
    assert Score([CLIP, HONEST]).caught(CLIP)


@pytest.mark.parametrize(
    ("predicted", "after_unread", "counts"),
    [
        ("clipped update", True, True),
        ("weight replicas", True, True),
        ("clipped update", False, False),
        ("gradients", True, False),
    ],
)
def test_an_update_that_was_not_read_shows_at_any_stage(predicted: str, after_unread: bool, counts: bool) -> None:
    row = dataclasses.replace(CLIP, stage="routing", predicted=predicted, after_unread=after_unread)
    assert Score([HONEST, row]).as_predicted(row) == counts


def test_what_was_not_run_is_no_score() -> None:
    score = Score([HONEST, CLIP, dataclasses.replace(MISSED, state="not_run")])
    assert not score.is_complete
    assert not score.holds


def test_a_declared_difference_is_no_false_alarm() -> None:
    assert Score([dataclasses.replace(HONEST, state="expected_difference")]).holds


def test_rows_of_an_earlier_command_are_not_run_again(tmp_path: Path) -> None:
    write_score(tmp_path, [HONEST, CLIP, dataclasses.replace(MISSED, state="not_run"), BLANKED], FACTS)
    assert list(written_rows(tmp_path).values()) == [HONEST, CLIP]


def test_every_fault_shows_in_some_tier() -> None:
    for name, fault in catalogue().items():
        assert not fault.cells.unobservable.keys() >= PRECISIONS.keys(), name


def score_of(out: Path, *options: str) -> tuple[int, Score]:
    """Exit status of the command, and what it wrote."""
    command = [sys.executable, str(ROOT / "benchmarks" / "mutation_score.py"), str(out), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (out / JSON).exists(), done.stderr
    return done.returncode, read_score(out / JSON)[0]


@pytest.mark.exhaustive
def test_every_fault_is_planned_on_every_backend_in_every_tier(tmp_path: Path) -> None:
    status, score = score_of(tmp_path / "out", "--minutes", "0")
    assert status == 3
    assert {row.state for row in score.planted} == {"not_run"}
    in_place = {(row.fault, row.backend, row.tier) for row in (*score.planted, *score.blank) if row.tier != QUICK}
    assert in_place == {
        (f, b, t) for f, fault in catalogue().items() for b, t in product(fault.cells.layouts, PRECISIONS)
    }
    read = {(cell.backend, cell.scenario.objective.reads) for cell in select_cells(Selection())}
    of_quick = {(row.fault, row.backend) for row in score.planted if row.tier == QUICK}
    for fault in catalogue().values():
        file = FIXTURES / "scenarios" / f"{fault.cells.scenario}.toml"
        reads = load_scenario(file, model="models/llama", precision="exact").objective.reads
        for backend in fault.cells.layouts:
            in_quick = reads == "samples" or (backend, reads) in read  # any cell of quick has samples
            assert ((fault.name, backend) in of_quick) == in_quick, fault.name
    assert score.honest.keys() >= {row.cell.removesuffix(f"/fault-{row.fault}") for row in score.planted}


@pytest.mark.exhaustive
def test_the_command_plants_what_it_says_and_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    options = ("--backends", "fsdp2", "--faults", "inverted-clip", "schedule-per-micro-batch", "--tiers", "exact")
    assert score_of(tmp_path / "out", *options, "--minutes", "0")[0] == 3
    status, score = score_of(tmp_path / "out", *options)
    assert status == 0
    found = {(row.fault, row.tier, row.stage) for row in score.planted}
    assert found == {(name, "exact", "clipped update") for name in ("inverted-clip", "schedule-per-micro-batch")}
    (honest,) = score.honest.values()
    assert honest.state == "conforms"
    assert all(row.loss and row.loss[0] < 1e-12 < 0.01 < row.loss[1] for row in score.planted)
    assert honest.loss
    assert max(honest.loss) < 1e-12
