"""Runs cells, judges and bisects them, and writes the reports (`parity run`); bisects one cell (`parity bisect`).

Also judges the records of an earlier run again (`parity judge`), and merges several runs (`parity merge`).
"""

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from conformance.backends.registry import codes, import_adapters
from conformance.bisect.explain import describe
from conformance.bisect.run import any_differs, bisect_cell, bisect_run
from conformance.cli import EXIT
from conformance.cli.report import Terminal, finish
from conformance.core.errors import UsageError
from conformance.core.io import Unwritable, is_unused, make_folder, owned, write_file
from conformance.core.process import Stop, seconds_of_tree, stop_code
from conformance.core.timeline import processor_table, seconds_by_phase, table, timeline, to_chrome
from conformance.data.inputs import input_digests
from conformance.judge.cells import rejudge
from conformance.judge.side_by_side import write_side_by_side
from conformance.matrix.cell import Cell
from conformance.matrix.options import Again, AtOnce, Demands, Kept, Portion, Ranks, Selection
from conformance.matrix.plan import make_plan
from conformance.matrix.profile import select_cells, selected_backends
from conformance.models.synthetic import is_large
from conformance.records.record_format import dumps
from conformance.results.history import read_baseline
from conformance.results.output_folders import merge, rewrite_summary, slim
from conformance.results.run_results import SUMMARY, read_run
from conformance.results.verdict import STATES
from conformance.runner.attempt import JudgedCell
from conformance.runner.earlier_run import cells_left, read_earlier, refuse_other_options, with_earlier_cells
from conformance.runner.phases import TraceFailed
from conformance.runner.placement import SessionConfig
from conformance.runner.preflight import check_device, leased_gpus, oracles_that_fit
from conformance.runner.session import Session
from conformance.runtime.leased_slots import lanes_of_host
from conformance.runtime.multihost.controller import hosts_of_engine
from conformance.spec.objectives import objective_class


def run_command(options: argparse.Namespace) -> int:
    return run_options(options)[1]


def run_options(options: argparse.Namespace) -> tuple[Path, int]:
    """Plans and runs cells; returns the output folder, which this process holds meanwhile, and the exit code."""
    if options.timeline and not options.timeline.parent.is_dir():
        raise UsageError(f"--timeline {options.timeline}: there is no such folder; create it, or name another file")
    timeline.begin(began := options.began or time.monotonic())
    timeline.switch("import", at=began)
    timeline.switch("plan")
    with owned(Path(options.resume), owner=_command(options)) if options.resume else contextlib.nullcontext():
        planned, cells, config = plan_run(options)
        try:
            return config.out, run_cells(planned, cells, config, options)
        finally:
            _show_timeline(options)


def _show_timeline(options: argparse.Namespace) -> None:
    timeline.switch("")
    if options.loudness == "verbose":
        busy = processor_table(timeline.spans, of_all=seconds_of_tree(os.getpid()))
        print(*table(seconds_by_phase(timeline.spans)), *busy, sep="\n", file=sys.stderr)
    if options.timeline:
        write_file(options.timeline, dumps(to_chrome(timeline.spans, began=timeline.began)))


def _command(options: argparse.Namespace) -> str:
    return shlex.join(["parity", "run", *options.arguments])


