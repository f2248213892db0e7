"""Imports the modules that most backends share, once per controller, and forks the forkservers of its pools.

Runs as ``python -m conformance.runtime.preload_server CONTROL_FD``, or as a fork of a controller that imports the same
and has done nothing else yet. Importing torch and transformers is most of the work of starting a forkserver. A
forkserver that is forked from here has them, and imports only its backend's own modules. The processes that answer
queries about adapters (conformance.backends.registry) are forked from here for the same reason, and because neither
CUDA nor NVML, which the controller may query later, survives a fork.

The preload server ends when its controller does, because its socket closes, and the kernel then signals its
forkservers. It never runs a task and stays single-threaded, because threads do not survive a fork.
"""

import atexit
import contextlib
import ctypes
import gc
import hashlib
import io
import itertools
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module, invalidate_caches
from importlib.metadata import distributions
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from conformance.core import packages as own_packages
from conformance.core.host import cache_folder
from conformance.core.process import (
    StartPatience,
    adopt_orphans,
    children,
    effort,
    ended_by_interrupt,
    signal_process,
    thread_count,
    uncollected,
)
from conformance.runtime import forkserver
from conformance.runtime.failure import ENTRIES, StartError
from conformance.runtime.messages import Device, Message, Wire, wire_pair

# A failed import is ignored here: a forkserver that needs the module imports it again and reports the error.
COMMON = ("conformance.runtime.worker_main",)
# By package: the module that takes most of the time of its imports, imported for the first forkserver that preloads the
# package. It also imports torch._dynamo and torch.distributed.tensor. Worker groups without models do not need it.
SHARED = {"transformers": "transformers.modeling_utils"}
# The second makes torch count GPUs without the driver, which a process without GPUs would otherwise load.
# Where Triton is installed, torch.compile also starts processes for its kernels, which a CPU has none of.
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCH_WARM_POOL": "0"}
_ENVIRONMENTS = 3  # number of environments whose bytecode is kept, the last ones used; 110 MB each
_STATUS = struct.Struct("i")
_TICK_S = 0.002
_SEND_LIMIT_S = 0.1
# glibc raises these two limits to these values at most, when large blocks are freed. Until then ranks get memory from
# the kernel for each tensor above 128 KiB, and give it back: a tenth of their processor time. By variable: the
# parameter of mallopt(3), and its value.
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": (-1, 64 * 2**20), "MALLOC_MMAP_THRESHOLD_": (-3, 32 * 2**20)}


class Forked:
    """Controls a process that the preload server forks, with the needed part of subprocess.Popen's interface."""

    def __init__(self, preload_server: "_PreloadServer", number: int, status_fd: int) -> None:
        self._preload_server, self._number, self._status_fd = preload_server, number, status_fd
        self.returncode: int | None = None

    def patience(self) -> StartPatience:
        """Returns the patience with the process that has to fork this one."""
        return self._preload_server.patience()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the process has ended, and returns its status. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not _is_readable(self._status_fd, limit_s=timeout):
                raise subprocess.TimeoutExpired(forkserver.__name__, timeout or 0.0)
            status = os.read(self._status_fd, _STATUS.size)
            # No status means that the preload server has died; the kernel has then ended its forkservers.
            self._end(_STATUS.unpack(status)[0] if status else -signal.SIGTERM)
        assert self.returncode is not None
        return self.returncode

    def _signal(self, number: int) -> None:
        if self.returncode is None:
            is_sent = self._preload_server.wire.send({"do": "signal", "fork": self._number, "signal": number})
            if (
                is_sent and not self._preload_server.has_imported()
            ):  # not forked yet: it gets the signal right after the fork
                self._end(-number)

    def _end(self, status: int) -> None:
        self.returncode = status
        os.close(self._status_fd)


