"""Worker groups: what a task gets that ends well, when a worker group is kept, and when a task gets a fresh one."""

import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from cells import exhaustive
from worker_group_helpers import Runner, is_dead_soon, is_gone, results

from conformance.core.host import available_memory
from conformance.runtime import Pool, WorkerGroupConfig, beat
from conformance.runtime.failure import StartError
from conformance.runtime.preload_server import COMMON, SHARED
from conformance.runtime.worker_groups import RANK_BYTES, check_host


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pool")


@pytest.fixture(scope="module")
def pool(work_dir: Path) -> Iterator[Pool]:
    with Pool(work_dir=work_dir) as pool:
        yield pool


@pytest.fixture
def run(pool: Pool, tmp_path: Path) -> Runner:
    return Runner(pool, tmp_path)


# --- what a task gets ---


def test_every_rank_returns_its_result(run: Runner) -> None:
    assert results(run("add", size=4, value=2.0)) == [{"rank": rank, "sum": 14.0} for rank in range(4)]


def test_arguments_and_results_may_be_larger_than_a_packet(run: Runner) -> None:
    """Messages of the controller and of its ranks; the socket between them buffers some 200 KiB."""
    text = "0123456789" * 100_000
    assert results(run("echo", text=text)) == [text, text]


def test_ranks_have_the_environment_that_trainers_read(run: Runner) -> None:
    for rank, environment in enumerate(results(run("environment", size=2))):
        port = environment.pop("MASTER_PORT")
        assert 1024 <= int(port) < 65536
        assert environment == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
        }


GLOO = """\
import os

import torch.distributed as dist

from conformance.core.process import open_files
from conformance.runtime.worker_main import _share_gloo_device

_share_gloo_device()
os.environ["GLOO_SOCKET_IFNAME"] = "nowhere"
try:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
except RuntimeError as error:
    print(str(error).splitlines()[0])
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups = [dist.new_group([0]) for _ in range(3)]
print(open_files()["eventpoll"])
options = dist.ProcessGroupGloo._Options()
options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options=options)
print(open_files()["eventpoll"])
"""


def test_gloo_groups_of_a_rank_share_a_device_at_the_interface_that_the_environment_names() -> None:
    rank = subprocess.run([sys.executable, "-c", GLOO], capture_output=True, text=True, check=False)
    assert rank.returncode == 0, rank.stderr
    failure, *devices = rank.stdout.splitlines()
    assert failure.endswith("Unable to find address for: nowhere")
    assert devices == ["1", "2"]  # the second one is of a group that brings it


def test_each_rank_and_task_has_its_own_log(pool: Pool, tmp_path: Path) -> None:
    for text in ("first", "second"):
        results(Runner(pool, tmp_path / text)("say", text=text))
        for rank in range(2):
            said = (tmp_path / text / f"rank-{rank}.log").read_text()
            assert said.split() == f"{text} 1 {rank} {text} 2 {rank} {text} 3 {rank}".split()
        assert not list((tmp_path / text).glob("*.stacks"))


def test_a_task_does_not_inherit_the_default_dtype(run: Runner) -> None:
    assert results(run("change_default_dtype")) == ["torch.float32"] * 2
    assert results(run("change_default_dtype")) == ["torch.float32"] * 2


def test_a_heartbeat_outside_a_worker_group_is_ignored() -> None:
    beat("step 1")


# --- which processes run it ---


def test_ranks_stay_alive_between_tasks(run: Runner) -> None:
    assert run.pids() == run.pids()


def test_worker_groups_that_preload_the_same_come_from_one_forkserver(run: Runner) -> None:
    """Whatever their size and their key; but each key has its own ranks."""
    found = [results(run("pids", key=key, size=size)) for key in ("test", "other") for size in (1, 2, 4)]
    assert len({result["forkserver"] for worker_group in found for result in worker_group}) == 1
    assert len({result["rank"] for worker_group in found for result in worker_group}) == 2 * (1 + 2 + 4)


@pytest.mark.parametrize(("preload", "shared"), [((), ()), exhaustive(("transformers",), SHARED.values())])
def test_ranks_find_what_the_preload_server_imports_once_for_all_and_no_library_on_top(
    tmp_path: Path, preload: tuple[str, ...], shared: Collection[str]
) -> None:
    """Each other import costs seconds in every forkserver. A process of its own has a preload server of its own."""
    asked = [*COMMON, *SHARED.values(), "deepspeed", "megatron", "datasets"]
    code = f"""
        from pathlib import Path
        from conformance.runtime import Pool, WorkerGroupConfig
        with Pool(work_dir=Path("pool")) as pool:
            config = WorkerGroupConfig(size=2, device="cpu", preload={preload})
            outcome = pool.run(key="", config=config, task="worker_group_tasks:imported", kwargs={{"modules": {asked}}},
                               log_dir=Path("logs"), budget_s=60)
        print(outcome.reason, outcome.results)
    """
    tests = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "support"), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | tests, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([[*COMMON, *shared]] * 2)


