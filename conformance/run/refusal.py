"""Refusal: why a cell is not run at all, and the state that it gets (claim 9).

There are three cases: the backend does not claim the cell (``unsupported``), this machine cannot run it (``not_run``),
or the backend cannot be asked (``infrastructure``). Only the first is an answer of the backend. This module also asks
backends for their expected differences.
"""

import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from conformance.backend import BackendEntry, BrokenBackend, MissingExtra, Support, Unsupported
from conformance.defect import Known
from conformance.expectation import ExpectedDifference
from conformance.faults import find_fault
from conformance.plan.cell import Cell, Leg
from conformance.record.verdict import Verdict
from conformance.run.environment import model_sizes
from conformance.validation import UsageError
from conformance.world import Device


class Refusals:
    """Asks backends. Every adapter is imported only once, also if the import fails."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._adapters: dict[BackendEntry, Any] = {}

    def refusal(self, cell: Cell, model: Path) -> Verdict | None:
        """The verdict of a cell that cannot be run; None if it can be. ``model``: the folder of its first model."""
        legs = (refused for leg in cell.legs if (refused := self._leg_refusal(cell, leg, model)))
        handovers = (refused for legs in pairwise(cell.legs) if (refused := self._handover_refusal(cell, *legs)))
        return next(legs, None) or next(handovers, None)

    def _handover_refusal(self, cell: Cell, before: Leg, after: Leg) -> Verdict | None:
        """The verdict if a backend cannot hand over or take over training state, or cannot load its own checkpoint in
        the next layout; None if it can."""
        giver, taker = self.adapter(before.backend), self.adapter(after.backend)
        if before.save == "state":
            for backend, adapter, method in ((before, giver, "export_state"), (after, taker, "import_state")):
                if not hasattr(adapter, method):
                    reason = f"{backend.backend.name} has no {method}, so it hands over no training state"
                    return Verdict(state="unsupported", reason=f"{reason}; use a checkpoint or an export")
        ask = getattr(giver, "supports_checkpoint", None)
        if before.save != "checkpoint" or ask is None:
            return None
        return _refused_by(before.backend.name, lambda: ask(cell.scenario, before.layout, after.layout))

    def _leg_refusal(self, cell: Cell, leg: Leg, model: Path) -> Verdict | None:
        scenario, kind, name = cell.scenario, cell.scenario.objective.kind, leg.backend.name
        adapter = self.adapter(leg.backend)
        if isinstance(adapter, Verdict):
            return adapter
        if kind not in getattr(adapter, "objectives", ("sft",)):
            return Verdict(state="unsupported", reason=f"{name} does not train the objective {kind!r}")
        for fault in map(find_fault, cell.faults):
            if fault.seam not in getattr(adapter, "seams", {}):
                reason = f"fault {fault.name!r} is not plantable: {name} does not name the seam {fault.seam!r}"
                return Verdict(state="unsupported", reason=reason)
        if refused := _refused_by(name, lambda: adapter.supports(scenario, leg.layout)):
            return refused
        try:
            leg.layout.validate(**model_sizes(model), rows=scenario.data.rows, accumulation=scenario.accumulation)
        except UsageError as error:
            return Verdict(state="unsupported", reason=str(error))
        gpus, ranks = torch.cuda.device_count(), leg.layout.world_size
        if self._device == "cuda" and gpus < ranks:
            reason = f"needs {ranks} GPUs, {gpus} visible; a layout of at most {gpus} ranks would run"
            return Verdict(state="not_run", reason=reason)
        return None

    def known(self, cell: Cell) -> tuple[Known, ...]:
        """The expected differences of a cell, as its backend declares them.

        Empty if the legs have different backends or layouts, if the backend cannot be imported, and for a cell with a
        planted fault, because a fault has to be found wherever it is planted.
        """
        leg, adapter = cell.legs[0], self.adapter(cell.legs[0].backend)
        alike = {(leg.backend, leg.layout) for leg in cell.legs}
        if cell.faults or len(alike) > 1 or isinstance(adapter, Verdict):
            return ()
        expected: tuple[ExpectedDifference, ...] = getattr(adapter, "expected", ())
        if not expected:
            return ()
        zero = adapter.describe().default_zero
        about = (one for one in expected if one.is_about(cell.scenario, leg.layout, default_zero=zero))
        found = (one.known_for(cell.scenario, leg.layout) for one in about)
        return tuple(known for known in found if known.defects or known.unmodelled)

    def adapter(self, backend: BackendEntry) -> Any:
        """The adapter's class; if it cannot be imported, the verdict of all its cells. Raises UsageError for a wrong
        target."""
        if backend not in self._adapters:
            try:
                self._adapters[backend] = backend.load()
            except MissingExtra as error:
                self._adapters[backend] = Verdict(state="unsupported", reason=str(error))
            except BrokenBackend as error:
                self._adapters[backend] = Verdict(state="infrastructure", reason=str(error))
        return self._adapters[backend]


def _refused_by(name: str, ask: Callable[[], Support]) -> Verdict | None:
    """The verdict if a backend does not claim a cell, or raises when it is asked; None if it claims the cell."""
    try:
        answer = ask()
    except UsageError:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raised = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}"
        return Verdict(state="infrastructure", reason=f"{name} was asked whether it supports the cell: {raised}")
    return Verdict(state="unsupported", reason=answer.reason) if isinstance(answer, Unsupported) else None
