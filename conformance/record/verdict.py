"""Verdict: what is said of one cell, and the numbers that it is said by. Without torch."""

import math
from dataclasses import dataclass

from conformance.record.states import State

BINS = 48  # of a strip, at most


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One judged number: how far it is from the reference, and how far it may be.

    observed: the relative error. allowed: its bound. tensor: what was compared, within its stage. step: -1 is as
    loaded.
    max_abs, where: the largest absolute difference and its place, where they are known. hint: a guess at the cause, of
    a finding.
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
        """Observed / allowed; infinite for NaN, and for any error where none is allowed."""
        if self.observed == 0:
            return 0.0
        if math.isnan(self.observed) or not self.allowed > 0:
            return math.inf
        return self.observed / self.allowed

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        size = f"{self.observed:.2e} off, allowed {self.allowed:.2e}"
        return f"{self.stage}, step {self.step}: {self.tensor} is {size}{hint}"


@dataclass(frozen=True, kw_only=True)
class Strip:
    """The errors of all tokens of a step, of one quantity that has a number per token (judge/strips.py).

    tokens: how many there are. starts: of each bin, row and target of its first token. errors: the largest of each bin;
    the worst finite one is the error of the quantity, and what is not finite is NaN or infinite. max_abs, where: the
    largest absolute difference, and its token.
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
    """What is said of one cell. ``quantities``: all that was compared, by step and then in causal order. ``strips``: of
    some of them the errors by token, in the same order; none of a cell that an earlier version judged.
    """

    state: State
    reason: str
    quantities: tuple[Quantity, ...] = ()
    strips: tuple[Strip, ...] = ()

    @property
    def findings(self) -> tuple[Quantity, ...]:
        """The quantities outside their tolerance."""
        return tuple(q for q in self.quantities if not q.ratio <= 1)

    @property
    def first_stage(self) -> str:
        """Stage of the first finding; empty if there is none."""
        return self.findings[0].stage if self.findings else ""

    @property
    def worst(self) -> dict[str, Quantity]:
        """The quantity with the highest ratio of each stage that was compared, in the order of their appearance."""
        worst: dict[str, Quantity] = {}
        for q in self.quantities:
            if q.stage not in worst or q.ratio > worst[q.stage].ratio:
                worst[q.stage] = q
        return worst
