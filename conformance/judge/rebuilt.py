"""Rebuilds what follows from a cell's own record: the gradient norm, the update, numbers made of rows.

A cell's own gradients carry the noise of its precision, so against the oracle an update can only be judged as loosely
as the gradients are: in bf16 a lost weight decay disappears in the noise. Given the gradients, an update has no noise
but the rounding of the optimizer's own arithmetic, which is float32 in every precision below the exact tier. So the
update is computed again in float64 from the cell's gradients and its weights before the step, and compared element by
element: clipping, moments, decay, bias correction and rate. Of a sketched tensor, the elements of its sample are
compared, among them one of each row and one of each column.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch

from conformance.judge.tensor_views import (
    Lazy,
    StepViews,
    Tensors,
    TensorView,
    infinite,
    number_off,
    place,
    tensor_off,
)
from conformance.judge.tolerance import EXACT, NOISE_FACTOR, NORM_ROUNDINGS, ROUNDING, Measurement
from conformance.numerics.comparison import finite
from conformance.numerics.sketch import sampled
from conformance.oracle.loss_terms import divergence
from conformance.oracle.optimizer import AdamW, Muon, clip_factor, make_optimizer, stacked
from conformance.oracle.primitives import HONEST, UNNAMED_NORM, Variant
from conformance.records.step_tensors import Record, StepRecord
from conformance.spec.objectives import REFERENCE_KL, PolicyGradient
from conformance.spec.observables import AGAINST_REBUILT, LOGPROBS, LOSS, SKIPPED, Observable, is_unread
from conformance.spec.precision import FloatFormat
from conformance.spec.scenario import OptimizerConfig, Scenario

REBUILT_ROUNDINGS = 4  # of a weight; a multiplication for decay and a subtraction of the update round it twice
MOMENT_ROUNDINGS = 8  # of a moment in a step: norm, clip factor and clipping, two products and their sum
LEAST_OF_MUON = 2.0**-7  # noise of its update, two roundings of bfloat16, whatever some draws show by chance
UPDATE_ROUNDINGS = 64  # of an update: norm and clipping, two moments, a square root, divisions, and the rate

UNCHANGED = " where the update is skipped"
OF_MUON = " of the update by Muon of "
CLIP = f"all: clip factor{AGAINST_REBUILT}"  # of gradients that were not read


def rebuilt_norm(o: Observable, step: StepRecord, oracle: StepRecord, views: StepViews) -> Iterator[Measurement]:
    """Compares a reported norm with the norm of the tensors that the cell recorded, ``views``, by a sharp bound."""
    own = step.value(o.key)
    if own is not None and o.norm_of and views[o.norm_of].tensors:
        unnamed = unnamed_norm(oracle, o.key.removesuffix("grad_norm"))
        rebuilt = math.hypot(unnamed, views[o.norm_of].norm)
        name, bound = o.key + AGAINST_REBUILT, NORM_ROUNDINGS * ROUNDING
        found = number_off(o.stage, name, step.step, own, rebuilt, unit=rebuilt, fixed=None if unnamed else bound)
        # The unnamed norm is the oracle's, and the cell's has the noise of its precision.
        yield replace(found, typical=bound / NOISE_FACTOR) if unnamed else found


def unnamed_norm(oracle: StepRecord, prefix: str) -> float:
    """Returns the norm of gradients that a known defect adds to the cell's norm but not to its record; else 0.

    ``prefix``: of the model's keys. The number is the oracle's, so it carries the noise of the cell's precision.
    """
    return oracle.value(prefix + UNNAMED_NORM) or 0.0


def rebuilt_of_rows(o: Observable, step: StepRecord, views: StepViews) -> Iterator[Measurement]:
    """Compares a number that follows from rows with the same number recomputed from the cell's own rows.

    The error of a mean is relative to the mean size of the numbers. The error of an explained variance, 1 - ratio, is
    relative to the ratio, whose denominator is verl's.
    """
    own, rows = step.value(o.key), _in_order(views[o.rows_key].tensors)
    if own is None or rows is None:
        if o.required:
            yield infinite(o.stage, f"{o.key} (missing)", step.step)
        return
    if o.mean_of:
        rebuilt, unit = rows.mean(), rows.abs().mean()
    elif o.max_of:
        rebuilt = unit = rows.max()
    else:
        explaining = _in_order(views[o.made_of].tensors)
        if explaining is None or explaining.shape != rows.shape:
            yield infinite(o.stage, f"{o.key} (rows of {o.made_of} are missing or of another length)", step.step)
            return
        unit = (rows - explaining).var() / (rows.var() + 1e-5)
        rebuilt = 1 - unit
    bound = NORM_ROUNDINGS * ROUNDING
    yield number_off(o.stage, o.judged_as, step.step, own, rebuilt.item(), unit=unit.item(), fixed=bound)


def rebuilt_losses(phases: Sequence[Record], oracle: Record, scenario: Scenario) -> Iterator[Measurement]:
    """Compares the KL estimates of tokens, and the loss, with what follows from the cell's own log-probs, and from the
    parts of the loss. All of them are float32 by convention.

    Rounding hides a small part of the loss from a comparison with the oracle in half precision, but not from this one.
    Conventions may change what follows; the oracle, which has them, shows it.
    """
    references = {step.step: step for step in oracle.steps}
    for step in (step for phase in phases for step in phase.steps if isinstance(scenario.objective, PolicyGradient)):
        if reference := references.get(step.step):
            follows = {m.key for m in _losses(reference, reference, scenario) if m.error <= EXACT}
            yield from (m for m in _losses(step, reference, scenario) if m.key in follows)


def _losses(step: StepRecord, oracle: StepRecord, scenario: Scenario) -> Iterator[Measurement]:
    o, bound, views = scenario.objective, NORM_ROUNDINGS * ROUNDING, StepViews(step.tensors())
    assert isinstance(o, PolicyGradient)
    kl, own, other = (_in_order(views[key].tensors) for key in (REFERENCE_KL, LOGPROBS.key, "reference.logprob"))
    if kl is not None and own is not None and other is not None and len(kl) == len(own) == len(other):
        rebuilt, name = divergence(own - other, o.kl_loss_type), REFERENCE_KL + AGAINST_REBUILT
        found = tensor_off(LOSS.stage, name, step.step, kl, rebuilt, floor=own.norm().item())
        yield replace(found, scalar=True, fixed=bound)
    factors = {"pg_loss": 1.0, "entropy_loss": -o.entropy_coeff, "kl_loss": o.kl_loss_coef}
    values = {key: step.value(key) for key in (LOSS.key, *(key for key, factor in factors.items() if factor))}
    numbers = {key: value for key, value in values.items() if value is not None}
    if len(numbers) == len(values):
        loss, parts = numbers.pop(LOSS.key), [factors[key] * value for key, value in numbers.items()]
        unit = max(oracle.value("loss_scale") or 0.0, sum(map(abs, parts)))
        yield number_off(LOSS.stage, LOSS.key + AGAINST_REBUILT, step.step, loss, sum(parts), unit=unit, fixed=bound)


def _in_order(rows: Tensors) -> torch.Tensor | None:
    """Concatenates the numbers of all rows; None if there are none."""
    return torch.cat([rows[name].double().flatten() for name in sorted(rows)]) if rows else None


def rebuilt_updates(
    phases: Sequence[Record], oracle: Record, scenario: Scenario, variant: Variant = HONEST
) -> Iterator[Measurement]:
    """Measures the distance of every weight after a step from the rebuilt one, largest element.

    An error is relative to |w| + (UPDATE_ROUNDINGS / REBUILT_ROUNDINGS) |u|, where w is the weight before and u the
    update if no two of its terms cancelled. A step whose weights were not read is rebuilt together with
    the next one, after which moments are shown: the first moment gives the gradient that was not read, and the second
    moment and the weights have to follow from it. Without moments nothing is rebuilt from there on, until a phase
    begins with a new optimizer. Where an update is skipped, because gradients overflow in fp16, no weight may change.
    Below the exact tier the update of Muon is judged as a whole, too (errors_of_muon).
    ``variant``: the oracle's.
    """
    declared = [o for o in oracle.observables if o.rebuilt]
    for key in dict.fromkeys(o.key for o in declared):
        steps = list(update_steps(phases, oracle, scenario, [o for o in declared if o.key == key]))
        clipped: dict[int, dict[str, _Clipped]] = defaultdict(dict)
        names = dict.fromkeys(name for step in steps for name in step.after.tensors)
        trained = {name for step in steps for name in (*step.unread, *step.gradients.tensors)}
        groups = {name: (name,) for name in names if name not in trained}
        # One matrix at a time, so that only one optimizer state is in memory.
        for matrix, parts in (groups | scenario.optimizer.matrices(name for name in names if name in trained)).items():
            yield from _of_matrix(matrix, parts, steps, scenario, variant, clipped)
        for step in (step for step in steps if step.step in clipped):
            yield from _read_in_moments(step, clipped[step.step], scenario)


@dataclass(frozen=True, kw_only=True)
class UpdateStep:
    """The inputs for rebuilding a step. first: it begins a phase with a new optimizer. before, after: the weights.
    factor: the clipping factor of the gradients. known: whether the state of the optimizer is known before it.
    unread: the names of gradients that were not read. expected: the oracle's gradients. norms: the reported norm and
    the oracle's, if the norm is that of the gradients. of_gradients, of_norm: their stages."""

    step: int
    stage: str
    first: bool
    skipped: bool
    before: TensorView
    gradients: TensorView
    after: TensorView
    lr: float
    factor: float
    known: bool
    unread: Set[str]
    first_moment: TensorView
    second_moment: TensorView
    expected: TensorView
    norms: tuple[float, float] | None
    of_gradients: str
    of_norm: str


