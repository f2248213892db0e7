"""Defines the states of a cell, its verdict with the judged numbers, the verdicts of a run, and the texts of errors.

Verdicts, the terminal and all reports show errors in the same words. Does not import torch.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from conformance.numerics.comparison import ratio
from conformance.spec.observables import AGAINST_REBUILT, SHARE

State = Literal[
    "differs", "infrastructure", "not_run", "partly_observed", "expected_difference", "unsupported", "conforms"
]
RunVerdict = Literal["conforms", "partly_observed", "differs", "incomplete"]
NOT_STARTED = "the run ended before this cell"  # the reason of every planned cell until it runs
OTHER_CODE = "only earlier code of its backend ran; --resume runs it"
FAILED_BEFORE = "failed with earlier code of its backend; --resume with --rerun failed runs it"


@dataclass(frozen=True, kw_only=True)
class StateInfo:
    """Defines how reports and the terminal show a state, never by colour alone.

    name: in reports. symbol: in matrices. word: in the lines of the terminal. meaning: one explaining phrase.
    answered: whether the cell was judged.
    """

    name: str
    symbol: str
    word: str
    meaning: str
    answered: bool


STATES: dict[State, StateInfo] = {  # the most important states come first
    "differs": StateInfo(
        name="fail", symbol="✗", word="FAIL", meaning="a quantity is outside its tolerance", answered=True
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
        name="pass", symbol="✓", word="pass", meaning="every compared quantity is within its tolerance", answered=True
    ),
}
NO_ANSWER: tuple[State, ...] = ("infrastructure", "not_run")
FAILED: tuple[State, ...] = ("differs", "infrastructure")
ANSWERED = tuple(state for state, info in STATES.items() if info.answered)
NO_FAULT: tuple[State, ...] = ("conforms", "partly_observed", "expected_difference")
PASSES: tuple[RunVerdict, ...] = ("conforms", "partly_observed")


def named(verdict: RunVerdict) -> str:
    """Returns the word for the verdict of a run in reports and on the terminal."""
    return "incomplete" if verdict == "incomplete" else STATES[verdict].name


def depth(state: State | None) -> int:
    """Returns how much is known about a cell: 0 nothing, 1 that it is supported, 2 some stages, 3 all stages."""
    if state in (None, "unsupported"):
        return 0
    if state not in ANSWERED:
        return 1
    return 2 if state == "partly_observed" else 3


def overall(states: Iterable[State], *, complete: bool) -> RunVerdict:
    """Returns the verdict of a run. A cell that could not be judged makes the run incomplete.

    complete: whether the run ended normally and meets its minimum requirements.
    """
    found = set(states)
    if "differs" in found:
        return "differs"
    if found & set(NO_ANSWER) or not found & set(NO_FAULT) or not complete:
        return "incomplete"
    return "partly_observed" if "partly_observed" in found else "conforms"


MANY, PERCENT = 10, 1e-4  # relative errors from which on an error is written as a factor, and as percent


class Judged(Protocol):
    """Has an error and its bound."""

    @property
    def observed(self) -> float: ...

    @property
    def allowed(self) -> float: ...


def number(value: float | None) -> str:
    """Formats a number with three significant digits: ``0``, ``1.2e-7``, ``0.0153``, ``NaN``."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{float(f'{value:.3g}'):g}" if abs(value) < 1000 else f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def size_off(error: float) -> str:
    """Formats a relative error: ``88 % off``, ``1.2e-7 off``, ``61,000 times its size off``."""
    if math.isnan(error):
        return "not a number"
    if math.isinf(error):
        return "beyond any tolerance"
    if error >= MANY:
        return f"{float(f'{error:.2g}'):,.0f} times its size off"
    return f"{float(f'{100 * error:.2g}'):g} % off" if error >= PERCENT else f"{number(error)} off"


def off(quantity: Judged) -> str:
    """Formats an error and its bound: ``88 % off, allowed 1e-11``."""
    allowed = number(quantity.allowed) if quantity.allowed > 0 else "nothing"
    return f"{size_off(quantity.observed)}, allowed {allowed}"


def margin(ratio: float) -> str:
    """Formats observed / allowed as a margin in digits, log10(allowed / observed): ``+2.4`` within the tolerance,
    ``-11`` outside of it, ``=`` without an error."""
    if ratio == 0:
        return "="
    digits = abs(math.log10(ratio)) if math.isfinite(ratio) else math.inf
    size = "∞" if digits == math.inf else f"{digits:.1f}" if digits < 9.95 else f"{digits:.0f}"
    return f"{'+' if ratio <= 1 else '-'}{size}"


