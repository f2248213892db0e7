"""Computes attention and rotary positions of packed documents with context parallelism, in megatron-core's layers.

megatron-core's own DotProductAttention supports neither packed documents nor context parallelism; both need
TransformerEngine. Here impl.context_parallel computes attention, also for a single context-parallel rank. megatron-core
passes the description of the micro-batch to every layer as ``packed_seq_params``.

DeepSeek's latent attention uses megatron-core's own module. The library's local layer spec shards the projections to
latent vectors by columns, and then loses a part of the gradient of the key that all heads share
(docs/findings/megatron-shared-key.md). Here every tensor-parallel rank has whole projections, as with
TransformerEngine.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_find_correction_range,
    _yarn_linear_ramp_mask,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import ModuleSpec, TransformerConfig, multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from impl.context_parallel.ring_attention import Ring, RingAttention
from impl.interface.micro_batches import MicroBatch, further_ahead
from impl.interface.trainable import ContextConfig
from impl.megatron.model_config import Latent, ModelShape
from impl.megatron.moe_config import Mixture
from impl.megatron.router import Routed, StepLoss, routed


@dataclass
class Documents(PackedSeqParams):  # type: ignore[misc]
    """Describes the documents of a micro-batch on this rank.

    positions: int64 (rows, length), counted in the whole document, below ``bound``. ring: placement on context-parallel
    ranks. routed: inputs of routers, None without experts. further: the tokens that each module for multi-token
    prediction reads. qkv_format: a batch of rows, because megatron-core's packed
    format would undo the placement.
    """

    qkv_format: str = "sbhd"
    positions: Tensor | None = None
    bound: int = 0
    ring: Ring | None = None
    routed: Routed | None = None
    further: Sequence[Tensor] = ()


class RingCoreAttention(torch.nn.Module):
    """Computes causal attention within each document as a layer's ``core_attention``, in a window if it has one.

    softmax_offset: the sinks of this rank's heads, None without; the name is megatron-core's. It is marked as sharded,
    because the gradient norm would count one rank's sinks only (docs/findings/megatron-unmarked-sinks.md).
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
            raise ValueError("attention has no dropout; set attention_dropout to 0.0 in the model's config.json")
        q, k, v = (x.transpose(0, 1).contiguous() for x in (query, key, value))
        out = ring(q, k, v, scale=self.scale, window=self.window, sinks=self.softmax_offset)
        return out.transpose(0, 1).flatten(2)  # (length, rows, heads * V)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Declares for the library's checkpoints that the sinks are sharded over tensor-parallel ranks."""
        assert metadata is not None
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
        return sharded


class DocumentRotary(RotaryEmbedding):  # type: ignore[misc]
    """Computes rotary angles from positions in documents; megatron-core's own class uses the index in the sequence."""

    inv_freq: Tensor

    def scale(self, llama3: Mapping[str, float]) -> None:
        """Scales the frequencies as Llama 3 does, by these numbers; megatron-core's constructor has fixed numbers."""
        self.inv_freq = self._apply_scaling(self.inv_freq, **llama3)

    def stretch(self, yarn: Mapping[str, float], *, base: float) -> None:
        """Stretches positions by YaRN with these numbers, by megatron-core's own functions.

        Its YaRN class supports neither positions in documents nor a part of each head.
        """
        dims = 2 * len(self.inv_freq)
        turns = (yarn["beta_fast"], yarn["beta_slow"])
        ends = _yarn_find_correction_range(
            *turns, dims, base, int(yarn["original_max_position_embeddings"]), bool(yarn["truncate"])
        )
        slow = _yarn_linear_ramp_mask(*ends, len(self.inv_freq), self.inv_freq.device)
        self.inv_freq = self.inv_freq / yarn["factor"] * slow + self.inv_freq * (1 - slow)

    def get_rotary_seq_len(self, context: Any, block: Any, hidden: Any, config: Any, documents: Documents) -> Documents:
        """Returns the micro-batch's documents; megatron-core calls ``forward`` with the result of this method."""
        return documents

    def forward(self, documents: Documents, **_: Any) -> Tensor:
        """Returns the rotary angles of each token's position, (length, rows, 1, turned numbers of a head)."""
        assert documents.positions is not None
        table: Tensor = self.get_emb(documents.bound)  # (positions, 1, 1, turned)
        return table[documents.positions.T][:, :, 0]


# The module assumes TransformerEngine even where it is missing (docs/findings/megatron-latent-needs-te.md). From 0.17
# on it knows the linear layer that needs none only beside TransformerEngine.
vars(multi_latent_attention).update(HAVE_TE=HAVE_TE, Linear=Linear)


