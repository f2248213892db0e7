"""Reads training logs: CSV, JSON, TensorBoard's event files, wandb's runs, and consoles. The content tells the format.

CSV has a header with a counter of steps. wandb exports a panel in this format: it names a column ``RUN - METRIC`` and
adds ``__MIN`` and ``__MAX`` of the interval that a point stands for, which are not metrics here (docs.wandb.ai, "Export
data from a panel"); SwanLab names it ``RUN-METRIC``. Of several runs one is read at a time: ``panel.csv#RUN``. Where a
log begins again at its first step, it holds several runs: ``log.jsonl#1``, ``log.jsonl#2``. Several files of one run
are joined by ``+``: ``loss.csv+grad_norm.csv``.

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
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.core.errors import UsageError, shown
from conformance.core.io import Unreadable, read_file
from reports.logdiff.event_files import EVENT_FILES, is_event_file, read_events
from reports.logdiff.lines import FORMATS, format_of, lines_of, read_lines
from reports.logdiff.metrics import STEP, TOKENS, canonical, is_known, plain_name
from reports.logdiff.rows import COUNTED, LARGEST_STEP, NO_STEP, Log, Row, flat, number_in, numbered, row_of

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
    header = _cells(lines[:1], delimiter, name=name)[0]
    lower = [plain_name(column) for column in header]
    counter = next((lower.index(plain_name(column)) for column in STEP if plain_name(column) in lower), None)
    if counter is None or len(header) < 2:
        return None
    if twice := next((one for one in header if header.count(one) > 1 and _is_read(one)), None):
        raise UsageError(f"{name} has {header.count(twice)} columns called {twice}; rename or remove all but one")
    _, *table = _cells(lines, delimiter, name=name)
    commas = delimiter == ";" and next((cell for line in table for cell in line if DECIMAL_COMMA.fullmatch(cell)), "")
    if commas:
        table = [[cell.replace(",", ".") if DECIMAL_COMMA.fullmatch(cell) else cell for cell in line] for line in table]
    form = "MLflow metric file" if lower == ["time", "value", "step"] else "CSV"
    names = {place: column for place, column in enumerate(header) if place != counter}
    if {"key", "value"} <= set(lower):
        return _long_table(table, lower, counter)
    if split := _split_columns(names.values()):
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


def _cells(lines: Sequence[str], delimiter: str, *, name: str) -> list[list[str]]:
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


def _split_columns(columns: Any) -> dict[str, tuple[str, str]]:
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
    return _log(whole if isinstance(whole, list) else [whole])


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
    return _log(objects, notes=notes)


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


def _log(objects: list[Any], *, notes: Sequence[str] = ()) -> Log | None:
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


WANDB = "wandb:"


def read_wandb(path: str) -> Log:
    """The history of a run of wandb, by its package. ``path``: entity/project/run."""
    try:
        import wandb
    except ImportError:
        way_out = "pip install wandb, or export its panels as CSV and give these files"
        raise UsageError(f"{WANDB}{path} is read by the package wandb: {way_out}") from None
    try:
        history = list(wandb.Api().run(path).scan_history())
    except Exception as error:  # of the network, of rights, or of a run that is not there: wandb has many classes
        raise UsageError(
            f"{WANDB}{path} cannot be read: {shown(str(error))}; the form is {WANDB}entity/project/run"
        ) from None
    if not (found := _log(history)):
        raise UsageError(f"{WANDB}{path} has no history")
    return replace(found, format="wandb history")


LONGEST, LONGEST_HEADER = 2**30, 2**16  # bytes of a log, and of a table's first line


def read_log(name: str, *, whole: bool = False) -> Log:
    """The log that the argument ``name`` names: a file, a folder of event files, ``panel.csv#RUN``, or a run of wandb.

    ``log.jsonl@30``, or ``log.jsonl#2@30``, is a resumed run whose counter began again after step 30. ``log.jsonl@0``
    says that the lines of a log without steps are steps.
    ``whole``: also of a log that begins again, which is refused otherwise if ``name`` names none of its runs.

    Raises UsageError, with what was looked for and the first line, if no reader knows it.
    """
    if name.startswith(WANDB):
        return read_wandb(name.removeprefix(WANDB))
    path, chosen = Path(name), None
    log, _, later = name.rpartition("@")
    if (
        later.isdecimal()
        and not path.exists()
        and any(Path(one).exists() for one in (log, log.rpartition("#")[0]) if one)
    ):
        return _continued(read_log(log, whole=whole), int(later))
    before, mark, run = name.rpartition("#")
    if not path.exists() and "+" in name and not (mark and Path(before).exists()):
        return _joined([read_log(part) for part in name.split("+")])
    if not path.exists() and mark:
        path, chosen = Path(before), run
    if path.is_dir() and (metrics := path / "metrics").is_dir():
        return _read_mlflow(metrics)
    if path.is_dir():
        files = _event_files(path)
        for file in files:
            _read(file)  # refuses links and files that are too large
        return read_events(files)
    data = _read(path)
    if is_event_file(data):
        return read_events([path])
    if data.startswith(b"\x1f\x8b"):
        raise UsageError(f"{path} is packed by gzip; unpack it first: gunzip {path}")
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))  # as PowerShell writes what it redirects
    text = data.decode("utf-16" if wide else "utf-8", errors="replace")
    return read_text(text, name=str(path), chosen=chosen, whole=whole)


def _continued(log: Log, steps: int) -> Log:
    """The log of a run that was resumed after so many ``steps``, from which its counter began again."""
    rows = [replace(row, step=row.step + steps) for row in log.rows if row.step is not None]
    return replace(log, rows=rows, notes=tuple(note for note in log.notes if note != COUNTED))


def _joined(logs: Sequence[Log]) -> Log:
    """The log of a run that several files hold, such as one for each metric."""
    return Log(
        format=" and ".join(dict.fromkeys(log.format for log in logs)),
        rows=sorted((row for log in logs for row in log.rows), key=lambda row: row.step or 0),
        averaged=frozenset().union(*(log.averaged for log in logs)),
        facts={name: value for log in logs for name, value in log.facts.items()},
        notes=tuple(dict.fromkeys(note for log in logs for note in log.notes)),
    )


def _read_mlflow(metrics: Path) -> Log:
    """The log in a run's folder of MLflow: a file for each metric, whose path is its name."""
    rows: list[Row] = []
    for file in sorted(one for one in metrics.rglob("*") if one.is_file()):
        text = _read(file).decode(errors="replace")
        is_metric_file = METRIC_FILE.match(text.partition("\n")[0].strip())
        log = read_table(text, name=str(file), chosen=None) if is_metric_file else None
        if log is None:
            raise UsageError(f"{file} is no metric of MLflow: its lines are not a time, a value and a step")
        own = file.relative_to(metrics).as_posix()
        rows += [replace(row, values={own: value}) for row in log.rows for value in row.values.values()]
    if not rows:
        raise UsageError(f"{metrics} holds no metric")
    return Log(format="MLflow run", rows=sorted(rows, key=lambda row: row.step or 0))