def _of_matrix(
    name: str,
    parts: Sequence[str],
    steps: Sequence[UpdateStep],
    scenario: Scenario,
    variant: Variant,
    clipped: Mapping[int, dict[str, "_Clipped"]],
) -> Iterator[Measurement]:
    """Goes through the steps of one parameter, or of the ``parts`` that are one matrix to its optimizer, from one
    weight that was read to the next. Adds gradients that were not read to ``clipped``, by step."""

    def whole(view: TensorView) -> torch.Tensor:
        return stacked([view.elements[part] for part in parts]).double()

    def has(view: TensorView) -> bool:
        return all(part in view.tensors for part in parts)

    known, together = False, list[UpdateStep]()
    for step in steps:
        if step.first:
            dims = step.before.elements[parts[0]].ndim if has(step.before) else 0
            optimizer, sizes = (make_optimizer(scenario.optimizer, name, dims, variant) for _ in range(2))
            sampled_part = any(part in step.before.samples for part in parts)
            known, together = not (isinstance(optimizer, Muon) and sampled_part), []
        if step.skipped:
            for part in parts:
                if part in step.before.tensors and part in step.after.tensors:
                    yield _unchanged(step, part)
        elif not (known := known and step.known):
            together = []
        elif step.unread >= set(parts) or has(step.gradients):
            if not together:
                start = weight = whole(step.before)
                moved, kept, draws = torch.zeros_like(weight), 1.0, list[torch.Tensor]()
            together.append(step)
            if step.unread:
                if not has(step.first_moment) or not has(step.after):
                    # Without momentum, SGD keeps nothing.
                    known, together = scenario.optimizer.name == "sgd" and not scenario.optimizer.momentum, []
                    continue
                gradient = optimizer.gradient_of(name, whole(step.first_moment), weight)
            else:
                gradient = step.factor * whole(step.gradients)
            weight = optimizer.step({name: weight}, {name: gradient}, step.lr)[name]
            moved = moved + sizes.size(gradient, name, step.lr)
            if isinstance(optimizer, Muon):
                kept *= optimizer.kept(step.lr)
                if not scenario.tier.is_exact:
                    further = optimizer.half_errors(name, step.lr)
                    draws = [a + b for a, b in zip(draws, further, strict=True)] if draws else [*further]
        if together and has(step.after):
            first, rounding, after = together[0], scenario.tier.master.rounding, whole(step.after)
            over = f" over steps {first.step} and {step.step}" if step is not first else ""
            at, errors = first, {}
            if step.unread and isinstance(optimizer, AdamW) and name in step.second_moment.tensors:
                error = optimizer.error_of_second(name, step.second_moment.elements[name].double())
                errors[f"exp_avg_sq of {name}"] = error, UPDATE_ROUNDINGS * rounding
            unit = start.abs() + UPDATE_ROUNDINGS / REBUILT_ROUNDINGS * moved
            noise = NOISE_FACTOR * max((draw.abs().max().item() for draw in draws), default=0.0)
            error = ((after - weight).abs() - noise).clamp(min=0) / unit.clamp(min=torch.finfo(torch.float64).tiny)
            errors[name] = error, REBUILT_ROUNDINGS * len(together) * rounding
            update = weight - kept * start
            is_half = isinstance(optimizer, Muon) and not scenario.tier.is_exact
            if is_half and update.norm() > EXACT * start.norm():
                rounded = REBUILT_ROUNDINGS * len(together) * rounding * start.norm().item()
                for kind, (off, bound) in errors_of_muon(after - weight, update, draws, rounded=rounded).items():
                    whose = f"{kind}{OF_MUON}{name}{over}{AGAINST_REBUILT}"
                    yield Measurement(stage=at.stage, tensor=whose, step=at.step, error=finite(off), fixed=bound)
            # The second moment tells whether the first one is right. Without it, weights do.
            error, bound = next(iter(errors.values()))
            if step.unread and error.max() <= bound:
                if not any(part in step.first_moment.samples for part in parts):
                    rounded = MOMENT_ROUNDINGS * rounding * sizes.gradient_rounding(name)
                    rows = [len(step.after.elements[part]) for part in parts] if len(parts) > 1 else []
                    pairs = (
                        zip(gradient.split(rows), rounded.split(rows), strict=True) if rows else [(gradient, rounded)]
                    )
                    clipped[step.step] |= {
                        part: clipped_gradient(step, part, *pair) for part, pair in zip(parts, pairs, strict=True)
                    }
            elif first.first and isinstance(optimizer, AdamW):  # whose first update does not depend on moments
                at = step
            for rebuilt, (error, bound) in errors.items():
                yield Measurement(
                    stage=at.stage,
                    tensor=rebuilt + over + AGAINST_REBUILT,
                    step=at.step,
                    error=finite(error.max().item()),
                    where=place_in_weight(step, parts[0], int(error.argmax()), after),
                    fixed=bound,
                )
            together = []


