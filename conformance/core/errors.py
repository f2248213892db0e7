"""Raises and formats errors about a user's input; each message says what to change."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

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
