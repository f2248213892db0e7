"""Chooses where ranks of a session run: on this host without leases, on its leased GPUs, or on several hosts."""

from collections.abc import Sequence
from pathlib import Path

from conformance.runner.scheduler import CELLS_PER_SLOT
from conformance.runtime import Device, Pool
from conformance.runtime.gpu_inventory import gpus_of
from conformance.runtime.gpu_slots import Gpus, LeasedSlots
from conformance.runtime.multihost.controller import Fleet, Hosts, Slots
from conformance.runtime.multihost.relay import JoinedHost


class Where:
    """Holds the ``pool`` of all worker groups, and the ``fleet`` of hosts; None if ranks run on this host alone."""

    def __init__(self, *, device: Device, gpus: tuple[str, ...], hosts: Hosts | None, work_dir: Path) -> None:
        """gpus: GPUs to lease, or shares of them; empty: ranks run on this host without leases."""
        self.fleet = Fleet(hosts, device=device, folder=work_dir) if hosts else None
        self._gpus, self._device = gpus, device
        self._slots: LeasedSlots | None = None
        if self.fleet is not None:
            self._slots = Slots(self.fleet)
        elif gpus:
            self._slots = Gpus(gpus, work_dir=work_dir)
        self.pool = Pool(work_dir=work_dir, slots=self._slots)

    @property
    def is_leased(self) -> bool:
        return self._slots is not None

    @property
    def hosts(self) -> Sequence[JoinedHost]:
        return self.fleet.joined if self.fleet is not None else ()

    @property
    def queues_oracles(self) -> bool:
        """Whether oracles wait for the same GPUs of this host as cells."""
        return bool(self._gpus) and self._device == "cuda"

    @property
    def gpus(self) -> int:
        """Returns the number of leased GPUs of this host, whole or shared; 1 if none are leased."""
        return len(gpus_of(self._gpus)) or 1

    @property
    def width(self) -> int:
        """Returns the number of cells that run at once, on the hosts that have joined."""
        return CELLS_PER_SLOT * (self.fleet.slots if self.fleet is not None else len(self._gpus))

    @property
    def leased(self) -> dict[str, float]:
        """Returns the share of the session's time that each GPU, or slot of a host, was leased; see Busy.shares."""
        return self._slots.busy.shares() if self._slots is not None else {}

    def close(self) -> None:
        self.pool.close()
        if self.fleet is not None:
            self.fleet.close()
