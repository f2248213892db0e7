"""Runs test files in forks of the process that has collected them: ``pytest --forks N``.

Collecting takes ten seconds of a processor, because it imports torch, transformers and the suite. Each worker of
pytest-xdist does so again; a fork has it all. A fork runs a file whole, then the next one that no other fork has begun,
and has session fixtures and a temporary folder of its own. Where there are GPUs all files run in one process, because
what the imports have asked of CUDA and NVML does not survive a fork.
"""

import contextlib
import os
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from signal import SIGKILL
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from _pytest.runner import runtestprotocol

from conformance.core.process import signal_at_death_of

Indices = list[int]  # of items of the session


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, metavar="N", help="run test files in N forks of this process")


@dataclass(kw_only=True)
class Fork:
    """Holds what the parent knows of a fork. left: its items that have not ended, the one that runs first."""

    pid: int
    number: int
    connection: Connection
    pidfd: int
    left: deque[int] = field(default_factory=deque)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    wanted: int = config.getoption("forks")
    has_gpus = Path("/dev/nvidiactl").exists()
    if wanted < 1 or has_gpus or config.option.collectonly or config.option.usepdb or session.testsfailed:
        return None  # as pytest itself does it
    _Parent(session).run(wanted)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


class _Parent:
    """Gives files to forks, and reports what they send."""

    def __init__(self, session: pytest.Session) -> None:
        self._session, self._hook = session, session.config.hook
        by_file = groupby(range(len(session.items)), key=lambda index: session.items[index].path)
        self._files: deque[Indices] = deque(list(indices) for _, indices in by_file)
        self._forks: dict[int, Fork] = {}  # by pidfd
        self._started = 0
        if terminal := session.config.pluginmanager.get_plugin("terminalreporter"):
            terminal.showfspath = False  # files run at once: dots only

    def run(self, wanted: int) -> None:
        try:
            for _ in range(min(wanted, len(self._files))):
                self._start()
            while self._forks:
                ready = wait([*self._forks, *(fork.connection for fork in self._forks.values())])
                for fork in [one for one in self._forks.values() if one.pidfd in ready or one.connection in ready]:
                    self._read(fork)
                    if fork.pidfd in ready:
                        self._end(fork)
        except BaseException:
            for fork in self._forks.values():
                os.kill(fork.pid, SIGKILL)
            raise

    def _start(self) -> None:
        ours, theirs = Pipe()
        number, self._started = self._started, self._started + 1
        self._session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        parent = os.getpid()
        if (pid := os.fork()) == 0:
            for connection in (ours, *(fork.connection for fork in self._forks.values())):
                connection.close()
            _run_in_fork(self._session, theirs, number, parent)
        theirs.close()
        pidfd = os.pidfd_open(pid)
        self._forks[pidfd] = Fork(pid=pid, number=number, connection=ours, pidfd=pidfd)

    def _read(self, fork: Fork) -> None:
        """Handles all that a fork has sent."""
        try:
            while fork.connection.poll():
                kind, content = fork.connection.recv()
                getattr(self, f"_on_{kind}")(fork, content)
        except (EOFError, OSError):  # it has ended, as its pidfd says
            return

    def _on_wants(self, fork: Fork, _: None) -> None:
        """Answers a fork that wants another file; it gets none once the session has to stop."""
        file = self._files.popleft() if self._files and not self._stops() else []
        fork.left.extend(file)
        fork.connection.send(file)

    def _stops(self) -> bool:
        return bool(self._session.shouldfail or self._session.shouldstop)

    def _on_reports(self, fork: Fork, reports: list[dict[str, Any]]) -> None:
        item = self._session.items[fork.left.popleft()]
        self._hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for data in reports:
            self._log(fork, self._hook.pytest_report_from_serializable(config=self._session.config, data=data))
        self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if self._stops():
            with contextlib.suppress(BrokenPipeError):
                for other in self._forks.values():
                    other.connection.send([])

    def _on_warning(self, _: Fork, content: dict[str, Any]) -> None:
        category = type(content.pop("category"), (Warning,), {})
        message = warnings.WarningMessage(category(content.pop("text")), category, **content.pop("place"))
        self._hook.pytest_warning_recorded.call_historic(kwargs=content | {"warning_message": message})

    def _log(self, fork: Fork, report: Any) -> None:
        name = f"fork{fork.number}"
        report.node = SimpleNamespace(gateway=SimpleNamespace(id=name), _workerinfocache=name)  # as of pytest-xdist
        self._hook.pytest_runtest_logreport(report=report)

    def _end(self, fork: Fork) -> None:
        """Reaps a fork. The test that it has died in has failed; another fork runs the rest of its files."""
        _, status = os.waitpid(fork.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        os.close(fork.pidfd)
        fork.connection.close()
        del self._forks[fork.pidfd]
        if not fork.left or (self._stops() and code == 0):
            return
        item = self._session.items[fork.left.popleft()]
        message = f"the fork of pytest that ran this test has ended with {code}"
        failed = pytest.TestReport(
            nodeid=item.nodeid, location=item.location, keywords={}, outcome="failed", longrepr=message, when="call"
        )
        self._log(fork, failed)
        if fork.left:
            self._files.appendleft([*fork.left])
        if self._files and not self._stops():
            self._start()


def _run_in_fork(session: pytest.Session, connection: Connection, number: int, parent: int) -> NoReturn:
    """Runs files until the parent has no more, and ends. What the parent would do at its exit is not done here."""
    status = 1
    try:
        signal_at_death_of(parent, SIGKILL)
        manager = session.config.pluginmanager
        capture: Any = manager.get_plugin("capturemanager")
        capture.stop_global_capturing()  # its files have offsets that forks would share
        capture.start_global_capturing()
        capture.suspend_global_capture(in_=False)
        factory: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = factory.getbasetemp() / f"fork-{number}"
        factory._basetemp.mkdir(mode=0o700)
        manager.register(reporting := _Reporting())  # is told of all earlier warnings
        reporting.connection = connection
        _run_items(session, connection)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _run_items(session: pytest.Session, connection: Connection) -> None:
    items = _wanted_items(session, connection)
    item = next(items, None)
    while item is not None and not connection.poll():  # an answer to nothing: the session stops
        following = next(items, None)  # which fixtures to end depends on it
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following
    session._setupstate.teardown_exact(None)


def _wanted_items(session: pytest.Session, connection: Connection) -> Iterator[pytest.Item]:
    while True:
        connection.send(("wants", None))
        if not (indices := connection.recv()):
            return
        for index in indices:
            yield session.items[index]


class _Reporting:
    """Sends reports and warnings of a fork to the parent."""

    connection: Connection | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        to_data, config = item.config.hook.pytest_report_to_serializable, item.config
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        assert self.connection
        self.connection.send(("reports", [to_data(config=config, report=report) for report in reports]))
        return True

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        if self.connection is None:
            return
        content = {
            "text": str(warning_message.message),
            "category": warning_message.category.__name__,
            "place": {"filename": warning_message.filename, "lineno": warning_message.lineno},
            "when": when,
            "nodeid": nodeid,
            "location": location,
        }
        self.connection.send(("warning", content))
