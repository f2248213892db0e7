"""Reads the output folder of a run for reports: cells, ends of logs, and texts of findings. Reads no tensors.

Verdicts that cannot be trusted are replaced by infrastructure failures (conformance.results.trust). A reason may name
``docs/findings/NAME.md``; the page contains the text of this finding, because it has to open offline.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

from conformance.core.errors import UsageError
from conformance.core.io import Unreadable, read_end
from conformance.records.record_format import Lines, RecordError, read_lines
from conformance.results.baseline import Outcome
from conformance.results.changes import Since
from conformance.results.requirements import TO
from conformance.results.run_results import SUMMARY, Run, inside, outcomes_of, read_output_json, states_of
from conformance.results.trust import CheckedCell, check_oracle, read_cells
from conformance.results.verdict import STATES, Quantity, RunVerdict, State
from conformance.spec.layout import Layout
from conformance.spec.precision import noise_runs

_PACKAGE = Path(__file__).resolve().parent
# Next to ``reports`` in a checkout, inside it in an installed wheel.
FOLDER = _PACKAGE / "_findings" if (_PACKAGE / "_findings").is_dir() else _PACKAGE.parent / "docs" / "findings"
MENTION = re.compile(r"docs/findings/([a-z0-9-]+)\.md")


def findings(texts: Iterable[str]) -> dict[str, str]:
    """Returns the Markdown of every existing finding that the texts mention, by name, in alphabetical order."""
    names = sorted({name for text in texts for name in MENTION.findall(text)})
    files = {name: FOLDER / f"{name}.md" for name in names}
    return {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}


LOG_LINES = 40  # last lines of each rank's log that are shown
LOG_BYTES = 6000


@dataclass(frozen=True, kw_only=True)
class Cell(CheckedCell):
    """Holds one cell of a report.

    logs: the last lines of each rank's log, if the cell does not conform. files: the paths of these logs, relative to
    the output folder. noise: the lines of the single-process runs in the cell's precision, from which its bounds come.
    """

    logs: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    noise: tuple[Lines, ...] = ()

    @property
    def id(self) -> str:
        return self.entry.cell

    @property
    def state(self) -> State:
        return self.entry.verdict.state

    @property
    def reason(self) -> str:
        return self.entry.verdict.reason

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Returns the lines of the optimizer steps of all phases."""
        return [line for phase in self.phases for line in phase.steps]

    @cached_property
    def findings(self) -> tuple[Quantity, ...]:
        """Returns the quantities outside their tolerance."""
        return self.entry.verdict.findings

    @cached_property
    def closest(self) -> Quantity | None:
        """Returns the quantity that is closest to its tolerance, or furthest outside; None if nothing was judged."""
        return self.entry.verdict.closest if STATES[self.state].answered else None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Holds a run and its cells in the planned order. version: the version of the suite that wrote the folder."""

    run: Run
    version: str
    cells: tuple[Cell, ...]

    @property
    def counts(self) -> dict[State, int]:
        states = [cell.state for cell in self.cells]
        return {state: states.count(state) for state in STATES}

    @property
    def several_backends(self) -> bool:
        return len({c.entry.backend for c in self.cells if c.state != "unsupported"}) > 1

    @property
    def verdict(self) -> RunVerdict:
        """Computes the verdict of the run from the cells as the report shows them."""
        return self.run.verdict(states_of([cell.entry for cell in self.cells]))

    @property
    def unmet(self) -> tuple[str, ...]:
        """Returns one sentence for each minimum requirement that is not met."""
        return self.run.floor.unmet(states_of([cell.entry for cell in self.cells]))

    @cached_property
    def outcomes(self) -> dict[str, Outcome]:
        """Returns how the cells ended, by id."""
        return outcomes_of([cell.entry for cell in self.cells])

    @cached_property
    def since(self) -> Since | None:
        """Returns the changes since earlier runs; None if the run has no baseline."""
        return self.run.since(self.outcomes)


def read_report(out: Path) -> Report:
    """Reads the output folder ``out`` of ``parity run``. Raises UsageError for a folder that cannot be trusted.

    Reading takes longer than writing, so the last report is cached for the next reporter until a file of the folder
    changes.
    """
    return _read_report(out, tuple(_status_of_files(out)))


@lru_cache(maxsize=1)
def _read_report(out: Path, _: tuple[object, ...]) -> Report:
    run, cells = read_cells(out)
    version = str(read_output_json(out / SUMMARY).get("suite_version", ""))
    noise = cache(_noise)  # many cells share an oracle
    return Report(run=run, version=version, cells=tuple(_complete(out, cell, noise) for cell in cells))


def _status_of_files(out: Path) -> Iterator[object]:
    """Yields the key of the cache. It has the ctime of each file, which unlike the mtime cannot be set back."""
    files = [out / SUMMARY]
    for place in ("cells", "oracle"):
        files += [Path(folder, name) for folder, _, names in os.walk(out / place) for name in sorted(names)]
    for file in files:
        with contextlib.suppress(OSError):
            status = file.lstat()
            yield str(file), status.st_ino, status.st_size, status.st_ctime_ns


def _complete(out: Path, cell: CheckedCell, noise: Callable[[Path, Path, str, int], tuple[Lines, ...]]) -> Cell:
    """Adds the logs and the noise of its precision to a cell."""
    entry = cell.entry
    is_sound = entry.verdict.state in ("conforms", "partly_observed")
    logs, files = ({}, {}) if is_sound else _read_logs(out, out / entry.folder)
    runs: tuple[Lines, ...] = ()
    if entry.oracle and cell.oracle:
        ranks = min(Layout.parse(layout).data for layout in entry.layout.split(TO))
        runs = noise(out, (out / entry.folder / entry.oracle).resolve(), entry.variant.partition("/")[0], ranks)
    return Cell(**vars(cell), logs=logs, files=files, noise=runs)


def _noise(out: Path, oracle: Path, precision: str, data_ranks: int) -> tuple[Lines, ...]:
    """Returns the lines of the single-process runs in a precision, as far as they are intact."""
    found = []
    for run in dict.fromkeys((*noise_runs(precision, data_ranks), *noise_runs(precision))):
        with contextlib.suppress(UsageError, RecordError):
            lines = read_lines(inside(out, oracle / run))
            check_oracle(oracle / run, lines.header, precision=run)
            found.append(lines)
    return tuple(found)


def _read_logs(out: Path, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the last lines of each rank's log and stacks, without terminal colours, and their paths relative to
    ``out``, both by rank, or by phase and rank. The logs of a second attempt in fresh ranks come last."""
    kinds = ("legs/*/logs/rank-*.log", "legs/*/logs/rank-*.stacks", "fresh/*/logs/rank-*.log")
    files = [file for kind in kinds for file in sorted(folder.glob(kind), key=lambda file: (len(str(file)), str(file)))]
    several = len({file.parent for file in files}) > 1
    logs, paths = {}, {}
    for file in files:
        name = f"{file.stem}, stacks" if file.suffix == ".stacks" else file.stem
        name = f"phase {file.parts[-3]}, {name}" if several else name
        name = f"fresh {name}" if file.parts[-4] == "fresh" else name
        try:
            text = read_end(inside(out, file), limit=LOG_BYTES).decode("utf-8", errors="replace")
        except (FileNotFoundError, Unreadable) as error:
            text = str(error)
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
        logs[name] = "\n".join(text.splitlines()[-LOG_LINES:])
        paths[name] = file.relative_to(out).as_posix()
    return logs, paths