class _Process(Protocol):
    """The process of a preload server, which may be a subprocess.Popen."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def wait(self) -> int: ...


class _ForkOfController:
    """Controls a child that this process has forked. Threads may share it."""

    def __init__(self, pid: int) -> None:
        self.pid, self._waiting = pid, threading.Lock()
        self._status: int | None = None

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        status = self._wait(0)
        assert status is not None
        return status

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def _wait(self, how: int) -> int | None:
        with self._waiting:
            if self._status is None and (ended := os.waitpid(self.pid, how))[0]:
                self._status = os.waitstatus_to_exitcode(ended[1])
            return self._status


class _PreloadServer:
    """Controls the preload server of this process. Threads may share it."""

    def __init__(self, *, fork_without: Sequence[int] | None = None) -> None:
        """fork_without: descriptors that a fork of this process, which has imported everything, must not keep; None:
        the preload server is started, and imports by itself."""
        self._owner = os.getpid()
        self._numbers = itertools.count()
        self._has_imported = False
        self.wire, child_end = wire_pair()
        with child_end:
            self._process = self._started(child_end) if fork_without is None else self._fork(child_end, fork_without)
        atexit.register(self._close)

    def _started(self, child_end: socket.socket) -> _Process:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, str(child_end.fileno())],
            pass_fds=[child_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment(),
        )

    def _fork(self, child_end: socket.socket, without: Sequence[int]) -> _Process:
        if pid := os.fork():
            return _ForkOfController(pid)
        try:
            self.wire.close()
            for fd in without:
                os.close(fd)
            _leave_controller()
            _serve(child_end)
        finally:
            os._exit(0)

    @property
    def is_alive(self) -> bool:
        return self._owner == os.getpid() and self._process.poll() is None

    def patience(self) -> StartPatience:
        return StartPatience(partial(effort, self._process.pid))

    def has_imported(self) -> bool:
        """Returns whether the imports are done. The only message of the preload server reports that."""
        self._has_imported = self._has_imported or _is_readable(self.wire.fileno(), limit_s=0)
        return self._has_imported

    def fork(self, request: Message, *, fds: Sequence[int]) -> Forked:
        """Requests a fork with the descriptors ``fds``, and does not wait for it. Raises StartError if the preload
        server does not read the request in time, and OSError if this process cannot open more files."""
        number = next(self._numbers)
        request = {**request, "do": "fork", "fork": number, "cwd": str(Path.cwd()), "path": absolute_path()}
        status_fd, write_fd = os.pipe()
        try:
            patience = self.patience()
            while not self.wire.send(request, fds=[*fds, write_fd], limit_s=_SEND_LIMIT_S):
                if why := "it has died" if not self.is_alive else patience.why_over():
                    raise StartError(f"the process that forks others reads no requests: {why}")
        except BaseException:
            os.close(status_fd)
            raise
        finally:
            os.close(write_fd)
        return Forked(self, number, status_fd)

    def _close(self) -> None:
        if self.is_alive:
            self._process.terminate()
            self._process.wait()


_preload_server: _PreloadServer | None = None
_starting = threading.Lock()


def fork_forkserver(preload: Sequence[str], *, device: Device, control: socket.socket, log: IO[bytes]) -> Forked:
    """Forks a forkserver that imports ``preload`` from the preload server of this process, which is started if needed.

    device: of its ranks. control: the forkserver's end of its control socket. log: gets its output. Raises OSError if
    the host lacks the resources, and StartError if the preload server reads no requests.
    """
    request: Message = {"preload": list(preload), "environment": environment(device)}
    return _server().fork(request, fds=[control.fileno(), log.fileno()])


def fork_call(function: str, argument: str, fds: Sequence[int]) -> Forked:
    """Forks a process that calls ``function`` ("package.module:name") with an argument and its copies of ``fds``, but
    the last one, which gets its output. It has this process's environment. Raises as ``fork_forkserver`` does."""
    request: Message = {"call": function, "argument": argument, "environment": dict(os.environ)}
    return _server().fork(request, fds=fds)


def _server() -> _PreloadServer:
    """Returns the preload server of this process, and starts it if there is none."""
    global _preload_server
    with _starting:
        if _preload_server is None or not _preload_server.is_alive:
            _preload_server = _PreloadServer()
        return _preload_server


def import_ahead(packages: Sequence[str]) -> None:
    """Lets the preload server of this process, which is started if needed, import what these packages share."""
    _server().wire.send({"do": "import", "preload": list(packages)})


