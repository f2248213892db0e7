"""DeepSpeed as a backend of the suite: what it claims to run, and where faults can be planted."""

from importlib.util import find_spec
from typing import ClassVar

from conformance.backend import BackendInfo, Support, Supported, Unsupported
from conformance.expectation import model_config
from conformance.layout import Layout
from conformance.scenario import Scenario
from conformance.validation import UsageError
from impl.adapter import HANDOVER_SEAMS, RL_SEAMS, ROUTER_SEAMS, StrategyBackend
from impl.deepspeed.cut import Cut, check, engine_cut
from impl.deepspeed.expected import EXPECTED
from impl.deepspeed.settings import zero_stage
from impl.families import WHOLE_OUTPUTS
from impl.lora import adapter_support
from impl.model_support import compile_support, model_support, plan_styles
from impl.ring.support import RING_MODULES, ring_support
from impl.routing import KINDS
from impl.train.memory import host_bytes

if find_spec("deepspeed") is None:  # importing it would take seconds, for questions that need no DeepSpeed
    raise ModuleNotFoundError("deepspeed is not installed", name="deepspeed")

# Of a tensor-parallel plan, what AutoTP of deepspeed 0.19.8 can do; it rejects a plan that asks for anything else.
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
_OPTIONS = ("ring", "zigzag", "torchcp", "ckpt", "compile", "leaf", "offload", "ownopt", "shipped")


