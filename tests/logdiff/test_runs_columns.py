"""Columns of logs for ``parity diff``: which are read, compared, refused or counted, and what NaN and nothing are."""

import json
import math
from pathlib import Path

import pytest
from log_diff import constant_columns, diff, write

from conformance.core.errors import UsageError


def test_columns_of_one_log_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trl = {"loss": 2.5, "sampling/sampling_logp_difference/mean": 0.01, "step_time": 1.0, "num_tokens": 5}
    verl = {"loss": 2.5, **{f"timing_s/part{i}": 1.0 for i in range(6)}, "training/rollout_probs_diff_mean": 0.01}
    for name, columns in (("trl.jsonl", trl), ("verl.jsonl", verl)):
        (tmp_path / name).write_text(json.dumps({"step": 1, **columns}) + "\n")
    assert diff(tmp_path / "trl.jsonl", tmp_path / "verl.jsonl") == 0
    told = capsys.readouterr().out
    alone = "alone, no loss, norm, reward or rate:"
    assert f"2 columns of trl.jsonl {alone} sampling/sampling_logp_difference/mean, step_time" in told
    assert f"7 columns of verl.jsonl {alone} training/rollout_probs_diff_mean, timing_s/part0, " in told


@pytest.mark.parametrize("text", ["", "\n \n", "\ufeff"])
def test_empty_log_is_called_empty(text: str, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"b.jsonl is empty; a log has lines such as"):
        diff(write(tmp_path, "a.jsonl"), tmp_path / "b.jsonl")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("step,loss,loss\n1,2.5,2.6\n2,2.4,2.5\n", "has 2 columns called loss; rename or remove all but one"),
        (
            '{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.4, "loss": 4.8}\n',
            "line 2: loss stands twice in one object, as 2.4 and as 4.8; rename or remove one of both",
        ),
        (
            "".join(f'{{"my_step": {step}, "loss": {2.5 - step}}}\n' for step in range(3)),
            "my_step looks like one; rename it step",
        ),
    ],
)
def test_columns_that_may_be_meant_otherwise_are_refused(content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=told):
        diff(tmp_path / "a", write(tmp_path, "b.jsonl"))


def test_the_same_number_twice_is_no_contradiction(tmp_path: Path) -> None:
    a = write(tmp_path, "a.jsonl")
    twice = [
        line.replace("}", f', "loss": {json.loads(line)["loss"]!r}}}') for line in Path(a).read_text().splitlines()
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(twice), encoding="utf-8")
    assert diff(a, tmp_path / "b.jsonl") == 0


