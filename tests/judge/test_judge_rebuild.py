"""Rebuilds updates from a cell's own gradients, and from the moments where gradients and weights were not read."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_sample import EQUAL, OBSERVABLES, STEPS, Tensors, evidence
from torch.optim._muon import _zeropower_via_newtonschulz

from conformance.judge.provenance import _check_phase
from conformance.judge.rebuilt import MOMENT_ROUNDINGS, REBUILT_ROUNDINGS, _reported, errors_of_muon
from conformance.judge.tolerance import ROUNDING
from conformance.judge.verdict import judge
from conformance.oracle.defects import WithDecayOfAll
from conformance.oracle.optimizer import COEFFICIENTS, SMALLEST, Muon, clip_factor, make_optimizer
from conformance.records.record_format import RecordError
from conformance.records.step_tensors import Record, RecordWriter, read_record
from conformance.results.verdict import Quantity, Verdict
from conformance.spec.observables import AGAINST_REBUILT
from conformance.spec.precision import PRECISIONS, PrecisionName
from conformance.spec.scenario import OptimizerConfig, parse_scenario, scenario_to_json
from conformance.worker import phase

MANY = 56_370_688  # torch's norm of so many numbers is 1.3e-14 off, measured


@pytest.mark.parametrize(
    ("own", "numbers", "precision", "is_used"),
    [
        (1 + 1.3e-14, MANY, "exact", True),
        (1 + 1.3e-14, 5_000, "exact", False),
        (1 + 1e-12, MANY, "exact", False),
        (1 + 3e-6, MANY, "fp32", False),
        (1 + 3e-6, MANY, "bf16", False),
        (None, 100, "exact", False),
    ],
)
def test_a_reported_norm_is_used_within_its_rounding(
    own: float | None, numbers: int, precision: PrecisionName, is_used: bool
) -> None:
    assert _reported(own, 1.0, numbers, PRECISIONS[precision].master) == (own if is_used else 1.0)


LIMIT = 5.0  # the norms of the three gradients are 4.3, 4.3 and 5.4
OPTIMIZER = {"name": "adamw", "lr": 0.1, "weight_decay": 0.1, "max_grad_norm": LIMIT}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "max_grad_norm": LIMIT}
IN_FLOAT32 = 2.0**-20  # far above the rounding of two updates in float32, which half precision allows
Lie = Callable[[Any, Tensors, float], None]  # changes the optimizer, or the weights that were updated at this rate


def no_decay(optimizer: Any, weights: Tensors, lr: float) -> None:
    optimizer._config = replace(optimizer._config, weight_decay=0.0)


def norms_decay(optimizer: Any, weights: Tensors, lr: float) -> None:
    optimizer._variant = WithDecayOfAll()


def second_moments_in_bf16(optimizer: Any, weights: Tensors, lr: float) -> None:
    optimizer._second = {name: tensor.bfloat16().double() for name, tensor in optimizer._second.items()}


def first_moments_in_bf16(optimizer: Any, weights: Tensors, lr: float) -> None:
    optimizer._first = {name: tensor.bfloat16().double() for name, tensor in optimizer._first.items()}


def decay_by_the_peak_rate(optimizer: Any, weights: Tensors, lr: float) -> None:
    weights["matrix"] -= (OPTIMIZER["lr"] - lr) * OPTIMIZER["weight_decay"] * weights["matrix"]  # type: ignore[operator]


def count_begins_again(optimizer: Any, weights: Tensors, lr: float) -> None:
    optimizer._steps = 0


def run(
    path: Path,
    *,
    drawn: int | None = None,
    lie: Lie | None = None,
    since: int = 0,
    factor: Callable[[int], float] = lambda step: 1.0,
    clip: Callable[[int, float], float] = lambda step, norm: clip_factor(norm, LIMIT),
    report: Callable[[int, float], float | None] = lambda step, norm: norm,
    optimizer: dict[str, Any] = OPTIMIZER,
    precision: PrecisionName = "exact",
) -> Record:
    """A run; with ``drawn`` that of a cell, whose weights after this step and gradients of the next are not read.

    lie: from the step ``since`` on. factor: of all gradients of a step. clip, report: the factor by which gradients of
    a norm are clipped, and the norm that is reported for it. precision: of the scenario and of the numbers that are
    recorded.
    """
    values = {"name": "x", "model": "m", "precision": precision, "optimizer": optimizer, "steps": STEPS}
    scenario = parse_scenario({**values, "accumulation": 3})
    header = {"layout": "dp2.tp2", "scenario": scenario_to_json(scenario), "optimizer": "new", "loads": ""}
    header |= {"cell": "x/m/b/dp2.tp2/exact", "backend": {"name": "b", "url": "", "default_zero": None, "defects": []}}
    writer = RecordWriter(path, header, observables=OBSERVABLES)
    training, trained = torch.Generator().manual_seed(0), make_optimizer(scenario.optimizer, "w", 2)
    sizes = {"matrix": (4, 3), "norm": (6,)}
    weights = {name: torch.randn(size, generator=training, dtype=torch.float64) for name, size in sizes.items()}
    writer.loaded({f"weight/{name}": weight.clone() for name, weight in weights.items()})
    for step in range(STEPS):
        lr = 0.1 / (1 + step)
        gradients = {name: torch.randn(size, generator=training, dtype=torch.float64) for name, size in sizes.items()}
        gradients = {name: factor(step) * gradient for name, gradient in gradients.items()}
        norm = math.hypot(*(gradient.norm().item() for gradient in gradients.values()))
        if lie and step >= since:
            lie(trained, {}, lr) if lie is not decay_by_the_peak_rate else lie(trained, weights, lr)
        clipped = {name: clip(step, norm) * gradient for name, gradient in gradients.items()}
        weights = trained.step(weights, clipped, lr)
        unread = ["weight"] * (step == drawn) + ["gradient"] * (drawn is not None and step == drawn + 1)
        tensors = {f"gradient/{name}": gradient for name, gradient in gradients.items()}
        tensors |= {f"weight/{name}": weight.clone() for name, weight in weights.items()}
        tensors = {name: tensor for name, tensor in tensors.items() if name.partition("/")[0] not in unread}
        if "gradient" in unread:
            kinds = {"exp_avg": "_first", "exp_avg_sq": "_second", "momentum_buffer": "_velocity"}
            for kind, of in kinds.items():
                tensors |= {f"{kind}/{name}": moment for name, moment in getattr(trained, of, {}).items()}
        tensors = {name: tensor.to(PRECISIONS[precision].master.dtype) for name, tensor in tensors.items()}
        tensors["logprob/0"] = torch.ones(5, dtype=torch.float64)
        numbers = {"loss": 2.0, "token_count": 5, "lr": lr}
        numbers |= {"grad_norm": told} if (told := report(step, norm)) else {}
        replicas = {o.key: EQUAL for o in OBSERVABLES if o.replicated != "no" and o.key not in unread}
        writer.step(numbers, tensors, replicas=replicas, seconds=0.0, unread=unread)
    writer.finish({"seconds": 0.0, "leaks": [], "evidence": [evidence(precision)] * 4})
    return read_record(path)


def verdict_of(tmp_path: Path, **options: Any) -> Verdict:
    honest = {key: value for key, value in options.items() if key == "optimizer"}
    return judge([run(tmp_path / "cell", **options)], oracle=run(tmp_path / "oracle", **honest), noise=())


def findings(tmp_path: Path, **options: Any) -> tuple[Quantity, ...]:
    return verdict_of(tmp_path, **options).findings


@pytest.mark.parametrize("drawn", [None, 0, 1])
def test_judge_accepts_steps_that_were_not_read(tmp_path: Path, drawn: int | None) -> None:
    assert not findings(tmp_path, drawn=drawn)


@pytest.mark.parametrize("drawn", [0, 1])
@pytest.mark.parametrize(
    "lie",
    [
        no_decay,
        norms_decay,
        decay_by_the_peak_rate,
        second_moments_in_bf16,
        first_moments_in_bf16,
        count_begins_again,
    ],
)
@pytest.mark.parametrize("begins", [0, 1])
def test_a_lie_in_unread_steps_is_named_at_the_optimizer(tmp_path: Path, drawn: int, lie: Lie, begins: int) -> None:
    found = findings(tmp_path, drawn=drawn, lie=lie, since=drawn + begins)
    if drawn + begins == 0 and lie not in (no_decay, norms_decay):
        return  # nothing is different at the first step of all
    # The first update does not depend on moments, so moments that do not follow are wrong at the second one.
    at = 1 if "moments" in lie.__name__ else drawn
    assert (found[0].stage, found[0].step) == ("weights after N steps" if at else "clipped update", at)
    rebuilt = [f for f in found if f.tensor.endswith(AGAINST_REBUILT) and f.step == at]
    assert any(f"over steps {drawn} and {drawn + 1}" in f.tensor and f.observed > IN_FLOAT32 for f in rebuilt)


def test_a_gradient_that_was_not_read_shows_in_its_moment(tmp_path: Path) -> None:
    found = findings(tmp_path, drawn=1, factor=lambda step: 1 + (step == 2))
    gradients = {f.tensor: f.observed for f in found if (f.stage, f.step) == ("gradients", 2)}
    assert gradients == {"matrix": pytest.approx(1), "norm": pytest.approx(1)}
    assert not [f for f in found if f.tensor.endswith(AGAINST_REBUILT)]


@pytest.mark.parametrize(("times", "is_found"), [(1.0, False), (1 + 2e-7, False), (1 + 1e-5, True)])
def test_a_float32_moment_shows_its_gradient(tmp_path: Path, times: float, is_found: bool) -> None:
    def as_noisy(folder: str, factor: Callable[[int], float], drawn: int | None = None) -> Record:
        return run(tmp_path / folder, factor=factor, drawn=drawn, precision="fp32")

    cell = as_noisy("cell", lambda step: times if step == 2 else 1 + 1e-7, drawn=1)
    noise = as_noisy("noise", lambda step: 1 - 1e-7)
    found = judge([cell], oracle=run(tmp_path / "oracle", precision="fp32"), noise=[noise]).findings
    assert [(f.stage, f.step) for f in found[:2]] == [("gradients", 2)] * 2 * is_found, found


@pytest.mark.parametrize(("optimizer", "key"), [(OPTIMIZER, "exp_avg"), (SGD, "momentum_buffer")], ids=["adamw", "sgd"])
def test_the_rounding_of_a_moment_is_bounded(optimizer: dict[str, Any], key: str) -> None:
    config = parse_scenario({"name": "x", "model": "m", "precision": "fp32", "optimizer": optimizer}).optimizer
    replayed, sizes = (make_optimizer(config, "w", 1) for _ in range(2))
    weight = torch.nn.Parameter(torch.zeros(1000))
    options: dict[str, Any] = {"lr": config.lr} | ({"momentum": config.momentum} if config.name == "sgd" else {})
    library = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[config.name]([weight], **options)
    for step in range(5):
        weight.grad = torch.randn(1000, generator=torch.Generator().manual_seed(step))
        gradient, _ = {"w": weight.grad.double()}, library.step()
        off = (replayed.gradient_of("w", library.state[weight][key].double(), gradient["w"]) - gradient["w"]).abs()
        replayed.step(gradient, gradient, 0.0)
        sizes.step(gradient, {"w": gradient["w"].abs()}, 0.0)
        allowed = MOMENT_ROUNDINGS * 2.0**-24 * sizes.gradient_rounding("w")
        assert (off <= allowed).all()
    assert off.norm() > 0.01 * allowed.norm()


CLIPS: dict[str, Callable[[int, float], float]] = {
    "always": lambda step, norm: LIMIT / norm,
    "never": lambda step, norm: 1.0,
    "another limit": lambda step, norm: clip_factor(norm, 2 * LIMIT / 3),
}
UPDATES = ("clipped update", "weights after N steps")


@pytest.mark.parametrize("optimizer", [OPTIMIZER, SGD], ids=["adamw", "sgd"])
@pytest.mark.parametrize("drawn", [0, 1])
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("since", [0, 1, 2])
def test_a_wrong_clip_is_no_wrong_gradient(
    tmp_path: Path, optimizer: dict[str, Any], drawn: int, clip: Callable[[int, float], float], since: int
) -> None:
    def later(step: int, norm: float) -> float:
        return clip(step, norm) if step >= since else clip_factor(norm, LIMIT)

    found = findings(tmp_path, drawn=drawn, clip=later, optimizer=optimizer)
    norms = [step.value("grad_norm") or 0.0 for step in run(tmp_path / "norms").steps]
    assert {f.stage for f in found} <= set(UPDATES)
    assert found or all(abs(later(s, n) - clip_factor(n, LIMIT)) < 1e-6 for s, n in enumerate(norms))


@pytest.mark.parametrize(("times", "clips_by_it"), [(1 / 3, False), (1 / 3, True), (3, True)])
def test_a_wrong_norm_is_no_wrong_gradient(tmp_path: Path, times: float, clips_by_it: bool) -> None:
    def report(step: int, norm: float) -> float:
        return norm * times if step == 2 else norm

    def clip(step: int, norm: float) -> float:
        return clip_factor(report(step, norm) if clips_by_it else norm, LIMIT)

    found = findings(tmp_path, drawn=1, report=report, clip=clip)
    assert (found[0].stage, found[0].step) == ("gradient norm", 2)
    assert not [f for f in found if f.stage == "gradients"]


UNDECIDED = "cannot be told apart at a step that was not observed"


@pytest.mark.parametrize(
    ("report", "optimizer", "suspects"),
    [
        (lambda step, norm: norm, OPTIMIZER, "gradients or reported norm"),
        (lambda step, norm: None, OPTIMIZER, "gradients or clip"),
        (lambda step, norm: None, SGD | {"momentum": 0.0}, "gradients, clip or update"),
    ],
)
def test_what_cannot_be_told_apart_is_said(
    tmp_path: Path, report: Callable[[int, float], float | None], optimizer: dict[str, Any], suspects: str
) -> None:
    options = {"report": report, "optimizer": optimizer, "drawn": 1, "factor": lambda step: 1 + (step == 2)}
    assert f"{suspects}: {UNDECIDED}" in verdict_of(tmp_path, **options).reason
    assert UNDECIDED not in verdict_of(tmp_path / "read", **{**options, "drawn": None}).reason


@pytest.mark.parametrize("lines", [["weight", "weight", ""], ["", "", "weight"], ["", "gradient", ""]])
def test_a_record_leaves_no_more_unread_than_was_drawn(tmp_path: Path, lines: list[str]) -> None:
    record = run(tmp_path / "cell")
    steps = [replace(step, line=step.line | {"unread": [kind]}) for step, kind in zip(record.steps, lines, strict=True)]
    for honest in (record, run(tmp_path / "drawn", drawn=1)):
        _check_phase(honest, is_first=True)
    with pytest.raises(RecordError, match="leaves unread more than"):
        _check_phase(replace(record, steps=tuple(steps)), is_first=True)


def test_each_step_is_drawn_and_none_is_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase.dist, "broadcast_object_list", lambda decided, src: None)
    found = set()
    for _ in range(100):
        drawn = phase.Drawn(3)
        decisions = [drawn.is_now() for _ in range(4)]
        assert sum(decisions) == 1
        found.add(decisions.index(True))
    assert found == {0, 1, 2}
    assert not phase.Drawn(0).is_now()


SHAPES = [(64, 64, 8), (64, 64, 1), (128, 64, 64), (64, 64, 64), (64, 256, 2), (16, 8, 8)]
MATRIX = "model.layers.0.mlp.up_proj.weight"
LR = 5e-4


def orthogonalized_in_half(matrix: torch.Tensor) -> torch.Tensor:
    return _zeropower_via_newtonschulz(matrix, COEFFICIENTS["simple"][0], 5, SMALLEST)


@pytest.mark.parametrize(("height", "width", "rank"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("update", "is_honest"),
    [
        (orthogonalized_in_half, True),
        (lambda matrix: 0 * matrix, False),
        (lambda matrix: 0.5 * orthogonalized_in_half(matrix), False),
        (lambda matrix: 1.5 * orthogonalized_in_half(matrix), False),
        (torch.sign, False),  # the first update of AdamW
        (lambda matrix: matrix / matrix.norm() * min(matrix.shape) ** 0.5, False),
        (lambda matrix: orthogonalized_in_half(matrix).flip(0), False),
    ],
    ids=["honest", "none", "half", "larger", "adamw", "not orthogonal", "other rows"],
)
def test_muon_below_the_exact_tier_is_judged_by_scale_and_directions(
    height: int,
    width: int,
    rank: int,
    dtype: torch.dtype,
    update: Callable[[torch.Tensor], torch.Tensor],
    is_honest: bool,
) -> None:
    """The gradient is rounded to ``dtype``, which makes its rank full in bf16; weights are float32."""
    config = OptimizerConfig(name="muon", lr=LR, momentum=0.95, nesterov=True, adjust_lr="original")
    draw = torch.Generator().manual_seed(height + rank)
    gradient = torch.randn(height, rank, generator=draw) @ torch.randn(rank, width, generator=draw)
    gradient, weight = gradient.to(dtype).float(), 0.05 * torch.randn(height, width, generator=draw)
    optimizer = make_optimizer(config, MATRIX, 2)
    assert isinstance(optimizer, Muon)
    rebuilt = optimizer.step({MATRIX: weight.double()}, {MATRIX: gradient.double()}, LR)[MATRIX]
    rate, draws = LR * max(1.0, height / width) ** 0.5, optimizer.half_errors(MATRIX, LR)
    error = (weight - rate * update(gradient).float()).double() - rebuilt
    rounded = REBUILT_ROUNDINGS * ROUNDING * weight.norm().item()
    found = errors_of_muon(error, rebuilt - weight.double(), draws, rounded=rounded)
    assert all(off <= bound for off, bound in found.values()) == is_honest, found
    assert found["scale"][1] < 0.5
