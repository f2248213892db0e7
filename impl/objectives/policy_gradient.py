"""Computes the columns of a rollout and the losses of micro-batches, for GRPO, PPO, SFT, DFT, MTP and distillation.

FUNCTIONS has the functions of every objective.

The work is split as in verl. A controller, which here is every rank, computes the columns of a rollout (advantages,
returns) from the log-probs and values of all ranks. Losses see one micro-batch. The oracle's functions were written
independently (conformance/oracle/policy_gradient.py). All
reference backends share the loss functions of each kind of objective.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from conformance.spec.batch import GIVEN, Batch, Document, Row
from conformance.spec.objectives import Grpo, Objective, Ppo, known_kinds
from conformance.spec.observables import CRITIC, POLICY, REFERENCE
from conformance.spec.offline import TEACHER, Distillation, MultiToken, mtp_count, mtp_logprob
from impl.interface.micro_batches import Evaluation, MicroBatch, Others, Outputs, Totals, Wanted
from impl.objectives.advantages import Estimate, Response, estimate, kept_groups, overlong_penalty
from impl.objectives.losses import importance_weights, kl_estimate, policy_losses, token_weights, value_losses
from impl.objectives.preferences import FUNCTIONS as PREFERENCES
from impl.objectives.preferences import Functions

RolloutOutputs = Mapping[str, Mapping[tuple[int, int], Tensor]]  # by model, by (mini-batch, row): (targets of the row,)


@dataclass(frozen=True)
class PolicyGradientFunctions:
    """Implements impl.objectives.policy_gradient.ObjectiveFunctions and impl.engine.trainer.RolloutFunctions."""

    objective: Grpo | Ppo

    @property
    def temperature(self) -> float:
        return self.objective.temperature

    # --- before the first update of a rollout -------------------------------------------------------------------------

    def rollout_wants(self, model: str) -> Wanted:
        if all(role.name != model for role in self.objective.rollout_roles):
            return frozenset()
        return frozenset({"values" if model == CRITIC.name else "logprobs"})

    def annotate(self, batches: Sequence[Batch], found: RolloutOutputs) -> list[Batch]:
        """Adds the columns that ``evaluate`` reads to the mini-batches."""
        outputs = {model: _by_document(batches, rows) for model, rows in found.items()}
        documents = self._sampled([document for batch in batches for document in batch.documents])
        responses = [
            _response(d, {model: numbers[n][: sum(d.targets)] for model, numbers in outputs.items()}, self.objective)
            for n, d in enumerate(documents)
        ]
        estimates = estimate(responses, self.objective)
        annotated = (self._annotated(*each) for each in zip(documents, responses, estimates, strict=True))
        return [
            replace(b, rows=tuple(replace(r, documents=tuple(next(annotated) for _ in r.documents)) for r in b.rows))
            for b in batches
        ]

    def _sampled(self, documents: list[Document]) -> list[Document]:
        """Takes the targets from responses of groups that dynamic sampling leaves out."""
        if not (isinstance(self.objective, Grpo) and self.objective.filter_groups):
            return documents
        groups, rewards = ([_number(d, name) for d in documents] for name in ("group", "reward"))
        given = [_of_targets(d, GIVEN).sum().item() if GIVEN in d.columns else 0.0 for d in documents]
        kept = kept_groups(groups, [reward + more for reward, more in zip(rewards, given, strict=True)])
        return [
            document if group in kept else replace(document, targets=(False,) * len(document.targets))
            for document, group in zip(documents, groups, strict=True)
        ]

    def _annotated(self, document: Document, response: Response, estimated: Estimate) -> Document:
        columns: dict[str, Tensor | None] = {
            "old_logprob": response.old_logprobs,
            "reference_logprob": response.reference_logprobs,
            "advantage": estimated.advantages,
        }
        if response.values is not None:
            columns |= {"value": response.values, "return": estimated.returns}
        if self.objective.rollout_is_threshold is not None:
            sampled = _of_targets(document, "rollout_logprob")
            o = self.objective
            bounds: dict[str, Any] = {"threshold": o.rollout_is_threshold, "level": o.rollout_is}
            columns["importance"] = importance_weights(response.old_logprobs, sampled, **bounds, mask=o.rollout_is_mask)
        known = {name: _column(document, numbers) for name, numbers in columns.items() if numbers is not None}
        return replace(document, columns={**document.columns, **known, "length": float(sum(document.targets))})

    # --- an update ----------------------------------------------------------------------------------------------------

    def wants(self, model: str) -> Wanted:
        """Returns the outputs per model; a frozen reference needs none, because its log-probs are in the columns."""
        if model == CRITIC.name:
            return frozenset({"values"})
        return frozenset({"logprobs", "entropy", "targets"}) if model == POLICY.name else frozenset()

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        lengths = [sum(document.targets) for row in rows for document in row.documents]
        return {"token_count": sum(lengths), "sequence_count": sum(length > 0 for length in lengths)}

    def summary(self, batch: Batch) -> dict[str, float]:
        if not isinstance(self.objective, Ppo):
            return {}
        returns, values = (torch.cat([_of_targets(d, name) for d in batch.documents]) for name in ("return", "value"))
        # verl's critic/vf_explained_var
        return {"critic.explained_var": (1 - (returns - values).var() / (returns.var() + 1e-5)).item()}

    def evaluate(
        self, model: str, outputs: Outputs, inputs: MicroBatch, *, totals: Totals, others: Others
    ) -> Evaluation:
        weights = loss_weights(inputs, self.objective, totals)
        share = inputs.targets.to(weights.dtype) / totals["token_count"]
        if model == CRITIC.name:
            assert outputs.values is not None
            return self._critic(outputs.values, inputs, weights, share)
        return self._policy(outputs, inputs, weights, share)

    def _policy(self, outputs: Outputs, inputs: MicroBatch, weights: Tensor, share: Tensor) -> Evaluation:
        o, columns, mask = self.objective, inputs.columns, inputs.targets
        logprobs, entropy, targets = outputs.logprobs, outputs.entropy, outputs.targets
        assert logprobs is not None
        assert entropy is not None
        assert targets is not None
        terms = policy_losses(
            logprobs,
            columns["old_logprob"],
            columns["advantage"],
            mask=mask,
            documents=document_numbers(inputs),
            objective=o,
        )
        losses = terms.losses if o.rollout_is_threshold is None else terms.losses * columns["importance"]
        values = {"pg_loss": (weights * losses).sum(), "entropy_loss": (weights * entropy).sum()}
        rows = {
            "logprob": logprobs,
            "entropy": entropy,
            "ratio": terms.ratio,
            "approx_kl": terms.approx_kl,
            "advantage": columns["advantage"],
        }
        if o.recompute_old_logprobs:
            rows["old_logprob"] = columns["old_logprob"]
        if o.has_reference:
            rows["reference.logprob"] = columns["reference_logprob"]
        if o.kl_loss_coef:
            rows["reference_kl"] = kl_estimate(logprobs, columns["reference_logprob"], o.kl_loss_type)
            values["kl_loss"] = (weights * rows["reference_kl"]).sum()
        loss = actor_loss(o, **values)
        means = {
            "ppo_kl": terms.approx_kl,
            "pg_clipfrac": terms.clipped,
            "pg_clipfrac_lower": terms.clipped_lower,
            "ratio_mean": terms.ratio,
        }
        values |= {key: (share * numbers).sum() for key, numbers in means.items()}
        values |= {"loss": loss, "token_count": targets.sum()}
        return Evaluation(loss=loss, values=values, highest={"ratio_max": terms.ratio.where(mask, 0).amax()}, rows=rows)

    def _critic(self, values: Tensor, inputs: MicroBatch, weights: Tensor, share: Tensor) -> Evaluation:
        assert isinstance(self.objective, Ppo)
        old, returns = inputs.columns["value"], inputs.columns["return"]
        losses, clipped = value_losses(values, old, returns, cliprange=self.objective.cliprange_value)
        loss = (weights * losses).sum()
        numbers = {"critic.loss": loss, "critic.clipfrac": (share * clipped).sum()}
        rows = {"critic.value": values, "critic.old_value": old, "return": returns}
        return Evaluation(loss=loss, values=numbers, rows=rows)


def loss_weights(inputs: MicroBatch, objective: Grpo | Ppo, totals: Totals) -> Tensor:
    """Returns the weight of the loss at each position, (rows, length); 0 where no response token is predicted."""
    weights = token_weights(
        inputs.columns["length"],
        objective.loss_agg_mode,
        tokens=totals["token_count"],
        sequences=totals["sequence_count"],
        scale_factor=objective.loss_scale_factor,
    )
    return weights.where(inputs.targets, 0)


def actor_loss(
    objective: Grpo | Ppo, *, pg_loss: Tensor, entropy_loss: Tensor, kl_loss: Tensor | None = None
) -> Tensor:
    """Returns pg_loss - entropy_coeff * entropy_loss + kl_loss_coef * kl_loss, as in verl."""
    loss = pg_loss - objective.entropy_coeff * entropy_loss
    return loss if kl_loss is None else loss + objective.kl_loss_coef * kl_loss


def document_numbers(inputs: MicroBatch) -> Tensor:
    """Numbers, from 0 in each row, the document of each position: int64 (rows, length).

    Padding counts as one more document.
    """
    return (inputs.positions == 0).cumsum(dim=1) - 1


def _by_document(batches: Sequence[Batch], found: Mapping[tuple[int, int], Tensor]) -> list[Tensor]:
    """Splits the numbers of each row by document: (targets,) for each document of all batches, in order."""
    parts: list[Tensor] = []
    for number, batch in enumerate(batches):
        for row in batch.rows:
            lengths = [sum(document.targets) for document in row.documents]
            of_row = found[number, row.index] if sum(lengths) else torch.zeros(0)
            parts += of_row.split(lengths)
    return parts


def _response(document: Document, found: Mapping[str, Tensor], objective: Grpo | Ppo) -> Response:
    sampled = _of_targets(document, "rollout_logprob")
    return Response(
        group=int(_number(document, "group")),
        reward=_number(document, "reward") + overlong_penalty(sum(document.targets), objective),
        old_logprobs=found.get(POLICY.name, sampled),
        reference_logprobs=found.get(REFERENCE.name),
        values=found.get(CRITIC.name),
        given=_of_targets(document, GIVEN) if GIVEN in document.columns else None,
        gaps=gaps_of(document.targets),
    )


def _number(document: Document, name: str) -> float:
    number = document.columns[name]
    assert isinstance(number, float)
    return number


def gaps_of(targets: Sequence[bool]) -> Tensor:
    """Returns the distance from each token that is trained on to the next one, and 1 for the last: (targets,)."""
    places = torch.tensor([place for place, target in enumerate(targets) if target])
    gaps = torch.ones(len(places))
    gaps[:-1] = places.diff().to(gaps.dtype)
    return gaps


def _of_targets(document: Document, name: str) -> Tensor:
    """Returns the numbers of a column at the response tokens, (targets,), in torch's default dtype."""
    column: Any = document.columns[name]
    return torch.tensor([number for number, target in zip(column, document.targets, strict=True) if target])


