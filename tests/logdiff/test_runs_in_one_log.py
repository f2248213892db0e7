"""A log of several processes, ranks, runs or panels: which numbers belong together, and which are compared."""

import json
import math
from pathlib import Path

import pytest
from console_lines import COUNTED, losses, opened, points, trainer

from conformance.core.errors import UsageError
from reports.logdiff.command import compare_sides
from reports.logdiff.output import Comparisons
from reports.logdiff.readers import read_log, read_text
from reports.logdiff.run import run_of


def test_epochs_that_go_back_are_a_resume() -> None:
    text = "".join(trainer(step) for step in [*range(1, 26), *range(21, 31)])
    run = opened(text)
    assert points(run) == losses(range(1, 31))
    assert run.resumed == (21,)


def test_rounded_epochs_that_repeat_are_no_resume() -> None:
    run = opened("".join(trainer(step, total=300) for step in range(1, 61)))
    assert points(run) == losses(range(1, 61))
    assert run.notes == (COUNTED,)


def test_lines_printed_by_two_processes_count_once() -> None:
    run = opened("".join(2 * trainer(step) for step in range(1, 31)))
    assert points(run) == losses(range(1, 31))
    assert set(run.notes) == {COUNTED, "2 processes log each step: 30 lines that repeat others were merged"}


@pytest.mark.parametrize("named", [True, False])
def test_losses_of_ranks_are_averaged_and_kept(named: bool) -> None:
    lines = [
        f"{f'[rank{rank}]:' if named else ''}step: {step}  loss:  {step + rank}.5  grad_norm:  0.5\n"
        for step in range(1, 9)
        for rank in ((0, 1, 2, 3) if named or step % 2 else (3, 2, 1, 0))
    ]
    if named:
        lines[3], lines[4] = lines[4], lines[3]  # a rank is late
    run = opened("".join(lines))
    assert points(run) == {step: step + 2.0 for step in range(1, 9)}
    assert run.resumed == ()
    who = "4 processes log each step and" if named else "4 lines of each step, of micro-batches or processes,"
    assert run.notes == (f"{who} differ in loss at 8 of 8 steps: their means are compared",)
    own = {name: points(run, name) for name in run.curves if name not in ("loss", "grad_norm")}
    assert own == {
        f"loss of rank {rank}": {step: step + rank + 0.5 for step in range(1, 9)} for rank in range(4) if named
    }


FORMS_OF_RANKS = ("[rank{0}]:step: {1}  loss:  {2}\n", '{{"step": {1}, "rank": {0}, "loss": {2}}}\n')


@pytest.mark.parametrize("form", FORMS_OF_RANKS)
@pytest.mark.parametrize("wrong", [1, None])
def test_ranks_are_compared_one_by_one(form: str, wrong: int | None, tmp_path: Path) -> None:
    for name in "ab":
        lines = [
            form.format(rank, step, (2 + rank + 1 / step) * (1.1 if name == "b" and rank == wrong else 1))
            for step in range(1, 9)
            for rank in range(4)
        ]
        (tmp_path / name).write_text("".join(lines), encoding="utf-8")
    found = compare_sides([[str(tmp_path / name)] for name in "ab"])
    assert isinstance(found, Comparisons)
    (pair,) = found.pairs
    assert [one.name for one in pair.shown] == ["loss", *([] if wrong is None else [f"loss of rank {wrong}"])]
    assert pair.differs == (wrong is not None)
    assert "4 curves of single ranks compared as well" in found.text()
    assert "no table knows" not in found.text()


def test_logs_of_bars_are_no_panels(tmp_path: Path) -> None:
    bars = [f"{n}/3 [00:01<01:00, 1s/it, gpt_loss=2.{n}]" for n in (1, 2, 3)]
    for name in "ab":
        (tmp_path / name).write_text("\r".join(f" 1%| | {one}" for one in bars), encoding="utf-8", newline="")
    assert not compare_sides([[str(tmp_path / name)] for name in "ab"]).differs


