"""Computes, once per rollout, the columns that all its updates read.

Forward passes run document by document over all mini-batches and give old log-probs, log-probs of the reference and
values of the critic. The choices of routers are recorded for each pass under a key of its own
(conformance.spec.observables.rollout_routing).
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
from conformance.spec.observables import rollout_routing

RowsByKey = Mapping[str, Mapping[int, Tensor]]  # by the key of an observable, then by the row's index in its batch


@dataclass(frozen=True)
class AnnotatedBatch:
    """Holds a batch with all columns that its update reads, and in ``rows`` the router weights of the rollout pass."""

    batch: Batch
    rows: RowsByKey = field(default_factory=dict)


def annotated(
    batches: Sequence[Batch], models: Sequence[Model], objective: Objective, policy: Policy, variant: Variant = HONEST
) -> Iterator[AnnotatedBatch]:
    """Yields batches lazily.

    At the first mini-batch of a rollout, it computes old log-probs, reference log-probs, values and advantages for the
    whole rollout with the current weights. Later epochs repeat the mini-batches with the same columns.
    """
    if objective.reads == "samples":
        yield from map(AnnotatedBatch, batches)
        return
    functions = rollout_functions_of(objective)
    known: list[AnnotatedBatch] = []
    first = 0
    for batch in batches:
        if batch.rollout:
            known = run_rollout_pass(batch.rollout, models, functions, policy.before_updates, variant)
            first = batch.step
        annotation = known[(batch.step - first) % len(known)]
        yield replace(annotation, batch=with_columns(batch, annotation.batch))


def with_columns(batch: Batch, known: Batch) -> Batch:
    """Adds the columns of ``known`` to ``batch``, the same mini-batch in a later epoch.

    Columns of ``batch`` take precedence, for example the choices of experts, which belong to this step.
    """
    rows = []
    for own, other in zip(batch.rows, known.rows, strict=True):
        pairs = zip(own.documents, other.documents, strict=True)
        documents = tuple(replace(d, columns={**of.columns, **d.columns}) for d, of in pairs)
        rows.append(replace(own, documents=documents))
    return replace(batch, rows=tuple(rows))


@torch.no_grad()
def run_rollout_pass(
    batches: Sequence[Batch],
    models: Sequence[Model],
    functions: RolloutFunctions,
    policy: Policy,
    variant: Variant,
) -> list[AnnotatedBatch]:
    """Returns the mini-batches of a rollout with all their columns."""
    found: dict[str, list[list[Tensor]]] = {}
    rows: list[dict[str, dict[int, Tensor]]] = [{} for _ in batches]
    for model in (model for model in models if functions.needs_rollout_pass(model.role.name)):
        key, outputs = rollout_routing(model.role.prefix, trained=model.role.trained), []
        for number, batch in enumerate(batches):
            routed: dict[int, list[Tensor]] = defaultdict(list)
            outputs.append(
                [
                    _document_numbers(model, document, functions, policy, variant, key, routed[row.index])
                    for row in batch.rows
                    for document in row.documents
                ]
            )
            if model.decoder.routers:
                rows[number][key] = {row: torch.cat(parts) for row, parts in routed.items()}
        found[model.role.name] = outputs
    made = functions.annotate(batches, found, stable=policy.stable)
    return [AnnotatedBatch(batch, of) for batch, of in zip(made, rows, strict=True)]


def _document_numbers(
    model: Model,
    document: Document,
    functions: RolloutFunctions,
    policy: Policy,
    variant: Variant,
    key: str,
    routed: list[Tensor],
) -> Tensor:
    """Returns the numbers of one document, (targets,), and appends its router weights to ``routed``."""
    routing = model.decoder.routing(document, key)
    if not (any(document.targets) or routing):
        return torch.zeros(0, dtype=policy.stable)
    tokens = torch.tensor(document.tokens)
    output = model.decoder.forward(tokens, model.weights, policy, variant, routing=routing)
    if routing:
        routed.append(routing.rows)
    if not any(document.targets):
        return torch.zeros(0, dtype=policy.stable)
    return functions.rollout_numbers(model.role.name, output, document, stable=policy.stable)
