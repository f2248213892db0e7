"""Runs the GPU optimizations of Megatron on the CPU, as tasks for tests/megatron_backend/test_megatron_speed.py."""

from typing import Any, cast
from unittest import mock

import torch
from megatron_tasks import new, opened, train, weights_of
from torch import Tensor

from conformance.runtime import RankContext
from impl.megatron import config
from impl.megatron import model as megatron_model


def logits(rank: RankContext, *, layout: str, folders: dict[str, str]) -> list[str]:
    """The dtypes of the logits that outputs are made of in bf16."""
    seen: set[str] = set()
    made = megatron_model.outputs_of

    def noted(result: Tensor, *arguments: Any, **options: Any) -> Any:
        seen.add(str(result.dtype))
        return made(result, *arguments, **options)

    with opened(rank, layout, "bf16") as context, mock.patch.object(megatron_model, "outputs_of", noted):
        model = new(context, folders["policy"])
        train(context, model, 0)
        model.teardown()
    return sorted(seen)


def fused(rank: RankContext, *, layout: str, folders: dict[str, str]) -> tuple[list[bool], float]:
    """Whether AdamW's kernel is the fused one, told to be and not, and how far apart weights are then (fp32).

    Between two steps, the number of updates is written as if a state was taken over.
    """
    weights, kernels = [], []
    with opened(rank, layout, "fp32") as context:
        for in_one in (False, True):
            with mock.patch.object(config, "updates_in_one_kernel", lambda in_one=in_one, **_: in_one):
                model = new(context, folders["policy"])
            train(context, model, 0)
            model.write_state("step", cast(Any, _Same(dict(model.named_tensors("step")))))
            train(context, model, 1)
            kernels.append(any(group["fused"] for group in model.optimizer.param_groups))
            weights.append(weights_of(model))
            model.teardown()
    return kernels, max(float((weight - weights[1][name]).abs().max()) for name, weight in weights[0].items())


class _Same:
    """Reads tensors that are there, as a reader of files does."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def whole(self, name: str) -> Tensor:
        return self.tensors[name].to(torch.float64)
