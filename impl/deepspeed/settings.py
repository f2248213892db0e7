"""DeepSpeed's JSON configuration, from what a context and an optimizer are told."""

from typing import Any

from conformance.layout import Layout
from conformance.scenario import OptimizerConfig
from impl.strategy import ContextConfig

DEFAULT_STAGE = 3  # cuts what FSDP2 cuts
NEVER = 10**9


def zero_stage(layout: Layout) -> int:
    return DEFAULT_STAGE if layout.zero is None else layout.zero


def clip_threshold(max_grad_norm: float | None) -> float:
    """DeepSpeed's ``gradient_clipping``, where 0 means none."""
    return 0.0 if max_grad_norm is None else max_grad_norm


def summing_dtype(config: ContextConfig) -> str:
    """In which half-precision gradients are reduced and added up."""
    return "fp32"


def training_settings(config: ContextConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    """The dictionary for an engine that trains."""
    settings: dict[str, Any] = {
        **cutting_settings(config),
        "gradient_accumulation_steps": config.accumulation,
        "gradient_clipping": clip_threshold(optimizer.max_grad_norm),
        "zero_allow_untested_optimizer": True,  # SGD; nothing else is different
        "zero_force_ds_cpu_optimizer": False,  # offload with torch's AdamW: no op to compile
    }
    if config.precision == "bf16":
        settings["bf16"] = {"enabled": True}
    if config.precision == "fp16":
        # A scale that falls at the first overflow, as ZeRO-0's does, and as those of other backends.
        settings["fp16"] = {"enabled": True, "initial_scale_power": 12, "hysteresis": 1}
    if config.precision in ("bf16", "fp16"):
        # float32 masters in any case. Gradients are reduced in float32, and added up over micro-batches in float32 by
        # all stages that offer it: at 0 they are the parameters' own, in half precision.
        settings["communication_data_type"] = summing_dtype(config)
        if zero_stage(config.layout) > 0:
            settings["data_types"] = {"grad_accum_dtype": summing_dtype(config)}
    if "ownopt" in config.layout.options:
        settings["optimizer"] = _optimizer(config, optimizer)
    return settings


def frozen_settings(config: ContextConfig) -> dict[str, Any]:
    """The dictionary for an engine without an optimizer, around a model that is in its compute dtype already.

    ZeRO-3 cuts the parameters of such a model, too; the other stages cut nothing of it, and want an optimizer.
    """
    settings = cutting_settings(config)
    return settings if zero_stage(config.layout) == 3 else {**settings, "zero_optimization": {"stage": 0}}


def cutting_settings(config: ContextConfig) -> dict[str, Any]:
    """What all engines have in common; an engine does not look at the rows per micro-batch, which vary."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": NEVER,
        "zero_optimization": _zero(config),
    }
    if config.layout.tp > 1:
        # Whole logits on every rank; a tied head would be cut along the vocabulary by default.
        settings["tensor_parallel"] = {"autotp_size": config.layout.tp, "vocab_parallel_lm_head": False}
    return settings


def _optimizer(config: ContextConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    """The optimizer that DeepSpeed builds itself: on GPUs its fused AdamW, which it compiles at first use.

    torch's AdamW, by its switch for that, where there is no such thing: on the CPU, and in float64.
    """
    if optimizer.name == "sgd":
        return {"type": "SGD", "params": {"lr": optimizer.lr, "momentum": optimizer.momentum}}
    params = {"lr": optimizer.lr, "betas": list(optimizer.betas), "eps": optimizer.eps}
    plain = config.device == "cpu" or config.precision == "exact"
    return {"type": "AdamW", "params": params | ({"torch_adam": True} if plain else {})}


def _zero(config: ContextConfig) -> dict[str, Any]:
    stage = zero_stage(config.layout)
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        # Tiny parameters are cut like large ones. The linear of their own would stay in torch for good.
        zero |= {"stage3_param_persistence_threshold": 0, "memory_efficient_linear": False}
    if "offload" in config.layout.options:
        device = {"device": "cpu", "pin_memory": config.device != "cpu"}
        zero |= {"offload_optimizer": device, **({"offload_param": device} if stage == 3 else {})}
    return zero
