"""Names metrics: the canonical name of what each framework calls a loss, a norm, a rate or a reward.

Where one framework has several quantities that another has once, each keeps its own canonical name: a policy loss is
not a language-modelling loss, and the KL divergence from the reference not the one from the rollout's policy. A column
that looks like a loss, norm, reward or rate and is not in the table keeps its own name, and is compared under it. Other
columns, such as times and memory, are not compared, because two honest runs need not agree in them.

Names are compared without case, and with ``_`` for spaces, dots and hyphens.

Sources: Hugging Face Trainer and its integrations (transformers/trainer.py, integrations/integration_utils.py), TRL
(trl/trainer/grpo_trainer.py, ppo_trainer.py), verl (verl/workers/actor, verl/trainer/ppo/metric_utils.py,
verl/trainer/sft_trainer.py), OpenRLHF (openrlhf/trainer), DeepSpeed's monitor (deepspeed/runtime/engine.py),
Megatron-LM (megatron/training/training.py), torchtitan (torchtitan/components/metrics.py).
"""

import re
from typing import NamedTuple

EVALUATION = "eval_"  # of metrics that a log may have before its first step of training, and not at every step

STEP = (
    "global_step",  # a step beside it may begin again in each epoch
    "train/global_step",
    "training/global_step",
    "trainer/global_step",
    "eval/global_step",
    "global_step/max_steps",
    "step",
    "current_steps",
    "iteration",
    "iter",
    "iter_num",
    "steps",
    "train/step",
    "training/step",
    "trainer/step",
    "train_step",
    "training_step",
    "trainer_step",
    "optimizer_step",
    "optim_step",
    "opt_step",
    "update_step",
    "global_steps",
    "current_step",
    "cur_step",
    "step_num",
    "num_updates",
    "n_updates",
    "update",
    "updates",
    "iterations",
    "iters",
    "train_iter",
    "_step",
)
"""Names of the counter of optimizer steps; where a row has several, the first of these counts."""

COUNTS_STEPS = re.compile(r"(?<![a-z])(step|iter|iteration|update|batch)(s|_?(idx|id|no|num|number|count))?$")

TOKENS = (
    "tokens",
    "tokens_seen",
    "ntokens_seen",
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
        "lm_loss",
        "gpt_loss",
        "loss_metrics/global_avg_loss",
        "reduced_train_loss",
        "reduced_llm_loss",
        "loss/reduced_llm_loss",
        "train_loss_step",
        "actor/loss",
    ),
    "policy_loss": ("policy_loss", "actor/pg_loss", "pg_loss", "loss/policy_avg"),
    "critic_loss": ("critic_loss", "critic/vf_loss", "vf_loss", "value_loss", "loss/value_avg"),
    "grad_norm": ("grad_norm", "gradient_norm", "actor/grad_norm", "actor_grad_norm", "gnorm", "optim/grad_norm"),
    "critic_grad_norm": ("critic_grad_norm", "critic/grad_norm"),
    "lr": ("lr", "learning_rate", "actor/lr", "actor_lr", "train/samples/lr", "lr_adamw", "lr_pg_0"),
    "critic_lr": ("critic_lr", "critic/lr"),
    "reward": (
        "reward",
        "reward_mean",
        "mean_reward",
        "avg_reward",
        "critic/score/mean",
        "objective/scores",
        "rollout/raw_reward",
    ),
    "reward_after_kl": ("reward_after_kl", "critic/rewards/mean", "objective/rlhf_reward"),
    "return": ("return", "returns", "critic/returns/mean"),
    "kl": ("kl", "actor/kl_loss", "kl_loss", "actor/reward_kl_penalty", "objective/kl"),
    "ppo_kl": ("ppo_kl", "actor/ppo_kl", "approx_kl", "policy/approxkl_avg"),
    "entropy": ("entropy", "actor/entropy", "actor/entropy_loss", "entropy_loss", "objective/entropy"),
    "clip_fraction": (
        "clip_fraction",
        "actor/pg_clipfrac",
        "pg_clipfrac",
        "clip_ratio",
        "clip_ratio/region_mean",
        "policy/clipfrac_avg",
    ),
    "response_length": (
        "response_length",
        "response_length/mean",
        "completions/mean_length",
        "completion_length",
        "mean_generation_length",
        "rollout/response_lengths",
    ),
    "eval_reward": ("eval_reward", "eval/reward"),
    "eval_loss": (
        "eval_loss",
        "eval/loss",
        "val/loss",
        "val_loss",
        "validation_loss",
        "validation_metrics/loss",
        "lm_loss_validation",
        "eval/lm_loss_value",
        "eval/gpt_loss",
    ),
}

