"""SFT as users begin it: problems in GSM8K's format, as they are, and a loss on those that were held out."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from gsm8k import write_problems
from train_runs import Trainings, assert_same, training

from conformance.runtime import Pool

STEPS = 8


Log = list[dict[str, Any]]


@pytest.fixture(scope="module")
def learned(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Log]:
    """The log of a backend's training, without its first line; each trains once."""
    root = tmp_path_factory.mktemp("gsm8k")
    problems = write_problems(root / "train.jsonl", count=200, seed=0)
    held_out = write_problems(root / "test.jsonl", count=8, seed=1)

    @functools.cache
    def log_of(backend: str) -> Log:
        (root / backend).mkdir()
        data = {"path": str(problems), "max_len": 512, "rows": 4}
        config = training(root / backend, "sft", backend=backend, steps=STEPS, data=data)
        return Trainings(pool, root / "logs")(replace(config, eval_dataset=held_out, eval_steps=STEPS))

    return log_of


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed", "megatron"])
def test_sft_lowers_the_loss_of_held_out_problems(learned: Callable[[str], Log], backend: str) -> None:
    before, *_, after = [line["eval/loss"] for line in learned(backend) if "eval/loss" in line]
    assert after < 0.8 * before


@pytest.mark.exhaustive
@pytest.mark.parametrize("other", ["deepspeed", "megatron"])
def test_all_backends_learn_the_same(learned: Callable[[str], Log], other: str) -> None:
    assert_same(learned("fsdp2"), learned(other), 1e-9)
