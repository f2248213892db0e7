"""Plants faults in mixtures of experts: in routers, in their losses, and in the exchange of tokens between ranks."""

from copy import copy
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.backends.faults import Function
from conformance.spec.observables import OLD_ROUTING, ROUTING
from impl.faults.declaration import OWN_CHOICES, REPLAY, Faults, rl, sft
from impl.faults.models import zeros_for

EXPERT_FAULTS = Faults()


@EXPERT_FAULTS.add(
    summary="the gradient of a router's weight comes from the tokens of the first rank only",
    source="https://github.com/pytorch/torchtitan/issues/2387",
    stage="gradients",
    cells=sft("sft-packed", "qwen3-moe", fsdp2="dp2", deepspeed="dp2.zero2", megatron="dp2"),
    blind=("loss",),
    needs="dp of 2 or more and a model with routers",
)
def router_not_reduced(routers_of: Function, model: Any, *more: Any) -> Any:
    found = routers_of(model, *more)
    for gate in (module for module in model.modules() if type(module).__name__.endswith("TopKRouter")):
        if dist.get_rank():
            _without_gradient(gate)
    return found


def _without_gradient(module: Any) -> None:
    """Zeroes the gradient of a weight. Forward passes set the hook, because FSDP2 may replace the parameter."""
    hooked: list[Any] = []

    def attach(module: Any, _: object) -> None:
        weight = module.weight
        if torch.is_grad_enabled() and weight.requires_grad and not any(weight is known for known in hooked):
            weight.register_hook(torch.zeros_like)
            hooked.append(weight)

    module.register_forward_pre_hook(attach)


@EXPERT_FAULTS.add(
    summary="a library's own load-balancing loss is added up over micro-batches instead of averaged",
    source="https://github.com/NVIDIA-NeMo/Automodel/pull/3359",
    stage="gradients",
    cells=sft("sft-packed", "qwen3-moe", megatron="dp2.ownaux", only=OWN_CHOICES),
    blind=("loss",),
    needs="accumulation of 2 or more and the option ownaux",
)
def router_loss_not_averaged(scale_router_loss: Function, scale: Tensor) -> None:
    scale_router_loss(torch.ones_like(scale))


@EXPERT_FAULTS.add(
    summary="counts of experts of several micro-batches are divided by the tokens of one, times their number",
    source="https://github.com/NVIDIA/Megatron-LM/issues/7213",
    stage="gradients",
    cells=sft("sft-packed", "qwen3-moe", megatron="dp2.globalaux", only=OWN_CHOICES),
    blind=("loss",),
    needs="accumulation of 2 or more and the option globalaux",
)
def counts_by_last_tokens(count_factor: Function, before: Tensor, now: Tensor, steps: Tensor) -> Tensor:
    return torch.ones_like(count_factor(before, now, steps))


@EXPERT_FAULTS.add(
    summary="weights of the chosen experts are divided by their sum where the model does not, or the reverse",
    source="https://github.com/databricks/megablocks/pull/87",
    stage="routing",
    cells=sft("sft-packed", "qwen3-moe", fsdp2="dp2", deepspeed="dp2.zero1", megatron="ep2"),
    needs="a model whose configuration has norm_topk_prob",
)
def experts_normalised_otherwise(routers_of: Function, model: Any, *more: Any) -> Any:
    for module in model.modules():
        if hasattr(module, "norm_topk_prob"):
            module.norm_topk_prob = not module.norm_topk_prob
        elif hasattr(module, "router_replay"):  # Megatron configures whether the softmax comes first
            module.config = copy(module.config)
            module.config.moe_router_pre_softmax = not module.config.moe_router_pre_softmax
    return routers_of(model, *more)


@EXPERT_FAULTS.add(
    summary="the output of the shared expert is added twice, because it is summed over ranks that all hold it",
    source="https://github.com/sgl-project/sglang/pull/26845",
    stage="log-probs",
    cells=sft("sft-packed", "qwen2-moe", fsdp2="tp2", deepspeed="dp2.zero2", megatron="ep2"),
    needs="a model with a shared expert",
)
def shared_expert_twice(routers_of: Function, model: Any, *more: Any) -> Any:
    for name, module in model.named_modules():
        if name.endswith(("shared_expert", "shared_experts")):  # the names of Hugging Face and Megatron
            module.register_forward_hook(lambda module, inputs, output: 2 * output)
    return routers_of(model, *more)


