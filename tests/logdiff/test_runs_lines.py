"""Lines of any console are read: prefixes, bars, several processes, steps that no line names, and hostile input."""

import gzip
import json
import math
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from conformance.core.errors import UsageError
from reports.logdiff.command import compare_sides
from reports.logdiff.lines import FORMATS, Format
from reports.logdiff.metrics import canonical
from reports.logdiff.output import Comparisons
from reports.logdiff.readers import read_log, read_text
from reports.logdiff.run import Run, run_of

IN_SAMPLES = {
    "loss": 2.5,
    "policy_loss": -0.25,
    "grad_norm": 0.5,
    "lr": 1e-6,
    "reward": 0.5,
    "eval_loss": 2.25,
    "entropy": 0.25,
    "value": 2.5,
    "total_loss": 2.5,
}
FIRST_STEPS = {
    "Hugging Face trainer_state.json": 10,
    "ms-swift": 10,
    "Megatron console": 10,
    "ms-swift console": 10,
    "slime console": 0,
    "nanoGPT console": 0,
}
COUNTED = "the log counts no steps: its lines are counted instead (1, 2, 3, ...)"


def opened(text: str) -> Run:
    return run_of(read_text(text, name="log"), name="log")


def points(run: Run, metric: str = "loss") -> dict[float, float]:
    curve = run.curves[metric]
    return dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_each_sample_of_the_documentation_is_read(form: Format) -> None:
    run = opened(form.sample)
    assert run.format == form.name
    assert "loss" in run.averaged if form.averaged else not run.averaged
    assert {name: curve.values[0] for name, curve in run.curves.items()} == {
        name: IN_SAMPLES[name] for name in run.curves
    }
    assert {curve.steps[0] for curve in run.curves.values()} == {FIRST_STEPS.get(form.name, 1)}
    doubled = form.sample.replace("2.5", "5.0").replace("-0.25", "-0.5")
    main = next(name for name in ("loss", "policy_loss", "value") if name in run.curves)
    assert opened(doubled).curves[main].values[0] == 2 * IN_SAMPLES[main]


PREFIXES = (
    "\x1b[36m(RayTrainWorker pid=4711, ip=10.0.0.1)\x1b[0m ",
    "(Worker rank=3, pid=12) ",
    "[default0]:",
    "[rank0]: ",
    "0: ",
    " 12: ",
    "worker-0: ",
    "node1.cluster.local: ",
    "trainer-1  | ",
    "[pod/train-0/main] ",
    "2026-01-05T10:00:01.123Z ",
    "2026-01-05T10:00:01.123456789Z stdout F ",
    "2026-01-05 10:00:01,123 - root - INFO - ",
    "[2026-01-05 10:00:01][INFO] ",
    "01/05 10:00:01 - mmengine - INFO - ",
    "[INFO|trainer.py:2409] 2026-01-05 10:00:01,123 >> ",
    "I0105 10:00:01.123456 1234 train.py:10] ",
    "worker-0: [default3]:[2026-01-05 10:00:01,123] [INFO] [logging.py:128:log_dist] [Rank 3] ",
    "\x1b[2K",
)
BODIES = (
    "{{'loss': {0}, 'grad_norm': 0.5, 'epoch': {1}}}",
    "step: {1}  loss:  {0}  grad_norm:  0.5",
    "iter {1}: loss {0}, grad_norm 0.5",
    "step:{1} - train/loss:{0} - train/grad_norm:0.5",
    'metrics: {{"step": {1}, "loss": {0}, "grad_norm": 0.5}}',
)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_prefixes_change_nothing(prefix: str, body: str, end: str) -> None:
    text = "".join(prefix + body.format(loss, step) + end for step, loss in enumerate((3.25, 2.5, 1.75), 1))
    run = opened(text)
    assert points(run) == {1: 3.25, 2: 2.5, 3: 1.75}
    assert set(points(run, "grad_norm").values()) == {0.5}


def trainer(step: int, *, every: int = 1, total: int = 30, loss: float | None = None) -> str:
    """A line of the Trainer, whose epoch is rounded to two digits."""
    loss = 3 - step / 50 if loss is None else loss
    return f"{{'loss': {loss}, 'learning_rate': {1e-6 * step}, 'epoch': {round(step / total, 2)}}}\n"


