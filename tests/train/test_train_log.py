"""The log of a training, and who follows it."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import parity
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.spec.batch import Batch, Document, Row
from impl.interface.distributed import FileFailure
from impl.train.experience import rollout_numbers
from impl.train.generation import Response
from impl.train.logging import Progress, Reporter, RunLog, follow, open_log, read_log
from impl.train.loop import RENAMED, Speed, log_name
from reports.logdiff.readers import read_log as read_any_log

HEADER = {"options": {"backend": "fsdp2"}}


def write(path: Path, steps: range, *, done: int = 0, resumes: bool = False) -> None:
    with open_log(path, HEADER, done=done, resumes=resumes) as log:
        for step in steps:
            log.write(step, {"loss": step / 10})


def test_a_log_begins_with_what_was_asked_and_has_a_line_for_each_step(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    write(path, range(1, 4))
    header, lines = read_log(path)
    assert header == HEADER
    assert lines == [{"step": 1, "loss": 0.1}, {"step": 2, "loss": 0.2}, {"step": 3, "loss": 0.3}]


def test_a_log_goes_on_behind_the_checkpoint_and_no_step_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, range(1, 6))
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # a crash
    write(path, range(4, 8), done=3, resumes=True)
    assert [line["step"] for line in read_log(path)[1]] == [1, 2, 3, 4, 5, 6, 7]


def test_a_training_that_resumes_without_a_checkpoint_begins_its_log_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, range(0, 3))
    write(path, range(0, 2), resumes=True)
    assert [line["step"] for line in read_log(path)[1]] == [0, 1]
    assert len(read_log(tmp_path / "log.jsonl.before")[1]) == 3, "nothing is lost"


def test_the_log_of_another_training_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, range(1, 3))
    with pytest.raises(UsageError, match="is the log of another training"):
        write(path, range(1, 3))
    assert len(read_log(path)[1]) == 2


def test_numbers_that_are_not_finite_are_strings_and_unknown_ones_null(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with open_log(path, HEADER, done=0, resumes=False) as log:
        log.write(1, {"loss": float("nan"), "grad_norm": float("inf"), "mfu": None})
    assert json.loads(path.read_text().splitlines()[1]) == {"step": 1, "loss": "nan", "grad_norm": "inf", "mfu": None}


def test_result_has_last_losses_and_rewards() -> None:
    reporter = Reporter(log=None, followers=[], progress=Progress(steps=2, done=0, shown=True))
    assert reporter.result() == "nothing was left to train"
    for step, numbers in enumerate([{"actor/loss": 3.0, "critic/score/mean": 0.5}, {"actor/loss": 2.0}], start=1):
        reporter.step(step, numbers)
    assert reporter.result() == "actor/loss 2.0000  critic/score/mean 0.500"


def test_every_name_of_the_log_is_explained() -> None:
    table = (FIXTURES.parent / "docs" / "guides" / "training.md").read_text(encoding="utf-8").split("## The log")[1]
    explained = {name for row in table.split("\n## ")[0].splitlines() for name in re.findall("`(.+?)`", row[:200])}
    assert {log_name(key, group="actor") for key in RENAMED} <= explained
    assert Speed(models={}, peak=None).of(Batch(0, 8, (Row(0, (Document((1,), (False,)),)),)), 1.0).keys() <= explained


VERL = (
    "step:{step} - training/global_step:{step} - actor/pg_loss:{a} - actor/entropy:0.5 - actor/ppo_kl:0.125 - "
    "actor/kl_loss:{b} - actor/pg_clipfrac:0.25 - actor/grad_norm:{b} - actor/lr:1e-06 - critic/vf_loss:{a} - "
    "critic/score/mean:{a} - critic/rewards/mean:{a} - response_length/mean:{b} - timing_s/step:9.5"
)
TRL = {"loss": 1, "grad_norm": 0, "learning_rate": 2, "reward": 0, "kl": 0, "completions/mean_length": 0}


def test_log_is_compared_with_verls_and_trls(tmp_path: Path) -> None:
    """Without a translation of names: each metric of theirs is found in ours, with its value."""
    ours, verl, trl = (tmp_path / name for name in ("ours.jsonl", "verl.log", "trainer_state.json"))
    observed = ("pg_loss", "entropy_loss", "ppo_kl", "kl_loss", "pg_clipfrac", "grad_norm", "lr", "critic.loss", "loss")
    names = [log_name(key, group="actor") for key in observed]
    with open_log(ours, HEADER, done=0, resumes=False) as log:
        for step in range(1, 9):
            a, b = 1 / step, 2 / step
            rollout = rollout_numbers([[Response((1,), (0.0,), True)]], [[a]], kl_coef=0.0)
            values = dict(zip(names, (a, 0.5, 0.125, b, 0.25, b, 1e-6, a, 2 * b), strict=True))
            log.write(step, {**values, **rollout, "response_length/mean": b})
    verl.write_text("".join(VERL.format(step=s, a=1 / s, b=2 / s) + "\n" for s in range(1, 9)))
    history = [
        {"step": s, **{name: (2 / s, 4 / s, 1e-6)[kind] for name, kind in TRL.items()}, "reward": 1 / s}
        for s in range(1, 9)
    ]
    trl.write_text(json.dumps({"log_history": history}))
    for theirs, count in ((verl, 11), (trl, 6)):
        compared = parity.diff(ours, theirs)
        assert compared.comparable
        assert not compared.differs
        assert f"agree within the band in {count} metrics" in compared.text()


@pytest.mark.parametrize("content", ["", "{}\n", '{"run": {}}\nnonsense\n{"step": 1}\n', "[1]\n"])
def test_what_is_no_log_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "log.jsonl").write_text(content)
    with pytest.raises(UsageError, match="is not the log of a training"):
        read_log(tmp_path / "log.jsonl")


@pytest.mark.parametrize(("tracker", "package"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_tracker_whose_package_is_missing_is_refused_with_the_name_of_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: Any, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"backend-parity\[{tracker}\]"):
        follow([tracker], tmp_path / "log.jsonl", HEADER, step=0)


def test_wandb_gets_the_numbers_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is an optional extra of the package, and not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tracker,) = follow(["wandb"], tmp_path / "log.jsonl", HEADER, step=0)
    for step in (1, 2):
        tracker.write(step, {"loss": step / 1024, "mfu": None})
    tracker.close()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    written = file.read_bytes()
    assert all(text in written for text in (b"loss", b"0.0009765625", b"0.001953125"))


def test_tensorboard_gets_the_numbers_of_the_log(tmp_path: Path) -> None:
    """As its own library writes them, and ``parity diff`` reads them."""
    (tracker,) = follow(["tensorboard"], tmp_path / "log.jsonl", HEADER, step=0)
    for step in (1, 2):
        tracker.write(step, {"loss": step / 4, "mfu": None})
    tracker.close()
    rows = read_any_log(str(tmp_path / "log.jsonl.tensorboard")).rows
    assert [(row.step, row.values) for row in rows] == [(1, {"loss": 0.25}), (2, {"loss": 0.5})]


def test_a_full_disk_under_the_log_is_one_line() -> None:
    full = Path("/dev/full")
    with full.open("ab", buffering=0) as file, pytest.raises(FileFailure, match=f"writing the log {full}: .*No space"):
        RunLog(file).write(1, {"train/loss": 0.5})
