"""Describes the result of a bisection in words, for the terminal and all reports. Does not import torch."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conformance.core.errors import first_few
from conformance.judge.tolerance import EXACT, largest_rounding
from conformance.numerics.comparison import times
from conformance.results.bisection import (
    OUTSIDE,
    PARAMETERS,
    UNKNOWN,
    Bisected,
    Bisection,
    Collectives,
    First,
    Issued,
)
from conformance.results.trust import CheckedCell
from conformance.results.verdict import size_off
from conformance.spec.precision import PRECISIONS, PrecisionName

MOST = 4  # most parameters that are listed
ALLOWED = f"{EXACT:g}"
POLICY = "policy"


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A bisection in words. answer: one line. facts: pairs of a label and a text."""

    answer: str
    facts: tuple[tuple[str, str], ...]

    @property
    def lines(self) -> list[str]:
        """Returns the lines for the terminal, the answer first."""
        return [self.answer, *(f"  {word}: {text}" for word, text in self.facts)]


def describe(bisection: Bisection) -> Explanation:
    """Describes the bisection of a cell."""
    is_twin = bisection.traced != bisection.cell
    if not bisection.models:
        return Explanation(answer=f"not bisected: {bisection.why_not}", facts=())
    main, *rest = bisection.models
    facts = (
        [("traced", f"{bisection.traced}, because noise hides what is right in any other precision")] if is_twin else []
    )
    parts = bisection.traced.split("/")
    precision: PrecisionName = next((name for name in PRECISIONS if name in parts), "exact")
    allowed = f"{largest_rounding(precision):g}"
    if precision != "exact":
        agrees = f"the exact tier agrees with the reference, so the defect is in code that only {precision} runs"
        facts.append(("traced", f"{precision}: {agrees}; errors up to {allowed} count as rounding"))
    facts += facts_of(main, bisection.stage, allowed)
    if bisection.collectives and main.first:
        facts += _of_collectives(bisection.collectives, main.first)
    facts += [(f"also {one.model}", answer_of(one, bisection.stage)) for one in rest if not one.is_right]
    facts += [(one.model, "all that was compared is right") for one in rest if one.is_right and not main.is_right]
    of = "" if main.model == POLICY else f" of the {main.model}"
    return Explanation(answer=f"step {bisection.step}: {answer_of(main, bisection.stage, of=of)}", facts=tuple(facts))


def answers(cells: Iterable[CheckedCell]) -> list[str]:
    """Returns a line for each cell of a run that has been bisected."""
    return [f"bisect {one.entry.cell}: {describe(one.bisection).answer}" for one in cells if one.bisection]


def facts_of(found: Bisected, stage: str, allowed: str = ALLOWED) -> list[tuple[str, str]]:
    """Returns the facts about one model. allowed: the bound of relative errors, as text."""
    forward, backward = found.compared
    first = found.first
    facts: list[tuple[str, str]] = [("first stage that differs", stage)] if found.where == OUTSIDE and stage else []
    if first:
        facts += _of_value(first, allowed)
    if not found.forward:
        facts.append(("forward", f"all {forward} inputs and outputs of modules are right, to {allowed}"))
    if found.forward:
        facts.append(("backward", "not compared, because wrong gradients follow from the wrong forward pass"))
    elif not found.backward:
        facts.append(("backward", f"all {backward} gradients of inputs and outputs are right, to {allowed}"))
    if found.parameters and not first:
        facts.append(("gradients of parameters", _of_parameters(found)))
    if found.unseen:
        kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in found.unseen)
        facts.append(("not shown by the backend", _listed(list(kinds))))
    return facts


