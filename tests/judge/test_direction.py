"""Judges records in half precision whose errors are as large as rounding, and lie along the reference."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import judge_sample
import pytest
import torch
from judge_sample import Change, Tensors, Values, both, unchanged, write

from conformance.judge.direction import OUTLYING, PART_OF_GRADIENTS, PART_OF_PAIRS, Along, Directions, is_summed_in
from conformance.judge.tensor_views import TensorView
from conformance.judge.tolerance import allowed_errors
from conformance.judge.verdict import judge
from conformance.oracle.optimizer import clip_factor
from conformance.results.verdict import Quantity
from conformance.spec.objectives import all_observables
from conformance.spec.observables import LOGPROBS, POLICY, Observable, trained_observables
from conformance.spec.offline import Sft
from conformance.spec.precision import PRECISIONS

SHAPE, LAST = (40, 30), 2  # the step before the last one is not observed, so the last update is not rebuilt


@cache
def rounding(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rounded(seed: int, *, by: float = 1e-2) -> Change:
    """Gradients and their norm are off by rounding, of relative size ``by``; weights by a thousandth of it."""

    def change(step: int, values: Values, tensors: Tensors) -> None:
        for number, (name, tensor) in enumerate(sorted(tensors.items())):
            size = by if name.startswith("gradient/") else by / 1000 if name.startswith("weight/") and step >= 0 else 0
            tensors[name] = tensor * (1 + size * rounding(tuple(tensor.shape), 1000 * seed + 10 * step + number))
        if step >= 0:
            values["grad_norm"] = sum(t.square().sum().item() for n, t in tensors.items() if "gradient/" in n) ** 0.5

    return change


def scaled(prefix: str, factor: float, *, since: int = 0) -> Change:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        for name in tensors:
            if step >= since and name.startswith(prefix):
                tensors[name] = factor * tensors[name]

    return change


def normed(factor: float) -> Change:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step >= 0:
            values["grad_norm"] *= factor

    return change


def wrong(tmp_path: Path, change: Change, *, precision: str = "bf16", by: float = 1e-2) -> list[Quantity]:
    """Returns the findings but those of rebuilt numbers, which these records do not keep together."""
    oracle = write(tmp_path / "oracle", shape=SHAPE)
    noise = write(tmp_path / "noise", rounded(1, by=by), precision=precision, shape=SHAPE)
    cell = write(tmp_path / "cell", both(rounded(2, by=by), change), precision=precision, shape=SHAPE)
    findings = judge([cell], oracle=oracle, noise=[noise]).findings
    return [finding for finding in findings if "against rebuilt" not in finding.tensor]


@pytest.mark.parametrize(("precision", "by"), [("bf16", 1e-2), ("fp16", 1e-3), ("fp32", 1e-6)])
def test_rounding_in_any_direction_conforms(tmp_path: Path, precision: str, by: float) -> None:
    assert not wrong(tmp_path, unchanged, precision=precision, by=by)


@pytest.mark.parametrize(
    ("change", "stage", "named"),
    [
        (scaled("gradient/", 1.01), "gradients", {"gradient: scale", "gradient: scale of a", "gradient: scale of b"}),
        (scaled("gradient/b", 1.01), "gradients", {"gradient: scale", "gradient: scale of b"}),
        (normed(1.01), "gradient norm", {"grad_norm"}),
        # A weight decay that was lost at the unobserved step.
        (scaled("weight/", 1 + 1e-5, since=LAST), "weights after N steps", {"weight: scale"}),
    ],
)
def test_an_error_along_the_reference_is_found(tmp_path: Path, change: Change, stage: str, named: set[str]) -> None:
    found = wrong(tmp_path, change)
    assert {finding.stage for finding in found} == {stage}
    assert named <= {finding.tensor for finding in found}
    assert all(": scale" in finding.tensor or finding.tensor == "grad_norm" for finding in found)


def updated() -> Change:
    """Weights follow from the gradients, as in a training."""
    weights: Tensors = {}

    def change(step: int, values: Values, tensors: Tensors) -> None:
        for name in ("a", "b"):
            if step >= 0:
                clipped = clip_factor(values["grad_norm"], 1.0) * tensors[f"gradient/{name}"]
                tensors[f"weight/{name}"] = weights[name] - 0.1 * clipped
            weights[name] = tensors[f"weight/{name}"]

    return change


def test_a_verdict_says_what_rounding_hides(tmp_path: Path) -> None:
    oracle = write(tmp_path / "oracle", shape=SHAPE)
    runs = [
        write(tmp_path / str(seed), both(rounded(seed), updated()), precision="bf16", shape=SHAPE) for seed in (1, 2)
    ]
    verdict = judge(runs[1:], oracle=oracle, noise=runs[:1])
    assert verdict.state == "conforms", verdict.reason
    allowed = {q.tensor: q.allowed for q in verdict.quantities}
    told = {
        f"errors of {key} below {allowed[f'{key}: size of all errors']:.2%} in bf16" for key in ("gradient", "logprob")
    }
    told.add(f"gradient scaled by less than {allowed['gradient: scale of all steps']:.2%} in bf16")
    listed = verdict.reason.partition("not proven: ")[2].split(", ")
    assert told == {item for item in listed if item.endswith(" in bf16")}


@pytest.mark.parametrize(
    ("scale", "is_one_of_them"),
    [
        ("gradient: scale", True),
        ("gradient: scale of layer 1", True),
        ("gradient: scale of layer 11", False),
        ("gradient: scale of model.layers.*.mlp.up_proj.weight", True),
        ("gradient: scale of model.layers.*.mlp.down_proj.weight", False),
    ],
)
def test_a_scale_knows_its_tensors(scale: str, is_one_of_them: bool) -> None:
    assert is_summed_in("model.layers.1.mlp.up_proj.weight", scale) == is_one_of_them


GRADIENT = next(o for o in trained_observables(POLICY.prefix) if o.key == "gradient")
MANY, BF16 = (50, 40), 2e-3  # the size of a tensor or of all rows, and of its errors


def found_over_steps(
    o: Observable, seed: int, *, by: float = 1.0, scale: float = 1.0, zeros: float = 0.0
) -> Directions:
    """The directions of three steps with errors of a size, of which the second half is scaled, with elements lost."""
    found = Directions(precision=PRECISIONS["bf16"])
    for step in range(3):
        ref = rounding(MANY, step)
        own = ref + by * BF16 * ref.square().mean().sqrt() * rounding(MANY, 100 * seed + step)
        own[len(own) // 2 :] *= scale
        own[ref.abs() < ref.abs().quantile(zeros)] = 0
        found.add(o, step, TensorView(tensors={"model.layers.0.x": own}), TensorView(tensors={"model.layers.0.x": ref}))
    return found


def beyond(o: Observable, seed: int, **wrong: float) -> set[str]:
    own, noise = list(found_over_steps(o, seed, **wrong).measurements()), list(found_over_steps(o, 9).measurements())
    options = {"gradients": frozenset((GRADIENT.stage,)), "amplified": {}, "drift": {}}
    bounds = allowed_errors(own, precision="bf16", noise=noise, **options)  # type: ignore[arg-type]
    return {one.tensor for one in own if one.error > bounds[one.key]}


@pytest.mark.parametrize(("weights_gradients", "bound"), [(True, 3 * 0.004), (False, 0.0)])
def test_rounded_probabilities_scale_gradients_that_they_weight(weights_gradients: bool, bound: float) -> None:
    """Log-probs that are 0.004 too large in one of two steps, as a single process has them, allow three times that."""
    found, logprobs = Directions(precision=PRECISIONS["bf16"]), replace(LOGPROBS, weights_gradients=weights_gradients)
    ref, rows = rounding(MANY, 0), -rounding(MANY, 1).abs().flatten()
    for step, shift in enumerate((0.004, -0.001)):
        found.add(logprobs, step, TensorView(tensors={"0": rows + shift}), TensorView(tensors={"0": rows}))
        found.add(GRADIENT, step, TensorView(tensors={"x": ref.clone()}), TensorView(tensors={"x": ref}))
    measured = list(found.measurements())
    options = {"gradients": frozenset((GRADIENT.stage,)), "amplified": {}, "drift": {}}
    bounds = allowed_errors(measured, precision="bf16", noise=measured, **options)  # type: ignore[arg-type]
    scales = [bounds[one.key] for one in measured if one.tensor.startswith("gradient: scale")]
    assert len(scales) == 4  # of both steps, of all steps, and of x
    assert scales == pytest.approx([max(bound, min(scales))] * 4)
    assert (min(scales) > 0.01) == weights_gradients
    norm = Observable(key="grad_norm", stage=GRADIENT.stage, kind="scalar", norm_of="gradient")
    assert 3 * found.of_gradients(norm, 0) == pytest.approx(scales[0])  # gradients are not off, so as their scale
    for step, most in ((2, OUTLYING * 0.004), (3, PRECISIONS["bf16"].noise_limit)):
        found.add(logprobs, step, TensorView(tensors={"0": rows + 0.3}), TensorView(tensors={"0": rows}))
        # One step that is far off allows little more, and no cell is judged by more than the limit.
        assert found.shift == pytest.approx(most if weights_gradients else 0)


def test_rounding_scales_gradients_of_preferences_more() -> None:
    """Half of an error may lie along such a gradient, a sixth along others; the larger part is no bound on more."""
    error, ref = 1e-2 * rounding(MANY, 1), rounding(MANY, 2)
    one, pairs = (Along(part=part) for part in (PART_OF_GRADIENTS, PART_OF_PAIRS))
    for found in (one, pairs):
        found.add(error.flatten(), ref.flatten(), 0.0)
    assert pairs.typical == pytest.approx(3 * one.typical)
    assert pairs.typical < pairs.whole


@pytest.mark.parametrize("o", [GRADIENT, LOGPROBS])
def test_errors_as_large_as_the_noise_conform(o: Observable) -> None:
    assert not set.union(*(beyond(o, seed, by=by) for seed in range(1, 9) for by in (0.7, 1.0, 1.3)))


@pytest.mark.parametrize(
    ("o", "wrong", "named"),
    [
        (LOGPROBS, {"scale": 1.002}, {"logprob: scale of all steps"}),  # weights that drift on one of two ranks
        (LOGPROBS, {"by": 1.8}, {"logprob: size of all errors"}),  # one product in fp8
        (GRADIENT, {"by": 1.8}, {"gradient: size of all errors"}),
        (GRADIENT, {"zeros": 0.05}, {"gradient: elements that are 0 where the oracle's are not"}),
    ],
)
def test_what_no_rounding_does_over_all_steps_is_found(o: Observable, wrong: dict[str, float], named: set[str]) -> None:
    for seed in range(1, 9):
        assert named <= beyond(o, seed, **wrong)


@pytest.mark.parametrize(
    ("precision", "routed", "is_said"), [("bf16", True, True), ("exact", True, False), ("bf16", False, False)]
)
def test_the_choice_of_experts_is_not_proven_if_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, routed: bool, is_said: bool
) -> None:
    def with_router(step: int, values: Values, tensors: Tensors) -> None:
        values |= {"router_loss": 1.0, "router_z_loss": 1.0}

    monkeypatch.setattr(judge_sample, "OBSERVABLES", all_observables(Sft(), routed=routed))
    change = with_router if routed else unchanged
    oracle, *others = (write(tmp_path / name, change, precision=precision) for name in ("oracle", "cell", "noise"))
    verdict = judge(others[:1], oracle=oracle, noise=others[1:] if precision == "bf16" else ())
    assert ("which experts are chosen" in verdict.reason) == is_said
