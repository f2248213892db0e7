"""Checks whether this machine can run the suite and its optional parts (`parity doctor`)."""

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from conformance.backends.protocol import BrokenBackend, MissingExtra, registered_backends
from conformance.cli import EXIT
from conformance.core.errors import UsageError
from conformance.core.host import cache_folder, host_resources_of
from conformance.core.packages import package_version

TESTED = {"torch": ("2.11", "2.13"), "transformers": ("5.17", "5.23")}


@dataclass(frozen=True, kw_only=True)
class Check:
    """Holds the result of one check. ``problem``: the suite cannot run. ``note``: information without a problem."""

    name: str
    state: Literal["ok", "note", "problem"]
    message: str


def doctor_command(options: argparse.Namespace) -> int:
    checks = examine()
    if options.json:
        print(json.dumps([vars(check) for check in checks]))
    else:
        for check in checks:
            print(f"{check.state:<8} {check.name}: {check.message}")
    return EXIT["incomplete"] if any(check.state == "problem" for check in checks) else EXIT["conforms"]


def examine() -> list[Check]:
    """Runs all checks; returns them in the order in which they are printed."""
    return [_system(), _memory(), _gloo(), *(_package(name) for name in TESTED), _gpus(), *_backends(), _disk()]


def _system() -> Check:
    if not sys.platform.startswith("linux"):
        return Check(
            name="system", state="problem", message=f"workers need Linux, this is {sys.platform}; use a container"
        )
    return Check(name="system", state="ok", message=f"Linux, Python {sys.version.split()[0]}, {os.cpu_count()} CPUs")


def _memory() -> Check:
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    enough = gib >= 8
    message = f"{gib:.0f} GiB" + ("" if enough else "; cells of 8 ranks need about 8 GiB")
    return Check(name="memory", state="ok" if enough else "note", message=message)


def _gloo() -> Check:
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        return Check(name="gloo", state="ok", message="collectives on the CPU are available")
    return Check(name="gloo", state="problem", message="this torch has no gloo; install the official wheel")


def _package(name: str) -> Check:
    version = package_version(name)
    known = version.startswith(TESTED[name])
    message = version if known else f"{version}; tested with {' and '.join(TESTED[name])}"
    return Check(name=name, state="ok" if known else "note", message=message)


def _gpus() -> Check:
    count = torch.cuda.device_count()
    if not count:
        return Check(name="GPUs", state="note", message="none visible; cells run on the CPU (--device cpu)")
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    more = ", and --ranks-per-gpu 2 for cells of two ranks" if count == 1 else ""
    return Check(name="GPUs", state="ok", message=f"{count} visible ({names}); use --device cuda{more}")


def _backends() -> list[Check]:
    checks = []
    for name, entry in registered_backends().items():
        try:
            info = entry.load().describe()
        except (MissingExtra, BrokenBackend, UsageError) as error:
            state: Literal["note", "problem"] = "note" if isinstance(error, MissingExtra) else "problem"
            checks.append(Check(name=f"backend {name}", state=state, message=str(error)))
        else:
            versions = ", ".join(f"{package} {package_version(package)}" for package in info.packages)
            checks.append(Check(name=f"backend {name}", state="ok", message=versions))
    return checks or [Check(name="backends", state="problem", message="none registered; pip install backend-parity")]


def _disk() -> Check:
    resources = host_resources_of(Path())
    free = resources.disk / 2**30
    cache = (
        ""
        if resources.cache is None
        else f", {resources.cache / 2**30:.0f} GiB for the oracle's cache ({cache_folder()})"
    )
    message = f"{free:.0f} GiB free here{cache}; parity plan estimates the disk that cells need"
    return Check(name="disk", state="ok" if free >= 2 else "note", message=message)
