"""Holds what readers find: rows of numbers under a log's own names, and numbers the rows that name no step."""

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import pairwise
from typing import Any

from conformance.core.errors import UsageError
from reports.logdiff.metrics import COUNTS_STEPS, STEP, canonical, is_evaluation, plain_name

LEAST_WITHOUT_EXPONENT = 1e-4  # of Python, and of C's %g
LARGEST_STEP = 15  # digits
TRANSPARENT = ("data", "metrics")  # keys whose objects are flattened without their name
LARGEST = 2**63  # of whole numbers; an identifier may be larger
RANK = ("rank", "global_rank", "process_index")  # names of the process in a line of JSON
FIXED = re.compile(r"[-+]?[0-9]{1,40}\.[0-9]{1,40}")
NO_STEP = -1  # of a row whose step is no whole number, or too large
COUNTED = "the log counts no steps: its lines are counted instead (1, 2, 3, ...)"


SCALES = {"%": "0.01", "k": "1e3", "K": "1e3", "M": "1e6", "G": "1e9", "B": "1e9"}  # what may stand behind a number


class Fixed(float):
    """A number that a log printed without an exponent. half_unit: half a unit of its last decimal, in its own unit.

    is_padded: whether it is no shortest form of a number, such as ``0.50`` and ``0.000003``; then decimals are fixed.
    """

    def __new__(cls, text: str, scale: str = "1") -> "Fixed":
        return super().__new__(cls, Decimal(text) * Decimal(scale))

    __slots__ = ("half_unit", "is_padded")

    def __init__(self, text: str, scale: str = "1") -> None:
        decimals = text.partition(".")[2]
        self.half_unit = float(Decimal(f"0.5e-{len(decimals)}") * Decimal(scale))
        self.is_padded = len(decimals) > 1 and (text.endswith("0") or 0 < abs(float(text)) < LEAST_WITHOUT_EXPONENT)


def times(value: float, unit: float) -> float:
    """Returns a product without the error of binary fractions: 0.997 of 1e-3 is 0.000997."""
    return float(Decimal(repr(float(value))) * Decimal(repr(unit)))


@dataclass(frozen=True)
class Row:
    """What a log says at one step, under its own names. ``step`` is None in logs that count no steps.

    ``blank``: names that have no number there, but JSON's null or an empty cell: NaN, as many programs write it, or
    nothing. ``process``: the ranks and hosts that a line names; ``pid``: the process that Ray names, another one after
    a restart. ``replaces``: a bar that is drawn again for a step replaces what it showed.
    """

    step: int | None
    values: Mapping[str, float]
    blank: frozenset[str] = frozenset()
    process: str = ""
    pid: str = ""
    replaces: bool = False

    @property
    def trains(self) -> bool:
        return any((place := canonical(own)) and not is_evaluation(place.metric) for own in self.values)