def errors_of_muon(
    error: torch.Tensor, update: torch.Tensor, draws: Sequence[torch.Tensor], *, rounded: float
) -> dict[str, tuple[float, float]]:
    """Returns three errors of an update by Muon in half precision, relative to ``update`` of float64, and their bounds.

    Rounding fills the directions that a gradient of low rank does not have, so that single elements say little. It
    hardly moves the scale <x, update> / <update, update>, nor the size of what is within the directions of the update.
    ``draws``: errors that rounding makes of the same update; the largest is the noise. rounded: the norm of the
    rounding of the weights.
    """

    def errors(of: torch.Tensor) -> dict[str, float]:
        inside, whole = (update.mT @ one @ update.mT for one in (of, update))
        return {
            "scale": ((of * update).sum() / update.square().sum()).abs().item(),
            "directions": (inside.norm() / whole.norm()).item(),
            "size": (of.norm() / update.norm()).item(),
        }

    noise = [errors(draw) for draw in draws]
    bounds = {kind: NOISE_FACTOR * max(LEAST_OF_MUON, *(one[kind] for one in noise)) for kind in noise[0]}
    return {kind: (off, bounds[kind] + rounded / update.norm().item()) for kind, off in errors(error).items()}


def muon_within_noise(found: Iterable[Measurement]) -> bool:
    """Tells whether the scale of some update by Muon is within its noise, so that no update at all would conform."""
    return any(m.tensor.startswith(f"scale{OF_MUON}") and (m.fixed or 0.0) >= 0.5 for m in found)


