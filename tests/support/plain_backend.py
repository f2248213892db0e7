"""Implements the smallest backend on the strategy interface, for tests of the code around backends.

Every rank holds the whole model, and gradients are summed over the ranks: data parallelism in exact and fp32. It trains
by SGD with the objectives of impl. The forward pass is the oracle's, so that ranks start fast, without transformers and
torch.optim. Its name is ``plain_backend:Plain``; ``plain_backend:OtherPlain`` is a second one that does the same.
"""

import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.backends.protocol import (
    BackendInfo,
    NamedTensors,
    Shard,
    Support,
    Supported,
    TensorKind,
    Unsupported,
)
from conformance.models.families import read_architecture
from conformance.oracle.decoder import forward, load_weights
from conformance.oracle.primitives import Policy, Weights
from conformance.spec.batch import Batch, Row
from conformance.spec.layout import Layout
from conformance.spec.observables import Head
from conformance.spec.scenario import OptimizerConfig, Scenario, ScheduleConfig
from impl.engine.adapter import ReferenceBackend
from impl.interface.micro_batches import Loss, MicroBatch, Outputs, Wanted, run_micro_batches
from impl.interface.sharded_safetensors import SliceReader
from impl.interface.trainable import AT_ONCE, CONTEXTS, ContextConfig, Dtype, Writing, WrittenKind
from impl.models.export import write_model


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """What gradients are multiplied with."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


class PlainTrainable:
    """See impl.interface.trainable.Trainable for the contract of each method."""

    source: Path
    weights: Weights
    config: OptimizerConfig | None
    schedule: ScheduleConfig
    router_loss_factor = 0.0

    def __init__(self, head: Head) -> None:
        self.head = head
        self.steps = 0
        self.velocity: Weights = {}

    def load_model(self, path: Path) -> Weights:
        self.source, self.architecture = path, read_architecture(path)
        return load_weights(path, self.architecture, torch.get_default_dtype())

    def prepare(self, model: Weights, optimizer: OptimizerConfig | None, schedule: ScheduleConfig) -> None:
        self.weights, self.config, self.schedule = model, optimizer, schedule
        for weight in model.values():
            weight.requires_grad_(optimizer is not None)

    def create_optimizer(self, model: Weights, config: OptimizerConfig) -> None:
        raise NotImplementedError("it has none of torch's: importing these takes a second in every rank")

    def forward_backward(
        self,
        inputs: Sequence[MicroBatch],
        *,
        want: Wanted,
        temperature: float = 1.0,
        loss: Loss | None,
        terms: None = None,
    ) -> list[Outputs]:
        return run_micro_batches(self, inputs, want=want, temperature=temperature, loss=loss)

    def start_micro_batch(self, index: int, count: int) -> None:
        if index == 0:
            for weight in self.weights.values():
                weight.grad = torch.zeros_like(weight)

    def forward(self, inputs: MicroBatch, *, want: Wanted, temperature: float) -> Outputs:
        output = torch.stack([self._row(*row) for row in zip(inputs.tokens, inputs.positions, strict=True)])
        if self.head == "value":
            return Outputs(values=output[..., 0].where(inputs.real, 0))
        every = torch.log_softmax(output / temperature, dim=-1)
        labels = inputs.labels.clamp(min=0)[..., None]
        found = {"logprobs": every.gather(-1, labels)[..., 0], "entropy": -(every.exp() * every).sum(-1)}
        found["targets"] = inputs.targets.to(every.dtype)
        return Outputs(**{name: found[name].where(inputs.targets, 0) for name in want if name in found})

    def _row(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits or values of a row, document by document."""
        dtype = torch.get_default_dtype()
        documents = tokens.tensor_split((positions == 0).nonzero().flatten()[1:].tolist())
        return torch.cat([forward(d, self.weights, self.architecture, Policy(dtype, dtype)) for d in documents])

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def finish_gradients(self) -> None:
        for _, gradient in self.named_tensors("gradient"):
            dist.all_reduce(gradient)

    def optimizer_step(self) -> float:
        assert self.config
        norm = float(sum(gradient.square().sum() for _, gradient in self.named_tensors("gradient"))) ** 0.5
        clip, lr = clip_coefficient(norm, self.config.max_grad_norm), self.learning_rate()
        for name, gradient in self.named_tensors("gradient"):
            gradient.mul_(clip)
            before = self.velocity.get(name)
            self.velocity[name] = gradient if before is None else self.config.momentum * before + gradient
            self.weights[name].data.sub_(lr * self.velocity[name])
        self.steps += 1
        return float(norm)

    def learning_rate(self) -> float:
        assert self.config
        return self.config.lr * self.schedule.factor(self.steps)

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        if kind == "progress":
            yield "schedule", torch.tensor(self.steps, dtype=torch.float64)
        elif kind == "momentum_buffer":
            yield from self.velocity.items()
        elif kind in ("weight", "gradient"):
            for name, weight in self.weights.items():
                tensor = weight.detach() if kind == "weight" else weight.grad
                assert tensor is not None
                yield name, tensor

    def write_state(self, kind: WrittenKind, read: SliceReader) -> None:
        for name, weight in self.weights.items():
            if kind == "weight":
                weight.data = read.whole(name)
            else:
                assert kind == "momentum_buffer", f"it has no {kind}"
                self.velocity[name] = read.whole(name)

    def set_progress(self, progress: Mapping[str, float]) -> None:
        self.steps = int(progress["schedule"])

    def local_shards(self, kind: TensorKind) -> Iterator[Shard]:
        return (Shard(name, "full", tensor) for name, tensor in self.named_tensors(kind))

    def resolved(self) -> dict[str, Any]:
        return {"dtype": str(torch.get_default_dtype())}

    def save_ckpt(self, path: Path, when: Writing = AT_ONCE) -> None:
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        torch.save([weights, self.velocity, self.steps], state := io.BytesIO())
        when.add(lambda: dist.get_rank() or path.write_bytes(state.getvalue()))

    def load_ckpt(self, path: Path) -> None:
        weights, self.velocity, self.steps = torch.load(path)
        for name, weight in self.weights.items():
            weight.data = weights[name]

    def save_model(self, path: Path, *, dtype: Dtype = "source") -> None:
        write_model(path, source=self.source, weights=self.named_tensors("weight"), dtype=dtype)

    def teardown(self) -> None:
        self.weights = {}


