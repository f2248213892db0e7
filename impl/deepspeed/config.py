"""Builds DeepSpeed's JSON configuration, corrects its loss scaling, clipping and checks, and estimates its memory.

The dynamic loss scale must grow after an update, when that is due, and gradients that overflowed must be dropped.
``scaler`` is the object of an engine's optimizer that holds the loss scale of fp16; its class depends on the ZeRO
stage, its attributes do not.

AutoTP checks at the first forward pass that tensor-parallel ranks get the same inputs. It sends the first rank's inputs
as pickled objects. Tensors of a GPU are unpickled on the same GPU, so every rank would open the first rank's GPU until
the process ends (docs/findings/deepspeed-autotp-context.md); copies in host memory prevent this.
"""

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from conformance.models.folders import HEAD
from conformance.spec.layout import Layout
from conformance.spec.precision import BF16, F16, F32, Precision
from conformance.spec.scenario import OptimizerConfig
from impl.engine.memory_estimate import Shapes, States, cut, elements
from impl.engine.optimizers import trained_parameters
from impl.interface.trainable import ContextConfig
from impl.models.lora import NAME

NEVER_GROWS = 2**62  # updates


def good_steps(scaler: Any) -> int:
    """Counts the updates since the last overflow, also across growths of the scale at multiples of the window."""
    return int(scaler.cur_iter - scaler.last_overflow_iter - 1)


@contextlib.contextmanager
def growth_afterwards(scaler: Any) -> Iterator[None]:
    """Keeps the loss scale from growing inside, and lets it grow on exit if that is due.

    DeepSpeed's scale grows one update late, and before the gradients of that update are divided by it: they are halved
    (docs/findings/deepspeed-loss-scale-window.md).
    """
    window, scaler.scale_window = scaler.scale_window, NEVER_GROWS
    try:
        yield
    finally:
        scaler.scale_window = window
    if (good := good_steps(scaler)) and good % window == 0:
        scaler.cur_scale *= scaler.scale_factor


def forget_overflow(optimizer: Any) -> None:
    """Clears the gradient buffers of ZeRO-1 or 2 after an update that was skipped.

    With an offloaded optimizer, DeepSpeed adds the next gradients to those that overflowed
    (docs/findings/deepspeed-offload-overflow.md).
    """
    for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        gradients.update(dict.fromkeys(gradients))