def _column(document: Document, numbers: Tensor) -> tuple[float, ...]:
    """Expands ``numbers`` (targets,) to a column of the document: one number per token, 0 without a target."""
    remaining: Iterator[float] = iter(numbers.tolist())
    return tuple(next(remaining) if target else 0.0 for target in document.targets)


class ObjectiveFunctions(Protocol):
    """Defines the functions of an objective that the trainer calls; ``model`` is the name of a role."""

    @property
    def temperature(self) -> float:
        """Returns the divisor of the logits."""
        ...

    def wants(self, model: str) -> Wanted:
        """Returns the outputs needed from ``model``; if there are none, the model runs no forward pass."""
        ...

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        """Returns sums over ``rows``, by observable; totals over the whole step are the denominators of the losses.

        The totals are recorded, except for keys under which ``evaluate`` gives a value itself.
        """
        ...

    def summary(self, batch: Batch) -> dict[str, float]:
        """Returns recorded numbers of the whole batch, by observable, that need no forward pass of this step."""
        ...

    def evaluate(
        self, model: str, outputs: Outputs, inputs: MicroBatch, *, totals: Totals, others: Others
    ) -> Evaluation:
        """Computes the loss and the recorded numbers of ``model`` for one micro-batch.

        ``totals``: sums over the whole step on all ranks, scalars on the device in the dtype of the outputs.
        ``others``: detached outputs for this micro-batch of the models that ran earlier in this step, by model.
        """
        ...


