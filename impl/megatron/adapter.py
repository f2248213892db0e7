"""Declares Megatron as a backend of the suite: supported cells, known defects and patch points for faults.

megatron-core looks for TransformerEngine once, when it is imported, and uses its optimizers, norms and layers. The
layout option ``te`` needs the layers and their attention, ``remainders`` needs the optimizers; other layouts need none
of it (impl.megatron.context). So a process runs layouts of one of these kinds.

Cells with the layout option ``shipped`` keep the known defects of megatron-core.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

import torch

from conformance.backends.protocol import BackendInfo, Support, Supported, Unsupported
from conformance.core.errors import UsageError
from conformance.core.host import resolve
from conformance.core.packages import check_version
from conformance.models.folders import EMBEDDING, HEAD
from conformance.spec.conventions import (
    Float8Products,
    RoundedMasters,
    RouterLossByMicroBatch,
    RouterLossSoFar,
    TrainedPaddingToken,
    model_config,
)
from conformance.spec.known_defects import (
    CountsByLastTokens,
    Defect,
    ExpectedDifference,
    OrthogonalizedShares,
    PaddedSoftmax,
)
from conformance.spec.layout import OWN_BALANCE, Layout
from conformance.spec.observables import MULTI_TOKEN
from conformance.spec.precision import HALF_PRECISIONS, Precision
from conformance.spec.scenario import Scenario
from impl.context_parallel.sequence_sharding import INSTALL, RING_MODULES, available, ring_support
from impl.engine.adapter import SCHEDULES, SHARED_SEAMS, VOCABULARY_SEAMS, ReferenceBackend, seams_of_model
from impl.engine.memory_estimate import Shapes, States, cut, elements, layer_of
from impl.interface.trainable import ContextConfig
from impl.megatron.hf_mapping import all_parameters, is_trained
from impl.megatron.model_config import FLOAT8_MULTIPLE, VALUE_HEAD, VOCABULARY_MULTIPLE, read_shape, stages
from impl.megatron.moe_config import expert_sizes, mixture_support
from impl.megatron.refusals import (
    RECIPES,
    adapters_refused,
    float8_refused,
    muon_refused,
    remainders_refused,
    sharded_refused,
    te_refused,
)
from impl.models.family_quirks import quirks_in
from impl.models.support import is_older

if TYPE_CHECKING:
    from impl.megatron.context import MegatronContext

VERSIONS = ("0.16", "0.17", "0.18", "0.19")  # of megatron-core; impl.megatron.releases holds their differences
TRANSFORMER_ENGINE = "transformer_engine.pytorch"
_TE_LAYER = f"{TRANSFORMER_ENGINE}.module.base:TransformerEngineBaseModule"
_NORM_AND_LINEAR = f"{TRANSFORMER_ENGINE}.module.layernorm_linear:LayerNormLinear"
_TF32 = "NVIDIA_TF32_OVERRIDE"
# How a process has imported megatron-core, by the option of its layouts that decides it.
_IMPORTED = {
    "": "without TransformerEngine",
    "te": "with TransformerEngine but its optimizers",
    "remainders": "with TransformerEngine and its optimizers",
}
_admitted = ""


def megatron_context(config: ContextConfig) -> "MegatronContext":
    """Creates a context. Raises UsageError as ``begin`` does."""
    begin(config.layout)
    return import_module("impl.megatron.context").MegatronContext(config)  # type: ignore[no-any-return]


def begin(layout: Layout) -> None:
    """Lets megatron-core find what a layout needs of TransformerEngine; call it before megatron-core is imported.

    Raises UsageError if this process has begun with a layout of another kind, or if TransformerEngine cannot run.
    """
    wanted = _uses_te(layout)
    if ("megatron.core" in sys.modules or _admitted) and wanted != _admitted:
        raise UsageError(
            f"this process is for megatron-core {_IMPORTED[_admitted]}, and {layout} needs it {_IMPORTED[wanted]}; "
            f"start a new process"
        )
    if wanted and not _admitted:
        _admit_te(wanted)


def _uses_te(layout: Layout) -> str:
    """Returns the option of a layout that decides what megatron-core finds of TransformerEngine; empty without."""
    return next((option for option in ("remainders", "te") if option in layout.options), "")


def _admit_te(option: str) -> None:
    global _admitted
    if not torch.cuda.is_available():
        raise UsageError(f"TransformerEngine needs a GPU (--device cuda); leave the layout's option {option} out")
    # TransformerEngine would use TF32 whatever torch's flags say (docs/findings/transformer-engine-tf32.md).
    os.environ.setdefault(_TF32, "0")
    try:
        import_module(TRANSFORMER_ENGINE)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise UsageError(
            f"TransformerEngine cannot be imported: {error}; run: pip install --no-build-isolation "
            f"'transformer-engine[pytorch]', or leave the layout's option {option} out"
        ) from error
    if option == "te":
        # Without TransformerEngine's optimizers megatron-core uses torch's, whose states impl.megatron.tensors can read
        # and write. TransformerEngine's kernels that clip gradients and copy masters stay.
        optimizers = import_module(f"{TRANSFORMER_ENGINE}.optimizers")
        del optimizers.FusedAdam, optimizers.FusedSGD
    _admitted = option


def _padded(scenario: Scenario, layout: Layout) -> tuple[Defect, ...]:
    multiple = VOCABULARY_MULTIPLE * layout.tp
    return (PaddedSoftmax(multiple=multiple),) if model_config(scenario)["vocab_size"] % multiple else ()


def _trained(scenario: Scenario, _: Layout) -> tuple[Defect, ...]:
    return () if model_config(scenario).get("pad_token_id") is None else (TrainedPaddingToken(),)


def _orthogonalized_shares(scenario: Scenario, layout: Layout) -> tuple[Defect, ...]:
    return (OrthogonalizedShares(ranks=layout.tp),) if scenario.optimizer.name == "muon" else ()


EXPECTED = (
    ExpectedDifference(
        reason="megatron-core copies the float32 masters from the model after its conversion to half precision",
        link="docs/findings/megatron-rounded-masters.md",
        defects=lambda scenario, _: (RoundedMasters(precision=scenario.precision),),
        options=("shipped",),
        precisions=HALF_PRECISIONS,
    ),
    ExpectedDifference(
        reason="the padding of the vocabulary takes part in the softmax",
        link="docs/findings/megatron-padded-vocabulary.md",
        defects=_padded,
        options=("shipped",),
    ),
    ExpectedDifference(
        reason="the padding token is trained as an input",
        link="docs/findings/megatron-padding-token.md",
        defects=_trained,
        options=("shipped",),
    ),
    ExpectedDifference(
        reason="Muon orthogonalizes each tensor-parallel rank's part of a matrix by itself",
        link="docs/findings/megatron-muon-parts.md",
        defects=_orthogonalized_shares,
        options=("shipped",),
        at_least={"tp": 2},
    ),
    ExpectedDifference(
        reason="the load-balancing loss divides counts of several micro-batches by the tokens of one",
        link="docs/findings/megatron-running-counts.md",
        defects=lambda *_: (CountsByLastTokens(),),
        options=("globalaux", "shipped"),
        at_least={"accumulation": 2},
    ),
)


if find_spec("megatron") is None or find_spec("megatron.core") is None:  # importing it would take seconds
    raise ModuleNotFoundError("megatron-core is not installed", name="megatron-core")
check_version("megatron-core", supported=VERSIONS, backend="megatron")
if not is_older("megatron-core", 0, 18) and find_spec("triton") is None:  # torch for CPUs does not bring it
    raise ModuleNotFoundError("megatron-core imports triton, also on a CPU", name="triton")

_OPTIONS = (
    "seqpar",
    "losspar",
    "ring",
    "zigzag",
    "torchcp",
    "ckpt",
    "te",
    "remainders",
    *RECIPES,
    "fp8ends",
    "mfsdp",
    "overlap",
    "manual",
    "pertoken",
    *OWN_BALANCE,
    "dropout",
    "varlen",
    "shipped",
)


_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"


def states_of(layout: Layout, tier: Precision, shapes: Shapes, trained: bool) -> States:
    """Estimates the memory that a model needs on a rank of the largest pipeline stage.

    The vocabulary is padded, and gradients are in whole buffers of full precision. The distributed optimizer shards
    masters and moments over dp x sp; Megatron-FSDP's shards gradients and weights, too.
    """
    full, compute = tier.master.bytes, tier.compute.bytes
    numbers = max(elements(stage) for stage in _stages(layout, shapes))
    if not trained:
        return States(weights=numbers * compute)
    piece = -(-numbers // (layout.dp * layout.sp)) if layout.zero else numbers
    masters = piece * (full - compute * ("remainders" in layout.options)) if tier.is_half else 0
    return States(
        weights=(piece if layout.zero == 3 else numbers) * compute,
        gradients=(piece if layout.zero in (2, 3) else numbers) * full,
        optimizer=masters + 2 * piece * full,
        update=piece * full,
    )


def _stages(layout: Layout, shapes: Shapes) -> list[dict[str, tuple[int, ...]]]:
    """Returns the shapes on a rank of each stage; the last has the head, and a copy of an embedding tied to it."""
    multiple = VOCABULARY_MULTIPLE * layout.tp
    padded = {
        name: (-(-shape[0] // multiple) * multiple, *shape[1:]) if name.endswith((EMBEDDING, HEAD)) else shape
        for name, shape in shapes.items()
    }
    own = cut(padded, layout.tp)
    count = 1 + max(layer for name in own if (layer := layer_of(name)) is not None)
    cuts = stages(layers=count, pp=layout.pp, vpp=layout.vpp)
    found: list[dict[str, tuple[int, ...]]] = [{} for _ in range(layout.pp)]
    tied = layout.pp > 1 and len(own) > 0 and not any(name.endswith((HEAD, VALUE_HEAD)) for name in own)
    for name, shape in own.items():
        layer = layer_of(name)
        first = layer is None and name.endswith(EMBEDDING)
        stage = 0 if first else layout.pp - 1 if layer is None else cuts.owner(layer)[0]
        found[stage][name] = shape
        if first and tied:
            found[-1][name] = shape
    return found


class MegatronBackend(ReferenceBackend):
    """Trains with tensor, sequence, pipeline and context parallelism, with and without the distributed optimizer."""

    info = BackendInfo(
        name="megatron",
        packages=("torch", "megatron-core", "transformers", "ring-flash-attn"),
        url="https://docs.nvidia.com/megatron-core/developer-guide/latest/",
        default_zero=0,
    )
    preload = ("transformers.modeling_utils", "impl.megatron.context", *RING_MODULES, *SCHEDULES)
    # TransformerEngine may initialise CUDA when it is imported; a process that forks must not.
    # Processes of layouts with other needs are told by the order.
    preload_apart: ClassVar = {
        "remainders": (*RING_MODULES, "transformers.modeling_utils"),
        "te": ("transformers.modeling_utils", *RING_MODULES),
    }
    expected = EXPECTED
    optimizers: ClassVar[tuple[str, ...]] = ("sgd", "adamw", "muon")
    conventions: ClassVar = (
        RouterLossByMicroBatch(),
        RouterLossSoFar(),
        Float8Products(multiple=FLOAT8_MULTIPLE, transformer_engine=True),
    )
    seams: ClassVar[dict[str, str]] = {
        **SHARED_SEAMS,
        **seams_of_model("impl.megatron.model:MegatronModel", "advance_schedule", "reduce_gradients"),
        "write_model": "impl.megatron.model:write_model",
        **VOCABULARY_SEAMS,
        "evaluate_modules": "impl.objectives.policy_gradient:MultiTokenFunctions.evaluate",
        "outputs_of": "impl.megatron.model:outputs_of",
        "reduce_replicas": "megatron.core.distributed:DistributedDataParallel.finish_grad_sync",
        "scale_bucket": f"{_FSDP}.param_and_grad_buffer:gradient_reduce_preprocessing",
        "gather_updated": f"{_FSDP}.megatron_fsdp:MegatronFSDP.start_param_sync",
        "clip_threshold": "impl.megatron.config:clip_threshold",
        "set_muon": "impl.megatron.library_optimizers:set_muon",
        "gather_owned": "impl.megatron.library_optimizers:gather_owned",
        "count_tokens": "impl.megatron.model:count_tokens",
        "summing_dtype": "impl.megatron.config:summing_dtype",
        "pipeline_config": "impl.megatron.model:transformer_config",
        "qkv_spans": "impl.megatron.hf_mapping:qkv_spans",
        "project_output": "impl.megatron.gpt_model:BiasedRowParallelLinear.forward",
        "layer_numbers": "impl.megatron.tensors:layer_numbers",
        "reduce_norms": "megatron.core.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
        "reduce_tie": "megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
        "add_adapters": "impl.megatron.model:add_adapters",
        "further_ahead": "impl.megatron.attention:further_ahead",
        "routers_of": "impl.megatron.gpt_model:number_routers",
        "permute_tokens": "megatron.core.transformer.moe.token_dispatcher:permute",
        "gather_shared_key": ("megatron.core.transformer.multi_latent_attention:gather_from_sequence_parallel_region"),
        "updated_bias": "megatron.core.distributed.finalize_model_grads:get_updated_expert_bias",
        "count_factor": "impl.megatron.router:count_factor",
        "scale_router_loss": "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler.set_loss_scale",
        "restore_generators": "megatron.core.tensor_parallel.random:_set_all_rng_states",
        "own_generator": "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork",
        "set_state": f"{TRANSFORMER_ENGINE}.optimizers.fused_adam:FusedAdam.set_scaled_state",
        "update_parameters": f"{TRANSFORMER_ENGINE}.optimizers.fused_adam:FusedAdam.step",
        "with_remainders": "impl.megatron.library_optimizers:with_remainders",
        "optimizer_settings": "impl.megatron.model:optimizer_settings",
        "te_recipe": "megatron.core.fp8_utils:get_fp8_recipe",
        "te_quantizers": f"{TRANSFORMER_ENGINE}.fp8:DelayedScalingRecipeState.make_quantizers",
        "amax_group": "megatron.core.parallel_state:get_amax_reduction_group",
        "float8_context": "megatron.core.transformer.transformer_block:get_fp8_context",
        "leave_float8": f"{TRANSFORMER_ENGINE}.fp8:FP8GlobalStateManager.autocast_exit",
        "adapter_product": "impl.megatron.lora:adapter_product",
        "is_left_out": "megatron.core.fp8_utils:is_first_last_bf16_layer",
        "layer_state": f"{_TE_LAYER}.get_extra_state",
        "load_layer_state": f"{_TE_LAYER}.set_extra_state",
        "is_recomputing": f"{TRANSFORMER_ENGINE}.module.base:in_fp8_activation_recompute_phase",
        "part_quantizers": f"{_NORM_AND_LINEAR}._customize_quantizers_float8_current_scaling",
        "cached_weight": f"{_TE_LAYER}.get_weight_workspace",
        "te_product": f"{TRANSFORMER_ENGINE}.module.linear:general_gemm",
        "weights_are_new": "megatron.core.transformer.module:MegatronModule.set_is_first_microbatch",
        "counts_in_norm": "megatron.core.tensor_parallel:param_is_not_tensor_parallel_duplicate",
    }

    @classmethod
    def begin(cls, layout: Layout) -> None:
        begin(layout)

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        try:
            shape = read_shape(resolve(scenario.model), multi_token=MULTI_TOKEN in scenario.objective.roles)
            for name in all_parameters(shape):
                is_trained(name, shape, scenario.optimizer)
        except UsageError as error:
            return Unsupported(str(error))
        if scenario.tier.stored:
            return Unsupported(f"{scenario.precision} is not built in; use fsdp2, deepspeed with bf16-nearest, or bf16")
        if shape.attention_dropout and not scenario.objective.disable_dropout:
            return Unsupported("dropout in attention not built in for megatron; set attention_dropout to 0.0")
        if shape.mtp and layout.pp > 1:
            return Unsupported("modules for multi-token prediction beside stages (pp) are not built in; use pp1")
        if scenario.optimizer.frozen and scenario.tier.is_half:
            return Unsupported("a frozen parameter has no float32 master, so it is rounded; use fp32")
        if scenario.lora and (refused := adapters_refused(scenario, scenario.lora, layout, shape)):
            return Unsupported(refused)
        schedule = scenario.schedule
        if schedule.name == "cosine" and scenario.steps > schedule.total_steps + 1:
            return Unsupported(
                f"after the end of a cosine schedule megatron-core keeps the lowest learning rate, but transformers' "
                f"rises again; use at least total_steps={scenario.steps - 1}"
            )
        if not available():
            return Unsupported(f"attention over packed documents needs the package ring-flash-attn; run: {INSTALL}")
        is_dense = not shape.mixture or len(shape.mixture.layers) < shape.layers
        if is_dense and shape.ffn % layout.tp:
            return Unsupported(
                f"megatron-core shards an MLP into equal parts, and tp={layout.tp} does not divide "
                f"intermediate_size={shape.ffn}; use tp1, or fsdp2"
            )
        if isinstance(lacking := mixture_support(shape.mixture, layout), Unsupported):
            return lacking
        if layout.rep > 1:
            return Unsupported("hybrid sharding is not built in; use rep1, or zero0, where every rank is a replica")
        if layout.hpz > 1:
            return Unsupported("second copies of weights (hpZ) need DeepSpeed; leave hpz out")
        if layout.ulysses > 1:
            return Unsupported("Ulysses needs DeepSpeed; use sp (ring attention) instead")
        if layout.zero in (2, 3) and "mfsdp" not in layout.options:
            return Unsupported(
                "Megatron's distributed optimizer is ZeRO-1; use zero1, or zero0 to leave it out, or add mfsdp "
                "(Megatron-FSDP)"
            )
        if "mfsdp" in layout.options and (refused := sharded_refused(scenario, layout)):
            return Unsupported(refused)
        if scenario.optimizer.name == "muon" and (refused := muon_refused(scenario, layout, shape)):
            return Unsupported(refused)
        if layout.zero and scenario.optimizer.name == "sgd":
            return Unsupported("Megatron's distributed optimizer supports AdamW only; use zero0, or an AdamW scenario")
        if "dropout" in layout.options and scenario.objective.disable_dropout:
            kind = scenario.objective.kind
            return Unsupported(f"the objective {kind} runs models without dropout; leave dropout out")
        if "dropout" in layout.options and "te" in layout.options:
            return Unsupported("dropout is not built in for te; leave te or dropout out")
        if "remainders" in layout.options and (refused := remainders_refused(scenario, layout)):
            return Unsupported(refused)
        if refused := float8_refused(scenario, layout, shape):
            return Unsupported(refused)
        if "te" in layout.options and (refused := te_refused(scenario, layout, shape)):
            return Unsupported(refused)
        if "varlen" in layout.options and layout.vpp > 1:
            return Unsupported(
                "interleaved pipeline stages may swap the lengths that they send to each other "
                "(docs/findings/megatron-batched-p2p.md); leave varlen out, or use vpp1"
            )
        if "buckets" in layout.options:
            return Unsupported(
                "without overlap megatron-core has one bucket, whatever bucket_size is; use overlap, which has several"
            )
        own = next((option for option in OWN_BALANCE if option in layout.options), "")
        if own and not (shape.mixture and shape.mixture.loss_factor):
            return Unsupported(
                "the model's routers have no load-balancing loss; set output_router_logits and router_aux_loss_coef in "
                f"its config.json, or leave {own} out"
            )
        if own and not scenario.tier.is_exact:
            return Unsupported(
                "below the exact tier routers are given the choices of experts, but megatron-core's load-balancing "
                f"loss makes its own; use exact, or leave {own} out"
            )
        if own and "pertoken" in layout.options:
            return Unsupported(
                "megatron-core scales its load-balancing loss by the tokens of each rank if it divides by tokens "
                f"(https://github.com/NVIDIA/Megatron-LM/pull/5047); leave {own} or pertoken out"
            )
        if "manual" in layout.options and ("overlap" not in layout.options or (shape.mixture and layout.pp == 1)):
            return Unsupported(
                "without overlap megatron-core reduces gradients at the end of a step, whoever counts micro-batches; "
                "without its schedules, nobody scales the losses of routers; use manual with overlap, and with pp2 for "
                "a mixture of experts"
            )
        if foreign := [option for option in layout.options if option not in _OPTIONS]:
            return Unsupported(f"{', '.join(foreign)} is not built into this backend; leave it out")
        return ring_support(scenario, layout)

    @classmethod
    def supports_checkpoint(cls, scenario: Scenario, before: Layout, after: Layout) -> Support:
        """Whether a checkpoint of one layout can be loaded in the other."""
        if ("remainders" in before.options) != ("remainders" in after.options):
            return Unsupported("a checkpoint has either masters or remainders; transfer a training state")
        if ("te" in before.options) != ("te" in after.options):
            return Unsupported(
                "TransformerEngine's norms have their own entries in checkpoints, which other layouts lack; "
                "transfer a training state"
            )
        if scenario.optimizer.name == "muon" and (before.zero or after.zero):
            return Unsupported(
                "checkpoints of Megatron's layer-wise optimizer, which fit one number of data-parallel ranks, are not "
                "built in; transfer a training state"
            )
        if "mfsdp" in (*before.options, *after.options):
            return Unsupported(
                "Megatron-FSDP writes checkpoints of its own format (fsdp_dtensor), which is not built in; transfer a "
                "training state"
            )
        if (before.zero == 1) != (after.zero == 1):
            return Unsupported(
                "megatron-core reads checkpoints of the distributed optimizer with that optimizer only; transfer a "
                "training state"
            )
        whole = quirks_in(resolve(scenario.model)).biased_experts
        if (expert_sizes(before, whole=whole).ranks > 1) != (expert_sizes(after, whole=whole).ranks > 1):
            return Unsupported(
                "megatron-core has a separate optimizer for experts that ranks share out, with separate entries in "
                "checkpoints; transfer a training state"
            )
        return Supported()
