"""States of a cell and the verdict of a run: the one place that says what counts as a pass (claim 9)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["differs", "infrastructure", "not_run", "expected_difference", "unsupported", "conforms"]
RunVerdict = Literal["conforms", "differs", "incomplete"]


@dataclass(frozen=True, kw_only=True)
class StateInfo:
    """How a state is called and drawn, never by colour alone. ``answered``: the cell was judged, whatever came out."""

    name: str
    symbol: str
    word: str
    meaning: str
    answered: bool


# In the order in which a reader wants to see them.
STATES: dict[State, StateInfo] = {
    "differs": StateInfo(
        name="differs", symbol="✗", word="DIFFERS", meaning="a quantity is outside its tolerance", answered=True
    ),
    "infrastructure": StateInfo(
        name="infrastructure failure",
        symbol="!",
        word="INFRASTRUCTURE",
        meaning="ended without a complete record; nothing to judge",
        answered=False,
    ),
    "not_run": StateInfo(
        name="not run", symbol="○", word="not run", meaning="planned, but not started", answered=False
    ),
    "expected_difference": StateInfo(
        name="expected difference", symbol="≈", word="expected", meaning="differs, by a known bug", answered=True
    ),
    "unsupported": StateInfo(
        name="unsupported",
        symbol="\N{EN DASH}",
        word="unsupported",
        meaning="the backend does not offer this",
        answered=False,
    ),
    "conforms": StateInfo(
        name="conforms", symbol="✓", word="ok", meaning="every compared quantity is within its tolerance", answered=True
    ),
}
NO_ANSWER: tuple[State, ...] = ("infrastructure", "not_run")


def overall(states: Iterable[State], *, finished: bool) -> RunVerdict:
    """One word for all cells of a run; what could not be judged makes it incomplete, never a pass."""
    found = set(states)
    if "differs" in found:
        return "differs"
    judged = found & {"conforms", "expected_difference"}
    return "incomplete" if found & set(NO_ANSWER) or not judged or not finished else "conforms"
