"""Devices: on which GPUs the oracle keeps a model, and how many bytes it needs of them.

Of a model of P trained parameters in float64: weights 8 P, gradients 8 P, and if there is a step after the first one
16 P for AdamW's moments or 8 P for a momentum. Gradients and updates are made tensor by tensor, so no further copy of
the model is ever held. Each GPU needs room for one document beside that: its activations, the largest tensor a few
times while it is updated, and on the first one the logits a few times. That is what SPARE is for.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from conformance.inputs.model import elements_of
from conformance.oracle.policy import Policy
from conformance.scenario import Scenario

SPARE = 0.3  # share of a GPU's free memory


def bytes_needed(scenario: Scenario, models: Mapping[str, Path], policy: Policy) -> int:
    """Of weights, gradients and optimizer states of all models."""
    moments = {"adamw": 2, "sgd": 1}[scenario.optimizer.name] if scenario.steps > 1 else 0
    total = 0
    for role in scenario.objective.roles:
        elements = elements_of({role.name: models[role.name]})
        total += elements * (policy.stable.itemsize * (2 + moments) if role.trained else policy.compute.itemsize)
    return total


def devices_for(device: str, needed: int) -> list[str]:
    """``device``, or of the GPUs from this one on as few as have room for a model, which they share equally.

    Those with the most free memory are taken, because another program may have filled some. If all together have not
    enough room, all are given, and the run will say that memory is short.
    """
    first = torch.device(device)
    if first.type == "cpu":
        return [device]
    gpus = range(first.index or 0, torch.cuda.device_count())
    room = {gpu: torch.cuda.mem_get_info(gpu)[0] * (1 - SPARE) for gpu in gpus}
    emptiest = sorted(gpus, key=lambda gpu: -room[gpu])  # equal ones stay in their order
    enough = (count for count in range(1, len(gpus) + 1) if count * room[emptiest[count - 1]] >= needed)
    return [f"cuda:{gpu}" for gpu in sorted(emptiest[: next(enough, len(gpus))])]
