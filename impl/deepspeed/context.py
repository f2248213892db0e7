"""Builds the mesh, context parallelism and DeepSpeed's process state, for all models of a cell.

Mesh axes, outermost first: ``dp``, ``sp`` (context parallel), ``ulysses``, ``tp``. ZeRO shards over all but ``tp``.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from conformance.spec.observables import Head
from impl.context_parallel.ring_attention import RingAttention, RingConfig, register, ring_kind
from impl.deepspeed import global_state
from impl.deepspeed.model import DeepspeedModel
from impl.engine.adapter import ReferenceContext


class DeepspeedContext(ReferenceContext):
    """Implements impl.interface.trainable.Context, which has the contract of each method."""

    ring: RingAttention | None = None

    @property
    def sequence_multiple(self) -> int:
        return 1

    def setup_distributed(self) -> None:
        layout = self.config.layout
        global_state.enter(self.config.device, layout)
        sizes = (layout.dp, layout.sp, layout.ulysses, layout.tp)
        kind = torch.device(self.config.device).type
        self.mesh = init_device_mesh(kind, sizes, mesh_dim_names=("dp", "sp", "ulysses", "tp"))
        self.data_rank, self.data_size = self.mesh.get_local_rank("dp"), layout.dp
        if layout.sp * layout.ulysses > 1:
            self.setup_ring_attn()

    def setup_ring_attn(self) -> None:
        register()
        layout = self.config.layout
        config = RingConfig(
            kind=ring_kind(layout),
            packed=self.config.packed or layout.ulysses > 1,  # Ulysses needs one row: documents are concatenated
            shipped="shipped" in layout.options,
            head_stride=layout.stride,
            multiple=layout.ulysses,
        )
        slices = self.mesh.get_group("ulysses") if layout.ulysses > 1 else None
        self.ring = RingAttention(self.mesh.get_group("sp"), config, slices=slices)

    @property
    def data_groups(self) -> list[dist.ProcessGroup]:
        return [self.mesh.get_group("dp")]  # ranks that share rows have the same number

    def new_trainable(self, head: Head) -> DeepspeedModel:
        return DeepspeedModel(self, head)

    def teardown(self) -> None:
        self.ring = None
        global_state.leave()
