"""Imports a backend once, then forks ranks on request, reports their deaths and reaps them.

Run as ``python -m conformance.runtime.forkserver CONTROL_FD PARENT_PID forked|started MODULE...``, or as a fork of the
preload server. One forkserver serves all worker groups on a block of slots that preload the same modules. It is the
parent of its ranks, so it notices each death, and no rank outlives it.

It never runs a task, stays single-threaded and does not touch GPUs, because neither threads nor CUDA survive a fork. If
an import starts a thread or CUDA, the process executes itself again without imports, and starts ranks instead of
forking them.

A worker group has a temporary folder of its own and, where the host allows it, a /dev/shm of its own. Both are removed
when it ends, and every descendant of its ranks is then ended, also one that has left their sessions.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from conformance.core import packages
from conformance.core.process import (
    adopt_orphans,
    children,
    mark_descendants,
    mark_of,
    mount_privately,
    open_files,
    signal_at_death_of,
    signal_group,
    signal_process,
    thread_count,
    uncollected,
)
from conformance.runtime.messages import Message, Wire

DEVICES = Path("/dev")
CUDA_DEVICE = DEVICES / "nvidia-uvm"  # the driver opens it when CUDA is initialised
TERM_GRACE_S = 0.5  # for a SIGTERM handler of the task
KILL_LIMIT_S = 5.0  # a process that is not dead by then hangs in the kernel: in a driver or a network file system
_TICK_S = 0.002
# Of ranks that share GPUs: a network adapter, or a cloud's plugin for NCCL, may be unable to reach its own host.
NETWORK = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=lo"}


@dataclass(kw_only=True)
class _Burial:
    """Holds a worker group that is being ended. until: the end of its grace, then that of the wait after SIGKILL."""

    groups: list[int]
    until: float
    is_killed: bool = False
    is_asked: bool = True


class Forkserver:
    """Forks ranks, reports their deaths, and ends and reaps them.

    Each rank leads its own process group. A dead rank is reaped only together with its worker group, because its pid,
    which is also the id of the process group, could otherwise be reused by another process.
    """

    def __init__(self, control: Wire, *, forks: bool) -> None:
        self._control, self._forks = control, forks
        self._pids: dict[int, list[int]] = {}  # by worker group, then by rank
        self._burials: dict[int, _Burial] = {}  # by worker group
        self._folders: dict[int, list[Path]] = {}  # by worker group: its temporary folder, and what it has as /dev/shm
        self._reported: set[int] = set()
        self._own = set(children())  # of imported modules
        self._wakeup = socket.socketpair()
        for end in self._wakeup:
            end.setblocking(False)
        # The death of a child or of the controller (by SIGTERM) writes here, which ends the wait for messages.
        signal.set_wakeup_fd(self._wakeup[1].fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)

    def serve(self) -> None:
        """Serves the controller's requests until it closes the socket or dies; then ends all processes."""
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(self._wakeup[0].fileno(), select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll(1000 * _TICK_S if self._burials else None)]
            if self._wakeup[0].fileno() in ready:
                if signal.SIGTERM in self._wakeup[0].recv(4096):
                    break
                self._report_deaths()
                self._reap_orphans()
            if self._control.fileno() in ready:
                message, fds = self._control.receive()
                if message is None:
                    break
                if message["do"] == "start":
                    self._start(message, fds)
                elif message["do"] == "bury":
                    self._bury(message["worker_group"])
            self._go_on_burying()
        for worker_group in self._pids.keys() - self._burials.keys():
            self._bury(worker_group)
        while self._burials:
            self._go_on_burying()
            time.sleep(_TICK_S)

    def _start(self, message: Message, fds: list[int]) -> None:
        assert not self._forks or thread_count() == 1, "a fork copies one thread only; something started another"
        beats_fd, store_fd, *sockets = fds
        forkserver, pids, failure = os.getpid(), [], ""
        number = message["worker_group"]
        folders = [
            Path(tempfile.mkdtemp(prefix=f"parity-{os.getpid()}-", dir=parent))
            for parent in (None, SHARED_MEMORY)
            if _is_folder(parent)
        ]
        for rank, socket_fd in enumerate(sockets):
            inherited = {"socket_fd": socket_fd, "beats_fd": beats_fd, "store_fd": store_fd}
            try:
                pid = os.fork()
            except OSError as error:  # the host allows no more processes
                failure = f"after {rank}, {error.strerror}"
                break
            if pid == 0:
                # The user, or the Python environment of the ranks, may have chosen another network.
                chosen = NETWORK.keys() & os.environ.keys()
                os.environ.update({name: at for name, at in message["variables"].items() if name not in chosen})
                mark_descendants(number)
                _make_private(*folders)
                slot = message["slots"][rank]
                self._become_rank(forkserver, {**message["spec"], **slot, "local_rank": rank, **inherited}, fds)
            _lead_group(pid)
            pids.append(pid)
        for fd in fds:
            os.close(fd)
        self._pids[number], self._folders[number] = pids, folders
        if failure:
            self._bury(number, is_asked=False)
        self._control.send({"type": "started", "worker_group": number, "pids": pids, "error": failure})

    def _become_rank(self, forkserver: int, spec: dict[str, Any], fds: list[int]) -> NoReturn:
        """Continue as a rank, in the child of a fork. This must never return into the loop of the forkserver."""
        status = 1
        try:
            signal_at_death_of(forkserver, signal.SIGKILL)
            _lead_group(0)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            own = (spec["socket_fd"], spec["beats_fd"], spec["store_fd"])
            # If this rank kept a copy of a sibling's socket, the controller would not notice the sibling's death.
            for fd in (self._control.fileno(), *(end.fileno() for end in self._wakeup), *(set(fds) - set(own))):
                os.close(fd)
            if self._forks:
                from conformance.runtime.worker_main import (
                    RankSpec,
                    serve,
                )  # imports torch, which a forkserver that forks nothing lacks

                serve(RankSpec(**spec))
            else:
                for fd in own:
                    os.set_inheritable(fd, True)
                os.execv(
                    sys.executable, [sys.executable, "-P", "-m", "conformance.runtime.worker_main", json.dumps(spec)]
                )
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _report_deaths(self) -> None:
        for worker_group, pids in self._pids.items():
            for rank, pid in enumerate(pids):
                if pid not in self._reported and (status := _exit_status(pid)) is not None:
                    self._reported.add(pid)
                    self._control.send({"type": "exited", "worker_group": worker_group, "rank": rank, "status": status})

    def _reap_orphans(self) -> list[int]:
        """Reaps dead processes whose parent has died. Returns those that live and belong to no live worker group."""
        ranks = {pid for pids in self._pids.values() for pid in pids}
        orphans = [pid for pid in set(children()) - ranks - self._own if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        return [pid for pid in orphans if mark_of(pid) not in self._pids]

    def _bury(self, worker_group: int, *, is_asked: bool = True) -> None:
        """Begins to end a worker group's ranks. ``_go_on_burying`` does the rest, because other worker groups start
        meanwhile. is_asked: whether the controller waits for the end."""
        groups = self._pids[worker_group]
        for group in groups:
            signal_group(group, signal.SIGTERM)
            signal_group(group, signal.SIGCONT)  # a stopped process acts on SIGTERM only when it runs again
        until = time.monotonic() + TERM_GRACE_S
        self._burials[worker_group] = _Burial(groups=groups, until=until, is_asked=is_asked)

    def _go_on_burying(self) -> None:
        """Ends what is left of buried worker groups: all descendants of their ranks, and their folders. Tells the
        controller the ids of processes and process groups that are still alive at the end."""
        for number, burial in list(self._burials.items()):
            is_late = time.monotonic() >= burial.until
            if not burial.is_killed:
                if is_late or all(_exit_status(pid) is not None for pid in burial.groups):
                    self._kill(number, burial)
                continue
            orphans = self._reap_orphans()
            for pid in orphans:  # descendants that have left the process groups of their ranks
                signal_process(pid, signal.SIGKILL)
            left = [*(group for group in burial.groups if signal_group(group, 0)), *orphans]
            if left and not is_late:
                continue
            for folder in self._folders.pop(number, ()):
                shutil.rmtree(folder, ignore_errors=True)
            del self._burials[number]
            if burial.is_asked:
                self._control.send({"type": "buried", "worker_group": number, "left": left})

    def _kill(self, number: int, burial: _Burial) -> None:
        for group in burial.groups:
            signal_group(group, signal.SIGKILL)
        del self._pids[number]  # from now on its ranks are reaped as orphans, like their children
        self._reported.difference_update(burial.groups)
        burial.is_killed, burial.until = True, time.monotonic() + KILL_LIMIT_S


SHARED_MEMORY = Path("/dev/shm")
PRIVATE = "PARITY_PRIVATE_SHM"  # set in ranks whose worker group has a /dev/shm of its own


def _is_folder(path: Path | None) -> bool:
    return path is None or os.access(path, os.W_OK)


def _make_private(temporary: Path, shared_memory: Path | None = None) -> None:
    """Gives this process, a rank of one thread, the folders of its worker group for temporary files."""
    os.environ["TMPDIR"], tempfile.tempdir = str(temporary), None
    if shared_memory and mount_privately(shared_memory, SHARED_MEMORY):
        os.environ[PRIVATE] = "1"


def _exit_status(pid: int) -> int | None:
    """Returns the exit status of a dead child, which stays a zombie; -N: killed by signal N. None while it lives."""
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _lead_group(pid: int) -> None:
    """Gives a rank its own process group. Parent and child both do this, so that neither has to wait for the other."""
    with contextlib.suppress(PermissionError, ProcessLookupError):  # the rank has called exec already, or is dead
        os.setpgid(pid, pid)


def _import(modules: list[str]) -> str:
    """Imports modules until one has an effect that does not survive a fork. Returns a description of it, or ""."""
    if harm := _harm():
        return f"importing what all forkservers share {harm}"
    with uncollected(), _without_nvml() as refused:
        for module in modules:
            try:
                import_module(module)
            except Exception:
                if not refused:
                    raise
                return f"importing {module} needs NVML"
            if harm := _harm():
                return f"importing {module} {harm}"
    return ""


def _harm() -> str:
    if thread_count() > 1:
        return "starts a thread"
    return "initialises CUDA" if str(CUDA_DEVICE) in open_files() else ""


@contextlib.contextmanager
def _without_nvml() -> Iterator[list[str]]:
    """Makes torch count GPUs by their files while libraries are imported, and makes calls of NVML fail.

    A query of CUDA does not survive a fork. Neither does NVML, which torch and DeepSpeed query: with driver 580 it
    initialises CUDA and starts a thread. Yields a list that gets an entry for each call of NVML that failed.
    """
    import torch  # imports pynvml, if it is installed

    installed = len(list(DEVICES.glob("nvidia[0-9]*")))
    refused = list[str]()
    if not installed or torch.version.cuda is None:
        yield refused
        return
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = installed if named is None else len(list(filter(None, named.split(","))))
    nvml: Any = sys.modules.get("pynvml")

    def refuse() -> None:
        refused.append("nvmlInit")
        raise nvml.NVMLError(nvml.NVML_ERROR_UNINITIALIZED)

    with contextlib.ExitStack() as changed:
        _set(changed, torch.cuda, "device_count", lambda: count)
        _set(changed, torch.cuda, "is_available", lambda: count > 0)
        if nvml is not None:
            _set(changed, nvml, "nvmlInit", refuse)
        yield refused


def _set(changed: contextlib.ExitStack, module: Any, name: str, value: Any) -> None:
    changed.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)


