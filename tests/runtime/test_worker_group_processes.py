"""Worker groups: the processes around the ranks, which are forkservers and controllers, and ranks that are not
forked."""

import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from worker_group_helpers import BUDGET_S, Runner, is_dead_soon, is_gone, no_descriptor_left, results

from conformance.core import process
from conformance.core.process import import_uncollected, process_state
from conformance.runtime import Pool, WorkerGroupConfig, forkserver, preload_server
from conformance.runtime.failure import StartError
from conformance.runtime.forkserver_client import Forkservers


def test_dead_forkserver_ends_ranks_and_is_replaced(tmp_path: Path) -> None:
    with Pool(work_dir=tmp_path / "before") as before:
        Runner(before, tmp_path)("pids")  # from now on there is a preload server, which serves all pools
    work_dir = tmp_path / "work"
    with no_descriptor_left():
        with Pool(work_dir=work_dir) as pool:
            run = Runner(pool, tmp_path)
            first = results(run("pids"))
            outcome = run("kill_forkserver")
            assert (outcome.kind, outcome.rank) == ("killed", None)
            assert "the process that ranks are forked from was killed by SIGKILL" in outcome.reason
            assert outcome.seconds < 5
            assert all(is_dead_soon(result["rank"]) for result in first)
            second = results(run("pids"))
            assert second[0]["forkserver"] != first[0]["forkserver"]
        assert all(is_gone(pid) for result in second for pid in result.values())
    assert list(work_dir.iterdir()) == []


@pytest.mark.parametrize("ends", ["with its task", "with its forkserver"])
def test_nothing_of_a_worker_group_outlives_it(tmp_path: Path, ends: str) -> None:
    """Neither a process that has left session and parent, nor a file in its temporary folders."""
    with Pool(work_dir=tmp_path / "work") as pool:
        run = Runner(pool, tmp_path)
        other = results(run("leave_a_daemon", size=1, key="other"))[0]["daemon"]
        (left,) = results(run("leave_a_daemon", size=1, keep=ends != "with its task"))
        if ends == "with its forkserver":
            run("kill_forkserver", size=1)
            assert is_dead_soon(left["daemon"])
            return
        assert is_gone(left["daemon"])
        assert not is_gone(other), "the daemon of a live worker group"
        assert left["seen"] == [True, True]
        assert not Path(left["temporary"]).parent.exists()
        if left["private"]:
            assert not Path("/dev/shm/left-by-a-task").exists()
    assert is_gone(other)


def test_the_forkservers_of_all_pools_are_forked_from_one_process(tmp_path: Path) -> None:
    forkserver_client = []
    for name in ("one", "other"):
        with Pool(work_dir=tmp_path / name) as pool:
            forkserver_client.append(results(Runner(pool, tmp_path)("pids"))[0]["forkserver"])
            assert forkserver_client[-1] in children_of(preload_server_of(os.getpid()))
    assert forkserver_client[0] != forkserver_client[1]


@pytest.fixture
def stopped_preload_server(tmp_path: Path) -> Iterator[int]:
    """The pid of this process's preload server, which receives nothing, as one that still imports torch from a slow
    disk."""
    with Pool(work_dir=tmp_path / "before") as before:
        Runner(before, tmp_path)("pids")
    pid = preload_server_of(os.getpid())
    os.kill(pid, signal.SIGSTOP)
    while process_state(pid) != "T":
        time.sleep(0.01)
    yield pid
    os.kill(pid, signal.SIGCONT)


WORLD = WorkerGroupConfig(size=1, device="cpu", preload=("json",))


