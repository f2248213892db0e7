"""Plants faults in a policy's update: in ratios, clips, KL, entropy, value losses and their gradients.

At the first update of a rollout the ratio is 1 and the policy loss carries no information, so most of these faults do
not change that loss.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from conformance.backends.faults import Fault, Function
from impl.faults.cells import FULL, rl


def _temperature_not_in_training(forward_backward: Function) -> Function:
    def faulty(trainable: Any, inputs: Any, *, temperature: float = 1.0, loss: Any, **options: Any) -> Any:
        temperature = temperature if loss is None else 1.0
        return forward_backward(trainable, inputs, temperature=temperature, loss=loss, **options)

    return faulty


def _ratio_inverted(policy_losses: Function) -> Function:
    def faulty(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, **options: Any) -> Any:
        return policy_losses(old_logprobs, logprobs, advantages, **options)

    return faulty


def _clip_sides_exchanged(policy_losses: Function) -> Function:
    def faulty(*tensors: torch.Tensor, objective: Any, **options: Any) -> Any:
        low, high = objective.clip_ratio_low, objective.clip_ratio_high
        exchanged = dataclasses.replace(objective, clip_ratio_low=high, clip_ratio_high=low)
        return policy_losses(*tensors, objective=exchanged, **options)

    return faulty


def _dual_clip_of_positive(dual_clipped: Function) -> Function:
    def faulty(losses: torch.Tensor, advantages: torch.Tensor, *, bound: float) -> torch.Tensor:
        return torch.minimum(losses, -advantages * bound)

    return faulty


def _gspo_without_length(sequence_mean: Function) -> Function:
    def faulty(numbers: torch.Tensor, *, mask: torch.Tensor, documents: torch.Tensor) -> Any:
        counts = torch.zeros_like(numbers).scatter_add(1, documents, mask.to(numbers.dtype)).gather(1, documents)
        return sequence_mean(numbers, mask=mask, documents=documents) * counts

    return faulty


def _importance_not_truncated(importance_weights: Function) -> Function:
    def faulty(old: torch.Tensor, sampled: torch.Tensor, *, threshold: float) -> Any:
        return importance_weights(old, sampled, threshold=math.inf)

    return faulty


def _importance_inverted(importance_weights: Function) -> Function:
    def faulty(old: torch.Tensor, sampled: torch.Tensor, *, threshold: float) -> Any:
        return importance_weights(sampled, old, threshold=threshold)

    return faulty


def _kl_sign(kl_estimate: Function) -> Function:
    def faulty(logprobs: torch.Tensor, reference: torch.Tensor, kind: str) -> Any:
        return kl_estimate(reference, logprobs, kind)

    return faulty


def _k1_for_k3(kl_estimate: Function) -> Function:
    def faulty(logprobs: torch.Tensor, reference: torch.Tensor, kind: str) -> Any:
        return kl_estimate(logprobs, reference, "kl")

    return faulty


def _changed_part(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Function], Function]:
    """Changes one part of the actor's loss before it is added; the reported part stays as it is."""

    def wrap(actor_loss: Function) -> Function:
        def faulty(objective: Any, **parts: torch.Tensor) -> Any:
            return actor_loss(objective, **parts | {name: change(parts[name])})

        return faulty

    return wrap


def _local_softmax(through_softmax: Function) -> Function:
    def faulty(s: torch.Tensor, total: torch.Tensor, *others: Any) -> Any:
        return through_softmax(s, s.exp().sum(-1), *others)

    return faulty


def _label_holders_only(through_label: Function) -> Function:
    def faulty(gradient: torch.Tensor, of_logprob: torch.Tensor, *, index: torch.Tensor, held: torch.Tensor) -> None:
        gradient.mul_(held[..., None])
        through_label(gradient, of_logprob, index=index, held=held)

    return faulty


