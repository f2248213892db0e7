"""Oracles on leased GPUs: how many of them an oracle has, when it waits, and what happens after a failure.

Ranks are real and compute on the CPU; a GPU is a name that they hold a lease of, as in
tests/runtime/test_leased_cells.py.
"""

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import make_cell
from test_leased_cells import GPUS, cell_of, on_shares, wait_for
from worker_group_helpers import results

from conformance.data.inputs import prepare_inputs
from conformance.models import synthetic
from conformance.models.folders import elements_of
from conformance.records.record_format import RECORD_FILE
from conformance.runner.oracle_jobs import Oracles
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session
from conformance.runtime import Outcome, Pool, WorkerGroupConfig
from conformance.runtime.failure import FailureKind
from conformance.runtime.gpu_inventory import gpu_of, shares_of
from conformance.runtime.gpu_leases import Ticket, holders, lease_folder
from conformance.runtime.leased_slots import Gpus
from conformance.runtime.worker_groups import Lease, NoLease


@pytest.fixture(autouse=True)
def _leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_LEASES", str(tmp_path / "leases"))


@pytest.mark.parametrize(
    ("gibibytes", "gpus"),
    [
        (1, "GPU-a"),
        (60, "GPU-a"),  # of the smallest
        (61, "GPU-a,GPU-b"),
        (120, "GPU-a,GPU-b"),
        (121, "GPU-a,GPU-b,GPU-c,GPU-d"),
        (241, "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e"),
        (999, "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e"),
    ],
)
def test_a_task_has_as_many_gpus_as_have_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gibibytes: int, gpus: str
) -> None:
    """An oracle of a large model, whose only rank spreads it over GPUs."""
    sizes = {"GPU-a": 80, "GPU-b": 60, "GPU-c": 80, "GPU-d": 80, "GPU-e": 80, "GPU-of-others": 1}
    told = {gpu: (2**30, size * 2**30) for gpu, size in sizes.items()}
    monkeypatch.setattr("conformance.runtime.leased_slots.memory_of_gpus", lambda: told)
    with Pool(work_dir=tmp_path / "worlds", slots=Gpus(tuple(sizes)[:5], work_dir=tmp_path / "worlds")) as pool:
        found = [
            pool.run(
                key="oracle",
                config=WorkerGroupConfig(size=1, device="cpu", preload=("worker_group_tasks",), gpu_memory=gpu_memory),
                task="worker_group_tasks:visible",
                kwargs={},
                log_dir=tmp_path / "logs" / str(gpu_memory),
                budget_s=60,
            )
            for gpu_memory in (gibibytes * 2**30, gibibytes * 2**30 - 1)
        ]
    assert [results(one) for one in found] == [[gpus], [gpus]]
    assert [one.used for one in found] == [False, True]  # the worker group stays, for tasks of other sizes, too


def test_ranks_have_a_gpu_each_however_little_room_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.runtime.leased_slots.memory_of_gpus", lambda: dict.fromkeys(GPUS, (0, 2**30)))
    gpus = Gpus(GPUS, work_dir=tmp_path)

    def lease(ranks: int) -> Lease:
        config = WorkerGroupConfig(size=ranks, device="cuda", preload=(), gpu_memory=1)
        return gpus.lease("ranks", config, prefer=(), limit_s=0.1, is_over=lambda: False)

    gpus.give_back(two := lease(2))
    assert two.block == GPUS
    with pytest.raises(NoLease, match="3 ranks, and there are 2 GPUs"):
        lease(3)


