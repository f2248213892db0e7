"""Bounds the effect of rounding where it is amplified, and detects gradients that were added up in half precision.

AdamW divides by sqrt(v) + eps. An element whose gradients consist of rounding errors moves by up to twice the learning
rate, in a random direction; with the usual eps of 1e-8 every model has such elements. A single-process run has a few of
them by chance, which does not limit how many another honest run may have. So they are identified: an element is noisy
if d / (sqrt(v) + eps) is above NOISY times the relative noise of its tensor's gradient. Here d is the root mean square
of the noise in the element's row.

The exact tier has no run that shows noise. There the noise is the error of the cell's own gradients, as far as it is
within their bound: a larger error is not rounding, and nothing is allowed for it. All elements are counted, because
their effect is far below the bound of an update unless it is amplified. Of a sketched tensor, the sample is searched.

Contributions of a document's values to a row of the embedding may nearly cancel, while their correlated errors do not
(docs/explanations/tolerances.md). Single-process runs give the size of these errors: the root mean square, over
hundreds of values, of the errors of the gradients of the loss with respect to the values. The oracle gives how far a
row moves with them (conformance.oracle.step).

Adding up micro-batches and ranks in bf16 costs a gradient 1e-3, which disappears in the noise of bf16 itself. But each
element keeps a trace: a sum that is rounded to bf16 can be represented in bf16. A float32 sum of several bf16 numbers
mostly cannot: over three backends, about 0.8 / n of the elements can, for n summands.

A micro-batch without targets adds nothing. Experts are judged separately, because each expert has its own number of
summands: a micro-batch that sends it no token adds none.
"""

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from conformance.judge.tensor_views import Leeway, StepViews, Tensors, floor_of_tensors, movement
from conformance.judge.tolerance import EXACT, NOISE_FACTOR, OF_ROWS, Key, Measurement
from conformance.oracle.optimizer import clip_factor
from conformance.records.record_format import AGAIN, RecordError
from conformance.records.step_tensors import Record, StepRecord
from conformance.spec.batch import Batch, Document, expert_column
from conformance.spec.layout import Layout
from conformance.spec.observables import ROUTING, SHARE, SHIFTED, VALUE_GRADIENT, Observable
from conformance.spec.offline import Sft
from conformance.spec.precision import FloatFormat
from conformance.spec.scenario import Scenario

NOISY = 3.0


@dataclass(kw_only=True)
class Amplified:
    """``updates``: how far noisy elements may move a weight, relative like its measurement, by stage, tensor and step.
    ``drift``: by step, the factor by which weights may be further apart than those of the single-process run."""

    updates: dict[tuple[str, str, int], float] = field(default_factory=dict)
    drift: dict[int, float] = field(default_factory=dict)


def amplified_noise(runs: Sequence[Sequence[StepRecord]], oracle: Record, scenario: Scenario) -> Amplified:
    """Computes the amplified noise from the steps of the single-process runs in the cell's precision (in the exact
    tier: of the cell itself) and the float64 oracle. SGD amplifies nothing."""
    found = Amplified()
    if scenario.optimizer.name == "sgd":
        return found
    for key in dict.fromkeys(o.key for o in oracle.observables if o.rebuilt):
        weights = [o for o in oracle.observables if o.key == key and o.rebuilt]
        for run in runs:
            for step, errors, drift in _of_model(run, oracle, scenario, key):
                stage = next(o.stage for o in weights if o.applies(step))
                for name, error in errors.items():
                    place = stage, name, step
                    found.updates[place] = max(error, found.updates.get(place, 0.0))
                found.drift[step + 1] = max(drift, found.drift.get(step + 1, 1.0))
    found.updates = {place: error for place, error in found.updates.items() if error}
    return found


