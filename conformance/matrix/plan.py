"""Plans one run of ``parity run`` or pytest from the user's options: its cells and its minimum requirements.

The cells of a shard are the same on every machine that selects the same cells. Cells with the same oracle run stay
together, because such a run costs more than a small cell. If they do not fit into one shard, several shards compute the
same oracle run.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.core.errors import UsageError
from conformance.matrix.cell import Cell
from conformance.matrix.options import Demands, Portion, Ranks, Selection
from conformance.matrix.profile import select, select_cells, selected_backends
from conformance.results.history import read_baseline
from conformance.results.requirements import OR, Floor
from conformance.spec.scenario import scenario_to_json


def floor_from_demands(
    demands: Demands, selection: Selection, cells: Sequence[Cell], *, ranks: Ranks, shard: str = ""
) -> Floor:
    """Returns the minimum requirements of a run of ``cells``, or of one ``shard`` of them.

    Each backend that the user selected by name needs at least one judged cell. With ``--cells``, the adapters of one
    module count as one backend: a pattern may be meant for the SFT or for the GRPO of a framework.

    Raises UsageError for a demand that these cells cannot meet, and for an earlier run that cannot be read.
    """
    select(cells, demands.require)
    if demands.baseline and shard:
        raise UsageError("--baseline concerns the cells of all shards together: give it to parity merge")
    if demands.min_judged > len(cells):
        raise UsageError(
            f"--min-judged {demands.min_judged}, but only {len(cells)} cells are selected; lower it or select more"
        )
    return Floor(
        require=demands.require,
        min_judged=demands.min_judged,
        backends=_named_backends(selection),
        baseline=read_baseline(demands.baseline, selection.text(ranks)) if demands.baseline else None,
        shards=(shard,) if shard else (),
        planned=tuple(map(str, cells)) if shard else (),
        whole=not shard,
    )


def _named_backends(selection: Selection) -> tuple[str, ...]:
    groups: dict[str, list[str]] = {}
    for entry in selected_backends(selection) if selection.backend else ():
        groups.setdefault(entry.target.partition(":")[0] if selection.cells else entry.name, []).append(entry.name)
    return tuple(map(OR.join, groups.values()))


MOST_SHARDS = 9999


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Identifies the ``number``-th of ``total`` shards, from 1."""

    number: int
    total: int

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


def parse_shard(text: str) -> Shard:
    """Parses a shard such as ``2/5``. Raises UsageError."""
    if found := re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text, re.ASCII):
        number, total = map(int, found.groups())
        if 1 <= number <= total:
            return Shard(number=number, total=total)
    raise UsageError(f"--shard {text}: must be K/N with K from 1 to N and N up to {MOST_SHARDS}, such as 2/5")


def split(cells: Sequence[Cell], shard: Shard) -> list[Cell]:
    """Returns the cells of ``shard``, in their order. Every cell is in exactly one shard of ``shard.total``.

    Raises UsageError for a shard without a cell.
    """
    loads = [0] * shard.total
    chosen: set[str] = set()
    # The largest piece goes first, to the shard with the least work; ties are broken by order, so all jobs agree.
    for piece in sorted(_pieces(cells, shard.total), key=_work, reverse=True):
        lightest = loads.index(min(loads))
        loads[lightest] += _work(piece)
        if lightest == shard.number - 1:
            chosen |= {str(cell) for cell in piece}
    if not chosen:
        raise UsageError(f"no cell is left for shard {shard}: {len(cells)} are selected; use fewer shards")
    return [cell for cell in cells if str(cell) in chosen]


def _pieces(cells: Sequence[Cell], total: int) -> list[list[Cell]]:
    """Groups the cells by oracle run; a group with more than a shard's work is cut into several pieces."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(json.dumps(cell.oracle_request, sort_keys=True), []).append(cell)
    most = _work(cells) / total
    pieces: list[list[Cell]] = []
    for group in groups.values():
        pieces.append([])
        for cell in group:
            if pieces[-1] and _work([*pieces[-1], cell]) > most:
                pieces.append([])
            pieces[-1].append(cell)
    return pieces


def _work(cells: Sequence[Cell]) -> int:
    """Estimates the time that cells take, in units of about 0.1 s; ranks share the cores, so it grows with them."""
    return sum(phase.layout.world_size for cell in cells for phase in cell.phases)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Holds what one run does.

    cells: the cells to run, those of one shard if there are several. floor: the minimum requirements. digest: equal for
    two runs of the same cells; for a shard it is the digest of all cells.
    """

    cells: tuple[Cell, ...]
    floor: Floor
    digest: str


def make_plan(selection: Selection, demands: Demands, portion: Portion, *, ranks: Ranks) -> Plan:
    """Plans a run. ``ranks``: the options of the earlier runs that are looked up in a history.

    Raises UsageError for a selection without cells, an impossible demand, and an invalid shard.
    """
    cells = with_controls(select_cells(selection))
    shard = parse_shard(portion.shard) if portion.shard else None
    return Plan(
        cells=tuple(split(cells, shard) if shard else cells),
        floor=floor_from_demands(demands, selection, cells, ranks=ranks, shard=str(shard or "")),
        digest=_digest(cells),
    )


def with_controls(cells: Sequence[Cell]) -> list[Cell]:
    """Adds the control of each cell with a fault: a difference in the control does not count as caught."""
    return list(dict.fromkeys([*cells, *(dataclasses.replace(cell, faults=()) for cell in cells)]))


def _digest(cells: Sequence[Cell]) -> str:
    """Digests the scenarios and phases of the cells.

    Models and data count by name, because their folders differ between machines.
    """
    digest = hashlib.sha256()
    for cell in cells:
        scenario = scenario_to_json(cell.scenario)
        named = _by_name(scenario | {"model": cell.scenario.model_name})
        phases = [dataclasses.asdict(phase) | {"layout": str(phase.layout)} for phase in cell.phases]
        for phase in phases:
            del phase["backend"]["python"]  # differs between machines
        digest.update(json.dumps([str(cell), named, phases], sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _by_name(scenario: dict[str, Any]) -> dict[str, Any]:
    path = scenario["data"]["path"]
    return scenario | {"data": scenario["data"] | {"path": path and Path(path).name}}
