"""Records a training by transformers' Trainer, as a callback.

The Trainer announces its steps. With ``logging_steps=1`` it logs the loss of every step. Rows are fingerprinted where
they enter the model. The Trainer logs a loss that is not finite as the mean of the losses before it
(``logging_nan_inf_filter``, on by default), so the loss is checked where it leaves the model and recorded as NaN.
"""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from parity.differences import Names
from parity.recorder import Recorder, record

UNSEEN = (
    "the model gives no loss that can be seen, and the Trainer logs one that is not finite as the mean of those before "
    "it; pass logging_nan_inf_filter=False for losses as they were computed"
)


class TrainerRecord(TrainerCallback):  # type: ignore[misc]
    """``Trainer(..., callbacks=[parity.TrainerRecord(out="run-a")])``; out, names and full as of ``parity.record``."""

    def __init__(self, *, out: str | Path, names: Names | None = None, full: bool = False) -> None:
        self._options: dict[str, Any] = {"out": out, "names": names, "full": full}
        self._recorder: Recorder | None = None
        self._rows: list[Tensor] = []
        self._ended = False  # a step has ended whose line is not written: its loss may be logged now
        self._finite: list[Tensor] = []  # of the step's micro-batches, whether the loss that the model gave is
        self._watches: list[RemovableHandle] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._recorder = record(parts["model"], parts["optimizer"], **self._options).__enter__()
        if not args.torch_compile:  # or the hooks would be compiled too
            self._watches.append(parts["model"].register_forward_pre_hook(self._see_rows, with_kwargs=True))
            self._watches.append(parts["model"].register_forward_hook(self._see_loss))

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._write()

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._ended = True

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict[str, Any], **parts: Any) -> None:
        if args.logging_steps == 1 and "loss" in logs and self._ended:
            if args.logging_nan_inf_filter and not self._finite:
                warnings.warn(UNSEEN, stacklevel=2)
            self._write(loss=logs["loss"] if all(self._finite) else math.nan)

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._write()
        for watch in self._watches:
            watch.remove()
        if self._recorder:
            self._recorder.__exit__(None, None, None)
            self._recorder = None

    def _write(self, *, loss: float | None = None) -> None:
        """Write the step that has ended, if there is one."""
        if self._ended and self._recorder:
            self._recorder.step(loss=loss, batch=self._rows)
            self._rows, self._finite, self._ended = [], [], False

    def _see_rows(self, model: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        """Keep the rows of a training micro-batch, without padding."""
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        if isinstance(ids, Tensor) and model.training and torch.is_grad_enabled():
            kept = mask.bool() if isinstance(mask, Tensor) and mask.shape == ids.shape else torch.ones_like(ids).bool()
            self._rows += [row[keep].cpu() for row, keep in zip(ids, kept, strict=True)]

    def _see_loss(self, model: nn.Module, args: tuple[Any, ...], outputs: Any) -> None:
        """Keep whether the loss of a micro-batch is finite, as a tensor, because reading it would wait for the GPU."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
        if isinstance(loss, Tensor) and model.training and torch.is_grad_enabled():
            self._finite.append(loss.detach().isfinite().all())
