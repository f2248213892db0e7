"""Trainings in ranks: interrupted and resumed, the same in every layout and on every backend, and learning."""

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from cells import exhaustive, slow
from train_runs import ADAMW, Trainings, assert_same, lines_of, training, writing_to

from conformance.core.host import FIXTURES
from conformance.runtime import Pool
from conformance.spec.layout import Layout
from impl.checkpoints.manifest import read_manifest
from impl.train.config import OutputConfig, TrainConfig, to_json
from impl.train.experience import IMPORTANCE, LOGPROB_GAP
from impl.train.flags import REWARDED
from impl.train.setup import is_value_model, settings_of

WORDS = FIXTURES / "data" / "word_problems.jsonl"


@pytest.fixture
def trainings(pool: Pool, tmp_path: Path) -> Trainings:
    return Trainings(pool, tmp_path / "logs")


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        exhaustive("fsdp2", "sft"),
        exhaustive("fsdp2", "grpo"),
        exhaustive("fsdp2", "ppo"),
        *(exhaustive(backend, kind) for backend in ("deepspeed", "megatron") for kind in ("sft", "grpo", "ppo")),
    ],
)
def test_training_stopped_by_signal_resumes_bitwise(
    trainings: Trainings, tmp_path: Path, backend: str, kind: str
) -> None:
    of_kind = {"packed": True, "max_len": 160, "rows": 4} if kind == "sft" else {}
    config = training(tmp_path, kind, backend=backend, steps=6, data=of_kind)
    config = replace(config, eval_dataset=held_out(tmp_path), eval_steps=3)
    whole = trainings(config)
    where = {"log": tmp_path / "divergence.jsonl", "ckpt_path": tmp_path / "checkpoints"}
    divergence = writing_to(config, **where, save_steps=1, async_save=kind == "sft")
    stopped = trainings(divergence, stop=[1, 2, "SIGTERM"])
    assert 2 <= stopped[-1]["step"] < 6
    assert (tmp_path / "checkpoints" / "latest").read_text() == f"step-{stopped[-1]['step']:06d}"
    assert trainings(writing_to(divergence, load_checkpoint=True), fresh=True) == whole


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_training_goes_on_with_another_number_of_ranks(trainings: Trainings, tmp_path: Path, kind: str) -> None:
    config = training(tmp_path, kind, steps=4, data={"packed": kind == "sft", "max_len": 160})
    config = replace(config, eval_dataset=held_out(tmp_path), eval_steps=2)
    whole = trainings(config)
    divergence = writing_to(config, log=tmp_path / "divergence.jsonl", ckpt_path=tmp_path / "checkpoints")
    trainings(replace(divergence, scenario=replace(divergence.scenario, steps=2)))
    alone = replace(divergence, layout=Layout.parse("dp1"))
    assert_same(whole, trainings(writing_to(alone, load_checkpoint=True), fresh=True), 1e-9)


@pytest.mark.parametrize("kind", ["grpo", exhaustive("sft"), exhaustive("ppo")])
def test_a_training_has_the_same_numbers_on_other_ranks(trainings: Trainings, tmp_path: Path, kind: str) -> None:
    alone, cut = (trainings(training(tmp_path / layout, kind, layout=layout, steps=2)) for layout in ("dp1", "tp2"))
    assert_same(alone, cut, 1e-9)


OTHER = {
    "dft": "deepspeed",
    "dpo": "deepspeed",
    "kto": "megatron",
    "reward": "deepspeed",
    "prm": "megatron",
    "distillation": "megatron",
}


@pytest.mark.parametrize("kind", ["dpo", *map(slow, ("dft", "kto", "reward", "prm", "distillation"))])
@pytest.mark.parametrize("packed", [False, exhaustive(True)])
def test_objectives_on_documents_have_the_same_numbers_on_other_backends(
    trainings: Trainings, tmp_path: Path, kind: str, packed: bool
) -> None:
    """The first loss of a policy that is its reference is known: log 2 for DPO, 1/2 for KTO; a teacher differs."""
    data = {"packed": packed, "max_len": 224}
    one = training(tmp_path / "fsdp2", kind, steps=2, data=data)
    if kind == "distillation":
        one = replace(one, models={**one.models, "teacher": FIXTURES / "models" / "pangu"})
    one = writing_to(one, save_path=tmp_path / "model")
    other = replace(one, backend=OTHER[kind], output=OutputConfig(log=tmp_path / "other.jsonl"))
    lines = trainings(one)
    assert [line["step"] for line in lines] == [1, 2]
    assert_same(lines, trainings(other), 1e-9)
    if known := {"dpo": math.log(2), "kto": 0.5}.get(kind):
        assert lines[0]["train/loss"] == pytest.approx(known, rel=1e-12, abs=0)
        assert lines[1]["train/loss"] != pytest.approx(known, rel=1e-6)
    assert is_value_model(tmp_path / "model") == (kind in REWARDED)


