"""Lets ranks of several processes compute on a GPU at the same time, by NVIDIA's Multi-Process Service (MPS).

Without it the processes take turns, and a collective between ranks that share a GPU waits for the turn of each of them.
A run in which ranks of a cell share GPUs starts a daemon of its own, changes no setting of the GPU, and ends the daemon
with itself. With a daemon of the user (``CUDA_MPS_PIPE_DIRECTORY``), without the driver's programs, or where no client
can connect, the run goes on as it is. The summary says which of these it was.

The module is also the program that keeps the daemon, ``python mps.py FOLDER``, as long as its standard input is open.
It imports nothing of the suite.
"""

import contextlib
import ctypes
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

SWITCH = "PARITY_MPS"  # "0": no daemon; "1": also for cells that share a GPU, whose ranks do not
_CONTROL = "nvidia-cuda-mps-control"
_PIPE, _LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_START_LIMIT_S = 20.0  # the server starts with its first client
_END_LIMIT_S = 5.0
_PROBE = "--probe"

logger = logging.getLogger(__name__)


class Mps:
    """Keeps a daemon for the ranks of this run that share GPUs. Threads share it."""

    def __init__(self, *, is_wanted: bool = True, visible: Mapping[str, str] | None = None) -> None:
        """is_wanted: whether to start a daemon without SWITCH. visible: variables that show the daemon its GPUs, by
        UUID where the user gave numbers: a daemon that sees GPU 1 alone numbers it 0, and its clients find no GPU 1."""
        self._environment = {**os.environ, **(visible or {})}
        self._daemons: list[subprocess.Popen[str]] = []  # the last one serves new ranks
        self._folder: Path | None = None
        self._variables: dict[str, str] | None = None
        self._starting = threading.Lock()
        self.number = 0  # of the daemon: how many failed before it
        self.state = "starting"  # for the summary
        if os.environ.get(SWITCH, str(int(is_wanted))) != "1":
            self._go_without(f"off ({SWITCH})" if SWITCH in os.environ else "off")
        elif _PIPE in os.environ:
            self._go_without(f"the user's ({_PIPE})")
        elif shutil.which(_CONTROL) is None:
            self._go_without(f"off: {_CONTROL} is not installed", warns=True)
        else:
            self._start()

    def _start(self) -> None:
        self._variables = None
        self._folder = Path(tempfile.mkdtemp(prefix="parity-mps-"))  # a socket's path has at most 107 bytes
        self._daemons.append(
            subprocess.Popen(
                [sys.executable, "-P", __file__, str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environment,
                start_new_session=True,
                text=True,
            )
        )

    def variables(self) -> dict[str, str]:
        """Returns the environment variables of ranks that share GPUs. Waits for the daemon, which starts meanwhile."""
        with self._starting:
            if self._variables is None:
                output = self._daemons[-1].stdout
                assert output is not None
                ready = select.select([output], [], [], _START_LIMIT_S)[0]
                answer = output.readline().strip() if ready else f"no answer within {_START_LIMIT_S:g} s"
                if answer == "ready" and self._folder:
                    self._variables, self.state = _variables_of(self._folder), "on"
                    if self.number:
                        self.state = f"on, started again after {self.number} failure{'s' * (self.number > 1)}"
                else:
                    self._go_without(f"off: MPS does not start: {answer or 'it has ended'}", warns=True)
            return self._variables or {}

    def has_failed(self, number: int) -> bool:
        """Returns whether the daemon with this ``number`` serves no clients any more; if so, starts another one.

        A client that is killed while its GPU computes can end all clients of a daemon, which then serves no new ones.
        The old daemon stays until the end, because clients on other GPUs may go on.
        """
        with self._starting:
            if number < self.number:
                return True
            if not self._variables or not (failure := _probed({**self._environment, **self._variables})):
                return False
            logger.warning("MPS has failed (%s), and ranks that share a GPU get a new daemon", failure)
            self.number += 1
            self._start()
            return True

    def _go_without(self, state: str, *, warns: bool = False) -> None:
        self._variables, self.state = {}, state
        if warns:
            logger.warning("ranks that share a GPU take turns: %s", state.partition(": ")[2])

    def close(self) -> None:
        """Ends the daemons. Their ranks have ended before."""
        for process in self._daemons:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2 * _END_LIMIT_S + _START_LIMIT_S / 2)
            process.kill()
            process.wait()


def _variables_of(folder: Path) -> dict[str, str]:
    return {_PIPE: str(folder), _LOG: str(folder)}


def keep(folder: Path) -> None:
    """Keeps a daemon in ``folder`` until standard input ends, and says on standard output whether it serves clients."""
    environment = {**os.environ, **_variables_of(folder)}
    daemon = subprocess.Popen(
        [_CONTROL, "-f"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + _END_LIMIT_S
        while not (folder / "control").exists() and daemon.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        failure = _probed(environment)
        print(failure or "ready", flush=True)
        if not failure:
            sys.stdin.read()
    finally:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run([_CONTROL], env=environment, input="quit\n", text=True, timeout=_END_LIMIT_S, check=False)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _probed(environment: Mapping[str, str]) -> str:
    """Returns what a client in a process of its own fails at, or ""."""
    command, limit_s = [sys.executable, "-P", __file__, _PROBE], _START_LIMIT_S / 2
    try:
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"a client has not begun within {limit_s:g} s"
    return (found.stdout.strip() or f"exit {found.returncode}") if found.returncode else ""


def probe() -> str:
    """Makes a context on the first GPU as a client. Returns what fails, or ""."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    context = ctypes.c_void_p()
    for name, arguments in (("cuInit", (0,)), ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), 0))):
        if code := getattr(driver, name)(*arguments):
            return f"{name} ended with CUDA error {code}"
    return ""


if __name__ == "__main__":
    if sys.argv[1] == _PROBE:
        print(failure := probe())
        sys.exit(bool(failure))
    keep(Path(sys.argv[1]))
