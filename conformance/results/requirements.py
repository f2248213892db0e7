"""Checks that a run judged what it had to judge, and formats its summary for the terminal.

If a backend supports fewer cells than before, if an adapter is no longer installed, or if a table is removed from a
profile, then nothing differs and the run is green, although it shows less. So users can set minimum requirements, and
every run lists the supported and unsupported cells of each backend. All results are computed from the states of cells.
"""

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.core.errors import first_few
from conformance.results.baseline import RANKS_PER_GPU, Baseline, backend_of, baseline_from_json
from conformance.results.changes import changes_between
from conformance.results.verdict import ANSWERED, NOT_SEEN, STATES, State, named

OR = " or "  # joins the names of backends of which one has to be judged
TO = "-to-"  # joins the backends, and the layouts, of consecutive phases in a cell's id
CELLS_LISTED = 3  # maximum number of cells that a sentence names

States = Mapping[str, State]  # by cell id


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Holds the minimum requirements for a run to pass. The default requires nothing.

    require: shell patterns of cell ids. Every cell that matches has to conform, or to differ as expected.
    min_judged: the number of cells that have to be judged.
    backends: names of backends; at least one cell of each has to be judged. ``a or b``: at least one of either.
    baseline: earlier runs; no cell may be covered less than in the last green one that has it, or in a later one.
    shards: the shards of the run that this folder has, such as ``2/5``; empty for a run without shards.
    planned: the ids of the cells of all shards. whole: False for a shard alone; ``parity merge`` checks the
        requirements for all shards together.
    """

    require: tuple[str, ...] = ()
    min_judged: int = 0
    backends: tuple[str, ...] = ()
    baseline: Baseline | None = None
    shards: tuple[str, ...] = ()
    planned: tuple[str, ...] = ()
    whole: bool = True

    @property
    def missing_shards(self) -> tuple[str, ...]:
        """Returns the shards of the run that are in none of the merged folders."""
        total = self.shards[0].partition("/")[2] if self.shards and self.whole else "0"
        every = [f"{number}/{total}" for number in range(1, int(total) + 1)]
        return tuple(shard for shard in every if shard not in self.shards)

    def unmet(self, states: States) -> tuple[str, ...]:
        """Returns one sentence for each requirement that is not met; empty if the run judged enough."""
        if not self.whole:
            return ()
        return tuple(sentence for sentence in self._unmet(states) if sentence)

    def _unmet(self, states: States) -> Iterator[str]:
        if absent := [cell for cell in self.planned if cell not in states]:
            shards = f"shard {', '.join(self.missing_shards)} is missing" if self.missing_shards else "planned"
            yield f"{shards}: {len(absent)} of {len(self.planned)} cells, {_list_cells(absent, states)}"
        planted = {cell: state for cell, state in states.items() if "/fault-" in cell}
        if planted and not any(state in ANSWERED for state in planted.values()):
            yield f"planted: no cell with a fault was judged: {_list_cells(list(planted), states)}"
        for pattern in self.require:
            cells = {cell: state for cell, state in states.items() if fnmatch.fnmatchcase(cell, pattern)}
            short = [cell for cell, state in cells.items() if state not in ("conforms", "expected_difference")]
            yield "" if cells else f"required: no cell of the run matches {pattern!r}"
            yield f"required: {pattern!r}, but {_list_cells(short, states)}" if short else ""
        judged = sum(state in ANSWERED for state in states.values())
        yield f"judged: {judged} of at least {self.min_judged} cells" if judged < self.min_judged else ""
        for name in self.backends:
            either = set(name.split(OR))
            cells = {cell: state for cell, state in states.items() if either & {*backend_of(cell).split(TO)}}
            if not any(state in ANSWERED for state in cells.values()):
                yield f"requested: backend {name}, but none of its cells was judged: {_list_cells(list(cells), states)}"
        if self.baseline and not self.baseline.runs:
            yield f"{self.baseline.path} has no earlier run of this selection: lost coverage cannot be found"
        if self.baseline and (lost := [c.cell for c in changes_between(self.baseline.demanded, states) if c.is_loss]):
            yield f"coverage lost since {self.baseline.path}: {_list_cells(lost, states)}"


def floor_from_json(values: Any) -> Floor:
    """Parses the JSON values of ``dataclasses.asdict``. Raises KeyError, TypeError or ValueError for other values."""
    require, backends = (tuple(map(str, values[name])) for name in ("require", "backends"))
    if values.get("against"):
        raise ValueError("a baseline: an older version compared it with an earlier run; use that version")
    baseline = values.get("baseline")  # summaries of older versions have neither this nor the last three
    return Floor(
        require=require,
        min_judged=int(values["min_judged"]),
        backends=backends,
        baseline=None if baseline is None else baseline_from_json(baseline),
        shards=_shards(values.get("shards", ())),
        planned=tuple(map(str, values.get("planned", ()))),
        whole=bool(values.get("whole", True)),
    )


def _shards(values: Any) -> tuple[str, ...]:
    if wrong := [shard for shard in values if not re.fullmatch("[1-9][0-9]{0,3}/[1-9][0-9]{0,3}", str(shard))]:
        raise ValueError(f"a shard, not {wrong[0]!r}")
    return tuple(map(str, values))


def _list_cells(cells: list[str], states: States) -> str:
    named = [f"{cell} ({STATES[states[cell]].name if cell in states else 'not in the run'})" for cell in cells]
    return first_few(named, most=CELLS_LISTED) or "the run has none"


def claims(cells: Mapping[str, tuple[State, str]]) -> dict[str, dict[str, Any]]:
    """Returns by backend, as JSON values: ``claimed``, a list of supported cells, and ``refused``, reasons by
    unsupported cell.

    cells: (state, reason) by cell id. A chain of backends has its own entry.
    """
    found: dict[str, dict[str, Any]] = {}
    for cell, (state, reason) in cells.items():
        of_backend = found.setdefault(backend_of(cell), {"claimed": [], "refused": {}})
        if state == "unsupported":
            of_backend["refused"][cell] = reason
        else:
            of_backend["claimed"].append(cell)
    return found


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """Returns the lines for the terminal, from the values of ``summary.json``: verdict, counts, unmet requirements, and
    changes since earlier runs."""
    counts = ", ".join(f"{count} {STATES[state].name}" for state, count in summary["counts"].items() if count)
    since = summary["since"]["text"] if summary["since"] else ()
    second = sum(bool(cell["second_class"]) for cell in summary["cells"])
    oracles = f"second-class reference: {second} judged by transformers' own implementation; {NOT_SEEN}"
    shares, shared = leased(summary["leased"]), shared_gpus(summary["environment"])
    notes = (f"share of the time with a lease: {shares}" if shares else "", oracles if second else "", shared)
    code = code_by_precision(summary["cells"])
    return [f"{named(summary['verdict'])}: {counts}", *summary["unmet"], *since, *code, *filter(None, notes)]


def code_by_precision(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each backend and precision with the code that ran there and not in the exact tier.

    The exact tier does not stand for this code. Dtypes of gradients are left out, because they always differ.
    """
    ran: dict[tuple[str, str], dict[str, None]] = {}
    for cell in cells:
        parts = (part for part in re.split("[,;] ", cell["code"]) if part and not part.startswith("gradients "))
        ran.setdefault((backend_of(cell["id"]), cell["id"].split("/")[4]), {}).update(dict.fromkeys(parts))
    return [
        f"{backend} in {precision} runs code that the exact tier does not: {', '.join(only)}"
        for (backend, precision), code in ran.items()
        if (exact := ran.get((backend, "exact"))) and (only := [part for part in code if part not in exact])
    ]


def shared_gpus(environment: Mapping[str, Any]) -> str:
    """Returns a warning about times and memory if ranks shared GPUs; else empty."""
    each = environment.get(RANKS_PER_GPU, 1)
    return f"up to {each} ranks shared a GPU: times and free memory are not those of one GPU each" if each != 1 else ""


def leased(shares: Mapping[str, float]) -> str:
    """Formats the share of the time in which cells and oracles used each GPU; empty if none was leased."""
    return ", ".join(f"{gpu} {share:.0%}" for gpu, share in shares.items())


def used(cpu_seconds: float, gpu_active: Mapping[str, float], *, cells: int) -> str:
    """Formats the processor time of a run and the activity of its GPUs; empty if neither was measured."""
    processors = f"{cpu_seconds:.0f} CPU-seconds, {cpu_seconds / max(cells, 1):.1f} a cell" if cpu_seconds else ""
    return ", ".join(filter(None, (processors, *(f"{gpu} {share:.1%} active" for gpu, share in gpu_active.items()))))
