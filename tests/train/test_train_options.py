"""The options of ``parity train``: what they become, and what is refused with which advice."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from train_runs import TINY, config_of

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.forms import read_samples
from conformance.spec.objectives import Grpo, PolicyGradient, Ppo
from impl.checkpoints.folder import TrainingFolder
from impl.objectives.losses import LOSS_MODES
from impl.train.command import TRAIN
from impl.train.flags import FLAGS
from impl.train.loop import training_folder
from impl.train.setup import held_out_data


def layout_of(backend: str, *said: str) -> str:
    return str(config_of("sft", backend, *TINY, *said).layout)


@pytest.mark.parametrize(
    ("backend", "said", "layout"),
    [
        ("fsdp2", "--nproc-per-node 4", "dp4"),
        ("fsdp2", "--nproc-per-node 2 --zero-stage 3", "dp2"),
        ("fsdp2", "--nproc-per-node 4 --fsdp-tensor-parallel-size 2", "dp2.tp2.plan"),
        ("fsdp2", "--nproc-per-node 4 --fsdp-tensor-parallel-size 2 --use-hf-tp-plan", "dp2.tp2"),
        ("fsdp2", "--tensor-model-parallel-size 2 --sequence-parallel", "tp2.seqpar"),
        ("fsdp2", "--nproc-per-node 4 --ring-attn-size 2 --ring-head-stride 2", "dp2.sp2.stride2"),
        ("fsdp2", "--gradient-checkpointing --offload", "dp1.ckpt.offload"),
        ("deepspeed", "--torch-compile --gradient-checkpointing --zero-stage 1", "dp1.zero1.ckpt.compile"),
        ("deepspeed", "--nproc-per-node 2 --zero-stage 2 --offload", "dp2.zero2.offload"),
        ("deepspeed", "--nproc-per-node 2 --zero-stage 3", "dp2.leaf"),
        ("deepspeed", "--tensor-model-parallel-size 2 --torch-compile", "tp2.compile.leaf"),
        (
            "megatron",
            "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --nproc-per-node 8",
            "dp2.tp2.pp2",
        ),
        ("megatron", "--nproc-per-node 2 --zero-stage 1", "dp2.zero1"),
        ("megatron", "--nproc-per-node 2 --zero-stage 0", "dp2"),
        ("megatron", "--context-parallel-size 2 --sequence-parallel --tensor-model-parallel-size 2", "tp2.sp2.seqpar"),
    ],
)
def test_sizes_and_switches_become_a_layout(backend: str, said: str, layout: str) -> None:
    assert layout_of(backend, *said.split()) == layout


@pytest.mark.parametrize(
    ("backend", "said", "advice"),
    [
        ("fsdp2", "--nproc-per-node 3 --tensor-model-parallel-size 2", "--nproc-per-node 2 or 4"),
        ("megatron", "--nproc-per-node 2 --pipeline-model-parallel-size 2 --ring-attn-size 2", "--nproc-per-node 4"),
        ("fsdp2", "--train-batch-size 6 --micro-train-batch-size 4", "use 4 or 8"),
        ("fsdp2", "--train-batch-size 2 --micro-train-batch-size 4", "use 4$"),
        ("fsdp2", "--nproc-per-node 3 --train-batch-size 32", "use 30 or 33"),
        ("fsdp2", "--tensor-model-parallel-size 8", "4 key-value heads .* tp4"),
        ("megatron", "--pipeline-model-parallel-size 5", "2 layers.*pp4"),
        ("fsdp2", "--ring-attn-size 2 --ring-head-stride 3", "stride=3 .*stride2"),
        ("fsdp2", "--zero-stage 2", "shards everything, as ZeRO-3"),
        ("megatron", "--zero-stage 3", "use zero1"),
        ("megatron", "--offload", "offload is not built"),
        ("deepspeed", "--sequence-parallel --tensor-model-parallel-size 2", "seqpar is not built"),
        ("deepspeed", "--pipeline-model-parallel-size 2", "pipeline engine"),
        ("fsdp2", "--sequence-parallel", "needs tensor parallelism"),
        ("fsdp2", "--use-hf-tp-plan", "--fsdp-tensor-parallel-size 2"),
        ("fsdp2", "--use-hf-tp-plan --sequence-parallel --tensor-model-parallel-size 2", "leave one of the two"),
        ("megatron", "--use-hf-tp-plan", "sharded by their own classes"),
        ("deepspeed", "--fsdp-tensor-parallel-size 2", "--tensor-model-parallel-size"),
        ("fsdp2", "--ring-attn-size 2 --context-parallel-size 4", "two names of one size"),
        ("fsdp2", "--learning-rate 0", "more than 0"),
        ("fsdp2", "--lr-warmup-ratio 1.5", "1 or less"),
        ("fsdp2", "--learning-rate nan", "--learning-rate must be more than 0"),
        ("fsdp2", "--micro-train-batch-size 0", "1 or more"),
        ("fsdp2", "--max-epochs 2", "give one of them"),
        ("fsdp2", "--load-checkpoint", "--ckpt-path"),
        ("fsdp2", "--dataset no/such.jsonl", "no/such.jsonl"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(backend: str, said: str, advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        layout_of(backend, *said.split())


def test_accumulation_is_what_is_left_of_the_batch() -> None:
    said = "--nproc-per-node 2 --train-batch-size 24 --micro-train-batch-size 3"
    config = config_of("sft", "fsdp2", *TINY, *said.split())
    assert (config.scenario.data.rows, config.scenario.accumulation) == (24, 4)


def test_epochs_count_whole_batches_of_the_data(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1 + 1?", "answer": "2"}\n' * 10)
    said = ("--pretrain", "models/llama", "--dataset", str(data), "--train-batch-size", "4", "--device", "cpu")
    assert config_of("sft", "fsdp2", *said, "--max-epochs", "2").scenario.steps == 5
    with pytest.raises(UsageError, match=r"10 samples.*--train-batch-size 10 or less, or --max-epochs 4"):
        config_of("sft", "fsdp2", *said[:-4], "--train-batch-size", "32")
    with pytest.raises(UsageError, match="give --max-steps"):
        config_of("sft", "fsdp2", *said, "--packing-samples")


def test_the_numbers_of_the_optimizer_arrive() -> None:
    said = "--learning-rate 1e-4 --lr-scheduler linear --lr-warmup-ratio 0.3 --weight-decay 0.1 --max-norm 0 --seed 7"
    scenario = config_of("sft", "fsdp2", *TINY, *said.split(), "--param-dtype", "fp32").scenario
    assert (scenario.optimizer.lr, scenario.optimizer.weight_decay) == (1e-4, 0.1)
    assert scenario.optimizer.max_grad_norm is None
    assert (scenario.schedule.name, scenario.schedule.warmup_steps, scenario.schedule.total_steps) == ("linear", 2, 4)
    assert (scenario.seed, scenario.precision, scenario.steps) == (7, "fp32", 4)


def test_a_roll_out_is_cut_into_steps() -> None:
    said = "--rollout-batch-size 6 --n-samples-per-prompt 4 --train-batch-size 12 --ppo-epochs 2 --generate-max-len 32"
    more = "--temperature 0.7 --eps-clip 0.1 --kl-loss-coef 0.05 --advantage-estimator rloo"
    config = config_of("grpo", "fsdp2", *TINY, *said.split(), *more.split())
    objective, rollout = config.scenario.objective, config.rollout
    assert isinstance(objective, Grpo)
    assert rollout is not None
    assert (objective.mini_batches, objective.ppo_epochs, objective.temperature) == (2, 2, 0.7)
    assert (objective.clip_ratio_low, objective.clip_ratio_high, objective.kl_loss_coef) == (0.1, 0.1, 0.05)
    assert objective.adv_estimator == "rloo"
    assert (rollout.prompts, rollout.n_samples_per_prompt, rollout.max_new_tokens, rollout.greedy) == (6, 4, 32, False)
    assert set(config.models) == {"reference", "policy"}
    alone = "--greedy --n-samples-per-prompt 1 --rollout-batch-size 32 --advantage-estimator reinforce_plus_plus"
    greedy = config_of("grpo", "fsdp2", *TINY, *alone.split(), "--gamma", "0.9", "--reward", "exact-answer")
    assert greedy.rollout is not None
    assert (greedy.rollout.greedy, greedy.rollout.reward) == (True, "exact-answer")
    assert isinstance(greedy.scenario.objective, Grpo)
    assert greedy.scenario.objective.gamma == 0.9


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("--rollout-batch-size 5 --train-batch-size 8", "--train-batch-size 20, or --rollout-batch-size 6"),
        ("--rollout-batch-size 8 --train-batch-size 8 --ppo-epochs 2 --max-steps 12", "4 mini-batches.*use 8 or 16"),
        ("--generate-max-len 64 --max-len 64", "--max-len 128 or --generate-max-len 32"),
        ("--n-samples-per-prompt 1 --rollout-batch-size 32", "use 2 or more, or reinforce_plus_plus"),
        ("--greedy", "all 4 responses .* the same; use --n-samples-per-prompt 1"),
        ("--gamma 0.9", "--advantage-estimator grpo .* without a discount; leave it out, or use reinforce_plus_plus"),
    ],
)
def test_a_roll_out_that_does_not_fit_is_refused_with_what_would(said: str, advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        config_of("grpo", "fsdp2", *TINY, *said.split())


def test_the_embedded_task_asks_for_a_number_of_steps() -> None:
    with pytest.raises(UsageError, match="give --max-steps"):
        config_of("grpo", "fsdp2", "--pretrain", "models/pangu", "--device", "cpu")


@pytest.mark.parametrize("command", ["grpo", "ppo"])
@pytest.mark.parametrize("mode", LOSS_MODES)
def test_every_loss_mode_can_be_trained_with(command: str, mode: str) -> None:
    objective = config_of(command, "fsdp2", *TINY, "--loss-mode", mode).scenario.objective
    assert isinstance(objective, PolicyGradient)
    assert objective.loss_mode == mode


def test_ppo_begins_its_critic_as_the_policy_or_as_another_model() -> None:
    said = "--lambd 0.95 --value-clip 0.2 --kl-coef 0.01"
    config = config_of("ppo", "fsdp2", *TINY, *said.split())
    assert isinstance(config.scenario.objective, Ppo)
    assert (config.scenario.objective.lam, config.scenario.objective.cliprange_value) == (0.95, 0.2)
    assert set(config.models) == {"reference", "policy", "critic"}
    assert len(set(config.models.values())) == 1
    other = config_of("ppo", "fsdp2", *TINY, "--critic-pretrain", "models/llama")
    assert {role: folder.name for role, folder in other.models.items()} == {"policy": "pangu", "critic": "llama"}


def test_a_log_lies_with_the_checkpoints_so_that_a_training_that_goes_on_finds_it(tmp_path: Path) -> None:
    ckpt = ("--ckpt-path", str(tmp_path))
    assert config_of("sft", "fsdp2", *TINY, *ckpt).output.log == tmp_path / "log.jsonl"
    assert config_of("sft", "fsdp2", *TINY, *ckpt, "--logging", "x.jsonl").output.log == Path("x.jsonl").absolute()
    assert config_of("sft", "fsdp2", *TINY).output.log.name == "log.jsonl"
    with pytest.raises(UsageError, match="give --logging or --ckpt-path"):
        config_of("sft", "fsdp2", *TINY, ranks=1)


def test_checkpoints_are_written_as_they_were_asked_for(tmp_path: Path) -> None:
    said = ("--ckpt-path", str(tmp_path), "--max-ckpt-num", "3")
    found = [training_folder(config_of("sft", "fsdp2", *TINY, *said, *more).output) for more in ((), ("--async-save",))]
    assert found == [TrainingFolder(root=tmp_path, keep=3, asynchronous=behind) for behind in (False, True)]
    assert training_folder(config_of("sft", "fsdp2", *TINY).output) is None


def run(*said: str) -> int:
    parser = argparse.ArgumentParser(prog="parity train")
    TRAIN.add_arguments(parser)
    return TRAIN.run(parser.parse_args(list(said)))


def test_the_number_of_ranks_is_torchruns_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ("sft", "--backend", "fsdp2", *TINY, "--logging", "log", "--dry-run", "--nproc-per-node", "2")
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():  # on two hosts
        monkeypatch.setenv(name, value)
    assert run(*said) == 0
    assert "layout dp4" in capsys.readouterr().out
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UsageError, match=r"--nproc-per-node 2: torchrun has started 4 ranks .* leave it out"):
        run(*said)


@pytest.mark.parametrize(
    ("command", "said", "told"),
    [
        ("sft", "--eval-dataset other.jsonl", "no columns of questions"),
        ("sft", "--dataset other.jsonl", "no columns of questions"),
        ("grpo", "--eval-dataset other.jsonl", "no columns of questions"),
        (
            "grpo",
            "--packing-samples --train-batch-size 1 --max-len 64 --generate-max-len 8",
            "a row of 32 prompts and responses has up to 32 x",
        ),
        ("grpo", "--generate-max-len 60 --max-len 64", "no room for a prompt of .* max_new_tokens=60"),
        ("ppo", "--critic-pretrain .", "config.json"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_rank_is_started(
    command: str, said: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.jsonl").write_text('{"text": "1"}\n')

    def started(*_: object, **__: object) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("impl.train.launch.run_ranks", started)
    with pytest.raises(UsageError, match=told):
        run(command, "--backend", "fsdp2", *TINY, "--trust-remote-code", *said.split())


@pytest.mark.parametrize(
    ("command", "said", "told"),
    [
        ("sft", "", "data: data/word_problems.jsonl, embedded"),
        ("grpo", "", "data: arithmetic, embedded.*; reward: near-answer "),
        ("ppo", "--dataset my.jsonl", "data: my.jsonl; reward: exact-answer "),
        ("grpo", "--dataset my.jsonl --reward near-answer", "data: my.jsonl; reward: near-answer$"),
    ],
)
def test_first_line_names_data_and_reward(command: str, said: str, told: str, capsys: Any) -> None:
    with pytest.raises(UsageError):  # there are no such models
        run(command, "--backend", "fsdp2", "--pretrain", "no/model", *said.split())
    assert re.search(told, capsys.readouterr().out.splitlines()[0])


def test_first_line_needs_no_torch() -> None:
    code = "import sys; import impl.train.command; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_packed_responses_share_rows() -> None:
    said = "--packing-samples --rollout-batch-size 8 --n-samples-per-prompt 4 --train-batch-size 6"
    config = config_of("grpo", "fsdp2", *TINY, *said.split())
    assert isinstance(config.scenario.objective, Grpo)
    assert (config.scenario.data.rows, config.scenario.objective.mini_batches) == (6, 1)
    with pytest.raises(UsageError, match="use --rollout-batch-size 10 or more"):
        config_of("grpo", "fsdp2", *TINY, *said.replace("size 6", "size 40").split())


@pytest.mark.parametrize("command", ["dft", "dpo", "kto", "reward", "prm", "distillation"])
def test_objectives_on_documents_take_their_options(command: str) -> None:
    said = {
        "dft": "--lora-rank 2",
        "dpo": "--loss-type odds_ratio --reference-free --length-normalised --sft-coef 1.0 --lora-rank 2",
        "kto": "--beta 0.3 --undesirable-weight 1.5",
        "reward": "--center-coef 0.01",
        "prm": "",
        "distillation": "--teacher-pretrain models/llama --beta 0.5 --temperature 2.0 --top-k 8",
    }
    of_step = "--train-batch-size 6 --micro-train-batch-size 3"
    config = config_of(command, "fsdp2", *TINY, *said[command].split(), *of_step.split())
    objective, pairs = config.scenario.objective, command in ("dpo", "kto", "reward")
    assert objective.kind == command
    expected: dict[str, dict[str, Any]] = {
        "dft": {},
        "dpo": {"loss_type": "odds_ratio", "reference_free": True, "length_normalised": True, "sft_coef": 1.0},
        "kto": {"beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 1.5},
        "reward": {"center_coef": 0.01},
        "prm": {},
        "distillation": {"beta": 0.5, "temperature": 2.0, "top_k": 8, "renormalise_top_k": True},
    }
    assert {name: getattr(objective, name) for name in expected[command]} == expected[command]
    assert (config.scenario.data.rows, config.scenario.accumulation) == (12 if pairs else 6, 2)
    packed = config_of(command, "fsdp2", *TINY, *said[command].split(), *of_step.split(), "--packing-samples")
    assert packed.scenario.data.rows == 6
    assert {role.name for role in objective.roles} == config.models.keys()
    if command == "distillation":
        assert config.models["teacher"].name == "llama"


@pytest.mark.parametrize(
    ("command", "said", "advice"),
    [
        ("distillation", "", "--teacher-pretrain is missing"),
        ("distillation", "--teacher-pretrain models/llama --beta 1.5", "^--beta must be 1 or less, got 1.5$"),
        ("dpo", "--loss-type robust", "^robust corrects for --label-smoothing, which is 0; set it"),
        ("dpo", "--beta 0", "^--beta must be more than 0, got 0.0$"),
        ("dpo", "--label-smoothing 0.5", "^--label-smoothing must be less than 0.5, got 0.5$"),
    ],
)
def test_wrong_objectives_on_documents_are_refused(command: str, said: str, advice: str) -> None:
    with pytest.raises(UsageError, match=advice):
        config_of(command, "fsdp2", *TINY, *said.split())


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(("command", "option"), [("distillation", "--teacher-pretrain"), ("ppo", "--critic-pretrain")])
def test_a_model_of_another_vocabulary_is_refused(dry_run: bool, command: str, option: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(FIXTURES / "models" / "llama", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 399}))
    with pytest.raises(UsageError, match=rf"{option} .*/other has vocab_size 399 .*/pangu has 400, .*; give a model"):
        config_of(command, "fsdp2", *TINY, option, str(other), dry_run=dry_run)


def test_a_critic_may_have_a_larger_vocabulary(tmp_path: Path) -> None:
    """As the 7B model of Qwen2.5 has, whose tokens are those of the 1.5B model."""
    shutil.copytree(FIXTURES / "models" / "llama", tmp_path / "critic")
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    (tmp_path / "critic" / "config.json").write_text(json.dumps(config | {"vocab_size": 528}))
    config_of("ppo", "fsdp2", *TINY, "--critic-pretrain", str(tmp_path / "critic"), dry_run=True)
    with pytest.raises(UsageError, match=r"vocab_size 528 .* give a model with a vocabulary of 400, or if"):
        config_of("distillation", "fsdp2", *TINY, "--teacher-pretrain", str(tmp_path / "critic"), dry_run=True)


def test_ranges_of_objectives_are_explained(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        config_of("dpo", "fsdp2", "--help")
    assert "(0 or more and less than 0.5; default: 0.0)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("command", "said", "told"),
    [
        ("reward", "--beta", "--beta is an option of dpo, kto and distillation, not of reward; leave it out"),
        ("grpo", "--beta", "not of grpo; grpo has --kl-loss-coef"),
        ("dpo", "--trainer.beta", "in parity train this is --beta"),
        ("kto", "--loss-type", "--loss-type is an option of dpo, not of kto; leave it out"),
        ("ppo", "--loss_type", "--loss-type is an option of dpo, not of ppo; ppo has --loss-mode"),
    ],
)
def test_options_of_other_commands_are_answered_by_the_typed_name(
    command: str, said: str, told: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit):
        config_of(command, "fsdp2", *TINY, f"{said}=1")
    assert told in capsys.readouterr().err


def test_documents_that_are_too_long_may_be_left_out() -> None:
    assert config_of("dpo", "fsdp2", *TINY, "--too-long", "drop").scenario.data.too_long == "drop"
    with pytest.raises(UsageError, match=r"--too-long drop: the number of rows .* give --max-steps"):
        config_of("dpo", "fsdp2", "--pretrain", "models/llama", "--device", "cpu", "--too-long", "drop")


def test_every_option_is_explained_and_takes_its_default() -> None:
    for flag in FLAGS.values():
        assert flag.help
        if flag.default is not None:
            assert flag.typed(flag.default, source="the table") == flag.default
            flag.check(flag.default)


def test_splits_of_a_saved_dataset_are_chosen(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {
        name: datasets.Dataset.from_list([{"question": f"{n}?", "answer": name} for n in range(count)])
        for name, count in (("train", 64), ("test", 32))
    }
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    folder = str(tmp_path / "saved")
    of_data = ("--dataset", folder, "--split", "train", "--eval-dataset", folder, "--eval-split", "test")
    config = config_of("sft", "fsdp2", "--pretrain", "models/pangu", "--device", "cpu", *of_data)
    assert config.scenario.steps == 2  # of 32 rows
    held_out = held_out_data(config)
    assert held_out is not None
    assert {read_samples(data)[0].answer for data in (config.scenario.data, held_out)} == {"train", "test"}
