"""Coverage: what a run had to judge at least, what it did judge, and what was lost since an earlier run (claim 9).

A backend that refuses more than it did, an adapter that is not installed any more, a table that was taken out of a
profile: none of these is a difference, and each makes a run green that shows less. So what a run has to judge can be
demanded, and the list of what each backend claims and refuses is published with every run. Nothing here is read from a
file as a result: all of it follows from the states of the cells.
"""

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.record.states import ANSWERED, STATES, State

TO = "-to-"  # between the backends and between the layouts of consecutive legs, in a cell's id
CELLS_LISTED = 3  # cells that a sentence names

States = Mapping[str, State]  # by the id of a cell


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What a run has to judge at least in order to pass; empty: anything.

    require: shell patterns of ids; each cell of one has to conform, or to differ as expected. min_judged: cells that
    have to be judged. backends: names of backends; of each, a cell has to be judged. against: the earlier run whose
    cells were in the states ``earlier``; none of their coverage may be lost.
    """

    require: tuple[str, ...] = ()
    min_judged: int = 0
    backends: tuple[str, ...] = ()
    against: str = ""
    earlier: dict[str, State] = field(default_factory=dict)

    def unmet(self, states: States) -> tuple[str, ...]:
        """What is missing, a sentence each; nothing if the run judged enough."""
        return tuple(sentence for sentence in self._unmet(states) if sentence)

    def _unmet(self, states: States) -> Iterator[str]:
        for pattern in self.require:
            cells = {cell: state for cell, state in states.items() if fnmatch.fnmatchcase(cell, pattern)}
            short = [cell for cell, state in cells.items() if state not in ("conforms", "expected_difference")]
            yield "" if cells else f"required: no cell of the run matches {pattern!r}"
            yield f"required: {pattern!r}, but {_list_cells(short, states)}" if short else ""
        judged = sum(state in ANSWERED for state in states.values())
        yield f"judged: {judged} of at least {self.min_judged} cells" if judged < self.min_judged else ""
        for name in self.backends:
            cells = {cell: state for cell, state in states.items() if name in _backend(cell).split(TO)}
            if not any(state in ANSWERED for state in cells.values()):
                yield f"asked for: backend {name}, and no cell of it was judged: {_list_cells(list(cells), states)}"
        if lost := self.changes(states)[0]:
            yield f"coverage lost since {self.against}: {_list_cells([change.cell for change in lost], states)}"

    def changes(self, states: States) -> tuple[tuple["Change", ...], tuple["Change", ...]]:
        """Coverage that was lost and that was gained since the earlier run; none without one."""
        if not self.against:
            return (), ()
        every = [
            Change(cell=cell, before=self.earlier.get(cell), now=states.get(cell))
            for cell in dict.fromkeys([*self.earlier, *states])
        ]
        lost = tuple(change for change in every if _depth(change.now) < _depth(change.before))
        gained = tuple(c for c in every if _depth(c.now) > _depth(c.before) and c.now in ANSWERED)
        return lost, gained


def floor_from_json(values: Any) -> Floor:
    """What ``dataclasses.asdict`` gave; raises KeyError, TypeError or ValueError for anything else."""
    require, backends = (tuple(map(str, values[name])) for name in ("require", "backends"))
    earlier = {str(cell): state for cell, state in dict(values["earlier"]).items()}
    if unknown := [state for state in earlier.values() if state not in STATES]:
        raise TypeError(f"a state, not {unknown[0]!r}")
    return Floor(
        require=require,
        min_judged=int(values["min_judged"]),
        backends=backends,
        against=str(values["against"]),
        earlier=earlier,
    )


@dataclass(frozen=True, kw_only=True)
class Change:
    """A cell that is covered less or more than in the earlier run; None: it was not part of that run."""

    cell: str
    before: State | None
    now: State | None

    def __str__(self) -> str:
        return f"{_word(self.before)}, now {_word(self.now)}"


def _depth(state: State | None) -> int:
    """How much is known of a cell: nothing, that it is claimed, a part, or all."""
    if state in (None, "unsupported"):
        return 0
    if state not in ANSWERED:
        return 1
    return 2 if state == "partly_observed" else 3


def _word(state: State | None) -> str:
    return STATES[state].name if state else "not in the run"


def _list_cells(cells: list[str], states: States) -> str:
    """``cell (state)`` of the first cells, and how many more there are."""
    said = ", ".join(f"{cell} ({_word(states.get(cell))})" for cell in cells[:CELLS_LISTED])
    return said + (f" and {len(cells) - CELLS_LISTED} more" if len(cells) > CELLS_LISTED else "") or "the run has none"


def _backend(cell: str) -> str:
    """The backend of a cell, or the chain of them, as its id has it."""
    return (*cell.split("/"), "", "", "")[2]


def claims(cells: Mapping[str, tuple[State, str]]) -> dict[str, dict[str, Any]]:
    """By backend: the cells that it ``claimed``, and those ``refused`` with the reason; JSON values.

    ``cells``: state and reason by id. A chain of backends stands under its own name.
    """
    found: dict[str, dict[str, Any]] = {}
    for cell, (state, reason) in cells.items():
        of_backend = found.setdefault(_backend(cell), {"claimed": [], "refused": {}})
        if state == "unsupported":
            of_backend["refused"][cell] = reason
        else:
            of_backend["claimed"].append(cell)
    return found
