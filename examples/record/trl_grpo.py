"""A record of TRL's GRPOTrainer: one callback. ``torchrun --nproc_per_node 2 trl_grpo.py MODEL DATA OUT``."""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import parity


def main(model_folder: str, data: str, out: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    texts = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
    train(
        AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32"),
        tokenizer,
        Dataset.from_list([{"prompt": text["question"]} for text in texts]),
        out,
    )


def reward(completions: list[str], **columns: Any) -> list[float]:
    """The part of a completion that is lower-case letters."""
    return [sum(letter.islower() for letter in text) / (len(text) or 1) for text in completions]


def train(model: Any, tokenizer: Any, prompts: Dataset, out: str | Path, **changes: Any) -> None:
    """Two steps of four completions on each rank."""
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 2,
        "bf16": False,
        "learning_rate": 1e-3,
        "logging_steps": 1,  # so that the record has a loss at each step
        "save_strategy": "no",
        "report_to": "none",
        "output_dir": str(out),
    }
    GRPOTrainer(
        model,
        reward,
        args=GRPOConfig(**arguments | changes),
        train_dataset=prompts,
        processing_class=tokenizer,
        callbacks=[parity.TrainerRecord(out=out)],
    ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
