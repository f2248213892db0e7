"""Names the first wrong module of a cell, forward and backward (`parity bisect CELL`)."""

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from conformance.bisect.explain import describe
from conformance.bisect.run import bisect_cell
from conformance.cli import EXIT
from conformance.core.errors import UsageError
from conformance.matrix.cell import Cell
from conformance.matrix.options import Ranks, Selection
from conformance.matrix.profile import select_cells
from conformance.records.record_format import dumps
from conformance.runner.phases import TraceFailed
from conformance.runner.placement import SessionConfig
from conformance.runner.preflight import check_device, leased_gpus
from conformance.runner.session import Session


def bisect_command(options: argparse.Namespace) -> int:
    options.cells = [options.cell]
    selection, ranks = Selection.from_options(options), Ranks.from_options(options)
    check_device(ranks)
    cells = select_cells(selection)
    if len(cells) != 1:
        raise UsageError(f"{options.cell} matches {len(cells)} cells; give the id of one, as parity list shows it")
    state = _bisect(cells[0], ranks=ranks, as_json=options.json)
    return EXIT[{"infrastructure": "incomplete", "differs": "differs"}.get(state, "conforms")]


def _bisect(cell: Cell, *, ranks: Ranks, as_json: bool) -> str:
    """Prints the first wrong module of the cell; returns the cell's state.

    Raises UsageError for a cell that cannot be bisected.
    """
    print(f"bisecting {cell}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        config = SessionConfig(
            out=Path(folder),
            device=ranks.device,
            gpus=leased_gpus(ranks),
            ranks_per_gpu=ranks.ranks_per_gpu,
            budget_s=ranks.budget,
        )
        with Session(config) as session:
            try:
                verdict, found = bisect_cell(session, cell)
            except TraceFailed as error:
                print(f"parity: {error}", file=sys.stderr)
                return "infrastructure"
    if as_json:
        where = found.models[0].where if found and found.models else None
        values = {"cell": str(cell), "state": verdict.state, "reason": verdict.reason, "where": where}
        bisection = {"bisection": asdict(found), "told": describe(found).lines} if found else {"bisection": None}
        print(dumps(values | bisection))
    elif found is None:
        print(f"{cell}: {verdict.reason or 'agrees with the oracle, so there is nothing to bisect'}")
    else:
        print(f"{cell}: {verdict.findings[0]}", *describe(found).lines, sep="\n")
    return verdict.state
