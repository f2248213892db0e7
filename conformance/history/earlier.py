"""Earlier: the runs that a run is compared with (``--baseline``), from an output folder, a summary, or a history."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from conformance.history.store import HISTORY, Summary, open_history, utc
from conformance.record.baseline import Baseline, RunFacts, baseline_from_json, make_baseline, outcome, versions_of
from conformance.record.cells import read_cells
from conformance.record.results import SUMMARY, outcomes_of, read_output_json, states_of
from conformance.record.states import STATES
from conformance.validation import UsageError

RUNS = 14  # of a history: two weeks of nights


def read_baseline(path: str, selection: str) -> Baseline:
    """The earlier runs in ``path``: an output folder, its ``summary.json``, or the folder of a history.

    Of a history, the last RUNS of the same ``selection`` count, and the last green one. Raises UsageError for anything
    else, and for what cannot be trusted.
    """
    given = Path(path)
    if os.path.lexists(given / HISTORY):
        with open_history(given) as history:
            runs = history.runs(selection, last=RUNS)
        told = [(run.started.isoformat(timespec="seconds"), run.verdict, run.versions, run.cells) for run in runs]
        return make_baseline(path, told)
    file = given / SUMMARY if given.is_dir() else given
    if not os.path.lexists(file):
        looked = f"{given / HISTORY} and no {file}" if given.is_dir() else str(given)
        raise UsageError(
            f"--baseline {path}: there is no {looked}; give the --out folder or the summary.json of an earlier run, or "
            f"the folder of a history, which parity history {path} --add OUT begins with an earlier run; leave it out "
            f"of the first run"
        )
    found = make_baseline(path, [_facts(read_output_json(file), file)])
    try:
        return baseline_from_json(dataclasses.asdict(found))
    except ValueError as error:
        raise UsageError(f"{file} lacks {error}: it was not written by `parity run`, or edited") from None


def _facts(values: dict[str, Any], file: Path) -> RunFacts:
    """A run from its summary alone. A published one may have no more than states."""
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
    """The run in ``out`` as a history keeps it; its cells are believed as reports believe them.

    Raises UsageError for a folder that cannot be trusted, and for a part of a run in several jobs.
    """
    run, cells = read_cells(out)
    if not run.floor.whole:
        raise UsageError(f"{out} is shard {', '.join(run.floor.shards)} alone; put all together first: parity merge")
    if not run.selection:
        raise UsageError(f"{out} does not say what was selected: its version was too old; run again")
    entries = [cell.entry for cell in cells]
    return Summary(
        selection=run.selection,
        started=utc(run.started, out),
        seconds=run.seconds,
        verdict=run.verdict(states_of(entries)),
        versions=versions_of(run.environment),
        cells=outcomes_of(entries),
    )
