"""The recipes of examples/recipes: each is one that its backend takes, fits its GPUs, and trains."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conformance.core.host import FIXTURES
from impl.train.command import TRAIN, read_recipe
from impl.train.flags import resolve_options
from impl.train.options import train_config
from impl.train.plan import GIB, memory_of, peak_of, sampler_of

RECIPES = sorted((FIXTURES.parent / "examples" / "recipes").glob("*.toml"))
GPU_GIB = 80e9 / GIB
PARITY_TRAIN = (
    "import argparse, sys; from impl.train.command import TRAIN; parser = argparse.ArgumentParser(prog='parity train');"
    "TRAIN.add_arguments(parser); sys.exit(TRAIN.run(parser.parse_args()))"
)
TINY = (
    "--device cpu --param-dtype fp32 --max-steps 2 --train-batch-size 8 --micro-train-batch-size 1 --max-len 192 "
    "--learning-rate 1e-3"
)
TINY_ROLLOUT = "--rollout-batch-size 4 --n-samples-per-prompt 2 --generate-max-len 8"


def command_of(recipe: Path) -> str:
    return next(command for command in ("sft", "grpo", "ppo") if f"-{command}-" in recipe.stem)


def tiny_of(recipe: Path) -> str:
    return next(f"models/{model}" for model in ("pangu", "llama", "qwen3") if model in recipe.stem)


def parity_train(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", PARITY_TRAIN, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=500)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(FIXTURES.parent), "OMP_NUM_THREADS": "1"}


def test_there_is_a_recipe_for_every_training_that_is_asked_for() -> None:
    pangu = {
        f"openpangu-{s}-{o}-{b}" for s in ("1b", "7b") for o in ("sft", "grpo", "ppo") for b in ("fsdp2", "megatron")
    }
    ways = ("deepspeed", "fsdp2-tp", "fsdp2-ring", "fsdp2-tp-ring")
    assert {recipe.stem for recipe in RECIPES} == pangu | {
        f"{m}-sft-{w}" for m in ("llama-3-8b", "qwen3-8b") for w in ways
    }


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_is_taken_by_its_backend_and_fits_gpus_of_80_gb(recipe: Path) -> None:
    command = command_of(recipe)
    said = read_recipe(recipe, command)
    config = train_config(command, resolve_options({}, said, command), given=said, ranks=None, dry_run=True)
    assert config.backend in recipe.stem
    assert config.layout.world_size == said["nproc_per_node"]
    models = memory_of(config)
    peak = peak_of(models, sampler_of(config, models)) / GIB
    assert peak < 0.9 * GPU_GIB, f"{peak:.1f} GiB"


def test_a_dry_run_prints_the_plan_and_trains_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    parser = argparse.ArgumentParser(prog="parity train")
    TRAIN.add_arguments(parser)
    recipe = next(one for one in RECIPES if one.stem == "openpangu-7b-ppo-megatron")
    said = f"ppo --config {recipe} --dry-run --logging {tmp_path / 'log'}"
    assert TRAIN.run(parser.parse_args(said.split())) == 0
    told = capsys.readouterr().out
    for words in (
        "8 = 2 data-parallel x 4 tensor-parallel",
        "64 rows of at most 2048 tokens = 2 data-parallel ranks x 16 micro-batches x 2 rows",
        "policy     8.03 B parameters, trained",
        "critic     7.4 B parameters, trained",
        "reference  8.03 B parameters, frozen",
        "peak, estimated:",
    ):
        assert words in told
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_the_command_trains_as_written(tmp_path: Path) -> None:
    said = f"sft --backend fsdp2 --pretrain models/llama {TINY} --logging log.jsonl --save-path trained"
    done = parity_train(*said.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines[1:]] == [1, 2]
    assert lines[0]["run"]["options"]["learning_rate"] == 1e-3
    assert (tmp_path / "trained" / "config.json").is_file()


@pytest.mark.exhaustive
def test_what_ranks_refuse_is_wrong_usage_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").touch()
    said = f"sft --backend fsdp2 --pretrain models/llama {TINY} --logging log.jsonl --nproc-per-node 2"
    done = parity_train(*said.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert "log of another training" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_trains_at_tiny_size(recipe: Path, tmp_path: Path) -> None:
    command = command_of(recipe)
    cuts = ("tensor_model_parallel_size", "fsdp_tensor_parallel_size", "ring_attn_size")
    recipe_says = read_recipe(recipe, command)
    ranks = max(2, *(int(str(recipe_says.get(cut, 1))) for cut in cuts))
    ranks = 4 if recipe.stem.endswith("tp-ring") else ranks
    said = (
        f"{command} --config {recipe} --pretrain {tiny_of(recipe)} --nproc-per-node {ranks} {TINY} --logging log.jsonl"
    )
    done = parity_train(*said.split(), *(() if command == "sft" else TINY_ROLLOUT.split()), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 2


@pytest.mark.exhaustive
@pytest.mark.usefixtures("foreground")
def test_ctrl_c_leaves_a_checkpoint_from_which_it_goes_on(tmp_path: Path) -> None:
    said = f"sft --backend fsdp2 --pretrain models/llama {TINY} --ckpt-path ckpt --nproc-per-node 2"
    command = [sys.executable, "-c", PARITY_TRAIN, *said.split(), "--max-steps", "2000"]
    log = tmp_path / "ckpt" / "log.jsonl"
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not (log.is_file() and '"step": 1,' in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 128 + signal.SIGINT
    stopped = int((tmp_path / "ckpt" / "latest").read_text().removeprefix("step-"))
    more = f"--load-checkpoint --max-steps {stopped + 1}"
    done = parity_train(*said.split(), *more.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(log.read_text().splitlines()[-1])["step"] == stopped + 1


@pytest.mark.exhaustive
def test_under_torchrun_the_command_is_a_rank(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PARITY_TRAIN)
    said = f"sft --backend megatron --pretrain models/llama {TINY} --logging log.jsonl --tensor-model-parallel-size 2"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        [*torchrun, *said.split()], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["run"]["config"]["layout"] == "tp2"
    assert len(lines) == 3