@pytest.mark.parametrize(("needed", "shares"), [(1, 1), (47, 1), (48, 2), (94, 2), (95, 4), (999, 4)])
def test_a_task_sized_by_memory_gets_shares(
    needed: int, shares: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two GPUs of 100 bytes, of which 94 are divided."""
    monkeypatch.setattr("conformance.runtime.leased_slots.memory_of_gpus", lambda: dict.fromkeys(GPUS, (0, 100)))
    config = WorkerGroupConfig(size=1, device="cuda", preload=(), gpu_memory=needed)
    lease = leased(Gpus(shares_of(GPUS, 2), work_dir=tmp_path, large=True), config)
    assert len(lease.block) == shares
    assert len(set(map(gpu_of, lease.block))) == (2 if shares > 2 else 1)


def leased(gpus: Gpus, config: WorkerGroupConfig) -> Lease:
    return gpus.lease("ranks", config, prefer=(), limit_s=0.1, is_over=lambda: False)


@pytest.mark.parametrize("other", [shares_of(GPUS, 2), shares_of(GPUS, 4), GPUS])
def test_a_run_with_large_models_has_its_gpus_for_itself(other: tuple[str, ...], tmp_path: Path) -> None:
    """Other runs have other GPUs, or wait, and so does this one, whoever is first."""
    one = WorkerGroupConfig(size=1, device="cuda", preload=())
    large, beside = Gpus(shares_of(GPUS, 2), work_dir=tmp_path, large=True), Gpus(other, work_dir=tmp_path)
    first, second = leased(large, one), leased(large, one)
    assert first.block != second.block
    third = leased(large, one)
    with pytest.raises(NoLease, match="no lease within"):
        leased(beside, one)
    for lease in (first, second, third):
        large.give_back(lease)
    of_other = leased(beside, one)
    blocks = [leased(large, one) for _ in range(2)]
    assert {gpu_of(lease.block[0]) for lease in blocks} == {*GPUS} - {gpu_of(of_other.block[0])}
    with pytest.raises(NoLease, match="no lease within"):
        leased(large, one)


def test_a_run_with_large_models_leases_no_share_that_another_run_waits_for(tmp_path: Path) -> None:
    """Else its cells could follow each other on a GPU for hours. The other way round as well."""
    one, shares = WorkerGroupConfig(size=1, device="cuda", preload=()), shares_of(GPUS[:1], 2)
    for large in (True, False):
        runs = Gpus(shares, work_dir=tmp_path, large=large), Gpus(shares, work_dir=tmp_path, large=not large)
        lease = leased(runs[0], one)
        ticket = runs[1]._ticket(shares, 1)
        with pytest.raises(NoLease, match="no lease within"):
            leased(runs[0], one)
        runs[0].give_back(lease)
        with pytest.raises(NoLease, match="no lease within"):
            leased(runs[0], one)
        found = ticket.serve()
        assert found is not None
        found.release()


def test_one_worker_group_lives_on_a_share_of_memory(tmp_path: Path) -> None:
    """Idle ranks of other backends, and of larger or smaller groups, would hold two gigabytes each."""
    shares = shares_of(GPUS, 2)
    with Pool(work_dir=tmp_path / "worlds", slots=Gpus(shares, work_dir=tmp_path / "worlds", large=True)) as pool:

        def is_used(key: str, size: int) -> bool:
            outcome = pool.run(
                key=key,
                config=WorkerGroupConfig(size=size, device="cpu", preload=("worker_group_tasks",)),
                task="worker_group_tasks:visible",
                kwargs={},
                log_dir=tmp_path / "logs",
                budget_s=60,
            )
            results(outcome)
            return outcome.used

        asked = [("a", 2), ("a", 2), ("b", 2), ("a", 2), ("b", 4), ("a", 2), ("a", 2)]
        assert [is_used(*one) for one in asked] == [False, True, False, False, False, False, True]


def test_task_sized_by_memory_gets_every_share_of_host_if_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conformance.runtime.leased_slots.memory_of_gpus", dict)
    everything = WorkerGroupConfig(size=1, device="cpu", preload=("worker_group_tasks",), gpu_memory=1)
    folder = tmp_path / "met"
    with on_shares(shares_of(GPUS, 2), tmp_path) as pool, ThreadPoolExecutor(1) as threads:
        oracle = threads.submit(
            pool.run,
            key="oracle",
            config=everything,
            task="worker_group_tasks:meet",
            kwargs={"of": 2, "folder": str(folder)},
            log_dir=tmp_path / "logs",
            budget_s=60,
        )
        wait_for(lambda: folder.is_dir() and any(folder.iterdir()))
        for slot in ("GPU-b", "GPU-a#1", "GPU-b#1"):
            ticket = Ticket((slot,), 1, folder=lease_folder())
            assert ticket.serve() is None
            ticket.withdraw()
        (folder / "the test").touch()
        assert results(oracle.result())[0][0] == "GPU-a,GPU-b"


@pytest.mark.exhaustive
def test_what_the_oracle_computes_on_a_gpu_takes_a_lease_like_any_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the pool of the cells, and on each GPU at the same time. These GPUs do not exist, so its rank ends; the leases
    were there, and are given back."""
    gpus = Gpus(GPUS, work_dir=tmp_path / "worlds")
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "none")
    cells = [make_cell("sft-sgd", "llama", "dp1", "fp32", steps=1, rows=12, seed=seed) for seed in (0, 1)]
    with (
        Pool(work_dir=tmp_path / "worlds", slots=gpus) as pool,
        Oracles(root=tmp_path / "out", device="cuda", budget_s=60, leased=pool, gpus=len(GPUS)) as oracles,
    ):
        for cell in cells:
            oracles.request(cell, prepare_inputs(cell.scenario, tmp_path / "out"))
        for cell in cells:
            assert "the oracle's fp32 run failed: rank 0 raised" in oracles.wait(cell)
            assert "float64" not in oracles.wait(cell)  # which is computed on the CPU
    assert all(gpus.busy.shares()[gpu] > 0 for gpu in GPUS)
    assert holders(GPUS, lease_folder()) == ""


