"""A record of a loop of one's own, in three lines: ``python accelerate_loop.py MODEL DATA OUT``."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

import parity


def main(model_folder: str, data: str, out: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    texts = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
    rows = [tokenizer(text["question"] + text["answer"], truncation=True, max_length=128).input_ids for text in texts]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32")
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), rows, out)


def train(model: Any, optimizer: Any, rows: list[list[int]], out: str | Path) -> None:
    """Four steps of four rows, a micro-batch each; the loss is the mean over the tokens of the step."""
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    with parity.record(model, optimizer, out=out) as r:
        for step in range(4):
            batch = [torch.tensor(row, device=accelerator.device) for row in rows[4 * step : 4 * step + 4]]
            tokens = sum(len(row) - 1 for row in batch)
            total = 0.0
            for row in batch:
                summed = model(input_ids=row[None], labels=row[None], num_items_in_batch=1).loss
                accelerator.backward(summed / tokens)
                total += summed.item()
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            r.step(loss=total / tokens, tokens=tokens, batch=batch)


if __name__ == "__main__":
    main(*sys.argv[1:])
