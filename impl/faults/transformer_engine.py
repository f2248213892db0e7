"""Plants faults in float8 of TransformerEngine's layers, which Megatron tells what to do.

Each loses what a recipe promises, and numbers stay plausible. Seams are functions of megatron-core and of
TransformerEngine.
"""

import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from conformance.backends.faults import FaultCells, Function
from impl.faults.declaration import FLOAT32, Faults, resume, rl, sft
from impl.faults.float8 import OF_TRANSFORMER_ENGINE, kept_of_layer

TE_FAULTS = Faults()
_loaded: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # what layers should have loaded
# Histories of layers in the order in which they were made, each with the library's list of all, which is new in a cell.
_histories: list[tuple[Any, Any]] = []


def _cells(options: str, model: str = "llama-even") -> FaultCells:
    return sft("sft-packed", model, megatron=f"dp2.te.{options}", only=FLOAT32)


@TE_FAULTS.add(
    summary="gradients of outputs are cast to e4m3, though the format is hybrid",
    source=f"{OF_TRANSFORMER_ENGINE}/issues/3342, where e5m2 is read as e4m3",
    stage="configuration",
    cells=_cells("fp8tensor"),
    needs="te and fp8tensor",
)
def te_gradients_in_e4m3(te_recipe: Function, config: Any) -> Any:
    return replace(recipe := te_recipe(config), fp8_format=type(recipe.fp8_format).E4M3)


@TE_FAULTS.add(
    summary="scales of tensors are rounded to powers of two, though the recipe has none",
    source=f"{OF_TRANSFORMER_ENGINE}/pull/1471, which makes it an option",
    stage="configuration",
    cells=_cells("fp8tensor"),
    needs="te and fp8tensor",
)
def te_scales_powers_of_two(te_recipe: Function, config: Any) -> Any:
    return _with_scales(te_recipe(config), powers=True)


@TE_FAULTS.add(
    summary="scales of blocks are not rounded to powers of two, though the recipe has them",
    source="https://github.com/ROCm/TransformerEngine/pull/687, about the two flags that say so",
    stage="configuration",
    cells=_cells("fp8block"),
    needs="te and fp8block",
)
def te_scales_not_powers_of_two(te_recipe: Function, config: Any) -> Any:
    return _with_scales(te_recipe(config), powers=False)


def _with_scales(recipe: Any, *, powers: bool) -> Any:
    for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(recipe, name, replace(getattr(recipe, name), power_2_scale=powers))
    return recipe


@TE_FAULTS.add(
    summary="weights have a scale for each 1 x 128 numbers, instead of each 128 x 128",
    source=f"{OF_TRANSFORMER_ENGINE}/pull/1559, whose recipe has both",
    stage="configuration",
    cells=_cells("fp8block"),
    needs="te and fp8block",
)
def te_weights_in_rows_of_blocks(te_recipe: Function, config: Any) -> Any:
    return replace(te_recipe(config), w_block_scaling_dim=1)


@TE_FAULTS.add(
    summary="each rank scales by the largest magnitudes of its own micro-batches",
    source="https://github.com/AMD-AGI/Primus/pull/669, where reduce_amax was always False",
    stage="configuration",
    cells=_cells("fp8delayed"),
    needs="te, fp8delayed and dp of 2 or more",
)
def te_magnitudes_of_own_rank(te_recipe: Function, config: Any) -> Any:
    recipe = te_recipe(config)
    recipe.reduce_amax = False
    return recipe


@TE_FAULTS.add(
    summary="magnitudes are reduced over data-parallel ranks only, and tensor-parallel ones scale by their own",
    source=f"{OF_TRANSFORMER_ENGINE}/issues/656, whose documentation says so",
    stage="configuration",
    cells=sft("sft-packed", "llama-even-deep", megatron="tp2.te.fp8delayed", only=FLOAT32),
    needs="te, fp8delayed and tp of 2 or more",
)
def te_magnitudes_of_data_ranks(amax_group: Function, **_: Any) -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


