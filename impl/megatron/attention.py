"""Modules for megatron-core's layers: attention and rotary positions for packed documents, over a ring.

megatron-core's own DotProductAttention supports neither packed documents nor context parallelism; both need
TransformerEngine. Here impl.ring computes attention, on a ring of one rank if the layout has none. megatron-core hands
the description of the micro-batch to every layer as ``packed_seq_params``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from impl.megatron.routers import Routed
from impl.ring.attention import Ring


@dataclass
class Documents(PackedSeqParams):  # type: ignore[misc]
    """The documents of a micro-batch on this rank.

    positions: int64 (rows, length), each counted in its whole document. ring: the placement on the ring. routed: what
    the routers of a mixture of experts are given, None without any. qkv_format: tells megatron-core that it is a batch
    of rows, because its packed format would undo the ring's placement.
    """

    qkv_format: str = "sbhd"
    positions: Tensor | None = None
    ring: Ring | None = None
    routed: Routed | None = None


class RingCoreAttention(torch.nn.Module):
    """The ``core_attention`` module of a layer: causal attention within each document, in a window if it has one."""

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__()
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size if windowed else (-1, -1)
        self.scale = config.kv_channels**-0.5
        self.attention_dropout = float(config.attention_dropout)

    def forward(
        self,
        query: Tensor,  # (length, rows, heads, E)
        key: Tensor,  # (length, rows, kv_heads, E)
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: Documents,
        **_: Any,
    ) -> Tensor:
        ring = packed_seq_params.ring
        assert ring is not None
        if self.training and self.attention_dropout:
            raise ValueError("attention here has no dropout; set attention_dropout to 0.0 in the model's config.json")
        q, k, v = (x.transpose(0, 1).contiguous() for x in (query, key, value))
        out = ring(q, k, v, scale=self.scale, window=self.window)
        return out.transpose(0, 1).flatten(2)  # (length, rows, heads * E)


class DocumentRotary(RotaryEmbedding):  # type: ignore[misc]
    """Rotary embedding by the positions of a micro-batch; megatron-core's own goes by the index in the sequence."""

    inv_freq: Tensor

    def scale(self, llama3: Mapping[str, float]) -> None:
        """Scale the frequencies as Llama 3 does, by these numbers: megatron-core's constructor has fixed ones."""
        self.inv_freq = self._apply_scaling(self.inv_freq, **llama3)

    def get_rotary_seq_len(self, context: Any, block: Any, hidden: Any, config: Any, documents: Documents) -> Tensor:
        """The positions, (rows, length); megatron-core calls ``forward`` with the result of this method."""
        assert documents.positions is not None
        return documents.positions

    def forward(self, positions: Tensor, **_: Any) -> Tensor:
        """The rotary angles, (length, rows, 1, turned numbers of a head), of ``positions`` (rows, length)."""
        table: Tensor = self.get_emb(int(positions.max()) + 1)  # (length, 1, 1, turned)
        return table[positions.T][:, :, 0]
