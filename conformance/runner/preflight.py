"""Checks before anything is started whether each cell can run, and whether memory and disk suffice for all.

A cell cannot run in three cases: the backend does not support the cell (``unsupported``), this machine cannot run it
(``not_run``), or the backend raises when it is queried (``infrastructure``). Only the first is an answer of the
backend. `parity list` and `parity run` both use this module, so they agree. This module also queries backends for their
expected differences.

An estimate of memory or disk may be wrong by a factor of DOUBT. So a run is rejected only if even the estimate
divided by DOUBT does not fit, and the user is warned in between. If other hosts start the ranks, each host is checked
with the numbers that its process reported when it joined.
"""

import contextlib
import dataclasses
import logging
import socket
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

import torch

from conformance.backends.faults import find_fault, needs_in_words
from conformance.backends.protocol import BackendEntry, BrokenBackend, MissingExtra, Support, Unsupported, is_own
from conformance.backends.registry import Adapter, AskFailed, adapter_of
from conformance.core.errors import UsageError
from conformance.core.host import HostResources, available_memory
from conformance.matrix.cell import Cell, Phase
from conformance.matrix.options import Ranks
from conformance.models.folders import model_sizes
from conformance.models.synthetic import is_large
from conformance.results.verdict import Verdict
from conformance.runner.resource_estimate import (
    ON_GPU,
    Estimate,
    Size,
    Total,
    estimate,
    leased_bytes,
    on_slots,
    oracle_bytes,
    size_of,
    total,
)
from conformance.runtime import Device
from conformance.runtime.failure import StartError
from conformance.runtime.gpu_inventory import gpus_of_host, memory_of_gpus, more_shares, shares_of
from conformance.runtime.leased_slots import ROOM, enough, oracles_of_host, processors_of_host
from conformance.runtime.multihost.controller import Fleet
from conformance.runtime.multihost.relay import JoinedHost
from conformance.runtime.worker_groups import check_host
from conformance.spec.conventions import KNOWN, AnyConvention, Conventions, in_cell
from conformance.spec.known_defects import Known
from conformance.spec.observables import Role
from conformance.spec.precision import noise_runs

logger = logging.getLogger(__name__)


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


