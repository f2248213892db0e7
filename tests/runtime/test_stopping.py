"""A run that is asked to end says what it judged, with an exit code that tells the signal, and leaves no process.

The runs are processes of their own, because a signal ends all of a process.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from worker_group_helpers import Runner, is_dead_soon

from conformance.core.process import Stop, Stopped
from conformance.runner.oracle_jobs import Oracles
from conformance.runtime import Pool
from conformance.suite.plugin import stop_at_signals

pytest_plugins = "pytester"
PROFILE = """
description = "one cell that conforms, one that never ends, one that is not reached"
[[cells]]
scenarios = ["tiny.toml"]
models = ["llama"]
layouts = ["dp1", "dp2", "dp4"]
precisions = ["fp32"]
"""
SCENARIO = 'steps = 1\ndata.rows = 8\n[optimizer]\nname = "sgd"\nlr = 0.05\n'
BACKEND = """
import pathlib, time
from plain_backend import Plain

class Waits(Plain):
    def train_step(self, batch, on_gradients):
        if self.layout.dp > 1:
            pathlib.Path("waits").touch()
            time.sleep(600)
        return super().train_step(batch, on_gradients)

    def setup(self, scenario, layout, *arguments):
        self.layout = layout
        return super().setup(scenario, layout, *arguments)
"""
# The process of a run imports no backend, so what a library does there is planted by sitecustomize.
SITE = "import sys\nif '-P' not in sys.orig_argv:  # as ranks have it\n    import planted\n"
PLAIN, WRONG_MLP = "from plain_backend import Plain as Waits\n", "from plain_traced import WrongMlp as Waits\n"
LOSES = """
import os, signal
import conformance.runner.attempt
from conformance.results.verdict import Verdict

def judge_cell(*_, **__):
    try:
        os.kill(os.getpid(), signal.Signals[os.environ["SENT"]])
    except KeyboardInterrupt:
        return Verdict(state="infrastructure", reason="a library made this of what the signal raised")

conformance.runner.attempt.judge_cell = judge_cell
"""
LOSES_WHILE_BISECTING = """
import os, signal
import conformance.bisect.run

def bisect_judged(*_):
    try:
        os.kill(os.getpid(), signal.Signals[os.environ["SENT"]])
    except KeyboardInterrupt:
        raise TypeError("a library made this of what the signal raised") from None

conformance.bisect.run.bisect_judged = bisect_judged
"""
LATE = """
import importlib, os, signal

module = importlib.import_module(os.environ["SENT_IN"])
read_run = module.read_run

def stopped_here(out):
    os.kill(os.getpid(), signal.Signals[os.environ["SENT"]])
    return read_run(out)

module.read_run = stopped_here
"""
ENDS = """
import os, signal

def pytest_terminal_summary():
    os.kill(os.getpid(), signal.SIGTERM)
"""
COMPARES, REMOVES = "conformance.judge.side_by_side", "conformance.results.output_folders"
CHOSEN = ("profile mine.toml", "backend waits:Waits", "out out")
COMMAND_LINE = ["conformance.cli.main", "run", *(part for text in CHOSEN for part in f"--{text}".split())]
IN_TURN = [*COMMAND_LINE, "--workers", "1"]  # one cell after another
PYTEST = ["pytest", "-p", "no:cacheprovider", "--pyargs", "conformance.suite"]
PYTEST += [part for text in CHOSEN for part in f"--parity-{text}".split()]
ONE_CELL, ONE_ITEM = (*COMMAND_LINE, "--cells", "*/dp1/*"), (*PYTEST, "--parity-cells", "*/dp1/*")


def processes_with(mark: str) -> list[int]:
    """The processes whose environment has ``mark``, which every descendant inherits."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def prepared(folder: Path, backend: str, **variables: str) -> dict[str, str]:
    """Write what a run in ``folder`` needs; returns its environment."""
    for name, text in (("mine.toml", PROFILE), ("tiny.toml", SCENARIO), ("waits.py", backend)):
        (folder / name).write_text(text)
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, **variables}


