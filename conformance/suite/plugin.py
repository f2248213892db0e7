"""Adds the options of ``pytest --pyargs conformance.suite``, and writes one report for all pytest-xdist workers.

Before the first cell runs, the output folder lists every cell as not run, and the report is made from the files in this
folder. So if a worker crashes or the run is stopped, the summary is incomplete, never green.

Pytest loads this module in every run wherever the package is installed. So it imports nothing slow, and does nothing
unless the suite is among the tests.
"""

import signal
import threading
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from conformance.core.io import is_unused
from conformance.core.process import Stop, Stopped
from conformance.matrix.options import NO_BISECT, Demands, Kept, Output, Portion, Ranks, Selection

OUT = pytest.StashKey[Path]()
RESOURCES = pytest.StashKey[dict[str, float | None]]()  # fields of a conformance.core.host.HostResources, for workers
USAGE = pytest.StashKey[str]()  # the message of a UsageError that was raised when the cells were collected
STOP = pytest.StashKey[Stop]()  # the handler of signals
LINES = pytest.StashKey[list[str]]()
NOT_BISECTED = pytest.StashKey[list[str]]()  # a line about each cell that could not be bisected


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity", "conformance of LLM training backends (pytest --pyargs conformance.suite)")
    for kind in (Selection, Demands, Portion, Ranks, Output, Kept):
        for option in kind.options():
            group.addoption(f"--parity-{option.name}", dest=f"parity_{option.field}", **option.about)
    group.addoption("--parity-no-bisect", action="store_true", help=NO_BISECT)


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the output folder, once per run. It is created when the first cell is about to run."""
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        config.stash[OUT] = Path(worker["parity_out"])
        return
    if getattr(config.option, "numprocesses", None) and is_on_hosts(config):
        raise pytest.UsageError("hosts work for one process, which runs cells in parallel; omit -n")
    out: Path | None = config.option.parity_out
    if out is not None and not is_unused(out):
        raise pytest.UsageError(
            f"{out} exists and is not an empty folder; give another --parity-out, nothing is overwritten"
        )
    default = Path("parity-out") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    config.stash[OUT] = Path.cwd() / (out or default)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Gives each new xdist worker the output folder, and the memory and disk that were free before the first worker."""
    from conformance.core.host import host_resources_of

    out, stash = node.config.stash[OUT], node.config.stash
    if RESOURCES not in stash:
        stash[RESOURCES] = vars(host_resources_of(out))
    node.workerinput |= {"parity_out": str(out), "parity_resources": stash[RESOURCES]}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Ends the run if the options cannot be used. An xdist worker then runs nothing, and reports the message."""
    if USAGE in config.stash:
        items.clear()
        if not is_worker(config):
            raise pytest.UsageError(config.stash[USAGE])
        config.workeroutput["parity_usage"] = config.stash[USAGE]  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any) -> None:
    """Handles signals from the time when an xdist worker has found cells and created the output folder."""
    if node.config.stash[OUT].is_dir() and STOP not in node.config.stash:
        stop_at_signals(node.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keeps the usage error of an xdist worker that ends. A crashed worker has no output."""
    message = getattr(node, "workeroutput", {}).get("parity_usage")
    if message:
        node.config.stash[USAGE] = message


