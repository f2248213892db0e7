"""States: the states of a cell, the verdicts of a run, and which of them count as a pass (claim 9)."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal[
    "differs", "infrastructure", "not_run", "partly_observed", "expected_difference", "unsupported", "conforms"
]
RunVerdict = Literal["conforms", "partly_observed", "differs", "incomplete"]
NOT_STARTED = "the run ended before this cell"  # the reason of every planned cell until it is run


@dataclass(frozen=True, kw_only=True)
class StateInfo:
    """How reports and the terminal show a state, never by colour alone.

    name: in reports. symbol: in matrices. word: in the lines of the terminal. meaning: one explaining phrase.
    answered: whether the cell was judged.
    """

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
    "partly_observed": StateInfo(
        name="partly observed",
        symbol="◐",
        word="partly",
        meaning="agrees in all that it shows, but does not show every stage",
        answered=True,
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
FAILED: tuple[State, ...] = ("differs", "infrastructure")
ANSWERED = tuple(state for state, info in STATES.items() if info.answered)
NO_FAULT: tuple[State, ...] = ("conforms", "partly_observed", "expected_difference")
PASSES: tuple[RunVerdict, ...] = ("conforms", "partly_observed")


def depth(state: State | None) -> int:
    """How much is known about a cell: 0 nothing, 1 that it is claimed, 2 some stages, 3 all stages."""
    if state in (None, "unsupported"):
        return 0
    if state not in ANSWERED:
        return 1
    return 2 if state == "partly_observed" else 3


def overall(states: Iterable[State], *, complete: bool) -> RunVerdict:
    """The verdict of a run from the states of its cells. A cell that could not be judged makes the run incomplete.

    ``complete``: the run came to its end and judged as much as its floor demands.
    """
    found = set(states)
    if "differs" in found:
        return "differs"
    if found & set(NO_ANSWER) or not found & set(NO_FAULT) or not complete:
        return "incomplete"
    return "partly_observed" if "partly_observed" in found else "conforms"
