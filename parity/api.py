"""Functions that do what the commands ``parity run`` and ``parity diff`` do, for scripts and notebooks."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NoReturn, Protocol

from conformance.cli.commands import COMMANDS
from conformance.core import packages
from conformance.core.errors import UsageError
from conformance.core.parser import Parser

File = str | PathLike[str]


class Comparison(Protocol):
    """All other sides compared with the first one."""

    @property
    def differs(self) -> bool:
        """Whether a side diverges from the first."""
        ...

    @property
    def comparable(self) -> bool:
        """Whether enough was compared for a verdict: False if the sides have too little in common."""
        ...

    def text(self) -> str:
        """What ``parity diff`` prints: plain text, which is Markdown as well."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        ...


def diff(
    a: File | Sequence[File],
    b: File | Sequence[File],
    *more_sides: File | Sequence[File],
    by: str = "step",
    threshold: float | None = None,
    metrics: Sequence[str] = (),
) -> Comparison:
    """Compare training logs, or records of ``parity.record``, with the first of them, as ``parity diff`` does.

    A side is a log, a record, or a list of logs that differ by their seeds. by: what curves of logs are aligned by,
    ``step`` or ``tokens``. threshold: the relative difference that is allowed; None: derived from the precision of
    records, 5 % for logs, and the spread where a side has several logs. metrics: the only ones to compare, such as
    ``loss``. Raises UsageError for logs that cannot be read or compared.

    Example::

        comparison = parity.diff("run-a", "run-b")
        assert not comparison.differs, comparison.text()
    """
    sides = [[side] if isinstance(side, str | PathLike) else side for side in (a, b, *more_sides)]
    with packages.preferred():
        from reports.logdiff.command import compare_sides

        names = [[fspath(one) for one in side] for side in sides]
        return compare_sides(names, by=by, threshold=threshold, metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended. ``out``: its output folder, for ``parity.load``. ``exit_code``: that of ``parity run``."""

    out: Path
    exit_code: int

    @property
    def passed(self) -> bool:
        """Whether no cell differs, and the run is complete."""
        return self.exit_code == 0


def run(
    *,
    profile: File = "quick",
    backend: str | Sequence[str] = (),
    cells: str | Sequence[str] = (),
    device: str = "cpu",
    out: File | None = None,
    **options: Any,
) -> RunResult:
    """Run cells, judge them and write the reports, as ``parity run`` does; progress goes to standard error.

    profile: a name or a .toml file. backend: names or ``module:Class``; all registered ones if empty. cells: shell
    patterns of cell ids. device: ``cpu`` or ``cuda``. out: a new or empty folder; None: parity-out/DATE_TIME.
    options: all other options of ``parity run``, with underscores and as Python values, such as ``max_len=512``,
    ``faults=["inverted-clip"]`` or ``quiet=True``. Raises UsageError for options that cannot be used. In a script, call
    it below ``if __name__ == "__main__":``.

    Example::

        result = parity.run(backend="my_package.adapter:MyBackend", cells="sft-sgd/llama/*/dp1/exact")
        assert result.passed, parity.load(result.out).cells.reason.tolist()
    """
    common = {"profile": profile, "backend": backend, "cells": cells, "device": device, "out": out}
    arguments = [text for name, value in (common | options).items() for text in _written(name, value)]
    parser = _Parser(prog="parity run")
    COMMANDS["run"].add_arguments(parser)
    parsed = parser.parse_args(arguments)
    parsed.arguments = arguments
    with packages.preferred():
        from conformance.cli.run import run_options

        folder, code = run_options(parsed)
    if code > 128:  # a signal stopped the run, which has written what it had
        raise KeyboardInterrupt(f"stopped by a signal; {shlex.quote(str(folder))} has the cells that were run")
    return RunResult(out=folder, exit_code=code)


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _written(name: str, value: Any) -> list[str]:
    """An option as the command line has it."""
    if value is None or value is False:
        return []
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    values = [value] if isinstance(value, str | PathLike) or not isinstance(value, Sequence) else value
    return [f"{flag}={fspath(one) if isinstance(one, PathLike) else one}" for one in values]
