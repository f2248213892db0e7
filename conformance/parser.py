"""Parser: the command line's. Options have to be written out, and what is nearly right is told the right one."""

import argparse
from collections.abc import Sequence
from typing import Any

from conformance.validation import did_you_mean


class Parser(argparse.ArgumentParser):
    """Also makes the parsers of its commands."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """An option that is not known is an error here, where those of the command are known."""
        found, unknown = super().parse_known_args(args, namespace)
        for option in (text.partition("=")[0] for text in unknown if text.startswith("-")):
            near = did_you_mean(option, self._option_string_actions)
            self.error(f"there is no option {option}; {near}{self.prog} --help shows all")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [] if action.choices is None else [*action.choices]
        if not choices or value in choices:
            return
        near, all_of_them = did_you_mean(str(value), map(str, choices)), ", ".join(map(str, choices))
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"there is no command {value!r}; {near}commands: {all_of_them}")
        raise argparse.ArgumentError(action, f"{value!r} is none of its values; {near}give one of {all_of_them}")
