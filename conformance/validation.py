"""Validation: what is wrong with a user's input, in words that say what to change."""

from pydantic import ConfigDict, ValidationError

STRICT = ConfigDict(extra="forbid")
"""Configuration of every pydantic dataclass that is read from a file: an unknown key is an error, never ignored."""


class UsageError(ValueError):
    """The user asked for something that cannot be done; the message says what to change."""


def explain(error: ValidationError, *, source: str, what: str) -> UsageError:
    """One UsageError that names every wrong field of ``source``, which should have been a valid ``what``."""
    lines = [f"  {'.'.join(map(str, e['loc'])) or '(whole)'}: {e['msg']} (got {e['input']!r})" for e in error.errors()]
    return UsageError(f"{source} is not a valid {what}:\n" + "\n".join(lines))
