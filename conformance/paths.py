"""Where the built-in fixtures lie: beside the packages in a checkout, inside ``conformance`` in an installed wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
FIXTURES = _PACKAGE / "_fixtures" if (_PACKAGE / "_fixtures").is_dir() else _PACKAGE.parent / "fixtures"


def resolve(path: str) -> Path:
    """A path given by the user, relative to the working directory or else to the fixtures.

    Raises ValueError when neither exists.
    """
    for candidate in (Path(path).expanduser(), FIXTURES / path):
        if candidate.exists():
            return candidate.resolve()
    raise ValueError(f"there is no {path!r}, neither here ({Path.cwd()}) nor among the fixtures ({FIXTURES})")
