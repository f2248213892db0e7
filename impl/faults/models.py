"""Faults of the models that a cell of reinforcement learning runs: dropout in them, and gradients of one in another."""

from collections.abc import Iterator
from typing import Any

import torch

from conformance.faults.fault import Fault, Function, not_called


def _always_training(switch_off_dropout: Function) -> Function:
    def faulty(model: torch.nn.Module) -> None:
        train = model.train
        model.train = lambda mode=True: train()  # type: ignore[method-assign]

    return faulty


def _library_default(transformer_config: Function) -> Function:
    def faulty(*arguments: Any) -> Any:
        config = transformer_config(*arguments)
        config.hidden_dropout = type(config).hidden_dropout  # a dataclass's default
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
    """What an update is about to read, where the parameters have it; of what ZeRO 1 to 3 cut they have none."""
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
        loss_blind=False,
        needs="dropout in the model's configuration, and in the attention that a backend uses",
        wrap=_always_training,
    ),
    Fault(
        name="dropout-in-updates",
        summary="old log-probs are computed in evaluation mode, and updates are made with dropout",
        source="https://github.com/huggingface/trl/pull/3234",
        seam="switch_off_dropout",
        stage="log-probs",
        loss_blind=False,
        needs="dropout in the model's configuration, and in the attention that a backend uses",
        wrap=not_called,
    ),
    Fault(
        name="dropout-by-default",
        summary="updates are made with the dropout that is the library's default, and not the model's",
        source="https://github.com/Human-Agent-Society/reef/pull/536",
        seam="pipeline_config",
        stage="log-probs",
        loss_blind=False,
        needs="megatron-core",
        wrap=_library_default,
    ),
    Fault(
        name="critic-leaks-into-policy",
        summary="the critic's gradients are added to those of the policy's parameters of the same names",
        source="https://github.com/huggingface/trl/issues/1108",
        seam="finish_gradients",
        stage="gradients",
        loss_blind=True,
        needs="a critic, and a second update: the critic's gradients come after the policy's",
        wrap=_critic_leaks,
    ),
)
