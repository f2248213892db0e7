"""Declares DeepSpeed as a backend of the suite: the supported cells, the patch points for faults, and known defects.

Cells with the layout option ``shipped`` run with most of these defects (upstream behaviour).
"""

from importlib.util import find_spec
from typing import ClassVar

from conformance.backends.protocol import BackendInfo, Support, Supported, Unsupported
from conformance.core.errors import UsageError
from conformance.core.packages import UnsupportedVersion, is_installed, package_version
from conformance.spec.conventions import MuonEpsilon, RoundedMasters, model_config
from conformance.spec.known_defects import (
    Defect,
    DividedGradients,
    ExpectedDifference,
    OrthogonalizedShares,
    Unmodelled,
)
from conformance.spec.layout import Layout
from conformance.spec.precision import BF16, F16, F32, HALF_PRECISIONS
from conformance.spec.scenario import Scenario
from impl.context_parallel.sequence_sharding import RING_DIFFERENCES, RING_MODULES, ring_support
from impl.deepspeed.checkpoint_layout import Cut, check, engine_cut
from impl.deepspeed.config import states_of, zero_stage
from impl.engine.adapter import HUGGING_FACE_SEAMS, SCHEDULES, SHARED_SEAMS, ReferenceBackend, seams_of_model
from impl.engine.memory_estimate import host_bytes
from impl.models.family_quirks import quirks_of
from impl.models.lora import adapter_support
from impl.models.support import compile_support, dropout_support, is_older, model_support, plan_styles

OLDEST = (0, 19, 8)  # of DeepSpeed: other releases lack settings or functions that the backend calls
FEWEST = 3  # summands for which the judge checks digits (conformance/judge/rounding.py)


def _half_precision_sums(scenario: Scenario, layout: Layout) -> Unmodelled | None:
    """Declares the visible effect of gradients that are accumulated in half precision; None if it is not visible.

    The error is smaller than the noise of half precision, so no number is judged wrong. But all elements of such a sum
    are half-precision numbers.
    """
    summands = layout.data * layout.sp * layout.ulysses * scenario.accumulation  # fewer if a micro-batch has no targets
    if summands < FEWEST:
        return None
    return Unmodelled(stage="gradients", tensors=("*gradient: elements *that are * numbers, so added up in it",))


def _orthogonalized_shares(scenario: Scenario, layout: Layout) -> tuple[Defect, ...]:
    return (OrthogonalizedShares(ranks=layout.tp),) if scenario.optimizer.name == "muon" else ()


EXPECTED = (
    ExpectedDifference(
        reason="DeepSpeed casts the model to half precision first and copies the float32 masters from the cast model",
        link="docs/findings/deepspeed-rounded-masters.md",
        defects=lambda scenario, _: (RoundedMasters(precision=scenario.precision),),
        options=("shipped",),
        precisions=HALF_PRECISIONS,
    ),
    ExpectedDifference(
        reason="ZeRO-0 adds gradients up in half precision, whatever grad_accum_dtype says",
        link="docs/findings/deepspeed-zero0-half.md",
        unmodelled=_half_precision_sums,
        at_most={"zero": 0},
        precisions=HALF_PRECISIONS,
    ),
    ExpectedDifference(
        reason="ZeRO-3 divides gradients by the ranks of Ulysses as well, ZeRO 0 to 2 do not",
        link="docs/findings/deepspeed-ulysses-scale.md",
        defects=lambda _, layout: (DividedGradients(by=layout.ulysses),),
        options=("shipped",),
        at_least={"ulysses": 2, "zero": 3},
        at_most={"tp": 1},  # with AutoTP its ranks are data ranks at every stage
    ),
    ExpectedDifference(
        reason="Muon orthogonalizes each rank's part of a matrix by itself beside AutoTP",
        link="docs/findings/deepspeed-muon-autotp.md",
        defects=_orthogonalized_shares,
        at_least={"tp": 2},
    ),
    *RING_DIFFERENCES,
)


if find_spec("deepspeed") is None:  # an import would take seconds, and most callers do not need it
    raise ModuleNotFoundError("deepspeed is not installed", name="deepspeed")
