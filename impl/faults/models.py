"""Plants faults in models: in LoRA adapters, in parts of an architecture, in dropout, and between policy and critic.

A fault of an architecture ignores a part of the model's configuration when the model is loaded.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import PrepareModuleOutput, RowwiseParallel

from conformance.backends.faults import Function
from conformance.core.io import read_json
from conformance.spec.scenario import CONFIG_FILE, is_adapter
from impl.faults.declaration import Faults, merge, rl, sft
from impl.interface.sharded_safetensors import SliceReader
from impl.models.lazy_weights import Origin
from impl.models.lora import NAME, is_adapted

BASE = "model.layers.1.mlp.up_proj.weight"  # has no adapter in the scenarios
FIRST = "model.layers.0."


@dataclass(frozen=True, kw_only=True)
class _Merged:
    """Reads a matrix with its adapter merged: base + scale B A."""

    base: Origin
    a: Origin
    b: Origin
    rank: int
    scale: float

    def region(self, read: SliceReader, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        a = self.a.region(read, (0, start[1]), (self.rank, shape[1]))
        b = self.b.region(read, (start[0], 0), (shape[0], self.rank))
        return self.base.region(read, start, shape) + self.scale * (b @ a)


def zeros_for(endings: str | tuple[str, ...], name: str, tensor: Tensor) -> Tensor:
    """Returns zeros for a tensor whose name has one of these endings, and other tensors as they are."""
    return torch.zeros_like(tensor) if name.endswith(endings) else tensor


ADAPTER_FAULTS = Faults()


@ADAPTER_FAULTS.add(
    summary="the adapter is added to the base that it is trained on, so it counts twice",
    source="https://github.com/radixark/miles/pull/1087",
    stage="weights",
    cells=sft("sft-lora", "llama", fsdp2="dp2", deepspeed="dp2.zero1"),
    needs="adapters (lora), and B that is not 0",
)
def adapter_counted_twice(load_adapter: Function, model: torch.nn.Module, folder: Path) -> Any:
    adapted = load_adapter(model, folder)
    unread: Any = model.unread
    for name, layer in model.named_modules():
        if is_adapted(layer):
            base, a, b = (unread.origins[f"{name}.{part}weight"] for part in ("", "lora_A.", "lora_B."))
            unread.origins[f"{name}.weight"] = _Merged(
                base=base, a=a, b=b, rank=layer.r[NAME], scale=layer.scaling[NAME]
            )
    return adapted


@ADAPTER_FAULTS.add(
    summary="adapters of the first layer are not trained",
    source="https://github.com/meta-pytorch/torchforge/issues/592",
    stage="gradients",
    cells=sft("sft-lora", "llama", fsdp2="dp2", deepspeed="dp2.zero3"),
    blind=("loss",),
    needs="adapters (lora) in the first layer",
)
def adapters_of_a_layer_frozen(trained_names: Function, *arguments: Any) -> frozenset[str]:
    return frozenset(n for n in trained_names(*arguments) if not (is_adapter(n) and n.startswith(FIRST)))


@ADAPTER_FAULTS.add(
    summary="a matrix of the base is trained beside the adapters",
    source="https://github.com/NVIDIA-NeMo/Automodel/issues/547",
    stage="gradients",
    cells=sft("sft-lora", "llama", fsdp2="dp2", deepspeed="dp2.zero2"),
    blind=("loss",),
    needs="adapters (lora)",
)
def base_trained_too(trained_names: Function, model: torch.nn.Module, config: Any) -> frozenset[str]:
    model.get_parameter(BASE).requires_grad_()  # before a library builds its engine
    return frozenset({*trained_names(model, config), BASE})


@ADAPTER_FAULTS.add(
    summary="the output of an adapter is multiplied by its scale twice",
    source="https://github.com/Blaizzy/mlx-vlm/issues/841",
    stage="log-probs",
    cells=sft("sft-lora", "llama", fsdp2="tp2", deepspeed="dp2.zero2"),
    needs="adapters (lora) with a scale that is not 1, and B that is not 0",
)
def adapter_scaled_twice(load_adapter: Function, model: Any, folder: Path) -> Any:
    adapted = load_adapter(model, folder)
    for layer in filter(is_adapted, model.modules()):
        layer.scaling[NAME] *= layer.scaling[NAME]
    return adapted


@ADAPTER_FAULTS.add(
    summary="an adapter's second matrix sees a part of the sequence, and its gradient is not summed over the parts",
    source="https://github.com/modelscope/mcore-bridge/pull/173",
    stage="gradients",
    cells=sft("sft-lora", "llama", fsdp2="dp2.tp2.seqpar.losspar"),
    blind=("loss",),
    needs="adapters (lora) of layers whose inputs tensor-parallel ranks share out, and seqpar",
)
def adapter_of_parts_not_summed(adapter_plan: Function, layer: Any, plan: Any, *, sequence: bool) -> Any:
    found = adapter_plan(layer, plan, sequence=sequence)
    for name, style in found.items():
        if f".lora_A.{NAME}" in name and isinstance(style, RowwiseParallel):
            found[name] = RowwiseParallel(input_layouts=style.input_layouts[0], output_layouts=Shard(1))
    return {name: style for name, style in found.items() if not isinstance(style, PrepareModuleOutput)}


MERGE_FAULTS = Faults()


@MERGE_FAULTS.add(
    summary="the adapter is merged into the base without its scale",
    source="https://github.com/hao-ai-lab/FastVideo/pull/870",
    stage="weights",
    cells=merge(),
    needs="a phase that merges adapters (lora) whose scale is not 1",
)
def merged_without_scale(merge_adapter: Function, model: Any, folder: Path) -> Any:
    file = folder / CONFIG_FILE
    config = read_json(file)
    file.write_text(json.dumps(config | {"lora_alpha": config["r"], "use_rslora": False}), encoding="utf-8")
    return merge_adapter(model, folder)


ARCHITECTURE_FAULTS = Faults()


@ARCHITECTURE_FAULTS.add(
    summary="rotary positions have the frequencies of the base alone, without the configuration's scaling",
    source="https://github.com/unslothai/unsloth/pull/6197",
    stage="log-probs",
    cells=sft("sft-packed", "llama3", fsdp2="tp2", deepspeed="dp2.zero2", megatron="pp2"),
    needs="a model with scaled rotary positions",
)
def positions_not_scaled(load_model: Function, trainable: Any, path: Path) -> Any:
    config = _config(path)
    rope = config.get("rope_parameters", config)  # of each kind of layer, if these have bases of their own
    return _with_base(load_model(trainable, path), lambda kind: rope.get(kind, rope).get("rope_theta", 1e4))


def _config(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = read_json(path / "config.json")
    return values


def _with_base(model: Any, base_of: Callable[[str], float]) -> Any:
    """Gives rotary positions the frequencies of a base alone. base_of: by the kind of layer, if buffers name one."""
    for module in model.modules():
        for name in [name for name in dir(module) if re.fullmatch(r"(\w+_attention_)?inv_freq", name)]:
            kind, scaled = name.removesuffix("inv_freq"), getattr(module, name)
            exponents = torch.arange(len(scaled), dtype=torch.float64) / len(scaled)
            setattr(module, name, (1.0 / base_of(kind.rstrip("_")) ** exponents).to(scaled))
            setattr(module, f"{kind}attention_scaling", 1.0)
    return model


@ARCHITECTURE_FAULTS.add(
    summary="rotary positions have the default base of 10,000 instead of the configuration's",
    source="https://github.com/sgl-project/SpecForge/issues/265",
    stage="log-probs",
    cells=sft("sft-packed", "mistral-odd", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2"),
    needs="a model with another rope_theta",
)
def default_theta(load_model: Function, trainable: Any, path: Path) -> Any:
    return _with_base(load_model(trainable, path), lambda _: 1e4)


@ARCHITECTURE_FAULTS.add(
    summary="norms have the default epsilon of 1e-6 instead of the configuration's",
    source="https://github.com/huggingface/transformers/issues/38025",
    stage="log-probs",
    cells=sft("sft-packed", "qwen2-yarn-odd", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2"),
    needs="a model with another rms_norm_eps",
)
def default_epsilon(load_model: Function, trainable: Any, path: Path) -> Any:
    model = load_model(trainable, path)
    for module in model.modules():
        for name in {"eps", "variance_epsilon"} & vars(module).keys():
            setattr(module, name, 1e-6)
    return model


@ARCHITECTURE_FAULTS.add(
    summary="scores are divided by the root of hidden_size / num_attention_heads instead of head_dim",
    source="https://github.com/InternLM/lmdeploy/pull/2761",
    stage="log-probs",
    half_stage="gradients",
    cells=sft("sft-packed", "llama3-odd", fsdp2="tp2", deepspeed="dp2.zero2", megatron="tp2"),
    needs="a model whose head_dim is not hidden_size / num_attention_heads",
)
def derived_head_size(load_model: Function, trainable: Any, path: Path) -> Any:
    model, config = load_model(trainable, path), _config(path)
    for module in model.modules():
        for name in {"scaling", "scale"} & vars(
            module
        ).keys():  # of transformers' attention, and the Megatron backend's
            setattr(module, name, (config["hidden_size"] // config["num_attention_heads"]) ** -0.5)
    return model


@ARCHITECTURE_FAULTS.add(
    summary="every second layer has a window, as by default, whatever the configuration's layer_types say",
    source="https://github.com/vllm-project/vllm/pull/33594",
    stage="log-probs",
    cells=sft("sft-packed", "gemma2-odd", fsdp2="dp2", deepspeed="dp2.zero2"),
    needs="a model with another order of sliding and full attention",
)
def default_layer_types(hugging_face_model: Function, *arguments: Any, **options: Any) -> Any:
    model = hugging_face_model(*arguments, **options)
    kinds = ("sliding_attention", "full_attention")
    model.config.layer_types = [kinds[layer % 2] for layer in range(model.config.num_hidden_layers)]
    return model


@ARCHITECTURE_FAULTS.add(
    summary="the numbers of layers are sorted as texts: layer 2 gets the weights of layer 10",
    source="https://github.com/deepspeedai/DeepSpeed/issues/3305, where layer 100 is read as layer 10",
    stage="weights",
    cells=sft("sft-packed", "llama3-odd", fsdp2="dp2", deepspeed="dp2.zero1", megatron="pp2"),
    needs="a model with more than ten layers",
)
def layers_sorted_as_text(read_slice: Function, reader: Any, name: str, spans: Any) -> Tensor:
    start, number, rest = re.split(r"(?<=\.layers\.)(\d+)", name) if ".layers." in name else (name, "", "")
    if number:
        layers = sorted({found[1] for other in reader.names() if (found := re.search(r"\.layers\.(\d+)\.", other))})
        number = layers[int(number)]
    piece: Tensor = read_slice(reader, f"{start}{number}{rest}", spans)
    return piece


@ARCHITECTURE_FAULTS.add(
    summary="queries of a layer with a sliding window see one key more, because a kernel does not count their own",
    source="https://github.com/huggingface/transformers/issues/39408",
    stage="log-probs",
    cells=sft("sft-packed", "mistral", fsdp2="sp2", deepspeed="dp2.zero1", megatron="sp2"),
    needs="a model with a sliding window, and documents that are longer",
)
def window_one_longer(load_model: Function, trainable: Any, path: Path) -> Any:
    model = load_model(trainable, path)
    if getattr(getattr(model, "config", None), "sliding_window", None):
        model.config.sliding_window += 1  # Hugging Face computes masks from it
    for module in model.modules():
        if isinstance(window := getattr(module, "sliding_window", None), int):
            module.sliding_window = window + 1
        if isinstance(window := getattr(module, "window", None), tuple) and window[0] >= 0:  # the Megatron backend
            module.window = (window[0] + 1, window[1])
    return model


@ARCHITECTURE_FAULTS.add(
    summary="the biases of q, k and v are not loaded, as if the model were a Llama",
    source="https://github.com/ServiceNow/Fast-LLM/pull/398",
    stage="weights",
    cells=sft("sft-packed", "qwen2", fsdp2="dp2", deepspeed="dp2.zero1", megatron="dp2"),
    needs="a model with biases on q, k and v",
)
def lost_qkv_biases(read_slice: Function, reader: Any, name: str, spans: Any) -> Tensor:
    return zeros_for(("q_proj.bias", "k_proj.bias", "v_proj.bias"), name, read_slice(reader, name, spans))


@ARCHITECTURE_FAULTS.add(
    summary="scores of attention are not soft-capped, because the kernel cannot",
    source="https://github.com/vllm-project/vllm-metal/issues/665",
    stage="log-probs",
    cells=sft("sft-packed", "gemma2", fsdp2="dp2", deepspeed="dp2.zero2"),
    needs="a model that soft-caps scores",
)
def scores_not_capped(hugging_face_model: Function, *arguments: Any, **options: Any) -> Any:
    model = hugging_face_model(*arguments, **options)
    for module in model.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = None
    return model


@ARCHITECTURE_FAULTS.add(
    summary="the softmax of attention is without its learned sinks, because the kernel knows none",
    source="https://github.com/vllm-project/vllm-metal/pull/550",
    stage="routing",
    cells=sft("sft-packed", "gpt-oss", fsdp2="sp2", deepspeed="dp2.zero2", megatron="tp2.seqpar"),
    needs="a model with attention sinks",
)
def sinks_dropped(load_model: Function, trainable: Any, path: Path) -> Any:
    # transformers gets a kernel that ignores sinks, the Megatron backend is patched. The gradients of the sinks are 0;
    # missing gradients would be found for another reason.
    model = load_model(trainable, path)
    if hasattr(model, "config"):
        model.config._attn_implementation = "sdpa"
    for module in model.modules():
        if hasattr(module, "sinks"):
            module.register_forward_hook(lambda own, _, output: (output[0] + 0 * _local(own.sinks).sum(), *output[1:]))
        if getattr(module, "softmax_offset", None) is not None:
            _forget_sinks(module)
    return model


def _local(parameter: Any) -> Tensor:
    """Returns the local part of a DTensor, or the parameter itself. The controller does not import torch's DTensor."""
    part: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part


