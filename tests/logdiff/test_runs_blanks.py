"""What a log names without a number is NaN where a number is due, and else nothing."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from reports.logdiff.readers import read_log
from reports.logdiff.run import Run, run_of


def opened(folder: Path, content: str) -> Run:
    (folder / "log").write_text(content, encoding="utf-8")
    return run_of(read_log(str(folder / "log")), name="log")


def points(run: Run, metric: str) -> dict[float, float]:
    curve = run.curves[metric]
    return dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))


@pytest.mark.parametrize("nan", ["nan", "NaN", "NAN"])
@pytest.mark.parametrize(
    "line",
    ['{{"step": {s}, "loss": {v}}}', "step: {s} loss: {v}", "{{'loss': {v}, 'step': {s}}}"],
)
def test_nan_in_any_spelling_is_nan_to_the_end(tmp_path: Path, line: str, nan: str) -> None:
    lines = [line.format(s=step, v=2.5 if step < 4 else nan) for step in range(1, 7)]
    assert nan_of(opened(tmp_path, "\n".join(lines) + "\n"), "loss") == [4, 5, 6]


def blanks(name: str, values: Sequence[float | None], **others: float) -> str:
    """Lines of JSON with a metric at steps 1, 2, 3, ..., null for None, and others at each of them."""
    lines = [json.dumps({"step": step, name: value, **others}) for step, value in enumerate(values, 1)]
    return "\n".join(lines) + "\n"


def nan_of(run: Run, metric: str) -> list[float]:
    curve = run.curves.get(metric)
    return [] if curve is None else [float(step) for step in curve.steps[np.isnan(curve.values)]]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("loss", [3.0, 2.0, None, 1.0], [3]),
        ("loss", [3.0, None, None, None, None], [2, 3, 4, 5]),  # a run that breaks down
        ("loss", [None, None, None], [1, 2, 3]),
        ("eval_loss", [None, 3.0, None, 2.0, None, 1.0, None], []),  # of every second step
        ("eval_loss", [None, 3.0, None, 2.0, None, None, None, None], [6, 8]),
        ("eval_loss", [None, 3.0, None, None], []),  # nothing says when the next one is due
        ("eval_loss", [None, None, None], []),
    ],
)
def test_null_is_nan_where_a_metric_is_due_and_all_else_is_there(
    name: str, values: list[float | None], expected: list[float], tmp_path: Path
) -> None:
    run = opened(tmp_path, blanks(name, values, lr=1e-3, grad_norm=0.5))
    assert nan_of(run, name) == expected
    table = "step,lr,grad_norm," + name + "\n"
    table += "".join(f"{step},1e-3,0.5,{'' if x is None else x}\n" for step, x in enumerate(values, 1))
    to_end = [step for step in expected if not any(values[int(step) - 1 :])]
    told = opened(tmp_path, table)
    assert nan_of(told, name) == to_end
    assert any("but later ones; not compared there" in note for note in told.notes) == (to_end != expected)
    if expected:
        number = len(expected)
        at = f"at {number} step{'s' * (number > 1)} that have all else"
        assert run.notes == (f"{name} has no number {at}; it was taken to be NaN there",)


def test_of_a_step_that_is_logged_twice_a_later_null_counts(tmp_path: Path) -> None:
    first, second = (blanks("loss", values, lr=1e-3) for values in ([4.0, 3.0, 2.0, 1.0], [4.0, 3.0, None, None]))
    resumed = "".join(second.splitlines(keepends=True)[2:])
    assert nan_of(opened(tmp_path, first + resumed), "loss") == [3, 4]
    once = (
        '{"step": 2, "lr": 0.1, "eval_loss": 3.0}\n{"step": 1, "lr": 0.1}\n{"step": 2, "lr": 0.1, "eval_loss": null}\n'
    )
    assert list(opened(tmp_path, once).curves) == ["lr"]


def test_null_beside_nothing_else_is_no_value(tmp_path: Path) -> None:
    assert nan_of(opened(tmp_path, blanks("loss", [3.0, None, 1.0])), "loss") == []
    lines = [{"step": 1, "loss": 3.0, "lr": 0.1}, {"step": 2, "loss": None, "lr": None}, {"step": 3, "loss": 1.0}]
    assert nan_of(opened(tmp_path, "\n".join(map(json.dumps, lines))), "loss") == []


def test_an_evaluation_on_a_line_of_its_own_leaves_the_losses_cells_empty(tmp_path: Path) -> None:
    """As pandas writes the Trainer's log_history."""
    table = "step,loss,lr,eval_loss\n10,3.0,0.1,\n10,,,3.5\n15,,,3.2\n20,2.0,0.1,\n20,,,2.5\n"
    table += "".join(f"{step},1.0,0.1,\n{step},,,1.5\n" for step in (30, 40, 50))
    run = opened(tmp_path, table)
    assert nan_of(run, "loss") == nan_of(run, "lr") == nan_of(run, "eval_loss") == []
    assert list(points(run, "eval_loss")) == [10, 15, 20, 30, 40, 50]


MEGATRON_LINE = (
    " iteration {step:8d}/     200 | learning rate: 1.000000E-06 |{loss} loss scale: 1.0 | grad norm: 2.5 |"
    " number of skipped iterations: {skipped:3d} | number of nan iterations: {nan:3d} |\n"
)


@pytest.mark.parametrize(
    ("skipped", "nan", "lost"),
    [(0, 0, True), (9, 0, True), (10, 0, False), (10, 1, True)],
)
def test_megatron_log_missing_loss_is_nan(skipped: int, nan: int, lost: bool, tmp_path: Path) -> None:
    lines = [
        MEGATRON_LINE.format(step=10, loss=" lm loss: 2.500000E+00 |", skipped=0, nan=0),
        MEGATRON_LINE.format(step=20, loss="", skipped=skipped, nan=nan),
    ]
    found = points(opened(tmp_path, "".join(lines)), "loss")
    assert list(found) == [10, 20] if lost else [10]
    assert math.isnan(found.get(20, math.nan))


def test_a_loss_that_megatron_never_prints_is_nan_where_the_model_has_no_other(tmp_path: Path) -> None:
    line = {"skipped": 0, "nan": 0}
    never = "".join(MEGATRON_LINE.format(step=step, loss="", **line) for step in (10, 20))
    assert np.isnan(opened(tmp_path, never).curves["loss"].values).all()
    other = "".join(MEGATRON_LINE.format(step=step, loss=" sop loss: 1.5 |", **line) for step in (10, 20))
    assert "loss" not in opened(tmp_path, other).curves
