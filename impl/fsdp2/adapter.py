"""Declares FSDP2 as a backend of the suite: the supported cells, the patch points for faults, and known defects.

Cells with the layout option ``shipped`` run with these defects (upstream behaviour).
"""

from importlib import metadata
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from conformance.backends.protocol import BackendInfo, Support, Supported, Unsupported
from conformance.core.packages import package_version
from conformance.spec.conventions import Conventions, Float8Products, model_config
from conformance.spec.known_defects import ExpectedDifference, LostEmbeddingGradient, ResummedHeadNorms, Unmodelled
from conformance.spec.layout import Layout
from conformance.spec.precision import F32, HALF_PRECISIONS, Precision
from conformance.spec.scenario import Scenario
from impl.context_parallel.sequence_sharding import RING_DIFFERENCES, RING_MODULES, ring_support
from impl.engine.adapter import (
    HUGGING_FACE_SEAMS,
    SCHEDULES,
    SHARED_SEAMS,
    VOCABULARY_SEAMS,
    ReferenceBackend,
    seams_of_model,
)
from impl.engine.memory_estimate import Shapes, States, cut, elements, host_bytes, largest_layer, layer_of
from impl.fsdp2.float8 import SHAPE_MULTIPLE, float8_support
from impl.models.family_quirks import ROUTED, quirks_of
from impl.models.lora import adapter_support
from impl.models.support import compile_support, dropout_support, is_older, model_support

FEWEST = 3  # summands for which the judge checks digits (conformance/judge/rounding.py)


def _half_precision_sums(scenario: Scenario, layout: Layout) -> Unmodelled | None:
    """Declares the visible effect of micro-batches that are added up in half precision; None if it is not visible."""
    if scenario.tier.summing != F32 or layout.data * layout.sp * scenario.accumulation < FEWEST:
        return None
    return Unmodelled(stage="gradients", tensors=("*gradient: elements *that are * numbers, so added up in it",))


EXPECTED = (
    ExpectedDifference(
        reason="transformers sums a head norm's accumulated gradient over tp at every micro-batch",
        link="docs/findings/hf-head-norm-accumulation.md",
        defects=lambda scenario, layout: (
            ResummedHeadNorms(ranks=layout.tp, data_ranks=layout.dp, micro_batches=scenario.accumulation),
        ),
        options=("lastsync", "shipped"),
        at_least={"tp": 2, "accumulation": 2},
        architectures=("qwen3", "gemma3_text"),
    ),
    ExpectedDifference(
        reason="torch.compile detaches the pending result of a collective from the autograd graph",
        link="docs/findings/compiled-collective-inputs.md",
        defects=lambda scenario, layout: (
            ()
            if model_config(scenario).get("tie_word_embeddings") or is_older("torch", 2, 12)
            else (LostEmbeddingGradient(),)
        ),
        options=("plan", "compile", "shipped"),
        at_least={"tp": 2},
    ),
    ExpectedDifference(
        reason="FSDP1 adds gradients of micro-batches up in half precision under no_sync, whatever reduce_dtype says",
        link="docs/findings/fsdp1-no-sync-half.md",
        unmodelled=_half_precision_sums,
        options=("fsdp1", "lastsync"),
        at_least={"accumulation": 2},
        precisions=HALF_PRECISIONS,
    ),
    *RING_DIFFERENCES,
)


