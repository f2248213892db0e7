"""Faults of tensor and pipeline parallelism, and of converters between Hugging Face and Megatron.

Faults of training over a ring: what sequence shards, ring attention and gradient reduction get wrong in public.
"""

import dataclasses
from typing import Any

import torch

from conformance.backends.faults import Fault, Function, not_called


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


NO_TARGET = -100


def _local_positions(shard_inputs: Function) -> Function:
    def faulty(inputs: Any, source: Any) -> Any:
        own = shard_inputs(inputs, source)
        here = torch.arange(own.positions.shape[1], device=own.positions.device)
        return dataclasses.replace(own, positions=here.expand_as(own.positions))

    return faulty


def _rolled_labels(shard_inputs: Function) -> Function:
    def faulty(inputs: Any, source: Any) -> Any:
        own = shard_inputs(inputs, source)
        # Each rank shifts its own tokens: its last one is to predict its first.
        next_tokens = own.tokens.roll(-1, dims=1)
        return dataclasses.replace(own, labels=next_tokens.where(own.labels != NO_TARGET, NO_TARGET))

    return faulty


def _dropped_last_token(shard_inputs: Function) -> Function:
    def faulty(inputs: Any, source: Any) -> Any:
        labels = inputs.labels.clone()
        for row, positions in enumerate(inputs.positions.tolist()):
            ends = [i for i, following in enumerate([*positions[1:], 0]) if following == 0]
            for end in ends:
                if positions[end] % 2 == 0 and end > 0:  # an odd length; its last token goes, and with it a target
                    labels[row, end - 1] = NO_TARGET
        return shard_inputs(dataclasses.replace(inputs, labels=labels), source)

    return faulty


def _divided_by_world(gradient_scale: Function) -> Function:
    def faulty(trainable: Any) -> float:
        dp = trainable.context.config.layout.dp
        return float(gradient_scale(trainable) * dp / torch.distributed.get_world_size())

    return faulty


def _ring_not_reduced(reduction_mesh: Function) -> Function:
    def faulty(trainable: Any) -> Any:
        return trainable.context.mesh["dp"]

    return faulty


def _merged_in_bf16(merge_blocks: Function) -> Function:
    def faulty(*arguments: Any, **options: Any) -> Any:
        return tuple(_bf16_digits(x) for x in merge_blocks(*arguments, **options))

    return faulty


def _bf16_digits(x: torch.Tensor) -> torch.Tensor:
    """Rounded to bfloat16's eight significant bits by arithmetic, which the exact tier does not lift."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**8).round() / 2**8, exponent)


RING_FAULTS = (
    Fault(
        name="local-positions",
        summary="each rank of the ring counts positions from 0 instead of from the start of the document",
        source="https://github.com/NVIDIA/Megatron-LM/pull/4977",
        seam="shard_inputs",
        stage="log-probs",
        loss_blind=False,
        needs="a document that crosses the edge of a shard",
        wrap=_local_positions,
    ),
    Fault(
        name="rolled-labels",
        summary="labels are shifted after the sequence was cut, so each shard's last target is wrong",
        source="https://github.com/verl-project/verl/pull/3724",
        seam="shard_inputs",
        stage="log-probs",
        loss_blind=False,
        needs="a target just behind the edge of a shard",
        wrap=_rolled_labels,
    ),
    Fault(
        name="dropped-last-token",
        summary="an odd length is rounded down to what the ring divides, so the last token is no target",
        source="https://github.com/NVIDIA/TransformerEngine/issues/1930",
        seam="shard_inputs",
        stage="log-probs",
        loss_blind=False,
        needs="documents of odd length",
        wrap=_dropped_last_token,
    ),
    Fault(
        name="merged-in-bf16",
        summary="outputs and log-sum-exps of ring steps are merged in bf16",
        source="https://github.com/zhuzilin/ring-flash-attention/issues/42",
        seam="merge_blocks",
        stage="log-probs",
        loss_blind=False,
        needs="a ring that merges blocks (option ring, packed rows)",
        wrap=_merged_in_bf16,
    ),
    Fault(
        name="divided-by-world",
        summary="gradients are divided by the world size instead of by dp",
        source="https://github.com/deepspeedai/DeepSpeed/pull/5555",
        seam="gradient_scale",
        stage="gradients",
        loss_blind=True,
        needs="a world larger than dp",
        wrap=_divided_by_world,
    ),
    Fault(
        name="ring-not-reduced",
        summary="the ranks of the ring shard nothing among them and reduce no gradients: dp alone does",
        source="https://github.com/verl-project/verl/issues/7493, where replicas are not reduced over",
        seam="reduction_mesh",
        stage="configuration",
        loss_blind=True,
        needs="sp of 2 or more",
        wrap=_ring_not_reduced,
    ),
)
