"""The judge, on records made by hand: every kind of difference is found, at its stage, with its hint.

Cells of real backends are judged elsewhere; here one number at a time is wrong, by a known amount.
"""

import math
from pathlib import Path

import pytest
import torch
from judge_sample import EQUAL, OBSERVABLES, STEPS, Tensors, Values, scale, unchanged, verdict_of, write

from conformance.judge.measurements import _of_parts
from conformance.judge.tensor_views import Lazy
from conformance.judge.tolerance import EXACT, NOISE_FACTOR
from conformance.judge.verdict import judge, judge_folders
from conformance.results.verdict import Verdict
from conformance.spec.objectives import Ppo, all_observables
from conformance.spec.observables import stages
from conformance.spec.precision import noise_runs


def test_equal_records_conform_and_every_stage_was_compared(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, unchanged)
    assert verdict.state == "conforms"
    assert verdict.worst.keys() == set(stages(OBSERVABLES)) - {"training state", "generators"}  # of handovers
    assert all(worst.ratio == 0 for worst in verdict.worst.values())


@pytest.mark.parametrize(
    ("key", "stage"),
    [
        ("loss", "loss"),
        ("token_count", "loss"),
        ("logprob/7", "log-probs"),
        ("gradient/a", "gradients"),
        ("grad_norm", "gradient norm"),
        ("lr", "clipped update"),
        ("weight/b", "clipped update"),
    ],
)
def test_one_wrong_quantity_is_found_at_its_stage(tmp_path: Path, key: str, stage: str) -> None:
    verdict = verdict_of(tmp_path, scale(key, 1 + 1e-6))
    assert verdict.state == "differs"
    assert verdict.first_stage == stage
    assert verdict.findings[0].step == 0


def test_an_error_just_below_the_exact_bound_passes_and_just_above_does_not(tmp_path: Path) -> None:
    assert verdict_of(tmp_path / "1", scale("loss", 1 + 0.9 * EXACT)).state == "conforms"
    assert verdict_of(tmp_path / "2", scale("loss", 1 + 1.1 * EXACT)).state == "differs"


def test_weights_are_judged_as_loaded_and_after_the_last_step(tmp_path: Path) -> None:
    loaded = verdict_of(tmp_path / "1", scale("weight/a", 1.01, at=-1))
    assert loaded.first_stage == "weights"
    last = verdict_of(tmp_path / "2", scale("weight/a", 1 + 1e-6, at=STEPS - 1))
    assert [(f.stage, f.tensor) for f in last.findings] == [
        ("weights after N steps", "a"),
        ("weights after N steps", "a against rebuilt"),
    ]


def test_asking_whether_there_is_a_tensor_computes_none() -> None:
    """The judge asks so for every tensor of every step, and at real size each of them takes a difference."""

    def compute(name: str) -> torch.Tensor:
        raise AssertionError(f"{name} is computed")

    here, there = Lazy(["a", "b"], compute), Lazy(["b"], compute)
    assert here.keys() - there.keys() == {"a"}
    assert here.keys() == Lazy(["b", "a"], compute).keys()


