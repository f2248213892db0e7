"""Defines backends that leave out a part of an update or a step and show what should have been."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from conformance.backends.protocol import StepMetrics, TensorKind
from conformance.spec.batch import Batch
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario
from impl.deepspeed.adapter import DeepspeedBackend
from impl.engine import hugging_face
from impl.fsdp2.adapter import Fsdp2Backend
from impl.megatron.adapter import MegatronBackend
from impl.objectives.policy_gradient import SftFunctions


class DropsTheLastMicroBatch(Fsdp2Backend):
    """The last micro-batch has no gradient, and those of the others are as much larger as the mean asks for."""

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        evaluate, count, number = SftFunctions.evaluate, self.context.config.accumulation, iter(range(10**6))

        def scaled(functions: Any, model: str, outputs: Any, *rest: Any, **named: Any) -> Any:
            factor = 0.0 if next(number) == count - 1 else count / (count - 1)
            fixed = outputs.logprobs.detach()
            logprobs = fixed + factor * (outputs.logprobs - fixed)
            return evaluate(functions, model, replace(outputs, logprobs=logprobs), *rest, **named)

        with patch.object(SftFunctions, "evaluate", scaled):
            return super().train_step(batch, on_gradients)


class UpdatesEverySecondParameter(Fsdp2Backend):
    """Every second parameter has a learning rate of 0."""

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        model: Any = self.models["policy"]
        kept = [p.detach().to_local().numpy().copy() for p in [*model.model.parameters()][::2]]  # below the watch
        metrics = super().train_step(batch, on_gradients)
        for parameter, old in zip([*model.model.parameters()][::2], kept, strict=True):
            parameter.detach().to_local().copy_(torch.from_numpy(old))
        return metrics


class SavesTheStepBefore(Fsdp2Backend):
    """A checkpoint has the weights of the step before, and optimizer states of its own step."""

    before: list[Any]

    def _weights(self) -> list[torch.Tensor]:
        model: Any = self.models["policy"].model  # type: ignore[attr-defined]
        return [parameter.detach().to_local() for parameter in model.parameters()]

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        self.before = [tensor.numpy().copy() for tensor in self._weights()]  # below the watch
        return super().train_step(batch, on_gradients)

    def save(self, path: Path) -> None:
        for tensor, before in zip(self._weights(), self.before, strict=True):
            tensor.copy_(torch.from_numpy(before))
        super().save(path)


class CopiesTheFirstRank(Fsdp2Backend):
    """The last tensor-parallel rank never trains its copy of a norm, and reports what the first rank has."""

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        model: Any = self.models["policy"].model  # type: ignore[attr-defined]
        own = model.model.layers[0].input_layernorm.weight.detach().to_local()
        kept = own.clone()
        metrics = super().train_step(batch, on_gradients)
        self.updated = own.clone()
        if dist.get_rank():
            own.copy_(kept)
        shared = [metrics]
        dist.broadcast_object_list(shared, src=0)
        return shared[0]

    def local_shards(self, kind: TensorKind, model: str) -> Any:
        for shard in super().local_shards(kind, model):
            shown = shard.tensor.detach().clone()
            if "input_layernorm" in shard.name or kind == "gradient":
                whole: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(whole, shown)
                shown = whole[0] if whole[0].shape == shown.shape and "norm" in shard.name else shown
            yield replace(shard, tensor=shown)


class EvaluatesThePolicyAsCritic(Fsdp2Backend):
    """The critic's layers are the policy's where its values are computed."""

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        critic: Any = self.models["critic"]
        policy = dict(self.models["policy"].model.named_parameters())  # type: ignore[attr-defined]
        own = critic.forward_backward

        def by_policy(*arguments: Any, **named: Any) -> Any:
            if named.get("loss") is not None:
                return own(*arguments, **named)
            kept = {}
            for name, parameter in critic.model.named_parameters():
                if name in policy and policy[name].shape == parameter.shape:
                    kept[name] = parameter.detach().to_local().clone()
                    parameter.detach().to_local().copy_(policy[name].detach().to_local())
            found = own(*arguments, **named)
            for name, parameter in critic.model.named_parameters():
                if name in kept:
                    parameter.detach().to_local().copy_(kept[name])
            return found

        critic.forward_backward = by_policy
        try:
            return super().train_step(batch, on_gradients)
        finally:
            del critic.forward_backward


class DropsHalfAsOften(Fsdp2Backend):
    """Dropout has half of the requested rate."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        with patch.object(hugging_face, "DROPOUT_RATE", hugging_face.DROPOUT_RATE / 2):
            return super().setup(*arguments)


class MergesMicroBatches:
    """All rows of a rank are one micro-batch, whatever was requested. All numbers are right."""

    def setup(self, scenario: Scenario, *arguments: Any) -> dict[str, Any]:
        resolved: dict[str, Any] = super().setup(replace(scenario, accumulation=1), *arguments)  # type: ignore[misc]
        return resolved


class Fsdp2MergesMicroBatches(MergesMicroBatches, Fsdp2Backend):
    pass


class DeepspeedMergesMicroBatches(MergesMicroBatches, DeepspeedBackend):
    pass


class MegatronMergesMicroBatches(MergesMicroBatches, MegatronBackend):
    pass


class ExchangesRows(Fsdp2Backend):
    """Each of two data ranks computes the rows of the other one, and reports its own, which it is sent."""

    def setup(self, scenario: Scenario, layout: Layout, *arguments: Any) -> dict[str, Any]:
        resolved = super().setup(scenario, layout, *arguments)
        context: Any = self.context
        context.setup_dataloader = lambda batch: batch.micro_batches(
            dp_rank=1 - context.data_rank, dp_size=2, accumulation=scenario.accumulation
        )
        return resolved

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        metrics = super().train_step(batch, on_gradients)
        rows: list[Any] = [None, None]
        dist.all_gather_object(rows, metrics.rows)
        return replace(metrics, rows=rows[1 - dist.get_rank()])


class KeepsRoundedMoments(Fsdp2Backend):
    """The optimizer's moments are rounded to bfloat16 after each step, and shown as they were before."""

    def _states(self) -> Any:
        yield from self.models["policy"].optimizer.state.values()  # type: ignore[attr-defined]

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        metrics = super().train_step(batch, on_gradients)
        self.shown = [state["exp_avg"].clone() for state in self._states()]
        for state in self._states():
            state["exp_avg"].copy_(state["exp_avg"].bfloat16().to(state["exp_avg"].dtype))
        return metrics

    def named_tensors(self, kind: TensorKind, model: str) -> Any:
        if kind == "exp_avg":
            rounded = [state["exp_avg"].clone() for state in self._states()]
            for state, shown in zip(self._states(), self.shown, strict=True):
                state["exp_avg"].copy_(shown)
            yield from super().named_tensors(kind, model)
            for state, own in zip(self._states(), rounded, strict=True):
                state["exp_avg"].copy_(own)
        else:
            yield from super().named_tensors(kind, model)