def fork_ahead(packages: Sequence[str]) -> None:
    """Imports what these packages share in this process, which needs it too, and forks the preload server from it.

    For a process that belongs to the suite and has just begun. If its modules would be compiled anew, or something has
    started a thread, which no fork copies, the preload server is started and imports by itself.
    """
    global _preload_server
    if _preload_server is not None or _bytecode():
        return import_ahead(packages)
    inherited = [int(fd.name) for fd in list(Path("/proc/self/fd").iterdir()) if int(fd.name) > 2 and fd.is_symlink()]
    before = dict(os.environ)
    os.environ.update(environment())  # libraries read some of it when they are imported
    try:
        with ended_by_interrupt():
            _import([*COMMON, *(SHARED[package] for package in packages)])
        if thread_count() == 1:
            _preload_server = _PreloadServer(fork_without=inherited)
    finally:
        os.environ.clear()
        os.environ.update(before)
    if _preload_server is None:
        import_ahead(packages)


def environment(device: Device | None = None, *, is_other: bool = False) -> dict[str, str]:
    """Returns the environment variables of a forkserver and its ranks.

    device: of the ranks; on the CPU they see no GPU, because libraries would query, open and compile for it. None: for
        a process that starts both kinds.
    is_other: for another Python environment, which imports its own packages and those of the user's PYTHONPATH.
    """
    return {
        **os.environ,
        **(_NO_GPU if device == "cpu" else {}),
        **({} if is_other else {"PYTHONPATH": os.pathsep.join(absolute_path()), **_bytecode()}),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # In half precision oneDNN compiles a kernel for each shape, which takes milliseconds. It keeps 1024 by default,
        # and the documents of an oracle's run have more shapes than that; a kernel takes up to 0.7 MiB.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "4096"),
        **{variable: os.environ.get(variable, str(value)) for variable, (_, value) in _MALLOC.items()},
        # Each rank that compiles starts as many compiler processes as there are processors, up to 32.
        "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get(
            "TORCHINDUCTOR_COMPILE_THREADS", str(min(4, len(os.sched_getaffinity(0))))
        ),
        # Worker groups have temporary folders of their own, and share what is compiled.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", _compiled_code()),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),  # reproducible results
        "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_FR_BUFFER_SIZE", str(ENTRIES)),
        "PYTHONUNBUFFERED": "1",  # the log contains all output of a rank that is killed
        # pyarrow, which transformers imports if it is installed, starts a thread otherwise.
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }


def _compiled_code() -> str:
    """Returns the folder in which torch.compile keeps its code by default."""
    return str(Path(tempfile.gettempdir()) / f"torchinductor_{os.environ.get('USER', os.getuid())}")


def _bytecode() -> dict[str, str]:
    """Returns variables that make Python keep bytecode in the cache folder, if it neither exists beside the libraries
    nor would be written there (``PYTHONDONTWRITEBYTECODE``, as in many container images). Otherwise every process
    compiles all that it imports: torch and transformers took 14 s, and 6 to 7 s with bytecode."""
    torch = find_spec("torch")
    if not sys.dont_write_bytecode or sys.pycache_prefix is not None or torch is None or torch.origin is None:
        return {}
    if Path(cache_from_source(torch.origin)).exists():
        return {}
    # Python distinguishes versions of a file by time and size, and all files of an image may have the same time.
    versions = [sys.version, sys.prefix, *(f"{d.name} {d.version}" for d in distributions())]
    folder = cache_folder() / "bytecode" / hashlib.sha256("\n".join(sorted(versions)).encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
    except OSError:
        return {}
    with contextlib.suppress(FileNotFoundError):  # another run removes them at the same time
        for unused in sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-_ENVIRONMENTS]:
            shutil.rmtree(unused, ignore_errors=True)
    # To Python, an empty value is the same as an unset one.
    return {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder)} if os.access(folder, os.W_OK) else {}


