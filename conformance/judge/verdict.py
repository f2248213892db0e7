"""Judge: a cell's record and the oracle's give a verdict, with the first difference and a guess at its cause.

Needs no GPU, no backend and no ranks, so old records can be judged again. A comparison that cannot be made (a truncated
record, a missing stage) is never a pass (claim 8).
"""

import math
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from conformance.judge.amplified import Amplified, amplified_noise
from conformance.judge.belongs import read_records
from conformance.judge.compare import measure, named
from conformance.judge.configuration import configurations
from conformance.judge.grain import grains
from conformance.judge.rebuild import rebuilt_updates
from conformance.judge.tolerance import Measurement, allowed_errors, gradient_stages, is_too_exact
from conformance.judge.unobserved import unobserved
from conformance.layout import Layout
from conformance.observable import Observable, stages
from conformance.record.format import RecordError
from conformance.record.states import State
from conformance.record.tensors import Record
from conformance.record.verdict import Quantity, Verdict
from conformance.scenario import Scenario, parse_scenario

DEFECT = "the judge failed on these records, which is a defect of the suite"


def judge_folders(cell: str, legs: Sequence[Path], oracle: Path) -> Verdict:
    """Judge the records of the legs of the cell with this id against the oracle's in ``oracle``.

    A record that cannot be trusted, or that is not the cell's own or the oracle's, gives an infrastructure failure.
    """
    try:
        records = read_records(cell, legs, oracle)
        return judge(records.legs, oracle=records.oracle, noise=records.noise)
    except RecordError as error:
        return Verdict(state="infrastructure", reason=str(error))
    except Exception as error:  # a defect of the judge must not keep the other cells from being judged
        place = traceback.extract_tb(error.__traceback__)[-1]
        reason = f"{DEFECT}: {error!r} at {Path(place.filename).name}:{place.lineno}; report it with the cell's folder"
        return Verdict(state="infrastructure", reason=reason)


def judge(legs: Sequence[Record], *, oracle: Record, noise: Record | None) -> Verdict:
    """Compare the complete records of all legs with the float64 oracle; they belong together (read_records).

    ``noise``: the single-process run in the cell's precision. Raises RecordError if it is none that this precision can
    have.
    """
    scenario = parse_scenario(legs[0].header["scenario"])
    observables, precision = oracle.observables, scenario.precision
    gradients = gradient_stages(observables)
    found = [
        *measure(legs, oracle),
        *configurations(legs, scenario, vocabulary=_vocabulary(oracle), frozen=_frozen_matrices(oracle)),
        *rebuilt_updates(legs, oracle, scenario),
        *grains(legs, scenario, [o for o in observables if o.stage in gradients]),
    ]
    rounding = measure([noise], oracle) if noise else []
    if is_too_exact(found, precision=precision, noise=rounding, gradients=gradients):
        name = f"all: closer to float64 than {precision} can be, so computed in a higher precision"
        stage = next(o.stage for o in observables if o.stage in gradients)
        found.append(Measurement(stage=stage, tensor=name, step=0, error=math.inf, fixed=0.0))
    found += _leaks(legs, observables)
    amplified = amplified_noise(noise, oracle, scenario) if noise else Amplified()
    bounds = allowed_errors(
        found,
        precision=precision,
        noise=rounding,
        gradients=gradients,
        amplified=amplified.updates,
        drift=amplified.drift,
    )
    order = {stage: i for i, stage in enumerate(stages(observables))}
    found.sort(key=lambda m: (m.step, order[m.stage]))
    tokens = {step.step: step.value("token_count") or 1 for step in oracle.steps}
    layouts = {step.step: Layout.parse(leg.header["layout"]) for leg in legs for step in leg.steps}
    quantities = [_judged(m, bounds[m.key], scenario, layouts, tokens) for m in found]
    strips = tuple(m.strip for m in found if m.strip)
    verdict = Verdict(state="conforms", reason="", quantities=tuple(quantities), strips=strips)
    lost, remarks = ([], []) if verdict.findings else unobserved(legs, quantities, observables)
    state: State = "differs" if verdict.findings else "partly_observed" if lost else "conforms"
    return replace(verdict, state=state, reason=_reason(verdict, lost, remarks))


