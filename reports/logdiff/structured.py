"""Reads structured training logs: tables (CSV, Markdown) and JSON.

CSV has a header with a counter of steps. wandb exports a panel in this format: it names a column ``RUN - METRIC`` and
adds ``__MIN`` and ``__MAX`` of the interval that a point stands for, which are not metrics here (docs.wandb.ai, "Export
data from a panel"); SwanLab names it ``RUN-METRIC``.

JSON is lines of objects (this project's log, wandb's history, verl's file logger), or Hugging Face's
trainer_state.json. An object with a counter of steps is a row. The first object without one is the header, which holds
the options of the run. Nested objects are flattened with ``/``; verl's ``{"step": 1, "data": {...}}``
(verl/utils/tracking.py, FileLogger) is flattened without it. ``trainer_state.json`` holds its rows under
``log_history`` (transformers/trainer_callback.py, TrainerState), and the Trainer logs the mean loss since the last line
(transformers/trainer.py, ``_maybe_log_save_evaluate``).
"""

import csv
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from conformance.core.errors import UsageError, shown
from reports.logdiff.metrics import STEP, TOKENS, canonical, is_known, plain_name
from reports.logdiff.rows import LARGEST_STEP, NO_STEP, Log, Row, flat, number_in, numbered, row_of

DECIMAL_COMMA = re.compile(r"[-+]?\d{1,40},\d{1,40}(?:[eE][-+]?\d{1,4})?")
BETWEEN = " - "
METRIC_FILE = re.compile(r"\d{10,16} \S{1,40} \d{1,15}\Z")  # of MLflow: time, value, step


def read_table(text: str, *, name: str, chosen: str | None) -> Log | None:
    """The log in ``text``, or None if its first line is no header with a counter of steps. ``chosen``: a run of it."""
    text = text.lstrip("\ufeff\r\n ")
    lines = re.split(r"\r\n|\n|\r", text)
    if METRIC_FILE.match(lines[0].strip()):
        lines = ["time,value,step", *(line.replace(" ", ",") for line in lines)]
    delimiter = max(",;\t", key=lines[0].count)
    delimiter = "|" if lines[0].startswith("|") else delimiter
    header = cells_of(lines[:1], delimiter, name=name)[0]
    lower = [plain_name(column) for column in header]
    counter = next((lower.index(plain_name(column)) for column in STEP if plain_name(column) in lower), None)
    if counter is None or len(header) < 2:
        return None
    if twice := next((one for one in header if header.count(one) > 1 and _is_read(one)), None):
        raise UsageError(f"{name} has {header.count(twice)} columns called {twice}; rename or remove all but one")
    _, *table = cells_of(lines, delimiter, name=name)
    commas = delimiter == ";" and next((cell for line in table for cell in line if DECIMAL_COMMA.fullmatch(cell)), "")
    if commas:
        table = [[cell.replace(",", ".") if DECIMAL_COMMA.fullmatch(cell) else cell for cell in line] for line in table]
    form = "MLflow metric file" if lower == ["time", "value", "step"] else "CSV"
    names = {place: column for place, column in enumerate(header) if place != counter}
    if {"key", "value"} <= set(lower):
        return _long_table(table, lower, counter)
    if split := split_columns(names.values()):
        names = _of_one_run(names, split, name=name, chosen=chosen)
        form = "wandb CSV" if any(BETWEEN in column for column in split) else "SwanLab CSV"
    elif lower == ["wall_time", "step", "value"] or form != "CSV":
        tag = re.split(r"-tag-|[/\\]", name)[-1].removesuffix(".csv")
        names = {
            place: tag if (own := canonical(tag)) and is_known(own.metric) else "value"
            for place in names
            if lower[place] == "value"
        }
        form = "TensorBoard CSV" if form == "CSV" else form
    elif any(column.startswith("lr_") for column in lower) and "epoch" in lower:
        form = "Lightning CSV"
    rows, broken = [], 0
    for line in table:
        step = _step(line[counter]) if counter < len(line) else None
        if step is None:
            broken += 1
            continue
        cells = {column: line[place].strip() for place, column in names.items() if place < len(line)}
        values = {column: value for column, cell in cells.items() if (value := number_in(cell)) is not None}
        rows.append(Row(step, values, frozenset(column for column, cell in cells.items() if not cell)))
    notes = [f"{broken} lines have no whole number as their step; they were left out"] if broken else []
    if commas:
        notes.append(f"cells are separated by semicolons, and a comma is a decimal sign: {commas} is a number")
    return Log(format=form, rows=rows, notes=tuple(notes))


