"""Worker groups that a host has no room for: one clear line, nothing left behind, and the next task runs."""

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_group_helpers import Runner, is_gone, no_descriptor_left, results

from conformance.core.process import open_files
from conformance.runtime import Pool, WorkerGroupConfig
from conformance.runtime.worker_groups import MOST_RANKS

ADVICE = "; use a smaller layout, or a host that allows more processes, open files and memory"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(work_dir=tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture
def run(pool: Pool, tmp_path: Path) -> Runner:
    return Runner(pool, tmp_path)


def test_a_worker_group_that_no_host_starts_is_one_line(run: Runner) -> None:
    before = run.pids()
    outcome = run("nothing", size=MOST_RANKS + 1)
    assert (outcome.state, outcome.used) == ("failed", False)
    assert outcome.reason == f"this host cannot start 249 ranks: one host starts at most 248{ADVICE}"
    assert run.pids() == before


def test_too_few_open_files_are_one_line_and_the_pool_goes_on(run: Runner) -> None:
    ranks = run.pids()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files().total() + 20, limits[1]))
    with no_descriptor_left():
        try:
            outcome = run("nothing", size=64)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert outcome.reason == f"this host cannot start 64 ranks: Too many open files{ADVICE}"
    assert run.pids() == ranks


def test_start_at_process_limit_fails_and_ends_started_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "few_processes.py").write_text(
        "import errno, os\n"
        "fork, forked = os.fork, []\n"
        "def limited():\n"
        "    if len(forked) == 2:\n"
        "        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n"
        "    forked.append(pid := fork())\n"
        f"    open({str(tmp_path)!r} + f'/{{pid}}.pid', 'w').close()\n"
        "    return pid\n"
        "os.fork = limited\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = WorkerGroupConfig(size=3, device="cpu", preload=("few_processes", "worker_group_tasks"))
    with Pool(work_dir=tmp_path / "pool") as pool:
        outcome = pool.run(
            key="test",
            config=config,
            task="worker_group_tasks:nothing",
            kwargs={},
            log_dir=tmp_path / "logs",
            budget_s=20.0,
        )
        reason = "this host cannot start 3 ranks: after 2, Resource temporarily unavailable"
        assert outcome.reason == reason + ADVICE
        started = [int(file.stem) for file in tmp_path.glob("*.pid") if file.stem != "0"]
        assert len(started) == 2
        until = time.monotonic() + 60  # they are ended beside whatever starts next
        while not all(is_gone(pid) for pid in started) and time.monotonic() < until:
            time.sleep(0.05)
        assert all(is_gone(pid) for pid in started)


def test_an_outcome_says_whether_its_ranks_had_run_a_task_before(run: Runner) -> None:
    outcomes = [run("nothing", fresh=True), run("nothing"), run("fail", rank=0), run("nothing")]
    assert [outcome.used for outcome in outcomes] == [False, True, True, False]
    assert results(outcomes[-1]) == [None, None]
