"""Sets up megatron-core in a process: its process-wide state, and the groups of a layout.

The order of ranks, innermost first: tp, cp (the layout's ``sp``), dp, pp. megatron-core's data-parallel ranks are those
of the layout's dp and ep; consecutive ranks of dp x cp hold different experts.
"""

from impl.megatron import releases  # noqa: F401 (it has to be imported before megatron-core)

# isort: split
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel import random as megatron_random
from torch import Tensor

from conformance.core.errors import UsageError
from conformance.spec.layout import Layout
from conformance.spec.observables import Head
from impl.context_parallel.ring_attention import RingAttention, RingConfig, ring_kind
from impl.engine.adapter import ReferenceContext
from impl.interface.trainable import ContextConfig
from impl.megatron.device_placement import placed
from impl.megatron.model import MegatronModel
from impl.megatron.model_config import float8_multiple
from impl.megatron.moe_config import expert_sizes
from impl.megatron.router import forget as forget_routers

# megatron-core selects TransformerEngine's attention by these, and does not allow another choice in the same process.
_ENVIRONMENT = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


class ModelParallel:
    """Holds the process groups and generators of one layout at a time, from the first ``enter`` to the last ``leave``.

    Both methods are collective and must be called inside ``device_placement.placed``.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int | None] = {}
        self._entered = 0

    def enter(self, layout: Layout, *, whole_experts: bool) -> None:
        """Creates the groups and generators, or shares those of an equal layout. Raises UsageError for another one."""
        experts = expert_sizes(layout, whole=whole_experts)
        sizes: dict[str, int | None] = {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
            "context_parallel_size": layout.sp,
            "expert_model_parallel_size": experts.ranks,
            "expert_tensor_parallel_size": experts.cuts,
        }
        if not self._entered:
            self._create(sizes, drops="dropout" in layout.options)
        elif sizes != self._sizes:
            raise UsageError(
                f"megatron-core supports one layout at a time, and this process uses {self._sizes}; "
                f"tear down its contexts before you set up {layout}"
            )
        self._entered += 1

    def leave(self) -> None:
        assert self._entered
        self._entered -= 1
        if not self._entered:
            self._destroy()

    def _create(self, sizes: dict[str, int | None], *, drops: bool) -> None:
        self._sizes = sizes
        self._groups = set(dist.distributed_c10d._world.pg_map)
        self._environment = {name: os.environ.pop(name, None) for name in _ENVIRONMENT}
        self._globals = [(module, _variables(module)) for module in (parallel_state, megatron_random)]
        generator = torch.cuda.get_rng_state()
        parallel_state.initialize_model_parallel(**sizes)
        # Tensor-parallel ranks draw masks of whole activations from equal generators, and of parts from their own.
        group = dist.get_rank() // parallel_state.get_tensor_model_parallel_world_size()
        model_parallel_cuda_manual_seed(1 + 1000 * group, force_reset_rng=True)
        if not drops:
            torch.cuda.set_rng_state(generator)

    def _destroy(self) -> None:
        """Destroys the groups and restores the globals.

        megatron-core's ``destroy_model_parallel`` is not enough: it leaves the groups, with their sockets and threads.
        """
        for group in list(dist.distributed_c10d._world.pg_map):
            if group not in self._groups:
                dist.destroy_process_group(group)
        for module, variables in self._globals:
            vars(module).update(variables)
        forget_routers()
        for name, value in self._environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _variables(module: Any) -> dict[str, Any]:
    """Returns a module's private global variables, without its functions."""
    return {name: v for name, v in vars(module).items() if name.startswith("_") and not callable(v)}


MODEL_PARALLEL = ModelParallel()


# isort: split


class MegatronContext(ReferenceContext):
    """Implements impl.interface.trainable.Context, which documents each method."""

    ring: RingAttention

    def __init__(self, config: ContextConfig) -> None:
        super().__init__(config)
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
            multiple=float8_multiple(layout) * (layout.tp if "seqpar" in layout.options else 1),
        )
        self.ring = RingAttention(parallel_state.get_context_parallel_group(), config)

    @property
    def data_groups(self) -> list[dist.ProcessGroup]:
        return [parallel_state.get_data_parallel_group()]  # ranks on the other axes hold the same numbers

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
        if (module := sys.modules.get("transformer_engine.pytorch.fp8")) is not None:
            module.FP8GlobalStateManager.reset()  # it holds the histories of all models, and their process groups
        del self.ring