def test_a_fresh_task_runs_in_processes_that_have_seen_no_other(run: Runner) -> None:
    """What a resumed cell needs: nothing that an earlier task left in memory can stand in for its checkpoint."""
    before = run.pids()
    assert results(run("remember", text="phase 1")) == [["phase 1"]] * 2
    assert results(run("remember", text="phase 2")) == [["phase 1", "phase 2"]] * 2
    assert results(run("remember", text="phase 3", fresh=True)) == [["phase 3"]] * 2
    assert all(is_gone(pid) for pid in before)


def test_the_fresh_worker_group_is_kept_for_the_next_task(run: Runner) -> None:
    fresh = run.pids(fresh=True)
    assert run.pids() == fresh
    assert set(run.pids(fresh=True)).isdisjoint(fresh)


def test_a_fresh_task_spares_worker_groups_of_other_keys_and_sizes(run: Runner) -> None:
    others = run.pids(size=4), run.pids(key="other")
    run.pids(fresh=True)
    assert (run.pids(size=4), run.pids(key="other")) == others


def test_beyond_the_cap_the_group_that_was_idle_longest_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.runtime.pool.MOST_GROUPS_HERE", 2)
    with Pool(work_dir=tmp_path) as pool:
        run = Runner(pool, tmp_path)
        first, second = run.pids(key="first", size=1), run.pids(key="second", size=1)
        assert run.pids(key="first", size=1) == first  # the second one is idle longer now
        third = run.pids(key="third", size=1)
        assert is_gone(*second)
        assert (run.pids(key="first", size=1), run.pids(key="third", size=1)) == (first, third)
        assert run.pids(key="second", size=1) != second
        assert is_gone(*first)


def test_a_fresh_worker_group_and_a_warm_task_cost_little(run: Runner) -> None:
    """In processor time, which a loaded machine does not change: an import of torch alone costs about a second."""
    fresh = results(run("processor_seconds", fresh=True))
    warm = results(run("processor_seconds"))
    assert max(fresh) < 0.5
    assert max(later - earlier for earlier, later in zip(fresh, warm, strict=True)) < 0.1


def test_eight_tasks_with_meshes_leak_nothing(run: Runner, caplog: pytest.LogCaptureFixture) -> None:
    """Nor does one suffer from what an earlier one left in DTensor's caches or in the store: the same ranks do all."""
    results(run("nothing", size=4))  # what a rank may hold is counted after its first task
    with caplog.at_level(logging.INFO):
        seen = [tuple(r["pid"] for r in results(run("tensor_tasks:tensor_parallel", size=4))) for _ in range(8)]
    assert len(set(seen)) == 1
    assert "retired" not in caplog.text


def test_dtensor_computes_each_shape_once_in_a_rank_for_meshes_of_all_tasks(run: Runner) -> None:
    """1 and 1.0 are equal, and give results of different dtypes; so does the default dtype of the exact tier."""
    tasks = [(1, "float32"), (1.0, "float32"), (1.0, "float64"), (1, "float32"), (1.0, "float32"), (1.0, "float64")]
    found = [results(run("tensor_tasks:dtensor_power", key="shapes", exponent=n, dtype=dtype)) for n, dtype in tasks]
    assert all(rank["equal"] for ranks in found for rank in ranks)
    computed = [ranks[0]["computed"] for ranks in found]
    assert computed[0] < computed[1] < computed[2] == computed[3] == computed[4] == computed[5]


def test_shapes_of_dtensors_are_on_the_meta_device_those_of_the_fake_mode(run: Runner) -> None:
    for rank in results(run("tensor_tasks:dtensor_shapes", key="meta")):
        assert rank["other"] == []
        assert rank["all"] > rank["on_meta"] > 30  # a cast names a dtype


def test_shapes_of_dtensors_are_right_in_threads_and_kept_for_so_many_operators(run: Runner) -> None:
    (rank,) = results(run("tensor_tasks:dtensor_threads", key="threads", size=1))
    assert rank["right"]
    assert rank["kept"] <= 100


def test_a_leak_retires_the_worker_group_after_its_task(run: Runner, caplog: pytest.LogCaptureFixture) -> None:
    before = run.pids()
    with caplog.at_level(logging.INFO):
        results(run("leak_files"))
    leak = r"group \d+ [(].* is retired: it leaks: rank 0: open file descriptors \d+ -> \d+, among them 40 /dev/null;"
    assert re.search(leak, caplog.text)
    assert all(is_gone(pid) for pid in before)
    assert set(run.pids()).isdisjoint(before)


