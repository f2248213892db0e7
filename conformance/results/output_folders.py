"""Removes tensors from output folders, merges the folders of shards, and compares two of them. Does not import torch.

Two steps of a model of 56 million parameters are 2.3 GB per cell in float64, and only cells that differ or failed need
their tensors. The other cells keep the lines of their records, with digests, and their verdicts, which cannot be judged
again. Folders of different runs are never merged, and a missing shard makes the merged run incomplete.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from conformance.core.environments import NAME
from conformance.core.errors import UsageError
from conformance.core.io import Unwritable, is_file
from conformance.core.packages import UNKNOWN
from conformance.results.baseline import COMMIT, RANKS_PER_GPU, Baseline, versions_of
from conformance.results.changes import Change, OracleChange, VersionChange, oracle_changes, version_changes
from conformance.results.run_results import (
    OUTPUT_SCHEMA,
    SUMMARY,
    Entry,
    Run,
    cell_summary,
    inside,
    outcomes_of,
    read_output_json,
    read_run,
    read_verdicts,
    states_of,
    validated,
    write_entry,
    write_output_json,
    write_summary,
)
from conformance.results.trust import CheckedCell, read_cells
from conformance.results.verdict import FAILED_BEFORE, NO_FAULT, NOT_STARTED, RunVerdict


@dataclass(frozen=True, kw_only=True)
class EnvironmentRun:
    """Says in which environment of `parity matrix` a run's ranks ran. note: why nothing was run; empty if it was.

    lock: exact requirements. command: runs the environment again. backends: the selected ones.
    """

    name: Annotated[str, Field(pattern=NAME)]
    lock: str
    note: str
    command: str
    backends: tuple[Annotated[str, Field(pattern=NAME)], ...]


ENVIRONMENT = "environment.json"
_ENVIRONMENT, _FIELDS = TypeAdapter(EnvironmentRun), [one.name for one in fields(EnvironmentRun)]


def write_environment(out: Path, about: EnvironmentRun) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_output_json(out / ENVIRONMENT, {"schema": OUTPUT_SCHEMA, **asdict(about)}, indent=1)


def read_environment(out: Path) -> EnvironmentRun | None:
    """Returns what `parity matrix` wrote; None for any other run. Raises UsageError."""
    file = out / ENVIRONMENT
    if not is_file(file):
        return None
    values = read_output_json(file)
    return validated(_ENVIRONMENT, {name: values.get(name) for name in _FIELDS}, file)


def slim(out: Path) -> None:
    """Removes the tensors of cells that conform, partly or wholly, or differ as expected, and the tensors of oracles
    that judged only such cells. Removes nothing if the run was stopped or has other shards, because the missing cells
    may need the same oracles.

    Raises UsageError for a folder that is not a run's output, and Unwritable.
    """
    run, listed = read_run(out)
    if not (run.finished and run.floor.whole) or run.floor.missing_shards:
        return
    entries = [entry for entry in listed if entry.records]
    for entry in entries:
        if entry.verdict.state in NO_FAULT:
            # Written first, because missing files without this mark count as damage. A marked cell may still have files
            # if an earlier call was interrupted.
            if not entry.slim:
                write_entry(out, replace(entry, slim=True))
            first_attempt = entry.other.records if entry.other else ()
            _remove(out, (out / entry.folder / record for record in (*entry.records, *first_attempt)))
    needed = {folder for entry in entries if entry.verdict.state not in NO_FAULT for folder in _oracles(out, entry)}
    for folder in {folder for entry in entries for folder in _oracles(out, entry)} - needed:
        _remove(out, folder.glob("*/"))


def _oracles(out: Path, entry: Entry) -> list[Path]:
    folders = (entry.oracle, *(one.folder for one in entry.variants))
    return [Path(os.path.normpath(out / entry.folder / path)) for path in folders if path]


def _remove(out: Path, records: Iterable[Path]) -> None:
    for record in records:
        for file in inside(out, record).glob("*.safetensors"):
            try:
                file.unlink()
            except OSError as error:
                raise Unwritable(f"{file} cannot be removed: {error.strerror}") from error


logger = logging.getLogger(__name__)

ReadBaseline = Callable[[str], Baseline]
# Keys of the environment that may differ between the jobs of a run.
MAY_DIFFER = ("platform", "cpus", "gpus", "CUDA_VISIBLE_DEVICES", "mps", COMMIT)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Holds one of the folders to merge. version: the version of the suite that wrote it."""

    name: str
    run: Run
    entries: tuple[Entry, ...]
    version: str


