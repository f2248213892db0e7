"""Worker groups and cells on leased GPUs. Ranks are real and compute on the CPU; a GPU is a name that they hold a lease
of.

What CUDA does is shown by tests that need GPUs, here and in tests/runtime/test_worker_groups.py.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import worker_group_tasks
from conftest import make_cell
from worker_group_helpers import group_config, is_dead_soon, results

from conformance.backends.protocol import BackendEntry
from conformance.core.environments import Environment, make_environment
from conformance.core.process import signal_process
from conformance.matrix.cell import Cell
from conformance.results.run_results import read_entry, read_output_json
from conformance.runner.attempt import JudgedCell
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session
from conformance.runtime import Outcome, Pool
from conformance.runtime.gpu_inventory import shares_of
from conformance.runtime.gpu_leases import Ticket, holders, lease_folder, leases_by_process
from conformance.runtime.leased_slots import Gpus
from conformance.runtime.preload_server import absolute_path
from conformance.runtime.worker_groups import NoLease

GPUS = ("GPU-a", "GPU-b")
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARITY_LEASES", str(tmp_path / "leases"))
    return lease_folder()


@pytest.fixture
def gpus(tmp_path: Path, leases: Path) -> Gpus:
    return Gpus(GPUS, work_dir=tmp_path / "worlds")


@pytest.fixture
def pool(tmp_path: Path, gpus: Gpus) -> Iterator[Pool]:
    with Pool(work_dir=tmp_path / "worlds", slots=gpus) as pool:
        yield pool


def run(
    pool: Pool,
    task: str,
    logs: Path,
    *,
    key: str = "test",
    size: int = 1,
    budget_s: float = 60,
    alone: bool = False,
    **kwargs: Any,
) -> Outcome:
    return pool.run(
        key=key,
        config=group_config(size=size),
        task=f"worker_group_tasks:{task}",
        kwargs=kwargs,
        log_dir=logs / str(next(_numbers)),  # tasks that run side by side log side by side
        budget_s=budget_s,
        alone=alone,
    )


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_tasks_run_side_by_side_and_each_sees_its_own_gpus(pool: Pool, tmp_path: Path, gpus: Gpus) -> None:
    """Two tasks of one GPU each meet while they run; a task of both GPUs runs alone, and worker groups are used
    again."""
    met = tmp_path / "met"
    with ThreadPoolExecutor(3) as threads:
        ask = [threads.submit(run, pool, "meet", tmp_path, of=3, folder=str(met)) for _ in range(2)]
        wait_for(lambda: met.is_dir() and len(list(met.iterdir())) == 2)
        both = threads.submit(run, pool, "visible", tmp_path, size=2)
        wait_for(lambda: any(lease_folder().glob("*.ticket")))
        (met / "the test").touch()
    one, other = sorted(results(asked.result())[0] for asked in ask)
    assert [one[0], other[0]] == ["GPU-a", "GPU-b"]
    assert results(both.result()) == ["GPU-a,GPU-b"] * 2
    again = results(run(pool, "meet", tmp_path, of=1, folder=str(tmp_path / "again")))[0]
    assert again in (one, other)  # the same process, on the same GPU
    assert all(0 < share <= 1 for share in gpus.busy.shares().values())


def test_what_another_run_has_leased_is_waited_for_and_then_told(pool: Pool, tmp_path: Path) -> None:
    ticket = Ticket(GPUS, 1, folder=lease_folder())
    lease = ticket.serve()
    assert lease is not None
    assert results(run(pool, "visible", tmp_path)) == ["GPU-b"]
    failed = run(pool, "visible", tmp_path, size=2, budget_s=0.05)
    assert failed.state == "failed"
    assert failed.reason == f"no lease within 0.6 s of 2 of 2 GPUs; leased are GPU-a by process {os.getpid()}"
    assert not list(lease_folder().glob("*.ticket"))
    lease.release()
    assert results(run(pool, "visible", tmp_path, size=2)) == ["GPU-a,GPU-b"] * 2


@pytest.mark.parametrize(
    ("variables", "of_user", "expected"),
    [
        ({}, {}, ("Socket", "=lo")),
        pytest.param({"NCCL_NET": "IB"}, {"NCCL_SOCKET_IFNAME": "eth7"}, ("IB", "eth7"), marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_that_share_a_gpu_keep_the_network_of_their_environment(
    variables: dict[str, str],
    of_user: dict[str, str],
    expected: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(worker_group_tasks.__file__).parent))  # for ranks in an environment
    for name in ("NCCL_NET", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in of_user.items():
        monkeypatch.setenv(name, value)
    python = make_environment(Environment(requirements=(), variables=variables)).python if variables else ""
    with Pool(work_dir=tmp_path / "worlds", slots=Gpus(("GPU-a#0", "GPU-a#1"), work_dir=tmp_path / "worlds")) as pool:
        found = pool.run(
            key="test",
            config=replace(group_config(size=2), python=python),
            task="worker_group_tasks:network",
            kwargs={},
            log_dir=tmp_path,
            budget_s=60,
        )
    assert [tuple(networks) for networks in results(found)] == [expected] * 2


HOLDER = """\
import sys
from pathlib import Path

