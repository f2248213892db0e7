"""Checks conventions: each variant of the oracle by a formula of its own, and which of them a verdict names."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_cell
from judge_sample import clauses
from oracle_cells import OracleRuns, as_cell

from conformance.backends.protocol import BackendEntry
from conformance.judge.expected_differences import explained, judge_cell
from conformance.matrix.cell import Cell, Phase
from conformance.records.step_tensors import Record
from conformance.results.trust import _conventions_problem
from conformance.results.verdict import Verdict
from conformance.runner.session import Session
from conformance.spec.conventions import (
    KNOWN,
    AdvantageEpsilon,
    BiasedWhitening,
    Conventions,
    CountEpsilon,
    DecaysAll,
    EntropyByMicroBatch,
    GenerationDenominator,
    MetricsByMicroBatch,
    OracleConvention,
    RoundedMasters,
    SchedulePerRollout,
    in_cell,
    of_oracle,
)
from conformance.spec.known_defects import DividedGradients, DividedLoss, MeanOfMeans, means_of_means
from conformance.spec.layout import Layout

ENTROPY = EntropyByMicroBatch(data_ranks=1, micro_batches=2)
METRICS = MetricsByMicroBatch(data_ranks=1, micro_batches=2)
SHOWN: tuple[OracleConvention, ...] = (
    DecaysAll(),
    AdvantageEpsilon(value=1e-4),
    SchedulePerRollout(),
    GenerationDenominator(),
    ENTROPY,
    METRICS,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> OracleRuns:
    """GRPO with two mini-batches in two epochs, a moving rate, decay and an entropy bonus: all of SHOWN change it."""
    cell = make_cell("grpo", "llama", "dp1", "exact", steps=2, rows=4, accumulation=2)
    return OracleRuns(cell, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> OracleRuns:
    cell = make_cell("ppo", "llama", "dp1", "exact", steps=1, rows=4, accumulation=1)
    return OracleRuns(cell, tmp_path_factory.mktemp("ppo"))


def rows_of(record: Record, key: str, step: int = 0) -> dict[int, torch.Tensor]:
    found = record.steps[step].tensors()
    return {int(n.partition("/")[2]): t.double() for n, t in found.items() if n.startswith(f"{key}/")}


# --- the oracle with a convention ------------------------------------------------------------------------------------


def test_decay_of_all_decays_norms(runs: OracleRuns) -> None:
    (own, right), lr = (runs.record(d).steps[0].tensors() for d in ((DecaysAll(),), ())), runs.cell.scenario.optimizer
    loaded = runs.record().loaded.tensors()
    for name, weight in right.items():
        if name.startswith("weight/"):
            decay = lr.lr * lr.weight_decay * loaded[name] if weight.ndim == 1 else torch.zeros_like(weight)
            torch.testing.assert_close(own[name], weight - decay, rtol=1e-14, atol=1e-16)


def test_the_schedule_stands_still_in_a_rollout(runs: OracleRuns) -> None:
    scenario = runs.cell.scenario
    rates = [step.value("lr") for step in runs.record((SchedulePerRollout(),)).steps]
    assert rates == [scenario.optimizer.lr * scenario.schedule.factor(0)] * 2
    assert len({step.value("lr") for step in runs.record().steps}) == 2


def test_the_epsilon_is_added_to_the_standard_deviation(runs: OracleRuns) -> None:
    documents = [d for batch in runs.batches[0].rollout for d in batch.documents]
    groups: dict[Any, list[float]] = {}
    for d in documents:
        groups.setdefault(d.columns["group"], []).append(float(d.columns["reward"]))  # type: ignore[arg-type]
    expected = []
    for d in (d for row in runs.batches[0].rows for d in row.documents):
        rewards = torch.tensor(groups[d.columns["group"]], dtype=torch.float64)
        own = (float(d.columns["reward"]) - rewards.mean()) / (rewards.std() + 0.25)  # type: ignore[arg-type]
        expected += [own.item()] * sum(d.targets)
    found = rows_of(runs.record((AdvantageEpsilon(value=0.25),)), "advantage")
    torch.testing.assert_close(torch.cat([found[row] for row in sorted(found)]), torch.tensor(expected).double())


def test_whitening_has_the_variance_of_n(ppo: OracleRuns) -> None:
    def advantages(*defects: OracleConvention) -> torch.Tensor:
        every = rows_of(ppo.record(defects), "advantage")
        return torch.cat([every[row] for row in sorted(every)])

    tokens = sum(batch.target_count for batch in ppo.batches[0].rollout)
    biased, right = advantages(BiasedWhitening()), advantages()
    torch.testing.assert_close(biased, right * (tokens / (tokens - 1)) ** 0.5, rtol=1e-7, atol=1e-9)
    assert not torch.equal(biased, right)


def test_whitening_has_an_epsilon_beside_the_count(tmp_path: Path) -> None:
    def flat(record: Record, key: str) -> torch.Tensor:
        return torch.cat([numbers for _, numbers in sorted(rows_of(record, key).items())])

    cell = make_cell("core-ppo-plain", "llama", "dp1", "exact", steps=1, rows=4, accumulation=1)
    runs = OracleRuns(cell, tmp_path)
    own, right = runs.record((CountEpsilon(value=0.5, whitening=True),)), runs.record((CountEpsilon(value=0.5),))
    raw = flat(right, "return") - flat(right, "critic.old_value")
    centred, n = raw - raw.sum() / (len(raw) + 0.5), len(raw)
    expected = centred / (centred.square().sum() / (n + 0.5) * n / (n - 1) + 1e-8).sqrt()
    torch.testing.assert_close(flat(own, "advantage"), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(flat(right, "advantage"), (raw - raw.mean()) / (raw.var() + 1e-8).sqrt())


def test_means_of_responses_have_an_epsilon_beside_the_count(tmp_path: Path) -> None:
    cell = make_cell("core-grpo-seq-mean", "llama", "dp1", "exact", steps=1, rows=4, accumulation=1)
    record = OracleRuns(cell, tmp_path).record((CountEpsilon(value=0.5),))
    entropies = rows_of(record, "entropy").values()
    mean = sum(one.sum().item() / (len(one) + 0.5) for one in entropies) / len(entropies)
    assert record.steps[0].value("entropy_loss") == pytest.approx(mean, rel=1e-12, abs=0)


@pytest.mark.parametrize("by", [1, 2])
@pytest.mark.parametrize("step", [0, 1])
def test_mini_batches_are_divided_by_their_mean_tokens(runs: OracleRuns, step: int, by: int) -> None:
    defects = (GenerationDenominator(), DividedLoss(by=2))[:by]
    tokens = [batch.target_count for batch in runs.batches[0].rollout]
    assert tokens[0] != tokens[1]
    own = runs.record(defects).steps[step]
    ratios, advantages = (rows_of(runs.record(defects), key, step) for key in ("ratio", "advantage"))
    losses = [-torch.minimum(r * advantages[row], r.clamp(0.9, 1.14) * advantages[row]) for row, r in ratios.items()]
    mean = sum(tokens) / len(tokens)
    total = sum(loss.sum().item() for loss in losses) / mean
    assert own.value("pg_loss") == pytest.approx(total / by, rel=1e-12, abs=0)


def test_a_divided_loss_leaves_the_entropy_bonus(runs: OracleRuns) -> None:
    found, right = (runs.record(defects).steps[0] for defects in ((DividedLoss(by=4),), ()))
    for key, by in (("pg_loss", 4), ("kl_loss", 4), ("entropy_loss", 1)):
        assert found.value(key) == pytest.approx((right.value(key) or 0.0) / by, rel=1e-12, abs=0)
    assert found.value("grad_norm") != right.value("grad_norm")


def test_entropy_is_the_mean_of_means(runs: OracleRuns) -> None:
    record = runs.record((ENTROPY,))
    entropies, rows = rows_of(record, "entropy"), [row.index for row in runs.batches[0].rows]
    halves = [torch.cat([entropies[row] for row in half]) for half in (rows[:2], rows[2:])]
    assert record.steps[0].value("entropy_loss") == pytest.approx(
        sum(h.mean().item() for h in halves) / 2, rel=1e-12, abs=0
    )
    right = runs.record().steps[0].value("entropy_loss")
    assert right == pytest.approx(torch.cat(halves).mean().item(), rel=1e-12, abs=0)


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_metrics_are_the_means_of_means(runs: OracleRuns, epsilon: float) -> None:
    record, rows = runs.record((replace(METRICS, epsilon=epsilon),)), [row.index for row in runs.batches[1].rows]
    for key, of_tokens in (("ppo_kl", "approx_kl"), ("ratio_mean", "ratio")):
        found = rows_of(record, of_tokens, step=1)
        halves = [torch.cat([found[row] for row in half]) for half in (rows[:2], rows[2:])]
        own, right = (one.steps[1].value(key) for one in (record, runs.record()))
        assert own == pytest.approx(sum(h.sum().item() / (len(h) + epsilon) for h in halves) / 2, rel=1e-12, abs=0)
        assert right == pytest.approx(torch.cat(halves).mean().item(), rel=1e-12, abs=0)
        assert own != right


# --- what a verdict says ----------------------------------------------------------------------------------------------


def judged(runs: OracleRuns, path: Path, shows: tuple[OracleConvention, ...], declares: Conventions) -> Verdict:
    """Judges a cell whose numbers are those of the oracle with some conventions, and whose backend declares others."""
    as_cell(runs.record(shows), path, runs.cell)
    options: Any = {"oracles": runs.folder, "observables": runs.record().observables, "conventions": declares}
    verdict = judge_cell(str(runs.cell), [path], known=(), **options)
    candidates = tuple(one for one in SHOWN if one not in declares)
    return explained(verdict, str(runs.cell), [path], candidates=candidates, means=(), **options)


@pytest.mark.parametrize("one", SHOWN, ids=str)
def test_a_declared_convention_that_shows_is_named(tmp_path: Path, runs: OracleRuns, one: OracleConvention) -> None:
    verdict = judged(runs, tmp_path / "cell", (one,), (one,))
    assert (verdict.state, verdict.conventions) == ("conforms", (str(one),)), verdict.reason
    assert verdict.reason.endswith(f"with the convention {one.words} ({one})")


def test_entropy_by_micro_batch_shows_beside_means_of_sequences(tmp_path: Path) -> None:
    cell = make_cell("core-grpo-seq-mean", "llama", "dp1", "exact", steps=1, rows=4, accumulation=1)
    verdict = judged(OracleRuns(cell, tmp_path), tmp_path / "cell", (ENTROPY,), (ENTROPY,))
    assert (verdict.state, verdict.conventions) == ("conforms", (str(ENTROPY),)), verdict.reason


@pytest.mark.parametrize("one", SHOWN, ids=str)
def test_a_declared_convention_that_does_not_show_is_stale(
    tmp_path: Path, runs: OracleRuns, one: OracleConvention
) -> None:
    verdict = judged(runs, tmp_path / "cell", (), (one,))
    assert (verdict.state, verdict.conventions) == ("differs", ())
    assert verdict.reason.startswith(f"declares the convention {one.words} ({one}), but does not show it")


@pytest.mark.parametrize("one", SHOWN, ids=str)
def test_an_undeclared_convention_is_the_likely_cause(tmp_path: Path, runs: OracleRuns, one: OracleConvention) -> None:
    verdict = judged(runs, tmp_path / "cell", (one,), ())
    hint = f"agrees in all stages with {one.words} (convention {one})"
    assert verdict.state == "differs"
    assert verdict.findings[0].hint == hint
    assert verdict.reason.count(hint) == 1


def test_each_stale_convention_is_named(tmp_path: Path, runs: OracleRuns) -> None:
    shown, stale = SHOWN[0], (SHOWN[1], SHOWN[2])
    verdict = judged(runs, tmp_path / "cell", (shown,), SHOWN[:3])
    assert verdict.state == "differs"
    words = " and ".join(f"{one.words} ({one})" for one in stale)
    assert verdict.reason.startswith(f"declares the conventions {words}, but does not show it")


def test_all_conventions_together_are_named(tmp_path: Path, runs: OracleRuns) -> None:
    verdict = judged(runs, tmp_path / "cell", SHOWN[:3], SHOWN[:3])
    assert (verdict.state, verdict.conventions) == ("conforms", tuple(map(str, SHOWN[:3])))


def test_a_bug_beside_a_convention_differs_and_no_convention_explains_it(tmp_path: Path, runs: OracleRuns) -> None:
    as_cell(runs.record((SHOWN[0],)), tmp_path / "cell", runs.cell, values={"loss": 1.0})
    options: Any = {"oracles": runs.folder, "observables": runs.record().observables, "conventions": (SHOWN[0],)}
    verdict = judge_cell(str(runs.cell), [tmp_path / "cell"], known=(), **options)
    again = explained(verdict, str(runs.cell), [tmp_path / "cell"], candidates=SHOWN[1:3], means=(), **options)
    assert (verdict.state, verdict.first_stage, again) == ("differs", "loss", verdict)


def test_a_convention_that_changes_no_number_is_not_named(tmp_path: Path, runs: OracleRuns) -> None:
    verdict = judged(runs, tmp_path / "cell", (), (EntropyByMicroBatch(), RoundedMasters(precision="bf16"))[:1])
    assert (verdict.state, verdict.conventions) == ("conforms", ())
    assert "convention" not in verdict.reason


def test_conventions_apply_only_where_they_can_change_numbers(runs: OracleRuns) -> None:
    sft = make_cell("sft-sgd", "llama", "dp1", "exact").scenario
    kinds = {str(one) for one in in_cell(KNOWN, sft, Layout())}
    assert kinds == {"TrainedPaddingToken", "GeneratorsNotSaved"}
    assert set(map(str, SHOWN)) <= {str(one) for one in in_cell(KNOWN, runs.cell.scenario, Layout())}
    assert of_oracle(KNOWN) == KNOWN[:-1]


# --- means of means, which are no convention -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> OracleRuns:
    cell = make_cell("sft-padded", "llama", "dp1", "exact", steps=2, rows=8, accumulation=2)
    return OracleRuns(cell, tmp_path_factory.mktemp("halves"))


def test_a_cell_could_have_the_means_of_all_its_parts(halves: OracleRuns) -> None:
    scenario = halves.cell.scenario
    kinds = {one.of: one.parts for one in means_of_means(scenario, Layout.parse("dp2.tp2"))}
    assert kinds == {("ranks",): 2, ("micro-batches",): 4, ("rows",): 8}
    assert {one.of: one.parts for one in means_of_means(scenario, Layout())} == {("micro-batches",): 2, ("rows",): 8}
    (same,) = means_of_means(replace(scenario, accumulation=8), Layout())
    assert same.words.startswith("the mean of the means of micro-batches or rows, ")
    pairs = make_cell("dpo", "llama", "dp1", "exact").scenario
    assert means_of_means(pairs, Layout.parse("dp2")) == ()


def test_a_mean_of_means_is_that_of_its_parts(halves: OracleRuns) -> None:
    (logprobs, right), batch = (rows_of(halves.record(), "logprob"), halves.record().steps[0]), halves.batches[0]
    micro_batches = batch.micro_batches(dp_rank=0, dp_size=1, accumulation=2)
    means = [
        -torch.cat([logprobs[row.index] for row in part if row.target_count]).mean().item() for part in micro_batches
    ]
    own = halves.record((MeanOfMeans(parts=2, of=("micro-batches",)),)).steps[0]
    assert own.value("loss") == pytest.approx(sum(means) / 2, rel=1e-13, abs=0)
    assert own.value("loss") != pytest.approx(right.value("loss"), rel=1e-4)
    assert own.value("token_count") == right.value("token_count")


@pytest.mark.parametrize("only", ["", "loss", "gradients"])
@pytest.mark.parametrize("of", ["micro-batches", "rows"])
def test_a_mean_of_means_is_named_for_loss_and_gradients(
    tmp_path: Path, halves: OracleRuns, of: str, only: str
) -> None:
    means = means_of_means(halves.cell.scenario, Layout())
    one = next(mean for mean in means if mean.of == (of,))
    wrong, right = (halves.record(defects) for defects in ((one,), ()))
    run = right if only == "loss" else wrong
    of_loss = (right if only == "gradients" else wrong).steps[0].value("loss")
    as_cell(replace(run, steps=run.steps[:1]), tmp_path / "cell", halves.cell, values={"loss": of_loss or 0.0})
    options: Any = {"oracles": halves.folder, "observables": right.observables, "conventions": ()}
    verdict = judge_cell(str(halves.cell), [tmp_path / "cell"], known=(), **options)
    verdict = explained(verdict, str(halves.cell), [tmp_path / "cell"], candidates=(), means=means, **options)
    hints = {stage: {q.hint for q in verdict.findings if (q.stage, q.step) == (stage, 0)} for stage in ORDER}
    assert [stage for stage in ORDER if hints[stage]] == [stage for stage in ORDER if only in ("", stage)]
    for hint in (hint for stage in ORDER for hint in hints[stage]):
        assert hint.endswith(f"the mean of the means of {of}, in which tokens count less where there are more of them")
    assert verdict.reason.count(one.words) == 1


ORDER = ("loss", "gradients")


def test_gradients_of_another_cause_are_no_mean_of_means(tmp_path: Path, halves: OracleRuns) -> None:
    means, right = means_of_means(halves.cell.scenario, Layout()), halves.record()
    as_cell(halves.record((DividedGradients(by=3),)), tmp_path / "cell", halves.cell, scaled={"gradient": 1.01})
    options: Any = {"oracles": halves.folder, "observables": right.observables, "conventions": ()}
    verdict = judge_cell(str(halves.cell), [tmp_path / "cell"], known=(), **options)
    again = explained(verdict, str(halves.cell), [tmp_path / "cell"], candidates=(), means=means, **options)
    assert (verdict.first_stage, again) == ("gradients", verdict)


# --- real cells -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "state", "conventions", "words"),
    [
        (
            "SavesNoGenerators",
            "conforms",
            ("GeneratorsNotSaved",),
            "not judged: generators; with the convention checkpoints without random generators (GeneratorsNotSaved)",
        ),
        ("ForgetsGenerators", "differs", (), "agrees in all stages with checkpoints without random generators"),
        ("SavesGenerators", "differs", (), "declares the convention checkpoints without random generators (Gen"),
    ],
)
def test_generators_that_a_checkpoint_leaves_out(
    session: Session, name: str, state: str, conventions: tuple[str, ...], words: str
) -> None:
    scenario = make_cell("sft-sgd", "llama", "dp1", "exact", steps=3, rows=4, accumulation=1).scenario
    backend = BackendEntry(name=name.lower(), target=f"plain_variants:{name}")
    saves = Phase(backend=backend, layout=Layout(dp=1), steps=1, save="checkpoint")
    phases = (saves, Phase(backend=backend, layout=Layout(dp=1), steps=2))
    verdict = session.run(Cell(scenario=scenario, phases=phases, program="resume")).verdict
    assert (verdict.state, verdict.conventions) == (state, conventions), verdict.reason
    assert words in "; ".join(clauses(verdict))


@pytest.mark.parametrize(
    ("shown", "made", "problem"),
    [
        ((SHOWN[0],), [SHOWN[1:2]], ""),
        ((SHOWN[2],), [SHOWN[1:2]], "which the backend does not declare"),
        ((SHOWN[0],), [], "but there is no record of the oracle without it"),
    ],
)
def test_a_verdict_shows_no_convention_without_proof(shown: tuple[Any, ...], made: list[Any], problem: str) -> None:
    verdict = SimpleNamespace(conventions=tuple(map(str, shown)))
    variants = [SimpleNamespace(defects=of_oracle(some)) for some in made]
    entry: Any = SimpleNamespace(verdict=verdict, conventions=SHOWN[:2], variants=variants, expected=(), records=("0",))
    found = _conventions_problem(entry)
    assert problem in found if problem else not found
