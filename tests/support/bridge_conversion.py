"""Converts models by Megatron-Bridge and holds them against the conversion of impl.megatron, in Bridge's environment.

    RANK=0 WORLD_SIZE=1 python bridge_conversion.py OUT.json FOLDER...

WORLD_SIZE is the tensor-parallel size. Each FOLDER is a Hugging Face folder, with the configuration as transformers 4
spells it. What is run is Bridge's released code: AutoBridge, its providers and its mappings. TransformerEngine needs a
GPU, so the model has megatron-core's own layers, which Bridge's mappings know as well. Those of latent attention, which
megatron-core cannot build without TransformerEngine, are ours.
"""

import contextlib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.utils import is_layer_window_attention
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import parity
from conformance.backends.on_cpu import replaced
from conformance.core.errors import UsageError
from conformance.models.folders import weight_files
from conformance.spec.layout import Layout
from conformance.spec.precision import PRECISIONS
from impl.interface.sharded_safetensors import SliceReader
from impl.megatron.device_placement import on_device
from impl.megatron.gpt_model import RMSNorm, layer_spec, transformer_config
from impl.megatron.hf_mapping import EMBEDDING, HEAD
from impl.megatron.model_config import ModelShape, read_shape, stages
from impl.megatron.tensors import load_parameter, parameter_names, weight_tensors

# They must not see the stand-in for TransformerEngine below.
for _name in ("models.gpt.gpt_layer_specs", "models.gpt.gpt_model", "optimizer", "dist_checkpointing"):
    importlib.import_module(f"megatron.core.{_name}")
with parity.on_cpu(stand_ins=("transformer_engine", "modelopt", "nvidia_resiliency_ext")):
    importlib.import_module("megatron.bridge")  # its LoRA has annotations of TransformerEngine's layers
with parity.on_cpu(stand_ins=("modelopt", "nvidia_resiliency_ext")):
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.bridge.models.gpt_provider import local_layer_spec

