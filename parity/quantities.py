"""Quantities: what a comparison of two records consists of."""

from dataclasses import dataclass

from parity.files import Run


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """How far apart one thing is in two records A and B.

    observed, allowed: relative. norms: of A and of B. scale: B is so many times A, where it is that and nothing else.
    rows: which rows of a parameter differ in norm, where these are few. said: the difference in words, if it is no
    number.
    """

    what: str
    observed: float
    allowed: float
    norms: tuple[float, float] | None = None
    scale: float | None = None
    rows: str = ""
    said: str = ""

    @property
    def differs(self) -> bool:
        return not self.observed <= self.allowed  # not a number is a difference


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The quantities of one stage, in the order of the model; ``step`` is None before the first.

    undetermined: what is not among the quantities because rounding decides it.
    """

    name: str
    step: int | None
    quantities: tuple[Quantity, ...]
    undetermined: tuple[str, ...] = ()

    @property
    def different(self) -> tuple[Quantity, ...]:
        """What differs, the worst first."""
        return tuple(sorted((q for q in self.quantities if q.differs), key=lambda q: -q.observed))

    @property
    def worst(self) -> Quantity | None:
        return max(self.quantities, key=lambda q: q.observed / q.allowed, default=None)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two records, A the one that the other is held against; ``stages`` up to the first that differs.

    because: where the thresholds are from.
    """

    a: Run
    b: Run
    threshold: float
    loss_threshold: float
    because: str
    stages: tuple[Stage, ...]

    @property
    def parted(self) -> Stage | None:
        """Where they part; None where they agree."""
        return next((stage for stage in self.stages if stage.different), None)
