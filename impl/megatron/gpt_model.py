"""Builds openPangu, Llama, Mistral, Phi-3, Qwen2, Qwen3, gpt-oss, DeepSeek and mixtures on megatron-core's GPTModel.

It adds modules that megatron-core's local layer spec lacks: a bias on o_proj without biases in the MLP
(``add_bias_linear`` couples the two), an RMSNorm that supports sequence parallelism without TransformerEngine,
attention and positions for packed documents with context parallelism, and a head with one value per token.

`parity bisect` traces its modules under Hugging Face's names. Activations are (length, rows, hidden). Projections to
q, k and v, and to gate and up, are fused and have no name in Hugging Face.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from conformance.backends.protocol import Cut, Traced, TracedModule
from conformance.spec.layout import DROPOUT_RATE, Layout
from conformance.spec.precision import BF16, F16, Precision
from impl.interface.micro_batches import MicroBatch, token_numbers
from impl.megatron.attention import DocumentRotary, Documents, RingCoreAttention, latent_config, place_latent
from impl.megatron.config import float8_settings
from impl.megatron.model_config import EPS, ModelShape, Stages
from impl.megatron.moe_config import Mixture, expert_sizes
from impl.megatron.releases import submodules
from impl.megatron.router import StepTopKRouter, number_routers


class BiasedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """Gives o_proj a bias.

    megatron-core has one flag, add_bias_linear, for o_proj and the MLP. It must stay False for the MLP.
    """

    def __init__(self, *sizes: int, bias: bool, **options: Any) -> None:
        super().__init__(*sizes, bias=True, **options)


class BiasedExpertLinear(RowParallelLinear):  # type: ignore[misc]
    """Corrects the second matrix of an expert with biases, which is whole on its rank.

    megatron-core marks the bias as shared by all tensor-parallel ranks, but the ranks may have different experts. Its
    MLP adds the bias in place; autograd raises an error for that where ranks have the same experts.
    """

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.bias.sequence_parallel = False
        self.bias.tensor_model_parallel = True

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        output, bias = super().forward(tokens)
        return output.clone(), bias


class RMSNorm(torch.nn.RMSNorm):
    """Marks torch's RMSNorm for sequence parallelism, which megatron-core's own wrapper of the norm does not support.

    megatron-core sums the gradients of marked weights over tensor-parallel ranks, each of which processes a slice of
    the sequence.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        device = torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LatentNorm(RMSNorm):
    """Normalises the latent vectors of DeepSeek's attention, which have a separate epsilon."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: Any) -> None:
        super().__init__(config, hidden_size, EPS)


class ValueHead(torch.nn.Linear):
    """Replaces GPTModel's output layer by a head with one value per token of the whole sequence, (length, rows, 1).

    Every tensor-parallel rank has the whole weight.
    """

    def __init__(self, config: TransformerConfig) -> None:
        device = torch.cuda.current_device()
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype, device=device)
        self.sequence_parallel = config.sequence_parallel
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, **_: Any) -> tuple[Tensor, None]:  # type: ignore[override]
        values = super().forward(hidden)
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class MultiTokenModule(MultiTokenPredictionLayer):  # type: ignore[misc]
    """Reads the tokens further ahead from the description of the micro-batch.

    The library's own ``roll_tensor`` knows one row of documents, and one placement on context-parallel ranks.
    """

    def _get_embeddings(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Any,
        hidden_states: Tensor,
        packed_seq_params: Documents | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert packed_seq_params is not None
        tokens = packed_seq_params.further[self.layer_number - 1]
        return input_ids, position_ids, embedding(input_ids=tokens, position_ids=position_ids), hidden_states

    def _checkpointed_forward(self, forward_func: Any, **inputs: Any) -> Tensor:
        """Recomputes from the two activations; the library would save all arguments, of which some are no tensors
        (docs/findings/megatron-mtp-recompute.md)."""
        activations = {name: inputs.pop(name) for name in ("hidden_states", "decoder_input")}

        def forward(hidden_states: Tensor, decoder_input: Tensor) -> Tensor:
            output: Tensor = forward_func(hidden_states=hidden_states, decoder_input=decoder_input, **inputs)
            return output

        output: Tensor = super()._checkpointed_forward(forward, **activations)
        return output


def transformer_config(
    shape: ModelShape, layout: Layout, tier: Precision, stages: Stages, bias_rate: float = 0.0
) -> TransformerConfig:
    """Returns megatron-core's configuration of the model: its sizes, and every switch that influences its numbers."""
    compute = tier.compute.dtype
    windows = {window for window in shape.windows if window is not None}
    assert len(windows) <= 1, "megatron-core supports one window size per model"
    window = next(iter(windows), None)
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    clamped = shape.mixture is not None and bool(shape.mixture.clamped)
    te = "te" in layout.options
    make = MLATransformerConfig if shape.latent else TransformerConfig
    config = make(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        layernorm_epsilon=shape.eps,
        normalization="RMSNorm",
        qk_layernorm=shape.qk_norm,
        window_size=None if window is None else (window - 1, 0),
        window_attn_skip_freq=[int(window is not None) for window in shape.windows],
        add_bias_linear=clamped,  # also sets biases of experts and routers
        add_qkv_bias=shape.qkv_bias,
        softmax_type="learnable" if shape.sinks else "vanilla",
        gated_linear_unit=True,
        activation_func=_quick_gelu if clamped else torch.nn.functional.silu,
        activation_func_clamp_value=7.0 if clamped else None,
        glu_linear_offset=1.0 if clamped else 0.0,
        hidden_dropout=DROPOUT_RATE if "dropout" in layout.options else 0.0,
        attention_dropout=shape.attention_dropout,
        init_method=_no_initialisation,  # weights come from a file
        output_layer_init_method=_no_initialisation,
        params_dtype=compute,
        pipeline_dtype=compute,
        bf16=tier.compute == BF16,
        fp16=tier.compute == F16,
        transformer_impl="transformer_engine" if te else "local",
        attention_backend=AttnBackend.auto if te else AttnBackend.local,
        attention_softmax_in_fp32=not tier.is_exact,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel="seqpar" in layout.options,
        context_parallel_size=layout.sp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        pipeline_model_parallel_layout=stages.layout if layout.pp > 1 else None,
        # Other values give silently wrong results: docs/findings/megatron-batched-p2p.md, megatron-freed-sends.md.
        batch_p2p_comm=False,
        overlap_p2p_comm=layout.vpp > 1,
        deallocate_pipeline_outputs=False,
        variable_seq_lengths="varlen" in layout.options,
        moe_token_dispatcher_type="alltoall",  # the library's default has no variable lengths, without experts too
        calculate_per_token_loss="pertoken" in layout.options,
        # Fused or compiled kernels need Apex or minutes to compile, and change the numbers that are compared.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        **(recompute if "ckpt" in layout.options else {}),
        **float8_settings(layout),
        **({} if shape.mixture is None else _mixture(shape.mixture, layout, tier, bias_rate)),
        **(latent_config(shape) if shape.latent else {}),
    )
    if shape.yarn:
        config.yarn_rotary_scaling_factor = shape.yarn["factor"]  # attention computes the scale of cos and sin from it
    return config


