"""Memory: how much the GPUs of this host have, and how much of it is taken, as nvidia-smi tells (claim 8)."""

import subprocess

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
