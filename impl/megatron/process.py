"""What megatron-core keeps in the process beside a model: made for a layout, and unmade after it.

``destroy_model_parallel`` forgets the process groups without destroying them, and each keeps sockets and threads.
"""

import os

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel import random as megatron_random

from conformance.layout import Layout

# megatron-core chooses TransformerEngine's attention by these, and refuses another choice later in the same process.
_ENVIRONMENT = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


class ModelParallel:
    """The process groups of a layout, from ``enter`` to ``leave``; both are collective."""

    def enter(self, layout: Layout) -> None:
        self._groups = set(dist.distributed_c10d._world.pg_map)
        self._environment = {name: os.environ.pop(name, None) for name in _ENVIRONMENT}
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.sp,
        )
        # Nothing here is random, but under sequence parallelism layers switch to a generator that has to exist.
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)

    def leave(self) -> None:
        for group in list(dist.distributed_c10d._world.pg_map):
            if group not in self._groups:
                dist.destroy_process_group(group)
        parallel_state.destroy_model_parallel()
        megatron_random._CUDA_RNG_STATE_TRACKER = None
        megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = False
        for name, value in self._environment.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