def _forget_sinks(attention: Any) -> None:
    forward, sinks = attention.forward, attention.softmax_offset

    def without(*arguments: Any, **options: Any) -> Tensor:
        attention.softmax_offset = None
        output = forward(*arguments, **options)
        attention.softmax_offset = sinks
        with_gradient: Tensor = output + 0 * sinks.sum()
        return with_gradient

    attention.forward = without


MODELS_FAULTS = Faults()


@MODELS_FAULTS.add(
    summary="old log-probs are computed in training mode, with dropout",
    source="https://github.com/verl-project/verl/pull/4708",
    stage="old log-probs",
    cells=rl("grpo", fsdp2="dp2", deepspeed="dp2.zero2", dropout=True),
    needs="dropout in the model's configuration, and in the attention that a backend uses",
)
def logprobs_in_train_mode(switch_off_dropout: Function, model: torch.nn.Module) -> None:
    train = model.train
    model.train = lambda mode=True: train()  # type: ignore[method-assign]


@MODELS_FAULTS.add(
    summary="updates are made with the dropout that is the library's default, and not the model's",
    source="https://github.com/Human-Agent-Society/reef/pull/536",
    stage="log-probs",
    cells=rl("grpo", megatron="dp2"),
    needs="megatron-core",
)
def dropout_by_default(pipeline_config: Function, *arguments: Any) -> Any:
    config = pipeline_config(*arguments)
    config.hidden_dropout = type(config).hidden_dropout  # the default of the dataclass
    return config


