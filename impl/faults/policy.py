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
from conformance.spec.batch import KEPT
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
def importance_not_truncated(importance_weights: Function, old: Tensor, sampled: Tensor, **bounds: Any) -> Any:
    return importance_weights(old, sampled, **{**bounds, "threshold": math.inf})


@POLICY_FAULTS.add(
    summary="the loss has no argument for importance weights, so all of them are 1",
    source="https://github.com/linkedin/Liger-Kernel/issues/1088",
    stage="loss",
    cells=rl("gspo", only=FULL),
    needs="rollout_is_threshold",
)
def importance_left_out(importance_weights: Function, old: Tensor, sampled: Tensor, **bounds: Any) -> Any:
    return torch.ones_like(importance_weights(old, sampled, **bounds))


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
def importance_inverted(importance_weights: Function, old: Tensor, sampled: Tensor, **bounds: Any) -> Any:
    return importance_weights(sampled, old, **bounds)


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
    cells=rl("grpo-off-policy", half="grpo-half-kl"),
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


@POLICY_FAULTS.add(
    summary="the temperatures of SAPO's gate are exchanged between positive and negative advantages",
    source="arXiv 2511.20347, equation 7",
    stage="loss",
    cells=rl("sapo", only=FULL),
    needs="sapo with two temperatures",
)
def gate_temperatures_exchanged(policy_losses: Function, *tokens: Tensor, objective: Any, **others: Any) -> Any:
    exchanged = dataclasses.replace(objective, tau_pos=objective.tau_neg, tau_neg=objective.tau_pos)
    return policy_losses(*tokens, objective=exchanged, **others)


@POLICY_FAULTS.add(
    summary="SAPO's gate is the sigmoid alone, so its slope at ratio 1 is a quarter of the temperature",
    source="arXiv 2511.20347, equation 6",
    stage="loss",
    cells=rl("sapo", only=FULL),
    needs="sapo",
)
def gate_without_scale(gate: Function, ratio: Tensor, tau: Tensor) -> Any:
    return gate(ratio, tau) * (tau / 4)


@POLICY_FAULTS.add(
    summary="the geometric mean of GMPO is that of a packed row instead of a response",
    source="arXiv 2507.20673, equation 4",
    stage="gradients",
    cells=rl("gmpo", only=FULL),
    blind=("loss",),
    needs="geo_mean and packed rows",
)
def geometric_mean_of_rows(sequence_mean: Function, numbers: Tensor, *, mask: Tensor, documents: Tensor) -> Any:
    return sequence_mean(numbers, mask=mask, documents=torch.zeros_like(documents))


@POLICY_FAULTS.add(
    summary="importance weights of sequences are those of their tokens",
    source="https://fengyao.notion.site/off-policy-rl",
    stage="loss",
    cells=rl("gmpo", only=FULL),
    needs="rollout_is = sequence",
)
def importance_of_tokens(importance_weights: Function, old: Tensor, sampled: Tensor, **bounds: Any) -> Any:
    return importance_weights(old, sampled, **{**bounds, "level": "token"})


@POLICY_FAULTS.add(
    summary="responses that masked importance sampling leaves out are trained with the largest weight",
    source="https://github.com/huggingface/trl/blob/main/trl/trainer/grpo_trainer.py, sequence_mask",
    stage="loss",
    cells=rl("gmpo", only=FULL),
    needs="rollout_is_mask and a weight above the threshold",
)
def importance_not_masked(importance_weights: Function, old: Tensor, sampled: Tensor, **bounds: Any) -> Any:
    return importance_weights(old, sampled, **{**bounds, "mask": False})


@POLICY_FAULTS.add(
    summary="the penalty for long responses is a bonus",
    source="arXiv 2503.14476, equation 13",
    stage="advantages",
    cells=rl("gmpo", only=FULL),
    needs="overlong_length and a response near it",
)
def overlong_bonus(overlong_penalty: Function, length: int, objective: Any) -> float:
    return -float(overlong_penalty(length, objective))


TRUNCATED = rl("top-p", only=FULL)


@POLICY_FAULTS.add(
    summary="the policy's log-probs are over the whole vocabulary, those of the sampler over the tokens that it kept",
    source="https://github.com/huggingface/trl/issues/6789",
    stage="old log-probs",
    cells=TRUNCATED,
    needs="rollouts sampled by top-k or top-p",
)
def mask_not_replayed(kept_logits: Function, logits: Tensor, inputs: Any, *, start: int) -> Tensor:
    return logits


@POLICY_FAULTS.add(
    summary="old log-probs are over the tokens that the sampler kept, and those of updates over the whole vocabulary",
    source="https://github.com/vllm-project/vllm/pull/49577: both sides of a ratio have one support",
    stage="log-probs",
    cells=TRUNCATED,
    needs="rollouts sampled by top-k or top-p",
)
def mask_on_one_side(kept_logits: Function, logits: Tensor, inputs: Any, *, start: int) -> Any:
    return logits if torch.is_grad_enabled() else kept_logits(logits, inputs, start=start)


@POLICY_FAULTS.add(
    summary="the trainer cuts its own distribution, which keeps other tokens than the sampler's",
    source="https://github.com/PrimeIntellect-ai/prime-rl/pull/2601",
    stage="old log-probs",
    cells=TRUNCATED,
    needs="rollouts sampled by top-k or top-p",
)
def mask_of_trainer(kept_logits: Function, logits: Tensor, inputs: Any, *, start: int) -> Tensor:
    return _likeliest(logits, inputs, start)


@POLICY_FAULTS.add(
    summary="each rank keeps the likeliest tokens of its own part of the vocabulary",
    source="https://github.com/NVIDIA-NeMo/RL/issues/69: logits are sharded along the vocabulary",
    stage="old log-probs",
    cells=rl("top-p", only=FULL, fsdp2="tp2.losspar", megatron="tp2"),
    needs="vocabulary shards, and rollouts sampled by top-k or top-p",
)
def mask_of_vocabulary_shard(kept_logits_of_shard: Function, logits: Tensor, inputs: Any, *, start: int) -> Tensor:
    return _likeliest(logits, inputs, start)


def _likeliest(logits: Tensor, inputs: Any, start: int) -> Tensor:
    """Keeps as many of these logits as the sampler kept tokens, the largest ones, and that of the label."""
    count = sum((column > 0).long() for name, column in inputs.columns.items() if name.startswith(KEPT))
    rank = logits.detach().argsort(dim=-1, descending=True).argsort(dim=-1)
    label = torch.arange(logits.shape[-1], device=logits.device) + start == inputs.labels[..., None]
    return logits.where((rank < torch.as_tensor(count)[..., None]) | label | (inputs.labels < 0)[..., None], -torch.inf)
