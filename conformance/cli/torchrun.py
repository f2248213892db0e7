"""Torchrun: a run on several hosts as one job of torchrun, which starts the same command on each.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m conformance.cli.torchrun run --profile full --out /shared/out

The process of the first node is the controller and starts the agent of its host; the others are agents. They find each
other through the store of torchrun's rendezvous, which also hands out a secret, so the user gives neither. How the
controller ended is said there, too: one that ends before it listens, because of a wrong option, ends all (claim 8).
"""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TextIO

from torch.distributed import TCPStore

from conformance.cli.main import main as parity
from conformance.cli.run import EXIT
from conformance.core.errors import UsageError
from conformance.runtime.multihost.agent import free_port
from conformance.runtime.multihost.handshake import SECRET

_WHERE, _ENDED, _HEARD = "backend-parity/controller", "backend-parity/ended", "backend-parity/heard"
_COME = timedelta(minutes=10)  # for the first node to say where it listens
_END_S = 20.0  # for agents to end by themselves, and for nodes to hear how the first one ended
_TICK_S = 0.2


def main(arguments: Sequence[str]) -> int:
    try:
        rank, size = _place(os.environ, arguments)
    except UsageError as error:
        print(f"parity: {error}", file=sys.stderr)
        return 2
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_COME)
    if rank == 0:
        host = os.environ["MASTER_ADDR"]
        address = f"{host}:{free_port(host)}"
        os.environ[SECRET] = secrets.token_hex(32)
        store.set(_WHERE, f"{address} {os.environ[SECRET]}")
        with _agent(address) as agent:
            code, said = _run(["run", *arguments[1:], "--hosts", str(size), "--listen", address])
            store.set(_ENDED, json.dumps([code, said]))
            _end(agent, code)
        deadline = time.monotonic() + _END_S
        while store.add(_HEARD, 0) < size - 1 and time.monotonic() < deadline:  # the store ends with this node
            time.sleep(_TICK_S)
        return code
    address, os.environ[SECRET] = store.get(_WHERE).decode().split()
    with _agent(address) as agent:
        code = _wait(agent, store)
    with contextlib.suppress(RuntimeError):  # the first node did not wait
        store.add(_HEARD, 1)
    return code


class _Heard:
    """Standard error, whose last lines are kept."""

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
        """The last message of parity; empty if there is none."""
        lines = list(self._lines)
        last = max((at for at, line in enumerate(lines) if line.startswith("parity")), default=len(lines))
        return "\n".join(lines[last:]).strip()


def _run(arguments: Sequence[str]) -> tuple[int, str]:
    """`parity`: its exit code, and its last message."""
    heard = _Heard(sys.stderr)
    with contextlib.redirect_stderr(heard):  # type: ignore[type-var]
        try:
            return parity(arguments), heard.message()
        except SystemExit as ended:  # an option that does not exist
            return int(ended.code or 0), heard.message()


def _wait(agent: "subprocess.Popen[bytes]", store: TCPStore) -> int:
    """Wait for the agent, or for the controller to have ended without it; returns the exit code of this node."""
    while agent.poll() is None:
        try:
            if store.check([_ENDED]):
                code, said = json.loads(store.get(_ENDED))
                if (own := _end(agent, code)) >= 0:
                    return own
                print(f"parity: the first node ended with code {code}: {said}", file=sys.stderr)
                return int(code)
        except RuntimeError as error:  # torch's DistStoreError
            _end(agent, EXIT["incomplete"])
            print(f"parity: the first node is gone: {error}", file=sys.stderr)
            return EXIT["incomplete"]
        time.sleep(_TICK_S)
    return int(agent.returncode)


def _end(agent: "subprocess.Popen[bytes]", code: int) -> int:
    """End the agent of a controller that ended with ``code``; returns its code. One that had a run ends by itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        agent.wait(timeout=0 if code == EXIT["usage"] else _END_S)
    agent.terminate()
    return agent.wait()


def _place(environment: "os._Environ[str]", arguments: Sequence[str]) -> tuple[int, int]:
    """The number of this node and how many there are. Raises UsageError."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UsageError("conformance.cli.torchrun is started by torchrun --rdzv-backend c10d (docs/guides/hosts.md)")
    if int(environment["LOCAL_WORLD_SIZE"]) != 1:
        raise UsageError("give torchrun --nproc-per-node 1: the agent of a host starts all of its ranks")
    if list(arguments[:1]) != ["run"]:
        raise UsageError("conformance.cli.torchrun wants the command run, and its options")
    return int(environment["GROUP_RANK"]), int(environment["GROUP_WORLD_SIZE"])


def _agent(address: str) -> "subprocess.Popen[bytes]":
    slots = os.environ.get("PARITY_SLOTS")
    more = ["--slots", slots] if slots else []
    return subprocess.Popen([sys.executable, "-P", "-m", "conformance.cli.agent", address, *more])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