def rewrite_summary(out: Path, *, seconds: float | None = None) -> dict[str, Any]:
    """Writes ``summary.json`` again from the verdicts in ``out``, and returns it.

    For a run whose processes wrote verdicts but no summary, or that was stopped between a verdict and its summary.
    seconds: the duration of the run; None: as in the summary.
    Raises UsageError for a folder that is not a run's output, and Unwritable.
    """
    run, entries = read_verdicts(out)
    finished = run.finished
    if all(entry.verdict.reason not in (NOT_STARTED, FAILED_BEFORE) for entry in entries):
        finished = finished or datetime.now(UTC).isoformat(timespec="seconds")
    seconds = run.seconds if seconds is None else seconds
    write_summary(out, replace(run, finished=finished, seconds=seconds), [cell_summary(entry) for entry in entries])
    return read_output_json(out / SUMMARY)


def read_part(out: Path) -> Part:
    """Reads one folder. Raises UsageError for a folder that is not a run's output."""
    run, entries = read_verdicts(out)
    return Part(
        name=str(out), run=run, entries=tuple(entries), version=str(read_output_json(out / SUMMARY)["suite_version"])
    )


def check_parts(parts: Sequence[Part]) -> None:
    """Raises UsageError unless the parts have the same selection, device, versions and requirements."""
    first, known = parts[0], dict[str, Part]()
    for part in parts:
        for what, one, other in _compare(first, part):
            _require_equal(first, part, what, one, other)
        for name in part.run.inputs.keys() - _without_digest(part).keys():
            one = known.setdefault(name, part)
            _require_equal(one, part, f"content (SHA-256) of {name}", one.run.inputs[name], part.run.inputs[name])
    if not first.run.selected:
        raise UsageError(f"{first.name} does not say which cells were selected: an older version wrote it")


def _require_equal(one: Part, other: Part, what: str, here: object, there: object) -> None:
    if here != there:
        raise UsageError(
            f"{one.name} and {other.name} do not belong together: {what} {here!r} and {there!r}. "
            f"The command of {one.name}: {one.run.command}"
        )


def _compare(one: Part, other: Part) -> Iterable[tuple[str, object, object]]:
    """Yields the values that have to be equal: (name, value of ``one``, value of ``other``)."""
    yield "suite version", one.version, other.version
    yield "device", one.run.device, other.run.device
    here, there = one.run.environment, other.run.environment
    yield "--ranks-per-gpu", here.get(RANKS_PER_GPU, 1), there.get(RANKS_PER_GPU, 1)
    for name in dict.fromkeys([*here, *there]):
        # Packages that adapters name are missing in jobs without these backends, and are compared only if both jobs
        # have them. Names in capitals are environment variables, which are compared also if one job does not set them.
        if name not in MAY_DIFFER and (name in here.keys() & there.keys() or name.isupper()):
            yield f"version of {name}", here.get(name), there.get(name)
    yield "selected cells (digest)", one.run.selected, other.run.selected
    yield "number of shards", _total(one), _total(other)
    for demand in ("require", "min_judged", "backends"):
        yield f"demand {demand}", getattr(one.run.floor, demand), getattr(other.run.floor, demand)
    yield "baseline (digest)", _baseline(one), _baseline(other)