def _optimistic_value_clip(value_losses: Function) -> Function:
    def faulty(
        values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, cliprange: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bounded = old_values + (values - old_values).clamp(-cliprange, cliprange)
        free, clipped = (values - returns).square(), (bounded - returns).square()
        return torch.minimum(free, clipped) / 2, clipped > free

    return faulty


POLICY_FAULTS = (
    Fault(
        name="temperature-not-in-training",
        summary="log-probs of the update are not at the temperature of sampling",
        source="https://github.com/verl-project/verl/pull/3133",
        seam="forward_backward",
        stage="log-probs",
        cells=rl("grpo-off-policy"),
        needs="a temperature other than 1",
        wrap=_temperature_not_in_training,
    ),
    Fault(
        name="ratio-inverted",
        summary="the ratio is old over new, so rewarded tokens become less likely",
        source="arXiv 1707.06347, equation 6, where it is new over old",
        seam="policy_losses",
        stage="gradients",
        cells=rl("grpo"),
        blind=("loss", "loss and norm"),
        needs="old log-probs that are recomputed; otherwise the loss shows the fault as well",
        wrap=_ratio_inverted,
    ),
    Fault(
        name="clip-sides-exchanged",
        summary="ratios are clipped by the upper bound below and by the lower bound above",
        source="arXiv 2503.14476, equation 10: clip(r, 1 - low, 1 + high)",
        seam="policy_losses",
        stage="loss",
        cells=rl("grpo", only=FULL),
        blind=("loss", "loss and norm"),
        needs="two bounds, and ratios beyond one of them: a second update of a rollout",
        wrap=_clip_sides_exchanged,
    ),
    Fault(
        name="dual-clip-of-positive",
        summary="dual clip bounds the loss of positive advantages too",
        source="https://github.com/thu-ml/tianshou/issues/433",
        seam="dual_clipped",
        stage="loss",
        cells=rl("grpo-off-policy"),
        needs="dual clip and a positive advantage",
        wrap=_dual_clip_of_positive,
    ),
    Fault(
        name="gspo-without-length",
        summary="the ratio of a sequence is the product of its tokens' ratios, not their geometric mean",
        source="arXiv 2507.18071, equation 7: the exponent is 1 over the length",
        seam="sequence_mean",
        stage="ratios",
        cells=rl("gspo", only=FULL),
        blind=("loss", "loss and norm"),
        needs="gspo and a second update of a rollout",
        wrap=_gspo_without_length,
    ),
    Fault(
        name="importance-not-truncated",
        summary="weights of truncated importance sampling have no bound",
        source="https://github.com/thinking-machines-lab/tinker-feedback/issues/24",
        seam="importance_weights",
        stage="loss",
        cells=rl("gspo", only=FULL),
        needs="rollout_is_threshold and a weight above it",
        wrap=_importance_not_truncated,
    ),
    Fault(
        name="importance-inverted",
        summary="importance weights are the sampler's probabilities over the trainer's",
        source="https://fengyao.notion.site/off-policy-rl, where they are the trainer's over the sampler's",
        seam="importance_weights",
        stage="loss",
        cells=rl("gspo", only=FULL),
        needs="rollout_is_threshold",
        wrap=_importance_inverted,
    ),
    Fault(
        name="kl-sign",
        summary="the log-ratio of the KL loss has the wrong sign: policy and reference are exchanged",
        source="http://joschu.net/blog/kl-approx.html, where log r is reference minus policy for samples of the policy",
        seam="kl_in_loss",
        stage="loss",
        cells=rl("grpo"),
        blind=("loss and norm",),
        needs="kl_loss_coef and a KL estimate that is not symmetric",
        wrap=_kl_sign,
    ),
    Fault(
        name="k1-for-k3",
        summary="the KL loss uses k1, whose gradient does not depend on the reference",
        source="https://github.com/allenai/open-instruct/pull/535",
        seam="kl_in_loss",
        stage="loss",
        cells=rl("grpo"),
        needs="kl_loss_coef and k3",
        wrap=_k1_for_k3,
    ),
    Fault(
        name="kl-subtracted",
        summary="the KL loss is subtracted, so the policy is driven away from the reference",
        source="https://github.com/verl-project/verl/pull/179",
        seam="actor_loss",
        stage="loss",
        cells=rl("grpo-off-policy"),
        needs="kl_loss_coef and a reference that is not the policy",
        wrap=_changed_part("kl_loss", torch.neg),
    ),
    Fault(
        name="kl-without-gradient",
        summary="the KL loss is computed without autograd",
        source="https://github.com/allenai/open-instruct/issues/530",
        seam="actor_loss",
        stage="gradients",
        cells=rl("grpo-off-policy"),
        blind=("loss", "loss and norm"),
        needs="kl_loss_coef",
        wrap=_changed_part("kl_loss", torch.detach),
    ),
    Fault(
        name="entropy-sign",
        summary="the entropy bonus is added to the loss instead of subtracted",
        source="https://github.com/nebuly-ai/optimate/pull/250",
        seam="actor_loss",
        stage="loss",
        cells=rl("grpo"),
        needs="entropy_coeff",
        wrap=_changed_part("entropy_loss", torch.neg),
    ),
    Fault(
        name="entropy-without-gradient",
        summary="the entropy bonus is part of the loss and not of the gradient",
        source="https://github.com/huggingface/trl/pull/6625",
        seam="actor_loss",
        stage="gradients",
        cells=rl("grpo"),
        blind=("loss", "loss and norm"),
        needs="entropy_coeff",
        wrap=_changed_part("entropy_loss", torch.detach),
    ),
    Fault(
        name="local-softmax-gradient",
        summary="the gradient of log-probs treats each shard of the vocabulary as the whole softmax",
        source="https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 2, where the loss is wrong as well",
        seam="through_softmax",
        stage="gradients",
        cells=rl("grpo-off-policy", fsdp2="tp2.losspar", megatron="tp2"),
        blind=("loss",),
        needs="logits that are cut along the vocabulary: losspar, or Megatron's tp",
        wrap=_local_softmax,
    ),
    Fault(
        name="label-holders-only",
        summary="no gradient reaches shards of the vocabulary that do not hold a token's label",
        source="https://github.com/modelscope/ms-swift/pull/9947",
        seam="through_label",
        stage="gradients",
        cells=rl("grpo-off-policy", fsdp2="tp2.losspar", megatron="tp2"),
        blind=("loss",),
        needs="logits that are cut along the vocabulary: losspar, or Megatron's tp",
        wrap=_label_holders_only,
    ),
    Fault(
        name="optimistic-value-clip",
        summary="the value loss is the smaller of the unclipped and the clipped loss",
        source="https://github.com/ray-project/ray/issues/2233",
        seam="value_losses",
        stage="critic loss",
        cells=rl("ppo", only=FULL),
        blind=("loss", "loss and norm"),
        needs="a critic and a second update of a rollout",
        wrap=_optimistic_value_clip,
    ),
)
