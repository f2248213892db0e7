"""Checks the tolerance of a value model's embedding row whose contributions nearly cancel: it covers their common error
and no more."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_objectives
from judge_sample import Change, Tensors, Values, unchanged, write
from test_oracle import FLOAT64, GAPS, LONG, PADDED, document
from torch import Tensor

from conformance.judge.verdict import judge
from conformance.models.folders import prepare_model
from conformance.oracle.primitives import HONEST
from conformance.oracle.role_model import read_decoder
from conformance.oracle.run import POLICIES
from conformance.oracle.step import EMBEDDING, Model, Observed, observe
from conformance.records.record_format import RecordError
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.observables import CRITIC
from conformance.spec.scenario import OptimizerConfig, Scenario

OBJECTIVE = toy_objectives.PolicyAndValue()


# --- the oracle ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Gemma's, whose embeddings are multiplied by a number, and whose padding token gets no gradient."""
    scenario = Scenario(
        name="any", model="models/gemma3", precision="exact", optimizer=OptimizerConfig(name="sgd", lr=0.1)
    )
    folder = prepare_model(scenario, CRITIC, tmp_path_factory.mktemp("critic") / "critic")
    decoder = read_decoder(folder)
    weights = decoder.load(folder, torch.float64, HONEST, trained=True, devices=["cpu"])
    return Model(role=CRITIC, decoder=decoder, weights=weights, trained=frozenset(weights))


def step_of(critic: Model, *documents: Document, returns: float = 0.0, shifts: bool = True) -> Observed:
    """``returns``: of every document."""
    given = (replace(d, columns={"return": returns}) for d in documents)
    batch = Batch(step=0, max_len=64, rows=tuple(Row(i, (d,)) for i, d in enumerate(given)))
    return observe(batch, [critic], OBJECTIVE, FLOAT64, shifts=shifts)


def moved(critic: Model, *documents: Document) -> Tensor:
    """How far rows move where the gradient with respect to every value is off by 1, found by giving other returns."""
    off = toy_objectives.RETURNS / sum(sum(d.targets) for d in documents)
    before, after = (
        step_of(critic, *documents, returns=number).gradients["critic"][EMBEDDING] for number in (0.0, 1.0)
    )
    distances: Tensor = (after - before).norm(dim=1) / off
    return distances


@pytest.mark.parametrize("of", [LONG, PADDED, GAPS])
def test_a_row_moves_as_far_as_another_return_of_the_document_moves_it(critic: Model, of: Document) -> None:
    found = step_of(critic, of).shifted["critic"]
    torch.testing.assert_close(found, moved(critic, of), rtol=1e-9, atol=1e-12)
    assert found[of.tokens[0]] > 0
    assert found[0] == 0, "the padding token"