def states_of(layout: Layout, tier: Precision, shapes: Shapes, trained: bool) -> States:
    """Estimates the bytes of a model whose parameters are the masters, sharded by rows over dp x sp.

    A layer is gathered whole, together with the next layer. Parameters outside of layers stay gathered from the
    forward pass to the end of the backward pass.
    """
    full, compute, own = tier.kept.bytes, tier.compute.bytes, cut(shapes, layout.tp)
    is_whole = layout.wrapper == "ddp" or (layout.wrapper == "mfsdp" and layout.zero in (1, 2))
    shards = 1 if is_whole else layout.dp // layout.rep * layout.sp
    sharded = elements({name: (-(-shape[0] // shards), *shape[1:]) for name, shape in own.items()}) // layout.pp
    outside = elements({name: shape for name, shape in own.items() if layer_of(name) is None})
    block = largest_layer(own)
    passing = (outside + 2 * block) * compute * (1 if shards > 1 or tier.is_half else 0)
    lasting = (sharded * full, sharded * full * trained, 2 * sharded * full * trained)
    if "offload" in layout.options:
        return States(weights=0, passing=passing, host=sum(lasting))
    return States(
        weights=lasting[0],
        gradients=lasting[1],
        freed=lasting[1],  # zero_grad() after each update
        optimizer=lasting[2],
        passing=passing + (outside + block) * compute * trained,  # gradients before they are reduced
        update=sharded * full * trained,
    )


class Fsdp2Backend(ReferenceBackend):
    """Runs PyTorch FSDP2 with tensor parallelism and ring attention, for any Hugging Face model that carries a plan.

    With the layout options ``ddp`` and ``fsdp1``, PyTorch's older wrappers run the model (impl.fsdp2.wrapped), with
    ``mfsdp`` Megatron-FSDP (impl.fsdp2.megatron_fsdp).
    """

    info = BackendInfo(
        name="fsdp2",
        packages=("torch", "transformers", "ring-flash-attn", "peft"),
        url="https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html",
        default_zero=3,
    )
    preload = (
        "impl.fsdp2.model",
        *(f"transformers.models.{family}.modeling_{family}" for family in ("llama", "qwen3", "gemma3")),
        *RING_MODULES,
        *SCHEDULES,
    )
    expected = EXPECTED
    optimizers: ClassVar[tuple[str, ...]] = ("sgd", "adamw", "muon")
    conventions: ClassVar[Conventions] = (Float8Products(multiple=SHAPE_MULTIPLE),)
    seams: ClassVar[dict[str, str]] = {
        **SHARED_SEAMS,
        **HUGGING_FACE_SEAMS,
        **seams_of_model(
            "impl.fsdp2.model:Fsdp2Model", "start_micro_batch", "advance_schedule", "reduction_mesh", "summing_dtype"
        ),
        **VOCABULARY_SEAMS,
        "outputs_of": "impl.fsdp2.model:outputs_of",
        "pipeline_schedule": "impl.fsdp2.pipeline:schedule_of",
        "norm_of_stages": "impl.fsdp2.pipeline:Pipeline.norm_of_all",
        "shard_model": "impl.fsdp2.model:Fsdp2Model._shard",
        "adapter_plan": "impl.fsdp2.model_parallel:_with_adapters",
        "recompute_activations": "impl.fsdp2.model:recompute_activations",
        "wrap_model": "impl.fsdp2.wrapped:DdpModel.wrap",
        "delays_reduction": "impl.fsdp2.wrapped:WrappedModel.delays_reduction",
        "clip_pieces": "impl.fsdp2.wrapped:Fsdp1Model.clip_gradients",
        "scale_bucket": (
            "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer:gradient_reduce_preprocessing"
        ),
        "shard_optimizer": "impl.fsdp2.megatron_fsdp:shard_optimizer",
        "round_at_random": "torchao.optim.adam:_fp32_to_bf16_sr",
        "stored_optimizer": "impl.engine.hugging_face:stored_optimizer",
        "numbers_of": "impl.engine.optimizers:numbers_of",
        "orthogonalize": "torch.optim._muon:_zeropower_via_newtonschulz",
        "adjust_rate": "torch.optim._muon:_adjust_lr",
        "restore_state": "impl.engine.optimizers:MuonWithAdamW.__setstate__",
        "norm_axes": "impl.fsdp2.dtensors:axes_to_sum",
        "clip_coefficient": "impl.fsdp2.dtensors:clip_coefficient",
        "find_overflow": "torch.amp.grad_scaler:GradScaler._unscale_grads_",
        "routers_of": "impl.fsdp2.model:routers_of",
        "sorted_by_expert": "impl.fsdp2.model_parallel:sorted_by_expert",
        "expert_divisor": "impl.fsdp2.model_parallel:expert_divisor",
        "float8_config": "impl.fsdp2.float8:float8_config",
        "cast_names": "impl.fsdp2.float8:cast_names",
        "cast_blocks": "impl.fsdp2.float8:cast_blocks",
        "agree_on_scales": "impl.fsdp2.model:agree_on_scales",
        "update_scales": "impl.fsdp2.model:update_scales",
        "keep_magnitudes": "impl.fsdp2.float8:keep_magnitudes",
        "reduce_magnitudes": "torchao.float8.float8_linear_utils:all_reduce",
        "cast_operand": "torchao.float8.float8_linear:hp_tensor_to_float8_dynamic",
        "axis_of_scale": "torchao.float8.float8_linear:get_maybe_axiswise_dim",
        "cast_shard": "torchao.float8.fsdp_utils:hp_tensor_to_float8_dynamic",
        "cast_saturated": "torchao.float8.float8_training_tensor:to_fp8_saturated",
        "amax_to_scale": "torchao.float8.float8_utils:amax_to_scale",
    }

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        if layout.pp > 1 and (refused := _stages_support(scenario, layout)):
            return Unsupported(refused)
        if scenario.optimizer.name == "muon" and (refused := _muon_support(scenario, layout)):
            return Unsupported(refused)
        if scenario.tier.stored and (refused := _stored_support(scenario, layout)):
            return Unsupported(refused)
        if layout.hpz > 1:
            return Unsupported("only DeepSpeed keeps second copies of weights (hpZ); leave hpz out")
        if layout.ulysses > 1:
            return Unsupported("only DeepSpeed has Ulysses; use context parallelism (sp) instead")
        if layout.wrapper:
            if refused := _wrapper_support(scenario, layout):
                return Unsupported(refused)
        elif layout.zero is not None:
            return Unsupported("FSDP2 has no ZeRO stages and shards everything, as ZeRO-3 does; leave the stage out")
        if foreign := [option for option in ("pertoken", "ownopt", "ownaux", "globalaux") if option in layout.options]:
            return Unsupported(f"{', '.join(foreign)} is not built into this backend; leave it out")
        if "buckets" in layout.options and "ddp" not in layout.options:
            return Unsupported("FSDP reduces the gradients of a layer at once; leave buckets out, or use ddp")
        if "manual" in layout.options and (layout.rep == 1 or "lastsync" in layout.options):
            return Unsupported(
                "manual delays what FSDP2 reduces over replicas only; use rep2 without lastsync, which delays all"
            )
        if refused := float8_support(scenario, layout):
            return Unsupported(refused)
        kind = model_config(scenario).get("model_type")
        quirks = quirks_of(kind)
        if layout.ep > 1 and not quirks.has_routers:
            return Unsupported(f"experts of {kind!r} cannot be sharded, only those of {', '.join(ROUTED)}; use ep1")
        if layout.tp > 1 and layout.ep == 1 and quirks.tp_cuts_experts and is_older("torch", 2, 13):
            return Unsupported(
                f"FSDP2 of torch {torch.__version__} does not support stacked experts that tp has sharded; use torch "
                f"2.13, or ep"
            )
        if quirks.has_routers and (uneven := _uneven_experts(model_config(scenario), layout)):
            return Unsupported(uneven)
        explicit = [option for option in ("plan", "seqpar", "losspar") if option in layout.options]
        if explicit and not quirks.has_plan:
            reason = f"{', '.join(explicit)} has no tensor-parallel plan for {kind!r}"
            return Unsupported(f"{reason}; leave it out to use the model's own plan")
        if layout.tp > 1 and not explicit and is_older("transformers", 5, 17):
            return Unsupported(
                f"transformers {metadata.version('transformers')} shards models by their own plan in another way; use "
                f"transformers 5.17 or newer, tp1, or the option 'plan'"
            )
        vocabulary = model_config(scenario).get("vocab_size", 0)
        if not explicit and vocabulary % layout.tp and is_older("transformers", 5, 23):
            return Unsupported(
                f"transformers {metadata.version('transformers')} gathers equal shards of a vocabulary only, and "
                f"tp={layout.tp} does not divide vocab_size={vocabulary}; use transformers 5.23, or the option 'plan'"
            )
        features = 0 if quirks.has_routers else model_config(scenario).get("intermediate_size", 0)
        if explicit and features % layout.tp:
            return Unsupported(
                f"PyTorch's parallel styles take equal shards only, and tp={layout.tp} does not divide "
                f"intermediate_size={features}; leave {', '.join(explicit)} out to use the model's own plan"
            )
        if scenario.lora and layout.tp > 1 and not explicit and scenario.lora.names_layers:
            return Unsupported(
                "the model's own tensor-parallel plan treats all layers alike, but only some have adapters; add the "
                "layout option 'plan'"
            )
        for lacking in (
            adapter_support(scenario),
            compile_support(scenario, layout),
            dropout_support(scenario, layout),
        ):
            if isinstance(lacking, Unsupported):
                return lacking
        without = "use the layout option 'plan', or tp1" if quirks.has_plan else "use tp1"
        lacking = model_support(scenario, layout, has_plan=bool(explicit), without=without)
        return lacking if isinstance(lacking, Unsupported) else ring_support(scenario, layout)

    @classmethod
    def host_bytes(cls, scenario: Scenario, layout: Layout) -> int:
        """Returns the host memory that ``offload`` needs in addition to a GPU."""
        return host_bytes(states_of, scenario, layout)

    @classmethod
    def supports_checkpoint(cls, scenario: Scenario, before: Layout, after: Layout) -> Support:
        """Returns whether a checkpoint of one layout can be loaded in the other."""
        if (before.pp > 1) != (after.pp > 1):
            return Unsupported(
                "checkpoints of pipeline stages name the optimizer's settings by parameter; transfer a training state"
            )
        if "mfsdp" in (before.wrapper, after.wrapper):
            return Unsupported(
                "checkpoints of Megatron-FSDP are not built into this backend; transfer a training state"
            )
        if before.wrapper != after.wrapper:
            return Unsupported("checkpoints of DDP, FSDP1 and FSDP2 are their own; transfer a training state")
        if before.data != after.data and after.float8:
            return Unsupported("scales of float8 depend on how rows are divided, so resume with as many data ranks")
        packed = any(layout.tp > 1 and layout.ep == 1 for layout in (before, after))
        if packed and quirks_of(model_config(scenario).get("model_type")).tp_cuts_experts:
            return Unsupported(
                "torch's checkpoints treat the shards of stacked experts under tp as one region "
                "(docs/findings/packed-colwise-checkpoint.md); transfer a training state, or use ep beside tp"
            )
        return Supported()


def _muon_support(scenario: Scenario, layout: Layout) -> str:
    """Explains why torch's Muon cannot train in a layout; empty if it can."""
    if is_older("torch", 2, 9):
        return f"torch {torch.__version__} has no Muon; use torch 2.9, or adamw"
    if sum(role.trained for role in scenario.objective.roles) > 1:
        return "Muon for two models of one training is not built into this backend; use adamw"
    if "fsdp1" in layout.options:
        return "FSDP1 flattens parameters, and Muon needs matrices; use FSDP2 (leave fsdp1 out), ddp, or adamw"
    optimizer = scenario.optimizer
    if optimizer.fused_matrices or optimizer.ns_coefficients != "simple" or optimizer.adjust_lr == "spectral":
        return (
            "torch's Muon takes each parameter for a matrix, has one set of coefficients for all Newton-Schulz steps, "
            "and no adjust_lr 'spectral'; leave fused_matrices, ns_coefficients and spectral out, or use megatron"
        )
    if layout.pp * layout.ep > 1 or layout.float8:
        return "Muon beside pp, ep and float8 is not built into this backend; leave them out, or use adamw"
    return ""


def _stored_support(scenario: Scenario, layout: Layout) -> str:
    """Explains why a cell cannot be trained without masters; empty if it can."""
    kind, precision = model_config(scenario).get("model_type"), scenario.precision
    if scenario.optimizer.name != "adamw":
        return f"{precision} is built in for AdamW only; use adamw, or bf16"
    if scenario.objective.kind != "sft" or scenario.lora:
        return f"{precision} is judged for supervised fine-tuning without adapters only; use bf16"
    if quirks_of(kind).has_routers or not quirks_of(kind).has_plan:
        return f"{precision} is judged for dense models of known families only; use bf16"
    if layout != Layout(dp=layout.dp, rep=layout.rep, tp=layout.tp, options=layout.options):
        return f"in {precision} only dp, rep and tp are built into this backend; leave other axes out, or use bf16"
    if others := {*layout.options} - {"plan", "ckpt", "manual"}:
        return f"{', '.join(sorted(others))} is not built into this backend in {precision}; leave it out, or use bf16"
    if not scenario.tier.is_stochastic:
        return ""
    if find_spec("torchao") is None:
        return f"{precision} needs torchao, which is not installed; run: pip install 'torchao>=0.18'"
    if is_older("torchao", 0, 18):
        found = package_version("torchao")
        return f"torchao {found} is installed, and {precision} is built on 0.18; pip install 'torchao>=0.18'"
    return ""


def _wrapper_support(scenario: Scenario, layout: Layout) -> str:
    """Explains why DistributedDataParallel or FullyShardedDataParallel cannot run a cell; empty if they can."""
    if layout.wrapper == "mfsdp":
        return _megatron_fsdp_support(scenario, layout)
    if layout.tp * layout.pp * layout.ep > 1:
        return f"{layout.wrapper} beside tp, pp and ep is not built into this backend; leave {layout.wrapper} out"
    if layout.zero not in (None, 2, 3):
        return "FSDP1 shards parameters as ZeRO-3, or with zero2 only until they are used; use one of them, or ddp"
    if foreign := {"offload", "manual"} & set(layout.options):
        return f"{', '.join(foreign)} beside {layout.wrapper} is not built into this backend; leave one of them out"
    if {"ddp", "compile"} <= set(layout.options):
        return "DDP of torch 2.13 fails to take compiled layers apart by its buckets; leave compile out, or use fsdp1"
    if scenario.tier.is_half and scenario.tier.summing == scenario.tier.compute and layout.wrapper == "ddp":
        return "DDP reduces the float32 gradients of autocast as they are; use fsdp1 for sums in half precision"
    return ""


def _megatron_fsdp_support(scenario: Scenario, layout: Layout) -> str:
    """Explains why Megatron-FSDP cannot run a Hugging Face model in a cell; empty if it can."""
    if find_spec("megatron") is None or not (is_older("megatron-core", 0, 18) or find_spec("triton")):
        return "mfsdp needs megatron-core, and from 0.18 on triton; run: pip install 'backend-parity[megatron]'"
    if layout.dp == 1:
        return (
            "with one data-parallel rank Megatron-FSDP doubles gradients at every micro-batch "
            "(https://github.com/NVIDIA/Megatron-LM/issues/6660); use dp2, or leave mfsdp out"
        )
    if layout.zero == 0:
        return "without a ZeRO stage Megatron-FSDP shards nothing; use zero1, zero2 or zero3, or leave mfsdp out"
    if layout != Layout(dp=layout.dp, zero=layout.zero, options=layout.options):
        return "beside mfsdp only dp and a ZeRO stage are built into this backend; leave the other axes out"
    if foreign := sorted({*layout.options} - {"mfsdp", "ckpt"}):
        return f"{', '.join(foreign)} beside mfsdp is not built into this backend; leave one of them out"
    if layout.zero in (1, 2) and quirks_of(model_config(scenario).get("model_type")).has_routers:
        return (
            "experts beside mfsdp with zero1 and zero2 are not built into this backend; use zero3, or leave mfsdp out"
        )
    if scenario.tier.is_loss_scaled:
        return "loss scales beside mfsdp are not built into this backend; use bf16, or leave mfsdp out"
    if scenario.optimizer.name == "muon":
        return "Megatron-FSDP flattens parameters, and Muon needs matrices; use adamw, or leave mfsdp out"
    if scenario.optimizer.frozen or scenario.lora:
        return "Megatron-FSDP of megatron-core 0.16 cannot hook a frozen parameter; leave mfsdp out"
    return ""


def _stages_support(scenario: Scenario, layout: Layout) -> str:
    """Explains why torch's pipelines cannot run a cell; empty if they can."""
    config = model_config(scenario)
    quirks = quirks_of(kind := config.get("model_type"))
    if config.get("tie_word_embeddings"):
        return (
            "the embedding and the head that is tied to it are on two stages, and torch's pipelines do not sum up "
            "their gradients; use pp1, or a model with tie_word_embeddings false"
        )
    if not quirks.has_plan or quirks.has_routers or str(kind).startswith("gemma"):
        return f"stages of {kind!r} are not built into this backend; use pp1"
    if layout != Layout(dp=layout.dp, pp=layout.pp, options=layout.options) or {*layout.options} - {"ckpt"}:
        return "beside stages (pp) only dp and ckpt are built into this backend; use megatron for others"
    if scenario.lora:
        return "adapters beside stages are not built into this backend; use pp1"
    if scenario.tier.is_loss_scaled:
        return "a stage's GradScaler does not know of the overflows of other stages; use bf16, or pp1"
    return ""


def _uneven_experts(config: dict[str, Any], layout: Layout) -> str:
    """Explains why experts cannot be sharded into equal parts; empty if they can, or are not sharded."""
    quirks = quirks_of(config["model_type"])
    hidden, size = config["hidden_size"], config.get("moe_intermediate_size") or config["intermediate_size"]
    if layout.tp > 1 and layout.ep == 1 and quirks.tp_cuts_experts and size % layout.tp:
        return f"tp={layout.tp} does not divide the {size} features of an expert; use a tp that does, or ep"
    ranks = layout.dp * layout.sp // layout.rep  # that hold the same experts
    cut = (hidden, 2 * size, size) if quirks.biased_experts else (hidden, 2 * size)
    if layout.ep > 1 and any(features % ranks for features in cut):
        return (
            f"FSDP2 shards experts of {hidden} and {size} features over the {ranks} ranks that hold the same experts, "
            f"but {ranks} does not divide both; use fewer ranks of dp and sp beside ep"
        )
    return ""
