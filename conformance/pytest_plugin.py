"""Pytest plugin: the options of ``pytest --pyargs conformance.suite``, and one report from what its workers wrote.

Serves claim 8: the folder lists every cell as not run before the first one runs, and the report is made from what is on
disk, so a worker that crashes or a run that is stopped leaves a summary that is incomplete, never green.

Everybody who has the package installed loads this module in every pytest run. So it imports nothing that is slow, and
without the suite among the tests it does nothing.
"""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from conformance.plan.selection import Demands, Selection

OUT = pytest.StashKey[Path]()
USAGE = pytest.StashKey[str]()  # why the options cannot be used, found where the cells are collected
LINES = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity", "conformance of LLM training backends (pytest --pyargs conformance.suite)")
    for name, about in (*Selection.options(), *Demands.options()):
        group.addoption(f"--parity-{name.replace('_', '-')}", dest=f"parity_{name}", **about)
    group.addoption("--parity-device", choices=("cpu", "cuda"), default="cpu")
    group.addoption("--parity-out", type=Path, help="new or empty folder (default: parity-out/DATE_TIME)")


def pytest_configure(config: pytest.Config) -> None:
    """Decide on the output folder, once per run; it is made when a cell is about to run."""
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        config.stash[OUT] = Path(worker["parity_out"])
        return
    out: Path | None = config.option.parity_out
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise pytest.UsageError(
            f"{out} exists and is not an empty folder; give another --parity-out, nothing is overwritten"
        )
    if config.option.parity_device == "cuda" and config.getoption("dist", "no") != "no":
        raise pytest.UsageError("--parity-device cuda: all workers would use the same GPUs; leave out -n and --dist")
    default = Path("parity-out") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    config.stash[OUT] = Path.cwd() / (out or default)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """xdist, for each worker that starts: all write into the controller's folder."""
    node.workerinput["parity_out"] = str(node.config.stash[OUT])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """End the run when the options cannot be used. A worker cannot; it runs nothing and tells the controller."""
    if USAGE in config.stash:
        items.clear()
        if not is_worker(config):
            raise pytest.UsageError(config.stash[USAGE])
        config.workeroutput["parity_usage"] = config.stash[USAGE]  # type: ignore[attr-defined]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """xdist, for each worker that ends; one that crashed has no output."""
    message = getattr(node, "workeroutput", {}).get("parity_usage")
    if message:
        node.config.stash[USAGE] = message


@pytest.hookimpl(trylast=True)  # after xdist has ended its workers
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the summary and the reports, if cells were to be run. What could not be judged is no success."""
    config = session.config
    if is_worker(config):
        return
    if USAGE in config.stash and exitstatus != pytest.ExitCode.USAGE_ERROR:
        raise pytest.UsageError(config.stash[USAGE])
    out = config.stash[OUT]
    if not (out / "summary.json").is_file():
        return
    summary = merge(out)
    from conformance.record.files import Unwritable
    from conformance.record.states import PASSES
    from conformance.record.summary import summary_lines
    from conformance.reporters import write_reports
    from conformance.validation import UsageError

    try:
        reports = write_reports(out)
    except (UsageError, Unwritable) as error:
        reports = [f"no report: {error}"]
    config.stash[LINES] = [*summary_lines(summary), *reports]
    if exitstatus == pytest.ExitCode.OK and summary["verdict"] not in PASSES:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if lines := config.stash.get(LINES, []):
        terminalreporter.section("parity")
        for line in lines:
            terminalreporter.write_line(line)


def merge(out: Path) -> dict[str, Any]:
    """Write ``summary.json`` anew from the verdicts of all cells that it lists, whoever wrote them, and return it.

    Only now is there a record of every cell, so backends are compared with each other here.
    """
    from conformance.peers.side_by_side import write_side_by_side
    from conformance.record.results import SUMMARY, cell_summary, read_output_json, read_verdicts, write_summary
    from conformance.record.states import NOT_STARTED

    run, entries = read_verdicts(out)
    now = datetime.now(UTC)
    finished = run.finished
    if all(entry.verdict.reason != NOT_STARTED for entry in entries):
        finished = now.isoformat(timespec="seconds")
    seconds = round((now - datetime.fromisoformat(run.started)).total_seconds(), 2)
    write_summary(out, replace(run, finished=finished, seconds=seconds), [cell_summary(entry) for entry in entries])
    write_side_by_side(out)
    return read_output_json(out / SUMMARY)


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def selection(config: pytest.Config) -> Selection:
    return Selection.from_options(config.option, prefix="parity_")


def demands(config: pytest.Config) -> Demands:
    return Demands.from_options(config.option, prefix="parity_")
