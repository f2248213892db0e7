"""DeepSeek's latent attention by megatron-core's own module, with packed documents, biases, and whole projections.

The library's local layer spec cuts the projections to latent vectors by columns, and then loses a part of the gradient
of the key that all heads share (docs/findings/megatron-shared-key.md). Here every tensor-parallel rank has them whole,
by another linear layer of the library, as with TransformerEngine.
"""

from copy import copy
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import ModuleSpec, TransformerConfig, multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from impl.megatron.attention import Documents
from impl.megatron.latent_shape import Latent
from impl.megatron.shape import ModelShape

# It is sure of TransformerEngine without having any (docs/findings/megatron-latent-needs-te.md).
vars(multi_latent_attention)["HAVE_TE"] = HAVE_TE


class DocumentAngles(torch.nn.Module):
    """The library's rotary angles, by the positions of a micro-batch; its own go by the index in the sequence."""

    def __init__(self, angles: Any, latent: Latent) -> None:
        super().__init__()
        self.angles, self._yarn = angles, latent.yarn
        self.documents: Documents | None = None
        if latent.yarn:
            angles.correction_range_round_to_int = latent.yarn.truncate

    def get_rotary_seq_len(self, *_: Any) -> Documents:
        """The micro-batch's documents; the library calls ``forward`` with the result of this method."""
        assert self.documents is not None
        return self.documents

    def forward(self, documents: Documents, **_: Any) -> Any:
        """The angles of each token's position, (length, rows, 1, turned), and with YaRN the size of sines."""
        assert documents.positions is not None
        table = self.angles.get_emb(documents.bound)
        if self._yarn is None:
            return table[documents.positions.T][:, :, 0]
        return table[0][documents.positions.T][:, :, 0], self._yarn.size


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """The ``self_attention`` module of a layer. shape: of a model with latent attention."""

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
        """As the library's for rows that are not packed, which its own packed format would undo."""
        self.rotary_pos_emb.documents = packed_seq_params
        try:
            return super().get_query_key_value_tensors(hidden_states, **options)
        finally:
            self.rotary_pos_emb.documents = None  # whose ring would keep process groups open


def latent_config(shape: ModelShape) -> dict[str, Any]:
    """What megatron-core's configuration has for latent attention."""
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
        "mscale_all_dim": yarn.all_dims,  # the scale of scores; that of sines is DocumentAngles'
    }


def place_latent(spec: ModuleSpec, shape: ModelShape, norm: type) -> None:
    """Put these modules into the spec of an attention; ``norm``: of latent vectors."""
    spec.module = LatentAttention
    spec.params = {**spec.params, "shape": shape}
    parts = spec.submodules
    parts.q_layernorm = parts.kv_layernorm = norm
    parts.linear_q_down_proj = parts.linear_kv_down_proj = Linear