@pytest.hookimpl(wrapper=True, trylast=True)  # around the ends of workers and fixtures, before pytest's own summary
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Writes the results, also if the run is stopped only here."""
    if is_worker(session.config):
        return (yield)
    result = None
    try:
        result = yield
        write_results(session)
    except Stopped:  # the first signal came only now; further SIGTERMs are ignored, and Ctrl-C ends pytest at once
        write_results(session)
    return result


def write_results(session: pytest.Session) -> None:
    """Writes the summary and the reports, if there were cells to run. The run fails if it is incomplete."""
    config = session.config
    if USAGE in config.stash and session.exitstatus != pytest.ExitCode.USAGE_ERROR:
        raise pytest.UsageError(config.stash[USAGE])
    if stopped_by := stopped(config):
        is_ctrl_c = stopped_by == signal.SIGINT
        session.exitstatus = pytest.ExitCode.INTERRUPTED if is_ctrl_c else 128 + stopped_by
    out = config.stash[OUT]
    if not (out / "summary.json").is_file():
        return
    summary = merge(out, compare=not stopped_by)
    if may_bisect(config) and not is_on_hosts(config):
        bisect(config, out)
    from conformance.bisect.explain import answers
    from conformance.core.errors import UsageError
    from conformance.core.io import Unwritable
    from conformance.core.packages import write_reports
    from conformance.results.output_folders import slim
    from conformance.results.requirements import summary_lines
    from conformance.results.trust import read_cells
    from conformance.results.verdict import PASSES

    try:
        if not stopped_by and kept(config).keep != "all":
            slim(out)
        reports = write_reports(out)
    except (UsageError, Unwritable) as error:
        reports = [f"no report: {error}"]
    by = [f"stopped by {signal.Signals(stopped_by).name}"] if stopped_by else []
    bisected = [*answers(read_cells(out)[1]), *config.stash.get(NOT_BISECTED, [])]
    config.stash[LINES] = [*by, *summary_lines(summary), *bisected, *reports]
    if session.exitstatus == pytest.ExitCode.OK and summary["verdict"] not in PASSES:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if STOP in config.stash and not stopped_by:
        config.stash[STOP].__exit__()  # everything is written: signals have their default effect again


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    from conformance.core.errors import visible

    if lines := config.stash.get(LINES, []):
        terminalreporter.section("parity")
        for line in lines:
            terminalreporter.write_line(visible(line))


def merge(out: Path, *, compare: bool = True) -> dict[str, Any]:
    """Writes ``summary.json`` again from the verdicts of all workers, compares the backends, and returns the summary.

    The comparison needs the records of all cells, so it is made once, at the end.
    """
    from conformance.judge.side_by_side import write_side_by_side
    from conformance.results.output_folders import rewrite_summary
    from conformance.results.run_results import read_summary

    started = datetime.fromisoformat(read_summary(out)[0].started)
    summary = rewrite_summary(out, seconds=round((datetime.now(UTC) - started).total_seconds(), 2))
    if compare:
        write_side_by_side(out)
    return summary


def bisect(config: pytest.Config, out: Path) -> None:
    """Bisects the first cells that differ, in this process, after all workers have ended."""
    from conformance.bisect.run import any_differs, bisect_run

    if not any_differs(out):
        return
    from conformance.matrix.plan import make_plan
    from conformance.runner.placement import SessionConfig
    from conformance.runner.preflight import leased_gpus
    from conformance.runner.session import Session

    where, lines = ranks(config), config.stash.setdefault(NOT_BISECTED, [])
    plan = make_plan(selection(config), demands(config), portion(config), ranks=where)
    config_of_all = SessionConfig(
        out=out,
        device=where.device,
        gpus=leased_gpus(where),
        ranks_per_gpu=where.ranks_per_gpu,
        budget_s=where.budget,
    )
    with Session(config_of_all, check=check_of(config)) as session:
        bisect_run(session, plan.cells, say=lines.append)


def may_bisect(config: pytest.Config) -> bool:
    return not stopped(config) and not config.option.parity_no_bisect


def stop_at_signals(config: pytest.Config) -> None:
    """Makes SIGTERM end the run like Ctrl-C, with a report; effects of the signal in a library are not judged.

    A worker ignores SIGTERM, because its controller ends it, but gets Ctrl-C from the terminal or from execnet. With
    --pdb, Ctrl-C starts to debug a test, and the run may continue.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    signals = [] if is_worker(config) else [signal.SIGTERM]
    if not config.getoption("usepdb", False):
        signals.append(signal.SIGINT)
    stop = config.stash[STOP] = Stop(*signals).__enter__()
    config.add_cleanup(stop.__exit__)


def stopped(config: pytest.Config) -> int:
    """Returns the number of the signal that stopped the run, or 0."""
    return config.stash[STOP].number if STOP in config.stash else 0


def check_of(config: pytest.Config) -> Callable[[], None]:
    """Returns the check of a session (conformance.runner.session.Session)."""
    return config.stash[STOP].check if STOP in config.stash else lambda: None


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def selection(config: pytest.Config) -> Selection:
    return Selection.from_options(config.option, prefix="parity_")


def demands(config: pytest.Config) -> Demands:
    return Demands.from_options(config.option, prefix="parity_")


def portion(config: pytest.Config) -> Portion:
    return Portion.from_options(config.option, prefix="parity_")


def kept(config: pytest.Config) -> Kept:
    return Kept.from_options(config.option, prefix="parity_")


def is_on_hosts(config: pytest.Config) -> bool:
    """Tell whether an engine has started the hosts that run the ranks (conformance.cli.torchrun and ray)."""
    from conformance.runtime.multihost.controller import hosts_of_engine

    return hosts_of_engine(ranks_per_gpu=1) is not None


def ranks(config: pytest.Config) -> Ranks:
    return Ranks.from_options(config.option, prefix="parity_")
