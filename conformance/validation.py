"""Validation: errors about a user's input, with messages that say what to change."""

from pydantic import ConfigDict, ValidationError

STRICT = ConfigDict(extra="forbid")
"""Configuration of every pydantic dataclass that is read from a file: an unknown key is an error, never ignored."""


class UsageError(ValueError):
    """The user asked for something that cannot be done. The message says what to change."""


def explain(error: ValidationError, *, source: str, what: str) -> UsageError:
    """A UsageError that names every wrong field of ``source`` (a file or table), which should be a valid ``what``."""
    lines = [
        f"  {'.'.join(map(str, e['loc'])) or '(whole)'}: {e['msg']} (got {shown(e['input'])})" for e in error.errors()
    ]
    return UsageError(f"{source} is not a valid {what}:\n" + "\n".join(lines))


def shown(value: object) -> str:
    """The repr of a value for a message, cut after 120 characters."""
    try:
        text = repr(value)
    except ValueError:  # a number of thousands of digits
        return f"a {type(value).__name__} that is too long to show"
    return text if len(text) <= 120 else f"{text[:120]}..."


def one_line(error: BaseException) -> str:
    """The message of a library's error in one line, cut after 300 characters; its type if the message is empty."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."
