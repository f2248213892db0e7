"""Checks that a cell is not judged where rounding may have put a number on the other side of a clip, and only there."""

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
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from conformance.core.errors import UsageError
from conformance.data.inputs import prepare_inputs
from conformance.judge.clips import CLIPPED, check_decided, undecided
from conformance.judge.tensor_views import StepViews
from conformance.judge.tolerance import Measurement
from conformance.judge.verdict import judge, judge_folders
from conformance.oracle.loss_terms import Term, importance
from conformance.oracle.objectives import DistillationFunctions, PreferenceFunctions
from conformance.oracle.policy_gradient import GrpoFunctions, PpoFunctions
from conformance.records.record_format import RecordError
from conformance.records.step_tensors import Record
from conformance.results.verdict import NO_FAULT
from conformance.runner.attempt import CellRunner, Expectations, expected_of_none
from conformance.runner.oracle_jobs import Oracles
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.objectives import REFERENCE_KL, Grpo, LossMode, Ppo, all_observables
from conformance.spec.observables import POLICY, distance_of
from conformance.spec.offline import PAIR, SIDE, Distillation, Dpo
from conformance.spec.precision import noise_runs

F64 = torch.float64
TOTALS = {"token_count": 1.0, "sequence_count": 1.0}
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
    step, found = 0.02, 0

    def at(loss: Loss, x: float) -> tuple[float, list[float]]:
        """The gradient, and the distances to clips."""
        term = loss(numbers := torch.full((2,), x, dtype=F64, requires_grad=True))
        assert term.loss is not None
        gradient = torch.autograd.grad(term.loss, numbers)[0].sum().item()
        return gradient, [d[0].item() for name, d in term.clips.items() if not CLIPPED[name].counted]

    for loss in losses:
        places = [(x, *at(loss, x)) for x in torch.arange(-3.005, 3.0, step, dtype=F64).tolist()]
        for (low, a, before), (high, b, after) in pairwise(places):
            jumped = abs(b - a) > max(10 * step, 0.2 * abs(a), 0.2 * abs(b))
            crossed = any(c * d <= 0 and abs(c - d) < 3 * step for c, d in zip(before, after, strict=True))
            assert jumped == crossed
            for _ in range(15 if jumped else 0):  # halve the place of the jump
                middle = (low + high) / 2
                low, high = (middle, high) if abs((g := at(loss, middle)[0]) - a) < abs(g - b) else (low, middle)
            assert not jumped or min(map(abs, at(loss, low)[1])) < 1e-5
            found += jumped
    assert found == jumps


@pytest.mark.parametrize(
    ("name", "losses"),
    [
        *(("ratio", partial(_policy, mode)) for mode in ("vanilla", "gspo", "geo_mean")),
        ("counted ratio", partial(_policy, "cispo")),
        *((REFERENCE_KL, partial(_policy, kl_loss_coef=1.0, kl_loss_type=kind)) for kind in ("low_var_kl", "abs")),
        *((name, partial(_critic, 1.5)) for name in CLIPPED if name.startswith("critic.value")),
        ("importance", partial(_importance, rollout_is_mask=True)),
        ("sequence importance", partial(_importance, rollout_is_mask=True, rollout_is="sequence")),
        ("margin", _hinge),
    ],
)
def test_a_distance_to_a_clip_rises_with_the_quantity_that_the_judge_computes_of_rows(
    name: str, losses: Callable[[], Iterator[Loss]]
) -> None:
    """So the distance of a cell is the oracle's and how far the cell's quantity is from the oracle's."""

    def shown(term: Term) -> tuple[float, float]:
        """The distance and the quantity of a token."""
        step = StepViews({f"{key}/0": numbers.detach() for key, numbers in term.rows.items()})
        numbers = CLIPPED[name].computed(step, {"0": term.clips[name]})["0"]
        return term.clips[name][0].item(), numbers[0].item()

    near = 0
    for loss in losses():
        for x in torch.arange(-3.005, 3.0, 0.015, dtype=F64):
            here, one = shown(loss(x.repeat(2)))
            if abs(here) < 0.02:
                near += 1
                there, other = shown(loss((x + 1e-4).repeat(2)))
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


