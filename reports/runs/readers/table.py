"""CSV: a header with a counter of steps and metrics; also what wandb exports of a panel.

wandb names a column ``RUN - METRIC`` and adds ``__MIN`` and ``__MAX`` of the interval that a point stands for, which
are no metrics here (docs.wandb.ai, "Export data from a panel"). A panel of several runs is read one run at a time:
``panel.csv#RUN``.
"""

import csv
import io

from conformance.validation import UsageError
from reports.runs.metrics import STEP
from reports.runs.run import Log, Row

BETWEEN = " - "


def read_table(text: str, *, name: str, chosen: str | None) -> Log | None:
    """The log in ``text``, or None if its first line is no header with a counter of steps. ``chosen``: a wandb run."""
    text = text.lstrip("\ufeff\r\n ")
    first = text.splitlines()[0] if text else ""
    delimiter = max(",;\t", key=first.count)
    header = [column.strip() for column in next(csv.reader([first], delimiter=delimiter), [])]
    lower = [column.lower() for column in header]
    counter = next((lower.index(column) for column in STEP if column in lower), None)
    if counter is None or len(header) < 2:
        return None
    table = [line for line in csv.reader(io.StringIO(text, newline=None), delimiter=delimiter) if line]
    names = {place: column for place, column in enumerate(header) if place != counter}
    exported = any(BETWEEN in column for column in names.values())
    if exported:
        names = _of_one_run(names, name=name, chosen=chosen)
    rows, broken = [], 0
    for line in table[1:]:
        step = _number(line[counter]) if counter < len(line) else None
        if step is None or not step.is_integer():
            broken += 1
            continue
        cells = {column: _number(line[place]) for place, column in names.items() if place < len(line)}
        values = {column: value for column, value in cells.items() if value is not None}
        rows.append(Row(int(step), values, frozenset(cells.keys() - values.keys())))
    notes = (f"{broken} lines have no whole number as their step; they were left out",) if broken else ()
    return Log(format="wandb CSV" if exported else "CSV", rows=rows, notes=notes)


def _of_one_run(names: dict[int, str], *, name: str, chosen: str | None) -> dict[int, str]:
    """The columns of the run that was asked for, or of the only one, without its name."""
    parts = {place: column.rpartition(BETWEEN) for place, column in names.items() if BETWEEN in column}
    runs = list(dict.fromkeys(run for run, _, _ in parts.values()))
    if chosen is None and len(runs) > 1:
        raise UsageError(f"{name} holds {len(runs)} runs; name one: " + " or ".join(f"{name}#{run}" for run in runs))
    if chosen is not None and chosen not in runs:
        raise UsageError(f"{name} holds no run {chosen!r}; it has {', '.join(runs)}")
    return {place: metric for place, (run, _, metric) in parts.items() if run == (chosen or runs[0])}


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