@EXPERT_FAULTS.add(
    summary="the load-balancing loss is computed and reported, but not added to the loss that is minimized",
    source="https://github.com/jingyaogong/minimind/issues/140",
    stage="gradients",
    cells=sft("sft-packed", "mixtral", fsdp2="dp2", deepspeed="dp2.zero2", megatron="pp2"),
    blind=("loss",),
    needs="a model whose configuration adds its routers' loss",
)
def router_loss_dropped(router_loss: Function, factor: float, *arguments: Any) -> Tensor:
    dropped: Tensor = router_loss(0.0, *arguments)
    return dropped


@EXPERT_FAULTS.add(
    summary="the load-balancing loss is a mean over micro-batches, each with its own counts of experts",
    source="https://github.com/IBM/ModuleFormer/issues/5",
    stage="gradients",
    cells=sft("sft-packed", "qwen3-moe", fsdp2="dp2", deepspeed="dp2.zero3", megatron="pp2"),
    blind=("loss",),
    needs="a model whose configuration adds its routers' loss, and several micro-batches",
)
def router_loss_of_micro_batch(
    router_loss: Function, factor: float, balance: Any, weights: Tensor, probabilities: Tensor
) -> Tensor:
    counts = (weights > 0).sum(dim=0).to(probabilities.dtype)
    own = counts.shape[0] * (counts @ probabilities.sum(dim=0)) / len(weights) ** 2
    share: Tensor = factor * own * len(weights) / balance.choosers  # the mean over micro-batches, weighted by tokens
    return share


@EXPERT_FAULTS.add(
    summary="the z-loss of routers is a mean over a micro-batch instead of the step, so it is added several times",
    source="https://github.com/NVIDIA-NeMo/Automodel/pull/3359",
    stage="gradients",
    cells=sft("sft-z-loss", "qwen2-moe", fsdp2="dp2", deepspeed="dp2.zero2", megatron="pp2"),
    blind=("loss",),
    needs="a scenario with router_z_loss, and several micro-batches",
)
def z_loss_of_micro_batch(z_loss: Function, factor: float, tokens: float, squares: Tensor) -> Tensor:
    own: Tensor = z_loss(factor, float(len(squares)), squares)
    return own


@EXPERT_FAULTS.add(
    summary="an update replays the experts that were recorded for the old log-probs, with other weights",
    source="https://github.com/areal-project/AReaL/pull/1166, whose queue may return the choices of another pass",
    stage="routing",
    cells=rl("grpo", model="qwen3-moe", fsdp2="dp2", deepspeed="dp2.zero2", megatron="ep2", only=REPLAY),
    blind=("loss",),
    needs="rollouts of a model with routers, below the exact tier, and a second update",
)
def replay_of_another_pass(choices_for: Function, inputs: Any, key: str) -> Any:
    return choices_for(inputs, OLD_ROUTING if key == ROUTING else key)


@EXPERT_FAULTS.add(
    summary="tokens are sent to the experts of their neighbors, because they are sorted in another order",
    source="https://github.com/pytorch/torchtitan/pull/2842, where a rank of the wrong group cut the tokens",
    stage="routing",
    cells=sft("sft-packed", "qwen3-moe", fsdp2="ep2"),
    needs="ep of 2 or more",
)
def tokens_off_by_one(sorted_by_expert: Function, chosen: Tensor) -> tuple[Tensor, Tensor]:
    order, token = sorted_by_expert(chosen)
    return order, token.roll(1)


@EXPERT_FAULTS.add(
    summary="gradients of experts are averaged over the ranks that hold them instead of over all that sent tokens",
    source="https://github.com/NVIDIA/Megatron-LM/pull/5956",
    stage="gradients",
    cells=sft("sft-packed", "qwen2-moe", fsdp2="ep2"),
    blind=("loss",),
    needs="ep of 2 or more",
)
def experts_not_divided(expert_divisor: Function, group: Any) -> float:
    assert expert_divisor(group) > 1
    return 1.0


@EXPERT_FAULTS.add(
    summary="tokens reach the experts shifted by one against the order in which outputs are put back",
    source="https://github.com/pytorch/torchtitan/pull/1340",
    stage="routing",
    cells=sft("sft-packed", "qwen3-moe", megatron="ep2"),
    needs="a model with routers in several layers",
)
def permutation_off_by_one(permute_tokens: Function, *arguments: Any, **options: Any) -> Any:
    permuted, *others = permute_tokens(*arguments, **options)
    return permuted.roll(1, dims=0), *others


