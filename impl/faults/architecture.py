"""Faults of architectures: a part of what a model's configuration says that whoever loads the model does not know."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from conformance.faults.fault import Fault, Function


def _of_loaded(change: Callable[[Any, Path], None]) -> Callable[[Function], Function]:
    """A fault that changes a model as it is loaded, by a function that is given its folder."""

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
    if hasattr(model, "config") and getattr(model.config, "sliding_window", None):  # Hugging Face: for the masks
        model.config.sliding_window += 1
    for module in model.modules():
        if isinstance(window := getattr(module, "sliding_window", None), int):
            module.sliding_window = window + 1
        if isinstance(window := getattr(module, "window", None), tuple) and window[0] >= 0:  # here on megatron-core
            module.window = (window[0] + 1, window[1])


def read_as_zeros(*endings: str) -> Callable[[Function], Function]:
    """A fault that leaves tensors with such names unread."""

    def wrap(read_slice: Function) -> Function:
        def faulty(reader: Any, name: str, spans: Any) -> torch.Tensor:
            found: torch.Tensor = read_slice(reader, name, spans)
            return torch.zeros_like(found) if name.endswith(endings) else found

        return faulty

    return wrap


def _uncapped_scores(model: Any, path: Path) -> None:
    for module in model.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = None


def _without_sinks(model: Any, path: Path) -> None:
    """By transformers' interface to torch's kernel, which is given the sinks and does nothing with them; or here on
    megatron-core.

    Their gradients are 0, because a parameter without one would show by itself.
    """
    if hasattr(model, "config"):
        model.config._attn_implementation = "sdpa"
    for module in model.modules():
        if hasattr(module, "sinks"):
            module.register_forward_hook(lambda own, _, found: (found[0] + 0 * _local(own.sinks).sum(), *found[1:]))
        if hasattr(module, "softmax_offset"):
            _forget_sinks(module)


def _local(parameter: Any) -> torch.Tensor:
    """A parameter, or this rank's part of it, if that is a DTensor: whose module imports too much for a controller."""
    part: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part


def _forget_sinks(attention: Any) -> None:
    forward, sinks = attention.forward, attention.softmax_offset

    def without(*arguments: Any, **options: Any) -> torch.Tensor:
        attention.softmax_offset = None
        found = forward(*arguments, **options)
        attention.softmax_offset = sinks
        with_gradient: torch.Tensor = found + 0 * sinks.sum()
        return with_gradient

    attention.forward = without


ARCHITECTURE_FAULTS = (
    Fault(
        name="positions-not-scaled",
        summary="rotary positions have the frequencies of the base alone, without the configuration's scaling",
        source="https://github.com/unslothai/unsloth/pull/6197",
        seam="load_model",
        stage="log-probs",
        loss_blind=False,
        needs="a model with scaled rotary positions",
        wrap=_of_loaded(_unscaled_positions),
    ),
    Fault(
        name="window-one-longer",
        summary="queries of a layer with a sliding window see one key more, because a kernel does not count their own",
        source="https://github.com/huggingface/transformers/issues/39408",
        seam="load_model",
        stage="log-probs",
        loss_blind=False,
        needs="a model with a sliding window, and documents that are longer",
        wrap=_of_loaded(_one_key_more),
    ),
    Fault(
        name="lost-qkv-biases",
        summary="the biases of q, k and v are not loaded, as if the model were a Llama",
        source="https://github.com/ServiceNow/Fast-LLM/pull/398",
        seam="read_slice",
        stage="weights",
        loss_blind=False,
        needs="a model with biases on q, k and v",
        wrap=read_as_zeros("q_proj.bias", "k_proj.bias", "v_proj.bias"),
    ),
    Fault(
        name="scores-not-capped",
        summary="scores of attention are not soft-capped, because the kernel cannot",
        source="https://github.com/vllm-project/vllm-metal/issues/665",
        seam="hugging_face_model",
        stage="log-probs",
        loss_blind=False,
        needs="a model that soft-caps scores",
        wrap=_of_loaded(_uncapped_scores),
    ),
    Fault(
        name="sinks-dropped",
        summary="the softmax of attention is without its learned sinks, because the kernel knows none",
        source="https://github.com/vllm-project/vllm-metal/pull/550",
        seam="load_model",
        stage="routing",
        loss_blind=False,
        needs="a model with attention sinks",
        wrap=_of_loaded(_without_sinks),
    ),
)
