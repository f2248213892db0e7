"""Runs linear layers of a Hugging Face model in float8 with torchao, by the recipe that a layout option names.

torchao replaces torch.nn.Linear by a layer that casts the operands of its three products. On a GPU torch._scaled_mm
multiplies them; in float64 and on a CPU, torchao multiplies the cast numbers in the precision of the cell's masters.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from conformance.core.packages import package_version
from conformance.numerics.sketch import without_modes
from conformance.spec.conventions import model_config
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario
from impl.models.family_quirks import quirks_of
from impl.models.support import is_older

if TYPE_CHECKING:
    import transformers  # whose import takes seconds; the suite asks for support without it

SHAPE_MULTIPLE = 32  # this backend's rows are filled up to a multiple of it, and of tp
MULTIPLE = 16  # torch._scaled_mm takes matrices whose sizes are multiples of this
BLOCK = 32  # numbers of MXFP8 that share a scale
HISTORY = 4  # micro-batches whose largest magnitude is the scale of the next, with fp8delayed
RECIPES = {"fp8tensor": "tensorwise", "fp8row": "rowwise", "fp8rowhp": "rowwise_with_gw_hp"}
JUDGED = ("sft", "grpo", "ppo")  # kinds of objectives
BESIDE = {
    "fp8ends",
    "fp8gather",
    "plan",
    "lastsync",
    "ckpt",
    "offload",
    "manual",
}  # options that cells in float8 may have


def float8_support(scenario: Scenario, layout: Layout) -> str:
    """Explains why a cell cannot run in float8; empty if it can, or if its layout does not ask for it."""
    if (recipe := layout.float8) is None:
        return ""
    if recipe == "fp8block":
        return "torchao casts blocks of 128 in bf16 on Hopper only; use fp8mx, or Megatron's layers of te"
    if find_spec("torchao") is None:
        return f"{recipe} needs torchao, which is not installed; run: pip install 'backend-parity[fp8]'"
    config = model_config(scenario)
    quirks = quirks_of(config.get("model_type"))
    if scenario.objective.kind not in JUDGED:
        return f"{recipe} was tried for {', '.join(JUDGED)} only; use one of these, or leave it out"
    if recipe == "fp8delayed" and scenario.objective.kind != "sft":
        return (
            "torchao's histories beside passes over rollouts are not modelled; leave fp8delayed out, or use fp8tensor"
        )
    if scenario.lora:
        return f"{recipe} was not tried with adapters, which replace layers of torchao as well; leave one of them out"
    if quirks.has_routers or not quirks.has_plan:
        return f"{recipe} is judged for dense models of known families only; leave it out"
    if scenario.tier.is_loss_scaled:
        return "the loss scale of fp16 moves what float8 rounds; use bf16"
    if layout != Layout(dp=layout.dp, rep=layout.rep, tp=layout.tp, options=layout.options):
        return f"beside {recipe} only dp, rep and tp are built into this backend; leave other axes out"
    if others := {*layout.options} - BESIDE - {recipe}:
        return f"{', '.join(sorted(others))} is not built into this backend beside {recipe}; leave it out"
    if recipe == "fp8mx" and layout.tp > 1:
        return "torchao's layers in MXFP8 are not cut over tp; use tp1, or fp8row"
    if layout.tp > 1 and "plan" not in layout.options:
        return f"transformers' own plan does not cut layers in float8; add the layout option 'plan' beside {recipe}"
    if "fp8ends" in layout.options and config.get("num_hidden_layers", 0) < 3:
        return "fp8ends leaves the first and the last layer out, and the model has no other; leave it out"
    found = package_version("torchao")
    if recipe == "fp8delayed":
        if layout.tp > 1:
            return "torchao's layers with delayed scaling are not cut over tp; use tp1, or fp8tensor"
        if not is_older("torchao", 0, 10):
            return (
                f"torchao {found} is installed, and torchao has delayed scaling until 0.9 only; "
                f"pip install 'torchao==0.9.*'"
            )
    elif is_older("torchao", 0, 18):
        return f"torchao {found} is installed, and {recipe} is built on 0.18; pip install 'torchao>=0.18'"
    if recipe == "fp8mx" and not found.startswith("0.18."):
        return f"torchao {found} is installed, and fp8mx is built on a prototype of 0.18; pip install 'torchao==0.18.*'"
    return ""


def cast_layers(model: "transformers.PreTrainedModel", layout: Layout, *, compute: torch.dtype, device: str) -> None:
    """Replaces the linear layers of decoder layers by those of torchao, if the layout names a recipe.

    Call this function before anything shards or wraps the layers. The head and the embedding stay as they are.
    """
    if layout.float8 is None:
        return
    names = cast_names(model, layout.options)
    if layout.float8 == "fp8mx":
        return _cast_blocks_of(model, names)
    per_tensor = layout.float8 in ("fp8tensor", "fp8delayed")
    from torchao.float8 import convert_to_float8_training  # only cells in float8 need torchao

    if compute == torch.float64:
        _round_in_float64()
    # With scales by row, the kernel gives results in bf16 only.
    has_kernel = device != "cpu" and compute != torch.float64 and (per_tensor or compute.itemsize == 2)
    config = float8_config(layout.float8, emulate=not has_kernel, gathers="fp8gather" in layout.options)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)


def float8_config(option: str, *, emulate: bool, gathers: bool) -> Any:
    """Returns torchao's configuration of a recipe."""
    from torchao.float8 import Float8LinearConfig

    if option == "fp8delayed":
        from torchao.float8.config import CastConfig, DelayedScalingConfig, ScalingType

        input_, weight, gradient = (CastConfig(scaling_type=ScalingType.DELAYED) for _ in range(3))
        return Float8LinearConfig(
            cast_config_input=input_,
            cast_config_weight=weight,
            cast_config_grad_output=gradient,
            delayed_scaling_config=DelayedScalingConfig(history_len=HISTORY),
            emulate=emulate,
            pad_inner_dim=True,
        )
    recipe = Float8LinearConfig.from_recipe_name(RECIPES[option])
    return replace(recipe, emulate=emulate, pad_inner_dim=True, enable_fsdp_float8_all_gather=gathers)


