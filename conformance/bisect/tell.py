"""Tell: what a bisection has found, in words."""

import re
from collections.abc import Sequence

from conformance.bisect.find import Bisected, First
from conformance.bisect.reference import Reference
from conformance.judge.tolerance import EXACT

MOST = 4  # tokens or parameters that are listed one by one


def told(found: Bisected, reference: Reference, *, step: int) -> list[str]:
    """The lines of the terminal, the answer first."""
    forward, backward = found.compared
    lines = [f"step {step}: {_answer(found)}"]
    first = found.forward or found.backward
    if first:
        lines += _of_value(first, reference)
    if not found.forward:
        lines.append(f"forward: all {forward} inputs and outputs of modules are right, to {EXACT:g}")
    if found.forward:
        lines.append("backward: not told, because wrong gradients follow from the wrong forward pass")
    elif not found.backward:
        lines.append(f"backward: all {backward} gradients of inputs and outputs are right, to {EXACT:g}")
    if found.parameters and not first:
        lines.append(_of_parameters(found))
    if found.unseen:
        kinds = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in found.unseen)
        lines.append(f"not shown by the backend: {_listed(list(kinds))}")
    return lines


def _answer(found: Bisected) -> str:
    first = found.forward or found.backward
    if first is None:
        if found.unknown:
            return (
                "not told: what the backend shows is right, but it does not show all; its traced() has to name the rest"
            )
        if found.where == "gradients of parameters":
            return (
                "the model is right, and gradients of parameters are wrong: look at how they are formed, added up over "
                "micro-batches or reduced over ranks"
            )
        if found.parameters:
            return (
                "outside the model: all gradients of parameters are wrong by one factor, as of a denominator of the "
                "loss or an average over ranks"
            )
        return (
            "outside the model: forward pass, backward pass and gradients are right. Look at what comes after them: "
            "norm, clipping, optimizer, schedule"
        )
    if first.inside:
        return f"first wrong module, {first.direction}: {first.module}"
    if first.before is None:
        if first.direction == "forward":
            return f"outside the model: the tokens that go into {first.module} are wrong"
        return f"outside the model: the gradient that the loss gives to {first.module} is wrong"
    return f"first wrong value, {first.direction}: between {first.before[0]} and {first.module}"


def _of_value(first: First, reference: Reference) -> list[str]:
    wrong, (name, side) = first.wrong, first.wrong.key
    off = f"is {_off(wrong.error)} (allowed {EXACT:g})" if wrong.ranks else "is not there"
    lines = [f"  the {side} of {name} {off}"]
    if first.before:
        before, of = first.before
        lines.append(f"  everything before it is right, the last of it the {of} of {before}")
        lines.append(f"  so the defect is {_place(first)}")
        if not first.inside and first.given_by != wrong.ranks:
            lines.append(f"  {_ranks(first.given_by)} gave that, and {_ranks(wrong.hold)} went on from it")
    if wrong.ranks:
        lines.append(f"  ranks: wrong on {_listed(wrong.ranks)} of {_listed(wrong.hold)}")
    if wrong.tokens:
        count, places = len(wrong.tokens), [reference.places[token] for token in wrong.tokens]
        rows = {row for row, _ in places}
        some = ", ".join(f"row {row} token {at}" for row, at in places[:MOST])
        more = f" and {count - MOST} more" if count > MOST else ""
        lines.append(f"  tokens: {count} of {int(reference.known.sum())}, in {len(rows)} rows: {some}{more}")
        low, high, width = wrong.features
        lines.append(f"  features: {low} to {high} of {width}")
    if wrong.silent:
        lines.append(f"  {_ranks(wrong.silent)} should have it and did not: nothing came back to it")
    if wrong.missing:
        lines.append(f"  {wrong.missing} tokens are on no rank")
    if wrong.would_be_right:
        lines.append(f"  {wrong.would_be_right}")
    return lines


def _place(first: First) -> str:
    if first.inside:
        return f"inside of {first.module}"
    return "between the two: a residual, an exchange between ranks, or how a tensor is handed on"


def _of_parameters(found: Bisected) -> str:
    worst = sorted(found.parameters, key=lambda name: -found.parameters[name])
    some = ", ".join(f"{name} ({_off(found.parameters[name])})" for name in worst[:MOST])
    more = f" and {len(worst) - MOST} more" if len(worst) > MOST else ""
    text = f"gradients of parameters: {len(worst)} of {found.gradients} are wrong: {some}{more}"
    return text if found.factor is None else f"{text}; all are {found.factor:.10g} times what they should be"


def _off(error: float) -> str:
    return f"{error:.1e} off"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(str, names))