def _mixture(mixture: Mixture, layout: Layout, tier: Precision, bias_rate: float) -> dict[str, Any]:
    """Returns the settings of a mixture of experts.

    No token is dropped. Tensor parallelism shards experts like any MLP, unless they have biases. The library's
    load-balancing loss is off without the option ``ownaux`` or ``globalaux``; impl.megatron.router adds the loss of the
    whole step.
    """
    own = "aux_loss" if "ownaux" in layout.options else "global_aux_loss" if "globalaux" in layout.options else ""
    sizes = expert_sizes(layout, whole=bool(mixture.clamped))
    return {
        "num_moe_experts": mixture.experts,
        "moe_ffn_hidden_size": mixture.size,
        "moe_router_topk": mixture.chosen,
        "moe_router_pre_softmax": not mixture.normalised,  # False: a softmax over the chosen experts
        "moe_router_dtype": None if tier.is_exact else "fp32",
        "moe_enable_routing_replay": True,
        "moe_router_load_balancing_type": own or "none",
        "moe_aux_loss_coeff": mixture.loss_factor if own else 0.0,
        "moe_shared_expert_intermediate_size": mixture.shared,
        "moe_shared_expert_gate": mixture.shared is not None and mixture.shared_gate,
        "moe_router_score_function": "sigmoid" if mixture.sigmoid else "softmax",
        "moe_router_enable_expert_bias": mixture.sigmoid,
        "moe_router_bias_update_rate": bias_rate,
        "moe_router_topk_scaling_factor": mixture.factor,
        "moe_router_num_groups": mixture.groups.many if mixture.groups else None,
        "moe_router_group_topk": mixture.groups.chosen if mixture.groups else None,
        "moe_grouped_gemm": False,  # its kernels need TransformerEngine or a package for bfloat16 on CUDA
        "expert_model_parallel_size": sizes.ranks,
        "expert_tensor_parallel_size": sizes.cuts,
    }


