"""transformers' Trainer (torch DDP) as a backend: each train_step is one ``Trainer.train()`` on the rows of one step.

The Trainer deals out rows, counts tokens, reduces, clips, steps and logs; model, optimizer and schedule stay the same.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, get_scheduler

import parity


class ObservedTrainer(Trainer):  # type: ignore[misc]
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.token_count = int(num_items_in_batch)
        if self.accelerator.sync_gradients:  # the last micro-batch: DDP has reduced, the Trainer clips next
            self.on_gradients("policy")
        return loss


class HFTrainerBackend:
    @classmethod
    def describe(cls) -> parity.BackendInfo:
        return parity.BackendInfo(name="hf-trainer", packages=("torch", "transformers", "accelerate"))

    @classmethod
    def supports(cls, scenario: parity.Scenario, layout: parity.Layout) -> parity.Support:
        if layout != parity.Layout(dp=layout.dp):
            return parity.Unsupported(f"the Trainer runs on plain DDP here; use dp{layout.world_size}")
        return (
            parity.Supported()
            if scenario.precision != "fp16"
            else parity.Unsupported("fp16 loss scaling is not undone; use bf16")
        )

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        o, s, k, (b1, b2) = scenario.optimizer, scenario.schedule, scenario.accumulation, scenario.optimizer.betas
        adamw = {"adam_beta1": b1, "adam_beta2": b2, "adam_epsilon": o.eps, "weight_decay": o.weight_decay}
        args = TrainingArguments(
            **({"optim": "sgd", "optim_args": f"momentum={o.momentum}"} if o.name == "sgd" else adamw),
            **{"learning_rate": o.lr, "max_grad_norm": o.max_grad_norm or 0.0},  # 0: no clipping
            **{"gradient_accumulation_steps": k, "per_device_train_batch_size": scenario.data.rows // (layout.dp * k)},
            **{"use_cpu": device == "cpu", "bf16": scenario.precision == "bf16"},
            **{"max_steps": 1, "logging_steps": 1, "train_sampling_strategy": "sequential"},  # for each train()
            **{"output_dir": ".", "save_strategy": "no", "disable_tqdm": True},  # nothing is written
        )
        # The default dtype is float64 in the exact tier, else float32: these are the master weights.
        code = parity.runs_code(folder := weights["policy"], trusted=scenario.trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.get_default_dtype(), trust_remote_code=code)
        self.trainer = ObservedTrainer(model, args, data_collator=lambda rows: parity.flatten(rows).as_inputs)
        name = s.name.replace("constant", "constant_with_warmup")
        # Otherwise the Trainer would create a new schedule in every train().
        self.trainer.lr_scheduler = get_scheduler(name, self.trainer.create_optimizer(), s.warmup_steps, s.total_steps)
        self.parts = (model, self.trainer.optimizer, self.trainer.lr_scheduler)
        return {"optimizer": repr(self.trainer.optimizer), "attention": model.config._attn_implementation}

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        dp, k = self.trainer.args.world_size, self.trainer.args.gradient_accumulation_steps
        ranks = [batch.micro_batches(dp_rank=rank, dp_size=dp, accumulation=k) for rank in range(dp)]
        # The Trainer's loader deals micro-batches to the ranks in turn, like cards.
        self.trainer.train_dataset = [row for turn in zip(*ranks, strict=True) for rows in turn for row in rows]
        self.trainer.on_gradients = on_gradients
        self.trainer.train()
        log = self.trainer.state.log_history[0]
        values = {"loss": log["loss"], "grad_norm": log["grad_norm"], "lr": log["learning_rate"]}
        return parity.StepMetrics(values=values | {"token_count": self.trainer.token_count})

    def named_tensors(self, kind: parity.TensorKind, model: str) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.trainer.model.named_parameters():
            yield name, parameter if kind == "weight" else parameter.grad

    def local_shards(self, kind: parity.TensorKind, model: str) -> Iterator[parity.Shard]:
        return parity.shards(self.named_tensors(kind, model))

    def save(self, path: Path) -> None:
        if self.trainer.is_world_process_zero():
            torch.save([part.state_dict() for part in self.parts], path / "state.pt")
        self.trainer._save_rng_state(str(path))

    def load(self, path: Path) -> None:
        for part, state in zip(self.parts, torch.load(path / "state.pt", map_location="cpu"), strict=True):
            part.load_state_dict(state)
        self.trainer._load_rng_state(str(path))

    def export(self, path: Path, model: str) -> None:
        self.trainer.model.save_pretrained(path, is_main_process=self.trainer.is_world_process_zero())

    def teardown(self) -> None:
        del self.trainer, self.parts
