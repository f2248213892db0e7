"""What is allowed: a threshold of two runs, and the spread of seeds, with the errors that its statistics promise."""

import math

import numpy as np
import pytest

from reports.logdiff.tolerance_band import printed, student_t, within_digits, within_spread, within_threshold


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),
    [  # of the tables in textbooks
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 4, 2.776),
        (0.995, 10, 3.169),
        (0.9995, 3, 12.924),
        (0.9995, 30, 3.646),
        (0.95, 120, 1.658),
    ],
)
def test_quantiles_of_students_t_are_those_of_tables(probability: float, freedom: float, quantile: float) -> None:
    assert student_t(probability, freedom) == pytest.approx(quantile, abs=6e-4)


def test_fewer_degrees_of_freedom_allow_more() -> None:
    found = [student_t(1 - 1e-6, freedom) for freedom in (1, 1.5, 2, 2.5, 3, 5, 10, 100, 1e6)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize(
    ("values", "units"),
    [
        ([12.2254, 3.9541], [5e-5, 5e-5]),  # four decimals, as torchtitan prints losses
        ([1.234, 0.01234], [5e-4, 5e-6]),  # four digits, as the Trainer prints numbers
        ([2.34375e-07, 9.999994e-06], [5e-14, 5e-13]),  # seven digits, as Megatron prints rates
    ],
)
def test_the_digits_that_a_log_prints_are_seen(values: list[float], units: list[float]) -> None:
    found = printed(np.array(values))
    assert (found >= 0.99 * np.array(units)).all()
    assert (found <= 10 * np.array(units)).all()


def judged(a: list[float], b: list[float], threshold: float = 0.05, *, any_size: bool = False) -> list[bool]:
    return list(within_threshold(np.array(a), np.array(b), threshold, any_size=any_size).outside)


def test_the_threshold_is_relative_to_the_first_run() -> None:
    a = [2.0000001, 1.0000001, 0.50000001]
    assert judged(a, [2.08, 1.06, 0.52]) == [False, True, False]
    assert judged(a, [1.92, 0.94, 0.48]) == [False, True, False]


def test_a_metric_that_changes_sign_is_measured_by_its_size_over_the_run() -> None:
    a = [1.0000001, -1.0000001, 1e-6, 1.0000001]
    assert judged(a, [1.01, -1.01, 1e-3, 1.2]) == [False, False, False, True]


def test_a_norm_of_one_digit_is_not_taken_for_one_that_is_rounded_to_it() -> None:
    assert judged([1e-5, 1e-5], [2e-5, 2e-5], any_size=True) == [True, True]
    assert judged([1e-5, 1e-5], [1.04e-5, 1e-5], any_size=True) == [False, False]


def exactly(a: list[float], b: list[float]) -> list[bool]:
    return list(within_digits(np.array(a), np.array(b)).outside)


def test_learning_rate_may_differ_in_unprinted_digits_only() -> None:
    schedule = [2.34375e-07, 9.999994e-06, 9.87654321e-06]
    assert exactly(schedule, [2.3438e-07, 1.0e-05, 9.8765e-06]) == [False, False, False]
    assert exactly(schedule, [2.3448e-07, 1.0e-05, 9.8785e-06]) == [True, False, True]
    assert exactly([9.7e-6, 9.6e-6], [9.7321e-6, 9.6214e-6]) == [False, False]  # a log that prints two digits


@pytest.mark.parametrize("rates", [[1e-5, 1e-5], [2.5e-5, 2.5e-5], [1e-5, 2e-5]])
def test_a_rate_that_is_constant_or_has_one_digit_is_what_was_configured(rates: list[float]) -> None:
    assert exactly(rates, [1.01 * rate for rate in rates]) == [True, True]
    assert exactly(rates, list(np.array(rates, dtype=np.float32).astype(float))) == [False, False]
    sides = np.tile(rates, (2, 1)), np.tile([1.01 * rate for rate in rates], (2, 1))
    assert within_spread(*sides, metrics=1, any_size=True, exact=True).outside.all()


def test_a_rate_that_ends_at_0_is_not_infinitely_different() -> None:
    assert exactly([1.0000001e-3, 5e-4, 0.0], [1.0000001e-3, 5e-4, 1e-9]) == [False, False, False]
    assert exactly([1.0000001e-3, 5e-4, 0.0], [1.0000001e-3, 5e-4, 1e-8]) == [False, False, True]


def test_a_spike_hides_no_difference_elsewhere() -> None:
    """Of both runs, a thousand times as large as all else, in a metric that changes its sign."""
    a = np.where(np.arange(50) % 2, 1.0000001, -0.9000001)
    a[20] = 1000.0000001
    assert judged(list(a), list(a * 1.5)) == [True] * 50
    assert judged(list(a), list(a * 1.01)) == [False] * 50  # the spike is no ratio to the others either
    seeds = np.tile(a, (4, 1))
    seeds[2:, 30:] *= 1.5
    assert within_spread(seeds[:2], seeds[2:], metrics=1, any_size=False).outside[30:].all()


def test_band_signed_metric_ignores_rounding_values() -> None:
    """The policy loss of two updates a roll-out: the first of normalised advantages is 0 but for rounding."""
    a = np.where(np.arange(40) % 2, 0.1000001, -1e-8)
    assert judged(list(a), list(a + 1e-3)) == [False] * 40


def test_zeros_do_not_make_a_metric_small() -> None:
    a = np.zeros(40)
    a[:6] = [1.0000001, -1.0000001] * 3
    b = a.copy()
    b[20] = 1e-3
    assert judged(list(a), list(b)) == [False] * 40


def test_band_constant_signed_metric_allows_one_percent() -> None:
    a = np.tile(np.where(np.arange(40) % 2, 1.0000001, -1.0000001), (2, 1))
    assert not within_spread(a, a + 0.009, metrics=1, any_size=False).outside.any()
    assert within_spread(a, a + 0.011, metrics=1, any_size=False).outside.all()


def test_a_policy_loss_that_is_0_but_for_rounding_does_not_differ() -> None:
    """Of normalised advantages at the first update; real numbers of two backends that agree."""
    a, b = [3.725290298461914e-08, -5.21540641784668e-08], [-6.332993507385254e-08, 1.1920928955078125e-07]
    assert judged(a, b) == [False, False]
    assert judged([0.0, 1e-8], [3e-8, 0.0]) == [False, False]  # a divergence, which has no sign
    assert judged([3.0000001e-5, -5e-5], [3.0000001e-5, -4e-5]) == [False, True]
    assert judged([3.0000001e-5, 5e-5], [3.0000001e-5, 4e-5], any_size=True) == [False, True]
    seeds = 1e-8 * np.random.default_rng(0).normal(size=(6, 100))
    seeds[3:] += 1e-7
    assert not within_spread(seeds[:3], seeds[3:], metrics=1, any_size=False).outside.any()
    assert within_spread(seeds[:3], seeds[3:], metrics=1, any_size=True).outside.any()


@pytest.mark.parametrize("size", [1e-8, 1e-6, 1e-5])
def test_a_small_metric_of_both_sides_is_told_apart_from_rounding(size: float) -> None:
    """A loss that is a small coefficient times a divergence, against one of twice the coefficient."""
    a = size * (2 + np.sin(np.arange(40.0)))
    found = within_threshold(a, 2 * a, 0.05, any_size=False)
    assert found.outside.all()
    assert found.difference == pytest.approx(1.0)
    assert not found.untold
    assert not within_threshold(a, 1.04 * a, 0.05, any_size=False).outside.any()
    falling, rising = size * np.exp(np.linspace(3, 0, 40)), size * np.exp(np.linspace(0, 3, 40))
    assert within_threshold(falling, rising, 0.05, any_size=False).outside.any()
    seeds = a * np.exp(0.02 * np.random.default_rng(0).normal(size=(4, 40)))
    assert within_spread(seeds[:2], 2 * seeds[2:], metrics=1, any_size=False).outside.all()


def test_rounding_is_untold_and_keeps_its_ratio() -> None:
    a, b = 1e-8 * np.random.default_rng(0).normal(size=(2, 40))
    found = within_threshold(a, b, 0.05, any_size=False)
    assert not found.outside.any()
    assert "too small to be told from the rounding" in found.untold
    assert np.abs(found.difference).max() > 1
    assert (found.allowed > np.abs(found.difference)).all()
    assert within_spread(np.stack([a, b]), np.stack([b, -a]), metrics=1, any_size=False).untold


def test_a_ratio_whose_ups_and_downs_are_the_same_is_judged_without_them() -> None:
    a = 0.01 * (1 + 0.5 * np.sin(3 * np.arange(1.0, 61.0)))
    assert ratios(a, 1.4 * a) == [True] * 60
    assert not any(ratios(a, 1.04 * a))
    assert not any(ratios(a, a * np.exp(0.05 * np.random.default_rng(1).normal(size=60))))  # the ratio has noise, too


def test_a_band_that_hides_a_factor_is_untold() -> None:
    (seeds,) = worlds(1, seed=0)
    assert not within_spread(seeds[:2], seeds[2:4], metrics=1, any_size=False).untold
    seeds[3] *= 4
    found = within_spread(seeds[:2], seeds[2:4], metrics=1, any_size=False)
    assert found.wide
    assert found.untold.startswith("the runs of a side differ so much that more than ±1000% are allowed")


def test_seeds_of_a_policy_loss_about_0_hide_a_difference_and_are_no_obstacle() -> None:
    seeds = 0.01 * np.random.default_rng(0).normal(size=(4, 60))
    found = within_spread(seeds[:2], seeds[2:], metrics=1, any_size=False)
    assert found.untold
    assert not found.wide


def test_rounding_that_sides_share_in_part_is_still_rounding() -> None:
    """Of the same batches, whose sums cancel to nearly the same."""
    shared, own = np.random.default_rng(0).normal(size=(2, 60))
    found = within_threshold(1e-6 * shared, 1e-6 * (shared + 0.3 * own), 0.05, any_size=False)
    assert found.untold
    assert not found.outside.any()
    assert within_threshold(1e-6 * shared, 1.3e-6 * shared, 0.05, any_size=False).outside.any()


def ratios(a: np.ndarray, b: np.ndarray) -> list[bool]:
    return list(within_threshold(a, b, 0.05, any_size=False, noisy=True).outside)


@pytest.mark.parametrize("size", [1e-3, 0.1, 2.0])
def test_a_ratio_may_differ_by_its_own_noise(size: float) -> None:
    a, b = size * np.exp(0.3 * np.random.default_rng(0).normal(size=(2, 100)))
    assert not any(ratios(a, b))
    assert any(judged(list(a), list(b)))
    assert any(ratios(a, 1.5 * b)), "its mean over the run"
    spike = b.copy()
    spike[50] *= 20
    assert ratios(a, spike)[50]
    broken = b.copy()
    broken[50] = np.nan
    assert ratios(a, broken)[50]


def test_a_ratio_without_noise_has_the_threshold() -> None:
    a = np.full(40, 0.0200001)
    assert not any(ratios(a, 1.04 * a))
    assert all(ratios(a, 1.06 * a))


def test_digits_that_are_not_printed_are_no_difference() -> None:
    assert judged([1.234, 2.345], [1.2343219871, 2.3448219871], threshold=1e-6) == [False, False]
    assert judged([1.234, 2.345], [1.2359219871, 2.3448219871], threshold=1e-6) == [True, False]


@pytest.mark.parametrize(("a", "b"), [(1.0, 0.0), (0.0, 1.0), (2.0, 3.0), (100.0, 200.0)])
def test_values_of_one_digit_differ_as_any_others_do(a: float, b: float) -> None:
    assert judged([a] * 9, [b] * 9) == [True] * 9
    assert within_spread(np.full((2, 9), a), np.full((2, 9), b), metrics=1, any_size=False).outside.all()


def test_a_spike_has_no_digits_for_the_rest_of_a_run() -> None:
    seeds = np.full((4, 50), 1.234)
    seeds[0, 0] = 5123.0
    seeds[2:, 1:] = 2.345
    assert within_spread(seeds[:2], seeds[2:], metrics=1, any_size=True).outside[12:].all()


def test_seeds_that_break_down_on_one_side_only_are_outside() -> None:
    (seeds,) = worlds(1, seed=3)
    seeds[4:, 150:] = math.nan
    found = within_spread(seeds[:3], seeds[3:], metrics=1, any_size=False)
    assert found.outside[150:].all()
    assert not found.outside[:150].any()
    assert judged([math.nan, math.inf], [math.inf, -math.inf]) == [True, True]


def test_what_is_not_finite_on_one_side_only_is_outside() -> None:
    nan, inf = math.nan, math.inf
    assert judged([1.0, nan, nan, inf, 1.0], [1.0, nan, 1.0, inf, inf]) == [False, False, True, False, True]


def worlds(count: int, *, seed: int, correlation: float = 0.0, offset: float = 0.0, steps: int = 200) -> np.ndarray:
    """Losses [W, 6, T] of six seeds in each world: noise with an autocorrelation, and an offset of each whole run."""
    generator = np.random.default_rng(seed)
    noise = generator.normal(size=(count, 6, steps))
    for step in range(1, steps):
        noise[..., step] = correlation * noise[..., step - 1] + math.sqrt(1 - correlation**2) * noise[..., step]
    return np.exp(0.05 * noise + offset * generator.normal(size=(count, 6, 1)))


@pytest.mark.parametrize(("correlation", "offset"), [(0.0, 0.0), (0.9, 0.0), (0.99, 0.0), (0.9, 0.05)])
def test_band_honest_seeds_fail_in_one_of_hundred_trials(correlation: float, offset: float) -> None:
    found = worlds(100, seed=0, correlation=correlation, offset=offset)
    flagged = sum(bool(within_spread(one[:3], one[3:], metrics=1, any_size=False).outside.any()) for one in found)
    assert flagged <= 4  # of a binomial with a mean of one, more than four have a probability of 0.4 %


def test_a_step_that_varies_more_than_its_neighbours_may_differ_more() -> None:
    found = np.log(worlds(100, seed=4))
    found[..., ::50] *= 10
    flagged = sum(
        bool(within_spread(one[:3], one[3:], metrics=1, any_size=False).outside.any()) for one in np.exp(found)
    )
    assert flagged <= 10  # a variance of four degrees of freedom alone: about two in a hundred


def test_a_spike_in_one_run_is_no_difference_and_in_all_of_a_side_it_is() -> None:
    (seeds,) = worlds(1, seed=1)
    seeds[3, 100] *= 5
    assert not within_spread(seeds[:3], seeds[3:], metrics=1, any_size=False).outside.any()
    seeds[3:, 100] = 3.0
    found = within_spread(seeds[:3], seeds[3:], metrics=1, any_size=False)
    assert found.outside[100]
    assert found.spans[100] == 1


def test_a_small_shift_shows_in_the_means_of_many_steps() -> None:
    (seeds,) = worlds(1, seed=2)
    seeds[3:, 100:] *= 1.06
    found = within_spread(seeds[:3], seeds[3:], metrics=1, any_size=False)
    assert not found.outside[:100].any()
    assert found.outside[100:].any()
    assert set(found.spans[found.outside]) == {10}
    first = int(np.flatnonzero(found.outside)[0])
    assert found.shown[first] == pytest.approx(0.06, abs=0.06)  # of the mean, which is beyond what is allowed of it
    assert found.shown[first] > found.bound[first]
    assert abs(found.difference[first]) < found.allowed[first]


def test_what_does_not_vary_between_seeds_may_not_differ_between_sides() -> None:
    rates = np.tile(np.linspace(1e-3, 1e-5, 50), (4, 1))
    assert not within_spread(rates[:2], rates[2:], metrics=3, any_size=True).outside.any()
    rates[2:, 30] *= 1.001
    found = within_spread(rates[:2], rates[2:], metrics=3, any_size=True)
    assert np.flatnonzero(found.outside)[0] == 30
    assert list(np.flatnonzero(found.spans == 1)) == [30]


def test_a_run_that_breaks_down_parts_where_it_does() -> None:
    (seeds,) = worlds(1, seed=3)
    seeds[3:, 150:] = math.nan
    found = within_spread(seeds[:3], seeds[3:], metrics=1, any_size=False)
    assert list(np.flatnonzero(found.outside)) == list(range(150, 200))
