"""Objective: what a training step minimises, as configuration: ``[objective] kind = "sft"`` in a scenario.

Objectives are a tagged union that can be extended: ``kind`` is the name of a built-in objective, or ``module:Class`` of
another one. The class holds only configuration and declarations. The loss is implemented twice, independently, in
conformance/oracle/objectives.py and in impl/objectives.py, each with a table by kind. If one side does not know an
objective, this is an error before anything runs, never a silent SFT.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from conformance.batch import Batch
from conformance.observable import (
    CONFIGURATION,
    GENERATORS,
    LOGPROBS,
    LOSS,
    TOKEN_COUNT,
    Observable,
    loaded_observables,
    look_routing_observable,
    routing_observables,
    trained_observables,
)
from conformance.rl import Grpo, Ppo
from conformance.role import POLICY, Role
from conformance.validation import STRICT, UsageError, explain, one_line, shown

Weight = Annotated[float, Field(strict=True, gt=0, le=1e12)]


class Objective(Protocol):
    """The protocol of an objective, which is a frozen pydantic dataclass with a field ``kind``.

    reads: what the data set holds: ``samples`` (pairs of texts) or ``rollouts`` (conformance.inputs.rollouts). One that
        reads roll-outs also has ``looking``, the roles whose models run over each before its first update.
    disable_dropout: whether models run without the dropout of their configuration, also in updates.
    """

    reads: ClassVar[Literal["samples", "rollouts"]]
    disable_dropout: ClassVar[bool]

    @property
    def kind(self) -> str: ...

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of the cell's models, frozen models first. The role of the policy, if there is one, is POLICY."""
        ...

    def observables(self) -> tuple[Observable, ...]:
        """The observables of forward passes and losses, in causal order. The suite adds those of weights, gradients
        and updates (``all_observables``)."""
        ...

    def annotate(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches with the columns that the objective adds. The result depends only on the batches."""
        ...


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sft:
    """Supervised fine-tuning: the mean of weight times -log p over all target tokens of the optimizer step.

    document_weights: for each optimizer step, the weight of its first document that has targets. All other documents,
    and those of further steps, have weight 1. A step with a weight that is far too large overflows in fp16. The
    recorded loss is without weights, so that as many tokens make its rounding as at any other step.
    """

    kind: Literal["sft"] = "sft"
    document_weights: tuple[Weight, ...] = ()
    reads: ClassVar[Literal["samples", "rollouts"]] = "samples"
    disable_dropout: ClassVar[bool] = False
    roles: ClassVar[tuple[Role, ...]] = (POLICY,)

    def observables(self) -> tuple[Observable, ...]:
        return (LOGPROBS, TOKEN_COUNT, replace(LOSS, made_of="logprob"))

    def annotate(self, batches: list[Batch]) -> list[Batch]:
        if not self.document_weights:
            return batches
        weights = dict(enumerate(self.document_weights))
        return [_weighted(batch, weights.get(batch.step, 1.0)) for batch in batches]


def _weighted(batch: Batch, weight: float) -> Batch:
    """The batch with the column ``weight``, which is ``weight`` for the first document that has targets, and else 1."""
    heavy = next((number for number, document in enumerate(batch.documents) if any(document.targets)), -1)
    numbers = itertools.count()
    rows = []
    for row in batch.rows:
        documents = [
            replace(d, columns={**d.columns, "weight": weight if next(numbers) == heavy else 1.0})
            for d in row.documents
        ]
        rows.append(replace(row, documents=tuple(documents)))
    return replace(batch, rows=tuple(rows))


BUILT_IN: dict[str, type[Any]] = {"sft": Sft, "grpo": Grpo, "ppo": Ppo}


def all_observables(objective: Objective, *, scaled: bool = False, routed: bool = False) -> tuple[Observable, ...]:
    """All observables of a cell, in causal order: configuration, weights as loaded, random generators, the objective's
    own (outputs, losses), then gradients, norm and update of each trained model. ``scaled``: whether
    the loss scale is judged (``Scenario.judged_loss_scale``). ``routed``: whether the models have routers that are
    judged (``conformance.oracle.decoder.is_routed``)."""
    loaded = [o for role in objective.roles for o in loaded_observables(role.prefix, trained=role.trained)]
    trained = [o for role in objective.roles if role.trained for o in trained_observables(role.prefix, scaled=scaled)]
    looking = getattr(objective, "looking", ()) if routed else ()
    looked = [look_routing_observable(role.prefix, trained=role.trained) for role in looking]
    routers = [o for role in objective.roles if role.trained for o in routing_observables(role.prefix) if routed]
    return (CONFIGURATION, *loaded, GENERATORS, *looked, *routers, *objective.observables(), *trained)


def parse_objective(values: Any) -> Objective:
    """Build an objective from a dict with a ``kind`` (default ``sft``). Raises UsageError for invalid values."""
    if not isinstance(values, dict):
        if hasattr(type(values), "roles"):  # it is an objective already
            built: Objective = values
            return built
        raise UsageError(f'[objective] has to be a table with a kind, such as kind = "sft", not {shown(values)}')
    kind = values.get("kind", "sft")
    try:
        objective: Objective = TypeAdapter(_find(kind)).validate_python({**values, "kind": kind})
    except ValidationError as error:
        raise explain(error, source=f"[objective] of kind {shown(kind)}", what="objective") from None
    return objective


def objective_to_json(objective: Objective) -> dict[str, Any]:
    """Plain JSON values, which ``parse_objective`` reads back."""
    values: dict[str, Any] = TypeAdapter(type(objective)).dump_python(objective, mode="json")
    return values


def known_kinds(table: Sequence[str] | dict[str, Any], objective: Objective, *, who: str) -> None:
    """Raises UsageError if the objective's kind is not in ``table``. ``who``: whose table it is, for the message."""
    if objective.kind not in table:
        raise UsageError(
            f"{who} does not know the objective {objective.kind!r} (known: {', '.join(table)}); register its functions "
            f"there, or use another kind"
        )


def _find(kind: Any) -> type[Any]:
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
        raise UsageError(f"{shown(kind)} is not the class of an objective, see conformance/objective.py")
    return found