def run_to_its_end(
    folder: Path, command: Sequence[str], planted: str, *, backend: str = PLAIN, **variables: str
) -> tuple[int, str, Any]:
    """The exit code of a run that sends itself a signal, what it said, and its summary."""
    environment = prepared(folder, backend, **variables)
    (folder / "planted.py").write_text(planted)
    (folder / "sitecustomize.py").write_text(SITE)
    command = [sys.executable, "-m", *command]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return run.returncode, run.stdout + run.stderr, json.loads((folder / "out" / "summary.json").read_text())


@pytest.mark.exhaustive
@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        (IN_TURN, signal.SIGTERM, 143),
        (IN_TURN, signal.SIGINT, 130),
        (PYTEST, signal.SIGTERM, 143),
        ([*PYTEST, "-n", "1"], signal.SIGTERM, 143),
    ],
    ids=["parity run, SIGTERM", "parity run, SIGINT", "pytest", "pytest with a worker"],
)
def test_a_run_that_a_signal_stops_leaves_a_true_report_and_no_process(
    command: list[str], number: signal.Signals, code: int, tmp_path: Path
) -> None:
    environment = prepared(tmp_path, BACKEND, PARITY_TEST_MARK=str(tmp_path))
    mark = f"PARITY_TEST_MARK={tmp_path}"
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=tmp_path, env=environment, stdout=log, stderr=log, text=True
        )
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "waits").exists() and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        asked = time.monotonic()
        run.send_signal(number)
        assert run.wait(timeout=60) == code, (tmp_path / "log").read_text()
        assert time.monotonic() - asked < 30
    finally:
        run.kill()
        run.wait()
    out = tmp_path / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["verdict"], summary["finished"]) == ("incomplete", None)
    states = {cell["id"].split("/")[3]: cell["state"] for cell in summary["cells"]}
    assert states == {"dp1": "conforms", "dp2": "not_run", "dp4": "not_run"}
    assert ET.parse(out / "junit.xml").getroot().get("errors") == "2"
    assert "The run did not finish" in (out / "report.html").read_text()
    assert (out / "report.md").read_text().startswith("## ⚠️ Incomplete")
    assert "Traceback" not in (tmp_path / "log").read_text()
    deadline = time.monotonic() + 5
    while (left := processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


@pytest.mark.slow
@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize(
    ("command", "sent", "code"),
    [
        (COMMAND_LINE, "SIGTERM", 143),
        (COMMAND_LINE, "SIGINT", 130),
        (PYTEST, "SIGTERM", 143),
        (PYTEST, "SIGINT", 2),
        ([*PYTEST, "-n", "1"], "SIGINT", 2),
    ],
    ids=["parity run, SIGTERM", "parity run, SIGINT", "pytest, SIGTERM", "pytest, SIGINT", "a worker, SIGINT"],
)
def test_what_a_library_makes_of_a_signal_is_no_verdict(
    command: list[str], sent: str, code: int, tmp_path: Path
) -> None:
    """torch did so once: its conversion of an object to a tensor took the exception for a wrong type."""
    ended, said, summary = run_to_its_end(tmp_path, command, LOSES, SENT=sent)
    assert ended == code, said
    assert [cell["state"] for cell in summary["cells"]] == ["not_run"] * 3
    assert summary["finished"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("foreground")
def test_what_a_library_makes_of_a_signal_is_not_what_bisecting_found(tmp_path: Path) -> None:
    """bisect_run itself: test_bisect_runs.py."""
    command = [*PYTEST, "--parity-cells", "*/dp2/*"]  # that layout is wrong
    ended, said, summary = run_to_its_end(tmp_path, command, LOSES_WHILE_BISECTING, backend=WRONG_MLP, SENT="SIGTERM")
    assert (ended, summary["verdict"]) == (143, "differs"), said
    assert "not bisected" not in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize(
    ("command", "sent", "sent_in", "code"),
    [
        (ONE_CELL, "SIGTERM", COMPARES, 143),
        (ONE_CELL, "SIGINT", REMOVES, 130),
        (ONE_ITEM, "SIGTERM", REMOVES, 143),
        (ONE_ITEM, "SIGINT", COMPARES, 2),
    ],
    ids=["parity run, SIGTERM", "parity run, SIGINT", "pytest, SIGTERM", "pytest, SIGINT"],
)
def test_a_run_that_is_stopped_after_its_last_cell_reports_them_all(
    command: Sequence[str], sent: str, sent_in: str, code: int, tmp_path: Path
) -> None:
    ended, said, summary = run_to_its_end(tmp_path, command, LATE, SENT=sent, SENT_IN=sent_in)
    assert ended == code, said
    assert (summary["verdict"], bool(summary["finished"])) == ("conforms", True)
    out = tmp_path / "out"
    assert ET.parse(out / "junit.xml").getroot().get("errors") == "0"
    assert "conforms" in (out / "report.html").read_text()
    assert (out / "report.md").is_file()
    assert (out / "side_by_side.json").exists() == (sent_in == REMOVES)  # nobody waits for a comparison
    assert f"stopped by {sent}" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.usefixtures("foreground")
def test_a_signal_after_the_reports_ends_pytest_as_any_other_process(tmp_path: Path) -> None:
    ended, said, summary = run_to_its_end(tmp_path, [*ONE_ITEM, "-p", "planted"], ENDS)
    assert (ended, summary["verdict"]) == (-signal.SIGTERM, "conforms"), said
    assert (tmp_path / "out" / "report.html").is_file()
    assert "Traceback" not in said


@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize(("options", "is_heeded"), [((), True), (("--pdb",), False)], ids=["else", "with --pdb"])
def test_ctrl_c_stops_the_run_unless_it_begins_to_debug(
    options: tuple[str, ...], is_heeded: bool, pytester: pytest.Pytester
) -> None:
    config = pytester.parseconfig(*options)
    before = signal.getsignal(signal.SIGINT)
    stop_at_signals(config)
    heeded = signal.getsignal(signal.SIGINT) is not before
    config._ensure_unconfigure()
    assert heeded == is_heeded
    assert signal.getsignal(signal.SIGINT) is before


def test_nobody_waits_for_an_oracle_when_the_run_is_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its runs have a thread and a worker group of their own. That the group ends is no news to whoever stopped it."""
    caplog.set_level(logging.INFO)
    oracles = Oracles(root=tmp_path, device="cpu", budget_s=60)
    run = Runner(oracles._pool, tmp_path)
    pids: list[int] = oracles._threads.submit(run.pids, size=1).result()
    work = oracles._threads.submit(run, "never_enter", size=1, rank=0, budget_s=60)
    oracles._runs[tmp_path / "float64"] = work  # type: ignore[assignment]
    time.sleep(0.5)
    began = time.monotonic()
    oracles.__exit__()
    assert time.monotonic() - began < 10
    assert (work.result().state, work.result().kind) == ("failed", "exited")
    assert "is retired" not in caplog.text
    assert all(is_dead_soon(pid) for pid in pids)


def test_a_pool_that_was_ended_starts_nothing_more(tmp_path: Path) -> None:
    with Pool(work_dir=tmp_path) as pool:
        pool.abort()
        assert Runner(pool, tmp_path)("nothing", size=1).state == "failed"


@pytest.mark.usefixtures("foreground")
def test_only_the_first_signal_stops_and_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Stop(signal.SIGINT, signal.SIGTERM) as stop:
        stop.check()
        with pytest.raises(Stopped, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # of a supervisor that repeats itself
        with pytest.raises(KeyboardInterrupt):  # of a user who does not want to wait
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Stopped, match="SIGTERM"):
            stop.check()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stop(signal.SIGINT):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
