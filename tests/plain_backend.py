"""The smallest backend on the strategy interface, for tests of what is around backends: torch and nothing else.

Every rank holds the whole model, and gradients are added up over the ranks by hand. Data parallelism, exact and fp32.
It really trains, so its cells conform, and start in a moment. ``plain_backend:Plain`` names it; ``OtherPlain`` is a
second backend that does the same.
"""

from collections.abc import Iterator, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import transformers

from conformance.backend import BackendInfo, NamedTensors, Shard, Support, Supported, TensorKind, Unsupported
from conformance.batch import Batch, Row
from conformance.layout import Layout
from conformance.objective import Head
from conformance.scenario import OptimizerConfig, Scenario, ScheduleConfig
from impl.adapter import StrategyBackend
from impl.collate import MicroBatch
from impl.files import write_model
from impl.micro_batches import Loss, one_after_another
from impl.models import load_model
from impl.outputs import Outputs, Wanted
from impl.strategy import CONTEXTS, ContextConfig


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """What gradients are multiplied with."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


class PlainTrainable:
    """See impl.strategy.Trainable for the contract of each method."""

    source: Path
    model: transformers.PreTrainedModel
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    max_norm: float | None

    def __init__(self, head: Head) -> None:
        self.head = head

    def load_model(self, path: Path) -> transformers.PreTrainedModel:
        self.source = path
        return load_model(path, dtype=torch.get_default_dtype(), attention="eager", head=self.head)

    def prepare(
        self, model: transformers.PreTrainedModel, optimizer: OptimizerConfig | None, schedule: ScheduleConfig
    ) -> None:
        self.model = model
        if optimizer:
            self.max_norm = optimizer.max_grad_norm
            self.optimizer = self.create_optimizer(model, optimizer)
            self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule.factor)

    def create_optimizer(self, model: Any, config: OptimizerConfig) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        if config.name == "sgd":
            return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum)
        decayed = [{"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay}]
        others = [{"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]
        return torch.optim.AdamW([*decayed, *others], lr=config.lr, betas=config.betas, eps=config.eps)

    def forward_backward(
        self, inputs: Sequence[MicroBatch], *, want: Wanted, temperature: float = 1.0, loss: Loss | None
    ) -> list[Outputs]:
        return one_after_another(self, inputs, want=want, temperature=temperature, loss=loss)

    def start_micro_batch(self, index: int, count: int) -> None:
        if index == 0:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)

    def forward(self, inputs: MicroBatch, *, want: Wanted, temperature: float) -> Outputs:
        logits = self.model(input_ids=inputs.tokens, position_ids=inputs.positions, use_cache=False).logits
        if self.head == "value":
            return Outputs(values=logits[..., 0].where(inputs.real, 0))
        every = torch.log_softmax(logits.float() / temperature, dim=-1)
        labels = inputs.labels.clamp(min=0)[..., None]
        found = {"logprobs": every.gather(-1, labels)[..., 0], "entropy": -(every.exp() * every).sum(-1)}
        return Outputs(**{name: found[name].where(inputs.targets, 0) for name in want if name in found})

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def finish_gradients(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)

    def optimizer_step(self) -> float:
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = float(sum(gradient.square().sum() for gradient in gradients)) ** 0.5
        for gradient in gradients:
            gradient.mul_(clip_coefficient(norm, self.max_norm))
        self.optimizer.step()
        self.schedule.step()
        return norm

    def learning_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        for name, parameter in self.model.named_parameters():
            tensor = parameter.detach() if kind == "weight" else parameter.grad
            assert tensor is not None
            yield name, tensor

    def local_shards(self, kind: TensorKind) -> Iterator[Shard]:
        return starmap(lambda name, tensor: Shard(name, "full", tensor), self.named_tensors(kind))

    def resolved(self) -> dict[str, Any]:
        return {"model": type(self.model).__name__}

    def save_ckpt(self, path: Path) -> None:
        if dist.get_rank() == 0:
            torch.save([part.state_dict() for part in self._parts()], path)
        dist.barrier()

    def load_ckpt(self, path: Path) -> None:
        for part, state in zip(self._parts(), torch.load(path), strict=True):
            part.load_state_dict(state)

    def _parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.schedule

    def save_model(self, path: Path) -> None:
        write_model(path, source=self.source, weights=self.named_tensors("weight"))

    def teardown(self) -> None:
        del self.model


class PlainContext:
    """See impl.strategy.Context."""

    sequence_multiple = 1

    def __init__(self, config: ContextConfig) -> None:
        self.config = config
        self.data_rank, self.data_size = dist.get_rank(), config.layout.dp

    def setup_distributed(self) -> None:
        pass

    def setup_ring_attn(self) -> None:
        raise ValueError("there is no ring")

    def setup_dataloader(self, batch: Batch) -> list[tuple[Row, ...]]:
        count = self.config.accumulation
        return batch.micro_batches(dp_rank=self.data_rank, dp_size=self.data_size, accumulation=count)

    def all_reduce(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item()

    def all_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.data_size
        dist.all_gather_object(values, value)
        return values

    def new_trainable(self, head: Head) -> PlainTrainable:
        return PlainTrainable(head)

    def teardown(self) -> None:
        pass


CONTEXTS["plain"] = "plain_backend:PlainContext"


class Plain(StrategyBackend):
    """The backend."""

    info = BackendInfo(name="plain", packages=("torch", "transformers"))
    preload = ("transformers.models.llama.modeling_llama",)
    seams: ClassVar[dict[str, str]] = {"clip_coefficient": "plain_backend:clip_coefficient"}

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        if scenario.precision not in ("exact", "fp32") or layout != Layout(dp=layout.dp):
            return Unsupported(f"plain torch is for data parallelism in exact and fp32; use dp{layout.world_size}")
        return Supported()


class OtherPlain(Plain):
    """Another backend, by name."""
