"""Faults of mixtures of experts: routers, their loss, and the exchange of tokens between ranks."""

from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.backends.faults import Fault, Function
from conformance.spec.observables import OLD_ROUTING, ROUTING
from impl.faults.models import read_as_zeros


def _gradient_of_first_rank(routers_of: Function) -> Function:
    def faulty(model: Any, *more: Any) -> Any:
        found = routers_of(model, *more)
        for gate in (module for module in model.modules() if type(module).__name__.endswith("TopKRouter")):
            if dist.get_rank():
                _without_gradient(gate)
        return found

    return faulty


def _without_gradient(module: Any) -> None:
    """FSDP2 may replace the parameter that autograd sees between steps, so the hook is set in forward passes."""
    hooked: list[Any] = []

    def attach(module: Any, _: object) -> None:
        weight = module.weight
        if torch.is_grad_enabled() and weight.requires_grad and not any(weight is known for known in hooked):
            weight.register_hook(torch.zeros_like)
            hooked.append(weight)

    module.register_forward_pre_hook(attach)


def _normalisation_inverted(routers_of: Function) -> Function:
    def faulty(model: Any, *more: Any) -> Any:
        for module in model.modules():
            if hasattr(module, "norm_topk_prob"):
                module.norm_topk_prob = not module.norm_topk_prob
            elif hasattr(module, "router_replay"):  # Megatron's configuration says whether the softmax comes first
                module.config = copy(module.config)
                module.config.moe_router_pre_softmax = not module.config.moe_router_pre_softmax
        return routers_of(model, *more)

    return faulty


def _shared_twice(routers_of: Function) -> Function:
    def faulty(model: Any, *more: Any) -> Any:
        for name, module in model.named_modules():
            if name.endswith(("shared_expert", "shared_experts")):  # Hugging Face's name, and Megatron's
                module.register_forward_hook(lambda module, inputs, output: 2 * output)
        return routers_of(model, *more)

    return faulty


def _router_loss_dropped(router_loss: Function) -> Function:
    def faulty(factor: float, *arguments: Any) -> Tensor:
        dropped: Tensor = router_loss(0.0, *arguments)
        return dropped

    return faulty


def _router_loss_of_micro_batch(router_loss: Function) -> Function:
    def faulty(factor: float, balance: Any, weights: Tensor, probabilities: Tensor) -> Tensor:
        counts = (weights > 0).sum(dim=0).to(probabilities.dtype)
        own = counts.shape[0] * (counts @ probabilities.sum(dim=0)) / len(weights) ** 2
        share: Tensor = factor * own * len(weights) / balance.choosers  # the mean over micro-batches, by their tokens
        return share

    return faulty


def _z_loss_of_micro_batch(z_loss: Function) -> Function:
    def faulty(factor: float, tokens: float, squares: Tensor) -> Tensor:
        own: Tensor = z_loss(factor, float(len(squares)), squares)
        return own

    return faulty


def _replay_of_another_pass(choices_for: Function) -> Function:
    def faulty(inputs: Any, key: str) -> Any:
        return choices_for(inputs, OLD_ROUTING if key == ROUTING else key)

    return faulty


def _tokens_off_by_one(sorted_by_expert: Function) -> Function:
    def faulty(chosen: Tensor) -> tuple[Tensor, Tensor]:
        order, token = sorted_by_expert(chosen)
        return order, token.roll(1)

    return faulty


def _not_divided(expert_divisor: Function) -> Function:
    def faulty(group: Any) -> float:
        assert expert_divisor(group) > 1
        return 1.0

    return faulty


def _permutation_off_by_one(permute_tokens: Function) -> Function:
    def faulty(*arguments: Any, **options: Any) -> Any:
        permuted, *others = permute_tokens(*arguments, **options)
        return permuted.roll(1, dims=0), *others

    return faulty


def _groups_not_limited(routers_of: Function) -> Function:
    def faulty(model: Any, *more: Any) -> Any:
        found = routers_of(model, *more)
        for module in model.modules():
            if hasattr(module, "topk_group"):
                module.topk_group = module.num_group
            elif getattr(module, "groups", None):  # Megatron's
                module.groups = module.groups._replace(chosen=module.groups.many)
        return found

    return faulty


def _correction_bias_moved(pipeline_config: Function) -> Function:
    def faulty(*arguments: Any) -> Any:
        config = pipeline_config(*arguments)
        config.moe_router_bias_update_rate = 1e-3  # the library's default
        return config

    return faulty


def _averaged_over_their_ranks(reduce_gradients: Function) -> Function:
    def faulty(trainable: Any) -> None:
        reduce_gradients(trainable)
        for chunk in trainable.chunks:
            for group in chunk.expert_parallel_bucket_groups:
                for bucket in group.buckets:
                    bucket.gradient_scaling_factor *= trainable.context.config.layout.ep

    return faulty


