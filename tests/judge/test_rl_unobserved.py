"""Checks what a cell of GRPO may leave out, and what its metrics are compared with if it shows no rows."""

from pathlib import Path

import pytest
from conftest import make_cell
from oracle_cells import OracleRuns, as_cell

from conformance.backends.protocol import StepMetrics
from conformance.judge.measurements import measure
from conformance.judge.verdict import judge
from conformance.records.step_tensors import Record
from conformance.results.verdict import Verdict
from conformance.spec.objectives import DECISIVE, Grpo, Ppo
from conformance.spec.observables import AGAINST_REBUILT
from conformance.worker.phase import check_values

METRICS = ("ppo_kl", "ratio_mean", "ratio_max", "pg_clipfrac", "pg_clipfrac_lower")
ROWS = ("entropy", "ratio", "approx_kl")
TOTALS = ("sequence_count", "entropy_loss", "pg_loss")
Runs = OracleRuns


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    cell = make_cell("grpo-half", "llama", "dp1", "bf16", steps=2, rows=4, accumulation=1)
    return OracleRuns(cell, tmp_path_factory.mktemp("runs"))


def cell_of(runs: Runs, path: Path, *without: str, **changes: dict[str, float]) -> Record:
    return as_cell(runs.record((), "bf16-plain"), path, runs.cell, *without, **changes)


def judged(cell: Record, runs: Runs) -> Verdict:
    return judge([cell], oracle=runs.record(), noise=[runs.record((), "bf16")])


@pytest.mark.parametrize("without", [("ratio_max",), (*ROWS, *TOTALS, *METRICS)])
def test_grpo_left_out_is_named_in_the_verdict(tmp_path: Path, runs: Runs, without: tuple[str, ...]) -> None:
    verdict = judged(cell_of(runs, tmp_path / "cell", *without), runs)
    assert verdict.state == "partly_observed", verdict.reason
    assert "policy metrics (" in verdict.reason
    for key in without:
        assert key in verdict.reason


def test_all_of_grpo_shown_conforms(tmp_path: Path, runs: Runs) -> None:
    verdict = judged(cell_of(runs, tmp_path / "cell"), runs)
    assert verdict.state == "conforms", verdict.reason


def test_losses_are_sums_over_tokens_and_a_norm_of_gradients_is_none(runs: Runs) -> None:
    found = [*measure([runs.record((), "bf16-plain")], runs.record())]
    assert {q.tensor for q in found if q.of_tokens} >= {"loss", "pg_loss"}
    assert {q.of_tokens for q in found if q.stage == "gradient norm"} == {False}


@pytest.mark.parametrize("key", ["logprob", "old_logprob", "advantage", "loss", "token_count"])
def test_what_decides_an_update_cannot_be_left_out(tmp_path: Path, runs: Runs, key: str) -> None:
    assert judged(cell_of(runs, tmp_path / "cell", key), runs).state == "differs"


def test_metrics_without_rows_are_held_against_the_oracles(tmp_path: Path, runs: Runs) -> None:
    honest = judged(cell_of(runs, tmp_path / "honest", *ROWS), runs)
    assert honest.state == "partly_observed", honest.reason
    for key, off in (("ppo_kl", 0.05), ("ratio_mean", 1.1), ("ratio_max", 3.0)):
        wrong = judged(cell_of(runs, tmp_path / key, *ROWS, values={key: off}), runs)
        assert (wrong.state, wrong.findings[0].tensor) == ("differs", key)


@pytest.mark.parametrize(("key", "more"), [("loss", ()), ("reference_kl", ("kl_loss",))])
def test_a_loss_follows_from_parts_and_log_probs(tmp_path: Path, runs: Runs, key: str, more: tuple[str, ...]) -> None:
    scaled = dict.fromkeys((key, *more), 1.01)
    wrong = judged(cell_of(runs, tmp_path / "cell", scaled=scaled), runs)
    assert (wrong.state, wrong.first_stage) == ("differs", "loss")
    assert key + AGAINST_REBUILT in {f.tensor for f in wrong.findings}
    unknown = judged(cell_of(runs, tmp_path / "without", "entropy_loss", "reference.logprob", scaled=scaled), runs)
    assert key + AGAINST_REBUILT not in {f.tensor for f in unknown.findings}


def test_a_metric_has_to_be_shown_at_all_steps_or_none(tmp_path: Path, runs: Runs) -> None:
    cell = cell_of(runs, tmp_path / "cell")
    del cell.steps[1].line["values"]["ratio_max"]
    assert judged(cell, runs).findings[0].tensor == "ratio_max (missing)"


def test_required_of_an_objective_is_what_decides() -> None:
    ppo = Ppo(kl_loss_coef=0.1).observables()
    assert {o.key for o in ppo if o.required} == DECISIVE
    assert {o.key for o in Grpo().observables() if o.required} == DECISIVE - {"return"} - {
        key for key in DECISIVE if key.startswith("critic.")
    }


def test_a_missing_loss_is_told_in_words() -> None:
    with pytest.raises(ValueError, match=r"TRL\.train_step gave no loss; every step needs it"):
        check_values(StepMetrics(values={"token_count": 3.0}), Grpo().observables(), "TRL")
    assert check_values(StepMetrics(values={"token_count": 3.0, "loss": 1.0}), Grpo().observables(), "TRL")