def _parameters(trainable: Any) -> Iterator[tuple[str, Any]]:
    modules = [chunk.module for chunk in trainable.chunks] if hasattr(trainable, "chunks") else [trainable.model]
    for module in modules:
        yield from module.named_parameters()


def _gradient(parameter: Any) -> Tensor:
    """Returns the gradient that the update reads. Where ZeRO 1 to 3 shard it, this is a copy, which all ranks make."""
    if (own := _own_gradient(parameter)) is not None:
        return own
    from deepspeed.utils import safe_get_full_grad  # imported here: only one backend has it

    return safe_get_full_grad(parameter)  # type: ignore[no-any-return]


def _own_gradient(parameter: Any) -> Tensor | None:
    own: Tensor | None = parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad
    return own


def _set_gradient(parameter: Any, gradient: Tensor) -> None:
    """Replaces the gradient that the update reads."""
    if (own := _own_gradient(parameter)) is not None:
        own.copy_(gradient)
        return
    from deepspeed.utils import safe_set_full_grad

    mapping = getattr(parameter, "_hp_mapping", None)
    fragment = mapping.get_lp_grad_fragment(parameter._index_in_param_group) if mapping else None
    if fragment is not None and fragment.numel() == parameter.numel():
        fragment.copy_(gradient.reshape_as(fragment))  # ZeRO-1 in bf16 keeps the whole gradient on every rank
    else:
        safe_set_full_grad(parameter, gradient)


