"""Checks of updates without masters: honest roundings are within their bounds, each bias and each repetition is not."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_cell
from torch import Tensor

from conformance.judge import stored_updates
from conformance.judge.rebuilt import UpdateStep
from conformance.judge.stored_updates import Sum
from conformance.judge.tensor_views import TensorView
from conformance.judge.tolerance import Measurement
from conformance.oracle.optimizer import rounded_at_random, spacing
from conformance.oracle.primitives import HONEST
from conformance.spec.observables import trained_observables
from conformance.spec.precision import PrecisionName

SHAPE, BITS, LR = (96, 64), 8, 1e-3
UNREAD = 1  # the step whose gradients are not read, nor the weights before it
Rounds = Callable[[Tensor, torch.Generator], Tensor]


def view(tensor: Tensor | None) -> TensorView:
    return TensorView(tensors={} if tensor is None else {"w": tensor})


def training(
    rounds: Rounds, *, seed: int, beta2: float = 0.95, decay: float = 0.1, size: float = 1e-3
) -> Iterator[UpdateStep]:
    """Trains in float32 and stores in bf16, as torchao does: AdamW of the scenario sft-packed."""
    generator = torch.Generator().manual_seed(seed)
    weight = (0.1 * torch.randn(SHAPE, generator=generator)).bfloat16()
    first = second = torch.zeros(SHAPE, dtype=torch.bfloat16)
    for number in range(4):
        before, gradient = weight, (size * torch.randn(SHAPE, generator=generator)).bfloat16()
        g, w = gradient.float(), weight.float()
        m, v = first.float().lerp(g, 0.1), second.float().lerp(g.square(), 1 - beta2)
        denominator = v.sqrt() / (1 - beta2 ** (number + 1)) ** 0.5 + 1e-3
        w = w - LR * decay * w - LR * (m / (1 - 0.9 ** (number + 1))) / denominator
        weight, first, second = rounds(w, generator).bfloat16(), m.bfloat16(), v.bfloat16()
        is_unread, is_hidden = number == UNREAD, number == UNREAD - 1
        yield UpdateStep(
            step=number,
            stage="clipped update",
            first=not number,
            skipped=False,
            before=view(before),
            gradients=view(None if is_unread else gradient),
            after=view(None if is_hidden else weight),
            lr=LR,
            factor=1.0,
            known=True,
            unread=frozenset({"w"} if is_unread else ()),
            first_moment=view(first if is_unread else None),
            second_moment=view(second if is_unread else None),
            expected=view(None),
            norms=None,
            of_gradients="gradients",
            of_norm="gradient norm",
        )


def judged(steps: Iterator[UpdateStep], precision: PrecisionName = "bf16-stochastic") -> list[Measurement]:
    scenario = make_cell("sft-packed", "llama", "dp2", precision).scenario
    of_steps = stored_updates._OfSteps(shards=(2,))
    return list(stored_updates._of_parameter("w", list(steps), scenario, HONEST, of_steps))


def beyond(measured: list[Measurement]) -> set[tuple[int, str]]:
    """The step and the kind of each measurement that is beyond its bound."""
    return {
        (m.step, m.where if m.tensor.startswith(stored_updates.ROUNDED) else m.tensor)
        for m in measured
        if m.fixed is not None and not m.error <= m.fixed
    }


def at_random(x: Tensor, generator: torch.Generator) -> Tensor:
    return rounded_at_random(x.double(), BITS, generator)


def toward(sign: Callable[[Tensor], Tensor]) -> Rounds:
    """Rounds to the neighbour on this side, of numbers that have two."""

    def rounds(x: Tensor, _: torch.Generator) -> Tensor:
        unit = spacing(x.double(), BITS)
        return torch.where(sign(x) > 0, (x / unit).ceil(), (x / unit).floor()) * unit

    return rounds


def shared(of: Callable[[Tensor], Tensor], *, in_halves: bool = False) -> Rounds:
    """Rounds by random numbers that several elements share. in_halves: the halves of a tensor have the same ones."""

    def rounds(x: Tensor, generator: torch.Generator) -> Tensor:
        unit = spacing(x.double(), BITS)
        below = (x / unit).floor()
        return (below + (of(torch.rand(x.shape, generator=generator)) < x / unit - below)) * unit

    return rounds


@pytest.mark.parametrize("seed", range(40))
def test_honest_roundings_are_within_their_bounds(seed: int) -> None:
    measured = judged(training(at_random, seed=seed))
    assert not beyond(measured)
    assert {m.step for m in measured if m.tensor.startswith(stored_updates.ROUNDED)} == {1, 2, 3}


def test_nearest_numbers_are_required_where_nothing_is_random() -> None:
    nearest = training(lambda x, _: x.bfloat16(), seed=0)
    assert not beyond(judged(nearest, "bf16-nearest"))
    assert {step for step, _ in beyond(judged(training(at_random, seed=0), "bf16-nearest"))} == {1, 2, 3}


@pytest.mark.parametrize(
    ("rounds", "kinds"),
    [
        (toward(torch.ones_like), {"up"}),
        (toward(torch.sign), {"away from zero"}),
        (toward(lambda x: -x.sign()), {"away from zero"}),
        (lambda x, _: x.bfloat16(), {"to the nearest number"}),
        (shared(lambda r: r[:1, :1].expand(r.shape)), {"up", "to the nearest number"}),
        (shared(lambda r: r[:, :1].expand(r.shape)), {"same random numbers as 1 elements before, up"}),
        (shared(lambda r: r[:1].expand(r.shape)), {"same random numbers as 64 elements before, up"}),
        (shared(lambda r: r[:48].repeat(2, 1)), {"same random numbers as 3072 elements before, up"}),
        (lambda x, _: at_random(x, torch.Generator().manual_seed(7)), {"same random numbers as at step 2, up"}),
        (lambda x, g: at_random(x + 0.3 * spacing(x, BITS), g), {"up"}),
    ],
    ids=["up", "away", "cut-off", "nearest", "one-number", "of-rows", "of-columns", "of-shards", "of-steps", "biased"],
)
def test_each_bias_is_named(rounds: Rounds, kinds: set[str]) -> None:
    found = {kind for _, kind in beyond(judged(training(rounds, seed=3)))}
    assert found & kinds, found


def test_numbers_of_an_earlier_step_are_seen_in_two_steps_that_are_judged_together() -> None:
    """Every second step has the numbers of the last but one, which was not read."""
    calls = iter(range(4))
    steps = training(lambda x, _: at_random(x, torch.Generator().manual_seed(next(calls) % 2)), seed=2)
    found = {kind for step, kind in beyond(judged(steps)) if step == 2}
    assert any(kind.startswith("same random numbers as at step 1,") for kind in found), found


def test_numbers_of_another_weight_of_the_same_size_are_seen() -> None:
    """The fourth weight has those of the first one."""
    scenario = make_cell("sft-packed", "llama", "dp2", "bf16-stochastic").scenario
    of_steps = stored_updates._OfSteps(shards=())
    for number, seed in enumerate((11, 12, 13, 11)):
        steps = list(training(numbers_from(torch.Generator().manual_seed(seed)), seed=20 + number))
        found = beyond(list(stored_updates._of_parameter("w", steps, scenario, HONEST, of_steps)))
        assert bool(found) == (number == 3)


def numbers_from(generator: torch.Generator) -> Rounds:
    return lambda x, _: at_random(x, generator)


def test_no_stored_number_is_outside_of_any_rounding() -> None:
    measured = judged(training(lambda x, g: at_random(x, g) + 2 * spacing(x.double(), BITS), seed=0))
    assert {m.step for m in measured if m.tensor.startswith("w against") and m.error > 0} == {2, 3}
    assert {m.step for m in measured if m.tensor.startswith("w over two") and m.error > 1} == {1}


@pytest.mark.parametrize(
    ("changed", "tensor"),
    [({"beta2": 0.9}, "exp_avg_sq of w against rebuilt"), ({"decay": 0.0}, "up")],
    ids=["another-beta2", "no-decay"],
)
def test_wrong_settings_show(changed: dict[str, float], tensor: str) -> None:
    found = beyond(judged(training(at_random, seed=1, **changed)))
    assert found, "nothing is beyond its bound"
    assert "beta2" not in changed or (UNREAD, tensor) in found


def test_moments_that_are_not_stored_in_bf16_show() -> None:
    steps = [
        replace(step, second_moment=view(step.second_moment.tensors["w"].double() * (1 + 2.0**-12)))
        if step.step == UNREAD
        else step
        for step in training(at_random, seed=0)
    ]
    assert (UNREAD, "exp_avg_sq of w against rebuilt") in beyond(judged(iter(steps)))


def test_a_weight_without_moments_is_never_passed_over() -> None:
    """Of two weights one has no moments, so nothing could be known of it after the two steps."""
    steps = list(training(at_random, seed=0))
    others = TensorView(tensors={"other": torch.zeros(1)})
    without = [replace(step, first_moment=others) if step.step == UNREAD else step for step in steps]
    assert [m.tensor for m in judged(iter(without)) if math.isinf(m.error)] == ["moments of w (missing)"]


def test_steps_without_any_moments_are_listed() -> None:
    steps = [replace(s, first_moment=view(None), second_moment=view(None)) for s in training(at_random, seed=0)]
    found = judged(iter(steps))
    assert not found, "the first step's weights are not read"
    lines = [{"unread": ["weight"]}, {"unread": ["gradient"]}, {}, {}]
    record: Any = SimpleNamespace(steps=[SimpleNamespace(step=n, line=line) for n, line in enumerate(lines)])
    of_oracle = [SimpleNamespace(step=n, names=lambda: ["gradient/w", "weight/w"]) for n in range(4)]
    oracle: Any = SimpleNamespace(steps=of_oracle, observables=trained_observables(""))
    assert stored_updates.not_rebuilt([record], found, oracle) == [1, 2, 3]
    assert not stored_updates.not_rebuilt([record], judged(training(at_random, seed=0)), oracle)


def test_updates_that_rounding_to_the_nearest_number_may_lose_are_told_from_those_it_may_not() -> None:
    def sums(nearest: float, n: int) -> list[Measurement]:
        of_steps = stored_updates._OfSteps(shards=())
        of_steps.nearest[0] = nearest
        of_steps.sums[0] = {stored_updates.NEAREST: Sum(variance=n / 6)}
        return list(of_steps.measurements(next(training(at_random, seed=0))))

    assert stored_updates.lost_in_rounding(sums(1.0, 1000))
    assert not stored_updates.lost_in_rounding(sums(1e5 / 24, 100_000))


def test_gradients_that_underflow_raise_no_alarm() -> None:
    for size in (1e-18, 1e-20, 1e-23):
        measured = judged(training(at_random, seed=5, size=size))
        assert not beyond(measured), size


def test_bound_of_a_sum_holds_far_beyond_its_standard_deviation() -> None:
    """For a sum of 600 fair roundings the bound is at 8 to 10 standard deviations: one alarm in 1e15."""
    error = Sum(value=8 * (600 / 6) ** 0.5, variance=600 / 6).error
    assert 0.8 < error < 1.0
