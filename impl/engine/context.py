"""Gives the contexts of all backends their data and the sums over data-parallel ranks."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from conformance.spec.batch import Batch, Row
from impl.interface.distributed import all_gather_value, all_reduce_number, all_reduce_over
from impl.interface.trainable import ContextConfig


class ReferenceContext:
    """Implements a part of impl.interface.trainable.Context, which has the contract of each method."""

    data_rank: int
    data_size: int

    def __init__(self, config: ContextConfig) -> None:
        self.config = config

    @property
    def data_groups(self) -> list[dist.ProcessGroup]:
        """Returns the groups of ranks with different rows; ranks on other axes hold the same numbers."""
        raise NotImplementedError

    def setup_dataloader(self, batch: Batch) -> list[tuple[Row, ...]]:
        return batch.micro_batches(
            dp_rank=self.data_rank, dp_size=self.data_size, accumulation=self.config.accumulation
        )

    def all_reduce(self, value: float) -> float:
        return all_reduce_number(value, groups=self.data_groups, device=self.config.device)

    def all_reduce_tensor(self, tensor: Tensor) -> Tensor:
        return all_reduce_over(tensor, groups=self.data_groups)

    def all_gather(self, value: Any) -> list[Any]:
        return all_gather_value(value)

    def library_generators(self) -> dict[str, Tensor]:
        return {}

    def set_library_generators(self, states: Mapping[str, Tensor]) -> None:
        assert not states, f"{type(self).__name__} has no generators {', '.join(states)}"