def begin_histories(model: torch.nn.Module) -> None:
    """Gives layers with delayed scaling empty histories, which belong to no state, when weights have memory."""
    for layer in _layers_with_histories(model):
        layer.create_buffers()
        for name in layer.always_float32_buffers:
            layer.register_buffer(name, getattr(layer, name).to(layer.weight.dtype), persistent=False)


def update_scales(model: torch.nn.Module) -> None:
    """Reduces the largest magnitudes of a micro-batch over all ranks, and computes the scales of the next one."""
    from torchao.float8 import sync_float8_amax_and_scale_history

    layers = _layers_with_histories(model)
    sync_float8_amax_and_scale_history(model, layers)
    keep_magnitudes(layers)


@torch.no_grad()
def keep_magnitudes(layers: Sequence[Any]) -> None:
    """Adds the magnitudes of this micro-batch to the histories, which torchao does in copies of them only
    (docs/findings/torchao-amax-history.md)."""
    for layer in layers:
        for operand in ("input", "weight", "grad_output"):
            history = getattr(layer, f"fp8_amax_history_{operand}")
            history.copy_(torch.cat([getattr(layer, f"fp8_amax_{operand}"), history[:-1]]))


def _layers_with_histories(model: torch.nn.Module) -> list[Any]:
    from torchao.float8.stateful_float8_linear import StatefulFloat8Linear

    return [module for module in model.modules() if isinstance(module, StatefulFloat8Linear)]


def agree_on_scales(model: torch.nn.Module) -> None:
    """Computes the scales of weights that are gathered in float8, after they were loaded or updated."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def cast_names(model: "transformers.PreTrainedModel", options: Collection[str]) -> set[str]:
    """Returns the names of the linear layers that multiply in float8."""
    from impl.engine.hugging_face import layers_of

    layers = layers_of(model)
    within = layers[1:-1] if "fp8ends" in options else layers
    multiple = BLOCK if "fp8mx" in options else MULTIPLE
    inner = {id(module) for layer in within for module in layer.modules()}
    return {
        name
        for name, module in model.named_modules()
        if id(module) in inner and isinstance(module, torch.nn.Linear)
        if module.in_features % multiple == 0 == module.out_features % multiple
    }


def _round_in_float64() -> None:
    """Lets torchao round scales to powers of two in the exact tier, where they are float64."""
    from torchao.float8 import float8_utils

    def rounded_down(scale: torch.Tensor) -> torch.Tensor:
        return torch.exp2(torch.floor(torch.log2(scale)))

    float8_utils._round_scale_down_to_power_of_2 = rounded_down


def _cast_blocks_of(model: "transformers.PreTrainedModel", names: Collection[str]) -> None:
    """Makes linear layers multiply in MXFP8. Their products are emulated, because only Blackwell has a kernel."""
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.prototype.mx_formats import mx_tensor
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    for name in names:
        like = MXFP8Linear(0, 0, kernel_preference=KernelPreference.EMULATED, device="meta")
        layer = model.get_submodule(name)
        layer.__dict__ |= {key: value for key, value in like.__dict__.items() if key not in layer.__dict__}
        layer.__class__ = MXFP8Linear
    if mx_tensor.to_mx.__module__ != __name__:
        original = mx_tensor.to_mx

        def to_mx(x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            # torchao takes no float64, of which float8 keeps four digits. What it returns are bytes.
            with without_modes(x) as plain:
                return cast_blocks(original, plain.float() if x.dtype == torch.float64 else plain, *arguments)

        mx_tensor.to_mx = to_mx


def cast_blocks(to_mx: Any, x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scales of blocks along rows (M, K / 32), as exponents, and the numbers in float8 (M, K)."""
    scales, numbers = to_mx(x, *arguments)
    return scales, numbers