def test_a_log_that_begins_again_holds_runs(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rows = [{"step": step, "loss": factor / step} for factor in (1, 2) for step in range(1, 9)]
    log.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert points(run_of(read_log(f"{log}#2"), name="2")) == {step: 2 / step for step in range(1, 9)}
    assert compare_sides([[str(log)]]).differs
    with pytest.raises(UsageError, match=r"begins again at its first step 1: .* name one: .*log.jsonl#1 or .*l#2\. A"):
        compare_sides([[f"{log}#1"], [str(log)]])
    with pytest.raises(UsageError, match="holds 2 runs and none called '3'"):
        read_log(f"{log}#3")


def test_a_resumed_run_whose_counter_began_again_is_put_on_its_steps(tmp_path: Path) -> None:
    resumed, whole, norms = (tmp_path / name for name in ("resumed.jsonl", "whole.jsonl", "norms.jsonl"))
    rows = [{"step": step, "loss": 5 / step} for step in range(1, 31)]
    whole.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    again = [*rows[:12], *({**row, "step": row["step"] - 12} for row in rows[12:])]
    resumed.write_text("\n".join(map(json.dumps, again)), encoding="utf-8")
    with pytest.raises(UsageError, match=r"A resumed run whose counter began again after step 12 is .*d.jsonl#2@12"):
        read_log(str(resumed))
    assert points(run_of(read_log(f"{resumed}#2@12"), name="2")) == {step: 5 / step for step in range(13, 31)}
    assert compare_sides([[str(whole)], [f"{resumed}#2"]]).differs
    found = compare_sides([[str(whole)], [f"{resumed}#2@12"]])
    assert found.comparable
    assert not found.differs
    norms.write_text('{"step": 1, "grad_norm": 0.5}', encoding="utf-8")
    run = run_of(read_log(f"{norms}@29+{norms}@7+{whole}"), name="joined")  # each file has its own
    assert points(run, "grad_norm") == {8: 0.5, 30: 0.5}
    (tmp_path / "log@7").write_text(whole.read_text(encoding="utf-8"), encoding="utf-8")
    assert points(run_of(read_log(str(tmp_path / "log@7")), name="a file")) == {
        row["step"]: row["loss"] for row in rows
    }


def test_panels_of_one_pair_are_one_comparison(tmp_path: Path) -> None:
    names = {"loss": "train/loss", "norm": "train/grad_norm"}
    for name, own in names.items():
        runs = ("run-a", "run-b") if name == "loss" else ("run-b", "run-a")
        text = ",".join(["Step", *(f"{run} - {own}" for run in runs)])
        text += "".join(
            f"\n{step}," + ",".join("2.5" if run == "run-a" or name == "loss" else "5.0" for run in runs)
            for step in range(9)
        )
        (tmp_path / f"{name}.csv").write_text(text, encoding="utf-8")
    found = compare_sides([[str(tmp_path / f"{name}.csv")] for name in names])
    assert isinstance(found, Comparisons)
    (pair,) = found.pairs
    assert [side.name for side in pair.sides] == ["run-a", "run-b"]
    assert {one.name: bool(one.first) for one in pair.metrics} == {"loss": False, "grad_norm": True}


def test_nanogpt_counts_steps_as_iter_num() -> None:
    run = opened('{"iter_num": 10, "loss": 2.5}\n{"iter_num": 20, "loss": 2.25}\n')
    assert points(run) == {10: 2.5, 20: 2.25}
    assert run.notes == ()


def test_a_rank_without_a_number_makes_the_mean_nan() -> None:
    run = opened("[rank0]:step: 1  loss:  2.5\n[rank1]:step: 1  loss:  nan\n")
    assert math.isnan(points(run)[1])


def test_a_restart_under_ray_is_a_resume() -> None:
    lines = [
        f"(Task pid={pid}) step:{step} - train/loss:{pid}.0\n"
        for pid, steps in ((1, range(1, 6)), (2, range(4, 9)))
        for step in steps
    ]
    run = opened("".join(lines))
    assert points(run) == {step: 1.0 if step < 4 else 2.0 for step in range(1, 9)}
    assert run.resumed == (4,)


def test_many_resumes_are_told_in_short() -> None:
    lines = [{"step": step, "loss": 1.0} for first in range(1, 40, 4) for step in range(first, first + 6)]
    (note,) = opened("\n".join(map(json.dumps, lines))).notes
    assert "beginning at step 5, 9, 13, 17, 21 and 4 more (a resume)" in note


def test_columns_of_two_runs_are_read_by_name(tmp_path: Path) -> None:
    panel = tmp_path / "swan.csv"
    panel.write_text("step,run-a-train/loss,run-b-train/loss\n1,2.5,3.5\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"holds 2 runs; name one: .*#run-a or .*#run-b"):
        read_log(str(panel))
    assert points(run_of(read_log(f"{panel}#run-b"), name="b")) == {1: 3.5}


@pytest.mark.parametrize("between", ["-", " - "])
def test_the_runs_of_one_panel_are_compared(between: str, tmp_path: Path) -> None:
    panel = tmp_path / "panel.csv"
    columns = ",".join(f"run-{letter}{between}train/loss" for letter in "abc")
    panel.write_text(f"step,{columns}\n" + "".join(f"{n},2.5123,2.5124,3.5\n" for n in range(5)), encoding="utf-8")
    found = compare_sides([[str(panel)]])
    assert isinstance(found, Comparisons)
    assert [one.differs for one in found.pairs] == [False, True]
    panel.write_text("step,loss\n1,2.5\n", encoding="utf-8")
    with pytest.raises(UsageError, match="needs two logs or more"):
        compare_sides([[str(panel)]])


def test_tables_of_one_metric_are_named_by_their_file() -> None:
    table = "Wall time,Step,Value\n1.5,1,2.5\n"
    assert list(run_of(read_text(table, name="run-x-tag-train_loss.csv"), name="x").curves) == ["loss"]
    assert list(run_of(read_text("1700000000001 0.5 1\n", name="mlruns/0/metrics/grad_norm"), name="x").curves) == [
        "grad_norm"
    ]
