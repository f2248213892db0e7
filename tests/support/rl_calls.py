"""Calls the functions of verl, TRL and OpenRLHF: documents in, documents or the loss of a mini-batch out."""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rl_cases import Documents, Padded, Rollout
from rl_libraries import NoFloat32, float64_by_default, openrlhf, taken_out, trl, verl
from torch import Tensor
from torch.nn import functional

from conformance.spec.objectives import Grpo, PolicyGradient, Ppo

# verl


class Batch(dict[str, Any]):
    """What of a TensorDict is asked for."""

    @property
    def batch_size(self) -> list[int]:
        return [len(self["response_mask"])]

    def select(self, *names: str) -> "Batch":
        return Batch({name: self[name] for name in names})

    def to_padded_tensor(self) -> "Batch":
        return self


def verl_evicted(groups: Sequence[int], rewards: Sequence[float]) -> set[int]:
    """The groups that dynamic sampling leaves out."""
    scores = {f"{group}_{n}": torch.tensor([0.0, r]) for n, (group, r) in enumerate(zip(groups, rewards, strict=True))}
    filtered = taken_out(
        "verl",
        "verl/trainer/ppo/v1/replay_buffer.py",
        "ReplayBuffer._dapo_filtered_keys",
        **{"Counter": Counter, "defaultdict": defaultdict, "np": np, "FILTER_GROUPS_REWARD_METRIC": "reward"},
        tq=SimpleNamespace(kv_batch_get=lambda keys, **_: {"rm_scores": [scores[key] for key in keys]}),
    )
    self = SimpleNamespace(
        filter_groups_metric="reward",
        finished_keys={"train": {str(group) for group in groups}},
        partitions={"train": scores},
        _dapo_classification_cache={"train": {}},
    )
    return {int(group) for group in filtered(self, "train")[0]}


def verl_overlong(length: int, *, limit: int, buffer: int) -> float:
    """What a response of so many tokens loses of its reward, 0."""

    async def called(_: object, function: Callable[[], Any]) -> Any:
        return function()

    self = SimpleNamespace(
        loop=SimpleNamespace(run_in_executor=called),
        tokenizer=SimpleNamespace(decode=lambda *_, **__: ""),
        compute_score=lambda **_: 0.0,
        **{"reward_router_address": None, "is_async_reward_score": False, "max_resp_len": limit},
        overlong_buffer_cfg=SimpleNamespace(enable=True, len=buffer, penalty_factor=1.0, log=False),
    )
    item = SimpleNamespace(
        batch={"responses": torch.zeros(length), "attention_mask": torch.ones(length, dtype=torch.int64)},
        non_tensor_batch={"data_source": "", "reward_model": {"ground_truth": ""}},
    )
    file = "verl/experimental/reward_loop/reward_manager/dapo.py"
    run = taken_out("verl", file, "DAPORewardManager.run_single")
    return float(asyncio.run(run(self, [item]))["reward_score"])


def verl_rewards(case: Rollout, padded: Padded, *, kl_coef: float, kl_penalty: str) -> Tensor:
    """Token rewards, padded."""
    batch = Batch(
        response_mask=padded.mask,
        token_level_scores=padded.last(case.rewards),
        old_log_probs=padded(case.old),
        ref_log_prob=padded(case.reference),
    )
    control = verl().core.FixedKLController(kl_coef)
    verl().kl_penalty_in_rewards(SimpleNamespace(batch=batch), control, kl_penalty=kl_penalty)
    rewards: Tensor = batch["token_level_rewards"]
    return rewards


