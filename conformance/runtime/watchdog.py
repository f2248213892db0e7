"""Runs one task on one worker group, and watches it until it is done, fails or hangs.

A single loop reads the sockets of the ranks and of the process that started them. If a rank dies, raises or is
stopped, the task ends after a short grace period, in which the other ranks can still report, so that the first cause is
named and not one of its consequences. Only a task that hangs takes the whole budget.

A slow task does not count as hung while a rank goes through phases, or through the smaller marks between them
(conformance.runtime.messages). Between two marks, for example in a long backward pass, processor time shows that ranks
compute, because ranks that wait for each other use almost none. On a GPU it shows nothing: a waiting rank polls.
"""

import signal
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from conformance.core.process import StartPatience
from conformance.core.timeline import Kind, timeline
from conformance.runtime import failure as flight
from conformance.runtime.failure import (
    Failure,
    FailureKind,
    Location,
    exit_words,
    first_cause,
    indent,
    is_whole,
    read_location,
    tail,
)
from conformance.runtime.messages import Beat, Garbage, Message, readable
from conformance.runtime.worker_groups import WorkerGroup

COMPUTING = 4  # times the budget: limit without a mark for a task whose ranks compute
SLOW = 12  # times the budget: limit of the whole task
SHARE = 0.05  # of a processor, all ranks together, that counts as computing; a loaded machine may give them no more


class Patience:
    """Decides when the ranks of one task hang. ``limit_s``: allowed seconds without a mark. ``since``: start of the
    task, in seconds of CLOCK_MONOTONIC."""

    def __init__(self, worker_group: WorkerGroup, *, limit_s: float, since: float) -> None:
        self._worker_group, self._limit_s, self._since = worker_group, limit_s, since
        self._beats: list[Beat] = [worker_group.beats.read(rank) for rank in range(worker_group.size)]
        self._used = self._used_s()
        self._marked = since
        self._longest: tuple[float, str] = (0.0, "")

    def why_over(self) -> str:
        """Returns the reason why the task counts as hung; empty while it does not."""
        self._update(now := time.monotonic())
        without, limit = now - self._marked, self._limit_s
        if now - self._since > SLOW * limit:
            return f"not done within {SLOW} times the budget of {limit:g} s (--budget){self._longest_phase()}"
        if without <= limit or (without <= COMPUTING * limit and self._computes(without)):
            return ""
        return f"no progress for {without:.1f} s, and the budget is {limit:g} s (--budget){self._longest_phase()}"

    def _update(self, now: float) -> None:
        beats = [self._worker_group.beats.read(rank) for rank in range(self._worker_group.size)]
        if beats == self._beats:
            return
        for before, beat in zip(self._beats, beats, strict=True):
            if beat.count == before.count + 1:
                self._longest = max(self._longest, (beat.time - before.time, before.phase))
        self._beats, self._marked, self._used = beats, now, self._used_s()

    def _computes(self, seconds: float) -> bool:
        return self._worker_group.computes_when_busy and self._used_s() - self._used >= SHARE * seconds

    def _used_s(self) -> float:
        return self._worker_group.processor_seconds()

    def _longest_phase(self) -> str:
        """Names the longest earlier phase: a long one suggests a slow machine instead of a hang."""
        seconds, phase = self._longest
        return f"; the longest phase before, {phase!r}, took {seconds:.1f} s" if phase else ""


GRACE_S = 1.0  # for the other ranks to report, and for a stopped rank to go on
_CUT_GRACE_S = 0.5  # for the forkserver to report how a rank died, after the rank's socket has closed
_STACKS_LIMIT_S = 1.0
_STACKS_TICK_S = 0.02
_TICK_S = 0.25


