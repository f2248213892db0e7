"""SFT as users begin it: problems in GSM8K's format, as they are, and a loss on those that were held out."""

from dataclasses import replace
from typing import Any

import pytest
from cells import BACKENDS
from gsm8k import write_problems
from train_runs import Trainings, assert_same, training

from conformance.world import Pool

STEPS = 8


@pytest.fixture(scope="module")
def learned(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The log of a training of each backend, without its first line."""
    root = tmp_path_factory.mktemp("gsm8k")
    problems = write_problems(root / "train.jsonl", count=200, seed=0)
    held_out = write_problems(root / "test.jsonl", count=8, seed=1)
    logs = {}
    for backend in BACKENDS:
        (root / backend).mkdir()
        data = {"path": str(problems), "max_len": 512, "rows": 4}
        config = training(root / backend, "sft", backend=backend, steps=STEPS, data=data)
        logs[backend] = Trainings(pool, root / "logs")(replace(config, eval_dataset=held_out, eval_steps=STEPS))
    return logs


@pytest.mark.parametrize("backend", BACKENDS)
def test_sft_lowers_the_loss_of_held_out_problems(learned: dict[str, list[dict[str, Any]]], backend: str) -> None:
    before, *_, after = [line["eval_loss"] for line in learned[backend] if "eval_loss" in line]
    assert after < 0.8 * before


def test_all_backends_learn_the_same(learned: dict[str, list[dict[str, Any]]]) -> None:
    one, *others = learned.values()
    for other in others:
        assert_same(one, other, 1e-9)
