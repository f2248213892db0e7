"""Cell: one scenario on one backend in one layout, and the task that runs it in every rank of a world.

The task only observes; it writes a record and judges nothing. It asks the backend for gradients while they exist
(claim 1), compares replicas over the ranks (claim 3), and in the exact tier lifts the libraries' silent downcasts.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import conformance
from conformance import faults, replicas
from conformance.backend import Backend, BackendEntry, StepMetrics
from conformance.batch import Batch, read_batches
from conformance.run.exact import LeakWatch, exact_tier
from conformance.layout import Layout
from conformance.record.tensors import RecordWriter
from conformance.scenario import Scenario, parse_scenario, scenario_to_json
from conformance.world.heartbeat import RankContext


@dataclass(frozen=True, kw_only=True)
class Cell:
    """``faults`` are planted on purpose and are part of the id; an ordinary cell has none."""

    scenario: Scenario
    backend: BackendEntry
    layout: Layout
    faults: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [self.scenario.name, self.scenario.model_name, self.backend.name, str(self.layout)]
        planted = [f"fault-{name}" for name in self.faults]
        seed = [f"seed{self.scenario.seed}"] if self.scenario.seed else []
        return "/".join([*parts, self.scenario.precision, *seed, *planted])

    @property
    def slug(self) -> str:
        """The id as a folder name."""
        return str(self).replace("/", "_")


def run_cell(
    rank: RankContext,
    *,
    cell: str,
    target: str,
    scenario: dict[str, Any],
    layout: str,
    weights: str,
    batches: str,
    record: str,
    planted: list[str],
) -> None:
    """Train the cell and write its record at ``record``; called in every rank, with plain JSON values."""
    config = parse_scenario(scenario)
    observer = _Observer(rank, header(cell, target, config, layout), Path(record))
    with contextlib.ExitStack() as stack:
        adapter = BackendEntry(name="", target=target).load()
        calls = stack.enter_context(faults.plant(planted, adapter))
        if config.precision == "exact":
            stack.enter_context(exact_tier())
        _train(rank, adapter, config, Layout.parse(layout), Path(weights), read_batches(Path(batches)), observer)
        _check_faults(rank, planted, calls)


def _check_faults(rank: RankContext, planted: list[str], calls: Mapping[str, int]) -> None:
    """Raises ValueError for a planted fault that no rank ever ran into: its cell would conform, and prove nothing."""
    if not planted:
        return
    of_all: list[Mapping[str, int]] = [{} for _ in range(rank.world_size)]
    dist.all_gather_object(of_all, dict(calls))
    for name in planted:
        if not any(of_one.get(name) for of_one in of_all):
            needs = faults.find_fault(name).needs
            raise ValueError(f"fault {name!r} was never called in this cell, so it changed nothing; it needs {needs}")


def header(cell: str, target: str, scenario: Scenario, layout: str) -> dict[str, Any]:
    """First line of the cell's record: who, what, where."""
    info = BackendEntry(name="", target=target).load().describe()
    return {
        "cell": cell,
        "backend": {"name": info.name, "url": info.url},
        "scenario": scenario_to_json(scenario),
        "layout": layout,
        "environment": {
            "backend-parity": conformance.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            **{package: package_version(package) for package in info.packages},
        },
    }


def package_version(package: str) -> str:
    """Version of an installed distribution, in words where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _train(
    rank: RankContext,
    adapter: type[Backend],
    scenario: Scenario,
    layout: Layout,
    weights: Path,
    batches: list[Batch],
    observer: "_Observer",
) -> None:
    started = time.perf_counter()
    rank.beat("setup")
    backend = adapter()
    resolved = backend.setup(scenario, layout, weights, rank.device)
    observer.start(backend, resolved)
    for batch in batches:
        rank.beat(f"step {batch.step}")
        observer.step(backend, batch, watch=batch.step == 0 and scenario.precision == "exact")
        if scenario.resume_after == batch.step + 1:
            rank.beat("save")
            checkpoint = observer.path.with_name("checkpoint")
            if rank.rank == 0:
                checkpoint.mkdir()
            dist.barrier()
            backend.save(checkpoint)
            backend.teardown()
            dist.barrier()
            rank.beat("load")
            backend = adapter()
            backend.setup(scenario, layout, weights, rank.device)
            backend.load(checkpoint)
    rank.beat("teardown")
    backend.teardown()
    observer.finish(time.perf_counter() - started)


def _check(metrics: StepMetrics, backend: str) -> None:
    """Raises ValueError where a backend's metrics are not what StepMetrics says."""
    numbers = {"loss_sum": metrics.loss_sum, "token_count": metrics.token_count, "lr": metrics.lr}
    if metrics.grad_norm is not None:
        numbers["grad_norm"] = metrics.grad_norm
    for name, value in numbers.items():
        if not isinstance(value, int | float):
            raise ValueError(f"{backend}.train_step gave {name}={value!r}; StepMetrics wants a plain number")
    if metrics.token_count < 1:
        raise ValueError(f"{backend}.train_step gave token_count={metrics.token_count}; count the step's target tokens")


