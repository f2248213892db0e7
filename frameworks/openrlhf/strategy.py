"""OpenRLHF's command lines without their scripts, and its DeepspeedStrategy, paused at each optimizer step."""

import os
import runpy
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch

import parity

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
with parity.on_cpu(stand_ins=("vllm",)):
    from openrlhf.models import Actor
    from openrlhf.utils.deepspeed import DeepspeedStrategy


def command_line(script: str, options: Mapping[str, Any]) -> Any:
    """Returns the options as the script of OpenRLHF reads and completes them; None leaves an option out."""

    class Parsed(Exception):
        """Ends the script where it begins to train."""

    def stop(args: Any) -> None:
        raise Parsed(args)

    words = [
        ["--" + name, *map(str, value if isinstance(value, tuple) else (value,))] for name, value in options.items()
    ]
    flags = [word for value, given in zip(options.values(), words, strict=True) if value is not None for word in given]
    with (
        mock.patch("sys.argv", [script, *(word for word in flags if word != "True")]),
        mock.patch("openrlhf.utils.get_strategy", stop),
        mock.patch("ray.is_initialized", return_value=True),
    ):
        try:
            runpy.run_module(f"openrlhf.cli.{script}", run_name="__main__")
        except Parsed as parsed:
            return parsed.args[0]
    raise AssertionError("the script ended without a strategy")


class PausedStrategy(DeepspeedStrategy):  # type: ignore[misc]
    """Shows gradients before each optimizer step, and pauses the loop after it."""

    def observe(self, *, on_step: Callable[[str], None], pause: Callable[[str, dict[str, float]], None]) -> None:
        self.on_step, self.pause, self.losses = on_step, pause, {"actor": [], "critic": [], "model": []}

    def backward(self, loss: torch.Tensor, model: Any, optimizer: Any, **kwargs: Any) -> None:
        self.latest = loss.detach()
        super().backward(loss, model, optimizer, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, name: str = "model", **kwargs: Any) -> None:
        engine = model.model if isinstance(model, Actor) else model
        self.losses[name].append(self.latest)
        ends, lr = engine.is_gradient_accumulation_boundary(), scheduler.get_last_lr()[0]
        if ends:
            self.on_step(name)
        super().optimizer_step(optimizer, model, scheduler, name=name, **kwargs)
        if ends:
            loss = self.all_reduce(float(torch.stack(self.losses[name]).mean()))
            self.losses[name].clear()
            self.pause(name, {"loss": loss, "lr": lr, "grad_norm": self.get_grad_norm(engine)})

    def get_ds_train_config(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        config: dict[str, Any] = super().get_ds_train_config(*args, **kwargs)
        if "optimizer" in config and (not torch.cuda.is_available() or torch.get_default_dtype() == torch.float64):
            config["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's fused one needs CUDA and float32
        return _sharded(config)

    def get_ds_eval_config(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return _sharded(super().get_ds_eval_config(*args, **kwargs))


def _sharded(config: dict[str, Any]) -> dict[str, Any]:
    # The defaults keep a tiny model whole, always and from its forward to its backward pass.
    for name in ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance"):
        config["zero_optimization"][f"stage3_{name}"] = 0
    return config
