"""JSON: lines of objects (ours, wandb's history, verl's file logger, anybody's), and Hugging Face's trainer_state.json.

An object with a counter of steps is a row; the first one without is the header: what was asked of the run. Objects in
objects are flattened with ``/``; verl's ``{"step": 1, "data": {...}}`` (verl/utils/tracking.py, FileLogger) without.
``trainer_state.json`` holds its rows under ``log_history`` (transformers/trainer_callback.py, TrainerState), and the
Trainer logs the mean loss since the last line (transformers/trainer.py, ``_maybe_log_save_evaluate``).
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from reports.runs.metrics import STEP
from reports.runs.run import Log, Row

TRANSPARENT = "data"
LARGEST = 2**63  # of whole numbers; an identifier may be larger
NOT_FINITE = ("nan", "inf", "-inf", "infinity", "-infinity")  # as texts, since JSON has no such numbers
OURS = {"kl": "ppo_kl"}  # the divergence from the roll-out's policy, where others mean that from the reference


def read_json(text: str) -> Log | None:
    """The log in ``text``, or None if this is no JSON with a counter of steps."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return _read_lines(text)
    history = whole.get("log_history") if isinstance(whole, dict) else None
    if isinstance(history, list):
        logged = [
            one for one in history if isinstance(one, dict) and "train_runtime" not in one
        ]  # that sums the run up
        rows = [row for one in logged for row in _rows(one)]
        return Log(format="Hugging Face trainer_state.json", rows=rows, averaged=frozenset({"loss"}))
    objects = whole if isinstance(whole, list) else [whole]
    return _log(objects, broken=0)


def _read_lines(text: str) -> Log | None:
    objects: list[Any] = []
    broken = 0
    for line in text.splitlines():
        if line.strip():
            try:
                objects.append(json.loads(line))
            except (ValueError, RecursionError):
                broken += 1
    return _log(objects, broken=broken)


def _log(objects: list[Any], *, broken: int) -> Log | None:
    objects = [one for one in objects if isinstance(one, dict)]
    rows = [row for one in objects for row in _rows(one)]
    if not rows:
        return None
    notes = (f"{broken} lines are no JSON, perhaps cut off; they were left out",) if broken else ()
    header = objects[0] if not list(_rows(objects[0])) else {}
    if "run" in header:
        rows = [
            Row(
                row.step,
                {OURS.get(name, name): value for name, value in row.values.items()},
                frozenset(OURS.get(name, name) for name in row.blank),
            )
            for row in rows
        ]
    wandb = any("_step" in one and "_timestamp" in one for one in objects)
    return Log(format="wandb history" if wandb else "JSON lines", rows=rows, facts=header, notes=notes)


def _rows(one: Mapping[str, Any]) -> Iterator[Row]:
    """The row that an object is; none without a whole number as its step."""
    named = dict(_flat(one))
    values = {name: value for name, value in named.items() if value is not None}
    lower = {name.lower(): name for name in values}
    counter = next((lower[name] for name in STEP if name in lower), None)
    if counter is not None and values[counter].is_integer():
        step = int(values[counter])
        blank = frozenset(name for name, value in named.items() if value is None)
        yield Row(step, {name: value for name, value in values.items() if name.lower() not in STEP}, blank)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    """Names with their numbers, or None for null."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, prefix if name == TRANSPARENT else f"{prefix}{name}/")
        elif value is None:
            yield f"{prefix}{name}", None
        elif isinstance(value, bool) or (isinstance(value, int) and abs(value) > LARGEST):
            continue
        elif isinstance(value, int | float) or (isinstance(value, str) and value.lower() in NOT_FINITE):
            yield f"{prefix}{name}", float(value)