class ClippingBeforeMuon:
    """Clips gradients at ZeRO 1 to 3 before Muon orthogonalizes them; DeepSpeed clips what Muon makes of them.

    ZeRO-1 and 2 orthogonalize at the end of the last backward pass; here they do so in the step. The engine's own
    clipping is off (docs/findings/deepspeed-muon-norm.md). ``wrapper``: the engine's optimizer.
    """

    def __init__(self, wrapper: Any, max_grad_norm: float | None) -> None:
        self.wrapper, self.max_grad_norm = wrapper, max_grad_norm
        # Of groups of matrices: the gradients of all matrices of which this rank has a part, and what makes the update.
        self._waiting: dict[int, tuple[list[torch.Tensor], Callable[[], list[torch.Tensor]]]] = {}
        self._has_waiting = hasattr(wrapper, "scaled_global_norm")  # ZeRO-1 and 2; ZeRO-3 orthogonalizes in the step
        if self._has_waiting:
            self._in_backward, wrapper.get_flat_partition = wrapper.get_flat_partition, self._wait
            # Compact buffers lose gradients of vectors that are reduced before a matrix; DeepSpeed uses them where the
            # model's dtype is not that of sums, as in the exact tier (docs/findings/deepspeed-muon-lost-gradients.md).
            wrapper._use_compact_grad_partition_buffer = lambda _: False

    def _wait(self, parameters: list[Any], *sizes: Any, param_group_idx: int, **options: Any) -> list[torch.Tensor]:
        """Returns this rank's part of the gradients of a group."""
        make = partial(self._in_backward, parameters, *sizes, param_group_idx=param_group_idx, **options)
        matrices = [parameter for parameter in parameters if parameter.use_muon]
        if matrices:
            self._waiting[param_group_idx] = list(self.wrapper.all_grad_tensors[param_group_idx]), make
        for parameter in matrices:
            parameter.use_muon = False
        parts: list[torch.Tensor] = make()
        for parameter in matrices:
            parameter.use_muon = True
        return parts

    def norm(self) -> float:
        """Returns the norm of what the step is going to use, of all ranks: gradients, or updates of matrices."""
        if self._has_waiting:
            return float(self.wrapper.scaled_global_norm())
        return math.hypot(*map(float, self.wrapper._get_norm_groups()))

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        for group, parts in self.wrapper.averaged_gradients.items():
            gradients, _ = self._waiting.get(group, (parts, None))
            for gradient in gradients:
                gradient.mul_(factor)

    @torch.no_grad()
    def orthogonalize(self) -> None:
        """Replaces the gradients of matrices by Muon's updates, at ZeRO-1 and 2."""
        for group, (gradients, make) in self._waiting.items():
            self.wrapper.all_grad_tensors[group] = gradients
            self.wrapper.averaged_gradients[group] = make()
            self.wrapper.all_grad_tensors[group] = None
        self._waiting.clear()

    def factor(self, norm: float) -> float:
        return 1.0 if self.max_grad_norm is None else min(1.0, self.max_grad_norm / (norm + 1e-6))

    def clip(self) -> float:
        """Clips before Muon's part of the step; returns the norm of the gradients."""
        norm = self.norm()
        self.scale(self.factor(norm))
        self.orthogonalize()
        return norm


def clip_by_a_number_of_the_host(wrapper: Any) -> None:
    """Clips gradients in bf16 by a factor in host memory, which torch does not round.

    DeepSpeed's factor is a tensor on the gradients' device. On a GPU torch rounds it to bf16 before it multiplies.
    """
    clip = wrapper.unscale_and_clip_grads
    wrapper.unscale_and_clip_grads = lambda gradients, norm: clip(gradients, torch.as_tensor(norm).cpu())


