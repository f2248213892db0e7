"""Judges a cell's record by the oracle's: the first difference, its likely cause, and what was not observed.

Needs no GPU, no backend and no workers, so old records can be judged again. A comparison that cannot be made (a
truncated record, a missing stage) is never a pass.

A quantity that is left out cannot be wrong, so a missing quantity shows in the state of the cell. Two kinds may be
missing without a loss: a quantity that is declared to be judged by its effect at another stage
(``Observable.effect_at``), and replicas where no two ranks hold the same tensor. Replicas may be missing only where the
backend names the pieces of its ranks, and no two of them are the same.
"""

import math
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from conformance.judge.clips import UndecidedNoise, check_decided, decided_alike, undecided
from conformance.judge.diagnosis import (
    Facts,
    backward_place,
    circumstances,
    facts_of_steps,
    likely_cause,
    with_unreduced,
    without_bare_factors,
)
from conformance.judge.direction import within_noise
from conformance.judge.layout_evidence import configurations, sizes_of, unproven
from conformance.judge.measurements import measure, shown_without_rows
from conformance.judge.provenance import code_of, is_routing, not_judged_of, read_records, second_class_of
from conformance.judge.rebuilt import muon_within_noise, rebuilt_losses, rebuilt_updates
from conformance.judge.rounding import (
    amplified_noise,
    leeway_of_rows,
    measure_accumulation_precision,
    measure_row_precision,
)
from conformance.judge.stored_updates import lost_in_rounding, not_rebuilt, stored_updates
from conformance.judge.tolerance import (
    Measurement,
    allowed_errors,
    gradient_stages,
    is_too_exact,
    may_be_judged_by,
    noisiest,
)
from conformance.numerics.sketch import is_part, is_projected
from conformance.oracle.defects import variant_of
from conformance.records.record_format import RecordError
from conformance.records.step_tensors import Record
from conformance.results.verdict import NOT_SEEN, Quantity, State, Verdict
from conformance.spec.batch import Batch
from conformance.spec.conventions import Convention
from conformance.spec.known_defects import Defect, parse_defects
from conformance.spec.observables import Observable, is_unread, stages
from conformance.spec.precision import noise_runs


def unobserved(
    phases: Sequence[Record], quantities: Sequence[Quantity], observables: Sequence[Observable]
) -> tuple[list[str], list[str]]:
    """Returns the lost stages, and remarks on what is missing without a loss, of a cell in which nothing differs."""
    observed = {(q.stage, q.tensor) for q in quantities}
    stages = {q.stage for q in quantities}
    lost: dict[str, list[str]] = {}  # the keys that were not observed, by stage
    unshared: dict[str, None] = {}
    remarks: list[str] = []
    if any(phase.header["optimizer"] == "loaded" for phase in phases):
        remarks += _unreported_state(observables, stages)
    for o in observables:
        if o.when == "handover":
            continue
        is_single = o.kind in ("scalar", "setting", "rows")  # one quantity per step, with the name of its key
        is_there = not observed.isdisjoint((o.stage, key) for key in (o.key, o.judged_as))
        if not o.required and not (is_there if is_single else o.stage in stages):
            if o.effect_at in stages:
                remarks.append(f"{o.key} is not reported, and judged by its effect at {o.effect_at}")
            else:
                lost.setdefault(o.stage, []).append(o.key)
        if o.kind == "tensors" and o.replica_stage and o.replica_stage not in stages:
            if all(_shares_nothing(phase, o.key) for phase in phases):
                unshared[o.replica_stage] = None
            else:
                lost[o.replica_stage] = []
    if unshared:
        remarks.append(f"no two ranks hold the same: {', '.join(unshared)}")
    of_stage = Counter(o.stage for o in observables if o.when != "handover")
    # A stage of a single quantity is named without its key.
    names = [f"{stage} ({', '.join(keys)})" if keys and of_stage[stage] > 1 else stage for stage, keys in lost.items()]
    return names, remarks


def _unreported_state(observables: Sequence[Observable], stages: Set[str]) -> Iterator[str]:
    """Yields a remark for each model whose training state the backend does not show at a resume."""
    for stage, effect in {o.stage: o.effect_at for o in observables if o.when == "handover" and o.effect_at}.items():
        if stage not in stages:
            yield f"the {stage} as loaded is not reported, and judged by its effect at {effect}"


def _shares_nothing(phase: Record, key: str) -> bool:
    """Whether no two ranks of a phase can hold the same tensor: there is one rank, or each names its own pieces."""
    return phase.layout.world_size == 1 or all(offered > 0 for offered in _offered(phase, key))


def _offered(phase: Record, key: str) -> Iterator[int]:
    """Yields the number of pieces that the ranks named, for each step at which tensors were read."""
    read = (step for step in phase.steps if not is_unread(key, step.line))
    return (step.line.get("replicas", {}).get(key, {}).get("offered", 0) for step in read)