@pytest.mark.exhaustive
def test_engine_and_policy_agree_on_every_logprob(trainings: Trainings, tmp_path: Path) -> None:
    lines = trainings(training(tmp_path, "grpo", layout="tp2", objective={"temperature": 0.7}))
    for line in lines:  # of other weights each
        assert line[f"{LOGPROB_GAP}/mean"] <= line[f"{LOGPROB_GAP}/max"] < 1e-12
        assert line[f"{IMPORTANCE}/mean"] == pytest.approx(1, abs=1e-12)


@pytest.mark.exhaustive
def test_the_held_out_loss_is_that_of_a_step_on_the_same_documents(trainings: Trainings, tmp_path: Path) -> None:
    path = held_out(tmp_path)
    config = training(tmp_path, "sft", steps=1, data={"path": str(path), "rows": 4})
    before, step = trainings(replace(config, eval_dataset=path))
    assert before["eval/loss"] == pytest.approx(step["train/loss"], rel=1e-12, abs=0)
    assert step["eval/loss"] < before["eval/loss"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_the_first_ten_iterations_of_all_backends_are_the_same(
    trainings: Trainings, tmp_path: Path, kind: str, greedy: bool
) -> None:
    lines = {
        backend: trainings(sampling(training(tmp_path / backend, kind, backend=backend, steps=10), greedy=greedy))
        for backend in ("fsdp2", "deepspeed", "megatron")
    }
    assert fmean(line["actor/grad_norm"] for line in lines["fsdp2"]) > 0.01
    for backend in ("deepspeed", "megatron"):
        assert_same(lines["fsdp2"], lines[backend], 1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed", "megatron"])
@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_thirty_iterations_raise_the_reward(trainings: Trainings, tmp_path: Path, backend: str, kind: str) -> None:
    config = training(tmp_path, kind, backend=backend, steps=30, precision="fp32", data={"rows": 64})
    assert config.rollout
    lines = trainings(replace(config, rollout=replace(config.rollout, prompts=8, n_samples_per_prompt=8)))
    rewards = [line["critic/score/mean"] for line in lines]
    assert fmean(rewards[:3]) < 0.2
    assert fmean(rewards[-5:]) > 0.35


@pytest.mark.exhaustive
def test_sft_lowers_the_held_out_loss(trainings: Trainings, tmp_path: Path) -> None:
    config = training(tmp_path, "sft", steps=20, precision="fp32", data={"packed": True, "max_len": 160})
    lines = trainings(replace(config, eval_dataset=WORDS))
    losses = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert len(losses) == 2
    assert losses[-1] < losses[0] - 1


ABORTS_AT_ITS_END = """
import atexit, os, runpy, sys
class Kept:
    def __del__(self):
        os.abort()  # as C++ does when Python is finalized under a thread of it
sys.modules["kept"] = Kept()
atexit.register(print, "registered for the end")
runpy.run_module("impl.train.launch", run_name="__main__")
"""


@pytest.mark.exhaustive
def test_a_rank_ends_with_its_exit_code_whatever_finalization_would_do(tmp_path: Path) -> None:
    (file := tmp_path / "config.json").write_text("{}")
    rank = [sys.executable, "-c", ABORTS_AT_ITS_END, str(file)]
    told = subprocess.run(rank, capture_output=True, text=True, timeout=120)
    assert told.returncode == 2, told
    assert "error: " in told.stderr
    assert told.stdout == "registered for the end\n"


@pytest.mark.exhaustive
def test_a_rank_is_a_process_that_torchrun_starts(tmp_path: Path) -> None:
    file, config = tmp_path / "config.json", training(tmp_path, "sft", steps=2)
    config = writing_to(config, save_path=tmp_path / "model")
    file.write_text(json.dumps(to_json(config)), encoding="utf-8")
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "impl.train.launch"]
    told = subprocess.run([sys.executable, *ranks, str(file)], capture_output=True, text=True, timeout=240, check=True)
    assert [line["step"] for line in lines_of(config)] == [1, 2]
    assert "step 2/2  loss" in told.stdout
    assert re.search(rf"^finished after update 2 of 2; loss \d.*; log: {config.output.log}$", told.stdout, re.M)
    assert (tmp_path / "model" / "model.safetensors").is_file()
    again = subprocess.run([sys.executable, *ranks, str(file)], capture_output=True, text=True, timeout=240)
    assert again.returncode != 0
    assert f"error: {config.output.log} is the log of another training" in again.stderr


@pytest.mark.exhaustive
def test_a_training_does_not_begin_where_another_one_is(trainings: Trainings, tmp_path: Path) -> None:
    config = writing_to(training(tmp_path, "sft", steps=1), ckpt_path=tmp_path / "checkpoints")
    trainings(config)
    assert "holds checkpoints of another training" in trainings.outcome(config).reason
    elsewhere = writing_to(config, ckpt_path=tmp_path / "others")
    assert "is the log of another training" in trainings.outcome(elsewhere).reason
    assert len(lines_of(config)) == 1


def test_a_frozen_model_may_go_once_it_is_loaded(trainings: Trainings, tmp_path: Path) -> None:
    """The checkpoint knows it by what it was when the training began."""
    config = writing_to(training(tmp_path, "grpo", steps=1, objective={"kl_loss_coef": 0.1}), ckpt_path=tmp_path / "at")
    reference = shutil.copytree(config.models["reference"], tmp_path / "reference")
    sample = {"question": "2+3=", "answer": "5", "folder": str(reference)}
    (tmp_path / "x.jsonl").write_text(f"{json.dumps(sample)}\n" * 2)
    data = replace(config.scenario.data, path=str(tmp_path / "x.jsonl"))
    assert config.rollout
    trainings(
        replace(
            config,
            models={**config.models, "reference": reference},
            scenario=replace(config.scenario, data=data),
            rollout=replace(config.rollout, reward="reward_functions:by_length"),
        )
    )
    assert not (reference / "model.safetensors").exists()
    settings = read_manifest(tmp_path / "at" / "step-000001").about.settings
    assert settings == settings_of(config.scenario, config.models)


@pytest.mark.exhaustive
def test_a_training_does_not_go_on_with_other_roll_outs(trainings: Trainings, tmp_path: Path) -> None:
    config = writing_to(training(tmp_path, "grpo", steps=1, precision="fp32"), ckpt_path=tmp_path / "checkpoints")
    trainings(config)
    assert config.rollout
    scenario = replace(config.scenario, steps=2, data=replace(config.scenario.data, rows=16))
    other = replace(config, scenario=scenario, rollout=replace(config.rollout, prompts=4))
    reason = trainings.outcome(writing_to(other, load_checkpoint=True)).reason
    assert "the checkpoint has 1 updates on 2 prompts, but this training makes 1 per rollout of 4" in reason


@pytest.mark.parametrize("backend", [slow("fsdp2"), exhaustive("deepspeed"), exhaustive("megatron")])
def test_lengthened_schedule_is_refused_unless_rates_stay(trainings: Trainings, tmp_path: Path, backend: str) -> None:
    def lasting(steps: int, name: str, **optimizer: Any) -> TrainConfig:
        schedule = {"name": name, "total_steps": steps, "warmup_steps": 1}
        changes: dict[str, Any] = {"optimizer": ADAMW | optimizer, "schedule": schedule}
        config = training(tmp_path / name, "sft", backend=backend, steps=steps, **changes)
        return writing_to(config, ckpt_path=tmp_path / name / "checkpoints", load_checkpoint=steps > 2)

    for name in ("cosine", "constant"):
        trainings(lasting(2, name))
    reason = trainings.outcome(lasting(3, "cosine")).reason
    assert "schedule.total_steps 2, now 3; the learning rate would jump" in reason
    assert "optimizer.lr 0.003, now 0.1" in trainings.outcome(lasting(3, "constant", lr=0.1)).reason
    assert [line["step"] for line in trainings(lasting(3, "constant"))] == [1, 2, 3]


def held_out(folder: Path) -> Path:
    """A data set of four questions, short ones for all kinds of trainings."""
    path = folder / "held-out.jsonl"
    samples = [{"question": f"{n}+{n}=", "answer": f"#### {2 * n}"} for n in (1, 2, 3, 4)]
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
    return path


def sampling(config: TrainConfig, **rollout: Any) -> TrainConfig:
    """Eight prompts with a response each: greedy responses to one prompt are alike, and their advantages 0."""
    assert config.rollout
    return replace(config, rollout=replace(config.rollout, prompts=8, n_samples_per_prompt=1, **rollout))