from conformance.runtime.gpu_leases import Ticket

lease = Ticket(("GPU-b",), 1, folder=Path(sys.argv[1])).serve()
print("has it", flush=True)
sys.stdin.read()
"""


def test_lease_wait_for_other_process_is_logged(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("conformance.runtime.leased_slots._REPORT_S", 0.05)
    caplog.set_level("INFO", logger="conformance.runtime.leased_slots")

    def waits() -> None:
        with pytest.raises(NoLease):
            gpus.lease("fsdp2", group_config(size=2), prefer=(), limit_s=0.3, is_over=lambda: False)

    own = gpus.lease("megatron", group_config(size=1), prefer=(), limit_s=0.3, is_over=lambda: False)
    waits()
    assert not caplog.messages
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, lease_folder()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        waits()
        other.communicate()
    (told,) = caplog.messages
    assert told.startswith("fsdp2 waits for 2 of 2 GPUs; leased are GPU-a by process ")
    assert f"GPU-b by process {other.pid}" in told
    gpus.give_back(own)


def test_a_run_that_is_stopped_gives_its_gpus_back(pool: Pool, tmp_path: Path) -> None:
    """Also the task that waits for a lease ends."""
    with ThreadPoolExecutor(2) as threads:
        runs = threads.submit(run, pool, "never_enter", tmp_path, rank=0, size=2)
        while not pool.phase():
            time.sleep(0.01)
        waits = threads.submit(run, pool, "visible", tmp_path)
        pool.abort()
    assert runs.result().state == "failed"
    assert waits.result().state == "failed"
    assert holders(GPUS, lease_folder()) == ""


CONTROLLER = """\
import sys
from pathlib import Path
from conformance.runtime.leased_slots import Gpus
from conformance.runtime import Pool, WorkerGroupConfig
here = Path(sys.argv[1])
pool = Pool(work_dir=here, slots=Gpus(("GPU-a",), work_dir=here))
config = WorkerGroupConfig(size=1, device="cpu", preload=("worker_group_tasks",))
kwargs = {"of": 2, "folder": sys.argv[1] + "/met"}
pool.run(key="x", config=config, task="worker_group_tasks:meet", kwargs=kwargs, log_dir=Path(sys.argv[1]), budget_s=60)
"""


@pytest.mark.exhaustive
def test_a_gpu_of_a_killed_controller_is_free_when_its_ranks_are_gone(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(absolute_path())}
    with contextlib.ExitStack() as stack:
        controller = subprocess.Popen([sys.executable, "-c", CONTROLLER, str(tmp_path)], env=environment)
        stack.callback(controller.kill)
        met = tmp_path / "met"
        while not met.is_dir() or not list(met.iterdir()):
            assert controller.poll() is None
            time.sleep(0.05)
        rank = int(next(met.iterdir()).name)
        forkserver = _parent(rank)
        for pid in (rank, forkserver):  # they are stopped, so they would end with nobody
            stack.callback(signal_process, pid, signal.SIGKILL)
        os.kill(rank, signal.SIGSTOP)  # it does not see the controller's death, as one that hangs in a driver
        os.kill(forkserver, signal.SIGSTOP)
        controller.kill()
        controller.wait()
        ticket = Ticket(GPUS, 2, folder=lease_folder())
        assert ticket.serve() is None
        os.kill(rank, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while (lease := ticket.serve()) is None:  # its threads end one after another
            assert time.monotonic() < deadline
            time.sleep(0.05)
        lease.release()


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# --- ranks that share a GPU ---


def on_shares(slots: tuple[str, ...], folder: Path) -> Pool:
    return Pool(work_dir=folder / "worlds", slots=Gpus(slots, work_dir=folder / "worlds"))


def test_ranks_that_share_a_gpu_see_it_once_and_have_a_host_each(tmp_path: Path) -> None:
    """A GPU with two shares: a task of two ranks gets both, and two tasks of one rank run side by side."""
    with on_shares(shares_of(GPUS[:1], 2), tmp_path) as pool:
        assert results(run(pool, "slot", tmp_path, size=2)) == [
            ["GPU-a", "0", "GPU-a#0"],
            ["GPU-a", "0", "GPU-a#1"],
        ]
        folder = str(tmp_path / "met")
        with ThreadPoolExecutor(2) as threads:
            met = [threads.submit(run, pool, "meet", tmp_path, of=2, folder=folder) for _ in range(2)]
        assert [results(one.result())[0][0] for one in met] == ["GPU-a", "GPU-a"]
        assert results(run(pool, "slot", tmp_path)) == [["GPU-a", "0", ""]]


def test_ranks_that_have_a_gpu_each_are_told_as_ever_though_others_share_it(tmp_path: Path) -> None:
    with on_shares(("GPU-a#1", "GPU-b#0", "GPU-a#0"), tmp_path) as pool:
        assert results(run(pool, "slot", tmp_path, size=2)) == [["GPU-a,GPU-b", own, ""] for own in ("0", "1")]
        found = results(run(pool, "slot", tmp_path, size=3))
    assert found == [["GPU-a,GPU-b", own, host] for own, host in (("0", "GPU-a#1"), ("1", "GPU-a#0"), ("0", "GPU-a#0"))]


def test_too_few_places_say_how_ranks_would_have_one(tmp_path: Path) -> None:
    for each, what in ((1, "2 GPUs"), (2, "4 shares of GPUs")):
        with on_shares(shares_of(GPUS, each), tmp_path) as pool:
            said = run(pool, "nothing", tmp_path, size=5).reason
        assert said == f"5 ranks, and there are {what}; --ranks-per-gpu 3 lets 3 ranks share a GPU"


# --- cells ---


def cell_of(layout: str, seed: int, backend: str = "plain_backend:Plain") -> Cell:
    entry = BackendEntry(name="plain", target=backend)
    return make_cell("sft-sgd", "llama", layout, "exact", backend=entry, seed=seed, steps=1, rows=12)


@pytest.mark.exhaustive
def test_cells_run_side_by_side_the_largest_first(tmp_path: Path) -> None:
    """Three cells of one GPU and one of both, on two GPUs: while a cell is judged, another one computes."""
    cells = [cell_of("dp1", 0), cell_of("dp1", 1), cell_of("dp2", 0), cell_of("dp1", 2)]
    done: list[JudgedCell] = []
    threads: set[str] = set()

    def progress(judged: JudgedCell) -> None:
        done.append(judged)
        threads.update(thread.name for thread in threading.enumerate() if thread.name.startswith("GPU-"))

    with Session(SessionConfig(out=tmp_path / "out", gpus=GPUS, budget_s=60)) as session:
        session.run_all(cells, progress=progress)
    assert [judged.verdict.state for judged in done] == ["conforms"] * 4, [judged.verdict.reason for judged in done]
    assert {judged.cell for judged in done} == set(cells)
    leased = read_output_json(tmp_path / "out" / "summary.json")["leased"]
    assert leased.keys() == set(GPUS)
    assert all(0.01 < share < 1 for share in leased.values())
    assert threads == {"GPU-a-GPU-b_0", "GPU-a_0", "GPU-b_0"}
    assert holders(GPUS, lease_folder()) == ""


RUN = """\
import sys
from pathlib import Path
from conftest import make_cell
from conformance.runner.session import Session
from conformance.runner.placement import SessionConfig
models = ("pangu", "llama") if sys.argv[2] == "first" else ("qwen3", "gemma3")
cells = [make_cell("sft-packed", model, "dp2", "fp32", steps=1, rows=6) for model in models]
with Session(SessionConfig(out=Path(sys.argv[1]) / sys.argv[2], gpus=("GPU-a", "GPU-b"), budget_s=120)) as session:
    for cell in cells:
        verdict = session.run(cell).verdict
        assert verdict.state == "conforms", verdict.reason
