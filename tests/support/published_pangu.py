"""Writes a folder with the structure of the published openPangu-Embedded; its code is new, not copied.

Its modeling file imports torch_npu and queries it for the device, imports a name that transformers has removed, reads
the default RoPE from a table without it, calls the mask function with older arguments, and initialises weights itself,
except for RoPE tables. Its tied weights are a list. Its configuration is a class with an older ``__init__``.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from conformance.core.host import FIXTURES
from conformance.models.components import parameter_shapes
from conformance.models.families import read_architecture

CONFIGURATION = """
from transformers.configuration_utils import PretrainedConfig


class PanguEmbeddedConfig(PretrainedConfig):
    model_type = "PanguEmbedded"
    _auto_class = "AutoConfig"

    def __init__(
        self,
        vocab_size=153376,
        hidden_size=4096,
        intermediate_size=12800,
        num_hidden_layers=34,
        num_attention_heads=32,
        num_key_value_heads=8,
        hidden_act="silu",
        max_position_embeddings=32768,
        initializer_range=0.02,
        rms_norm_eps=1e-5,
        use_cache=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=45892,
        tie_word_embeddings=False,
        rope_theta=16000000.0,
        bias=True,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.hidden_act = hidden_act
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.use_cache = use_cache
        self.rope_theta = rope_theta
        self.bias = bias
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )
"""

MODELING = """
import torch
from torch import nn

import torch_npu
from torch_npu.contrib import transfer_to_npu

if "910" in torch.npu.get_device_name():
    NPU_ATTN_INFR = True
else:
    NPU_ATTN_INFR = False

from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import LossKwargs, can_return_tuple, logging

from .configuration_openpangu_dense import PanguEmbeddedConfig

logger = logging.get_logger(__name__)


class PanguEmbeddedRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class PanguEmbeddedRotaryEmbedding(nn.Module):
    def __init__(self, config, device=None):
        super().__init__()
        self.rope_type = "default"
        self.config = config
        self.rope_init_fn = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = self.rope_init_fn(self.config, device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.original_inv_freq = self.inv_freq

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x, position_ids):
        expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1).to(x.device)
        freqs = (expanded @ position_ids[:, None, :].float()).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos() * self.attention_scaling, emb.sin() * self.attention_scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


def rotate_half(x):
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


class PanguEmbeddedMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask[:, :, :, : key.shape[-2]]
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class PanguEmbeddedAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        heads, kv_heads = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, heads, bias=config.bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads, bias=config.bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads, bias=config.bias)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=config.bias)

    def forward(self, hidden_states, position_embeddings, attention_mask, past_key_value=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        attend = eager_attention_forward
        if self.config._attn_implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        if not self.training and NPU_ATTN_INFR:
            output, _ = torch_npu.npu_fused_infer_attention_score(q, k, v)
        else:
            dropout = 0.0 if not self.training else self.attention_dropout
            output, _ = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1).contiguous())


class PanguEmbeddedDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = PanguEmbeddedAttention(config=config, layer_idx=layer_idx)
        self.mlp = PanguEmbeddedMLP(config)
        self.input_layernorm = PanguEmbeddedRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = PanguEmbeddedRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
        y = self.input_layernorm(hidden_states)
        x = hidden_states + self.self_attn(y, position_embeddings, attention_mask, **kwargs)
        return x + self.mlp(self.post_attention_layernorm(x))


class PanguEmbeddedPreTrainedModel(PreTrainedModel):
    config_class = PanguEmbeddedConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["PanguEmbeddedDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_attention_backend = True

    def _init_weights(self, module):
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=std)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=std)
            if module.padding_idx is not None:
                module.weight.data[module.padding_idx].zero_()
        elif isinstance(module, PanguEmbeddedRMSNorm):
            module.weight.data.fill_(1.0)


class PanguEmbeddedModel(PanguEmbeddedPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([PanguEmbeddedDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = PanguEmbeddedRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = PanguEmbeddedRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        cache_position=None,
        **flash_attn_kwargs: Unpack[FlashAttentionKwargs],
    ):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        if cache_position is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            cache_position = torch.arange(seen, seen + inputs_embeds.shape[1], device=inputs_embeds.device)
        if position_ids is None:
            position_ids = cache_position.unsqueeze(0)
        causal_mask = create_causal_mask(
            config=self.config,
            input_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache_position=cache_position,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        x = inputs_embeds
        position_embeddings = self.rotary_emb(x, position_ids)
        for layer in self.layers[: self.config.num_hidden_layers]:
            x = layer(x, attention_mask=causal_mask, position_embeddings=position_embeddings, **flash_attn_kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past_key_values)


class KwargsForCausalLM(FlashAttentionKwargs, LossKwargs): ...


class PanguEmbeddedForCausalLM(PanguEmbeddedPreTrainedModel, GenerationMixin):
    _tied_weights_keys = ["lm_head.weight"]
    _tp_plan = {"lm_head": "colwise_rep"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config):
        super().__init__(config)
        self.model = PanguEmbeddedModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs: Unpack[KwargsForCausalLM]
    ):
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        return CausalLMOutputWithPast(loss=None, logits=self.lm_head(outputs.last_hidden_state))
"""


# Sizes in the proportions of the published models: heads per key-value head, and width of the MLP.
SHAPES: dict[str, dict[str, int]] = {
    "7b": {"hidden_size": 64, "intermediate_size": 200, "num_attention_heads": 8, "num_key_value_heads": 2},
    "1b": {"hidden_size": 96, "intermediate_size": 384, "num_attention_heads": 12, "num_key_value_heads": 6},
}


def published_folder(to: Path, *, shape: str = "", tied: bool = False) -> Path:
    """The fixture with these two Python files, and with random weights if it has another ``shape``."""
    shutil.copytree(FIXTURES / "models" / "pangu", to)
    (to / "configuration_openpangu_dense.py").write_text(CONFIGURATION)
    (to / "modeling_openpangu_dense.py").write_text(MODELING)
    if shape:
        config = json.loads((to / "config.json").read_text())
        del config["head_dim"]
        (to / "config.json").write_text(json.dumps({**config, **SHAPES[shape], "tie_word_embeddings": tied}))
        generator = torch.Generator().manual_seed(0)
        weights = {
            name: 0.12 * torch.randn(size, generator=generator) + name.endswith("norm.weight")
            for name, size in parameter_shapes(read_architecture(to)).items()
        }
        save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to