DEFECT = "the judge failed on these records, which is a defect of the suite"


def judge_folders(
    cell: str,
    phases: Sequence[Path],
    oracle: Path,
    *,
    defects: tuple[Defect, ...] = (),
    unjudged: Set[str] = frozenset(),
) -> Verdict:
    """Judges the records of the phases of the cell with this id against the oracle's in ``oracle``, which has
    ``defects``. ``unjudged``: stages that are not judged.

    If the cell agrees by the first noise run, that run decides alone. Otherwise all existing runs decide together. A
    record that cannot be trusted, or that does not belong to the cell or the oracle, gives an infrastructure failure.
    """
    try:
        records = read_records(cell, phases, oracle, defects=defects)
        by = partial(judge, records.phases, oracle=records.oracle, batches=records.batches, unjudged=unjudged)
        with suppress(UndecidedNoise) if len(records.noise) > 1 else nullcontext():
            verdict = by(noise=records.noise[:1])
            if verdict.state != "differs" or len(records.noise) < 2:
                return verdict
        return by(noise=records.noise)
    except RecordError as error:
        return Verdict(state="infrastructure", reason=str(error))
    except Exception as error:  # a defect of the judge must not keep the other cells from being judged
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{DEFECT}: {error!r} at {Path(place.filename).name}:{place.lineno}; report it with the cell's folder"
        return Verdict(state="infrastructure", reason=reason)


def judge(
    phases: Sequence[Record],
    *,
    oracle: Record,
    noise: Sequence[Record],
    batches: Sequence[Batch] = (),
    unjudged: Set[str] = frozenset(),
) -> Verdict:
    """Compares the complete records of all phases with the float64 oracle; they belong together (read_records).

    ``noise``: the single-process runs in the cell's precision, none in the exact tier. ``batches``: with the choices of
    routers, below the exact tier. ``unjudged``: stages that are not judged. Raises RecordError if the noise is
    impossible for this precision.
    """
    scenario = phases[0].scenario
    observables, precision = oracle.observables, scenario.precision
    gradients = gradient_stages(observables)
    defects = parse_defects(oracle.header["backend"]["defects"])
    own_means = {key for one in defects if isinstance(one, Convention) for key in one.own_means}
    means = {o.key for o in observables if o.mean_of}  # of token-mean only; other sums have no rows of their own
    without_rows = shown_without_rows(phases, observables) | (own_means & means)
    # A value near a tie of a coarse format rounds either way, and moves its neighbours past further ties.
    coarse = not scenario.tier.is_exact and any(isinstance(one, Convention) and one.coarse for one in defects)
    limited = frozenset[str]() if coarse else gradients
    made = len(noise)
    noise = decided_alike(noise, oracle, precision)
    rounded = scenario.tier.stored is not None
    judged_rows = partial(_judged_rows, coarse=coarse, rounded=rounded)
    runs = [judged_rows(measure([run], oracle, without_rows=without_rows)) for run in noise]
    # Amplified noise is taken from runs whose gradients are all exact enough to judge by.
    usable = [run.steps for n, run in enumerate(noise) if not n or may_be_judged_by(runs[n], precision, limited)]
    steps = [[step for phase in phases for step in phase.steps]] if scenario.tier.is_exact else usable
    amplified = amplified_noise(steps, oracle, scenario)
    rounding = noisiest(runs, precision=precision, gradients=limited, amplified=amplified.updates.keys())
    bounds_of = partial(
        allowed_errors,
        precision=precision,
        noise=rounding,
        gradients=limited,
        amplified=amplified.updates,
        drift=amplified.drift,
    )
    leeway = leeway_of_rows(usable, oracle, bounds_of(rounding))
    sizes = sizes_of(oracle)
    rebuild = stored_updates if scenario.tier.stored else rebuilt_updates
    found = [
        *judged_rows(measure(phases, oracle, leeway=leeway, without_rows=without_rows)),
        *configurations(phases, scenario, sizes),
        *rebuilt_losses(phases, oracle, scenario),
        *rebuild(phases, oracle, scenario, variant_of(defects)),
        *measure_accumulation_precision(phases, scenario, [o for o in observables if o.stage in gradients], batches),
        *measure_row_precision(phases, noise, observables),
    ]
    if is_too_exact(found, precision=precision, noise=rounding, gradients=gradients):
        name = f"all: closer to float64 than {precision} can be, so computed in a higher precision"
        stage = next(o.stage for o in observables if o.stage in gradients)
        found.append(Measurement(stage=stage, tensor=name, step=0, error=math.inf, fixed=0.0))
    found += _leaks(phases, observables)
    found = [one for one in found if one.stage not in unjudged]
    bounds = bounds_of(found)
    order = {stage: i for i, stage in enumerate(stages(observables))}
    found.sort(key=lambda m: (m.step, order[m.stage], backward_place(m.tensor) if m.stage in gradients else ()))
    facts = facts_of_steps(phases, oracle, scenario, observables)
    beyond = [m for m in found if m.error > bounds[m.key]]
    if beyond and made == len(noise_runs(precision)):
        each = getattr(scenario.objective, "steps_per_rollout", 1)
        near = undecided(phases, oracle, noise, precision)
        check_decided(beyond, near, observables, precision, steps_per_rollout=each)
    judged = [_judged(m, bounds[m.key], facts.get(m.step, facts[-1])) for m in found]
    quantities = without_bare_factors(with_unreduced(judged, observables))
    strips = tuple(m.strip for m in found if m.strip)
    author = second_class_of(oracle)
    verdict = Verdict(
        state="conforms",
        reason="",
        quantities=tuple(quantities),
        strips=strips,
        second_class=author,
        code=code_of(phases),
    )
    notes = [f"second-class reference, {author}: {NOT_SEEN}"] if author else []
    notes += [f"not judged: {', '.join(features)}"] if (features := not_judged_of(oracle)) else []
    notes += [f"not judged: {', '.join(sorted(unjudged))}"] if unjudged else []
    notes += ["not judged: single rows, because float8 rounds them too coarsely"] if coarse else []
    notes += ["not judged: single rows after the first update, which rounds weights"] if rounded else []
    listed = unproven(phases, scenario, sizes)
    if not scenario.tier.is_exact and any(map(is_routing, observables)):
        listed.append(f"which experts are chosen, which backends are told in {precision}")
    if coarse:
        listed.append("anything but gross faults, because float8 amplifies rounding below the exact tier")
    if rounded and lost_in_rounding(found):
        listed.append("that small updates are not lost in rounding to the nearest number")
    if muon_within_noise(found):
        listed.append("update of matrices by Muon")
    if not verdict.findings:
        listed += within_noise(quantities, precision)
    notes += [f"not proven: {', '.join(listed)}"] if listed else []
    notes += _sketched(oracle.loaded.names())
    if verdict.findings:
        more = [*circumstances(quantities, phases, observables), *notes]
        return replace(verdict, state="differs", reason=_difference(verdict, more))
    lost, remarks = unobserved(phases, quantities, observables)
    if rounded and (steps_left := not_rebuilt(phases, found, oracle)):
        lost.append(f"updates of steps {', '.join(map(str, steps_left))}, without moments")
    more = [*([f"not observed: {', '.join(lost)}"] if lost else []), *remarks, *notes]
    state: State = "partly_observed" if lost else "conforms"
    return replace(verdict, state=state, reason="; ".join([f"{len(found)} quantities agree with the reference", *more]))


