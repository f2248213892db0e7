"""Configures megatron-core's optimizer, schedule and gradient reduction; reads and sets schedule and loss scale."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from conformance.spec.layout import Layout
from conformance.spec.precision import BF16, F16
from conformance.spec.scenario import OptimizerConfig, ScheduleConfig
from impl.engine.optimizers import updates_in_one_kernel
from impl.interface.trainable import ContextConfig, code_that_ran
from impl.megatron.refusals import RECIPES
from impl.megatron.releases import dtypes_of_buffers

# Megatron-FSDP's names of the ZeRO stages.
_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def clip_threshold(max_grad_norm: float | None) -> float:
    """Returns the value of megatron-core's ``clip_grad``, in which 0 means no clipping."""
    return 0.0 if max_grad_norm is None else max_grad_norm


def shards_optimizer(config: ContextConfig) -> bool:
    """Whether the layout asks for the distributed optimizer: ZeRO-1, or more with Megatron-FSDP."""
    return bool(config.layout.zero)


def is_fully_sharded(config: ContextConfig) -> bool:
    """Whether the layout asks for Megatron-FSDP."""
    return "mfsdp" in config.layout.options


def summing_dtype(config: ContextConfig) -> torch.dtype:
    """Returns the dtype in which half-precision gradients are reduced and accumulated."""
    return config.tier.summing.dtype


def reduction_settings(config: ContextConfig, *, parameters: int) -> DistributedDataParallelConfig:
    """Returns the settings of the gradient reduction. ``parameters``: the number of this rank's parameters.

    Overlap needs several buckets; with megatron-core's default size, a small model has only one.
    """
    overlap, stage = "overlap" in config.layout.options, config.layout.zero or 0
    further: dict[str, Any] = {}
    if is_fully_sharded(config):
        further = {
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": _STRATEGIES[stage],
            # Without masters, which the library keeps in float32, the optimizer updates the weights themselves.
            **dtypes_of_buffers(*((torch.float32, summing_dtype(config)) if config.tier.is_half else (None, None))),
            "gradient_reduce_div_fusion": not _sums_by_gloo(config.device),  # which cannot scale while it sums
        }
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.tier.is_half and summing_dtype(config) == torch.float32,
        use_distributed_optimizer=shards_optimizer(config),
        bucket_size=parameters // 4 if overlap else None,
        overlap_grad_reduce=overlap or stage >= 2,
        overlap_param_gather=(overlap and shards_optimizer(config)) or stage == 3,
        **further,
    )


def _sums_by_gloo(device: str) -> bool:
    backends = parallel_state.get_data_parallel_group()._get_backend(torch.device(device))
    return bool(backends.name() == "gloo")


def run_by_hand(
    *, forward_step_func: Callable[..., Any], data_iterator: Any, model: Any, num_microbatches: int, **_: Any
) -> None:
    """Trains on the micro-batches of a step as a loop without megatron-core's schedules does.

    It takes the arguments of such a schedule.
    """
    scale = model.config.grad_scale_func or (lambda loss: loss)
    per_token, counted = model.config.calculate_per_token_loss, []
    for index in range(num_microbatches):
        with nullcontext() if index == num_microbatches - 1 else model.no_sync():
            result, finish = forward_step_func(data_iterator, model)
            loss, tokens, _ = finish(result)
            counted.append(tokens)
            scale(loss if per_token else loss / num_microbatches).backward()
    finalize_model_grads([model], torch.stack(counted).sum(dtype=torch.int) if per_token else None)


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
        use_distributed_optimizer=shards_optimizer(config) and optimizer.name != "muon",
        overlap_param_gather="overlap" in config.layout.options and config.layout.zero == 1,
        # It also says that gradients, masters and moments have dtypes of their own, by default float32.
        use_precision_aware_optimizer="remainders" in config.layout.options,
        store_param_remainders="remainders" in config.layout.options,
        **kind,
    )


def update_in_one_kernel(chain: Any, config: ContextConfig) -> None:
    """Switches torch's AdamW to its fused kernel where that kernel is right; megatron-core leaves it off.

    ``chain``: megatron-core's chain of optimizers, before the first update.
    """
    if not updates_in_one_kernel(device=config.device, precision=config.precision):
        return
    for one in chain.chained_optimizers:
        if isinstance(one.optimizer, torch.optim.AdamW):
            for group in one.optimizer.param_groups:
                group["fused"] = True


class SharedScale:
    """Shares one loss scale among all optimizers in a chain (docs/findings/megatron-two-loss-scales.md).

    Each optimizer reports once a step whether its gradients overflow. After the last report the scale changes, as an
    overflow if any optimizer reported one. All other attributes are those of ``scaler``, megatron-core's grad scaler.
    """

    def __init__(self, scaler: Any, *, sharers: int) -> None:
        self._scaler, self._sharers = scaler, sharers
        self._overflows: list[bool] = []

    def update(self, found_inf: bool) -> None:
        self._overflows.append(found_inf)
        if len(self._overflows) == self._sharers:
            self._scaler.update(any(self._overflows))
            self._overflows.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scaler, name)


