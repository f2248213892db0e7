"""What a planted fault is.

Planting a fault: wrap a seam while a cell runs, and restore it afterwards.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from conformance.backends.protocol import Backend
from conformance.core.errors import UsageError, did_you_mean

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A bug that can be planted.

    summary: what the bug does. source: a public report of such a bug. seam: the name of the function that it wraps.
    stage: the stage at which it is expected to be found first. loss_blind: whether the loss of step 0 is still exact.
    needs: in words, the conditions under which the fault changes anything at all.
    wrap: returns the faulty function, from the original one.
    """

    name: str
    summary: str
    source: str
    seam: str
    stage: str
    loss_blind: bool
    needs: str
    wrap: Callable[[Function], Function]


def not_called(function: Function) -> Function:
    """A ``wrap`` for functions without a result: the faulty function does nothing."""

    def faulty(*args: Any, **kwargs: Any) -> None:
        return None

    return faulty


ENTRY_POINT_GROUP = "parity.faults"


@cache
def catalogue() -> dict[str, Fault]:
    """All faults by name. Each entry point of the group ``parity.faults`` is a tuple of faults."""
    found = sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name)
    return {fault.name: fault for entry in found for fault in entry.load()}


def find_fault(name: str) -> Fault:
    """Look up a fault by its name. Raises UsageError, which lists the known faults, for any other name."""
    if name not in catalogue():
        near = did_you_mean(name, catalogue())
        raise UsageError(f"unknown fault {name!r}; {near or 'known: ' + ', '.join(catalogue())}".rstrip())
    return catalogue()[name]


@contextlib.contextmanager
def plant(names: Sequence[str], adapter: type[Backend]) -> Iterator[Counter[str]]:
    """Plant the named faults: wrap the seams that they need, and restore them on exit.

    Yields a counter of the calls of each fault in this process. Raises UsageError if the backend lacks a seam.
    """
    calls: Counter[str] = Counter()
    seams: dict[str, str] = getattr(adapter, "seams", {})
    with contextlib.ExitStack() as stack:
        for name in names:
            fault = find_fault(name)
            if fault.seam not in seams:
                raise UsageError(
                    f"fault {name!r} needs the seam {fault.seam!r}, which {adapter.__name__} does not name; "
                    f"its seams: {', '.join(seams) or 'none'}"
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
