"""Zygote: imports the modules that its ranks need once, then forks ranks on request, reports deaths and reaps ranks.

``python -m conformance.runtime.forkserver CONTROL_FD PARENT_PID forked|started MODULE...``, or a fork of the nursery
that goes on as this would; there is one zygote for all worlds of a place that preload the same modules. It never runs a
task, stays single-threaded and leaves GPUs alone, because neither threads nor CUDA survive a fork. If a module that it
imports does otherwise, it starts again, imports nothing, and its ranks are started instead of forked.
Serves claim 8: it is the parent of every rank, so it notices the death of every rank, and no rank outlives it.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from conformance.core import own_packages
from conformance.core.process import (
    adopt_orphans,
    children,
    open_files,
    signal_at_death_of,
    signal_group,
    signal_process,
    thread_count,
)
from conformance.runtime.messages import Message, Wire

DEVICES = Path("/dev")
CUDA_DEVICE = DEVICES / "nvidia-uvm"  # the driver opens it when CUDA is initialised
TERM_GRACE_S = 0.5  # for a SIGTERM handler of the task
KILL_LIMIT_S = 5.0  # a process that is not dead by then hangs in the kernel: in a driver or a network file system
_TICK_S = 0.002


class Zygote:
    """Forks ranks, reports their deaths, and ends and reaps them.

    Each rank leads its own process group. A dead rank is reaped only together with its world, because its pid, which is
    also the id of the group, could otherwise be reused by another process.
    """

    def __init__(self, control: Wire, *, forks: bool) -> None:
        self._control, self._forks = control, forks
        self._pids: dict[int, list[int]] = {}  # of each world, by rank
        self._reported: set[int] = set()
        self._wakeup = socket.socketpair()
        for end in self._wakeup:
            end.setblocking(False)
        # A child's death writes here, and so ends the wait for messages; so does the controller's, by SIGTERM.
        signal.set_wakeup_fd(self._wakeup[1].fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)

    def serve(self) -> None:
        """Serve the controller's requests until it closes the socket or dies; then end all processes."""
        poll = select.poll()
        poll.register(self._control.fileno(), select.POLLIN)
        poll.register(self._wakeup[0].fileno(), select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
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
                    left = self._bury(message["world"])
                    self._control.send({"type": "buried", "world": message["world"], "left": left})
        for world in list(self._pids):
            self._bury(world)
        for pid in children():  # what left its rank's process group
            signal_process(pid, signal.SIGKILL)

    def _start(self, message: Message, fds: list[int]) -> None:
        assert not self._forks or thread_count() == 1, "a fork copies one thread only; something started another"
        beats_fd, store_fd, *sockets = fds
        zygote, pids, failure = os.getpid(), [], ""
        for rank, socket_fd in enumerate(sockets):
            inherited = {"socket_fd": socket_fd, "beats_fd": beats_fd, "store_fd": store_fd}
            try:
                pid = os.fork()
            except OSError as error:  # no room for another process
                failure = f"after {rank}, {error.strerror}"
                break
            if pid == 0:
                os.environ.update(message["variables"])
                seat = message["seats"][rank]
                self._become_rank(zygote, {**message["spec"], **seat, "local_rank": rank, **inherited}, fds)
            _lead_group(pid)
            pids.append(pid)
        for fd in fds:
            os.close(fd)
        self._pids[message["world"]] = pids
        if failure:
            self._bury(message["world"])
        self._control.send({"type": "started", "world": message["world"], "pids": pids, "error": failure})

    def _become_rank(self, zygote: int, spec: dict[str, Any], fds: list[int]) -> NoReturn:
        """Continue as a rank, in the child of a fork. This must never return into the loop of the zygote."""
        status = 1
        try:
            signal_at_death_of(zygote, signal.SIGKILL)
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
                )  # torch, which a zygote that forks nothing lacks

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
        for world, pids in self._pids.items():
            for rank, pid in enumerate(pids):
                if pid not in self._reported and (status := _exit_status(pid)) is not None:
                    self._reported.add(pid)
                    self._control.send({"type": "exited", "world": world, "rank": rank, "status": status})

    def _reap_orphans(self) -> None:
        ranks = {pid for pids in self._pids.values() for pid in pids}
        for pid in set(children()) - ranks:
            os.waitpid(pid, os.WNOHANG)

    def _bury(self, world: int) -> list[int]:
        """End a world's ranks and the processes that they started. Returns the process groups that are still alive."""
        groups = self._pids[world]
        for group in groups:
            signal_group(group, signal.SIGTERM)
            signal_group(group, signal.SIGCONT)  # a stopped process acts on SIGTERM only when it runs again
        deadline = time.monotonic() + TERM_GRACE_S
        while any(_exit_status(pid) is None for pid in groups) and time.monotonic() < deadline:
            time.sleep(_TICK_S)
        for group in groups:
            signal_group(group, signal.SIGKILL)
        del self._pids[world]  # from now on its ranks are reaped as orphans, like the processes that they started
        self._reported.difference_update(groups)
        deadline = time.monotonic() + KILL_LIMIT_S
        left = groups
        while left and time.monotonic() < deadline:
            self._reap_orphans()
            left = [group for group in left if signal_group(group, 0)]
            time.sleep(_TICK_S if left else 0)
        return left


