"""Hugging Face's Trainer (torch DDP) as a backend of the suite: an adapter for a framework that owns its training loop.

Each train_step is a call of ``Trainer.train()`` over the rows of one optimizer step. The Trainer loads, shards, scales,
reduces, clips and steps; model, optimizer and schedule live on between the calls. Rows are flattened, not padded.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer, TrainingArguments, get_scheduler

from conformance.backend import BackendInfo, Kind, NamedTensors, Shard, StepMetrics, Support, Supported, Unsupported
from conformance.batch import Batch, Row
from conformance.layout import Layout
from conformance.scenario import Scenario

URL = "https://huggingface.co/docs/transformers/main_classes/trainer"
PARTS = ("model", "optimizer", "lr_scheduler")


class ObservedTrainer(Trainer):  # type: ignore[misc]
    """The Trainer as it is, watched through two of its public methods: gradients and logits exist only in a step."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        logits, labels = outputs.logits[0, :-1].detach().float(), inputs["labels"][0, 1:]
        self.logprobs.append(-torch.nn.functional.cross_entropy(logits, labels, reduction="none")[labels != -100])
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.token_count = int(num_items_in_batch)
        if self.accelerator.sync_gradients:  # after the last micro-batch: DDP has reduced, the Trainer clips next
            self.on_gradients()
        return loss


def collate(rows: list[Row]) -> Any:
    """All documents of a micro-batch one after another; positions that start again at 0 keep them apart."""
    documents = [document for row in rows for document in row.documents]
    labels = [[t if target else -100 for t, target in zip(d.tokens, d.targets, strict=True)] for d in documents]
    samples = zip(documents, labels, strict=True)
    return DataCollatorWithFlattening()([{"input_ids": list(d.tokens), "labels": wanted} for d, wanted in samples])


class HFTrainerBackend:
    """torch DDP through ``transformers.Trainer``."""

    @classmethod
    def describe(cls) -> BackendInfo:
        packages = ("torch", "transformers", "accelerate")
        return BackendInfo(name="hf-trainer", packages=packages, install="pip install parity-hf-trainer", url=URL)

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        if layout != Layout(dp=layout.dp):
            return Unsupported(f"this adapter runs the Trainer on plain DDP only; use dp{layout.world_size}")
        if scenario.precision == "fp16":
            return Unsupported("this adapter does not undo the Trainer's fp16 loss scaling; use bf16 or fp32")
        return Supported()

    def setup(self, scenario: Scenario, layout: Layout, weights: Path, device: str) -> dict[str, Any]:
        optimizer, schedule = scenario.optimizer, scenario.schedule
        sgd = optimizer.name == "sgd"
        args = TrainingArguments(
            output_dir=tempfile.gettempdir(),  # nothing is written
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            use_cpu=device == "cpu",
            bf16=scenario.precision == "bf16",
            max_steps=1,  # of one train() call
            per_device_train_batch_size=scenario.data.rows // (layout.dp * scenario.accumulation),
            gradient_accumulation_steps=scenario.accumulation,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            optim="sgd" if sgd else "adamw_torch_fused",
            optim_args=f"momentum={optimizer.momentum}" if sgd else None,
            learning_rate=optimizer.lr,
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            adam_epsilon=optimizer.eps,
            weight_decay=0.0 if sgd else optimizer.weight_decay,
            max_grad_norm=optimizer.max_grad_norm or 0.0,  # 0: no clipping
        )
        # Masters in float32, in the exact tier in float64: the default dtype says which.
        model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.get_default_dtype(), trust_remote_code=True)
        self.trainer = ObservedTrainer(model, args, data_collator=collate)
        # Given from outside, or every train() would start a new schedule of max_steps steps.
        name = "constant_with_warmup" if schedule.name == "constant" else schedule.name
        self.trainer.lr_scheduler = get_scheduler(
            name, self.trainer.create_optimizer(), schedule.warmup_steps, schedule.total_steps
        )
        kept = ("world_size", "optim", "max_grad_norm", "average_tokens_across_devices", "gradient_accumulation_steps")
        return {name: getattr(args, name) for name in kept} | {"attention": model.config._attn_implementation}

    def train_step(self, batch: Batch, on_gradients: Callable[[], None]) -> StepMetrics:
        trainer, args = self.trainer, self.trainer.args
        accumulation = args.gradient_accumulation_steps
        ranks = [
            batch.micro_batches(dp_rank=rank, dp_size=args.world_size, accumulation=accumulation)
            for rank in range(args.world_size)
        ]
        # Accelerate deals micro-batches to the ranks like cards.
        trainer.train_dataset = [row for deal in zip(*ranks, strict=True) for rows in deal for row in rows]
        trainer.on_gradients, trainer.logprobs = on_gradients, []
        trainer.train()
        log = trainer.state.log_history[0]
        mine = [row for rows in ranks[args.process_index] for row in rows]
        logprobs = torch.cat(trainer.logprobs).split([row.target_count for row in mine])
        return StepMetrics(
            loss_sum=log["loss"] * trainer.token_count,
            token_count=trainer.token_count,
            grad_norm=log["grad_norm"],
            lr=log["learning_rate"],
            logprobs={row.index: values for row, values in zip(mine, logprobs, strict=True) if row.target_count},
        )

    def _named(self, kind: Kind) -> NamedTensors:
        for name, parameter in self.trainer.model.named_parameters():
            yield name, (parameter if kind == "weight" else parameter.grad)

    def named_gradients(self) -> NamedTensors:
        return self._named("gradient")

    def named_weights(self) -> NamedTensors:
        return self._named("weight")

    def local_shards(self, kind: Kind) -> Iterator[Shard]:
        return (Shard(name, "full", tensor.detach()) for name, tensor in self._named(kind))

    def save(self, path: Path) -> None:
        if self.trainer.is_world_process_zero():
            torch.save({part: getattr(self.trainer, part).state_dict() for part in PARTS}, path / "state.pt")

    def load(self, path: Path) -> None:
        for part, state in torch.load(path / "state.pt", map_location=self.trainer.args.device).items():
            getattr(self.trainer, part).load_state_dict(state)

    def teardown(self) -> None:
        del self.trainer
