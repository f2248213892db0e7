"""A record of transformers' Trainer: one callback. ``python hf_trainer.py MODEL DATA OUT``."""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import parity


def main(model_folder: str, data: str, out: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    texts = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
    train(
        AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32"),
        tokenizer,
        [tokenizer(text["question"] + text["answer"], truncation=True, max_length=128) for text in texts],
        out,
    )


def train(model: Any, tokenizer: Any, dataset: list[Any], out: str | Path, **changes: Any) -> None:
    """An ordinary training of four steps, with two micro-batches each."""
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",  # the rows that the other run has
        "logging_steps": 1,  # so that the record has a loss at each step
        "save_strategy": "no",
        "report_to": "none",
        "output_dir": str(out),
    }
    Trainer(
        model,
        TrainingArguments(**arguments | changes),
        train_dataset=dataset,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[parity.TrainerRecord(out=out)],
    ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
