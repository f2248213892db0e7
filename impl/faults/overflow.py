"""Faults of updates that overflow in fp16: the loss sees none of them, and most runs never come to an overflow."""

from collections.abc import Callable
from typing import Any

import torch

from conformance.faults.fault import Fault, Function, not_called
from impl.faults.optimizer import of_torch

Progress = dict[str, float]


def _with_progress(change: Callable[[Any, Progress, Progress], Progress]) -> Callable[[Function], Function]:
    """``change(trainable, before, after)`` gives the progress of schedule and loss scale that an update leaves."""

    def wrap(optimizer_step: Function) -> Function:
        def faulty(trainable: Any) -> Any:
            before = _progress(trainable)
            norm = optimizer_step(trainable)
            after = _progress(trainable)
            if (changed := change(trainable, before, after)) != after:
                trainable.set_progress(changed)
            return norm

        return faulty

    return wrap


def _progress(trainable: Any) -> Progress:
    return {name: float(number) for name, number in trainable.named_tensors("progress")}


def _counted_by_schedule(trainable: Any, before: Progress, after: Progress) -> Progress:
    return after | {"schedule": after["schedule"] + trainable.skipped}


def _never_lower(trainable: Any, before: Progress, after: Progress) -> Progress:
    return after | {"loss_scale": max(before["loss_scale"], after["loss_scale"])} if "loss_scale" in after else after


def _never_higher(trainable: Any, before: Progress, after: Progress) -> Progress:
    return after | {"loss_scale": min(before["loss_scale"], after["loss_scale"])} if "loss_scale" in after else after


def _counted_by_optimizer(optimizer_step: Function) -> Function:
    def faulty(trainable: Any) -> Any:
        norm = optimizer_step(trainable)
        for optimizer in of_torch(trainable.optimizer) if trainable.skipped else ():
            first, second = optimizer.param_groups[0]["betas"]
            for state in optimizer.state.values():
                state["exp_avg"].mul_(first)  # as a gradient of zeros does
                state["exp_avg_sq"].mul_(second)
                state["step"] += 1
        return norm

    return faulty


def _of_first_rank(find_overflow: Function) -> Function:
    def faulty(*arguments: Any) -> Any:
        found = find_overflow(*arguments)
        if torch.distributed.get_rank() > 0:
            for number in found.values():
                number.zero_()
        return found

    return faulty


OVERFLOW_FAULTS = (
    Fault(
        name="overflow-on-one-rank",
        summary="an overflow is known to the first rank only, and the others make the update",
        source="https://github.com/pytorch/pytorch/pull/115710",
        seam="find_overflow",
        stage="loss scale",
        loss_blind=True,
        needs="fp16, two ranks and an overflow",
        wrap=_of_first_rank,
    ),
    Fault(
        name="skip-counted-by-schedule",
        summary="the learning-rate schedule counts an update that is skipped for an overflow",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/18828",
        seam="optimizer_step",
        stage="clipped update",
        loss_blind=True,
        needs="fp16, an overflow and a schedule that is not constant",
        wrap=_with_progress(_counted_by_schedule),
    ),
    Fault(
        name="skip-counted-by-optimizer",
        summary="AdamW counts an update that is skipped for an overflow, and its moments decay",
        source="https://github.com/allenai/OLMo-core/pull/309, where it never counts",
        seam="optimizer_step",
        stage="weights after N steps",
        loss_blind=True,
        needs="fp16, AdamW, an overflow and an update after it",
        wrap=_counted_by_optimizer,
    ),
    Fault(
        name="scale-not-halved",
        summary="the loss scale stays as it is at an overflow",
        source="https://github.com/deepspeedai/DeepSpeed/issues/1599, point 2",
        seam="optimizer_step",
        stage="loss scale",
        loss_blind=True,
        needs="fp16 and an overflow",
        wrap=_with_progress(_never_lower),
    ),
    Fault(
        name="scale-never-grows",
        summary="the loss scale falls at overflows and never grows, so gradients underflow in the end",
        source="arXiv 1710.03740, section 3.3: it is increased when there was no overflow for N iterations",
        seam="optimizer_step",
        stage="loss scale",
        loss_blind=True,
        needs="fp16 and as many updates as the scale grows after",
        wrap=_with_progress(_never_higher),
    ),
    Fault(
        name="overflow-stays",
        summary="what overflowed stays in a buffer that the next gradients are added to, so every update is skipped",
        source="docs/findings/deepspeed-offload-overflow.md",
        seam="forget_overflow",
        stage="loss scale",
        loss_blind=True,
        needs="fp16, an overflow, an optimizer that is offloaded at ZeRO-1 or 2, and gradients added up in float32",
        wrap=not_called,
    ),
)
