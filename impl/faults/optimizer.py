"""Plants faults in accumulation, reduction, clipping, the optimizer, and the handling of overflows in fp16.

The loss of the first step shows none of them, and the noise of bf16 hides faults of the optimizer. The suite finds them
because it rebuilds the update from the gradients, and because a sum in bf16 shows in the digits of its result.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from conformance.backends.faults import Fault, Function, not_called
from impl.faults.cells import FP16, HALF, ROUNDING, sft


def _copied_micro_batch(backward: Function) -> Function:
    calls = itertools.count()

    def faulty(trainable: Any, loss: torch.Tensor) -> Any:
        # The second micro-batch overwrites this gradient, which is the same as if it had been zero.
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
        cells=sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="pp2"),
        blind=("loss",),
        needs="accumulation of 2 or more",
        wrap=_copied_micro_batch,
    ),
    Fault(
        name="unreduced-replicas",
        summary="gradients are never reduced over replicas, which drift apart",
        source="https://github.com/pytorch/pytorch/issues/154888",
        seam="reduce_replicas",
        stage="gradients",
        cells=sft("sft-sgd", "llama", deepspeed="dp2.zero0", megatron="dp2"),
        blind=("loss",),
        needs="replicas: zero0, or rep of 2 or more",
        wrap=not_called,
    ),
    Fault(
        name="clip-never",
        summary="large gradients are never clipped, as by a library that takes the maximum of the factor and 1",
        source="https://github.com/deepspeedai/DeepSpeed/pull/5150",
        seam="clip_threshold",
        stage="clipped update",
        cells=sft("sft-sgd", "llama", deepspeed="dp2.zero3", megatron="dp2"),
        blind=("loss",),
        needs="a step whose gradient norm is above max_grad_norm",
        wrap=_clip_never,
    ),
    Fault(
        name="unmarked-shards",
        summary="the gradient norm of a library that clips leaves out shards beyond the first tensor-parallel rank",
        source="docs/findings/deepspeed-zero0-norm.md",
        seam="mark_cut_gradients",
        stage="gradient norm",
        cells=sft("sft-padded", "llama", deepspeed="tp2.zero0", only=HALF),
        blind=("loss",),
        needs="zero0 with tp of 2 or more, in bf16 or fp16",
        wrap=not_called,
    ),
    Fault(
        name="lost-loss-scale",
        summary="gradients are divided by the loss scale of fp16, and the loss was never multiplied by it",
        source="https://github.com/deepspeedai/DeepSpeed/pull/8393",
        seam="forgotten_scale",
        stage="gradients",
        cells=sft("sft-packed", "llama", deepspeed="dp2.zero0", only=FP16),
        blind=("loss",),
        needs="zero0 in fp16",
        wrap=_lost_loss_scale,
    ),
    Fault(
        name="step-at-setup",
        summary="AdamW counts one step before the first one, so all its updates are scaled wrongly",
        source="docs/findings/deepspeed-zero0-half.md",
        seam="forget_steps",
        stage="clipped update",
        cells=sft("sft-padded", "llama", deepspeed="dp2.zero0", only=HALF),
        blind=("loss",),
        needs="AdamW at zero0, in bf16 or fp16",
        wrap=not_called,
    ),
)


def _changed_groups(change: Callable[[dict[str, Any]], None]) -> Callable[[Function], Function]:
    def wrap(create_optimizer: Function) -> Function:
        def faulty(trainable: Any, model: Any, config: Any) -> Any:
            optimizer = create_optimizer(trainable, model, config)
            for group in optimizer.param_groups:
                change(group)
            return optimizer

        return faulty

    return wrap


def _no_decay(group: dict[str, Any]) -> None:
    group.update(weight_decay=0.0, wd_mult=0.0)  # megatron-core's schedule sets the decay to a multiple


def _default_betas(group: dict[str, Any]) -> None:
    group["betas"] = (0.9, 0.999)


def _norms_decayed(create_optimizer: Function) -> Function:
    def faulty(trainable: Any, model: Any, config: Any) -> Any:
        optimizer = create_optimizer(trainable, model, config)
        for group in optimizer.param_groups:
            group.update(weight_decay=config.weight_decay, wd_mult=1.0)  # megatron-core reads the multiple
        return optimizer

    return faulty


def _moments_in_bf16(create_optimizer: Function) -> Function:
    def round_moments(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].to(torch.bfloat16))

    def faulty(trainable: Any, model: Any, config: Any) -> Any:
        created = create_optimizer(trainable, model, config)
        for optimizer in of_torch(created):
            optimizer.register_step_post_hook(round_moments)
        return created

    return faulty


def of_torch(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yields the torch optimizers inside an optimizer of a library."""
    if isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer
    else:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            yield part.optimizer


def _summed_in_bf16(summing_dtype: Function) -> Function:
    def faulty(*arguments: Any) -> Any:
        return "bf16" if isinstance(summing_dtype(*arguments), str) else torch.bfloat16

    return faulty