@dataclass(frozen=True, kw_only=True)
class Log:
    """What a reader found: rows in the order of the file.

    ``averaged``: canonical names whose values are means over the steps since the line before. ``facts``: what the log
    says of how it was made, such as its options. ``notes``: sentences about what could not be read.
    """

    format: str
    rows: list[Row]
    averaged: frozenset[str] = frozenset()
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def row_of(one: Mapping[str, Any]) -> Row:
    """The row that an object is; its step is None if it has no whole number under a name of STEP."""
    named = dict(flat(one))
    values = {name: value for name, value in named.items() if value is not None}
    lower = {name.lower(): name for name in values}
    step = None
    if counter := next((lower[name] for name in STEP if name in lower), None):
        number = values[counter]
        step = int(number) if number.is_integer() and 0 <= number < 10**LARGEST_STEP else NO_STEP
    process = next((f"rank {values[lower[name]]:g}" for name in RANK if name in lower), "")
    summary = any(name.endswith("train_runtime") for name in values)  # the Trainer's last line sums the run up
    values = {name: value for name, value in values.items() if name.lower() not in STEP and not summary}
    return Row(step, values, frozenset(name for name, value in named.items() if value is None), process)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    """Names with their numbers, None for null; texts count (``"1e-05"``, ``"nan"``, ``"10/60"`` of a counter)."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, prefix if name in TRANSPARENT else f"{prefix}{name}/")
        elif value is None:
            yield f"{prefix}{name}", None
        elif isinstance(value, str):
            part = value.partition("/")[0] if name.lower() in STEP else value
            if (number := number_in(part)) is not None:
                yield f"{prefix}{name}", number
        elif isinstance(value, list) and len(value) == 1 and isinstance(value[0], float):
            yield f"{prefix}{name}", value[0]
        elif isinstance(value, int | float) and not isinstance(value, bool) and not _is_identifier(value):
            yield f"{prefix}{name}", float(value)


def _is_identifier(value: float) -> bool:
    return isinstance(value, int) and abs(value) > LARGEST


def number_in(text: str) -> float | None:
    """The number that a text is, if it is one."""
    try:
        number = float(text) if len(text) <= 40 and "_" not in text else None
    except ValueError:
        return None
    return Fixed(text.strip()) if FIXED.fullmatch(text.strip()) else number


Bar = tuple[int, int, int]  # the number of rows before a progress bar, what it says is done, and of how many


def numbered(rows: Sequence[Row], bars: Sequence[Bar] = ()) -> tuple[list[Row], tuple[str, ...]]:
    """The rows, each with a step; and a note if lines had to be counted.

    Where most rows that train name their step, another one has that of the row before it. Else the rows are counted.
    A line that names its step among those that do not is of another format: it is left out, and a note counts such
    lines. A line that is printed twice is one step. Where the epoch goes back, a resume goes back to the row of that
    epoch. Then progress bars tell what a row counts for, or the epoch does if the bar reached its end.
    """
    rows = [row for row in rows if row.step != NO_STEP]
    trained = [row for row in rows if row.trains]
    lacking = sum(row.step is None for row in trained)
    if 2 * lacking <= len(trained):
        step, found = None, []
        for row in rows:
            step = step if row.step is None else row.step
            found += [] if step is None else [replace(row, step=step)]
        return found, (f"{lacking} lines name no step; they have that of the line before",) if lacking else ()
    foreign = sum(row.step is not None for row in rows if row.trains)
    rows, bars = _without_steps(rows, bars)
    processes = dict.fromkeys(row.process for row in rows)
    steps: dict[int, int] = {}
    notes = {other_format(foreign)} if foreign else set()
    for process in processes:
        places = [place for place, row in enumerate(rows) if row.process == process]
        found_steps, note = _steps(rows, places, bars)
        steps |= found_steps
        notes |= {note} - {""}
    return [replace(row, step=steps[place]) for place, row in enumerate(rows)], tuple(sorted(notes))


def other_format(count: int, first: int | None = None) -> str:
    """The note on lines of a second format; ``first``: the number of the first of them."""
    where = "" if first is None else f", first line {first}"
    return f"{count} line{'s' * (count != 1)} of another format were not read{where}"


def _without_steps(rows: Sequence[Row], bars: Sequence[Bar]) -> tuple[list[Row], list[Bar]]:
    """The rows but those that train and name a step, and the bars with the number of such rows before them."""
    kept = [place for place, row in enumerate(rows) if row.step is None or not row.trains]
    return [rows[place] for place in kept], [(bisect_left(kept, before), done, total) for before, done, total in bars]


def _steps(rows: Sequence[Row], places: Sequence[int], bars: Sequence[Bar]) -> tuple[dict[int, int], str]:
    """The step of each of one process's rows, and a note."""
    ordinals = _ordinals(rows, [place for place in places if rows[place].trains])
    scaled, note = _by_bars(ordinals, bars), ""
    if scaled is None:
        scaled = _by_epochs(rows, ordinals, bars)
    if scaled is None:
        if counter := _counter([rows[place] for place in places if rows[place].trains]):
            raise UsageError(
                f"no column of the log has a usual name of a counter of steps, and {counter} looks like one; rename it"
                " step, or leave it out, and the lines are counted"
            )
        scaled, note = ordinals, COUNTED
    found: dict[int, int] = {}
    step, reached = 0, 0.0
    for place in places:
        epoch = epoch_of(rows[place])
        if place in scaled:
            step, reached = scaled[place], epoch
        share = epoch / reached if reached > 0 else 1.0
        found[place] = round(step * share) if 1 < share < math.inf else step
    return found, note


