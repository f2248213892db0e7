"""Provides optional base classes of adapters: for any framework, and for whole trainings by Hugging Face trainers.

An adapter that derives from one has only the code that its framework needs.
"""

import contextlib
import copy
import functools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist

from conformance.backends.adapter_helpers import Paused, by_row, shards, whole_tensors
from conformance.backends.protocol import (
    NamedTensors,
    Shard,
    StepMetrics,
    Support,
    Supported,
    TensorKind,
    Unsupported,
)
from conformance.spec.batch import Batch, Row
from conformance.spec.conventions import AdvantageEpsilon, GenerationDenominator
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario


class FrameworkAdapter:
    """Is the base of adapters for frameworks. A subclass has ``describe``, ``setup``, ``train_step`` and ``tensors``.

    ``setup`` sets ``scenario`` and ``layout``, and enters what lasts until ``teardown`` into ``stack``.
    """

    fresh_ranks = True  # frameworks leave state behind in the process
    scenario: Scenario
    layout: Layout

    @classmethod
    def refuses(cls, scenario: Scenario, layout: Layout) -> str:
        """Returns why the cell is not supported; empty if it is."""
        return ""

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        reason = cls.refuses(scenario, layout)
        return Unsupported(reason) if reason else Supported()

    @functools.cached_property
    def stack(self) -> contextlib.ExitStack:
        return contextlib.ExitStack()

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Replaces an attribute of ``owner`` until ``teardown``."""
        self.stack.enter_context(mock.patch.object(owner, name, value))

    def own(self, batch: Batch) -> list[tuple[Row, ...]]:
        """Returns the micro-batches of this rank, for data parallelism over all ranks."""
        k = self.scenario.accumulation
        return batch.micro_batches(dp_rank=dist.get_rank(), dp_size=self.layout.dp, accumulation=k)

    def tensors(self, kind: TensorKind, model: str) -> NamedTensors:
        """Yields the parameters of this rank, or their gradients."""
        raise NotImplementedError

    def named_tensors(self, kind: TensorKind, model: str) -> NamedTensors:
        return whole_tensors(self.tensors(kind, model))

    def local_shards(self, kind: TensorKind, model: str) -> Iterator[Shard]:
        return shards(self.tensors(kind, model))

    def teardown(self) -> None:
        self.stack.close()
        self.__dict__.clear()


class Loader:
    """Stands in for a framework's loader: hands out ``waiting``, which each ``train_step`` fills, without an end."""

    sampler = None

    def __init__(self) -> None:
        self.waiting: list[Any] = []

    def __len__(self) -> int:
        return 10**6

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.waiting.pop(0)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class PausedTrainer:
    """Is put before a class of trainers by ``TrainerAdapter.paused``: pauses ``train()`` where it asks for rows."""

    adapter: Any

    def get_train_dataloader(self: Any, *_: Any, **__: Any) -> Iterator[Any]:
        self.adapter.trainer = self
        while True:  # without a length; the step count is max_steps
            for examples in self.adapter.loop.pause():
                yield self.data_collator(examples)

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        # NaN: it counts no tokens of the step, and divides each micro-batch by its own. The log may have the next rate.
        count = math.nan if num_items_in_batch is None else float(num_items_in_batch)
        self.adapter.values = {"lr": self.optimizer.param_groups[0]["lr"], "token_count": count}
        if self.accelerator.sync_gradients:  # the last micro-batch: DDP has reduced, the trainer clips next
            self.adapter.on_gradients(self.adapter.trained)
        return loss

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.args.device.type == "cpu":  # "cpu:0", which torch.load refuses and newer transformers replace
            self.args._setup_devices = torch.device("cpu")
        result = super().train(*args, **kwargs)  # type: ignore[misc]
        self.adapter.loop.pause()  # the last step of all ends train(), where the others ask for more rows
        return result


