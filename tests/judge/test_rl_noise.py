"""Checks the tolerances for losses of reinforcement learning, which rounding alone moves.

At the first update of a rollout all ratios are 1, so without other updates one lucky draw would set the bound.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import make_cell
from oracle_cells import OracleRuns, as_cell
from torch import Tensor

from conformance.data.prepare import prepare_inputs
from conformance.judge.clips import CLIPPED, check_decided
from conformance.judge.direction import Directions
from conformance.judge.measurements import _of_terms, _Start, _step
from conformance.judge.tensor_views import StepViews
from conformance.judge.tolerance import Measurement
from conformance.judge.verdict import judge
from conformance.oracle.loss_terms import Term, importance
from conformance.oracle.policy_gradient import GrpoFunctions, PpoFunctions
from conformance.oracle.preferences import PreferenceFunctions
from conformance.oracle.run import run_oracle
from conformance.records.header_checks import noise_runs
from conformance.records.record_format import RecordError
from conformance.records.step_tensors import read_record
from conformance.spec.batch import Batch, Document, Row, read_batches
from conformance.spec.layout import Layout
from conformance.spec.objectives import REFERENCE_KL, Grpo, LossMode, Ppo, all_observables, terms_of
from conformance.spec.observables import POLICY
from conformance.spec.offline import PAIR, SIDE, Dpo
from conformance.spec.precision import PRECISIONS

TOKENS = 400
F64 = torch.float64
TOTALS = {"token_count": 1.0, "sequence_count": 1.0}


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
    assert terms.sum().item() == pytest.approx(right, rel=1e-13)
    wrong = [losses(1e-4) for _ in range(200)]
    errors = torch.tensor([loss - right for loss, _ in wrong])
    estimates = torch.tensor([_of_terms({"0": found}, {"0": terms}, unit=1.0) for _, found in wrong])
    assert 0.7 < estimates.square().mean().sqrt() / errors.square().mean().sqrt() < 1.4
    assert estimates.min() > 0.5 * estimates.max(), "no draw is lucky"


Loss = Callable[[Tensor], Term]  # of one number of every token
SIDES = (1.0, -1.0)


def _answer(count: int, **columns: float) -> Document:
    """A response of ``count`` target tokens behind a prompt of one."""
    return Document((0,) * (count + 1), (False, *(True,) * count), {n: (x,) * (count + 1) for n, x in columns.items()})


def _policy(mode: LossMode = "vanilla", **more: Any) -> Iterator[Loss]:
    """Yields the loss by log-ratios to the old policy and to the reference, for each sign of the advantage."""
    functions = GrpoFunctions(Grpo(clip_ratio_high=0.3, loss_mode=mode, **more))
    for side in SIDES:
        document = _answer(2, old_logprob=0.0, reference_logprob=0.0, advantage=side)
        yield lambda x, d=document: functions.of_policy(x, torch.zeros(2), d, TOTALS)  # type: ignore[misc]


def _importance(**more: Any) -> Iterator[Loss]:
    """Yields the loss by the distance of old log-probs from the sampler's."""
    functions = GrpoFunctions(Grpo(rollout_is_threshold=2.0, **more))

    def loss(x: Tensor) -> Term:
        document = _answer(2, old_logprob=x[0].item(), rollout_logprob=0.0, advantage=1.0)
        old, sampled = (torch.full((2,), number, dtype=x.dtype) for number in (x[0].item(), 0.0))
        weights = importance(old, sampled, functions.objective)
        document = replace(document, columns={**document.columns, "importance": (0.0, *weights.tolist())})
        return functions.of_policy(x, torch.zeros(2), document, TOTALS)

    yield loss


def _critic(wanted: float) -> Iterator[Loss]:
    functions, document = PpoFunctions(Ppo(cliprange_value=0.5)), _answer(2, value=0.2, **{"return": wanted})
    yield lambda x: functions.of_critic(x, document, TOTALS)


def _hinge() -> Iterator[Loss]:
    """Yields the loss by the log-odds of the answer's token, against another answer of log-prob -3."""
    functions = PreferenceFunctions(Dpo(loss_type="hinge", beta=0.7, reference_free=True))
    chosen, rejected = (replace(_answer(1), columns={PAIR: 0.0, SIDE: side}) for side in SIDES)
    odds = -math.log(math.expm1(3.0))
    functions.see(rejected, {POLICY.name: torch.tensor([[odds, 0.0], [0.0, 0.0]], dtype=F64)}, stable=F64)
    totals = {"pair_count": 1.0, "chosen_count": 1.0}
    yield lambda x: functions.term(
        POLICY.name, torch.stack([x, torch.zeros_like(x)], 1), chosen, totals=totals, earlier={}, stable=F64
    )


