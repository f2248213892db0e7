"""Parser: the command line's. Options have to be written out, and what is nearly right is told the right one.

Completion: the script that makes a shell complete `parity`, made by shtab from the parser of the command line.

Names of profiles, backends and faults are those that are known when the script is printed.
"""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import shtab

from conformance.backends.faults import catalogue
from conformance.backends.protocol import registered_backends
from conformance.core.errors import did_you_mean
from conformance.matrix.profile import profile_names


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


_FILES = {"data": shtab.FILE, "against": shtab.FILE}
_FOLDERS = dict.fromkeys(("out", "model", "resume"), shtab.DIRECTORY)


class PrintCompletion(argparse.Action):
    """The option ``--print-completion SHELL``, which prints the script and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *values: object) -> None:
        _, shell, _ = values
        print(script(parser, str(shell)))
        parser.exit()


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for ``bash`` or ``zsh``."""
    names = {"profile": profile_names(), "backend": registered_backends(), "faults": catalogue()}
    for action in _options(parser):
        if action.dest in names:
            words = " ".join(names[action.dest])
            action.complete = {"bash": f"_parity_{action.dest}", "zsh": f"({words})"}  # type: ignore[attr-defined]
        elif action.dest in _FILES | _FOLDERS:
            action.complete = (_FILES | _FOLDERS)[action.dest]  # type: ignore[attr-defined]
    functions = [f"_parity_{name}() {{ compgen -W '{' '.join(words)}' -- \"$1\"; }}" for name, words in names.items()]
    return shtab.complete(parser, shell=shell, preamble="\n".join(functions) if shell == "bash" else "")


def _options(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    """The options of the parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)
        else:
            yield action
