"""Filled: GPUs that programs without leases have filled, so that who finds no memory there is told why (claim 8)."""

import subprocess

from conformance.gpus.inventory import VISIBLE
from conformance.gpus.lease import held, lease_folder
from conformance.gpus.shares import gpu_of, gpus_of
from conformance.world.places import Block

MOST = 0.1  # of a GPU's memory: worlds of other runs that wait for their next cell hold less
GIB = 2**10  # MiB, in which nvidia-smi counts
_QUERY = ["nvidia-smi", "--query-gpu=uuid,memory.used,memory.total", "--format=csv,noheader,nounits"]


def filled(places: Block) -> list[str]:
    """A sentence about each GPU of these places of whose memory more than MOST is taken while no run has leased it.

    Parts of GPUs (MIG) are not looked at: nvidia-smi does not tell of their memory here.
    """
    try:
        listed = subprocess.run(_QUERY, capture_output=True, text=True, check=False).stdout
    except OSError:  # no nvidia-smi, which whoever asks for the GPUs of this host is told
        return []
    leased = {gpu_of(name) for names in held(places, lease_folder()).values() for name in names}
    found = []
    for line in listed.splitlines():
        gpu, *memory = line.split(", ")
        if gpu not in gpus_of(places) or gpu in leased or not all(number.isdecimal() for number in memory):
            continue
        used, whole = map(int, memory)
        if used > MOST * whole:
            advice = f"end these programs (nvidia-smi), or leave the GPU out of {VISIBLE}"
            found.append(
                f"other programs have {used / GIB:.1f} of the {whole / GIB:.1f} GiB of {gpu}; cells that find too "
                f"little there are told as out of memory: {advice}"
            )
    return found
