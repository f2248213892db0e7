"""Plants faults in accumulation, reduction, clipping, and the optimizer.

The loss of the first step shows none of them, and the noise of bf16 hides faults of the optimizer. The suite finds them
because it rebuilds the update from the gradients, and because a sum in bf16 shows in the digits of its result.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from conformance.backends.faults import Function
from impl.faults.declaration import BF16, FP16, HALF, OFFLOADED, ROUNDING, WITHOUT_HALF, Faults, sft

ENGINE_FAULTS = Faults(blind=("loss",))
OPTIMIZER_FAULTS = Faults(blind=("loss",))
MEGATRON_MUON_FAULTS = Faults(blind=("loss",))  # which need megatron-core 0.17 and emerging-optimizers


@ENGINE_FAULTS.add(
    summary="large gradients are never clipped, as by a library that takes the maximum of the factor and 1",
    source="https://github.com/deepspeedai/DeepSpeed/pull/5150",
    stage="clipped update",
    cells=sft("sft-sgd", "llama", deepspeed="dp2.zero3", megatron="dp2"),
    needs="a step whose gradient norm is above max_grad_norm",
)
def clip_never(clip_threshold: Function, max_norm: float | None) -> Any:
    return clip_threshold(None)


@ENGINE_FAULTS.add(
    summary="a communication hook of DDP sums gradients, which DDP no longer divides by the number of ranks",
    source="https://github.com/pytorch/pytorch/pull/42400",
    stage="gradients",
    cells=sft("sft-packed", "llama", fsdp2="dp2.ddp"),
    needs="the option ddp, and dp of 2 or more",
)
def undivided_buckets(wrap_model: Function, trainable: Any, model: torch.nn.Module) -> torch.nn.Module:
    wrapped: Any = wrap_model(trainable, model)
    wrapped.register_comm_hook(trainable.context.mesh.get_group("shard"), _summed)
    return wrapped  # type: ignore[no-any-return]


def _summed(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    reduced: Any = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    summed: torch.futures.Future[Tensor] = reduced.get_future().then(lambda future: future.value()[0])
    return summed


@ENGINE_FAULTS.add(
    summary="Megatron-FSDP sums the gradients of data-parallel ranks and does not divide by their number",
    source="https://github.com/NVIDIA/Megatron-LM/pull/3023",
    stage="gradients",
    cells=sft("sft-packed", "llama", fsdp2="dp2.mfsdp", megatron="dp2.zero3.mfsdp"),
    needs="the option mfsdp, and dp of 2 or more",
)
def unscaled_buckets(scale_bucket: Function, *arguments: Any) -> Any:
    return dist.ReduceOp.SUM


@ENGINE_FAULTS.add(
    summary="ranks of Megatron-FSDP go on with the weights from before the update, where others own the updated ones",
    source="https://github.com/NVIDIA/Megatron-LM/pull/6336",
    stage="configuration",
    cells=sft("sft-packed", "llama", megatron="dp2.zero2.mfsdp"),
    needs="the option mfsdp with zero1 or zero2, and dp of 2 or more",
)
def updates_not_gathered(gather_updated: Function, *arguments: Any, **options: Any) -> None:
    return None


@ENGINE_FAULTS.add(
    summary="the update by zero gradients that makes AdamW's state is counted, so the first real one is corrected for "
    "bias as a second one, and weights decay before training",
    source="https://github.com/NVIDIA/Megatron-LM/issues/5974",
    stage="weights",
    cells=sft("sft-packed", "llama", fsdp2="dp2.mfsdp"),
    needs="the option mfsdp and AdamW",
    blind=(),
)
def counted_update(shard_optimizer: Function, optimizer: torch.optim.Optimizer) -> None:
    shard_optimizer(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    type(optimizer).step(optimizer)
    for parameter in parameters:
        parameter.grad = None


@ENGINE_FAULTS.add(
    summary="reductions stay delayed at the last micro-batch, so every rank updates with gradients of its own",
    source="https://github.com/modelscope/FunASR/pull/3472",
    stage="configuration",
    cells=sft("sft-packed", "llama", fsdp2="dp2.ddp.lastsync"),
    needs="the options ddp and lastsync, and accumulation of 2 or more",
)
def no_sync_at_boundary(delays_reduction: Function, trainable: Any, index: int, count: int) -> bool:
    return True


@ENGINE_FAULTS.add(
    summary="parameters that FSDP1 has sharded are clipped by torch's function, by the norm of a rank's own pieces",
    source="https://github.com/PrimeIntellect-ai/OpenDiloco/pull/6",
    stage="gradient norm",
    cells=sft("sft-sgd", "llama", fsdp2="dp2.fsdp1"),
    needs="the option fsdp1, and dp of 2 or more",
)
def norm_of_own_pieces(clip_pieces: Function, trainable: Any) -> Tensor:
    bound = float("inf") if trainable.max_grad_norm is None else trainable.max_grad_norm
    return torch.nn.utils.clip_grad_norm_(trainable.wrapper.parameters(), bound)


@ENGINE_FAULTS.add(
    summary="gradients are divided by the loss scale of fp16, and the loss was never multiplied by it",
    source="https://github.com/deepspeedai/DeepSpeed/pull/8393",
    stage="gradients",
    cells=sft("sft-packed", "llama", deepspeed="dp2.zero0", only=FP16),
    needs="zero0 in fp16",
)
def lost_loss_scale(forgotten_scale: Function, trainable: Any) -> float:
    return 1.0


@ENGINE_FAULTS.add(
    summary="the second micro-batch's gradients are copied over the first's instead of added",
    source="https://github.com/deepspeedai/DeepSpeed/pull/6550",
    stage="gradients",
    cells=sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="pp2"),
    needs="accumulation of 2 or more",
)
def copied_micro_batch(backward: Function, trainable: Any, loss: Tensor) -> Any:
    # The second micro-batch overwrites this gradient, which is the same as if it had been zero.
    count = trainable.context.config.accumulation
    trainable.backward_calls = getattr(trainable, "backward_calls", 0) + 1
    overwritten = count > 1 and trainable.backward_calls % count == 1
    return backward(trainable, loss * 0 if overwritten else loss)


@ENGINE_FAULTS.add(
    summary="with an offloaded optimizer, gradients of all micro-batches but the last are dropped",
    source="https://github.com/deepspeedai/DeepSpeed/pull/7981",
    stage="gradients",
    cells=sft("sft-packed", "llama", deepspeed="dp2.zero2.manual.offload", only=OFFLOADED),
    needs="zero1 or zero2 with offload, accumulation of 2 or more, and the option manual",
)
def offloaded_last_only(copy_offloaded: Function, optimizer: Any, parameter: Any, *rest: Any) -> None:
    # As before the mend: the host adds gradients up only if DeepSpeed counts the micro-batches.
    if optimizer.gradient_accumulation_steps > 1 or optimizer.is_gradient_accumulation_boundary():
        with mock.patch.object(optimizer, "micro_step_id", 0):
            copy_offloaded(optimizer, parameter, *rest)
    else:
        optimizer.clear_grad_attribute(parameter)


@ENGINE_FAULTS.add(
    summary="gradients are averaged before those of the last micro-batch are added to them",
    source="https://github.com/deepspeedai/DeepSpeed/pull/7985",
    stage="gradients",
    cells=sft("sft-packed", "llama", deepspeed="dp2.zero1", only=BF16),
    needs="zero1 in bf16, where DeepSpeed adds up in an optimizer of its own",
)
def averaged_before_last_micro_batch(end_backward: Function, engine: Any) -> None:
    engine.allreduce_gradients()
    with mock.patch.object(engine, "allreduce_gradients"):
        end_backward(engine)


@ENGINE_FAULTS.add(
    summary="master weights, and so the optimizer state, are in bf16",
    source="https://github.com/huggingface/accelerate/issues/3979",
    stage="weights",
    cells=sft("sft-packed", "llama", fsdp2="dp2", only=BF16),
    needs="bf16 with masters in float32",
)
def masters_in_bf16(shard_model: Function, trainable: Any, model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    shard_model(trainable, model)


@ENGINE_FAULTS.add(
    summary="a full bucket is reduced before the gradients at its end have been written",
    source="https://github.com/deepspeedai/DeepSpeed/issues/8061",
    stage="gradients",
    cells=sft("sft-packed", "llama", deepspeed="dp2.zero2.buckets"),
    needs="zero1 or zero2, and gradients that fill several buckets",
)
def bucket_reduced_early(average_bucket: Function, optimizer: Any, bucket: Tensor, *rest: Any) -> None:
    if bucket.numel() > optimizer.reduce_bucket_size / 2:
        bucket[-bucket.numel() // 8 :] = 0.0
    average_bucket(optimizer, bucket, *rest)


@ENGINE_FAULTS.add(
    summary="each context-parallel rank counts the tokens of whole rows, so the library divides by too many",
    source="https://github.com/verl-project/verl/pull/6836",
    stage="gradients",
    cells=sft("sft-packed", "llama", megatron="sp2.pertoken"),
    needs="context parallelism and the option pertoken",
)
def tokens_of_whole_rows(count_tokens: Function, part: Any) -> Tensor:
    return part.whole.targets.sum().int()  # type: ignore[no-any-return]


@ENGINE_FAULTS.add(
    summary="gradients are never reduced over replicas, which drift apart",
    source="https://github.com/pytorch/pytorch/issues/154888",
    stage="configuration",
    cells=sft("sft-sgd", "llama", deepspeed="dp2.zero0", megatron="dp2"),
    needs="replicas: zero0, or rep of 2 or more",
)
def unreduced_replicas(reduce_replicas: Function, *arguments: Any, **options: Any) -> None:
    pass


@ENGINE_FAULTS.add(
    summary="the gradient norm of a library that clips leaves out shards beyond the first tensor-parallel rank",
    source="docs/findings/deepspeed-zero0-norm.md",
    stage="gradient norm",
    cells=sft("sft-padded", "llama", deepspeed="tp2.zero0", only=HALF),
    needs="zero0 with tp of 2 or more, in bf16 or fp16",
)
def unmarked_shards(mark_cut_gradients: Function, *arguments: Any) -> None:
    pass


@ENGINE_FAULTS.add(
    summary="ZeRO++'s second copy of weights is kept when weights are loaded or updated, so it is stale",
    source="https://github.com/deepspeedai/DeepSpeed/issues/4851",
    stage="configuration",
    cells=sft("sft-packed", "llama", deepspeed="dp4.hpz2"),
    blind=(),
    needs="hpz of 2 or more",
)
def second_copy_stale(forget_second_copy: Function, *arguments: Any) -> None:
    pass


@ENGINE_FAULTS.add(
    summary="ranks cut their part of ZeRO++'s second copy of weights by their number among all ranks",
    source="https://github.com/deepspeedai/DeepSpeed/issues/6659",
    stage="log-probs",
    cells=sft("sft-packed", "llama", deepspeed="dp4.hpz2"),
    blind=(),
    needs="hpz of 2 or more, and fewer than the ranks that share weights",
)
def second_copy_of_another_group(cut_second_copy: Function, owner: Any, *arguments: Any, **options: Any) -> None:
    own, owner.rank_in_group = owner.rank_in_group, owner.rank
    cut_second_copy(owner, *arguments, **options)
    owner.rank_in_group = own


@ENGINE_FAULTS.add(
    summary="AdamW counts one step before the first one, so all its updates are scaled wrongly",
    source="docs/findings/deepspeed-zero0-half.md",
    stage="clipped update",
    cells=sft("sft-padded", "llama", deepspeed="dp2.zero0", only=HALF),
    needs="AdamW at zero0, in bf16 or fp16",
)
def step_at_setup(forget_steps: Function, *arguments: Any) -> None:
    pass


@OPTIMIZER_FAULTS.add(
    summary="Muon orthogonalizes the part of a matrix that each rank holds, instead of the matrix",
    source="https://github.com/hiyouga/LlamaFactory/pull/10618",
    stage="clipped update",
    cells=sft("sft-muon-rms", "llama", fsdp2="dp2"),
    needs="Muon, and matrices that ranks share",
)
def orthogonalized_shards(orthogonalize: Function, matrix: Any, *options: Any) -> Any:
    own = orthogonalize(matrix.to_local(), *options)
    return DTensor.from_local(own, matrix.device_mesh, matrix.placements, shape=matrix.shape, stride=matrix.stride())


@OPTIMIZER_FAULTS.add(
    summary="Muon never orthogonalizes and steps by the momentum, which is far smaller",
    source="https://github.com/deepspeedai/DeepSpeed/issues/8441",
    stage="clipped update",
    cells=sft("sft-muon-rms", "llama", fsdp2="dp2"),
    needs="Muon",
)
def not_orthogonalized(orthogonalize: Function, matrix: Any, *options: Any) -> Any:
    return matrix.clone()


@OPTIMIZER_FAULTS.add(
    summary="without ZeRO, DeepSpeed's Muon steps by the gradient, which no ZeRO optimizer has orthogonalized",
    source="https://github.com/deepspeedai/DeepSpeed/issues/8441",
    stage="clipped update",
    cells=sft("sft-muon", "llama", deepspeed="dp2.zero0.ownopt", only=WITHOUT_HALF),
    needs="DeepSpeed's Muon at zero0",
)
def muon_without_zero_is_sgd(update_by_muon: Function, gradient: Any, *_: Any, **options: Any) -> Any:
    return gradient


@OPTIMIZER_FAULTS.add(
    summary="DeepSpeed's Muon at ZeRO-1 and 2 clips updates of matrices instead of gradients, by a norm of updates",
    source="https://github.com/deepspeedai/DeepSpeed/issues/8439",
    stage="gradient norm",
    cells=sft("sft-muon", "llama", deepspeed="dp2.zero2.ownopt", only=WITHOUT_HALF),
    needs="DeepSpeed's Muon at zero1 or zero2",
)
def updates_clipped(clip_before_muon: Function, clipping: Any) -> float:
    clipping.orthogonalize()
    norm: float = clipping.norm()
    clipping.scale(clipping.factor(norm))
    return norm


@OPTIMIZER_FAULTS.add(
    summary="the learning rate of a matrix under Muon is adjusted by other dimensions than the matrix has",
    source="https://github.com/huggingface/pytorch-image-models/pull/2791",
    stage="clipped update",
    cells=sft("sft-muon", "llama", fsdp2="tp2"),
    needs="Muon, and matrices that are not square",
)
def rate_of_transposed(adjust_rate: Function, lr: float, adjustment: str, shape: Any) -> float:
    rate: float = adjust_rate(lr, adjustment, shape[::-1])
    return rate


@MEGATRON_MUON_FAULTS.add(
    summary="a tensor-parallel rank orthogonalizes its own part of a matrix, as Megatron does by default",
    source="docs/findings/megatron-muon-parts.md",
    stage="clipped update",
    cells=sft("sft-muon-fused", "llama", megatron="tp2"),
    needs="Megatron's Muon, and tp",
)
def orthogonalized_blockwise(set_muon: Function, settings: Any, *arguments: Any) -> None:
    set_muon(settings, *arguments)
    settings.muon_tp_mode = "blockwise"


@MEGATRON_MUON_FAULTS.add(
    summary="queries, keys and values are orthogonalized as one matrix where a scenario has three",
    source="https://github.com/NVIDIA/Megatron-LM/pull/7117",
    stage="clipped update",
    cells=sft("sft-muon-fused", "llama", megatron="dp2"),
    needs="Megatron's Muon without fused qkv_proj",
)
def qkv_orthogonalized_as_one(set_muon: Function, settings: Any, *arguments: Any) -> None:
    set_muon(settings, *arguments)
    settings.muon_split_qkv = False


@MEGATRON_MUON_FAULTS.add(
    summary="Newton-Schulz steps have the coefficients that another library has by default",
    source="https://github.com/marin-community/marin/pull/2545",
    stage="clipped update",
    cells=sft("sft-muon-fused", "llama", megatron="dp2"),
    needs="Megatron's Muon with other coefficients than 'simple'",
)
def coefficients_of_author(set_muon: Function, settings: Any, *arguments: Any) -> None:
    set_muon(settings, *arguments)
    settings.muon_coefficient_type = "simple"


@MEGATRON_MUON_FAULTS.add(
    summary="an update by Megatron's layer-wise optimizer never reaches the ranks that do not own the matrix",
    source="https://github.com/NVIDIA/Megatron-LM/pull/5707",
    stage="configuration",
    cells=sft("sft-muon-fused", "llama", megatron="dp2.zero1"),
    needs="Megatron's Muon, zero1 and dp of 2 or more",
)
def owned_not_gathered(gather_owned: Function, gather: Any) -> None:
    pass


@OPTIMIZER_FAULTS.add(
    summary="weights of norms are decayed too, because a refactoring lost their exemption",
    source="https://github.com/ServiceNow/Fast-LLM/issues/542",
    stage="clipped update",
    cells=sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2"),
    needs="AdamW with weight decay, and parameters of one dimension",
)
def norms_decayed(create_optimizer: Function, trainable: Any, model: Any, config: Any) -> Any:
    optimizer = create_optimizer(trainable, model, config)
    for group in optimizer.param_groups:
        group.update(weight_decay=config.weight_decay, wd_mult=1.0)  # megatron-core reads the multiple
    return optimizer


def of_torch(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yields the torch optimizers inside an optimizer of a library."""
    if isinstance(optimizer, torch.optim.Optimizer):
        yield optimizer
    else:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            yield part.optimizer