class _Observer:
    """Asks the backend on all ranks, keeps and writes on rank 0."""

    def __init__(self, rank: RankContext, header: dict[str, Any], path: Path) -> None:
        self.rank, self.header, self.path = rank, header, path
        self.writer: RecordWriter | None = None
        self.leaks: list[dict[str, Any]] = []

    def start(self, backend: Backend, resolved: dict[str, Any]) -> None:
        if self.rank.rank == 0:
            self.writer = RecordWriter(self.path, {**self.header, "resolved": resolved})
        self._write(-1, {}, self._full("weight", backend.named_weights()))

    def step(self, backend: Backend, batch: Batch, *, watch: bool) -> None:
        gradients: dict[str, torch.Tensor] = {}
        shards: list[replicas.Result] = []
        calls = 0
        observing = 0.0
        watcher = LeakWatch() if watch else None

        def on_gradients() -> None:
            nonlocal calls, observing
            calls += 1
            began = time.perf_counter()
            gradients.update(self._full("gradient", backend.named_gradients()))
            shards.append(replicas.compare("gradient", backend.local_shards("gradient")))
            observing = time.perf_counter() - began

        started = time.perf_counter()
        with watcher or contextlib.nullcontext():
            metrics = backend.train_step(batch, on_gradients)
        seconds = time.perf_counter() - started - observing
        _check(metrics, type(backend).__name__)
        if calls != 1:
            raise ValueError(
                f"{type(backend).__name__}.train_step called on_gradients() {calls} times; call it exactly once per "
                f"step, after the last backward and before clipping"
            )
        if watcher:
            self.leaks += [{"op": leak.op, "where": leak.where, "count": leak.count} for leak in watcher.leaks]
        shards.append(replicas.compare("weight", backend.local_shards("weight")))
        weights = self._full("weight", backend.named_weights())
        gathered: list[dict[int, torch.Tensor]] = [{} for _ in range(self.rank.world_size)]
        dist.all_gather_object(gathered, {row: t.cpu() for row, t in metrics.logprobs.items()})
        logprobs = {f"logprob/{row}": t for held in reversed(gathered) for row, t in sorted(held.items())}
        values = {
            "loss": metrics.loss_sum / metrics.token_count,
            "loss_sum": metrics.loss_sum,
            "token_count": metrics.token_count,
            "grad_norm": metrics.grad_norm,
            "lr": metrics.lr,
            "seconds": seconds,
            "replicas": {
                "offered": sum(result.offered for result in shards),
                "compared": sum(result.compared for result in shards),
                "differing": [entry for result in shards for entry in result.differing],
            },
        }
        self._write(batch.step, values, {**gradients, **weights, **logprobs})

    def finish(self, seconds: float) -> None:
        dist.barrier()  # the footer says that all ranks came to their end
        if self.writer:
            self.writer.finish({"seconds": seconds, "leaks": self.leaks})

    def _write(self, step: int, values: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        if self.writer:
            self.writer.step(step, values, tensors)

    def _full(self, kind: str, named: Iterator[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Walk the iterator on all ranks; copies stay on rank 0 only."""
        kept = {}
        for name, tensor in named:
            if self.rank.rank == 0:
                kept[f"{kind}/{name}"] = tensor.detach().to("cpu", copy=True)
        return kept