def verl_estimate(
    case: Rollout, objective: Grpo | Ppo, *, holes: bool, name: str | None = None
) -> tuple[Documents, Documents]:
    """(advantages, returns), of another estimator than the objective's if ``name`` says so."""
    padded = Padded.of(case, holes=holes)
    rewards = verl_rewards(case, padded, kl_coef=objective.kl_coef, kl_penalty=objective.kl_penalty)
    if isinstance(objective, Ppo):
        with NoFloat32():
            found = verl().core.compute_gae_advantage_return(
                rewards, padded(case.old_values), padded.mask, objective.gamma, objective.lam
            )
    else:
        function = verl().core.get_adv_estimator_fn(name or objective.adv_estimator)
        grpo = "grpo" in (name or objective.adv_estimator)
        with float64_by_default() if grpo else NoFloat32():  # the deviation of a group of one has no dtype
            found = function(
                token_level_rewards=rewards,
                response_mask=padded.mask,
                index=torch.tensor(case.groups).numpy(),
                config=SimpleNamespace(gamma=objective.gamma),
                **({"norm_adv_by_std_in_grpo": objective.norm_adv_by_std_in_grpo} if grpo else {}),
            )
    return padded.back(found[0]), padded.back(found[1])


def verl_config(objective: PolicyGradient, **info: Any) -> Any:
    return verl().ActorConfig(
        clip_ratio=0.2,
        clip_ratio_low=objective.clip_ratio_low,
        clip_ratio_high=objective.clip_ratio_high,
        clip_ratio_c=objective.clip_ratio_c or math.inf,  # verl has no "none"
        tau_pos=objective.tau_pos,
        tau_neg=objective.tau_neg,
        policy_loss={"loss_mode": objective.loss_mode},
        loss_agg_mode=objective.loss_agg_mode,
        loss_scale_factor=objective.loss_scale_factor,
        entropy_coeff=objective.entropy_coeff,
        use_kl_loss=objective.kl_loss_coef > 0,
        kl_loss_coef=objective.kl_loss_coef,
        kl_loss_type=objective.kl_loss_type,
        global_batch_info={"loss_scale_factor": objective.loss_scale_factor, **info},
    )


def verl_policy(
    case: Rollout, new: Documents, objective: PolicyGradient, *, holes: bool, weights: Documents | None = None
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics) of the policy loss alone; ``weights`` are those of the roll-out's correction."""
    padded = Padded.of(case, holes=holes)
    loss, metrics = verl().core.get_policy_loss_fn(objective.loss_mode)(
        padded(case.old),
        padded(new),
        padded(case.advantages),
        padded.mask.bool(),
        loss_agg_mode=objective.loss_agg_mode,
        config=verl_config(objective),
        rollout_is_weights=None if weights is None else padded(weights),
    )
    return loss, metrics


def verl_actor_loss(
    case: Rollout, new: Documents, entropy: Documents, objective: PolicyGradient, weights: Documents
) -> Tensor:
    """The whole loss of the actor, the mini-batch in two micro-batches on one of two data ranks each."""
    padded = Padded.of(case)
    whole = {
        "response_mask": padded.mask,
        "old_log_probs": padded(case.old),
        "advantages": padded(case.advantages),
        "rollout_is_weights": padded(weights),
        "ref_log_prob": padded(case.reference),
    }
    outputs = {"log_probs": padded(new), "entropy": padded(entropy)}
    total = torch.zeros(())
    for part in (slice(0, case.count // 2), slice(case.count // 2, None)):
        if not len(padded.mask[part]):
            continue
        data = Batch({name: tensor[part] for name, tensor in whole.items()})
        sequences = int((padded.mask.sum(1) > 0).sum())
        data |= {"dp_size": 2, "batch_num_tokens": case.tokens, "global_batch_size": sequences}
        model_output = {name: tensor[part] for name, tensor in outputs.items()}
        loss, _ = verl().ppo_loss(verl_config(objective), model_output, Batch(data))
        total = total + loss / 2  # gradients are averaged over data ranks
    return total


# OpenRLHF


def openrlhf_estimate(
    case: Rollout, estimator: str, *, gamma: float = 1.0, lam: float = 1.0, kl_coef: float = 0.0, clip: Any = None
) -> tuple[Documents, Documents]:
    """(advantages, returns); groups have to be of one size and side by side. KL is k1."""
    padded = Padded.of(case)
    size = case.groups.count(case.groups[0])
    maker = openrlhf().maker
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator=estimator, gamma=gamma, lambd=lam, no_std_norm=False)),
        rollout=SimpleNamespace(n_samples_per_prompt=size),
        reward=SimpleNamespace(clip_range=clip),
    )
    self = SimpleNamespace(
        strategy=SimpleNamespace(args=args), advantage_estimator=estimator, kl_ctl=SimpleNamespace(value=kl_coef)
    )
    for method in ("get_advantages_and_returns", "get_cumulative_returns"):
        setattr(self, method, getattr(maker, method).__get__(self))
    half = case.count // 2
    experiences = []
    with NoFloat32():
        for rows in (slice(0, half), slice(half, None)):  # in two batches, whose widths are the same
            kl = openrlhf().utils.compute_approx_kl(padded(case.old)[rows], padded(case.reference)[rows])
            experiences.append(
                SimpleNamespace(
                    rewards=torch.tensor(case.rewards, dtype=torch.float64)[rows],
                    index=list(range(case.count))[rows],
                    action_mask=padded.mask[rows],
                    values=padded(case.old_values)[rows],
                    kl=kl * padded.mask[rows],
                    info={},
                )
            )
        maker.compute_advantages_and_returns(self, [each for each in experiences if each.index])
    experiences = [each for each in experiences if each.index]
    return (
        padded.back(torch.cat([each.advantages for each in experiences])),
        padded.back(torch.cat([each.returns for each in experiences])),
    )


