"""Lines of any console are read: prefixes, bars, steps that no line names, and hostile input."""

import gzip
import json
import math
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from console_lines import COUNTED, losses, opened, points, trainer

from conformance.core.errors import UsageError
from reports.logdiff.command import compare_sides
from reports.logdiff.lines import FORMATS, Format, lines_of, read_lines
from reports.logdiff.metrics import canonical
from reports.logdiff.readers import read_log, read_text
from reports.logdiff.run import run_of

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


def test_a_console_may_begin_with_json() -> None:
    run = opened('{"model": "llama", "lr": 1e-5, "train": {"loss": 1}}\n' + "".join(map(trainer, range(1, 31))))
    assert points(run) == losses(range(1, 31))


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


@pytest.mark.parametrize(("rate", "differs"), [("4e-4", False), ("6e-4", True)])
def test_a_printed_zero_is_any_smaller_number(rate: str, differs: bool, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("".join(f"step:{n} - actor/lr:0.000 - actor/pg_loss:0.5\n" for n in range(9)))
    (tmp_path / "b").write_text("".join(f"step:{n} - actor/lr:{rate} - actor/pg_loss:0.5\n" for n in range(9)))
    for names in (("a", "b"), ("b", "a")):
        assert compare_sides([[str(tmp_path / name)] for name in names]).differs == differs


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


COSINE = [1e-3 * (1 + math.cos(math.pi * step / 31)) / 2 for step in range(1, 31)]
VERL = "step:{step} - train/loss:2.5{step} - train/"


def rates(folder: Path, line: str, factor: float = 1.0) -> bool:
    """Whether rates that a console prints differ from exact ones; factor: of the printed ones."""
    exact = [json.dumps({"step": step, "loss": float(f"2.5{step}"), "lr": rate}) for step, rate in enumerate(COSINE)]
    lines = [
        line.format(step=step, rate=rate, large=1e3 * rate, short=round(1e3 * rate, 5))
        for step, rate in enumerate(factor * rate for rate in COSINE)
    ]
    (folder / "exact.jsonl").write_text("\n".join(exact))
    (folder / "console.log").write_text("\n".join(lines))
    found = compare_sides([[str(folder / "exact.jsonl")], [str(folder / "console.log")]])
    assert found.comparable
    return found.differs


@pytest.mark.parametrize(
    "line",
    [
        VERL + "lr(1e-3):{large:.3f}",
        VERL + "lr(1e-3):{large:.6f}",
        VERL + "lr:{rate:.6f}",
        VERL + "lr:{rate:.3e}",
        VERL + "lr:{rate}",
        VERL + "lr(1e-3):{large}",
        VERL + "lr(1e-3):{short}",
        "{{'loss': '2.5{step}', 'learning_rate': '{rate:.5f}', 'step': '{step}'}}",
    ],
)
def test_rate_as_it_is_printed_equals_the_exact_one(line: str, tmp_path: Path) -> None:
    assert not rates(tmp_path, line)
    assert rates(tmp_path, line, factor=1.02)


@pytest.mark.parametrize(
    ("text", "value", "half_unit"),
    [
        ("12%", 0.12, 0.0),
        ("12.5 %", 0.125, 0.0005),
        ("1.20k", 1200.0, 5.0),
        ("1.25M", 1.25e6, 5e3),
        ("1,234.50", 1234.5, 0.005),
        ("2.5e-3", 2.5e-3, 0.0),
        ("10.00GB", 10.0, 0.005),
        ("3.50ms", 3.5, 0.005),
    ],
)
def test_suffix_of_a_number_scales_it_and_its_last_decimal(text: str, value: float, half_unit: float) -> None:
    for line in (f"step: 1  loss: {text}  kl: 0.5", f"step 1 | loss={text} kl=0.5", f"step:1 - loss:{text} - kl:0.5"):
        found = read_text(line, name="a.log").rows[0].values["loss"]
        assert found == value
        assert getattr(found, "half_unit", 0.0) == half_unit


def test_tokens_in_thousands_and_in_numbers_are_the_same() -> None:
    texts = ["step: 1  loss: 2.5  tokens: 900", "step: 2  loss: 2.25  tokens: 1.8k", "step: 3  loss: 2.0  tokens: 2.7K"]
    run = opened("\n".join(texts))
    assert run.tokens is not None
    assert list(run.tokens.values) == [900.0, 1800.0, 2700.0]


@pytest.mark.parametrize(
    ("line", "own"),
    [
        (
            "iteration 10/ 20 | elapsed time per iteration (ms): 512.3 | lm loss: 2.5 |",
            "elapsed time per iteration (ms)",
        ),
        ("steps: 10 loss: 2.5000 iter time (s): 1.234 samples/sec: 12.963", "iter time (s)"),
    ],
)
def test_a_name_keeps_its_words_before_a_unit(line: str, own: str) -> None:
    (row,), _ = read_lines(list(lines_of(line)), name="log")
    assert own in row.values
    assert [name for name in row.values if canonical(name)] in (["lm loss"], ["loss"])


def test_lines_of_deepspeed_that_name_rank_0_are_of_one_process() -> None:
    lines = [
        f"[2026-11-30 08:00:00,123] [INFO] [logging.py:128:log_dist] [Rank 0] step={step}, skipped=0, lr=[1e-05]\n"
        f"[2026-11-30 08:00:00,124] [INFO] [timer.py:258:stop] epoch=0/micro_step={step}/global_step={step}, Mem=1GB\n"
        f"{{'loss': {2.5 - step / 100}, 'grad_norm': 1.5, 'learning_rate': 1e-05, 'epoch': {step / 60:.2f}}}\n"
        for step in range(1, 9)
    ]
    run = run_of(read_text("".join(lines), name="log"), name="log")
    assert not [note for note in run.notes if "processes" in note]
    assert list(run.curves["loss"].steps) == list(range(1, 9))
