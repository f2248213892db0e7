"""Defines trainers with common bugs, as backends on the plain one: ``buggy_trainers:TrainsPrompts`` is one of them."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from plain_backend import Plain, PlainTrainable
from torch import Tensor

from conformance.backends.protocol import NamedTensors, StepMetrics, Support, Supported, TensorKind
from conformance.spec.batch import Batch, Row
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario
from impl.objectives import advantages


class AdamTrainable(PlainTrainable):
    """Trains by torch.optim.AdamW, whose groups ``groups`` decides."""

    optimizer: torch.optim.Optimizer | None = None

    def decays(self, name: str, weight: Tensor) -> bool:
        return weight.ndim > 1

    def begin(self) -> torch.optim.Optimizer:
        assert self.config
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, weight in self.weights.items():
            groups[self.decays(name, weight)].append(weight)
        decay = self.config.weight_decay
        parts = [{"params": own, "weight_decay": decay * decays} for decays, own in groups.items() if own]
        return self.kind(parts, lr=self.config.lr, betas=self.config.betas, eps=self.config.eps)

    kind: ClassVar[Callable[..., torch.optim.Optimizer]] = torch.optim.AdamW

    def clipped(self, norm: float) -> float:
        assert self.config
        limit = self.config.max_grad_norm
        return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))

    def optimizer_step(self) -> float:
        self.optimizer = self.optimizer or self.begin()
        norm = math.hypot(*(float(gradient.norm()) for _, gradient in self.named_tensors("gradient")))
        for _, gradient in self.named_tensors("gradient"):
            gradient.mul_(self.clipped(norm))
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.step()
        self.steps += 1
        return norm

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        if kind in ("exp_avg", "exp_avg_sq") and self.optimizer:
            yield from ((name, self.optimizer.state[weight][kind]) for name, weight in self.weights.items())
        elif kind == "progress":
            yield "step", torch.tensor(self.steps, dtype=torch.float64)
            yield from super().named_tensors(kind)
        else:
            yield from super().named_tensors(kind)


class Adam(Plain):
    """Trains as AdamTrainable does, without a bug."""

    trainable: ClassVar[type[AdamTrainable]] = AdamTrainable

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        return Supported()

    def setup(self, *arguments: Any) -> dict[str, Any]:
        with mock.patch("impl.engine.adapter.switch_off_dropout"):  # its models are no modules
            return super().setup(*arguments)

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        for model in self.models.values():
            model.__class__ = self.trainable  # type: ignore[assignment]
        return super().train_step(batch, on_gradients)


class _ClipsEach(AdamTrainable):
    def finish_gradients(self) -> None:
        norm = math.hypot(*(float(gradient.norm()) for _, gradient in self.named_tensors("gradient")))
        for _, gradient in self.named_tensors("gradient"):
            gradient.mul_(dist.get_world_size()).mul_(self.clipped(norm * dist.get_world_size()))
        super().finish_gradients()
        for _, gradient in self.named_tensors("gradient"):
            gradient.div_(dist.get_world_size())


class ClipsBeforeReduction(Adam):
    """Clips the gradients of each rank, then averages them."""

    trainable = _ClipsEach


class _ClipsTensors(AdamTrainable):
    def finish_gradients(self) -> None:
        super().finish_gradients()
        for _, gradient in self.named_tensors("gradient"):
            gradient.mul_(self.clipped(float(gradient.norm())))


class ClipsTensors(Adam):
    """Clips each parameter's gradient by its own norm: another bug than clipping on each rank."""

    trainable = _ClipsTensors


class _L2(AdamTrainable):
    kind = torch.optim.Adam


class AddsL2(Adam):
    """Uses torch.optim.Adam, which adds weight decay to gradients."""

    trainable = _L2


class _DecaysNoEmbedding(AdamTrainable):
    def decays(self, name: str, weight: Tensor) -> bool:
        return super().decays(name, weight) and "embed" not in name


class DecaysNoEmbedding(Adam):
    """Leaves the embedding out of weight decay."""

    trainable = _DecaysNoEmbedding


class _DecaysNoProjection(AdamTrainable):
    def decays(self, name: str, weight: Tensor) -> bool:
        return super().decays(name, weight) and "down_proj" not in name


class DecaysNoProjection(Adam):
    """Leaves other parameters out of weight decay than any of the bugs that are known."""

    trainable = _DecaysNoProjection


class _DropsBackward(AdamTrainable):
    is_last = False

    def start_micro_batch(self, index: int, count: int) -> None:
        super().start_micro_batch(index, count)
        self.is_last = index == count - 1

    def backward(self, loss: Tensor) -> None:
        if not self.is_last:
            super().backward(loss)


class DropsLastMicroBatch(Adam):
    """Steps before the backward pass of the last micro-batch."""

    trainable = _DropsBackward


class _DropsSecondBackward(_DropsBackward):
    def start_micro_batch(self, index: int, count: int) -> None:
        super().start_micro_batch(index, count)
        self.is_last = index == 1


class DropsSecondMicroBatch(Adam):
    """Leaves out another micro-batch than the last one, of three or more."""

    trainable = _DropsSecondBackward


class TrainsPrompts(Adam):
    """Has labels for all tokens."""

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        rows = tuple(_with_targets(row, first=1) for row in batch.rows)
        return super().train_step(dataclasses.replace(batch, rows=rows), on_gradients)


class TrainsHalfOfPrompts(Adam):
    """Has labels for all tokens but the first three of a document."""

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        rows = tuple(_with_targets(row, first=3) for row in batch.rows)
        return super().train_step(dataclasses.replace(batch, rows=rows), on_gradients)


def _with_targets(row: Row, *, first: int) -> Row:
    documents = [
        dataclasses.replace(one, targets=tuple(n >= first for n in range(len(one.tokens)))) for one in row.documents
    ]
    return dataclasses.replace(row, documents=tuple(documents))


class NormalisesOverRollout(Adam):
    """Divides advantages by the standard deviation of all rewards, having subtracted the mean of all."""

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        def of_all(scores: Tensor, groups: object, *, by_std: bool) -> Tensor:
            return (scores - self.mean(scores)) / (scores.std() + 1e-6)

        with mock.patch.object(advantages, "group_advantages", of_all):
            return super().train_step(batch, on_gradients)

    def mean(self, scores: Tensor) -> Tensor:
        return scores.mean()


class SubtractsTheMedian(NormalisesOverRollout):
    """Subtracts the median instead, which is none of the bugs that are known."""

    def mean(self, scores: Tensor) -> Tensor:
        return scores.median()
