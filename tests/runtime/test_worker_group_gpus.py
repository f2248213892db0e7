"""Checks worker groups on real GPUs: the work of ranks, and their end when one of them fails.

A single GPU is enough: the ranks then share it, each with its own CUDA context and NCCL communicator.
"""

import itertools
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_group_helpers import is_gone, results

from conformance.runtime import Outcome, Pool, WorkerGroupConfig
from conformance.runtime.gpu_inventory import gpus_of_host, shares_of
from conformance.runtime.leased_slots import Gpus
from conformance.runtime.pool import KEPT_BYTES

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _leases(leased_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_LEASES", str(tmp_path / "leases"))


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    """Two slots: two GPUs, or two shares of the only one."""
    gpus = gpus_of_host()[:2]
    with pool_on(shares_of(gpus, 2 // len(gpus)), tmp_path) as pool:
        yield pool


def pool_on(slots: tuple[str, ...], folder: Path) -> Pool:
    return Pool(work_dir=folder / "worlds", slots=Gpus(slots, work_dir=folder / "worlds"))


def run(pool: Pool, task: str, logs: Path, *, size: int = 2, budget_s: float = 60, **kwargs: Any) -> Outcome:
    return pool.run(
        key="x",
        config=WorkerGroupConfig(size=size, device="cuda", preload=("worker_group_tasks",)),
        task=task if ":" in task else f"worker_group_tasks:{task}",
        kwargs=kwargs,
        log_dir=logs / f"logs-{next(_numbers)}",
        budget_s=budget_s,
    )


def test_ranks_compute_on_meshes_one_task_after_another(pool: Pool, tmp_path: Path) -> None:
    for _ in range(2):
        results(run(pool, "tensor_tasks:tensor_parallel", tmp_path))


def test_workspaces_of_cublas_keep_no_memory_and_the_worker_group_stays(pool: Pool, tmp_path: Path) -> None:
    """torch gives back a block of memory when nothing is in it, whatever its size."""
    before = results(run(pool, "pids", tmp_path))
    results(run(pool, "tensor_tasks:multiply_where_much_was", tmp_path, mib=2 * KEPT_BYTES // 2**20))
    assert results(run(pool, "pids", tmp_path)) == before


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_on_one_gpu_speak_over_nccl(tmp_path: Path, size: int) -> None:
    gpu = gpus_of_host()[0]
    with pool_on(shares_of((gpu,), size), tmp_path) as pool:
        outcome = run(pool, "tensor_tasks:exchange", tmp_path, size=size)
    ranks = [float(rank + 1) for rank in range(size)]
    for rank, found in enumerate(results(outcome)):
        assert found.pop("gpu") in gpu
        assert found == {
            "backend": "nccl",
            "sum": [sum(ranks)] * size,
            "gathered": [value for value in ranks for _ in range(size)],
            "scattered": [sum(ranks)],
            "received": [ranks[rank - 1]] * size,
        }


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize(
    ("task", "kwargs", "kind", "said"),
    [
        ("signal_self", {"number": signal.SIGKILL}, "killed", "rank 1 was killed by SIGKILL"),
        ("never_enter", {}, "hung", "rank 0 is in a collective called from never_enter"),  # which joins the ranks first
        ("never_arrive", {}, "hung", "  collectives of group "),  # rank 1 has entered fewer, says the flight recorder
        ("tensor_tasks:break_cuda", {}, "raised", "rank 1 raised"),
        ("eat_gpu_memory", {}, "out of memory", "rank 1 ran out of memory during 'eats'"),
    ],
)
def test_the_rank_that_broke_is_named_and_the_next_task_runs(
    tmp_path: Path, task: str, kwargs: dict[str, Any], kind: str, said: str, size: int
) -> None:
    """Its peers wait in a collective of NCCL, which says nothing of a peer that is gone."""
    gpus = gpus_of_host()[:2]
    with pool_on(shares_of(gpus, size // len(gpus)), tmp_path) as pool:
        before = [ranks["rank"] for ranks in results(run(pool, "pids", tmp_path, size=size))]
        outcome = run(pool, task, tmp_path, size=size, budget_s=10, rank=1, **kwargs)
        assert (outcome.state, outcome.kind, outcome.rank) == ("failed", kind, 1), outcome.reason
        assert said in outcome.reason
        assert all(is_gone(pid) for pid in before)
        results(run(pool, "tensor_tasks:exchange", tmp_path, size=size))


def test_a_cuda_error_that_stays_ends_its_own_worker_group_only(pool: Pool, tmp_path: Path) -> None:
    """A task of each slot runs where it has its lease, and only the worker group that broke is a new one."""

    def on_both() -> set[int]:
        """The processes that run tasks at the two slots at once."""
        folder = str(tmp_path / f"met-{next(_numbers)}")
        with ThreadPoolExecutor(2) as threads:
            met = [threads.submit(run, pool, "meet", tmp_path, size=1, of=2, folder=folder) for _ in range(2)]
        return {results(one.result())[0][1] for one in met}

    before = on_both()
    ((_, first),) = results(run(pool, "tensor_tasks:on_gpu", tmp_path, size=1))
    assert len(before) == 2
    assert first in before
    broken = run(pool, "tensor_tasks:break_cuda", tmp_path, size=1, rank=0)  # at the first slot, which is free
    assert (broken.state, broken.kind) == ("failed", "raised")
    assert before & on_both() == before - {first}