class DeepspeedBackend(StrategyBackend):
    """DeepSpeed: ZeRO 0 to 3, with AutoTP, ring attention and Ulysses.

    A layout without a ZeRO stage runs at stage 3, which shards the same tensors as FSDP2.
    """

    info = BackendInfo(
        name="deepspeed",
        packages=("torch", "transformers", "deepspeed", "ring-flash-attn", "peft"),
        url="https://deepspeed.readthedocs.io/en/latest/zero3.html",
        default_zero=3,
    )
    preload = (
        "impl.deepspeed.context",
        "deepspeed.runtime.engine",
        "torch._inductor.compile_fx",  # the first engine imports it, and every rank of a fresh world makes one
        *(f"transformers.models.{family}.modeling_{family}" for family in ("llama", "qwen3", "gemma3")),
        *RING_MODULES,
    )
    expected = EXPECTED
    seams: ClassVar[dict[str, str]] = {
        **RL_SEAMS,
        **HANDOVER_SEAMS,
        "write_model": "impl.deepspeed.trainable:write_model",
        "forward_backward": "impl.deepspeed.trainable:DeepspeedTrainable.forward_backward",
        "outputs_of": "impl.deepspeed.trainable:outputs_of",
        "read_slice": "impl.files:SliceReader.slice",
        "load_model": "impl.deepspeed.trainable:DeepspeedTrainable.load_model",
        "hugging_face_model": "impl.deepspeed.trainable:empty_model",
        "load_adapter": "impl.deepspeed.trainable:load_adapter",
        "trained_names": "impl.optimizers:trained_names",
        "merge_adapter": "impl.model_folder:merge_adapter",
        "switch_off_dropout": "impl.adapter:switch_off_dropout",
        "collate": "impl.trainer:collate",
        "step_totals": "impl.trainer:step_totals",
        "backward": "impl.deepspeed.trainable:DeepspeedTrainable.backward",
        "finish_gradients": "impl.deepspeed.trainable:DeepspeedTrainable.finish_gradients",
        "gradient_scale": "impl.deepspeed.trainable:DeepspeedTrainable.gradient_scale",
        "reduce_replicas": "deepspeed.runtime.engine:DeepSpeedEngine.buffered_allreduce_fallback",
        "clip_threshold": "impl.deepspeed.settings:clip_threshold",
        "mark_cut_gradients": "impl.deepspeed.tensors:EngineTensors.mark_cut_gradients",
        "forgotten_scale": "impl.deepspeed.trainable:DeepspeedTrainable.forgotten_scale",
        "forget_steps": "impl.deepspeed.trainable:DeepspeedTrainable.forget_steps",
        "optimizer_step": "impl.deepspeed.trainable:DeepspeedTrainable.optimizer_step",
        "forget_overflow": "impl.deepspeed.trainable:forget_overflow",
        **ROUTER_SEAMS,
        "routers_of": "impl.deepspeed.trainable:routers_of",
        "create_optimizer": "impl.deepspeed.trainable:DeepspeedTrainable.create_optimizer",
        "summing_dtype": "impl.deepspeed.settings:summing_dtype",
        "shard_inputs": "impl.ring.placement:shard_inputs",
        "merge_blocks": "impl.ring.package:ring_varlen.update_out_and_lse",
    }

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        if layout.pp > 1:
            return Unsupported("DeepSpeed's pipeline engine is not built in; use pp1")
        if layout.ep > 1:
            return Unsupported("DeepSpeed's experts are layers of its own, which no Hugging Face model has; use ep1")
        if layout.tp > 1 and (kind := model_config(scenario).get("model_type")) in KINDS:
            return Unsupported(f"AutoTP does not know how the plan of {kind} cuts experts; use tp1, or fsdp2")
        if layout.rep > 1:
            return Unsupported("hybrid sharding is not built in; use rep1, or zero0, where every rank is a replica")
        if foreign := [option for option in layout.options if option not in _OPTIONS]:
            return Unsupported(f"{', '.join(foreign)} is not built into this backend; leave it out")
        if "offload" in layout.options and layout.zero == 0:
            return Unsupported("DeepSpeed offloads what ZeRO cuts, and zero0 cuts nothing; use zero1, zero2 or zero3")
        if "ownopt" in layout.options and layout.zero == 0 and scenario.precision in ("bf16", "fp16"):
            return Unsupported(
                "around its own fused AdamW DeepSpeed puts another wrapper at zero0 in half precision, whose state is "
                "not read here; use zero1, zero2 or zero3, or leave ownopt out"
            )
        if "compile" in layout.options and zero_stage(layout) == 3 and "leaf" not in layout.options:
            return Unsupported(
                "ZeRO-3 fetches weights in hooks inside of a layer, so that torch.compile takes it in pieces, and runs "
                "some of them as they are written; add leaf, use zero0, zero1 or zero2, or fsdp2"
            )
        if "leaf" in layout.options and zero_stage(layout) < 3:
            return Unsupported("only ZeRO-3 gathers weights for a layer; use zero3, or leave leaf out")
        if scenario.lora and scenario.precision == "fp16":
            return Unsupported("the frozen base has no float32 master, so fp16 rounds it; use bf16, which does not")
        for lacking in (adapter_support(scenario), compile_support(scenario, layout)):
            if isinstance(lacking, Unsupported):
                return lacking
        if scenario.optimizer.frozen and not scenario.lora and scenario.precision in ("bf16", "fp16"):
            return Unsupported("a frozen parameter has no float32 master, so it is rounded; use fp32")
        if layout.tp > 1 and (kind := model_config(scenario).get("model_type")) in WHOLE_OUTPUTS:
            return Unsupported(
                f"AutoTP leaves each rank its own part of {' and '.join(WHOLE_OUTPUTS[kind][0])}, and the code of "
                f"{kind} wants them whole; use tp1, or fsdp2, which gathers them"
            )
        by_mpu = layout.ulysses > 1 and layout.tp == 1
        if by_mpu and layout.zero == 1 and scenario.precision == "bf16":
            return Unsupported(
                "DeepSpeed's BF16_Optimizer raises on all but the first rank of Ulysses "
                "(docs/findings/deepspeed-ulysses-scale.md); use zero0, zero2 or zero3, or fp16"
            )
        # AutoTP knows openPangu by the names of its modules, which are Llama's.
        has_plan = model_config(scenario).get("model_type") == "PanguEmbedded"
        if isinstance(lacking := model_support(scenario, layout, has_plan=has_plan), Unsupported):
            return lacking
        if layout.tp > 1 and (unknown := plan_styles(scenario) - STYLES):
            return Unsupported(
                f"AutoTP does not know {', '.join(sorted(unknown))}, which the model's tensor-parallel plan asks for; "
                f"use tp1, or fsdp2"
            )
        return ring_support(scenario, layout)

    @classmethod
    def host_bytes(cls, scenario: Scenario, layout: Layout) -> int:
        """Of the host, beside a GPU: ZeRO-3 puts its pieces together there, and ``offload`` keeps them there."""
        return host_bytes("deepspeed", scenario, layout)

    @classmethod
    def supports_checkpoint(cls, scenario: Scenario, before: Layout, after: Layout) -> Support:
        """Whether a checkpoint of one layout can be loaded in the other."""

        def cut(layout: Layout) -> Cut:
            own = "its own Adam" if scenario.optimizer.name == "adamw" else "its own SGD"
            torchs = "AdamW" if scenario.optimizer.name == "adamw" else "SGD"
            return engine_cut(layout, scenario.precision, optimizer=own if "ownopt" in layout.options else torchs)

        try:
            check(cut(before), cut(after))
        except UsageError as error:
            return Unsupported(str(error))
        return Supported()
