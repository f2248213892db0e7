"""Commands beside the suite's own, found by entry point as backends are; conformance knows none of them.

Each entry under ``parity.commands`` is an object of the protocol below; its name is the command's.
"""

import argparse
from importlib.metadata import entry_points
from typing import Protocol

from conformance.validation import UsageError

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
            found[entry.name] = _Missing(f"{type(error).__name__}: {error}")
    return found


class _Missing:
    """Stands for a command that cannot be imported."""

    def __init__(self, reason: str) -> None:
        self.help = f"not available: {reason}"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("ignored", nargs=argparse.REMAINDER)

    def run(self, options: argparse.Namespace) -> int:
        raise UsageError(f"this command is {self.help}")
