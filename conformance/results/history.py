"""Stores a history of runs in one SQLite file, ``DIR/history.sqlite``, and reads the baseline of a run from it.

The history has the verdict and the versions of each run, and the state, the seconds and the errors of its cells. The
file may come from an untrusted place, such as a cache or an artifact. So SQLite never opens it in place: the bytes of a
regular file are read, checked for exactly the tables below, and used in memory. Rows are validated when they are read.
A change is written as a whole new file, which replaces a link of that name. A lock serializes processes that add runs.
Does not import torch.
"""

import contextlib
import dataclasses
import json
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from conformance.core.errors import UsageError, one_line
from conformance.core.io import Unreadable, Unwritable, lock, read_file, write_file
from conformance.records.record_format import dumps, first_error
from conformance.results.baseline import (
    Baseline,
    Outcome,
    RunFacts,
    baseline_from_json,
    make_baseline,
    outcome,
    versions_of,
)
from conformance.results.run_results import SUMMARY, outcomes_of, read_output_json, states_of
from conformance.results.trust import read_cells
from conformance.results.verdict import PASSES, STATES, RunVerdict

HISTORY = "history.sqlite"
HISTORY_SCHEMA = 3
LONGEST = 2**29  # bytes; a year of nights of 3,000 cells is about 40 MiB
AGAIN = "replace it by an intact copy, or move it away and start a new history"
_OUTCOMES = "CREATE TABLE outcomes (run INTEGER NOT NULL, cell INTEGER NOT NULL, state TEXT NOT NULL, seconds REAL, {}"
TABLES = (
    "CREATE TABLE cells (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE)",
    _OUTCOMES.format("second_class TEXT, errors TEXT, PRIMARY KEY (run, cell)) WITHOUT ROWID"),
    "CREATE TABLE runs (number INTEGER PRIMARY KEY, selection TEXT NOT NULL, started TEXT NOT NULL, "
    "seconds REAL NOT NULL, verdict TEXT NOT NULL, versions TEXT NOT NULL, UNIQUE (selection, started, versions))",
)
OLDER = {1: "NULL, NULL", 2: "second_class, NULL"}  # by schema, the values of columns that it may lack
TABLES_OF = {
    1: (TABLES[0], _OUTCOMES.format("PRIMARY KEY (run, cell)) WITHOUT ROWID"), TABLES[2]),
    2: (TABLES[0], _OUTCOMES.format("second_class TEXT, PRIMARY KEY (run, cell)) WITHOUT ROWID"), TABLES[2]),
    HISTORY_SCHEMA: TABLES,
}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Holds a run of a history. started: UTC. selection: the cells that the user selected, as text. cells: by id."""

    selection: str
    started: datetime
    seconds: float
    verdict: RunVerdict
    versions: dict[str, str]
    cells: dict[str, Outcome]


_SUMMARY = TypeAdapter(Summary)


class History:
    """Reads and changes the runs of a history. Use ``open_history`` to get one."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection, self.path = connection, path

    def selections(self) -> list[str]:
        """Returns the distinct selections of the runs; the selection of the latest run comes first."""
        found = self._rows("SELECT selection FROM runs GROUP BY selection ORDER BY max(started) DESC")
        return [str(selection) for (selection,) in found]

    def runs(self, selection: str, *, last: int) -> list[Summary]:
        """Returns the ``last`` runs of a selection from the earliest to the latest. If none of them is green, the last
        green run comes first. Raises UsageError for rows that the suite would not have written."""
        rows = self._rows("SELECT * FROM runs WHERE selection = ? ORDER BY started, number", selection)
        green = [row for row in rows if row[4] in PASSES][-1:]
        chosen = rows[-last:]
        return [self._summary(row) for row in ([] if any(row in chosen for row in green) else green) + chosen]

    def add(self, run: Summary) -> None:
        """Adds a run, or replaces it: a run may be judged again."""
        versions, started = json.dumps(run.versions, sort_keys=True), run.started.isoformat(timespec="seconds")
        key = (run.selection, started, versions)
        same = "SELECT number FROM runs WHERE selection = ? AND started = ? AND versions = ?"
        for (number,) in self._rows(same, *key):
            self._remove(number)
        values = (run.selection, started, run.seconds, run.verdict, versions)
        insert = "INSERT INTO runs (selection, started, seconds, verdict, versions) VALUES (?, ?, ?, ?, ?)"
        number = self._connection.execute(insert, values).lastrowid
        self._connection.executemany("INSERT OR IGNORE INTO cells (id) VALUES (?)", [(cell,) for cell in run.cells])
        self._connection.executemany(
            "INSERT INTO outcomes SELECT ?, number, ?, ?, ?, ? FROM cells WHERE id = ?",
            [
                (number, ended.state, ended.seconds, ended.second_class, dumps(ended.errors), cell)
                for cell, ended in run.cells.items()
            ],
        )

    def prune(self, keep: int) -> int:
        """Removes all but the last ``keep`` runs and the last green run of each selection; returns how many."""
        removed = 0
        for selection in self.selections():
            rows = self._rows(
                "SELECT number, verdict FROM runs WHERE selection = ? ORDER BY started, number", selection
            )
            green = [number for number, verdict in rows if verdict in PASSES][-1:]
            for number, _ in rows[:-keep]:
                if number not in green:
                    self._remove(number)
                    removed += 1
        return removed

    def _remove(self, number: int) -> None:
        self._connection.execute("DELETE FROM outcomes WHERE run = ?", (number,))
        self._connection.execute("DELETE FROM runs WHERE number = ?", (number,))

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        try:
            return list(self._connection.execute(query, values))
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise _damaged(self.path, error) from None

    def _summary(self, row: tuple[Any, ...]) -> Summary:
        number, selection, started, seconds, verdict, versions = row
        rows = self._rows(
            "SELECT id, state, seconds, second_class, errors FROM outcomes JOIN cells ON cell = number WHERE run = ? "
            "ORDER BY cell",
            number,
        )
        known = {"selection": selection, "started": started, "seconds": seconds, "verdict": verdict}
        try:
            known["cells"] = {
                cell: {"state": state, "seconds": took, "second_class": whose, "errors": json.loads(errors or "{}")}
                for cell, state, took, whose, errors in rows
            }
            return _SUMMARY.validate_python({**known, "versions": json.loads(versions)})
        except ValidationError as error:
            raise _damaged(self.path, first_error(error)) from None
        except (ValueError, TypeError, RecursionError) as error:
            raise _damaged(self.path, error) from None


