"""Faults of tensor and pipeline parallelism, and of converters between Hugging Face and Megatron."""

from typing import Any

from conformance.faults.fault import Fault, Function, not_called


def _concatenated_qkv(qkv_spans: Function) -> Function:
    def faulty(*arguments: Any) -> Any:
        # All of q, then all of k, then all of v; consistently so, and a round trip gives back what it got.
        own, concatenated = 0, []
        for spans in qkv_spans(*arguments):
            moved = []
            for span in spans:
                moved.append(span._replace(own=own))
                own += span.length
            concatenated.append(tuple(moved))
        return tuple(concatenated)

    return faulty


def _bias_per_rank(project_output: Function) -> Function:
    def faulty(module: Any, x: Any) -> Any:
        output, bias = project_output(module, x)
        return output, bias * module.tp_group.size()

    return faulty


def _batched_p2p(pipeline_config: Function) -> Function:
    def faulty(*arguments: Any) -> Any:
        config = pipeline_config(*arguments)
        config.batch_p2p_comm, config.overlap_p2p_comm = True, False  # the library's defaults
        return config

    return faulty


def _stage_local_layers(layer_numbers: Function) -> Function:
    def faulty(chunk: Any) -> list[int]:
        return list(range(len(layer_numbers(chunk))))

    return faulty


def _duplicates_counted(counts_in_norm: Function) -> Function:
    def faulty(*args: Any, **kwargs: Any) -> bool:
        return True

    return faulty


def _of_own_heads(gather_shared_key: Function) -> Function:
    def faulty(own: Any, **options: Any) -> Any:
        return gather_shared_key(own, tensor_parallel_output_grad=False, **options)

    return faulty


def _ring_not_counted(gradient_scale: Function) -> Function:
    def faulty(trainable: Any) -> float:
        return float(gradient_scale(trainable) / trainable.context.config.layout.sp)

    return faulty


MODEL_PARALLEL_FAULTS = (
    Fault(
        name="concatenated-qkv",
        summary="q, k and v are concatenated where the layer expects them interleaved per key-value head",
        source="https://github.com/NVIDIA-NeMo/RL/pull/2802",
        seam="qkv_spans",
        stage="log-probs",
        loss_blind=False,
        needs="fewer key-value heads than heads, or several of them",
        wrap=_concatenated_qkv,
    ),
    Fault(
        name="o-bias-per-rank",
        summary="the bias of o_proj is added on every tensor-parallel rank before the sum, tp times in all",
        source="https://github.com/huggingface/text-generation-inference/issues/1036",
        seam="project_output",
        stage="log-probs",
        loss_blind=False,
        needs="tp of 2 or more and a model with a bias on o_proj",
        wrap=_bias_per_rank,
    ),
    Fault(
        name="batched-p2p",
        summary="two pipeline ranks batch several sends to each other, and activations arrive as gradients",
        source="https://github.com/NVIDIA/Megatron-LM/issues/750",
        seam="pipeline_config",
        stage="log-probs",
        loss_blind=False,
        needs="pp of 2 and vpp of 2 or more",
        wrap=_batched_p2p,
    ),
    Fault(
        name="stage-local-layers",
        summary="every pipeline stage counts its layers from 0 and loads the first ones of the model",
        source="https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 12",
        seam="layer_numbers",
        stage="weights",
        loss_blind=False,
        needs="pp of 2 or more",
        wrap=_stage_local_layers,
    ),
    Fault(
        name="norms-not-summed",
        summary="norm weights that see a slice of the sequence, or a rank's own heads, keep that part's gradient",
        source="https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 11",
        seam="reduce_norms",
        stage="gradients",
        loss_blind=True,
        needs="seqpar, or tp of 2 or more and norms on q and k",
        wrap=not_called,
    ),
    Fault(
        name="broken-tie",
        summary="gradients of a tied embedding are not summed over the first and the last pipeline stage",
        source="https://github.com/NVIDIA/Megatron-LM/issues/656",
        seam="reduce_tie",
        stage="gradients",
        loss_blind=True,
        needs="pp of 2 or more and a tied model",
        wrap=not_called,
    ),
    Fault(
        name="duplicates-counted",
        summary="the gradient norm counts what all tensor-parallel ranks hold once per rank",
        source="https://github.com/NVIDIA-NeMo/RL/issues/3788",
        seam="counts_in_norm",
        stage="gradient norm",
        loss_blind=True,
        needs="tp of 2 or more",
        wrap=_duplicates_counted,
    ),
    Fault(
        name="shared-key-not-summed",
        summary="the key that heads of latent attention share has the gradient of a tensor-parallel rank's own heads",
        source="https://github.com/NVIDIA/Megatron-LM/issues/1699",
        seam="gather_shared_key",
        stage="gradients",
        loss_blind=True,
        needs="tp of 2 or more and a model with latent attention",
        wrap=_of_own_heads,
    ),
    Fault(
        name="ring-not-counted",
        summary="the loss lacks the factor for the ring's ranks, which the framework averages gradients over as well",
        source="https://github.com/NovaSky-AI/SkyRL/pull/1420",
        seam="gradient_scale",
        stage="gradients",
        loss_blind=True,
        needs="sp of 2 or more",
        wrap=_ring_not_counted,
    ),
)
