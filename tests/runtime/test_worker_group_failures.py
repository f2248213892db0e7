"""Worker groups: whatever happens to a rank, its task ends in time with the right cause, nothing is left, the next task
runs.

Every failure here is real: real signals, real hangs in real collectives, a real memory limit.
"""

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_group_helpers import BUDGET_S, Runner, is_gone, results

from conformance.runtime import Pool, watchdog
from conformance.runtime.failure import Failure, first_cause


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(work_dir=tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture
def run(pool: Pool, tmp_path: Path) -> Runner:
    return Runner(pool, tmp_path)


@pytest.fixture
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the second that the other ranks get to report: these tests are about ranks that have nothing to say."""
    monkeypatch.setattr(watchdog, "GRACE_S", 0.2)


@pytest.mark.usefixtures("_short_grace")
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
            "rank 1 is in signal_self (worker_group_tasks.py:",
        ),
        (
            "leave",
            {"status": 3},
            "exited",
            "rank 1 exited with status 3 during 'step 1'",
            "end of rank-1.log:\n    about to leave",
        ),
        (
            "leave",
            {"status": 0},
            "exited",
            "rank 1 exited with status 0 during 'step 1'",
            "end of rank-1.log:\n    about to leave",
        ),
        (
            "fail",
            {},
            "raised",
            "rank 1 raised during 'step 1': ArithmeticError: the loss is not a number",
            "rank 0 is in a collective called from _step (worker_group_tasks.py:",
        ),
        (
            "cut_connection",
            {},
            "exited",
            "rank 1 closed its connection to the controller during 'cuts'",
            "rank 0 is in cut_connection (worker_group_tasks.py:",
        ),
        (
            "send_garbage",
            {},
            "exited",
            "rank 1 sent garbage to the controller during 'babbles': b'this is no message'",
            "rank 0 is in send_garbage (worker_group_tasks.py:",
        ),
    ],
    ids=["sigkill", "sigsegv", "sigstop", "exit", "exit-0", "exception", "cut", "garbage"],
)
def test_a_failure_ends_its_task_at_once(
    run: Runner, task: str, kwargs: dict[str, Any], kind: str, first_line: str, also: str
) -> None:
    before = run.pids()
    outcome = run(task, rank=1, **kwargs)
    assert (outcome.state, outcome.kind, outcome.rank) == ("failed", kind, 1)
    assert outcome.reason.splitlines()[0] == first_line
    assert also in outcome.reason
    assert outcome.seconds < 5 < BUDGET_S
    assert all(is_gone(pid) for pid in before)
    assert set(run.pids()).isdisjoint(before)


@pytest.mark.usefixtures("_short_grace")
def test_a_rank_out_of_memory_is_told_from_one_that_raised(run: Runner) -> None:
    """Idle worker groups are ended as well: their memory is what the next attempt needs."""
    limit = 512 << 20
    before = [*run.pids(memory=limit), *run.pids(key="idle")]
    outcome = run("eat_memory", rank=1, memory=limit)
    assert (outcome.state, outcome.kind, outcome.rank) == ("failed", "out of memory", 1)
    assert "rank 1 ran out of memory during 'eats': RuntimeError" in outcome.reason
    assert outcome.seconds < 5 < BUDGET_S
    assert all(is_gone(pid) for pid in before)
    assert run.pids(memory=limit)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", "out of memory"),
        ("NCCL error: unhandled cuda error. Last error:\nCuda failure 2 'out of memory'", "out of memory"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out of memory"),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "out of memory"),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasGemmEx(handle)`", "raised"),
        ("Triton Error [CUDA]: out of memory", "out of memory"),
        ("NCCL WARN Failed to CUDA calloc 4194304 bytes", "out of memory"),
        ("CUDA error: an illegal memory access was encountered", "raised"),
    ],
)
def test_what_libraries_say_without_memory_is_told_as_that(run: Runner, said: str, kind: str) -> None:
    """Where nothing is left of a GPU, not even for a context or a communicator, no error has a class of its own."""
    outcome = run("fail", rank=1, said=said)
    assert (outcome.state, outcome.kind, outcome.rank) == ("failed", kind, 1)


def test_a_rank_that_never_enters_a_collective_is_named(run: Runner, tmp_path: Path) -> None:
    """All ranks are in the same phase; the stacks tell which one the others wait for."""
    before = run.pids()
    outcome = run("never_enter", rank=1, budget_s=0.5)
    assert (outcome.kind, outcome.rank) == ("hung", 1)
    said = r"rank 1 hung during 'step 1': no progress for [0-9.]+ s, and the budget is 0\.5 s \(--budget\)"
    assert re.match(said, outcome.reason.splitlines()[0])
    assert "rank 0 is in a collective called from never_enter (worker_group_tasks.py:" in outcome.reason
    assert "stacks: rank-0.stacks, rank-1.stacks" in outcome.reason
    group = "  collectives of group 0 default_pg: "
    counted = re.search(rf"{group}rank 0 at (\d+) \(gloo:(\w+)\), rank 1 at (\d+) \(", outcome.reason)
    assert counted, outcome.reason
    assert int(counted[1]) == int(counted[3]) + 1
    assert counted[2] == "all_reduce"
    for rank in range(2):
        assert "in never_enter" in (tmp_path / f"rank-{rank}.stacks").read_text()
    assert 0.5 < outcome.seconds < 2.5
    assert all(is_gone(pid) for pid in before)
    assert run.pids()


def test_a_rank_whose_collective_is_awaited_outside_of_collectives_is_named(run: Runner) -> None:
    """By their stacks, all ranks may be the one that hangs; the flight recorder tells who entered fewer collectives."""
    outcome = run("never_arrive", rank=1, budget_s=1.0)
    assert (outcome.kind, outcome.rank) == ("hung", 1), outcome.reason
    assert outcome.reason.startswith("rank 1 hung during 'step 1'")
    assert "rank 0 is in _ask_until_done (worker_group_tasks.py:" in outcome.reason
    assert re.search(r"  collectives of group 0 default_pg: rank 0 at 2 .*, rank 1 at 1 ", outcome.reason)


def test_collectives_of_an_earlier_group_of_the_same_name_do_not_count(run: Runner) -> None:
    results(run("speak_in_a_group"))
    outcome = run("never_arrive", rank=1, alone=True, budget_s=1.0)
    assert (outcome.kind, outcome.rank) == ("hung", 1), outcome.reason
    assert re.search(r"  collectives of group \w+: rank 0 at 1 .*, rank 1 at 0 \(none\)", outcome.reason)


def test_what_a_rank_has_forgotten_is_not_what_it_has_never_entered(run: Runner) -> None:
    outcome = run("forget_a_group", rank=1, budget_s=1.0)
    assert (outcome.kind, outcome.rank) == ("hung", 1), outcome.reason
    assert outcome.reason.count("  collectives of group ") == 1


@pytest.mark.parametrize(
    ("task", "size", "hung", "groups"),
    [
        ("wait_in_a_chain", 3, 2, 2),
        ("fall_apart", 3, 2, 1),
        ("hang_before_sending", 4, 1, 2),
        ("send_nothing", 3, 2, 1),
    ],
)
def test_a_rank_that_waits_for_another_one_is_not_named(
    run: Runner, task: str, size: int, hung: int, groups: int
) -> None:
    """Neither stacks nor collectives alone would tell: who polls is in none, and who receives has entered fewer."""
    outcome = run(task, size=size, budget_s=1.0)
    assert (outcome.kind, outcome.rank) == ("hung", hung), outcome.reason
    assert outcome.reason.startswith(f"rank {hung} hung during")
    assert outcome.reason.count("  collectives of group ") == groups


@pytest.mark.parametrize("task", ["get_on", "compute"])
def test_a_task_that_gets_on_has_longer_than_its_budget(run: Runner, task: str) -> None:
    assert results(run(task, seconds=2.0, budget_s=0.8)) == ["done", "done"]


def test_ranks_that_only_compute_have_four_budgets(run: Runner, tmp_path: Path) -> None:
    outcome = run("compute", key="has never spoken", seconds=100, budget_s=0.8)
    assert (outcome.kind, outcome.rank) == ("hung", 1)
    assert 4 * 0.8 < outcome.seconds < 10
    recorded = [file.name for file in tmp_path.glob("*.flight*")]
    assert recorded == ["rank-0.flight.json"], "and nothing of the rank that computes"


def test_a_task_that_gets_on_for_ever_has_twelve_budgets(run: Runner) -> None:
    outcome = run("get_on", seconds=100, budget_s=0.2)
    assert (
        "hung during 'step 2': not done within 12 times the budget of 0.2 s (--budget)"
        in outcome.reason.splitlines()[0]
    )
    assert 12 * 0.2 < outcome.seconds < 6


def test_a_hang_is_told_with_the_longest_phase_before_it(run: Runner) -> None:
    """By which one sees whether the budget is too short."""
    outcome = run("slow_then_hang", seconds=1.0, budget_s=1.5)
    longest = re.search(r"the longest phase before, 'step 1', took ([0-9.]+) s", outcome.reason.splitlines()[0])
    assert longest
    assert float(longest[1]) >= 1.0


def test_a_rank_whose_heartbeat_lags_is_named(run: Runner) -> None:
    """All ranks wait in a collective; the heartbeats tell who is behind."""
    outcome = run("lag_behind", size=4, rank=2, budget_s=0.5)
    assert (outcome.kind, outcome.rank) == ("hung", 2)
    assert outcome.reason.startswith("rank 2 hung during 'step 1'")
    assert outcome.seconds < 2.5


def test_hang_of_all_ranks_blames_none_and_ends_children(run: Runner, tmp_path: Path) -> None:
    """Even if nobody heeds SIGTERM."""
    forkserver = results(run("pids"))[0]["forkserver"]
    pid_dir = tmp_path / "pids"
    pid_dir.mkdir()
    outcome = run("hang_with_child", pid_dir=str(pid_dir), new_session=False, budget_s=0.5)
    assert (outcome.kind, outcome.rank) == ("hung", None)
    assert outcome.reason.startswith("ranks 0, 1 hung during 'hangs'")
    started = {int(file.name) for file in pid_dir.iterdir()}
    assert len(started) == 5
    assert [pid for pid in started if not is_gone(pid)] == [forkserver]


def test_a_death_that_is_reported_late_is_still_the_cause(run: Runner) -> None:
    outcome = run("hear_of_a_death_first")
    assert (outcome.kind, outcome.rank) == ("killed", 1)
    assert "then rank 0 raised during 'step 1': RuntimeError: Connection reset by peer" in outcome.reason


def test_the_first_failure_that_is_no_echo_is_the_cause() -> None:
    echo = Failure(rank=0, kind="raised", what="", detail="[gloo] Connection closed by peer [127.0.0.1]:4")
    error = Failure(rank=1, kind="raised", what="", detail="ValueError: no")
    later = Failure(rank=2, kind="raised", what="", detail="ValueError: no")
    death = Failure(rank=3, kind="killed", what="")
    forkserver = Failure(rank=None, kind="killed", what="")
    assert first_cause([echo]) is echo
    assert first_cause([echo, error, later]) is error
    assert first_cause([echo, error, death]) is death
    assert first_cause([echo, error, death, forkserver]) is forkserver


def test_a_result_that_is_not_json_is_the_tasks_error(run: Runner) -> None:
    outcome = run("return_an_object")
    assert outcome.kind == "raised"
    assert "a task has to return JSON values" in outcome.reason


@pytest.mark.usefixtures("_short_grace")
def test_a_failed_worker_group_takes_no_other_worker_group_with_it(run: Runner) -> None:
    four = run.pids(size=4)
    run("fail", rank=0, size=2)
    assert run.pids(size=4) == four


@pytest.mark.usefixtures("_short_grace")
def test_a_fresh_worker_group_that_fails_is_retired_as_any_other(run: Runner) -> None:
    outcome = run("fail", rank=0, fresh=True)
    assert (outcome.kind, outcome.rank) == ("raised", 0)
    assert results(run("remember", text="alone")) == [["alone"]] * 2


def test_an_interrupted_task_leaves_no_rank_and_a_pool_that_works(run: Runner) -> None:
    before = run.pids()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(KeyboardInterrupt):
        run("never_enter", rank=0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    assert all(is_gone(pid) for pid in before)
    assert run.pids()