def losses(steps: Sequence[int]) -> dict[float, float]:
    return {step: 3 - step / 50 for step in steps}


def bar(done: int, total: int = 3000) -> str:
    return f"\r {100 * done // total}%|##   | {done}/{total} [00:10<05:00,  1.00it/s]"


TENS = range(10, 110, 10)


@pytest.mark.parametrize(
    "text",
    [
        "".join(bar(step) + "\n" + trainer(step, total=3000) for step in TENS),
        "".join(trainer(step, total=3000) + bar(step) for step in TENS),
        "".join(bar(step - 3) + "\n" + trainer(step, total=3000) + bar(step) for step in TENS),
        "".join(bar(step) * (step % 30 == 0) + trainer(step, total=3000) for step in TENS),
        "".join(bar(7, 99) + bar(step) + trainer(step, total=3000) for step in TENS),  # of another loop
    ],
    ids=["before", "behind", "stale", "sometimes", "evaluation"],
)
def test_a_bar_gives_the_steps(text: str) -> None:
    run = opened(text)
    assert points(run) == losses(TENS)
    assert COUNTED not in run.notes


def test_a_bar_that_starts_later_gives_its_steps() -> None:
    text = "".join(bar(step) + "\n" + trainer(step, total=3000) for step in range(510, 600, 10))
    assert points(opened(text)) == losses(range(510, 600, 10))


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
    note = "4 processes log each step and differ in loss at 8 of 8 steps: their means are compared"
    assert run.notes == (note,)
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


def test_lines_of_a_second_format_are_counted() -> None:
    deepspeed = (
        "[2026-01-05 10:00:00,123] [INFO] [logging.py:128:log_dist] [Rank 0] step={0}, skipped=0, lr=[{0}e-06]\n"
    )
    between = [trainer(step) + (deepspeed.format(7 * step) if step % 10 == 0 else "") for step in range(1, 31)]
    run = opened("".join(between))
    assert points(run) == losses(range(1, 31))
    assert run.notes == ("3 lines of another format were not read", COUNTED)
    without = "epoch done, loss: 2.5, reward: 0.5\n{'loss': 0.5, 'grad_norm': 1.0}\n"
    run = opened("step: 1  loss: 2.5\n" + without + "step: 2  loss: 2.5\n")
    assert points(run) == {1: 2.5, 2: 2.5}
    assert run.notes == ("2 lines of another format were not read, first line 2",)


def test_logs_of_bars_are_no_panels(tmp_path: Path) -> None:
    bars = [f"{n}/3 [00:01<01:00, 1s/it, gpt_loss=2.{n}]" for n in (1, 2, 3)]
    for name in "ab":
        (tmp_path / name).write_text("\r".join(f" 1%| | {one}" for one in bars), encoding="utf-8", newline="")
    assert not compare_sides([[str(tmp_path / name)] for name in "ab"]).differs


def test_a_console_may_begin_with_json() -> None:
    run = opened('{"model": "llama", "lr": 1e-5, "train": {"loss": 1}}\n' + "".join(map(trainer, range(1, 31))))
    assert points(run) == losses(range(1, 31))


