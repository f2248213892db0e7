"""Nursery: imports once per controller what all ranks and most backends import, and forks the zygotes of its pools.

``python -m conformance.runtime.preload_server CONTROL_FD``. Importing torch and transformers is most of the work of
starting a zygote. A zygote that is forked from here has them, and imports only what is its backend's own.

Serves claim 8: the nursery ends when its controller does, because its socket closes, and the kernel then signals its
zygotes. It never runs a task and stays single-threaded, because threads do not survive a fork.
"""

import atexit
import contextlib
import gc
import hashlib
import itertools
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module, invalidate_caches
from importlib.metadata import distributions
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import IO, NoReturn

from conformance.core import own_packages
from conformance.core.paths import cache_folder
from conformance.runtime import forkserver
from conformance.runtime.config import START_LIMIT_S, StartError
from conformance.runtime.failure import ENTRIES
from conformance.runtime.messages import Message, Wire, wire_pair

# What cannot be imported is left to the zygotes that need it, which say why.
COMMON = ("conformance.runtime.worker_main",)
# Imported when the first zygote wants anything of its package, because it is most of what such modules import: this one
# imports torch._dynamo and torch.distributed.tensor, too. The oracle, and worlds without models, need none of it.
SHARED = {"transformers": "transformers.modeling_utils"}
_ENVIRONMENTS = 3  # those used last whose bytecode is kept; of one, it takes 110 MB
_STATUS = struct.Struct("i")


class Forked:
    """The controller's handle of a forked zygote: the part of subprocess.Popen that is needed."""

    def __init__(self, nursery: "_Nursery", number: int, status_fd: int) -> None:
        self._nursery, self._number, self._status_fd = nursery, number, status_fd
        self.returncode: int | None = None

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended, and return its status. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not _is_readable(self._status_fd, limit_s=timeout):
                raise subprocess.TimeoutExpired(forkserver.__name__, timeout or 0.0)
            status = os.read(self._status_fd, _STATUS.size)
            # Nothing is written if the nursery has died, and then the kernel has ended its zygotes.
            self._end(_STATUS.unpack(status)[0] if status else -signal.SIGTERM)
        assert self.returncode is not None
        return self.returncode

    def _signal(self, number: int) -> None:
        if self.returncode is None:
            is_taken = self._nursery.wire.send({"do": "signal", "zygote": self._number, "signal": number})
            if is_taken and not self._nursery.has_imported():  # it is not forked yet; this ends it when it is
                self._end(-number)

    def _end(self, status: int) -> None:
        self.returncode = status
        os.close(self._status_fd)


class _Nursery:
    """The controller's handle of its nursery; threads may share it."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._numbers = itertools.count()
        self._has_imported = False
        self.wire, theirs = wire_pair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __spec__.name, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=environment(),
            )
        atexit.register(self._close)

    @property
    def is_alive(self) -> bool:
        return self._owner == os.getpid() and self._process.poll() is None

    def has_imported(self) -> bool:
        """Whether it forks by now. It says so once, and nothing else ever."""
        self._has_imported = self._has_imported or _is_readable(self.wire.fileno(), limit_s=0)
        return self._has_imported

    def fork(self, preload: Sequence[str], *, control: socket.socket, log: IO[bytes]) -> Forked:
        """Ask for a zygote, without waiting for it. Raises StartError if the nursery does not take the request in
        time, and OSError if this process can open no more files."""
        number = next(self._numbers)
        asked: Message = {"do": "fork", "zygote": number, "preload": preload, "cwd": str(Path.cwd())}
        asked |= {"environment": environment(), "path": absolute_path()}
        ours, theirs = os.pipe()
        try:
            if not self.wire.send(asked, fds=[control.fileno(), log.fileno(), theirs], limit_s=START_LIMIT_S):
                raise StartError(f"the process that forks others has died, or has read nothing for {START_LIMIT_S:g} s")
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return Forked(self, number, ours)

    def _close(self) -> None:
        if self.is_alive:
            self._process.terminate()
            self._process.wait()


_nursery: _Nursery | None = None
_choosing = threading.Lock()


def fork_zygote(preload: Sequence[str], *, control: socket.socket, log: IO[bytes]) -> Forked:
    """Fork a zygote that imports ``preload``, from the nursery of this process, which begins with the first of them.

    control: the zygote's end of its control socket. log: gets its output. Raises OSError if the host has no room, and
    StartError if the nursery takes no requests.
    """
    global _nursery
    with _choosing:
        if _nursery is None or not _nursery.is_alive:
            _nursery = _Nursery()
        chosen = _nursery
    return chosen.fork(preload, control=control, log=log)


def environment(*, is_other: bool = False) -> dict[str, str]:
    """The environment variables of a zygote and its ranks.

    is_other: of another Python environment, which finds its own packages and what the user's PYTHONPATH names.
    """
    return {
        **os.environ,
        **({} if is_other else {"PYTHONPATH": os.pathsep.join(absolute_path()), **_bytecode()}),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # In half precision oneDNN compiles a kernel for each shape, which takes milliseconds. It keeps 1024 by default,
        # and the documents of an oracle's run have more shapes than that; a kernel takes up to 0.7 MiB.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "4096"),
        # Each rank that compiles starts processes to compile in: 32, where there are as many processors.
        "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get(
            "TORCHINDUCTOR_COMPILE_THREADS", str(min(4, len(os.sched_getaffinity(0))))
        ),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),  # the same results twice
        "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", str(ENTRIES)),
        "PYTHONUNBUFFERED": "1",  # what a rank said before it was killed has to be in its log
        # pyarrow, which transformers imports where it is installed, starts a thread otherwise.
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }


def _bytecode() -> dict[str, str]:
    """Where Python keeps what it compiles, if it is neither compiled beside the libraries nor would be
    (``PYTHONDONTWRITEBYTECODE``, as in many container images). Else every process of every world compiles all that it
    imports: on such machines, torch and transformers took 14 s, and with bytecode 6 to 7 s."""
    torch = find_spec("torch")
    if not sys.dont_write_bytecode or sys.pycache_prefix is not None or torch is None or torch.origin is None:
        return {}
    if Path(cache_from_source(torch.origin)).exists():
        return {}
    # Python tells versions of a file apart by its time and size, and in an image all files may be of the same time.
    versions = [sys.version, sys.prefix, *(f"{d.name} {d.version}" for d in distributions())]
    folder = cache_folder() / "bytecode" / hashlib.sha256("\n".join(sorted(versions)).encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
    except OSError:
        return {}
    with contextlib.suppress(FileNotFoundError):  # another run removes them at the same time
        for unused in sorted(folder.parent.iterdir(), key=lambda kept: kept.stat().st_mtime)[:-_ENVIRONMENTS]:
            shutil.rmtree(unused, ignore_errors=True)
    # Python takes an empty value for one that is not set.
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder)} if os.access(folder, os.W_OK) else {}


def absolute_path() -> list[str]:
    """This process's ``sys.path``, for a process in another folder."""
    return [path or str(Path.cwd()) for path in sys.path]