def cells_of(lines: Sequence[str], delimiter: str, *, name: str) -> list[list[str]]:
    """The cells of each line that has any; of a table in Markdown, without its outer bars and the line of hyphens."""
    bars = delimiter == "|"
    reader = csv.reader((line.strip().strip("|") if bars else line for line in lines), delimiter=delimiter)
    try:
        cells = [line for line in reader if line and not (bars and set("".join(line)) <= set(" -:"))]
    except csv.Error as error:
        raise UsageError(f"{name}, line {reader.line_num}: {error}") from None
    return [[cell.strip() for cell in line] for line in cells] or [[]]


def _is_read(own: str) -> bool:
    """Whether a column has a metric, the tokens or the steps."""
    return bool(canonical(own)) or plain_name(own) in (*TOKENS, *map(plain_name, STEP))


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object that JSON's pairs are. Raises UsageError if a metric stands there twice with different values."""
    found = dict(pairs)
    if len(found) < len(pairs):
        for own, value in pairs:
            if found[own] != value and found[own] == found[own] and _is_read(own):
                raise UsageError(
                    f"{own} stands twice in one object, as {shown(value)} and as {shown(found[own])}; rename or remove"
                    " one of both"
                )
    return found


def _step(cell: str) -> int | None:
    number = number_in(cell)
    return int(number) if number is not None and number.is_integer() and abs(number) < 10**LARGEST_STEP else None


def _long_table(table: Sequence[Sequence[str]], header: Sequence[str], counter: int) -> Log:
    """A table with a line for each number, as MLflow exports it."""
    key, value = header.index("key"), header.index("value")
    whole = [line for line in table if len(line) == len(header)]
    found = [(_step(line[counter]), line[key], number_in(line[value])) for line in whole]
    rows: dict[int, dict[str, float]] = {}
    for step, own, number in found:
        if step is not None and number is not None:
            rows.setdefault(step, {})[own] = number
    return Log(format="MLflow CSV", rows=[Row(step, values) for step, values in rows.items()])


def split_columns(columns: Any) -> dict[str, tuple[str, str]]:
    """The columns that are named after a run and a metric, with both."""
    found = {}
    for column in columns:
        run, between, metric = column.rpartition(BETWEEN)
        cuts = [] if between or is_metric(column) else [match.start() for match in re.finditer("-", column)]
        cut = next((at for at in cuts if is_metric(column[at + 1 :])), None)
        if between or cut:
            found[column] = (run, metric) if cut is None else (column[:cut], column[cut + 1 :])
    return found


def is_metric(own: str) -> bool:
    return (place := canonical(own)) is not None and is_known(place.metric)


def _of_one_run(
    names: dict[int, str], split: dict[str, tuple[str, str]], *, name: str, chosen: str | None
) -> dict[int, str]:
    """The columns of the run that was asked for, or of the only one, without its name."""
    runs = list(dict.fromkeys(run for run, _ in split.values()))
    if chosen is None and len(runs) > 1:
        raise UsageError(f"{name} holds {len(runs)} runs; name one: " + " or ".join(f"{name}#{run}" for run in runs))
    if chosen is not None and chosen not in runs:
        raise UsageError(f"{name} holds no run {chosen!r}; it has {', '.join(runs)}")
    one = chosen or runs[0]
    return {place: split[column][1] for place, column in names.items() if column in split and split[column][0] == one}


