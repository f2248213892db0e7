"""Builds megatron-core's GPTModel from TransformerEngine's layers, for the layout option ``te``.

Import this module only in a process in which impl.megatron.adapter has admitted TransformerEngine. TransformerEngine's
linear layers contain the preceding norms, and all its layers need a GPU. Its attention supports documents laid end to
end (``thd``) in half precision only; in float32, this package's attention is used. It does not support float64, so
there is no exact tier.
"""

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm, TERowParallelLinear
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from impl.megatron.attention import Documents, RingCoreAttention
from impl.megatron.model_config import ModelShape

FINAL_NORM = TENorm


class BiasedTELinear(TERowParallelLinear):  # type: ignore[misc]
    """Gives o_proj a bias; see impl.megatron.gpt_model.BiasedRowParallelLinear."""

    def __init__(self, *sizes: int, bias: bool, **options: Any) -> None:
        super().__init__(*sizes, bias=True, **options)


class TEAttention(TEDotProductAttention):  # type: ignore[misc]
    """Computes causal attention within each document by TransformerEngine, as a layer's ``core_attention``."""

    def forward(
        self,
        query: Tensor,  # (length, 1, heads, E): the documents lie end to end in one row
        key: Tensor,  # (length, 1, kv_heads, E)
        value: Tensor,  # (length, 1, kv_heads, E)
        attention_mask: None,
        *,
        packed_seq_params: Documents,
        **_: Any,
    ) -> Tensor:
        assert packed_seq_params.ring is not None
        starts, longest = packed_seq_params.ring.documents
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        q, k, v = (x.squeeze(1).contiguous() for x in (query, key, value))
        out: Tensor = super().forward(q, k, v, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=packed)
        return out.view(len(query), 1, -1)  # (length, 1, heads * E)


def te_spec(shape: ModelShape, compute: torch.dtype) -> ModuleSpec:
    """Returns megatron-core's layer spec for TransformerEngine, with documents and a bias on o_proj.

    compute: the dtype of activations.
    """
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_norm)
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = RingCoreAttention if compute == torch.float32 else TEAttention
    if shape.output_bias:
        attention.linear_proj = BiasedTELinear
    return spec
