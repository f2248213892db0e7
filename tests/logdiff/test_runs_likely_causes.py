"""Likely causes name what a difference looks like; where nothing fits, none is named."""

import math

import numpy as np
import pytest

from reports.logdiff.likely_causes import Evidence, Factor, constant_factor, integer_of, likely_causes, rate_causes
from reports.logdiff.run import Floats

STEPS = np.arange(1.0, 101.0)
COSINE = np.where(STEPS <= 10, STEPS / 10, 0.55 + 0.45 * np.cos(np.pi * (STEPS - 10) / 90)) * 1e-3
GENERATOR = np.random.default_rng(0)
NOISE = 0.05 * GENERATOR.normal(size=(2, 100))
LOSS = 2.0 + np.exp(-STEPS / 20)


def lr_names(b: Floats, a: Floats = COSINE) -> list[str]:
    return [name for name, _ in rate_causes((STEPS, a, b))]


def lr_text(b: Floats, a: Floats = COSINE) -> str:
    return " ".join(text for _, text in rate_causes((STEPS, a, b)))


def schedule(steps: Floats) -> Floats:
    return np.interp(steps, STEPS, COSINE)


def test_the_same_schedule_has_no_cause_also_when_it_is_printed_with_few_digits() -> None:
    assert lr_names(COSINE) == []
    assert lr_names(np.array([float(f"{rate:.4g}") for rate in COSINE])) == []
    assert list(rate_causes(None)) == []


@pytest.mark.parametrize("factor", [2.0, 0.5, 1.1, 1.02, math.sqrt(8), 64.0])
def test_a_factor_of_the_learning_rate(factor: float) -> None:
    assert lr_names(factor * COSINE) == ["learning rate: factor"]
    assert ("larger" if factor > 1 else "smaller") in lr_text(factor * COSINE)
    if factor == math.sqrt(8):
        assert "2.828 times larger on side B, the square root of 8" in lr_text(factor * COSINE)


@pytest.mark.parametrize("lag", [1, 2, 10])
def test_a_lag_of_the_schedule_is_told_with_its_side_and_steps(lag: int) -> None:
    late = np.concatenate([np.zeros(lag), COSINE[:-lag]])
    assert lr_names(late) == ["learning rate: lag"]
    assert f"of side B is the other's {lag} step{'s' * (lag > 1)} later" in lr_text(late)
    assert f"of side A is the other's {lag} step{'s' * (lag > 1)} later" in lr_text(COSINE, late)


@pytest.mark.parametrize("pace", [2, 4, 8])
def test_a_schedule_that_is_advanced_with_every_micro_batch(pace: int) -> None:
    fast = schedule(np.minimum(STEPS * pace, 100))
    assert lr_names(fast) == ["learning rate: pace"]
    assert f"of side B runs {pace} times as fast" in lr_text(fast)


@pytest.mark.parametrize("first", [7, 10])
def test_the_pace_of_a_schedule_shows_in_a_log_that_begins_later(first: int) -> None:
    """As a log of every tenth step does, whose first one is step 10."""
    steps = np.arange(first, 401.0, first)
    slow, fast = (np.interp(np.minimum(pace * steps, 400), 4 * STEPS, COSINE) for pace in (1, 2))
    assert [name for name, _ in rate_causes((steps, slow, fast))] == ["learning rate: pace"]


def test_a_schedule_that_begins_again() -> None:
    again = np.concatenate([COSINE[:60], COSINE[:40]])
    assert lr_names(again) == ["learning rate: begins again"]
    assert "of side B begins again at step 61" in lr_text(again)


def test_another_schedule_is_told_with_its_first_step() -> None:
    other = np.where(STEPS <= 10, COSINE, 1e-3)
    assert lr_names(other) == ["learning rate"]
    assert "differ from step 12 on" in lr_text(other)


@pytest.mark.parametrize(
    ("factor", "error", "expected"),
    [
        (4.0, 0.001, (4, False)),
        (1 / 4, 0.001, (4, False)),
        (4.05, 0.01, (4, False)),
        (math.sqrt(8), 0.001, (8, True)),
        (64.3, 0.003, (64, False)),
        (64.3, 0.02, (64, False)),  # 63, 64 and 65 are as near, but 64 is a power of two
        (2.5, 0.001, None),
        (2.5, 0.01, (6, True)),
        (45.5, 0.02, None),
        (1.05, 0.001, None),
    ],
)
def test_diagnosis_factor_is_integer_or_root_within_error(
    factor: float, error: float, expected: tuple[int, bool] | None
) -> None:
    assert integer_of(Factor(log=math.log(factor), error=error)) == expected


