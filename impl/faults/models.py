"""Plants faults in models: in LoRA adapters, in parts of an architecture, in dropout, and between policy and critic.

A fault of an architecture ignores a part of the model's configuration when the model is loaded.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from conformance.backends.faults import Fault, Function, not_called
from conformance.spec.lora import CONFIG_FILE, is_adapter
from impl.faults.cells import merge, rl, sft
from impl.interface.sharded_safetensors import SliceReader
from impl.models.lazy_weights import Origin
from impl.models.lora import NAME, is_adapted

BASE = "model.layers.1.mlp.up_proj.weight"  # has no adapter in the scenarios
FIRST = "model.layers.0."


def _of_adapted(change: Callable[[Any], None]) -> Callable[[Function], Function]:
    """Applies ``change`` to every layer that has an adapter, after the adapter was loaded."""

    def wrap(load_adapter: Function) -> Function:
        def faulty(model: torch.nn.Module, folder: Path) -> Any:
            adapted = load_adapter(model, folder)
            for module in model.modules():
                if hasattr(module, "base_layer"):
                    change(module)
            return adapted

        return faulty

    return wrap


def _scaled_twice(layer: Any) -> None:
    layer.scaling[NAME] *= layer.scaling[NAME]


@dataclass(frozen=True, kw_only=True)
class _Merged:
    """Reads a matrix with its adapter merged: base + scale B A."""

    base: Origin
    a: Origin
    b: Origin
    rank: int
    scale: float

    def region(self, read: SliceReader, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        a = self.a.region(read, (0, start[1]), (self.rank, shape[1]))
        b = self.b.region(read, (start[0], 0), (shape[0], self.rank))
        return self.base.region(read, start, shape) + self.scale * (b @ a)


def _added_to_base(load_adapter: Function) -> Function:
    def faulty(model: torch.nn.Module, folder: Path) -> Any:
        adapted = load_adapter(model, folder)
        unread: Any = model.unread
        for name, layer in model.named_modules():
            if is_adapted(layer):
                base, a, b = (unread.origins[f"{name}.{part}weight"] for part in ("", "lora_A.", "lora_B."))
                unread.origins[f"{name}.weight"] = _Merged(
                    base=base, a=a, b=b, rank=layer.r[NAME], scale=layer.scaling[NAME]
                )
        return adapted

    return faulty


def _first_layer_frozen(trained_names: Function) -> Function:
    def faulty(*arguments: Any) -> frozenset[str]:
        return frozenset(n for n in trained_names(*arguments) if not (is_adapter(n) and n.startswith(FIRST)))

    return faulty


def _base_trained(trained_names: Function) -> Function:
    def faulty(model: torch.nn.Module, config: Any) -> frozenset[str]:
        model.get_parameter(BASE).requires_grad_()  # before a library builds its engine
        return frozenset({*trained_names(model, config), BASE})

    return faulty


def _unscaled(merge_adapter: Function) -> Function:
    def faulty(model: Any, folder: Path) -> Any:
        file = folder / CONFIG_FILE
        config = json.loads(file.read_text(encoding="utf-8"))
        file.write_text(json.dumps(config | {"lora_alpha": config["r"], "use_rslora": False}), encoding="utf-8")
        return merge_adapter(model, folder)

    return faulty


ADAPTER_FAULTS = (
    Fault(
        name="adapter-scaled-twice",
        summary="the output of an adapter is multiplied by its scale twice",
        source="https://github.com/Blaizzy/mlx-vlm/issues/841",
        seam="load_adapter",
        stage="log-probs",
        cells=sft("sft-lora", "llama", fsdp2="tp2", deepspeed="dp2.zero2"),
        needs="adapters (lora) with a scale that is not 1, and B that is not 0",
        wrap=_of_adapted(_scaled_twice),
    ),
    Fault(
        name="adapter-counted-twice",
        summary="the adapter is added to the base that it is trained on, so it counts twice",
        source="https://github.com/radixark/miles/pull/1087",
        seam="load_adapter",
        stage="weights",
        cells=sft("sft-lora", "llama", fsdp2="dp2", deepspeed="dp2.zero1"),
        needs="adapters (lora), and B that is not 0",
        wrap=_added_to_base,
    ),
    Fault(
        name="adapters-of-a-layer-frozen",
        summary="adapters of the first layer are not trained",
        source="https://github.com/meta-pytorch/torchforge/issues/592",
        seam="trained_names",
        stage="gradients",
        cells=sft("sft-lora", "llama", fsdp2="dp2", deepspeed="dp2.zero3"),
        blind=("loss",),
        needs="adapters (lora) in the first layer",
        wrap=_first_layer_frozen,
    ),
    Fault(
        name="base-trained-too",
        summary="a matrix of the base is trained beside the adapters",
        source="https://github.com/NVIDIA-NeMo/Automodel/issues/547",
        seam="trained_names",
        stage="gradients",
        cells=sft("sft-lora", "llama", fsdp2="dp2", deepspeed="dp2.zero2"),
        blind=("loss",),
        needs="adapters (lora)",
        wrap=_base_trained,
    ),
)
MERGE_FAULTS = (
    Fault(
        name="merged-without-scale",
        summary="the adapter is merged into the base without its scale",
        source="https://github.com/hao-ai-lab/FastVideo/pull/870",
        seam="merge_adapter",
        stage="weights",
        cells=merge(),
        needs="a phase that merges adapters (lora) whose scale is not 1",
        wrap=_unscaled,
    ),
)


def _of_loaded(change: Callable[[Any, Path], None]) -> Callable[[Function], Function]:
    """Applies ``change`` to a model and its folder, after the model was loaded."""

    def wrap(load: Function) -> Function:
        def faulty(*arguments: Any, **options: Any) -> Any:
            model = load(*arguments, **options)
            change(model, next(argument for argument in arguments if isinstance(argument, Path)))
            return model

        return faulty

    return wrap


def _unscaled_positions(model: Any, path: Path) -> None:
    theta = json.loads((path / "config.json").read_text(encoding="utf-8"))["rope_parameters"]["rope_theta"]
    for module in model.modules():
        if isinstance(scaled := getattr(module, "inv_freq", None), torch.Tensor):
            exponents = torch.arange(len(scaled), dtype=torch.float64) / len(scaled)
            module.inv_freq = (1.0 / theta**exponents).to(scaled)
            module.attention_scaling = 1.0


def _one_key_more(model: Any, path: Path) -> None:
    if hasattr(model, "config") and getattr(
        model.config, "sliding_window", None
    ):  # Hugging Face computes masks from it
        model.config.sliding_window += 1
    for module in model.modules():
        if isinstance(window := getattr(module, "sliding_window", None), int):
            module.sliding_window = window + 1
        if isinstance(window := getattr(module, "window", None), tuple) and window[0] >= 0:  # the Megatron backend
            module.window = (window[0] + 1, window[1])


def read_as_zeros(*endings: str) -> Callable[[Function], Function]:
    """Reads tensors whose names have one of these endings as zeros."""

    def wrap(read_slice: Function) -> Function:
        def faulty(reader: Any, name: str, spans: Any) -> torch.Tensor:
            tensor: torch.Tensor = read_slice(reader, name, spans)
            return torch.zeros_like(tensor) if name.endswith(endings) else tensor

        return faulty

    return wrap


def _uncapped_scores(model: Any, path: Path) -> None:
    for module in model.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = None


def _without_sinks(model: Any, path: Path) -> None:
    """Drops attention sinks: selects a kernel of transformers that ignores them, or patches the Megatron backend.

    The gradients of the sinks are 0. Missing gradients would be found for another reason.
    """
    if hasattr(model, "config"):
        model.config._attn_implementation = "sdpa"
    for module in model.modules():
        if hasattr(module, "sinks"):
            module.register_forward_hook(lambda own, _, output: (output[0] + 0 * _local(own.sinks).sum(), *output[1:]))
        if hasattr(module, "softmax_offset"):
            _forget_sinks(module)


def _local(parameter: Any) -> torch.Tensor:
    """Returns the local part of a DTensor, or the parameter itself. The controller does not import torch's DTensor."""
    part: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part


