"""Commands beside the suite's own, found by entry point as backends are; conformance knows none of them.

Each entry under ``parity.commands`` is an object of the protocol below; its name is the command's.
"""

import argparse
from importlib.metadata import entry_points
from typing import Protocol

from conformance.validation import UsageError, one_line

ENTRY_POINT_GROUP = "parity.commands"


class Command(Protocol):
    help: str  # one line

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int:
        """Do it, and return the exit code. UsageError is told in one line."""
        ...


def announced_commands() -> dict[str, Command]:
    """The commands of installed packages, by name; one that cannot be imported says why when it is run."""
    found: dict[str, Command] = {}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name):
        try:
            found[entry.name] = entry.load()
        except Exception as error:  # whatever a plug-in does is no reason to stop the others
            found[entry.name] = _Missing(f"{type(error).__name__}: {one_line(error)}")
    return found


class _Missing:
    """Stands for a command that cannot be imported."""

    def __init__(self, reason: str) -> None:
        self.reason = f"not available: {reason}"
        self.help = self.reason.replace("%", "%%")  # as argparse wants it

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.prefix_chars = "\0"  # whatever it is given, options too, it only says why it is missing
        parser.add_argument("ignored", nargs="*")

    def run(self, options: argparse.Namespace) -> int:
        raise UsageError(f"this command is {self.reason}")