def leased_gpus(ranks: Ranks, *, cells: Sequence[Cell] = (), workers: int = 1) -> tuple[str, ...]:
    """Returns the GPUs that the cells of a run lease, by UUID, or shares of them; empty on the CPU.

    workers: how many cells may share a GPU; 0: as many as processors and memory allow. All shares are equal. Of large
    models the smallest cell decides, and a rank of a larger cell leases several shares of one GPU
    (conformance.runtime.leased_slots.Gpus). Raises UsageError.
    """
    if ranks.device == "cpu":
        return ()
    gpus, each = gpus_of_host(), ranks.ranks_per_gpu
    by_gpu = memory_of_gpus() if workers != 1 and cells else {}
    memory = min(by_gpu.get(gpu, (0, 0))[1] for gpu in gpus) if gpus else 0
    large = [leased_bytes(cell) for cell in cells if is_large(cell.scenario)] if memory else []
    fitting = _cells_on_a_gpu(cells, large, memory, each) if memory else 1
    if workers > fitting:
        logger.warning("the memory of a GPU suffices for %d cells at once, not for %d", fitting, workers)
    # Tiny kernels are bound by what starts them: a processor for each rank and for the noise run of each cell, which
    # leases a share as well; more of them only take turns (docs/measurements/speed.md). All shares fit into the memory.
    processes = min(processors_of_host(), int(available_memory() / ON_GPU)) // max(1, len(gpus))
    at_once = min(workers or max(1, processes // (each + 1)), fitting)
    if large:
        return shares_of(gpus, each * min(range(1, at_once + 1), key=lambda n: _time(large, memory, each * n)))
    has_noise = at_once > 1 and any(noise_runs(cell.scenario.precision) for cell in cells)
    return shares_of(gpus, each * at_once + (min(at_once, each * (fitting - at_once)) if has_noise else 0))


MOST_ON_A_GPU = 16  # ranks at once; each has a context, and so has each idle rank
MOST_LARGE = 4  # ranks of large models at once
FILLED = 0.8  # share of a GPU's memory


def _cells_on_a_gpu(cells: Sequence[Cell], large: Sequence[int], memory: int, each: int) -> int:
    """Returns how many cells with ``each`` ranks on a GPU its memory holds at once, by the largest cell, or by the
    smallest large one; at least 1. large: the bytes that a rank of each large cell needs.

    The estimate is that of a rank on the CPU, where nothing is sharded. With large models no idle ranks stay on a share
    (conformance.runtime.pool), so more of the memory is for cells.
    """
    if large:
        return max(1, min(MOST_LARGE, int(ROOM * memory / min(large))) // each)
    by_size = {(c.scenario.model, c.scenario.name): c for c in cells}
    largest = max(map(leased_bytes, by_size.values()))
    return max(1, min(MOST_ON_A_GPU, int(FILLED * memory / largest)) // each)


def _time(large: Sequence[int], memory: int, shares: int) -> float:
    """Returns the relative time of all large cells if a GPU has this number of shares and each cell takes equally long.
    With three shares, a rank that needs half of the GPU leases two, so that two such ranks do not run at once."""
    return sum(1 / (shares // enough(needed, each=ROOM * memory / shares, most=shares)) for needed in large)


def oracles_that_fit(cells: Sequence[Cell]) -> int:
    """Returns how many oracle runs the processors of this host, and half of its free memory, allow at once."""
    small = {cell.scenario.model: cell for cell in cells if not is_large(cell.scenario)}
    needed = max((oracle_bytes(cell.scenario, size_of(cell.scenario)) for cell in small.values()), default=1.0)
    return max(1, min(oracles_of_host(), int(available_memory() / 2 / needed)))


def _can_show(convention: AnyConvention, cell: Cell) -> bool:
    """Whether a cell has what the convention is about: only a cell that resumes from a checkpoint has generators."""
    return not convention.unjudged or any(phase.save == "checkpoint" for phase in cell.phases)


def _float8_refused(cell: Cell, before: Phase, after: Phase, giver: Adapter, taker: Adapter) -> str:
    """Explains why a phase in float8 cannot go on with what another one hands over; empty if it can."""
    by_te = [phase for phase in (before, after) if "te" in phase.layout.options and phase.layout.float8]
    if by_te and (giver.conventions(cell.scenario, before.layout) != taker.conventions(cell.scenario, after.layout)):
        return (
            "what shares a scale in TransformerEngine's float8 depends on the layout, and the reference has one layout "
            "for all phases; use layouts with equal ranks and options, or leave te and float8 out"
        )
    if after.layout.scales_by_histories and before.save != "checkpoint":
        what = "training state" if before.save == "state" else "export"
        return (
            f"no {what} holds the histories of fp8delayed, which are those of one library and layout; hand over a "
            f"checkpoint, or use fp8tensor"
        )
    if "fp8delayed" in after.layout.options and not after.layout.scales_by_histories:
        return (
            "no checkpoint of torchao holds the histories of fp8delayed, so that a resumed phase would begin without; "
            "use a cell of one phase, or fp8tensor"
        )
    return ""


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
        if (before.backend, before.layout) != (after.backend, after.layout) and not cell.faults:
            for phase, adapter in ((before, giver), (after, taker)):
                if known := next((one for one in adapter.known(cell.scenario, phase.layout) if one.defects), None):
                    what = f"{phase.backend.name} {phase.layout} is expected to differ ({known.link})"
                    reason = f"{what}, which is not modelled where layouts change; use one layout in all phases"
                    return Verdict(state="unsupported", reason=reason)
        if refused := _float8_refused(cell, before, after, giver, taker):
            return Verdict(state="unsupported", reason=refused)
        if before.save != "checkpoint" or "supports_checkpoint" not in giver.traits.methods:
            return None
        return _refused_by(
            before.backend.name, lambda: giver.supports_checkpoint(cell.scenario, before.layout, after.layout)
        )

    def _phase_refusal(self, cell: Cell, phase: Phase, model: Path) -> Verdict | None:
        scenario, name = cell.scenario, phase.backend.name
        adapter = self.adapter(phase.backend)
        if isinstance(adapter, Verdict):
            return adapter
        if scenario.lora and "export_merged" not in adapter.traits.methods:
            return Verdict(state="unsupported", reason=f"{name} has no export_merged, so it trains no adapters (lora)")
        for fault in map(find_fault, cell.faults):
            if fault.seam not in adapter.traits.seams:
                missing = f"{name} has no patch point {fault.seam!r}; {needs_in_words(fault.name)}"
                reason = f"fault {fault.name!r} cannot be planted: {missing}"
                return Verdict(state="unsupported", reason=reason)

        def ask() -> Support:
            adapter.conventions(scenario, phase.layout)  # raises if the backend declares something else
            return adapter.supports(scenario, phase.layout)

        if refused := _refused_by(name, ask):
            return refused
        try:
            phase.layout.validate(
                **model_sizes(model),
                rows=scenario.data.rows,
                rows_together=scenario.rows_together,
                accumulation=scenario.accumulation,
            )
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
        """Returns the expected differences of a cell: those that its backend declares and the profile names.

        Those of the suite's own backends need no name. Empty if the phases have different backends or layouts, if the
        backend cannot be imported, and for a cell with a planted fault, because a fault has to be found wherever it is
        planted.
        """
        phase, adapter = cell.phases[0], self.adapter(cell.phases[0].backend)
        combinations = {(phase.backend, phase.layout) for phase in cell.phases}
        if cell.faults or len(combinations) > 1 or isinstance(adapter, Verdict):
            return ()
        declared = adapter.known(cell.scenario, phase.layout)
        if is_own(phase.backend):
            return declared
        return tuple(one for one in declared if any(fnmatchcase(one.link, pattern) for pattern in cell.expected))

    def unnamed(self, cell: Cell) -> str:
        """Returns what to add to the profile if the backend declares differences that it does not name; else ""."""
        adapter, name = self.adapter(cell.phases[0].backend), cell.phases[0].backend.name
        everything = () if isinstance(adapter, Verdict) else self.known(dataclasses.replace(cell, expected=("*",)))
        named = self.known(cell)
        if not (unnamed := [one for one in everything if one not in named]):
            return ""
        reasons = "; ".join(f"{one.reason} ({one.link})" for one in unnamed)
        links = ", ".join(f'"{link}"' for link in dict.fromkeys(one.link for one in unnamed))
        return (
            f"{name} declares this as expected: {reasons}. That counts only if the profile names it; if you agree, add "
            f"to the profile's file: [expected] {name} = [{links}]"
        )

    def conventions(self, cell: Cell) -> Conventions:
        """Returns the conventions that the backends of all phases declare and that can change the cell."""
        found: list[Conventions] = []
        for phase in cell.phases:
            adapter = self.adapter(phase.backend)
            with contextlib.suppress(AskFailed):  # the cell is refused
                found.append(() if isinstance(adapter, Verdict) else adapter.conventions(cell.scenario, phase.layout))
        if len(found) < len(cell.phases):
            return ()
        return tuple(one for one in found[0] if all(one in of_phase for of_phase in found) and _can_show(one, cell))

    def undeclared(self, cell: Cell) -> Conventions:
        """Returns the known conventions that are not declared and could change the cell."""
        declared = {one.kind for one in self.conventions(cell)}
        found = in_cell(KNOWN, cell.scenario, cell.phases[0].layout)
        return tuple(one for one in found if one.kind not in declared and _can_show(one, cell))

    def can_be_asked(self, cell: Cell) -> bool:
        """Returns whether the adapters of all phases could be imported. Raises UsageError for a wrong target."""
        return not any(isinstance(self.adapter(phase.backend), Verdict) for phase in cell.phases)

    def adapter(self, backend: BackendEntry) -> Adapter | Verdict:
        """Returns the adapter, or the verdict of all its cells if it cannot be imported. Raises UsageError for a wrong
        target."""
        if backend not in self._adapters:
            try:
                self._adapters[backend] = adapter_of(backend)
            except MissingExtra as error:
                self._adapters[backend] = Verdict(state="unsupported", reason=str(error))
            except (BrokenBackend, AskFailed, StartError) as error:
                self._adapters[backend] = Verdict(state="infrastructure", reason=str(error))
        return self._adapters[backend]


def _refused_by(name: str, ask: Callable[[], Support]) -> Verdict | None:
    """Returns the verdict if a backend does not support a cell, or raises when it is queried; else None."""
    try:
        answer = ask()
    except AskFailed as error:
        return Verdict(state="infrastructure", reason=f"{name} was asked whether it supports the cell: {error}")
    return Verdict(state="unsupported", reason=answer.reason) if isinstance(answer, Unsupported) else None


DOUBT = 1.5
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Holds the memory and disk required with ``workers`` concurrent cells, and a message for each limit exceeded."""

    workers: int
    cells: Sequence[tuple[Cell, Estimate]]
    total: Total
    impossible: tuple[str, ...]
    doubtful: tuple[str, ...]


def needs_of(
    cells: Sequence[Cell],
    resources: HostResources,
    *,
    device: Device = "cpu",
    workers: int = 1,
    hosts: Sequence[JoinedHost] = (),
) -> Needs:
    """Compares the estimates of all cells with memory and disk. Raises UsageError for a model that cannot be used.

    cells: one or more. workers: processes that run cells at the same time, each with its own ranks, oracle and judge.
    hosts: the hosts that start all ranks; empty if this machine starts them.
    """
    sizes: dict[tuple[str, tuple[Role, ...], int | None], Size] = {}
    adapters: dict[BackendEntry, Adapter] = {}
    found = []
    for cell in cells:
        key = cell.scenario.model, tuple(cell.scenario.objective.roles), cell.scenario.sketch
        if key not in sizes:
            sizes[key] = size_of(cell.scenario)
        found.append((cell, estimate(cell, sizes[key], device=device, adapters=adapters)))
    workers = min(workers, len(found))
    of_all = total(found, workers=workers)
    impossible, doubtful = [], []
    limits = _limits_of_hosts(found, of_all, resources, hosts) if hosts else _limits(of_all, resources, workers)
    for needed, available, message in limits:
        if needed > DOUBT * available:
            impossible.append(message)
        elif needed > available:
            doubtful.append(message)
    return Needs(workers=workers, cells=found, total=of_all, impossible=tuple(impossible), doubtful=tuple(doubtful))


def check_resources(
    cells: Sequence[Cell],
    resources: HostResources,
    *,
    device: Device,
    warn: Callable[[str], None],
    workers: int = 1,
    hosts: Sequence[JoinedHost] = (),
) -> None:
    """Raises UsageError, with advice, if the cells do not fit. ``warn`` gets a message for each limit
    that may be exceeded."""
    if not cells:
        return
    needs = needs_of(cells, resources, device=device, workers=workers, hosts=hosts)
    if needs.impossible:
        for_hosts = (
            "select other cells (--cells), offer fewer slots (PARITY_SLOTS under torchrun, "
            "--slots on Ray), or take larger hosts"
        )
        what = for_hosts if hosts else advice(needs, resources)
        raise UsageError(f"{'; '.join(needs.impossible)}; {what} (parity plan shows the estimates)")
    for message in needs.doubtful:
        warn(f"{message}; it may not fit")


def workers_that_fit(cells: Sequence[Cell], resources: HostResources, *, most: int) -> int:
    """Returns how many cells can run at once on the CPU in the free memory: at most ``most``, and at least 1."""
    return _fitting(needs_of(cells, resources), resources, most=most) or 1


def _fitting(needs: Needs, resources: HostResources, *, most: int) -> int | None:
    return next((n for n in range(most, 0, -1) if total(needs.cells, workers=n).host <= resources.memory), None)


def advice(needs: Needs, resources: HostResources) -> str:
    """Returns a selection that would fit, or ways to make cells smaller, in words."""
    if workers := _fitting(needs, resources, most=needs.workers - 1):
        return f"{workers} of the {needs.workers} workers would fit: -n {workers}"
    fitting = [(cell, one) for cell, one in needs.cells if one.host <= resources.memory]
    several = len(needs.cells) > 1
    if fitting and several and needs.total.host > resources.memory:
        alone = "each cell would fit alone" if len(fitting) == len(needs.cells) else ""
        return f"{alone or f'{len(fitting)} of {len(needs.cells)} cells would fit'}, such as --cells {fitting[0][0]}"
    if needs.total.host <= resources.memory and several:
        return "select fewer cells (--cells), give --shard K/N and merge on another disk, or free disk space"
    return (
        "use a model with fewer layers and the same architecture, fewer rows (data.rows), a shorter --max-len, fewer "
        "steps, fp32 instead of the exact tier, or a larger machine"
    )


def _limits(of_all: Total, resources: HostResources, workers: int) -> list[tuple[float, float, str]]:
    """Returns (needed bytes, available bytes, message) of memory and disks."""
    who = f"{of_all.worst} needs" if workers == 1 else f"{workers} cells at once, the largest {of_all.worst}, need"
    free = f"{resources.memory / GB:.1f} GB are free"
    memory = f"{who} about {of_all.host / GB:.1f} GB of memory, including idle ranks, and {free}"
    return [(of_all.host, resources.memory, memory), *_disks(of_all, resources)]


def _disks(of_all: Total, resources: HostResources) -> list[tuple[float, float, str]]:
    on_disk = of_all.disk + (of_all.cache if resources.cache is None else 0.0)
    disk = f"the records need about {on_disk / GB:.1f} GB of disk, and {resources.disk / GB:.1f} GB are free"
    found = [(on_disk, resources.disk, disk)]
    if resources.cache is not None:
        need = f"the oracle's cache needs about {of_all.cache / GB:.1f} GB, and {resources.cache / GB:.1f} are free"
        found.append((of_all.cache, resources.cache, f"{need}; PARITY_CACHE names another folder"))
    return found


def _limits_of_hosts(
    cells: Sequence[tuple[Cell, Estimate]], of_all: Total, resources: HostResources, hosts: Sequence[JoinedHost]
) -> list[tuple[float, float, str]]:
    """Returns (needed bytes, available bytes, message) for each host with slots, and for the controller's host.

    resources: memory and disk of the controller's host.
    """
    slots, by_host = defaultdict[str, int](int), dict[str, HostResources]()
    for joined in hosts:
        slots[joined.host] += joined.slots
        by_host.setdefault(joined.host, joined.resources)
    own, found = socket.gethostname(), []
    controller, oracle_of = max(((one.controller, cell) for cell, one in cells), key=lambda pair: pair[0])
    for host, count in slots.items():
        needed, worst = on_slots(cells, count)
        who = f"host {host}: the ranks of its {count} slots, the largest of {worst},"
        if host == own:
            needed, who = needed + controller, f"{who} and the oracle and judge of {oracle_of}"
        found.append((needed, by_host[host].memory, _memory_of_host(who, needed, by_host[host])))
    if own not in slots:
        who = f"host {own}, the controller's: the oracle and judge of {oracle_of}"
        found.append((controller, resources.memory, _memory_of_host(who, controller, resources)))
    host, least = min(by_host.items(), key=lambda pair: pair[1].disk)
    disk = (
        f"host {host}: the records need about {of_all.disk / GB:.1f} GB of disk, and {least.disk / GB:.1f} GB are free"
    )
    return [*found, (of_all.disk, least.disk, disk), *_disks(of_all, resources)]


def _memory_of_host(who: str, needed: float, resources: HostResources) -> str:
    return f"{who} need about {needed / GB:.1f} GB of memory, and {resources.memory / GB:.1f} GB are free"
