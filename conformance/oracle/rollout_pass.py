"""Looking ahead: what the oracle computes of a roll-out before its first update, and keeps for all its updates.

Serves claim 1 for reinforcement learning. Forward passes run document by document over all mini-batches: old log-probs,
log-probs of the reference, values of the critic. What routers do in them is recorded as well, each pass under a key of
its own (conformance.spec.observables.look_routing).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from conformance.oracle.loss_terms import RolloutFunctions
from conformance.oracle.objectives import rollout_functions_of
from conformance.oracle.primitives import Policy
from conformance.oracle.step import Model
from conformance.oracle.variant import HONEST, Variant
from conformance.spec.batch import Batch, Document
from conformance.spec.objectives import Objective
from conformance.spec.observables import look_routing

RowsByKey = Mapping[str, Mapping[int, Tensor]]  # by the key of an observable, then by the row's index in its batch


@dataclass(frozen=True)
class Looked:
    """A batch with all columns that its update reads. ``rows``: what routers did in the passes that made them."""

    batch: Batch
    rows: RowsByKey = field(default_factory=dict)


def annotated(
    batches: Sequence[Batch], models: Sequence[Model], objective: Objective, policy: Policy, variant: Variant = HONEST
) -> Iterator[Looked]:
    """The batches, one when it is asked for; those of a roll-out with the columns that are computed of it as a whole,
    by the weights that the models have when its first one is asked for. Its mini-batches go round, epoch by epoch."""
    if objective.reads == "samples":
        yield from map(Looked, batches)
        return
    functions = rollout_functions_of(objective)
    known: list[Looked] = []
    first = 0
    for batch in batches:
        if batch.rollout:
            known = look_ahead(batch.rollout, models, functions, policy.before_updates, variant)
            first = batch.step
        looked = known[(batch.step - first) % len(known)]
        yield replace(looked, batch=with_columns(batch, looked.batch))


def with_columns(batch: Batch, known: Batch) -> Batch:
    """``batch`` with the columns of ``known``, which is the same mini-batch of its roll-out, gone through before. Its
    own stay, such as choices of experts, which are of this step."""
    rows = []
    for own, other in zip(batch.rows, known.rows, strict=True):
        pairs = zip(own.documents, other.documents, strict=True)
        documents = tuple(replace(d, columns={**of.columns, **d.columns}) for d, of in pairs)
        rows.append(replace(own, documents=documents))
    return replace(batch, rows=tuple(rows))


@torch.no_grad()
def look_ahead(
    batches: Sequence[Batch],
    models: Sequence[Model],
    functions: RolloutFunctions,
    policy: Policy,
    variant: Variant,
) -> list[Looked]:
    """The mini-batches of a roll-out with all their columns."""
    found: dict[str, list[list[Tensor]]] = {}
    rows: list[dict[str, dict[int, Tensor]]] = [{} for _ in batches]
    for model in (model for model in models if functions.looks(model.role.name)):
        key, outputs = look_routing(model.role.prefix, trained=model.role.trained), []
        for number, batch in enumerate(batches):
            routed: dict[int, list[Tensor]] = defaultdict(list)
            outputs.append(
                [
                    _look(model, document, functions, policy, variant, key, routed[row.index])
                    for row in batch.rows
                    for document in row.documents
                ]
            )
            if model.decoder.routers:
                rows[number][key] = {row: torch.cat(parts) for row, parts in routed.items()}
        found[model.role.name] = outputs
    made = functions.annotate(batches, found, stable=policy.stable)
    return [Looked(batch, of) for batch, of in zip(made, rows, strict=True)]


def _look(
    model: Model,
    document: Document,
    functions: RolloutFunctions,
    policy: Policy,
    variant: Variant,
    key: str,
    routed: list[Tensor],
) -> Tensor:
    """What is kept of one document, (targets,). Adds what its routers did to ``routed``."""
    routing = model.decoder.routing(document, key)
    if not (any(document.targets) or routing):
        return torch.zeros(0, dtype=policy.stable)
    tokens = torch.tensor(document.tokens)
    output = model.decoder.forward(tokens, model.weights, policy, variant, routing=routing)
    if routing:
        routed.append(routing.rows)
    if not any(document.targets):
        return torch.zeros(0, dtype=policy.stable)
    return functions.look(model.role.name, output, document, stable=policy.stable)