class PlainContext:
    """See impl.interface.trainable.Context."""

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

    def all_reduce_tensor(self, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def all_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.data_size
        dist.all_gather_object(values, value)
        return values

    def new_trainable(self, head: Head) -> PlainTrainable:
        return PlainTrainable(head)

    def library_generators(self) -> dict[str, Tensor]:
        return {}

    def set_library_generators(self, states: Mapping[str, Tensor]) -> None:
        assert not states, f"{type(self).__name__} has no generators {', '.join(states)}"

    def teardown(self) -> None:
        pass


CONTEXTS["plain"] = "plain_backend:PlainContext"


class Plain(ReferenceBackend):
    """The backend."""

    info = BackendInfo(name="plain", packages=("torch",))
    preload = ("transformers",)  # or each fresh rank imports it to read the configuration
    traced: Any = None  # it has no modules; plain_traced.py has
    seams: ClassVar[dict[str, str]] = {
        "clip_coefficient": "plain_backend:clip_coefficient",
        "step_totals": "impl.engine.trainer:step_totals",
    }

    @classmethod
    def describe(cls) -> BackendInfo:
        """Each variant has a name of its own."""
        return dataclasses.replace(cls.info, name=cls.__name__.lower())

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        if layout != Layout(dp=layout.dp):
            return Unsupported(f"plain torch is data parallel; use dp{layout.world_size}")
        if scenario.precision not in ("exact", "fp32") or scenario.optimizer.name != "sgd":
            return Unsupported("plain torch is for exact and fp32, and for sgd")
        return Supported()


class OtherPlain(Plain):
    """Another backend, by name."""