def read_json(text: str, *, name: str) -> Log | None:
    """The log in ``text``, or None if this is no JSON with numbers of a training."""
    if not text.lstrip("\ufeff\r\n ").startswith(("{", "[")):
        return None
    text = text.lstrip("\ufeff")
    try:
        whole = json.loads(text, object_pairs_hook=_object)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    except (ValueError, RecursionError):
        return _read_lines(text, name=name)
    history = whole.get("log_history") if isinstance(whole, dict) else None
    if isinstance(history, list):
        rows = [row for one in history if isinstance(one, dict) and (row := _row(one)) and row.values]
        return Log(format="Hugging Face trainer_state.json", rows=rows, averaged=frozenset({"loss"}))
    return log_of(whole if isinstance(whole, list) else [whole])


def _read_lines(text: str, *, name: str) -> Log | None:
    objects: list[Any] = []
    broken: list[int] = []
    wrong: dict[str, list[str]] = {}
    for number, line in enumerate(text.split("\n"), 1):  # no other separator of Unicode, which texts may hold
        if line.strip():
            try:
                objects.append(_parsed(line))
            except UsageError as error:
                raise UsageError(f"{name}, line {number}: {error}") from None
            except (ValueError, RecursionError):
                broken.append(number)
                continue
            for own, value in _no_numbers(objects[-1]):
                wrong.setdefault(own, []).append(f"first {shown(value)} in line {number}")
    notes = [f"{own} is no number in {len(lines)} lines, {lines[0]}" for own, lines in wrong.items()]
    if len(broken) > len(objects):
        return None  # a console, in which some lines are JSON
    if broken:
        notes.append(f"{len(broken)} lines are no JSON, perhaps cut off, first line {broken[0]}; they were left out")
    return log_of(objects, notes=notes)


def _parsed(line: str) -> Any:
    """Parses a line of JSON, also if ``print`` wrote its numbers that are not finite: ``nan`` in place of ``NaN``."""
    try:
        return json.loads(line, object_pairs_hook=_object)
    except UsageError:
        raise
    except ValueError:
        return json.loads(_PRINTED.sub(lambda found: _AS_JSON[found[0].lower()], line), object_pairs_hook=_object)


_AS_JSON = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_PRINTED = re.compile(r"(?i)(?<=[:,\[\s])(?:nan|-?inf)(?=[\s,}\]])")


def _no_numbers(one: Any) -> Iterator[tuple[str, Any]]:
    """The metrics of an object that have a value which is no number."""
    for own, value in one.items() if isinstance(one, dict) else ():
        if value is not None and not isinstance(value, dict) and is_metric(own) and not dict(flat({own: value})):
            yield own, value


def _row(one: dict[str, Any]) -> Row | None:
    """The row that an object is; None if it is nested too deeply, or its step is no step."""
    try:
        row = row_of(one)
    except RecursionError:
        return None
    return None if row.step == NO_STEP else row


def log_of(objects: list[Any], *, notes: Sequence[str] = ()) -> Log | None:
    objects = [one for one in objects if isinstance(one, dict)]
    found = [(one, row) for one in objects if (row := _row(one))]
    rows, counted = numbered([row for _, row in found if row.step is not None or row.trains])
    if not any(row.trains or row.blank or row.step is not None for row in rows):
        return None
    header = objects[0] if (first := _row(objects[0])) and first.step is None and not first.trains else {}
    keys = set().union(*objects)
    marks = {"_timestamp": "wandb history", "current_steps": "LLaMA-Factory", "global_step/max_steps": "ms-swift"}
    form = next((form for key, form in marks.items() if key in keys), "JSON lines")
    return Log(format=form, rows=rows, facts=header, notes=(*notes, *counted))
