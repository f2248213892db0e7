"""Reads and writes ``side_by_side.json``: which cells of a scenario agree with the oracle and with each other.

docs/explanations/architecture.md has the fields of the file. Does not import torch.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from conformance.core.errors import UsageError
from conformance.numerics.comparison import ratio
from conformance.records.record_format import first_error
from conformance.results.run_results import OUTPUT_SCHEMA, SIDE_BY_SIDE, read_output_json, write_output_json
from conformance.results.verdict import State

GroupState = Literal["conforms", "differs", "expected_difference", "infrastructure"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The worst difference of one column, of a cell from the oracle or between two cells, and its tensor and step.

    ``observed`` and ``allowed`` are relative. ``since``: the first step at which a quantity of the column exceeds its
    tolerance; None if none does.
    """

    column: str
    observed: float
    allowed: float
    tensor: str
    step: int
    since: int | None = None

    @property
    def ratio(self) -> float:
        return ratio(self.observed, self.allowed)


Columns = Mapping[str, Difference]


@dataclass(frozen=True, kw_only=True)
class Member:
    """One cell of a group.

    records: digests of the compared records. problem: why the cell is not compared with others, or not in all columns;
    empty if it is compared in all columns. oracle: its worst difference from the oracle in each column.
    conventions: those of the oracle that judged it and that show, or all if it differs; ``oracle`` is without them.
    """

    cell: str
    state: State
    records: tuple[str, ...]
    problem: str
    oracle: Columns
    conventions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.cell.split("/")) < 4:
            raise ValueError(f"{self.cell} is not a cell")

    @property
    def backend(self) -> str:
        return self.cell.split("/")[2]

    @property
    def layout(self) -> str:
        return self.cell.split("/")[3]

    def __str__(self) -> str:
        return f"{self.backend} {self.layout}"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The worst difference of two members, by their numbers, from each other in each column."""

    members: tuple[int, int]
    columns: Columns

    @property
    def furthest(self) -> Difference | None:
        """Returns the difference with the highest ratio over all columns; None without differences."""
        return max(self.columns.values(), key=lambda one: one.ratio, default=None)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The cells of one scenario, model and precision.

    group: its name. columns: the names of the compared quantities, in causal order. state, text: which members agree,
    in sentences. families: by column, the cells that agree; the family of the oracle comes first.
    """

    group: str
    columns: tuple[str, ...]
    state: GroupState
    text: str
    families: Mapping[str, tuple[tuple[str, ...], ...]] = field(default_factory=dict)
    members: tuple[Member, ...]
    pairs: tuple[Pair, ...]

    def __post_init__(self) -> None:
        if not all(0 <= number < len(self.members) for pair in self.pairs for number in pair.members):
            raise ValueError("it has pairs of unknown members")

    @property
    def backends(self) -> list[str]:
        return list(dict.fromkeys(member.backend for member in self.members))

    @property
    def outside(self) -> list[Pair]:
        """Returns the pairs that exceed their tolerance, the worst first."""
        beyond = [(worst.ratio, pair) for pair in self.pairs if (worst := pair.furthest) and worst.ratio > 1]
        return [pair for _, pair in sorted(beyond, key=lambda found: -found[0])]

    def worst_over_pairs(self, column: str) -> Difference | None:
        """Returns the difference with the highest ratio in one column, over all pairs; None if no pair has the
        column."""
        found = [pair.columns[column] for pair in self.pairs if column in pair.columns]
        return max(found, key=lambda one: one.ratio, default=None)


_GROUPS = TypeAdapter(tuple[Group, ...])


def write_groups(out: Path, groups: Sequence[Group]) -> None:
    """Writes ``side_by_side.json``. Raises Unwritable."""
    values = [asdict(group) for group in groups]
    for group, of_group in zip(groups, values, strict=True):
        for member, of_member in zip(group.members, of_group["members"], strict=True):
            of_member["oracle"] = _to_json(member.oracle)
        for pair, of_pair in zip(group.pairs, of_group["pairs"], strict=True):
            of_pair["columns"] = _to_json(pair.columns)
    write_output_json(out / SIDE_BY_SIDE, {"schema": OUTPUT_SCHEMA, "groups": values}, indent=None)


def _to_json(columns: Columns) -> dict[str, Any]:
    names = ("observed", "allowed", "tensor", "step", "since", "ratio")
    return {column: {name: getattr(one, name) for name in names} for column, one in columns.items()}


def read_groups(out: Path) -> tuple[Group, ...] | None:
    """Reads ``side_by_side.json``; None if there is none. Raises UsageError for a file that the suite did not write."""
    file = out / SIDE_BY_SIDE
    if not os.path.lexists(file):
        return None
    values: Any = read_output_json(file).get("groups")
    try:
        for group in values:
            for columns in (*(m["oracle"] for m in group["members"]), *(p["columns"] for p in group["pairs"])):
                for column, difference in columns.items():
                    difference["column"] = column
        groups = _GROUPS.validate_python(values)
        if edited := [group.group for group in groups if group.state == "conforms" and group.outside]:
            raise ValueError(f"{edited[0]} conforms, but a pair is outside its tolerance")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = first_error(error) if isinstance(error, ValidationError) else repr(error)
        raise UsageError(f"{file} is not as the suite wrote it ({what}); judge again") from None
    return groups
