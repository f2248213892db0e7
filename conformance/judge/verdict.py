"""Judge: a cell's record and the oracle's give a verdict, with the first difference and a guess at its cause.

Needs no GPU, no backend and no ranks, so old records can be judged again. A comparison that cannot be made (a truncated
record, a missing stage) is never a pass (claim 8).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from conformance.judge.compare import STAGES, measure
from conformance.layout import Layout
from conformance.record.tensors import Record, RecordError, read_record
from conformance.scenario import Scenario, parse_scenario
from conformance.judge.tolerance import Quantity, allowed_errors, is_too_exact

State = Literal["conforms", "differs", "unsupported", "expected_difference", "infrastructure", "not_run"]
STATES: tuple[State, ...] = (
    "conforms",
    "differs",
    "unsupported",
    "expected_difference",
    "infrastructure",
    "not_run",
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One quantity outside its tolerance."""

    stage: str
    tensor: str
    step: int
    observed: float
    allowed: float
    max_abs: float
    where: str
    hint: str

    def __str__(self) -> str:
        hint = f" ({self.hint})" if self.hint else ""
        size = f"{self.observed:.2e} off, allowed {self.allowed:.2e}"
        return f"{self.stage}, step {self.step}: {self.tensor} is {size}{hint}"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is said of one cell. ``stages`` holds the worst quantity of each stage, ``quantities`` all of them."""

    state: State
    reason: str
    findings: list[Finding] = field(default_factory=list)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    quantities: list[dict[str, Any]] = field(default_factory=list)

    @property
    def first_stage(self) -> str:
        """Stage of the first finding in causal order; empty if there is none."""
        return self.findings[0].stage if self.findings else ""


def judge_folder(record: Path, oracle: Path) -> Verdict:
    """Judge the record in one folder against the oracle runs in another (``float64`` and the cell's precision)."""
    try:
        cell = read_record(record)
        scenario = parse_scenario(cell.header["scenario"])
        reference = read_record(oracle / "float64")
        noise = None if scenario.precision == "exact" else read_record(oracle / scenario.precision)
        return judge(cell, oracle=reference, noise=noise)
    except RecordError as error:
        return Verdict(state="infrastructure", reason=str(error))


def judge(record: Record, *, oracle: Record, noise: Record | None) -> Verdict:
    """Compare a complete record with the float64 oracle; ``noise``: the single-process run in the cell's precision.

    Raises RecordError if the records do not belong together, or the noise is none that this precision can have.
    """
    scenario = parse_scenario(record.header["scenario"])
    layout = Layout.parse(record.header["layout"])
    for other in (oracle, noise or oracle):
        _same_training(record, other)
    quantities = measure(record, oracle)
    rounding = measure(noise, oracle) if noise else []
    if is_too_exact(quantities, precision=scenario.precision, noise=rounding):
        name = f"all: closer to float64 than {scenario.precision} can be, so computed in a higher precision"
        quantities.append(Quantity(stage="gradients", tensor=name, step=0, error=math.inf, fixed=0.0))
    bounds = allowed_errors(quantities, precision=scenario.precision, noise=rounding)
    tokens = {step.step: step.values["token_count"] for step in oracle.steps}
    order = {stage: i for i, stage in enumerate(STAGES)}
    quantities.sort(key=lambda q: (q.step, order[q.stage]))
    wrong = [q for q in quantities if not q.error <= bounds[q.key]]
    findings = [
        Finding(
            stage=q.stage,
            tensor=q.tensor,
            step=q.step,
            observed=q.error,
            allowed=bounds[q.key],
            max_abs=q.max_abs,
            where=q.where,
            hint=hint(q, scenario=scenario, layout=layout, tokens=tokens.get(q.step, 1)),
        )
        for q in wrong
    ]
    return Verdict(
        state="differs" if findings else "conforms",
        reason=_reason(findings, quantities, record),
        findings=findings,
        stages=_worst(quantities, bounds),
        quantities=[
            {"stage": q.stage, "tensor": q.tensor, "step": q.step, "observed": q.error, "allowed": bounds[q.key]}
            for q in quantities
        ],
    )


def _same_training(record: Record, other: Record) -> None:
    """Raises RecordError if the two are not of one scenario, apart from its name, precision and micro-batches."""
    mine, theirs = (
        replace(parse_scenario(r.header["scenario"]).reference, name="any", precision="exact") for r in (record, other)
    )
    if mine != theirs:
        raise RecordError(f"{record.path} and {other.path} are of different scenarios; judge each by its own oracle")


def hint(quantity: Quantity, *, scenario: Scenario, layout: Layout, tokens: int) -> str:
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
    if quantity.stage == "replicas":
        return "ranks that should hold the same numbers do not: a reduction over these ranks is missing"
    if quantity.stage == "clipped update" and quantity.tensor == "lr":
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


def _reason(findings: Sequence[Finding], quantities: Sequence[Quantity], record: Record) -> str:
    leaks = record.footer.get("leaks", [])
    leak = f"; float32 left in the exact tier by {leaks[0]['op']} at {leaks[0]['where']}" if leaks else ""
    if not findings:
        unseen = [stage for stage in STAGES if stage not in {q.stage for q in quantities}]
        not_observed = f"; not observed: {', '.join(unseen)}" if unseen else ""
        return f"{len(quantities)} quantities agree with the oracle{not_observed}{leak}"
    first = findings[0]
    same = [f for f in findings if (f.stage, f.step) == (first.stage, first.step)]
    total = sum((q.stage, q.step) == (first.stage, first.step) for q in quantities)
    worst = max(same, key=lambda f: f.observed / f.allowed if f.allowed else math.inf)
    return f"first difference at {first.stage}, step {first.step}, {len(same)} of {total} tensors; worst: {worst}{leak}"


def _worst(quantities: Sequence[Quantity], bounds: dict[tuple[str, str, int], float]) -> dict[str, dict[str, Any]]:
    stages: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        ratios = [(_ratio(q.error, bounds[q.key]), q) for q in quantities if q.stage == stage]
        if ratios:
            ratio, q = max(ratios, key=lambda pair: pair[0])
            stages[stage] = {
                "ratio": ratio,
                "observed": q.error,
                "allowed": bounds[q.key],
                "tensor": q.tensor,
                "step": q.step,
            }
    return stages


def _ratio(error: float, allowed: float) -> float:
    if error == 0:
        return 0.0
    return error / allowed if allowed else math.inf
