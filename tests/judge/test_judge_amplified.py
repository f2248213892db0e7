"""AdamW divides by sqrt(v) + eps: an update whose gradient is only rounding is judged by what its gradient implies."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from judge_sample import EQUAL, OBSERVABLES, STEPS, Tensors, evidence

from conformance.judge.tolerance import EXACT
from conformance.judge.verdict import judge
from conformance.oracle.optimizer import make_optimizer
from conformance.records.step_tensors import Record, RecordWriter, read_record
from conformance.results.verdict import Verdict
from conformance.spec.scenario import parse_scenario, scenario_to_json

ADAMW = {"name": "adamw", "lr": 0.1, "eps": 1e-8}
ROUNDING = 1e-17  # of a sum of numbers near 1, which is 0
UNOBSERVED = 1
UPDATES = "weights after N steps"
Wrong = Callable[[int, Tensors], None]  # changes the gradients, or the weights, of a step


def as_it_is(step: int, tensors: Tensors) -> None:
    """Leave them."""


def run(
    path: Path,
    seed: int,
    *,
    wrong_gradient: Wrong = as_it_is,
    wrong_weight: Wrong = as_it_is,
    precision: str = "exact",
) -> Record:
    """A run with a matrix, and with a bias whose gradient is nothing but the rounding that ``seed`` draws. Seed 0 is
    the oracle's, which is observed at every step."""
    values = {"name": "x", "model": "m", "precision": precision, "optimizer": ADAMW}
    scenario = parse_scenario({**values, "steps": STEPS, "accumulation": 3})
    header = {"layout": "dp2.tp2", "scenario": scenario_to_json(scenario), "optimizer": "new", "loads": ""}
    header |= {"cell": "x/m/b/dp2.tp2/exact", "backend": {"name": "b", "url": "", "default_zero": None, "defects": []}}
    writer = RecordWriter(path, header, observables=OBSERVABLES)
    training, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    weights: Tensors = {"matrix": torch.randn(4, 3, generator=training, dtype=torch.float64)}
    weights["bias"] = torch.randn(6, generator=training, dtype=torch.float64)
    writer.loaded({f"weight/{name}": weight.clone() for name, weight in weights.items()})
    optimizer = make_optimizer(scenario.optimizer, "w", 2)
    for step in range(STEPS):
        gradients = {"matrix": torch.randn(4, 3, generator=training, dtype=torch.float64)}
        gradients["bias"] = ROUNDING * torch.randn(6, generator=own, dtype=torch.float64)
        wrong_gradient(step, gradients)
        weights = optimizer.step(weights, gradients, 0.1)
        wrong_weight(step, weights)
        norm = math.hypot(*(gradient.norm().item() for gradient in gradients.values()))
        tensors = {f"gradient/{name}": gradient for name, gradient in gradients.items()}
        tensors |= {f"weight/{name}": weight.clone() for name, weight in weights.items()}
        unread = ["weight"] * (step == UNOBSERVED) + ["gradient"] * (step - 1 == UNOBSERVED) if seed else []
        tensors = {name: tensor for name, tensor in tensors.items() if name.partition("/")[0] not in unread}
        numbers = {"loss": 2.0, "token_count": 5, "grad_norm": norm, "lr": 0.1}
        replicas = {o.key: EQUAL for o in OBSERVABLES if o.replicated != "no" and o.key not in unread}
        tensors["logprob/0"] = torch.ones(5, dtype=torch.float64)
        writer.step(numbers, tensors, replicas=replicas, seconds=0.0, unread=unread)
    writer.finish({"seconds": 0.0, "leaks": [], "evidence": [evidence(precision)] * 4})
    return read_record(path)


def verdict_of(tmp_path: Path, *, wrong_gradient: Wrong = as_it_is, wrong_weight: Wrong = as_it_is) -> Verdict:
    cell = run(tmp_path / "cell", 1, wrong_gradient=wrong_gradient, wrong_weight=wrong_weight)
    return judge([cell], oracle=run(tmp_path / "oracle", 0), noise=())


def wrong(name: str, by: float, *, at: int) -> Wrong:
    def change(step: int, tensors: Tensors) -> None:
        if step == at:
            tensors[name] = tensors[name] + by

    return change


def test_judge_accepts_updates_of_rounded_zero_gradient(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path)
    assert verdict.state == "conforms", verdict.reason
    moved = [q for q in verdict.quantities if q.tensor == "bias" and q.stage in ("clipped update", UPDATES)]
    assert [q.step for q in moved] == [0, 2]
    assert min(q.observed for q in moved) > 100 * EXACT


def test_no_other_tensor_is_allowed_more(tmp_path: Path) -> None:
    allowed = {(q.stage, q.tensor): q.allowed for q in verdict_of(tmp_path).quantities}
    assert {key for key, bound in allowed.items() if bound > EXACT} == {("clipped update", "bias"), (UPDATES, "bias")}


def test_such_an_update_still_follows_from_its_own_gradient(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, wrong_weight=wrong("bias", 1e-13, at=0))
    assert [f.tensor for f in verdict.findings] == ["bias against rebuilt"]


def test_where_nothing_can_be_rebuilt_more_than_rounding_can_do_is_found(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, wrong_weight=wrong("bias", 1e-7, at=UNOBSERVED))
    assert [(f.stage, f.tensor) for f in verdict.findings] == [(UPDATES, "bias")]


@pytest.mark.parametrize("by", [1e-11, 1e-3])
def test_a_wrong_gradient_is_no_rounding_and_gives_no_allowance(tmp_path: Path, by: float) -> None:
    verdict = verdict_of(tmp_path, wrong_gradient=wrong("bias", by, at=0))
    assert verdict.first_stage == "gradients"
    first = next(q for q in verdict.quantities if (q.stage, q.tensor) == ("clipped update", "bias"))
    assert first.allowed == EXACT < first.observed


def test_a_further_run_that_is_too_noisy_gives_no_allowance(tmp_path: Path) -> None:
    oracle, cell = run(tmp_path / "oracle", 0), run(tmp_path / "cell", 1, precision="fp32")
    first, further = (
        run(tmp_path / f"{off}", 0, wrong_gradient=wrong("matrix", off, at=0), precision="fp32") for off in (1e-7, 10.0)
    )
    alone, both = (judge([cell], oracle=oracle, noise=noise).quantities for noise in ([first], [first, further]))
    assert [q.allowed for q in both] == [q.allowed for q in alone]