def _forget_sinks(attention: Any) -> None:
    forward, sinks = attention.forward, attention.softmax_offset

    def without(*arguments: Any, **options: Any) -> torch.Tensor:
        attention.softmax_offset = None
        output = forward(*arguments, **options)
        attention.softmax_offset = sinks
        with_gradient: torch.Tensor = output + 0 * sinks.sum()
        return with_gradient

    attention.forward = without


ARCHITECTURE_FAULTS = (
    Fault(
        name="positions-not-scaled",
        summary="rotary positions have the frequencies of the base alone, without the configuration's scaling",
        source="https://github.com/unslothai/unsloth/pull/6197",
        seam="load_model",
        stage="log-probs",
        cells=sft("sft-packed", "llama3", fsdp2="tp2", deepspeed="dp2.zero2", megatron="pp2"),
        needs="a model with scaled rotary positions",
        wrap=_of_loaded(_unscaled_positions),
    ),
    Fault(
        name="window-one-longer",
        summary="queries of a layer with a sliding window see one key more, because a kernel does not count their own",
        source="https://github.com/huggingface/transformers/issues/39408",
        seam="load_model",
        stage="log-probs",
        cells=sft("sft-packed", "mistral", fsdp2="sp2", deepspeed="dp2.zero1", megatron="sp2"),
        needs="a model with a sliding window, and documents that are longer",
        wrap=_of_loaded(_one_key_more),
    ),
    Fault(
        name="lost-qkv-biases",
        summary="the biases of q, k and v are not loaded, as if the model were a Llama",
        source="https://github.com/ServiceNow/Fast-LLM/pull/398",
        seam="read_slice",
        stage="weights",
        cells=sft("sft-packed", "qwen2", fsdp2="dp2", deepspeed="dp2.zero1", megatron="dp2"),
        needs="a model with biases on q, k and v",
        wrap=read_as_zeros("q_proj.bias", "k_proj.bias", "v_proj.bias"),
    ),
    Fault(
        name="scores-not-capped",
        summary="scores of attention are not soft-capped, because the kernel cannot",
        source="https://github.com/vllm-project/vllm-metal/issues/665",
        seam="hugging_face_model",
        stage="log-probs",
        cells=sft("sft-packed", "gemma2", fsdp2="dp2", deepspeed="dp2.zero2"),
        needs="a model that soft-caps scores",
        wrap=_of_loaded(_uncapped_scores),
    ),
    Fault(
        name="sinks-dropped",
        summary="the softmax of attention is without its learned sinks, because the kernel knows none",
        source="https://github.com/vllm-project/vllm-metal/pull/550",
        seam="load_model",
        stage="routing",
        cells=sft("sft-packed", "gpt-oss", fsdp2="sp2", deepspeed="dp2.zero2", megatron="tp2.seqpar"),
        needs="a model with attention sinks",
        wrap=_of_loaded(_without_sinks),
    ),
)