def plan_run(options: argparse.Namespace) -> tuple[Sequence[Cell], list[Cell], SessionConfig]:
    """Returns the planned cells, those of them to run, and the configuration.

    Raises UsageError for options that are invalid or conflict.
    """
    selection, again = Selection.from_options(options), Again.from_options(options)
    ranks, workers = Ranks.from_options(options), AtOnce.from_options(options).workers
    hosts = hosts_of_engine(ranks_per_gpu=ranks.ranks_per_gpu)
    check_device(ranks)
    if again.rerun and not again.resume:
        raise UsageError("--rerun selects cells of an earlier run; add --resume OUT")
    if again.resume and options.out:
        raise UsageError("--resume continues in the folder of the earlier run; omit --out")
    out = Path(again.resume) if again.resume else output_folder(options.out)
    only = selection.cells if again.rerun else ()  # of the cells of the earlier run
    selection = replace(selection, cells=()) if only else selection
    selection = with_earlier_cells(selection, out) if again.resume else selection
    text = selection.text(ranks)
    more = f" --rerun {again.rerun}" * bool(again.rerun) + "".join(f" --cells {shlex.quote(one)}" for one in only)
    try:
        plan = make_plan(selection, Demands.from_options(options), Portion.from_options(options), ranks=ranks)
    except UsageError:
        if again.resume:
            refuse_other_options(out, text, more=more)
        raise
    import_adapters(selected_backends(selection))  # while this process checks the inputs
    digests = _digests(plan.cells) if again.resume else {}  # a new run checks memory first: this reads all weights
    earlier = read_earlier(out, plan, ranks, selection=text, inputs=digests, more=more) if again.resume else None
    cells = cells_left(plan.cells, earlier, again, only=only) if earlier else list(plan.cells)
    config = SessionConfig(
        out=out,
        device=ranks.device,
        profile=selection.profile_name,
        command=_command(options),
        arguments=(*selection.arguments(without="cells"), *ranks.arguments()),
        gpus=() if hosts else leased_gpus(ranks, cells=cells, workers=workers),  # hosts lease their own
        lanes=workers or lanes_of_host(),
        oracle_lanes=oracles_that_fit(cells),
        ranks_per_gpu=ranks.ranks_per_gpu,
        large=any(is_large(cell.scenario) for cell in cells),
        hosts=hosts,
        budget_s=ranks.budget,
        fail_fast=options.fail_fast,
        floor=plan.floor,
        selected=plan.digest,
        selection=text,
        inputs=earlier.inputs if earlier else {},
        earlier=earlier,
    )
    return plan.cells, cells, config


def _digests(cells: Sequence[Cell]) -> dict[str, str]:
    """Reads all weights and data of the cells; returns digests of these files and of the code of adapters."""
    return input_digests(cell.scenario for cell in cells) | codes(one.backend for cell in cells for one in cell.phases)


def run_cells(
    planned: Sequence[Cell], cells: Sequence[Cell], config: SessionConfig, options: argparse.Namespace
) -> int:
    """Runs ``cells`` of the planned ones; returns the exit code. Signals stop the run only in the main thread."""
    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    with Stop(*signals) as stop:
        missing = [folder for folder in (config.out, *config.out.parents) if not folder.exists()]
        if config.earlier is not None:  # its folder is held
            return _run_cells(planned, cells, config, stop, options, missing=missing)
        make_folder(config.out)
        with owned(config.out, owner=config.command):
            return _run_cells(planned, cells, config, stop, options, missing=missing)


def _run_cells(
    planned: Sequence[Cell],
    cells: Sequence[Cell],
    config: SessionConfig,
    stop: Stop,
    options: argparse.Namespace,
    *,
    missing: Sequence[Path],
) -> int:
    """missing: the output folder and those above it that this run creates."""
    out, as_json, is_compared = config.out, options.json, False
    session = Session(config, check=stop.check)
    terminal = Terminal(total=len(cells), now=session.activity, loudness=options.loudness)

    def begun() -> None:
        print(f"running {len(cells)} cells; results: {out}", file=sys.stderr, flush=True)

    def progress(judged: JudgedCell) -> None:
        terminal.judged(judged.cell, judged.verdict, judged.seconds)
        stop.check()

    try:
        with terminal, session:
            session.run_all(cells, progress=progress, begun=begun, inputs=partial(_digests, planned))
            if not options.no_bisect and any_differs(out):
                timeline.switch("bisect")
                bisect_run(session, planned, say=terminal.say)
            timeline.switch("end processes")
        timeline.switch("side by side")
        write_side_by_side(out)
        is_compared = True
        timeline.switch("report")
        if Kept.from_options(options).keep != "all":
            slim(out)
        return finish(out, as_json=as_json)
    except UsageError:
        if not terminal.done:  # nothing was run: the corrected command may use the same folder
            _remove(missing)
        raise
    except KeyboardInterrupt as stopped:
        print(
            f"parity: stopped by {str(stopped) or 'SIGINT'} after {terminal.done} of {len(cells)} cells",
            file=sys.stderr,
        )
        if (out / SUMMARY).is_file():
            rewrite_summary(out)
            # The backends are not compared, because that reads all records, which takes too long after Ctrl-C.
            _report_what_is_left(out, as_json=as_json)
        else:  # the cells were still being listed
            _remove(missing)
        return stop_code(stopped)
    except Unwritable as error:
        when = "" if is_compared else f"stopped after {terminal.done} of {len(cells)} cells: "
        print(f"parity: {when}{error}", file=sys.stderr)
        return _report_what_is_left(out, as_json=as_json, compare=not is_compared)