@dataclass(frozen=True, kw_only=True)
class _Clipped:
    """A gradient as it entered the moment: its norm, and its distance from the oracle's by the expected clip factor, of
    which the moment's roundings may be a part."""

    norm: float
    error: Measurement | None


def clipped_gradient(step: UpdateStep, name: str, gradient: torch.Tensor, rounded: torch.Tensor) -> _Clipped:
    reference, error = step.expected.tensors.get(name), None
    if reference is not None and reference.shape == gradient.shape:
        floor = step.expected.floor
        unit = max(reference.double().norm().item(), floor) or 1.0
        error = tensor_off(step.of_gradients, name, step.step, gradient / step.factor, reference, floor=floor)
        error = replace(error, rounding=rounded.norm().item() / step.factor / unit)
    return _Clipped(norm=gradient.norm().item(), error=error)


def _read_in_moments(step: UpdateStep, clipped: Mapping[str, _Clipped], scenario: Scenario) -> Iterator[Measurement]:
    """Measures gradients that were not read: those that entered the moments, ``clipped``, with the clipping undone.

    The reported norm says how large they were before, so a wrong clip is told from wrong gradients: by the right clip
    of any gradients, the norm of ``clipped`` is min(norm, limit). If it is not, the norm is assumed that is nearest to
    the oracle's: the reported one if the clip is wrong; if that one is wrong, the one that makes the clip right.
    A sample of a sketched gradient has no bound of its own.
    """
    undone = 1.0  # times the expected factor
    if step.norms and clipped.keys() == step.unread:
        (norm, expected), limit = step.norms, scenario.optimizer.max_grad_norm
        size = math.hypot(*(one.norm for one in clipped.values()))
        share = min(_shares(scenario.optimizer))  # of it in a moment
        amplified = max(1.0, step.first_moment.norm / (share * size or 1.0))
        applied, bound = size / norm, EXACT if scenario.tier.is_exact else NORM_ROUNDINGS * ROUNDING * amplified
        found = number_off(step.stage, CLIP, step.step, applied, step.factor, unit=step.factor, fixed=bound)
        if not found.error <= bound:
            candidates = [f for f in (applied, step.factor, clip_factor(expected, limit)) if f]
            factor = min(candidates, key=lambda f: abs(size / f - expected))
            undone, found = factor / step.factor, found if factor == applied else replace(found, stage=step.of_norm)
        yield found
    for error in (one.error for one in clipped.values()):
        if error and undone != 1:
            left, scale, rounding = error.left_without(undone), (error.scale or 0.0) / undone, error.rounding / undone
            error = replace(error, error=left, scale=scale, residual=error.residual / undone, max_abs=0.0, where="")
            error = replace(error, rounding=rounding)
        if error:
            yield error


