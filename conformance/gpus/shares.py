"""Shares: places of several ranks on one GPU, and what the ranks of a block of places are told.

A share is a name, ``GPU-0aa1#0``, so it is leased as a GPU is. With N ranks per GPU, every GPU has N of them. They are
ordered round by round (the first of every GPU, then the second ones), so that the ranks of a world share a GPU only
where there are more of them than GPUs, and the rank N of a whole block has the GPU N modulo their number, which is what
libraries guess (DTensor's generators, the first barrier of a process group).

NCCL refuses two ranks of a communicator on one GPU of a host ("Duplicate GPU detected" in src/init.cc of NVIDIA/nccl).
It takes ``NCCL_HOSTID`` for the host's name (getHostHash in src/misc/utils.cc), so ranks that share have a host each:
the share's own name, which no other rank of any host has. Between such ranks it sends everything over its network.
"""

import os
from collections.abc import Sequence

from conformance.gpus.inventory import VISIBLE
from conformance.world.places import Block, Seat

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
