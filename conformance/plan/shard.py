"""Shard: the cells of one of several jobs, the same on every machine that selects the same cells.

Cells with the same oracle stay together, because its runs cost more than a small cell. An oracle with more cells than
fit into a shard is computed in several.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from conformance.plan.cell import Cell
from conformance.validation import UsageError

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