"""


@pytest.mark.exhaustive
def test_two_runs_at_once_use_the_same_gpus_in_turn(tmp_path: Path) -> None:
    """Each of their cells wants both GPUs, and no GPU is ever seen to be leased by both."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(absolute_path())}
    commands = [[sys.executable, "-c", RUN, str(tmp_path), name] for name in ("first", "second")]
    runs = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    seen = set[int]()
    while any(one.poll() is None for one in runs):
        having = leases_by_process(GPUS, lease_folder())
        assert len(having) < 2 or not set.intersection(*having.values()), having
        seen |= having.keys()
        time.sleep(0.02)
    assert [one.returncode for one in runs] == [0, 0], [one.communicate()[1] for one in runs]
    assert seen == {one.pid for one in runs}
    assert leases_by_process(GPUS, lease_folder()) == {}


def test_all_blocks_share_one_import_without_leases(pool: Pool, tmp_path: Path) -> None:
    """So that no GPU is leased meanwhile, and a backend is imported once."""
    for size in (2, 1, 3):  # three ranks have no slot here
        pool.prepare(group_config(size=size))
    with ThreadPoolExecutor(2) as threads:
        ran = [threads.submit(run, pool, "pids", tmp_path) for _ in GPUS]
    ranks = [results(one.result())[0]["rank"] for one in ran]
    assert len({_parent(rank) for rank in ranks}) == 1
    assert len(list(tmp_path.rglob("forkserver-*.log"))) == 1
    assert holders(GPUS, lease_folder()) == ""


