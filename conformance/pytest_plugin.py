"""Pytest plugin: the options of ``pytest --pyargs conformance.suite``, and one report from what its workers wrote.

Serves claim 8: the folder lists every cell as not run before the first one runs, and the report is made from what is on
disk, so a worker that crashes or a run that is stopped leaves a summary that is incomplete, never green.

Everybody who has the package installed loads this module in every pytest run. So it imports nothing that is slow, and
without the suite among the tests it does nothing.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conformance.plan.profile import Selection

OUT = pytest.StashKey[Path]()
USAGE = pytest.StashKey[str]()  # why the options cannot be used, found where the cells are collected
LINES = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity", "conformance of LLM training backends (pytest --pyargs conformance.suite)")
    for option, about in (
        ("profile", {"help": "name (parity list shows them) or .toml file (default: quick)"}),
        ("backend", {"action": "append", "help": "name or module:Class; may be repeated (default: all)"}),
        ("cells", {"action": "append", "metavar": "GLOB", "help": "cell ids; may be repeated"}),
        ("faults", {"action": "append", "metavar": "NAME", "help": "plant a fault in every cell; may be repeated"}),
        ("model", {"help": "Hugging Face folder to use instead of the profile's models"}),
        ("data", {"help": "JSONL or Parquet file, or a Hugging Face dataset on disk"}),
        ("input-key", {"help": "column of the prompt"}),
        ("output-key", {"help": "column of the answer"}),
        ("max-len", {"type": int, "help": "longest row, in tokens"}),
        ("packing-samples", {"action": "store_true", "help": "several documents per row, in every scenario"}),
        ("ring-head-stride", {"type": int, "metavar": "N", "help": "key-value heads that a ring gathers at a time"}),
        ("seed", {"type": int, "help": "another model and another order of the documents"}),
        ("device", {"choices": ("cpu", "cuda"), "default": "cpu"}),
        ("out", {"type": Path, "help": "new or empty folder (default: parity-out/DATE_TIME)"}),
    ):
        group.addoption(f"--parity-{option}", **about)


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
    counts = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in summary["counts"].items() if count)
    try:
        from reports import write_all

        report = f"report: {write_all(out)[0]}"
    except (ValueError, ModuleNotFoundError) as error:
        report = f"no report: {error}"
    config.stash[LINES] = [f"{summary['verdict']}: {counts}", report]
    if exitstatus == pytest.ExitCode.OK and summary["verdict"] != "conforms":
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
    from conformance.record.results import SUMMARY, read_results, write_summary
    from conformance.peers.side_by_side import write_side_by_side

    run, entries = read_results(out)
    now = datetime.now(UTC)
    if all(entry.verdict.state != "not_run" for entry in entries):
        run["finished"] = now.isoformat(timespec="seconds")
    run["seconds"] = round((now - datetime.fromisoformat(run["started"])).total_seconds(), 2)
    write_summary(out, run, entries)
    write_side_by_side(out)
    summary: dict[str, Any] = json.loads((out / SUMMARY).read_text(encoding="utf-8"))
    return summary


def is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def selection(config: pytest.Config) -> "Selection":
    from conformance.plan.profile import Selection

    return Selection.from_options(config.option, prefix="parity_")