def _without_digest(part: Part) -> dict[str, str]:
    """Returns why code of backends has no digest, by its name among the inputs."""
    return {name: text.removeprefix(UNKNOWN) for name, text in part.run.inputs.items() if text.startswith(UNKNOWN)}


def _baseline(part: Part) -> str:
    """Returns a digest of the earlier runs, without their path, which may differ between jobs."""
    baseline = part.run.floor.baseline
    return hashlib.sha256(repr((baseline.cells, baseline.runs)).encode()).hexdigest()[:16] if baseline else "none"


def _total(part: Part) -> str:
    return next((shard.partition("/")[2] for shard in part.run.floor.shards), "1")


def merge(folders: Sequence[Path], out: Path, *, command: str, baseline: ReadBaseline | None = None) -> None:
    """Puts the cells of ``folders`` into the new folder ``out``, with one summary.

    Files become hard links where possible. This is safe because the suite never changes a file in place.
    baseline: reads the earlier runs of a selection, with which the merged run is compared.

    Raises UsageError for folders that do not belong together or that have different verdicts of a cell, and Unwritable.
    """
    parts = [read_part(folder) for folder in folders]
    check_parts(parts)
    for name, why in {name: why for part in parts for name, why in _without_digest(part).items()}.items():
        logger.warning("whether all folders are of the same %s is not known: %s", name, why)
    chosen, whole = _choose(parts), _whole(parts, command)
    if baseline:
        whole = replace(whole, floor=replace(whole.floor, baseline=baseline(whole.selection)))
    try:
        for folder, part in zip(folders, parts, strict=True):
            for entry in part.entries:
                if chosen[entry.cell] is entry:
                    _link(folder, out, entry.folder)
            for path in (*folder.glob("inputs/*"), *folder.glob("oracle/*/*")):
                if not (out / path.relative_to(folder)).exists():  # cells of several jobs share them
                    _link(folder, out, str(path.relative_to(folder)))
    except (OSError, UsageError) as error:
        shutil.rmtree(out, ignore_errors=True)
        if isinstance(error, UsageError):
            raise
        raise Unwritable(f"{out} cannot be written: {error}") from error
    planned = parts[0].run.floor.planned
    order = {cell: place for place, cell in enumerate(planned)}
    entries = sorted(chosen.values(), key=lambda entry: order.get(entry.cell, len(order)))
    write_summary(out, whole, [cell_summary(entry) for entry in entries])


def _choose(parts: Sequence[Part]) -> dict[str, Entry]:
    """Returns one entry for every cell. Raises UsageError for a cell with two different verdicts."""
    chosen: dict[str, tuple[Part, Entry]] = {}
    for part in parts:
        for entry in part.entries:
            if entry.cell not in chosen or chosen[entry.cell][1].verdict.state == "not_run":
                chosen[entry.cell] = part, entry
                continue
            other, known = chosen[entry.cell]
            if entry.verdict.state not in (known.verdict.state, "not_run"):
                raise UsageError(
                    f"{entry.cell} is {known.verdict.state} in {other.name} and {entry.verdict.state} in {part.name}: "
                    f"omit the folder that does not count"
                )
    return {cell: entry for cell, (_, entry) in chosen.items()}


def _whole(parts: Sequence[Part], command: str) -> Run:
    """Returns the run that all parts make together."""
    runs = [part.run for part in parts]
    ended = [run.finished for run in runs if run.finished]
    environment = {name: value for run in reversed(runs) for name, value in run.environment.items()}
    for name in MAY_DIFFER:
        found = list(dict.fromkeys(str(run.environment.get(name)) for run in runs))
        environment[name] = environment.get(name) if len(found) == 1 else found
    shards = dict.fromkeys(chain.from_iterable(run.floor.shards for run in runs))
    return replace(
        runs[0],
        started=min(run.started for run in runs),
        finished=max(ended) if len(ended) == len(runs) else None,
        seconds=round(sum(run.seconds for run in runs), 2),
        command=command,
        # Where a part has no digest, the whole has none.
        inputs={
            name: run.inputs[name]
            for without in (False, True)
            for run in runs
            for name in run.inputs
            if run.inputs[name].startswith(UNKNOWN) == without
        },
        environment=environment,
        leased={},
        floor=replace(runs[0].floor, shards=tuple(sorted(shards, key=lambda s: int(s.partition("/")[0]))), whole=True),
    )


