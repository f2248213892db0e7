"""Records the input and output of every module of the oracle in one optimizer step, and their gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from conformance.oracle.primitives import Function, Tap
from conformance.oracle.run import observe_step
from conformance.results.bisection import Key
from conformance.spec.batch import Batch, Document
from conformance.spec.known_defects import Defect
from conformance.spec.observables import Role
from conformance.spec.scenario import Scenario


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The oracle's values and gradients of one step.

    values: float64 (tokens, features) by module and side; rows lie end to end. known: bool (tokens,), False in
    documents without targets, which the oracle does not run. order: inputs and outputs in the order of the forward
    pass. gradients: those of the parameters. places: the row of each token, and its position in the row.
    """

    values: dict[Key, Tensor]
    known: Tensor
    order: tuple[Key, ...]
    gradients: dict[str, Tensor]
    places: tuple[tuple[int, int], ...]


def references(
    *,
    scenario: Scenario,
    models: Mapping[str, Path],
    batches: Sequence[Batch],
    step: int,
    weights: Callable[[int, Role], dict[str, Tensor] | None],
    defects: tuple[Defect, ...] = (),
) -> dict[str, Reference]:
    """Runs the oracle on a step, for each trained model, by role; see conformance.oracle.run.observe_step."""
    batch = batches[step]
    taps = {role.name: _Recording(batch) for role in scenario.objective.roles if role.trained}
    observed = observe_step(
        scenario=scenario, models=models, batches=batches, step=step, weights=weights, taps=taps, defects=defects
    )
    places = tuple((row.index, at) for row in batch.rows for at in range(row.length))
    return {
        name: Reference(
            values=tap.values,
            known=tap.known,
            order=tuple(tap.order),
            gradients=observed.gradients[name],
            places=places,
        )
        for name, tap in taps.items()
    }


@dataclass
class _Recording(Tap):
    batch: Batch
    values: dict[Key, Tensor] = field(default_factory=dict)
    order: dict[Key, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.total = sum(row.length for row in self.batch.rows)
        self.known = torch.zeros(self.total, dtype=torch.bool)

    def begins(self, documents: Sequence[tuple[int, int, Document]]) -> None:
        places = []  # -1 where the batch has no token, or the document no target
        for row, number, document in documents:
            before = sum(other.length for other in self.batch.rows[:row])
            start = before + sum(len(one.tokens) for one in self.batch.rows[row].documents[:number])
            end = start + len(document.tokens)
            places.append(torch.arange(start, end) if any(document.targets) else torch.full((end - start,), -1))
        self.at = torch.cat(places)
        self.known[self.at[self.at >= 0]] = True

    def module(self, name: str, function: Function, x: Tensor) -> Tensor:
        at = self.at  # gradients arrive when ``self.at`` belongs to another document
        alias = x.view_as(x)
        self._keep((name, "input"), at, alias)
        result = function(alias)
        self._keep((name, "output"), at, result)
        return result

    def _keep(self, key: Key, at: Tensor, x: Tensor) -> None:
        self.order[key] = None
        self._set(key, at, x.detach())
        if x.requires_grad:
            gradient_key = cast(Key, (key[0], f"gradient of the {key[1]}"))
            x.register_hook(lambda gradient: self._set(gradient_key, at, gradient))

    def _set(self, key: Key, at: Tensor, x: Tensor) -> None:
        x = x if x.is_floating_point() else x[:, None]
        if key not in self.values:
            self.values[key] = torch.zeros(self.total, x.shape[1], dtype=torch.float64)
        self.values[key][at[at >= 0]] = x[at >= 0].double()
