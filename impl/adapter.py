"""The built-in backends behind the suite's adapter protocol: one adapter over the strategy interface for all."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from conformance.backend import (
    BackendInfo,
    ExpectedDifference,
    NamedTensors,
    Shard,
    StepMetrics,
    Support,
    TensorKind,
)
from conformance.batch import Batch
from conformance.layout import Layout
from conformance.scenario import Scenario
from impl.objectives import FUNCTIONS
from impl.rollouts import Rollouts
from impl.strategy import Context, ContextConfig, Trainable, get_context
from impl.trainer import train_step


class StrategyBackend:
    """Adapter over ``get_context(name)``. Subclasses give ``info``, ``supports``, ``preload`` and ``seams``."""

    info: ClassVar[BackendInfo]
    objectives = FUNCTIONS
    expected: ClassVar[tuple[ExpectedDifference, ...]] = ()
    preload: ClassVar[tuple[str, ...]]
    seams: ClassVar[dict[str, str]]
    context: Context
    models: dict[str, Trainable]

    @classmethod
    def describe(cls) -> BackendInfo:
        return cls.info

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        raise NotImplementedError

    def setup(self, scenario: Scenario, layout: Layout, weights: Mapping[str, Path], device: str) -> dict[str, Any]:
        config = ContextConfig(
            layout=layout,
            precision=scenario.precision,
            device=device,
            accumulation=scenario.accumulation,
            packed=scenario.data.packed,
            trust_remote_code=scenario.trust_remote_code,
        )
        self.objective = scenario.objective
        self.context = get_context(self.info.name, config)
        self.context.setup_distributed()
        self.models = {}
        for role in self.objective.roles:
            trainable = self.context.new_trainable(role.head)
            optimizer = scenario.optimizer if role.trained else None
            trainable.prepare(trainable.load_model(weights[role.name]), optimizer, scenario.schedule)
            self.models[role.name] = trainable
        self.rollouts = Rollouts(self.context, self.models, self.objective)
        resolved = {name: trainable.resolved() for name, trainable in self.models.items()}
        return next(iter(resolved.values())) if len(resolved) == 1 else resolved

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        if self.objective.reads == "rollouts":
            batch = self.rollouts.annotated(batch)
        return train_step(self.context, self.models, self.objective, batch, on_gradients=on_gradients)

    def named_tensors(self, kind: TensorKind, model: str) -> NamedTensors:
        return self.models[model].named_tensors(kind)

    def local_shards(self, kind: TensorKind, model: str) -> Iterator[Shard]:
        return self.models[model].local_shards(kind)

    def save(self, path: Path) -> None:
        for name, trainable in self._trained():
            trainable.save_ckpt(path / name)

    def load(self, path: Path) -> None:
        for name, trainable in self._trained():
            trainable.load_ckpt(path / name)

    def _trained(self) -> Iterator[tuple[str, Trainable]]:
        trained = {role.name for role in self.objective.roles if role.trained}
        return ((name, trainable) for name, trainable in self.models.items() if name in trained)

    def export(self, path: Path, model: str) -> None:
        self.models[model].save_model(path)

    def teardown(self) -> None:
        for trainable in self.models.values():
            trainable.teardown()
        self.models = {}
        self.context.teardown()
