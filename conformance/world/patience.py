"""Patience: when a task that is not done counts as hung. A task that gets on, however slowly, does not (claim 8).

A task gets on while a rank goes through phases or through the smaller marks between them (conformance.world.heartbeat).
Between two marks, of a long backward pass for example, ranks may also show that they compute: ranks that wait for one
another use next to no processor time. On a GPU that says nothing, because a waiting rank polls.
"""

from conformance.world.heartbeat import Beat
from conformance.world.launch import World

COMPUTING = 4  # times the budget: so long a task may go without a mark if its ranks compute
SLOW = 12  # times the budget: so long a task may take in all, or it could go on for ever
SHARE = 0.05  # of a processor, all ranks together, that counts as computing; a loaded machine may give them no more


class Patience:
    """With the ranks of one task. ``limit_s``: seconds that may pass without a mark. ``since``: when the task began, in
    seconds of CLOCK_MONOTONIC."""

    def __init__(self, world: World, *, limit_s: float, since: float) -> None:
        self._world, self._limit_s, self._since = world, limit_s, since
        self._beats: list[Beat] = [world.beats.read(rank) for rank in range(world.size)]
        self._used = self._used_s()
        self._marked = since
        self._longest: tuple[float, str] = (0.0, "")

    def why_over(self, now: float) -> str:
        """Why the task counts as hung, in words; empty while it does not."""
        self._look(now)
        without, limit = now - self._marked, self._limit_s
        if now - self._since > SLOW * limit:
            return f"not done within {SLOW} times the budget of {limit:g} s (--budget){self._told()}"
        if without <= limit or (without <= COMPUTING * limit and self._computes(without)):
            return ""
        return f"no progress for {without:.1f} s, and the budget is {limit:g} s (--budget){self._told()}"

    def _look(self, now: float) -> None:
        beats = [self._world.beats.read(rank) for rank in range(self._world.size)]
        if beats == self._beats:
            return
        for before, beat in zip(self._beats, beats, strict=True):
            if beat.count == before.count + 1:
                self._longest = max(self._longest, (beat.time - before.time, before.phase))
        self._beats, self._marked, self._used = beats, now, self._used_s()

    def _computes(self, seconds: float) -> bool:
        return self._world.computes_when_busy and self._used_s() - self._used >= SHARE * seconds

    def _used_s(self) -> float:
        return self._world.processor_seconds()

    def _told(self) -> str:
        """What a slow machine would show."""
        seconds, phase = self._longest
        return f"; the longest phase before, {phase!r}, took {seconds:.1f} s" if phase else ""
