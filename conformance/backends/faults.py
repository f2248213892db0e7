"""Defines faults, finds them by name, and plants them: wraps a patch point while a cell runs, and restores it."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Literal

from conformance.core.errors import UsageError, did_you_mean
from conformance.core.packages import entry_points_of
from conformance.spec.precision import HALF_PRECISIONS, PrecisionName

Function = Callable[..., Any]
Resumes = Literal["checkpoint", "state", "export", "merge"]
# Common checks against the reference at the first step: the loss to the last digit, or loss and gradient norm of policy
# and critic within 1 %. The second one is measured only for faults of reinforcement learning.
Gate = Literal["loss", "loss and norm"]


@dataclass(frozen=True, kw_only=True)
class FaultCells:
    """Names one cell for each backend in which a fault changes something; backends without its patch point have none.

    scenario, model: names in the fixtures. half_scenario: the scenario in half precision, if it is another one.
    layouts: the layout of the cell by backend. dropout: whether the model's configuration has dropout in attention.
    saves: what a second phase resumes from; None for a cell of one phase.
    unobservable: why the fault changes nothing that could be observed, by precision.
    """

    scenario: str
    model: str
    layouts: Mapping[str, str]
    half_scenario: str = ""
    dropout: bool = False
    saves: Resumes | None = None
    unobservable: Mapping[PrecisionName, str] = field(default_factory=dict)

    def scenario_in(self, precision: PrecisionName) -> str:
        """Returns the scenario of the cell in this precision."""
        return self.half_scenario if self.half_scenario and precision in HALF_PRECISIONS else self.scenario


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Describes a bug that can be planted.

    summary: the effect of the bug. source: a public report of such a bug. seam: the name of the function that it wraps.
    stage: the first stage at which the suite has to find it. half_stage: in half precision, if it is another one.
    cells: where it changes something, by backend. blind: the gates that pass in its cell although the fault is planted.
    needs: the conditions under which the fault changes anything, in words. wrap: returns the faulty function, from the
    original one.
    """

    name: str
    summary: str
    source: str
    seam: str
    stage: str
    cells: FaultCells
    blind: tuple[Gate, ...] = ()
    needs: str
    wrap: Callable[[Function], Function]
    half_stage: str = ""

    def stage_in(self, precision: str) -> str:
        """Returns the first stage at which the suite has to find the fault in this precision."""
        return self.half_stage if self.half_stage and precision in HALF_PRECISIONS else self.stage


ENTRY_POINT_GROUP = "parity.faults"


@cache
def catalogue() -> dict[str, Fault]:
    """Returns all faults by name. Each entry point of the group ``parity.faults`` is a tuple of faults."""
    found = sorted(entry_points_of(ENTRY_POINT_GROUP), key=lambda entry: entry.name)
    return {fault.name: fault for entry in found for fault in entry.load()}


def find_fault(name: str, known: Mapping[str, Fault] | None = None) -> Fault:
    """Finds a fault by its name. Raises UsageError, which lists the known faults, for any other name.

    known: the faults by name; those of the entry points by default.
    """
    known = catalogue() if known is None else known
    if name not in known:
        near = did_you_mean(name, known)
        raise UsageError(f"unknown fault {name!r}; {near or 'known: ' + ', '.join(known)}".rstrip())
    return known[name]


def needs_in_words(name: str) -> str:
    """Says what a fault needs to change anything, and names a cell of each backend that has it."""
    if (fault := catalogue().get(name)) is None:  # records are judged where the package with the fault is missing, too
        return f"{name} comes from a package that is not installed here; install it to read what the fault needs"
    where, then = f"{fault.cells.scenario}/{fault.cells.model}", " that resumes" if fault.cells.saves else ""
    cells = [f"{where}/{backend}/{layout}" for backend, layout in fault.cells.layouts.items()]
    return f"{name} needs {fault.needs}, as in a cell of {' or '.join(cells)}{then}"


def faults_of(engine: type) -> dict[str, Fault]:
    """Returns the faults that may be planted in a rollout engine, by name. It names the tuple of them in ``faults``."""
    module, _, attribute = getattr(engine, "faults", "").partition(":")
    return {fault.name: fault for fault in getattr(import_module(module), attribute)} if module else {}


@contextlib.contextmanager
def plant(names: Sequence[str], adapter: type, known: Mapping[str, Fault] | None = None) -> Iterator[Counter[str]]:
    """Plants the named faults: wraps their patch points, and restores them on exit. known: see find_fault.

    Yields a counter of the calls of each fault in this process. Raises UsageError if the backend lacks a patch point.
    """
    calls: Counter[str] = Counter()
    seams: dict[str, str] = getattr(adapter, "seams", {})
    with contextlib.ExitStack() as stack:
        for name in names:
            fault = find_fault(name, known)
            if fault.seam not in seams:
                raise UsageError(
                    f"fault {name!r} needs the patch point {fault.seam!r}, which {adapter.__name__} does not have; "
                    f"its patch points: {', '.join(seams) or 'none'}"
                )
            stack.enter_context(_wrapped(seams[fault.seam], fault, calls))
        yield calls


@contextlib.contextmanager
def _wrapped(seam: str, fault: Fault, calls: Counter[str]) -> Iterator[None]:
    module, _, path = seam.partition(":")
    *parents, attribute = path.split(".")
    owner: Any = import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, attribute)
    faulty = fault.wrap(original)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[fault.name] += 1
        return faulty(*args, **kwargs)

    setattr(owner, attribute, counted)
    try:
        yield
    finally:
        setattr(owner, attribute, original)