def _judged_rows(measured: Iterable[Measurement], coarse: bool, rounded: bool = False) -> list[Measurement]:
    """Leaves worst rows out if numbers are rounded so coarsely that the noise of some row is no less than the row: all
    if ``coarse``, and if an update has ``rounded`` the weights."""
    return [one for one in measured if not (one.of_row and (coarse or (rounded and one.step > 0)))]


def _sketched(names: Sequence[str]) -> list[str]:
    """Remarks that some of these tensors are sketches, if they are."""
    whole = [name for name in names if not is_part(name)]
    sketched = sum(is_projected(name, set(names)) for name in whole)
    return [f"{sketched} of {len(whole)} parameters are compared by sketches"] if sketched else []


def _leaks(phases: Sequence[Record], observables: Sequence[Observable]) -> list[Measurement]:
    """Measures the operations of the exact tier in a lower precision: nothing after such an operation is exact."""
    found = []
    for phase in phases:
        step = phase.header["first_step"]
        stage = next(o.stage for o in observables if o.applies(step))
        for leak in phase.footer["leaks"]:
            name = f"{leak['op']} at {leak['where']}: a lower precision in the exact tier, {leak['count']} times"
            found.append(Measurement(stage=stage, tensor=name, step=step, error=math.inf, fixed=0.0))
    return found


def _judged(m: Measurement, allowed: float, facts: Facts) -> Quantity:
    quantity = Quantity(stage=m.stage, tensor=m.tensor, step=m.step, observed=m.error, allowed=allowed)
    if m.error <= allowed:
        return quantity
    return replace(quantity, max_abs=m.max_abs, where=m.where, hint=likely_cause(m, facts, allowed=allowed))


def _difference(verdict: Verdict, more: Sequence[str]) -> str:
    quantities, findings = verdict.quantities, verdict.findings
    first = findings[0]
    same = [f for f in findings if (f.stage, f.step) == (first.stage, first.step)]
    total = sum((q.stage, q.step) == (first.stage, first.step) for q in quantities)
    worst = max(same, key=lambda finding: finding.urgency)
    head = f"first difference at {first.stage}, step {first.step}, {len(same)} of {total} tensors; worst: {worst}"
    return "; ".join([head, *more])
