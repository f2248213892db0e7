"""Lists special needs of model families when matrices are sharded or attention is replaced; one row per family.

The table needs no torch. Families without a row have the defaults. megatron-core's layers have a table of their own
(impl/megatron/model_config.py).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from conformance.core.io import read_json

SINKS = "attention sinks"
_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA_NORMS = (*_LLAMA_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True, kw_only=True)
class FamilyQuirks:
    """Describes the special needs of the Hugging Face code of one model type; module names are relative to a layer.

    stream_norms: the norms on the residual stream. A family with this entry has an explicit tensor-parallel plan
        (impl/fsdp2/model_parallel.py).
    head_dimension: the dimension that counts the heads in the input of q_norm and k_norm; None without such norms.
    whole_outputs: projections whose outputs must be whole, because the code splits or normalises all of them together.
    recut_inputs: projections whose inputs tensor parallelism therefore has to shard again.
    latent_attention: whether the head size of values differs from that of queries and keys, so no plan shards them.
    soft_cap: the default of ``attn_logit_softcapping``; None for scores without a soft cap.
    attention_sinks: whether attention has sinks.
    router: the scores of the routers of a mixture of experts; None without known routers.
    router_normalises: whether a router divides the weights of chosen experts by their sum, if its module does not say.
    biased_experts: whether experts have biases, and matrices stacked as (experts, inputs, outputs).
    autotp_by_name: whether DeepSpeed's AutoTP knows the modules by their names, so the class needs no plan.
    """

    stream_norms: tuple[str, ...] = ()
    head_dimension: int | None = None
    whole_outputs: tuple[str, ...] = ()
    recut_inputs: tuple[str, ...] = ()
    latent_attention: bool = False
    soft_cap: float | None = None
    attention_sinks: bool = False
    router: Literal["softmax", "sigmoid"] | None = None
    router_normalises: bool = True
    biased_experts: bool = False
    autotp_by_name: bool = False

    @property
    def has_plan(self) -> bool:
        """Returns whether the family has an explicit tensor-parallel plan."""
        return bool(self.stream_norms)

    @property
    def has_routers(self) -> bool:
        return self.router is not None

    @property
    def tp_cuts_experts(self) -> bool:
        """Returns whether tensor parallelism shards stacked experts. An explicit plan leaves experts whole."""
        return self.has_routers and not self.has_plan


QUIRKS = {  # by ``model_type`` of the configuration
    "llama": FamilyQuirks(stream_norms=_LLAMA_NORMS),
    "PanguEmbedded": FamilyQuirks(stream_norms=_LLAMA_NORMS, autotp_by_name=True),
    "mistral": FamilyQuirks(stream_norms=_LLAMA_NORMS),
    "qwen2": FamilyQuirks(stream_norms=_LLAMA_NORMS),
    "qwen3": FamilyQuirks(stream_norms=_LLAMA_NORMS, head_dimension=2),  # (rows, length, heads, head_dim)
    "phi3": FamilyQuirks(  # q, k and v are one projection, and so are gate and up
        stream_norms=_LLAMA_NORMS,
        whole_outputs=("self_attn.qkv_proj", "mlp.gate_up_proj"),
        recut_inputs=("self_attn.o_proj", "mlp.down_proj"),
    ),
    "olmo2": FamilyQuirks(  # q and k are normalised over all heads together
        stream_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        whole_outputs=_QKV,
        recut_inputs=("self_attn.o_proj",),
    ),
    "seed_oss": FamilyQuirks(stream_norms=_LLAMA_NORMS),
    "mixtral": FamilyQuirks(router="softmax"),
    "qwen2_moe": FamilyQuirks(router="softmax"),
    "qwen3_moe": FamilyQuirks(router="softmax"),
    "qwen3_next": FamilyQuirks(router="softmax"),
    "deepseek_v2": FamilyQuirks(latent_attention=True, router="softmax", router_normalises=False),
    "deepseek_v3": FamilyQuirks(latent_attention=True, router="sigmoid"),
    "gpt_oss": FamilyQuirks(stream_norms=_LLAMA_NORMS, attention_sinks=True, router="softmax", biased_experts=True),
    "gemma2": FamilyQuirks(stream_norms=_GEMMA_NORMS, soft_cap=50.0),
    "gemma3_text": FamilyQuirks(stream_norms=_GEMMA_NORMS, head_dimension=1),  # (rows, heads, length, head_dim)
}
PLANNED = tuple(kind for kind, quirks in QUIRKS.items() if quirks.has_plan)
ROUTED = tuple(kind for kind, quirks in QUIRKS.items() if quirks.has_routers)


def quirks_of(model_type: object) -> FamilyQuirks:
    """Returns the row of a model type, which a configuration may lack; a family without a row has the defaults."""
    return QUIRKS.get(str(model_type), FamilyQuirks())


def quirks_in(folder: Path) -> FamilyQuirks:
    """Returns the row of the model in a Hugging Face folder."""
    return quirks_of(_config(folder).get("model_type"))


def needs_loop(folder: Path) -> bool:
    """Returns whether transformers' grouped kernels for experts do not suit a model, so that a loop runs the experts.

    The kernels sum gradients of biases token by token (docs/findings/experts-bias-gradient.md). In half precision they
    need rows of a multiple of 16 bytes, also under tp2.
    """
    config = _config(folder)
    size = config.get("moe_intermediate_size") or config.get("intermediate_size") or 0
    return quirks_of(config.get("model_type")).biased_experts or bool(size % 16 or config.get("hidden_size", 0) % 8)


def unsupported_by_kernels(folder: Path) -> str:
    """Names the feature of a model's attention that torch's and flash-attn's kernels lack; empty for most models.

    The default ring adds sinks itself (impl/context_parallel/ring_attention.py).
    """
    config = _config(folder)
    quirks = quirks_of(config.get("model_type"))
    if quirks.soft_cap and config.get("attn_logit_softcapping", quirks.soft_cap):
        return "soft-capping of scores"
    return SINKS if quirks.attention_sinks else ""


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = read_json(folder / "config.json")
    return config