class SftFunctions(Functions):
    """Computes the SFT loss: the mean of weight times -log p over the target tokens of the whole step on all ranks.

    Documents without a column ``weight`` have weight 1.
    """

    def evaluate(
        self, model: str, outputs: Outputs, inputs: MicroBatch, *, totals: Totals, others: Others
    ) -> Evaluation:
        assert outputs.logprobs is not None
        assert outputs.targets is not None
        loss = minimised = -outputs.logprobs.sum() / totals["token_count"]
        if "weight" in inputs.columns:
            minimised = -(inputs.columns["weight"] * outputs.logprobs).sum() / totals["token_count"]
        # Trained targets are counted, because the batch's own count would hide lost ones.
        values = {"loss": loss, "token_count": outputs.targets.sum()}
        return Evaluation(loss=minimised, values=values, rows={"logprob": outputs.logprobs})


class DftFunctions(Functions):
    """Computes the loss of conformance.spec.offline.Dft: the mean of -sg(p) log p over the step's target tokens."""

    def evaluate(
        self, model: str, outputs: Outputs, inputs: MicroBatch, *, totals: Totals, others: Others
    ) -> Evaluation:
        assert outputs.logprobs is not None
        assert outputs.targets is not None
        loss = weighted_losses(outputs.logprobs).sum() / totals["token_count"]
        values = {"loss": loss, "token_count": outputs.targets.sum()}
        return Evaluation(loss=loss, values=values, rows={"logprob": outputs.logprobs})


