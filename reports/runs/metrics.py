"""The canonical names of metrics, and what each framework calls them: one table.

Only what is in the table is compared, because two logs that share a name such as ``time`` or ``memory`` need not agree
in it. Where one framework has several quantities that another has once, each keeps its own canonical name: a policy
loss is not a language-modelling loss, and the KL divergence from the reference not the one from the roll-out's policy.

Sources: Hugging Face Trainer and its integrations (transformers/trainer.py, integrations/integration_utils.py), TRL
(trl/trainer/grpo_trainer.py, ppo_trainer.py), verl (verl/workers/actor, verl/trainer/ppo/metric_utils.py,
verl/trainer/sft_trainer.py), OpenRLHF (openrlhf/trainer), DeepSpeed's monitor (deepspeed/runtime/engine.py),
Megatron-LM (megatron/training/training.py), torchtitan (torchtitan/components/metrics.py).
"""

import re

EVALUATION = "eval_"  # of metrics that a log may have before its first step of training, and not at every step

STEP = (
    "step",
    "global_step",
    "train/global_step",
    "training/global_step",
    "trainer/global_step",
    "eval/global_step",
    "iteration",
    "iter",
    "steps",
    "_step",
)
"""Names of the counter of optimizer steps; where a row has several, the first of these counts."""

TOKENS = (
    "tokens",
    "tokens_seen",
    "ntokens_seen",
    "consumed tokens",
    "consumed_tokens",
    "num_input_tokens_seen",
    "num_tokens",
    "total_tokens",
)

METRICS: dict[str, tuple[str, ...]] = {
    "loss": (
        "loss",
        "train_loss",
        "train/samples/train_loss",
        "training_loss",
        "lm loss",
        "lm_loss",
        "gpt_loss",
        "loss_metrics/global_avg_loss",
    ),
    "policy_loss": ("policy_loss", "actor/pg_loss", "pg_loss", "loss/policy_avg"),
    "critic_loss": ("critic_loss", "critic/vf_loss", "vf_loss", "value_loss", "loss/value_avg"),
    "grad_norm": ("grad_norm", "gradient_norm", "grad norm", "grad-norm", "actor/grad_norm"),
    "critic_grad_norm": ("critic_grad_norm", "critic/grad_norm"),
    "lr": ("lr", "learning_rate", "learning rate", "learning-rate", "actor/lr", "actor_lr", "train/samples/lr"),
    "critic_lr": ("critic_lr", "critic/lr"),
    "reward": ("reward", "reward_mean", "mean_reward", "critic/score/mean", "objective/scores"),
    "reward_after_kl": ("reward_after_kl", "critic/rewards/mean", "objective/rlhf_reward"),
    "return": ("return", "returns", "critic/returns/mean"),
    "kl": ("kl", "actor/kl_loss", "kl_loss", "actor/reward_kl_penalty", "objective/kl"),
    "ppo_kl": ("ppo_kl", "actor/ppo_kl", "approx_kl", "policy/approxkl_avg"),
    "entropy": ("entropy", "actor/entropy", "actor/entropy_loss", "entropy_loss", "objective/entropy"),
    "clip_fraction": (
        "clip_fraction",
        "actor/pg_clipfrac",
        "clip_ratio",
        "clip_ratio/region_mean",
        "policy/clipfrac_avg",
    ),
    "response_length": ("response_length", "response_length/mean", "completions/mean_length", "completion_length"),
    "eval_reward": ("eval_reward", "eval/reward"),
    "eval_loss": (
        "eval_loss",
        "eval/loss",
        "val/loss",
        "val_loss",
        "validation_loss",
        "validation_metrics/loss",
        "lm loss validation",
        "eval/gpt_loss",
    ),
}

OF_ANY_SIZE = ("grad_norm", "critic_grad_norm", "lr", "critic_lr")
"""Metrics that may be as small as they like; the others are of order one, or differences of such numbers."""

EXACT = ("lr", "critic_lr")
"""Metrics that follow from the configuration alone, and are the same to the last digit that a log prints."""

_PLACES = {alias: (name, rank) for name, aliases in METRICS.items() for rank, alias in enumerate(aliases)}
SUMMARY = "train/train_loss"  # the mean of a whole run, which the Trainer's integrations log at its end
_UNIT = re.compile(r"\((1e-\d+)\)$")  # verl writes lr(1e-3):0.02 of a learning rate of 2e-5


def canonical(own: str) -> tuple[str, int, float] | None:
    """A log's own name as (canonical name, rank, unit); None for what is not compared.

    Of two names of one metric in a log the lower rank counts. A value times its unit is in the canonical unit.
    """
    name, unit = own.strip().lower(), 1.0
    if name == SUMMARY:
        return None
    found = _UNIT.search(name)
    if found:
        name, unit = name[: found.start()], float(found[1])
    place = _PLACES.get(name) or _PLACES.get(name.removeprefix("train/"))
    return (*place, unit) if place else None
