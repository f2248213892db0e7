"""Raises and formats errors about a user's input; each message says what to change.

``Parser`` reads a command line: it suggests the right spelling of an option, value or command that is nearly right.
Options are written with dashes (``--max-len``); underscores are accepted. No option may be abbreviated. An error is one
line, without the usage.
"""

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:  # the command line says what is wrong with its options without pydantic, whose import takes a while
    from pydantic import ConfigDict, ValidationError
    from pydantic_core import ErrorDetails

STRICT: "ConfigDict" = {"extra": "forbid"}
"""Configuration of every pydantic dataclass that is read from a file: an unknown key is an error, never ignored."""


class UsageError(ValueError):
    """Signals that the user asked for something impossible. The message says what to change."""


def explain(error: "ValidationError", *, source: str, what: str) -> UsageError:
    """Returns a UsageError that names every wrong field of ``source`` (a file or table), which should be a ``what``."""
    found = error.errors()
    lines = [f"  {'.'.join(map(str, e['loc'])) or '(whole)'}: {_message(e)}" for e in found if not _follows(e, found)]
    return UsageError(f"{source} is not a valid {what}:\n" + "\n".join(lines))


# Replaces pydantic's messages that use terms of Python, which the writer of a TOML file need not know.
_WORDS = {
    "unexpected_keyword_argument": "there is no such key",
    "tuple_type": "must be a list",
    "dataclass_type": "must be a table",
    "missing": "is missing",
    "missing_keyword_only_argument": "is missing",
}


def _message(error: "ErrorDetails") -> str:
    if error["type"] == "too_short":
        return "the list is empty; give at least one"
    words = _WORDS.get(error["type"], error["msg"].removeprefix("Value error, "))
    return words if words == "is missing" else f"{words} (got {shown(error['input'])})"


def _follows(error: "ErrorDetails", errors: "Sequence[ErrorDetails]") -> bool:
    """Tells whether a list is reported as too short only because its items are wrong, which ``errors`` also report."""
    loc = error["loc"]
    return error["type"] == "too_short" and any(e["loc"][: len(loc)] == loc != e["loc"] for e in errors)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ``did you mean 'a' or 'b'? `` with the known names close to ``name``; empty if no name is close."""
    near = difflib.get_close_matches(name, list(known), n=2)
    return f"did you mean {' or '.join(map(repr, near))}? " if near else ""


def shown(value: object) -> str:
    """Returns the repr of a value for a message, cut after 120 characters."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        return f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= 120 else f"{text[:120]}..."


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Writes control characters as escapes such as ``\\x1b``, so that text from a file cannot control a terminal.

    Line feeds and tabs stay. Marks that change the direction of writing are control characters, too.
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def limited(message: str) -> str:
    """Returns a message for the user, cut after 2500 characters: values from files and arguments may be long."""
    return message if len(message) <= 2500 else f"{message[:2500]}..."


def first_few(names: Sequence[object], *, most: int) -> str:
    """Lists the first names and counts the rest: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def one_line(error: BaseException) -> str:
    """Returns a library's error message in one line, cut after 300 characters; its type if the message is empty."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."


def lost_message(number: int, turn: Mapping[str, Any]) -> UsageError:
    """Returns the error for a message of a conversation that the chat template leaves out."""
    return UsageError(
        f"the chat template leaves out message {number}, of the role {turn['role']!r}, "
        f"{str(turn.get('content') or '').strip()[:40]!r}; correct the tokenizer's files, or leave the message out"
    )


def lost_calls(number: int) -> UsageError:
    """Returns the error for a message of which the chat template leaves out the calls of tools."""
    return UsageError(
        f"the chat template leaves out 'tool_calls' of message {number}; give the model's folder a template that "
        f"writes them, or write them into 'content'"
    )


def not_encoded(folder: object, place: str, error: BaseException) -> UsageError:
    """Returns the error for a sample that the chat template or the tokenizer of a folder cannot render or encode."""
    return UsageError(f"the tokenizer in {folder} cannot encode {place}: {one_line(error)}")


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