class TrainerAdapter(FrameworkAdapter):
    """Is the base of adapters for frameworks that train by a Hugging Face ``Trainer``, on plain DDP.

    Their ``train()`` runs whole, and pauses where it asks for the rows of the next step. A subclass has ``describe``,
    ``example`` and ``setup``, which sets ``trainer`` to one of the class ``paused(kind)`` and calls ``start``. The kind
    appends the log-probs of the targets of each micro-batch, (targets,), to ``self.adapter.seen``.
    """

    trained: ClassVar[str] = "policy"  # the role of the trainer's model
    trainer: Any
    values: dict[str, float]  # of the step, from the trainer

    @classmethod
    def refuses(cls, scenario: Scenario, layout: Layout) -> str:
        """Returns why the cell is not supported; empty if it is."""
        if layout != Layout(dp=layout.dp):
            return f"this adapter runs plain DDP; use dp{layout.world_size}"
        if scenario.schedule.name != "constant" and scenario.steps > scenario.schedule.total_steps:
            return "train() ends with its schedule; use at least as many schedule.total_steps as steps"
        if scenario.optimizer.frozen or scenario.lora or scenario.balances_routers or scenario.precision == "fp16":
            return "this adapter has no frozen parameters, LoRA, z-loss or fp16; use exact or bf16"
        return ""

    def options(self, scenario: Scenario, layout: Layout, device: str) -> dict[str, Any]:
        """Returns the options of ``TrainingArguments``, as a user of the framework writes them."""
        self.scenario, self.layout = scenario, layout
        o, s, k = scenario.optimizer, scenario.schedule, scenario.accumulation
        adamw = {"adam_beta1": o.betas[0], "adam_beta2": o.betas[1], "adam_epsilon": o.eps}
        minimum = {"lr_scheduler_kwargs": {"min_lr_rate": s.min_factor}} if s.min_factor else {}
        name = "cosine_with_min_lr" if minimum else s.name.replace("constant", "constant_with_warmup")
        return {
            **({"optim": "sgd", "optim_args": f"momentum={o.momentum}"} if o.name == "sgd" else adamw),
            **{"learning_rate": o.lr, "weight_decay": o.weight_decay, "max_grad_norm": o.max_grad_norm or 0.0},
            **{"lr_scheduler_type": name, "warmup_steps": s.warmup_steps, **minimum},
            **{"max_steps": max(s.total_steps, scenario.steps)},
            **{"ignore_data_skip": True},  # the suite gives the rows after a resume
            **{"gradient_accumulation_steps": k, "bf16": scenario.precision == "bf16", "use_cpu": device == "cpu"},
            **{"per_device_train_batch_size": scenario.data.rows // (layout.dp * k * scenario.rows_together)},
            **{"gradient_checkpointing": False},
            **{"logging_steps": 1, "disable_tqdm": True, "report_to": "none", "save_strategy": "no"},
            **{"output_dir": self.stack.enter_context(tempfile.TemporaryDirectory())},  # for logs of the framework
        }

    def paused(self, kind: type) -> Any:
        """Returns a subclass of a class of trainers, whose ``train()`` pauses."""
        return type(kind.__name__, (PausedTrainer, kind), {"adapter": self})

    def train(self, checkpoint: str | None) -> Any:
        """Runs the framework's training, from its beginning or from a checkpoint."""
        return self.trainer.train(resume_from_checkpoint=checkpoint)

    def start(self, checkpoint: str | None = None) -> dict[str, Any]:
        """Runs ``train`` until it asks for rows."""
        self.loop = Paused(lambda _: self.train(checkpoint))
        self.stack.callback(self.loop.close)
        self.loop.resume()
        attention = self.trainer.model.config._attn_implementation
        return {"optimizer": repr(self.trainer.optimizer), "attention": attention}

    def step(self, micro_batches: list[list[Any]], on_gradients: Callable[[str], None]) -> dict[str, float]:
        """Runs ``train`` until it asks for the rows of the step after this one; returns what it has logged."""
        self.on_gradients, self.seen = on_gradients, list[Any]()
        self.loop.resume(micro_batches)
        log = next(line for line in reversed(self.trainer.state.log_history) if "loss" in line)
        return {**self.values, "loss": log["loss"], "grad_norm": log["grad_norm"]}

    def example(self, row: Row) -> Any:
        """Returns a row as the framework's data set gives it to the collator."""
        raise NotImplementedError

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        own, found = self.own(batch), dict[int, torch.Tensor]()
        values = self.step([[self.example(row) for row in rows] for rows in own], on_gradients)
        for rows, logprobs in zip(own, self.seen, strict=True):
            found |= by_row(logprobs, rows)
        return StepMetrics(values=values, rows={"logprob": found})

    def tensors(self, kind: TensorKind, model: str) -> NamedTensors:
        role = self.trainer.ref_model if model == "reference" else self.trainer.model
        for name, parameter in role.named_parameters():
            yield name.removeprefix("module."), parameter if kind == "weight" else parameter.grad

    def save(self, path: Path) -> None:
        self.trainer.args.output_dir = str(path)
        self.trainer._save_checkpoint(self.trainer.model, None)

    def load(self, path: Path) -> None:
        self.loop.close()
        (checkpoint,) = path.glob("checkpoint-*")
        self.start(str(checkpoint))

    def export(self, path: Path, model: str) -> None:
        self.trainer.save_model(str(path))


class GrpoTrainerAdapter(TrainerAdapter):
    """Is the base of adapters for TRL's ``GRPOTrainer`` and its descendants. Frozen responses stand in for generation.

    ``prompt``: an empty row of the data set. ``self.rollout`` has the responses of this rank. The trainer appends for
    each micro-batch the mask of its responses, and numbers of the same shape by their keys in ``StepMetrics.rows``.
    """

    objectives: ClassVar = ("grpo",)
    conventions: ClassVar[tuple[Any, ...]] = (AdvantageEpsilon(value=1e-4), GenerationDenominator())
    prompt: ClassVar[Mapping[str, Any]]
    losses: ClassVar = {  # loss_type by loss_mode and loss_agg_mode
        ("vanilla", "token-mean"): "dapo",
        ("vanilla", "seq-mean-token-mean"): "grpo",
        ("vanilla", "seq-mean-token-sum-norm"): "dr_grpo",
        ("gspo", "token-mean"): "dapo",
        ("gspo", "seq-mean-token-mean"): "grpo",
        ("cispo", "token-mean"): "cispo",
    }

    @classmethod
    def refuses(cls, scenario: Scenario, layout: Layout) -> str:
        o: Any = scenario.objective
        if scenario.data.packed:
            return "GRPOTrainer has rows of one response; use data.packed = false"
        if o.kl_coef or o.kl_loss_type != "low_var_kl":
            return "GRPOTrainer has k3 in the loss, and no KL per token in rewards"
        if not o.recompute_old_logprobs or o.rollout_is_threshold:
            return "this adapter gives no log-probs of a sampler; use recompute_old_logprobs = true"
        if o.replay_sampling_mask:
            return "GRPOTrainer takes log-probs over the whole vocabulary; use replay_sampling_mask = false"
        if (o.loss_mode, o.loss_agg_mode) not in cls.losses:
            return f"GRPOTrainer has no {o.loss_agg_mode} with {o.loss_mode}"
        if o.loss_mode == "cispo" and o.clip_ratio_low < 1:
            return "GRPOTrainer bounds ratios of CISPO from above only; use clip_ratio_low = 1.0"
        return super().refuses(scenario, layout)

    def options(self, scenario: Scenario, layout: Layout, device: str) -> dict[str, Any]:
        o: Any = scenario.objective
        cispo = o.loss_mode == "cispo"
        return {
            **super().options(scenario, layout, device),
            **{"steps_per_generation": o.mini_batches * scenario.accumulation, "num_iterations": o.ppo_epochs},
            **{"num_generations": 4, "temperature": o.temperature, "disable_dropout": True},
            **{"loss_type": self.losses[o.loss_mode, o.loss_agg_mode], "beta": o.kl_loss_coef},
            **({"max_completion_length": int(o.loss_scale_factor)} if o.loss_scale_factor else {}),  # dr_grpo's divisor
            **{"importance_sampling_level": "sequence" if o.loss_mode == "gspo" else "token"},
            **{"epsilon": o.clip_ratio_low, "epsilon_high": o.clip_ratio_high + cispo},  # there, of the ratio itself
            **{"delta": None if cispo else o.clip_ratio_c},
            **{"scale_rewards": "group" if o.norm_adv_by_std_in_grpo and o.adv_estimator == "grpo" else "none"},
        }

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        own = self.own(batch)
        if batch.rollout:
            self.rollout = [row.documents[0] for one in batch.rollout for rows in self.own(one) for row in rows]
        prompts = [[copy.deepcopy(self.prompt) for _ in self.rollout] for _ in own]
        values = self.step(prompts, on_gradients)
        found: dict[str, dict[int, torch.Tensor]] = {}
        for rows, (mask, columns) in zip(own, self.seen, strict=True):
            for key, numbers in columns.items():
                if numbers is not None:
                    found.setdefault(key, {}).update(by_row(numbers.detach()[mask.bool()], rows))
        count = self.trainer.accelerator.reduce(sum(mask.sum() for mask, _ in self.seen))
        return StepMetrics(values={**values, "token_count": int(count)}, rows=found)
