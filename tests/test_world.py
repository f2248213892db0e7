"""Worlds: whatever happens to a rank, its task ends in time with the right cause, nothing is left, the next task runs.

Every fault here is real: real signals, real hangs in real collectives, a real memory limit.
"""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.world import Outcome, Pool, WorldConfig, beat
from conformance.world.launch import ZygoteHandle
from conformance.world.process import process_state
from conformance.world.reason import Fault, first_cause
from conformance.world.watch import run_task

BUDGET_S = 20.0
Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(work_dir=tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture
def run(pool: Pool, tmp_path: Path) -> Run:
    """Run a task of world_tasks; logs go to tmp_path."""

    def run(
        task: str, *, size: int = 2, budget_s: float = BUDGET_S, memory: int | None = None, **kwargs: Any
    ) -> Outcome:
        return pool.run(
            key="test",
            config=config(size=size, memory_limit_bytes=memory),
            task=f"world_tasks:{task}",
            kwargs=kwargs,
            log_dir=tmp_path,
            budget_s=budget_s,
        )

    return run


def config(*, size: int, memory_limit_bytes: int | None = None) -> WorldConfig:
    return WorldConfig(size=size, device="cpu", preload=("world_tasks",), memory_limit_bytes=memory_limit_bytes)


def results(outcome: Outcome) -> list[Any]:
    assert outcome.state == "done", outcome.reason
    return outcome.results


def pids(run: Run, *, size: int = 2, memory: int | None = None) -> list[int]:
    return [result["rank"] for result in results(run("pids", size=size, memory=memory))]


def is_gone(pid: int) -> bool:
    """No such process, not even a zombie."""
    return process_state(pid) == ""


def is_dead_soon(pid: int) -> bool:
    """For a process whose zygote is gone: whoever adopts it reaps it, sooner or later."""
    deadline = time.monotonic() + 5
    while process_state(pid) not in ("", "Z") and time.monotonic() < deadline:
        time.sleep(0.02)
    return process_state(pid) in ("", "Z")


# --- what a good task gets ---


def test_every_rank_returns_its_result(run: Run) -> None:
    assert results(run("add", size=4, value=2.0)) == [{"rank": rank, "sum": 14.0} for rank in range(4)]


def test_ranks_stay_alive_between_tasks(run: Run) -> None:
    assert pids(run) == pids(run)


def test_worlds_of_two_sizes_come_from_one_zygote(run: Run) -> None:
    zygotes = {result["zygote"] for size in (1, 2, 4) for result in results(run("pids", size=size))}
    assert len(zygotes) == 1


def test_ranks_have_the_environment_that_trainers_read(run: Run) -> None:
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


def test_each_rank_and_task_has_its_own_log(pool: Pool, tmp_path: Path) -> None:
    for text in ("first", "second"):
        kwargs = {"text": text}
        outcome = pool.run(
            key="test",
            config=config(size=2),
            task="world_tasks:say",
            kwargs=kwargs,
            log_dir=tmp_path / text,
            budget_s=5,
        )
        results(outcome)
        for rank in range(2):
            said = (tmp_path / text / f"rank-{rank}.log").read_text()
            assert said.split() == f"{text} 1 {rank} {text} 2 {rank} {text} 3 {rank}".split()
        assert not list((tmp_path / text).glob("*.stacks"))


def test_a_task_does_not_inherit_the_default_dtype(run: Run) -> None:
    assert results(run("change_default_dtype")) == ["torch.float32"] * 2
    assert results(run("change_default_dtype")) == ["torch.float32"] * 2


def test_twenty_tasks_with_meshes_leak_nothing(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Nor does one suffer from what an earlier one left in DTensor's caches or in the store: the same ranks do all."""
    results(run("nothing", size=4))  # what a rank may hold is counted after its first task
    with caplog.at_level(logging.INFO):
        seen = [tuple(r["pid"] for r in results(run("tensor_parallel", size=4))) for _ in range(20)]
    assert len(set(seen)) == 1
    assert "retired" not in caplog.text


def test_a_leak_retires_the_world_after_its_task(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    before = pids(run)
    with caplog.at_level(logging.INFO):
        results(run("leak_files"))
    assert re.search(r"retired world .* it leaks: rank 0: open file descriptors \d+ -> \d+", caplog.text)
    assert all(is_gone(pid) for pid in before)
    assert set(pids(run)).isdisjoint(before)


def test_a_fresh_world_and_a_warm_task_cost_little(run: Run) -> None:
    """In processor time, which a loaded machine does not change: an import of torch alone costs more than a second."""
    before = pids(run)
    run("fail", rank=0)
    fresh = results(run("processor_seconds"))
    warm = results(run("processor_seconds"))
    assert set(pids(run)).isdisjoint(before)
    assert max(fresh) < 0.5
    assert max(later - earlier for earlier, later in zip(fresh, warm, strict=True)) < 0.1


# --- what goes wrong in a rank ---


@pytest.mark.parametrize(
    ("task", "kwargs", "kind", "first_line", "also"),
    [
        (
            "signal_self",
            {"number": signal.SIGKILL},
            "killed",
            "rank 1 was killed by SIGKILL (the out-of-memory killer, or somebody) during 'step 2'",
            "end of rank-1.log:\n    before the signal",
        ),
        (
            "signal_self",
            {"number": signal.SIGSEGV},
            "killed",
            "rank 1 was killed by SIGSEGV during 'step 2'",
            "Fatal Python error: Segmentation fault",
        ),
        (
            "signal_self",
            {"number": signal.SIGSTOP},
            "stopped",
            "rank 1 was stopped (SIGSTOP, or job control) during 'step 2'",
            "rank 1 is in signal_self (world_tasks.py:",
        ),
        (
            "leave",
            {},
            "exited",
            "rank 1 exited with status 3 during 'step 1'",
            "end of rank-1.log:\n    about to leave",
        ),
        (
            "fail",
            {},
            "raised",
            "rank 1 raised during 'step 1': ArithmeticError: the loss is not a number",
            "rank 0 is in a collective called from _step (world_tasks.py:",
        ),
        (
            "cut_connection",
            {},
            "exited",
            "rank 1 closed its connection to the controller during 'cuts'",
            "rank 0 is in cut_connection (world_tasks.py:",
        ),
        (
            "send_garbage",
            {},
            "exited",
            "rank 1 sent garbage to the controller during 'babbles': b'this is no message'",
            "rank 0 is in send_garbage (world_tasks.py:",
        ),
    ],
    ids=["sigkill", "sigsegv", "sigstop", "exit", "exception", "cut", "garbage"],
)
def test_a_fault_ends_its_task_at_once(
    run: Run, task: str, kwargs: dict[str, Any], kind: str, first_line: str, also: str
) -> None:
    before = pids(run)
    outcome = run(task, rank=1, **kwargs)
    assert (outcome.state, outcome.kind, outcome.rank) == ("failed", kind, 1)
    assert outcome.reason.splitlines()[0] == first_line
    assert also in outcome.reason
    assert outcome.seconds < 5 < BUDGET_S
    assert all(is_gone(pid) for pid in before)
    assert set(pids(run)).isdisjoint(before)


def test_a_rank_out_of_memory_is_told_from_one_that_raised(run: Run) -> None:
    limit = 512 << 20
    before = pids(run, memory=limit)
    outcome = run("eat_memory", rank=1, memory=limit)
    assert (outcome.state, outcome.kind, outcome.rank) == ("failed", "out of memory", 1)
    assert "rank 1 ran out of memory during 'eats': RuntimeError" in outcome.reason
    assert outcome.seconds < 5 < BUDGET_S
    assert all(is_gone(pid) for pid in before)
    assert pids(run, memory=limit)


def test_a_rank_that_never_enters_a_collective_is_named(run: Run, tmp_path: Path) -> None:
    """All ranks are in the same phase; the stacks tell which one the others wait for."""
    before = pids(run)
    outcome = run("never_enter", rank=1, budget_s=1.0)
    assert (outcome.kind, outcome.rank) == ("hung", 1)
    assert outcome.reason.splitlines()[0] == "rank 1 hung during 'step 1': not done within 1.0 s"
    assert "rank 0 is in a collective called from never_enter (world_tasks.py:" in outcome.reason
    assert "stacks: rank-0.stacks, rank-1.stacks" in outcome.reason
    for rank in range(2):
        assert "in never_enter" in (tmp_path / f"rank-{rank}.stacks").read_text()
    assert 1.0 < outcome.seconds < 3.0
    assert all(is_gone(pid) for pid in before)
    assert pids(run)


def test_a_rank_whose_heartbeat_lags_is_named(run: Run) -> None:
    """All ranks wait in a collective; the heartbeats tell who is behind."""
    outcome = run("lag_behind", size=4, rank=2, budget_s=1.0)
    assert (outcome.kind, outcome.rank) == ("hung", 2)
    assert outcome.reason.startswith("rank 2 hung during 'step 1'")
    assert outcome.seconds < 3.0


def test_no_rank_is_blamed_for_a_hang_that_all_share(run: Run, tmp_path: Path) -> None:
    outcome = run("hang_with_child", pid_dir=str(tmp_path), new_session=False, budget_s=0.5)
    assert (outcome.kind, outcome.rank) == ("hung", None)
    assert outcome.reason.startswith("ranks 0, 1 hung during 'hangs'")


def test_the_children_of_ranks_go_too_even_if_nobody_heeds_sigterm(run: Run, tmp_path: Path) -> None:
    zygote = results(run("pids"))[0]["zygote"]
    pid_dir = tmp_path / "pids"
    pid_dir.mkdir()
    run("hang_with_child", pid_dir=str(pid_dir), new_session=False, budget_s=0.5)
    started = {int(file.name) for file in pid_dir.iterdir()}
    assert len(started) == 5
    assert [pid for pid in started if not is_gone(pid)] == [zygote]


def test_a_death_that_is_reported_late_is_still_the_cause(run: Run) -> None:
    outcome = run("hear_of_a_death_first")
    assert (outcome.kind, outcome.rank) == ("killed", 1)
    assert "then rank 0 raised during 'step 1': RuntimeError: Connection reset by peer" in outcome.reason


def test_the_first_fault_that_is_no_echo_is_the_cause() -> None:
    echo = Fault(rank=0, kind="raised", what="", detail="[gloo] Connection closed by peer [127.0.0.1]:4")
    error = Fault(rank=1, kind="raised", what="", detail="ValueError: no")
    later = Fault(rank=2, kind="raised", what="", detail="ValueError: no")
    death = Fault(rank=3, kind="killed", what="")
    zygote = Fault(rank=None, kind="killed", what="")
    assert first_cause([echo]) is echo
    assert first_cause([echo, error, later]) is error
    assert first_cause([echo, error, death]) is death
    assert first_cause([echo, error, death, zygote]) is zygote


def test_a_result_that_is_not_json_is_the_tasks_error(run: Run) -> None:
    outcome = run("return_an_object")
    assert outcome.kind == "raised"
    assert "a task has to return JSON values" in outcome.reason


def test_a_failed_world_takes_no_other_world_with_it(run: Run) -> None:
    four = pids(run, size=4)
    run("fail", rank=0, size=2)
    assert pids(run, size=4) == four


def test_a_world_whose_idle_rank_died_is_replaced_before_the_next_task(run: Run) -> None:
    before = pids(run)
    os.kill(before[1], signal.SIGKILL)
    time.sleep(0.1)
    assert set(pids(run)).isdisjoint(before)


# --- what goes wrong around the ranks ---


def test_a_dead_zygote_takes_its_ranks_along_and_is_replaced_and_close_leaves_nothing(tmp_path: Path) -> None:
    fds = set(Path("/proc/self/fd").iterdir())
    work_dir = tmp_path / "work"
    with Pool(work_dir=work_dir) as own_pool:

        def task(name: str) -> Outcome:
            return own_pool.run(
                key="a/b",
                config=config(size=2),
                task=f"world_tasks:{name}",
                kwargs={},
                log_dir=tmp_path,
                budget_s=BUDGET_S,
            )

        first = results(task("pids"))
        outcome = task("kill_zygote")
        assert (outcome.kind, outcome.rank) == ("killed", None)
        assert "the process that ranks are forked from was killed by SIGKILL" in outcome.reason
        assert outcome.seconds < 5
        assert all(is_dead_soon(result["rank"]) for result in first)
        second = results(task("pids"))
        assert second[0]["zygote"] != first[0]["zygote"]
    assert all(is_gone(pid) for result in second for pid in result.values())
    assert set(Path("/proc/self/fd").iterdir()) == fds
    assert list(work_dir.iterdir()) == []


def test_a_module_that_cannot_be_preloaded_fails_the_task_with_its_traceback(tmp_path: Path) -> None:
    broken = WorldConfig(size=2, device="cpu", preload=("no_such_adapter",))
    with Pool(work_dir=tmp_path) as pool:
        outcome = pool.run(key="x", config=broken, task="m:f", kwargs={}, log_dir=tmp_path, budget_s=BUDGET_S)
    assert outcome.state == "failed"
    assert "No module named 'no_such_adapter'" in outcome.reason


SCRIPT = """
import sys, pathlib
from conformance.world import Pool, WorldConfig
here = pathlib.Path(sys.argv[1])
with Pool(work_dir=here) as pool:
    config = WorldConfig(size=2, device="cpu", preload=("world_tasks",))
    kwargs = {"pid_dir": str(here / "pids"), "new_session": True}
    pool.run(key="x", config=config, task="world_tasks:hang_with_child", kwargs=kwargs, log_dir=here, budget_s=1000)
"""


def test_nothing_outlives_a_controller_that_is_killed(tmp_path: Path) -> None:
    """Not even processes that a rank started in a session of their own; and a controller needs no stdin."""
    pid_dir = tmp_path / "pids"
    pid_dir.mkdir()
    shared_memory = set(Path("/dev/shm").iterdir())
    controller = subprocess.Popen(
        ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    while len(started := [int(file.name) for file in pid_dir.iterdir()]) < 5 and controller.poll() is None:
        time.sleep(0.05)
    assert len(started) == 5
    controller.kill()
    controller.wait()
    assert [pid for pid in started if not is_dead_soon(pid)] == []
    assert set(Path("/dev/shm").iterdir()) == shared_memory
    logs = {"rank-0.log", "rank-1.log", "rank-0.stacks", "rank-1.stacks", "zygote-x.log"}
    assert {file.name for file in tmp_path.iterdir() if file.is_file()} == logs


def test_an_interrupted_task_leaves_no_rank_and_a_pool_that_works(run: Run) -> None:
    before = pids(run)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(KeyboardInterrupt):
        run("never_enter", rank=0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert all(is_gone(pid) for pid in before)
    assert pids(run)


def test_started_ranks_do_as_forked_ranks_do(tmp_path: Path) -> None:
    """What a GPU's ranks do differently, but for NCCL: a zygote without torch starts them afresh."""
    zygote = ZygoteHandle(ranks="started", preload=(), log=tmp_path / "zygote.log")
    try:
        world = zygote.start_world(size=2, device="cpu", preload=("world_tasks",), memory_limit_bytes=None)
        for value in (1.0, 2.0):
            summed, leaks = run_task(
                world, task="world_tasks:add", kwargs={"value": value}, log_dir=tmp_path, budget_s=BUDGET_S
            )
            assert [result["sum"] for result in summed] == [2 * value + 1] * 2
            assert leaks == ""
        assert world.bury() == []
        assert all(is_gone(pid) for pid in world.pids)
    finally:
        zygote.close()


def test_a_module_that_starts_a_thread_costs_time_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text("import threading; threading.Thread(target=threading.Event().wait).start()")
    threaded = WorldConfig(size=2, device="cpu", preload=("world_tasks", "threaded"))
    sys.path.insert(0, str(tmp_path))
    try:
        with Pool(work_dir=tmp_path) as pool:
            outcome = pool.run(
                key="x", config=threaded, task="world_tasks:add", kwargs={"value": 1.0}, log_dir=tmp_path, budget_s=30
            )
            assert [result["sum"] for result in results(outcome)] == [3.0, 3.0]
            assert "importing threaded starts a thread" in (tmp_path / "zygote-x.log").read_text()
    finally:
        sys.path.remove(str(tmp_path))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_on_gpus(tmp_path: Path) -> None:
    two = WorldConfig(size=2, device="cuda", preload=("world_tasks",))
    with Pool(work_dir=tmp_path) as pool:
        for _ in range(2):
            outcome = pool.run(
                key="x", config=two, task="world_tasks:tensor_parallel", kwargs={}, log_dir=tmp_path, budget_s=60
            )
            results(outcome)
        outcome = pool.run(
            key="x", config=two, task="world_tasks:never_enter", kwargs={"rank": 1}, log_dir=tmp_path, budget_s=5
        )
        assert (outcome.kind, outcome.rank) == ("hung", 1), outcome.reason


# --- wrong calls ---


def test_wrong_calls_say_what_to_change(pool: Pool, tmp_path: Path) -> None:
    def call(device: Any = "cpu", task: str = "m:f", kwargs: dict[str, Any] | None = None, size: int = 2) -> None:
        wrong = WorldConfig(size=size, device=device, preload=())
        pool.run(key="x", config=wrong, task=task, kwargs=kwargs or {}, log_dir=tmp_path, budget_s=1)

    with pytest.raises(ValueError, match="needs at least one"):
        call(size=0)
    with pytest.raises(ValueError, match=r"not of the form package\.module:function"):
        call(task="m.f")
    with pytest.raises(ValueError, match="have to be JSON values"):
        call(kwargs={"x": object()})
    with pytest.raises(ValueError, match=r"needs 99 GPUs, .* widen CUDA_VISIBLE_DEVICES"):
        call(device="cuda", size=99)


def test_a_heartbeat_outside_a_world_is_ignored() -> None:
    beat("step 1")
