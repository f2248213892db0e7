"""The comparison of a traced cell with the oracle, as a task of a world of one rank: it may take long, or too much
memory, and then ends alone."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from conformance.batch import read_batches
from conformance.bisect.capture import read_pieces
from conformance.bisect.find import bisect
from conformance.bisect.reference import references
from conformance.observable import model_key
from conformance.record.bisection import Bisected, most_telling_first
from conformance.record.tensors import read_record
from conformance.role import Role
from conformance.scenario import Scenario, parse_scenario
from conformance.world import RankContext


def find(
    rank: RankContext,
    *,
    scenario: dict[str, Any],
    models: dict[str, str],
    batches: str,
    oracle: str,
    traced: str,
    step: int,
) -> list[dict[str, Any]]:
    """What was found of each trained model of a cell that was traced at ``step``, as JSON values, the most telling
    first. ``oracle``: the oracle's record of the cell. ``traced``: the folder of what was traced."""
    rank.beat(f"step {step}")
    found = bisect_traced(
        scenario=parse_scenario(scenario),
        models={role: Path(folder) for role, folder in models.items()},
        batches=Path(batches),
        oracle=Path(oracle),
        traced=Path(traced),
        step=step,
    )
    return [asdict(one) for one in found]


def bisect_traced(
    *, scenario: Scenario, models: dict[str, Path], batches: Path, oracle: Path, traced: Path, step: int
) -> tuple[Bisected, ...]:
    """See ``find``. The oracle begins the step with its own weights."""

    def weights(before: int, role: Role) -> dict[str, Tensor] | None:
        if not before or not role.trained:
            return None
        return _of_key(model_key(role.prefix, "weight"), oracle, before - 1)

    right = references(scenario=scenario, models=models, batches=read_batches(batches), step=step, weights=weights)
    roles = [role for role in scenario.objective.roles if role.trained]
    gradients = {role.name: _of_key(model_key(role.prefix, "gradient"), traced / "record", step) for role in roles}
    return most_telling_first(
        [bisect(name, read_pieces(traced / "trace" / name), gradients[name], right[name]) for name in gradients]
    )


def _of_key(key: str, record: Path, step: int) -> dict[str, Tensor]:
    """The tensors of an observable at a step of a record, by the parameter's name."""
    tensors = read_record(record).steps[step].tensors()
    return {name.removeprefix(f"{key}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{key}/")}