@TE_FAULTS.add(
    summary="scales follow from the last micro-batch alone, and the history is not read",
    source="https://github.com/pytorch/ao/pull/1753 deletes such code; docs/findings/torchao-amax-history.md",
    stage="configuration",
    cells=_cells("fp8delayed"),
    needs="te, fp8delayed and three micro-batches",
)
def te_history_not_read(te_recipe: Function, config: Any) -> Any:
    recipe = te_recipe(config)
    recipe.amax_compute_algo = "most_recent"
    return recipe


@TE_FAULTS.add(
    summary="scales are those of the micro-batch before the last one",
    source=f"{OF_TRANSFORMER_ENGINE}/pull/118, where magnitudes are copied before their reduction has ended",
    stage="configuration",
    cells=_cells("fp8delayed"),
    needs="te, fp8delayed and three micro-batches",
)
def te_scales_one_micro_batch_late(te_recipe: Function, config: Any) -> Any:
    recipe = te_recipe(config)
    recipe.scaling_factor_compute_algo = _late_scale
    return recipe


def _late_scale(amax: Tensor, scale: Tensor, largest: float, recipe: Any) -> Tensor:
    """Computes new scales as TransformerEngine does, and returns those of the update before."""
    new = torch.where(amax > 0, largest / amax, scale)
    late: Tensor = kept_of_layer(scale, "late", new, first=False)
    return late


@TE_FAULTS.add(
    summary="casts note the largest magnitudes where nothing reads them, so that scales stay 1",
    source=f"{OF_TRANSFORMER_ENGINE}/pull/2044, where histories are new and casts write to the old ones",
    stage="configuration",
    cells=_cells("fp8delayed"),
    needs="te and fp8delayed",
)
def te_magnitudes_not_recorded(te_quantizers: Function, state: Any) -> Any:
    found = te_quantizers(state)
    for one in found:
        one.amax = torch.zeros_like(one.amax)
    return found


@TE_FAULTS.add(
    summary="weights are cast in the first step, and what later steps multiply by is not cast again",
    source="https://github.com/NVIDIA/Megatron-LM/issues/629, after which Megatron says when weights are new",
    stage="log-probs",
    cells=_cells("fp8tensor"),
    needs="te, float8 and two steps",
)
def te_weights_of_first_step(weights_are_new: Function, model: Any) -> None:
    if not hasattr(model, "has_cast"):
        weights_are_new(model)
        model.has_cast = True


@TE_FAULTS.add(
    summary="scales are half of those that histories prescribe, so that the format's last binade is empty",
    source=f"{OF_TRANSFORMER_ENGINE}/pull/427, which decides how a margin and rounding make scales smaller",
    stage="configuration",
    cells=_cells("fp8delayed"),
    needs="te and fp8delayed",
)
def te_scales_with_a_margin(te_recipe: Function, config: Any) -> Any:
    recipe = te_recipe(config)
    recipe.margin = 1
    return recipe


@TE_FAULTS.add(
    summary="weights are cast anew after an update, but their transposed copy is that of the first step",
    source=f"{OF_TRANSFORMER_ENGINE}/pull/1596",
    stage="configuration",
    cells=_cells("fp8tensor"),
    needs="te, fp8tensor and two steps",
)
def te_stale_transposed_weights(cached_weight: Function, module: Any, *arguments: Any, **options: Any) -> Any:
    found = cached_weight(module, *arguments, **options)
    if found._transpose is not None:
        first = kept_of_layer(module, "transposed", found._transpose.clone(), first=True)
        found._transpose.copy_(first)
    return found