def read_text(text: str, *, name: str, chosen: str | None = None, whole: bool = False) -> Log:
    """The log that a text holds. Raises UsageError if it holds none."""
    if not text.strip("\ufeff\r\n\t "):
        raise UsageError(f'{name} is empty; a log has lines such as {{"step": 1, "loss": 2.5}}')
    found = read_json(text, name=name) or read_table(text, name=name, chosen=chosen)
    if found is None:
        lines = list(lines_of(text))
        rows, notes = read_lines(lines, name=name)
        form = format_of(line.text for line in lines)
        found = Log(format=form.name, rows=rows, averaged=frozenset({"loss"} if form.averaged else ()), notes=notes)
    if found.format not in PANELS and not whole:
        found = _chosen(found, name=name, chosen=chosen)
    if not found.rows:
        first = next((line for line in text.split("\n") if line.strip()), "")
        looked_for = ", ".join(dict.fromkeys(one.name for one in FORMATS))
        raise UsageError(
            f"{name} is no training log that can be read; looked for: {looked_for}, TensorBoard's event files, and"
            f" lines with a step and numbers. It begins {shown(first)}. Another log is read as JSON lines, such as"
            ' {"step": 1, "loss": 2.5}'
        )
    return found


PANELS = ("wandb CSV", "SwanLab CSV")


def _chosen(log: Log, *, name: str, chosen: str | None) -> Log:
    """The run that was asked for, of a log that begins again; refuses such a log if none was, for it may be either."""
    parts = _runs(log.rows)
    if chosen is None and len(parts) > 1:
        names = " or ".join(f"{name}#{number}" for number in range(1, len(parts) + 1))
        raise UsageError(
            f"{name} begins again at its first step {parts[1][0].step}: it holds {len(parts)} runs; name one: {names}."
            f" A resumed run whose counter began again after step {parts[0][-1].step} is"
            f" {name}#2@{parts[0][-1].step}"
        )
    if chosen is None:
        return log
    if len(parts) < 2 or chosen not in map(str, range(1, len(parts) + 1)):
        raise UsageError(f"{name} holds {len(parts)} run{'s' * (len(parts) > 1)} and none called {chosen!r}")
    return replace(log, rows=parts[int(chosen) - 1])


def _runs(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each run, where one process begins again at the first step that it had."""
    found: list[list[Row]] = []
    single = len({row.process for row in rows}) == 1
    for row in rows:
        assert row.step is not None
        if not found or (single and row.step == found[0][0].step and (found[-1][-1].step or 0) > row.step):
            found.append([])
        found[-1].append(row)
    return found


def runs_in(name: str) -> list[str]:
    """The runs of a panel, or the numbers of those that a log holds which begins again; none of any other log."""
    if runs := runs_of_panel(name):
        return runs
    parts = _runs(read_log(name, whole=True).rows) if Path(name).is_file() else []
    return [str(number) for number in range(1, len(parts) + 1)] if len(parts) > 1 else []


def runs_of_panel(name: str) -> list[str]:
    """The runs whose columns a table of several runs has; none of any other log."""
    path = Path(name)
    start = _read(path)[:LONGEST_HEADER].decode(errors="replace") if path.is_file() else ""
    first = re.split(r"[\r\n]", start.lstrip("\ufeff"), maxsplit=1)[0]
    columns = _cells([first], max(",;\t", key=first.count), name=name)[0]
    return list(dict.fromkeys(run for run, _ in _split_columns(columns).values()))


def _read(path: Path) -> bytes:
    try:
        return read_file(path.resolve() if path.is_file() else path, limit=LONGEST)  # the user may name a link
    except FileNotFoundError:
        raise UsageError(f"there is no log {path}") from None
    except Unreadable as error:
        raise UsageError(str(error)) from None


def _event_files(folder: Path) -> list[Path]:
    """In the order of their names, which hold the time of their making."""
    files = sorted(folder.glob(EVENT_FILES))
    if files:
        return files
    below = sorted({file.parent for file in folder.rglob(EVENT_FILES)})
    if below:
        raise UsageError(f"{folder} holds several runs of TensorBoard; name one: " + " or ".join(map(str, below)))
    raise UsageError(f"{folder} holds neither TensorBoard's event files nor a record (record.jsonl); name a log")