@pytest.mark.parametrize(
    ("losses", "jumps"),
    [
        (_policy(), 3),  # the upper clip; the lower one and the dual clip
        (_policy(clip_ratio_c=None), 2),
        (_policy("gspo"), 2),
        (_policy("geo_mean"), 2),
        (_policy("cispo"), 0),  # its weight bends
        (_policy("sapo"), 0),
        (_policy("sapo", kl_loss_coef=1.0), 2),  # k3 ends at 10
        (_policy("sapo", kl_loss_coef=1.0, kl_loss_type="abs"), 2),
        (_policy("sapo", kl_loss_coef=1.0, kl_loss_type="mse"), 0),
        (_importance(), 0),
        (_importance(rollout_is_mask=True), 1),
        (_importance(rollout_is_mask=True, rollout_is="sequence"), 1),
        (_critic(1.5), 2),  # where the value leaves the range, and beyond the return
        (_critic(-1.5), 2),
        (_critic(0.3), 0),
        (_hinge(), 1),
    ],
)
def test_gradients_jump_where_the_distance_to_a_clip_is_zero_and_nowhere_else(
    losses: Iterator[Loss], jumps: int
) -> None:
    step, found = 0.01, 0
    for loss in losses:
        gradients, distances = [], []
        for number in torch.arange(-3.005, 3.0, step, dtype=F64):
            x = number.repeat(2).requires_grad_()
            term = loss(x)
            assert term.loss is not None
            gradients.append(torch.autograd.grad(term.loss, x)[0].sum().item())
            distances.append([d[0].item() for name, d in term.clips.items() if not CLIPPED[name].counted])
        jumped = [abs(b - a) > max(0.1, 0.2 * abs(a), 0.2 * abs(b)) for a, b in pairwise(gradients)]
        pairs = ([*zip(before, after, strict=True)] for before, after in pairwise(distances))
        crossed = [any(a * b <= 0 and abs(a - b) < 3 * step for a, b in pair) for pair in pairs]
        assert jumped == crossed
        found += sum(jumped)
    assert found == jumps


@pytest.mark.parametrize(
    ("name", "losses"),
    [
        *(("ratio", partial(_policy, mode)) for mode in ("vanilla", "gspo", "geo_mean")),
        ("counted ratio", partial(_policy, "cispo")),
        *((REFERENCE_KL, partial(_policy, kl_loss_coef=1.0, kl_loss_type=kind)) for kind in ("low_var_kl", "abs")),
        *((name, partial(_critic, 1.5)) for name in CLIPPED if name.startswith("critic.value")),
        ("margin", _hinge),
    ],
)
def test_a_distance_to_a_clip_rises_with_the_quantity_that_the_judge_computes_of_rows(
    name: str, losses: Callable[[], Iterator[Loss]]
) -> None:
    """So the distance of a cell is the oracle's and how far the cell's quantity is from the oracle's."""

    def shown(term: Term) -> tuple[float, float]:
        """The distance and the quantity of a token."""
        (numbers,) = CLIPPED[name].of(StepViews({f"{key}/0": of.detach() for key, of in term.rows.items()})).values()
        return term.clips[name][0].item(), numbers[0].item()

    near = 0
    for loss in losses():
        for x in torch.arange(-3.005, 3.0, 0.01, dtype=F64):
            (here, one), (there, other) = (shown(loss((x + more).repeat(2).requires_grad_())) for more in (0.0, 1e-4))
            if abs(here) < 0.02:
                near += 1
                assert abs(other - one) > 1e-5
                assert there - here == pytest.approx(other - one, rel=0.05)
    assert near > 1


def test_the_clip_fraction_of_cispo_has_a_distance_of_its_own() -> None:
    ratios = torch.tensor([0.8 - 1e-6, 0.8 + 1e-6, 1.3 - 1e-6, 1.3 + 1e-6, 1.0], dtype=F64)
    functions = GrpoFunctions(Grpo(clip_ratio_high=0.3, loss_mode="cispo"))
    term = functions.of_policy(ratios.log(), torch.zeros(5), _answer(5, old_logprob=0.0, advantage=1.0), TOTALS)
    distances = term.clips["counted ratio"]
    assert ((distances.abs() < 2e-6) == torch.tensor([True, True, True, True, False])).all()
    assert term.clips["ratio"].isinf().all()