def _quick_gelu(x: Tensor) -> Tensor:
    """Computes gpt-oss's GELU without compiling, unlike megatron-core's own function."""
    return x * torch.sigmoid(1.702 * x)


def _no_initialisation(weight: Tensor) -> None:
    pass


def build_chunk(config: TransformerConfig, shape: ModelShape, stages: Stages, chunk: int) -> GPTModel:
    """Builds this rank's chunk number ``chunk`` (see impl.megatron.model_config) with uninitialised weights."""
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    index = chunk * stages.pp + pp_rank
    last = index == len(stages.chunks) - 1
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layers(config, shape, stages.chunks[index]),
        vocab_size=shape.padded_vocab(config.tensor_model_parallel_size),
        max_sequence_length=shape.max_positions,
        pre_process=index == 0,
        post_process=last,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        vp_stage=chunk if stages.vpp > 1 else None,
        # With ``mtp_num_layers`` in its configuration, the library would also compute the modules' loss.
        mtp_block_spec=_modules(shape) if last and shape.mtp else None,
    )
    if not shape.latent:  # layers with latent attention have their own rotary embedding
        model.rotary_pos_emb = DocumentRotary(
            kv_channels=shape.head_dim,
            rotary_percent=shape.rotary_share,
            rotary_base=shape.rope_theta,
            cp_group=model.cp_group,
        )
    if shape.llama3:
        model.rotary_pos_emb.scale(shape.llama3)
    if shape.yarn:
        model.rotary_pos_emb.stretch(shape.yarn, base=shape.rope_theta)
    if last and shape.head == "value":
        model.output_layer = ValueHead(config)
    if shape.mixture:
        number_routers(model, shape.mixture)
        # The library leaves routers, and the gates of shared experts, on the CPU.
        model.to(torch.cuda.current_device())
    return model


def _layers(config: TransformerConfig, shape: ModelShape, layers: range) -> TransformerBlockSubmodules:
    if config.transformer_impl == "transformer_engine":
        from impl.megatron.transformer_engine import FINAL_NORM, te_spec  # not installed everywhere

        specs = [te_spec(shape, config.params_dtype) for _ in layers]
        return TransformerBlockSubmodules(layer_specs=specs, layer_norm=FINAL_NORM)
    return TransformerBlockSubmodules(layer_specs=[layer_spec(shape, layer) for layer in layers], layer_norm=RMSNorm)


def _modules(shape: ModelShape) -> ModuleSpec:
    """Returns the spec of the modules for multi-token prediction, which give their hidden states one after another."""
    parts = (
        MultiTokenPredictionLayerSubmodules(
            enorm=RMSNorm,
            hnorm=RMSNorm,
            eh_proj=ColumnParallelLinear,
            transformer_layer=layer_spec(shape, shape.layers + number),
            layer_norm=RMSNorm,
        )
        for number in range(shape.mtp)
    )
    specs = [ModuleSpec(module=MultiTokenModule, submodules=each) for each in parts]
    return ModuleSpec(
        module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=specs)
    )


def layer_spec(shape: ModelShape, layer: int) -> ModuleSpec:
    """Returns megatron-core's local layer spec with the norms, attention, o_proj and routers of this package."""
    mixture = shape.mixture if shape.mixture and layer in shape.mixture.layers else None
    experts = mixture.experts if mixture else None
    spec = get_gpt_layer_local_spec(
        normalization="RMSNorm",
        qk_layernorm=shape.qk_norm,
        num_experts=experts,
        multi_latent_attention=shape.latent is not None,
    )
    if mixture:
        submodules(spec.submodules.mlp).router = StepTopKRouter
        if mixture.clamped:
            submodules(submodules(spec.submodules.mlp).experts).linear_fc2 = BiasedExpertLinear
    parts, attention = spec.submodules, spec.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention.core_attention = RingCoreAttention
    if shape.latent:
        place_latent(parts.self_attention, shape, LatentNorm)
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    if shape.output_bias:
        attention.linear_proj = BiasedRowParallelLinear
    return spec


