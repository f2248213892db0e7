"""Cells of large models lease as many shares of a GPU as each of their ranks needs. A GPU is a name that has memory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from test_leased_cells import cell_of
from test_leased_oracles import leased
from worker_group_helpers import group_config, results

from conformance.data.inputs import prepare_inputs
from conformance.models import synthetic
from conformance.runner.phases import _run_phase, import_ahead
from conformance.runner.resource_estimate import leased_bytes
from conformance.runtime import Device, Outcome, Pool, WorkerGroupConfig
from conformance.runtime.gpu_inventory import shares_of
from conformance.runtime.gpu_leases import Ticket, blocks, lease_folder
from conformance.runtime.leased_slots import Gpus
from conformance.runtime.worker_groups import Block, Lease, NoLease

GPUS = tuple(f"GPU-{letter}" for letter in "ABCD")
LIGHT, HEAVY, WHOLE = 23, 47, 94  # of 100 bytes, of which 94 are divided: a quarter, a half, all


@pytest.fixture(autouse=True)
def _leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_LEASES", str(tmp_path / "leases"))
    monkeypatch.setattr("conformance.runtime.leased_slots.memory_of_gpus", lambda: dict.fromkeys(GPUS, (0, 100)))


def config(memory: int, size: int = 2) -> WorkerGroupConfig:
    return WorkerGroupConfig(size=size, device="cuda", preload=(), rank_memory=memory)


def shares(names: str) -> tuple[str, ...]:
    return tuple(f"GPU-{name[0]}#{name[1]}" for name in names.split())


def large(tmp_path: Path, gpus: int = 2, each: int = 4) -> Gpus:
    return Gpus(shares_of(GPUS[:gpus], each), work_dir=tmp_path, shared=False, large=True)


@pytest.mark.parametrize(
    ("gpus", "of_gpu", "size", "each", "found"),
    [
        (2, 4, 2, 1, ["A0 B0", "A1 B1", "A2 B2", "A3 B3"]),
        (2, 4, 2, 2, ["A0 B0 A1 B1", "A2 B2 A3 B3"]),
        (2, 4, 2, 4, ["A0 B0 A1 B1 A2 B2 A3 B3"]),
        (4, 2, 2, 2, ["A0 B0 A1 B1", "C0 D0 C1 D1"]),
        (4, 4, 4, 2, ["A0 B0 C0 D0 A1 B1 C1 D1", "A2 B2 C2 D2 A3 B3 C3 D3"]),
        (2, 4, 1, 2, ["A0 A1", "B0 B1", "A2 A3", "B2 B3"]),
        (2, 4, 4, 2, ["A0 B0 A2 B2 A1 B1 A3 B3"]),  # two ranks on each GPU
        (2, 3, 2, 2, ["A0 B0 A1 B1"]),
        (2, 3, 2, 3, ["A0 B0 A1 B1 A2 B2"]),
        (2, 2, 4, 2, []),
    ],
)
def test_each_rank_of_a_block_has_shares_of_one_gpu(
    gpus: int, of_gpu: int, size: int, each: int, found: list[str]
) -> None:
    assert blocks(shares_of(GPUS[:gpus], of_gpu), size, each) == list(map(shares, found))


@pytest.mark.parametrize(
    ("gpus", "each", "memory", "size", "found"),
    [
        (2, 4, 0, 2, "A0 B0"),
        (2, 4, LIGHT, 2, "A0 B0"),
        (2, 4, LIGHT + 1, 2, "A0 B0 A1 B1"),
        (2, 4, HEAVY, 2, "A0 B0 A1 B1"),
        (4, 4, HEAVY, 2, "A0 B0 A1 B1"),
        (4, 4, HEAVY, 4, "A0 B0 C0 D0 A1 B1 C1 D1"),
        (2, 4, HEAVY + 1, 2, "A0 B0 A1 B1 A2 B2 A3 B3"),
        (2, 4, WHOLE, 2, "A0 B0 A1 B1 A2 B2 A3 B3"),
        (2, 4, 999, 1, "B0 B1 B2 B3"),
        (2, 4, HEAVY, 1, "B2 B3"),  # the last ones, so that blocks of larger groups stay whole
        (2, 2, HEAVY, 4, "A0 B0 A1 B1"),  # two ranks on a GPU
        (2, 2, HEAVY + 1, 4, "A0 B0 A1 B1"),  # all there is
        (2, 2, WHOLE, 2, "A0 B0 A1 B1"),
    ],
)
def test_rank_leases_power_of_two_of_shares_that_holds_it(
    gpus: int, each: int, memory: int, size: int, found: str, tmp_path: Path
) -> None:
    assert leased(large(tmp_path, gpus, each), config(memory, size)).block == shares(found)


def test_whole_gpus_and_slots_without_known_memory_are_leased_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert leased(Gpus(GPUS[:2], work_dir=tmp_path), config(999)).block == GPUS[:2]
    monkeypatch.setattr("conformance.runtime.leased_slots.memory_of_gpus", dict)
    assert len(leased(large(tmp_path, 4, 2), config(1)).block) == 4


@pytest.mark.parametrize(
    ("device", "above", "is_sized"), [("cuda", 0, True), ("cuda", 10**9, False), ("cpu", 0, False)]
)
def test_ranks_of_large_cell_ask_for_memory_of_their_gpu(
    device: Device, above: int, is_sized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic, "LARGE_MODELS", above)
    asked = list[WorkerGroupConfig]()

    class NoPool:
        is_shared = True

        def prepare(self, config: WorkerGroupConfig) -> None:
            asked.append(config)

        def run(self, *, config: WorkerGroupConfig, **_: object) -> Outcome:
            asked.append(config)
            return Outcome(state="failed", reason="", kind="", rank=None, seconds=0, results=[])

    cell, pool = cell_of("dp2", 0), cast(Pool, NoPool())
    import_ahead(pool, [cell], device)
    inputs = prepare_inputs(cell.scenario, tmp_path / "out")
    _run_phase(pool, cell, 0, inputs, tmp_path, device=device, budget_s=1, fresh=False, alone=False)
    assert [one.rank_memory for one in asked] == [leased_bytes(cell) if is_sized else 0] * 2


def test_light_cells_run_beside_a_heavy_one(tmp_path: Path) -> None:
    gpus = large(tmp_path)
    leases = [leased(gpus, config(memory)) for memory in (HEAVY, LIGHT, LIGHT)]
    assert [lease.block for lease in leases] == [shares("A0 B0 A1 B1"), shares("A2 B2"), shares("A3 B3")]
    with pytest.raises(NoLease, match="no lease within"):
        leased(gpus, config(LIGHT))
    gpus.give_back(leases[1])
    with pytest.raises(NoLease, match="no lease within"):
        leased(gpus, config(HEAVY))
    gpus.give_back(leases[2])
    assert leased(gpus, config(HEAVY)).block == shares("A2 B2 A3 B3")
    assert gpus.busy.shares().keys() == set(GPUS[:2])


def test_heavy_cell_that_waits_is_not_passed_by_light_ones_and_light_ones_use_what_it_cannot(tmp_path: Path) -> None:
    """The ticket is that of any run: consecutive names are blocks, as earlier versions read them."""
    gpus = large(tmp_path)
    leases = [leased(gpus, config(LIGHT)) for _ in range(3)]
    heavy = gpus._ticket(*gpus._wanted(config(HEAVY)))
    (ticket,) = lease_folder().glob("*.ticket")
    request = json.loads(ticket.read_bytes())
    assert (request["size"], request["gpus"][:4]) == (4, list(shares("A0 B0 A1 B1")))
    assert request["gpus"][4:] == list(shares("A2 B2 A3 B3"))
    gpus.give_back(leases[0])
    own = {gpu: lease.fds[number] for lease in leases[1:] for number, gpu in enumerate(GPUS[:2])}
    assert heavy.serve(own=own) is None  # the second pair has two free shares, and so has the first; the first waits
    assert leased(gpus, config(LIGHT)).block == shares("A3 B3")
    with pytest.raises(NoLease, match="no lease within"):
        leased(gpus, config(LIGHT))  # A0 and B0 are free, and reserved
    gpus.give_back(leases[1])
    lease = heavy.serve(own=own)
    assert lease is not None
    assert lease.block == shares("A0 B0 A1 B1")


def test_another_run_waits_for_gpus_with_shares_of_any_weight(tmp_path: Path) -> None:
    gpus, beside = large(tmp_path), Gpus(shares_of(GPUS[:2], 2), work_dir=tmp_path, large=True)
    lease = leased(gpus, config(HEAVY))
    with pytest.raises(NoLease, match="no lease within"):
        leased(beside, config(LIGHT))
    gpus.give_back(lease)
    gpus.give_back(leased(gpus, config(WHOLE)))
    assert Ticket(shares("A0 B0"), 2, folder=lease_folder()).serve() is not None


@pytest.mark.parametrize(
    ("gpus", "memory", "found"),
    [
        (2, LIGHT, "B3"),
        (2, HEAVY, "B2 B3"),
        (2, WHOLE, "B0 B1 B2 B3"),
        (2, WHOLE + 1, "A0 B0 A1 B1 A2 B2 A3 B3"),
        (4, WHOLE + 1, "A0 B0 A1 B1 A2 B2 A3 B3"),
        (4, 2 * WHOLE + 1, "A0 B0 C0 D0 A1 B1 C1 D1 A2 B2 C2 D2 A3 B3 C3 D3"),
    ],
)
def test_oracle_leases_shares_of_one_gpu_or_whole_gpus(gpus: int, memory: int, found: str, tmp_path: Path) -> None:
    one = WorkerGroupConfig(size=1, device="cuda", preload=(), gpu_memory=memory)
    assert leased(large(tmp_path, gpus), one).block == shares(found)


def test_worker_group_stays_on_its_shares_until_ranks_of_another_weight_have_them(tmp_path: Path) -> None:
    with Pool(work_dir=tmp_path / "worlds", slots=large(tmp_path)) as pool:

        def ran(key: str, memory: int) -> tuple[bool, list[list[str]]]:
            outcome = pool.run(
                key=key,
                config=replace(group_config(size=2), rank_memory=memory),
                task="worker_group_tasks:slot",
                kwargs={},
                log_dir=tmp_path / "logs",
                budget_s=60,
            )
            return outcome.used, results(outcome)

        slots = [["GPU-A,GPU-B", own, ""] for own in ("0", "1")]  # not those of ranks that share a GPU
        asked = [("a", LIGHT), ("a", LIGHT), ("a", HEAVY), ("a", HEAVY), ("b", LIGHT), ("a", LIGHT), ("a", LIGHT)]
        found = [ran(*one) for one in asked]
    assert [used for used, _ in found] == [False, True, False, True, False, False, True]
    assert [slot for _, slot in found] == [slots] * len(asked)


def test_worker_group_that_has_ended_draws_no_cell_to_its_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a cell would end the worker group there, although its own backend has one elsewhere."""
    gpus, preferred = large(tmp_path), list[set[Block]]()
    lease = gpus.lease

    def noted(who: str, config: WorkerGroupConfig, *, prefer: set[Block], **rest: Any) -> Lease:
        preferred.append(set(prefer))
        return lease(who, config, prefer=prefer, **rest)

    monkeypatch.setattr(gpus, "lease", noted)
    with Pool(work_dir=tmp_path / "worlds", slots=gpus) as pool:
        for key, memory in (("a", LIGHT), ("b", HEAVY), ("a", LIGHT), ("b", LIGHT), ("a", LIGHT), ("a", LIGHT)):
            results(
                pool.run(
                    key=key,
                    config=replace(group_config(size=2), rank_memory=memory),
                    task="worker_group_tasks:pids",
                    kwargs={},
                    log_dir=tmp_path / "logs",
                    budget_s=60,
                )
            )
    assert preferred == [set(), set(), set(), set(), set(), {shares("A0 B0")}]