def _of_model(
    run: Sequence[StepRecord], oracle: Record, scenario: Scenario, key: str
) -> Iterator[tuple[int, dict[str, float], float]]:
    """Yields, after each step, the largest possible relative error of each tensor, and the drift that follows."""
    config, exact = scenario.optimizer, scenario.tier.is_exact
    gradient, rate = (key.removesuffix("weight") + name for name in ("gradient", "lr"))
    start, steps = _float64(StepViews(oracle.loaded.tensors()), key), {step.step: step for step in run}
    second, moved = ({name: torch.zeros_like(weight) for name, weight in start.items()} for _ in range(2))
    noise: dict[str, torch.Tensor] = {}  # a step without gradients keeps that of the previous step
    count = 0  # number of updates
    for reference in (step for step in oracle.steps if step.step in steps):
        own, expected = StepViews(steps[reference.step].tensors()), StepViews(reference.tensors())
        lr, weights, gradients = reference.value(rate) or 0.0, _float64(expected, key), _float64(expected, gradient)
        factor = clip_factor(expected[gradient].norm, config.max_grad_norm)
        count += bool(gradients)  # a skipped update has none
        noise |= _noise(_float64(own, gradient), gradients, most=EXACT if exact else math.inf)
        for name, g in gradients.items():
            if config.orthogonalizes(name, g.ndim):  # what Muon amplifies shows in the noise of its update
                continue
            error = noise.get(name, torch.zeros_like(g))
            relative = error.norm() / g.norm().clamp(min=torch.finfo(g.dtype).tiny)
            rows = (factor * error).reshape(len(g) if g.ndim > 1 else 1, -1)
            d = rows.square().mean(dim=1).sqrt().reshape(-1, *[1] * (g.ndim - 1))
            second[name] = config.betas[1] * second[name] + (1 - config.betas[1]) * (factor * g).square()
            size = (second[name] / (1 - config.betas[1] ** count)).sqrt() + config.eps
            least = 0.0 if exact else NOISY * relative
            moved[name] = moved[name] + torch.where(d > least * size, lr * (d / size).clamp(max=2.0), 0.0)
        movements = dict(movement(weights, start))
        floor = floor_of_tensors(movements)
        errors = {
            name: m.norm().item() / (max(movements[name].norm().item(), floor) or 1.0) for name, m in moved.items()
        }
        possible = _norm(moved.values())
        distance = _norm([w - weights[name] for name, w in _float64(own, key).items()]) if not exact else 0.0
        yield reference.step, errors, max(1.0, possible / distance) if distance else 1.0


def _noise(own: Tensors, reference: Tensors, *, most: float) -> dict[str, torch.Tensor]:
    """Returns the errors of gradients, without gradients whose relative error exceeds ``most``."""
    floor = floor_of_tensors(reference)
    errors = {name: own[name] - g for name, g in reference.items() if name in own and own[name].shape == g.shape}
    return {name: e for name, e in errors.items() if e.norm() <= most * max(reference[name].norm().item(), floor)}


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(tensor.square().sum().item() for tensor in tensors))


def _float64(views: StepViews, key: str) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in views[key].elements.items()}


def leeway_of_rows(
    runs: Sequence[Sequence[StepRecord]], oracle: Record, bounds: Mapping[Key, float]
) -> dict[Key, Leeway]:
    """Returns the leeway of rows by the key of the measurement of the worst row. ``runs``: the steps of the
    single-process runs. ``bounds``: of all quantities of these runs. Rows whose bound is 0, or whose movement the
    oracle did not record, get no leeway.

    Raises RecordError if the oracle's record gives the movement of other rows than it has.
    """
    found = {}
    for o in (o for o in oracle.observables if o.rowwise):
        prefix = o.key.removesuffix("gradient")
        for number, reference in enumerate(oracle.steps):
            values = _read(reference, prefix + VALUE_GRADIENT)
            error = max((_error(_read(run[number], prefix + VALUE_GRADIENT), values) for run in runs), default=0.0)
            for name, moved in _read(reference, prefix + SHIFTED).items():
                rows = reference.shapes().get(f"{o.key}/{name}", ())[:1]
                if moved.shape != rows:
                    shapes = f"the movement of {tuple(moved.shape)} rows of {name}, but has {tuple(rows)}"
                    raise RecordError(f"{reference.path} gives {shapes}; {AGAIN}")
                key = o.stage, f"{name} {OF_ROWS}", reference.step
                if bound := bounds.get(key):
                    found[key] = Leeway(rows=NOISE_FACTOR * error * moved, bound=bound)
    return found


def _read(step: StepRecord, key: str) -> dict[str, Tensor]:
    """Reads the tensors of one key, in float64 by name."""
    with step.open() as file:
        names = [name for name in file.keys() if name.startswith(f"{key}/")]  # noqa: SIM118
        return {name.removeprefix(f"{key}/"): file.get_tensor(name).double() for name in names}


