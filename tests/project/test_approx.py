"""pytest.approx takes the larger of ``rel`` and ``abs``, and ``abs`` is 1e-12 by default: a test of the last digits
needs ``abs=0``, or it cannot fail."""

import ast
from pathlib import Path

import pytest

from conformance.core.host import CHECKOUT

FINEST = 1e-10  # numbers are rarely below 0.01, for which the default is 1e-10 of them


def without_abs(text: str) -> list[int]:
    """Returns the lines of the calls of approx with a finer ``rel`` and without ``abs``."""
    found = []
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if ast.unparse(call.func).endswith("approx") and "rel" in given and "abs" not in given:
            rel = given["rel"]
            if isinstance(rel, ast.Constant) and isinstance(rel.value, float) and rel.value <= FINEST:
                found.append(call.lineno)
    return found


@pytest.mark.parametrize(
    ("call", "lines"),
    [
        ("pytest.approx(1, rel=1e-15)", [1]),
        ("x == approx(y,\n rel=1e-13)", [1]),
        ("approx(1, rel=1e-15, abs=0)", []),
        ("approx(1, rel=0.01)", []),
    ],
)
def test_fine_tolerance_without_abs_is_found(call: str, lines: list[int]) -> None:
    assert without_abs(call) == lines


def test_fine_tolerances_are_not_widened_by_the_default() -> None:
    found = {
        str(file): lines for file in Path(CHECKOUT, "tests").rglob("*.py") if (lines := without_abs(file.read_text()))
    }
    assert not found, "give abs=0 in these lines"
