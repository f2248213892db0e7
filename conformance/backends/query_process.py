"""Runs processes that answer queries line by line, as JSON: forks of the preload server, or in another environment.

Code of a framework never runs in the process that judges it, because it could change the judge there.
"""

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import conformance
from conformance.core import packages as own_packages
from conformance.core.environments import OF_RANKS
from conformance.core.errors import UsageError
from conformance.core.io import no_link
from conformance.core.process import (
    StartPatience,
    effort,
    signal_at_death_of,
    signal_at_hang_up,
    signal_group,
    signal_group_of,
)
from conformance.runtime.preload_server import fork_call

_TICK_S = 0.25
_REAP_S = 10.0  # limit for the preload server to reap a process that was killed
_PID = struct.Struct("q")
NEEDS = f"needs backend-parity {{}} (pip install --no-deps), {', '.join(OF_RANKS)}"
Made = TypeVar("Made")


class EnvironmentProcess:
    """Runs a module in another Python environment, in a process group of its own, and exchanges lines of JSON with it.

    what: names the process in messages. The group ends with this process.
    """

    def __init__(self, what: str, python: str, module: str, name: str, *, limit_s: float, errors: Path | None = None):
        """errors: a file for its standard error. Raises UsageError if the environment or ``name`` cannot be used."""
        self._what, self._limit_s = what, limit_s
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONHOME"}
        if python == sys.executable:  # it finds what this process finds
            environment["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        try:
            with open(errors, "wb", opener=no_link) if errors else contextlib.nullcontext() as file:
                self.process = subprocess.Popen(
                    [python, "-P", "-m", module, name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    env=environment,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for the controller
                )
        except OSError as error:
            raise UsageError(f"{what}: {error.strerror}; give the executable of an environment") from None
        self.check()

    def check(self) -> None:
        """Waits for the imports of the process. Raises UsageError if it has no suite, or another one."""
        needs = NEEDS.format(conformance.__version__)
        if "suite" not in self.hello:
            why = self.hello["message"]
            raise UsageError(f"{self._what}: it does not answer; the environment {needs} ({why})")
        if self.hello["suite"] != conformance.__version__:
            raise UsageError(f"{self._what}: the environment has backend-parity {self.hello['suite']}; it {needs}")

    @cached_property
    def hello(self) -> dict[str, Any]:
        """Waits for the imports of the process. Returns its first message."""
        return self._started()

    def ask(self, query: dict[str, Any]) -> dict[str, Any]:
        """Sends a query; returns the answer, which has a ``message`` if it failed."""
        assert self.process.stdin
        try:
            print(json.dumps(query), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return {"kind": "failed", "message": "its process has ended"}
        return self.receive()

    def _started(self) -> dict[str, Any]:
        patience = StartPatience(partial(effort, self.process.pid), limit_s=self._limit_s)
        while not self._is_readable(_TICK_S):
            if why := patience.why_over():
                self.end()
                return {"kind": "failed", "message": f"its process hangs in its imports: {why}"}
        return self.receive()

    def _is_readable(self, limit_s: float) -> bool:
        assert self.process.stdout
        return bool(select.select([self.process.stdout], [], [], limit_s)[0])

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout
        if not self._is_readable(self._limit_s):
            self.end()
            return {"kind": "failed", "message": f"its process has not answered within {self._limit_s:g} s"}
        try:
            answer = json.loads(self.process.stdout.readline())
        except ValueError:  # it has ended; standard error says why
            return {"kind": "failed", "message": "its process has ended"}
        return answer if isinstance(answer, dict) else {"kind": "failed", "message": f"it answered {answer!r}"}

    def end(self) -> None:
        """Kills the process and its descendants."""
        if self.process.returncode is None:  # once it was waited for, its number may belong to another process
            signal_group(self.process.pid, signal.SIGKILL)
        self.process.wait()


class _Fork:
    """Lets the preload server fork a process; has what EnvironmentProcess uses of subprocess.Popen."""

    def __init__(self, function: str, name: str) -> None:
        """See ForkedProcess."""
        parent_end, child_end = socket.socketpair()
        parent_lives, self._life = os.pipe()
        with child_end:
            self._forked = fork_call(function, name, fds=(child_end.fileno(), parent_lives, 2))
        os.close(parent_lives)
        self.stdin = parent_end.makefile("w", encoding="utf-8")
        self.stdout = parent_end.makefile("r", encoding="utf-8")
        parent_end.close()  # the files keep it
        self.patience = self._forked.patience
        self.pid, self._pidfd = 0, -1  # until it is forked

    def read_pid(self) -> None:
        """Waits until the process is forked. Reads no byte more, because whoever waits for hello polls the socket."""
        with socket.socket(fileno=os.dup(self.stdout.fileno())) as end:
            sent, fds, *_ = socket.recv_fds(end, _PID.size, 1)
        if sent:
            (self.pid,), (self._pidfd,) = _PID.unpack(sent), fds

    def kill(self) -> None:
        """Kills the process group, and asks the preload server, which also ends descendants that have left it."""
        if self._pidfd >= 0:
            signal_group_of(self._pidfd, self.pid, signal.SIGKILL)
        self._forked.kill()

    def wait(self) -> None:
        """Waits until the preload server has reaped the process, but not for a preload server that hangs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._forked.wait(_REAP_S)
        for fd in {self._life, self._pidfd} - {-1}:
            os.close(fd)
        self._life = self._pidfd = -1


def answer_in_fork(child_end: int, parent_lives: int, serve: Callable[[IO[str], IO[str]], None]) -> NoReturn:
    """Continues as the process that answers, until the controller closes its end of the socket.

    child_end: descriptor of the other end. parent_lives: the end for reading of a pipe that the controller holds open.
    """
    try:
        signal_at_hang_up(parent_lives)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # output of frameworks must not mix with that of the controller
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        end = socket.socket(fileno=child_end)
        queries, answers = end.makefile("r", encoding="utf-8"), end.makefile("w", encoding="utf-8")
        pidfd = os.pidfd_open(os.getpid())
        socket.send_fds(end, [_PID.pack(os.getpid())], [pidfd])
        os.close(pidfd)
        serve(queries, answers)
    except ConnectionError:
        pass  # the controller has closed its end, and left an answer unread
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(0)


class ForkedProcess(EnvironmentProcess):
    """Answers queries in a process that is forked from the preload server."""

    def __init__(self, what: str, function: str, name: str, *, limit_s: float) -> None:
        """function: gets ``name`` and the first two arguments of ``answer_in_fork``, which it has to call."""
        self._what, self._limit_s = what, limit_s
        self.process: Any = _Fork(function, name)

    def _started(self) -> dict[str, Any]:
        patience = self.process.patience()
        while not self._is_readable(_TICK_S):
            if why := patience.why_over():
                self.end()
                return {"kind": "failed", "message": f"its process is not forked: {why}"}
        self.process.read_pid()
        return super()._started()

    def end(self) -> None:
        if not self.process.pid and self._is_readable(0):  # it was forked, and nobody has waited for it
            self.process.read_pid()
        self.process.kill()
        self.process.wait()


def answer_queries(
    make: Callable[[str], tuple[Made, dict[str, Any]]],
    reply: Callable[[Made, dict[str, Any]], dict[str, Any]],
    error_message: Callable[[Exception], dict[str, str]],
) -> None:
    """Runs the other end of an EnvironmentProcess: makes an object by the first argument, says hello, and replies."""
    own_packages.prefer()
    signal_at_death_of(os.getppid(), signal.SIGTERM)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of frameworks must not mix with the answers
    serve_queries(sys.stdin, answers, sys.argv[1], make, reply, error_message)


def serve_queries(
    queries: IO[str],
    answers: IO[str],
    name: str,
    make: Callable[[str], tuple[Made, dict[str, Any]]],
    reply: Callable[[Made, dict[str, Any]], dict[str, Any]],
    error_message: Callable[[Exception], dict[str, str]],
) -> None:
    """Makes an object by its name, says hello, and replies until there are no more queries."""

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    suite = {"suite": conformance.__version__, "python": ".".join(map(str, sys.version_info[:3]))}
    try:
        made, hello = make(name)
    except Exception as error:
        return say(suite | error_message(error))
    say(suite | hello)
    for line in queries:
        try:
            say(reply(made, json.loads(line)))
        except Exception as error:
            say(error_message(error))
