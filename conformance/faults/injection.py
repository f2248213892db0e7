"""Planting a fault: wrap a seam while a cell runs, and restore it afterwards."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from conformance.backend import Backend
from conformance.faults.fault import Fault
from conformance.validation import UsageError, did_you_mean

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