@contextlib.contextmanager
def open_history(folder: Path, *, change: bool = False) -> Iterator[History]:
    """Opens the history in ``folder``. With ``change``, creates folder and file if they are missing, locks them against
    changes by other processes, and writes the changes at the end.

    Raises UsageError for a file that is missing, is a link, is damaged or has another schema, and Unwritable.
    """
    file = folder / HISTORY
    with _Locked(folder) if change else contextlib.nullcontext():
        connection = sqlite3.connect(":memory:")
        with contextlib.closing(connection):
            if change and not os.path.lexists(file):
                _begin(connection)
            else:
                _load(connection, file)
            yield History(connection, file)
            if change:
                connection.execute("DELETE FROM cells WHERE number NOT IN (SELECT cell FROM outcomes)")
                connection.commit()
                connection.execute("VACUUM")
                write_file(file, connection.serialize())


_LOCK_S = 60.0  # another process reads and writes a file


class _Locked:
    """Creates the folder, and locks it until the end of the ``with`` statement."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._opened = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            lock(self._opened, self._folder, limit_s=_LOCK_S)
        except OSError as error:
            raise Unwritable(f"{self._folder} cannot be used as the folder of a history: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._opened)


def _begin(connection: sqlite3.Connection) -> None:
    for table in TABLES:
        connection.execute(table)
    connection.execute(f"PRAGMA user_version = {HISTORY_SCHEMA}")


def _load(connection: sqlite3.Connection, file: Path) -> None:
    """Reads the file into memory, and upgrades tables of an older version there; the file is not changed.

    Raises UsageError for anything but an intact file with the tables of this version or of an older one.
    """
    try:
        content = read_file(file, limit=LONGEST)
    except FileNotFoundError:
        raise UsageError(f"there is no {file}; parity history {file.parent} --add OUT starts a history") from None
    except Unreadable as error:
        raise UsageError(f"{str(error).partition(';')[0]}; {AGAIN}") from None
    if not content:
        raise _damaged(file, "it is empty")
    try:
        connection.deserialize(content)
        connection.execute("PRAGMA trusted_schema = OFF")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        found = connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY name").fetchall()
        if tuple(sql for (sql,) in found) != TABLES_OF.get(version):
            known = " or ".join(map(str, TABLES_OF))
            raise UsageError(
                f"{file} is not a history of schema {known} (its schema is {version}); use the version of the suite "
                f"that wrote it, or {AGAIN}"
            )
        (checked,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if version in OLDER and checked == "ok":
            _upgrade(connection, OLDER[version])
    except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
        raise _damaged(file, error) from None
    if checked != "ok":
        raise _damaged(file, checked)


def _upgrade(connection: sqlite3.Connection, columns: str) -> None:
    """Upgrades tables of an older schema. columns: the values of the columns that it lacks, and of the rest."""
    connection.execute("ALTER TABLE outcomes RENAME TO older")
    connection.execute(TABLES[1])
    connection.execute(f"INSERT INTO outcomes SELECT run, cell, state, seconds, {columns} FROM older")
    connection.execute("DROP TABLE older")
    connection.execute(f"PRAGMA user_version = {HISTORY_SCHEMA}")


def _damaged(file: Path, why: object) -> UsageError:
    message = one_line(why) if isinstance(why, BaseException) else " ".join(str(why).split())[:300]
    return UsageError(f"{file} is damaged ({message}); {AGAIN}")


def utc(started: str, source: object) -> datetime:
    """Parses a run's time and converts it to UTC. Raises UsageError for a text that is not a time with a zone."""
    try:
        found = datetime.fromisoformat(started)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise UsageError(f"{source} has no valid start time ({started!r}): it was edited; run again")
    return found.astimezone(UTC)