@pytest.mark.parametrize(
    "counter", [{"train_step": None}, {"optimizer_step": None}, {"step": 10, "global_step": None}, {"update": None}]
)
def test_the_usual_counters_of_steps_are_read(
    counter: dict[str, int | None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step beside a global step begins again in each epoch."""
    a = write(tmp_path, "a.jsonl")
    rows = [json.loads(line) for line in Path(a).read_text().splitlines()][10:]
    for row in rows:
        step = row.pop("step")
        row |= {name: step if epoch is None else step % epoch for name, epoch in counter.items()}
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert diff(a, tmp_path / "b.jsonl") == 0
    assert "b.jsonl (JSON lines, steps 11 to 80)" in capsys.readouterr().out


def test_decimal_commas_between_semicolons_are_read_and_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path, "a.jsonl")
    rows = [json.loads(line) for line in Path(a).read_text().splitlines()]
    lines = [f"{row['step']};{row['loss']:.5f};{row['grad_norm']:.4f}".replace(".", ",") for row in rows]
    (tmp_path / "b.csv").write_text("\n".join(["step;loss;grad_norm", *lines]), encoding="utf-8")
    assert diff(a, tmp_path / "b.csv") == 0
    note = f"a comma is a decimal sign: {lines[0].split(';')[1]} is a number"
    assert note in capsys.readouterr().out


def test_empty_cells_of_a_table_are_no_overflow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path, "a.jsonl")
    rows = [json.loads(line) for line in Path(a).read_text().splitlines()]
    for name, lost, code in (("b.csv", range(7, 80, 7), 0), ("c.csv", range(60, 81), 1)):
        lines = [f"{row['step']},{'' if row['step'] in lost else row['loss']},{row['grad_norm']}" for row in rows]
        (tmp_path / name).write_text("\n".join(["step,loss,grad_norm", *lines]), encoding="utf-8")
        assert diff(a, tmp_path / name) == code
        told = capsys.readouterr().out
        assert ("loss has no number at 11 steps, but later ones; not compared there" in told) == (not code)
        assert ("not finite from step 60 on, to the end" in told) == bool(code)


def test_a_value_that_is_not_finite_on_one_side_parts_the_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff(write(tmp_path, "a.jsonl"), write(tmp_path, "b.jsonl", s50=math.nan)) == 1
    told = capsys.readouterr().out
    assert "diverge at step 50: loss" in told
    assert "loss of b.jsonl (side B) is not finite at 1 position, first at 50" in told


def test_unknown_columns_are_compared_or_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = {"grad_norm": 1.0, "time": 1.0, "mfu": 0.5, "memory__gib": 3.0, "perf__a": 1.0, "perf__b": 1.0, "x": 1.0}
    a = constant_columns(tmp_path, "a.jsonl", mtp_loss=2.00001, aux__z_norm=1.0, **same)
    b = constant_columns(tmp_path, "b.jsonl", mtp_loss=4.00002, **same)
    assert diff(a, b) == 1
    said = capsys.readouterr().out
    assert "diverge at step 1: mtp_loss +100% where ±5% is allowed." in said
    assert "- mtp_loss: no table knows this name; compared under it" in said
    assert "- not compared: aux/z_norm: not in every log, under names that no table knows" in said
    assert (
        "- not compared: 6 columns of every log, no loss, norm, reward or rate: time, mfu, memory/gib, perf/a, " in said
    )
    assert "perf/b and 1 more\n" in said
    assert diff(a, b, "--metric", "mtp_loss") == 1
    assert diff(a, b, "--metric", "grad_norm") == 0


@pytest.mark.parametrize("lacking", [{"loss", "lr", "tokens"}, {"grad_norm", "lr", "tokens"}, set()])
def test_nan_to_the_end_is_named(lacking: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        rows = [json.loads(line) for line in Path(write(tmp_path, name)).read_text(encoding="utf-8").splitlines()]
        rows = [{key: value for key, value in row.items() if key not in lacking} for row in rows]
        for row in rows[40:] if name == "b.jsonl" else []:
            row.update(dict.fromkeys(set(row) & {"loss", "grad_norm"}, math.nan))
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert diff(tmp_path / "a.jsonl", tmp_path / "b.jsonl") == 1
    said = capsys.readouterr().out
    assert "of side B is not finite from step 41 on, to the end" in said
    assert ("loss" in said) == ("loss" not in lacking)


def test_a_nan_that_is_written_as_null_parts_the_runs(tmp_path: Path) -> None:
    """As programs in JavaScript and pandas write it: json.dumps of Python writes NaN."""
    log = write(tmp_path, "a.jsonl")
    other = Path(write(tmp_path, "b.jsonl", s50=math.nan))
    other.write_text(other.read_text(encoding="utf-8").replace("NaN", "null"), encoding="utf-8")
    assert diff(log, other) == 1
    assert diff(other, log) == 1


def test_a_learning_rate_is_held_to_its_digits_and_that_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, other = write(tmp_path, "a.jsonl"), tmp_path / "b.jsonl"
    other.write_text(Path(log).read_text(encoding="utf-8").replace("0.001", "0.00102"), encoding="utf-8")
    assert diff(log, other) == 1
    told = capsys.readouterr().out
    assert "diverge at step 1: lr +2% where ±1.02e-4% is allowed." in told
    assert "±5% at every step; of lr, only digits that are not printed." in told
