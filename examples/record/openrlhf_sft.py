"""A record of OpenRLHF's training: its script with a DeepspeedStrategy that records; RECORD names the folder.

``RECORD=OUT deepspeed openrlhf_sft.py --model.model_name_or_path MODEL --data.dataset DATA``, with the options of
``openrlhf.cli.train_sft``.
"""

import contextlib
import os
import runpy
from typing import Any

import openrlhf.utils.deepspeed
from openrlhf.utils.deepspeed import DeepspeedStrategy
from torch import Tensor

import parity


class Recording(DeepspeedStrategy):  # type: ignore[misc]
    """Records the optimizer steps of the model that is trained. The loss is the mean over micro-batches."""

    def prepare(self, *args: Any) -> Any:
        prepared = super().prepare(*args)
        self.engine, self.losses = getattr(prepared[0], "model", prepared[0]), list[Tensor]()  # engine: of an Actor
        recorder = parity.record(self.engine, self.engine.optimizer, out=os.environ["RECORD"])
        self.recorder = self.records.enter_context(recorder)
        return prepared

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.losses.append(loss.detach())
        super().backward(loss, *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        ends = self.engine.is_gradient_accumulation_boundary()
        super().optimizer_step(*args, **kwargs)
        if ends:
            self.recorder.step(loss=sum(self.losses) / len(self.losses))
            self.losses.clear()


def main() -> None:
    openrlhf.utils.deepspeed.DeepspeedStrategy = Recording
    with contextlib.ExitStack() as Recording.records:  # the record ends when the training does
        runpy.run_module("openrlhf.cli.train_sft", run_name="__main__")


if __name__ == "__main__":
    main()
