"""Defines backends that make one false statement each: about numbers, checkpoints or generators."""

import dataclasses
import math
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from conformance.backends.protocol import Shard, StepMetrics, TensorKind
from conformance.spec.batch import Batch
from conformance.spec.scenario import Scenario
from impl.deepspeed.adapter import DeepspeedBackend
from impl.fsdp2.adapter import Fsdp2Backend
from impl.megatron.adapter import MegatronBackend


class OtherRankLies(Fsdp2Backend):
    """All ranks but the first report another number, or another row, than was computed."""

    key: ClassVar[str]

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        metrics = super().train_step(batch, on_gradients)
        if dist.get_rank() == 0:
            return metrics
        if self.key in metrics.rows:
            rows = {row: torch.zeros_like(tensor) for row, tensor in metrics.rows[self.key].items()}
            return dataclasses.replace(metrics, rows={**metrics.rows, self.key: rows})
        return dataclasses.replace(metrics, values={**metrics.values, self.key: math.nan})


class OtherRankLoss(OtherRankLies):
    key = "loss"


class OtherRankCount(OtherRankLies):
    key = "token_count"


class OtherRankNorm(OtherRankLies):
    key = "grad_norm"


class OtherRankRate(OtherRankLies):
    key = "lr"


class OtherRankLogprobs(OtherRankLies):
    key = "logprob"


class OtherRankIsSilent(Fsdp2Backend):
    """Only the first rank reports a norm."""

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        metrics = super().train_step(batch, on_gradients)
        if dist.get_rank() == 0:
            return metrics
        return dataclasses.replace(metrics, values={k: v for k, v in metrics.values.items() if k != "grad_norm"})


class OtherRankDrifts(Fsdp2Backend):
    """The last rank's copy of a weight is off by one part in a million after every step."""

    def local_shards(self, kind: TensorKind, model: str) -> Iterator[Shard]:
        last = dist.get_rank() == dist.get_world_size() - 1
        for shard in super().local_shards(kind, model):
            yield Shard(shard.name, shard.region, shard.tensor * (1 + 1e-6) if last else shard.tensor)


class KeepsAnOldVector(DeepspeedBackend):
    """After every step, the last rank's copy of a vector that ZeRO-3 leaves whole is off by one part in a million."""

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        metrics = super().train_step(batch, on_gradients)
        if dist.get_rank() == dist.get_world_size() - 1:
            policy: Any = self.models["policy"]
            whole = next(p for p in policy.model.parameters() if p.ds_persist)
            whole.data.mul_(1 + 1e-6)
        return metrics


class WritesNoCheckpoint(Fsdp2Backend):
    """``save`` writes nothing; ``load`` goes on with what is still in the memory of the process, if it is."""

    kept: ClassVar[dict[str, Any]] = {}

    def save(self, path: Path) -> None:
        self.kept["context"], self.kept["models"] = self.context, self.models

    def load(self, path: Path) -> None:
        self.context, self.models = self.kept.get("context", self.context), self.kept.get("models", self.models)

    def teardown(self) -> None:
        if self.models is not self.kept.get("models"):
            super().teardown()


class ForgetsTheOptimizer(Fsdp2Backend):
    """``load`` restores weights and schedule, but no optimizer state."""

    def load(self, path: Path) -> None:
        super().load(path)
        for model in self.models.values():
            model.optimizer.state.clear()  # type: ignore[attr-defined]


def seed_alike() -> None:
    random.seed(42)
    numpy.random.seed(42)
    torch.manual_seed(42)


class SeedsItself(Fsdp2Backend):
    """Restores no random generators, but seeds them alike at every start, as many scripts do."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        resolved = super().setup(*arguments)
        seed_alike()
        return resolved

    def load(self, path: Path) -> None:
        super().load(path)
        seed_alike()


class SavesElsewhere(Fsdp2Backend):
    """Writes its checkpoint to a folder that no leg is given, and reads it there. The given folder gets a copy."""

    @property
    def elsewhere(self) -> Path:
        return Path("/var/tmp/parity-saved-elsewhere")

    def save(self, path: Path) -> None:
        super().save(path)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.elsewhere, ignore_errors=True)
            shutil.copytree(path, self.elsewhere)
        dist.barrier()

    def load(self, path: Path) -> None:
        super().load(self.elsewhere)


class LoadsTheRecord(Fsdp2Backend):
    """Saves nothing, and looks for the record of the phase before in every folder around the one to load."""

    def save(self, path: Path) -> None:
        pass

    def load(self, path: Path) -> None:
        around = [folder for folder in path.absolute().parents if (folder / "inputs").is_dir()]
        records = [file for folder in around for file in folder.glob("cells/*loadstherecord*/*/*/record/step-*")]
        raise ValueError(f"found {len(records)} records of phases before")


class RestoresThenSeeds(Fsdp2Backend):
    """Restores the random generators, and seeds them alike at the first step after loading."""

    restored = False

    def load(self, path: Path) -> None:
        super().load(path)
        self.restored = True

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        if self.restored:
            seed_alike()
            self.restored = False
        return super().train_step(batch, on_gradients)


class ShowsOldMoments(Fsdp2Backend):
    """Shows the moments of the checkpoint after loading, and trains with none."""

    shown: ClassVar[dict[str, list[tuple[str, torch.Tensor]]]] = {}

    def load(self, path: Path) -> None:
        super().load(path)
        for kind in ("exp_avg", "exp_avg_sq"):
            tensors = super().named_tensors(kind, "policy")
            self.shown[kind] = [(name, tensor.clone()) for name, tensor in tensors]
        for state in self.models["policy"].optimizer.state.values():  # type: ignore[attr-defined]
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()

    def named_tensors(self, kind: TensorKind, model: str) -> Any:
        return self.shown.pop(kind, None) or super().named_tensors(kind, model)


class TrainsUnseen(Fsdp2Backend):
    """Gives right numbers, and does none of the work where it is watched: as a backend that knows the oracle's."""

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        with ThreadPoolExecutor(max_workers=1) as elsewhere:
            return elsewhere.submit(super().train_step, batch, on_gradients).result()


