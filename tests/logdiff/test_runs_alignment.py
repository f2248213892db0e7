"""Runs are put on common positions, and whatever had to be put right is said."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.core.errors import UsageError
from reports.logdiff.alignment import Alignment, align, averages
from reports.logdiff.rows import COUNTED, Log, Row
from reports.logdiff.run import Run, run_of

LOSSES = {step: 3 * 0.9**step + 0.1 * np.sin(7.0 * step) for step in range(200)}


def run(
    values: dict[int, float], name: str, *, metric: str = "loss", averaged: bool = False, **more: dict[int, float]
) -> Run:
    columns = {metric: values, **more}
    steps = list(dict.fromkeys(step for column in columns.values() for step in column))
    rows = [Row(step, {key: column[step] for key, column in columns.items() if step in column}) for step in steps]
    return run_of(Log(format="test", rows=rows, averaged=frozenset({"loss"} if averaged else ())), name=name)


def aligned(a: Run, b: Run, by: str = "step") -> Alignment:
    return align(([a], [b]), by=by)


def test_a_learning_rate_between_the_positions_of_a_log_is_not_exact() -> None:
    rates = dict.fromkeys(range(1, 5), 1e-3)
    a, b = (run(rates, name, metric="lr", tokens={s: 64.0 * s for s in range(1, 5)}) for name in "ab")
    assert aligned(a, b).metrics[0].exact
    assert not aligned(a, b, by="tokens").metrics[0].exact


def part(first: int, last: int, stride: int = 1, shift: int = 0) -> dict[int, float]:
    return {step + shift: LOSSES[step] for step in range(first, last + 1, stride)}


def test_runs_are_compared_at_the_steps_that_both_have() -> None:
    found = aligned(run(part(1, 50), "a"), run(part(11, 80), "b"))
    assert found.notes == ("a ends at step 50 and b at 80: what follows is not compared",)
    (one,) = found.metrics
    assert list(one.positions) == list(range(11, 51))
    assert (one.sides[0] == one.sides[1]).all()


@pytest.mark.parametrize("stride", [1, 10])
def test_a_counter_that_begins_at_0_is_put_on_one_that_begins_at_1(stride: int) -> None:
    zero, one = run(part(0, 90, stride), "zero"), run(part(0, 90, stride, shift=1), "one")
    found = aligned(one, zero)
    assert (found.metrics[0].sides[0] == found.metrics[0].sides[1]).all()
    assert len(found.metrics[0].positions) == 90 // stride + 1
    assert found.notes == ("zero counts its steps from 0 and one from 1: 1 was added to the former's",)
    assert "1 was taken from" in aligned(zero, one).notes[0]


def test_a_log_that_merely_lacks_its_first_line_is_not_shifted() -> None:
    found = aligned(run(part(0, 90), "a"), run(part(1, 90), "b"))
    assert found.notes == ()
    assert (found.metrics[0].sides[0] == found.metrics[0].sides[1]).all()


NORMS = {step: 2 + np.cos(3.0 * step) for step in range(200)}


def two(first: int, last: int, *, factor: float = 1.0, shift: int = 0, name: str) -> Run:
    """A run whose loss is multiplied by a factor; its gradient norm is that of every other run."""
    steps = range(first, last + 1)
    losses, norms = ({step + shift: values[step] for step in steps} for values in (LOSSES, NORMS))
    return run({step: factor * loss for step, loss in losses.items()}, name, grad_norm=norms)


def test_alignment_uses_gradient_norms_if_losses_are_scaled() -> None:
    shifted = aligned(two(0, 90, name="a"), two(0, 90, factor=2, shift=1, name="b"))
    assert shifted.notes == ("b counts its steps from 1 and a from 0: 1 was taken from the former's",)
    lacking = aligned(two(0, 90, name="a"), two(1, 95, factor=2, name="b"))
    assert lacking.notes == ("a ends at step 90 and b at 95: what follows is not compared",)


RATES = {step: 1e-3 * 0.9**step for step in range(200)}


def dense_and_sparse(shift: int, *, lag: int = 0, noise: float = 0.0) -> Alignment:
    """Steps 0 to 99, and every tenth of a counter that is ``shift`` ahead, of a run with noise whose rates lag."""
    of = {step: step - shift for step in range(10, 100 + shift, 10)}
    factors = {step: 1 + noise * (-1) ** (step // 10) for step in of}
    losses, norms = ({step: values[i] * factors[step] for step, i in of.items()} for values in (LOSSES, NORMS))
    sparse = run(losses, "b", grad_norm=norms, lr={step: RATES[i - lag] for step, i in of.items()})
    losses, norms, rates = ({step: values[step] for step in range(100)} for values in (LOSSES, NORMS, RATES))
    return aligned(run(losses, "a", grad_norm=norms, lr=rates), sparse)


@pytest.mark.parametrize("noise", [0.0, 0.002])
def test_a_shift_of_a_sparse_log_is_found_by_its_values(noise: float) -> None:
    found = dense_and_sparse(1, noise=noise)
    assert found.notes[0].startswith("1 was taken from the steps of b: only then a has the same grad_norm")
    assert list(found.metrics[0].positions) == list(range(9, 100, 10))
    rates = next(one for one in found.metrics if one.metric == "lr")
    assert (rates.sides[0] == rates.sides[1]).all()


@pytest.mark.parametrize(
    ("shift", "lag", "noise"),
    [(0, 1, 0.0), (0, -1, 0.0), (1, -1, 0.0), (1, 0, 0.1)],
    ids=["the rates lag", "the rates lead", "all but the rates is a batch ahead", "only the rates agree"],
)
def test_runs_that_differ_are_not_shifted_into_agreement(shift: int, lag: int, noise: float) -> None:
    found = dense_and_sparse(shift, lag=lag, noise=noise)
    assert list(found.metrics[0].positions) == list(range(10, 100, 10))


def test_a_shift_leaves_the_rates_that_lag() -> None:
    rates = next(one for one in dense_and_sparse(1, lag=1).metrics if one.metric == "lr")
    assert list(rates.positions) == list(range(9, 100, 10))
    assert (rates.sides[0] != rates.sides[1]).any()


@pytest.mark.parametrize(
    ("curve", "bias"),
    [({step: 0.93**step for step in range(100)}, 1.015), ({step: 2 + NORMS[step] / 100 for step in range(100)}, 1.0)],
    ids=["merely nearer", "within the band either way"],
)
def test_a_shift_needs_clear_evidence(curve: dict[int, float], bias: float) -> None:
    found = aligned(run(curve, "a"), run({step: bias * curve[step - 1] for step in range(10, 101, 10)}, "b"))
    assert list(found.metrics[0].positions) == list(range(10, 100, 10))


def test_a_run_that_is_a_batch_ahead_of_the_same_counter_is_not_shifted() -> None:
    losses, norms = ({step: values[step + 1] for step in range(0, 100, 10)} for values in (LOSSES, NORMS))
    found = aligned(two(0, 99, name="a"), run(losses, "b", grad_norm=norms))
    assert list(found.metrics[0].positions) == list(range(0, 100, 10))


def test_alignment_undecided_shift_follows_log_ends() -> None:
    """Losses of other seeds, whose noise has nothing to do with each other."""
    noise = np.random.default_rng(0).normal(size=(2, 100))
    a, b = ({step: 2 + 0.1 * float(x) for step, x in enumerate(row)} for row in noise)
    undecided = "although the values do not tell whether it is that or a first line that is missing"
    later = {step + 1: loss for step, loss in b.items()}
    assert aligned(run(a, "a"), run(later, "b")).notes == (
        f"b counts its steps from 1 and a from 0: 1 was taken from the former's, {undecided}",
    )
    lacking = aligned(run(a, "a"), run({step: loss for step, loss in b.items() if step}, "b"))
    assert lacking.notes == (f"b counts its steps from 1 and a from 0: both count the same steps, {undecided}",)
    assert len(lacking.metrics[0].positions) == 99


def test_a_metric_that_is_nowhere_finite_is_not_compared() -> None:
    nothing = dict.fromkeys(range(1, 5), np.nan)
    found = aligned(run(part(1, 4), "a", grad_norm=nothing), run(part(1, 4), "b", grad_norm=nothing))
    assert [one.metric for one in found.metrics] == ["loss"]
    assert found.missing == ("grad_norm: no finite value in any of them",)


def test_an_evaluation_before_the_first_step_is_no_counter_that_begins_at_0() -> None:
    found = aligned(run(part(1, 90), "a", eval_loss={0: 9.0, 90: 1.0}), run(part(1, 90), "b"))
    assert found.notes == ()
    assert found.missing == ("eval_loss: not in b",)


def test_a_log_of_every_tenth_step_is_compared_there() -> None:
    found = aligned(run(part(1, 100), "dense"), run(part(10, 100, 10), "sparse"))
    assert list(found.metrics[0].positions) == list(range(10, 101, 10))
    assert (found.metrics[0].sides[0] == found.metrics[0].sides[1]).all()
    assert found.notes == ("loss: logged every 1 and every 10 steps; compared at those that all have",)


def test_a_log_of_means_over_ten_steps_is_compared_with_the_others_means() -> None:
    means = {end: float(np.mean([LOSSES[step] for step in range(end - 9, end + 1)])) for end in range(10, 101, 10)}
    found = aligned(run(part(1, 95), "dense"), run(means, "sparse", averaged=True))
    assert list(found.metrics[0].positions) == list(range(10, 91, 10))  # the last ten steps are not complete
    assert found.metrics[0].sides[0] == pytest.approx(found.metrics[0].sides[1])
    assert "averaged over the steps between" in found.notes[0]


MEANS = {line: float(np.mean([LOSSES[10 * line + n] for n in range(10)])) for line in range(20)}


def counting_lines(losses: dict[int, float], *, first: int = 0, bias: float = 1.0, **more: Any) -> Run:
    """A log like wandb's export: its counter counts what was logged."""
    return run({line + first: bias * loss for line, loss in losses.items()}, "lines", **more)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("swapped", [False, True])
