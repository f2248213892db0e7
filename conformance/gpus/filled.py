"""Filled: GPUs of which somebody without a lease has taken memory; who finds none there is told why (claim 8)."""

from conformance.gpus.inventory import VISIBLE
from conformance.gpus.lease import is_leased, lease_folder
from conformance.gpus.memory import memory_of_gpus
from conformance.gpus.shares import gpus_of
from conformance.world.places import Block

MOST = 0.1  # of a GPU's memory: below, some contexts of CUDA are enough to explain it
GIB = 2**30


def filled(places: Block) -> list[str]:
    """A sentence about each GPU of these places of whose memory more than MOST is taken while no run has leased it.

    Nothing is said where nvidia-smi does not answer, nor of parts of GPUs (MIG), of which it tells nothing here.
    """
    found = []
    for gpu, (used, whole) in memory_of_gpus().items():
        if gpu in gpus_of(places) and used > MOST * whole and not is_leased(gpu, lease_folder()):
            found.append(
                f"{used / GIB:.1f} of the {whole / GIB:.1f} GiB of {gpu} are taken without a lease, by other programs "
                f"or by worlds of another run that wait; cells that find too little there are told as out of memory: "
                f"end these programs (nvidia-smi), or leave the GPU out of {VISIBLE}"
            )
    return found
