"""Defines the configuration of a session: where cells run, how long they may take, and values for the summary."""

from dataclasses import dataclass, field
from pathlib import Path

from conformance.matrix.cell import Cell
from conformance.results.requirements import Floor
from conformance.runner.resume import Earlier
from conformance.runtime import Device
from conformance.runtime.multihost.controller import Hosts


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """Configures a session.

    out: the output folder. profile, command: the profile and the user's command line, for the summary.
    arguments: the arguments that select cells; they become part of the command that reproduces a cell.
    gpus: the GPUs that cells lease, or shares of them, to run in parallel; empty: cells run sequentially.
    ranks_per_gpu: how many ranks may share a GPU. hosts: the hosts that start ranks; None: only this host.
    budget_s: seconds that a phase, or an oracle run, may go without progress. fail_fast: end after the first failure.
    floor, selected: see conformance.matrix.plan. selection: see conformance.results.run_results.Run.
    earlier: the run in ``out`` that this one continues.
    """

    out: Path
    device: Device = "cpu"
    profile: str = ""
    command: str = ""
    arguments: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    ranks_per_gpu: int = 1
    hosts: Hosts | None = None
    budget_s: float = 300.0
    fail_fast: bool = False
    floor: Floor = field(default_factory=Floor)
    selected: str = ""
    selection: str = ""
    earlier: Earlier | None = None

    def folder(self, cell: Cell) -> Path:
        """Returns the folder of a cell, with its verdict and its records."""
        return self.out / "cells" / cell.slug