def share_scale(chain: Any) -> None:
    """Gives all optimizers in megatron-core's chain one loss scale, if they have any."""
    first, *rest = chain.chained_optimizers
    if rest and getattr(first, "grad_scaler", None):
        shared = SharedScale(first.grad_scaler, sharers=1 + len(rest))
        for one in chain.chained_optimizers:
            one.grad_scaler = shared


def undecayed() -> dict[ParamKey, Any]:
    """Returns the weight-decay exemptions of a model whose experts have biases.

    megatron-core exempts every parameter with one dimension. Hugging Face stacks the biases of experts into two
    dimensions, so by the scenario's convention they have weight decay.
    """
    flat = ParamWithNamePredicate(
        name="flat_but_not_of_experts", fn=lambda weight, name: weight.ndim == 1 and ".local_experts." not in name
    )
    return {ParamKey(with_name_predicate=flat): {"wd_mult": 0.0}}


def scheduler(
    chain: MegatronOptimizer, optimizer: OptimizerConfig, schedule: ScheduleConfig
) -> OptimizerParamScheduler:
    """Creates the schedule of learning rate and weight decay; without the latter, exempt parameters would decay too."""
    lowest = optimizer.lr * schedule.min_factor
    for group in chain.param_groups:
        group["min_lr"] = lowest  # the group's own value counts, and the optimizer has set it to 0
    return OptimizerParamScheduler(
        chain,
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
    """Yields the progress of schedule and loss scale, as ``Trainable.named_tensors("progress")`` defines it.

    ``scaler``: megatron-core's grad scaler; None if there is no loss scale.
    """
    found = {"schedule": float(scheduler.num_steps)}
    if scaler:
        found |= {"loss_scale": float(scaler.scale), "good_steps": float(scaler._growth_tracker)}
    yield from ((name, torch.tensor(value, dtype=torch.float64)) for name, value in found.items())


def set_progress(scheduler: OptimizerParamScheduler, scaler: Any, progress: Mapping[str, float]) -> None:
    """Sets the numbers that ``read_progress`` yields; the loss scale only if ``scaler`` and ``progress`` have one.

    The count of consecutive overflows starts anew, because no state contains it.
    """
    scheduler.num_steps = 0
    scheduler.step(int(progress["schedule"]))
    if scaler and "loss_scale" in progress:
        scale = torch.full_like(scaler.scale, progress["loss_scale"])
        found = {"scale": scale, "growth_tracker": int(progress.get("good_steps", 0))}
        scaler.load_state_dict(scaler.state_dict() | found)


def resolved_optimizer(optimizer: MegatronOptimizer, chunks: Sequence[Any]) -> dict[str, Any]:
    """Returns the settings of optimizer and gradient reduction that are in use, as JSON values."""
    group, reduction = optimizer.param_groups[0], chunks[0].ddp_config
    return {
        "optimizer": type(optimizer.optimizer).__name__,
        "code": code_that_ran(
            optimizer=optimizer,
            update=optimizer.optimizer,
            gradients=torch.float32 if reduction.grad_reduce_in_fp32 else optimizer.config.params_dtype,
        ),
        "optimizer_defaults": {k: v for k, v in group.items() if isinstance(v, (int, float, str, bool, tuple))},
        "max_grad_norm": optimizer.config.clip_grad or None,
        "buckets": len(
            chunks[0].param_and_grad_buffer.parameter_groups if reduction.use_megatron_fsdp else chunks[0].bucket_groups
        ),
        "overlaps_reduction": reduction.overlap_grad_reduce,
        "overlaps_gathering": reduction.overlap_param_gather,
    }


HISTORY = 4  # micro-batches whose largest magnitude is the scale of the next, with fp8delayed


def float8_settings(layout: Layout) -> dict[str, Any]:
    """Returns the fields of megatron-core's configuration for the recipe of a layout; none without."""
    if layout.float8 is None:
        return {}
    number_format, recipe = RECIPES[layout.float8]
    return {
        "fp8": number_format,
        "fp8_recipe": recipe,
        "fp8_margin": 0,
        "fp8_amax_history_len": HISTORY,
        "fp8_amax_compute_algo": "max",
        "fp8_wgrad": True,
        "fp8_param": False,
        "fp8_dot_product_attention": False,
        "fp8_multi_head_attention": False,
        "tp_only_amax_red": False,
        "first_last_layers_bf16": "fp8ends" in layout.options,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 1,
    }
