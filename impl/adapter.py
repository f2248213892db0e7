"""The built-in backends behind the suite's adapter protocol: one adapter over the strategy interface for all."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from conformance.backend import BackendInfo, ExpectedDifference, Kind, NamedTensors, Shard, StepMetrics, Support
from conformance.batch import Batch
from conformance.layout import Layout
from conformance.scenario import Scenario
from impl.strategy import Strategy, StrategyConfig, get_strategy
from impl.trainer import sft_step


class StrategyBackend:
    """Adapter over ``get_strategy(name)``. Subclasses give ``info``, ``supports``, ``preload`` and ``seams``."""

    info: ClassVar[BackendInfo]
    expected: ClassVar[tuple[ExpectedDifference, ...]] = ()
    preload: ClassVar[tuple[str, ...]]
    seams: ClassVar[dict[str, str]]
    strategy: Strategy

    @classmethod
    def describe(cls) -> BackendInfo:
        return cls.info

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        raise NotImplementedError

    def setup(self, scenario: Scenario, layout: Layout, weights: Path, device: str) -> dict[str, Any]:
        config = StrategyConfig(
            layout=layout,
            precision=scenario.precision,
            device=device,
            accumulation=scenario.accumulation,
            packed=scenario.data.packed,
            max_grad_norm=scenario.optimizer.max_grad_norm,
        )
        self.device = device
        self.strategy = get_strategy(self.info.name, config)
        self.strategy.setup_distributed()
        self.strategy.prepare(self.strategy.load_model(weights), scenario.optimizer, scenario.schedule)
        return self.strategy.resolved()

    def train_step(self, batch: Batch, on_gradients: Callable[[], None]) -> StepMetrics:
        return sft_step(self.strategy, batch, device=self.device, on_gradients=on_gradients)

    def named_gradients(self) -> NamedTensors:
        return self.strategy.named_tensors("gradient")

    def named_weights(self) -> NamedTensors:
        return self.strategy.named_tensors("weight")

    def local_shards(self, kind: Kind) -> Iterator[Shard]:
        return self.strategy.local_shards(kind)

    def save(self, path: Path) -> None:
        self.strategy.save_ckpt(path)

    def load(self, path: Path) -> None:
        self.strategy.load_ckpt(path)

    def teardown(self) -> None:
        self.strategy.teardown()
