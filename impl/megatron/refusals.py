"""Explains which cells with Megatron-FSDP, TransformerEngine, float8, Muon and adapters cannot run, and what to do.

This module does not import Megatron.
"""

from importlib.metadata import version

import torch

from conformance.core.packages import is_installed
from conformance.runtime.gpu_inventory import gpus_of_host, installed_gpus
from conformance.spec.conventions import BLOCK, model_config
from conformance.spec.layout import Layout
from conformance.spec.scenario import LoraConfig, Scenario
from impl.megatron.model_config import FLOAT8_MULTIPLE, ModelShape
from impl.models.support import is_older

# Recipes of float8: Megatron's names of the format and of the recipe.
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
JUDGED = ("sft", "grpo", "ppo")  # kinds of objectives that cells in float8 may have


def float8_refused(scenario: Scenario, layout: Layout, shape: ModelShape) -> str:
    """Explains why a cell cannot run in float8; empty if it can, or if its layout does not ask for it."""
    if (recipe := layout.float8) is None:
        return ""
    if "te" not in layout.options or recipe not in RECIPES:
        return f"Megatron multiplies in float8 by TransformerEngine; use te with {', '.join(RECIPES)}, or fsdp2"
    if scenario.objective.kind not in JUDGED:
        return (
            f"{recipe} was tried for {', '.join(JUDGED)}, and not for {scenario.objective.kind}; use one of these, or "
            f"leave {recipe} out"
        )
    if scenario.tier.is_loss_scaled:
        return "the loss scale of fp16 moves what float8 rounds; use bf16"
    axes = {axis: getattr(layout, axis) for axis in ("dp", "tp", "pp", "vpp", "zero")}
    if layout != Layout(**axes, options=layout.options):
        return f"beside {recipe} only {', '.join(axes)} are built into this backend; leave other axes out"
    if recipe == "fp8delayed" and layout.vpp > 1 and scenario.objective.reads == "rollouts":
        return (
            "the first micro-batch of a virtual stage moves the histories of the others, which then end a rollout "
            "apart from it, and the reference does not model this; use vpp1, or fp8tensor"
        )
    if recipe == "fp8block" and "seqpar" in layout.options and shape.hidden % BLOCK:
        return (
            f"TransformerEngine gathers blocks of {BLOCK} x {BLOCK} numbers only, and the model has "
            f"hidden_size={shape.hidden}; use another model, fp8tensor or fp8delayed, or leave seqpar out"
        )
    if others := {*layout.options} - BESIDE - {recipe}:
        return f"{', '.join(sorted(others))} is not built into this backend beside {recipe}; leave it out"
    cut = {"intermediate_size": shape.ffn, "heads x head_dim": shape.attended}  # shared out among tp ranks
    sizes = {"hidden_size": (shape.hidden, 1), **{name: (size, layout.tp) for name, size in cut.items()}}
    if uneven := [f"{name}={size}" for name, (size, ranks) in sizes.items() if size % (FLOAT8_MULTIPLE * ranks)]:
        share = f", also on each of {layout.tp} ranks" if layout.tp > 1 else ""
        return (
            f"TransformerEngine multiplies matrices of float8 whose sizes are multiples of {FLOAT8_MULTIPLE}{share}, "
            f"and the model has {', '.join(uneven)}; use another model, or leave {recipe} out"
        )
    if shape.fused:
        return f"{recipe} is judged for models whose projections Hugging Face keeps apart only; leave it out"
    if not scenario.tier.is_half and (shape.qkv_bias or shape.output_bias):
        return f"beside {recipe} TransformerEngine rounds biases in float32 to bfloat16; use bf16, or leave it out"
    if "fp8ends" in layout.options:
        if recipe == "fp8delayed":
            return "Megatron's delayed scaling leaves no layers out; leave fp8ends out, or use fp8tensor"
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


def sharded_refused(scenario: Scenario, layout: Layout) -> str:
    """Explains why Megatron-FSDP cannot run a cell; empty if it can."""
    if not layout.zero:
        return "without a ZeRO stage Megatron-FSDP shards nothing; add zero1, zero2 or zero3, or leave mfsdp out"
    if layout.dp * layout.sp == 1:
        return (
            "with one data-parallel rank Megatron-FSDP doubles gradients at every micro-batch "
            "(https://github.com/NVIDIA/Megatron-LM/issues/6660); use dp2, or leave mfsdp out"
        )
    if "overlap" in layout.options:
        return (
            "with zero2 and zero3 Megatron-FSDP overlaps by itself; with zero1 and overlap it adds reduced gradients "
            "to the rank's own (fixed in megatron-core 0.17); leave overlap out"
        )
    if layout.pp * layout.ep > 1:
        return "mfsdp beside pp and ep is not built into this backend; leave mfsdp out"
    if foreign := {"te", "manual", "dropout"} & set(layout.options):
        return f"{', '.join(sorted(foreign))} beside mfsdp is not built into this backend; leave one of them out"
    if scenario.tier.is_loss_scaled:
        return (
            "megatron-core unscales the gradient of every parameter, and a rank of Megatron-FSDP has none where it "
            "owns no part ('NoneType' object has no attribute 'data'); use bf16, or leave mfsdp out"
        )
    if scenario.optimizer.frozen or scenario.lora:
        return (
            "Megatron-FSDP of megatron-core 0.16 cannot hook a frozen parameter, and frozen ones are not built in for "
            "later releases; leave mfsdp out"
        )
    return ""


