"""Makes a gradient of FSDP2 wrong in the shard of one rank: of a bias of one layer, or of a row of the head."""

from collections.abc import Callable
from typing import ClassVar

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from conformance.backends.protocol import StepMetrics
from conformance.spec.batch import Batch
from impl.fsdp2.adapter import Fsdp2Backend
from impl.fsdp2.model import Fsdp2Model

WRONG_BY = 1.001
ROW = 3  # of the second rank's shard


class Planted(Fsdp2Backend):
    """The second rank multiplies a row, or everything, of its shard of one gradient before it is read."""

    parameter: ClassVar[str]
    rows: ClassVar[slice] = slice(None)

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        def planted(model: str) -> None:
            if dist.get_rank() == 1:
                trainable = self.models[model]
                assert isinstance(trainable, Fsdp2Model)
                gradient = trainable.model.get_parameter(self.parameter).grad
                assert isinstance(gradient, DTensor)
                gradient.to_local()[self.rows].mul_(WRONG_BY)
            on_gradients(model)

        return super().train_step(batch, planted)


class WrongBias(Planted):
    parameter = "model.layers.1.self_attn.o_proj.bias"


class WrongRow(Planted):
    parameter = "lm_head.weight"
    rows = slice(ROW, ROW + 1)
