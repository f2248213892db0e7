"""Runs the two sides that are compared with the libraries: impl in packed rows and micro-batches, and the oracle one
response at a time. Both take and return documents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from rl_cases import GARBAGE, Documents, Rollout, pack
from rl_libraries import float64_by_default
from torch import Tensor

from conformance.oracle import loss_terms
from conformance.oracle import policy_gradient as oracle
from conformance.spec.batch import Batch, Column, Document, Row
from conformance.spec.objectives import Grpo, LossAggMode, PolicyGradient, Ppo
from conformance.spec.observables import CRITIC, POLICY, REFERENCE
from impl.interface.micro_batches import MicroBatch, Outputs, collate
from impl.objectives import advantages, losses
from impl.objectives.policy_gradient import PolicyGradientFunctions

Numbers = dict[str, float]


class OfDocuments(Protocol):
    """(losses, clipped, clipped by dual clip) of each token."""

    def __call__(
        self, new: Documents, old: Documents, advantages: Documents, *, objective: PolicyGradient
    ) -> tuple[Documents, Documents, Documents]: ...


class Weights(Protocol):
    """Of each token of each document, where the mini-batch has so many tokens and sequences."""

    def __call__(
        self,
        lengths: Sequence[int],
        mode: LossAggMode,
        *,
        tokens: float,
        sequences: float,
        scale_factor: float | None = None,
    ) -> Documents: ...


class WholePolicy(Protocol):
    """The loss of a mini-batch with entropy and KL, and the metrics beside it; ``weights`` are those of the sampler."""

    def __call__(
        self, case: Rollout, new: Documents, entropy: Documents, objective: PolicyGradient, weights: Documents
    ) -> tuple[Tensor, Numbers]: ...


@dataclass(frozen=True, kw_only=True)
class Side:
    """Functions of our own that are held against the libraries.

    estimate: (advantages, returns) of the responses of a roll-out, in order; None for returns that nothing reads.
    annotated: the mini-batches of a rollout with the columns that updates read. penalty: what a response of so many
    tokens loses. importance_weights: of the tokens of a response. kl_estimate, value_losses: of tensors of any shape.
    policy, critic: as in a step.
    """

    name: str
    estimate: Callable[[list[advantages.Response], Grpo | Ppo], tuple[Documents, Documents | None]]
    annotated: Callable[[list[Batch], Grpo], list[Batch]]
    token_rewards: Callable[..., Tensor]
    policy_losses: OfDocuments
    token_weights: Weights
    penalty: Callable[[int, PolicyGradient], float]
    importance_weights: Callable[..., Tensor]
    kl_estimate: Callable[..., Tensor]
    value_losses: Callable[..., tuple[Tensor, Tensor]]
    policy: WholePolicy
    critic: Callable[[Rollout, Documents, Ppo], tuple[Tensor, Numbers]]


def weights_of(
    side: Side, lengths: Sequence[int], mode: LossAggMode, *, scale_factor: float | None = None
) -> Documents:
    """Of a mini-batch, asked for in two micro-batches of unequal lengths."""
    totals: Any = {"tokens": sum(lengths), "sequences": sum(length > 0 for length in lengths)}
    parts = (lengths[: len(lengths) // 3], lengths[len(lengths) // 3 :])
    return [
        each for part in parts if part for each in side.token_weights(part, mode, **totals, scale_factor=scale_factor)
    ]


def rows_of(case: Rollout, *, single: bool = False, **columns: Documents | Sequence[float]) -> list[Row]:
    """Rows of one to three responses, of one if ``single``, with prompts of a token or two before them."""
    documents = []
    for i, length in enumerate(case.lengths):
        prompt = 1 + i % 2
        mine: dict[str, Column] = {}
        for name, column in columns.items():
            of_document = column[i]
            numbers = of_document.tolist() if isinstance(of_document, Tensor) else of_document
            mine[name] = (0.0,) * prompt + tuple(numbers) if isinstance(numbers, list) else numbers
        documents.append(Document((7,) * (prompt + length), (False,) * prompt + (True,) * length, mine))
    rows: list[Row] = []
    while documents:
        size = 1 if single else 1 + (len(rows) + case.count) % 3
        rows.append(Row(len(rows), tuple(documents[:size])))
        documents = documents[size:]
    return rows


def policy_columns(case: Rollout, weights: Documents) -> dict[str, Any]:
    lengths = [float(length) for length in case.lengths]
    known = {"old_logprob": case.old, "reference_logprob": case.reference, "advantage": case.advantages}
    return {**known, "importance": weights, "length": lengths}


def value_columns(case: Rollout) -> dict[str, Any]:
    return {"value": case.old_values, "return": case.advantages, "length": [float(length) for length in case.lengths]}


# impl


def _estimate(of: list[advantages.Response], objective: Grpo | Ppo) -> tuple[Documents, Documents]:
    found = advantages.estimate(of, objective)
    return [each.advantages for each in found], [each.returns for each in found]


def _packed_losses(
    new: Documents, old: Documents, advantages: Documents, *, objective: PolicyGradient
) -> tuple[Documents, Documents, Documents]:
    """In packed rows; the other tests have one document in a row."""
    lengths = [len(document) for document in new]
    generator = torch.Generator().manual_seed(len(lengths) + sum(lengths))
    mask, documents, layout = pack(lengths, generator)
    terms = losses.policy_losses(
        layout(new), layout(old), layout(advantages), mask=mask, documents=documents, objective=objective
    )

    def back(matrix: Tensor) -> Documents:
        return list(matrix[mask].split(lengths))

    return back(terms.losses), back(terms.clipped), back(terms.clipped_lower)


def _token_weights(
    lengths: Sequence[int],
    mode: LossAggMode,
    *,
    tokens: float,
    sequences: float,
    scale_factor: float | None = None,
) -> Documents:
    """From the length of the document at each token, as it is laid out in packed rows, padding of length 0."""
    mask, _, layout = pack(lengths, torch.Generator().manual_seed(sum(lengths)))
    of_tokens = layout([torch.full((length,), float(length), dtype=torch.float64) for length in lengths])
    t, n = torch.tensor([tokens, sequences], dtype=torch.float64)
    weights = losses.token_weights(of_tokens.where(mask, 0), mode, tokens=t, sequences=n, scale_factor=scale_factor)
    assert weights.isfinite().all()
    return list(weights[mask].split(list(lengths)))


def _in_micro_batches(
    model: str, rows: list[Row], outputs: dict[str, Documents], objective: PolicyGradient
) -> tuple[Tensor, Numbers]:
    """The sum over two micro-batches of unequal numbers of rows."""
    functions = PolicyGradientFunctions(objective)  # type: ignore[arg-type]
    totals = {key: torch.tensor(total, dtype=torch.float64) for key, total in functions.totals(rows).items()}
    left = {name: list(documents) for name, documents in outputs.items()}
    loss, values = torch.zeros((), dtype=torch.float64), dict[str, float]()
    for part in (rows[: len(rows) // 3], rows[len(rows) // 3 :]):
        if not part:
            continue
        count = sum(len(row.documents) for row in part)
        with float64_by_default():  # as in the exact tier
            inputs = collate(part)
            taken = {name: laid_out(documents[:count], inputs) for name, documents in left.items()}
            given = Outputs(**taken, targets=inputs.targets.double())
            found = functions.evaluate(model, given, inputs, totals=totals, others={})
        left = {name: documents[count:] for name, documents in left.items()}
        assert found.loss is not None
        loss = loss + found.loss
        for key, value in found.values.items():
            values[key] = values.get(key, 0.0) + float(value.detach())
        for key, value in found.highest.items():
            values[key] = max(values.get(key, 0.0), float(value))
    return loss, values


def laid_out(documents: Documents, inputs: MicroBatch) -> Tensor:
    """At the targets; what stands elsewhere may not be looked at."""
    matrix = torch.full(inputs.targets.shape, GARBAGE, dtype=torch.float64)
    return matrix.masked_scatter(inputs.targets, torch.cat(documents))


def _policy(
    case: Rollout, new: Documents, entropy: Documents, objective: PolicyGradient, weights: Documents
) -> tuple[Tensor, Numbers]:
    rows = rows_of(case, **policy_columns(case, weights))
    return _in_micro_batches(POLICY.name, rows, {"logprobs": new, "entropy": entropy}, objective)


def _critic(case: Rollout, values: Documents, objective: Ppo) -> tuple[Tensor, Numbers]:
    return _in_micro_batches(CRITIC.name, rows_of(case, **value_columns(case)), {"values": values}, objective)


IMPL = Side(
    name="impl",
    estimate=_estimate,
    annotated=lambda batches, objective: PolicyGradientFunctions(objective).annotate(batches, {}),
    token_rewards=advantages.token_rewards,
    policy_losses=_packed_losses,
    token_weights=_token_weights,
    penalty=advantages.overlong_penalty,
    importance_weights=losses.importance_weights,
    kl_estimate=losses.kl_estimate,
    value_losses=losses.value_losses,
    policy=_policy,
    critic=_critic,
)


# The oracle


def each_document(function: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> OfDocuments:
    """The policy losses of a side whose ``function`` takes the 1-D tensors of one document, and ``objective``."""

    def of_documents(
        new: Documents, old: Documents, advantages: Documents, *, objective: PolicyGradient
    ) -> tuple[Documents, Documents, Documents]:
        found = [function(*each, objective=objective) for each in zip(new, old, advantages, strict=True)]
        losses, clipped, lower = zip(*found, strict=True)
        return list(losses), list(clipped), list(lower)

    return of_documents


def _oracle_estimate(of: list[advantages.Response], objective: Grpo | Ppo) -> tuple[Documents, Documents | None]:
    """From the columns that two mini-batches get before the first update of a roll-out."""
    functions = (oracle.PpoFunctions if isinstance(objective, Ppo) else oracle.GrpoFunctions)(objective)
    cut = len(of) // 2
    parts = [part for part in (of[:cut], of[cut:]) if part]
    batches = [
        Batch(step, 99, tuple(_row(i, response) for i, response in enumerate(p))) for step, p in enumerate(parts)
    ]
    seen = {POLICY.name: "old_logprobs", REFERENCE.name: "reference_logprobs", CRITIC.name: "values"}
    found = {model: [[getattr(each, name) for each in part] for part in parts] for model, name in seen.items()}
    annotated = functions.annotate(batches, found, stable=torch.float64)
    documents = [document for batch in annotated for document in batch.documents]

    def column(name: str) -> Documents:
        return [loss_terms.of_targets(document, name, torch.float64) for document in documents]

    return column("advantage"), column("return") if isinstance(objective, Ppo) else None


def _row(index: int, response: advantages.Response) -> Row:
    length = len(response.old_logprobs)
    columns: Any = {"group": float(response.group), "reward": float(response.reward)}
    columns["rollout_logprob"] = (0.0,) * (1 + length)
    return Row(index, (Document((7,) * (1 + length), (False,) + (True,) * length, columns),))


def _oracle_rewards(response: advantages.Response, **penalty: Any) -> Tensor:
    return oracle.ResponseFunctions(Grpo(**penalty)).rewards(
        response.reward, response.old_logprobs, response.reference_logprobs
    )


def _oracle_losses(
    new: Tensor, old: Tensor, advantage: Tensor, *, objective: PolicyGradient
) -> tuple[Tensor, Tensor, Tensor]:
    terms = loss_terms.LOSS_MODES[objective.loss_mode](new, old, advantage, objective)
    return terms.losses, terms.clipped, terms.clipped_lower


def _oracle_weights(
    lengths: Sequence[int],
    mode: LossAggMode,
    *,
    tokens: float,
    sequences: float,
    scale_factor: float | None = None,
) -> Documents:
    functions = oracle.ResponseFunctions(PolicyGradient(loss_agg_mode=mode, loss_scale_factor=scale_factor))
    totals = {"token_count": tokens, "sequence_count": sequences}
    # Nothing is asked of a response without tokens.
    weights = [functions.weight(length, totals) if length else 0.0 for length in lengths]
    return [torch.full((n,), weight, dtype=torch.float64) for n, weight in zip(lengths, weights, strict=True)]


def _oracle_policy(
    case: Rollout, new: Documents, entropy: Documents, objective: PolicyGradient, weights: Documents
) -> tuple[Tensor, Numbers]:
    functions = oracle.ResponseFunctions(objective)
    rows = rows_of(case, single=True, **policy_columns(case, weights))
    totals = functions.totals(Batch(0, 99, tuple(rows)))
    return _summed(
        functions.of_policy(n, e, row.documents[0], totals)
        for row, n, e in zip(rows, new, entropy, strict=True)
        if len(n)
    )


def _oracle_critic(case: Rollout, values: Documents, objective: Ppo) -> tuple[Tensor, Numbers]:
    functions = oracle.PpoFunctions(objective)
    rows = rows_of(case, single=True, **value_columns(case))
    totals = {"token_count": case.tokens, "sequence_count": sum(length > 0 for length in case.lengths)}
    return _summed(
        functions.of_critic(v, row.documents[0], totals) for row, v in zip(rows, values, strict=True) if len(v)
    )


def _summed(terms: Any) -> tuple[Tensor, Numbers]:
    loss, values = torch.zeros((), dtype=torch.float64), dict[str, float]()
    for term in terms:
        loss = loss + term.loss
        for key, value in term.values.items():
            values[key] = values.get(key, 0.0) + value
        for key, value in term.highest.items():
            values[key] = max(values.get(key, 0.0), value)
    return loss, values


ORACLE = Side(
    name="oracle",
    estimate=_oracle_estimate,
    annotated=lambda batches, objective: oracle.GrpoFunctions(objective).annotate(batches, {}, stable=torch.float64),
    token_rewards=_oracle_rewards,
    policy_losses=each_document(_oracle_losses),
    token_weights=_oracle_weights,
    penalty=lambda length, objective: oracle.GrpoFunctions(objective).score(
        Document((7,) * (length + 1), (False,) + (True,) * length, {"reward": 0.0})
    ),
    importance_weights=lambda old, sampled, *, threshold, level="token", mask=False: loss_terms.importance(
        old, sampled, PolicyGradient(rollout_is_threshold=threshold, rollout_is=level, rollout_is_mask=mask)
    ),
    kl_estimate=lambda new, reference, kind: loss_terms.divergence(new - reference, kind),
    value_losses=loss_terms.value_losses,
    policy=_oracle_policy,
    critic=_oracle_critic,
)
SIDES = [IMPL, ORACLE]
