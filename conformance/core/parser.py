"""Parses the command line, and suggests the right spelling of an option, value or command that is nearly right.

Options are written with dashes (``--max-len``); underscores are accepted. No option may be abbreviated. An error is one
line, without the usage.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from conformance.core.errors import did_you_mean, limited


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Formats the usage with required arguments only, because groups of options follow below it."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        needed = [action for action in actions if action.required or not action.option_strings]
        if len(needed) < len(actions):
            self._prog += " [options]"
        super().add_usage(usage, needed, [], prefix)


class Parser(argparse.ArgumentParser):
    """Parses arguments, also those of commands: argparse builds their parsers from the same class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": Formatter, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Reports an unknown option from the command's own parser, which knows similar options."""
        given = None if args is None else [self._with_dashes(text) for text in args]
        found, unknown = super().parse_known_args(given, namespace)
        for option in (text.partition("=")[0] for text in unknown if text.startswith("-") or "=" in text):
            self.error(self.unknown(option))
        return found, unknown

    def unknown(self, option: str) -> str:
        """Returns the message about an option that does not exist."""
        near = did_you_mean(option.replace("_", "-"), self._option_string_actions)
        return f"there is no option {option}; {near}{self.prog} --help shows all"

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {limited(message)}\n")

    def _with_dashes(self, text: str) -> str:
        """Replaces underscores in the name of an option by dashes, if the option is declared so."""
        name, equals, value = text.partition("=")
        dashed = name.replace("_", "-")
        is_other = name.startswith("--") and name not in self._option_string_actions
        return f"{dashed}{equals}{value}" if is_other and dashed in self._option_string_actions else text

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [] if action.choices is None else [*action.choices]
        if not choices or value in choices:
            return
        if advice := getattr(action, "advice", {}).get(value):
            self.error(advice)
        near, all_of_them = did_you_mean(str(value), map(str, choices)), ", ".join(map(str, choices))
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"there is no command {value!r}; {near}commands: {all_of_them}")
        raise argparse.ArgumentError(action, f"invalid choice {value!r}; {near}give one of {all_of_them}")
