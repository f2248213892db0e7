"""Plants faults in tensor, pipeline and context parallelism, and in converters of Hugging Face weights to Megatron."""

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor

from conformance.backends.faults import Function
from impl.faults.declaration import Faults, sft
from impl.interface.micro_batches import NO_TARGET

MODEL_PARALLEL_FAULTS = Faults()


@MODEL_PARALLEL_FAULTS.add(
    summary="q, k and v are concatenated where the layer expects them interleaved per key-value head",
    source="https://github.com/NVIDIA-NeMo/RL/pull/2802",
    stage="log-probs",
    cells=sft("sft-padded", "llama", megatron="dp1"),
    needs="fewer key-value heads than heads, or several of them",
)
def concatenated_qkv(qkv_spans: Function, *arguments: Any) -> Any:
    # All of q, then all of k, then all of v, in both directions, so a round trip restores the original.
    own, concatenated = 0, []
    for spans in qkv_spans(*arguments):
        moved = []
        for span in spans:
            moved.append(span._replace(own=own))
            own += span.length
        concatenated.append(tuple(moved))
    return tuple(concatenated)


@MODEL_PARALLEL_FAULTS.add(
    summary="the bias of o_proj is added on every tensor-parallel rank before the sum, tp times in all",
    source="https://github.com/huggingface/text-generation-inference/issues/1036",
    stage="log-probs",
    cells=sft("sft-padded", "pangu", megatron="tp2"),
    needs="tp of 2 or more and a model with a bias on o_proj",
)
def o_bias_per_rank(project_output: Function, module: Any, x: Any) -> Any:
    output, bias = project_output(module, x)
    return output, bias * module.tp_group.size()


@MODEL_PARALLEL_FAULTS.add(
    summary="two pipeline ranks batch several sends to each other, and activations arrive as gradients",
    source="https://github.com/NVIDIA/Megatron-LM/issues/750",
    stage="log-probs",
    cells=sft("sft-packed", "llama", megatron="pp2.vpp2"),
    needs="pp of 2 and vpp of 2 or more",
)
def batched_p2p(pipeline_config: Function, *arguments: Any) -> Any:
    config = pipeline_config(*arguments)
    config.batch_p2p_comm, config.overlap_p2p_comm = True, False  # the defaults of the library
    return config


@MODEL_PARALLEL_FAULTS.add(
    summary="the whole matrix of an adapter is not marked, so its gradient is of one part of the sequence",
    source="https://github.com/modelscope/mcore-bridge/pull/173",
    stage="gradients",
    cells=sft("sft-lora", "llama", megatron="tp2.seqpar"),
    blind=("loss",),
    needs="adapters, tp of 2 or more, and seqpar",
)
def adapter_not_marked(add_adapters: Function, chunk: Any, *arguments: Any) -> None:
    add_adapters(chunk, *arguments)
    for name, parameter in chunk.named_parameters():
        if "lora" in name:
            parameter.sequence_parallel = False


@MODEL_PARALLEL_FAULTS.add(
    summary="torch's pipeline divides gradients by the number of micro-batches, by which the loss is divided already",
    source="https://github.com/pytorch/torchtitan/issues/1733",
    stage="gradients",
    cells=sft("sft-packed", "llama", fsdp2="pp2"),
    blind=("loss",),
    needs="pp of 2 or more and several micro-batches",
)
def divided_by_micro_batches(pipeline_schedule: Function, *arguments: Any) -> Any:
    schedule = pipeline_schedule(*arguments)
    schedule.scale_grads = True  # torch's default
    return schedule


@MODEL_PARALLEL_FAULTS.add(
    summary="each pipeline stage clips by the norm of its own gradients",
    source="https://github.com/Modalities/modalities/pull/399, whose review found it",
    stage="gradient norm",
    cells=sft("sft-packed", "llama", fsdp2="pp2"),
    blind=("loss",),
    needs="pp of 2 or more",
)
def norm_of_own_stage(norm_of_stages: Function, pipeline: Any, norm: Tensor) -> Tensor:
    return norm


