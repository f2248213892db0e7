"""Memory: how much the GPUs of this host have, and how much of it is taken, as nvidia-smi tells (claim 8).

Inventory: the GPUs that this process may use, by UUID, in the order in which CUDA would number them.

Numbers mean nothing between processes: GPU 0 of a job that got ``CUDA_VISIBLE_DEVICES=2,3`` is another job's GPU 2. So
GPUs are leased by UUID, and ranks are told UUIDs. A number is taken for nvidia-smi's, as torch does.

Shares: places of several ranks on one GPU, and what the ranks of a block of places are told.

A share is a name, ``GPU-0aa1#0``, so it is leased as a GPU is. With N ranks per GPU, every GPU has N of them. They are
ordered round by round (the first of every GPU, then the second ones), so that the ranks of a world share a GPU only
where there are more of them than GPUs, and the rank N of a whole block has the GPU N modulo their number, which is what
libraries guess (DTensor's generators, the first barrier of a process group).

NCCL refuses two ranks of a communicator on one GPU of a host ("Duplicate GPU detected" in src/init.cc of NVIDIA/nccl).
It takes ``NCCL_HOSTID`` for the host's name (getHostHash in src/misc/utils.cc), so ranks that share have a host each:
the share's own name, which no other rank of any host has. Between such ranks it sends everything over its network.
"""

import os
import re
import subprocess
from collections.abc import Sequence

from conformance.core.errors import UsageError, shown
from conformance.runtime.slots import Block, Seat

MIB = 2**20  # bytes, in which nvidia-smi counts
LIMIT_S = 10.0  # for nvidia-smi, which hangs where a driver does
_QUERY = ["nvidia-smi", "--query-gpu=uuid,memory.used,memory.total", "--format=csv,noheader,nounits"]


def memory_of_gpus() -> dict[str, tuple[int, int]]:
    """Bytes that are taken, and all, of each whole GPU that nvidia-smi tells of, by UUID; of none if it does not
    answer."""
    try:
        listed = subprocess.run(_QUERY, capture_output=True, timeout=LIMIT_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):  # whoever asks for the GPUs of this host is told of the first
        return {}
    rows = (line.split(", ") for line in listed.decode(errors="replace").splitlines())
    return {
        row[0]: (int(row[1]) * MIB, int(row[2]) * MIB)
        for row in rows
        if len(row) == 3 and row[1].isdecimal() and row[2].isdecimal()
    }


_GPU = re.compile(r"^\s*GPU \d+: .*\(UUID: (GPU-[0-9A-Za-z-]+)\)", re.MULTILINE)
_PART = re.compile(r"^\s*MIG .*\(UUID: (MIG-[0-9A-Za-z/-]+)\)", re.MULTILINE)
VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_of_host() -> tuple[str, ...]:
    """The UUIDs of the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves. Raises UsageError if that names one that is not
    there: CUDA would hide it and all after it without a word."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise UsageError(f"--device cuda: nvidia-smi cannot be run ({error.strerror}); it tells GPUs apart") from None
    return visible_gpus(listed, os.environ.get(VISIBLE))


def visible_gpus(listed: str, visible: str | None) -> tuple[str, ...]:
    """Of the GPUs that ``nvidia-smi -L`` has ``listed``, those that the value of ``CUDA_VISIBLE_DEVICES`` names."""
    whole, parts = _GPU.findall(listed), _PART.findall(listed)
    if visible is None:
        return tuple(whole)
    chosen = [_named(entry.strip(), whole, parts) for entry in visible.split(",") if entry.strip()]
    if len(set(chosen)) < len(chosen):
        raise UsageError(f"{VISIBLE}={shown(visible)} names a GPU twice; name each once")
    return tuple(chosen)


def _named(entry: str, whole: Sequence[str], parts: Sequence[str]) -> str:
    """The UUID of an entry: a number, a UUID, or the beginning of one."""
    if entry.isdecimal():
        found = list(whole[int(entry) : int(entry) + 1])
    else:
        found = [uuid for uuid in (*whole, *parts) if uuid.startswith(entry)]
    if len(found) != 1:
        count = f"{len(whole)} GPU{'s' * (len(whole) != 1)}"
        what = f"{len(found)} GPUs" if found else f"no GPU that nvidia-smi lists, which has {count}"
        raise UsageError(f"{VISIBLE}: {shown(entry)} is {what}; name GPUs by number or UUID (nvidia-smi -L)")
    return found[0]


# An adapter or a cloud's plugin for NCCL need not reach back to its own host.
_NETWORK = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=lo"}


def shares_of(gpus: Sequence[str], ranks_per_gpu: int) -> Block:
    """The places of so many ranks on each GPU: the GPUs themselves if it is one."""
    if ranks_per_gpu == 1:
        return tuple(gpus)
    return tuple(f"{gpu}#{number}" for number in range(ranks_per_gpu) for gpu in gpus)


def gpu_of(place: str) -> str:
    """The GPU of a share; any other place is its own."""
    gpu, _, number = place.rpartition("#")
    return gpu if gpu and number.isdecimal() else place


def gpus_of(block: Block) -> Block:
    """The GPUs of a block, each once."""
    return tuple(dict.fromkeys(map(gpu_of, block)))


def more_shares(ranks: int, gpus: int) -> str:
    """How so many ranks would have places on so many GPUs, for the user."""
    each = -(-ranks // gpus)
    return f"--ranks_per_gpu {each} lets {each} ranks share a GPU"


def visible_to(block: Block) -> dict[str, str]:
    """The environment variables of ranks on these places; without any, they see what this process sees."""
    return {VISIBLE: ",".join(gpus_of(block))} if block else {}


def network_of(block: Block) -> dict[str, str]:
    """The environment variables of ranks that share GPUs of this host and speak with no other host: how NCCL reaches
    the others, where the user has not said so."""
    is_shared = len(gpus_of(block)) < len(block)
    return {name: value for name, value in _NETWORK.items() if is_shared and name not in os.environ}


def seats_of(block: Block) -> tuple[Seat, ...]:
    """Of each rank on these places, its GPU among those of ``visible_to``, and the host that it says it is on."""
    gpus = gpus_of(block)
    is_shared = len(gpus) < len(block)
    return tuple(Seat(gpu=gpus.index(gpu_of(place)), host=place if is_shared else "") for place in block)