def test_documents_err_independently_and_copies_of_one_err_alike(critic: Model) -> None:
    one, other = LONG, document(5, 30, 3)
    apart = torch.hypot(moved(critic, one), moved(critic, other))
    torch.testing.assert_close(step_of(critic, one, other).shifted["critic"], apart, rtol=1e-9, atol=1e-12)
    alike = step_of(critic, one, one, one).shifted["critic"]
    torch.testing.assert_close(alike, moved(critic, one, one, one), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(alike, 3 * moved(critic, one), rtol=1e-9, atol=1e-12)
    untaught = replace(one, targets=(False,) * len(one.tokens))
    torch.testing.assert_close(step_of(critic, one, untaught).shifted["critic"], moved(critic, one), rtol=1e-9, atol=0)


def test_the_gradients_of_values_are_recorded_without_the_scale_of_the_loss(critic: Model) -> None:
    found = step_of(critic, GAPS, returns=1.0)
    wanted = (found.rows["critic.value"][0] - toy_objectives.RETURNS) / sum(GAPS.targets)
    torch.testing.assert_close(found.rows["critic.value_gradient"][0], wanted, rtol=1e-12, atol=0)
    half = replace(critic, weights={name: weight.float() for name, weight in critic.weights.items()})
    batch = Batch(step=0, max_len=64, rows=(Row(0, (replace(GAPS, columns={"return": 1.0}),)),))
    scaled = observe(batch, [half], OBJECTIVE, POLICIES["fp16"]).rows["critic.value_gradient"][0]
    torch.testing.assert_close(scaled, wanted, rtol=0.05, atol=1e-4)


def test_shifted_row_backward_changes_no_gradient(critic: Model) -> None:
    with_it, without = (step_of(critic, LONG, GAPS, shifts=shifts) for shifts in (True, False))
    for name, gradient in without.gradients["critic"].items():
        assert torch.equal(gradient, with_it.gradients["critic"][name]), name
    assert without.shifted == {}
    frozen = replace(critic, trained=critic.trained - {EMBEDDING})
    assert step_of(frozen, LONG).shifted == {}


# --- the judge -------------------------------------------------------------------------------------------------------

NOISE = 1e-6  # relative error of each row, and of gradients with respect to values, of the single-process run
CANCELS, MOVES = 2, 10.0  # a row of ``a``, and how far it moves, relative to its norm
BOUND = 3 * NOISE


def reference(far: float) -> Change:
    """The oracle's steps, with what a value model has: the row CANCELS moves ``far`` times its norm, others a half."""

    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step >= 0:
            factors = torch.full((4,), 0.5, dtype=torch.float64)
            factors[CANCELS] = far
            tensors["shifted/a"] = factors * tensors["gradient/a"].norm(dim=1)
            tensors["value_gradient/0"] = torch.linspace(-1, 1, 50, dtype=torch.float64)

    return change


def noisy(step: int, values: Values, tensors: Tensors, *, times: float = 1.0) -> None:
    """``times``: how large the errors of values are, of which those of the second step are a tenth."""
    if step >= 0:
        for name in ("gradient/a", "gradient/b"):
            tensors[name] *= 1 + NOISE
        # None alike and half of them 0: it is the root mean square that counts.
        errors = torch.tensor([1.0, 0.0, -1.0, 0.0], dtype=torch.float64).repeat(13)[:50] * 2**0.5
        errors *= NOISE * times * (0.1 if step else 1.0)
        tensors["value_gradient/0"] = torch.linspace(-1, 1, 50, dtype=torch.float64) + errors


def quiet(step: int, values: Values, tensors: Tensors) -> None:
    noisy(step, values, tensors, times=0.2)


def ratio(
    tmp_path: Path,
    row: int,
    off: float,
    *,
    far: float = MOVES,
    told: bool = True,
    runs: tuple[Change, ...] = (noisy,),
    at: int = 0,
    **options: Any,
) -> float:
    """Observed / allowed of the worst row of ``a`` where ``row`` is ``off`` at step ``at``, relative to its norm.

    ``told``: whether the oracle says how far rows move. ``runs``: the single-process runs.
    """

    def wrong(step: int, values: Values, tensors: Tensors) -> None:
        if step == at:
            tensors["gradient/a"][row] *= 1 + off

    precision = options.get("precision", "fp32")
    oracle = write(tmp_path / "oracle", reference(far) if told else unchanged)
    noise = [write(tmp_path / f"noise{n}", run, precision=precision) for n, run in enumerate(runs)]
    cell = write(tmp_path / "cell", wrong, precision=precision)
    verdict = judge([cell], oracle=oracle, noise=[] if precision == "exact" else noise)
    (found,) = (q for q in verdict.quantities if (q.stage, q.tensor, q.step) == ("gradients", "a (worst row)", at))
    return found.ratio


@pytest.mark.parametrize("row", range(4))
def test_shifted_row_gets_own_tolerance_only(tmp_path: Path, row: int) -> None:
    allowed = BOUND * (MOVES if row == CANCELS else 1.0)
    assert ratio(tmp_path / "within", row, 0.99 * allowed) == pytest.approx(0.99, abs=0.02)
    assert ratio(tmp_path / "beyond", row, 3 * allowed) == pytest.approx(3, abs=0.06)


def without_values(step: int, values: Values, tensors: Tensors) -> None:
    noisy(step, values, tensors)
    tensors.pop("value_gradient/0", None)


@pytest.mark.parametrize(
    ("off", "options", "expected"),
    [
        (3 * BOUND * MOVES, {"runs": (noisy, quiet)}, 3),
        (3 * BOUND * MOVES, {"runs": (quiet, noisy)}, 3),
        (3 * BOUND, {"at": 2}, 3),  # errors of values are a tenth of those of the first step
        (3 * BOUND, {"runs": (without_values,)}, 3),
        (2 * BOUND, {"told": False}, 2),
        (-1.0, {"far": 1e9}, 2),
        (0.4, {"far": 1e9}, 0.8),
        (2e-11, {"precision": "exact"}, 2),
    ],
    ids=["noisiest first", "noisiest last", "later step", "no values", "not told", "lost", "halved", "exact"],
)
def test_leeway_comes_from_the_noise_of_its_step(
    tmp_path: Path, off: float, options: dict[str, Any], expected: float
) -> None:
    assert ratio(tmp_path, CANCELS, off, **options) == pytest.approx(expected, rel=0.02)


def test_an_oracle_that_says_it_of_other_rows_than_it_has_is_not_judged_by(tmp_path: Path) -> None:
    def fewer(step: int, values: Values, tensors: Tensors) -> None:
        if step >= 0:
            tensors["shifted/a"] = torch.ones(3, dtype=torch.float64)

    oracle, noise = write(tmp_path / "oracle", fewer), write(tmp_path / "noise", noisy, precision="fp32")
    with pytest.raises(RecordError, match=r"gives the movement of .3,. rows of a, but has .4,.; run the cell again"):
        judge([write(tmp_path / "cell", precision="fp32")], oracle=oracle, noise=[noise])
