"""Auto: after the cells of a run, its first differing cells are bisected, a cell for each group and backend.

It changes no verdict, and what fails is said in a line. Cells of small worlds come first, the exact tier before others.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain, zip_longest
from pathlib import Path

from conformance.bisect.run import bisect_judged, exact_twin, not_bisected
from conformance.bisect.tell import told
from conformance.layout import Layout
from conformance.plan.cell import Cell
from conformance.record.bisection import write_bisection
from conformance.record.results import SUMMARY, VERDICT, read_entry, read_output_json
from conformance.run.session import Session
from conformance.validation import one_line

MOST = 8  # cells of a run that are bisected; the others are one command each
Group = tuple[str, str, str, str]  # scenario, model, variant and backend


def any_differs(out: Path) -> bool:
    """Whether the summary in ``out`` has a cell that differs."""
    return "differs" in _states(out).values()


def bisect_run(session: Session, cells: Sequence[Cell], *, say: Callable[[str], None]) -> None:
    """Bisect the first differing cell of each group of a finished run, and write ``bisect.json`` beside its verdict.

    ``say`` gets a line about each.
    """
    states = _states(session.config.out)
    of_state = {state: [cell for cell in cells if states.get(str(cell)) == state] for state in ("differs", "conforms")}
    chosen = list(_chosen([cell for cell in of_state["differs"] if not not_bisected(session, cell)]))
    for cell in chosen[:MOST]:
        alike = [other for other in of_state["conforms"] if _group(other) == _group(exact_twin(cell))]
        said = _bisect(session, cell, _most_alike(session, cell, alike))
        session.check()
        say(f"bisect {cell}: {said}")
    if len(chosen) > MOST:
        say(f"{len(chosen) - MOST} more groups differ and were not bisected; parity bisect CELL does it")


def _bisect(session: Session, cell: Cell, conforming: Cell | None) -> str:
    """Bisect one cell; returns what is to be said."""
    try:
        finding = read_entry(session.folder(cell) / VERDICT).verdict.findings[0]
        found = bisect_judged(session, cell, finding, conforming)
        session.check()
        write_bisection(session.folder(cell), found)
    except Exception as error:  # the run and its verdicts stand, whatever this one ends with
        return f"not bisected: {type(error).__name__}: {one_line(error)}"
    return told(found).answer


def _states(out: Path) -> Mapping[str, str]:
    return {cell["id"]: cell["state"] for cell in read_output_json(out / SUMMARY)["cells"]}


def _group(cell: Cell) -> Group:
    return cell.scenario.name, cell.scenario.model_name, cell.variant, cell.backend


def _chosen(differ: Sequence[Cell]) -> Iterator[Cell]:
    """The smallest cell of each group; backends take turns."""
    groups: dict[Group, list[Cell]] = defaultdict(list)
    for cell in sorted(differ, key=lambda cell: (cell.scenario.precision != "exact", cell.world_size)):
        groups[_group(cell)].append(cell)
    of_backends: dict[str, list[Cell]] = defaultdict(list)
    for first, *_ in groups.values():
        of_backends[first.backend].append(first)
    return filter(None, chain.from_iterable(zip_longest(*of_backends.values())))


def _most_alike(session: Session, cell: Cell, others: Sequence[Cell]) -> Cell | None:
    """Of the others that can be traced, the one that is cut in the most alike way, and of these the smallest."""
    (leg,) = cell.legs

    def apart(other: Cell) -> tuple[int, int]:
        layout = other.legs[0].layout
        same = [getattr(layout, f.name) == getattr(leg.layout, f.name) for f in fields(Layout)]
        return same.count(False), other.world_size

    return min((other for other in others if not not_bisected(session, other)), key=apart, default=None)