def te_refused(scenario: Scenario, layout: Layout, shape: ModelShape) -> str:
    """Explains why TransformerEngine's layers cannot run a cell; empty if they can."""
    if scenario.tier.is_exact:
        return "TransformerEngine has no float64; use fp32, bf16 or fp16, or leave te out"
    if shape.mixture or shape.latent or shape.sinks or any(shape.windows):
        return "te is built in for models without experts, latent attention, sinks and sliding windows; leave te out"
    if shape.attention_dropout:
        return "dropout in attention not built in for te; set attention_dropout to 0.0"
    if layout.sp > 1:
        return "context parallelism by TransformerEngine is not built in; use sp without te, or te without sp"
    return _te_missing("te") or machine_refused(layout)


def _te_missing(option: str) -> str:
    """Explains why this machine cannot run ``option``, which needs TransformerEngine; empty if it can."""
    if is_installed("transformer-engine"):  # it may be hidden in this process (impl.megatron.context)
        return ""
    if not gpus_of_host():
        return (
            f"there is no GPU, and {option} needs one (--device cuda) with TransformerEngine; leave {option} out, or "
            f"use a machine with a GPU"
        )
    return (
        f"{option} needs TransformerEngine and --device cuda; run: pip install --no-build-isolation "
        f"'transformer-engine[pytorch]'"
    )


def remainders_refused(scenario: Scenario, layout: Layout) -> str:
    """Explains why TransformerEngine's AdamW cannot keep masters by their remainders; empty if it can."""
    if scenario.precision != "bf16":
        return "remainders complete parameters in bf16 to float32 masters; use bf16, or leave remainders out"
    if scenario.optimizer.name != "adamw":
        return "TransformerEngine keeps remainders for AdamW only; use an AdamW scenario, or leave remainders out"
    if layout.zero != 1:
        return "Megatron's distributed optimizer keeps remainders, and no other; add zero1, or leave remainders out"
    if "mfsdp" in layout.options:
        return "Megatron-FSDP keeps masters of its own; leave mfsdp or remainders out"
    if missing := _te_missing("remainders"):
        return missing
    if is_older("transformer-engine", 2, 1):
        return (
            f"TransformerEngine {version('transformer-engine')} keeps no remainders; run: pip install "
            f"--no-build-isolation 'transformer-engine[pytorch]>=2.1', or leave remainders out"
        )
    return ""


def muon_refused(scenario: Scenario, layout: Layout, shape: ModelShape) -> str:
    """Explains why megatron-core's Muon cannot train in a layout; empty if it can."""
    optimizer = scenario.optimizer
    if is_older("megatron-core", 0, 17):
        return (
            "the Muon of megatron-core 0.16 fails beside emerging-optimizers 0.2 and newer (missing 1 required "
            "keyword-only argument: 'nesterov'); use megatron-core 0.17 to 0.19 and emerging-optimizers, for "
            "Python 3.12 (examples/environments.toml), or fsdp2 for torch's Muon"
        )
    if not is_installed("emerging-optimizers"):
        return (
            "Muon needs the package emerging-optimizers, for Python 3.12 and triton (examples/environments.toml); run: "
            "pip install emerging-optimizers, or use fsdp2 for torch's Muon"
        )
    if shape.mixture or shape.latent or scenario.lora or optimizer.frozen:
        return "Muon for experts, latent attention, adapters and frozen parameters is not built in; use fsdp2, or adamw"
    if not shape.fused and "gate_up_proj" not in optimizer.fused_matrices:
        return (
            "megatron-core takes gate and up projections for one matrix (docs/findings/megatron-muon-parts.md); say so "
            'in the scenario by fused_matrices = ["gate_up_proj"], as sft-muon-fused does, or use fsdp2'
        )
    if sum(role.trained for role in scenario.objective.roles) > 1:
        return "Muon for two models of one training is not built into this backend; use adamw"
    if scenario.tier.is_loss_scaled:
        return "megatron-core has Muon without loss scaling only; use bf16, or adamw"
    if "shipped" in layout.options and (shape.fused or "qkv_proj" in optimizer.fused_matrices):
        return "parts of fused query, key and value projections are not modelled; leave shipped out"
    if foreign := {"mfsdp", "te", "overlap"} & set(layout.options):
        return f"Muon beside {', '.join(sorted(foreign))} is not built into this backend; leave it out, or use adamw"
    return ""


def adapters_refused(scenario: Scenario, lora: LoraConfig, layout: Layout, shape: ModelShape) -> str:
    """Explains why the adapters of a cell are not built in; empty if they are."""
    if shape.mixture or shape.latent or shape.fused:
        return (
            "adapters of experts, of latent attention and of projections that Hugging Face fuses are not built in for "
            "megatron; use fsdp2"
        )
    if scenario.tier.is_loss_scaled:
        return "a frozen base has no float32 masters, and fp16 rounds it; use bf16, whose digits published weights have"
    if lora.names_layers and layout.pp > 1:
        return "a pipeline stage without an adapter has nothing to train; use targets of all layers, or pp1"
    return ""
