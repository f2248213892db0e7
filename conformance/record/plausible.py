"""Plausible: whether what ``bisect.json`` says of a cell can be said of its verdict, its records and its run; no torch.

A digest keeps the file from being edited by hand, and the digests of the records from being of another run. This is
what remains: a stage, a step, a module, a rank or another cell that the cell cannot have (claim 9).
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from conformance.layout import Layout
from conformance.objective import parse_objective
from conformance.observable import stages
from conformance.record.bisection import Bisected, Bisection, First
from conformance.record.format import Line
from conformance.record.results import Entry
from conformance.record.states import State

TIED = "lm_head"  # has no weight of its own where it is that of the embedding


@dataclass(frozen=True, kw_only=True)
class _Cell:
    """What the bisection of a cell may name."""

    modules: Set[str]
    parameters: Set[str]
    ranks: int
    rows: int


def implausible(found: Bisection, entry: Entry, header: Line, states: Mapping[str, State]) -> str:
    """What of a bisection cannot be; empty if all can.

    header: of the record of the cell's first leg. states: of the cells of the run by id.
    """
    try:
        return next(_contradictions(found, entry, header, states), "")
    except (KeyError, TypeError, ValueError) as error:  # UsageError among them
        return f"cannot be held against the record of the cell ({error!r})"


def _contradictions(found: Bisection, entry: Entry, header: Line, states: Mapping[str, State]) -> Iterator[str]:
    precision, _, rest = entry.variant.partition("/")
    variant = "/".join(filter(None, ("exact", rest)))
    twin = "/".join([entry.scenario, entry.model, entry.backend, entry.layout, variant])
    if found.traced != twin:
        yield f"is of {found.traced}, and the exact tier of this cell is {twin}"
    if found.stage not in stages(entry.observables):
        yield f"names the stage {found.stage!r}, which this cell has not"
    if precision == "exact" and entry.verdict.findings:
        first = entry.verdict.findings[0]
        if found.stage != first.stage:
            yield f"names the stage {found.stage}, and the verdict says that {first.stage} differs first"
        if found.models and found.step != max(0, first.step):
            yield f"is of step {found.step}, and the verdict says that step {first.step} differs first"
    scenario = header["scenario"]
    if not 0 <= found.step < scenario["steps"]:
        yield f"is of step {found.step} of {scenario['steps']}"
    roles = [role.name for role in parse_objective(scenario["objective"]).roles if role.trained]
    if found.models and sorted(model.model for model in found.models) != sorted(roles):
        yield f"is of the models {', '.join(model.model for model in found.models)}; trained are {', '.join(roles)}"
    parameters = {name for quantity in entry.verdict.quantities if "." in (name := _parameter(quantity.tensor))}
    cell = _Cell(
        modules={
            TIED,
            *(".".join(parts[:n]) for p in parameters for parts in [p.split(".")] for n in range(1, len(parts))),
        },
        parameters=parameters,
        ranks=Layout.parse(entry.layout).world_size,
        rows=scenario["data"]["rows"],
    )
    for model in found.models:
        yield from _of_model(model, cell)
    if found.collectives and (other := found.collectives.conforming) and states.get(other) != "conforms":
        yield f"holds collectives against {other}, which does not conform in this run"


def _modules_around(parameter: str) -> Iterator[str]:
    parts = parameter.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def _parameter(tensor: str) -> str:
    """The name of a parameter in that of a quantity, without what is said of it; empty if it is of all."""
    return "" if ": " in tensor else tensor.partition(" ")[0]


def _of_model(found: Bisected, cell: _Cell) -> Iterator[str]:
    named = [*found.unseen, *found.unknown]
    for first, direction in ((found.forward, "forward"), (found.backward, "backward")):
        if first:
            named += [first.module, first.wrong.key[0], *([first.before[0]] if first.before else [])]
            yield from _of_first(first, direction, cell)
    if unknown := [name for name in named if name not in cell.modules]:
        yield f"names the module {unknown[0]!r}, which this model has not"
    if unknown := [name for name in found.parameters if name not in cell.parameters]:
        yield f"names the parameter {unknown[0]!r}, which this model has not"
    if len(found.parameters) > found.gradients or not set(found.unknown) <= set(found.unseen):
        yield "counts more than there is"
    if found.forward and found.backward:
        yield "names a wrong backward pass, although wrong gradients follow from the wrong forward pass"


def _of_first(first: First, direction: str, cell: _Cell) -> Iterator[str]:
    wrong, (name, side) = first.wrong, first.wrong.key
    sides = ("input", "output") if direction == "forward" else ("gradient of the output", "gradient of the input")
    if first.direction != direction or side not in sides:
        yield f"has the {side} of {name} as what is wrong {direction}"
    if not (name == first.module or name.startswith(f"{first.module}.")):
        yield f"names the module {first.module}, and what is wrong is the {side} of {name}"
    ranks: Sequence[int] = (*wrong.ranks, *wrong.hold, *wrong.silent, *first.given_by)
    if any(rank >= cell.ranks for rank in ranks) or not set(wrong.ranks) <= set(wrong.hold):
        yield f"names ranks {', '.join(map(str, sorted(set(ranks))))} of {cell.ranks}"
    if any(row >= cell.rows for row, _ in wrong.places) or wrong.tokens > wrong.compared or wrong.rows > cell.rows:
        yield f"names rows or tokens that a step of {cell.rows} rows has not"
