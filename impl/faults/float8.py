"""Plants faults of training in float8: wrong scales, wrong formats, and layers or products that should not be cast.

Each loses what a recipe promises, and numbers stay plausible. Seams are functions of torchao, and those of
impl.fsdp2.float8 that choose a recipe and its layers. In Megatron they are functions of megatron-core that tell
TransformerEngine what to do.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from conformance.backends.faults import FaultCells, Function
from impl.faults.declaration import COARSE, FLOAT32, Faults, resume, sft

FLOAT8_FAULTS = Faults()
_OF_TRANSFORMER_ENGINE = "https://github.com/NVIDIA/TransformerEngine"
# What a layer had before, by its configuration, which is an object of its own and is kept so that no other has its id.
_earlier: dict[tuple[int, str], tuple[Any, Any]] = {}
_loaded: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # what layers should have loaded


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _is_operand(options: dict[str, Any], role: str, *, backward: bool) -> bool:
    """Tells whether an operand of this role is cast, for a product of the backward or the forward pass."""
    return str(options["gemm_input_role"].value) == role and _in_backward() == backward


def _cells(options: str, model: str = "llama") -> FaultCells:
    return sft("sft-packed", model, fsdp2=f"dp2.{options}", only=COARSE)


def _kept(layer: Any, role: str, new: Any, *, first: bool) -> Any:
    """Returns the ``first`` value that was kept for a layer, or the one before ``new``."""
    key = id(layer), role
    _, before = _earlier.get(key, (layer, new))
    _earlier[key] = layer, before if first else new
    return before


@FLOAT8_FAULTS.add(
    summary="activations are cast with the scale of the micro-batch before, and larger ones become the largest number",
    source=f"{_OF_TRANSFORMER_ENGINE}/pull/728, where the first scale is updated before its reduction has ended",
    stage="log-probs",
    cells=_cells("fp8tensor"),
    needs="float8 with one scale for a tensor, and accumulation of 2 or more",
)
def scale_of_last_micro_batch(cast_operand: Function, x: Tensor, dtype: Any, layer: Any, **options: Any) -> Any:
    found = cast_operand(x, dtype, layer, **options)
    if not _is_operand(options, "input", backward=False):
        return found
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8

    late = _kept(layer, "scale", found._scale, first=False)
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
    source=f"{_OF_TRANSFORMER_ENGINE}/pull/118, where magnitudes are copied before their reduction has ended",
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
def histories_not_kept(keep_magnitudes: Function, layers: Any) -> None:
    pass


@FLOAT8_FAULTS.add(
    summary="the transposed weight of the backward pass is cached, and an update does not invalidate it",
    source=f"{_OF_TRANSFORMER_ENGINE}/pull/1596",
    stage="gradients",
    cells=_cells("fp8row"),
    needs="float8 and two steps",
)
def stale_transposed_weight(cast_operand: Function, x: Tensor, dtype: Any, layer: Any, **options: Any) -> Any:
    found = cast_operand(x, dtype, layer, **options)
    is_transposed = _is_operand(options, "weight", backward=True)
    return _kept(layer, "weight", found, first=True) if is_transposed else found


@FLOAT8_FAULTS.add(
    summary="gradients of outputs are cast to e4m3, though the recipe has e5m2",
    source=f"{_OF_TRANSFORMER_ENGINE}/issues/3342, where e5m2 is read as e4m3",
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
    source=f"{_OF_TRANSFORMER_ENGINE}/pull/1128, where a product has the inverse scale of another",
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


# In TransformerEngine's layers, which Megatron gives a recipe.


def _te_cells(options: str, model: str = "llama-even") -> FaultCells:
    return sft("sft-packed", model, megatron=f"dp2.te.{options}", only=FLOAT32)


@FLOAT8_FAULTS.add(
    summary="gradients of outputs are cast to e4m3, though the format is hybrid",
    source=f"{_OF_TRANSFORMER_ENGINE}/issues/3342, where e5m2 is read as e4m3",
    stage="configuration",
    cells=_te_cells("fp8tensor"),
    needs="te and fp8tensor",
)
def te_gradients_in_e4m3(te_recipe: Function, config: Any) -> Any:
    return replace(recipe := te_recipe(config), fp8_format=type(recipe.fp8_format).E4M3)


@FLOAT8_FAULTS.add(
    summary="scales of tensors are rounded to powers of two, though the recipe has none",
    source=f"{_OF_TRANSFORMER_ENGINE}/pull/1471, which makes it an option",
    stage="configuration",
    cells=_te_cells("fp8tensor"),
    needs="te and fp8tensor",
)
def te_scales_powers_of_two(te_recipe: Function, config: Any) -> Any:
    return _with_scales(te_recipe(config), powers=True)


@FLOAT8_FAULTS.add(
    summary="scales of blocks are not rounded to powers of two, though the recipe has them",
    source="https://github.com/ROCm/TransformerEngine/pull/687, about the two flags that say so",
    stage="configuration",
    cells=_te_cells("fp8block"),
    needs="te and fp8block",
)
def te_scales_not_powers_of_two(te_recipe: Function, config: Any) -> Any:
    return _with_scales(te_recipe(config), powers=False)


def _with_scales(recipe: Any, *, powers: bool) -> Any:
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, name, replace(getattr(recipe, name), power_2_scale=powers))
    return recipe


@FLOAT8_FAULTS.add(
    summary="weights have a scale for each 1 x 128 numbers, instead of each 128 x 128",
    source=f"{_OF_TRANSFORMER_ENGINE}/pull/1559, whose recipe has both",
    stage="configuration",
    cells=_te_cells("fp8block"),
    needs="te and fp8block",
)
def te_weights_in_rows_of_blocks(te_recipe: Function, config: Any) -> Any:
    return replace(te_recipe(config), w_block_scaling_dim=1)


@FLOAT8_FAULTS.add(
    summary="each rank scales by the largest magnitudes of its own micro-batches",
    source="https://github.com/AMD-AGI/Primus/pull/669, where reduce_amax was always False",
    stage="configuration",
    cells=_te_cells("fp8delayed"),
    needs="te, fp8delayed and dp of 2 or more",
)
def te_magnitudes_of_own_rank(te_recipe: Function, config: Any) -> Any:
    recipe = te_recipe(config)
    recipe.reduce_amax = False
    return recipe


@FLOAT8_FAULTS.add(
    summary="magnitudes are reduced over data-parallel ranks only, and tensor-parallel ones scale by their own",
    source=f"{_OF_TRANSFORMER_ENGINE}/issues/656, whose documentation says so",
    stage="configuration",
    cells=sft("sft-packed", "llama-even-deep", megatron="tp2.te.fp8delayed", only=FLOAT32),
    needs="te, fp8delayed and tp of 2 or more",
)
def te_magnitudes_of_data_ranks(amax_group: Function, **_: Any) -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


@FLOAT8_FAULTS.add(
    summary="scales follow from the last micro-batch alone, and the history is not read",
    source="https://github.com/pytorch/ao/pull/1753 deletes such code; docs/findings/torchao-amax-history.md",
    stage="configuration",
    cells=_te_cells("fp8delayed"),
    needs="te, fp8delayed and three micro-batches",
)
def te_history_not_read(te_recipe: Function, config: Any) -> Any:
    recipe = te_recipe(config)
    recipe.amax_compute_algo = "most_recent"
    return recipe


@FLOAT8_FAULTS.add(
    summary="scales are those of the micro-batch before the last one",
    source=f"{_OF_TRANSFORMER_ENGINE}/pull/118, where magnitudes are copied before their reduction has ended",
    stage="configuration",
    cells=_te_cells("fp8delayed"),
    needs="te, fp8delayed and three micro-batches",
)
def te_scales_one_micro_batch_late(te_recipe: Function, config: Any) -> Any:
    recipe = te_recipe(config)
    recipe.scaling_factor_compute_algo = _late_scale
    return recipe


def _late_scale(amax: Tensor, scale: Tensor, largest: float, recipe: Any) -> Tensor:
    """Computes new scales as TransformerEngine does, and returns those of the update before."""
    new = torch.where(amax > 0, largest / amax, scale)
    late: Tensor = _kept(scale, "late", new, first=False)
    return late


@FLOAT8_FAULTS.add(
    summary="casts note the largest magnitudes where nothing reads them, so that scales stay 1",
    source=f"{_OF_TRANSFORMER_ENGINE}/pull/2044, where histories are new and casts write to the old ones",
    stage="configuration",
    cells=_te_cells("fp8delayed"),
    needs="te and fp8delayed",
)
def te_magnitudes_not_recorded(te_quantizers: Function, state: Any) -> Any:
    found = te_quantizers(state)
    for one in found:
        one.amax = torch.zeros_like(one.amax)
    return found


@FLOAT8_FAULTS.add(
    summary="weights are cast in the first step, and what later steps multiply by is not cast again",
    source="https://github.com/NVIDIA/Megatron-LM/issues/629, after which Megatron says when weights are new",
    stage="log-probs",
    cells=_te_cells("fp8tensor"),
    needs="te, float8 and two steps",
)
def te_weights_of_first_step(weights_are_new: Function, model: Any) -> None:
    if not hasattr(model, "has_cast"):
        weights_are_new(model)
        model.has_cast = True


@FLOAT8_FAULTS.add(
    summary="scales are half of those that histories prescribe, so that the format's last binade is empty",
    source=f"{_OF_TRANSFORMER_ENGINE}/pull/427, which decides how a margin and rounding make scales smaller",
    stage="configuration",
    cells=_te_cells("fp8delayed"),
    needs="te and fp8delayed",
)
def te_scales_with_a_margin(te_recipe: Function, config: Any) -> Any:
    recipe = te_recipe(config)
    recipe.margin = 1
    return recipe


@FLOAT8_FAULTS.add(
    summary="weights are cast anew after an update, but their transposed copy is that of the first step",
    source=f"{_OF_TRANSFORMER_ENGINE}/pull/1596",
    stage="configuration",
    cells=_te_cells("fp8tensor"),
    needs="te, fp8tensor and two steps",
)
def te_stale_transposed_weights(cached_weight: Function, module: Any, *arguments: Any, **options: Any) -> Any:
    found = cached_weight(module, *arguments, **options)
    if found._transpose is not None:
        first = _kept(module, "transposed", found._transpose.clone(), first=True)
        found._transpose.copy_(first)
    return found


@FLOAT8_FAULTS.add(
    summary="gradients of the weights of o_proj and down_proj are multiplied in high precision",
    source="https://github.com/pytorch/ao/pull/3508, which adds the option",
    stage="configuration",
    cells=_te_cells("fp8tensor"),
    needs="te and fp8tensor",
)
def te_weight_gradients_in_high_precision(te_product: Function, a: Any, b: Any, **options: Any) -> Any:
    if options.get("layout") == "NT":  # of an input and a gradient
        a, b = _in_float32(a), _in_float32(b)
    return te_product(a, b, **options)


def _in_float32(x: Any) -> Tensor:
    """Returns the numbers of a tensor that TransformerEngine has cast, and may keep as a transposed copy only."""
    dtype = torch.float8_e5m2 if "E5M2" in str(x._fp8_dtype) else torch.float8_e4m3fn
    data = x._data if x._data is not None else x._transpose.reshape(len(x._transpose), -1).T.contiguous()
    found: Tensor = data.reshape(-1, data.shape[-1]).view(dtype).float() * x._scale_inv
    return found


@FLOAT8_FAULTS.add(
    summary="the second layer multiplies in the precision of the cell",
    source=f"{_OF_TRANSFORMER_ENGINE}/pull/2, after which float8 is on again behind layers without it",
    stage="configuration",
    cells=_te_cells("fp8tensor", "llama-even-deep"),
    needs="te, float8 of current tensors or blocks, and two layers",
)
def te_layer_not_cast(float8_context: Function, config: Any, layer: int = -1, **options: Any) -> Any:
    return nullcontext() if layer == 1 else float8_context(config, layer, **options)


@FLOAT8_FAULTS.add(
    summary="the last layer multiplies in float8 too, though it should be left out",
    source="https://github.com/NVIDIA/Megatron-LM/pull/1731, which comes with first_last_layers_bf16",
    stage="configuration",
    cells=_te_cells("fp8block.fp8ends", "llama-even-deep"),
    needs="te, fp8ends and three layers",
)
def te_last_layer_in_float8(is_left_out: Function, config: Any, layer: int) -> bool:
    return bool(is_left_out(config, layer)) and layer != config.num_layers - 1


# In checkpoints of TransformerEngine's layers, and where they recompute or gather what they have cast.


def _resumed(model: str = "llama-even") -> FaultCells:
    return resume("checkpoint", model=model, megatron="dp2.te.fp8delayed", only=FLOAT32)


@FLOAT8_FAULTS.add(
    summary="checkpoints hold no scales and histories of delayed scaling",
    source=f"{_OF_TRANSFORMER_ENGINE}/issues/304, where what a layer saves is empty",
    stage="training state",
    cells=_resumed(),
    needs="te, fp8delayed and a checkpoint",
)
def te_state_not_saved(layer_state: Function, layer: Any) -> Tensor:
    return layer_state(layer)[:0]  # type: ignore[no-any-return]


@FLOAT8_FAULTS.add(
    summary="scales and histories that a checkpoint has are loaded, and begin anew",
    source=f"{_OF_TRANSFORMER_ENGINE}/issues/982, where a resumed training diverges",
    stage="training state",
    cells=_resumed(),
    needs="te, fp8delayed and a checkpoint",
)
def te_histories_reset_at_load(load_layer_state: Function, layer: Any, state: Any) -> None:
    load_layer_state(layer, state)
    layer.reset_fp8_meta_tensors()


@FLOAT8_FAULTS.add(
    summary="scales follow from empty histories when a checkpoint is loaded, and the histories come afterwards",
    source=f"{_OF_TRANSFORMER_ENGINE}/pull/123, where an inverse scale is not that of the scale loaded",
    stage="training state",
    cells=_resumed(),
    needs="te, fp8delayed and a checkpoint",
)
def te_scales_of_empty_histories(load_layer_state: Function, layer: Any, state: Any) -> None:
    load_layer_state(layer, state)
    for direction in ("scaling_fwd", "scaling_bwd"):
        if hasattr(found := layer.fp8_meta.get(direction), "scale"):
            found.scale.fill_(1)


@FLOAT8_FAULTS.add(
    summary="all layers load scales and histories of the first one",
    source="https://github.com/microsoft/ltp-megatron-lm/pull/29, where parts of a checkpoint have wrong places",
    stage="training state",
    cells=_resumed("llama-even-deep"),
    needs="te, fp8delayed, two layers and a checkpoint",
)
def te_state_of_first_layer(load_layer_state: Function, layer: Any, state: Any) -> None:
    alike = (found for other, found in _loaded.items() if other.weight.shape == layer.weight.shape)
    load_layer_state(layer, next(alike, state))
    _loaded[layer] = state


@FLOAT8_FAULTS.add(
    summary="layers that are recomputed note their magnitudes once more, and scale by what came after the forward pass",
    source=f"{_OF_TRANSFORMER_ENGINE}/pull/24, without which the two passes have other scales",
    stage="configuration",
    cells=_te_cells("fp8delayed.ckpt"),
    needs="te, fp8delayed and ckpt",
)
def te_histories_updated_twice(is_recomputing: Function) -> bool:
    return False


@FLOAT8_FAULTS.add(
    summary="tensor-parallel ranks cast parts of the sequence by their own magnitudes, and gather them",
    source=f"{_OF_TRANSFORMER_ENGINE}/pull/1471, whose reduction over tensor-parallel ranks this is",
    stage="gradients",
    cells=sft("sft-packed", "llama-even-deep", megatron="tp2.te.fp8tensor.seqpar", only=FLOAT32),
    needs="te, fp8tensor and seqpar",
)
def te_parts_with_own_scales(part_quantizers: Function, layer: Any, *arguments: Any) -> None:
    part_quantizers(layer, *arguments)
    for quantizer in (one for of_pass in layer.quantizers.values() for one in of_pass):
        quantizer.with_amax_reduction = False