def _remove(folders: Sequence[Path]) -> None:
    """Removes an output folder that this run created, and the folders above it, unless they hold something else."""
    for folder in folders[:1]:
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        for folder in folders[1:]:
            folder.rmdir()


def _report_what_is_left(out: Path, *, as_json: bool, compare: bool = False) -> int:
    """Writes reports as far as files can still be read and written. The exit code is always ``incomplete``."""
    try:
        if compare:
            write_side_by_side(out)
        finish(out, as_json=as_json)
    except (UsageError, Unwritable) as error:
        print(f"parity: no report: {error}", file=sys.stderr)
    return EXIT["incomplete"]


def output_folder(out: Path | None) -> Path:
    """Returns the output folder of this run. Raises UsageError if it exists and is not an empty folder."""
    if out is None:
        out = Path("parity-out") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    if not is_unused(out):
        raise UsageError(f"{out} exists and is not an empty folder; give another --out, nothing is overwritten")
    return out


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
        bisection = {"bisection": asdict(found), "text": describe(found).lines} if found else {"bisection": None}
        print(dumps(values | bisection))
    elif found is None:
        print(f"{cell}: {verdict.reason or 'agrees with the reference, so there is nothing to bisect'}")
    else:
        print(f"{cell}: {verdict.findings[0]}", *describe(found).lines, sep="\n")
    return verdict.state


def judge_command(options: argparse.Namespace) -> int:
    """Judges the records of an earlier run again."""
    for kind in options.objective:
        objective_class(kind)
    with owned(options.out, owner="parity judge"):
        return _judge(options)


def _judge(options: argparse.Namespace) -> int:
    if slim_cells := rejudge(options.out):
        print(
            f"parity: {slim_cells} cells keep their verdicts, because their tensors were not kept (parity run --keep "
            f"all keeps them)",
            file=sys.stderr,
        )
    write_side_by_side(options.out)
    for entry in read_run(options.out)[1]:
        if entry.verdict.state != "conforms":
            word, reason = STATES[entry.verdict.state].word, entry.verdict.reason.partition("\n")[0]
            print(f"{word:<8} {entry.cell}  {reason}", file=sys.stderr)
    return finish(options.out, as_json=options.json)


def merge_command(options: argparse.Namespace) -> int:
    """Merges the output folders of several shards or jobs of a run."""
    if len({os.path.realpath(folder) for folder in options.outs}) < len(options.outs):
        raise UsageError("a folder is given twice; give the folder of each shard or job once")
    out = output_folder(options.out)
    baseline = partial(read_baseline, options.baseline) if options.baseline else None
    merge(options.outs, out, command=shlex.join(["parity", "merge", *options.arguments]), baseline=baseline)
    write_side_by_side(out, parts=options.outs)
    if Kept.from_options(options).keep != "all":
        slim(out)
    return finish(out, as_json=options.json)