def answer_of(found: Bisected, stage: str, *, of: str = "") -> str:
    """Returns the place of the defect in one line. of: names the model, if a cell trains several."""
    first, where = found.first, found.where
    if where == UNKNOWN:
        return "unknown: all shown modules are right, but the backend does not show all; traced() has to name the rest"
    if where == PARAMETERS:
        return (
            f"the model{of} is right, and gradients of parameters are wrong: look at how they are formed, added up "
            "over micro-batches or reduced over ranks"
        )
    if where != OUTSIDE:
        assert first
        kind = "module" if first.inside else "value"
        return f"first wrong {kind}{of}, {first.direction}: {where}"
    return f"{OUTSIDE}{of}: {_outside(found, stage)}"


def _outside(found: Bisected, stage: str) -> str:
    if first := found.first:
        if first.direction == "forward":
            return f"the tokens that go into {first.module} are wrong"
        return f"the gradient that the loss gives to {first.module} is wrong"
    if found.parameters:
        return (
            "all gradients of parameters are wrong by one factor, as of a denominator of the loss or an average over "
            "ranks"
        )
    if stage.endswith("gradients"):
        return (
            "no gradient of a parameter is wrong in the run that was traced, although the record of the cell has one: "
            "a race, or an error too small for the norm of a tensor"
        )
    return (
        f"forward pass, backward pass and gradients are right, and {stage} differs first. Look at the code "
        "around the model: data, rollout, loss and advantages, or norm, clipping, optimizer and schedule"
    )


def _of_value(first: First, allowed: str) -> list[tuple[str, str]]:
    wrong, (name, side) = first.wrong, first.wrong.key
    off = f"is {size_off(wrong.error)}, allowed {allowed}" if wrong.ranks else "is missing"
    facts = [("wrong", f"the {side} of {name} {off}")]
    if first.before:
        before, of = first.before
        text = f"everything up to the {of} of {before}; so the defect is {_place(first)}"
        facts.append(("right", text))
        if not first.inside and first.given_by != wrong.ranks:
            facts.append(("exchange", f"from {name_ranks(first.given_by)} to {name_ranks(wrong.hold)}"))
    if wrong.ranks:
        facts.append(("ranks", f"wrong on {_listed(wrong.ranks)} of {_listed(wrong.hold)}"))
    if wrong.tokens:
        some = ", ".join(f"row {row} token {at}" for row, at in wrong.places)
        more = wrong.tokens - len(wrong.places)
        rest = f" and {more} more" if more else ""
        facts.append(("tokens", f"{wrong.tokens} of {wrong.compared}, in {wrong.rows} rows: {some}{rest}"))
        low, high, width = wrong.features
        facts.append(("features", f"{low} to {high} of {width}"))
    if wrong.silent:
        facts.append(("silent", f"no gradient came back on {name_ranks(wrong.silent)}"))
    if wrong.missing:
        facts.append(("missing", f"{wrong.missing} tokens are on no rank"))
    if wrong.would_be_right:
        facts.append(("what it is", wrong.would_be_right))
    return facts


def _place(first: First) -> str:
    if first.inside:
        return f"inside of {first.module}"
    return "between the two: a residual, an exchange between ranks, or the way a tensor is passed on"


def _of_parameters(found: Bisected) -> str:
    worst = sorted(found.parameters, key=lambda name: -found.parameters[name])
    some = first_few([f"{name} ({size_off(found.parameters[name])})" for name in worst], most=MOST)
    text = f"{len(worst)} of {found.gradients} are wrong: {some}"
    return text if found.factor is None else f"{text}; all are {times(found.factor, digits=10)}"


def _of_collectives(collectives: Collectives, first: First) -> list[tuple[str, str]]:
    facts = [("collectives", f"there, {first.direction}: {issued(collectives.issued)}")]
    if not collectives.conforming:
        return [*facts, ("conforming", "no other layout of this group to compare the collectives with")]
    return [*facts, ("conforming", f"{collectives.conforming}, there: {issued(collectives.there)}")]


def issued(found: Sequence[Issued]) -> str:
    """Lists collectives in one line."""
    return "; ".join(
        f"{one.times} {one.kind} of {one.size} ranks, {one.dtype}, {one.elements} elements, on {name_ranks(one.ranks)}"
        for one in found
    ) or ("none")


def name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(str, names))
