"""Defines variants of the plain backend that record, claim or leave other things; ``plain_variants:Silent`` is one."""

import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plain_backend import Plain

from conformance.backends.protocol import NamedTensors, Shard, StepMetrics, Support, TensorKind, Unsupported
from conformance.spec.batch import Batch, Row
from conformance.spec.conventions import GeneratorsNotSaved
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario

BROKEN = "PARITY_TEST_BROKEN"
_cells_before: list[str] = []  # of this process


class Silent(Plain):
    """Its framework shows no log-probs."""

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        return dataclasses.replace(super().train_step(batch, on_gradients), rows={})


class FillsGaps(Plain):
    """Trains on every token between the first and the last target of a document."""

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        return super().train_step(dataclasses.replace(batch, rows=tuple(map(_filled, batch.rows))), on_gradients)


def _filled(row: Row) -> Row:
    spans = [[number for number, target in enumerate(one.targets) if target] for one in row.documents]
    documents = [
        dataclasses.replace(one, targets=tuple(bool(span) and span[0] <= n <= span[-1] for n in range(len(one.tokens))))
        for one, span in zip(row.documents, spans, strict=True)
    ]
    return dataclasses.replace(row, documents=tuple(documents))


class Shy(Plain):
    """Names no piece of its ranks."""

    def local_shards(self, kind: TensorKind, model: str) -> Iterator[Shard]:
        return iter(())


class NamesAGradientTwice(Plain):
    """First as nothing computed it, then right."""

    def named_tensors(self, kind: TensorKind, model: str) -> NamedTensors:
        for name, tensor in super().named_tensors(kind, model):
            if kind == "gradient" and name == "model.norm.weight":
                yield name, 2 * tensor
            yield name, tensor


class NamesAPieceTwice(Plain):
    """First as no other rank has it, then right."""

    def local_shards(self, kind: TensorKind, model: str) -> Iterator[Shard]:
        for shard in super().local_shards(kind, model):
            if kind == "gradient" and shard.name == "model.norm.weight":
                yield Shard(shard.name, shard.region, (1 + dist.get_rank()) * shard.tensor)
            yield shard


class Normless(Plain):
    """Its framework reports no norm."""

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        metrics = super().train_step(batch, on_gradients)
        return dataclasses.replace(metrics, values={k: v for k, v in metrics.values.items() if k != "grad_norm"})


class Picky(Plain):
    """Refuses what the environment says."""

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        if str(layout) in os.environ.get("REFUSED", "").split():
            return Unsupported(f"{layout} is not offered any more; use another layout")
        return super().supports(scenario, layout)


class Clumsy(Plain):
    """Cannot say what it supports."""

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        raise KeyError("a defect")


class Vague(Plain):
    """Says ``answer`` when it is asked what it holds of the host's memory, or raises it."""

    answer: Any = None

    @classmethod
    def host_bytes(cls, scenario: Scenario, layout: Layout) -> Any:
        if isinstance(cls.answer, Exception):
            raise cls.answer
        return cls.answer


class Selfish:
    """Has no training state for others, and breaks when it is asked about its checkpoints."""

    objectives, describe, supports = Plain.objectives, Plain.describe, Plain.supports

    @classmethod
    def supports_checkpoint(cls, scenario: Scenario, before: Layout, after: Layout) -> Support:
        raise KeyError("a defect")


class ForgetsGenerators(Plain):
    """Restores no random generators, as many frameworks do not."""

    def load(self, path: Path) -> None:
        super().load(path)
        torch.manual_seed(42)


class SavesNoGenerators(ForgetsGenerators):
    """Says so."""

    conventions = (GeneratorsNotSaved(),)


class SavesGenerators(Plain):
    """Says that it does not."""

    conventions = (GeneratorsNotSaved(),)


class Leftover(Plain):
    """Patches its process and leaves it so: from its second cell there, losses are a thousandth too large."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        _cells_before.append("one")
        return super().setup(*arguments)

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        metrics = super().train_step(batch, on_gradients)
        off = 1.001 if len(_cells_before) > 1 else 1.0
        return dataclasses.replace(metrics, values={**metrics.values, "loss": metrics.values["loss"] * off})


class Isolated(Leftover):
    """The same, and says that each of its cells needs fresh ranks."""

    fresh_ranks = True


class Breaks(Leftover):
    """Cannot be set up twice in a process."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        if _cells_before:
            raise RuntimeError("it is set up already")
        return super().setup(*arguments)


class Wrong(Leftover):
    """Its losses are wrong in any cell."""

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        metrics = super().train_step(batch, on_gradients)
        return dataclasses.replace(metrics, values={**metrics.values, "loss": 2 * metrics.values["loss"]})


class KilledOnce(Plain):
    """Is killed in its first cell, as by a machine that fails at times; the file that ``KILLED`` names remembers it."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        if not Path(os.environ["KILLED"]).exists():
            Path(os.environ["KILLED"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().setup(*arguments)


class FullOnce(Plain):
    """Finds no memory in its first cell, as where another cell fills the GPU; ``KILLED`` remembers it, as above."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        if not Path(os.environ["KILLED"]).exists():
            Path(os.environ["KILLED"]).touch()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().setup(*arguments)


class RaisesOnce(Plain):
    """Raises an error of code in its first cell; ``KILLED`` remembers it, as above."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        if not Path(os.environ["KILLED"]).exists():
            Path(os.environ["KILLED"]).touch()
            raise RuntimeError("expected scalar type Double but found Float")
        return super().setup(*arguments)


class KilledAlways(Plain):
    """Is killed in every cell."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().setup(*arguments)


class Flaky(Plain):
    """Fails when it is asked about the layout that the variable BROKEN names."""

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        if str(layout) == os.environ.get(BROKEN):
            raise ConnectionError("the machine is away")
        return super().supports(scenario, layout)
