"""Slots: what worlds of several hosts lease: one of an agent for each rank, so that cells run side by side (claim 8).

An agent holds its GPUs while it lives, so its slots are leased within the run alone: the locks are in a folder of the
controller. Blocks are those of all slots in the order in which agents came.
"""

from itertools import groupby

from conformance.gpus.places import LeasedPlaces
from conformance.hosts.fleet import FarHandle, Fleet
from conformance.world.places import Block, NoLease

_SLOT = " slot "


class Slots(LeasedPlaces):
    def __init__(self, fleet: Fleet) -> None:
        super().__init__(what="slots of agents", folder=fleet.own_folder)
        self._fleet = fleet

    def names(self) -> Block:
        if problem := self._fleet.problem():
            raise NoLease(problem)
        return tuple(f"{agent.name}{_SLOT}{slot}" for agent in self._fleet.agents for slot in range(agent.slots))

    def names_of_a_host(self) -> Block:
        """The first agent's."""
        names = self.names()
        return next(tuple(slots) for _, slots in groupby(names, _agent_of))

    def starter(self, block: Block) -> FarHandle:
        parts = [
            (agent, [int(name.rpartition(_SLOT)[2]) for name in slots]) for agent, slots in groupby(block, _agent_of)
        ]
        return self._fleet.handle(parts)


def _agent_of(name: str) -> str:
    return name.rpartition(_SLOT)[0]
