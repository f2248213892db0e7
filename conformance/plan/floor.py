"""Floor: how much the run has to judge at least, from the user's options."""

from collections.abc import Sequence

from conformance.history.earlier import read_baseline
from conformance.plan.cell import Cell
from conformance.plan.profile import select, selected_backends
from conformance.plan.selection import Demands, Ranks, Selection
from conformance.record.coverage import Floor
from conformance.validation import UsageError


def floor_from_demands(
    demands: Demands, selection: Selection, cells: Sequence[Cell], *, ranks: Ranks, shard: str = ""
) -> Floor:
    """The floor for a run of ``cells``, or of one ``shard`` of them.

    Each backend that the user selected by name needs at least one judged cell.

    Raises UsageError for a demand that these cells cannot meet, and for an earlier run that cannot be read.
    """
    select(cells, demands.require)
    if demands.baseline and shard:
        raise UsageError("--baseline is about the cells of all shards together: give it to parity merge")
    if demands.min_judged > len(cells):
        raise UsageError(
            f"--min_judged {demands.min_judged}, but only {len(cells)} cells are selected; lower it or select more"
        )
    return Floor(
        require=demands.require,
        min_judged=demands.min_judged,
        backends=tuple(entry.name for entry in selected_backends(selection)) if selection.backend else (),
        baseline=read_baseline(demands.baseline, selection.text(ranks)) if demands.baseline else None,
        shards=(shard,) if shard else (),
        planned=tuple(map(str, cells)) if shard else (),
        whole=not shard,
    )