def compare_in_host_memory(engine: Any) -> None:
    """Replaces the input check of an engine with tensor parallelism, before its first forward pass."""
    own = engine.first_dataloader_check
    check = engine.module._forward_pre_hooks[own.id]
    own.remove()

    def of_copies(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        check(module, *tree_map(_copy, (args, kwargs)))  # removes engine.first_dataloader_check at its end

    engine.first_dataloader_check = engine.module.register_forward_pre_hook(of_copies, prepend=True, with_kwargs=True)


def _copy(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


DEFAULT_STAGE = 3  # shards the same tensors as FSDP2
NEVER = 10**9  # steps
MOST_LEFT_WHOLE = 0.25  # the largest share of a model that ZeRO-3 may leave whole on every rank


# How AutoTP shards linear layers and, of each adapter, the matrix on the sharded side; the other matrix is whole on
# every rank. By default AutoTP would shard both matrices, and no layer of a model whose own plan names only the head
# (docs/findings/deepspeed-autotp-head-plan.md).
LAYERS: dict[str, Any] = {
    "use_default_specs": False,
    "layer_specs": [
        {
            "patterns": [rf".*\.(q|k|v|gate|up)_proj(\.base_layer|\.lora_B\.{NAME})?\.weight$"],
            "partition_type": "column",
        },
        {
            "patterns": [rf".*\.(o|down)_proj(\.base_layer|\.lora_A\.{NAME})?\.weight$"],
            "partition_type": "row",
        },
    ],
}


def zero_stage(layout: Layout) -> int:
    return DEFAULT_STAGE if layout.zero is None else layout.zero


BUCKET = 500_000_000  # DeepSpeed's default ``reduce_bucket_size``, in numbers
BUCKETS = 8  # with the option ``buckets``, for all gradients of a rank
LARGE = 7_000_000_000  # numbers of a model that ZeRO-3's defaults are made for
LIVE = 1_000_000_000  # DeepSpeed's default ``stage3_max_live_parameters``, which smaller models get their share of


def share_of(default: int, count: int) -> int:
    """Returns the share of a default of ZeRO-3 that a model of ``count`` numbers is of a large one."""
    return min(default, default * count // LARGE)


def states_of(layout: Layout, tier: Precision, shapes: Shapes, trained: bool) -> States:
    """Estimates the bytes of a model with ZeRO (arXiv 1910.02054).

    DeepSpeed has four optimizer classes, which keep different gradients.
    """
    full, compute, own = tier.kept.bytes, tier.compute.bytes, cut(shapes, layout.tp, vocabulary=(HEAD,))
    count, pieces = elements(own), layout.dp * layout.sp * layout.ulysses
    stage, half = zero_stage(layout), tier.is_half
    piece, offloads = -(-count // pieces), "offload" in layout.options
    largest = max(map(math.prod, own.values()))
    live = max(largest, share_of(LIVE, count)) * compute  # a parameter in use is whole
    if not trained and stage == 3:
        passing = live
        if offloads:
            return States(weights=0, passing=passing, host=piece * compute)
        return States(weights=piece * compute, passing=passing)
    if not trained:
        return States(weights=count * compute)
    if stage == 0:
        masters = count * full if half else 0
        update = count * full * (2 if half else 1)  # gradients in full precision, and AdamW's copy
        return States(
            weights=count * compute,
            gradients=count * compute,
            freed=count * compute,
            optimizer=masters + 2 * count * full,
            update=update,
        )
    # ZeRO-1 in bf16 has its own class: whole gradients in float32, those of autograd beside them, and no bucket.
    has_own_class = stage == 1 and tier.compute == BF16 and not offloads and not tier.stored
    gathered = live if stage == 3 and pieces > 1 else 0
    gathered += -(-count // layout.hpz) * compute if layout.hpz > 1 else 0  # the second copy
    bucket = 0 if has_own_class else BUCKET * (compute if stage == 2 else full)
    weights = (piece if stage == 3 else count) * compute
    gradients = count * (full + compute) if has_own_class else piece * full
    # That class frees autograd's gradients only, ZeRO-3 frees none; the class of ZeRO-1 and 2 allocates them per step.
    freed = count * compute if has_own_class else 0 if stage == 3 else gradients
    optimizer = 3 * piece * full  # there are masters beside the weights in every precision
    if offloads and stage == 3:
        # Gradients are summed in one buffer, and updated from another.
        return States(weights=0, passing=gathered + bucket, host=weights + 2 * gradients + optimizer)
    if offloads:
        # The host holds summed gradients and those of the masters, the rank's part of the parameters, which the update
        # writes, and the largest gradient in transfer; the device holds another one.
        transfer = largest * compute
        host = 2 * gradients + optimizer + piece * compute + transfer
        return States(weights=weights, passing=gathered + bucket + transfer, host=host)
    return States(
        weights=weights,
        gradients=gradients,
        freed=freed,
        optimizer=optimizer,
        passing=gathered + bucket,
        update=piece * full,
        loading=weights if stage == 3 else 0,  # the pieces of all parameters are collected on the host
    )


def clip_threshold(max_grad_norm: float | None) -> float:
    """Returns the value of DeepSpeed's ``gradient_clipping``, in which 0 means no clipping."""
    return 0.0 if max_grad_norm is None else max_grad_norm


def clips_before_muon(config: ContextConfig, optimizer: OptimizerConfig) -> bool:
    return optimizer.name == "muon" and zero_stage(config.layout) > 0


def summing_dtype(config: ContextConfig) -> str:
    """Returns the dtype in which half-precision gradients are reduced and accumulated, by DeepSpeed's name."""
    return {F32: "fp32", BF16: "bf16"}[config.tier.summing]


def plans_the_head_alone(model: torch.nn.Module) -> bool:
    """Returns whether the model's own tensor-parallel plan has none of its layers, but LAYERS knows them all."""
    own = (getattr(model.config, "base_model_tp_plan", None), getattr(type(model), "_tp_plan", None))
    plan: dict[str, str] = {name: style for one in own for name, style in (one or {}).items()}
    linear = [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and "layers." in name
    ]
    patterns = [re.compile(pattern) for spec in LAYERS["layer_specs"] for pattern in spec["patterns"]]
    is_known = all(any(pattern.match(f"{name}.weight") for pattern in patterns) for name in linear)
    return bool(plan) and not any("*" in name for name in plan) and is_known  # layers are planned by a pattern


def training_settings(
    config: ContextConfig, optimizer: OptimizerConfig, model: torch.nn.Module, *, explicit: bool = False
) -> dict[str, Any]:
    """Builds the configuration of an engine that trains. ``explicit``: AutoTP shards layers by LAYERS."""
    settings: dict[str, Any] = {
        **cutting_settings(config, model, explicit=explicit),
        "gradient_accumulation_steps": 1 if "manual" in config.layout.options else config.accumulation,
        "gradient_clipping": clip_threshold(None if clips_before_muon(config, optimizer) else optimizer.max_grad_norm),
        "zero_allow_untested_optimizer": True,  # for SGD; changes nothing else
        "zero_force_ds_cpu_optimizer": False,  # offload with torch's AdamW, which needs no compiled op
    }
    if "buckets" in config.layout.options:
        trained = sum(parameter.numel() for parameter in trained_parameters(model, optimizer))
        settings["zero_optimization"]["reduce_bucket_size"] = max(1, trained // (BUCKETS * config.layout.tp))
    if clips_before_muon(config, optimizer) and zero_stage(config.layout) == 3:
        settings["zero_optimization"]["reduce_scatter"] = False  # DeepSpeed demands it
    if config.tier.compute == BF16:
        settings["bf16"] = {"enabled": True}
        if config.tier.stored:
            settings["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if config.tier.compute == F16:
        settings["fp16"] = {
            "enabled": True,
            "initial_scale_power": config.loss_scale.initial_power,
            "loss_scale_window": config.loss_scale.growth_interval,
            "hysteresis": 1,  # by default the second overflow lowers the scale, at ZeRO-0 the first in any case
        }
    if config.tier.is_half:
        # Masters are float32 in any case. Stage 0 accumulates in the parameters' half precision, whatever is set.
        settings["communication_data_type"] = summing_dtype(config)
        if zero_stage(config.layout) > 0:
            settings["data_types"] = {"grad_accum_dtype": summing_dtype(config)}
    if "ownopt" in config.layout.options:
        settings["optimizer"] = _optimizer(config, optimizer)
    return settings


def frozen_settings(config: ContextConfig, model: torch.nn.Module, *, explicit: bool = False) -> dict[str, Any]:
    """Builds the configuration of an engine without an optimizer, for a model that is in its compute dtype already.

    ZeRO-3 partitions the parameters of such a model too. The other stages would partition nothing and require an
    optimizer, so stage 0 replaces them.
    """
    settings = cutting_settings(config, model, explicit=explicit)
    return settings if zero_stage(config.layout) == 3 else {**settings, "zero_optimization": {"stage": 0}}


def cutting_settings(config: ContextConfig, model: torch.nn.Module, *, explicit: bool = False) -> dict[str, Any]:
    """Returns the settings that all engines share.

    The micro-batch size of 1 is a placeholder: DeepSpeed requires one, but does not check rows against it.
    """
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": NEVER,
        "timers": {"throughput": {"enabled": False}},  # the timer waits for the GPU at both ends of a step
        "zero_optimization": _zero(config, model),
    }
    if config.layout.tp > 1:
        # Every rank has whole logits; by default, a tied head would be sharded along the vocabulary.
        settings["tensor_parallel"] = {"autotp_size": config.layout.tp, "vocab_parallel_lm_head": False}
        if explicit:
            settings["tensor_parallel"]["partition_config"] = LAYERS
    return settings


def _optimizer(config: ContextConfig, optimizer: OptimizerConfig) -> dict[str, Any]:
    """Returns the settings of the optimizer that DeepSpeed builds itself.

    On GPUs it is DeepSpeed's fused AdamW, which is compiled at first use. It does not exist on the CPU and in float64;
    there, DeepSpeed's switch ``torch_adam`` selects torch's AdamW.
    """
    if optimizer.name == "sgd":
        return {"type": "SGD", "params": {"lr": optimizer.lr, "momentum": optimizer.momentum}}
    params = {"lr": optimizer.lr, "betas": list(optimizer.betas), "eps": optimizer.eps}
    plain = config.device == "cpu" or config.tier.is_exact
    if optimizer.name == "muon":
        params |= {"momentum": optimizer.momentum}
        run_muon_uncompiled()
        return {"type": "Muon", "params": params | ({"torch_adam": True} if plain else {})}
    return {"type": "AdamW", "params": params | ({"torch_adam": True} if plain else {})}


def run_muon_uncompiled() -> None:
    """Replaces the compiled functions of DeepSpeed's Muon, which take minutes on a CPU, by their code."""
    from deepspeed.runtime.zero.muon import muon_optimizer, original_muon

    for name in ("zeropower_via_newtonschulz5", "zeropower_via_gram_newtonschulz", "muon_update"):
        compiled = getattr(original_muon, name)
        code = inspect.unwrap(compiled)
        for module in (original_muon, muon_optimizer):
            if getattr(module, name, code) is compiled:  # a planted fault stays
                setattr(module, name, code)


def _zero(config: ContextConfig, model: torch.nn.Module) -> dict[str, Any]:
    stage = zero_stage(config.layout)
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        # Imported here, because it takes seconds, and the controller only asks what is supported.
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

        # DeepSpeed leaves small parameters whole on every rank, by their size after tensor parallelism. If that is a
        # large share of the model, as with small matrices, only parameters up to the largest vector stay whole.
        defaults, tp = DeepSpeedZeroConfig(), config.layout.tp
        threshold = defaults.param_persistence_threshold
        vectors = [parameter.numel() for parameter in model.parameters() if parameter.ndim < 2]
        matrices = [parameter.numel() // tp for parameter in model.parameters() if parameter.ndim >= 2]
        left = sum(size for size in vectors + matrices if size <= threshold)
        if left > MOST_LEFT_WHOLE * sum(vectors + matrices):
            zero["stage3_param_persistence_threshold"] = min(threshold, max(vectors, default=0))
        # It also keeps what is used again within a billion numbers, and gathers 50 million ahead: all of a small model,
        # from its forward to its backward pass. So these are the shares that they are of a large model.
        for name in ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size"):
            default: int = getattr(defaults, name)
            zero[f"stage3_{name}"] = share_of(default, sum(vectors + matrices))
        # On GPUs, torch's linear layers keep a view of each gathered weight for the backward pass, so all weights stay
        # gathered; DeepSpeed's own layers keep none. Compiled layers keep the parameter itself, and with DeepSpeed's
        # own layers torch 2.11 loses their gradients (docs/findings/deepspeed-compiled-biases.md).
        zero["memory_efficient_linear"] = "compile" not in config.layout.options
        if config.layout.hpz > 1:
            zero["zero_hpz_partition_size"] = config.layout.hpz
    if "offload" in config.layout.options:
        device = {"device": "cpu", "pin_memory": config.device != "cpu"}
        zero |= {"offload_optimizer": device, **({"offload_param": device} if stage == 3 else {})}
    return zero
