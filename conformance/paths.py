"""Where the built-in fixtures lie: beside the packages in a checkout, inside ``conformance`` in an installed wheel."""

from pathlib import Path

from conformance.validation import UsageError, one_line, shown

_PACKAGE = Path(__file__).resolve().parent
FIXTURES = _PACKAGE / "_fixtures" if (_PACKAGE / "_fixtures").is_dir() else _PACKAGE.parent / "fixtures"


def resolve(path: str) -> Path:
    """A path given by the user, relative to the working directory or else to the fixtures.

    Raises UsageError when neither exists.
    """
    try:
        for candidate in (Path(path).expanduser(), FIXTURES / path):
            if candidate.exists():
                return candidate.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a link to itself, no such user, a name that is too long
        raise UsageError(f"{shown(path)} cannot be used as a path: {one_line(error)}") from None
    raise UsageError(f"there is no {shown(path)}, neither here ({Path.cwd()}) nor among the fixtures ({FIXTURES})")
