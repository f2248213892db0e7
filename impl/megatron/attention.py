"""Modules for megatron-core's layers: attention and rotary positions for packed documents, over a ring.

megatron-core's own DotProductAttention supports neither packed documents nor context parallelism; both need
TransformerEngine. Here impl.ring computes attention, on a ring of one rank if the layout has none. megatron-core hands
the description of the micro-batch to every layer as ``packed_seq_params``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_find_correction_range,
    _yarn_linear_ramp_mask,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from impl.megatron.routers import Routed
from impl.ring.attention import Ring


@dataclass
class Documents(PackedSeqParams):  # type: ignore[misc]
    """The documents of a micro-batch on this rank.

    positions: int64 (rows, length), each counted in its whole document, and below ``bound``. ring: the placement on the
    ring. routed: what the routers of a mixture of experts are given, None without any. qkv_format: tells megatron-core
    that it is a batch of rows, because its packed format would undo the ring's placement.
    """

    qkv_format: str = "sbhd"
    positions: Tensor | None = None
    bound: int = 0
    ring: Ring | None = None
    routed: Routed | None = None


class RingCoreAttention(torch.nn.Module):
    """The ``core_attention`` module of a layer: causal attention within each document, in a window if it has one.

    softmax_offset: the sinks of this rank's heads, called as in megatron-core's own module, whose gradient norm leaves
    out those of all ranks but one (docs/findings/megatron-unmarked-sinks.md); None without them.
    """

    softmax_offset: torch.nn.Parameter | None

    def __init__(
        self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__()
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size if windowed else (-1, -1)
        self.scale = softmax_scale or config.kv_channels**-0.5
        self.attention_dropout = float(config.attention_dropout)
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            device = torch.cuda.current_device()
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def forward(
        self,
        query: Tensor,  # (length, rows, heads, E)
        key: Tensor,  # (length, rows, kv_heads, E)
        value: Tensor,  # (length, rows, kv_heads, V)
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
        out = ring(q, k, v, scale=self.scale, window=self.window, sinks=self.softmax_offset)
        return out.transpose(0, 1).flatten(2)  # (length, rows, heads * V)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What the library's checkpoints are told of the sinks: that they are cut over tensor-parallel ranks."""
        assert metadata is not None
        of_ranks: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
        return of_ranks


class DocumentRotary(RotaryEmbedding):  # type: ignore[misc]
    """Rotary embedding by the positions of a micro-batch; megatron-core's own goes by the index in the sequence."""

    inv_freq: Tensor

    def scale(self, llama3: Mapping[str, float]) -> None:
        """Scale the frequencies as Llama 3 does, by these numbers: megatron-core's constructor has fixed ones."""
        self.inv_freq = self._apply_scaling(self.inv_freq, **llama3)

    def stretch(self, yarn: Mapping[str, float], *, base: float) -> None:
        """Stretch positions by YaRN with these numbers, by megatron-core's own functions.

        Its class for that takes no documents' positions and turns whole heads only.
        """
        dims = 2 * len(self.inv_freq)
        turns = (yarn["beta_fast"], yarn["beta_slow"])
        ends = _yarn_find_correction_range(
            *turns, dims, base, int(yarn["original_max_position_embeddings"]), bool(yarn["truncate"])
        )
        slow = _yarn_linear_ramp_mask(*ends, len(self.inv_freq), self.inv_freq.device)
        self.inv_freq = self.inv_freq / yarn["factor"] * slow + self.inv_freq * (1 - slow)

    def get_rotary_seq_len(self, context: Any, block: Any, hidden: Any, config: Any, documents: Documents) -> Documents:
        """The micro-batch's documents; megatron-core calls ``forward`` with the result of this method."""
        return documents

    def forward(self, documents: Documents, **_: Any) -> Tensor:
        """The rotary angles of each token's position, (length, rows, 1, turned numbers of a head)."""
        assert documents.positions is not None
        table: Tensor = self.get_emb(documents.bound)  # (positions, 1, 1, turned)
        return table[documents.positions.T][:, :, 0]
