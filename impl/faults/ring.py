"""Faults of training over a ring: what sequence shards, ring attention and gradient reduction get wrong in public."""

import dataclasses
from typing import Any

import torch

from conformance.faults.fault import Fault, Function

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