def _counter(rows: Sequence[Row]) -> str:
    """A column with the name of a counter whose whole numbers rise from row to row; empty without one."""
    names = {own for row in rows for own in row.values if COUNTS_STEPS.search(plain_name(own))}
    for own in sorted(names):
        values = [row.values.get(own, math.nan) for row in rows]
        if len(values) > 1 and all(value.is_integer() for value in values) and all(a < b for a, b in pairwise(values)):
            return own
    return ""


def _ordinals(rows: Sequence[Row], places: Sequence[int]) -> dict[int, int]:
    """The rows that train, counted from 1."""
    found: dict[int, int] = {}
    epochs: list[float] = []
    before: Row | None = None
    for place in places:
        row, epoch = rows[place], epoch_of(rows[place])
        if before is None or row.values != before.values:
            if epochs and epoch < epochs[-1]:
                epochs = [one for one in epochs if one < epoch]
            epochs.append(epoch if not math.isnan(epoch) or not epochs else epochs[-1])
        found[place] = len(epochs)
        before = row
    return found


def _by_bars(ordinals: Mapping[int, int], bars: Sequence[Bar]) -> dict[int, int] | None:
    """Steps by the bars that stand before or behind the rows, if bars and rows go up together; else None.

    A bar may be drawn some steps late before a row, and is drawn anew behind it. Bars of other loops differ in length.
    """
    places = sorted(ordinals)
    marked = []
    for total, _ in Counter(whole for _, _, whole in bars).most_common(3):
        before: dict[int, int] = {}
        behind: dict[int, int] = {}
        for between, done, _ in (one for one in bars if one[2] == total):
            at = bisect_left(places, between)
            if at < len(places):
                before[places[at]] = done
            if at:
                behind.setdefault(places[at - 1], done)
        marked += [(total, before), (total, behind)]
    for total, marks in marked:
        ratios = Counter(done / ordinals[place] for place, done in marks.items() if done)
        ratio, count = ratios.most_common(1)[0] if ratios else (0.0, 0)
        even = len(marks) > 1 and count >= 0.9 * len(marks) and ratio.is_integer()
        if even and ratio * max(ordinals.values()) <= total:
            return {place: int(ratio) * ordinal for place, ordinal in ordinals.items()}
    for _, marks in marked:
        if len(marks) == len(places) > 1 and _rise_together(ordinals, marks):
            return dict(marks)
    return None


def _rise_together(ordinals: Mapping[int, int], steps: Mapping[int, int]) -> bool:
    pairs = pairwise(sorted(ordinals))
    return all((ordinals[b] > ordinals[a]) == (steps[b] > steps[a]) for a, b in pairs)


def _by_epochs(rows: Sequence[Row], ordinals: Mapping[int, int], bars: Sequence[Bar]) -> dict[int, int] | None:
    """Steps by the epoch's part of a bar that reached its end, if each row has a step of its own; else None."""
    total = max((whole for _, done, whole in bars if done == whole), default=0)
    epochs = {place: epoch_of(rows[place]) for place in ordinals}
    last = max((row.values.get("epoch", 0.0) for row in rows), default=0.0)
    if not total or not 0 < last < math.inf or any(map(math.isnan, epochs.values())):
        return None
    steps = {place: round(epoch / last * total) for place, epoch in epochs.items()}
    return steps if _rise_together(ordinals, steps) else None


def epoch_of(row: Row) -> float:
    """The epoch that a row names; NaN if it names none that is finite."""
    epoch = row.values.get("epoch", math.nan)
    return epoch if math.isfinite(epoch) else math.nan