def absolute_path() -> list[str]:
    """Returns this process's ``sys.path`` for a process in another folder."""
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
    """Forks forkservers, signals them, and reports their exit statuses, inside the preload server."""

    def __init__(self, control: Wire) -> None:
        self._control = control
        self._children: dict[int, _Child] = {}  # by pidfd, which is readable when the process has ended
        self._own: set[int] = set()  # processes that imported modules have started

    def serve(self) -> None:
        """Serves until the controller closes its socket or dies."""
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
                    _import_shared(message.get("preload", ()))
                    self._own |= set(children()) - {child.pid for child in self._children.values()}
                    self._fork(message, *fds)
                elif message["do"] == "import":
                    _import_shared(message["preload"])
                else:
                    self._signal(message["fork"], message["signal"])

    def _fork(self, message: Message, *fds: int) -> None:
        """Forks. ``fds``: the descriptors of the child, of which the last one that it keeps is for its output, and the
        end of a pipe that gets its exit status."""
        *fds_of_child, log_fd, status_fd = fds
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
                _become(message, parent, fds_of_child, log_fd)
            child = _Child(number=message["fork"], pid=pid, status_fd=status_fd)
            self._children[os.pidfd_open(pid)] = child
        for fd in (*fds_of_child, log_fd):
            os.close(fd)

    def _signal(self, which: int, number: int) -> None:
        for child in self._children.values():
            if child.number == which:
                os.kill(child.pid, number)  # at least a zombie: it is reaped only here

    def _reap(self, fd: int) -> None:
        child = self._children.pop(fd)
        os.close(fd)
        _, status = os.waitpid(child.pid, 0)
        self._end_orphans()
        with contextlib.suppress(BrokenPipeError):
            os.write(child.status_fd, _STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(child.status_fd)

    def _end_orphans(self) -> None:
        """Ends the descendants of a forkserver that was killed. A live one keeps its own orphans."""
        deadline = time.monotonic() + forkserver.KILL_LIMIT_S
        others = self._own | {child.pid for child in self._children.values()}
        while (orphans := set(children()) - others) and time.monotonic() < deadline:
            for pid in orphans:
                signal_process(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            time.sleep(_TICK_S)


def _import_shared(preload: Sequence[str]) -> None:
    packages = {name.partition(".")[0] for name in preload}
    if wanted := [module for package, module in SHARED.items() if package in packages and module not in sys.modules]:
        _import(wanted)


def _import(modules: Sequence[str]) -> None:
    """Imports modules for all later forkservers, which share the memory until they write to it. Of the objects that
    imports leave, 2 % are garbage, and to find them takes as long as the imports of a backend."""
    with uncollected():
        for module in modules:
            with contextlib.suppress(Exception):
                import_module(module)
    gc.freeze()


def _become(message: Message, parent: int, fds: Sequence[int], log_fd: int) -> NoReturn:
    """Continues as a forkserver, or calls a function, in the child of a fork, with the controller's folder, environment
    and path."""
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
        if "call" in message:
            module, _, function = message["call"].partition(":")
            getattr(import_module(module), function)(message["argument"], *fds)
        else:
            forkserver.main([*map(str, fds), str(parent), "forked", *message["preload"]])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _leave_controller() -> None:
    """Gives a fork of the controller what a process of its own has: session, streams, main module, limits of malloc."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(max(3, null), null + 1)  # it is one of the three if the user has closed that
    # Without a buffer, so that logs have all output of a rank that is killed.
    raw: Any = [io.FileIO(fd, "wb", closefd=False) for fd in (1, 2)]
    sys.stdout, sys.stderr = (io.TextIOWrapper(one, "utf-8", "backslashreplace", write_through=True) for one in raw)
    sys.modules["__main__"], sys.argv[:] = sys.modules[__name__], [__spec__.name]
    libc = ctypes.CDLL(None)
    for variable, (parameter, value) in _MALLOC.items():
        if os.environ[variable] == str(value):  # any other value is the user's, which the controller began with
            libc.mallopt(parameter, value)


def _serve(control_end: socket.socket) -> None:
    own_packages.prefer()
    adopt_orphans()
    control = Wire(control_end)
    os.set_inheritable(control.fileno(), False)
    _import(COMMON)
    control.send({"type": "ready"})
    _Server(control).serve()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