def _vocabulary(oracle: Record) -> int:
    """Rows of the policy's embedding."""
    tensors = named(oracle.loaded.tensors(), "weight")
    return next((len(tensor) for name, tensor in tensors.items() if name.endswith("embed_tokens.weight")), 0)


def _frozen_matrices(oracle: Record) -> int:
    """Of the policy's linear layers, those that are not trained."""
    trained = named(oracle.steps[0].tensors(), "gradient") if oracle.steps else {}
    loaded = named(oracle.loaded.tensors(), "weight").items()
    return sum(
        tensor.ndim == 2 and name not in trained and not name.endswith("embed_tokens.weight") for name, tensor in loaded
    )


def _leaks(legs: Sequence[Record], observables: Sequence[Observable]) -> list[Measurement]:
    """What was left in a lower precision in the exact tier: nothing after it is exact."""
    found = []
    for leg in legs:
        step = leg.header["first_step"]
        stage = next(o.stage for o in observables if o.applies(step))
        for leak in leg.footer["leaks"]:
            name = f"{leak['op']} at {leak['where']}: a lower precision in the exact tier, {leak['count']} times"
            found.append(Measurement(stage=stage, tensor=name, step=step, error=math.inf, fixed=0.0))
    return found


def _judged(
    m: Measurement, allowed: float, scenario: Scenario, layouts: dict[int, Layout], tokens: dict[int, float]
) -> Quantity:
    if m.error <= allowed:
        return Quantity(stage=m.stage, tensor=m.tensor, step=m.step, observed=m.error, allowed=allowed)
    layout = layouts.get(m.step, next(iter(layouts.values())))
    return Quantity(
        stage=m.stage,
        tensor=m.tensor,
        step=m.step,
        observed=m.error,
        allowed=allowed,
        max_abs=m.max_abs,
        where=m.where,
        hint=hint(m, scenario=scenario, layout=layout, tokens=tokens.get(m.step, 1)),
    )


def hint(quantity: Measurement, *, scenario: Scenario, layout: Layout, tokens: float) -> str:
    """Names a known cause when the quantity is the reference times a number that layout or token count explain.

    ``tokens``: target tokens of the optimizer step.
    """
    sizes: dict[str, float] = {
        "dp": layout.dp,
        "rep": layout.rep,
        "tp": layout.tp,
        "sp": layout.sp,
        "ulysses": layout.ulysses,
        "accumulation": scenario.accumulation,
        "dp x sp": layout.dp * layout.sp,
        "dp x accumulation": layout.dp * scenario.accumulation,
        "world size": layout.world_size,
        "tokens": tokens,
        "tokens / dp": tokens / layout.dp,
    }
    scale = quantity.scale
    if quantity.replica:
        return "ranks that should hold the same numbers do not: a reduction over these ranks is missing"
    if quantity.tensor.rpartition(".")[2] == "lr":
        return "the learning-rate schedule is at another step"
    if scale is None or not math.isfinite(scale) or abs(scale - 1) < 1e-6:
        return ""
    known = [
        text
        for name, size in sizes.items()
        for text, factor in ((name, size), (f"1/({name})", 1 / size), (f"sqrt({name})", size**0.5))
        if size > 1 and abs(scale / factor - 1) < 1e-3
    ]
    if known:
        return f"{scale:.4g} times the reference, which is {' or '.join(known)}"
    return f"{scale:.4g} times the reference" if quantity.scalar else ""


def _reason(verdict: Verdict, lost: Sequence[str], remarks: Sequence[str]) -> str:
    quantities, findings = verdict.quantities, verdict.findings
    if not findings:
        not_observed = [f"not observed: {', '.join(lost)}"] if lost else []
        more = "".join(f"; {said}" for said in (*not_observed, *remarks))
        return f"{len(quantities)} quantities agree with the oracle{more}"
    first = findings[0]
    same = [f for f in findings if (f.stage, f.step) == (first.stage, first.step)]
    total = sum((q.stage, q.step) == (first.stage, first.step) for q in quantities)
    worst = max(same, key=lambda finding: finding.ratio)
    return f"first difference at {first.stage}, step {first.step}, {len(same)} of {total} tensors; worst: {worst}"
