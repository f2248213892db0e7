"""Inventory: the GPUs that this process may use, by UUID, in the order in which CUDA would number them.

Numbers mean nothing between processes: GPU 0 of a job that got ``CUDA_VISIBLE_DEVICES=2,3`` is another job's GPU 2. So
GPUs are leased by UUID, and ranks are told UUIDs. A number is taken for nvidia-smi's, as torch does.
"""

import os
import re
import subprocess
from collections.abc import Sequence

from conformance.validation import UsageError, shown

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