def test_all_places_of_a_host_ask_a_preload_server_that_still_imports_for_forkservers(
    stopped_preload_server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen shares of GPUs ask for one each, and with them goes the environment, which is long on many hosts."""
    monkeypatch.setenv("LONG", "x" * 20_000)
    slots = [Forkservers(tmp_path) for _ in range(16)]
    with monkeypatch.context() as impatient:
        impatient.setattr(process, "START_LIMIT_S", 0.0)  # a request that cannot be sent at once is an error
        made = [each.of(WORLD) for each in slots]
    os.kill(stopped_preload_server, signal.SIGCONT)
    for each, handle in zip(slots, made, strict=True):
        handle.wait_until_ready()
        each.close()


def test_a_request_waits_for_room_until_the_preload_server_reads(stopped_preload_server: int, tmp_path: Path) -> None:
    fill_socket()
    timer = threading.Timer(0.5, os.kill, (stopped_preload_server, signal.SIGCONT))
    timer.start()
    slot = Forkservers(tmp_path)
    slot.of(WORLD).wait_until_ready()
    slot.close()
    timer.join()


@pytest.mark.usefixtures("stopped_preload_server")
def test_a_preload_server_that_reads_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_socket()
    monkeypatch.setattr(process, "START_LIMIT_S", 0.1)
    with pytest.raises(StartError, match=r"reads no requests: for 0\.\d+ s it has neither computed nor read files"):
        Forkservers(tmp_path).start(WORLD)
    Forkservers(tmp_path).prepare(WORLD)  # raises nothing: whoever wants the worker group is told


def fill_socket() -> None:
    """Send the stopped preload server signals for nobody, until its socket takes no more."""
    assert preload_server._preload_server is not None
    while preload_server._preload_server.wire.send({"do": "signal", "fork": -1, "signal": 0}, limit_s=0.0):
        pass


def preload_server_of(controller: int) -> int:
    """The pid of a process's preload server."""
    children = children_of(controller)
    (found,) = [
        pid for pid in children if b"conformance.runtime.preload_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found


def children_of(parent: int) -> list[int]:
    threads = Path(f"/proc/{parent}/task").iterdir()
    return [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]


OWN = """
import json, os, sys, threading
from pathlib import Path
from conformance.runtime import Pool, WorkerGroupConfig, preload_server
if sys.argv[1] == "beside a thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
before = dict(os.environ)
preload_server.fork_ahead(())
assert dict(os.environ) == before
with Pool(work_dir=Path("work")) as pool:
    config = WorkerGroupConfig(size=1, device="cpu", preload=("worker_group_tasks",))
    outcome = pool.run(key="", config=config, task="worker_group_tasks:surroundings", kwargs={}, log_dir=Path("logs"),
                       budget_s=60)
process = preload_server._preload_server._process
print(json.dumps([type(process).__name__, *outcome.results]), outcome.reason)
"""


def test_forked_preload_server_leaves_nothing_of_its_controller_to_ranks(tmp_path: Path) -> None:
    """A rank finds the same in a fork of the controller as below a preload server that was started."""
    read_end, write_end = os.pipe()
    found = {}
    for how in ("alone", "beside a thread"):
        (folder := tmp_path / how).mkdir()
        done = subprocess.run(
            [sys.executable, "-c", OWN, how],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "2"},
            pass_fds=[write_end],
            capture_output=True,
            text=True,
            check=True,
        )
        kind, own = json.loads(done.stdout)
        assert own.pop("session") == own.pop("server"), "Ctrl-C would reach it"
        assert "written at once" in (folder / "logs" / "rank-0.log").read_text()
        found[kind] = own
    os.close(read_end)
    os.close(write_end)
    assert found["_ForkOfController"] == found["Popen"]
    assert found["Popen"]["threads"] == 1
    assert found["Popen"]["blocks that malloc maps"] == 0


def test_controller_is_forked_whatever_limit_of_malloc_its_user_sets(tmp_path: Path) -> None:
    """glibc has read it when the controller began. A limit that is no number made the fork end at once."""
    limits = {"MALLOC_TRIM_THRESHOLD_": "", "MALLOC_MMAP_THRESHOLD_": "131072k"}
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", OWN, "alone"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **path, **limits}, capture_output=True, check=True)
    assert json.loads(done.stdout)[0] == "_ForkOfController"


LOSING = """
import os, signal, sys
from conformance.runtime import preload_server
class Losing:
    def find_spec(self, name, path=None, target=None):
        if name == "losing":
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                pass  # as in the imports of torch, whose code in C clears exceptions
sys.meta_path.insert(0, Losing())
preload_server.COMMON = ("losing",)
preload_server.fork_ahead(())
print("goes on")
"""


def test_interrupt_that_an_import_loses_ends_the_run() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", LOSING], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "parity: interrupted\n")


def test_a_module_that_cannot_be_preloaded_fails_the_task_with_its_traceback(tmp_path: Path) -> None:
    broken = WorkerGroupConfig(size=2, device="cpu", preload=("no_such_adapter",))
    with Pool(work_dir=tmp_path) as pool:
        outcome = pool.run(key="x", config=broken, task="m:f", kwargs={}, log_dir=tmp_path, budget_s=BUDGET_S)
    assert outcome.state == "failed"
    assert "No module named 'no_such_adapter'" in outcome.reason


SCRIPT = """
import sys, pathlib
from conformance.runtime import Pool, WorkerGroupConfig
from conformance.runtime.preload_server import fork_ahead
here = pathlib.Path(sys.argv[1])
if sys.argv[2] == "forked":
    fork_ahead(())
with Pool(work_dir=here) as pool:
    config = WorkerGroupConfig(size=2, device="cpu", preload=("worker_group_tasks",))
    kwargs = {"pid_dir": str(here / "pids"), "new_session": True}
    task = "worker_group_tasks:hang_with_child"
    pool.run(key="x", config=config, task=task, kwargs=kwargs, log_dir=here, budget_s=1000)
"""


@pytest.mark.parametrize("preload_server", ["started", "forked"])
def test_nothing_outlives_a_controller_that_is_killed(tmp_path: Path, preload_server: str) -> None:
    """Not even processes that a rank started in a session of their own; and a controller needs no stdin."""
    pid_dir = tmp_path / "pids"
    pid_dir.mkdir()
    shared_memory = set(Path("/dev/shm").iterdir())

    def left() -> list[Path]:
        """New files, without the folders of live forkservers, which belong to other tests and runs."""
        new = set(Path("/dev/shm").iterdir()) - shared_memory
        owners = {path: re.match(r"parity-(\d+)-", path.name) for path in new}
        return [path for path, owner in owners.items() if not (owner and process_state(int(owner[1])))]

    controller = subprocess.Popen(
        ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", SCRIPT, str(tmp_path), preload_server],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    while len(started := [int(file.name) for file in pid_dir.iterdir()]) < 5 and controller.poll() is None:
        time.sleep(0.05)
    assert len(started) == 5
    started += children_of(controller.pid)
    assert len(started) == 6
    controller.kill()
    controller.wait()
    assert [pid for pid in started if not is_dead_soon(pid)] == []
    deadline = time.monotonic() + 5
    while left() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left() == []
    logs = {"rank-0.log", "rank-1.log", "rank-0.stacks", "rank-1.stacks", f"forkserver-{controller.pid}-1.log"}
    assert {file.name for file in tmp_path.iterdir() if file.is_file()} == logs


def test_a_forkserver_that_is_still_importing_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    monkeypatch.syspath_prepend(tmp_path)
    began = time.monotonic()
    with Pool(work_dir=tmp_path / "work") as pool:
        pool.prepare(WorkerGroupConfig(size=2, device="cpu", preload=("slow",)))
    assert time.monotonic() - began < 5
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize("work", ["while time.monotonic() < end: pass", "time.sleep(60)"])
def test_slow_import_hangs_only_without_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    (tmp_path / "slow_import.py").write_text(f"import time; end = time.monotonic() + 1\n{work}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(process, "START_LIMIT_S", 0.4)
    config = WorkerGroupConfig(size=1, device="cpu", preload=("slow_import",))
    with contextlib.closing(Forkservers(tmp_path / "work")) as slot:
        if "sleep" not in work:
            return slot.of(config).wait_until_ready()
        why = r"hangs in its imports \(slow_import\): for 0\.\d+ s it has neither computed nor read files"
        with pytest.raises(StartError, match=why):
            slot.of(config).wait_until_ready()
    return None


def test_what_was_prepared_is_what_the_first_task_finds(tmp_path: Path) -> None:
    config = WorkerGroupConfig(size=2, device="cpu", preload=("worker_group_tasks",))
    with Pool(work_dir=tmp_path) as pool:
        pool.prepare(config)
        pool.prepare(config)
        logs = sorted(tmp_path.glob("forkserver-*.log"))
        assert len(logs) == 1
        outcome = pool.run(
            key="x",
            config=config,
            task="worker_group_tasks:add",
            kwargs={"value": 1.0},
            log_dir=tmp_path,
            budget_s=BUDGET_S,
        )
        assert [result["sum"] for result in results(outcome)] == [3.0, 3.0]
        assert sorted(tmp_path.glob("forkserver-*.log")) == logs


@pytest.mark.exhaustive
def test_a_module_that_starts_a_thread_costs_time_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "threaded.py").write_text("import threading; threading.Thread(target=threading.Event().wait).start()")
    monkeypatch.syspath_prepend(tmp_path)
    threaded = WorkerGroupConfig(size=2, device="cpu", preload=("threaded", "worker_group_tasks"))
    with Pool(work_dir=tmp_path) as pool:
        for value in (1.0, 2.0):
            outcome = pool.run(
                key="x",
                config=threaded,
                task="worker_group_tasks:add",
                kwargs={"value": value},
                log_dir=tmp_path,
                budget_s=30,
            )
            assert [result["sum"] for result in results(outcome)] == [2 * value + 1] * 2
            assert outcome.used == (value == 2.0)
        [log] = tmp_path.glob(f"forkserver-{os.getpid()}-*.log")
        assert "importing threaded starts a thread" in log.read_text()
        asked = pool.run(
            key="x", config=threaded, task="worker_group_tasks:pids", kwargs={}, log_dir=tmp_path, budget_s=BUDGET_S
        )
        pids = results(asked)
    assert all(is_gone(pid) for of_rank in pids for pid in of_rank.values())


def test_forkserver_detects_import_that_initialises_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "nvidia-uvm"  # the driver has this open from then on
    device.touch()
    (tmp_path / "harmless.py").touch()
    (tmp_path / "initialising.py").write_text(f"opened = open({str(device)!r})")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(forkserver, "CUDA_DEVICE", device)
    monkeypatch.setattr(forkserver, "thread_count", lambda: 1)  # this process may have more
    assert forkserver._import(["harmless"]) == ""
    assert forkserver._import(["harmless", "initialising"]) == "importing initialising initialises CUDA"


ASKING = """
import pynvml, torch

found = torch.cuda.device_count(), torch.cuda.is_available()
try:
    pynvml.nvmlInit()
    has_nvml = True
except pynvml.NVMLError:
    has_nvml = False
"""


@pytest.mark.parametrize(("visible", "found"), [(None, 2), ("GPU-a", 1), ("", 0)])
def test_imports_count_gpus_without_their_driver(
    visible: str | None, found: int, two_gpus: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asking.py").write_text(ASKING)
    monkeypatch.delitem(sys.modules, "asking", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", itself := lambda: 0)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert forkserver._import(["asking"]) == ""
    assert sys.modules["asking"].found == (found, found > 0)
    assert not sys.modules["asking"].has_nvml
    assert torch.cuda.device_count is itself
    two_gpus.nvmlInit()


@pytest.mark.usefixtures("two_gpus")
def test_a_module_that_needs_nvml_has_it_in_started_ranks(tmp_path: Path) -> None:
    (tmp_path / "insisting.py").write_text("import pynvml; pynvml.nvmlInit()")
    (tmp_path / "broken.py").write_text("raise LookupError")
    assert forkserver._import(["insisting"]) == "importing insisting needs NVML"
    with pytest.raises(LookupError):
        forkserver._import(["broken"])


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Lets forkservers see the files of two GPUs, a torch for CUDA, and this NVML; modules come from ``tmp_path``.

    What this process has open and its threads are no matter: another test may have used a real GPU.
    """
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(forkserver, "DEVICES", tmp_path)
    monkeypatch.setattr(forkserver, "_harm", lambda: "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    nvml = SimpleNamespace(nvmlInit=lambda: None, NVMLError=LookupError, NVML_ERROR_UNINITIALIZED=1)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return nvml


@pytest.mark.parametrize("visible", [None, "0,1"])
def test_ranks_on_the_cpu_see_no_gpu(visible: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron compiles for a GPU that is visible, also in a rank on the CPU, and FSDP2 opens it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with Pool(work_dir=tmp_path / "work") as pool:
        assert set(results(Runner(pool, tmp_path)("visible"))) == {""}


@pytest.mark.parametrize(
    ("writes_none", "has_some", "is_kept"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_bytecode_that_is_kept_nowhere_else_is_kept_in_the_cache(
    writes_none: bool, has_some: bool, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image without bytecode whose Python writes none: ranks would compile all that they import."""
    beside = tmp_path / "torch.pyc"
    if has_some:
        beside.touch()
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1" if writes_none else "")
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "dont_write_bytecode", writes_none)
    monkeypatch.setattr(preload_server, "cache_from_source", lambda _: str(beside))
    subprocess.run(
        [sys.executable, "-c", "import conformance.spec.layout"], env=preload_server.environment(), check=True
    )
    assert any((tmp_path / "cache" / "bytecode").rglob("layout.*.pyc")) == is_kept


def test_the_bytecode_of_environments_that_are_gone_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(preload_server, "cache_from_source", lambda _: str(tmp_path / "torch.pyc"))
    own = Path(preload_server.environment()["PYTHONPYCACHEPREFIX"])
    for number in range(5):
        (others := own.parent / f"other-{number}").mkdir()
        os.utime(others, (number, number))
    os.utime(own, (0, 0))  # not used since all of them
    assert Path(preload_server.environment()["PYTHONPYCACHEPREFIX"]) == own
    assert {kept.name for kept in own.parent.iterdir()} == {own.name, "other-3", "other-4"}


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_imports_without_collection_leave_garbage_of_others_to_later_collections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_once.py").write_text("import gc\nwas_collecting = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    garbage = weakref.ref(Cycle())
    assert not import_uncollected("imported_once").was_collecting
    assert gc.isenabled()
    gc.collect()
    assert garbage() is None
