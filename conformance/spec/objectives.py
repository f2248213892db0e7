"""Configures what a training step minimises: SFT, GRPO and PPO, with the names and the defaults of verl.

Losses of preferences are in conformance.spec.offline.

A rollout is frozen: prompts, responses, rewards and the log-probs of the inference engine that sampled the responses
come from a file. Everything else is computed twice, independently (impl/objectives and conformance/oracle), in the
order of the frameworks: log-probs and values of the whole rollout before its first update, rewards and advantages from
these, then ``ppo_epochs`` passes over the ``mini_batches`` of the rollout, with one update per mini-batch.

Conventions, where verl, TRL and OpenRLHF differ (docs/explanations/objectives.md has the table):

* Denominators count the whole mini-batch, over all ranks and micro-batches; there are no means of means.
* A response without tokens counts in the statistics of its group, but in no mean over tokens or sequences.
* Statistics over tokens (whitening) are computed over the whole rollout.
* No model runs with dropout, not even in updates: the ratio has to compare two policies, not two dropout masks.

A scenario selects an objective by ``[objective] kind = "sft"``. Objectives are a tagged union that can be extended:
``kind`` is the name of a built-in objective, or ``module:Class`` of another one. The class holds only configuration and
declarations. The loss is implemented twice, independently, in conformance/oracle/objectives.py and in
impl/objectives/policy_gradient.py, each with a table by kind. If one side does not know an objective, this is an
error before anything runs, never a silent SFT.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from conformance.core.errors import STRICT, UsageError, explain, one_line, shown
from conformance.spec.batch import Batch
from conformance.spec.observables import (
    CONFIGURATION,
    CRITIC,
    GENERATORS,
    LOGPROBS,
    LOSS,
    POLICY,
    REFERENCE,
    TOKEN_COUNT,
    Observable,
    Reads,
    Role,
    curve,
    loaded_observables,
    rollout_routing_observable,
    routing_observables,
    rows,
    scalar,
    terms_of,
    trained_observables,
)
from conformance.spec.offline import PREFERENCES, SUPERVISED

AdvantageEstimator = Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
# Each is a function in the LOSS_MODES of the oracle and in those of impl.
LossMode = Literal["vanilla", "gspo", "cispo", "sapo", "geo_mean"]
LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlEstimator = Literal["kl", "abs", "mse", "low_var_kl"]
DiscountOver = Literal["trained-tokens", "all-tokens"]
Coefficient = Annotated[float, Field(strict=True, ge=0, le=1000)]
Positive = Annotated[float, Field(strict=True, gt=0, le=1e6)]
Clip = Annotated[float, Field(strict=True, gt=0, le=100)]
Count = Annotated[int, Field(strict=True, ge=1, le=1000)]
Discount = Annotated[float, Field(strict=True, ge=0, le=1)]

REFERENCE_KL = "reference_kl"  # the estimated KL to the reference of each token, in the loss


# The quantities that decide an update. A cell without any other quantity of its objective is partly observed.
_OF_CRITIC = ("critic.old_value", "return", "critic.value", "critic.loss")
DECISIVE = frozenset(("old_logprob", "advantage", "logprob", "token_count", "loss", *_OF_CRITIC))

# The metrics that verl prints.
METRICS = (
    replace(curve("ppo_kl", "policy metrics", "KL to the old policy"), mean_of="approx_kl"),
    replace(curve("ratio_mean", "policy metrics", "mean ratio"), mean_of="ratio"),
    replace(curve("ratio_max", "policy metrics", "largest ratio"), max_of="ratio"),
    curve("pg_clipfrac", "policy metrics", "clip fraction"),
    curve("pg_clipfrac_lower", "policy metrics", "dual-clip fraction"),
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PolicyGradient:
    """Configures how GRPO and PPO update a policy from advantages.

    kind: the name of the objective.
    temperature: logits are divided by it for log-probs and entropy, in the policy and in the reference.
    mini_batches: number of updates into which one pass over a rollout is divided.
    ppo_epochs: number of passes over each rollout.
    recompute_old_logprobs: if true, the policy computes the old log-probs of a rollout before its first update.
        Otherwise the old log-probs are those of the inference engine that sampled it.
    clip_ratio_low, clip_ratio_high: the ratio is clipped to [1 - low, 1 + high] (Schulman et al., arXiv 1707.06347;
        with different bounds: DAPO, arXiv 2503.14476).
    clip_ratio_c: dual clip (Ye et al., arXiv 1912.09729): with a negative advantage A the loss is at most -A c; None
        for no such bound.
    loss_mode: ``vanilla`` takes the ratio of each token, ``gspo`` that of the sequence (Zheng et al., arXiv 2507.18071,
        the token variant of section 4.3), ``cispo`` clips the ratio of each token and takes it as a constant weight of
        the log-prob (MiniMax, arXiv 2506.13585, equation 4), ``sapo`` has a smooth gate instead of a clip (Gao et al.,
        arXiv 2511.20347, equation 6), ``geo_mean`` takes the geometric mean of the clipped ratios of the response's
        tokens, whose logarithms are clipped to [-low, high] (GMPO, arXiv 2507.20673, equation 4). Only ``vanilla`` has
        dual clip.
    tau_pos, tau_neg: temperatures of the gate of ``sapo`` for tokens with positive advantages, and for others.
    loss_agg_mode, loss_scale_factor: how the losses of tokens become one number: their mean over all tokens, or the
    mean over sequences
        of their sum, their mean, or their sum divided by the factor (Dr. GRPO, arXiv 2503.20783).
    entropy_coeff: the mean entropy, aggregated like the loss, is subtracted with this coefficient.
    kl_loss_coef, kl_loss_type: a KL estimate against the reference is added to the loss (Schulman,
        http://joschu.net/blog/kl-approx.html: ``kl`` is k1, ``mse`` k2, ``low_var_kl`` k3).
    kl_coef, kl_penalty: a KL estimate of the old log-probs against the reference is subtracted from each token's
        reward.
    discount_over: the tokens that a discount counts, in a response with tokens that are not trained on, such as the
        answers of tools. ``trained-tokens`` passes over the others, as verl and TRL do; with ``all-tokens`` they are
        steps without a reward whose value is 0, as in OpenRLHF.
    rollout_is_threshold: each token's policy loss is multiplied by the weight exp(old - sampled log-prob), truncated
        at this threshold (truncated importance sampling); None: no weights.
    rollout_is: whether the weight is that of the ``token``, or the product of the weights of its ``sequence``.
    rollout_is_mask: whether a weight above the threshold becomes 0 instead of the threshold (masked importance
        sampling). Denominators do not change.
    replay_sampling_mask: whether the distributions of policy and reference are those over the tokens that the sampler
        kept by top-k and top-p, which the column ``sampling_mask`` of the rollout lists for each token of a response.
        Log-probs are then log p - log of the sum of p over the kept tokens, as those of a sampler that cut its
        distribution (vLLM's processed_logprobs and sampling mask, https://github.com/vllm-project/vllm/pull/49577).
    overlong_length, overlong_buffer: a response of more than length - buffer trained tokens loses (tokens - length +
        buffer) / buffer of its reward, at most 1 (DAPO, arXiv 2503.14476, equation 13); None: no penalty.
    """

    temperature: Positive = 1.0
    mini_batches: Count = 1
    ppo_epochs: Count = 1
    recompute_old_logprobs: bool = True
    clip_ratio_low: Clip = 0.2
    clip_ratio_high: Clip = 0.2
    clip_ratio_c: Annotated[float, Field(strict=True, gt=1, le=1000)] | None = 3.0
    loss_mode: LossMode = "vanilla"
    tau_pos: Positive = 1.0
    tau_neg: Positive = 1.05
    loss_agg_mode: LossAggMode = "token-mean"
    loss_scale_factor: Positive | None = None
    entropy_coeff: Coefficient = 0.0
    kl_loss_coef: Coefficient = 0.0
    kl_loss_type: KlEstimator = "low_var_kl"
    kl_coef: Coefficient = 0.0
    kl_penalty: KlEstimator = "kl"
    discount_over: DiscountOver = "trained-tokens"
    rollout_is_threshold: Positive | None = None
    rollout_is: Literal["token", "sequence"] = "token"
    rollout_is_mask: bool = False
    replay_sampling_mask: Annotated[bool, Field(strict=True)] = False
    overlong_length: Count | None = None
    overlong_buffer: Count | None = None

    reads: ClassVar[Reads] = "rollouts"
    disable_dropout: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if (self.loss_agg_mode == "seq-mean-token-sum-norm") != (self.loss_scale_factor is not None):
            raise ValueError(
                "loss_scale_factor is the divisor of loss_agg_mode 'seq-mean-token-sum-norm' and of no other; give both"
            )
        if (self.overlong_length is None) != (self.overlong_buffer is None):
            raise ValueError("overlong_length and overlong_buffer are one penalty; give both, or none")
        if self.rollout_is_threshold is None and (self.rollout_is_mask or self.rollout_is != "token"):
            raise ValueError("rollout_is and rollout_is_mask say how weights are bounded; give rollout_is_threshold")

    @property
    def roles(self) -> tuple[Role, ...]:
        return (REFERENCE, POLICY) if self.has_reference else (POLICY,)

    @property
    def rollout_roles(self) -> tuple[Role, ...]:
        """Returns the roles whose models run over a rollout before its first update, in evaluation mode."""
        return tuple(role for role in self.roles if role != POLICY or self.recompute_old_logprobs)

    @property
    def steps_per_rollout(self) -> int:
        return self.mini_batches * self.ppo_epochs

    @property
    def has_reference(self) -> bool:
        return bool(self.kl_coef or self.kl_loss_coef)

    def observables(self) -> tuple[Observable, ...]:
        old = (rows("old_logprob", "old log-probs"),) if self.recompute_old_logprobs else ()
        reference = (rows("reference.logprob", "reference log-probs"),) if self.has_reference else ()
        kl = (replace(rows(REFERENCE_KL, "loss"), scale="logprob"),) if self.kl_loss_coef else ()
        means = {curve("entropy_loss", "loss", "entropy"): "entropy"}
        if self.kl_loss_coef:
            means[curve("kl_loss", "loss", "KL to the reference")] = REFERENCE_KL
        is_mean = self.loss_agg_mode == "token-mean"
        every = (
            *old,
            *reference,
            *self.estimate_observables(),
            rows("advantage", "advantages", column="advantages"),
            LOGPROBS,
            rows("entropy", "entropy"),
            replace(rows("approx_kl", "ratios"), scale="logprob"),
            rows("ratio", "ratios"),
            TOKEN_COUNT,
            replace(TOKEN_COUNT, key="sequence_count"),
            *kl,
            *(replace(o, mean_of=of) if is_mean else replace(o, sum_of=terms_of(o.key)) for o, of in means.items()),
            # Their terms cancel out, so the error is relative to the size of the terms, not of the sum.
            *(replace(o, scale="loss_scale", sum_of=terms_of(o.key)) for o in (scalar("pg_loss", "loss"), LOSS)),
            *METRICS,
            *self.critic_observables(),
        )
        return tuple(replace(o, required=o.key in DECISIVE) for o in every)

    def estimate_observables(self) -> tuple[Observable, ...]:
        """Returns the observables of a critic's pass over a rollout before its first update."""
        return ()

    def critic_observables(self) -> tuple[Observable, ...]:
        """Returns the observables of a critic's update."""
        return ()

    def annotate(self, batches: list[Batch]) -> list[Batch]:
        return batches


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Grpo(PolicyGradient):
    """Configures group-relative policy optimisation (Shao et al., arXiv 2402.03300) and similar methods without critic.

    adv_estimator: ``grpo``; ``rloo`` (Ahmadian et al., arXiv 2402.14740); ``reinforce_plus_plus`` and
        ``reinforce_plus_plus_baseline`` (Hu, arXiv 2501.03262).
    norm_adv_by_std_in_grpo: whether ``grpo`` divides by the group's standard deviation (n - 1); Dr. GRPO does not.
    gamma: discount of ``reinforce_plus_plus``.
    filter_groups: whether groups whose responses all have the same reward, before penalties, are left out of
        everything: losses, denominators, whitening (dynamic sampling: DAPO, arXiv 2503.14476, equation 11). There are
        no further responses in their place.
    """

    kind: Literal["grpo"] = "grpo"
    adv_estimator: AdvantageEstimator = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    gamma: Discount = 1.0
    filter_groups: Annotated[bool, Field(strict=True)] = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Ppo(PolicyGradient):
    """Configures proximal policy optimisation (arXiv 1707.06347) with a critic.

    Advantages are estimated by generalised advantage estimation (Schulman et al., arXiv 1506.02438).

    gamma, lam: the discount, and the lambda of generalised advantage estimation (0: one step, 1: the whole return).
    cliprange_value: the loss of a value is the larger of two losses: of the value, and of the value clipped to
        [old value - cliprange_value, old value + cliprange_value].
    """

    kind: Literal["ppo"] = "ppo"
    gamma: Discount = 1.0
    lam: Discount = 1.0
    cliprange_value: Positive = 0.5

    @property
    def roles(self) -> tuple[Role, ...]:
        return (*super().roles, CRITIC)

    def estimate_observables(self) -> tuple[Observable, ...]:
        explained = curve("critic.explained_var", "returns", "explained variance", printed="vf_explained_var")
        explained = replace(explained, explains="return", made_of="critic.old_value")
        return (rows("critic.old_value", "old values"), rows("return", "returns"), explained)

    def critic_observables(self) -> tuple[Observable, ...]:
        loss = replace(LOSS, key="critic.loss", stage="critic loss", column="critic loss")
        loss = replace(loss, made_of="critic.value", one_direction=True)
        clipped = curve("critic.clipfrac", "critic metrics", "critic clip fraction", printed="vf_clipfrac")
        return (rows("critic.value", "values"), loss, clipped)


class Objective(Protocol):
    """Defines the protocol of an objective: a frozen pydantic dataclass with a field ``kind``.

    reads: what the data set holds: ``samples`` (pairs of texts), ``preferences`` (a chosen and a rejected answer to a
        prompt, two consecutive documents), ``labelled answers`` (an answer, and beside it the same prompt with the
        next answer to another prompt) or ``rollouts`` (conformance.data.rollouts). One that reads rollouts also has
        ``rollout_roles``, the roles whose models run over each before its first update.
    disable_dropout: whether models run without the dropout of their configuration, also in updates.
    """

    reads: ClassVar[Reads]
    disable_dropout: ClassVar[bool]

    @property
    def kind(self) -> str: ...

    @property
    def roles(self) -> tuple[Role, ...]:
        """Returns the roles of the cell's models, frozen models first. The role of a policy is POLICY."""
        ...

    def observables(self) -> tuple[Observable, ...]:
        """Returns the observables of forward passes and losses, in causal order.

        The suite adds those of weights, gradients and updates (``all_observables``).
        """
        ...

    def annotate(self, batches: list[Batch]) -> list[Batch]:
        """Returns the batches with the columns that the objective adds. The result depends only on the batches."""
        ...


BUILT_IN: dict[str, type[Any]] = {**SUPERVISED, "grpo": Grpo, "ppo": Ppo, **PREFERENCES}


def all_observables(objective: Objective, *, scaled: bool = False, routed: bool = False) -> tuple[Observable, ...]:
    """Returns all observables of a cell, in causal order.

    These are configuration, weights as loaded, the objective's own (outputs, losses), then gradients, norm and update
    of each trained model, and random generators last: no number of a cell depends on them. ``scaled``: whether the
    loss scale is judged (``Scenario.judged_loss_scale``). ``routed``: whether routers are judged
    (``conformance.oracle.role_model.is_routed``).
    """
    loaded = [o for role in objective.roles for o in loaded_observables(role.prefix, trained=role.trained)]
    trained = [o for role in objective.roles if role.trained for o in trained_observables(role.prefix, scaled=scaled)]
    rollout_roles = getattr(objective, "rollout_roles", ()) if routed else ()
    rollout_routers = [rollout_routing_observable(role.prefix, trained=role.trained) for role in rollout_roles]
    routers = [o for role in objective.roles if role.trained for o in routing_observables(role.prefix) if routed]
    return (CONFIGURATION, *loaded, *rollout_routers, *routers, *objective.observables(), *trained, GENERATORS)


def parse_objective(values: Any) -> Objective:
    """Builds an objective from a dict with a ``kind`` (default ``sft``). Raises UsageError for invalid values."""
    if not isinstance(values, dict):
        if hasattr(type(values), "roles"):  # already an objective
            built: Objective = values
            return built
        raise UsageError(f'[objective] must be a table with a kind, such as kind = "sft", got {shown(values)}')
    kind = values.get("kind", "sft")
    try:
        objective: Objective = TypeAdapter(objective_class(kind)).validate_python({**values, "kind": kind})
    except ValidationError as error:
        raise explain(error, source=f"[objective] of kind {shown(kind)}", what="objective") from None
    return objective


def objective_to_json(objective: Objective) -> dict[str, Any]:
    """Returns plain JSON values, which ``parse_objective`` reads back."""
    values: dict[str, Any] = TypeAdapter(type(objective)).dump_python(objective, mode="json")
    return values


def check_imported(kind: Any) -> None:
    """Raises UsageError for an objective whose module this process has not imported: a record runs no code."""
    module, is_own, _ = str(kind).partition(":")
    if is_own and kind not in BUILT_IN and module not in sys.modules:
        raise UsageError(
            f"the record names the objective {shown(kind)}, and no module is imported because a record names it; if "
            f"the objective is yours, add --objective {shown(kind)}"
        )


def known_kinds(table: Sequence[str] | dict[str, Any], objective: Objective, *, who: str) -> None:
    """Raises UsageError if the objective's kind is not in ``table``. ``who``: whose table it is, for the message."""
    if objective.kind not in table:
        raise UsageError(
            f"{who} does not know the objective {objective.kind!r} (known: {', '.join(table)}); register its functions "
            f"there, or use another kind"
        )


def objective_class(kind: Any) -> type[Any]:
    """Returns the class of a kind; imports the module of ``module:Class``. Raises UsageError."""
    if isinstance(kind, str) and kind in BUILT_IN:
        return BUILT_IN[kind]
    module, _, name = str(kind).partition(":")
    if not module or not name:
        raise UsageError(f"unknown objective {shown(kind)}; known: {', '.join(BUILT_IN)}, or module:Class of your own")
    try:
        found: type[Any] = getattr(import_module(module), name)
    except Exception as error:  # importing a user's module may raise anything
        raise UsageError(
            f"objective {shown(kind)} cannot be imported ({one_line(error)}); check the spelling and PYTHONPATH"
        ) from None
    if not isinstance(found, type) or not hasattr(found, "roles"):
        raise UsageError(f"{shown(kind)} is not the class of an objective, see conformance/spec/objectives.py")
    return found
