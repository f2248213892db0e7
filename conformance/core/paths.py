"""Locates the cache and the fixtures: next to ``conformance`` in a checkout, inside it in an installed wheel."""

import os
from pathlib import Path

from conformance.core.errors import UsageError, did_you_mean, one_line, shown

_PACKAGE = Path(__file__).resolve().parent.parent
CHECKOUT = _PACKAGE.parent  # for an installed wheel, the folder that holds the packages
FIXTURES = _PACKAGE / "_fixtures" if (_PACKAGE / "_fixtures").is_dir() else CHECKOUT / "fixtures"


def resolve(path: str) -> Path:
    """Returns the absolute path for a user's path, which is relative to the working directory or to the fixtures.

    Raises UsageError if neither exists.
    """
    try:
        for candidate in (Path(path).expanduser(), FIXTURES / path):
            if candidate.exists():
                return candidate.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, an unknown user, a name that is too long
        raise UsageError(f"{shown(path)} cannot be used as a path: {one_line(error)}") from None
    known = [f"{folder}/{file.name}" for folder in ("models", "data") for file in (FIXTURES / folder).glob("*")]
    where = f"neither here ({Path.cwd()}) nor among the fixtures ({FIXTURES})"
    raise UsageError(f"there is no {shown(path)}, {where}; {did_you_mean(path, known)}".rstrip("; "))


def cache_folder() -> Path:
    """Returns the folder in which records are kept across runs."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "backend-parity"
    return Path(os.environ.get("PARITY_CACHE") or default)
