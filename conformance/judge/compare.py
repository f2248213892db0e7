"""Compare: every quantity of a record against the oracle's, stage by stage, in causal order.

The same measurement is applied to a cell and to the single-process run that gives the noise; whether an error is small
enough is for conformance.judge.tolerance, what it means for conformance.judge.
"""

import math
from collections.abc import Iterator, Mapping

import torch

from conformance.layout import Layout
from conformance.record.tensors import Record, StepRecord
from conformance.judge.tolerance import FLOOR, NORM_ROUNDINGS, ROUNDING, SETTING, Quantity

STAGES = (
    "weights",
    "log-probs",
    "loss",
    "gradients",
    "replicas",
    "gradient norm",
    "clipped update",
    "weights after N steps",
)
"""The stages in causal order: what is wrong at one is expected to show at all later ones."""

Tensors = Mapping[str, torch.Tensor]


def measure(record: Record, oracle: Record) -> list[Quantity]:
    """All quantities that both observed, by step and then by stage.

    Tensors that only one of them has give a quantity of infinite error.
    """
    start, start_ref = record.initial.tensors(), oracle.initial.tensors()
    replicated = Layout.parse(record.header["layout"]).rep > 1
    quantities = list(_tensors("weights", -1, named(start, "weight/"), named(start_ref, "weight/"), fixed=SETTING))
    for step, reference in zip(record.steps, oracle.steps, strict=False):
        quantities += _step(step, reference, start=start, start_ref=start_ref, replicated=replicated)
    quantities += _gaps(record)
    if len(record.steps) != len(oracle.steps):
        missing = f"{len(record.steps)} of {len(oracle.steps)} steps"
        quantities.append(_infinite("loss", missing, len(record.steps)))
    return quantities


def _gaps(record: Record) -> Iterator[Quantity]:
    """What was observed at some steps has to be observed at all."""
    for stage, seen in (
        ("log-probs", [any(name.startswith("logprob/") for name in step.tensors()) for step in record.steps]),
        ("gradient norm", [step.values.get("grad_norm") is not None for step in record.steps]),
        ("replicas", [step.values.get("replicas", {}).get("offered", 0) > 0 for step in record.steps]),
    ):
        if any(seen):
            for step, here in enumerate(seen):
                if not here:
                    yield _infinite(stage, "observed at other steps, missing at this one", step)


def _step(
    step: StepRecord, oracle: StepRecord, *, start: Tensors, start_ref: Tensors, replicated: bool
) -> Iterator[Quantity]:
    number, tensors, reference = step.step, step.tensors(), oracle.tensors()
    logprobs, logprobs_ref = named(tensors, "logprob/"), named(reference, "logprob/")
    if logprobs:
        yield _logprobs(number, logprobs, logprobs_ref)
    yield _scalar(
        "loss", "token_count", number, step.values["token_count"], oracle.values["token_count"], fixed=SETTING
    )
    yield _scalar("loss", "loss", number, step.values["loss"], oracle.values["loss"])
    gradients = named(tensors, "gradient/")
    yield from _tensors("gradients", number, gradients, named(reference, "gradient/"))
    replicas = step.values.get("replicas", {"offered": 0, "compared": 0, "differing": []})
    if replicated and replicas["offered"] and not replicas["compared"]:
        yield _infinite("replicas", "the layout has replicas, but no piece is named alike by two ranks", number)
    if replicas["compared"] and not replicas["differing"]:
        pieces = f"{replicas['compared']} pieces held by several ranks"
        yield Quantity(stage="replicas", tensor=pieces, step=number, error=0.0, fixed=ROUNDING)
    for entry in replicas["differing"]:
        name = f"{entry['kind']} {entry['tensor']} on ranks {', '.join(map(str, entry['ranks']))}"
        yield Quantity(stage="replicas", tensor=name, step=number, error=entry["relative"], fixed=ROUNDING)
    if (reported := step.values.get("grad_norm")) is not None:
        yield _scalar("gradient norm", "reported", number, reported, oracle.values["grad_norm"])
        rebuilt = math.sqrt(sum(g.double().square().sum().item() for g in gradients.values()))
        bound = NORM_ROUNDINGS * ROUNDING
        yield _scalar("gradient norm", "reported against rebuilt", number, reported, rebuilt, fixed=bound)
    yield _scalar("clipped update", "lr", number, step.values["lr"], oracle.values["lr"], fixed=SETTING)
    stage = "clipped update" if number == 0 else "weights after N steps"
    update = movement(named(tensors, "weight/"), named(start, "weight/"))
    yield from _tensors(stage, number, update, movement(named(reference, "weight/"), named(start_ref, "weight/")))