def test_lines_counted_from_0_are_put_on_the_steps_whose_means_they_are(first: int, swapped: bool) -> None:
    norms = {step + first: values for step, values in NORMS.items()}
    whole = run(part(0, 199, shift=first), "whole", grad_norm=norms)
    lines = counting_lines(MEANS, bias=1.001, grad_norm={line: NORMS[10 * line + 9] for line in range(20)})
    found = aligned(lines, whole) if swapped else aligned(whole, lines)
    what = "only so has it their mean of loss and the last one's grad_norm"
    assert found.notes[0] == f"each line of lines stands for 10 steps of whole: {what}"
    loss, norm = found.metrics
    assert list(loss.positions) == list(norm.positions) == list(range(9 + first, 200 + first, 10))
    assert loss.sides[0] == pytest.approx(loss.sides[1], rel=0.0011)
    assert (norm.sides[0] == norm.sides[1]).all()


def test_lines_counted_from_0_are_refused_where_no_value_tells_their_steps() -> None:
    other = counting_lines(MEANS, bias=1.2)
    for found in (aligned(run(part(0, 199), "whole"), other), aligned(other, run(part(0, 199, shift=1), "whole"))):
        assert found.metrics == ()
        assert "lines counts its 20 lines from 0, as wandb's Step does, whole has 10 times as many" in found.refused
        assert found.refused.endswith("give a log that has the trainer's own step, such as train/global_step")
    named = aligned(run(part(0, 199, shift=1), "whole"), counting_lines(MEANS, bias=1.2, first=1))
    assert list(named.metrics[0].positions) == list(range(1, 21))


