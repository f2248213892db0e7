"""Finds reporters and commands that installed packages register as entry points; conformance imports none of them.

parity.reporters: each function takes the output folder, writes a file for readers, and returns its path.
parity.comparisons: each function takes the output folder and returns a text that compares the backends. The function
    also takes the TwoRuns of two folders (conformance.results.output_folders), and compares these.
parity.commands: each is a Command object, whose entry point has the name of the command.
"""

import argparse
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Protocol

from conformance.core.errors import UsageError, one_line
from conformance.core.io import Unwritable

COMMANDS, REPORTERS, COMPARISONS = "parity.commands", "parity.reporters", "parity.comparisons"


def write_reports(out: Path) -> list[str]:
    """Calls all reporters; returns one line for the user about each, the HTML report last.

    If files cannot be written, raises Unwritable after all reporters were called.
    """
    lines, failed = [], []
    for entry in sorted(entry_points(group=REPORTERS), key=lambda entry: (entry.name == "html", entry.name)):
        try:
            write: Callable[[Path], Path] = entry.load()
        except ImportError as error:
            missing = f"{error.name} is not installed" if isinstance(error, ModuleNotFoundError) else str(error)
            lines.append(f"no {entry.name} report: {missing}; run: pip install 'backend-parity[report]'")
        else:
            try:
                lines.append(f"{'report' if entry.name == 'html' else entry.name}: {write(out)}")
            except Unwritable as error:
                failed.append(str(error))
    if failed:
        raise Unwritable("; ".join(failed))
    return lines or ["no report: no reporter is installed"]


def compare(runs: object) -> str:
    """Returns the text of the first installed comparison.

    runs: the path of an output folder, to compare its backends; or the TwoRuns of two folders.

    Raises LookupError if none is installed.
    """
    for entry in entry_points(group=COMPARISONS):
        to_text: Callable[[object], str] = entry.load()
        return to_text(runs)
    raise LookupError(f"no package registers a comparison under the entry-point group {COMPARISONS!r}")


class Command(Protocol):
    help: str  # one line

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int:
        """Runs the command and returns the exit code. A UsageError is shown to the user in one line."""
        ...


def announced_commands() -> dict[str, EntryPoint]:
    """Returns the entry points of the commands of installed packages, by name. None is imported."""
    return {entry.name: entry for entry in sorted(entry_points(group=COMMANDS), key=lambda entry: entry.name)}


def load_command(name: str) -> Command:
    """Imports a command. A command that cannot be imported raises UsageError with the reason when it is run."""
    try:
        command: Command = announced_commands()[name].load()
    except Exception as error:  # one broken plugin must not stop the others
        return _Missing(f"{type(error).__name__}: {one_line(error)}")
    return command


class _Missing:
    """Stands for a command that cannot be imported; ``run`` raises UsageError with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = f"not available: {reason}"
        self.help = self.reason.replace("%", "%%")  # argparse formats help texts with %

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.prefix_chars = "\0"  # accept all arguments and options: ``run`` only reports what is missing
        parser.add_argument("ignored", nargs="*")

    def run(self, options: argparse.Namespace) -> int:
        raise UsageError(f"this command is {self.reason}")
