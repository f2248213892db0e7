"""Checks whether a cell can run, and returns the verdict of a cell that cannot.

There are three cases: the backend does not support the cell (``unsupported``), this machine cannot run it
(``not_run``), or the backend raises when it is queried (``infrastructure``). Only the first is an answer of the
backend. `parity list` and `parity run` both use this module, so they agree. This module also queries backends for their
expected differences.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

from conformance.backends.faults import find_fault
from conformance.backends.protocol import BackendEntry, BrokenBackend, MissingExtra, Support, Unsupported
from conformance.backends.registry import Adapter, AskFailed, adapter_of
from conformance.core.errors import UsageError
from conformance.core.host_resources import available_memory
from conformance.matrix.cell import Cell, Phase
from conformance.matrix.options import Ranks
from conformance.results.verdict import Verdict
from conformance.runner.environment import model_sizes
from conformance.runtime import Device
from conformance.runtime.config import StartError
from conformance.runtime.gpu_inventory import gpus_of_host, more_shares, shares_of
from conformance.runtime.multihost.controller import Fleet
from conformance.runtime.worker_groups import check_host
from conformance.spec.known_defects import Known


def check_shared(ranks: Ranks) -> None:
    """Raises UsageError for ranks that share GPUs on the CPU."""
    if ranks.device == "cpu" and ranks.ranks_per_gpu > 1:
        raise UsageError("--ranks-per-gpu is about GPUs: add --device cuda; on the CPU, ranks share all processors")


def check_device(ranks: Ranks) -> None:
    """Raises UsageError for ``cuda`` on a machine without a GPU, and as ``check_shared`` does."""
    check_shared(ranks)
    if ranks.device == "cuda" and not torch.cuda.device_count():
        raise UsageError(
            "--device cuda: no GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES, or omit it to run on the CPU"
        )


def leased_gpus(ranks: Ranks) -> tuple[str, ...]:
    """Returns the GPUs that the cells of a run lease, by UUID, or shares of them; empty on the CPU. Raises
    UsageError."""
    return shares_of(gpus_of_host(), ranks.ranks_per_gpu) if ranks.device == "cuda" else ()


class Refusals:
    """Queries backends. Every adapter is imported only once, also if the import fails."""

    def __init__(self, device: Device, *, ranks_per_gpu: int = 1, fleet: Fleet | None = None) -> None:
        """fleet: the hosts that start ranks; None if this machine starts them."""
        self._device, self._ranks_per_gpu, self._fleet = device, ranks_per_gpu, fleet
        self._memory = available_memory()  # measured once, so that a listed cell is not rejected later
        self._adapters: dict[BackendEntry, Adapter | Verdict] = {}

    def refusal(self, cell: Cell, model: Path) -> Verdict | None:
        """Returns the verdict of a cell that cannot run; None if it can. model: the folder of its first model."""
        found = [refused for phase in cell.phases if (refused := self._phase_refusal(cell, phase, model))]
        if all(refused.state == "not_run" for refused in found):
            found += [refused for phases in pairwise(cell.phases) if (refused := self._handover_refusal(cell, *phases))]
        # "unsupported" wins over "not_run": it also holds on a larger machine.
        return min(found, key=lambda refused: refused.state == "not_run", default=None)

    def _handover_refusal(self, cell: Cell, before: Phase, after: Phase) -> Verdict | None:
        """Returns the verdict if a backend cannot export or import training state, or cannot load its own checkpoint in
        the next layout; else None."""
        giver, taker = self.adapter(before.backend), self.adapter(after.backend)
        assert not isinstance(giver, Verdict)
        assert not isinstance(taker, Verdict)
        if before.save == "state":
            for backend, adapter, method in ((before, giver, "export_state"), (after, taker, "import_state")):
                if method not in adapter.traits.methods:
                    reason = f"{backend.backend.name} has no {method}, so it cannot transfer training state"
                    return Verdict(state="unsupported", reason=f"{reason}; use a checkpoint or an export")
        if before.save != "checkpoint" or "supports_checkpoint" not in giver.traits.methods:
            return None
        return _refused_by(
            before.backend.name, lambda: giver.supports_checkpoint(cell.scenario, before.layout, after.layout)
        )

    def _phase_refusal(self, cell: Cell, phase: Phase, model: Path) -> Verdict | None:
        scenario, kind, name = cell.scenario, cell.scenario.objective.kind, phase.backend.name
        adapter = self.adapter(phase.backend)
        if isinstance(adapter, Verdict):
            return adapter
        if kind not in adapter.traits.objectives:
            return Verdict(state="unsupported", reason=f"{name} does not train the objective {kind!r}")
        if scenario.lora and "export_merged" not in adapter.traits.methods:
            return Verdict(state="unsupported", reason=f"{name} has no export_merged, so it trains no adapters (lora)")
        for fault in map(find_fault, cell.faults):
            if fault.seam not in adapter.traits.seams:
                reason = f"fault {fault.name!r} cannot be planted: {name} has no patch point {fault.seam!r}"
                return Verdict(state="unsupported", reason=reason)
        if refused := _refused_by(name, lambda: adapter.supports(scenario, phase.layout)):
            return refused
        try:
            phase.layout.validate(**model_sizes(model), rows=scenario.data.rows, accumulation=scenario.accumulation)
        except UsageError as error:
            return Verdict(state="unsupported", reason=str(error))
        return self._too_large(phase.layout.world_size)

    def _too_large(self, ranks: int) -> Verdict | None:
        """Returns the verdict if this machine cannot run so many ranks; else None."""
        if self._fleet is not None:
            return self._too_large_for(self._fleet, ranks)
        if self._device == "cuda":
            return self._too_large_for_gpus(ranks)
        try:
            check_host(ranks, memory=self._memory)
        except StartError as error:
            return Verdict(state="not_run", reason=str(error))
        return None

    def _too_large_for_gpus(self, ranks: int) -> Verdict | None:
        gpus, each = torch.cuda.device_count(), self._ranks_per_gpu
        if ranks <= gpus * each:
            return None
        advice = "without --device cuda it runs on the CPU"
        if gpus:
            advice = f"a layout of at most {gpus * each} ranks would run, and {more_shares(ranks, gpus)}"
        shared = f" for {each} ranks each" if each > 1 else ""
        return Verdict(state="not_run", reason=f"needs {ranks} GPUs, {gpus} visible{shared}; {advice}")

    @staticmethod
    def _too_large_for(fleet: Fleet, ranks: int) -> Verdict | None:
        if problem := fleet.problem():
            return Verdict(state="infrastructure", reason=problem)
        if (slots := fleet.slots) < ranks:
            return Verdict(state="not_run", reason=f"needs {ranks} ranks, and the hosts start {slots}; add hosts")
        return None

    def known(self, cell: Cell) -> tuple[Known, ...]:
        """Returns the expected differences of a cell, as its backend declares them.

        Empty if the phases have different backends or layouts, if the backend cannot be imported, and for a cell with a
        planted fault, because a fault has to be found wherever it is planted.
        """
        phase, adapter = cell.phases[0], self.adapter(cell.phases[0].backend)
        combinations = {(phase.backend, phase.layout) for phase in cell.phases}
        if cell.faults or len(combinations) > 1 or isinstance(adapter, Verdict):
            return ()
        return adapter.known(cell.scenario, phase.layout)

    def adapter(self, backend: BackendEntry) -> Adapter | Verdict:
        """Returns the adapter, or the verdict of all its cells if it cannot be imported. Raises UsageError for a wrong
        target."""
        if backend not in self._adapters:
            try:
                self._adapters[backend] = adapter_of(backend)
            except MissingExtra as error:
                self._adapters[backend] = Verdict(state="unsupported", reason=str(error))
            except (BrokenBackend, AskFailed) as error:
                self._adapters[backend] = Verdict(state="infrastructure", reason=str(error))
        return self._adapters[backend]


def _refused_by(name: str, ask: Callable[[], Support]) -> Verdict | None:
    """Returns the verdict if a backend does not support a cell, or raises when it is queried; else None."""
    try:
        answer = ask()
    except AskFailed as error:
        return Verdict(state="infrastructure", reason=f"{name} was asked whether it supports the cell: {error}")
    return Verdict(state="unsupported", reason=answer.reason) if isinstance(answer, Unsupported) else None
