"""Torchrun: a run on several hosts as one job of torchrun, which starts the same command on each.

    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        -m conformance.hosts.torchrun run --profile full --out /shared/out

The process of the first node is the controller and starts the agent of its host; the others are agents. They find each
other through the store of torchrun's rendezvous, which also hands out a secret, so the user gives neither.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import TCPStore

from conformance.cli import main as parity
from conformance.hosts.agent import free_port
from conformance.hosts.stream import SECRET
from conformance.validation import UsageError

_WHERE = "backend-parity/controller"
_COME = timedelta(minutes=10)  # for the first node to say where it listens


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
        with _agent(address):
            return parity(["run", *arguments[1:], "--hosts", str(size), "--listen", address])
    address, os.environ[SECRET] = store.get(_WHERE).decode().split()
    with _agent(address) as agent:
        return agent.wait()


def _place(environment: "os._Environ[str]", arguments: Sequence[str]) -> tuple[int, int]:
    """The number of this node and how many there are. Raises UsageError."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise UsageError("conformance.hosts.torchrun is started by torchrun --rdzv-backend c10d (docs/hosts.md)")
    if int(environment["LOCAL_WORLD_SIZE"]) != 1:
        raise UsageError("give torchrun --nproc-per-node 1: the agent of a host starts all of its ranks")
    if list(arguments[:1]) != ["run"]:
        raise UsageError("conformance.hosts.torchrun wants the command run, and its options")
    return int(environment["GROUP_RANK"]), int(environment["GROUP_WORLD_SIZE"])


def _agent(address: str) -> "subprocess.Popen[bytes]":
    slots = os.environ.get("PARITY_SLOTS")
    more = ["--slots", slots] if slots else []
    return subprocess.Popen([sys.executable, "-P", "-m", "conformance.hosts.command", address, *more])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