EXPERT_FAULTS = (
    Fault(
        name="router-not-reduced",
        summary="the gradient of a router's weight is that of the first rank's tokens, and of no other rank's",
        source="https://github.com/pytorch/torchtitan/issues/2387",
        seam="routers_of",
        stage="gradients",
        loss_blind=True,
        needs="dp of 2 or more and a model with routers",
        wrap=_gradient_of_first_rank,
    ),
    Fault(
        name="experts-normalised-otherwise",
        summary="weights of the chosen experts are divided by their sum where the model does not, or the other way",
        source="https://github.com/databricks/megablocks/pull/87",
        seam="routers_of",
        stage="routing",
        loss_blind=False,
        needs="a model whose configuration has norm_topk_prob",
        wrap=_normalisation_inverted,
    ),
    Fault(
        name="shared-expert-twice",
        summary="the shared expert's output is added twice, because ranks that all have it are summed",
        source="https://github.com/sgl-project/sglang/pull/26845",
        seam="routers_of",
        stage="log-probs",
        loss_blind=False,
        needs="a model with a shared expert",
        wrap=_shared_twice,
    ),
    Fault(
        name="router-loss-dropped",
        summary="the load-balancing loss is computed and told, and not added to what is minimised",
        source="https://github.com/jingyaogong/minimind/issues/140",
        seam="router_loss",
        stage="gradients",
        loss_blind=True,
        needs="a model whose configuration adds its routers' loss",
        wrap=_router_loss_dropped,
    ),
    Fault(
        name="router-loss-of-micro-batch",
        summary="the load-balancing loss is the mean of those of micro-batches, each with its own counts of experts",
        source="https://github.com/IBM/ModuleFormer/issues/5",
        seam="router_loss",
        stage="gradients",
        loss_blind=True,
        needs="a model whose configuration adds its routers' loss, and several micro-batches",
        wrap=_router_loss_of_micro_batch,
    ),
    Fault(
        name="z-loss-of-micro-batch",
        summary="the z-loss of routers is the mean over a micro-batch and not over the step, so each adds a whole one",
        source="https://github.com/NVIDIA-NeMo/Automodel/pull/3359",
        seam="z_loss",
        stage="gradients",
        loss_blind=True,
        needs="a scenario with router_z_loss, and several micro-batches",
        wrap=_z_loss_of_micro_batch,
    ),
    Fault(
        name="replay-of-another-pass",
        summary="an update is given the experts that were recorded for the old log-probs, under other weights",
        source="https://github.com/areal-project/AReaL/pull/1166, whose queue may give a pass another one's",
        seam="choices_for",
        stage="routing",
        loss_blind=True,
        needs="roll-outs of a model with routers, below the exact tier, and a second update",
        wrap=_replay_of_another_pass,
    ),
    Fault(
        name="tokens-off-by-one",
        summary="tokens are sent to the experts of their neighbours, because they are sorted by another order",
        source="https://github.com/pytorch/torchtitan/pull/2842, where a rank of the wrong group cut the tokens",
        seam="sorted_by_expert",
        stage="routing",
        loss_blind=False,
        needs="ep of 2 or more",
        wrap=_tokens_off_by_one,
    ),
    Fault(
        name="experts-not-divided",
        summary="gradients of experts are averaged over the ranks that hold them, and not over all that sent tokens",
        source="https://github.com/NVIDIA/Megatron-LM/pull/5956",
        seam="expert_divisor",
        stage="gradients",
        loss_blind=True,
        needs="ep of 2 or more",
        wrap=_not_divided,
    ),
    Fault(
        name="permutation-off-by-one",
        summary="tokens lie one place further in front of the experts than the order by which outputs are put back",
        source="https://github.com/pytorch/torchtitan/pull/1340",
        seam="permute_tokens",
        stage="routing",
        loss_blind=False,
        needs="a model with routers in several layers",
        wrap=_permutation_off_by_one,
    ),
    Fault(
        name="experts-averaged-over-their-ranks",
        summary="gradients of experts are divided by the number of ranks that hold them, not by that of all data ranks",
        source="https://github.com/databricks/megablocks/pull/20",
        seam="reduce_gradients",
        stage="gradients",
        loss_blind=True,
        needs="ep of 2 or more",
        wrap=_averaged_over_their_ranks,
    ),
    Fault(
        name="groups-not-limited",
        summary="experts are chosen in all groups, and not in those alone that are best for the token",
        source="https://github.com/vllm-project/vllm/pull/13474",
        seam="routers_of",
        stage="routing",
        loss_blind=False,
        needs="a model that chooses groups of experts, in the exact tier",
        wrap=_groups_not_limited,
    ),
    Fault(
        name="correction-bias-not-loaded",
        summary="the bias by which experts are chosen, a buffer, is not loaded, so it is zero",
        source="https://github.com/alibaba/Pai-Megatron-Patch/pull/497, before which it was not converted",
        seam="read_slice",
        stage="weights",
        loss_blind=False,
        needs="a model whose experts are chosen by scores with a bias",
        wrap=read_as_zeros("e_score_correction_bias"),
    ),
    Fault(
        name="correction-bias-moved",
        summary="the bias by which experts are chosen moves by the library's default rate at each step",
        source="https://github.com/alibaba/Pai-Megatron-Patch/issues/467, which asks for a fixed one",
        seam="pipeline_config",
        stage="clipped update",
        loss_blind=True,
        needs="a model whose experts are chosen by scores with a bias",
        wrap=_correction_bias_moved,
    ),
)