def openrlhf_policy(
    case: Rollout, new: Documents, objective: PolicyGradient, *, threshold: float | None = None, lowest: float = 0.0
) -> Tensor:
    """The policy loss, with importance weights clipped to ``lowest`` and ``threshold``."""
    padded = Padded.of(case)
    function = openrlhf().loss.PolicyLoss(
        clip_eps_low=objective.clip_ratio_low,
        clip_eps_high=objective.clip_ratio_high,
        dual_clip=objective.clip_ratio_c,
        token_level_loss=objective.loss_agg_mode == "token-mean",
        policy_loss_type="gspo" if objective.loss_mode == "gspo" else "ppo",
        is_correction_level="off" if threshold is None else "token",
        is_correction_mode="clip",
        is_correction_threshold=(lowest, threshold),
    )
    loss: Tensor = function(
        padded(new),
        padded(case.old),
        padded(case.advantages),
        action_mask=padded.mask,
        rollout_log_probs=padded(case.sampled),
    )[0]
    return loss


def openrlhf_actor_loss(
    case: Rollout, new: Documents, entropy: Documents, objective: PolicyGradient, *, estimator: str
) -> Tensor:
    """The whole loss of the actor, as its training step hands it to the backward pass."""
    padded = Padded.of(case)
    given: list[Tensor] = []
    args = SimpleNamespace(
        algo=SimpleNamespace(
            kl=SimpleNamespace(
                use_loss=True, init_coef=objective.kl_loss_coef, estimator=estimator, unbiased_gradient=False
            )
        ),
        actor=SimpleNamespace(entropy_coef=objective.entropy_coeff),
        train=SimpleNamespace(dynamic_batch_enable=False),
    )

    class Actor:
        def train(self) -> None: ...

        def __call__(self, *arguments: Any, **named: Any) -> tuple[Tensor, Any]:
            return padded(new), SimpleNamespace(entropy=padded(entropy))

    def nothing(*arguments: Any, **named: Any) -> None: ...

    self = SimpleNamespace(
        actor=Actor(),
        args=args,
        actor_optim=None,
        ema_model=None,
        aux_loss=False,
        actor_scheduler=SimpleNamespace(get_last_lr=lambda: [0.0]),
        actor_loss_fn=openrlhf().loss.PolicyLoss(
            objective.clip_ratio_low,
            objective.clip_ratio_high,
            objective.clip_ratio_c,
            token_level_loss=objective.loss_agg_mode == "token-mean",
        ),
        strategy=SimpleNamespace(
            ring_attn_group=None,
            backward=lambda loss, *rest: given.append(loss),
            optimizer_step=nothing,
            get_grad_norm=nothing,
        ),
    )
    experience = SimpleNamespace(
        sequences=None,
        attention_mask=None,
        action_mask=padded.mask,
        action_log_probs=padded(case.old),
        base_action_log_probs=padded(case.reference),
        rollout_log_probs=None,
        advantages=padded(case.advantages),
        info={},
    )
    info = {"dp_size": 1, "batch_num_tokens": case.tokens, "global_batch_size": case.count}
    with NoFloat32():
        openrlhf().training_step(self, experience, objective.kl_loss_coef, 0, loss_batch_info=info)
    return given[0]