def _error(own: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float:
    """Returns the root mean square of the differences; 0 if the run has different rows or none."""
    if own.keys() != reference.keys() or any(own[row].shape != ref.shape for row, ref in reference.items()):
        return 0.0
    squares = sum((own[row] - ref).square().sum().item() for row, ref in reference.items())
    return math.sqrt(squares / max(1, sum(ref.numel() for ref in reference.values())))


COARSE = 1.2  # the bound of the fraction of coarse elements times the number of summands
COARSE_PART = 0.75  # the bound of the fraction of coarse elements of one tensor, or of rows
FEWEST_ELEMENTS = 16  # of which a fraction is taken
SAMPLE, REFERENCES = 256, 4  # elements in which a common factor is looked for, and that it is looked for by
FACTOR_ROUNDING = 2.0**-22  # relative: of a multiplication by the factor in float32
IN_FLOAT32 = ("logprob", "old_logprob", "entropy")
SMALL = 2.0**-10
HIDING = 2.0**8  # a weight of one document beside which the digits of others are lost, in part or wholly
FEWEST = 3  # least number of summands; a sum of two has too many coarse elements
EMBEDDED = "embed"  # a row of an embedding may have a single summand: the only micro-batch with its token
STACKED = re.compile(r"\.(\d+)\.mlp\.experts\.")  # the name of the stacked experts of one layer


def measure_accumulation_precision(
    phases: Sequence[Record], scenario: Scenario, gradients: Sequence[Observable], batches: Sequence[Batch]
) -> Iterator[Measurement]:
    """Measures, for each phase and model, the fraction of elements that the half precision can represent, times the
    number of summands of a gradient: the median over tensors and steps, and a separate median over routed experts.
    A tensor that is coarse as a whole at every step is a finding of its own, except for an embedding.

    Steps with fewer than FEWEST summands are left out. ``batches`` contain the choices of the routers
    (conformance.oracle.run). Without them experts are not measured: the oracle does not know the routers of
    such a model. Experts are not measured in reinforcement learning either, where a token may have a target and no
    gradient (an advantage of 0, a clipped ratio). Raises RecordError for batches without choices of a router.
    """
    if scenario.tier.summing == scenario.tier.compute:
        return
    for phase in phases:
        summands = summands_of_steps(phase, scenario)
        for o in gradients:
            by_name: dict[str, list[tuple[float, int]]] = defaultdict(list)  # fractions and summands
            for step in (step for step in phase.steps if summands[step.step] >= FEWEST):
                for name, tensor in StepViews(step.tensors())[o.key].elements.items():
                    if tensor.any() and not STACKED.search(name):
                        fraction = coarse_fraction(tensor, scenario.tier.compute)
                        by_name[name].append((fraction, summands[step.step]))
            dense = [fraction * count for found in by_name.values() for fraction, count in found]
            is_known = batches and scenario.objective.kind == "sft"
            routed = _of_experts(phase, o, scenario, batches) if is_known else []
            for found, whose in ((dense, ""), (routed, "experts' ")):
                if found:
                    yield Measurement(
                        stage=o.stage,
                        tensor=f"{whose}{o.key}{SHARE}that are {scenario.precision} numbers, so added up in it",
                        step=phase.header["first_step"],
                        error=statistics.median(found),
                        fixed=COARSE,
                    )
            parts = {name: min(fraction for fraction, _ in found) for name, found in by_name.items()}
            for name in sorted(name for name, part in parts.items() if part > COARSE_PART and EMBEDDED not in name):
                yield Measurement(
                    stage=o.stage,
                    tensor=f"{o.key}{SHARE}of {name} that are {scenario.precision} numbers, so added up in it",
                    step=phase.header["first_step"],
                    error=parts[name],
                    fixed=COARSE_PART,
                )


def summands_of_steps(phase: Record, scenario: Scenario) -> Mapping[int, int]:
    """Returns the number of summands of a gradient by step: one for each micro-batch with targets of each data-parallel
    rank, times the ranks that share its rows; a single one where a document's weight hides all others. Older records
    do not say which micro-batches have targets."""
    batches = phase.footer.get("batches", ())
    counts = {given["step"]: sum(bool(count) for rank in given["targets"] for count in rank) for given in batches}
    ranks, by_default = phase.layout.sp * phase.layout.ulysses, scenario.accumulation * phase.layout.data
    weights = dict(enumerate(scenario.objective.document_weights)) if isinstance(scenario.objective, Sft) else {}
    return {
        step.step: 1 if weights.get(step.step, 1.0) > HIDING else ranks * counts.get(step.step, by_default)
        for step in phase.steps
    }


def _of_experts(phase: Record, gradient: Observable, scenario: Scenario, batches: Sequence[Batch]) -> list[float]:
    """Returns, for each step and each expert with at least FEWEST summands, the fraction of coarse elements times the
    number of summands. Sketches are skipped, because their sample mixes all experts."""
    layers = sorted({int(found[1]) for name in phase.loaded.names() if (found := STACKED.search(name))})
    fractions = []
    for step in phase.steps:
        for name, stacked in StepViews(step.tensors())[gradient.key].elements.items():
            if (found := STACKED.search(name)) and len(stacked) > 1:
                batch = next(b for b in batches if b.step == step.step)
                router = layers.index(int(found[1]))
                counts = expert_summands(
                    batch,
                    key=gradient.key.replace("gradient", ROUTING),
                    router=router,
                    is_last=router == len(layers) - 1,
                    layout=phase.layout,
                    accumulation=scenario.accumulation,
                )
                fractions += [
                    coarse_fraction(stacked[expert], scenario.tier.compute) * count
                    for expert, count in counts.items()
                    if count >= FEWEST and stacked[expert].any()
                ]
    return fractions


def expert_summands(
    batch: Batch, *, key: str, router: int, is_last: bool, layout: Layout, accumulation: int
) -> Counter[int]:
    """Counts the least number of summands of the gradient of each expert of a router, by the expert's number.

    One for each micro-batch of each data-parallel rank in which a token that the loss depends on goes to the expert;
    with ``ep``, one product may contain the tokens of all ranks. Context parallelism cuts these further, which only
    adds summands. ``key``: the observable of the routing. ``is_last``: the loss depends on tokens of this router only
    through their own predictions.
    """
    summands: Counter[int] = Counter()
    parts = [
        batch.micro_batches(dp_rank=rank, dp_size=layout.data, accumulation=accumulation) for rank in range(layout.data)
    ]
    for of_ranks in zip(*parts, strict=True):
        chosen = [
            {
                expert
                for row in rows
                for document in row.documents
                for expert in _chosen(document, key=key, router=router, is_last=is_last)
            }
            for rows in of_ranks
        ]
        summands.update(set().union(*chosen) if layout.ep > 1 else [expert for part in chosen for expert in part])
    return summands


def _chosen(document: Document, *, key: str, router: int, is_last: bool) -> Iterator[int]:
    """Yields the experts that a router chooses for those tokens of a document that the loss depends on."""
    if document.columns.get(expert_column(router, 0, key)) is None:
        raise RecordError(f"the batches do not say which experts router {router} chooses ({key}); {AGAIN}")
    slot = 0
    last = max((i for i, target in enumerate(document.targets) if target), default=0)  # predicted from those before it
    while isinstance(column := document.columns.get(expert_column(router, slot, key)), tuple):
        yield from (int(column[i]) for i in range(last) if document.targets[i + 1] or not is_last)
        slot += 1


def coarse_fraction(tensor: torch.Tensor, number_format: FloatFormat) -> float:
    """Returns the fraction of nonzero elements with no more significant bits than the format has, or that have no more
    once a factor is undone that all elements share: a sum that was rounded may be divided afterwards.

    The factor is looked for in a sample: a number of the format divided by one of few elements.
    """
    bits = number_format.significant_bits
    mantissas = torch.frexp(tensor[tensor != 0].flatten().double()).mantissa.abs()
    plain = float((mantissas * 2**bits % 1 == 0).double().mean())
    sample = mantissas[:: max(1, len(mantissas) // SAMPLE)][:SAMPLE]
    if len(sample) < FEWEST_ELEMENTS:
        return plain

    def coarse(numbers: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        undone = torch.frexp(numbers * factors[:, None]).mantissa * 2**bits
        near: torch.Tensor = (undone - undone.round()).abs() <= 2**bits * FACTOR_ROUNDING
        return near.double().mean(dim=1)

    representable = torch.arange(2 ** (bits - 1), 2**bits, dtype=torch.float64) / 2**bits
    found = torch.cat([representable / one for one in sample[:: len(sample) // REFERENCES][:REFERENCES]])
    best = found[coarse(sample, found).argmax()]
    return max(plain, coarse(mantissas, best[None]).item())


def measure_row_precision(
    phases: Sequence[Record], noise: Sequence[Record], observables: Sequence[Observable]
) -> Iterator[Measurement]:
    """Measures, for each phase and kind of row that is computed in float32 by convention, the fraction of numbers that
    the half precision can represent. Logits may be in half precision, log-softmax and entropy may not.

    Numbers below SMALL are left out: a difference of float32 numbers near 1 has few digits there. Rows that are such
    numbers in a single-process run as well are not measured.
    """
    number_format, precision = phases[0].scenario.tier.compute, phases[0].scenario.precision
    if not phases[0].scenario.tier.is_half:
        return
    for o in (o for o in observables if o.kind == "rows" and o.key.rpartition(".")[2] in IN_FLOAT32):
        if any(_fraction_of_rows(run, o, number_format) > COARSE_PART for run in noise):
            continue
        for phase in phases:
            yield Measurement(
                stage=o.stage,
                tensor=f"{o.key}: numbers that are {precision} numbers, so computed in it instead of float32",
                step=phase.header["first_step"],
                error=_fraction_of_rows(phase, o, number_format),
                fixed=COARSE_PART,
            )


def _fraction_of_rows(record: Record, o: Observable, number_format: FloatFormat) -> float:
    rows = [row.flatten() for step in record.steps for row in StepViews(step.tensors())[o.key].tensors.values()]
    numbers = torch.cat(rows) if rows else torch.zeros(0)
    numbers = numbers[numbers.abs() >= SMALL]
    if len(numbers) < FEWEST_ELEMENTS:
        return 0.0
    scaled = torch.frexp(numbers.double()).mantissa * 2**number_format.significant_bits
    return float((scaled == scaled.round()).double().mean())