BINS = 48  # maximum number of bins of per-token errors
NOT_SEEN = "errors that transformers itself makes are not seen"  # with a second-class oracle


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """Holds one judged number: its error against the reference, and the tolerance.

    stage: the stage in causal order, such as gradients. tensor: the name of the tensor or number. step: the optimizer
    step; -1 for the weights as loaded. observed: the relative error. allowed: the tolerance.
    max_abs, where: the largest absolute difference and its position in the tensor, if they are known.
    hint: the likely cause of a finding; may be empty.
    """

    stage: str
    tensor: str
    step: int
    observed: float
    allowed: float
    max_abs: float | None = None
    where: str = ""
    hint: str = ""

    @property
    def ratio(self) -> float:
        """Returns observed / allowed; infinite if ``observed`` is NaN, or if it is above a tolerance of 0."""
        return ratio(self.observed, self.allowed)

    @property
    def is_error(self) -> bool:
        """Whether ``observed`` is an error against the oracle, a replica or the previous phase; neither one against
        rebuilt numbers, whose bound is a few units in the last place, nor a share of elements."""
        return not self.tensor.endswith(AGAINST_REBUILT) and SHARE not in self.tensor

    @property
    def urgency(self) -> tuple[bool, bool, float]:
        """Sorts quantities by what they say about a cell, the most urgent last: those outside of their
        tolerance, then errors (``is_error``), then by ratio."""
        ratio = self.ratio
        return not ratio <= 1, self.is_error, ratio

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.stage}, step {self.step}: {self.tensor} is {off(self)}{hint}"


BARS = 24  # of the distribution of a number per token


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Holds the distribution of a number per token, of the cell and of the reference, in BARS bars of equal width.

    low, high: the ends of the bars. observed, reference: the number of tokens in each bar.
    quantiles: the median, the 99th percentile and the largest of the absolute differences of the tokens.
    """

    low: float
    high: float
    observed: tuple[int, ...]
    reference: tuple[int, ...]
    quantiles: tuple[float, float, float]

    def __post_init__(self) -> None:
        if not len(self.observed) == len(self.reference) == BARS or not self.low < self.high < math.inf:
            raise ValueError(f"a distribution from {self.low} to {self.high} without {BARS} bars")


@dataclass(frozen=True, kw_only=True)
class TokenErrors:
    """Holds the per-token errors of a quantity with one number per token, over the tokens of a step, in bins.

    stage, tensor, step: the quantity. tokens: number of tokens.
    starts: for each bin, the row and the target index of its first token.
    errors: the largest error of each bin. The largest finite one equals the error of the quantity; NaN and infinity
        stand for numbers that are not finite.
    max_abs, where: the largest absolute difference and its token.
    spread: the distribution of the numbers; None if one is not finite, or if an earlier version judged.
    """

    stage: str
    tensor: str
    step: int
    tokens: int
    starts: tuple[tuple[int, int], ...]
    errors: tuple[float, ...]
    max_abs: float
    where: str
    spread: Spread | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.errors) == len(self.starts) <= min(BINS, self.tokens):
            raise ValueError(f"{len(self.errors)} errors of {len(self.starts)} bins of {self.tokens} tokens")
        if any(error < 0 for error in self.errors):
            raise ValueError("an error is negative")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Holds the result for one cell.

    state: one of the states above. reason: a sentence for the user; for a cell that differs, the first finding.
    quantities: everything that was compared, sorted by step and then in causal order.
    strips: the per-token errors of some of these quantities, in the same order; empty if an earlier version judged.
    second_class: the implementation that was the reference, if the oracle itself does not know the model; else empty.
    conventions: the declared conventions of the backend that change the numbers of this cell, and that it shows.
    code: the code of the library that ran, by its record, where the library chooses code by precision.
    """

    state: State
    reason: str
    quantities: tuple[Quantity, ...] = ()
    strips: tuple[TokenErrors, ...] = ()
    second_class: str = ""
    conventions: tuple[str, ...] = ()
    code: str = ""

    @property
    def findings(self) -> tuple[Quantity, ...]:
        """Returns the quantities that exceed their tolerance."""
        return tuple(q for q in self.quantities if not q.ratio <= 1)

    @property
    def first_stage(self) -> str:
        """Returns the stage of the first finding; empty if there is none."""
        return self.findings[0].stage if self.findings else ""

    @property
    def worst(self) -> dict[str, Quantity]:
        """Returns the most urgent quantity of each compared stage, in the order of first appearance."""
        by_stage: dict[str, list[Quantity]] = {}
        for q in self.quantities:
            by_stage.setdefault(q.stage, []).append(q)
        return {stage: max(found, key=lambda q: q.urgency) for stage, found in by_stage.items()}

    @property
    def closest(self) -> Quantity | None:
        """Returns the quantity that is closest to its tolerance, or furthest outside; None without quantities."""
        return max(self.quantities, key=lambda q: q.urgency, default=None)

    @property
    def errors(self) -> dict[str, float]:
        """Returns the largest relative error by stage: against the oracle, replicas, and the previous phase."""
        errors: dict[str, float] = {}
        for q in self.quantities:
            if q.is_error:
                largest = errors.get(q.stage, 0.0)
                # NaN is larger than any number.
                errors[q.stage] = q.observed if math.isnan(q.observed) or q.observed > largest else largest
        return errors