@pytest.mark.parametrize(
    ("old_logprobs", "count"),
    [
        ((-6e-7, -6e-7, -1.0), 2),  # the first response crosses the threshold
        ((-6e-7, 0.0, -1.0), 0),
        ((6e-7, 6e-7, 0.0), 0),
    ],
)
def test_log_probs_of_a_response_decide_together_about_its_importance_weight(
    old_logprobs: tuple[float, ...], count: int
) -> None:
    def step(numbers: Sequence[float], *distances: float) -> Any:
        tensors = {"old_logprob/0": torch.tensor(numbers, dtype=F64)}
        tensors |= {"sequence importance_to_clip/0": torch.tensor(distances, dtype=F64)} if distances else {}
        return SimpleNamespace(step=0, tensors=lambda: tensors)

    cell, oracle, noise = (
        cast(Record, SimpleNamespace(steps=[one]))
        for one in (step(old_logprobs), step((0.0, 0.0, 0.0), 1e-6, 1e-6, 0.5), step((1e-6, 0.0, 0.0)))
    )
    assert undecided([cell], oracle, [noise], "fp32") == ({0: {"sequence importance": count}} if count else {})


def _off_policy(folder: Path, high: float = 0.3, **more: Any) -> OracleRuns:
    cell = make_cell("grpo-off-policy", "llama", "dp1", "fp32", steps=1, rows=4, accumulation=1)
    objective = replace(cast(Grpo, cell.scenario.objective), clip_ratio_high=high, kl_loss_coef=0.0, mini_batches=1)
    objective = replace(objective, **more)
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


@pytest.mark.parametrize("of", ["token", "sequence"])
def test_a_cell_is_judged_near_the_threshold_of_importance_weights_that_all_runs_mask_alike(
    tmp_path: Path, of: str
) -> None:
    masked = partial(_off_policy, recompute_old_logprobs=True, rollout_is=of, rollout_is_mask=True)
    runs = masked(tmp_path / "any", rollout_is_threshold=1.0)
    name = "importance" if of == "token" else "sequence importance"
    exact, *rounded = (
        StepViews(runs.record((), run).steps[0].tensors())[distance_of(name)].tensors
        for run in ("float64", *noise_runs("fp32"))
    )
    errors = {
        (row, token): max(abs(run[row][token].item() - weight) for run in rounded)
        for row, weights in exact.items()
        for token, weight in enumerate(weights.tolist())
    }
    row, token = min(errors, key=errors.__getitem__)
    threshold = math.exp(exact[row][token].item() - 2 * max(errors.values()))
    judged = masked(tmp_path / "judged", rollout_is_threshold=threshold)
    cell = as_cell(judged.record((), "fp32-plain"), tmp_path / "record", judged.cell)
    noise = [judged.record((), run) for run in noise_runs("fp32")]
    assert judge([cell], oracle=judged.record(), noise=noise).state == "conforms"


def test_more_noise_is_asked_for_where_rounding_decided_otherwise_in_the_first_run(tmp_path: Path) -> None:
    """A ratio's clip is put between float64 and the first run, and the cell is as the second run."""
    fused, plain = noise_runs("fp32")
    runs = _off_policy(tmp_path / "any")
    exact, first, second = (runs.record((), run).steps[0].tensors() for run in ("float64", fused, plain))
    ratios = [
        (of_token, first[name][token].item(), second[name][token].item())
        for name in exact
        if name.startswith("ratio/")
        for token, of_token in enumerate(exact[name].tolist())
        if 1.05 < of_token < 1.5 and exact[name.replace("ratio", "advantage")][token] > 0
    ]

    def room(of_token: tuple[float, float, float]) -> float:
        """How far the second run is from a clip in the middle between the others, on the side of float64."""
        x, fused_x, plain_x = of_token
        return min(abs(fused_x - x), (x + fused_x - 2 * plain_x) * math.copysign(1.0, fused_x - x))

    clip = sum(max(ratios, key=room)[:2]) / 2
    judged = _off_policy(tmp_path / "judged", clip - 1)
    cell = as_cell(judged.record((), plain), tmp_path / "record", judged.cell)
    with Oracles(root=tmp_path, device="cpu", budget_s=120.0) as oracles:
        inputs = prepare_inputs(judged.cell.scenario, tmp_path)
        oracles.request(judged.cell, inputs)
        assert oracles.wait(judged.cell) == ""
        folder, none = oracles.folder(judged.cell), cast(Any, None)
        alone = judge_folders(str(judged.cell), [cell.path], folder)
        assert (alone.state, "also in a single process" in alone.reason) == ("infrastructure", True), alone.reason
        expectations = cast(Expectations, SimpleNamespace(of=expected_of_none))
        runner = CellRunner(none, where=none, oracles=oracles, expectations=expectations, activities=none)
        verdict = runner._judge(judged.cell, [cell.path], inputs)
        assert (folder / plain).is_dir()
        assert verdict.state in NO_FAULT, verdict.reason


