"""Offer: what an agent says of its host, and why a controller refuses it (claim 9).

Ranks of one world have to be of the same code. So the sources of the suite are compared, not only its version, and the
versions of all packages that a summary names.
"""

import hashlib
import os
import platform
import socket
from pathlib import Path

import conformance
from conformance.packages import package_version

PACKAGES = ("torch", "transformers", "ring-flash-attn", "deepspeed", "megatron-core")


def versions() -> dict[str, str]:
    """Of what has to be the same on all hosts."""
    package = Path(conformance.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(f"{file.relative_to(package)} {file.stat().st_size}\n".encode() + file.read_bytes())
    return {
        "backend-parity": f"{conformance.__version__} (sources {digest.hexdigest()[:12]})",
        "python": platform.python_version(),
        **{name: package_version(name) for name in PACKAGES},
    }


def own_name() -> str:
    """What users know an agent by."""
    return f"{socket.gethostname()} (process {os.getpid()})"


def told_apart(theirs: dict[str, str], ours: dict[str, str]) -> str:
    """Which versions an agent has that its controller has not, in words; empty if they are the same."""
    apart = [name for name in ours if theirs.get(name) != ours[name]]
    return ", ".join(f"{name} {theirs.get(name, 'unknown')} and not {ours[name]}" for name in apart)
