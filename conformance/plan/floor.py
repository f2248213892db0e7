"""Floor: what the user's options demand of the cells that they select."""

from collections.abc import Sequence
from pathlib import Path

from conformance.backend import find_backend
from conformance.plan.cell import Cell
from conformance.plan.profile import select
from conformance.plan.selection import Demands, Selection
from conformance.record.coverage import Floor
from conformance.record.summary import read_states
from conformance.validation import UsageError


def floor_from_demands(demands: Demands, selection: Selection, cells: Sequence[Cell]) -> Floor:
    """What the cells have to reach. A backend that is asked for by name has to have a cell judged.

    Raises UsageError for what these cells cannot reach, and for an earlier run that cannot be read.
    """
    select(cells, demands.require)
    if demands.min_judged > len(cells):
        raise UsageError(
            f"--min_judged {demands.min_judged}, and {len(cells)} cells are selected; lower it or select more"
        )
    return Floor(
        require=demands.require,
        min_judged=demands.min_judged,
        backends=tuple(dict.fromkeys(find_backend(name).name for name in selection.backend)),
        against=demands.against or "",
        earlier=read_states(Path(demands.against)) if demands.against else {},
    )
