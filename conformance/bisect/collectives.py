"""Collectives: which ones each module of a rank issues in a step, and which are issued between two modules."""

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch._subclasses import FakeTensor

from conformance.record.bisection import Direction, First, Issued
from conformance.run.evidence import collective_of
from conformance.run.exact import PLAIN, EagerMode

BETWEEN = " -> "  # of two modules in a place's name
Place = tuple[str, Direction]  # a module, or ``A -> B``
Kind = tuple[str, int, str]  # kind, size of the group, dtype


class Issuing(EagerMode):
    """Counts collectives inside its ``with`` block, by the modules that are at work.

    A collective counts for the module, and for all that it is a part of. In the backward pass, a module is at work
    from the gradient of its output to that of its input. What comes between two modules is counted for the pair; what
    comes before the first or after the last one is not.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.times: Counter[tuple[Place, Kind]] = Counter()
        self.elements: Counter[tuple[Place, Kind]] = Counter()
        self._at_work: dict[Direction, list[str]] = {"forward": [], "backward": []}
        self._direction: Direction = "forward"
        self._last = ""
        self._between: list[tuple[Kind, int]] = []
        self._is_paused = False

    def enter(self, name: str, direction: Direction) -> None:
        for kind, elements in self._between:
            if self._last:
                self._count((f"{self._last}{BETWEEN}{name}", direction), kind, elements)
        self._between = []
        modules = self._at_work[direction]
        while modules and not name.startswith(f"{modules[-1]}."):
            modules.pop()  # no gradient came back to its input
        modules.append(name)
        self._last, self._direction = name, direction

    def leave(self, name: str, direction: Direction) -> None:
        modules = self._at_work[direction]
        if name in modules:
            del modules[modules.index(name) :]
        self._last, self._direction = name, direction

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Collectives inside this block belong to the suite and are not counted."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not PLAIN.issuperset(types):
            return NotImplemented  # a DTensor goes first, so that the ops on its local tensors come here
        if not self._is_paused and FakeTensor not in types and (found := collective_of(func, args)):
            kind = (found.kind, found.size, str(found.dtype).removeprefix("torch."))
            modules = self._at_work[self._direction]
            if not modules:
                self._between.append((kind, found.elements))
            for name in modules:
                self._count((name, self._direction), kind, found.elements)
        return func(*args, **(kwargs or {}))

    def _count(self, place: Place, kind: Kind, elements: int) -> None:
        self.times[place, kind] += 1
        self.elements[place, kind] += elements

    def write(self, folder: Path, rank: int) -> None:
        told = [[*place, *kind, times, self.elements[place, kind]] for (place, kind), times in self.times.items()]
        (folder / f"collectives-{rank}.json").write_text(json.dumps([rank, told]))


def read_issued(folder: Path, first: First) -> tuple[Issued, ...]:
    """What all ranks issued in the place of a first wrong value; ranks that did the same are told together."""
    alike: dict[tuple[Kind, int, int], list[int]] = defaultdict(list)
    for file in sorted(folder.glob("collectives-*.json")):
        rank, told = json.loads(file.read_text())
        found: dict[Kind, list[int]] = defaultdict(lambda: [0, 0])
        for name, direction, kind, size, dtype, times, elements in told:
            if direction == first.direction and _is_there(name, first):
                found[kind, size, dtype][0] += times
                found[kind, size, dtype][1] += elements
        for each, (times, elements) in found.items():
            alike[each, times, elements].append(rank)
    return tuple(
        Issued(kind=kind, size=size, dtype=dtype, times=times, elements=elements, ranks=tuple(sorted(ranks)))
        for ((kind, size, dtype), times, elements), ranks in sorted(alike.items())
    )


def _is_there(name: str, first: First) -> bool:
    """Whether a place's name is that of the module, or begins or ends where the defect's place between two does: one
    of the two may be on another rank."""
    if first.inside or first.before is None:
        return name == first.module
    before, arrow, after = name.partition(BETWEEN)
    return bool(arrow) and (before == first.before[0] or after == first.module)
