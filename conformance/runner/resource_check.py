"""Checks that memory and disk suffice for the selected cells, before anything is started.

An estimate may be wrong by a factor of DOUBT. So a run is rejected only if even the estimate divided by DOUBT does not
fit, and the user is warned in between. If other hosts start the ranks, each host is checked with the numbers that its
process reported when it joined.
"""

import socket
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conformance.backends.protocol import BackendEntry
from conformance.backends.registry import Adapter
from conformance.core.errors import UsageError
from conformance.core.host_resources import HostResources
from conformance.matrix.cell import Cell
from conformance.runner.resource_estimate import Estimate, Size, Total, estimate, on_slots, size_of, total
from conformance.runtime import Device
from conformance.runtime.multihost.relay import JoinedHost
from conformance.spec.roles import Role

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
    room: HostResources,
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
    limits = _limits_of_hosts(found, of_all, room, hosts) if hosts else _limits(of_all, room, workers)
    for needed, available, message in limits:
        if needed > DOUBT * available:
            impossible.append(message)
        elif needed > available:
            doubtful.append(message)
    return Needs(workers=workers, cells=found, total=of_all, impossible=tuple(impossible), doubtful=tuple(doubtful))


def check_resources(
    cells: Sequence[Cell],
    room: HostResources,
    *,
    device: Device,
    warn: Callable[[str], None],
    workers: int = 1,
    hosts: Sequence[JoinedHost] = (),
) -> None:
    """Raises UsageError, with advice, if the cells cannot fit into ``room``. ``warn`` gets a message for each limit
    that may be exceeded."""
    if not cells:
        return
    needs = needs_of(cells, room, device=device, workers=workers, hosts=hosts)
    if needs.impossible:
        for_hosts = (
            "select other cells (--cells), offer fewer slots (PARITY_SLOTS under torchrun, "
            "--slots on Ray), or take larger hosts"
        )
        what = for_hosts if hosts else advice(needs, room)
        raise UsageError(f"{'; '.join(needs.impossible)}; {what} (parity plan shows the estimates)")
    for message in needs.doubtful:
        warn(f"{message}; it may not fit")


def advice(needs: Needs, room: HostResources) -> str:
    """Returns a selection that would fit, or ways to make cells smaller, in words."""
    fewer = (n for n in range(needs.workers - 1, 0, -1) if total(needs.cells, workers=n).host <= room.memory)
    if workers := next(fewer, None):
        return f"{workers} of the {needs.workers} workers would fit: -n {workers}"
    fitting = [(cell, one) for cell, one in needs.cells if one.host <= room.memory]
    several = len(needs.cells) > 1
    if fitting and several and needs.total.host > room.memory:
        alone = "each cell would fit alone" if len(fitting) == len(needs.cells) else ""
        return f"{alone or f'{len(fitting)} of {len(needs.cells)} cells would fit'}, such as --cells {fitting[0][0]}"
    if needs.total.host <= room.memory and several:
        return "select fewer cells (--cells), give --shard K/N and merge on another disk, or free disk space"
    return (
        "use a model with fewer layers and the same architecture, fewer rows (data.rows), a shorter --max-len, fewer "
        "steps, fp32 instead of the exact tier, or a larger machine"
    )


def _limits(of_all: Total, room: HostResources, workers: int) -> list[tuple[float, float, str]]:
    """Returns (needed bytes, available bytes, message) of memory and disks."""
    who = f"{of_all.worst} needs" if workers == 1 else f"{workers} cells at once, the largest {of_all.worst}, need"
    memory = (
        f"{who} about {of_all.host / GB:.1f} GB of memory, including idle ranks, and {room.memory / GB:.1f} GB are free"
    )
    return [(of_all.host, room.memory, memory), *_disks(of_all, room)]


def _disks(of_all: Total, room: HostResources) -> list[tuple[float, float, str]]:
    on_disk = of_all.disk + (of_all.cache if room.cache is None else 0.0)
    disk = f"the records need about {on_disk / GB:.1f} GB of disk, and {room.disk / GB:.1f} GB are free"
    found = [(on_disk, room.disk, disk)]
    if room.cache is not None:
        need = f"the oracle's cache needs about {of_all.cache / GB:.1f} GB, and {room.cache / GB:.1f} GB are free there"
        found.append((of_all.cache, room.cache, f"{need}; PARITY_CACHE names another folder"))
    return found


def _limits_of_hosts(
    cells: Sequence[tuple[Cell, Estimate]], of_all: Total, room: HostResources, hosts: Sequence[JoinedHost]
) -> list[tuple[float, float, str]]:
    """Returns (needed bytes, available bytes, message) for each host with slots, and for the controller's host.

    room: memory and disk of the controller's host.
    """
    slots, rooms = defaultdict[str, int](int), dict[str, HostResources]()
    for joined in hosts:
        slots[joined.host] += joined.slots
        rooms.setdefault(joined.host, joined.room)
    own, found = socket.gethostname(), []
    controller, oracle_of = max(((one.controller, cell) for cell, one in cells), key=lambda pair: pair[0])
    for host, count in slots.items():
        needed, worst = on_slots(cells, count)
        who = f"host {host}: the ranks of its {count} slots, the largest of {worst},"
        if host == own:
            needed, who = needed + controller, f"{who} and the oracle and judge of {oracle_of}"
        found.append((needed, rooms[host].memory, _memory_of_host(who, needed, rooms[host])))
    if own not in slots:
        who = f"host {own}, the controller's: the oracle and judge of {oracle_of}"
        found.append((controller, room.memory, _memory_of_host(who, controller, room)))
    host, least = min(rooms.items(), key=lambda pair: pair[1].disk)
    disk = (
        f"host {host}: the records need about {of_all.disk / GB:.1f} GB of disk, and {least.disk / GB:.1f} GB are free"
    )
    return [*found, (of_all.disk, least.disk, disk), *_disks(of_all, room)]


def _memory_of_host(who: str, needed: float, room: HostResources) -> str:
    return f"{who} need about {needed / GB:.1f} GB of memory, and {room.memory / GB:.1f} GB are free"
