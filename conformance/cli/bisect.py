"""The command `parity bisect CELL`."""

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from conformance.bisect.explain import told
from conformance.bisect.run import bisect_cell
from conformance.matrix.cell import Cell
from conformance.matrix.options import Ranks
from conformance.records.record_format import dumps
from conformance.runner.phases import TraceFailed
from conformance.runner.preflight import leased_gpus
from conformance.runner.session import Session
from conformance.runner.session_config import SessionConfig


def run(cell: Cell, *, ranks: Ranks, as_json: bool) -> str:
    """Print where the cell is wrong first; returns the cell's state.

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
        told_of_it = {"bisection": asdict(found), "told": told(found).lines} if found else {"bisection": None}
        print(dumps(values | told_of_it))
    elif found is None:
        print(f"{cell}: {verdict.reason or 'agrees with the oracle, so there is nothing to bisect'}")
    else:
        print(f"{cell}: {verdict.findings[0]}", *told(found).lines, sep="\n")
    return verdict.state
