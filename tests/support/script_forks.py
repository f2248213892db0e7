"""Runs scripts as ``subprocess.run`` does, in forks of a process that has done their slow imports.

A script of docs/findings computes for a second and imports for several. A fork finds its imports done, and otherwise
equals ``python SCRIPT``: a process in a session of its own, with the script as ``__main__`` and its folder first in
``sys.path``, that ends as Python ends, with tracebacks, exit statuses and ``atexit``. Libraries were imported in the
environment of the forking process, so a script about the effects of an import must not run in a fork.

    with Forker.start(folder, ("torch",)) as forker:
        done = forker.run(folder / "script.py", timeout=60)

The process that forks is ``python tests/support/script_forks.py DESCRIPTOR PARENT FOLDER``.
"""

import contextlib
import gc
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from conformance.core.process import signal_at_death_of, signal_group, thread_count
from conformance.runtime.messages import Wire, wire_pair


class Forker:
    """A process that has imported modules, and forks scripts one after another."""

    def __init__(self, wire: Wire, modules: tuple[str, ...]) -> None:
        """Raises RuntimeError if a module cannot be imported, or starts a thread, which no fork would have."""
        self._wire = wire
        self._wire.send({"import": modules})
        answer, _ = self._wire.receive()
        if answer is None or answer["threads"] != 1:
            raise RuntimeError(f"cannot fork after importing {', '.join(modules)}: {answer or 'it failed, see stderr'}")

    @classmethod
    @contextlib.contextmanager
    def start(cls, folder: Path, modules: tuple[str, ...]) -> Iterator["Forker"]:
        """Start a fresh interpreter with ``folder`` first in its path."""
        wire, theirs = wire_pair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(os.getpid()), str(folder)],
                pass_fds=[theirs.fileno()],
                # NumPy's BLAS starts a thread for each core otherwise, and so does pyarrow, which transformers imports.
                env={**os.environ, "OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"},
            )
        try:
            yield cls(wire, modules)
        finally:
            wire.close()
            process.wait()

    @contextlib.contextmanager
    def branch(self, modules: tuple[str, ...], *, environment: Mapping[str, str]) -> Iterator["Forker"]:
        """Fork a process that imports more, with more variables in its environment; this one stays as it is."""
        wire, theirs = wire_pair()
        with theirs:
            self._wire.send({"branch": dict(environment)}, fds=[theirs.fileno()])
        try:
            yield Forker(wire, modules)
        finally:
            wire.close()

    def run(self, script: Path, *, timeout: float) -> subprocess.CompletedProcess[str]:
        """What ``subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=timeout)`` does.

        Raises subprocess.TimeoutExpired. Whatever the script has started ends with it.
        """
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            self._wire.send({"run": str(script), "timeout": timeout}, fds=[stdout.fileno(), stderr.fileno()])
            answer, _ = self._wire.receive()
            if answer is None:
                raise RuntimeError(f"the process that forks {script} is gone")
            for file in (stdout, stderr):
                file.seek(0)
            said = stdout.read(), stderr.read()
        if answer["status"] is None:
            raise subprocess.TimeoutExpired(str(script), timeout, *said)
        return subprocess.CompletedProcess([sys.executable, str(script)], answer["status"], *said)


def serve(wire: Wire) -> str:
    """Import, branch and fork as asked until the other side closes, which ends this process.

    Returns in forks only: the script that the fork is to run.
    """
    while (received := wire.receive())[0] is not None:
        message, fds = received
        assert message is not None
        if "import" in message:
            for name in message["import"]:
                import_module(name)
            gc.freeze()  # what is there by now is shared with the forks as long as nobody writes to it
            wire.send({"threads": thread_count()})
            continue
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal_at_death_of(parent, signal.SIGKILL)
            wire.close()
            if "branch" in message:
                os.environ.update(message["branch"])
                wire = Wire(socket.socket(fileno=fds[0]))
                continue
            os.setsid()
            for fd, target in zip(fds, (1, 2), strict=True):
                os.dup2(fd, target)
        for fd in fds:
            os.close(fd)
        if pid == 0:
            return str(message["run"])
        if "run" in message:
            wire.send({"status": _status(pid, timeout=message["timeout"])})
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()  # for branches, which the other side has closed by now
    os._exit(0)  # and wait for no thread that a module has started


def _status(pid: int, *, timeout: float) -> int | None:
    """Wait for a session's first process and end the others; returns its status, negative: a signal, None: too late."""
    poll = select.poll()
    handle = os.pidfd_open(pid)
    poll.register(handle, select.POLLIN)
    in_time = bool(poll.poll(timeout * 1000))
    os.close(handle)
    os.kill(pid, signal.SIGKILL)  # by its own id, too: it may not lead its session yet
    signal_group(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if in_time else None


if __name__ == "__main__":
    descriptor, parent_pid, sys.path[0] = sys.argv[1:]
    signal_at_death_of(int(parent_pid), signal.SIGKILL)
    os.set_inheritable(int(descriptor), False)
    script = serve(Wire(socket.socket(fileno=int(descriptor))))
    sys.argv[:] = [script]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