def test_a_log_that_begins_again_holds_runs(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    rows = [{"step": step, "loss": factor / step} for factor in (1, 2) for step in range(1, 9)]
    log.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert points(run_of(read_log(f"{log}#2"), name="2")) == {step: 2 / step for step in range(1, 9)}
    assert f"its 2 runs are {log}#1 and {log}#2" in run_of(read_log(str(log)), name="log").notes[0]
    assert compare_sides([[str(log)]]).differs
    with pytest.raises(UsageError, match="holds 2 runs and none called '3'"):
        read_log(f"{log}#3")


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


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0c", "\x1e"])
def test_only_newlines_end_lines(separator: str) -> None:
    lines = [json.dumps({"step": s, "loss": s / 2, "text": f"a{separator}b"}, ensure_ascii=False) for s in (1, 2)]
    run = opened("\n".join(lines))
    assert run.format == "JSON lines"
    assert points(run) == {1: 0.5, 2: 1.0}
    assert run.notes == ()


def test_numbers_in_quotes_are_numbers() -> None:
    run = opened('{"step": "1", "loss": "2.5000", "learning_rate": "1e-05", "note": "x"}\n{"step": "2", "loss": "nan"}')
    assert points(run)[1] == 2.5
    assert math.isnan(points(run)[2])
    assert points(run, "lr") == {1: 1e-5}


def test_epochs_of_a_bar_add_up() -> None:
    lines = [
        f"Train step of epoch {e}:  1%| | {n}/3 [00:01<01:00, 1s/it, gpt_loss={e}.{n}, lr=1e-6]"
        for e in (0, 1)
        for n in (1, 2, 3)
    ]
    assert points(opened("\r".join(lines))) == {1: 0.1, 2: 0.2, 3: 0.3, 4: 1.1, 5: 1.2, 6: 1.3}
    assert points(opened("\r".join(2 * line for line in lines))) == points(opened("\r".join(lines)))


@pytest.mark.parametrize(
    ("own", "metric"),
    [
        ("Grad. Norm", "grad_norm"),
        ("Training Loss", "loss"),
        ("train/reduced_train_loss", "loss"),
        ("mtp_loss", "mtp_loss"),
        ("optim/total_grad_norm", "optim/total_grad_norm"),
        ("rewards/format", "rewards/format"),
        ("lr_embedding", "lr_embedding"),
        ("loss_scale", None),
        ("timing_s/reward", None),
        ("critic/score/max", None),
        ("lossy_count", None),
        ("normalizer", None),
        ("tokens_per_second", None),
        ("x" * 1000 + "loss", None),
    ],
)
def test_names_of_losses_norms_rewards_and_rates(own: str, metric: str | None) -> None:
    assert (place.metric if (place := canonical(own)) else None) == metric


@pytest.mark.parametrize(
    "junk", ["Saved checkpoint at step 2", "step 2 took 3.5 s", "{'lr': 0.5, 'batch': 4}", "epoch 2"]
)
def test_lines_without_numbers_of_a_step_are_no_rows(junk: str) -> None:
    assert points(opened(f"{junk}\nstep: 1  loss: 2.5\n{junk}\nstep: 2  loss: 2.0\n")) == {1: 2.5, 2: 2.0}


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


@pytest.mark.parametrize(("rate", "differs"), [("4e-4", False), ("6e-4", True)])
def test_a_printed_zero_is_any_smaller_number(rate: str, differs: bool, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("".join(f"step:{n} - actor/lr:0.000 - actor/pg_loss:0.5\n" for n in range(9)))
    (tmp_path / "b").write_text("".join(f"step:{n} - actor/lr:{rate} - actor/pg_loss:0.5\n" for n in range(9)))
    for names in (("a", "b"), ("b", "a")):
        assert compare_sides([[str(tmp_path / name)] for name in names]).differs == differs


def test_tables_of_one_metric_are_named_by_their_file() -> None:
    table = "Wall time,Step,Value\n1.5,1,2.5\n"
    assert list(run_of(read_text(table, name="run-x-tag-train_loss.csv"), name="x").curves) == ["loss"]
    assert list(run_of(read_text("1700000000001 0.5 1\n", name="mlruns/0/metrics/grad_norm"), name="x").curves) == [
        "grad_norm"
    ]


@pytest.mark.parametrize("value", ["oops", [1, 2], True, ""])
def test_a_loss_that_is_no_number_is_told_with_its_line(value: object) -> None:
    rows = [{"step": step, "lr": 1e-3, "loss": value if step in (3, 5) else 1 / step} for step in range(1, 9)]
    run = opened("\n".join(map(json.dumps, rows)))
    assert list(points(run)) == [1, 2, 4, 6, 7, 8]
    assert run.notes == (f"loss is no number in 2 lines, first {value!r} in line 3",)


def test_a_run_of_mlflow_is_a_folder_of_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics" / "eval").mkdir(parents=True)
    for own, factor in (("loss", 1), ("eval/loss", 2)):
        lines = [f"17676072000{step:02d} {factor / step} {step}" for step in range(1, 9)]
        (tmp_path / "metrics" / own).write_text("\n".join(lines), encoding="utf-8")
    run = run_of(read_log(str(tmp_path)), name="run")
    assert points(run) == {step: 1 / step for step in range(1, 9)}
    assert points(run, "eval_loss") == {step: 2 / step for step in range(1, 9)}
    assert run.notes == ()
    (tmp_path / "metrics" / "lr").write_text("1e-3\n", encoding="utf-8")
    with pytest.raises(UsageError, match="lr is no metric of MLflow"):
        read_log(str(tmp_path))


def test_a_bar_of_torchtune_counts_steps_over_epochs() -> None:
    bars = [f"{1 + step // 5}|{step}|Loss: {1 / step}: 20%|##| {step % 5 + 1}/5 [00:01<00:02]" for step in range(1, 12)]
    assert points(opened("\r".join(bars))) == {step: 1 / step for step in range(1, 12)}


def test_a_table_in_markdown_is_read() -> None:
    assert points(opened("| Step | Training Loss |\n|---|:--|\n| 1 | 2.5 |\n| 2 | No log |\n")) == {1: 2.5}


def test_files_of_other_encodings(tmp_path: Path) -> None:
    text = '{"step": 1, "loss": 2.5}\n'
    (tmp_path / "wide").write_bytes(text.encode("utf-16"))
    assert points(run_of(read_log(str(tmp_path / "wide")), name="wide")) == {1: 2.5}
    (tmp_path / "log.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(UsageError, match="is packed by gzip; unpack it first: gunzip"):
        read_log(str(tmp_path / "log.gz"))


def test_wandb_runs_are_read_by_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    history = [{"_step": 0, "_timestamp": 1.0, "train/loss": 2.5, "train/global_step": 1}]

    class Api:
        def run(self, path: str) -> object:
            if path != "us/project/abc":
                raise ValueError("not found")
            return types.SimpleNamespace(scan_history=lambda: iter(history))

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Api=Api))
    assert points(run_of(read_log("wandb:us/project/abc"), name="w")) == {1: 2.5}
    with pytest.raises(UsageError, match="wandb:x cannot be read: 'not found'; the form is wandb:entity/project/run"):
        read_log("wandb:x")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="pip install wandb"):
        read_log("wandb:us/project/abc")


