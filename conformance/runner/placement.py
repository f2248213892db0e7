"""Decides where and when the cells of a session run: its configuration, leased slots, parallel threads, its disk.

Ranks run on the processors of this host, in one or more lanes, on its leased GPUs, or on several hosts.

On leased slots (GPUs, or slots of hosts) a cell waits for its lease, its oracle and its judge. Other cells use the
slots meanwhile, so more cells are started than there are slots. The largest worker groups start first, because small
ones then fill the gaps at the end.

A full disk, or an output folder that was removed during a run, can cause any error in any library. It is reported as
such, and the verdicts of earlier cells are kept.
"""

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from conformance.core.io import Unwritable
from conformance.core.timeline import WAIT, timeline
from conformance.matrix.cell import Cell
from conformance.models.synthetic import is_large
from conformance.results.requirements import Floor
from conformance.results.run_results import SUMMARY
from conformance.runner.earlier_run import Earlier
from conformance.runtime import Device, Pool
from conformance.runtime.gpu_inventory import gpus_of
from conformance.runtime.leased_slots import Gpus, Lanes, LeasedSlots
from conformance.runtime.multihost.controller import Fleet, Hosts, Slots
from conformance.runtime.multihost.relay import JoinedHost


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Configures a session.

    out: the output folder. profile, command: the profile and the user's command line, for the summary.
    arguments: the arguments that select cells; they become part of the command that reproduces a cell.
    gpus: the GPUs that cells lease, or shares of them, to run in parallel; empty: cells run on processors.
    lanes: the largest number of cells that run at once on processors; fewer run at once if memory is scarce.
    oracle_lanes: the number of oracle runs on processors at once, and of judges.
    ranks_per_gpu: how many ranks may share a GPU. large: whether cells have models of which not many copies fit into a
    GPU's memory. hosts: the hosts that start ranks; None: only this host.
    budget_s: seconds that a phase, or an oracle run, may go without progress. fail_fast: end after the first failure.
    floor, selected: see conformance.matrix.plan. selection, inputs: see conformance.results.run_results.Run.
    earlier: the run in ``out`` that this one continues.
    """

    out: Path
    device: Device = "cpu"
    profile: str = ""
    command: str = ""
    arguments: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    lanes: int = 1
    oracle_lanes: int = 1
    ranks_per_gpu: int = 1
    large: bool = False
    hosts: Hosts | None = None
    budget_s: float = 300.0
    fail_fast: bool = False
    floor: Floor = field(default_factory=Floor)
    selected: str = ""
    selection: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    earlier: Earlier | None = None

    def folder(self, cell: Cell) -> Path:
        """Returns the folder of a cell, with its verdict and its records."""
        return self.out / "cells" / cell.slug


class Where:
    """Holds the ``pool`` of all worker groups, and the ``fleet`` of hosts; None if ranks run on this host alone."""

    def __init__(self, config: SessionConfig) -> None:
        device, gpus, work_dir = config.device, config.gpus, config.out / "worlds"
        self.fleet = Fleet(config.hosts, device=device, folder=work_dir) if config.hosts else None
        self._gpus, self._device, self._lanes = gpus, device, config.lanes
        self._ranks_per_gpu = config.ranks_per_gpu
        self._slots: LeasedSlots | None = None
        if self.fleet is not None:
            self._slots = Slots(self.fleet)
        elif gpus:
            self._slots = Gpus(gpus, work_dir=work_dir, shared=config.ranks_per_gpu > 1, large=config.large)
        elif config.lanes > 1:
            self._slots = Lanes(config.lanes, work_dir=work_dir)
        self.pool = Pool(work_dir=work_dir, slots=self._slots)

    @property
    def is_leased(self) -> bool:
        """Whether ranks run on slots that drivers and links can break."""
        return self.fleet is not None or bool(self._gpus)

    @property
    def hosts(self) -> Sequence[JoinedHost]:
        return self.fleet.joined if self.fleet is not None else ()

    @property
    def queues_oracles(self) -> bool:
        """Whether oracles wait for the same GPUs of this host as cells."""
        return bool(self._gpus) and self._device == "cuda"

    @property
    def oracles(self) -> int:
        """Returns how many oracle runs may use GPUs at once: one on each, or in a third of its shares."""
        return max(len(gpus_of(self._gpus)), len(self._gpus) // 3, 1)

    @property
    def is_packed(self) -> bool:
        """Whether cells share processors or GPUs, so that one may lack memory that it has alone."""
        if not self.is_leased:
            return self._lanes > 1
        return len(self._gpus) > self._ranks_per_gpu * len(gpus_of(self._gpus))

    @property
    def width(self) -> int:
        """Returns the number of cells that run at once, on the hosts that have joined."""
        if not self.is_leased:
            return self._lanes
        return CELLS_PER_SLOT * (self.fleet.slots if self.fleet is not None else len(self._gpus))

    @property
    def leased(self) -> dict[str, float]:
        """Returns the share of the session's time that each GPU, or slot of a host, was leased; see Busy.shares."""
        return self._slots.busy.shares() if self._slots is not None and self.is_leased else {}

    @property
    def mps(self) -> dict[str, str]:
        """Returns the entry ``mps`` of the environment; empty if no ranks share GPUs of this host."""
        state = self._slots.mps if isinstance(self._slots, Gpus) else ""
        return {"mps": state} if state else {}

    def close(self) -> None:
        self.pool.close()
        if self.fleet is not None:
            self.fleet.close()