def test_an_update_is_judged_by_its_own_size_and_not_by_that_of_the_weight(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 0:
            tensors["weight/a"] += 1e-10

    verdict = verdict_of(tmp_path, change)
    assert verdict.first_stage == "clipped update"
    assert verdict.findings[0].observed > 1e-10 / 0.1


def test_the_reported_norm_is_held_against_the_gradients_that_were_gathered(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 0:  # both gradients too large, the norm the oracle's: only the rebuilt norm shows the contradiction
            tensors["gradient/a"] *= 2
            tensors["gradient/b"] *= 2

    names = [f.tensor for f in verdict_of(tmp_path, change).findings if f.stage == "gradient norm"]
    assert names == ["grad_norm against rebuilt"]


@pytest.mark.parametrize(
    ("key", "name", "stage", "words"),
    [
        ("gradient", "a", "gradient replicas", "gradient a on ranks 0, 1"),
        ("weight", "a", "weight replicas", "weight a on ranks 0, 1"),
        ("loss", "loss", "loss", "loss on ranks 0, 1"),
        ("grad_norm", "grad_norm", "gradient norm", "grad_norm on ranks 0, 1"),
        ("lr", "lr", "clipped update", "lr on ranks 0, 1"),
        ("logprob", "row 7", "log-probs", "logprob row 7 on ranks 0, 1"),
    ],
)
def test_ranks_that_say_different_things_are_a_finding_even_if_rank_zero_is_right(
    tmp_path: Path, key: str, name: str, stage: str, words: str
) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == STEPS - 1:
            entry = {"name": name, "region": "full", "ranks": [0, 1], "relative": 1e-5}
            values["replicas"] = {**values["replicas"], key: {**EQUAL, "differing": [entry]}}

    verdict = verdict_of(tmp_path, change)
    assert verdict.first_stage == stage
    assert words in verdict.reason
    assert "ranks that should hold the same numbers do not" in verdict.reason


def test_a_missing_an_unexpected_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 0:
            del tensors["gradient/a"]
            tensors["gradient/c"] = torch.zeros(1)
            tensors["gradient/b"] = tensors["gradient/b"].T.contiguous()
            tensors |= {"logprob/7": tensors["logprob/7"][:1], "logprob/8": tensors.pop("logprob/0")}

    found = verdict_of(tmp_path, change).findings
    assert {f.tensor for f in found if f.stage == "gradients"} == {
        *("a (missing)", "c (unexpected)", "b (shape (3, 4) instead of (4, 3))"),
    }
    rows = "0 for the 2 targets of row 0, 1 for the 3 targets of row 7, 2 for the 0 targets of row 8"
    assert (found[0].stage, found[0].tensor) == ("log-probs", f"logprob: numbers and targets disagree: {rows}")


@pytest.mark.parametrize("key", ["loss", "grad_norm", "gradient/a", "logprob/0"])
def test_nan_never_passes(tmp_path: Path, key: str) -> None:
    assert verdict_of(tmp_path, scale(key, math.nan)).state == "differs"


@pytest.mark.parametrize("until", [1, 2])
def test_a_record_with_fewer_steps_than_the_oracle_differs(tmp_path: Path, until: int) -> None:
    verdict = verdict_of(tmp_path, unchanged, until=until)
    assert verdict.state == "differs"
    assert f"steps from {until} on are missing" in verdict.reason


def test_phases_are_judged_as_one_run(tmp_path: Path) -> None:
    oracle = write(tmp_path / "oracle")
    phases = [write(tmp_path / "1", until=1), write(tmp_path / "2", first=1, layout="dp1")]
    verdict = judge(phases, oracle=oracle, noise=())
    assert verdict.state == "conforms", verdict.reason
    assert {q.step for q in verdict.quantities} == {-1, 0, 1, 2}
    whole = judge([write(tmp_path / "whole")], oracle=oracle, noise=())
    handed_over = [q for q in verdict.quantities if q.stage == "weights" and q.step == 1]
    assert [q.tensor for q in handed_over] == ["a", "b"]
    judged, at_once = ({(q.stage, q.tensor, q.step) for q in of.quantities} for of in (verdict, whole))
    assert judged - at_once >= {(q.stage, q.tensor, q.step) for q in handed_over}
    assert at_once <= judged


def test_below_the_exact_tier_the_noise_of_a_single_process_sets_the_bound(tmp_path: Path) -> None:
    oracle = write(tmp_path / "oracle")
    noisy = scale("gradient/a", 1 + 1e-7)
    noise = write(tmp_path / "noise", noisy, precision="fp32")

    def verdict(name: str, factor: float) -> Verdict:
        cell = write(tmp_path / name, scale("gradient/a", 1 + factor), precision="fp32")
        return judge([cell], oracle=oracle, noise=[noise])

    assert verdict("within", 0.9 * NOISE_FACTOR * 1e-7).state == "conforms"
    assert verdict("beyond", 1.1 * NOISE_FACTOR * 1e-7).first_stage == "gradients"


def test_a_lucky_run_is_no_bound_because_there_is_another_with_the_other_kernel(tmp_path: Path) -> None:
    oracle = write(tmp_path / "oracle")
    lucky = write(tmp_path / "lucky", scale("gradient/a", 1 + 1e-7), precision="fp32")
    usual = write(tmp_path / "usual", scale("gradient/a", 1 + 2e-7), precision="fp32")

    def verdict(name: str, factor: float) -> Verdict:
        cell = write(tmp_path / name, scale("gradient/a", 1 + factor), precision="fp32")
        return judge([cell], oracle=oracle, noise=[lucky, usual])

    assert verdict("within", 0.9 * NOISE_FACTOR * 2e-7).state == "conforms"
    assert verdict("beyond", 1.1 * NOISE_FACTOR * 2e-7).first_stage == "gradients"


@pytest.mark.parametrize(
    ("off", "further", "state"),
    [
        (2.5e-7, 1e-2, "conforms"),  # by the first run
        (5e-7, 2e-7, "conforms"),
        (7e-7, 2e-7, "differs"),
        (5e-7, 1e-2, "differs"),  # a run that is too noisy to judge by excuses nothing
    ],
)
def test_a_further_noise_run_decides_only_where_a_cell_differs_by_the_first(
    tmp_path: Path, off: float, further: float, state: str
) -> None:
    write(tmp_path / "oracle" / "float64", oracle="float64")
    for run, noise in zip(noise_runs("fp32"), (1e-7, further), strict=True):
        write(tmp_path / "oracle" / run, scale("gradient/a", 1 + noise), precision="fp32", oracle=run)
    write(tmp_path / "cell", scale("gradient/a", 1 + off), precision="fp32")
    verdict = judge_folders("x/m/b/dp2.tp2/fp32", [tmp_path / "cell"], tmp_path / "oracle")
    assert verdict.state == state, verdict.reason


def test_too_noisy_quantity_of_noise_run_keeps_the_others(tmp_path: Path) -> None:
    def further(step: int, values: Values, tensors: Tensors) -> None:
        scale("gradient/a", 1 + 1e-2)(step, values, tensors)
        scale("loss", 1 + 1e-3)(step, values, tensors)

    write(tmp_path / "oracle" / "float64", oracle="float64")
    first, second = noise_runs("fp32")
    write(tmp_path / "oracle" / first, precision="fp32", oracle=first)
    write(tmp_path / "oracle" / second, further, precision="fp32", oracle=second)
    for key, factor, stage in (("loss", 1.002, ""), ("loss", 1.004, "loss"), ("gradient/a", 1.002, "gradients")):
        cell = tmp_path / f"{key.replace('/', '-')} {factor}"
        write(cell, scale(key, factor), precision="fp32")
        verdict = judge_folders("x/m/b/dp2.tp2/fp32", [cell], tmp_path / "oracle")
        assert verdict.first_stage == stage, verdict.reason


def test_critic_loss_tolerance_covers_biased_values() -> None:
    """With a mean of ``n`` independent errors its bound would be the root of n times narrower."""
    (loss,) = (o for o in all_observables(Ppo()) if o.key == "critic.loss")
    values, off = {"0": torch.ones(50), "1": -torch.ones(50)}, 1e-6
    wrong = {name: value * (1 + off) for name, value in values.items()}
    assert loss.made_of == "critic.value"
    assert _of_parts(wrong, values, independent=not loss.one_direction) == pytest.approx(off, rel=0.1, abs=0)
    assert _of_parts(wrong, values, independent=True) == pytest.approx(off / 10, rel=0.1, abs=0)


def test_a_near_zero_gradient_is_held_against_the_norm_of_all(tmp_path: Path) -> None:
    def tiny(step: int, values: Values, tensors: Tensors) -> None:
        if step >= 0:
            tensors["gradient/a"] *= 1e-12
            values["grad_norm"] = tensors["gradient/b"].norm().item()

    def tiny_and_wrong(step: int, values: Values, tensors: Tensors) -> None:
        tiny(step, values, tensors)
        if step >= 0:
            tensors["gradient/a"] *= 1 + 1e-5  # relative to itself far beyond the bound, to the whole gradient 1e-17

    oracle = write(tmp_path / "oracle", tiny)
    verdict = judge([write(tmp_path / "cell", tiny_and_wrong)], oracle=oracle, noise=())
    assert "gradients" not in {finding.stage for finding in verdict.findings}


def test_a_gap_in_what_was_observed_is_a_finding(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 2:
            values["grad_norm"] = None

    verdict = verdict_of(tmp_path, change)
    assert [(f.stage, f.step) for f in verdict.findings] == [("gradient norm", 2)]


@pytest.mark.parametrize(("layout", "stages"), [("dp1", set()), ("dp2.tp2", {"gradient norm"})])
def test_what_one_layout_does_not_report_another_may(tmp_path: Path, layout: str, stages: set[str]) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        values.pop("grad_norm", None)

    phases = [write(tmp_path / "1", first=0, until=1), write(tmp_path / "2", change, first=1, layout=layout)]
    verdict = judge(phases, oracle=write(tmp_path / "oracle"), noise=())
    assert {finding.stage for finding in verdict.findings} == stages


def test_replicas_that_no_two_ranks_name_alike_were_not_compared(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step >= 0:
            unmatched = {"offered": 8, "compared": 0, "differing": []}
            values["replicas"] = {**values["replicas"], "gradient": unmatched, "weight": unmatched}

    verdict = verdict_of(tmp_path, change, layout="dp2.rep2")
    assert verdict.first_stage == "gradient replicas"


def test_shards_that_are_offered_at_some_steps_have_to_be_at_all(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 2:
            values["replicas"] = {**values["replicas"], "weight": {"offered": 0, "compared": 0, "differing": []}}

    assert [(f.stage, f.step) for f in verdict_of(tmp_path, change).findings] == [("weight replicas", 2)]


@pytest.mark.parametrize("key", ["loss", "lr", "token_count", "gradient/a", "gradient/b", "weight/a"])
def test_what_is_required_and_missing_is_a_finding(tmp_path: Path, key: str) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == STEPS - 1:
            values.pop(key, None)
            tensors.pop(key, None)

    verdict = verdict_of(tmp_path, change)
    assert any("(missing)" in finding.tensor for finding in verdict.findings)


def test_a_half_precision_cell_that_is_too_good_computed_in_another_precision(tmp_path: Path) -> None:
    oracle = write(tmp_path / "oracle")

    def rounded(step: int, values: Values, tensors: Tensors) -> None:
        for name in ("gradient/a", "gradient/b"):
            if name in tensors:
                tensors[name] *= 1 + 2**-9 * torch.sin(torch.arange(12.0, dtype=torch.float64)).reshape(4, 3)

    noise = write(tmp_path / "noise", rounded, precision="bf16")
    honest = judge([write(tmp_path / "honest", rounded, precision="bf16")], oracle=oracle, noise=[noise])
    assert "gradients" not in {f.stage for f in honest.findings}
    verdict = judge([write(tmp_path / "cell", precision="bf16")], oracle=oracle, noise=[noise])
    assert verdict.first_stage == "gradients"
    assert "computed in a higher precision" in verdict.reason


@pytest.mark.parametrize("factor", [math.nan, 1.01])
def test_noise_that_no_rounding_explains_is_no_bound(tmp_path: Path, factor: float) -> None:
    write(tmp_path / "oracle" / "float64", oracle="float64")
    for run in noise_runs("fp32"):
        write(tmp_path / "oracle" / run, scale("gradient/a", factor), precision="fp32", oracle=run)
    write(tmp_path / "cell", precision="fp32")
    verdict = judge_folders("x/m/b/dp2.tp2/fp32", [tmp_path / "cell"], tmp_path / "oracle")
    assert verdict.state == "infrastructure"
    assert "more than can be judged by" in verdict.reason


def test_a_record_is_judged_by_the_oracle_of_its_own_scenario_only(tmp_path: Path) -> None:
    write(tmp_path / "oracle" / "float64", lr=0.2, oracle="float64")
    write(tmp_path / "cell")
    verdict = judge_folders("x/m/b/dp2.tp2/exact", [tmp_path / "cell"], tmp_path / "oracle")
    assert verdict.state == "infrastructure"
    assert "are of different scenarios" in verdict.reason
