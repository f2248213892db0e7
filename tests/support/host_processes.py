"""Starts host processes on this machine, as if each were on its own host, for the tests of several hosts."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from conformance.runtime.messages import Wire, wire_pair
from conformance.runtime.multihost.controller import Fleet, Hosts
from conformance.runtime.preload_server import absolute_path

Process = subprocess.Popen[str]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(absolute_path())}


@contextlib.contextmanager
def host(*, slots: int = 1, code: str = "pass") -> Iterator[tuple[Wire, Process]]:
    """Start a host process; ``code`` is run before it in its process."""
    start = f"import sys; {code}; from conformance.runtime.multihost.host import main; sys.exit(main())"
    wire, theirs = wire_pair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", start, str(theirs.fileno()), "127.0.0.1", str(slots)],
            pass_fds=[theirs.fileno()],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        yield wire, process
    finally:
        wire.close()
        process.kill()
        process.communicate()


@contextlib.contextmanager
def fleet(
    folder: Path, *, slots: int = 1, codes: Sequence[str] = ("pass",), device: str = "cpu", ranks_per_gpu: int = 1
) -> Iterator[tuple[Fleet, list[Process]]]:
    """Start a host process for each of the ``codes``, and the controller's side of them."""
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(host(slots=slots, code=code)) for code in codes]
        hosts = Hosts(wires=tuple(wire for wire, _ in started), ranks_per_gpu=ranks_per_gpu)
        made = Fleet(hosts, device=device, folder=folder)
        stack.callback(made.close)
        yield made, [process for _, process in started]


def is_true_soon(ask: object, *, limit_s: float = 30.0) -> bool:
    assert callable(ask)
    deadline = time.monotonic() + limit_s
    while not ask() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(ask())
