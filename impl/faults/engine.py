"""Faults of training engines that accumulate, reduce and clip by themselves: what these got wrong in public."""

import itertools
from typing import Any

import torch

from conformance.faults.fault import Fault, Function, not_called


def _copied_micro_batch(backward: Function) -> Function:
    calls = itertools.count()

    def faulty(trainable: Any, loss: torch.Tensor) -> Any:
        # What the second micro-batch overwrites might as well have been zero.
        count = trainable.context.config.accumulation
        overwritten = count > 1 and next(calls) % count == 0
        return backward(trainable, loss * 0 if overwritten else loss)

    return faulty


def _clip_never(clip_threshold: Function) -> Function:
    def faulty(max_norm: float | None) -> Any:
        return clip_threshold(None)

    return faulty


def _lost_loss_scale(forgotten_scale: Function) -> Function:
    def faulty(trainable: Any) -> float:
        return 1.0

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
        wrap=not_called,
    ),
    Fault(
        name="clip-never",
        summary="large gradients stay large, as where a library that clips by itself takes the max of factor and 1",
        source="https://github.com/deepspeedai/DeepSpeed/pull/5150",
        seam="clip_threshold",
        stage="clipped update",
        loss_blind=True,
        needs="a step whose gradient norm is above max_grad_norm",
        wrap=_clip_never,
    ),
    Fault(
        name="unmarked-shards",
        summary="the norm that a library clips by leaves out shards beyond the first tensor-parallel rank's",
        source="docs/findings/deepspeed-zero0-norm.md",
        seam="mark_cut_gradients",
        stage="gradient norm",
        loss_blind=True,
        needs="zero0 with tp of 2 or more, in bf16 or fp16",
        wrap=not_called,
    ),
    Fault(
        name="lost-loss-scale",
        summary="gradients are divided by the loss scale of fp16, and the loss was never multiplied by it",
        source="https://github.com/deepspeedai/DeepSpeed/pull/8393",
        seam="forgotten_scale",
        stage="gradients",
        loss_blind=True,
        needs="zero0 in fp16",
        wrap=_lost_loss_scale,
    ),
    Fault(
        name="step-at-setup",
        summary="AdamW has counted a step before the first, so all its updates are scaled wrongly",
        source="docs/findings/deepspeed-zero0-half.md",
        seam="forget_steps",
        stage="clipped update",
        loss_blind=True,
        needs="AdamW at zero0, in bf16 or fp16",
        wrap=not_called,
    ),
)
