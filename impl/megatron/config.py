"""megatron-core's settings of optimizer, schedule and gradient reduction; progress of schedule and loss scale."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from conformance.spec.precision import BF16, F16
from conformance.spec.scenario import OptimizerConfig, ScheduleConfig
from impl.engine.optimizers import updates_in_one_kernel
from impl.interface.protocol import ContextConfig


def clip_threshold(max_grad_norm: float | None) -> float:
    """The value of megatron-core's ``clip_grad``, in which 0 means no clipping."""
    return 0.0 if max_grad_norm is None else max_grad_norm


def cuts_optimizer(config: ContextConfig) -> bool:
    """Whether the layout asks for the distributed optimizer (ZeRO-1)."""
    return config.layout.zero == 1


def summing_dtype() -> torch.dtype:
    """The dtype in which half-precision gradients are reduced and accumulated."""
    return torch.float32


def reduction_settings(config: ContextConfig, *, parameters: int) -> DistributedDataParallelConfig:
    """The settings of the gradient reduction. ``parameters``: the number of this rank's parameters.

    Overlap needs several buckets; with megatron-core's default size, a small model has only one.
    """
    overlap = "overlap" in config.layout.options
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.tier.is_half and summing_dtype() == torch.float32,
        use_distributed_optimizer=cuts_optimizer(config),
        bucket_size=parameters // 4 if overlap else None,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and cuts_optimizer(config),
    )


def optimizer_settings(config: ContextConfig, optimizer: OptimizerConfig) -> MegatronOptimizerConfig:
    kind: dict[str, Any] = (
        {"optimizer": "sgd", "sgd_momentum": optimizer.momentum}
        if optimizer.name == "sgd"
        else {
            "optimizer": "adam",
            "adam_beta1": optimizer.betas[0],
            "adam_beta2": optimizer.betas[1],
            "adam_eps": optimizer.eps,
        }
    )
    return MegatronOptimizerConfig(
        lr=optimizer.lr,
        min_lr=0.0,
        weight_decay=optimizer.weight_decay,
        clip_grad=clip_threshold(optimizer.max_grad_norm),
        params_dtype=config.tier.compute.dtype,
        bf16=config.tier.compute == BF16,
        fp16=config.tier.compute == F16,
        initial_loss_scale=2.0**config.loss_scale.initial_power,
        loss_scale_window=config.loss_scale.growth_interval,
        hysteresis=1,  # by default the second overflow lowers the scale
        use_distributed_optimizer=cuts_optimizer(config),
        overlap_param_gather="overlap" in config.layout.options and cuts_optimizer(config),
        **kind,
    )


def update_in_one_kernel(made: Any, config: ContextConfig) -> None:
    """Let torch's AdamW run as its fused kernel where that is right; megatron-core makes it without.

    ``made``: megatron-core's chain of optimizers, which have made no update yet.
    """
    if not updates_in_one_kernel(device=config.device, precision=config.precision):
        return
    for one in made.chained_optimizers:
        if isinstance(one.optimizer, torch.optim.AdamW):
            for group in one.optimizer.param_groups:
                group["fused"] = True


class SharedScale:
    """The loss scale of all optimizers in a chain, each of which would have one of its own.

    Each tells it, once a step, whether its gradients overflow; the scale moves when all have, by what any has told
    (docs/findings/megatron-two-loss-scales.md). ``scaler``: megatron-core's, of which all else is asked.
    """

    def __init__(self, scaler: Any, *, sharers: int) -> None:
        self._scaler, self._sharers = scaler, sharers
        self._told: list[bool] = []

    def update(self, found_inf: bool) -> None:
        self._told.append(found_inf)
        if len(self._told) == self._sharers:
            self._scaler.update(any(self._told))
            self._told.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scaler, name)


def share_scale(made: Any) -> None:
    """Let the optimizers in megatron-core's chain have one loss scale, where they have any and are several."""
    first, *others = made.chained_optimizers
    if others and getattr(first, "grad_scaler", None):
        shared = SharedScale(first.grad_scaler, sharers=1 + len(others))
        for one in made.chained_optimizers:
            one.grad_scaler = shared


def undecayed() -> dict[ParamKey, Any]:
    """Which parameters have no weight decay, for a model whose experts have biases.

    By its own rule megatron-core would decay none with one dimension. Hugging Face holds biases of experts stacked, and
    by their dimensions there the scenario's convention has them decayed.
    """
    flat = ParamWithNamePredicate(
        name="flat_but_not_of_experts", fn=lambda weight, name: weight.ndim == 1 and ".local_experts." not in name
    )
    return {ParamKey(with_name_predicate=flat): {"wd_mult": 0.0}}


def scheduler(made: MegatronOptimizer, optimizer: OptimizerConfig, schedule: ScheduleConfig) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay; without a weight decay, exempt parameters would decay too."""
    lowest = optimizer.lr * schedule.min_factor
    for group in made.param_groups:
        group["min_lr"] = lowest  # the group's own value counts, and the optimizer has set it to 0
    return OptimizerParamScheduler(
        made,
        init_lr=0.0,
        max_lr=optimizer.lr,
        min_lr=lowest,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=max(schedule.total_steps, schedule.warmup_steps + 1),
        lr_decay_style=schedule.name,
        start_wd=optimizer.weight_decay,
        end_wd=optimizer.weight_decay,
        wd_incr_steps=schedule.total_steps,
        wd_incr_style="constant",
    )


def read_progress(scheduler: OptimizerParamScheduler, scaler: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the progress of schedule and loss scale as
    ``impl.interface.protocol.Trainable.named_tensors("progress")`` does.

    ``scaler``: megatron-core's grad scaler; None if there is no loss scale.
    """
    found = {"schedule": float(scheduler.num_steps)}
    if scaler:
        found |= {"loss_scale": float(scaler.scale), "good_steps": float(scaler._growth_tracker)}
    yield from ((name, torch.tensor(value, dtype=torch.float64)) for name, value in found.items())


def set_progress(scheduler: OptimizerParamScheduler, scaler: Any, progress: Mapping[str, float]) -> None:
    """Set the numbers that ``read_progress`` yields; the loss scale only if ``scaler`` and ``progress`` have one.

    The number of overflows in a row that the library tolerates before it lowers the scale is in no state; its count
    starts anew.
    """
    scheduler.num_steps = 0
    scheduler.step(int(progress["schedule"]))
    if scaler and "loss_scale" in progress:
        scale = torch.full_like(scaler.scale, progress["loss_scale"])
        found = {"scale": scale, "growth_tracker": int(progress.get("good_steps", 0))}
        scaler.load_state_dict(scaler.state_dict() | found)


def resolved_optimizer(made: MegatronOptimizer, chunks: Sequence[Any]) -> dict[str, Any]:
    """The settings of optimizer and gradient reduction that are really in use, as JSON values."""
    group, reduction = made.param_groups[0], chunks[0].ddp_config
    return {
        "optimizer": type(made.optimizer).__name__,
        "optimizer_wrapper": type(made).__name__,
        "optimizer_defaults": {k: v for k, v in group.items() if isinstance(v, (int, float, str, bool, tuple))},
        "max_grad_norm": made.config.clip_grad or None,
        "buckets": len(chunks[0].bucket_groups),
        "overlaps_reduction": reduction.overlap_grad_reduce,
        "overlaps_gathering": reduction.overlap_param_gather,
    }
