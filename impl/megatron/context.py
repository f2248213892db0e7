"""Sets up process groups, generators and context parallelism for all models of a Megatron layout.

The order of ranks, innermost first: tp, cp (the layout's ``sp``), dp, pp. megatron-core's data-parallel ranks are those
of the layout's dp and ep; consecutive ranks of dp x cp hold different experts.
"""

from impl.megatron import global_state  # noqa: F401 (it has to be imported before megatron-core)

# isort: split
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from conformance.spec.batch import Batch, Row
from conformance.spec.roles import Head
from impl.context_parallel.ring_attention import RingAttention, RingConfig, ring_kind
from impl.interface.distributed import all_gather_value, all_reduce_number, all_reduce_over
from impl.interface.protocol import ContextConfig
from impl.megatron.device_placement import placed
from impl.megatron.global_state import MODEL_PARALLEL
from impl.megatron.model import MegatronModel


class MegatronContext:
    """Implements impl.interface.protocol.Context, which documents each method."""

    ring: RingAttention

    def __init__(self, config: ContextConfig) -> None:
        self.config = config
        self.data_size = config.layout.data

    @property
    def sequence_multiple(self) -> int:
        return 1  # RingAttention pads rows when it shards them

    def placed(self) -> AbstractContextManager[None]:
        """Returns the context manager for calls into megatron-core; see impl.megatron.device_placement."""
        return placed(self.config.device, exact=self.config.tier.is_exact)

    def setup_distributed(self) -> None:
        with self.placed():
            MODEL_PARALLEL.enter(self.config.layout, whole_experts=self.config.whole_experts)
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.setup_ring_attn()

    def setup_ring_attn(self) -> None:
        layout = self.config.layout
        config = RingConfig(
            kind=ring_kind(layout),
            packed=self.config.packed or layout.sp == 1,  # a single rank: rows end to end, without padding
            shipped="shipped" in layout.options,
            head_stride=layout.stride,
            multiple=layout.tp if "seqpar" in layout.options else 1,
        )
        self.ring = RingAttention(parallel_state.get_context_parallel_group(), config)

    def setup_dataloader(self, batch: Batch) -> list[tuple[Row, ...]]:
        return batch.micro_batches(
            dp_rank=self.data_rank, dp_size=self.data_size, accumulation=self.config.accumulation
        )

    def all_reduce(self, value: float) -> float:
        return all_reduce_number(value, groups=self._data_groups, device=self.config.device)

    def all_reduce_tensor(self, tensor: Tensor) -> Tensor:
        return all_reduce_over(tensor, groups=self._data_groups)

    @property
    def _data_groups(self) -> list[dist.ProcessGroup]:
        """Returns the groups of ranks with different rows."""
        return [parallel_state.get_data_parallel_group()]  # ranks on the other axes hold the same numbers

    def all_gather(self, value: Any) -> list[Any]:
        return all_gather_value(value)

    def new_trainable(self, head: Head) -> MegatronModel:
        return MegatronModel(self, head)

    def library_generators(self) -> dict[str, Tensor]:
        with self.placed():
            return dict(get_cuda_rng_tracker().get_states())

    def set_library_generators(self, states: Mapping[str, Tensor]) -> None:
        with self.placed():
            get_cuda_rng_tracker().set_states(dict(states))

    def teardown(self) -> None:
        with self.placed():
            MODEL_PARALLEL.leave()
        del self.ring
