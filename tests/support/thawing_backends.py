"""Defines backends that train frozen parameters: one hides it, the plain one does so openly."""

import dataclasses
from collections.abc import Callable

from plain_backend import Plain

from conformance.backends.protocol import NamedTensors, StepMetrics, TensorKind
from conformance.spec.batch import Batch
from conformance.spec.layout import Layout
from conformance.spec.scenario import OptimizerConfig, Scenario


class Secretly(Plain):
    """Shows neither the gradients nor the norm that they are part of."""

    optimizer: OptimizerConfig

    def setup(self, scenario: Scenario, layout: Layout, *rest: object) -> dict[str, object]:
        self.optimizer = scenario.optimizer
        return super().setup(scenario, layout, *rest)  # type: ignore[arg-type]

    def named_tensors(self, kind: TensorKind, model: str) -> NamedTensors:
        shown = super().named_tensors(kind, model)
        return ((name, tensor) for name, tensor in shown if kind == "weight" or self.optimizer.trains(name))

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        metrics = super().train_step(batch, on_gradients)
        return dataclasses.replace(metrics, values={k: v for k, v in metrics.values.items() if k != "grad_norm"})
