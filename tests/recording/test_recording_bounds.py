"""How far apart two records may be: no bound lets everything pass, and each is told with its reason."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recording_tasks import adamw, recorded, tiny, train
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import parity
from parity.compare import compare_records
from parity.differences import MOST, allowed_update

NORM = "model.norm.weight"


@pytest.mark.parametrize("noise", [0.0, 1e-4, 0.01, 0.1, 0.2, 1.0, 100.0])
@pytest.mark.parametrize("stored", [0.0, 0.01, 0.5, 0.89, 2.0, 50.0])
def test_no_update_may_be_as_far_apart_as_one_that_is_not_made(noise: float, stored: float) -> None:
    for updates in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):
        allowed = allowed_update(1e-4, noise=np.full(64, noise), stored=stored, updates=updates)
        assert allowed is None or allowed <= MOST < 1
        if stored < MOST and not all(updates):
            assert allowed is not None  # what one side does not move at all is a difference whatever the noise


def test_half_of_the_elements_turned_by_noise_leave_nothing_to_compare() -> None:
    of_half, of_less = (np.repeat([1.0, 1e-9], [turned, 64 - turned]) for turned in (32, 31))
    assert allowed_update(1e-4, noise=of_half, stored=0.0, updates=(1.0, 1.0)) is None
    assert allowed_update(1e-4, noise=of_less, stored=0.0, updates=(1.0, 1.0)) == MOST


def test_an_update_that_is_not_made_is_told_whatever_the_noise_of_its_gradient(tmp_path: Path) -> None:
    recorded(tmp_path / "a")
    model = tiny()
    optimizer, norm = adamw(model), model.get_parameter(NORM)
    before = norm.detach().clone()
    optimizer.register_step_post_hook(lambda *_: norm.data.copy_(before))
    with parity.record(model, optimizer, out=tmp_path / "b") as recorder:
        train(model, optimizer, recorder, autocast=True)
    compared = compare_records([tmp_path / "a", tmp_path / "b"], threshold=None)
    divergence = compared.pairs[0].divergence
    assert divergence is not None
    assert (divergence.name, [quantity.what for quantity in divergence.different]) == ("update", [NORM])
    assert divergence.different[0].allowed > 0.4  # as Adam makes it of bfloat16's noise


def test_updates_that_rounding_decides_are_told_as_not_compared(tmp_path: Path) -> None:
    for name, order in (("a", list), ("b", lambda rows: rows[::-1])):
        recorded(tmp_path / name, model=tiny().bfloat16(), order=order)
    compared = compare_records([tmp_path / "a", tmp_path / "b"], threshold=None)
    assert not compared.differs, compared.text()
    (step,) = (stage for stage in compared.pairs[0].stages if stage.name == "update" and stage.step == 0)
    assert "model.embed_tokens.weight" in step.undetermined
    assert not set(step.undetermined) & {quantity.what for quantity in step.quantities}
    assert "updates, which rounding decides, in 3 steps, of " in compared.text()


Step = Callable[[int, nn.Parameter], None]


def steps_of(out: Path, optimizers: Callable[[Sequence[nn.Parameter]], list[Optimizer]], *, faulty: bool) -> None:
    """Three steps of two matrices; noisy gradients, and a move of the first that is 1 % too long, if faulty."""
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(64, 64) for _ in range(2)])
    made = optimizers(list(model))
    generator = torch.Generator().manual_seed(int(faulty))
    with parity.record(model, made, out=out) as recorder:
        for step in range(3):
            noise = [torch.randn(64, 64, generator=generator) for _ in model]
            torch.manual_seed(step)
            for weight, of_it in zip(model, noise, strict=True):
                weight.grad = torch.randn(64, 64) * (1 + 1e-4 * of_it)
            before = model[0].detach().clone()
            handle = made[0].register_step_post_hook(lambda *_, old=before: _longer(model[0], old) if faulty else None)
            for optimizer in made:
                optimizer.step()
            handle.remove()
            recorder.step()


@torch.no_grad()
def _longer(weight: Tensor, before: Tensor) -> None:
    weight.copy_(before + 1.01 * (weight - before))


def test_only_what_adam_steps_may_move_apart_as_adam_makes_it(tmp_path: Path) -> None:
    def both(weights: Sequence[nn.Parameter]) -> list[Optimizer]:
        return [SGD(weights[:1], lr=0.1), AdamW(weights[1:], lr=0.1)]

    def adam(weights: Sequence[nn.Parameter]) -> list[Optimizer]:
        return [AdamW(weights, lr=0.1)]

    found: dict[str, Any] = {}
    for name, made in (("both", both), ("adam", adam)):
        for faulty in (False, True):
            steps_of(tmp_path / f"{name}-{faulty}", made, faulty=faulty)
        compared = compare_records([tmp_path / f"{name}-{faulty}" for faulty in (False, True)], threshold=None)
        found[name] = compared.pairs[0].divergence
    assert found["adam"] is None
    assert (found["both"].name, [quantity.what for quantity in found["both"].different]) == ("update", ["0"])


def test_a_threshold_that_is_given_holds_for_updates_of_adam_as_well(tmp_path: Path) -> None:
    folders = [recorded(tmp_path / "a"), recorded(tmp_path / "b", order=lambda rows: rows[::-1])]
    pair = compare_records(folders, threshold=None).pairs[0]
    gradient, update = (
        max(q.observed for stage in pair.stages if stage.name == name for q in stage.quantities)
        for name in ("gradients", "update")
    )
    assert gradient < update
    compared = compare_records(folders, threshold=math.sqrt(gradient * update))
    divergence = compared.pairs[0].divergence
    assert divergence is not None
    assert divergence.name == "update"
    assert {quantity.allowed for quantity in divergence.quantities} == {compared.pairs[0].threshold}
    assert "because the threshold was given." in compared.text()


def test_the_dtype_that_bounds_are_from_is_told_with_the_record_that_has_it(tmp_path: Path) -> None:
    folders = [recorded(tmp_path / "a"), recorded(tmp_path / "b", autocast=True)]
    compared = compare_records(folders, threshold=None)
    because = f"{tmp_path / 'b'} computes in bfloat16"
    assert (compared.pairs[0].threshold, compared.pairs[0].because) == (2**-3.5, because)
    allowed = "8.8e-02 of gradients and updates, 8.8e-03 of the loss"
    assert f"Allowed: {allowed}, because {because}." in compared.text()
    assert compared.to_json()["pairs"][0]["because"] == because


@pytest.mark.parametrize(("off", "differs"), [(1e-8, False), (1e-5, True)])
def test_loaded_weights_may_differ_by_the_rounding_of_their_own_dtype_alone(
    off: float, *, differs: bool, tmp_path: Path
) -> None:
    for name, dtype, factor in (("a", torch.float32, 1.0), ("b", torch.float64, 1 + off)):
        model = nn.ParameterDict(
            {
                "fine": torch.linspace(1, 2, 8, dtype=dtype) * factor,
                "coarse": torch.ones(4, dtype=torch.bfloat16),
            }
        )
        with parity.record(model, SGD(model.parameters(), lr=0.1), out=tmp_path / name):
            pass
    compared = compare_records([tmp_path / "a", tmp_path / "b"], threshold=None)
    assert compared.differs == differs
    if differs:
        divergence = compared.pairs[0].divergence
        assert divergence is not None
        assert (divergence.name, [quantity.what for quantity in divergence.different]) == ("weights", ["fine"])