# TRL


def _trainer(case: Rollout, **more: Any) -> SimpleNamespace:
    """What the methods of a trainer look at: one process, one micro-batch, no tools and no images."""

    def same(tensor: Tensor, **named: Any) -> Tensor:
        return tensor

    one_process = SimpleNamespace(
        device="cpu", process_index=0, num_processes=1, gather=same, gather_for_metrics=same, reduce=same
    )
    args = SimpleNamespace(
        per_device_train_batch_size=case.count,
        gradient_checkpointing_kwargs=None,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        use_bias_correction_kl=False,
        delta=None,
    )
    self = SimpleNamespace(
        accelerator=one_process,
        args=args,
        model=SimpleNamespace(training=True),
        ref_model=SimpleNamespace(),
        num_generations=case.groups.count(case.groups[0]),
        num_iterations=1,
        current_gradient_accumulation_steps=1,
        reward_weights=torch.ones(1, dtype=torch.float64),
        reward_func_names=["reward"],
        reward_funcs=[None],
        reward_clip_range=None,
        multi_objective_aggregation="sum_then_normalize",
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        beta=0.0,
        use_vllm=False,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_min=None,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=False,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _logs={"prompt": [], "completion": [], "advantages": [], "rewards": defaultdict(list)},
        _pending_extra_logs={},
        _pending_metrics={},
        **dict.fromkeys(["environment_factories", "tools", "environments", "pad_to_multiple_of"]),
        **dict.fromkeys(["mask_truncated_completions", "normalize_advantages", "aux_loss_enabled"], False),
        **dict.fromkeys(["off_policy_mask_threshold", "chat_template_kwargs"]),
    )
    vars(self).update(more)
    return self


def trl_score(case: Rollout, method: Callable[..., Any], **more: Any) -> dict[str, Tensor]:
    """What a trainer's ``_generate_and_score_completions`` makes of a roll-out; groups of one size, side by side."""
    padded = Padded.of(case)
    width = max(case.lengths)
    prompts = [{"prompt": "p"} for _ in case.groups]
    ids = [[7] * length for length in case.lengths]
    texts = ["c"] * case.count
    sampled = [document.tolist() for document in case.sampled]
    self = _trainer(case, **more)
    rloo = method is trl().rloo_score
    self._generate = lambda prompts: (
        ([[5]] * case.count, ids, texts) if rloo else ([[5]] * case.count, ids, None, texts, sampled, {}, None, None)
    )
    self._calculate_rewards = lambda *arguments: torch.tensor(case.rewards, dtype=torch.float64)[:, None]
    self._get_per_token_logps_and_entropies = lambda model, *arguments, **named: (
        padded(case.reference if model is self.ref_model else case.old)[:, :width],
        None,
        None,
    )
    with float64_by_default():
        scored: dict[str, Tensor] = method(self, prompts)
    return scored