def _link(folder: Path, out: Path, name: str) -> None:
    """Links the file or folder ``name`` into ``out``. Raises UsageError if it lies outside of ``folder``."""
    source, target = inside(folder, folder / name), out / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, copy_function=_link_file)
    else:
        _link_file(str(source), str(target))


def _link_file(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system
        shutil.copy2(source, target, follow_symlinks=False)


@dataclass(frozen=True, kw_only=True)
class CellOfTwo:
    """Holds the results of one cell in two runs. change: its states in the first and in the second run.

    ratios: for each stage, in causal order, the worst observed / allowed in the first and in the second run; None if
        nothing in the stage was compared.
    """

    change: Change
    ratios: dict[str, tuple[float | None, float | None]]


@dataclass(frozen=True, kw_only=True)
class TwoRuns:
    """Holds the comparison of two runs.

    paths, started, verdicts: of the first and of the second run. versions: the versions that are not known to be equal.
    oracles: the cells whose reference differs between the runs.
    """

    paths: tuple[str, str]
    started: tuple[str, str]
    verdicts: tuple[RunVerdict, RunVerdict]
    versions: tuple[VersionChange, ...]
    oracles: tuple[OracleChange, ...]
    cells: tuple[CellOfTwo, ...]

    @property
    def changed(self) -> list[CellOfTwo]:
        """Returns the cells whose states differ."""
        return [cell for cell in self.cells if cell.change.before != cell.change.now]

    @property
    def is_unchanged(self) -> bool:
        """Whether all cells ended in the same states, judged by the same oracles."""
        return not self.changed and not self.oracles

    def to_json(self) -> dict[str, Any]:
        cells = [{**vars(cell.change), "ratios": cell.ratios} for cell in self.cells]
        return {**asdict(self), "cells": cells}


def compare_runs(first: Path, second: Path) -> TwoRuns:
    """Compares all cells of two runs, in the order of the first. Raises UsageError for a folder that cannot be
    trusted."""
    (run, cells), (other, other_cells) = read_cells(first), read_cells(second)
    one, two = ({cell.entry.cell: cell for cell in found} for found in (cells, other_cells))
    ended = [outcomes_of([cell.entry for cell in found]) for found in (cells, other_cells)]
    return TwoRuns(
        paths=(str(first), str(second)),
        started=(run.started, other.started),
        verdicts=(_verdict(run, cells), _verdict(other, other_cells)),
        versions=version_changes(versions_of(run.environment), versions_of(other.environment)),
        oracles=oracle_changes(*ended),
        cells=tuple(_cell_of_two(cell, one.get(cell), two.get(cell)) for cell in dict.fromkeys([*one, *two])),
    )


def _verdict(run: Run, cells: list[CheckedCell]) -> RunVerdict:
    return run.verdict(states_of([cell.entry for cell in cells]))


def _cell_of_two(cell: str, one: CheckedCell | None, two: CheckedCell | None) -> CellOfTwo:
    found = [side.entry if side else None for side in (one, two)]
    worst = [entry.verdict.worst if entry else {} for entry in found]
    stages = dict.fromkeys(stage for entry in found if entry for stage in (*entry.stages, *entry.verdict.worst))
    ratios = [[side[stage].ratio if stage in side else None for side in worst] for stage in stages]
    before, now = (entry.verdict.state if entry else None for entry in found)
    return CellOfTwo(
        change=Change(cell=cell, before=before, now=now),
        ratios={stage: (a, b) for stage, (a, b) in zip(stages, ratios, strict=True) if (a, b) != (None, None)},
    )