def _exit_status(pid: int) -> int | None:
    """The exit status of a dead child, which stays a zombie; -N: killed by signal N. None while the child lives."""
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _lead_group(pid: int) -> None:
    """Give a rank its own process group. Parent and child both do this, so that neither has to wait for the other."""
    with contextlib.suppress(PermissionError, ProcessLookupError):  # the rank has called exec already, or is dead
        os.setpgid(pid, pid)


def _import(modules: list[str]) -> str:
    """Import modules until one does what does not survive a fork. Returns in words which one did what, or ""."""
    if harm := _harm():
        return f"importing what all zygotes share {harm}"
    with _driver_left_alone() as refused:
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
def _driver_left_alone() -> Iterator[list[str]]:
    """Let torch say from files whether there are GPUs, which libraries ask when they are imported, and refuse NVML.

    CUDA does not survive a fork once it was asked. Neither does NVML, which torch and DeepSpeed ask: with driver 580 it
    initialises CUDA and starts a thread. The list that is given has an entry for each time that NVML was refused.
    """
    import torch  # which imports pynvml, if there is one

    count = len(list(DEVICES.glob("nvidia[0-9]*")))
    if count and (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        count = len(list(filter(None, named.split(","))))
    refused = list[str]()
    if not count or torch.version.cuda is None:
        yield refused
        return
    nvml: Any = sys.modules.get("pynvml")

    def refuse() -> None:
        refused.append("nvmlInit")
        raise nvml.NVMLError(nvml.NVML_ERROR_UNINITIALIZED)

    with contextlib.ExitStack() as changed:
        _set(changed, torch.cuda, "device_count", lambda: count)
        _set(changed, torch.cuda, "is_available", lambda: True)
        if nvml is not None:
            _set(changed, nvml, "nvmlInit", refuse)
        yield refused


def _set(changed: contextlib.ExitStack, module: Any, name: str, value: Any) -> None:
    changed.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)


def main(arguments: Sequence[str]) -> None:
    own_packages.prefer()
    control_fd, parent, ranks, *preload = arguments
    signal_at_death_of(int(parent), signal.SIGTERM)
    adopt_orphans()
    control = Wire(socket.socket(fileno=int(control_fd)))
    os.set_inheritable(int(control_fd), False)
    if ranks == "forked":
        try:
            harm = _import([*preload, "conformance.runtime.worker_main"])
        except BaseException:
            error = f"a preloaded module cannot be imported:\n{traceback.format_exc()}"
            control.send({"type": "ready", "error": error})
            return
        if harm:
            # Exec ends threads, and leaves the GPU. This is slower, because every rank imports for itself.
            print(f"{harm}, so ranks are started afresh instead of forked", flush=True)
            os.set_inheritable(int(control_fd), True)
            os.execv(sys.executable, [sys.executable, "-P", "-m", __spec__.name, control_fd, parent, "started"])
        from conformance.runtime.cleanup import freeze

        freeze()
    control.send({"type": "ready", "error": ""})
    Zygote(control, forks=ranks == "forked").serve()


if __name__ == "__main__":
    main(sys.argv[1:])