def movement(weights: Tensors, start: Tensors) -> dict[str, torch.Tensor]:
    """Distance of each weight from where it started: an update is judged by its own size, not the weight's."""
    return {name: weight.double() - start[name].double() for name, weight in weights.items() if name in start}


def _tensors(
    stage: str, step: int, tensors: Tensors, reference: Tensors, *, fixed: float | None = None
) -> Iterator[Quantity]:
    floor = floor_of(reference)
    for name, ref in reference.items():
        if name not in tensors:
            yield _infinite(stage, f"{name} (missing)", step)
        elif tensors[name].shape != ref.shape:
            shapes = f"{tuple(tensors[name].shape)} instead of {tuple(ref.shape)}"
            yield _infinite(stage, f"{name} (shape {shapes})", step)
        else:
            yield _tensor(stage, name, step, tensors[name], ref, floor=floor, fixed=fixed)
    for name in tensors.keys() - reference.keys():
        yield _infinite(stage, f"{name} (unexpected)", step)


def floor_of(reference: Tensors) -> float:
    """The least norm that an error of these tensors is relative to."""
    squares = [t.double().square().sum().item() for t in reference.values()]
    return FLOOR * math.sqrt(sum(squares) / max(1, len(squares)))


def _tensor(
    stage: str, name: str, step: int, x: torch.Tensor, ref: torch.Tensor, *, floor: float, fixed: float | None
) -> Quantity:
    x, ref = x.double(), ref.double()
    difference = (x - ref).abs()
    norm = ref.norm().item()
    at = int(difference.argmax()) if difference.numel() else 0
    return Quantity(
        stage=stage,
        tensor=name,
        step=step,
        error=_finite(difference.norm().item() / (max(norm, floor) or 1.0)),
        fixed=fixed,
        max_abs=_finite(difference.max().item() if difference.numel() else 0.0),
        where=str([int(i) for i in torch.unravel_index(torch.tensor(at), ref.shape)]) if ref.ndim else "",
        scale=((x * ref).sum() / ref.square().sum()).item() if norm else None,
    )


def _logprobs(step: int, rows: Tensors, reference: Tensors) -> Quantity:
    """All target tokens of the step as one vector; ``where`` names the row and target that are furthest off."""
    if set(rows) != set(reference) or any(rows[r].shape != reference[r].shape for r in reference):
        wrong = sorted(set(rows) ^ set(reference)) or [r for r in reference if rows[r].shape != reference[r].shape]
        return _infinite("log-probs", f"rows {', '.join(wrong[:8])} missing, unexpected or of another length", step)
    order = sorted(reference, key=int)
    x, ref = torch.cat([rows[r].double() for r in order]), torch.cat([reference[r].double() for r in order])
    quantity = _tensor("log-probs", "log-probs", step, x, ref, floor=0.0, fixed=None)
    at = int((x - ref).abs().argmax())
    for row in order:
        if at < len(reference[row]):
            break
        at -= len(reference[row])
    fields = {**vars(quantity), "scalar": True, "where": f"row {row}, target {at}"}
    return Quantity(**fields)


def _scalar(stage: str, name: str, step: int, x: float, ref: float, *, fixed: float | None = None) -> Quantity:
    error = abs(x - ref) / (abs(ref) or 1.0)
    scale = x / ref if ref else None
    return Quantity(
        stage=stage,
        tensor=name,
        step=step,
        error=_finite(error),
        scalar=True,
        fixed=fixed,
        max_abs=abs(x - ref),
        scale=scale,
    )


def _infinite(stage: str, tensor: str, step: int) -> Quantity:
    return Quantity(stage=stage, tensor=tensor, step=step, error=math.inf, fixed=0.0)


def _finite(error: float) -> float:
    """NaN would pass every comparison; it is as wrong as can be."""
    return math.inf if math.isnan(error) else error


def named(tensors: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of one kind (``gradient/``, ``weight/``, ``logprob/``), by name without it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