def trl_loss(
    case: Rollout,
    new: Documents,
    *,
    loss_type: str,
    objective: PolicyGradient,
    entropy: Documents | None = None,
    weights: Documents | None = None,
    max_completion_length: float = 1.0,
    accumulation: int = 1,
    use_bias_correction_kl: bool = False,
) -> Tensor:
    """The GRPO trainer's loss of one micro-batch, or for ``rloo`` that of the RLOO trainer. Advantages are those of
    each response's first token."""
    padded = Padded.of(case)
    self = _trainer(
        case,
        loss_type=loss_type,
        epsilon_low=objective.clip_ratio_low,
        epsilon_high=objective.clip_ratio_high,
        beta=objective.kl_loss_coef,
        importance_sampling_level="sequence" if objective.loss_mode == "gspo" else "token",
        max_completion_length=max_completion_length,
        entropy_coef=objective.entropy_coeff,
        _entropy_bonus_enabled=objective.entropy_coeff > 0,
        use_vllm=weights is not None,
        current_gradient_accumulation_steps=accumulation,
    )
    self.args.use_bias_correction_kl = use_bias_correction_kl
    self.args.delta = objective.clip_ratio_c if objective.loss_mode == "vanilla" else None
    self.args.sapo_temperature_pos, self.args.sapo_temperature_neg = objective.tau_pos, objective.tau_neg
    entropies = padded(case.old if entropy is None else entropy)
    self._get_per_token_logps_and_entropies = lambda *arguments, **named: (padded(new), entropies, None)
    self.accelerator.sync_gradients = True
    width = padded.mask.shape[1]
    nothing = torch.zeros(case.count, 0, dtype=torch.int64)
    inputs: dict[str, Any] = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros(case.count, width, dtype=torch.int64),
        "completion_mask": padded.mask,
        "advantages": first(case.advantages),
        "old_per_token_logps": padded(case.old),
        "old_logps": torch.stack([document.sum() for document in case.old]),
        "ref_per_token_logps": padded(case.reference),
        "num_items_in_batch": padded.mask.sum(),
        "importance_sampling_ratio": None if weights is None else padded(weights),
    }
    with float64_by_default():
        loss: Tensor = (trl().rloo_loss if loss_type == "rloo" else trl().loss)(self, None, inputs)
    return loss


def first(documents: Sequence[Tensor]) -> Tensor:
    """The first number of each document, 0 of an empty one: (N,)."""
    return torch.stack([each[0] if len(each) else torch.zeros((), dtype=torch.float64) for each in documents])


def trl_kto(
    answers: Sequence[tuple[Tensor, Tensor]],
    mismatched: Sequence[tuple[Tensor, Tensor]],
    labels: Sequence[bool],
    *,
    beta: float,
    weights: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """The loss of KTOTrainer for one micro-batch. The policy's and the reference's log-probs of each answer."""
    method = taken_out("trl", "trl/trainer/kto_trainer.py", "KTOTrainer._compute_loss", F=functional)
    width = max(len(own) for own, _ in answers)
    numbers = torch.stack([functional.pad(own, (0, width - len(own))) for own, _ in answers])
    nothing = torch.zeros_like(numbers)
    self = SimpleNamespace(
        **{"model": SimpleNamespace(training=False), "calculate_KL": True, "precompute_ref_logps": True},
        **{"aux_loss_enabled": False, "loss_type": "kto", "beta": beta, "_metrics": {"eval": defaultdict(list)}},
        **{"desirable_weight": weights[0], "undesirable_weight": weights[1], "_total_train_tokens": 0},
        accelerator=SimpleNamespace(device="cpu", gather_for_metrics=lambda x: x),
        _compute_kl_logps=lambda model, batch: torch.stack([own.sum() for own, _ in mismatched]),
    )
    places = torch.zeros(len(answers), width + 1, dtype=torch.int64)
    batch = {
        "label": torch.tensor(labels),
        "input_ids": places,
        "completion_mask": torch.ones_like(places),
        "ref_logps": torch.stack([frozen.sum() for _, frozen in answers]),
        "ref_KL_logps": torch.stack([frozen.sum() for _, frozen in mismatched]),
    }
    outputs = SimpleNamespace(log_probs=numbers, entropy=nothing, mean_logits=nothing)
    loss: Tensor = method(self, lambda **_: outputs, batch, False)
    return loss
