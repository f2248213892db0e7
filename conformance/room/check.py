"""Check: whether this machine has the room that cells need, before anything is started (claim 9).

An estimate may be wrong by a factor of DOUBT. So a run is refused where even that much less would not fit, and the user
is warned in between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from conformance.machine import Room
from conformance.plan.cell import Cell
from conformance.role import Role
from conformance.room.estimate import Estimate, Size, Total, estimate, size_of, total
from conformance.validation import UsageError
from conformance.world import Device

DOUBT = 1.5
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What the cells of a run need, ``workers`` of them at once, and what is too much of it, a sentence each."""

    workers: int
    cells: Sequence[tuple[Cell, Estimate]]
    total: Total
    impossible: tuple[str, ...]
    doubtful: tuple[str, ...]


def needs_of(cells: Sequence[Cell], room: Room, *, device: Device = "cpu", workers: int = 1) -> Needs:
    """Raises UsageError for a model that cannot be used. ``cells``: one or more. ``workers``: processes that run
    cells at the same time, each with ranks, an oracle and a judge of its own."""
    sizes: dict[tuple[str, tuple[Role, ...], int | None], Size] = {}
    found = []
    for cell in cells:
        key = cell.scenario.model, tuple(cell.scenario.objective.roles), cell.scenario.sketch
        if key not in sizes:
            sizes[key] = size_of(cell.scenario)
        found.append((cell, estimate(cell, sizes[key], device=device)))
    workers = min(workers, len(found))
    of_all = total(found, workers=workers)
    impossible, doubtful = [], []
    for needed, there, said in _held_against(of_all, room, workers):
        if needed > DOUBT * there:
            impossible.append(said)
        elif needed > there:
            doubtful.append(said)
    return Needs(workers=workers, cells=found, total=of_all, impossible=tuple(impossible), doubtful=tuple(doubtful))


def check_room(
    cells: Sequence[Cell], room: Room, *, device: Device, warn: Callable[[str], None], workers: int = 1
) -> None:
    """Raises UsageError, which says what would fit, if the cells cannot fit into ``room``; ``warn`` gets what may not
    fit."""
    if not cells:
        return
    needs = needs_of(cells, room, device=device, workers=workers)
    if needs.impossible:
        raise UsageError(f"{'; '.join(needs.impossible)}; {advice(needs, room)} (parity plan shows the estimates)")
    for said in needs.doubtful:
        warn(f"{said}; it may not fit")


def advice(needs: Needs, room: Room) -> str:
    """What of the selection would fit, or what makes cells smaller."""
    fewer = (n for n in range(needs.workers - 1, 0, -1) if total(needs.cells, workers=n).host <= room.memory)
    if workers := next(fewer, None):
        return f"{workers} of the {needs.workers} workers would fit: -n {workers}"
    fitting = [(cell, one) for cell, one in needs.cells if one.host <= room.memory]
    several = len(needs.cells) > 1
    if fitting and several and needs.total.host > room.memory:
        alone = "each cell would fit alone" if len(fitting) == len(needs.cells) else ""
        return f"{alone or f'{len(fitting)} of {len(needs.cells)} cells would fit'}, such as --cells {fitting[0][0]}"
    if needs.total.host <= room.memory and several:
        return "select fewer cells (--cells), give --shard K/N and merge on another disk, or make room"
    return (
        "use a model with fewer layers and the same architecture, fewer rows (data.rows), a shorter --max_len, fewer "
        "steps, fp32 instead of the exact tier, or a machine with more"
    )


def _held_against(of_all: Total, room: Room, workers: int) -> list[tuple[float, float, str]]:
    """(needed, there, in words)."""
    who = f"{of_all.worst} needs" if workers == 1 else f"{workers} cells at once, the largest {of_all.worst}, need"
    memory = (
        f"{who} about {of_all.host / GB:.1f} GB of memory, with what other ranks hold on to, and "
        f"{room.memory / GB:.1f} GB are free"
    )
    on_disk = of_all.disk + (of_all.cache if room.cache is None else 0.0)
    disk = f"the records need about {on_disk / GB:.1f} GB of disk, and {room.disk / GB:.1f} GB are free"
    found = [(of_all.host, room.memory, memory), (on_disk, room.disk, disk)]
    if room.cache is not None:
        said = f"the oracle's cache needs about {of_all.cache / GB:.1f} GB, and {room.cache / GB:.1f} GB are free there"
        found.append((of_all.cache, room.cache, f"{said}; PARITY_CACHE names another folder"))
    return found