SUMMARY = "train/train_loss"  # the mean of a whole run, which the Trainer's integrations log at its end
# A file of one metric may not name it, and has values.
LOOKS = re.compile(r"loss|norm(?![a-z])|(?<![a-z])(rewards?|scores?|lr|rate)(?![a-z])|^value$")
LOOKS_NOT = re.compile(
    r"tim(e|ing)|second|(?<![a-z])(per|sec|mem\w*|min|max|std|count|num\w*|scale|tokens?|perf|throughput)(?![a-z])"
    r"|(sample|frame|hit|success|error)[a-z]*_rate"
)
_PLACES = {alias: (name, rank) for name, aliases in METRICS.items() for rank, alias in enumerate(aliases)}
_UNIT = re.compile(r"\((1e-\d+)\)$")  # verl writes lr(1e-3):0.02 of a learning rate of 2e-5
LONGEST_NAME = 200


class Place(NamedTuple):
    """What a log's own name stands for.

    rank: of two names of one metric in a log the lower rank counts. unit: a value times it is in the canonical unit.
    """

    metric: str
    rank: int
    unit: float


def plain_name(own: str) -> str:
    return re.sub(r"[\s_.\-]+", "_", own.strip().lower())


def canonical(own: str) -> Place | None:
    """Give the metric that a log's own name stands for: of the table, or its own if it looks like one; else None."""
    if len(own) > LONGEST_NAME or own.strip().lower() == SUMMARY:
        return None
    unit = 1.0
    own = own.strip().lower()
    if found := _UNIT.search(own):
        own, unit = own[: found.start()], float(found[1])
    name = plain_name(own)
    short = name.removeprefix("train/")
    if place := _PLACES.get(name) or _PLACES.get(short):
        return Place(*place, unit)
    return Place(short, 0, unit) if LOOKS.search(short.replace("_", "/")) and not LOOKS_NOT.search(short) else None


def is_cost(own: str) -> bool:
    """Tell whether a column has a time, a memory, a rate of tokens, or a spread: what two honest runs differ in."""
    return bool(LOOKS_NOT.search(plain_name(own)))


OF_RANK = " of "  # between a metric and the rank whose own numbers a curve has


def is_known(metric: str) -> bool:
    return metric.partition(OF_RANK)[0] in METRICS


def is_of_rank(metric: str) -> bool:
    """Tell whether a curve holds the numbers of one rank, such as ``loss of rank 3``."""
    return OF_RANK in metric


def is_evaluation(metric: str) -> bool:
    return metric.startswith((EVALUATION, "eval/", "val/", "val_", "validation"))


def is_loss(metric: str) -> bool:
    """Tell whether a metric is a loss of training, of any kind."""
    return "loss" in metric and not is_evaluation(metric)


def is_rate(metric: str) -> bool:
    """Whether a metric follows from the configuration alone, and is the same to the last digit that a log prints."""
    return bool(re.search(r"(?<![a-z])(lr|learning_rate)(?![a-z])", metric))


def of_any_size(metric: str) -> bool:
    """Whether a metric may be as small as it likes; the others are of order one, or differences of such numbers."""
    return is_rate(metric) or "norm" in metric


RATIOS = ("kl", "ppo_kl", "clip_fraction")


def is_ratio(metric: str) -> bool:
    """Tell whether a metric compares two policies: its numbers are small, and their noise is large beside them."""
    return metric.partition(OF_RANK)[0] in RATIOS