def leave_padding_token(model: GPTModel, token: int) -> None:
    """Stops the gradient of the padding token's embedding where the token is an input, as in transformers.

    megatron-core's embedding has no padding_idx (docs/findings/megatron-padding-token.md).
    """

    def without_gradient(_: Any, __: Any, inputs: dict[str, Any], embedded: Tensor) -> Tensor:
        padding = (inputs["input_ids"] == token).T.contiguous()  # (length, rows); pipelines send contiguous tensors
        if model.config.sequence_parallel:
            padding = padding.chunk(model.config.tensor_model_parallel_size)[
                parallel_state.get_tensor_model_parallel_rank()
            ]
        return torch.where(padding[..., None], embedded.detach(), embedded)

    model.embedding.register_forward_hook(without_gradient, with_kwargs=True)


def begin_with_gradient(model: GPTModel) -> None:
    """Makes the output of the embedding require a gradient even if the embedding is frozen.

    megatron-core's recomputation is a reentrant checkpoint: if none of a layer's inputs requires a gradient, the
    layer's own parameters get none, without an error (docs/findings/megatron-frozen-embedding.md).
    """
    model.embedding.register_forward_hook(lambda _, __, embedded: embedded.requires_grad_())


def traced_chunks(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    stages: Stages,
    parts: Sequence[MicroBatch],
    *,
    gradient_scale: float,
) -> Traced:
    """Returns the modules that this rank traces.

    ``parts``: this rank's part of each micro-batch, with token numbers in the place of token ids.
    """
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    found: list[TracedModule] = []
    for number, chunk in enumerate(chunks):
        found += _of_chunk(chunk, stages.chunks[number * stages.pp + pp_rank], shape)
    return Traced(modules=tuple(found), tokens=tuple(map(token_numbers, parts)), gradient_scale=gradient_scale)


def _of_chunk(chunk: Any, layers: range, shape: ModelShape) -> Iterator[TracedModule]:
    tp = parallel_state.get_tensor_model_parallel_world_size()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    # Sequence parallelism cuts the stream between blocks along the length.
    part, parts = (tp_rank, tp) if chunk.config.sequence_parallel else (0, 1)
    stream = Cut(length_first=True, part=part, parts=parts)

    def cut(features: int) -> Cut:
        return Cut(length_first=True, first_feature=tp_rank * features // tp)

    modules = dict(chunk.named_modules())
    if "embedding" in modules:
        yield TracedModule(name="model.embed_tokens", module=modules["embedding"], output=stream)
    for number, layer in enumerate(layers):
        local, prefix = f"decoder.layers.{number}.", f"model.layers.{layer}."
        attention = cut(shape.attended)
        # TransformerEngine fuses norms into linear layers.
        fused = isinstance(modules[local + "input_layernorm"], IdentityOp)
        has_experts = shape.mixture is not None and layer in shape.mixture.layers  # they are traced as one module
        for name, of, inside in (
            ("input_layernorm", "input_layernorm", stream),
            ("self_attn", "self_attention", stream),
            ("self_attn.o_proj", "self_attention.linear_proj", attention),
            ("post_attention_layernorm", "pre_mlp_layernorm", stream),
            ("mlp", "mlp", stream),
            *([] if has_experts else [("mlp.down_proj", "mlp.linear_fc2", cut(shape.ffn))]),
        ):
            if fused and not name.endswith("_proj"):  # the input is not normalised yet
                continue
            leaves = name.startswith(("self_attn", "mlp"))
            module = modules[local + of]
            yield TracedModule(name=prefix + name, module=module, input=inside, output=stream, leaves_bias=leaves)
    if "decoder.final_layernorm" in modules:
        yield TracedModule(name="model.norm", module=modules["decoder.final_layernorm"], input=stream, output=stream)
    if "output_layer" in modules:
        value = shape.head == "value"
        yield TracedModule(
            name="score" if value else "lm_head",
            module=modules["output_layer"],
            input=stream,
            output=Cut(length_first=True) if value else cut(shape.padded_vocab(tp)),
            leaves_bias=True,
        )
