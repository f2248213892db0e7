"""Two runs: how each cell ended in two output folders, and its worst observed / allowed by stage; without torch."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conformance.record.baseline import versions_of
from conformance.record.cells import BelievedCell, read_cells
from conformance.record.results import Run, outcomes_of, states_of
from conformance.record.since import Change, OracleChange, VersionChange, oracle_changes, version_changes
from conformance.record.states import RunVerdict


@dataclass(frozen=True, kw_only=True)
class CellOfTwo:
    """One cell. change: its state in the first and in the second run.

    ratios: for each stage, in causal order, the worst observed / allowed in the first and in the second run; None where
        nothing of the stage was compared.
    """

    change: Change
    ratios: dict[str, tuple[float | None, float | None]]


@dataclass(frozen=True, kw_only=True)
class TwoRuns:
    """paths, started, verdicts: of the first and of the second run. versions: those that are not known to be equal.
    oracles: the cells that were judged by others."""

    paths: tuple[str, str]
    started: tuple[str, str]
    verdicts: tuple[RunVerdict, RunVerdict]
    versions: tuple[VersionChange, ...]
    oracles: tuple[OracleChange, ...]
    cells: tuple[CellOfTwo, ...]

    @property
    def changed(self) -> list[CellOfTwo]:
        """The cells that did not end alike."""
        return [cell for cell in self.cells if cell.change.before != cell.change.now]

    @property
    def are_alike(self) -> bool:
        """Whether all cells ended alike, judged by the same oracles."""
        return not self.changed and not self.oracles

    def to_json(self) -> dict[str, Any]:
        cells = [{**vars(cell.change), "ratios": cell.ratios} for cell in self.cells]
        return {**asdict(self), "cells": cells}


def compare_runs(first: Path, second: Path) -> TwoRuns:
    """The cells of both runs, in the order of the first. Raises UsageError for a folder that cannot be trusted."""
    (run, cells), (other, others) = read_cells(first), read_cells(second)
    one, two = ({cell.entry.cell: cell for cell in found} for found in (cells, others))
    ended = [outcomes_of([cell.entry for cell in found]) for found in (cells, others)]
    return TwoRuns(
        paths=(str(first), str(second)),
        started=(run.started, other.started),
        verdicts=(_verdict(run, cells), _verdict(other, others)),
        versions=version_changes(versions_of(run.environment), versions_of(other.environment)),
        oracles=oracle_changes(*ended),
        cells=tuple(_beside(cell, one.get(cell), two.get(cell)) for cell in dict.fromkeys([*one, *two])),
    )


def _verdict(run: Run, cells: list[BelievedCell]) -> RunVerdict:
    return run.verdict(states_of([cell.entry for cell in cells]))


def _beside(cell: str, one: BelievedCell | None, two: BelievedCell | None) -> CellOfTwo:
    found = [side.entry if side else None for side in (one, two)]
    worst = [entry.verdict.worst if entry else {} for entry in found]
    stages = dict.fromkeys(stage for entry in found if entry for stage in (*entry.stages, *entry.verdict.worst))
    ratios = [[side[stage].ratio if stage in side else None for side in worst] for stage in stages]
    before, now = (entry.verdict.state if entry else None for entry in found)
    return CellOfTwo(
        change=Change(cell=cell, before=before, now=now),
        ratios={stage: (a, b) for stage, (a, b) in zip(stages, ratios, strict=True) if (a, b) != (None, None)},
    )
