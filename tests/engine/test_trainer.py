"""Numbers of a training step that are put together over micro-batches and ranks."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.spec.offline import Sft
from impl.engine import trainer
from impl.engine.trainer import of_all_ranks, sum_evaluations
from impl.fsdp2 import dtensors
from impl.fsdp2.model import Fsdp2Model
from impl.interface.distributed import Reading
from impl.interface.micro_batches import Evaluation
from impl.train.experience import largest


def scalar(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


def beside(*others: list[float]) -> Any:
    """The context of the first rank; the others have these sums and largest numbers."""

    def all_reduce(table: Tensor) -> Tensor:
        assert not table[1:].any()
        return torch.cat([table[:1], torch.tensor(others, dtype=torch.float64).view(-1, table.shape[1])])

    return SimpleNamespace(
        config=SimpleNamespace(device="cpu"), data_rank=0, data_size=1 + len(others), all_reduce_tensor=all_reduce
    )


def test_sums_are_added_up_and_the_largest_number_of_any_rank_is_kept() -> None:
    sums, highest = {"loss": scalar(0.5), "count": scalar(3.0)}, {"ratio": scalar(4.0), "value": scalar(-2.0)}
    found = of_all_ranks(beside([0.5, 2.0, 3.0, -7.0], [0.5, 4.0, 5.0, -1.0]), sums, highest)
    assert found == {"loss": 1.5, "count": 9.0, "ratio": 5.0, "value": -1.0}
    assert of_all_ranks(beside(), sums, {}) == {"loss": 0.5, "count": 3.0}


def test_a_largest_number_is_nan_if_one_rank_has_it() -> None:
    for own, other in ((math.nan, 2.0), (1.0, math.nan)):
        assert math.isnan(of_all_ranks(beside([1.0, other]), {"loss": scalar(1.0)}, {"ratio": scalar(own)})["ratio"])


@pytest.mark.parametrize(("numbers", "largest"), [([1.0, 4.0], 4.0), ([math.nan, 1.0], math.nan)])
def test_micro_batches_are_summed_up_in_float64(numbers: list[float], largest: float) -> None:
    found = [
        Evaluation(loss=None, values={"loss": torch.tensor(2.0**-30)}, highest={"ratio": torch.tensor(number)})
        for number in numbers
    ]
    sums, highest = sum_evaluations([*found, Evaluation(loss=None, values={"loss": torch.tensor(1.0)})])
    assert sums["loss"].item() == 1 + 2.0**-29
    assert highest["ratio"].item() == pytest.approx(largest, nan_ok=True)


def test_a_number_that_is_nan_is_not_lost_behind_another() -> None:
    assert math.isnan(largest([math.nan, 1.0]))
    assert math.isnan(largest([1.0, math.nan]))
    assert largest([1.0, 3.0, 2.0]) == 3.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("leased_gpus")
def test_numbers_are_read_when_the_gpu_has_them_and_no_later() -> None:
    numbers = torch.zeros(3, device="cuda", dtype=torch.float64)
    torch.cuda._sleep(10**9)
    reading = Reading(numbers + 1)
    torch.cuda._sleep(10**9)
    later = torch.cuda.Event()
    later.record()
    assert reading.numbers() == [1.0, 1.0, 1.0]
    assert not later.query()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the device, in order; whoever asks for an update first would wait for it."""
    asked: list[str] = []
    monkeypatch.setattr(Reading, "__init__", lambda self, tensor: asked.append("reading"))
    monkeypatch.setattr(Reading, "numbers", lambda self: [0.0])
    return asked


def test_fsdp2_reads_its_norm_before_the_update(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    nothing, trainable = lambda *_: None, Fsdp2Model.__new__(Fsdp2Model)
    trainable.__dict__ |= {
        **{
            "model": torch.nn.Linear(1, 1),
            "max_grad_norm": None,
            "options": (),
            "context": SimpleNamespace(pipeline=None),
        },
        "optimizer": SimpleNamespace(zero_grad=nothing),
        "scheduler": SimpleNamespace(step=nothing),
        "scaler": SimpleNamespace(get_scale=lambda: 1.0, update=nothing, step=lambda _: asked.append("update")),
    }
    monkeypatch.setattr(dtensors, "gradient_norm", lambda gradients: scalar(1.0))
    trainable.optimizer_step()
    assert asked == ["reading", "update"]


def test_a_step_reads_its_numbers_before_the_last_update(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def update(*_: Any) -> dict[str, float]:
        asked.append("update")
        return {}

    found = {"step_inputs": ([], []), "step_totals": {"token_count": scalar(1.0)}, "_run": [], "_routing": {}}
    for name, given in {**found, "of_all_ranks": {}}.items():
        monkeypatch.setattr(trainer, name, lambda *_, given=given: given)
    monkeypatch.setattr(trainer, "_update", update)
    context, models, batch = SimpleNamespace(), {"policy": None}, SimpleNamespace()
    step: Any = trainer.train_step
    step(context, models, Sft(), batch, on_gradients=lambda _: None, with_rows=False)
    assert asked == ["reading", "update"]
