"""Plants faults in a policy's update: in ratios, clips, KL, entropy, value losses and their gradients.

At the first update of a rollout the ratio is 1 and the policy loss carries no information, so most of these faults do
not change that loss.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from conformance.backends.faults import Function
from impl.faults.declaration import FULL, Faults, rl

POLICY_FAULTS = Faults()


@POLICY_FAULTS.add(
    summary="log-probs of the update are not at the temperature of sampling",
    source="https://github.com/verl-project/verl/pull/3133",
    stage="log-probs",
    cells=rl("grpo-off-policy"),
    needs="a temperature other than 1",
)
def temperature_not_in_training(
    forward_backward: Function, trainable: Any, inputs: Any, *, temperature: float = 1.0, loss: Any, **options: Any
) -> Any:
    temperature = temperature if loss is None else 1.0
    return forward_backward(trainable, inputs, temperature=temperature, loss=loss, **options)


@POLICY_FAULTS.add(
    summary="the ratio is old over new, so rewarded tokens become less likely",
    source="arXiv 1707.06347, equation 6, where it is new over old",
    stage="gradients",
    cells=rl("grpo"),
    blind=("loss", "loss and norm"),
    needs="old log-probs that are recomputed; otherwise the loss shows the fault as well",
)
def ratio_inverted(
    policy_losses: Function,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    **options: Any,
) -> Any:
    return policy_losses(old_logprobs, logprobs, advantages, **options)


@POLICY_FAULTS.add(
    summary="ratios are clipped by the upper bound below and by the lower bound above",
    source="arXiv 2503.14476, equation 10: clip(r, 1 - low, 1 + high)",
    stage="loss",
    cells=rl("grpo", only=FULL),
    blind=("loss", "loss and norm"),
    needs="two bounds, and ratios beyond one of them: a second update of a rollout",
)
def clip_sides_exchanged(policy_losses: Function, *tensors: Tensor, objective: Any, **options: Any) -> Any:
    low, high = objective.clip_ratio_low, objective.clip_ratio_high
    exchanged = dataclasses.replace(objective, clip_ratio_low=high, clip_ratio_high=low)
    return policy_losses(*tensors, objective=exchanged, **options)


@POLICY_FAULTS.add(
    summary="dual clip bounds the loss of positive advantages too",
    source="https://github.com/thu-ml/tianshou/issues/433",
    stage="loss",
    cells=rl("grpo-off-policy"),
    needs="dual clip and a positive advantage",
)
def dual_clip_of_positive(dual_clipped: Function, losses: Tensor, advantages: Tensor, *, bound: float) -> Tensor:
    return torch.minimum(losses, -advantages * bound)


@POLICY_FAULTS.add(
    summary="the ratio of a sequence is the product of its tokens' ratios, not their geometric mean",
    source="arXiv 2507.18071, equation 7: the exponent is 1 over the length",
    stage="ratios",
    cells=rl("gspo", only=FULL),
    blind=("loss", "loss and norm"),
    needs="gspo and a second update of a rollout",
)
def gspo_without_length(sequence_mean: Function, numbers: Tensor, *, mask: Tensor, documents: Tensor) -> Any:
    counts = torch.zeros_like(numbers).scatter_add(1, documents, mask.to(numbers.dtype)).gather(1, documents)
    return sequence_mean(numbers, mask=mask, documents=documents) * counts


@POLICY_FAULTS.add(
    summary="weights of truncated importance sampling have no bound",
    source="https://github.com/thinking-machines-lab/tinker-feedback/issues/24",
    stage="loss",
    cells=rl("gspo", only=FULL),
    needs="rollout_is_threshold and a weight above it",
)
def importance_not_truncated(importance_weights: Function, old: Tensor, sampled: Tensor, *, threshold: float) -> Any:
    return importance_weights(old, sampled, threshold=math.inf)


@POLICY_FAULTS.add(
    summary="the loss has no argument for importance weights, so all of them are 1",
    source="https://github.com/linkedin/Liger-Kernel/issues/1088",
    stage="loss",
    cells=rl("gspo", only=FULL),
    needs="rollout_is_threshold",
)
def importance_left_out(importance_weights: Function, old: Tensor, sampled: Tensor, *, threshold: float) -> Any:
    return torch.ones_like(importance_weights(old, sampled, threshold=threshold))


class _HeadOfFirstToken(torch.autograd.Function):
    """A linear head whose weight gets the gradients of all tokens with the factor of the first one."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        logits = hidden @ weight.T
        context.save_for_backward(hidden, weight, logits)
        return logits

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight, logits = context.saved_tensors
        trained = gradient.abs().sum(-1) > 0
        of_logits = gradient[trained]
        label = of_logits.abs().argmax(-1, keepdim=True)  # no other logit has a larger gradient
        factors = of_logits.gather(1, label) / (logits[trained].softmax(-1).gather(1, label) - 1)
        wrong = of_logits / factors * factors[:1]
        return gradient @ weight, wrong.T @ hidden[trained]


@POLICY_FAULTS.add(
    summary="a fused loss forms the head's gradient with the factor of the first token for all tokens",
    source="https://github.com/linkedin/Liger-Kernel/pull/1298",
    stage="gradients",
    cells=rl("gspo", fsdp2="dp2", only=FULL),
    blind=("loss",),
    needs="a model with a head of its own, and tokens with other factors, as advantages are",
)
def head_weighted_by_first_token(shard_model: Function, trainable: Any, model: Any) -> None:
    head = getattr(model, "lm_head", None)
    if head is not None:
        head.forward = lambda hidden: _HeadOfFirstToken.apply(hidden, head.weight)  # type: ignore[no-untyped-call]
    shard_model(trainable, model)


