"""A record of DeepSpeed's engine, in two lines: ``torchrun --nproc_per_node 2 deepspeed_loop.py MODEL DATA OUT``."""

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import parity


def main(model_folder: str, data: str, out: str) -> None:
    deepspeed.init_distributed()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    texts = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
    rows = [tokenizer(text["question"] + text["answer"], return_tensors="pt").input_ids[0] for text in texts]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32")
    train(model, [rows[start : start + 4] for start in range(0, 16, 4)], out, stage=2)


def train(model: Any, batches: list[list[torch.Tensor]], out: str | Path, *, stage: int, **changes: Any) -> None:
    """A step for each batch, whose rows the ranks share; the loss is the mean over its tokens."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": len(batches[0]) // ranks,
        "gradient_clipping": 1e6,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config | changes, dist_init_required=False
    )
    with parity.record(engine, optimizer, out=out) as r:
        for batch in batches:
            own = [row.to(engine.device) for row in batch[rank::ranks]]
            total, tokens, summed = sum(len(row) - 1 for row in batch), sum(len(row) - 1 for row in own), 0.0
            for row in own:
                loss = engine(
                    input_ids=row[None], labels=row[None], num_items_in_batch=1
                ).loss  # summed over its tokens
                engine.backward(loss * ranks / total, scale_wrt_gas=False)
                engine.step()
                summed += loss.item()
            r.step(loss=summed / tokens, tokens=tokens, batch=own)
    engine.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
