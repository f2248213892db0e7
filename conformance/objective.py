"""Objective: what a training step minimises, as configuration: ``[objective] kind = "sft"`` in a scenario.

A tagged union that can be extended. ``kind`` is the name of a built-in objective, or ``module:Class`` of one that lives
elsewhere. The class holds configuration and declarations only; how the loss is computed is written twice and apart, in
conformance/oracle/objectives.py and in impl/objectives.py, each with a table by kind. An objective that a side does not
know is an error before anything runs, never a silent SFT.
"""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar, Literal, Protocol

from pydantic import TypeAdapter, ValidationError
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
    trained_observables,
)
from conformance.rl import Grpo, Ppo
from conformance.role import POLICY, Role
from conformance.validation import STRICT, UsageError, explain, one_line, shown


class Objective(Protocol):
    """What a class of the union has; a frozen pydantic dataclass with a field ``kind``.

    reads: what the data set holds: ``samples`` (pairs of texts) or ``rollouts`` (conformance.inputs.rollouts).
    disable_dropout: whether models run without the dropout of their configuration in every mode, updates included.
    """

    reads: ClassVar[Literal["samples", "rollouts"]]
    disable_dropout: ClassVar[bool]

    @property
    def kind(self) -> str: ...

    @property
    def roles(self) -> tuple[Role, ...]:
        """The models of a cell, frozen ones first. The policy, if there is one, is POLICY."""
        ...

    def observables(self) -> tuple[Observable, ...]:
        """What is observed of the forward passes and the losses, in causal order; the engine declares the rest."""
        ...

    def annotate(self, batches: list[Batch]) -> list[Batch]:
        """The frozen batches with the columns filled in; the same for the same batches."""
        ...


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Sft:
    """Supervised fine-tuning: the mean of -log p over all target tokens of the optimizer step."""

    kind: Literal["sft"] = "sft"
    reads: ClassVar[Literal["samples", "rollouts"]] = "samples"
    disable_dropout: ClassVar[bool] = False
    roles: ClassVar[tuple[Role, ...]] = (POLICY,)

    def observables(self) -> tuple[Observable, ...]:
        return (LOGPROBS, TOKEN_COUNT, replace(LOSS, made_of="logprob"))

    def annotate(self, batches: list[Batch]) -> list[Batch]:
        return batches


BUILT_IN: dict[str, type[Any]] = {"sft": Sft, "grpo": Grpo, "ppo": Ppo}


def all_observables(objective: Objective) -> tuple[Observable, ...]:
    """The objective's and the engine's observables, in causal order: weights, outputs, losses, then model by model."""
    loaded = [o for role in objective.roles for o in loaded_observables(role.prefix, trained=role.trained)]
    trained = [o for role in objective.roles if role.trained for o in trained_observables(role.prefix)]
    return (CONFIGURATION, *loaded, GENERATORS, *objective.observables(), *trained)


def parse_objective(values: Any) -> Objective:
    """Build an objective from plain values with a ``kind``. Raises UsageError that says what may stand there."""
    if not isinstance(values, dict):
        if hasattr(type(values), "roles"):  # one that has been built already
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
    """Plain JSON values; ``parse_objective`` reads them back."""
    values: dict[str, Any] = TypeAdapter(type(objective)).dump_python(objective, mode="json")
    return values


def known_kinds(table: Sequence[str] | dict[str, Any], objective: Objective, *, who: str) -> None:
    """Raises UsageError where ``who`` has no functions for an objective."""
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
    except Exception as error:  # whatever somebody's module does when it is imported
        raise UsageError(
            f"objective {shown(kind)} cannot be imported ({one_line(error)}); check the spelling and PYTHONPATH"
        ) from None
    if not isinstance(found, type) or not hasattr(found, "roles"):
        raise UsageError(f"objective {shown(kind)} is no class of an objective, see conformance/objective.py")
    return found