@MODEL_PARALLEL_FAULTS.add(
    summary="every pipeline stage counts its layers from 0 and loads the first ones of the model",
    source="https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 12",
    stage="weights",
    cells=sft("sft-padded", "llama", megatron="pp2"),
    needs="pp of 2 or more",
)
def stage_local_layers(layer_numbers: Function, chunk: Any) -> list[int]:
    return list(range(len(layer_numbers(chunk))))


@MODEL_PARALLEL_FAULTS.add(
    summary="the gradient norm counts parameters that all tensor-parallel ranks hold once per rank",
    source="https://github.com/NVIDIA-NeMo/RL/issues/3788",
    stage="gradient norm",
    cells=sft("sft-sgd", "llama", deepspeed="tp2.zero2", megatron="tp2"),
    blind=("loss",),
    needs="tp of 2 or more, with DeepSpeed zero1 or zero2",
)
def duplicates_counted(counts_in_norm: Function, *args: Any, **kwargs: Any) -> bool:
    return True


@MODEL_PARALLEL_FAULTS.add(
    summary="the gradient of the key that heads of latent attention share is not summed over tensor-parallel ranks",
    source="https://github.com/NVIDIA/Megatron-LM/issues/1699",
    stage="gradients",
    cells=sft("sft-packed", "deepseek-v2", megatron="tp2.seqpar"),
    blind=("loss",),
    needs="tp of 2 or more and a model with latent attention",
)
def shared_key_not_summed(gather_shared_key: Function, own: Any, **options: Any) -> Any:
    return gather_shared_key(own, tensor_parallel_output_grad=False, **options)


@MODEL_PARALLEL_FAULTS.add(
    summary="the loss lacks the factor for context-parallel ranks, over which the framework averages gradients",
    source="https://github.com/NovaSky-AI/SkyRL/pull/1420",
    stage="gradients",
    cells=sft("sft-sgd", "llama", fsdp2="sp2", deepspeed="sp2.zero1", megatron="sp2"),
    blind=("loss",),
    needs="sp of 2 or more",
)
def ring_not_counted(gradient_scale: Function, trainable: Any) -> float:
    return float(gradient_scale(trainable) / trainable.context.config.layout.sp)


@MODEL_PARALLEL_FAULTS.add(
    summary="gradients of norm weights are not summed over ranks with other parts of the sequence or other heads",
    source="https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 11",
    stage="gradients",
    cells=sft("sft-sgd", "llama", megatron="tp2.seqpar"),
    blind=("loss",),
    needs="seqpar, or tp of 2 or more and norms on q and k",
)
def norms_not_summed(reduce_norms: Function, *arguments: Any) -> None:
    pass


@MODEL_PARALLEL_FAULTS.add(
    summary="gradients of a tied embedding are not summed over the first and the last pipeline stage",
    source="https://github.com/NVIDIA/Megatron-LM/issues/656",
    stage="gradients",
    cells=sft("sft-sgd", "qwen3", megatron="pp2"),
    blind=("loss",),
    needs="pp of 2 or more and a tied model",
)
def broken_tie(reduce_tie: Function, *arguments: Any) -> None:
    pass


RING_FAULTS = Faults()


@RING_FAULTS.add(
    summary="each context-parallel rank counts positions from 0 instead of from the start of the document",
    source="https://github.com/NVIDIA/Megatron-LM/pull/4977",
    stage="log-probs",
    cells=sft("sft-packed", "llama", fsdp2="sp2", deepspeed="sp2.zero1", megatron="sp2"),
    needs="a document that crosses the edge of a shard",
)
def local_positions(shard_inputs: Function, inputs: Any, source: Any) -> Any:
    own = shard_inputs(inputs, source)
    local = torch.arange(own.positions.shape[1], device=own.positions.device)
    return dataclasses.replace(own, positions=local.expand_as(own.positions))


