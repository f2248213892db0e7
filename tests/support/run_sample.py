"""Writes a small output folder with complete synthetic records: two precisions, two backends, a cell of two phases.

Every cell conforms, except for one that is unsupported. The folder has everything that is read of one: records with
tensors, the oracle's in two precisions, verdicts, summary, comparison, logs.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from report_sample import RUN, write_cell
from side_sample import SCENARIO, STEPS, write_oracle, write_record

from conformance.judge.cells import rejudge
from conformance.judge.side_by_side import write_side_by_side
from conformance.results.run_results import Entry, cell_summary, write_summary
from conformance.results.verdict import State, Verdict
from conformance.spec.objectives import all_observables
from conformance.spec.precision import PrecisionName, noise_runs

EXACT = "sft-tiny/pangu/fsdp2/dp2/exact"
OTHER = "sft-tiny/pangu/megatron/tp2/exact"
RESUMED = "sft-tiny/pangu/fsdp2/dp2/exact/resume"
FP32 = "sft-tiny/pangu/fsdp2/dp2/fp32"
UNSUPPORTED = "sft-tiny/pangu/megatron/pp2/exact"
CELLS = (EXACT, OTHER, RESUMED, FP32, UNSUPPORTED)
JUDGED = CELLS[:-1]
FOLDERS = {cell: f"cells/{number:02d}" for number, cell in enumerate(CELLS)}
FIRST_PHASE = 2  # steps of the first phase of RESUMED
ORACLE = "oracle/tiny"
ROUNDING: dict[PrecisionName, float] = {"exact": 1e-15, "fp32": 1e-7}


def record_folders(cell: str) -> list[str]:
    """The folders of a cell's records, in order, from the output folder."""
    phases = 0 if cell == UNSUPPORTED else 2 if cell == RESUMED else 1
    return [f"{FOLDERS[cell]}/legs/{phase}/record" for phase in range(phases)]


def write_sample_run(out: Path) -> Path:
    """Write the folder and return it."""
    write_oracle(out / ORACLE / "float64", SCENARIO)
    fp32 = replace(SCENARIO, precision="fp32")
    for run in noise_runs("fp32"):
        write_oracle(out / ORACLE / run, fp32, precision=run, rounding=ROUNDING["fp32"])
    write_summary(out, RUN, [cell_summary(_write(out, cell)) for cell in CELLS])
    rejudge(out)
    write_side_by_side(out)
    return out


def _write(out: Path, cell: str) -> Entry:
    _, _, backend, layout, *_ = cell.split("/")
    scenario = replace(SCENARIO, precision="fp32" if cell == FP32 else "exact")
    for folder, (first, until) in zip(record_folders(cell), _phases(cell), strict=True):
        header = {"cell": cell, "layout": layout, "backend": {"name": backend, "default_zero": None}}
        rounding = ROUNDING[scenario.precision]
        seed = 1 + CELLS.index(cell)
        write_record(
            out / folder,
            scenario,
            header,
            rounding=rounding,
            seed=seed,
            first=first,
            until=until,
            unread=until - 2 if until - first > 1 else None,
        )
        logs = (out / folder).with_name("logs")
        logs.mkdir()
        (logs / "rank-0.log").write_text("step 0\nstep 1\n")
    state: State = "unsupported" if cell == UNSUPPORTED else "not_run"
    return write_cell(
        out,
        cell,
        folder=FOLDERS[cell],
        records=tuple(str(Path(f).relative_to(FOLDERS[cell])) for f in record_folders(cell)),
        oracle=None if cell == UNSUPPORTED else "../../oracle/tiny",
        observables=all_observables(SCENARIO.objective),
        verdict=Verdict(state=state, reason="" if state == "not_run" else "there are no stages here"),
    )


def _phases(cell: str) -> Iterator[tuple[int, int]]:
    """First step of each phase, and the one after its last."""
    if cell == RESUMED:
        yield 0, FIRST_PHASE
        yield FIRST_PHASE, STEPS
    elif cell != UNSUPPORTED:
        yield 0, STEPS
