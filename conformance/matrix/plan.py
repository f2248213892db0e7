"""Floor: how much the run has to judge at least, from the user's options.

Shard: the cells of one of several jobs, the same on every machine that selects the same cells.

Cells with the same oracle stay together, because its runs cost more than a small cell. An oracle with more cells than
fit into a shard is computed in several.

Plan: what one run of ``parity run`` or pytest has to do, from the user's options.
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
from conformance.results.requirements import Floor
from conformance.spec.scenario import scenario_to_json


def floor_from_demands(
    demands: Demands, selection: Selection, cells: Sequence[Cell], *, ranks: Ranks, shard: str = ""
) -> Floor:
    """The floor for a run of ``cells``, or of one ``shard`` of them.

    Each backend that the user selected by name needs at least one judged cell.

    Raises UsageError for a demand that these cells cannot meet, and for an earlier run that cannot be read.
    """
    select(cells, demands.require)
    if demands.baseline and shard:
        raise UsageError("--baseline is about the cells of all shards together: give it to parity merge")
    if demands.min_judged > len(cells):
        raise UsageError(
            f"--min-judged {demands.min_judged}, but only {len(cells)} cells are selected; lower it or select more"
        )
    return Floor(
        require=demands.require,
        min_judged=demands.min_judged,
        backends=tuple(entry.name for entry in selected_backends(selection)) if selection.backend else (),
        baseline=read_baseline(demands.baseline, selection.text(ranks)) if demands.baseline else None,
        shards=(shard,) if shard else (),
        planned=tuple(map(str, cells)) if shard else (),
        whole=not shard,
    )


MOST_SHARDS = 9999


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The ``number``-th of ``total`` shards, from 1."""

    number: int
    total: int

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


def parse_shard(text: str) -> Shard:
    """A shard from ``2/5``. Raises UsageError."""
    if found := re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text, re.ASCII):
        number, total = map(int, found.groups())
        if 1 <= number <= total:
            return Shard(number=number, total=total)
    raise UsageError(f"--shard {text}: it has to be K/N with K from 1 to N and N up to {MOST_SHARDS}, such as 2/5")


def split(cells: Sequence[Cell], shard: Shard) -> list[Cell]:
    """The cells of ``shard``, in their order. Every cell is in exactly one shard of ``shard.total``.

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
    """The cells by oracle, those of an oracle with more than a shard's work in several pieces."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(json.dumps(cell.asked_of_oracle, sort_keys=True), []).append(cell)
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
    """The time that cells take, in units of about 0.1 s: ranks share the cores, so it grows with their number."""
    return sum(leg.layout.world_size for cell in cells for leg in cell.legs)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """cells: those to run; of one shard, if there are several. floor: what has to be judged at least.
    digest: equal for two runs of the same cells, whatever their shards; of shards it is that of all cells.
    """

    cells: tuple[Cell, ...]
    floor: Floor
    digest: str


def make_plan(selection: Selection, demands: Demands, portion: Portion, *, ranks: Ranks) -> Plan:
    """``ranks``: of the earlier runs that a history is asked for.

    Raises UsageError for a selection without cells, a demand that it cannot meet, and a shard that is none.
    """
    cells = with_controls(select_cells(selection))
    shard = parse_shard(portion.shard) if portion.shard else None
    return Plan(
        cells=tuple(split(cells, shard) if shard else cells),
        floor=floor_from_demands(demands, selection, cells, ranks=ranks, shard=str(shard or "")),
        digest=_digest(cells),
    )


def with_controls(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, and for those with a planted fault the same without it: what differs there as well was not caught."""
    return list(dict.fromkeys([*cells, *(dataclasses.replace(cell, faults=()) for cell in cells)]))


def _digest(cells: Sequence[Cell]) -> str:
    """A digest of what the cells are: their scenarios and legs. Models and data count by name, because jobs on several
    machines have them in different folders."""
    digest = hashlib.sha256()
    for cell in cells:
        scenario = scenario_to_json(cell.scenario)
        named = _by_name(scenario | {"model": cell.scenario.model_name})
        legs = [dataclasses.asdict(leg) | {"layout": str(leg.layout)} for leg in cell.legs]
        for leg in legs:
            del leg["backend"]["python"]  # differs between machines
        digest.update(json.dumps([str(cell), named, legs], sort_keys=True).encode())
    return digest.hexdigest()[:16]


def _by_name(scenario: dict[str, Any]) -> dict[str, Any]:
    path = scenario["data"]["path"]
    return scenario | {"data": scenario["data"] | {"path": path and Path(path).name}}