def main(arguments: Sequence[str]) -> None:
    packages.prefer()
    control_fd, parent, ranks, *preload = arguments
    signal_at_death_of(int(parent), signal.SIGTERM)
    adopt_orphans()
    control = Wire(socket.socket(fileno=int(control_fd)))
    os.set_inheritable(int(control_fd), False)
    control.send({"type": "importing", "pid": os.getpid()})
    began = time.monotonic()
    if ranks == "forked":
        try:
            harm = _import([*preload, "conformance.runtime.worker_main"])
        except BaseException:
            error = f"a preloaded module cannot be imported:\n{traceback.format_exc()}"
            control.send({"type": "ready", "error": error})
            return
        if harm:
            # Exec ends threads and releases the GPU. This is slower, because every rank imports for itself.
            print(f"{harm}, so ranks are started afresh instead of forked", flush=True)
            os.set_inheritable(int(control_fd), True)
            os.execv(sys.executable, [sys.executable, "-P", "-m", __spec__.name, control_fd, parent, "started"])
        from conformance.runtime.cleanup import freeze

        freeze()
    control.send({"type": "ready", "error": "", "imports": [began, time.monotonic(), time.process_time()]})
    Forkserver(control, forks=ranks == "forked").serve()


if __name__ == "__main__":
    main(sys.argv[1:])