@EXPERT_FAULTS.add(
    summary="experts are chosen from all groups instead of from the best groups for the token",
    source="https://github.com/vllm-project/vllm/pull/13474",
    stage="routing",
    cells=sft("sft-packed", "deepseek-v3", fsdp2="dp2", deepspeed="dp2.zero2", megatron="ep2", only=OWN_CHOICES),
    needs="a model that chooses groups of experts, in the exact tier",
)
def groups_not_limited(routers_of: Function, model: Any, *more: Any) -> Any:
    found = routers_of(model, *more)
    for module in model.modules():
        if hasattr(module, "topk_group"):
            module.topk_group = module.num_group
        elif getattr(module, "groups", None):  # Megatron
            module.groups = module.groups._replace(chosen=module.groups.many)
    return found


@EXPERT_FAULTS.add(
    summary="the bias for the choice of experts moves by the default rate of the library at each step",
    source="https://github.com/alibaba/Pai-Megatron-Patch/issues/467, which asks for a fixed one",
    stage="clipped update",
    cells=sft("sft-packed", "deepseek-v3", megatron="dp2"),
    blind=("loss",),
    needs="a model whose experts are chosen by scores with a bias",
)
def correction_bias_moved(pipeline_config: Function, *arguments: Any) -> Any:
    config = pipeline_config(*arguments)
    config.moe_router_bias_update_rate = 1e-3  # the library's default
    return config


@EXPERT_FAULTS.add(
    summary="gradients of experts are divided by the number of ranks that hold them instead of all data ranks",
    source="https://github.com/databricks/megablocks/pull/20",
    stage="gradients",
    cells=sft("sft-packed", "qwen2-moe", megatron="ep2"),
    blind=("loss",),
    needs="ep of 2 or more",
)
def experts_averaged_over_their_ranks(reduce_gradients: Function, trainable: Any) -> None:
    reduce_gradients(trainable)
    for chunk in trainable.chunks:
        for group in chunk.expert_parallel_bucket_groups:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor *= trainable.context.config.layout.ep


@EXPERT_FAULTS.add(
    summary="the bias for the choice of experts, a buffer, is not loaded, so it is zero",
    source="https://github.com/alibaba/Pai-Megatron-Patch/pull/497, before which it was not converted",
    stage="weights",
    cells=sft("sft-packed", "deepseek-v3", fsdp2="dp2", deepspeed="dp2.zero1", megatron="dp2"),
    needs="a model whose experts are chosen by scores with a bias",
)
def correction_bias_not_loaded(read_slice: Function, reader: Any, name: str, spans: Any) -> Tensor:
    return zeros_for("e_score_correction_bias", name, read_slice(reader, name, spans))


_moving = partial(sft, "sft-expert-bias", fsdp2="dp2", deepspeed="dp2.zero1", megatron="dp2")
_MOVED = "a scenario with router_bias_rate"


@EXPERT_FAULTS.add(
    summary="the bias for the choice of experts moves by the load that each rank counts, instead of the sum over ranks",
    source="https://github.com/NVIDIA/TransformerEngine/pull/3471, whose reduced counts were discarded",
    stage="clipped update",
    cells=_moving("deepseek-v3"),
    blind=("loss",),
    needs=f"{_MOVED}, and dp of 2 or more",
)
def bias_by_own_load(updated_bias: Function, *arguments: Any) -> Any:
    with mock.patch.object(dist, "all_reduce"):
        return updated_bias(*arguments)


@EXPERT_FAULTS.add(
    summary="the bias for the choice of experts rises for experts that are chosen too often",
    source="https://arxiv.org/abs/2408.15664, whose algorithm 1 has the mean load first, not second",
    stage="clipped update",
    cells=_moving("deepseek-v3"),
    blind=("loss",),
    needs=_MOVED,
)
def bias_moves_backwards(updated_bias: Function, *arguments: Any) -> Any:
    *before, rate = arguments
    return updated_bias(*before, -rate)


@EXPERT_FAULTS.add(
    summary="the bias for the choice of experts moves at each micro-batch, so several times in a step",
    source="https://github.com/pytorch/torchtitan/pull/1114, which moves it with the optimizer instead",
    stage="clipped update",
    cells=_moving("deepseek-v3"),
    blind=("loss",),
    needs=f"{_MOVED}, and several micro-batches",
)
def bias_moves_twice(updated_bias: Function, *arguments: Any) -> Any:
    *before, rate = arguments
    return updated_bias(*before, 2 * rate)


@EXPERT_FAULTS.add(
    summary="the bias for the choice of experts moves in the first layer that has experts, and in no other",
    source="https://github.com/pytorch/torchtitan/pull/3686",
    stage="clipped update",
    cells=_moving("deepseek-v3-odd"),
    blind=("loss",),
    needs=f"{_MOVED}, and a model with experts in several layers",
)
def later_biases_stay(updated_bias: Function, *arguments: Any) -> Any:
    before = arguments[-2]
    return torch.cat([updated_bias(*arguments)[:1], before[1:]])