def test_a_factor_is_constant_from_the_first_third_to_the_last() -> None:
    found = constant_factor(math.log(4) + NOISE[0])
    assert found
    assert found.log == pytest.approx(math.log(4), abs=4 * found.error)
    assert constant_factor(NOISE[0]) is None
    assert constant_factor(math.log(4) * STEPS / 100) is None
    assert constant_factor(math.log(4) * (0.6 + 0.8 * STEPS / 100)) is None  # it grows
    assert constant_factor(0.18 + 6 * NOISE[0]) is None  # it does not stand out
    assert constant_factor(np.where(STEPS < 50, math.log(4), -math.log(4))) is None


def names(firsts: dict[str, int], *, seeds: bool = False, **curves: tuple[Floats, Floats]) -> list[str]:
    return [cause.name for cause in likely_causes(evidence_of(firsts, seeds=seeds, **curves))]


def evidence_of(firsts: dict[str, int], *, seeds: bool = False, **curves: tuple[Floats, Floats]) -> Evidence:
    return Evidence(
        curves={name: (STEPS, a, b) for name, (a, b) in curves.items()},
        firsts=firsts,
        broken=(),
        averaged={},
        numbers={},
        resumed={},
        by="step",
        seeds=seeds,
    )


def test_a_loss_that_is_logged_as_a_sum_is_no_gradient() -> None:
    norm = (1 + NOISE[0], 1 + NOISE[0])
    assert names({"loss": 0}, loss=(LOSS, 8 * LOSS), grad_norm=norm) == ["loss factor"]


def test_a_gradient_norm_that_is_a_root_too_large() -> None:
    norm = 1 + NOISE[0]
    assert names({"grad_norm": 0}, loss=(LOSS, LOSS), grad_norm=(norm, math.sqrt(8) * norm)) == ["gradient factor"]


def test_a_cause_speaks_of_metrics_in_the_logs_alone() -> None:
    norm = 1 + NOISE[0]
    (cause,) = likely_causes(evidence_of({"grad_norm": 0}, grad_norm=(norm, 2 * norm)))
    assert cause.name == "gradient factor"
    assert "loss" not in cause.text
    (cause,) = likely_causes(evidence_of({"loss": 0}, loss=(LOSS, 2 * LOSS)))
    assert "the logs have no gradient norm" in cause.text


def test_a_factor_holds_at_most_steps() -> None:
    wild = np.where(STEPS % 3 == 0, 0.1, math.log(4))  # its median is steady, and a third of the steps lack it
    assert constant_factor(wild) is None


def test_a_factor_that_the_first_step_has_is_named_although_the_runs_go_apart() -> None:
    """Under SGD, gradients that are four times too large are a learning rate four times too high."""
    apart = np.exp(-STEPS / 15)
    norm = 1 + NOISE[0]
    wrong = 4 * norm * np.exp(-STEPS / 25)
    wrong[0] = 4 * norm[0]
    loss = np.where(STEPS == 1, LOSS, LOSS * (0.6 + 0.4 * apart))
    assert names({"loss": 3, "grad_norm": 0}, loss=(LOSS, loss), grad_norm=(norm, wrong))[0] == "gradient factor"


def test_rounding_that_training_amplifies_is_told_apart_from_a_wrong_setting() -> None:
    amplified = LOSS * (1 + np.minimum(1e-8 * np.exp(STEPS / 5), 0.1))
    assert names({"loss": 78}, loss=(LOSS, amplified)) == ["rounding"]
    drifting = LOSS * (1 - 0.2 * (1 - np.exp(-(STEPS - 1) / 60)))
    assert names({"loss": 20}, loss=(LOSS, drifting)) == ["growing"]


