"""Starts a run on several hosts as one job of torchrun, which starts the same command on each of them.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m conformance.cli.torchrun run --profile full --out /shared/out

The process of the first node is the controller. The process of every node starts the host process of its machine, and
carries its messages by keys of the store of torchrun's rendezvous. The exit code and message of the controller are a
key too, so a wrong option ends all nodes. ``pytest`` and its arguments may replace ``run``.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TextIO

from torch.distributed import TCPStore

from conformance.cli import EXIT
from conformance.cli.main import main as parity
from conformance.core.errors import UsageError, one_line
from conformance.core.io import visible_output
from conformance.runtime.failure import exit_words
from conformance.runtime.messages import Carrier, Closed, Message, Wire, connect
from conformance.runtime.multihost.controller import started_by_engine
from conformance.runtime.multihost.host import start_host

_COME = timedelta(minutes=10)  # limit for a node to reach the store
_END_S = 20.0  # limit for host processes to end by themselves, and for nodes to read the first node's exit code
_TICK_S = 0.2
_MAIL_S = 0.02  # seconds between checks for messages
COMMANDS = ("run", "pytest")


def main(arguments: Sequence[str]) -> int:
    try:
        rank, size = _place(os.environ, arguments)
        slots = _slots(os.environ.get("PARITY_SLOTS", ""))
    except UsageError as error:
        print(f"parity: {error}", file=sys.stderr)
        return 2
    job = f"backend-parity/{os.environ['TORCHELASTIC_RUN_ID']}/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    wire, host = start_host(address=_own_address(), slots=slots)
    if rank == 0:
        return _control(job, size, wire, host, arguments)
    store = _store()
    carrier = Carrier(wire, Mailbox(f"{job}/from/{rank}", f"{job}/to/{rank}"), why_closed=lambda: _why_ended(host))
    try:
        return _wait(host, store, job)
    finally:
        carrier.close()
        with contextlib.suppress(RuntimeError):  # the first node did not wait
            store.add(f"{job}/heard", 1)


def _control(job: str, size: int, own: Wire, host: "subprocess.Popen[bytes]", arguments: Sequence[str]) -> int:
    """Runs the command on the hosts of all nodes, in the process of the first node; returns the exit code."""
    store, wires = _store(), [own]
    with contextlib.ExitStack() as carriers:
        for node in range(1, size):
            wire, carrier = connect(Mailbox(f"{job}/to/{node}", f"{job}/from/{node}"))
            wires.append(wire)
            carriers.callback(carrier.close)
        with started_by_engine(wires):
            code, message = _run(arguments)
        _end(host, code)
    store.set(f"{job}/ended", json.dumps([code, message]))
    deadline = time.monotonic() + _END_S
    while store.add(f"{job}/heard", 0) < size - 1 and time.monotonic() < deadline:  # the store ends with this node
        time.sleep(_TICK_S)
    return code


class Mailbox:
    """Sends and receives messages as values of numbered keys of torchrun's store.

    Each direction has its own connection, because two threads use them.
    """

    def __init__(self, outgoing: str, incoming: str) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        self._sending, self._receiving = _store(), _store()
        self._sent = self._received = 0

    def send(self, messages: list[Message]) -> None:
        try:
            self._sending.set(f"{self._outgoing}/{self._sent}", json.dumps(messages))
        except RuntimeError as error:
            raise Closed(f"torchrun's store is gone: {one_line(error)}") from None
        self._sent += 1

    def receive(self, *, limit_s: float) -> list[Message]:
        key, deadline = f"{self._incoming}/{self._received}", time.monotonic() + limit_s
        try:
            while not self._receiving.check([key]):  # TCPStore.wait logs a warning after each timeout
                if time.monotonic() > deadline:
                    return []
                time.sleep(_MAIL_S)
            messages: list[Message] = json.loads(self._receiving.get(key))
            self._receiving.delete_key(key)
        except RuntimeError as error:
            raise Closed(f"torchrun's store is gone: {one_line(error)}") from None
        self._received += 1
        return messages


def _store() -> TCPStore:
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_COME)


class _Heard:
    """Keeps the last lines of standard error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lines = stream, deque([""], maxlen=20)

    def write(self, text: str) -> int:
        first, *more = text.split("\n")
        self._lines[-1] += first
        self._lines.extend(more)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def message(self) -> str:
        """Returns the last message of parity; empty if there is none."""
        lines = list(self._lines)
        last = max((at for at, line in enumerate(lines) if line.startswith("parity")), default=len(lines))
        return "\n".join(lines[last:]).strip()