def test_large_oracle_retries_with_all_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may have filled those that it had. These GPUs do not exist, so every attempt fails."""
    gpus = Gpus(GPUS, work_dir=tmp_path / "worlds")
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "none")
    monkeypatch.setattr(synthetic, "LARGE_MODELS", 0)
    asked: list[int | None] = []
    lease = gpus.lease

    def noted(who: str, config: WorkerGroupConfig, **rest: Any) -> Lease:
        asked.append(config.gpu_memory)
        return lease(who, config, **rest)

    monkeypatch.setattr(gpus, "lease", noted)
    cell = make_cell("sft-sgd", "llama", "dp1", "exact", steps=1, rows=12)
    inputs = prepare_inputs(cell.scenario, tmp_path / "out")
    with (
        Pool(work_dir=tmp_path / "worlds", slots=gpus) as pool,
        Oracles(root=tmp_path / "out", device="cuda", budget_s=60, leased=pool, gpus=len(GPUS)) as oracles,
    ):
        oracles.request(cell, inputs)
        assert "the oracle's float64 run failed: rank 0 raised" in oracles.wait(cell)
        again = make_cell("sft-sgd", "llama", "dp1", "exact", steps=1, rows=12, seed=1)
        oracles.request(again, prepare_inputs(again.scenario, tmp_path / "out"))
        assert "failed" in oracles.wait(again)
    weights_and_gradients = 2 * 8 * elements_of(inputs.models)
    assert asked == [round(weights_and_gradients / 0.7), *[sys.maxsize] * 3]  # devices_for leaves three tenths free


@pytest.mark.parametrize(("kind", "runs"), [("killed", [False, True]), ("raised", [False])])
def test_an_oracle_that_dies_beside_others_runs_again_alone(
    kind: FailureKind, runs: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that raises would raise again."""
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path / "cache"))
    ran = list[bool]()

    def fail_once(pool: Pool, *, kwargs: dict[str, Any], alone: bool = False, **call: Any) -> Outcome:
        ran.append(alone)
        if alone:
            shutil.copytree(record, kwargs["out"])
        state: Any = "done" if alone else "failed"
        return Outcome(state=state, reason=kind, kind=kind, rank=0, seconds=0, results=[])

    record = tmp_path / "record"
    record.mkdir()
    (record / RECORD_FILE).touch()
    monkeypatch.setattr(Pool, "run", fail_once)
    cell = make_cell("sft-sgd", "llama", "dp1", "exact", steps=1, rows=12)
    with Oracles(root=tmp_path / "out", device="cpu", budget_s=60, lanes=2, packed=True) as oracles:
        oracles.request(cell, prepare_inputs(cell.scenario, tmp_path / "out"))
        assert bool(oracles.wait(cell)) == (kind == "raised")
    assert ran == runs
    assert oracles.repeated == [f"the oracle's float64 run of {cell} was repeated: {kind}"] * runs.count(True)


def test_a_cell_queues_up_for_its_gpus_when_its_oracle_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else oracles that need one GPU would wait behind it for a GPU that idles until the cell has all of its own."""
    wait, lease, order = Oracles.wait, Gpus.lease, list[str]()

    def waiting(oracles: Oracles, *cell: Any) -> str:
        missing = wait(oracles, *cell)
        order.append("the oracle is done")
        return missing

    def leasing(gpus: Gpus, who: str, *args: Any, **options: Any) -> Any:
        order.append(who)
        return lease(gpus, who, *args, **options)

    monkeypatch.setattr(Oracles, "wait", waiting)
    monkeypatch.setattr(Gpus, "lease", leasing)
    with Session(SessionConfig(out=tmp_path / "out", device="cuda", gpus=GPUS, budget_s=60)) as session:
        monkeypatch.setattr("torch.cuda.device_count", lambda: len(GPUS))
        assert session.run(cell_of("dp2", 0)).verdict.state == "infrastructure"  # these GPUs do not exist
    assert order[:2] == ["the oracle is done", "plain"]