def test_idle_groups_of_a_block_are_few(pool: Pool, tmp_path: Path) -> None:
    """Every idle rank keeps a context on its GPU; with large models (test_leased_oracles) one group is kept."""

    def pid(key: str) -> int:
        rank = results(run(pool, "pids", tmp_path, key=key, size=2))[0]["rank"]
        assert isinstance(rank, int)
        return rank

    pids = [pid(key) for key in "abc"]
    assert [pid(key) for key in "abc"] == pids
    pid("d")
    assert is_dead_soon(pids[0])  # the one that was idle longest
    assert [pid(key) for key in "bc"] == pids[1:]


def test_a_task_alone_waits_for_all_and_ends_idle_groups(pool: Pool, tmp_path: Path) -> None:
    met = tmp_path / "met"
    with ThreadPoolExecutor(3) as threads:
        beside = [threads.submit(run, pool, "meet", tmp_path, of=3, folder=str(met)) for _ in GPUS]
        wait_for(lambda: met.is_dir() and len(list(met.iterdir())) == 2)
        alone = threads.submit(run, pool, "pids", tmp_path, alone=True)
        wait_for(lambda: any(lease_folder().glob("*.ticket")))
        assert not alone.done()
        (met / "the test").touch()
    assert {one.result().state for one in (*beside, alone)} == {"done"}
    assert all(is_dead_soon(results(one.result())[0][1]) for one in beside)


def test_a_rank_that_dies_harms_no_task_beside_it(pool: Pool, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        beside = threads.submit(run, pool, "meet", tmp_path, of=2, folder=str(tmp_path / "met"))
        killed = threads.submit(run, pool, "signal_self", tmp_path, rank=0, number=9)
        assert killed.result().kind == "killed"
        (tmp_path / "met").mkdir(exist_ok=True)
        (tmp_path / "met" / "the test").touch()
    assert beside.result().state == "done"


@pytest.mark.parametrize(
    ("adapter", "state", "reason", "where"),
    [
        ("KilledAlways", "infrastructure", "rank 0 was killed by SIGKILL", {"gpus": GPUS}),
        ("KilledOnce", "conforms", "rank 0 was killed by SIGKILL", {"gpus": shares_of(GPUS, 2)}),  # two cells on each
        ("FullOnce", "conforms", "rank 0 ran out of memory", {"gpus": shares_of(GPUS, 2)}),
        ("KilledOnce", "conforms", "rank 0 was killed by SIGKILL", {"lanes": 2}),
        ("RaisesOnce", "conforms", "expected scalar type Double but found Float", {"gpus": shares_of(GPUS, 2)}),
    ],
)
def test_a_failure_is_tried_again_once_and_told(
    adapter: str, state: str, reason: str, where: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone where memory was shared and may have been scarce, on a GPU or on processors; not after an error of code,
    because the others would wait. The verdict says that it had failed before."""
    monkeypatch.setenv("KILLED", str(tmp_path / "killed"))
    ran = list[bool]()
    run_alone = Pool.run

    def counted(pool: Pool, **call: Any) -> Outcome:
        if call["key"] != "oracle":
            ran.append(call.get("alone", False))
        return run_alone(pool, **call)

    monkeypatch.setattr(Pool, "run", counted)
    with Session(SessionConfig(out=tmp_path / "out", budget_s=60, **where)) as session:
        cell = cell_of("dp1", 0, f"plain_variants:{adapter}")
        assert session.run(cell).verdict.state == state
        entry = read_entry(session.folder(cell) / "verdict.json")
    assert entry.before == ("infrastructure",)
    assert entry.other is not None
    assert reason in entry.other.verdict.reason
    assert ran == [False, where != {"gpus": GPUS} and adapter != "RaisesOnce"]