if is_installed("deepspeed") and is_older("deepspeed", *OLDEST):
    raise UnsupportedVersion(
        f"deepspeed {package_version('deepspeed')} is installed, which lacks functions that this backend calls; "
        f"install deepspeed {'.'.join(map(str, OLDEST))} or newer"
    )

# The styles of tensor-parallel plans that AutoTP of deepspeed 0.19.8 supports; it rejects a plan with another style.
STYLES = frozenset(
    (
        "colwise",
        "colwise_rep",
        "colwise_gather_output",
        "rowwise",
        "replicated_with_grad_allreduce",
        "embedding_rowwise",
    )
)
_OPTIONS = (
    "ring",
    "zigzag",
    "torchcp",
    "ckpt",
    "reentrant",
    "compile",
    "leaf",
    "manual",
    "buckets",
    "dropout",
    "offload",
    "ownopt",
    "shipped",
)


class DeepspeedBackend(ReferenceBackend):
    """Runs DeepSpeed: ZeRO 0 to 3, with AutoTP, ring attention and Ulysses.

    A layout without a ZeRO stage runs at stage 3, which shards the same tensors as FSDP2.
    """

    info = BackendInfo(
        name="deepspeed",
        packages=("torch", "transformers", "deepspeed", "ring-flash-attn", "peft"),
        url="https://deepspeed.readthedocs.io/en/latest/zero3.html",
        default_zero=3,
    )
    preload = (
        "impl.deepspeed.model",
        "deepspeed.runtime.engine",
        "torch._inductor.compile_fx",  # the first engine of every fresh worker imports it
        *(f"transformers.models.{family}.modeling_{family}" for family in ("llama", "qwen3", "gemma3")),
        *RING_MODULES,
        *SCHEDULES,
    )
    expected = EXPECTED
    optimizers: ClassVar[tuple[str, ...]] = ("sgd", "adamw", "muon")
    conventions: ClassVar = (MuonEpsilon(),)
    seams: ClassVar[dict[str, str]] = {
        **SHARED_SEAMS,
        **HUGGING_FACE_SEAMS,
        **seams_of_model("impl.deepspeed.model:DeepspeedModel", "forgotten_scale", "forget_steps"),
        "outputs_of": "impl.deepspeed.model:outputs_of",
        "recompute_activations": "impl.deepspeed.model:recompute_activations",
        "reduce_replicas": "deepspeed.runtime.engine:DeepSpeedEngine.buffered_allreduce_fallback",
        "end_backward": "deepspeed.runtime.engine:DeepSpeedEngine._backward_epilogue",
        "copy_offloaded": "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.copy_grads_in_partition",
        "forget_second_copy": (
            "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.invalidate_secondary_tensor"
        ),
        "cut_second_copy": "deepspeed.runtime.zero.partition_parameters:Init._partition_param_sec",
        "average_bucket": "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.average_tensor",
        "counts_in_norm": "deepspeed.runtime.zero.stage_1_and_2:is_model_parallel_parameter",
        "clip_threshold": "impl.deepspeed.config:clip_threshold",
        "stored_optimizer": "impl.engine.hugging_face:stored_optimizer",
        "mark_cut_gradients": "impl.deepspeed.tensors:EngineTensors.mark_cut_gradients",
        "forget_overflow": "impl.deepspeed.model:forget_overflow",
        "routers_of": "impl.deepspeed.model:routers_of",
        "summing_dtype": "impl.deepspeed.config:summing_dtype",
        "clip_before_muon": "impl.deepspeed.config:ClippingBeforeMuon.clip",
        "update_by_muon": "deepspeed.runtime.zero.muon.muon_optimizer:muon_update",
    }

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        if scenario.tier.stored and (refused := _stored_support(scenario, layout)):
            return Unsupported(refused)
        if layout.pp > 1:
            return Unsupported("DeepSpeed's pipeline engine is not built in; use pp1")
        if layout.ep > 1:
            return Unsupported("DeepSpeed's experts are its own layers, which no Hugging Face model has; use ep1")
        kind = model_config(scenario).get("model_type")
        quirks = quirks_of(kind)
        if layout.tp > 1 and quirks.has_routers:
            return Unsupported(f"AutoTP does not know how the plan of {kind} shards experts; use tp1, or fsdp2")
        if layout.rep > 1:
            return Unsupported("hybrid sharding is not built in; use rep1, or zero0, where every rank is a replica")
        if layout.hpz > 1 and layout.tp > 1 and "shipped" in layout.options:
            return Unsupported(
                "DeepSpeed's groups for hpZ mix parts of tensor parallelism (docs/findings/deepspeed-hpz-autotp.md), "
                "and this is not modelled; leave shipped out"
            )
        if scenario.optimizer.name == "muon" and (refused := _muon_support(scenario, layout)):
            return Unsupported(refused)
        if foreign := [option for option in layout.options if option not in _OPTIONS]:
            return Unsupported(f"{', '.join(foreign)} is not built into this backend; leave it out")
        if "offload" in layout.options and layout.zero == 0:
            return Unsupported("DeepSpeed offloads shards of ZeRO, and zero0 has none; use zero1, zero2 or zero3")
        own_class = zero_stage(layout) == 1 and scenario.tier.compute == BF16 and "offload" not in layout.options
        if "buckets" in layout.options and (zero_stage(layout) == 0 or own_class):
            return Unsupported(
                "ZeRO-0, and ZeRO-1 in bf16, reduce buckets of 500 million numbers, whatever reduce_bucket_size is; "
                "use zero2 or zero3"
            )
        sums_in_half = scenario.tier.is_half and scenario.tier.summing != F32
        if sums_in_half and not scenario.tier.stored and zero_stage(layout) < 2:
            return Unsupported(
                "sums in half precision are built in for ZeRO-2 and 3: ZeRO-1 would take another wrapper for them, and "
                "ZeRO-0 adds up so in any case; use zero2 or zero3"
            )
        if "ownopt" in layout.options and layout.zero == 0 and scenario.tier.is_half:
            return Unsupported(
                "at zero0 in half precision, the state of DeepSpeed's wrapper around its fused AdamW cannot be read; "
                "use zero1, zero2 or zero3, or leave ownopt out"
            )
        if "compile" in layout.options and zero_stage(layout) == 3 and "leaf" not in layout.options:
            return Unsupported(
                "ZeRO-3 fetches weights in hooks inside a layer, which breaks the graph of torch.compile, so parts run "
                "uncompiled; add leaf, use zero0, zero1 or zero2, or fsdp2"
            )
        if "leaf" in layout.options and zero_stage(layout) < 3:
            return Unsupported("only ZeRO-3 gathers weights for a layer; use zero3, or leave leaf out")
        if scenario.lora and scenario.tier.compute == F16:
            return Unsupported("the frozen base has no float32 master, so fp16 rounds it; use bf16")
        for lacking in (
            adapter_support(scenario),
            compile_support(scenario, layout),
            dropout_support(scenario, layout),
        ):
            if isinstance(lacking, Unsupported):
                return lacking
        if scenario.optimizer.frozen and not scenario.lora and scenario.tier.is_half:
            return Unsupported("a frozen parameter has no float32 master, so it is rounded; use fp32")
        if layout.tp > 1 and quirks.whole_outputs:
            return Unsupported(
                f"AutoTP leaves each rank its own part of {' and '.join(quirks.whole_outputs)}, but the code of "
                f"{kind} needs whole outputs; use tp1, or fsdp2, which gathers them"
            )
        by_mpu = layout.ulysses > 1 and layout.tp == 1
        if by_mpu and layout.zero == 1 and scenario.tier.compute == BF16:
            return Unsupported(
                "DeepSpeed's BF16_Optimizer raises on all but the first rank of Ulysses "
                "(docs/findings/deepspeed-ulysses-scale.md); use zero0, zero2 or zero3, or fp16"
            )
        if isinstance(lacking := model_support(scenario, layout, has_plan=quirks.autotp_by_name), Unsupported):
            return lacking
        if layout.tp > 1 and (unknown := plan_styles(scenario) - STYLES):
            return Unsupported(
                f"AutoTP does not know {', '.join(sorted(unknown))}, which the model's tensor-parallel plan asks for; "
                f"use tp1, or fsdp2"
            )
        return ring_support(scenario, layout)

    @classmethod
    def host_bytes(cls, scenario: Scenario, layout: Layout) -> int:
        """Returns the host memory that a rank on a GPU needs: for pieces that ZeRO-3 collects, and for ``offload``."""
        return host_bytes(states_of, scenario, layout)

    @classmethod
    def supports_checkpoint(cls, scenario: Scenario, before: Layout, after: Layout) -> Support:
        """Returns whether a checkpoint of one layout can be loaded in the other."""

        def cut(layout: Layout) -> Cut:
            name = {"adamw": "Adam", "sgd": "SGD", "muon": "Muon with Adam"}[scenario.optimizer.name]
            builtin = "AdamW" if scenario.optimizer.name == "adamw" else "SGD"
            own = f"its own {name}" if "ownopt" in layout.options else builtin
            return engine_cut(layout, scenario.precision, optimizer=own)

        try:
            check(cut(before), cut(after))
        except UsageError as error:
            return Unsupported(str(error))
        return Supported()


