"""Checks the tolerances for losses of reinforcement learning, which rounding alone moves.

At the first update of a rollout all ratios are 1, so without other updates one lucky draw would set the bound.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_cell

from conformance.data.inputs import prepare_inputs
from conformance.judge.direction import Directions
from conformance.judge.measurements import _of_terms, _Start, _step
from conformance.judge.tensor_views import StepViews
from conformance.oracle.policy_gradient import GrpoFunctions
from conformance.oracle.run import run_oracle
from conformance.records.step_tensors import read_record
from conformance.spec.batch import Document, read_batches
from conformance.spec.layout import Layout
from conformance.spec.objectives import REFERENCE_KL, Grpo, terms_of
from conformance.spec.precision import PRECISIONS, noise_runs

TOKENS = 400


def test_the_noise_of_a_loss_is_that_of_its_tokens_where_all_ratios_are_1() -> None:
    generator = torch.Generator().manual_seed(0)
    old, apart, advantages = (torch.randn(TOKENS, dtype=torch.float64, generator=generator) for _ in range(3))
    columns = {"old_logprob": old, "reference_logprob": old - apart, "advantage": advantages}
    document = Document(
        (0,) * (TOKENS + 1),
        (False, *(True,) * TOKENS),
        {name: (0.0, *numbers.tolist()) for name, numbers in columns.items()},
    )
    functions = GrpoFunctions(Grpo(kl_loss_coef=0.05, entropy_coeff=0.02))
    totals = {"token_count": float(TOKENS), "sequence_count": 1.0}

    def losses(off: float) -> tuple[float, torch.Tensor]:
        """The loss and its terms where log-probs and entropies are ``off``."""
        noise = off * torch.randn(2, TOKENS, dtype=torch.float64, generator=generator)
        term = functions.of_policy(old + noise[0], advantages.abs() + noise[1], document, totals)
        return term.values["loss"], term.rows[terms_of("loss")]

    right, terms = losses(0.0)
    assert terms.sum().item() == pytest.approx(right, rel=1e-13, abs=0)
    wrong = [losses(1e-4) for _ in range(200)]
    errors = torch.tensor([loss - right for loss, _ in wrong])
    estimates = torch.tensor([_of_terms({"0": found}, {"0": terms}, unit=1.0) for _, found in wrong])
    assert 0.7 < estimates.square().mean().sqrt() / errors.square().mean().sqrt() < 1.4
    assert estimates.min() > 0.5 * estimates.max(), "no draw is lucky"


def test_the_noise_of_a_sum_knows_that_tokens_of_a_row_err_in_one_direction() -> None:
    rows, tokens = 64, 40
    generator = torch.Generator().manual_seed(3)
    terms = {str(row): torch.randn(tokens, dtype=torch.float64, generator=generator) for row in range(rows)}

    def estimate_and_error(*, shared: bool) -> tuple[float, float]:
        size = (rows, 1) if shared else (rows, tokens)
        errors = (1e-4 * torch.randn(size, dtype=torch.float64, generator=generator)).expand(rows, tokens)
        wrong = {str(row): terms[str(row)] + errors[row] for row in range(rows)}
        return _of_terms(wrong, terms, unit=1.0), errors.sum().item()

    for shared in (False, True):
        drawn = torch.tensor([estimate_and_error(shared=shared) for _ in range(100)])
        estimates, errors = drawn.square().mean(dim=0).sqrt()
        assert 0.7 < estimates / errors < 1.4


def test_a_kl_that_is_a_mean_over_tokens_is_judged_by_the_cells_own_tokens() -> None:
    def kl_of(mode: str) -> tuple[str, str]:
        objective = Grpo(kl_loss_coef=0.05, loss_agg_mode=mode)  # type: ignore[arg-type]
        (found,) = (o for o in objective.observables() if o.key == "kl_loss")
        return found.mean_of, found.sum_of

    assert kl_of("token-mean") == (REFERENCE_KL, "")
    assert kl_of("seq-mean-token-mean") == ("", terms_of("kl_loss"))


@pytest.mark.parametrize("key", ["ratio_mean", "ratio_max"])
def test_a_metric_is_held_against_the_cells_own_rows_and_not_against_the_oracles(key: str) -> None:
    """Rounding may move ratios, and the metrics with them; what a backend tells has to be what its rows make of it."""
    (metric,) = (o for o in Grpo().observables() if o.key == key)

    def step(told: float, *ratios: float) -> Any:
        tensors = {f"ratio/{row}": torch.tensor([ratio]) for row, ratio in enumerate(ratios)}
        return SimpleNamespace(step=0, tensors=lambda: tensors, value={key: told}.get, line={})

    def error(told: float) -> float:
        (measurement,) = _step(
            step(told, 1.5, 1.5),
            step(1.0, 1.0, 1.0),
            [metric],
            _Start(own=StepViews({}), reference=StepViews({})),
            Layout(),
            Directions(precision=PRECISIONS["exact"]),
        )
        assert measurement.fixed is not None
        return measurement.error / measurement.fixed

    assert error(1.5) == 0
    assert error(1.0) > 1
    assert error(1.50001) > 1


def test_one_noise_run_rounds_old_log_probs_separately(tmp_path: Path) -> None:
    scenario = make_cell("grpo-half", "llama", "dp1", "bf16", steps=1, rows=8, accumulation=1).scenario
    inputs = prepare_inputs(scenario, tmp_path)
    batches = read_batches(inputs.batches)

    def off(run: str) -> float:
        """How far the ratio that is furthest from 1 is from it."""
        out = tmp_path / run
        run_oracle(scenario=scenario, models=inputs.models, batches=batches, out=out, policy_name=run)
        tensors = read_record(out).steps[0].tensors()
        return max((tensors[name] - 1).abs().max().item() for name in tensors if name.startswith("ratio/"))

    kernel, formula = noise_runs("bf16")
    assert off("float64") == off(kernel) == 0.0
    assert 1e-3 < off(formula) < 1e-1