def weighted_losses(logprobs: Tensor) -> Tensor:
    """Returns -log p of each token times p, which has no gradient; any shape."""
    return -logprobs.detach().exp() * logprobs


@dataclass(frozen=True)
class MultiTokenFunctions(Functions):
    """Implements impl.objectives.policy_gradient.ObjectiveFunctions for conformance.spec.offline.MultiToken."""

    objective: MultiToken

    def wants(self, model: str) -> Wanted:
        return frozenset({"logprobs", "targets", "mtp_logprobs"})

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        documents = [document for row in rows for document in row.documents]
        counts = {mtp_count(k): sum(sum(d.targets[1 + k :]) for d in documents) for k in self.objective.depths}
        return {**super().totals(rows), **counts}

    def evaluate(
        self, model: str, outputs: Outputs, inputs: MicroBatch, *, totals: Totals, others: Others
    ) -> Evaluation:
        assert outputs.logprobs is not None
        assert outputs.targets is not None
        assert outputs.mtp_logprobs is not None
        loss = -outputs.logprobs.sum() / totals["token_count"]
        rows = {"logprob": outputs.logprobs}
        scale = self.objective.mtp_loss_scaling_factor / self.objective.mtp_num_layers
        for k, logprobs in zip(self.objective.depths, outputs.mtp_logprobs.unbind(-1), strict=True):
            loss = loss - scale * logprobs.sum() / totals[mtp_count(k)]
            rows[mtp_logprob(k)] = logprobs.roll(k, dims=1)  # to the position that predicts the same token next
        return Evaluation(loss=loss, values={"loss": loss, "token_count": outputs.targets.sum()}, rows=rows)


@dataclass(frozen=True)
class DistillationFunctions(Functions):
    """Implements impl.objectives.policy_gradient.ObjectiveFunctions for conformance.spec.offline.Distillation."""

    objective: Distillation

    @property
    def temperature(self) -> float:
        return self.objective.temperature

    def wants(self, model: str) -> Wanted:
        if model == TEACHER.name:
            return frozenset({"logprobs", "distribution"})
        return frozenset({"logprobs", "targets", self.objective})

    def evaluate(
        self, model: str, outputs: Outputs, inputs: MicroBatch, *, totals: Totals, others: Others
    ) -> Evaluation:
        assert outputs.logprobs is not None
        if model == TEACHER.name:
            return Evaluation(loss=None, rows={"teacher.logprob": outputs.logprobs})
        assert outputs.divergence is not None
        assert outputs.targets is not None
        loss = outputs.divergence.sum() / totals["token_count"]
        values = {"loss": loss, "token_count": outputs.targets.sum()}
        return Evaluation(
            loss=loss, values=values, rows={"logprob": outputs.logprobs, "divergence": outputs.divergence}
        )


FUNCTIONS: dict[str, Callable[[Any], ObjectiveFunctions]] = {
    "sft": SftFunctions,
    "dft": DftFunctions,
    "grpo": PolicyGradientFunctions,
    "ppo": PolicyGradientFunctions,
    **PREFERENCES,
    "distillation": DistillationFunctions,
    "mtp": MultiTokenFunctions,
}


def functions_of(objective: Objective) -> ObjectiveFunctions:
    """Returns the functions of a scenario's objective. Raises UsageError for a kind that is not in FUNCTIONS."""
    known_kinds(FUNCTIONS, objective, who="impl/objectives/policy_gradient.py")
    return FUNCTIONS[objective.kind](objective)
