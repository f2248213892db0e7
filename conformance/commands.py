"""Additional commands of the command line, which packages register as entry points; conformance knows none of them.

Each entry point of the group ``parity.commands`` is a Command object, and its name is the name of the command.
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
        """Run the command and return the exit code. A UsageError is shown to the user in one line."""
        ...


def announced_commands() -> dict[str, Command]:
    """The commands of installed packages, by name. A command that cannot be imported says why when it is run."""
    found: dict[str, Command] = {}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name):
        try:
            found[entry.name] = entry.load()
        except Exception as error:  # one broken plug-in must not stop the others
            found[entry.name] = _Missing(f"{type(error).__name__}: {one_line(error)}")
    return found


class _Missing:
    """A placeholder for a command that cannot be imported; ``run`` raises UsageError with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = f"not available: {reason}"
        self.help = self.reason.replace("%", "%%")  # argparse formats help texts with %

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.prefix_chars = "\0"  # accept all arguments, options included: ``run`` only says what is missing
        parser.add_argument("ignored", nargs="*")

    def run(self, options: argparse.Namespace) -> int:
        raise UsageError(f"this command is {self.reason}")