def _stored_support(scenario: Scenario, layout: Layout) -> str:
    """Explains why a cell cannot be trained without float32 masters; empty if it can."""
    precision = scenario.precision
    if scenario.tier.is_stochastic:
        return f"DeepSpeed rounds its bf16 masters to the nearest number; use bf16-nearest, or fsdp2 for {precision}"
    if scenario.optimizer.name != "adamw":
        return f"{precision} is built in for AdamW only; use adamw, or bf16"
    if scenario.objective.kind != "sft" or scenario.lora:
        return f"{precision} is judged for supervised fine-tuning without adapters only; use bf16"
    if quirks_of(model_config(scenario).get("model_type")).has_routers:
        return f"{precision} is judged for dense models only; use bf16"
    if layout != Layout(dp=layout.dp, tp=layout.tp, zero=layout.zero, options=layout.options):
        return f"in {precision} only dp and tp are built into this backend; leave other axes out, or use bf16"
    if others := {*layout.options} - {"ckpt", "manual"}:
        return f"{', '.join(sorted(others))} is not built into this backend in {precision}; leave it out, or use bf16"
    if zero_stage(layout) == 0:
        return "DeepSpeed has bf16 masters at ZeRO-1 to 3 only; use zero1, zero2 or zero3, or bf16"
    if is_older("deepspeed", 0, 18, 3):
        return f"DeepSpeed {package_version('deepspeed')} has no bf16 masters; run: pip install 'deepspeed>=0.18.3'"
    return ""