def _off_policy(folder: Path, high: float = 0.3) -> OracleRuns:
    cell = make_cell("grpo-off-policy", "llama", "dp1", "fp32", steps=1, rows=4, accumulation=1)
    objective = replace(cast(Grpo, cell.scenario.objective), clip_ratio_high=high, kl_loss_coef=0.0, mini_batches=1)
    return OracleRuns(replace(cell, scenario=replace(cell.scenario, objective=objective)), folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, int, float]:
    """A row, a target of it and its ratio, which float32 rounds least of all with a positive advantage."""
    runs = _off_policy(tmp_path_factory.mktemp("any"))
    exact, rounded = (runs.record((), run).steps[0].tensors() for run in ("float64", "fp32-plain"))
    _, row, token, ratio = min(
        (abs(rounded[name][token].item() - ratio), int(name.removeprefix("ratio/")), token, ratio)
        for name in exact
        if name.startswith("ratio/")
        for token, ratio in enumerate(exact[name].tolist())
        if 1.05 < ratio < 1.5 and exact[name.replace("ratio", "advantage")][token] > 0
    )
    return row, token, ratio


@pytest.mark.parametrize(
    ("distance", "moved", "clip", "state"),
    [
        (1e-8, 3e-6, 1e-8, "at a clip"),  # rounding puts the ratio on the other side
        (1e-6, 0.0, 1e-6, "conforms"),
        (1e-6, 4e-6, 1e-6, "at a clip"),
        (1e-6, 0.0, -1e-6, "differs"),  # the clip is on the other side of the cell's own ratio
        (1e-3, 3e-3, 1e-3, "differs"),  # no rounding
        (1e-3, 0.0, -1e-3, "differs"),
    ],
)
def test_a_cell_is_not_judged_where_rounding_put_a_ratio_on_the_other_side_of_a_clip(
    tmp_path: Path, place: tuple[int, int, float], distance: float, moved: float, clip: float, state: str
) -> None:
    """A ratio is ``distance`` above its clip; the cell's sampled log-prob is ``moved``, its ratio ``clip`` above its
    clip."""
    row, token, ratio = place
    judged = _off_policy(tmp_path / "judged", ratio * math.exp(-distance) - 1)
    run = _off_policy(tmp_path / "cell", ratio * math.exp(-clip) - 1)
    run.batches = [_with_sampled(batch, row, token, moved) for batch in run.batches]
    noise = [judged.record((), name) for name in noise_runs("fp32")]
    cell = as_cell(run.record((), "fp32-plain"), tmp_path / "record", judged.cell)
    refused = pytest.raises(RecordError, match="at step 0, numbers are so near to a clip that fp32 rounds them")
    with refused if state == "at a clip" else contextlib.nullcontext():
        verdict = judge([cell], oracle=judged.record(), noise=noise)
        assert verdict.state == state, verdict.reason


def _with_sampled(batch: Batch, row: int, token: int, moved: float) -> Batch:
    """Adds ``moved`` to the sampler's log-prob of a target token, in the step and in its rollout."""

    def changed(one: Row) -> Row:
        places = [(n, at) for n, d in enumerate(one.documents) for at, target in enumerate(d.targets) if target]
        number, at = places[token]
        document = one.documents[number]
        sampled = [*cast(Sequence[float], document.columns["rollout_logprob"])]
        sampled[at] += moved
        document = replace(document, columns={**document.columns, "rollout_logprob": tuple(sampled)})
        return replace(one, documents=tuple(document if n == number else d for n, d in enumerate(one.documents)))

    rows = tuple(changed(one) if one.index == row else one for one in batch.rows)
    return replace(batch, rows=rows, rollout=tuple(_with_sampled(one, row, token, moved) for one in batch.rollout))


@pytest.mark.parametrize(
    ("quantity", "more", "is_judged"),
    [
        ("ratio", (), False),
        ("ratio", (("log-probs", 2, None),), True),  # before the loss of the same step
        ("ratio", (("gradients", 1, None),), True),  # at an earlier step
        ("ratio", (("loss", 2, 1e-7),), True),  # against the cell's own numbers
        ("ratio", (("configuration", 3, 0.0),), True),
        ("ratio", (("log-probs", 3, None),), False),  # at a later step
        ("ratio", (("critic gradients", 2, None),), True),
        ("critic.value", (), True),
        ("counted ratio", (), True),
    ],
)
def test_what_may_follow_from_a_number_near_a_clip_is_not_judged(
    quantity: str, more: tuple[tuple[str, int, float | None], ...], is_judged: bool
) -> None:
    beyond = [
        Measurement(stage=stage, tensor="a", step=step, error=0.1, fixed=fixed)
        for stage, step, fixed in (("gradients", 2, None), *more)
    ]
    refused = contextlib.nullcontext() if is_judged else pytest.raises(RecordError, match="at step 2, numbers are so")
    with refused:
        check_decided(beyond, {2: Counter({quantity: 1})}, all_observables(Ppo()), "fp32")
    check_decided(beyond, {}, all_observables(Ppo()), "fp32")


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