def _is_readable(fd: int, *, limit_s: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if limit_s is None else limit_s * 1000))


@dataclass(frozen=True, kw_only=True)
class _Child:
    number: int
    pid: int
    status_fd: int


class _Server:
    """The nursery's own side: forks zygotes, signals them, and tells how they ended."""

    def __init__(self, control: Wire) -> None:
        self._control = control
        self._children: dict[int, _Child] = {}  # by a descriptor that can be read when the process has ended

    def serve(self) -> None:
        """Serve until the controller closes its socket or dies."""
        while True:
            poll = select.poll()
            for fd in (self._control.fileno(), *self._children):
                poll.register(fd, select.POLLIN)
            for fd, _ in poll.poll():
                if fd in self._children:
                    self._reap(fd)
                    continue
                message, fds = self._control.receive()
                if message is None:
                    return
                if message["do"] == "fork":
                    _import_shared(message["preload"])
                    self._fork(message, *fds)
                else:
                    self._signal(message["zygote"], message["signal"])

    def _fork(self, message: Message, control_fd: int, log_fd: int, status_fd: int) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.write(log_fd, f"it cannot be forked: {error.strerror}\n".encode())
            os.write(status_fd, _STATUS.pack(1))
            os.close(status_fd)
        else:
            if pid == 0:
                for fd in (self._control.fileno(), status_fd, *self._children):
                    os.close(fd)
                for child in self._children.values():
                    os.close(child.status_fd)
                _become_zygote(message, parent, control_fd, log_fd)
            child = _Child(number=message["zygote"], pid=pid, status_fd=status_fd)
            self._children[os.pidfd_open(pid)] = child
        os.close(control_fd)
        os.close(log_fd)

    def _signal(self, which: int, number: int) -> None:
        for child in self._children.values():
            if child.number == which:
                os.kill(child.pid, number)  # a zombie at least: it is reaped here only

    def _reap(self, fd: int) -> None:
        child = self._children.pop(fd)
        os.close(fd)
        _, status = os.waitpid(child.pid, 0)
        with contextlib.suppress(BrokenPipeError):
            os.write(child.status_fd, _STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(child.status_fd)


def _import_shared(preload: Sequence[str]) -> None:
    packages = {name.partition(".")[0] for name in preload}
    if wanted := [module for package, module in SHARED.items() if package in packages and module not in sys.modules]:
        _import(wanted)


def _import(modules: Sequence[str]) -> None:
    """Import modules for all zygotes to come, which share their memory as long as nobody writes to it."""
    for module in modules:
        with contextlib.suppress(Exception):
            import_module(module)
    gc.collect()
    gc.freeze()


def _become_zygote(message: Message, parent: int, control_fd: int, log_fd: int) -> NoReturn:
    """Continue as a zygote, in the child of a fork, in the controller's folder, environment and path."""
    status = 1
    try:
        os.setsid()
        for fd in (1, 2):
            os.dup2(log_fd, fd)
        os.close(log_fd)
        os.chdir(message["cwd"])
        os.environ.clear()
        os.environ.update(message["environment"])
        sys.path[:] = message["path"]
        invalidate_caches()
        forkserver.main([str(control_fd), str(parent), "forked", *message["preload"]])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    own_packages.prefer()
    control = Wire(socket.socket(fileno=int(sys.argv[1])))
    os.set_inheritable(control.fileno(), False)
    _import(COMMON)
    control.send({"type": "ready"})
    _Server(control).serve()


if __name__ == "__main__":
    main()
