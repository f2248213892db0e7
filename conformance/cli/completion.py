"""Generates the script for completion of `parity` in a shell, with shtab.

The script contains the names of profiles, backends and faults that are known when it is printed.
"""

import argparse
from collections.abc import Iterable

import shtab

from conformance.backends.faults import catalogue
from conformance.backends.protocol import registered_backends
from conformance.matrix.profile import profile_names

_FILES = {"data": shtab.FILE, "against": shtab.FILE}
_FOLDERS = dict.fromkeys(("out", "model", "resume"), shtab.DIRECTORY)


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Returns the script for ``bash`` or ``zsh``."""
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
    """Yields the options of the parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)
        else:
            yield action
