"""Verdict: the result for one cell, and the judged numbers behind it. Without torch."""

import math
from dataclasses import dataclass

from conformance.observable import AGAINST_REBUILT
from conformance.record.said import off
from conformance.record.states import State

BINS = 48  # most bins of a strip
NOT_SEEN = "errors that transformers itself makes are not seen"  # by a second-class oracle


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """One judged number: its error against the reference, and the bound of this error.

    stage, tensor: what was compared; ``tensor`` is the name of a tensor or of a number. step: -1 means as loaded.
    observed: the relative error. allowed: its bound.
    max_abs, where: the largest absolute difference and its position in the tensor, if they are known.
    hint: for a finding, a guess at the cause; may be empty.
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
        """Observed / allowed; infinite if ``observed`` is NaN, or if there is an error and none is allowed."""
        if self.observed == 0:
            return 0.0
        if math.isnan(self.observed) or not self.allowed > 0:
            return math.inf
        return self.observed / self.allowed

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.stage}, step {self.step}: {self.tensor} is {off(self)}{hint}"


@dataclass(frozen=True, kw_only=True)
class Strip:
    """The errors of a quantity with one number per token, over the tokens of a step, in bins (judge/strips.py).

    tokens: number of tokens. starts: for each bin, the row and the target index of its first token.
    errors: the largest error of each bin. The largest finite one equals the error of the quantity; NaN and infinity
        stand for numbers that are not finite.
    max_abs, where: the largest absolute difference, and its token.
    """

    stage: str
    tensor: str
    step: int
    tokens: int
    starts: tuple[tuple[int, int], ...]
    errors: tuple[float, ...]
    max_abs: float
    where: str

    def __post_init__(self) -> None:
        if not 0 < len(self.errors) == len(self.starts) <= min(BINS, self.tokens):
            raise ValueError(f"{len(self.errors)} errors of {len(self.starts)} bins of {self.tokens} tokens")
        if any(error < 0 for error in self.errors):
            raise ValueError("an error is negative")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result for one cell.

    quantities: everything that was compared, sorted by step and then in causal order.
    strips: the errors by token of some of these quantities, in the same order; empty if an earlier version judged.
    second_class: whose implementation was the reference, if the oracle's own does not know the model; else empty.
    """

    state: State
    reason: str
    quantities: tuple[Quantity, ...] = ()
    strips: tuple[Strip, ...] = ()
    second_class: str = ""

    @property
    def findings(self) -> tuple[Quantity, ...]:
        """The quantities that exceed their tolerance."""
        return tuple(q for q in self.quantities if not q.ratio <= 1)

    @property
    def first_stage(self) -> str:
        """The stage of the first finding; empty if there is none."""
        return self.findings[0].stage if self.findings else ""

    @property
    def worst(self) -> dict[str, Quantity]:
        """For each stage that was compared, the quantity with the highest ratio, in the order of first appearance."""
        worst: dict[str, Quantity] = {}
        for q in self.quantities:
            if q.stage not in worst or q.ratio > worst[q.stage].ratio:
                worst[q.stage] = q
        return worst

    @property
    def errors(self) -> dict[str, float]:
        """For each stage, the largest relative error of all that was compared: with the oracle and, where there are
        any, with replicas and with the leg before. What is compared with rebuilt numbers (AGAINST_REBUILT) is left
        out, because such an error is relative to something else."""
        errors: dict[str, float] = {}
        for q in self.quantities:
            if not q.tensor.endswith(AGAINST_REBUILT):
                errors[q.stage] = _larger(errors.get(q.stage, 0.0), q.observed)
        return errors


def _larger(a: float, b: float) -> float:
    """The larger of two errors; NaN is larger than any."""
    return b if math.isnan(b) or b > a else a