class DocumentAngles(torch.nn.Module):
    """Looks up the library's rotary angles by positions in documents instead of indices in the sequence."""

    def __init__(self, angles: Any, latent: Latent) -> None:
        super().__init__()
        self.angles, self._yarn = angles, latent.yarn
        self.documents: Documents | None = None
        if latent.yarn:
            angles.correction_range_round_to_int = latent.yarn.truncate

    def get_rotary_seq_len(self, *_: Any) -> Documents:
        """Returns the micro-batch's documents; the library calls ``forward`` with the result of this method."""
        assert self.documents is not None
        return self.documents

    def forward(self, documents: Documents, **_: Any) -> Any:
        """Returns the angles of each token's position, (length, rows, 1, turned), and with YaRN the scale of sines."""
        assert documents.positions is not None
        table = self.angles.get_emb(documents.bound)
        if self._yarn is None:
            return table[documents.positions.T][:, :, 0]
        return table[0][documents.positions.T][:, :, 0], self._yarn.size


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Adds documents and biases to the library's ``self_attention`` module. shape: of a model with latent attention."""

    rotary_pos_emb: Any

    def __init__(self, config: TransformerConfig, *args: Any, shape: ModelShape, **options: Any) -> None:
        super().__init__(config, *args, **options)
        latent = shape.latent
        assert latent is not None
        self.rotary_pos_emb = DocumentAngles(self.rotary_pos_emb, latent)
        if shape.qkv_bias:  # the library has none here
            for linear in (self.linear_kv_down_proj, *([self.linear_q_down_proj] if latent.q_rank else [])):
                linear.bias = torch.nn.Parameter(linear.weight.new_empty(linear.out_features))
                linear.bias.sequence_parallel = config.sequence_parallel
        if not latent.neighbours:  # the library turns neighbours wherever attention is latent
            self.config = copy(config)
            self.config.multi_latent_attention = False

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: None = None,
        position_ids: None = None,
        packed_seq_params: Documents | None = None,
        **options: Any,
    ) -> Any:
        """Calls the library's method without ``packed_seq_params``; its packed format would undo the placement."""
        self.rotary_pos_emb.documents = packed_seq_params
        try:
            return super().get_query_key_value_tensors(hidden_states, **options)
        finally:
            self.rotary_pos_emb.documents = None  # its ring would keep process groups open


def latent_config(shape: ModelShape) -> dict[str, Any]:
    """Returns the fields of megatron-core's configuration for latent attention."""
    latent = shape.latent
    assert latent is not None
    sizes = {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.plain,
        "qk_pos_emb_head_dim": latent.turned,
        "v_head_dim": latent.value,
        "rotary_base": shape.rope_theta,
    }
    if (yarn := latent.yarn) is None:
        return {**sizes, "rope_type": "rope", "rotary_scaling_factor": 1.0}
    return {
        **sizes,
        "rope_type": "yarn",
        "rotary_scaling_factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_positions,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "mscale_all_dim": yarn.all_dims,  # the scale of scores; DocumentAngles returns the scale of sines
    }


def place_latent(spec: ModuleSpec, shape: ModelShape, norm: type) -> None:
    """Puts these modules into the spec of an attention; ``norm``: the class of norms of latent vectors."""
    spec.module = LatentAttention
    spec.params = {**spec.params, "shape": shape}
    parts = spec.submodules
    parts.q_layernorm = parts.kv_layernorm = norm
    parts.linear_q_down_proj = parts.linear_kv_down_proj = Linear


@dataclass(frozen=True, kw_only=True)
class ShardedMicroBatch:
    """Holds one rank's part of a micro-batch.

    index: number in the step. whole: the micro-batch with all tokens. own: the tokens of this context-parallel rank.
    documents: the placement of these tokens. further: these tokens as each module for multi-token prediction reads
    them.
    """

    index: int
    whole: MicroBatch
    own: MicroBatch
    documents: Documents
    further: Sequence[MicroBatch] = ()


def sharded(
    inputs: Sequence[MicroBatch],
    ring: RingAttention,
    config: ContextConfig,
    *,
    mixture: Mixture | None = None,
    loss: StepLoss | None = None,
    modules: int = 0,
) -> list[ShardedMicroBatch]:
    """Returns this rank's part of each micro-batch.

    ``modules``: number of modules for multi-token prediction.
    With a pipeline all parts are padded to one length, because stages receive tensors of one size unless they send
    sizes (the option ``varlen``).
    """
    parts = [ring.shard(whole) for whole in inputs]
    if config.layout.pp > 1 and "varlen" not in config.layout.options:
        longest = max(own.tokens.shape[1] for own, _ in parts)
        parts = [ring.shard(whole, multiple=longest) for whole in inputs]
    sequence_parallel = "seqpar" in config.layout.options
    further = [[ring.shard(further_ahead(whole, 1 + k))[0] for k in range(modules)] for whole in inputs]
    return [
        ShardedMicroBatch(
            index=index,
            whole=whole,
            own=own,
            further=further[index],
            documents=Documents(
                further=[one.tokens for one in further[index]],
                positions=own.positions,
                bound=max(whole.tokens.shape[1], ring.size * own.tokens.shape[1]),  # with the padding to one length
                ring=placement,
                routed=None
                if mixture is None
                else routed(own, mixture, sequence_parallel=sequence_parallel, loss=loss),
            ),
        )
        for index, (whole, (own, placement)) in enumerate(zip(inputs, parts, strict=True))
    ]