def test_a_run_that_ended_early_and_diverges_is_compared_step_by_step() -> None:
    losses = {step: LOSSES[step] * (1.3 if step > 12 else 1.001) for step in range(20)}
    for shift in (0, 1):
        found = aligned(run(part(0, 199, shift=shift), "whole"), counting_lines(losses))
        assert list(found.metrics[0].positions) == list(range(shift, 20 + shift))


def test_a_run_whose_rates_agree_step_by_step_is_not_put_on_the_steps_whose_means_its_losses_are() -> None:
    whole = run(part(0, 199), "whole", lr=RATES)
    found = aligned(whole, counting_lines(MEANS, lr={step: RATES[step] for step in range(20)}))
    assert [list(one.positions) for one in found.metrics] == [list(range(20))] * 2


def test_lines_without_steps_are_put_on_the_steps_whose_means_they_are() -> None:
    whole, lines = (
        replace(run(values, name), notes=(COUNTED,))
        for values, name in ((part(0, 199, shift=1), "a"), ({line + 1: mean for line, mean in MEANS.items()}, "b"))
    )
    for one, other in ((whole, lines), (lines, whole), (run(part(0, 199, shift=1), "a"), lines)):
        found = aligned(one, other)
        assert found.notes[0] == "each line of b stands for 10 steps of a: only so has it their mean of loss"
        assert list(found.metrics[0].positions) == list(range(10, 201, 10))
    assert (
        "nothing tells which"
        in aligned(whole, replace(counting_lines(MEANS, bias=1.2, first=1), notes=(COUNTED,))).refused
    )


