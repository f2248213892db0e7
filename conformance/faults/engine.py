"""Faults of training engines that accumulate, reduce and clip by themselves: what these got wrong in public."""

import itertools
from typing import Any

import torch

from conformance.faults.fault import Fault, Function


def _copied_micro_batch(backward: Function) -> Function:
    calls = itertools.count()

    def faulty(strategy: Any, loss: torch.Tensor) -> Any:
        # What the second micro-batch overwrites might as well have been zero.
        count = strategy.config.accumulation
        overwritten = count > 1 and next(calls) % count == 0
        return backward(strategy, loss * 0 if overwritten else loss)

    return faulty


def _unreduced_replicas(reduce_replicas: Function) -> Function:
    def faulty(*args: Any, **kwargs: Any) -> None:
        return None

    return faulty


def _clip_never(clip_threshold: Function) -> Function:
    def faulty(max_norm: float | None) -> Any:
        return clip_threshold(None)

    return faulty


ENGINE_FAULTS = (
    Fault(
        name="copied-micro-batch",
        summary="the second micro-batch's gradients are copied over the first's instead of added",
        source="https://github.com/deepspeedai/DeepSpeed/pull/6550",
        seam="backward",
        stage="gradients",
        loss_blind=True,
        needs="accumulation of 2 or more",
        wrap=_copied_micro_batch,
    ),
    Fault(
        name="unreduced-replicas",
        summary="gradients are never reduced over replicas, which drift apart",
        source="https://github.com/pytorch/pytorch/issues/154888",
        seam="reduce_replicas",
        stage="gradients",
        loss_blind=True,
        needs="replicas: zero0, or rep of 2 or more",
        wrap=_unreduced_replicas,
    ),
    Fault(
        name="clip-never",
        summary="a library that clips by itself bounds the factor by max instead of min: large gradients stay large",
        source="https://github.com/deepspeedai/DeepSpeed/pull/5150",
        seam="clip_threshold",
        stage="clipped update",
        loss_blind=True,
        needs="a step whose gradient norm is above max_grad_norm",
        wrap=_clip_never,
    ),
)