@OPTIMIZER_FAULTS.add(
    summary="gradients are reduced, or added up over micro-batches, in bf16",
    source="https://github.com/ISEEKYAN/Megatron-LM/issues/149",
    stage="gradients",
    cells=sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2", only=HALF),
    needs="bf16 and at least three summands: micro-batches times ranks with different tokens",
)
def summed_in_bf16(summing_dtype: Function, *arguments: Any) -> Any:
    return "bf16" if isinstance(summing_dtype(*arguments), str) else torch.bfloat16


@OPTIMIZER_FAULTS.add(
    summary="parameter groups are recreated without their weight decay",
    source="https://github.com/pytorch/pytorch/issues/101343",
    stage="clipped update",
    cells=sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2"),
    needs="AdamW with weight decay",
)
def no_weight_decay(create_optimizer: Function, trainable: Any, model: Any, config: Any) -> Any:
    optimizer = create_optimizer(trainable, model, config)
    for group in optimizer.param_groups:
        group.update(weight_decay=0.0, wd_mult=0.0)  # megatron-core's schedule sets the decay to a multiple
    return optimizer


@OPTIMIZER_FAULTS.add(
    summary="the optimizer has the default betas of its library instead of the configured ones",
    source="https://github.com/EleutherAI/gpt-neox/pull/228",
    stage="weights after N steps",
    cells=sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2"),
    needs="AdamW and two steps",
)
def default_betas(create_optimizer: Function, trainable: Any, model: Any, config: Any) -> Any:
    optimizer = create_optimizer(trainable, model, config)
    for group in optimizer.param_groups:
        group["betas"] = (0.9, 0.999)
    return optimizer


@OPTIMIZER_FAULTS.add(
    summary="AdamW's moments are held in bf16",
    source="https://github.com/areal-project/AReaL/issues/1292",
    stage="weights after N steps",
    cells=sft("sft-packed", "llama", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2", only=ROUNDING),
    needs="AdamW, two steps and a precision below the exact tier, where the rounding is not lifted",
)
def moments_in_bf16(create_optimizer: Function, trainable: Any, model: Any, config: Any) -> Any:
    optimizer = create_optimizer(trainable, model, config)
    for one in of_torch(optimizer):
        one.register_step_post_hook(_round_moments)
    return optimizer


def _round_moments(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(state[name].to(torch.bfloat16))
