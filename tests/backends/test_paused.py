"""Paused: a loop that owns its steps runs whole, in one thread, and is paused at each optimizer step."""

import gc
import re
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import parity

Pause = Callable[[Any], Any]


def three_steps(pause: Pause) -> str:
    for step in range(3):
        pause(step)
    return "done"


def test_each_resume_is_one_step_and_finish_gives_the_result() -> None:
    loop = parity.Paused(three_steps)
    assert not loop.running
    assert [loop.resume() for _ in range(3)] == [0, 1, 2]
    assert loop.running
    assert loop.finish() == "done"
    assert not loop.running


def test_what_resume_is_given_comes_out_of_pause() -> None:
    loop = parity.Paused(lambda pause: [pause(None) for _ in range(2)])
    loop.resume()
    loop.resume("first")
    assert loop.finish("second") == ["first", "second"]


def test_the_loop_runs_in_the_thread_of_its_caller() -> None:
    loop = parity.Paused(lambda pause: pause(threading.get_ident()))
    assert loop.resume() == threading.get_ident()


def test_an_exception_comes_out_with_its_traceback() -> None:
    def breaks(pause: Pause) -> None:
        pause(0)
        raise ValueError("loader is empty")

    loop = parity.Paused(breaks)
    loop.resume()
    with pytest.raises(ValueError, match="loader is empty") as error:
        loop.resume()
    assert "breaks" in [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
    assert not loop.running


def test_a_loop_of_too_few_or_too_many_steps_is_told() -> None:
    loop = parity.Paused(three_steps)
    for _ in range(3):
        loop.resume()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ended after 3 pauses, and pause 4 was asked for"):
            loop.resume()
    longer = parity.Paused(three_steps)
    longer.resume()
    with pytest.raises(RuntimeError, match="paused again, at pause 2, where it should have ended"):
        longer.finish()
    longer.close()


@pytest.mark.parametrize("where", ["outside", "thread"])
def test_a_pause_at_the_wrong_place_is_told(where: str) -> None:
    errors: list[str] = []

    def body(pause: Pause) -> None:
        thread = threading.Thread(target=loop_body, args=(pause,))
        thread.start()
        thread.join()

    def loop_body(pause: Pause) -> None:
        try:
            pause(0)
        except RuntimeError as error:
            errors.append(str(error))

    loop = parity.Paused(body)
    loop_body(loop.pause) if where == "outside" else loop.finish()
    assert re.search("outside of the paused loop, or in another thread", errors[0])


def test_an_unfinished_loop_is_unwound_and_freed() -> None:
    ended: list[str] = []

    def body(pause: Pause, big: torch.Tensor) -> None:
        try:
            pause(weakref.ref(big))
        finally:
            ended.append("finally")

    loop = parity.Paused(lambda pause: body(pause, torch.zeros(3)))
    big = loop.resume()
    loop.close()
    loop.close()  # harmless
    gc.collect()
    assert ended == ["finally"]
    assert big() is None


def test_modes_of_both_sides_are_kept_apart() -> None:
    def body(pause: Pause) -> None:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            pause(0)
            pause((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    loop = parity.Paused(body)
    loop.resume()
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert loop.resume() == (False, True)
    loop.close()
    assert torch.is_grad_enabled()


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((2,), float(index))}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(x).square().mean()}


def test_a_trainer_that_is_paused_computes_as_one_that_is_not(tmp_path: Path) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments  # takes long, and other workers do without

    class PausesAtGradients(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.pause: Pause | None = None

        def on_pre_optimizer_step(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
            assert self.pause is not None
            self.pause(next(model.parameters()).grad.norm().item())  # type: ignore[union-attr]

    def weights(paused: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model, callback = Net(), PausesAtGradients()
        options: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
        arguments = TrainingArguments(str(tmp_path), max_steps=3, per_device_train_batch_size=2, **options)
        trainer = Trainer(model, arguments, train_dataset=Rows(), callbacks=[callback] if paused else [])
        if not paused:
            trainer.train()
        else:
            loop = parity.Paused(lambda _: trainer.train())
            callback.pause = loop.pause
            assert all(loop.resume() > 0 for _ in range(3))
            assert loop.finish().global_step == 3
        return model.linear.weight.detach()

    assert torch.equal(weights(True), weights(False))