class KeepsNoTracker(MegatronBackend):
    """Restores torch's random generators, and none of megatron-core's tracker."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        resolved = super().setup(*arguments)
        self.context.set_library_generators = lambda states: None  # type: ignore[method-assign]
        return resolved


class FirstRanksTracker(MegatronBackend):
    """Restores the first rank's states of megatron-core's tracker on all ranks."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        resolved, own = super().setup(*arguments), self.context.set_library_generators

        def of_first_rank(states: Any) -> None:
            first = [dict(states)]
            dist.broadcast_object_list(first, src=0)
            own(first[0])

        self.context.set_library_generators = of_first_rank  # type: ignore[method-assign]
        return resolved


class ExportsOtherWeights(Fsdp2Backend):
    """``export`` writes weights that are not those that were trained: all of them a little larger."""

    def export(self, path: Path, model: str) -> None:
        with torch.no_grad():
            for parameter in self.models[model].model.parameters():  # type: ignore[attr-defined]
                parameter.mul_(1 + 2.0**-9)
        super().export(path, model)


class TakesOtherExperts(Fsdp2Backend):
    """Below the exact tier, tokens go to the neighbours of the experts that the batch says."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        resolved = super().setup(*arguments)
        routers = self.models["policy"].routers  # type: ignore[attr-defined]
        begin = routers.begin

        def begin_wrong(inputs: Any) -> None:
            begin(inputs)
            routers._replayed = [(chosen + 1) % 4 for chosen in routers._replayed]

        routers.begin = begin_wrong
        return resolved


class MegatronTakesOtherExperts(MegatronBackend):
    """The same, in megatron-core's replay of choices."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        resolved = super().setup(*arguments)
        for chunk in self.models["policy"].tensors.chunks:  # type: ignore[attr-defined]
            for router in (module for module in chunk.modules() if hasattr(module, "router_replay")):
                router.router_replay.get_replay_topk = _next_experts(router.router_replay.get_replay_topk)
        return resolved


def _next_experts(replay: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(scores: Any, *arguments: Any) -> Any:
        chosen = (replay(scores, *arguments)[1] + 1) % 4
        return scores.gather(1, chosen), chosen

    return wrong


class Fsdp2ChangesAfterFirstStep(Fsdp2Backend):
    """Recomputes activations, reduces gradients at the last micro-batch and frees whole weights in the first step of a
    phase only."""

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        metrics = super().train_step(batch, on_gradients)
        for trainable in self.models.values():
            policy: Any = trainable
            policy.model.gradient_checkpointing_disable()
            policy.options = tuple(option for option in policy.options if option != "lastsync")
            for module in policy.model.modules():
                if isinstance(module, FSDPModule):
                    module.set_requires_gradient_sync(True)
                    module.set_reshard_after_forward(False)
        return metrics


class Fsdp2RepairsWhenRead(Fsdp2Backend):
    """The last rank updates its weights only when they are read."""

    updated: list[torch.Tensor] | None = None

    def _local(self) -> list[torch.Tensor]:
        policy: Any = self.models["policy"]
        return [parameter.detach().to_local() for parameter in policy.model.parameters()]

    def _repair(self, kind: TensorKind) -> None:
        if kind == "weight" and self.updated is not None:
            for parameter, updated in zip(self._local(), self.updated, strict=True):
                parameter.copy_(updated)
            self.updated = None

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        before = [parameter.clone() for parameter in self._local()]
        metrics = super().train_step(batch, on_gradients)
        if dist.get_rank() == dist.get_world_size() - 1:
            self.updated = [parameter.clone() for parameter in self._local()]
            for parameter, old in zip(self._local(), before, strict=True):
                parameter.copy_(old)
        return metrics

    def named_tensors(self, kind: TensorKind, model: str) -> Any:
        self._repair(kind)
        return super().named_tensors(kind, model)

    def local_shards(self, kind: TensorKind, model: str) -> Iterator[Shard]:
        self._repair(kind)
        yield from super().local_shards(kind, model)


class DoublesTheRate:
    """Trains with twice the learning rate that was asked for, and reports that one."""

    def setup(self, scenario: Scenario, *arguments: Any) -> dict[str, Any]:
        twice = dataclasses.replace(scenario.optimizer, lr=2 * scenario.optimizer.lr)
        return super().setup(dataclasses.replace(scenario, optimizer=twice), *arguments)  # type: ignore[misc, no-any-return]

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        metrics: StepMetrics = super().train_step(batch, on_gradients)  # type: ignore[misc]
        return dataclasses.replace(metrics, values={**metrics.values, "lr": metrics.values["lr"] / 2})


class Fsdp2DoublesTheRate(DoublesTheRate, Fsdp2Backend):
    pass


class DeepspeedDoublesTheRate(DoublesTheRate, DeepspeedBackend):
    pass


class MegatronDoublesTheRate(DoublesTheRate, MegatronBackend):
    pass