def _always_training(switch_off_dropout: Function) -> Function:
    def faulty(model: torch.nn.Module) -> None:
        train = model.train
        model.train = lambda mode=True: train()  # type: ignore[method-assign]

    return faulty


def _library_default(transformer_config: Function) -> Function:
    def faulty(*arguments: Any) -> Any:
        config = transformer_config(*arguments)
        config.hidden_dropout = type(config).hidden_dropout  # the default of the dataclass
        return config

    return faulty


def _critic_leaks(finish_gradients: Function) -> Function:
    of_critic: dict[str, torch.Tensor] = {}

    def faulty(trainable: Any) -> None:
        finish_gradients(trainable)
        gradients = dict(_gradients(trainable))
        if trainable.head == "value":
            of_critic.update({name: gradient.clone() for name, gradient in gradients.items()})
            return
        for name in gradients.keys() & of_critic.keys():
            gradients[name].add_(of_critic[name])

    return faulty


def _gradients(trainable: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the gradients that the update reads, by name. Parameters have none where ZeRO 1 to 3 shard gradients."""
    modules = [chunk.module for chunk in trainable.chunks] if hasattr(trainable, "chunks") else [trainable.model]
    for module in modules:
        for name, parameter in module.named_parameters():
            yield name, parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad


MODELS_FAULTS = (
    Fault(
        name="logprobs-in-train-mode",
        summary="old log-probs are computed in training mode, with dropout",
        source="https://github.com/verl-project/verl/pull/4708",
        seam="switch_off_dropout",
        stage="old log-probs",
        cells=rl("grpo", fsdp2="dp2", deepspeed="dp2.zero2", dropout=True),
        needs="dropout in the model's configuration, and in the attention that a backend uses",
        wrap=_always_training,
    ),
    Fault(
        name="dropout-in-updates",
        summary="old log-probs are computed in evaluation mode, and updates are made with dropout",
        source="https://github.com/huggingface/trl/pull/3234",
        seam="switch_off_dropout",
        stage="log-probs",
        cells=rl("grpo", fsdp2="dp2", deepspeed="dp2.zero2", dropout=True),
        needs="dropout in the model's configuration, and in the attention that a backend uses",
        wrap=not_called,
    ),
    Fault(
        name="dropout-by-default",
        summary="updates are made with the dropout that is the library's default, and not the model's",
        source="https://github.com/Human-Agent-Society/reef/pull/536",
        seam="pipeline_config",
        stage="log-probs",
        cells=rl("grpo", megatron="dp2"),
        needs="megatron-core",
        wrap=_library_default,
    ),
    Fault(
        name="critic-leaks-into-policy",
        summary="the critic's gradients are added to those of the policy's parameters of the same names",
        source="https://github.com/huggingface/trl/issues/1108",
        seam="finish_gradients",
        stage="gradients",
        cells=rl("ppo", fsdp2="dp2", deepspeed="dp2.zero0", megatron="dp2"),
        blind=("loss", "loss and norm"),
        needs="a critic, and a second update: the critic's gradients come after the policy's",
        wrap=_critic_leaks,
    ),
)