UNFUSED = (
    *("apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion", "cross_entropy_loss_fusion"),
    *("gradient_accumulation_fusion", "masked_softmax_fusion", "persist_layer_norm", "moe_permute_fusion"),
    *("moe_shared_expert_overlap", "moe_grouped_gemm"),
)
# Settings of megatron-core's TransformerConfig that decide about the model's function. The others decide about dtypes,
# kernels, parallelism, initialisation and the losses that balance routers.
DECISIVE = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
    *("layernorm_epsilon", "layernorm_zero_centered_gamma", "normalization", "qk_layernorm", "softmax_scale"),
    *("add_bias_linear", "softmax_type", "rotary_interleaved", "gated_linear_unit", "activation_func"),
    *("activation_func_clamp_value", "glu_linear_offset", "hidden_dropout", "attention_dropout", "num_moe_experts"),
    *("moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax", "moe_shared_expert_intermediate_size"),
    *("moe_shared_expert_gate", "moe_router_score_function", "moe_router_enable_expert_bias"),
    *("moe_router_num_groups", "moe_router_group_topk", "q_lora_rank", "kv_lora_rank", "qk_head_dim"),
    *("qk_pos_emb_head_dim", "v_head_dim"),
)
YARN = {
    "rotary_scaling_factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
OF_LATENT = ("kv_channels", "qk_layernorm")
LENGTH = 40  # tokens of the document whose logits are compared


def main(out: str, *folders: str) -> None:
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group("gloo", init_method=f"file://{Path(out).absolute()}.store", rank=rank, world_size=size)
    with on_device("cpu", exact=False):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        model_parallel_cuda_manual_seed(0)  # attention asks for a generator
        found = {Path(folder).name: converted(Path(folder)) for folder in folders}
    if rank == 0:
        Path(out).write_text(json.dumps(found, indent=1))
    dist.destroy_process_group()


def converted(folder: Path) -> dict[str, Any]:
    """Converts a model both ways. The lists of names are empty where Bridge does what impl.megatron does."""
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = bridge.to_megatron_provider(load_weights=False)
    try:
        shape = read_shape(folder)
    except UsageError:  # a family that impl.megatron refuses
        shape = None
    if shape is None:
        return {"without a mapping": unmapped(bridge, folder)}
    found: dict[str, Any] = {"settings": settings(provider, shape)}
    model = build(provider, shape)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    with contiguous_scatter(), grouped_experts(model):
        bridge.load_hf_weights([model])
        found["not loaded"] = [name for name, tensor in model.named_parameters() if tensor.isnan().any()]
        if not found["not loaded"]:
            found["exported"], found["unlike the files"] = exported(bridge, model, folder)
    if not found["not loaded"]:
        loaded = weight_tensors(model)
        found["loaded"] = len(loaded)
        found["unlike ours"] = unlike_ours(loaded, parameter_names(model), shape, folder)
        if dist.get_world_size() == 1 and not shape.latent:  # megatron-core's latent attention needs TransformerEngine
            found["logits"] = error_of_logits(model, folder)
    return found


def settings(provider: Any, shape: ModelShape) -> dict[str, list[Any]]:
    """Returns the settings that decide about the function of a model and differ: Bridge's, and ours."""
    layout, parts = Layout.parse("dp1"), stages(layers=shape.layers, pp=1, vpp=1)
    config = transformer_config(shape, layout, PRECISIONS["fp32"], parts)
    both = [{name: getattr(one, name, None) for name in DECISIVE} for one in (provider, config)]
    if shape.latent:  # ours computes positions and norms of latent vectors itself
        both = [{name: value for name, value in one.items() if name not in OF_LATENT} for one in both]
    own, ours = both
    own |= {
        "rotary_base": provider.rotary_base,
        "rotary_percent": provider.rotary_percent,
        "position_embedding_type": provider.position_embedding_type,
        "tied": provider.share_embeddings_and_output_weights,
        "vocab_size": provider.vocab_size,
        "qkv_bias": provider.add_qkv_bias or provider.add_bias_linear,
        "windows": [window(provider, layer) for layer in range(shape.layers)],
        "expert_layers": expert_layers(provider),
        "expert_factor": provider.moe_router_topk_scaling_factor or 1.0,
    }
    ours |= {
        "rotary_base": shape.rope_theta,
        "rotary_percent": shape.rotary_share,
        "position_embedding_type": "yarn" if shape.yarn else "rope",
        "tied": shape.tied,
        "vocab_size": shape.vocab,
        "qkv_bias": shape.qkv_bias,
        "windows": [one or 0 for one in shape.windows],
        "expert_layers": list(shape.mixture.layers) if shape.mixture else [],
        "expert_factor": shape.mixture.factor if shape.mixture else 1.0,
    }
    if provider.position_embedding_type == "yarn" and shape.yarn:
        own["yarn"] = [getattr(provider, f"yarn_{name}") for name in YARN]
        ours["yarn"] = [shape.yarn[name] for name in YARN.values()]
    if provider.rope_scaling:  # megatron-core has the other numbers as defaults
        scale = inspect.signature(RotaryEmbedding._apply_scaling).parameters
        own["llama3"] = [provider.rope_scaling_factor, *(one.default for one in list(scale.values())[3:])]
        ours["llama3"] = list(shape.llama3.values()) if shape.llama3 else []
    if shape.mixture and shape.mixture.sigmoid:  # then nothing reads it
        own["moe_router_pre_softmax"] = ours["moe_router_pre_softmax"]
    return {name: [own[name], ours[name]] for name in own if plain(own[name]) != plain(ours[name])}


def window(provider: Any, layer: int) -> int:
    """Returns to how many tokens a layer attends, with the own, which megatron-core's bounds leave out; 0: all."""
    size, every = provider.window_size, provider.window_attn_skip_freq
    return int(size[0]) + 1 if is_layer_window_attention(size, every, layer + 1) else 0


def expert_layers(provider: Any) -> list[int]:
    if not provider.num_moe_experts:
        return []
    every = provider.moe_layer_freq
    return [n for n in range(provider.num_layers) if (every[n] if isinstance(every, list) else n % every == 0)]


def plain(value: Any) -> Any:
    """Returns a setting in a form in which two spellings of the same are equal."""
    if callable(value):  # activations: what they compute
        numbers = torch.linspace(-3, 3, 13)
        return [round(float(one), 5) for one in value(numbers)]
    return list(value) if isinstance(value, tuple) else value


def unmapped(bridge: Any, folder: Path) -> list[str]:
    """Lists the tensors of a folder for which Bridge has no mapping."""
    registry = bridge._model_bridge.mapping_registry()
    names = [name for file in weight_files(folder) for name in load_file(file)]
    return [name for name in names if registry.hf_to_megatron_lookup(name) is None]


def build(provider: Any, shape: ModelShape) -> Any:
    """Builds this rank's GPTModel as Bridge's provider does, in fp32, without TransformerEngine and fused kernels."""
    size = dist.get_world_size()
    provider.tensor_model_parallel_size = size
    provider.transformer_layer_spec, provider.attention_backend = local_layer_spec, AttnBackend.local
    provider.transformer_impl, provider.use_cpu_initialization = "local", True
    provider.params_dtype = provider.pipeline_dtype = torch.float32
    provider.bf16 = provider.fp16 = False
    for fusion in UNFUSED:
        setattr(provider, fusion, False)
    if shape.latent:
        for name in ("Linear", "StepTopKRouter"):  # our projections to latent vectors, and our router
            AutoMapping.register_module_type(name, "replicated")
        provider.transformer_layer_spec = lambda _: TransformerBlockSubmodules(
            layer_specs=[layer_spec(shape, layer) for layer in range(shape.layers)], layer_norm=RMSNorm
        )
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    return provider.provide(pre_process=True, post_process=True)


@contextlib.contextmanager
def grouped_experts(model: Any) -> Iterator[None]:
    """Gives experts' parameters the names and classes that they have in TransformerEngine's grouped layers.

    The layers cannot compute meanwhile. Bridge's mappings for DeepSeek know no other names, and its export of experts
    in megatron-core's local layers raises ValueError (``int('')``).
    """
    before = {}
    for number, layer in enumerate(model.decoder.layers):
        if experts := getattr(getattr(layer.mlp, "experts", None), "local_experts", None):
            before[number], layer.mlp.experts = layer.mlp.experts, torch.nn.Module()
            for name, kind in (
                ("linear_fc1", "TEColumnParallelGroupedLinear"),
                ("linear_fc2", "TERowParallelGroupedLinear"),
            ):
                grouped = type(kind, (torch.nn.Module,), {})()
                for expert, one in enumerate(experts):
                    for key, parameter in getattr(one, name).named_parameters():
                        grouped.register_parameter(f"{key}{expert}", parameter)
                layer.mlp.experts.register_module(name, grouped)
    yield
    for number, experts in before.items():
        model.decoder.layers[number].mlp.experts = experts


@contextlib.contextmanager
def contiguous_scatter() -> Iterator[None]:
    """Scatters contiguous copies, as Bridge does on a GPU, where ``to("cuda")`` makes them.

    Gloo scatters the memory behind a tensor instead of its numbers: docs/findings/torch-gloo-scatter.md.
    """
    scatter = dist.scatter

    def scattered(output: Tensor, parts: list[Tensor] | None = None, *args: Any, **options: Any) -> Any:
        return scatter(output, parts and [part.contiguous() for part in parts], *args, **options)

    with replaced(dist, {"scatter": scattered}):
        yield


def unlike_ours(loaded: dict[str, Tensor], names: dict[str, str], shape: ModelShape, folder: Path) -> list[str]:
    """Lists the parameters of this or another rank in which one bit differs from what impl.megatron loads.

    Ranks share out the rows of vocabulary matrices in two ways, because ours are padded; whole matrices are compared.
    """
    unlike = []
    with SliceReader(weight_files(folder)) as files:
        for name, own in loaded.items():
            ours = torch.empty_like(own)
            if names[name] in (EMBEDDING, HEAD):
                rows = shape.padded_vocab(dist.get_world_size()) // dist.get_world_size()
                ours = own.new_empty(rows, own.shape[1])
            load_parameter(ours, names[name], shape, files)
            if names[name] in (EMBEDDING, HEAD):
                own, ours = (gathered(one)[: shape.vocab] for one in (own, ours))
            if not torch.equal(own, ours):
                unlike.append(name)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, unlike)
    return sorted({name for each in ranks for name in each})


def gathered(own: Tensor) -> Tensor:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.detach().contiguous())
    return torch.cat(parts)


def exported(bridge: Any, model: Any, folder: Path) -> tuple[int, list[str]]:
    """Converts back. Returns the number of tensors, and the names of those that differ from the folder's by one bit."""
    files = {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}
    found: dict[str, Tensor] = {}
    for name, tensor in bridge.export_hf_weights([model], cpu=True, show_progress=False):
        found[name] = tensor.detach().clone()
    unlike = [name for name in found if name not in files or not torch.equal(found[name], files[name])]
    return len(found), [*unlike, *(name for name in files if name not in found)]


def error_of_logits(model: Any, folder: Path) -> float:
    """Returns the relative error of a document's logits against transformers'."""
    tokens = torch.arange(3, 3 + LENGTH).view(1, -1)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril().logical_not()
    with torch.no_grad():
        due = reference.eval()(tokens).logits
        logits = model.eval()(tokens, torch.arange(LENGTH).view(1, -1), mask)
    return float((logits - due).norm() / due.norm())


if __name__ == "__main__":
    main(*sys.argv[1:])
