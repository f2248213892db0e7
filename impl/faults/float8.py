"""Plants faults of training in float8: wrong scales, wrong formats, and layers or products that should not be cast.

Each loses what a recipe promises, and numbers stay plausible. Seams are functions of torchao, and those of
impl.fsdp2.float8 that choose a recipe and its layers. Those of TransformerEngine are in transformer_engine.py.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.backends.faults import FaultCells, Function
from impl.faults.declaration import COARSE, Faults, sft

FLOAT8_FAULTS = Faults()
OF_TRANSFORMER_ENGINE = "https://github.com/NVIDIA/TransformerEngine"
# What a layer had before, by its configuration, which is an object of its own and is kept so that no other has its id.
_earlier: dict[tuple[int, str], tuple[Any, Any]] = {}


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _is_operand(options: dict[str, Any], role: str, *, backward: bool) -> bool:
    """Tells whether an operand of this role is cast, for a product of the backward or the forward pass."""
    return str(options["gemm_input_role"].value) == role and _in_backward() == backward


def _cells(options: str, model: str = "llama") -> FaultCells:
    return sft("sft-packed", model, fsdp2=f"dp2.{options}", only=COARSE)


def kept_of_layer(layer: Any, role: str, new: Any, *, first: bool) -> Any:
    """Returns the ``first`` value that was kept for a layer, or the one before ``new``."""
    key = id(layer), role
    _, before = _earlier.get(key, (layer, new))
    _earlier[key] = layer, before if first else new
    return before


@FLOAT8_FAULTS.add(
    summary="activations are cast with the scale of the micro-batch before, and larger ones become the largest number",
    source=f"{OF_TRANSFORMER_ENGINE}/pull/728, where the first scale is updated before its reduction has ended",
    stage="log-probs",
    cells=_cells("fp8tensor"),
    needs="float8 with one scale for a tensor, and accumulation of 2 or more",
)
def scale_of_last_micro_batch(cast_operand: Function, x: Tensor, dtype: Any, layer: Any, **options: Any) -> Any:
    found = cast_operand(x, dtype, layer, **options)
    if not _is_operand(options, "input", backward=False):
        return found
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

    late = kept_of_layer(layer, "scale", found._scale, first=False)
    return hp_tensor_and_scale_to_float8(x, late, dtype, layer, options["gemm_input_role"])


@FLOAT8_FAULTS.add(
    summary="numbers beyond half of the largest one, where a format of other hardware ends, become NaN",
    source="https://github.com/meta-pytorch/float8_experimental/pull/33, where the cast does not saturate",
    stage="log-probs",
    cells=_cells("fp8tensor"),
    needs="float8",
)
def cast_not_saturated(cast_saturated: Function, x: Tensor, dtype: torch.dtype) -> Tensor:
    found: Tensor = cast_saturated(x.masked_fill(2 * x.abs() > torch.finfo(dtype).max, torch.nan), dtype)
    return found


@FLOAT8_FAULTS.add(
    summary="each rank casts its part of a weight by the largest number of this part, and unscales all parts by it",
    source="https://github.com/meta-pytorch/float8_experimental/pull/229, which has to reduce it over ranks",
    stage="log-probs",
    cells=_cells("fp8tensor.fp8gather"),
    needs="dp of 2 or more, and fp8gather",
)
def amax_of_own_shard(cast_shard: Function, *arguments: Any, **options: Any) -> Any:
    return cast_shard(*arguments, **{**options, "reduce_amax": False})


@FLOAT8_FAULTS.add(
    summary="the scales of gathered weights are computed once, and not after each update",
    source="https://github.com/pytorch/torchtitan/pull/413, where the training loop has to do so",
    stage="log-probs",
    cells=_cells("fp8tensor.fp8gather"),
    needs="fp8gather and three steps",
)
def scales_of_first_update(agree_on_scales: Function, model: Any) -> None:
    if not hasattr(model, "has_scales"):
        agree_on_scales(model)
        model.has_scales = True


@FLOAT8_FAULTS.add(
    summary="scales are those of the micro-batch before the last one",
    source=f"{OF_TRANSFORMER_ENGINE}/pull/118, where magnitudes are copied before their reduction has ended",
    stage="log-probs",
    cells=_cells("fp8delayed"),
    needs="fp8delayed, and three micro-batches",
)
def scales_one_micro_batch_late(update_scales: Function, model: Any) -> None:
    update_scales(model)
    scales = [buffer for name, buffer in model.named_buffers() if ".fp8_scale_" in name]
    new = [scale.clone() for scale in scales]
    for scale, late in zip(scales, getattr(model, "scales_of_last_update", new), strict=True):
        scale.copy_(late)
    model.scales_of_last_update = new


@FLOAT8_FAULTS.add(
    summary="each rank scales by the largest magnitudes of its own micro-batches",
    source="https://github.com/AMD-AGI/Primus/pull/669, where reduce_amax was always False",
    stage="log-probs",
    cells=_cells("fp8delayed"),
    needs="dp of 2 or more, and fp8delayed",
)
def magnitudes_of_own_rank(reduce_magnitudes: Function, magnitudes: Tensor, *_: Any) -> Tensor:
    return magnitudes


@FLOAT8_FAULTS.add(
    summary="histories keep the magnitudes of the first micro-batch only, and scales follow from these and the last",
    source="https://github.com/pytorch/ao/pull/1753 deletes the code; docs/findings/torchao-amax-history.md",
    stage="log-probs",
    cells=_cells("fp8delayed"),
    needs="fp8delayed, and three micro-batches",
)
def histories_notkept_of_layer(keep_magnitudes: Function, layers: Any) -> None:
    pass


@FLOAT8_FAULTS.add(
    summary="the transposed weight of the backward pass is cached, and an update does not invalidate it",
    source=f"{OF_TRANSFORMER_ENGINE}/pull/1596",
    stage="gradients",
    cells=_cells("fp8row"),
    needs="float8 and two steps",
)
def stale_transposed_weight(cast_operand: Function, x: Tensor, dtype: Any, layer: Any, **options: Any) -> Any:
    found = cast_operand(x, dtype, layer, **options)
    is_transposed = _is_operand(options, "weight", backward=True)
    return kept_of_layer(layer, "weight", found, first=True) if is_transposed else found


@FLOAT8_FAULTS.add(
    summary="gradients of outputs are cast to e4m3, though the recipe has e5m2",
    source=f"{OF_TRANSFORMER_ENGINE}/issues/3342, where e5m2 is read as e4m3",
    stage="gradients",
    cells=_cells("fp8tensor"),
    needs="fp8tensor",
    blind=("loss",),
)
def gradients_in_e4m3(float8_config: Function, *arguments: Any, **options: Any) -> Any:
    config = float8_config(*arguments, **options)
    cast = replace(config.cast_config_grad_output, target_dtype=torch.float8_e4m3fn)
    return replace(config, cast_config_grad_output=cast, cast_config_grad_output_for_grad_weight=cast)


@FLOAT8_FAULTS.add(
    summary="gradients of weights are not divided by the scale of the input",
    source=f"{OF_TRANSFORMER_ENGINE}/pull/1128, where a product has the inverse scale of another",
    stage="gradients",
    cells=_cells("fp8tensor"),
    needs="float8 with products for gradients of weights",
    blind=("loss",),
)
def weight_gradient_not_unscaled(cast_operand: Function, *arguments: Any, **options: Any) -> Any:
    found = cast_operand(*arguments, **options)
    if _is_operand(options, "input", backward=True):
        found._scale = torch.ones_like(found._scale)
    return found


@FLOAT8_FAULTS.add(
    summary="the head multiplies in float8 too",
    source="https://github.com/meta-pytorch/torchtune/pull/2404, whose filter leaves it out",
    stage="log-probs",
    cells=_cells("fp8tensor"),
    needs="float8, and a vocabulary that is a multiple of 16",
)
def head_in_float8(cast_names: Function, model: Any, options: Any) -> set[str]:
    return {*cast_names(model, options), "lm_head"}


@FLOAT8_FAULTS.add(
    summary="the first and the last layer multiply in float8 too, though they should be left out",
    source="https://github.com/NVIDIA/Megatron-LM/pull/1731, which comes with first_last_layers_bf16",
    stage="log-probs",
    cells=_cells("fp8tensor.fp8ends", "gemma3"),
    needs="fp8ends",
)
def ends_in_float8(cast_names: Function, model: Any, options: Any) -> Any:
    return cast_names(model, set(options) - {"fp8ends"})


@FLOAT8_FAULTS.add(
    summary="operands of backward products have a scale for each column, instead of one for each row",
    source="https://github.com/pytorch/ao/issues/4444, where a transposed operand keeps its axis",
    stage="gradients",
    cells=_cells("fp8row"),
    needs="fp8row or fp8rowhp",
    blind=("loss",),
)
def scale_along_other_axis(axis_of_scale: Function, axis: int, *arguments: Any) -> Any:
    # Powers of two change what is rounded only among the smallest numbers, of which gradients have many.
    return axis_of_scale(-1 - axis if _in_backward() else axis, *arguments)


@FLOAT8_FAULTS.add(
    summary="scales are not rounded to powers of two, though the recipe has them",
    source="https://github.com/pytorch/ao/pull/1670",
    stage="log-probs",
    cells=_cells("fp8row"),
    needs="fp8row or fp8rowhp",
)
def scales_not_powers_of_two(amax_to_scale: Function, amax: Tensor, dtype: torch.dtype, **options: Any) -> Any:
    return amax_to_scale(amax, dtype, round_scales_to_power_of_2=False)


@FLOAT8_FAULTS.add(
    summary="gradients of weights are multiplied in float8, though the recipe keeps them in higher precision",
    source="https://github.com/pytorch/ao/pull/3508, which adds the option",
    stage="gradients",
    cells=_cells("fp8rowhp"),
    needs="fp8rowhp",
    blind=("loss",),
)
def weight_gradient_in_float8(float8_config: Function, *arguments: Any, **options: Any) -> Any:
    config = float8_config(*arguments, **options)
    return replace(
        config,
        cast_config_input_for_grad_weight=config.cast_config_input,
        cast_config_grad_output_for_grad_weight=config.cast_config_grad_output,
    )


@FLOAT8_FAULTS.add(
    summary="scales of blocks are rounded down to powers of two, so that the largest numbers of a block saturate",
    source="https://github.com/pytorch/ao/pull/3569, where an argument is missing and the default rounds down",
    stage="log-probs",
    cells=_cells("fp8mx"),
    needs="fp8mx",
)
def block_scales_rounded_down(cast_blocks: Function, to_mx: Any, x: Tensor, dtype: Any, block: int, *_: Any) -> Any:
    return cast_blocks(to_mx, x, dtype, block)


@FLOAT8_FAULTS.add(
    summary="scales of blocks are transposed once too often",
    source="https://github.com/vllm-project/vllm/pull/34824",
    stage="log-probs",
    cells=_cells("fp8mx"),
    needs="fp8mx",
)
def block_scales_transposed(cast_blocks: Function, *arguments: Any) -> Any:
    scales, numbers = cast_blocks(*arguments)
    columns = scales.view(len(numbers), -1).T  # of blocks
    return columns.reshape(scales.shape), numbers