ONES = "1" * 20_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"ok\n iteration {ONES[:400]}/ 5 | lm loss: 1.0 |", "log, line 2: a step of 400 digits"),
        (f"step:{ONES[:4500]} - actor/pg_loss:1.0", "log, line 1: a step of 4500 digits"),
        (f"step,loss\n1,2.5\n2,{7 * ONES}", "log, line 3: field larger than field limit"),
        ('{"step": 1e300, "loss": 1.0}', "is no training log"),
        ('{"step": -3, "loss": 1.0}', "is no training log"),
        ('{"step": 1, "loss": [1.0, 2.0], "grad_norm": {}, "lr": true}', "no metric that can be compared"),
        ("{'loss': " + ONES + "x}", "is no training log"),
        ("step:  1  a: 1 " + "a" * 32_000, "is no training log"),
        ("step: 1 " + "a " * 16_000 + "loss", "is no training log"),
        ("(" * 30_000, "is no training log"),
        ("[a" * 20_000, "is no training log"),
        ("a-" * 20_000 + ":", "is no training log"),
        ("| 1/2 [" * 5_000, "is no training log"),
        ("step:1\n" * 5_000, "is no training log"),
        ("\x00\xff" * 1000, "is no training log"),
        ("{" * 100_000, "is no training log"),
        ('{"step": 1, "a": ' * 3_000 + "1" + "}" * 3_000, "is no training log"),
    ],
)
def test_hostile_logs_are_refused_soon(text: str, message: str) -> None:
    begun = time.monotonic()
    with pytest.raises(UsageError, match=message):
        opened(text)
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize("epoch", ["nan", "inf", "-inf", "1e400", "0"])
@pytest.mark.parametrize("first", [True, False])
def test_epochs_that_are_no_numbers_count_lines(epoch: str, first: bool) -> None:
    lines = [
        f"{{'loss': '{loss}', 'epoch': '{one}'}}\n"
        for loss, one in zip((2.5, 1.5), (epoch, "1.0") if first else ("1.0", epoch), strict=True)
    ]
    assert set(points(opened("".join(lines) + bar(2, 2))).values()) <= {2.5, 1.5}


def test_a_log_that_is_cut_anywhere_is_read_or_refused() -> None:
    for form in FORMATS:
        whole = form.sample + "\n" + form.sample
        for end in range(1, len(whole), 3):
            try:
                run = opened(whole[:end])
            except UsageError:
                continue
            assert all(np.isfinite(curve.steps).all() for curve in run.curves.values())
