"""Defines backends that run another layout than was requested, with right numbers."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist

from conformance.backends.protocol import StepMetrics
from conformance.spec.batch import Batch
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario
from impl.deepspeed import config
from impl.deepspeed.adapter import DeepspeedBackend
from impl.fsdp2.adapter import Fsdp2Backend
from impl.megatron.adapter import MegatronBackend


class DropsItsOptions:
    """Runs the layout without its options, and with another ZeRO stage."""

    stage: ClassVar[int | None] = None

    def setup(self, scenario: Scenario, layout: Layout, *arguments: Any) -> dict[str, Any]:
        zero = layout.zero if self.stage is None else self.stage
        less: dict[str, Any] = super().setup(  # type: ignore[misc]
            scenario, dataclasses.replace(layout, options=(), zero=zero), *arguments
        )
        return {**less, "options": list(layout.options)}


class RunsWholeExperts:
    """Its ranks of ``ep`` are data ranks like others: each has all experts, and all numbers are right."""

    def setup(self, scenario: Scenario, layout: Layout, *arguments: Any) -> dict[str, Any]:
        whole = dataclasses.replace(layout, dp=layout.data, ep=1)
        resolved: dict[str, Any] = super().setup(scenario, whole, *arguments)  # type: ignore[misc]
        return resolved


class Fsdp2RunsWholeExperts(RunsWholeExperts, Fsdp2Backend):
    pass


class MegatronRunsWholeExperts(RunsWholeExperts, MegatronBackend):
    pass


class Fsdp2DropsItsOptions(DropsItsOptions, Fsdp2Backend):
    pass


class DeepspeedDropsItsOptions(DropsItsOptions, DeepspeedBackend):
    pass


class MegatronDropsItsOptions(DropsItsOptions, MegatronBackend):
    pass


class DeepspeedRunsStage0(DeepspeedDropsItsOptions):
    stage = 0


class DeepspeedRunsStage1(DeepspeedDropsItsOptions):
    stage = 1


class DeepspeedRunsStage3(DeepspeedDropsItsOptions):
    stage = 3


class DeepspeedRunsStage2(DeepspeedDropsItsOptions):
    stage = 2


class Fsdp2ReplicatesItsWeights(Fsdp2Backend):
    """Every data rank is a replica, so nothing is cut."""

    def setup(self, scenario: Scenario, layout: Layout, *arguments: Any) -> dict[str, Any]:
        return super().setup(scenario, dataclasses.replace(layout, rep=layout.dp), *arguments)


class DeepspeedHasSmallBuckets(DeepspeedBackend):
    """Honest. Its bucket for gradients is smaller than the weights, as DeepSpeed's is at real size."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        original = config.training_settings

        def with_bucket(*arguments: Any, **options: Any) -> dict[str, Any]:
            made = original(*arguments, **options)
            made["zero_optimization"]["reduce_bucket_size"] = 80_000  # elements, of 97,600
            return made

        with mock.patch("impl.deepspeed.model.training_settings", with_bucket):
            return super().setup(*arguments)


class MegatronRunsStage0(MegatronDropsItsOptions):
    stage = 0


class RunsAnotherLayout:
    """Runs the layout that ``instead`` makes of the requested one. All numbers are right."""

    @staticmethod
    def instead(layout: Layout) -> Layout:
        raise NotImplementedError

    def setup(self, scenario: Scenario, layout: Layout, *arguments: Any) -> dict[str, Any]:
        resolved: dict[str, Any] = super().setup(scenario, self.instead(layout), *arguments)  # type: ignore[misc]
        return resolved


class MegatronRunsPlainStages(RunsAnotherLayout, MegatronBackend):
    """Gives each rank one pipeline stage where several were requested."""

    @staticmethod
    def instead(layout: Layout) -> Layout:
        return dataclasses.replace(layout, vpp=1)


class MegatronShardsLess(RunsAnotherLayout, MegatronBackend):
    """Keeps weights whole where ZeRO-3 was requested, and gradients where ZeRO-2 was."""

    @staticmethod
    def instead(layout: Layout) -> Layout:
        return dataclasses.replace(layout, zero=(layout.zero or 1) - 1)


class DeepspeedKeepsNoSecondCopy(RunsAnotherLayout, DeepspeedBackend):
    @staticmethod
    def instead(layout: Layout) -> Layout:
        return dataclasses.replace(layout, hpz=1)


class CutsRows(RunsAnotherLayout):
    """Gives whole rows to ranks that should share them along the sequence."""

    @staticmethod
    def instead(layout: Layout) -> Layout:
        options = tuple(option for option in layout.options if option not in ("ring", "zigzag", "torchcp"))
        dp = layout.dp * layout.sp * layout.ulysses
        return dataclasses.replace(layout, dp=dp, sp=1, ulysses=1, options=options)


class Fsdp2CutsRows(CutsRows, Fsdp2Backend):
    pass


class DeepspeedCutsRows(CutsRows, DeepspeedBackend):
    pass


class MegatronCutsRows(CutsRows, MegatronBackend):
    pass


class DeepspeedGathersKeys(RunsAnotherLayout, DeepspeedBackend):
    @staticmethod
    def instead(layout: Layout) -> Layout:
        return dataclasses.replace(layout, sp=layout.ulysses, ulysses=1)


class Fsdp2PassesKeysAround(RunsAnotherLayout, Fsdp2Backend):
    @staticmethod
    def instead(layout: Layout) -> Layout:
        return dataclasses.replace(layout, options=("ring",))


class SwapsTheOrder(RunsAnotherLayout):
    """Cuts documents into contiguous parts where zigzag parts were requested, and the other way round, and gathers one
    head at a time."""

    @staticmethod
    def instead(layout: Layout) -> Layout:
        other = {"zigzag": "ring", "ring": "zigzag"}
        return dataclasses.replace(layout, options=tuple(other.get(o, o) for o in layout.options), stride=1)


class Fsdp2SwapsTheOrder(SwapsTheOrder, Fsdp2Backend):
    pass


class DeepspeedSwapsTheOrder(SwapsTheOrder, DeepspeedBackend):
    pass


class MegatronSwapsTheOrder(SwapsTheOrder, MegatronBackend):
    pass


class Fsdp2ScattersOneNumber(RunsAnotherLayout, Fsdp2Backend):
    """Cuts nothing along the sequence, and reduces and scatters one number in every step."""

    @staticmethod
    def instead(layout: Layout) -> Layout:
        return dataclasses.replace(layout, options=("plan",))

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        one = [torch.ones(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.reduce_scatter(torch.empty_like(one[0]), one)
        return super().train_step(batch, on_gradients)