NOISY = np.array([2 + LOSSES[step] for step in range(1, 101)])
TRAILING = np.concatenate([NOISY[:4], np.convolve(NOISY, np.ones(5) / 5, mode="valid")])
LAGGING = np.exp(-np.arange(101) / 30) + 2


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (NOISY, np.cumsum(NOISY) / np.arange(1, 101), "of side B are means of side A's so far"),
        (TRAILING * 1.001, NOISY, "of side A are means of side B's over the last 5"),
        (NOISY, NOISY, ""),
        (NOISY, np.concatenate([NOISY[:1], NOISY[:-1]]), ""),  # the log of the step before
        (LAGGING[1:], LAGGING[:-1], ""),  # where a mean over three is near the middle one
        (NOISY, 1.2 * np.cumsum(NOISY) / np.arange(1, 101), ""),
    ],
)
def test_running_means_are_told_apart_from_lags(
    a: np.ndarray[tuple[int], np.dtype[np.float64]], b: np.ndarray[tuple[int], np.dtype[np.float64]], text: str
) -> None:
    assert text in averages(a, b)
    assert bool(text) == bool(averages(a, b))


def test_by_tokens_other_batch_sizes_are_compared_after_the_same_data() -> None:
    a = run({s: 5.0 - 0.064 * s for s in range(1, 33)}, "a", tokens={s: 64.0 * s for s in range(1, 33)})
    b = run({s: 5.0 - 0.256 * s for s in range(1, 9)}, "b", tokens={s: 256.0 * s for s in range(1, 9)})
    (one,) = aligned(a, b, by="tokens").metrics
    assert list(one.positions) == [256.0 * s for s in range(1, 9)]
    assert one.sides[0] == pytest.approx(one.sides[1])


def test_tokens_of_each_step_are_added_up_and_that_is_told() -> None:
    each = run(part(1, 4), "each", tokens={1: 60.0, 2: 70.0, 3: 80.0, 4: 90.0})
    assert each.tokens
    assert list(each.tokens.values) == [60, 130, 210, 300]
    total = run(part(1, 4), "total", tokens={1: 60.0, 2: 130.0, 3: 210.0, 4: 300.0})
    assert total.tokens
    assert list(total.tokens.values) == [60, 130, 210, 300]
    assert aligned(each, total, by="tokens").notes == (
        "each counts the tokens of each step, not those so far; they were added up",
    )


def test_a_log_without_tokens_is_not_aligned_by_them() -> None:
    with pytest.raises(UsageError, match="b counts no tokens; leave out --by tokens"):
        aligned(run(part(1, 4), "a", tokens=part(1, 4)), run(part(1, 4), "b"), by="tokens")


def test_runs_without_a_common_step_have_nothing_to_compare() -> None:
    found = aligned(run(part(1, 10), "a"), run(part(50, 60), "b"))
    assert found.metrics == ()
    assert found.missing == ("loss: no step in common",)


def rows(*steps: int) -> list[Row]:
    return [Row(step, {"loss": float(place)}) for place, step in enumerate(steps)]


def test_of_steps_that_are_logged_twice_the_later_lines_count() -> None:
    found = run_of(Log(format="test", rows=rows(1, 2, 3, 4, 3, 4, 5, 2, 3, 4, 5, 6)), name="a")
    assert found.resumed == (3, 2)
    assert list(found.curves["loss"].values) == [0, 7, 8, 9, 10, 11]
    assert found.notes == ("6 steps are logged twice, beginning at step 3, 2 (a resume); the later lines count",)


def test_lines_out_of_order_are_sorted() -> None:
    found = run_of(Log(format="test", rows=rows(1, 3, 2, 4)), name="a")
    assert found.resumed == ()
    assert list(found.curves["loss"].values) == [0, 2, 1, 3]
    assert found.notes == ("1 lines are out of order; they were sorted by step",)


def test_an_evaluation_on_a_line_of_its_own_is_no_second_step() -> None:
    log = Log(format="test", rows=[Row(1, {"loss": 1.0, "epoch": 0.5}), Row(1, {"eval_loss": 2.0, "epoch": 0.5})])
    assert run_of(log, name="a").notes == ()


def test_of_two_names_of_one_metric_the_first_in_the_table_counts() -> None:
    log = Log(format="test", rows=[Row(1, {"lm loss": 1.0, "loss": 2.0}), Row(2, {"loss": 3.0, "lm loss": 4.0})])
    assert list(run_of(log, name="a").curves["loss"].values) == [2.0, 3.0]