def _shares(config: OptimizerConfig) -> tuple[float, ...]:
    """Returns the shares of a gradient that enter first moments."""
    of_muon = (1 - config.momentum,) if config.name == "muon" else ()
    return (1.0,) if config.name == "sgd" else (1 - config.betas[0], *of_muon)


def update_steps(
    phases: Sequence[Record], oracle: Record, scenario: Scenario, weights: Sequence[Observable]
) -> Iterator[UpdateStep]:
    key = weights[0].key
    prefix = key.removesuffix("weight")
    gradient = f"{prefix}gradient"
    config = scenario.optimizer
    has_adamw, has_momentum = config.name != "sgd", config.momentum > 0 or config.name == "muon"
    firsts = [kind for kind, is_kept in (("exp_avg", has_adamw), ("momentum_buffer", has_momentum)) if is_kept]
    of_gradients = next(o.stage for o in oracle.observables if o.key == gradient)
    of_norm = next(o for o in oracle.observables if o.norm_of == gradient)
    references = {step.step: step for step in oracle.steps}
    known = False
    trained: Set[str] = frozenset()
    for phase in phases:
        previous = StepViews(phase.loaded.tensors())
        shapes = {name: tensor.shape for name, tensor in previous[key].elements.items()}
        first = phase.header["optimizer"] == "new"
        known = known or first
        for step in phase.steps:
            views, reference = StepViews(step.tensors()), references.get(step.step)
            lr = reference.value(f"{prefix}lr") if reference else None
            skipped = bool(reference and reference.value(f"{prefix}{SKIPPED}"))
            gradients, after = views[gradient].elements, views[key].elements
            unread = is_unread(gradient, step.line)
            if not skipped:
                trained = trained or gradients.keys()  # other weights are frozen: the oracle's do not move either
                known = known and lr is not None and bool(trained) and (unread or gradients.keys() == trained)
                known = known and (is_unread(key, step.line) or trained <= after.keys())
                read = [*gradients.items(), *((name, after[name]) for name in trained & after.keys())]
                known = known and all(name in shapes and t.shape == shapes[name] for name, t in read)
            yield UpdateStep(
                step=step.step,
                stage=next(o.stage for o in weights if o.applies(step.step)),
                first=first,
                skipped=skipped,
                before=previous[key],
                gradients=views[gradient],
                after=views[key],
                lr=lr or 0.0,
                factor=_factor(step, reference, prefix, views[gradient], scenario) if reference else 1.0,
                known=known,
                unread=trained if unread else frozenset(),
                first_moment=_joined([views[prefix + kind] for kind in firsts]),
                second_moment=views[prefix + ("exp_avg_sq" if has_adamw else "")],
                expected=StepViews(reference.tensors())[gradient] if reference and unread else TensorView(tensors={}),
                norms=_norms(step, reference, of_norm.key) if reference and unread else None,
                of_gradients=of_gradients,
                of_norm=of_norm.stage,
            )
            previous = previous if skipped and is_unread(key, step.line) else views
            first = False