@TE_FAULTS.add(
    summary="gradients of the weights of o_proj and down_proj are multiplied in high precision",
    source="https://github.com/pytorch/ao/pull/3508, which adds the option",
    stage="configuration",
    cells=_cells("fp8tensor"),
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


@TE_FAULTS.add(
    summary="the second layer multiplies in the precision of the cell",
    source=f"{OF_TRANSFORMER_ENGINE}/pull/2, after which float8 is on again behind layers without it",
    stage="configuration",
    cells=_cells("fp8tensor", "llama-even-deep"),
    needs="te, float8 of current tensors or blocks, and two layers",
)
def te_layer_not_cast(float8_context: Function, config: Any, layer: int = -1, **options: Any) -> Any:
    return nullcontext() if layer == 1 else float8_context(config, layer, **options)


@TE_FAULTS.add(
    summary="the last layer multiplies in float8 too, though it should be left out",
    source="https://github.com/NVIDIA/Megatron-LM/pull/1731, which comes with first_last_layers_bf16",
    stage="configuration",
    cells=_cells("fp8block.fp8ends", "llama-even-deep"),
    needs="te, fp8ends and three layers",
)
def te_last_layer_in_float8(is_left_out: Function, config: Any, layer: int) -> bool:
    return bool(is_left_out(config, layer)) and layer != config.num_layers - 1


# In checkpoints of TransformerEngine's layers, and where they recompute or gather what they have cast.


def _resumed(model: str = "llama-even") -> FaultCells:
    return resume("checkpoint", model=model, megatron="dp2.te.fp8delayed", only=FLOAT32)


@TE_FAULTS.add(
    summary="checkpoints hold no scales and histories of delayed scaling",
    source=f"{OF_TRANSFORMER_ENGINE}/issues/304, where what a layer saves is empty",
    stage="training state",
    cells=_resumed(),
    needs="te, fp8delayed and a checkpoint",
)
def te_state_not_saved(layer_state: Function, layer: Any) -> Tensor:
    return layer_state(layer)[:0]  # type: ignore[no-any-return]


@TE_FAULTS.add(
    summary="scales and histories that a checkpoint has are loaded, and begin anew",
    source=f"{OF_TRANSFORMER_ENGINE}/issues/982, where a resumed training diverges",
    stage="training state",
    cells=_resumed(),
    needs="te, fp8delayed and a checkpoint",
)
def te_histories_reset_at_load(load_layer_state: Function, layer: Any, state: Any) -> None:
    load_layer_state(layer, state)
    layer.reset_fp8_meta_tensors()


@TE_FAULTS.add(
    summary="scales follow from empty histories when a checkpoint is loaded, and the histories come afterwards",
    source=f"{OF_TRANSFORMER_ENGINE}/pull/123, where an inverse scale is not that of the scale loaded",
    stage="training state",
    cells=_resumed(),
    needs="te, fp8delayed and a checkpoint",
)
def te_scales_of_empty_histories(load_layer_state: Function, layer: Any, state: Any) -> None:
    load_layer_state(layer, state)
    for direction in ("scaling_fwd", "scaling_bwd"):
        if hasattr(found := layer.fp8_meta.get(direction), "scale"):
            found.scale.fill_(1)


@TE_FAULTS.add(
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


@TE_FAULTS.add(
    summary="layers that are recomputed note their magnitudes once more, and scale by what came after the forward pass",
    source=f"{OF_TRANSFORMER_ENGINE}/pull/24, without which the two passes have other scales",
    stage="configuration",
    cells=_cells("fp8delayed.ckpt"),
    needs="te, fp8delayed and ckpt",
)
def te_histories_updated_twice(is_recomputing: Function) -> bool:
    return False


@TE_FAULTS.add(
    summary="tensor-parallel ranks cast parts of the sequence by their own magnitudes, and gather them",
    source=f"{OF_TRANSFORMER_ENGINE}/pull/1471, whose reduction over tensor-parallel ranks this is",
    stage="configuration",
    cells=sft("sft-packed", "llama-even-deep", megatron="tp2.te.fp8tensor.seqpar", only=FLOAT32),
    needs="te, fp8tensor and seqpar",
)
def te_parts_with_own_scales(part_quantizers: Function, layer: Any, *arguments: Any) -> None:
    part_quantizers(layer, *arguments)
    for quantizer in (one for of_pass in layer.quantizers.values() for one in of_pass):
        quantizer.with_amax_reduction = False


# Beside rollouts, adapters and stages of a pipeline.


@TE_FAULTS.add(
    summary="passes over a rollout multiply in the precision of the cell, and updates in float8",
    source="https://github.com/verl-project/verl/pull/4223, which lets updates of a policy multiply in float8",
    stage="configuration",
    cells=rl("grpo-half", model="llama-even", megatron="dp2.te.fp8tensor", only=FLOAT32),
    needs="te, float8 and rollouts",
)
def te_rollouts_in_high_precision(float8_context: Function, config: Any, layer: int = -1, **options: Any) -> Any:
    return float8_context(config, layer, **options) if torch.is_grad_enabled() else nullcontext()


@TE_FAULTS.add(
    summary="each micro-batch of a rollout, which has no gradients, moves histories as those of an update do",
    source=f"{OF_TRANSFORMER_ENGINE}/pull/40, where only an iteration with gradients updates scales",
    stage="configuration",
    cells=rl("grpo-half", model="llama-even", megatron="dp2.te.fp8delayed", only=FLOAT32),
    needs="te, fp8delayed and rollouts",
)
def te_rollouts_move_histories(leave_float8: Function, enabled: bool, **options: Any) -> None:
    leave_float8(enabled, **options)
    if enabled and not torch.is_grad_enabled():
        leave_float8.__self__.reduce_and_update_fp8_tensors(forward=True)  # type: ignore[attr-defined]


def _with_histories_of_first(te_quantizers: Function, state: Any) -> Any:
    """Lets each layer behind the first one cast by the scales of the first one, and note its magnitudes there."""
    manager = sys.modules["transformer_engine.pytorch.fp8"].FP8GlobalStateManager
    buffers = getattr(manager, "quantization_state", manager).global_amax_buffer
    before = [histories for all_, histories in _histories if all_ is buffers]
    _histories[:] = [(buffers, histories) for histories in [*before, state]]
    of_layer = 8  # forward and backward, of four products
    return te_quantizers(before[len(before) % of_layer] if len(before) >= of_layer else state)


@TE_FAULTS.add(
    summary="the policy casts by the scales of the reference, and notes its magnitudes in the reference's histories",
    source=f"{OF_TRANSFORMER_ENGINE}/pull/2044, where casts write to histories that are not theirs",
    stage="configuration",
    cells=rl("grpo-half", model="llama-even", megatron="dp2.te.fp8delayed", only=FLOAT32),
    needs="te, fp8delayed and a reference",
)
def te_policy_scaled_as_reference(te_quantizers: Function, state: Any) -> Any:
    return _with_histories_of_first(te_quantizers, state)


@TE_FAULTS.add(
    summary="virtual stages of a rank share their scales and histories",
    source=f"{OF_TRANSFORMER_ENGINE}/pull/2044, where casts write to histories that are not theirs",
    stage="configuration",
    cells=sft("sft-packed", "llama-even-stages", megatron="pp2.vpp2.te.fp8delayed", only=FLOAT32),
    needs="te, fp8delayed and vpp of 2 or more",
)
def te_chunks_share_histories(te_quantizers: Function, state: Any) -> Any:
    return _with_histories_of_first(te_quantizers, state)


@TE_FAULTS.add(
    summary="layers are counted from 1, so that the second layer is left out of float8 and the first is not",
    source="https://github.com/NVIDIA/Megatron-LM/pull/1731, which comes with first_last_layers_bf16",
    stage="configuration",
    cells=sft("sft-packed", "llama-even-deep", megatron="pp2.te.fp8tensor.fp8ends", only=FLOAT32),
    needs="te, fp8ends and three layers",
)
def te_ends_counted_from_one(is_left_out: Function, config: Any, layer: int) -> bool:
    return bool(is_left_out(config, layer + 1 if layer >= 0 else layer))


@TE_FAULTS.add(
    summary="adapters multiply by numbers that are cast to float8, as the layers beside them do",
    source="https://github.com/unslothai/unsloth/pull/3440, which keeps adapters in bf16 beside weights in float8",
    stage="configuration",
    cells=sft("sft-lora", "llama-even", megatron="dp2.te.fp8tensor", only=FLOAT32),
    needs="te, float8 and adapters",
)
def te_adapters_in_float8(adapter_product: Function, inputs: Tensor, weight: Tensor) -> Any:
    return adapter_product(*(x + (_in_e4m3(x) - x).detach() for x in (inputs, weight)))


def _in_e4m3(x: Tensor) -> Tensor:
    scale = torch.finfo(torch.float8_e4m3fn).max / x.abs().amax()
    return (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale
