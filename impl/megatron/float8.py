"""Configures float8 in Megatron's layers of TransformerEngine, for the recipe that a layout option names.

TransformerEngine casts the operands of the three products of a linear layer, and keeps the histories of delayed
scaling. It needs a GPU. This module does not import Megatron.
"""

from importlib.metadata import version
from typing import Any

import torch

from conformance.runtime.gpu_inventory import gpus_of_host, installed_gpus
from conformance.spec.conventions import model_config
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario
from impl.megatron.model_config import ModelShape
from impl.models.support import is_older

MULTIPLE = 16  # TransformerEngine multiplies matrices of float8 whose sizes are multiples of this, tokens among them
HISTORY = 4  # micro-batches whose largest magnitude is the scale of the next, with fp8delayed
# Megatron's names of the format and of the recipe.
RECIPES = {
    "fp8tensor": ("hybrid", "tensorwise"),
    "fp8delayed": ("hybrid", "delayed"),
    "fp8block": ("e4m3", "blockwise"),
}
# The release of TransformerEngine from which megatron-core gives it a recipe, and the compute capability of GPUs that
# have the recipe's products.
NEEDED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "fp8tensor": ((2, 2), (8, 9)),
    "fp8delayed": ((2, 1), (8, 9)),
    "fp8block": ((2, 3), (9, 0)),
}
BESIDE = {"te", "fp8ends", "overlap", "ckpt", "seqpar"}  # options that cells in float8 may have


def float8_refused(scenario: Scenario, layout: Layout, shape: ModelShape) -> str:
    """Explains why a cell cannot run in float8; empty if it can, or if its layout does not ask for it."""
    if (recipe := layout.float8) is None:
        return ""
    if "te" not in layout.options or recipe not in RECIPES:
        return f"Megatron multiplies in float8 by TransformerEngine; use te with {', '.join(RECIPES)}, or fsdp2"
    if scenario.objective.kind != "sft" or scenario.lora:
        return f"{recipe} is judged for supervised fine-tuning without adapters only; leave it out"
    if scenario.tier.is_loss_scaled:
        return "the loss scale of fp16 moves what float8 rounds; use bf16"
    if layout != Layout(dp=layout.dp, tp=layout.tp, pp=layout.pp, zero=layout.zero, options=layout.options):
        return f"beside {recipe} only dp, tp, pp and zero are built into this backend; leave other axes out"
    if others := {*layout.options} - BESIDE - {recipe}:
        return f"{', '.join(sorted(others))} is not built into this backend beside {recipe}; leave it out"
    if recipe == "fp8block" and "seqpar" in layout.options:
        return (
            "beside seqpar TransformerEngine casts each rank's part of the sequence in blocks of its own, which the "
            "reference does not; leave seqpar out, or use fp8tensor or fp8delayed"
        )
    cut = {"intermediate_size": shape.ffn, "heads x head_dim": shape.attended}  # shared out among tp ranks
    sizes = {"hidden_size": (shape.hidden, 1), **{name: (size, layout.tp) for name, size in cut.items()}}
    if uneven := [f"{name}={size}" for name, (size, ranks) in sizes.items() if size % (MULTIPLE * ranks)]:
        share = f", also on each of {layout.tp} ranks" if layout.tp > 1 else ""
        return (
            f"TransformerEngine multiplies matrices of float8 whose sizes are multiples of {MULTIPLE}{share}, and the "
            f"model has {', '.join(uneven)}; use another model, or leave {recipe} out"
        )
    if shape.fused:
        return f"{recipe} is judged for models whose projections Hugging Face keeps apart only; leave it out"
    if not scenario.tier.is_half and (shape.qkv_bias or shape.output_bias):
        return f"beside {recipe} TransformerEngine rounds biases in float32 to bfloat16; use bf16, or leave it out"
    if "fp8ends" in layout.options:
        if recipe == "fp8delayed":
            return "Megatron's delayed scaling leaves no layers out; leave fp8ends out, or use fp8tensor"
        if layout.pp > 1:
            return "the layers that fp8ends leaves out are of two stages, which is not built in; use pp1"
        if model_config(scenario).get("num_hidden_layers", 0) < 3:
            return "fp8ends leaves the first and the last layer out, and the model has no other; leave it out"
    return ""


def machine_refused(layout: Layout) -> str:
    """Explains why this machine cannot run a recipe of TransformerEngine, which is installed; empty if it can."""
    if (recipe := layout.float8) is None:
        return ""
    release, needed = NEEDED[recipe]
    if is_older("transformer-engine", *release):
        first = ".".join(map(str, release))
        return (
            f"TransformerEngine {version('transformer-engine')} has no {recipe}; run: pip install "
            f"--no-build-isolation 'transformer-engine[pytorch]>={first}', or leave {recipe} out"
        )
    visible = gpus_of_host()
    for gpu in installed_gpus():
        if (gpu.uuid in visible or {*gpu.parts} & {*visible}) and gpu.capability and gpu.capability < needed:
            least, found = (".".join(map(str, capability)) for capability in (needed, gpu.capability))
            return (
                f"{recipe} needs GPUs of compute capability {least} or higher, and {gpu.name} has {found}; use te "
                f"without {recipe}, fsdp2 in the exact tier, whose products in float8 are emulated, or other GPUs"
            )
    if recipe == "fp8block" and torch.version.cuda and [*map(int, torch.version.cuda.split("."))] < [12, 9]:
        return f"fp8block needs CUDA 12.9, and torch is built for {torch.version.cuda}; use another build, or fp8tensor"
    return ""


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
