"""Measures every declared observable of a cell's records against the oracle's, in causal order.

The same measurement is applied to a cell and to the single-process run that gives the noise.
conformance.judge.tolerance decides whether an error is small enough, conformance.judge.verdict what it means.

Rows are judged as one vector, and reports read no tensors. So a verdict keeps the errors of the tokens in the order of
the batch, in at most BINS bins, with the largest error of each bin. A token has no bound of its own: the worst token
gets the error of the whole observable, and the others are in proportion to it. So a token is outside of its tolerance
if and only if the observable is.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, zip_longest
from typing import Any

import torch

from conformance.judge.direction import PART_OF_GRADIENTS, PART_OF_PAIRS, Directions
from conformance.judge.rebuilt import rebuilt_norm, rebuilt_of_rows
from conformance.judge.tensor_views import (
    NO_LEEWAY,
    Leeway,
    StepViews,
    Tensors,
    infinite,
    number_off,
    tensor_off,
)
from conformance.judge.tolerance import NOISE_FACTOR, ROUNDING, Key, Measurement
from conformance.numerics.comparison import finite
from conformance.oracle.decoder import lora_of, merged
from conformance.records.record_format import number
from conformance.records.step_tensors import Record, StepRecord
from conformance.results.verdict import BARS, BINS, Spread, TokenErrors
from conformance.spec.layout import Layout
from conformance.spec.observables import Observable, is_unread
from conformance.spec.scenario import is_adapter

# How many standard deviations of a sum are allowed: 5,000 cells have about 50,000 sums, and 5 are exceeded by one
# honest sum in 1.7 million, 3 by one in 370.
DEVIATIONS = 5.0


def token_errors_of(
    observable: Observable,
    step: int,
    own: torch.Tensor,
    reference: torch.Tensor,
    lengths: Mapping[int, int],
    *,
    norm: float,
) -> TokenErrors:
    """Bins the errors of tokens. own, reference: the number of each token, row after row. lengths: of each row, by its
    index. norm: what the error of the observable is relative to."""
    off = (own - reference).abs()
    count = len(off)
    edges = [count * i // min(BINS, count) for i in range(min(BINS, count) + 1)]
    largest = torch.stack([off[start:end].max() for start, end in pairwise(edges)]).tolist()
    numbers = off[off.isfinite()]
    error, top = numbers.norm().item() / norm, numbers.max().item() if len(numbers) else 0.0
    ends, rows = list(accumulate(lengths.values())), list(lengths)

    def place(token: int) -> tuple[int, int]:
        row = bisect_right(ends, token)
        return rows[row], token - (ends[row - 1] if row else 0)

    row, target = place(int(off.argmax()))
    return TokenErrors(
        stage=observable.stage,
        tensor=observable.key,
        step=step,
        tokens=count,
        starts=tuple(place(edge) for edge in edges[:-1]),
        errors=tuple(_rounded(value / (top or 1.0) * error, error) for value in largest),
        max_abs=off.max().item(),
        where=f"row {row}, target {target}",
        spread=_spread(own, reference, off),
    )


def _spread(own: torch.Tensor, reference: torch.Tensor, off: torch.Tensor) -> Spread | None:
    """Returns the distribution of the numbers of tokens; None if one of them is not finite."""
    both = torch.cat((own, reference))
    if not both.isfinite().all():
        return None
    low, high = both.min().item(), both.max().item()
    high = high if high > low else low + max(abs(low), 1.0)
    counts = [tuple(map(int, torch.histc(of, BARS, low, high).tolist())) for of in (own, reference)]
    median, most = (float(f"{off.quantile(share).item():.2e}") for share in (0.5, 0.99))
    return Spread(
        low=low, high=high, observed=counts[0], reference=counts[1], quantiles=(median, most, off.max().item())
    )


def _rounded(value: float, most: float) -> float:
    """Rounds to three significant digits, but never across ``most``, the error of the observable, which is exact."""
    return value if value == most else min(float(f"{value:.2e}"), most) if value < most else value


@dataclass(frozen=True, kw_only=True)
class _Start:
    """The weights as loaded before the first step, of the cell and of the oracle."""

    own: StepViews
    reference: StepViews


def shown_without_rows(phases: Sequence[Record], observables: Sequence[Observable]) -> frozenset[str]:
    """Returns the keys of recorded means and maxima whose rows are not recorded at any step."""
    steps = [step for phase in phases for step in phase.steps]
    by_key = {o.key: o for o in observables}
    return frozenset(
        o.key
        for o in observables
        if (o.mean_of or o.max_of) and any(_is_there(o, step) for step in steps)
        if not any(_is_there(by_key[o.rows_key], step) for step in steps)
    )


def measure(
    phases: Sequence[Record],
    oracle: Record,
    *,
    leeway: Mapping[Key, Leeway] = NO_LEEWAY,
    without_rows: Set[str] = frozenset(),
) -> list[Measurement]:
    """Returns all measurements of quantities that both recorded, by step.

    phases: records with consecutive steps. leeway: see conformance.judge.tensor_views.TensorView.errors. without_rows:
    the keys of means and maxima to compare with the oracle's, because the cell does not record their rows. A quantity
    that only one side has gives a measurement of infinite error.
    """
    observables = oracle.observables
    start = _Start(own=StepViews(phases[0].loaded.tensors()), reference=StepViews(oracle.loaded.tensors()))
    found = [m for o in observables if o.applies(-1) for m in start.own[o.key].errors(start.reference[o.key], o, -1)]
    for before, after in pairwise(phases):
        found += errors_after_resume(before, after, observables, start.own)
    steps = {step.step: (step, phase) for phase in phases for step in phase.steps}
    scenario, tier = phases[0].scenario, phases[0].scenario.tier
    part = PART_OF_PAIRS if scenario.objective.reads == "preferences" else PART_OF_GRADIENTS
    directions = Directions(precision=tier, part_of_gradients=part)
    for reference in oracle.steps:
        if reference.step not in steps:
            missing = f"steps from {reference.step} on are missing"
            found.append(infinite(observables[0].stage, missing, reference.step))
            break
        step, phase = steps[reference.step]
        shown = [o for o in observables if not is_unread(o.key, step.line)]
        layout = phase.layout
        found += _step(step, reference, shown, start, layout, directions, leeway=leeway, without_rows=without_rows)
    found += directions.measurements()
    lost = {(o, step.step) for step in oracle.steps for o in observables if is_lost(o, step)}
    found += _gaps(list(steps.values()), observables, lost)
    return found


def _gaps(
    steps: Sequence[tuple[StepRecord, Record]],
    observables: Sequence[Observable],
    lost: Set[tuple[Observable, int]],
) -> Iterator[Measurement]:
    """Requires optional quantities that were observed at some of the ``steps`` at all of them, except those in
    ``lost``.

    A quantity that is judged by its effect may be reported by a single backend, in a single layout.
    """
    for observable in observables:
        if observable.required or observable.when == "handover":
            continue
        by_source: dict[object, dict[int, bool]] = defaultdict(dict)
        for step, phase in ((step, phase) for step, phase in steps if (observable, step.step) not in lost):
            source = (phase.header["backend"]["name"], phase.header["layout"]) if observable.effect_at else ()
            by_source[source][step.step] = _is_there(observable, step)
        for shown in by_source.values():
            if any(shown.values()):
                missing = f"{observable.key} (missing)"
                yield from (infinite(observable.stage, missing, n) for n, here in shown.items() if not here)
    for key, stage in {o.key: o.replica_stage for o in observables if o.kind == "tensors" and o.replica_stage}.items():
        read = [step for step, _ in steps if not is_unread(key, step.line)]
        offered = {step.step: step.line.get("replicas", {}).get(key, {}).get("offered", 0) for step in read}
        if any(offered.values()):
            yield from (infinite(stage, f"shards of {key} (missing)", n) for n, count in offered.items() if not count)


def _is_there(observable: Observable, step: StepRecord) -> bool:
    if observable.kind in ("scalar", "setting"):
        return step.value(observable.key) is not None
    return any(name.startswith(f"{observable.key}/") for name in step.names())


def _step(
    step: StepRecord,
    oracle: StepRecord,
    observables: Sequence[Observable],
    start: _Start,
    layout: Layout,
    directions: Directions,
    *,
    leeway: Mapping[Key, Leeway] = NO_LEEWAY,
    without_rows: Set[str] = frozenset(),
) -> Iterator[Measurement]:
    views, references = StepViews(step.tensors()), StepViews(oracle.tensors())
    for o in observables:
        if not o.applies(step.step) or is_lost(o, oracle):
            continue
        own, reference = views[o.key], references[o.key]
        # Without masters, weights are rounded more coarsely than updates, which are judged where they are rebuilt.
        is_hidden = o.rebuilt and directions.precision.stored is not None
        if o.kind in ("tensors", "rows") and not is_hidden:
            directions.add(o, step.step, own, reference)
        if o.key in without_rows:
            yield from _scalar_of_rows(o, step, oracle, observables, views, references)
        elif o.is_of_rows:
            yield from rebuilt_of_rows(o, step, views)
        elif o.kind in ("scalar", "setting"):
            parts, independent = o.made_of, not o.one_direction
            typical = _of_parts(views[parts].tensors, references[parts].tensors, independent=independent)
            if o.norm_of:
                typical = directions.of_gradients(o, step.step)
            elif o.sum_of:
                unit = oracle.value(o.scale or o.key)
                deviation = _of_terms(views[o.sum_of].tensors, references[o.sum_of].tensors, unit=unit)
                typical = DEVIATIONS / NOISE_FACTOR * deviation
            for found in (*_scalar(o, step, oracle), *rebuilt_norm(o, step, oracle, views)):
                of_tokens = bool(o.made_of or o.sum_of)
                yield replace(found, typical=found.typical or typical, of_tokens=of_tokens)
        elif o.kind == "rows":
            yield from _rows(o, step.step, own.tensors, reference.tensors, references[o.scale or o.key].tensors)
        elif o.change:
            moved, expected = own.since(start.own[o.key]), reference.since(start.reference[o.key])
            errors = moved.errors(expected, o, step.step)
            yield from (m for m in errors if not is_hidden or math.isinf(m.error))
        else:
            yield from own.errors(reference, o, step.step, leeway=leeway)
        yield from _replicas(o, step, layout)


def is_lost(observable: Observable, oracle: StepRecord) -> bool:
    """Whether the observable has no value at this step of the oracle, because an update is skipped."""
    return bool(observable.lost_if and oracle.value(observable.lost_if))


def _replicas(observable: Observable, step: StepRecord, layout: Layout) -> Iterator[Measurement]:
    found = step.line.get("replicas", {}).get(observable.key)
    if not found or not observable.replica_stage or not _is_there(observable, step):
        return
    stage, key, number = observable.replica_stage, observable.key, step.step
    if observable.kind == "tensors" and layout.rep > 1 and found["offered"] and not found["compared"]:
        yield infinite(stage, f"{key}: the layout has replicas, but no shard is named alike by two ranks", number)
    if found["compared"] and not found["differing"]:
        name = f"{key}: {found['compared']} held by several ranks"
        yield Measurement(stage=stage, tensor=name, step=number, error=0.0, fixed=ROUNDING, replica=True)
    for entry in found["differing"]:
        tensor = key if entry["name"] == key else f"{key} {entry['name']}"
        name = f"{tensor} on ranks {', '.join(map(str, entry['ranks']))}"
        error = float(entry["relative"])
        yield Measurement(stage=stage, tensor=name, step=number, error=error, fixed=ROUNDING, replica=True)


def _rows(
    observable: Observable, step: int, rows: Tensors, reference: Tensors, scale: Tensors
) -> Iterator[Measurement]:
    """Measures all target tokens of the step as one vector; ``where`` names the row and target that are furthest off.

    ``scale``: rows whose norm the error is relative to.
    """
    if not rows and not observable.required:
        return
    stage, key = observable.stage, observable.key
    counts = {r: (len(rows.get(r, ())), len(reference.get(r, ()))) for r in sorted({*rows, *reference}, key=int)}
    if wrong := [f"{own} for the {right} targets of row {r}" for r, (own, right) in counts.items() if own != right]:
        others = f" and {len(wrong) - 4} more rows" if len(wrong) > 4 else ""
        yield infinite(stage, f"{key}: numbers and targets disagree: {', '.join(wrong[:4])}{others}", step)
        return
    order = sorted(reference, key=int)
    x, ref, unit = (torch.cat([of[r].double() for r in order]) for of in (rows, reference, scale))
    found = tensor_off(stage, key, step, x, ref, floor=0.0)
    norm = unit.norm().item() or 1.0
    strip = token_errors_of(observable, step, x, ref, {int(r): len(reference[r]) for r in order}, norm=norm)
    error = finite((x - ref).norm().item() / norm)
    by_unit = (ref.norm().item() or 1.0) / norm
    left, size = found.residual * by_unit, found.size * by_unit
    yield replace(found, error=error, scalar=True, residual=left, size=size, where=strip.where, strip=strip)


def _scalar(o: Observable, step: StepRecord, oracle: StepRecord, *, unit: float | None = None) -> Iterator[Measurement]:
    """Measures a scalar or setting. ``unit``: of the error; None: the one that the observable declares."""
    own, reference = step.value(o.key), oracle.value(o.key)
    assert reference is not None, f"the oracle did not record {o.key}"
    if own is None:
        if o.required:
            yield infinite(o.stage, f"{o.key} (missing)", step.step)
        return
    if unit is None:
        unit = oracle.value(o.scale) if o.scale else reference
    assert unit is not None, f"the oracle did not record {o.scale}"
    yield number_off(o.stage, o.key, step.step, own, reference, unit=unit, fixed=o.exact_bound)


def _scalar_of_rows(
    o: Observable,
    step: StepRecord,
    oracle: StepRecord,
    observables: Sequence[Observable],
    views: StepViews,
    references: StepViews,
) -> Iterator[Measurement]:
    """Measures a mean or maximum of rows against the oracle's, in the unit of the rows: their mean size. A run of the
    oracle, which has the rows, also gives the effect of their errors."""
    scale = next((rows.scale for rows in observables if rows.key == o.rows_key), "") or o.rows_key
    unit = torch.cat([row.double().abs() for row in references[scale].tensors.values()]).mean().item()
    own, expected = views[o.rows_key].tensors, references[o.rows_key].tensors
    off = torch.cat([(row.double() - expected[index].double()).abs() for index, row in own.items()] or [torch.zeros(1)])
    typical = (off.norm() / len(off) if o.mean_of else off.max()).item() / (unit or 1.0)
    for found in _scalar(o, step, oracle, unit=unit):
        yield replace(found, typical=typical, of_tokens=True)


def _of_parts(parts: Tensors, reference: Tensors, *, independent: bool) -> float:
    """Returns the relative error that a sum of these numbers inherits. ``independent`` errors shrink by the root of
    their count. Other errors may point in one direction, so they count in full."""
    if parts.keys() != reference.keys() or any(parts[name].shape != ref.shape for name, ref in reference.items()):
        return 0.0
    squares = [(parts[name].double() - ref.double()).square().sum().item() for name, ref in reference.items()]
    norm = math.sqrt(sum(ref.double().square().sum().item() for ref in reference.values()))
    count = sum(ref.numel() for ref in reference.values()) if independent else 1
    return finite(math.sqrt(sum(squares)) / (norm or 1.0)) / math.sqrt(max(1, count))


def _of_terms(terms: Tensors, reference: Tensors, *, unit: float | None) -> float:
    """Returns the standard deviation of a sum of ``terms`` relative to ``unit``, if tokens or rows are independent; 0
    for a cell, which does not record the terms. Tokens of a row share what they attend to, so their errors may point in
    one direction."""
    if terms.keys() != reference.keys():
        return 0.0
    errors = [terms[name].double() - ref.double() for name, ref in reference.items()]
    tokens = sum(error.square().sum().item() for error in errors)
    rows = sum(error.sum().item() ** 2 for error in errors) if len(errors) > 1 else 0.0  # one row is one draw
    return finite(math.sqrt(max(tokens, rows)) / abs(unit or 1.0))


def errors_after_resume(
    before: Record, after: Record, observables: Sequence[Observable], start: StepViews
) -> Iterator[Measurement]:
    """Compares what a phase loaded with the end of the previous phase. ``start``: the weights of the first phase.

    Measurements belong to the step that comes next. Training state and generators are compared if the optimizer is
    loaded. Backends may round frozen weights differently; everything else is equal to the bit.
    """
    end, number = before.steps[-1] if before.steps else before.loaded, after.loaded.step + 1
    last, first = StepViews(end.tensors()), StepViews(after.loaded.tensors())
    if after.control == "same":
        yield infinite("weights", "all (loaded from a changed copy they are the same: they are read elsewhere)", number)
    resumes = after.header["optimizer"] == "loaded"
    for o in observables:
        if o.when == "loaded":
            # The weights of a model that is not trained are recorded only as loaded.
            saved = last[o.key] if last[o.key].tensors else StepViews(before.loaded.tensors())[o.key]
            saved = replace(saved, tensors=_end_of(before, after, o.key, saved.tensors, start[o.key].tensors))
            for found in first[o.key].errors(saved, o, number):
                yield found if o.rounded else replace(found, fixed=_bound_of(after, o.key, found.tensor))
        elif o.when == "handover" and o.kind == "tensors" and resumes:
            for found in first[o.key].errors(last[o.key], o, number):
                yield replace(found, tensor=f"{o.key.rpartition('.')[2]} of {found.tensor}")
            own, reference = first[o.key].elements, last[o.key].elements
            for name in own.keys() & reference.keys():
                if own[name].dtype != reference[name].dtype:
                    dtypes = f"{own[name].dtype} instead of {reference[name].dtype}"
                    yield infinite(o.stage, f"{o.key} of {name} ({dtypes})", number)
        elif o.when == "handover" and o.kind == "evidence" and resumes:
            yield from _generators(o, before, after, number)
    if resumes and after.layout.scales_by_histories:
        stage = next(o.stage for o in observables if o.when == "handover" and o.kind == "tensors")
        yield from _float8_state(stage, before, after, number)


# float32 roundings of W + scale B A, relative to W: the product is summed over the rank, scaled, added and rounded.
MERGE_ROUNDINGS = 4


def _end_of(before: Record, after: Record, key: str, last: Tensors, start: Tensors) -> dict[str, torch.Tensor]:
    """Returns the weights, by name, that ``after`` should have loaded for the model whose weights have this ``key``.

    last: the weights at the end of the previous phase, by name. start: the weights that the first phase loaded.
    """
    if not _is_merged(after, key) or not last:
        return dict(last)
    lora = before.scenario.lora
    assert lora, "a phase merges adapters only where there are some"
    exact = {name: tensor.double() for name, tensor in last.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in exact.items() if not is_adapter(name)}
    return merged(exact, lora_of(lora, shapes)) | {name: t for name, t in start.items() if is_adapter(name)}


def _bound_of(after: Record, key: str, name: str) -> float:
    """Returns the largest relative distance that a weight may have from the result of ``_end_of``."""
    return MERGE_ROUNDINGS * ROUNDING if _is_merged(after, key) and not is_adapter(name) else 0.0


def _is_merged(after: Record, key: str) -> bool:
    return bool(after.header["loads"] == "merge") and key == "weight"


# Of the operands of a linear layer of TransformerEngine, in the order in which it keeps scales and histories.
_FLOAT8_OPERANDS = {"forward": ("input", "weight", "output"), "backward": ("gradient", "gradient of the input")}


def _float8_state(stage: str, before: Record, after: Record, step: int) -> Iterator[Measurement]:
    """Compares the scales and histories of delayed scaling that TransformerEngine had at the end of the phase before,
    on each rank, with those that it had until the first update after the resume. No word of the backend counts."""
    saved: Sequence[Mapping[str, Sequence[Any]]] = before.footer.get("float8_saved", ())
    began = [evidence.get("float8_began", {}) for evidence in after.footer.get("evidence", ())]
    nothing: dict[str, Sequence[Any]] = {}
    for rank, (was, now) in enumerate(zip_longest(saved, began, fillvalue=nothing)):
        for direction, operands in _FLOAT8_OPERANDS.items():
            own, reference = now.get(direction, ()), was.get(direction, ())
            if len(own) != len(reference) or not reference:
                counts = f"{len(own)} of {len(reference)} {direction} operands"
                yield infinite(stage, f"float8 scales and histories of {counts} on rank {rank}", step)
                continue
            for place, (observed, due) in enumerate(zip(own, reference, strict=True)):
                layer, operand = divmod(place, len(operands))
                where = f"of the {operands[operand]} of linear layer {layer + 1} on rank {rank}"
                for what, part in (("scale", slice(0, 1)), ("history", slice(1, None))):
                    pairs = [*zip(map(number, observed[part]), map(number, due[part]), strict=False)]
                    errors = [finite(abs(own - other) / (abs(other) or 1.0)) for own, other in pairs]
                    error = max(errors, default=math.inf) if len(observed) == len(due) else math.inf
                    yield Measurement(stage=stage, tensor=f"float8 {what} {where}", step=step, error=error, fixed=0.0)


def _generators(observable: Observable, before: Record, after: Record, step: int) -> Iterator[Measurement]:
    """Compares digests of random generators, which are equal or not, and finds generators that are seeded later. A
    checkpoint restores them if the backend and the layout stay the same."""
    same = all(before.header[key] == after.header[key] for key in ("backend", "layout"))
    if not same or after.header["loads"] != "checkpoint":
        return
    end = before.steps[-1] if before.steps else before.loaded
    ranks = zip(after.loaded.line["generators"], end.line["generators"], strict=True)
    for rank, (loaded, saved) in enumerate(ranks):
        for name, digest in saved.items():
            error = 0.0 if loaded.get(name) == digest else math.inf
            tensor = f"{name} of rank {rank}"
            yield Measurement(stage=observable.stage, tensor=tensor, step=step, error=error, fixed=0.0)
    for rank, seeded in enumerate(after.footer.get("reseeded", ())):
        for later, name in seeded:
            yield infinite(observable.stage, f"{name} of rank {rank} (does not follow from what was loaded)", later)