def _joined(views: Sequence[TensorView]) -> TensorView:
    """Returns one view of tensors of different names."""
    where = {name: view for view in views for name in view.tensors}
    return TensorView(
        tensors=Lazy(where, lambda name: where[name].tensors[name]),
        norms={name: norm for view in views for name, norm in view.norms.items()},
        samples={name: sample for view in views for name, sample in view.samples.items()},
    )


def _norms(step: StepRecord, reference: StepRecord, key: str) -> tuple[float, float] | None:
    own, expected = step.value(key), reference.value(key)
    return (own, expected) if own and expected and not unnamed_norm(reference, key.removesuffix("grad_norm")) else None


def _factor(step: StepRecord, reference: StepRecord, prefix: str, gradients: TensorView, scenario: Scenario) -> float:
    """Returns the clipping factor of a step."""
    own = step.value(f"{prefix}grad_norm")
    if gradients.tensors:
        norm = math.hypot(gradients.norm, unnamed_norm(reference, prefix))
        norm = _reported(own, norm, _elements(gradients), scenario.tier.master)
    else:
        norm = own or reference.value(f"{prefix}grad_norm") or 0.0
    return clip_factor(norm, scenario.optimizer.max_grad_norm)


def _elements(view: TensorView) -> int:
    return sum(math.prod(view.shape_of(name, tensor)) for name, tensor in view.tensors.items())


def _reported(own: float | None, norm: float, elements: int, master: FloatFormat) -> float:
    """Returns the norm that the cell clips by: its reported norm if this differs from the rebuilt one by no more than
    another order of summation explains, else the rebuilt one. The reported norm is judged separately.

    Errors of n additions grow as the square root of n (Higham, Accuracy and Stability of Numerical Algorithms, section
    2.8). At 56 million parameters torch's norm is 1.3e-14 off in float64, twice the bound of a whole update.
    """
    if own is None:
        return norm
    tolerance = min(math.sqrt(elements) * master.rounding, NORM_ROUNDINGS * ROUNDING)
    return own if abs(own - norm) <= tolerance * norm else norm


def _unchanged(step: UpdateStep, name: str) -> Measurement:
    """Measures the largest relative change of a weight, of the sample and the rows if sketched; none is allowed."""
    before, after = step.before.elements[name].double(), step.after.elements[name].double()
    change = (after - before).abs() / before.abs().clamp(min=torch.finfo(torch.float64).tiny)
    where, error = place_in_weight(step, name, int(change.argmax()), change), finite(change.max().item())
    if not error:
        error, where = step.after.changed_row(step.before, name)
    return Measurement(stage=step.stage, tensor=name + UNCHANGED, step=step.step, error=error, where=where, fixed=0.0)


def place_in_weight(step: UpdateStep, name: str, at: int, compared: torch.Tensor) -> str:
    """Returns the index in its weight of element ``at`` of the compared tensor, which may be a sample."""
    shape = step.after.shape_of(name, step.after.tensors[name])
    if compared.shape == shape or name not in step.after.samples:  # of parts, the index in the whole matrix
        return place(at, compared)
    height, width = shape
    row, column = divmod(int(sampled(name, height, width, device=compared.device)[at]), width)
    return str([row, column])