def _muon_support(scenario: Scenario, layout: Layout) -> str:
    """Explains why DeepSpeed's Muon cannot train in a layout; empty if it can."""
    if zero_stage(layout) > 0 and {"shipped", "offload"} & set(layout.options):
        return (
            "at ZeRO 1 to 3 DeepSpeed's Muon clips by the norm of the orthogonalized updates, which is not modelled, "
            "and corrected without offload only (docs/findings/deepspeed-muon-norm.md); leave both shipped and "
            "offload out"
        )
    if "ownopt" not in layout.options:
        return "DeepSpeed builds Muon from its configuration; add the layout option ownopt, or use fsdp2 for torch's"
    optimizer = scenario.optimizer
    if not optimizer.nesterov or optimizer.adjust_lr != "original":
        return "DeepSpeed's Muon has Nesterov momentum, and the factor 'original' of the learning rate; set these"
    if optimizer.fused_matrices or (optimizer.ns_steps, optimizer.ns_coefficients) != (5, "simple"):
        return (
            "DeepSpeed's Muon takes each parameter for a matrix, and has five Newton-Schulz steps of the coefficients "
            "'simple'; leave fused_matrices, ns_steps and ns_coefficients out, or use megatron"
        )
    if scenario.tier.is_half:
        return (
            "in half precision DeepSpeed's Muon adds gradients up in it, or loses some "
            "(docs/findings/deepspeed-muon-lost-gradients.md); use fp32, or fsdp2 for torch's Muon"
        )
    if sum(role.trained for role in scenario.objective.roles) > 1:
        return "DeepSpeed's Muon for two models is not built in; use fsdp2 for torch's Muon"
    return ""