@pytest.mark.parametrize(
    ("gap", "of_cell", "state"),
    [
        (1e-8, -3e-7, "at a clip"),  # rounding puts the next token among the top k
        (2e-6, 2e-6, "conforms"),
        (1e-3, -1e-3, "differs"),  # no rounding
    ],
)
def test_a_cell_is_not_judged_where_rounding_chose_another_token_of_the_teachers_top_k(
    tmp_path: Path, gap: float, of_cell: float, state: str
) -> None:
    """The last of the teacher's top k logits of a token is ``gap`` above the next one, in the cell ``of_cell``."""
    judged, run = _with_gap(tmp_path / "judged", gap), _with_gap(tmp_path / "cell", of_cell)
    noise = [judged.record((), name) for name in noise_runs("fp32")]
    with_other_choice = replace(run.record((), "fp32-plain"), loaded=noise[0].loaded)
    cell = as_cell(with_other_choice, tmp_path / "record", judged.cell)
    refused = pytest.raises(RecordError, match=r"so near to a clip that fp32 rounds .* \(1 of top_k\)")
    with refused if state == "at a clip" else contextlib.nullcontext():
        verdict = judge([cell], oracle=judged.record(), noise=noise)
        assert verdict.state == state, verdict.reason


def _with_gap(folder: Path, gap: float) -> OracleRuns:
    """Distillation from a teacher with this gap behind its eighth largest logit, where it was smallest."""
    runs = OracleRuns(make_cell("distillation-top-k", "llama", "dp1", "fp32", steps=1, rows=4, accumulation=1), folder)
    teacher = runs._inputs.models["teacher"]
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=F64)
    places = []
    for document in (document for row in runs.batches[0].rows for document in row.documents):
        logits = model(torch.tensor([document.tokens])).logits[0].detach()
        before = [at - 1 for at, target in enumerate(document.targets) if target]
        places += [*zip(*(one[:, 7:9].tolist() for one in logits[before].topk(9)), strict=True)]
    (last, following), (_, token) = min(places, key=lambda place: place[0][0] - place[0][1])
    weights = load_file(file := teacher / "model.safetensors")
    weights["lm_head.weight"][token] *= (last - gap) / following
    save_file(weights, file, metadata={"format": "pt"})
    return runs


def test_equal_logits_at_the_end_of_the_top_k_are_refused() -> None:
    functions = DistillationFunctions(Distillation(top_k=2))
    teacher = torch.tensor([[3.0, 1.0, 1.0, 0.0]], dtype=F64).repeat(2, 1)
    with pytest.raises(UsageError, match=r"the teacher's logits 2 and 3 of a token, .* are equal; use another top_k"):
        functions.term(
            POLICY.name,
            torch.zeros_like(teacher),
            _answer(1),
            totals=TOTALS,
            earlier={"teacher": teacher},
            stable=F64,
        )


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
        ("ratio", (("critic gradients", 3, None),), True),  # of the other model, whose rollout is frozen
        ("ratio", (("critic gradients", 4, None),), False),  # in the next rollout
        ("ratio", (("values", 3, None),), True),
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
    observables = all_observables(Ppo(mini_batches=2))
    refused = contextlib.nullcontext() if is_judged else pytest.raises(RecordError, match="at step 2, numbers are so")
    with refused:
        check_decided(beyond, {2: Counter({quantity: 1})}, observables, "fp32", steps_per_rollout=2)
    check_decided(beyond, {}, observables, "fp32", steps_per_rollout=2)