_Judged = TypeVar("_Judged")

CELLS_PER_SLOT = 2  # one computes while the other one waits


class AtOnce:
    """Runs cells in threads. width: the number of concurrent cells; with 1, the caller's thread runs them."""

    def __init__(self, width: int) -> None:
        self._threads: ThreadPoolExecutor | None = None
        if width > 1:
            # MKL has a number for each thread, which torch sets when it first starts threads of its own: too late.
            self._threads = ThreadPoolExecutor(
                max_workers=width, thread_name_prefix="cell", initializer=torch.set_num_threads, initargs=(1,)
            )

    @property
    def is_parallel(self) -> bool:
        return self._threads is not None

    def run(
        self, cells: Sequence[Cell], run: Callable[[Cell], _Judged], *, ready: Callable[[Cell], None] = lambda _: None
    ) -> Iterator[_Judged]:
        """Calls ``run`` for each cell; yields the results in the order in which they finish. ready: see ``begin``."""
        if self._threads is None:
            yield from map(run, cells)
            return
        left = set[Future[_Judged]]()
        for _, begun in self.begin(cells, run, ready=ready):
            left.add(begun)
            for future in [one for one in left if one.done()]:
                left.remove(future)
                yield future.result()
        while left:
            done, left = wait(left, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()

    def begin(
        self, cells: Sequence[Cell], run: Callable[[Cell], _Judged], *, ready: Callable[[Cell], None] = lambda _: None
    ) -> Iterator[tuple[Cell, Future[_Judged]]]:
        """Calls ``run`` for each cell in threads, and yields the futures; none if there are no threads.

        ready: called before a cell starts, in the caller's thread.
        """
        for cell in self.ordered(cells) if self._threads is not None else ():
            assert self._threads is not None
            ready(cell)
            yield cell, self._threads.submit(run, cell)

    def ordered(self, cells: Sequence[Cell]) -> Sequence[Cell]:
        """Returns the cells in the order in which they start: the cheapest one of each backend, so that a verdict comes
        early, then the largest ones, and of one size those with the same oracle together. Cells of large models are
        together if they have as many shares of GPUs and the same backend, so that few worker groups end for others."""
        if not self.is_parallel:
            return cells
        ahead: dict[str, Cell] = {}
        for cell in sorted(cells, key=_cost):
            ahead.setdefault(cell.backend, cell)
        left = {id(cell) for cell in cells} - {id(cell) for cell in ahead.values()}
        rest = sorted(cells, key=_kind)
        return [*ahead.values(), *(cell for cell in rest if id(cell) in left)]

    def cancel(self) -> None:
        """Starts no further cell."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Waits for the cells that were started, after ``cancel``."""
        if self._threads is not None:
            self._threads.shutdown()


def _kind(cell: Cell) -> tuple[int | str, ...]:
    scenario = cell.scenario
    large = (-scenario.tier.master.bytes, scenario.model_name, cell.backend) if is_large(scenario) else (0, "", "")
    return -cell.world_size, *large, scenario.name, scenario.model_name


def _cost(cell: Cell) -> tuple[int, ...]:
    """Ranks cells by the time until their verdict: by processes that are started anew, noise runs, and tokens."""
    data, roles = cell.scenario.data, cell.scenario.objective.roles
    tokens = cell.scenario.steps * data.rows * data.max_len * len(roles)
    return len(cell.phases), not cell.scenario.tier.is_exact, tokens, cell.world_size


@dataclass(frozen=True, kw_only=True)
class Activity:
    """Holds the current activity of a session.

    cell: the running cell; of several, the one that started first. phase: the activity of its slowest rank, or of the
    session. since: start of the cell, in seconds of time.monotonic. waiting: the cells that will run after it.
    """

    cell: Cell
    phase: str
    since: float
    waiting: Sequence[Cell]


@dataclass(kw_only=True)
class _Running:
    cell: Cell
    since: float
    phase: str


class Activities:
    """Tracks the running and the waiting cells. Each running cell has its own thread."""

    def __init__(self) -> None:
        self.waiting: tuple[Cell, ...] = ()
        self._running: dict[int, _Running] = {}  # by thread

    @property
    def are_any(self) -> bool:
        return bool(self._running)

    def begin(self, cell: Cell) -> None:
        self.waiting = tuple(one for one in self.waiting if one is not cell)
        self._running[threading.get_ident()] = _Running(cell=cell, since=time.monotonic(), phase="preparing")
        timeline.switch("preparing", kind="cells", about=str(cell))

    def phase(self, phase: str) -> None:
        """Sets the activity of the cell in this thread."""
        if (running := self._running.get(threading.get_ident())) is not None:
            running.phase = phase
            name = phase.replace("waiting for ", WAIT)
            timeline.switch(name, kind="cells", about=str(running.cell))

    def end(self) -> None:
        del self._running[threading.get_ident()]
        timeline.switch("")

    def now(self, of_ranks: Callable[[], str]) -> Activity | None:
        """Returns the current activity; None between cells. of_ranks: returns the activity of ranks, or empty."""
        running = sorted(self._running.values(), key=lambda one: one.since)
        if not running:
            return None
        first, more = running[0], len(running) - 1
        phase = f"{first.phase}, {more} more cells" if more else of_ranks() or first.phase
        return Activity(cell=first.cell, phase=phase, since=first.since, waiting=self.waiting)


# The system's messages for a full or read-only disk. safetensors raises its own error type, with the same messages.
_NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))


@contextlib.contextmanager
def lasting(out: Path) -> Iterator[None]:
    """Turns an error inside the block into Unwritable if ``out``, which has a summary, was removed or its disk is
    full."""
    try:
        yield
    except Exception as error:
        check_output_folder(out)
        if any(words in str(error) for words in _NO_ROOM):
            raise Unwritable(f"nothing can be written: {error}; free disk space, and run into a new folder") from error
        raise


def check_output_folder(out: Path) -> None:
    """Raises Unwritable if the run's summary is missing. Other files may exist, written after ``out`` was removed."""
    if not (out / SUMMARY).is_file():
        raise Unwritable(f"{out} was removed while cells ran, or its {SUMMARY} was; run again into a new folder")