def test_a_pool_of_threads_that_starts_once_is_no_leak(run: Runner, caplog: pytest.LogCaptureFixture) -> None:
    before = run.pids(fresh=True)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            results(run("start_threads", count=20, name="pool"))
    assert "retired" not in caplog.text
    assert run.pids() == before


def test_threads_that_every_task_leaves_are_a_leak(run: Runner, caplog: pytest.LogCaptureFixture) -> None:
    before = run.pids(fresh=True)
    with caplog.at_level(logging.INFO):
        results(run("start_threads", count=10, name="one"))
        assert "retired" not in caplog.text
        results(run("start_threads", count=10, name="other"))
    assert re.search(r"is retired: it leaks: rank 0: threads \d+ -> \d+; rank 1: threads", caplog.text)
    assert set(run.pids()).isdisjoint(before)


def test_one_process_group_that_lives_on_is_a_leak(run: Runner, caplog: pytest.LogCaptureFixture) -> None:
    """Of the first task, too: three threads, where eight are allowed to whatever starts threads."""
    before = run.pids(fresh=True)
    with caplog.at_level(logging.INFO):
        results(run("keep_a_group", fresh=True))
    assert "it leaks: rank 0: process groups that were destroyed and live on 0 -> 1" in caplog.text
    assert set(run.pids()).isdisjoint(before)


def test_a_worker_group_that_keeps_much_memory_is_retired_as_planned(
    run: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiled kernels of half precision would fill a machine in a run of hundreds of cells."""
    before = run.pids(fresh=True)
    with caplog.at_level(logging.DEBUG):
        results(run("keep_memory", rank=1, mib=300))
        assert run.pids() == before
        results(run("keep_memory", rank=1, mib=300))
    (record,) = [record for record in caplog.records if "retired" in record.message]
    assert re.search(r"a rank keeps \d{3} MiB between tasks, in caches of libraries", record.message)
    assert record.levelno == logging.DEBUG
    assert set(run.pids()).isdisjoint(before)


def test_a_worker_group_whose_idle_rank_died_is_replaced_before_the_next_task(run: Runner) -> None:
    before = run.pids()
    os.kill(before[1], signal.SIGKILL)
    assert is_dead_soon(before[1])
    assert set(run.pids()).isdisjoint(before)


def test_a_pool_deletes_no_log_but_its_own(run: Runner, work_dir: Path, tmp_path: Path) -> None:
    """Workers of pytest-xdist share an output folder, and a forkserver may write long after it has started."""
    run.pids()
    logs = set(work_dir.iterdir())
    broken = WorkerGroupConfig(size=2, device="cpu", preload=("no_such_adapter",))
    with Pool(work_dir=work_dir) as other:
        other.run(key="test", config=broken, task="m:f", kwargs={}, log_dir=tmp_path, budget_s=1)
    assert len(logs) == 1
    assert set(work_dir.iterdir()) == logs


# --- wrong calls ---


def test_wrong_calls_say_what_to_change(pool: Pool, tmp_path: Path) -> None:
    def call(device: Any = "cpu", task: str = "m:f", kwargs: dict[str, Any] | None = None, size: int = 2) -> None:
        wrong = WorkerGroupConfig(size=size, device=device, preload=())
        pool.run(key="x", config=wrong, task=task, kwargs=kwargs or {}, log_dir=tmp_path, budget_s=1)

    with pytest.raises(ValueError, match="needs at least one"):
        call(size=0)
    with pytest.raises(ValueError, match=r"not of the form package\.module:function"):
        call(task="m.f")
    with pytest.raises(ValueError, match="have to be JSON values"):
        call(kwargs={"x": object()})
    with pytest.raises(ValueError, match=r"needs 99 GPUs, .* widen CUDA_VISIBLE_DEVICES"):
        call(device="cuda", size=99)


# --- what a host can hold ---


def test_more_ranks_than_the_host_can_run_fail_their_own_task_only(run: Runner) -> None:
    outcome = run("add", size=300, value=2.0)
    assert (outcome.state, outcome.rank) == ("failed", None)
    assert outcome.reason.startswith("this host cannot start 300 ranks: one host starts at most 248; ")
    assert results(run("add", size=2, value=2.0)) == [{"rank": rank, "sum": 5.0} for rank in range(2)]


def test_more_ranks_than_there_is_memory_for_are_refused_with_a_number_that_fits() -> None:
    check_host(10, memory=10 * RANK_BYTES)
    with pytest.raises(StartError, match=r"cannot start 11 ranks: .* 400 MiB are free, enough for 10"):
        check_host(11, memory=10 * RANK_BYTES)
    assert 0 < available_memory() < 2**50
