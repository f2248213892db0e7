"""Records what each process of a run does at every moment, and sums up the seconds by phase.

A ``Track`` belongs to one thread, which is in one phase at a time. Ranks keep a track of their own and send its spans
to the controller after each task. Times are those of CLOCK_MONOTONIC, which all processes of a host share. Processor
time is that of the thread in the controller, and that of the whole process in a rank.

This module imports nothing slow.
"""

import contextlib
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["controller", "cells", "oracle", "ranks", "groups"]
WAIT = "wait: "  # begins the name of a phase in which a track waits for another one
_FOREIGN_S = 1.0  # clocks that differ by more are those of different hosts
_NUMBER = re.compile(r" \d+$")


@dataclass(frozen=True, kw_only=True)
class Span:
    """Holds one phase of a track. about: the cell, if there is one. busy: seconds of processor time."""

    kind: Kind
    track: str
    phase: str
    began: float
    ended: float
    about: str = ""
    busy: float = 0.0


@dataclass
class Track:
    """Holds the phases of one thread. spans: phase, begin, end and processor time; the current phase is not among them.

    processor: returns the processor time used so far.
    """

    processor: Callable[[], float] = time.thread_time
    spans: list[tuple[str, float, float, float]] = field(default_factory=list)
    _phase: str = ""
    _since: float = 0.0
    _busy_before: float = 0.0

    def switch(self, phase: str, *, at: float | None = None) -> str:
        """Ends the current phase, begins another one (empty: none), and returns the phase before."""
        now, before, busy = time.monotonic() if at is None else at, self._phase, self.processor()
        if before and now > self._since:
            self.spans.append((before, self._since, now, busy - self._busy_before))
        self._phase, self._since, self._busy_before = phase, now, busy
        return before

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Interrupts the current phase by another one."""
        before = self.switch(phase)
        try:
            yield
        finally:
            self.switch(before)

    def drain(self) -> list[tuple[str, float, float, float]]:
        """Ends the current phase; returns all spans and forgets them."""
        self.switch("")
        spans, self.spans = self.spans, []
        return spans


own = Track(time.process_time)  # of a rank's main thread


class _Own(threading.local):
    """Holds the track of each thread, and what its current phase is about."""

    def __init__(self) -> None:
        self.track, self.about = Track(), ""
        self.kind: Kind = "controller"


class Timeline:
    """Holds the spans of a run, in the controller. Threads share it."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._own = _Own()
        self.began = time.monotonic()

    def begin(self, began: float) -> None:
        """Forgets everything, for a run that began at this time."""
        self._spans, self._own, self.began = [], _Own(), began

    def switch(self, phase: str, *, kind: Kind = "controller", about: str = "", at: float | None = None) -> str:
        """Ends the current phase of this thread and begins another one; empty: none. Returns the phase before."""
        own = self._own
        before = own.track.switch(phase, at=at)
        self.add(own.kind, threading.current_thread().name, own.track.spans, about=own.about)
        own.track.spans.clear()
        own.kind, own.about = kind, about
        return before

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Interrupts the current phase of this thread by another one."""
        kind, about = self._own.kind, self._own.about
        before = self.switch(phase, kind=kind, about=about)
        try:
            yield
        finally:
            self.switch(before, kind=kind, about=about)

    def add(self, kind: Kind, track: str, spans: Iterable[Sequence[Any]], *, about: str = "", clock: float = 0) -> None:
        """Adds spans: phase, begin, end, processor time. clock: the time now on their clock, if another process's."""
        shift = time.monotonic() - clock if clock else 0.0
        shift = shift if abs(shift) > _FOREIGN_S else 0.0
        self._spans += [
            Span(
                kind=kind,
                track=track,
                phase=str(phase),
                began=began + shift,
                ended=ended + shift,
                about=about,
                busy=busy,
            )
            for phase, began, ended, busy in spans
        ]

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans)


timeline = Timeline()


def process_start() -> float:
    """Returns the time at which this process started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic() - (since_boot - ticks / os.sysconf("SC_CLK_TCK"))


def seconds_by_phase(spans: Iterable[Span], *, busy: bool = False) -> dict[str, dict[str, float]]:
    """Sums up the seconds of each kind of track by phase, the longest first; ``step 3`` counts as ``step``.

    busy: the seconds of processor time.
    """
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        found[span.kind][_NUMBER.sub("", span.phase)] += span.busy if busy else span.ended - span.began
    return {
        kind: {phase: round(seconds, 2) for phase, seconds in sorted(of.items(), key=lambda item: -item[1])}
        for kind, of in sorted(found.items())
    }


def processor_table(spans: Iterable[Span], *, of_all: float) -> list[str]:
    """Returns a line for each kind of track: its processor time by phase, and the rest of that ``of_all`` processes."""
    found = {kind: phases for kind, phases in seconds_by_phase(spans, busy=True).items() if any(phases.values())}
    rest = of_all - sum(sum(of.values()) for of in found.values())
    return [
        f"processor time: {of_all:.1f} s in all, {rest:.1f} s of it in none of the following",
        *(
            f"{kind}: {sum(of.values()):.1f} s ({', '.join(f'{phase} {s:.1f}' for phase, s in of.items() if s > 0.05)})"
            for kind, of in found.items()
        ),
    ]


def table(seconds: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Returns a line for each kind of track: its seconds, the share of waiting, and its phases."""
    lines = []
    for kind, phases in seconds.items():
        total = sum(phases.values())
        waits = sum(value for phase, value in phases.items() if phase.startswith(WAIT)) / (total or 1)
        parts = ", ".join(f"{phase} {value:.1f}" for phase, value in phases.items() if value >= 0.05)
        lines.append(f"{kind}: {total:.1f} s, {waits:.0%} waiting ({parts})")
    return lines


def to_chrome(spans: Sequence[Span], *, began: float) -> dict[str, Any]:
    """Returns the spans as a trace for chrome://tracing or Perfetto: one process a kind, one thread a track."""
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(span.kind for span in spans), start=1)}
    tracks = {pair: n for n, pair in enumerate(dict.fromkeys((span.kind, span.track) for span in spans), start=1)}
    names = [
        *({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": kind}} for kind, pid in kinds.items()),
        *(
            {"ph": "M", "name": "thread_name", "pid": kinds[kind], "tid": tid, "args": {"name": track}}
            for (kind, track), tid in tracks.items()
        ),
    ]
    events = [
        {
            "ph": "X",
            "name": span.phase,
            "cat": span.kind,
            "ts": round(1e6 * (span.began - began)),
            "dur": round(1e6 * (span.ended - span.began)),
            "pid": kinds[span.kind],
            "tid": tracks[span.kind, span.track],
            "args": {"cell": span.about, "processor_s": round(span.busy, 4)},
        }
        for span in sorted(spans, key=lambda span: span.began)
    ]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}