class TaskFailed(Exception):
    """Says that a task failed on a rank. ``cause`` is the first failure; the message is the whole text for the user."""

    def __init__(self, cause: Failure, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


def run_task(
    worker_group: WorkerGroup,
    *,
    task: str,
    kwargs: dict[str, Any],
    log_dir: Path,
    budget_s: float,
    held: Sequence[int] = (),
    key: str = "",
    about: str = "",
) -> tuple[list[Any], str, int]:
    """Runs a task on all ranks. Returns the results by rank, a description of the leaks ("" if there are none), and the
    most bytes of memory that a rank keeps between tasks.

    ``budget_s``: allowed seconds without progress, from when all ranks have started the task to the end of the
    clean-up. ``held``: descriptors that ranks keep open until then. ``key``, ``about``: name the ranks and the task in
    the timeline. Raises TaskFailed.
    """
    watch = _Watch(worker_group, log_dir)
    worker_group.beats.reset("start")
    for wire in worker_group.wires:
        wire.send({"do": "task", "task": task, "kwargs": kwargs, "log_dir": str(log_dir)}, fds=held)
    watch.expect("started", StartPatience(worker_group.effort))
    patience = Patience(worker_group, limit_s=budget_s, since=time.monotonic())
    done = watch.expect("done", patience)
    for wire in worker_group.wires:
        wire.send({"do": "clean"})
    clean = watch.expect("clean", patience)
    for rank, message in enumerate(clean):
        track = f"{key} {worker_group.number} rank {rank}"
        kind: Kind = "oracle" if key == "oracle" else "ranks"
        timeline.add(kind, track, message.get("spans", ()), about=about, clock=message.get("clock", 0.0))
    leaks = [f"rank {rank}: {message['leaks']}" for rank, message in enumerate(clean) if message["leaks"]]
    return [message["result"] for message in done], "; ".join(leaks), max(message.get("kept", 0) for message in clean)


class _Watch:
    def __init__(self, worker_group: WorkerGroup, log_dir: Path) -> None:
        self._worker_group = worker_group
        self._log_dir = log_dir
        self._inbox: list[deque[Message]] = [deque() for _ in worker_group.wires]
        self._open = set(range(worker_group.size))
        self._failures: dict[int | None, Failure] = {}  # by rank, in the order in which they were noticed
        self._stopped_since: dict[int, float] = {}
        self._cut_since: dict[int, float] = {}

    def expect(self, kind: str, patience: Patience | StartPatience) -> list[Message]:
        """Waits until every rank has sent a message of this kind. Raises TaskFailed."""
        while not all(self._inbox):
            self._poll(limit_s=_TICK_S)
            if self._failures:
                self._collect_other_failures()
                self._fail(first_cause(list(self._failures.values())), self._stacks())
            if not all(self._inbox) and (why := patience.why_over()):
                self._hang(why)
        messages = [inbox.popleft() for inbox in self._inbox]
        for rank, message in enumerate(messages):
            if message.get("type") != kind:
                self._record_failure(rank, "exited", f"sent {message.get('type')!r} where {kind!r} was due")
                self._fail(self._failures[rank], self._stacks())
        return messages

    def _poll(self, *, limit_s: float) -> None:
        """Waits at most ``limit_s`` for messages, and records failures: exceptions, deaths, stopped ranks."""
        worker_group = self._worker_group
        ready = readable([worker_group.handle, *(worker_group.wires[rank] for rank in self._open)], limit_s=limit_s)
        for rank in sorted(self._open):
            if worker_group.wires[rank].fileno() in ready:
                self._read(rank)
        worker_group.handle.receive()
        if not worker_group.handle.is_alive:
            status = worker_group.handle.close()
            what = f"{worker_group.handle.what} {exit_words(status)}, and its ranks with it"
            self._failures[None] = Failure(rank=None, kind="killed" if status < 0 else "exited", what=what)
        elif worker_group.lost:
            self._failures[None] = Failure(rank=None, kind="killed", what=worker_group.lost[0])
        for rank, status in worker_group.statuses.items():
            self._record_failure(rank, "killed" if status < 0 else "exited", exit_words(status))
        now = time.monotonic()
        for rank in range(worker_group.size):
            if now - self._cut_since.get(rank, now) > _CUT_GRACE_S:
                self._record_failure(rank, "exited", "closed its connection to the controller")
            if worker_group.state(rank) != "T":
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) > GRACE_S:
                self._record_failure(rank, "stopped", "was stopped (SIGSTOP, or job control)")

    def _read(self, rank: int) -> None:
        """Reads all messages that the rank has sent, because the last one may explain its death."""
        wire = self._worker_group.wires[rank]
        while rank in self._open and readable([wire], limit_s=0.0):
            try:
                message, _ = wire.receive()
            except Garbage as garbage:
                self._open.discard(rank)
                self._record_failure(rank, "exited", "sent garbage to the controller", detail=str(garbage))
                return
            if message is None:
                self._open.discard(rank)
                self._cut_since[rank] = time.monotonic()
            elif message.get("type") == "raised":
                kind: FailureKind = "out of memory" if message["out_of_memory"] else "raised"
                what = "ran out of memory" if message["out_of_memory"] else "raised"
                self._record_failure(rank, kind, what, detail=message["error"], traceback=message["traceback"])
            else:
                self._inbox[rank].append(message)

    def _record_failure(
        self, rank: int, kind: FailureKind, what: str, *, detail: str = "", traceback: str = ""
    ) -> None:
        """Records a rank's first failure; later failures of the same rank are consequences and are ignored."""
        phase = self._worker_group.beats.read(rank).phase
        what = f"rank {rank} {what}"
        failure = Failure(rank=rank, kind=kind, what=what, phase=phase, detail=detail, traceback=traceback)
        self._failures.setdefault(rank, failure)

    def _collect_other_failures(self) -> None:
        deadline = time.monotonic() + GRACE_S
        while self._ranks_without_report() and None not in self._failures and time.monotonic() < deadline:
            self._poll(limit_s=min(_TICK_S, deadline - time.monotonic()))

    def _ranks_without_report(self) -> list[int]:
        """Returns the ranks that have neither finished nor failed. A message that a rank has started does not count."""
        at_work = (all(message.get("type") == "started" for message in inbox) for inbox in self._inbox)
        return [rank for rank, is_at_work in enumerate(at_work) if is_at_work and rank not in self._failures]

    def _hang(self, why: str) -> NoReturn:
        """Raises TaskFailed for a hang, and names the suspects among the ranks with the fewest heartbeats.

        A rank is no suspect if its stack is inside a collective or receive, or if it has entered more collectives of a
        group than other ranks. Ranks that have entered fewer come first. Both signs are needed: a rank that waits for
        its GPU is not inside a collective, and the flight recorder does not count receives.
        """
        locations = self._stacks()
        late = self._ranks_without_report()
        fewest = min(self._worker_group.beats.read(rank).count for rank in late)
        suspects = [rank for rank in late if self._worker_group.beats.read(rank).count == fewest]
        behind, ahead = flight.behind_and_ahead(self._log_dir, range(self._worker_group.size))
        outside = {rank for rank in suspects if rank in locations and not locations[rank].in_collective}
        choices = outside & behind, outside - ahead, outside, behind & set(suspects)
        suspects = next((sorted(choice) for choice in choices if choice), suspects)
        names = f"rank{'s' if len(suspects) > 1 else ''} {', '.join(map(str, suspects))}"
        cause = Failure(
            rank=suspects[0] if len(suspects) < self._worker_group.size else None,
            kind="hung",
            what=f"{names} hung",
            phase=self._worker_group.beats.read(suspects[0]).phase,
            detail=why,
        )
        self._fail(cause, locations)

    def _stacks(self) -> dict[int, Location]:
        """Makes the ranks that still run write their stacks; returns their locations by rank."""
        ranks = [
            *self._ranks_without_report(),
            *(rank for rank, f in self._failures.items() if rank is not None and f.kind == "stopped"),
        ]
        files = {rank: self._log_dir / f"rank-{rank}.stacks" for rank in ranks}
        for rank in ranks:
            self._worker_group.signal(rank, signal.SIGUSR1)
            self._worker_group.signal(rank, signal.SIGCONT)  # a stopped rank writes them when it runs again
            self._worker_group.signal(rank, flight.ASK)
        deadline = time.monotonic() + _STACKS_LIMIT_S
        while time.monotonic() < deadline and not all(
            is_whole(file) and flight.flight_file(self._log_dir, rank).exists() for rank, file in files.items()
        ):
            time.sleep(_STACKS_TICK_S)
        for file in self._log_dir.glob("rank-*.stacks"):
            if not _is_written(file):
                file.unlink(missing_ok=True)
        return {rank: location for rank, file in files.items() if (location := read_location(file))}

    def _fail(self, cause: Failure, locations: dict[int, Location]) -> NoReturn:
        """Raises TaskFailed with the text: the cause, the other ranks, the names of logs, the end of the log."""
        lines = [str(cause)]
        now = time.monotonic()
        for rank in range(self._worker_group.size):
            other = self._failures.get(rank)
            beat = self._worker_group.beats.read(rank)
            if other is not None and other is not cause:
                lines.append(f"  then {other}")
            elif rank in locations:
                lines.append(f"  rank {rank} is {locations[rank].text}, {beat.phase!r} for {now - beat.time:.1f} s")
        lines += flight.uneven_collectives(self._log_dir, range(self._worker_group.size))
        flight.remove_empty(self._log_dir, range(self._worker_group.size))
        stacks = sorted(file.name for file in self._log_dir.glob("rank-*.stacks"))
        logs = sorted(file.name for file in self._log_dir.glob("rank-*.log"))
        lines.append(f"logs: {', '.join(logs) or 'none'}; stacks: {', '.join(stacks) or 'none'}")
        if cause.traceback:
            lines += [f"traceback of rank {cause.rank}:", indent(cause.traceback)]
        elif cause.rank is not None:
            lines += [f"end of rank-{cause.rank}.log:", tail(self._log_dir / f"rank-{cause.rank}.log")]
        raise TaskFailed(cause, "\n".join(lines))


def _is_written(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0
