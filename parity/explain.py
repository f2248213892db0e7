"""Describes a comparison of two records: where they differ, likely causes, and what could not be compared.

The description is text for a person, or JSON values. Where both records hold whole tensors (``full=True``), it gives
exact distances and the elements that differ most.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from conformance.core.errors import UsageError, first_few, one_line
from conformance.numerics.comparison import common_factor, mean_over, times
from parity.differences import CLASS, Pair, Quantity, Stage, common, setting
from parity.record_files import Line, Run

if TYPE_CHECKING:  # torch is imported where whole tensors of a record are read
    from torch import Tensor

COMPARED_WHOLE = 4


def exact(pair: Pair, stage: Stage) -> Iterator[str]:
    """Yield a sentence for each of the worst tensors of a stage, where both sides have kept whole tensors."""
    kept = all("tensors" in run.loaded for run in (pair.a, pair.b))
    if not kept or stage.name not in ("weights", "gradients", "update"):
        return
    for name in [quantity.what for quantity in stage.different if not quantity.description][:COMPARED_WHOLE]:
        x, y = (_whole_values(run, stage, name) for run in (pair.a, pair.b))
        if x is None or y is None:
            return
        errors = (x - y).abs()
        worst = [int(place) for place in np.unravel_index(int(errors.argmax()), errors.shape)]
        size = max(float(x.norm()), float(y.norm()))
        count = f"{int((errors > 0).sum())} of {errors.numel()} elements"
        yield (
            f"{name}: exactly {float(errors.norm()) / size:.6g} apart, in {count}, "
            f"most at {worst}: {float(x[tuple(worst)]):.6g} and {float(y[tuple(worst)]):.6g}."
        )


def _whole_values(run: Run, stage: Stage, name: str) -> "Tensor | None":
    """Read a whole weight, gradient or update of a stage, in float64; None where the record does not hold it."""
    if stage.step is None:
        return _read(run, run.loaded, f"weight/{name}")
    line = run.steps[stage.step]
    if stage.name == "gradients":
        return _read(run, line, f"gradient/{name}")
    earlier = [run.loaded, *(step for step in run.steps[: stage.step] if step["stepped"])]
    before, after = _read(run, earlier[-1], f"weight/{name}"), _read(run, line, f"weight/{name}")
    return None if before is None or after is None else after - before


def _read(run: Run, line: Line, key: str) -> "Tensor | None":
    path = run.tensors(line)
    if path is None:
        return None
    try:
        with safe_open(path, framework="pt") as file:
            found: Tensor = file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} cannot be read ({one_line(error)}); record the training again") from None
    return found.double()


def notes(pair: Pair) -> Iterator[str]:
    """Yield sentences about what was not compared and why, and about what only one record observed."""
    a, b = pair.a, pair.b
    both = min(len(a.steps), len(b.steps))
    if len(a.steps) != len(b.steps):
        yield f"Compared are the first {both} steps, which both have."
    for what in ("batch", "loss", "tokens"):
        without = {run.name: sum(line[what] is None for line in run.steps[:both]) for run in (a, b)}
        lacking = [f"{name}{_some(count, both)}" for name, count in without.items() if count]
        if lacking:
            yield f"Not compared: {what}, which {' and '.join(lacking)} did not record."
    for run in (a, b):
        for name, rows in run.header["left_out"].items():
            yield f"Not compared: {rows} of {name}, which names= leaves out in {run.name}."
        if unseen := max((line["unseen"] for line in run.steps), default=0):
            yield f"Not recorded: {unseen} parameters of the optimizers of {run.name}, which are not the model's."
        if run.steps and not any(line["computed_in"] for line in run.steps):
            yield f"Not recorded: the dtype that {run.name} computes in; the dtype of its parameters is assumed."
    yield from _optimizers(a, b)
    yield from _undetermined(pair)


def _some(count: int, every: int) -> str:
    return "" if count == every else f" (in {count} of {every} steps)"


def _optimizers(a: Run, b: Run) -> Iterator[str]:
    """Report optimizers of different classes at the first step that both made, and settings that only one has."""
    made = [
        (here, there) for here, there in zip(a.steps, b.steps, strict=False) if here["stepped"] and there["stepped"]
    ]
    sentences: dict[str, None] = {}  # in order
    for name in common(a, b, trained=True) if made else ():
        p, q = setting(a, made[0][0], name), setting(b, made[0][1], name)
        if p and q and p[CLASS] != q[CLASS]:
            sentences[
                f"{a.name} steps with {p[CLASS]} and {b.name} with {q[CLASS]}; compared is what both are set to."
            ] = None
        if p and q:
            for run, own, its in ((a, p, q), (b, q, p)):
                if only := [key for key in own if key not in its]:
                    sentences[
                        f"Not compared: {first_few(only, most=NAMED)} of {own[CLASS]}, which only {run.name} is set to."
                    ] = None
    yield from sentences


def _undetermined(pair: Pair) -> Iterator[str]:
    found = [(stage, name) for stage in pair.stages for name in stage.undetermined]
    if found:
        names, steps = list(dict.fromkeys(name for _, name in found)), {stage.step for stage, _ in found}
        compared = sum(len(stage.quantities) for stage in pair.stages if stage.name == "update")
        yield (
            f"Not compared: {len(found)} of {len(found) + compared} updates, which rounding decides, in {len(steps)} "
            f"steps, of {first_few(names, most=NAMED)}."
        )


FACTOR_SPREAD = 0.01  # relative spread of factors that are taken for one
times_a = partial(times, of="those of A", digits=6)
GRADUAL = 10.0  # a distance that grows less than so much in a step grows gradually
NAMED = 4  # names that a sentence lists


def likely_causes(pair: Pair, divergence: Stage) -> Iterator[str]:
    """Yield a sentence for each likely cause of the difference, the most telling first."""
    different = divergence.different
    if divergence.name == "gradients":
        yield from _of_gradients(divergence)
    elif (factor := _one_factor(different)) is not None:
        if divergence.name == "update":
            yield f"The updates of B are {times_a(factor)}, in the same direction: another rate."
        elif divergence.name == "loss" and (mean := mean_over(factor)):
            yield f"B is {times_a(factor, of='A')}: {mean}."
    if divergence.name == "update":
        for quantity in (q for q in different if q.norms and not all(q.norms)):
            assert quantity.norms is not None
            still = pair.a if quantity.norms[0] == 0 else pair.b
            yield f"{quantity.what} does not move in {still.name}."
    yield from _history(pair, divergence)


def _of_gradients(stage: Stage) -> Iterator[str]:
    """Separate the factor that most gradients share from the gradients that are wrong by themselves."""
    every = [quantity for quantity in stage.quantities if quantity.differs or any(quantity.norms or ())]
    factor, same_factor = _most_common_factor(every)
    wrong = [quantity for quantity in every if quantity not in same_factor]
    if not wrong:
        mean = f"{cause}, " if (cause := mean_over(factor)) else ""
        yield (
            f"All gradients of B are {times_a(factor)}, in the same direction: {mean}clipping to another "
            "norm, or a loss scale."
        )
        return
    if any(quantity.differs for quantity in same_factor):
        yield (
            f"{len(same_factor)} gradients of B are {times_a(factor)}, as clipping makes them where the "
            f"norm of the others is wrong. The others: {_last_names([quantity.what for quantity in wrong])}."
        )
    own = _one_factor(wrong)
    if own is not None and same_factor:
        scaled = times_a(own / factor, of="that of A")
        yield f"What is wrong by itself is {scaled}, in the same direction: it is scaled."
    block = _block(wrong[-1].what)
    inside = [quantity.what for quantity in wrong if _block(quantity.what) == block]
    yield (
        f"Nearest to the loss of these is {block} ({_last_names(inside)}), in the order in which the model defines its "
        "parameters. A wrong backward pass shows there first; what lies before it is wrong in consequence."
    )


def _most_common_factor(quantities: Sequence[Quantity]) -> tuple[float, list[Quantity]]:
    """Give the factor that most gradients differ by, and these gradients; 1 if no two share a factor."""
    groups = [
        (one.scale, [q for q in quantities if q.scale is not None and abs(q.scale / one.scale - 1) <= q.allowed])
        for one in quantities
        if one.scale
    ]
    factor, same_factor = max(groups, key=lambda group: len(group[1]), default=(1.0, []))
    return (factor, same_factor) if len(same_factor) > 1 or len(quantities) == 1 else (1.0, [])


def _one_factor(different: Sequence[Quantity]) -> float | None:
    """Give the one factor by which all different quantities differ; None if their factors are not the same."""
    scales = [quantity.scale for quantity in different if quantity.scale is not None]
    return common_factor(scales, within=FACTOR_SPREAD) if len(scales) == len(different) else None


def _block(name: str) -> str:
    """Give the layer of a parameter: its name up to the last number, or its module."""
    parts = name.split(".")
    last = max((place for place, part in enumerate(parts) if part.isdigit()), default=len(parts) - 2)
    return ".".join(parts[: last + 1]) or name


def _last_names(names: Sequence[str]) -> str:
    return ", ".join(names[-NAMED:]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _history(pair: Pair, divergence: Stage) -> Iterator[str]:
    """State whether the worst quantity drifted apart gradually or at once over the steps before."""
    worst = divergence.different[0]
    past = [q.observed for s in pair.stages if s.name == divergence.name for q in s.quantities if q.what == worst.what]
    if len(past) < 2 or worst.description:
        return
    distances = ", ".join(f"{distance:.1e}" for distance in past[-5:])
    if all(later <= GRADUAL * earlier for earlier, later in pairwise(past)):
        yield f"{worst.what} moved apart gradually ({distances}): rounding that training amplifies, or a small cause."
    else:
        yield f"{worst.what} moved apart at once ({distances})."


LISTED = 10  # quantities of the stage that differs


def text(pair: Pair) -> str:
    """Describe where and how two records differ, or how closely they agree."""
    lines = [f"{run.name}: {described_run(run)}" for run in (pair.a, pair.b)]
    allowed = f"{pair.threshold:.1e} of gradients and updates, {pair.loss_threshold:.1e} of the loss"
    lines += [f"Allowed: {allowed}, because {pair.because}.", ""]
    if divergence := pair.divergence:
        lines += [f"The records diverge at {where(divergence)}.", *_different(divergence)]
        lines += [*exact(pair, divergence), *(f"Likely cause: {cause}" for cause in likely_causes(pair, divergence))]
    else:
        lines.append("The records agree.")
    lines += ["", "Largest differences before that:" if divergence else "Largest differences:"]
    return "\n".join([*lines, *(f"- {_line(stage, worst)}" for stage, worst in largest(pair)), *notes(pair)])


def values(pair: Pair) -> dict[str, Any]:
    """Give the description of a comparison as JSON values."""
    divergence = pair.divergence
    return {
        "a": pair.a.name,
        "b": pair.b.name,
        "threshold": pair.threshold,
        "loss_threshold": pair.loss_threshold,
        "because": pair.because,
        "divergence": None
        if divergence is None
        else {
            "step": divergence.step,
            "stage": divergence.name,
            "quantities": [_values(quantity) for quantity in divergence.different],
            "hints": [*exact(pair, divergence), *likely_causes(pair, divergence)],
        },
        "largest": [
            {"stage": stage.name, "step": stage.step, **_values(quantity)} for stage, quantity in largest(pair)
        ],
        "notes": list(notes(pair)),
    }


def _values(quantity: Quantity) -> dict[str, Any]:
    found: dict[str, Any] = {"what": quantity.what, "observed": _json(quantity.observed), "allowed": quantity.allowed}
    if quantity.norms:
        found["norms"] = [_json(norm) for norm in quantity.norms]
    optional = {"scale": quantity.scale, "rows": quantity.rows, "description": quantity.description}
    return found | {name: value for name, value in optional.items() if value}


def _json(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)


def described_run(run: Run) -> str:
    steps, ranks = len(run.steps), run.header["ranks"]
    dtypes = sorted({parameter["dtype"] for parameter in run.parameters.values()})
    computed = next((line["computed_in"] for line in run.steps if line["computed_in"]), None)
    return (
        f"{_count(steps, 'step')}, {_count(ranks, 'rank')}, {_count(len(run.parameters), 'parameter')} "
        f"in {', '.join(dtypes)}"
        f"{f', computed in {computed}' if computed else ''}{'' if run.complete else '; it did not come to its end'}"
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def where(stage: Stage) -> str:
    return stage.name if stage.step is None else f"step {stage.step}, {stage.name}"


def _different(stage: Stage) -> Iterator[str]:
    """Yield a line for each of the quantities that differ, the worst first."""
    different = stage.different
    if len(stage.quantities) > 1:
        yield f"{len(different)} of {len(stage.quantities)} differ, the worst first:"
    yield from (f"- {_described_quantity(quantity)}" for quantity in different[:LISTED])
    if len(different) > LISTED:
        yield f"- and {len(different) - LISTED} more"


def _described_quantity(quantity: Quantity) -> str:
    if quantity.description:
        return f"{quantity.what}: {quantity.description}"
    parts = [f"{quantity.what}: {quantity.observed:.2e} apart, allowed {quantity.allowed:.1e}"]
    if quantity.norms:
        parts.append("A {:.6g}, B {:.6g}".format(*quantity.norms))
    if quantity.scale is not None:
        parts.append(f"times {quantity.scale:.6g}")
    return "; ".join([*parts, *([quantity.rows] if quantity.rows else [])])


def _line(stage: Stage, quantity: Quantity) -> str:
    if not quantity.observed:
        return f"{where(stage)}: equal"
    return f"{where(stage)}: {quantity.observed:.1e} ({quantity.what}), allowed {quantity.allowed:.1e}"


def largest(pair: Pair) -> list[tuple[Stage, Quantity]]:
    """Give, for every kind of stage that does not differ, the quantity that is nearest to its bound."""
    found: dict[str, tuple[Stage, Quantity]] = {}
    for stage in (stage for stage in pair.stages if not stage.different):
        worst, known = stage.worst, found.get(stage.name)
        if worst and (known is None or worst.observed * known[1].allowed > known[1].observed * worst.allowed):
            found[stage.name] = stage, worst
    return list(found.values())
