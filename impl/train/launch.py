"""Starts the ranks of a training on this host, with torchrun's environment variables, and runs one as a process.

torchrun itself ends its ranks 30 s after a signal, and a checkpoint may take longer; here a signal is forwarded once,
and there is no time limit. The first rank writes to the terminal, the other ranks into files without names, of which
nothing is left if this process is killed. The last lines of the first rank that fails are printed, because the other
ranks mostly fail as a consequence.

A rank is ``torchrun -m impl.train.launch CONFIG.json``; the file holds the result of impl.train.config.to_json. A rank
that waits too long for the others ends, and says who waits for what; so does the training then.
"""

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

import torch
import transformers

from conformance.core.errors import UsageError
from conformance.core.io import read_json, visible_output
from conformance.core.process import listening_store, not_ignored, signal_at_death_of, signal_process
from impl.interface.distributed import FileFailure, limited_waits
from impl.train.config import from_json
from impl.train.loop import train

LAST_LINES = 15
FAILED, USAGE = 1, 2  # exit codes
LOOPBACK = "127.0.0.1"
GRACE_S, _POLL_S = 5.0, 0.1


def run_ranks(command: list[str], *, ranks: int, device: str, inherited: Sequence[int] = ()) -> int:
    """Runs ``command`` in ``ranks`` processes, which get the descriptors ``inherited``; returns an exit code.

    0: all ranks succeeded. 1: a rank failed, and the other ranks were ended. 2: a rank reported wrong usage. 128 + the
        signal: they ended after a signal.
    """
    store = listening_store(LOOPBACK, 0)
    with ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) if rank else None for rank in range(ranks)]
        started: list[subprocess.Popen[bytes]] = []
        signals = _Signals(started=started)
        signals.listen()
        try:
            for rank, log in enumerate(logs):
                process = subprocess.Popen(
                    command,
                    env={**os.environ, **_environment(rank, ranks, port=store.port, device=device)},
                    stdout=log,
                    stderr=log,
                    pass_fds=inherited,
                    start_new_session=True,  # Ctrl-C in a terminal reaches only this process, which forwards it
                    preexec_fn=partial(signal_at_death_of, os.getpid(), signal.SIGKILL),
                )
                started.append(process)
                signals.pass_on()  # forwards a signal that arrived while the process was being started
            failed = _wait(started)
        finally:
            _end(started)
        if failed is not None and -started[failed].returncode not in signals.received:
            _report(failed, started[failed].returncode, logs[failed])
            return USAGE if started[failed].returncode == USAGE else FAILED
    return 128 + signals.received[0] if signals.received else 0


def _environment(rank: int, ranks: int, *, port: int, device: str) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if device == "cpu" else {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        # Ranks of one host need no other network. The user's own settings win.
        **{name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")},
        # As under torchrun, ranks find each other by the store of the process that started them.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **threads,
    }


@dataclass(kw_only=True)
class _Signals:
    """Forwards the first signal to all ranks, once to each, and kills them at the second.

    A signal that was ignored before stays ignored, here and in the ranks, which inherit this.
    """

    started: list[subprocess.Popen[bytes]]
    received: list[int] = field(default_factory=list)
    signalled: set[int] = field(default_factory=set)  # pids; a second signal of the same kind would end a rank

    def listen(self) -> None:
        for number in not_ignored(signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.received.append(signal.SIGKILL if self.received else number)
        if len(self.received) == 1:
            print("parity: stopping after this step; a second signal stops at once", file=sys.stderr, flush=True)
        else:
            self.signalled.clear()
        self.pass_on()

    def pass_on(self) -> None:
        for process in self.started if self.received else ():
            if process.pid not in self.signalled:
                self.signalled.add(process.pid)
                signal_process(process.pid, self.received[-1])


def _wait(started: list[subprocess.Popen[bytes]]) -> int | None:
    """Returns the first rank that fails; None when all have succeeded."""
    while True:
        codes = [process.poll() for process in started]
        if failed := [rank for rank, code in enumerate(codes) if code]:
            return failed[0]
        if None not in codes:
            return None
        time.sleep(_POLL_S)


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    """Ends ranks that still run, for example because they wait for a failed rank; they get time to print messages."""
    deadline = time.monotonic() + GRACE_S
    while any(process.poll() is None for process in started) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for process in started:
        if process.poll() is None:
            signal_process(process.pid, signal.SIGKILL)
        process.wait()


def _report(rank: int, code: int, log: IO[bytes] | None) -> None:
    """Prints which rank failed, and the end of its output unless that is on the terminal already."""
    if code == USAGE and not rank:  # the first rank has printed the error itself
        return
    status = f"exit code {code}" if code > 0 else signal.Signals(-code).name
    lines: list[str] = []
    if log is not None:
        log.seek(0)
        lines = log.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    print("\n".join([f"parity: rank {rank} failed ({status})", *lines]), file=sys.stderr, flush=True)


def main(path: str) -> int:
    """Trains as the file says, in the process group of torchrun's environment variables; returns the exit code."""
    try:
        config = from_json(read_json(Path(path)), source=path)
        if config.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        transformers.utils.logging.disable_progress_bar()  # each rank would show a bar for loading weights
        with limited_waits(config.ddp_timeout, device=config.device):
            train(config)
    except (UsageError, FileFailure) as error:
        # If the first rank has the same error, torchrun ends this one before it repeats the message.
        time.sleep(0 if os.environ.get("RANK", "0") == "0" else 2)
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USAGE if isinstance(error, UsageError) else FAILED
    return 0


def leave(status: int) -> NoReturn:
    """Ends this process with an exit code, after its registered exit functions, without Python's finalization.

    A thread of a library that requests Python's lock during finalization is unwound through C++ code that forbids
    unwinding. A rank that had done all its work then ended by SIGABRT ("terminate called without an active exception";
    observed once, on a machine with a load of 20).
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    with visible_output():
        leave(main(sys.argv[1]))