@RING_FAULTS.add(
    summary="labels are shifted after the sequence was cut, so each shard's last target is wrong",
    source="https://github.com/verl-project/verl/pull/3724",
    stage="log-probs",
    half_stage="gradients",
    cells=sft("sft-packed", "llama", fsdp2="sp2", deepspeed="ulysses2.zero2", megatron="sp2"),
    needs="a target directly behind the edge of a shard",
)
def rolled_labels(shard_inputs: Function, inputs: Any, source: Any) -> Any:
    own = shard_inputs(inputs, source)
    # Each rank shifts its own tokens, so its last token is to predict its first one.
    next_tokens = own.tokens.roll(-1, dims=1)
    return dataclasses.replace(own, labels=next_tokens.where(own.labels != NO_TARGET, NO_TARGET))


@RING_FAULTS.add(
    summary="an odd length is rounded down to a multiple of the context-parallel ranks, so the last target is lost",
    source="https://github.com/NVIDIA/TransformerEngine/issues/1930",
    stage="log-probs",
    cells=sft("sft-packed", "llama", fsdp2="sp2", deepspeed="sp2.zero1", megatron="sp2"),
    needs="documents of odd length",
)
def dropped_last_token(shard_inputs: Function, inputs: Any, source: Any) -> Any:
    labels = inputs.labels.clone()
    for row, positions in enumerate(inputs.positions.tolist()):
        ends = [i for i, following in enumerate([*positions[1:], 0]) if following == 0]
        for end in ends:
            if positions[end] % 2 == 0 and end > 0:  # an odd length: the last token and its target are dropped
                labels[row, end - 1] = NO_TARGET
    return shard_inputs(dataclasses.replace(inputs, labels=labels), source)


@RING_FAULTS.add(
    summary="with sequence parallelism, tensor-parallel ranks draw the same masks of dropout for their parts",
    source="https://github.com/NVIDIA/Megatron-LM/issues/1256",
    stage="configuration",
    cells=sft("sft-packed", "llama", megatron="tp2.seqpar.ckpt.dropout"),
    blind=("loss", "loss and norm"),
    needs="megatron-core, seqpar and the option dropout",
)
def one_mask_for_all_parts(own_generator: Function, *_: Any) -> Any:
    return contextlib.nullcontext()


@RING_FAULTS.add(
    summary="gradients are divided by the world size instead of by dp",
    source="https://github.com/deepspeedai/DeepSpeed/pull/5555",
    stage="gradients",
    cells=sft("sft-sgd", "llama", fsdp2="sp2", deepspeed="tp2.zero1", megatron="tp2"),
    blind=("loss",),
    needs="a world larger than dp",
)
def divided_by_world(gradient_scale: Function, trainable: Any) -> float:
    dp = trainable.context.config.layout.dp
    return float(gradient_scale(trainable) * dp / torch.distributed.get_world_size())


@RING_FAULTS.add(
    summary="context-parallel ranks neither shard parameters among them nor reduce gradients; only dp ranks do",
    source="https://github.com/verl-project/verl/issues/7493, where gradients of replicas are not reduced",
    stage="configuration",
    cells=sft("sft-sgd", "llama", fsdp2="sp2"),
    blind=("loss",),
    needs="sp of 2 or more",
)
def ring_not_reduced(reduction_mesh: Function, trainable: Any) -> Any:
    return trainable.context.mesh["dp"]


@RING_FAULTS.add(
    summary="outputs and log-sum-exps of the steps of ring attention are merged in bf16",
    source="https://github.com/zhuzilin/ring-flash-attention/issues/42",
    stage="log-probs",
    cells=sft("sft-packed", "llama", fsdp2="sp2.ring", deepspeed="sp2.ring.zero1", megatron="sp2.ring"),
    needs="a ring that merges blocks (option ring, packed rows)",
)
def merged_in_bf16(merge_blocks: Function, *arguments: Any, **options: Any) -> Any:
    return tuple(_bf16_digits(x) for x in merge_blocks(*arguments, **options))


def _bf16_digits(x: Tensor) -> Tensor:
    """Rounds to the eight significant bits of bfloat16 by arithmetic, which the exact tier does not lift."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**8).round() / 2**8, exponent)
