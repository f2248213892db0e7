"""Coverage of a run: what it had to judge at least, what it judged, and what was lost since an earlier run (claim 9).

If a backend refuses more cells than before, if an adapter is no longer installed, or if a table is removed from a
profile, nothing differs and the run is green, although it shows less. So users can demand what a run has to judge, and
every run publishes which cells each backend claims and refuses. All results here are computed from the states of the
cells; none is read from a file.
"""

import fnmatch
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.record.states import ANSWERED, STATES, State

TO = "-to-"  # joins the backends, and the layouts, of consecutive legs in a cell's id
CELLS_LISTED = 3  # most cells that a sentence names

States = Mapping[str, State]  # by cell id


@dataclass(frozen=True, kw_only=True)
class Floor:
    """What a run has to judge at least in order to pass. The default demands nothing.

    require: shell patterns of cell ids. Every cell that matches has to conform, or to differ as expected.
    min_judged: the number of cells that have to be judged.
    backends: names of backends; at least one cell of each has to be judged.
    against: the path of an earlier run, and ``earlier`` the states of its cells by id. No cell may be covered less.
    shards: the parts of a run in several jobs that this folder holds, such as ``2/5``; empty for a run in one piece.
    planned: the ids of the cells of all parts. whole: False for one part alone: the demands are held against all parts
        together, by ``parity merge``.
    """

    require: tuple[str, ...] = ()
    min_judged: int = 0
    backends: tuple[str, ...] = ()
    against: str = ""
    earlier: dict[str, State] = field(default_factory=dict)
    shards: tuple[str, ...] = ()
    planned: tuple[str, ...] = ()
    whole: bool = True

    @property
    def missing_shards(self) -> tuple[str, ...]:
        """The parts of the run that are in none of the merged folders."""
        total = self.shards[0].partition("/")[2] if self.shards and self.whole else "0"
        every = [f"{number}/{total}" for number in range(1, int(total) + 1)]
        return tuple(shard for shard in every if shard not in self.shards)

    def unmet(self, states: States) -> tuple[str, ...]:
        """One sentence for each demand that is not met; empty if the run judged enough."""
        if not self.whole:
            return ()
        return tuple(sentence for sentence in self._unmet(states) if sentence)

    def _unmet(self, states: States) -> Iterator[str]:
        if absent := [cell for cell in self.planned if cell not in states]:
            shards = f"shard {', '.join(self.missing_shards)} is missing" if self.missing_shards else "planned"
            yield f"{shards}: {len(absent)} of {len(self.planned)} cells, {_list_cells(absent, states)}"
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
        """(lost, gained): the cells that are covered less, and more, than in the earlier run; empty without one."""
        if not self.against or not self.whole:
            return (), ()
        every = [
            Change(cell=cell, before=self.earlier.get(cell), now=states.get(cell))
            for cell in dict.fromkeys([*self.earlier, *states])
        ]
        lost = tuple(change for change in every if _depth(change.now) < _depth(change.before))
        gained = tuple(c for c in every if _depth(c.now) > _depth(c.before) and c.now in ANSWERED)
        return lost, gained


def floor_from_json(values: Any) -> Floor:
    """A Floor from the JSON values of ``dataclasses.asdict``. Raises KeyError, TypeError or ValueError for others."""
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
        shards=_shards(values.get("shards", ())),  # summaries of older versions have none of these three
        planned=tuple(map(str, values.get("planned", ()))),
        whole=bool(values.get("whole", True)),
    )


def _shards(values: Any) -> tuple[str, ...]:
    if wrong := [shard for shard in values if not re.fullmatch("[1-9][0-9]{0,3}/[1-9][0-9]{0,3}", str(shard))]:
        raise ValueError(f"a shard, not {wrong[0]!r}")
    return tuple(map(str, values))


@dataclass(frozen=True, kw_only=True)
class Change:
    """A cell that is covered less or more than in the earlier run.

    before, now: its state in the earlier run and in this one; None if the run does not have the cell.
    """

    cell: str
    before: State | None
    now: State | None

    def __str__(self) -> str:
        return f"{_word(self.before)}, now {_word(self.now)}"


def _depth(state: State | None) -> int:
    """How much is known about a cell: 0 nothing, 1 that it is claimed, 2 some stages, 3 all stages."""
    if state in (None, "unsupported"):
        return 0
    if state not in ANSWERED:
        return 1
    return 2 if state == "partly_observed" else 3


def _word(state: State | None) -> str:
    return STATES[state].name if state else "not in the run"


def _list_cells(cells: list[str], states: States) -> str:
    """``cell (state)`` for the first cells, and the number of further ones, in words."""
    said = ", ".join(f"{cell} ({_word(states.get(cell))})" for cell in cells[:CELLS_LISTED])
    return said + (f" and {len(cells) - CELLS_LISTED} more" if len(cells) > CELLS_LISTED else "") or "the run has none"


def _backend(cell: str) -> str:
    """The backend in a cell's id, or the chain of backends."""
    return (*cell.split("/"), "", "", "")[2]


def claims(cells: Mapping[str, tuple[State, str]]) -> dict[str, dict[str, Any]]:
    """By backend, as JSON values: ``claimed``, a list of cell ids, and ``refused``, the reasons by cell id.

    ``cells``: (state, reason) by cell id. A chain of backends has its own entry.
    """
    found: dict[str, dict[str, Any]] = {}
    for cell, (state, reason) in cells.items():
        of_backend = found.setdefault(_backend(cell), {"claimed": [], "refused": {}})
        if state == "unsupported":
            of_backend["refused"][cell] = reason
        else:
            of_backend["claimed"].append(cell)
    return found