@POLICY_FAULTS.add(
    summary="importance weights are the sampler's probabilities over the trainer's",
    source="https://fengyao.notion.site/off-policy-rl, where they are the trainer's over the sampler's",
    stage="loss",
    cells=rl("gspo", only=FULL),
    needs="rollout_is_threshold",
)
def importance_inverted(importance_weights: Function, old: Tensor, sampled: Tensor, *, threshold: float) -> Any:
    return importance_weights(sampled, old, threshold=threshold)


@POLICY_FAULTS.add(
    summary="the log-ratio of the KL loss has the wrong sign: policy and reference are exchanged",
    source="http://joschu.net/blog/kl-approx.html, where log r is reference minus policy for samples of the policy",
    stage="loss",
    cells=rl("grpo"),
    blind=("loss and norm",),
    needs="kl_loss_coef and a KL estimate that is not symmetric",
)
def kl_sign(kl_in_loss: Function, logprobs: Tensor, reference: Tensor, kind: str) -> Any:
    return kl_in_loss(reference, logprobs, kind)


@POLICY_FAULTS.add(
    summary="the KL loss uses k1, whose gradient does not depend on the reference",
    source="https://github.com/allenai/open-instruct/pull/535",
    stage="loss",
    cells=rl("grpo"),
    needs="kl_loss_coef and k3",
)
def k1_for_k3(kl_in_loss: Function, logprobs: Tensor, reference: Tensor, kind: str) -> Any:
    return kl_in_loss(logprobs, reference, "kl")


@POLICY_FAULTS.add(
    summary="the gradient of log-probs treats each shard of the vocabulary as the whole softmax",
    source="https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 2, where the loss is wrong as well",
    stage="gradients",
    cells=rl("grpo-off-policy", fsdp2="tp2.losspar", megatron="tp2"),
    blind=("loss",),
    needs="logits that are cut along the vocabulary: losspar, or Megatron's tp",
)
def local_softmax_gradient(through_softmax: Function, s: Tensor, total: Tensor, *others: Any) -> Any:
    return through_softmax(s, s.exp().sum(-1), *others)


@POLICY_FAULTS.add(
    summary="no gradient reaches shards of the vocabulary that do not hold a token's label",
    source="https://github.com/modelscope/ms-swift/pull/9947",
    stage="gradients",
    cells=rl("grpo-off-policy", fsdp2="tp2.losspar", megatron="tp2"),
    blind=("loss",),
    needs="logits that are cut along the vocabulary: losspar, or Megatron's tp",
)
def label_holders_only(
    through_label: Function,
    gradient: Tensor,
    of_logprob: Tensor,
    *,
    index: Tensor,
    held: Tensor,
) -> None:
    gradient.mul_(held[..., None])
    through_label(gradient, of_logprob, index=index, held=held)


@POLICY_FAULTS.add(
    summary="the value loss is the smaller of the unclipped and the clipped loss",
    source="https://github.com/ray-project/ray/issues/2233",
    stage="critic loss",
    cells=rl("ppo", only=FULL),
    blind=("loss", "loss and norm"),
    needs="a critic and a second update of a rollout",
)
def optimistic_value_clip(
    value_losses: Function, values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange: float
) -> tuple[Tensor, Tensor]:
    bounded = old_values + (values - old_values).clamp(-cliprange, cliprange)
    free, clipped = (values - returns).square(), (bounded - returns).square()
    return torch.minimum(free, clipped) / 2, clipped > free


@POLICY_FAULTS.add(
    summary="the KL loss is subtracted, so the policy is driven away from the reference",
    source="https://github.com/verl-project/verl/pull/179",
    stage="loss",
    cells=rl("grpo-off-policy"),
    needs="kl_loss_coef and a reference that is not the policy",
)
def kl_subtracted(actor_loss: Function, objective: Any, **parts: Tensor) -> Any:
    return actor_loss(objective, **parts | {"kl_loss": -parts["kl_loss"]})


@POLICY_FAULTS.add(
    summary="the KL loss is computed without autograd",
    source="https://github.com/allenai/open-instruct/issues/530",
    stage="gradients",
    cells=rl("grpo-off-policy"),
    blind=("loss", "loss and norm"),
    needs="kl_loss_coef",
)
def kl_without_gradient(actor_loss: Function, objective: Any, **parts: Tensor) -> Any:
    return actor_loss(objective, **parts | {"kl_loss": parts["kl_loss"].detach()})


@POLICY_FAULTS.add(
    summary="the entropy bonus is added to the loss instead of subtracted",
    source="https://github.com/nebuly-ai/optimate/pull/250",
    stage="loss",
    cells=rl("grpo"),
    needs="entropy_coeff",
)
def entropy_sign(actor_loss: Function, objective: Any, **parts: Tensor) -> Any:
    return actor_loss(objective, **parts | {"entropy_loss": -parts["entropy_loss"]})


@POLICY_FAULTS.add(
    summary="the entropy bonus is part of the loss and not of the gradient",
    source="https://github.com/huggingface/trl/pull/6625",
    stage="gradients",
    cells=rl("grpo"),
    blind=("loss", "loss and norm"),
    needs="entropy_coeff",
)
def entropy_without_gradient(actor_loss: Function, objective: Any, **parts: Tensor) -> Any:
    return actor_loss(objective, **parts | {"entropy_loss": parts["entropy_loss"].detach()})
