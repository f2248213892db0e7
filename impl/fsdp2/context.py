"""Builds the device mesh and context parallelism of a layout for FSDP2, and selects the data of this rank.

Mesh axes, outermost first: ``rep`` (replicas), ``ep`` (experts), ``dp``, ``sp`` (context parallel), ``tp``. Parameters,
gradients and optimizer state are sharded over ep x dp x sp, which is flattened into the axis ``shard``; those of
experts over dp x sp, ``expert_shard``.
"""

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from conformance.spec.observables import Head
from impl.context_parallel.ring_attention import RingAttention, RingConfig, register, ring_kind
from impl.engine.adapter import ReferenceContext
from impl.fsdp2.model import Fsdp2Model

MESH_DIM_NAMES = ("rep", "ep", "dp", "sp", "tp")


class Fsdp2Context(ReferenceContext):
    """Implements impl.interface.trainable.Context, which has the contract of each method."""

    ring: RingAttention | None = None

    @property
    def sequence_multiple(self) -> int:
        # With context parallelism, rows are padded when they are sharded.
        return 1 if self.config.layout.sp > 1 else self._shape_multiple

    @property
    def _shape_multiple(self) -> int:
        # DTensor plans each op once per shape; few shapes keep that cheap. seqpar shards rows into tp equal slices.
        return math.lcm(32, self.config.layout.tp)

    def setup_distributed(self) -> None:
        layout = self.config.layout
        sizes = (layout.rep, layout.ep, layout.dp // layout.rep, layout.sp, layout.tp)
        self.mesh = init_device_mesh(torch.device(self.config.device).type, sizes, mesh_dim_names=MESH_DIM_NAMES)
        self.mesh["ep", "dp", "sp"]._flatten("shard")
        if layout.ep > 1:
            self.mesh["dp", "sp"]._flatten("expert_shard")
        self.data_rank, self.data_size = dist.get_rank() // (layout.sp * layout.tp), layout.data
        if layout.sp > 1:
            self.setup_ring_attn()

    def setup_ring_attn(self) -> None:
        register()
        layout = self.config.layout
        config = RingConfig(
            kind=ring_kind(layout),
            packed=self.config.packed,
            shipped="shipped" in layout.options,
            head_stride=layout.stride,
            multiple=self._shape_multiple if layout.tp > 1 else 1,
        )
        self.ring = RingAttention(self.mesh.get_group("sp"), config)

    @property
    def data_groups(self) -> list[dist.ProcessGroup]:
        return [self.mesh.get_group(axis) for axis in ("rep", "ep", "dp")]

    def new_trainable(self, head: Head) -> Fsdp2Model:
        return Fsdp2Model(self, head)

    def teardown(self) -> None:
        # The mesh's process groups stay open: DTensor's caches refer to them, and reuse them for an equal mesh later.
        for name in ("mesh", "ring"):
            self.__dict__.pop(name, None)