def _run(arguments: Sequence[str]) -> tuple[int, str]:
    """Runs the command; returns its exit code and its last message."""
    heard = _Heard(sys.stderr)
    with contextlib.redirect_stderr(heard):  # type: ignore[type-var]
        try:
            return run_command(arguments), heard.message()
        except SystemExit as ended:  # an option that does not exist
            return int(ended.code or 0), heard.message()


def run_command(arguments: Sequence[str]) -> int:
    """Runs ``parity run``, or ``pytest``, in this process."""
    if arguments[0] == "pytest":
        import pytest

        code = int(pytest.main(list(arguments[1:])))
        return EXIT["usage"] if code == pytest.ExitCode.USAGE_ERROR else code
    return parity(list(arguments))


def _wait(host: "subprocess.Popen[bytes]", store: TCPStore, job: str) -> int:
    """Waits until the host process or the controller has ended; returns the exit code of this node."""
    while host.poll() is None:
        try:
            if store.check([f"{job}/ended"]):
                code, message = json.loads(store.get(f"{job}/ended"))
                if (own := _end(host, code)) >= 0:
                    return own
                print(
                    f"parity: the first node ended with code {code}: {message or 'see what it printed'}",
                    file=sys.stderr,
                )
                return int(code)
        except RuntimeError as error:  # torch's DistNetworkError
            _end(host, EXIT["incomplete"])
            print(f"parity: lost the first node: {one_line(error)}", file=sys.stderr)
            return EXIT["incomplete"]
        time.sleep(_TICK_S)
    return int(host.returncode)


def _end(host: "subprocess.Popen[bytes]", code: int) -> int:
    """Ends the host process after a controller that ended with ``code``; returns the exit code of the host process.

    After a run, the host process ends by itself.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        host.wait(timeout=0 if code == EXIT["usage"] else _END_S)
    host.terminate()
    return host.wait()


def _why_ended(host: "subprocess.Popen[bytes]") -> str:
    """Returns why the host process has closed its wire, which it does when it ends."""
    try:
        return f"its process {exit_words(host.wait(timeout=_END_S))}"
    except subprocess.TimeoutExpired:
        return "it closed the connection"


def _place(environment: "os._Environ[str]", arguments: Sequence[str]) -> tuple[int, int]:
    """Returns the number of this node and the number of nodes. Raises UsageError."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UsageError("start conformance.cli.torchrun with torchrun --rdzv-backend c10d (docs/guides/hosts.md)")
    if int(environment["LOCAL_WORLD_SIZE"]) != 1:
        raise UsageError("give torchrun --nproc-per-node 1: the host process of a node starts all of its ranks")
    if not arguments or arguments[0] not in COMMANDS:
        raise UsageError(f"conformance.cli.torchrun needs a command, {' or '.join(COMMANDS)}, and its options")
    return int(environment["GROUP_RANK"]), int(environment["GROUP_WORLD_SIZE"])


def _slots(text: str) -> int | None:
    if text and (not text.isdecimal() or not int(text)):
        raise UsageError(f"PARITY_SLOTS must be a positive number of ranks, got {text!r}")
    return int(text) if text else None


def _own_address() -> str:
    """Returns the address from which this machine reaches the first node."""
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    family, kind, protocol, _, address = socket.getaddrinfo(*where, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


if __name__ == "__main__":
    with visible_output():
        sys.exit(main(sys.argv[1:]))