@MODELS_FAULTS.add(
    summary="old log-probs are computed in evaluation mode, and updates are made with dropout",
    source="https://github.com/huggingface/trl/pull/3234",
    stage="log-probs",
    cells=rl("grpo", fsdp2="dp2", deepspeed="dp2.zero2", dropout=True),
    needs="dropout in the model's configuration, and in the attention that a backend uses",
)
def dropout_in_updates(switch_off_dropout: Function, *arguments: Any) -> None:
    pass


@MODELS_FAULTS.add(
    summary="the critic's gradients are added to those of the policy's parameters of the same names",
    source="https://github.com/huggingface/trl/issues/1108",
    stage="gradients",
    cells=rl("ppo"),
    blind=("loss", "loss and norm"),
    needs="a critic, and a second update: the critic's gradients come after the policy's",
)
def critic_leaks_into_policy(finish_gradients: Function, trainable: Any) -> None:
    finish_gradients(trainable)
    parameters = dict(_parameters(trainable))
    of_critic = vars(trainable.context).setdefault("gradients_of_critic", {})
    if trainable.head == "value":
        of_critic.update({name: _gradient(parameter).clone() for name, parameter in parameters.items()})
        return
    for name in (name for name in parameters if name in of_critic):  # in one order on all ranks
        _set_gradient(parameters[name], _gradient(parameters[name]) + of_critic[name])