def test_a_jump_is_told_where_it_begins_and_not_where_it_leaves_the_band() -> None:
    jumped = LOSS * np.where(STEPS < 60, 1 + 1e-6 * NOISE[0], 1 + np.minimum(0.02 * (STEPS - 59), 0.1))
    evidence = Evidence(
        curves={"loss": (STEPS, LOSS, jumped)},
        firsts={"loss": 61},
        broken=(),
        averaged={},
        numbers={},
        resumed={50: "b"},
        by="step",
        seeds=False,
    )
    (cause,) = likely_causes(evidence)
    assert cause.name == "jump"
    assert "before step 60, from which the loss differs by up to +10%" in cause.text
    assert "the log of b begins again at step 50" in cause.text


@pytest.mark.parametrize("steps", [(30,), (30, 31, 32)])
def test_a_number_that_leaves_no_trace_is_no_lost_state(steps: tuple[int, ...]) -> None:
    """Weights that had lost a state would show it at the steps after."""
    bad = np.where(np.isin(STEPS, steps), 5.0, 1.0) * LOSS
    (cause,) = likely_causes(evidence_of({"loss": 29}, loss=(LOSS, bad)))
    assert cause.name == "passing"
    where = "at step 30" if len(steps) == 1 else "from step 30 to 32"
    assert f"differs {where} alone, by up to +400%, and both agree again after it" in cause.text
    fading = LOSS * np.where(STEPS < 30, 1.0, 1 + 4 * np.exp(-(STEPS - 30) / 3))
    assert names({"loss": 29}, loss=(LOSS, fading)) == ["jump"]


def test_a_gradient_norm_that_stays_shows_the_same_weights() -> None:
    norm, end = 1 + NOISE[0], np.where(STEPS >= 99, 1.2, 1.0)
    assert names({"loss": 98}, loss=(LOSS, LOSS * end), grad_norm=(norm, norm)) == ["passing"]
    assert names({"loss": 98, "grad_norm": 98}, loss=(LOSS, LOSS * end), grad_norm=(norm, norm * end)) == ["jump"]
    assert names({"loss": 98}, loss=(LOSS, LOSS * end), grad_norm=(0 * norm + 1, 0 * norm + 1)) == ["jump"]


def test_a_loss_in_bits_is_no_sum() -> None:
    norm = 1 + NOISE[0]
    for factor, bits in ((1 / math.log(2), True), (math.log(2), True), (1.5, False)):
        (cause,) = likely_causes(evidence_of({"loss": 0}, loss=(LOSS, factor * LOSS), grad_norm=(norm, norm)))
        assert ("in bits on one side and in nats on the other" in cause.text) == bits
        assert ("as a sum" in cause.text) != bits


def test_another_order_of_the_data_has_the_same_mean_and_unrelated_noise() -> None:
    a, b = LOSS * (1 + NOISE[0]), LOSS * (1 + NOISE[1])
    assert names({"loss": 0}, loss=(a, b)) == ["data order"]
    assert names({"loss": 0}, seeds=True, loss=(a, b)) == []  # each seed has an order of its own
    assert names({"loss": 0}, loss=(a, 1.2 * a)) == ["loss factor"]  # the same noise
    assert "data order" not in names({"loss": 0}, loss=(a, 1.2 * b))


@pytest.mark.parametrize(
    ("metric", "words"),
    [("kl", "another estimator (k1, k2 or k3), or a coefficient in"), ("entropy", ": a coefficient")],
)
def test_a_factor_of_a_metric_that_is_no_loss(metric: str, words: str) -> None:
    values = 0.01 * STEPS * (1 + NOISE[0])
    own = {metric: (values, 1.4 * values * (1 + 0.1 * NOISE[1]))}
    (cause,) = likely_causes(evidence_of({metric: 0}, seeds=False, loss=(LOSS, LOSS), **own))
    assert cause.text.startswith(f"the {metric} is 1.4")
    assert "times larger on side B" in cause.text
    assert words in cause.text
    own = {metric: (values, values * (1 + NOISE[1] + STEPS / 100))}
    assert names({metric: 0}, seeds=False, loss=(LOSS, LOSS), **own) == []


def test_where_nothing_fits_there_is_no_likely_cause() -> None:
    noisy = LOSS * (1 + NOISE[0])
    assert names({"loss": 3}, loss=(noisy, noisy * (1 + 0.2 * np.sin(STEPS / 5)))) == []
    assert names({"eval_loss": 0}, eval_loss=(LOSS[:1], 2 * LOSS[:1])) == []