RUNS = 14  # number of earlier runs in a baseline: two weeks of nightly runs


def read_baseline(path: str, selection: str) -> Baseline:
    """Reads the earlier runs in ``path``: an output folder, its ``summary.json``, or the folder of a history.

    From a history, reads the last RUNS runs of the same ``selection``, and the last green one. Raises UsageError for
    any other path, and for files that cannot be trusted.
    """
    given = Path(path)
    if os.path.lexists(given / HISTORY):
        with open_history(given) as history:
            runs = history.runs(selection, last=RUNS)
        facts = [(run.started.isoformat(timespec="seconds"), run.verdict, run.versions, run.cells) for run in runs]
        return make_baseline(path, facts)
    file = given / SUMMARY if given.is_dir() else given
    if not os.path.lexists(file):
        missing = f"{given / HISTORY} and no {file}" if given.is_dir() else str(given)
        raise UsageError(
            f"--baseline {path}: there is no {missing}; give the --out folder or the summary.json of an earlier run, "
            f"or the folder of a history, which parity history {path} --add OUT starts with an earlier run; omit "
            f"--baseline in the first run"
        )
    found = make_baseline(path, [_facts(read_output_json(file), file)])
    try:
        return baseline_from_json(dataclasses.asdict(found))
    except ValueError as error:
        raise UsageError(f"{file} lacks {error}: it was not written by `parity run`, or edited") from None


def _facts(values: dict[str, Any], file: Path) -> RunFacts:
    """Returns the facts about a run from its summary alone. A published summary may have only the states."""
    try:
        cells = values["cells"]
        if unknown := sorted({str(cell["state"]) for cell in cells if str(cell["state"]) not in STATES}):
            raise UsageError(
                f"{file} has states {', '.join(unknown)}; known: {', '.join(STATES)}. Update backend-parity"
            )
        outcomes = {
            str(cell["id"]): outcome(
                state=cell["state"],
                seconds=float(cell.get("seconds", 0)),
                before=cell.get("before", ()),
                second_class=cell.get("second_class"),
                errors={str(stage): float(error) for stage, error in cell.get("errors", {}).items()},
            )
            for cell in cells
        }
        versions = versions_of(values.get("environment", {}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{file} lacks {error}: it was not written by `parity run`, or edited") from None
    return str(values.get("started", "")), values.get("verdict"), versions, outcomes


def summarise(out: Path) -> Summary:
    """Returns the run in ``out`` for a history; its cells are checked as for the reports.

    Raises UsageError for a folder that cannot be trusted, and for one shard of a run.
    """
    run, cells = read_cells(out)
    if not run.floor.whole:
        raise UsageError(f"{out} has only shard {', '.join(run.floor.shards)}; merge all shards first: parity merge")
    if not run.selection:
        raise UsageError(f"{out} does not say what was selected: an older version wrote it; run again")
    entries = [cell.entry for cell in cells]
    return Summary(
        selection=run.selection,
        started=utc(run.started, out),
        seconds=run.seconds,
        verdict=run.verdict(states_of(entries)),
        versions=versions_of(run.environment),
        cells=outcomes_of(entries),
    )
