"""A record of verl's engine. ``torchrun --nproc_per_node 2 verl_engine.py MODEL DATA OUT``."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import sft_loss

import parity


def recorded(engine: Any, out: str | Path) -> parity.Recorder:
    """Records every ``train_batch`` of an engine, of SFT, actor or critic; its loss is scaled by verl for each rank."""
    recorder = parity.record(engine.module, engine.optimizer, out=out)
    train_batch = engine.train_batch

    def recording(data: Any, loss_function: Any) -> Any:
        rows = list(data["input_ids"].unbind())
        output = train_batch(data, loss_function)
        recorder.step(loss=sum(output["loss"]), batch=rows)
        return output

    engine.train_batch = recording
    return recorder


def main(model_folder: str, data: str, out: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    texts = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
    rows = [tokenizer(text["question"] + text["answer"], return_tensors="pt").input_ids[0] for text in texts]
    worker = build(model_folder)
    train(worker, [rows[start : start + 4] for start in range(0, 16, 4)], out)


def build(model_folder: str) -> TrainingWorker:
    """Builds verl's worker with its FSDP2 engine in float32."""
    dtypes = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=model_folder, load_tokenizer=False, override_config={"attn_implementation": "sdpa"}
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2", mixed_precision=dtypes, use_dynamic_bsz=False, micro_batch_size_per_gpu=1
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=4, clip_grad=1e6),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(sft_loss, config=None))
    return worker


def train(worker: TrainingWorker, batches: list[list[torch.Tensor]], out: str | Path) -> None:
    """A step for each batch, whose rows the ranks share."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with recorded(worker.engine, out):
        for batch in batches:
            own = batch[rank::ranks]
            columns = {
                "input_ids": own,
                "position_ids": [torch.arange(len(row)) for row in own],
                "loss_mask": [torch.ones_like(row) for row in own],
            }
            nested = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in columns.items()}
            settings = {"temperature": 1.0, "global_batch_size": len(batch), "update_lr_scheduler": True}
            worker.train_batch(tu.get_tensordict(nested, settings))


if __name__ == "__main__":
    main(*sys.argv[1:])