OPTIMIZER_FAULTS = (
    Fault(
        name="summed-in-bf16",
        summary="gradients are reduced, or added up over micro-batches, in bf16",
        source="https://github.com/ISEEKYAN/Megatron-LM/issues/149",
        seam="summing_dtype",
        stage="gradients",
        cells=sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2", only=HALF),
        blind=("loss",),
        needs="bf16 and at least three summands: micro-batches times ranks with different tokens",
        wrap=_summed_in_bf16,
    ),
    Fault(
        name="no-weight-decay",
        summary="parameter groups are recreated without their weight decay",
        source="https://github.com/pytorch/pytorch/issues/101343",
        seam="create_optimizer",
        stage="clipped update",
        cells=sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2"),
        blind=("loss",),
        needs="AdamW with weight decay",
        wrap=_changed_groups(_no_decay),
    ),
    Fault(
        name="norms-decayed",
        summary="weights of norms are decayed too, because a refactoring lost their exemption",
        source="https://github.com/ServiceNow/Fast-LLM/issues/542",
        seam="create_optimizer",
        stage="clipped update",
        cells=sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2"),
        blind=("loss",),
        needs="AdamW with weight decay, and parameters of one dimension",
        wrap=_norms_decayed,
    ),
    Fault(
        name="default-betas",
        summary="the optimizer has the default betas of its library instead of the configured ones",
        source="https://github.com/EleutherAI/gpt-neox/pull/228",
        seam="create_optimizer",
        stage="weights after N steps",
        cells=sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2"),
        blind=("loss",),
        needs="AdamW and two steps",
        wrap=_changed_groups(_default_betas),
    ),
    Fault(
        name="moments-in-bf16",
        summary="AdamW's moments are held in bf16",
        source="https://github.com/areal-project/AReaL/issues/1292",
        seam="create_optimizer",
        stage="weights after N steps",
        cells=sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2", only=ROUNDING),
        blind=("loss",),
        needs="AdamW, two steps and a precision below the exact tier, where the rounding is not lifted",
        wrap=_moments_in_bf16,
    ),
)


Progress = dict[str, float]


def _with_progress(change: Callable[[Any, Progress, Progress], Progress]) -> Callable[[Function], Function]:
    """Replaces the progress of schedule and loss scale after an update by ``change(trainable, before, after)``."""

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
                state["exp_avg"].mul_(first)  # as an update with zero gradients does
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
        summary="only the first rank finds an overflow, and the other ranks make the update",
        source="https://github.com/pytorch/pytorch/pull/115710",
        seam="find_overflow",
        stage="loss scale",
        cells=sft("sft-overflow", "llama", fsdp2="dp2", only=FP16),
        blind=("loss",),
        needs="fp16, two ranks and an overflow",
        wrap=_of_first_rank,
    ),
    Fault(
        name="skip-counted-by-schedule",
        summary="the learning-rate schedule counts an update that is skipped for an overflow",
        source="https://github.com/Lightning-AI/pytorch-lightning/issues/18828",
        seam="optimizer_step",
        stage="clipped update",
        cells=sft("sft-overflow", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2", only=FP16),
        blind=("loss",),
        needs="fp16, an overflow and a schedule that is not constant",
        wrap=_with_progress(_counted_by_schedule),
    ),
    Fault(
        name="skip-counted-by-optimizer",
        summary="AdamW counts an update that is skipped for an overflow, and its moments decay",
        source="https://github.com/allenai/OLMo-core/pull/309, where it never counts",
        seam="optimizer_step",
        stage="weights after N steps",
        cells=sft("sft-overflow", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2", only=FP16),
        blind=("loss",),
        needs="fp16, AdamW, an overflow and an update after it",
        wrap=_counted_by_optimizer,
    ),
    Fault(
        name="scale-not-halved",
        summary="the loss scale stays as it is at an overflow",
        source="https://github.com/deepspeedai/DeepSpeed/issues/1599, point 2",
        seam="optimizer_step",
        stage="loss scale",
        cells=sft("sft-overflow", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2", only=FP16),
        blind=("loss",),
        needs="fp16 and an overflow",
        wrap=_with_progress(_never_lower),
    ),
    Fault(
        name="scale-never-grows",
        summary="the loss scale falls at overflows and never grows, so gradients underflow in the end",
        source="arXiv 1710.03740, section 3.3: it is increased when there was no overflow for N iterations",
        seam="optimizer_step",
        stage="loss scale",
        cells=sft("sft-overflow", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2", only=FP16),
        blind=("loss",),
        needs="fp16 and as many updates as the scale grows after",
        wrap=_with_progress(_never_higher),
    ),
    Fault(
        name="overflow-stays",
        summary="an overflow stays in the buffer to which the next gradients are added, so every update is skipped",
        source="docs/findings/deepspeed-offload-overflow.md",
        seam="forget_overflow",
        stage="loss scale",
        cells=sft("sft-overflow", "llama", deepspeed="dp2.zero1.offload", only=FP16),
        blind=("loss",),
        needs="fp16, an overflow, an optimizer that is offloaded at ZeRO-1 or 2, and gradients added up in float32",
        wrap=not_called,
    ),
)
