"""Computes the advantages of a rollout and sums up the loss of each response for GRPO and PPO, from the papers.

The oracle shares no code with impl/objectives (docs/principles.md). It goes response by response, with the sums of the
papers. All numbers are in ``stable``, the dtype of softmax and losses. Columns of documents hold Python floats, so they
lose no precision.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from conformance.oracle.loss_terms import (
    LOSS_MODES,
    Earlier,
    Term,
    Totals,
    bounds_of_log_ratio,
    divergence,
    entropies,
    importance,
    log_weight,
    of_targets,
    target_logprobs,
    target_positions,
    to_clip_of_kl,
    to_clips_of_value,
    to_nearest,
    value_losses,
    values_of,
)
from conformance.oracle.primitives import HONEST, Variant
from conformance.spec.batch import GIVEN, Batch, Document
from conformance.spec.objectives import REFERENCE_KL, Grpo, PolicyGradient, Ppo, terms_of
from conformance.spec.observables import CRITIC, POLICY, REFERENCE

Responses = list[list[Tensor]]  # by mini-batch and document: one number for each token of the response


class ResponseFunctions:
    """Computes what GRPO and PPO have in common, one response after another."""

    variant: Variant = HONEST

    def __init__(self, objective: PolicyGradient) -> None:
        self.objective = objective

    # --- before the first update of a rollout -------------------------------------------------------------------------

    def needs_rollout_pass(self, model: str) -> bool:
        return any(role.name == model for role in self.objective.rollout_roles)

    def rollout_numbers(self, model: str, output: Tensor, document: Document, *, stable: torch.dtype) -> Tensor:
        if model == CRITIC.name:
            return values_of(output, document, stable=stable)
        return target_logprobs(output, document, stable=stable, temperature=self.objective.temperature)

    def annotate(self, batches: Sequence[Batch], found: Mapping[str, Responses], *, stable: torch.dtype) -> list[Batch]:
        batches = self.sampled(batches)
        flat = [document for batch in batches for document in batch.documents]
        known: dict[str, list[Any]] = {
            model: [one[: sum(d.targets)] for d, one in zip(flat, (n for batch in of for n in batch), strict=True)]
            for model, of in found.items()
        }
        sampled = [of_targets(d, "rollout_logprob", stable) for d in flat]
        old = known.get(POLICY.name, sampled)
        columns: dict[str, list[Tensor]] = {"old_logprob": old}
        if self.objective.rollout_is_threshold is not None:
            columns["importance"] = [importance(o, s, self.objective) for o, s in zip(old, sampled, strict=True)]
        if REFERENCE.name in known:
            columns["reference_logprob"] = known[REFERENCE.name]
        references = known.get(REFERENCE.name, [None] * len(flat))
        rewards = [self.rewards(self.score(d), o, r) for d, o, r in zip(flat, old, references, strict=True)]
        if GIVEN in flat[0].columns:
            rewards = [numbers + of_targets(d, GIVEN, stable) for d, numbers in zip(flat, rewards, strict=True)]
        groups = [int(one_number(d, "group")) for d in flat]
        columns |= self.advantages(flat, rewards, groups, known.get(CRITIC.name, []), stable)
        annotated = iter(
            replace(d, columns={**d.columns, **{k: _column(d, c[n]) for k, c in columns.items()}})
            for n, d in enumerate(flat)
        )
        made = [
            replace(b, rows=tuple(replace(r, documents=tuple(next(annotated) for _ in r.documents)) for r in b.rows))
            for b in batches
        ]
        return self.variant.rollout(made)

    def sampled(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Returns the mini-batches of a rollout with the responses that the objective trains on."""
        return batches

    def score(self, document: Document) -> float:
        """Returns the response's reward, less the penalty for its length: arXiv 2503.14476, equation 13."""
        reward, length, cache = one_number(document, "reward"), sum(document.targets), self.objective.overlong_buffer
        if self.objective.overlong_length is None or cache is None or length <= self.objective.overlong_length - cache:
            return reward
        if length > self.objective.overlong_length:
            return reward - 1
        return reward + (self.objective.overlong_length - cache - length) / cache

    def rewards(self, reward: float, old: Tensor, reference: Tensor | None) -> Tensor:
        """Returns each token's reward, (targets,): the response's at its last token, minus each token's penalty."""
        rewards = torch.zeros_like(old)
        if len(rewards):
            rewards[-1] = reward
        if self.objective.kl_coef:
            assert reference is not None
            rewards = rewards - self.objective.kl_coef * divergence(old - reference, self.objective.kl_penalty)
        return rewards

    def advantages(
        self,
        documents: list[Document],
        rewards: list[Tensor],
        groups: list[int],
        values: list[Tensor],
        stable: torch.dtype,
    ) -> dict[str, list[Tensor]]:
        """Returns ``advantage`` and, for PPO, ``value`` and ``return``: numbers for each token of each document."""
        raise NotImplementedError

    def in_steps(self, document: Document, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Returns numbers for each step of a discount, and which steps are those of target tokens.

        With ``all-tokens`` the tokens between two targets are steps, too, with the number 0.
        """
        places = target_positions(document)
        if self.objective.discount_over == "trained-tokens" or not len(places):
            return numbers, torch.ones(len(numbers), dtype=torch.bool)
        steps = torch.zeros(int(places[-1] - places[0]) + 1, dtype=numbers.dtype)
        is_target = torch.zeros(len(steps), dtype=torch.bool)
        steps[places - places[0]] = numbers
        is_target[places - places[0]] = True
        return steps, is_target

    def whitened(self, numbers: list[Tensor]) -> list[Tensor]:
        """Shifts numbers to mean 0 and scales them to variance 1, over all tokens of all responses."""
        every = torch.cat(numbers)
        scale = self.variant.whitening_variance(every.var(correction=1) + 1e-8, every).rsqrt()
        mean = self.variant.whitening_mean(every.mean(), every)
        return [(one - mean) * scale for one in numbers]

    # --- an update ----------------------------------------------------------------------------------------------------

    def totals(self, batch: Batch) -> dict[str, float]:
        lengths = [sum(document.targets) for document in batch.documents]
        return {
            "token_count": sum(lengths),
            "sequence_count": sum(length > 0 for length in lengths),
            "loss_scale": self._loss_scale(batch),
        } | self.summary(batch)

    def _loss_scale(self, batch: Batch) -> float:
        """Returns the mean |advantage| of the tokens: the size of the terms of a policy loss, which mostly cancel."""
        taken = [of_targets(document, "advantage", torch.float64).abs() for document in batch.documents]
        return torch.cat(taken).mean().item()

    def summary(self, batch: Batch) -> dict[str, float]:
        """Returns numbers of the batch that depend on no forward pass of this step."""
        return {}

    def term(
        self, model: str, output: Tensor, document: Document, *, totals: Totals, earlier: Earlier, stable: torch.dtype
    ) -> Term:
        if model == CRITIC.name:
            return self.of_critic(values_of(output, document, stable=stable), document, totals)
        temperature = self.objective.temperature
        logprobs = target_logprobs(output, document, stable=stable, temperature=temperature)
        entropy = entropies(output, document, stable=stable, temperature=temperature)
        return self.of_policy(logprobs, entropy, document, totals)

    def weight(self, length: int, totals: Totals) -> float:
        """Returns the factor of the loss of each token, for a response of this length."""
        sequences = totals["sequence_count"]
        match self.objective.loss_agg_mode:
            case "token-mean":
                return 1 / totals["token_count"]
            case "seq-mean-token-sum":
                return 1 / sequences
            case "seq-mean-token-mean":
                return 1 / sequences / self.variant.mean_count(length)
            case "seq-mean-token-sum-norm":
                assert self.objective.loss_scale_factor is not None
                return 1 / sequences / self.objective.loss_scale_factor

    def of_policy(self, logprobs: Tensor, entropy: Tensor, document: Document, totals: Totals) -> Term:
        """Computes the policy's term from log-probs and entropies of the response's tokens, (targets,) each."""
        o, stable = self.objective, logprobs.dtype
        old, advantage = (of_targets(document, name, stable) for name in ("old_logprob", "advantage"))
        policy = LOSS_MODES[o.loss_mode](logprobs, old, advantage, o)
        losses, ratio, clips = policy.losses, policy.ratio, {"ratio": policy.to_clip}
        if o.loss_mode == "cispo":
            clips["counted ratio"] = to_nearest(ratio.log(), *bounds_of_log_ratio(o))
        if o.rollout_is_threshold is not None:
            losses = losses * of_targets(document, "importance", stable)
            if o.rollout_is_mask and o.recompute_old_logprobs:  # others are 1, or bend at the threshold
                name = "importance" if o.rollout_is == "token" else "sequence importance"
                sampled = of_targets(document, "rollout_logprob", stable)
                clips[name] = log_weight(old, sampled, o) - math.log(o.rollout_is_threshold)
        mean = self.weight(len(losses), totals)
        weight, of_entropy = (_given(document, f"{name}_weight", mean) for name in ("token", "entropy"))
        rows = {"logprob": logprobs, "entropy": entropy, "ratio": ratio, "advantage": advantage}
        parts = {"pg_loss": weight * losses, "entropy_loss": of_entropy * entropy}
        parts["loss"] = parts["pg_loss"] - o.entropy_coeff * parts["entropy_loss"]
        if o.kl_loss_coef:
            reference = of_targets(document, "reference_logprob", stable)
            rows[REFERENCE_KL] = divergence(logprobs - reference, o.kl_loss_type)
            clips[REFERENCE_KL] = to_clip_of_kl(logprobs - reference, o.kl_loss_type)
            parts["kl_loss"] = weight * rows[REFERENCE_KL]
            parts["loss"] = parts["loss"] + o.kl_loss_coef * parts["kl_loss"]
        of_metric = _given(document, "metric_weight", 1 / totals["token_count"])
        means = {
            "ppo_kl": policy.approx_kl,
            "pg_clipfrac": policy.clipped.to(stable),
            "pg_clipfrac_lower": policy.clipped_lower.to(stable),
            "ratio_mean": ratio,
        }
        values = {key: terms.sum().item() for key, terms in parts.items()}
        values |= {key: (of_metric * numbers.sum()).item() for key, numbers in means.items()}
        rows |= {terms_of(key): terms for key, terms in parts.items()}
        rows |= {"approx_kl": policy.approx_kl, "old_logprob": old}
        if not o.recompute_old_logprobs:
            del rows["old_logprob"]
        if o.has_reference:
            rows["reference.logprob"] = of_targets(document, "reference_logprob", stable)
        highest = {"ratio_max": ratio.max().item()}
        return Term(loss=parts["loss"].sum(), values=values, rows=rows, highest=highest, clips=clips)

    def of_critic(self, values: Tensor, document: Document, totals: Totals) -> Term:
        """Computes the critic's term from its values at the response's tokens, (targets,)."""
        raise NotImplementedError


class GrpoFunctions(ResponseFunctions):
    """Computes advantages of GRPO (arXiv 2402.03300) and of similar estimators.

    Every token of a response has the response's advantage, except with ``reinforce_plus_plus``, which discounts.
    """

    objective: Grpo

    def sampled(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Takes the targets from groups whose rewards are equal (arXiv 2503.14476, equation 11)."""
        if not self.objective.filter_groups:
            return batches
        rewards: dict[float, list[float]] = {}
        for document in (document for batch in batches for document in batch.documents):
            given = of_targets(document, GIVEN, torch.float64).sum().item() if GIVEN in document.columns else 0.0
            rewards.setdefault(one_number(document, "group"), []).append(one_number(document, "reward") + given)
        without = {group for group, found in rewards.items() if len(found) > 1 and min(found) == max(found)}

        def filtered(document: Document) -> Document:
            is_out = one_number(document, "group") in without
            return replace(document, targets=(False,) * len(document.tokens)) if is_out else document

        return [
            replace(b, rows=tuple(replace(r, documents=tuple(map(filtered, r.documents))) for r in b.rows))
            for b in batches
        ]

    def advantages(
        self,
        documents: list[Document],
        rewards: list[Tensor],
        groups: list[int],
        values: list[Tensor],
        stable: torch.dtype,
    ) -> dict[str, list[Tensor]]:
        o = self.objective
        if o.adv_estimator == "reinforce_plus_plus":
            returns = []
            for document, tokens in zip(documents, rewards, strict=True):
                steps, is_target = self.in_steps(document, tokens)
                ahead, found = torch.zeros((), dtype=stable), []
                for reward in steps.flip(0):
                    ahead = reward + o.gamma * ahead
                    found.append(ahead)
                returns.append(torch.stack(found[::-1])[is_target] if found else tokens)
            return {"advantage": self.whitened(returns)}
        scores = torch.stack(
            [
                tokens.sum() if len(tokens) else torch.tensor(self.score(d), dtype=stable)
                for d, tokens in zip(documents, rewards, strict=True)
            ]
        )
        of_group = [self._of_group(n, scores, torch.tensor(groups)) for n in range(len(groups))]
        spread = [of_group[n].expand(len(tokens)) for n, tokens in enumerate(rewards)]
        return {"advantage": self.whitened(spread) if o.adv_estimator == "reinforce_plus_plus_baseline" else spread}

    def _of_group(self, n: int, scores: Tensor, groups: Tensor) -> Tensor:
        group, epsilon = scores[groups == groups[n]], self.variant.advantage_epsilon(1e-6)
        members, spread = self.variant.compared((group, group), scores)
        if len(members) == 1:  # a group of one has nothing to compare with
            return members[0] / (1 + epsilon) if self._normalises else members[0]
        if self.objective.adv_estimator == "rloo":
            baseline = (members.sum() - scores[n]) / (len(members) - 1)
            return scores[n] - baseline
        centred = scores[n] - members.mean()
        return centred / (spread.std(correction=1) + epsilon) if self._normalises else centred

    @property
    def _normalises(self) -> bool:
        return self.objective.adv_estimator == "grpo" and self.objective.norm_adv_by_std_in_grpo


class PpoFunctions(ResponseFunctions):
    """Computes PPO (arXiv 1707.06347) with advantages by arXiv 1506.02438, eq. 11 to 16, whitened over the rollout."""

    objective: Ppo

    def advantages(
        self,
        documents: list[Document],
        rewards: list[Tensor],
        groups: list[int],
        values: list[Tensor],
        stable: torch.dtype,
    ) -> dict[str, list[Tensor]]:
        found = []
        for document, earned, estimated in zip(documents, rewards, values, strict=True):
            (tokens, is_target), (value, _) = (self.in_steps(document, numbers) for numbers in (earned, estimated))
            after = torch.cat([value[1:], value.new_zeros(1)])[: len(value)]
            surprise = tokens + self.objective.gamma * after - value
            decay = self.objective.gamma * self.objective.lam
            # A_t = sum over l of (gamma lambda)^l delta_{t + l} (equation 16).
            powers = decay ** torch.arange(len(value), dtype=stable)
            found.append(
                torch.stack([(powers[: len(value) - t] * surprise[t:]).sum() for t in range(len(value))])[is_target]
                if len(value)
                else value
            )
        returns = [a + v for a, v in zip(found, values, strict=True)]
        return {"advantage": self.whitened(found), "value": list(values), "return": returns}

    def summary(self, batch: Batch) -> dict[str, float]:
        returns, values = (
            torch.cat([of_targets(document, name, torch.float64) for document in batch.documents])
            for name in ("return", "value")
        )
        return {"critic.explained_var": (1 - (returns - values).var() / (returns.var() + 1e-5)).item()}

    def of_critic(self, values: Tensor, document: Document, totals: Totals) -> Term:
        old, wanted = (of_targets(document, name, values.dtype) for name in ("value", "return"))
        losses, clipped = value_losses(values, old, wanted, cliprange=self.objective.cliprange_value)
        loss = self.weight(len(values), totals) * losses.sum()
        share = _given(document, "metric_weight", 1 / totals["token_count"]) * clipped.to(values.dtype).sum()
        numbers = {"critic.loss": loss.item(), "critic.clipfrac": share.item()}
        rows = {"critic.value": values, "critic.old_value": old, "return": wanted}
        clips = to_clips_of_value(values, old, wanted, cliprange=self.objective.cliprange_value)
        return Term(loss=loss, values=numbers, rows=rows, clips=clips)


def _given(document: Document, column: str, weight: float) -> float:
    """Returns the weight of each token that a convention gives to a document; ``weight`` if none does."""
    return cast(float, document.columns.get(column, weight))


def one_number(document: Document, name: str) -> float:
    number = document.columns[name]
    assert isinstance(number, float), f"{name} is a number of the whole response"
    return number


def _column(document: Document, numbers: Tensor) -> tuple[float, ...]:
    taken = iter(numbers.tolist())
    return tuple(next(taken) if target else 0.0 for target in document.targets)
