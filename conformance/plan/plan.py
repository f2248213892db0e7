"""Plan: what one run of ``parity run`` or pytest has to do, from the user's options."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.plan.cell import Cell
from conformance.plan.floor import floor_from_demands
from conformance.plan.profile import select_cells
from conformance.plan.selection import Demands, Portion, Ranks, Selection
from conformance.plan.shard import parse_shard, split
from conformance.record.coverage import Floor
from conformance.scenario import scenario_to_json


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
