"""Worker groups on several hosts: real host processes, each of which takes this machine for its own host.

Whatever happens to a host process, the task ends with a reason that names it, and no rank is left.
"""

import contextlib
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from host_processes import Process, fleet, host, is_true_soon
from torch.distributed import TCPStore
from worker_group_helpers import Runner, is_dead_soon, results

from conformance.cli import torchrun
from conformance.runtime import Pool
from conformance.runtime.gpu_leases import Ticket, lease_folder
from conformance.runtime.messages import Carrier, Closed, closing, connect
from conformance.runtime.multihost.controller import Fleet, Hosts, Slots

pytestmark = pytest.mark.slow

START_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Two:
    """A pool of two host processes with two slots each, of which the second takes itself for another host."""

    fleet: Fleet
    pool: Pool
    processes: dict[int, Process]


ANOTHER_HOST = (
    "import conformance.core.host, socket; socket.gethostname = lambda: 'far'; "
    "conformance.core.host.available_memory = lambda: 10**15"
)


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[Two]:
    with fleet(folder, slots=2, codes=("pass", ANOTHER_HOST)) as (made, processes):
        made.wait(limit_s=START_S)
        assert made.problem() == ""
        with Pool(work_dir=folder, slots=Slots(made)) as pool:
            yield Two(fleet=made, pool=pool, processes={process.pid: process for process in processes})


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with two_hosts(tmp_path_factory.mktemp("two")) as two:
        yield two


@pytest.fixture
def run(two: Two, tmp_path: Path) -> Runner:
    return Runner(two.pool, tmp_path)


def test_ranks_of_two_hosts_are_one_worker_group(run: Runner) -> None:
    """They compute together, know which ranks are on their host, and stay alive for the next task."""
    assert results(run("add", size=3, value=2.0)) == [{"rank": rank, "sum": 9.0} for rank in range(3)]
    found = results(run("environment", size=3))
    assert [(e["RANK"], e["LOCAL_RANK"], e["LOCAL_WORLD_SIZE"]) for e in found] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
        ("2", "0", "1"),
    ]
    assert len({e["MASTER_ADDR"] for e in found}) == 1
    before = run.pids(size=3)
    assert run.pids(size=3) == before
    forkservers = {result["forkserver"] for result in results(run("pids", size=3))}
    assert len(forkservers) == 2  # one on each host
    text = "0123456789" * 100_000
    assert results(run("echo", size=3, text=text)) == [text] * 3


@pytest.mark.parametrize(
    ("task", "kwargs", "kind", "reason"),
    [
        ("signal_self", {"rank": 2, "number": signal.SIGKILL}, "killed", "rank 2 was killed by SIGKILL"),
        ("fail", {"rank": 2}, "raised", "rank 2 raised during 'step 1'"),
        ("never_enter", {"rank": 2, "budget_s": 2.0}, "hung", "rank 2 hung during 'step 1': no progress for "),
    ],
)
def test_what_happens_to_a_rank_of_another_host_is_told_as_here(
    run: Runner, task: str, kwargs: dict[str, float], kind: str, reason: str
) -> None:
    outcome = run(task, size=3, **kwargs)  # type: ignore[arg-type]
    assert (outcome.kind, outcome.rank) == (kind, 2), outcome.reason
    assert outcome.reason.startswith(reason)
    if kind == "hung":
        assert "stacks: rank-0.stacks, rank-1.stacks, rank-2.stacks" in outcome.reason
    assert len(results(run("pids", size=3))) == 3  # the next task has a worker group again


def test_tasks_run_side_by_side_on_slots_of_their_own(run: Runner, tmp_path: Path) -> None:
    """Two of two ranks at once, one on each host, in worker groups that are used again; one of three waits for both."""
    with ThreadPoolExecutor(3) as threads:
        met: dict[str, Any] = {"of": 5, "folder": str(tmp_path / "met")}
        ask = [threads.submit(Runner(run.pool, tmp_path / str(n)), "meet", **met) for n in range(2)]
        assert is_true_soon(lambda: (tmp_path / "met").is_dir() and len(list((tmp_path / "met").iterdir())) == 4)
        both = threads.submit(run, "pids", size=3)
        time.sleep(0.5)  # it would have run
        assert not both.done()
        (tmp_path / "met" / "the test").touch()
    worker_groups = [{pid for _, pid in results(asked.result())} for asked in ask]
    assert worker_groups[0].isdisjoint(worker_groups[1])
    assert len({result["forkserver"] for result in results(both.result())}) == 2
    assert set(run.pids(size=2)) in worker_groups


def test_hosts_report_their_memory_and_disk(two: Two) -> None:
    here = {joined.host: joined for joined in two.fleet.joined}
    far, near = here.pop("far"), here.pop(socket.gethostname())
    assert not here
    assert (far.slots, far.resources.memory) == (2, 10**15)
    assert 0 < near.resources.memory < 10**15
    assert near.resources.disk > 0


def test_more_ranks_than_the_hosts_offer_are_refused(run: Runner) -> None:
    assert run("nothing", size=5).reason == "5 ranks, and there are 4 slots of hosts"


def test_a_host_process_that_is_killed_is_named_and_its_ranks_end(tmp_path: Path) -> None:
    """Those of the other host too."""
    with two_hosts(tmp_path) as own:
        run = Runner(own.pool, tmp_path)
        found = results(run("pids", size=3))
        outcome = run("kill_host_process", size=3, rank=2)
        killed = re.match(r"host \S+ \(process (\d+)\) was lost: ", outcome.reason)
        assert killed, outcome.reason
        assert own.processes[int(killed[1])].wait(timeout=10) == -signal.SIGKILL
        assert all(is_dead_soon(result["rank"]) for result in found)
        again = run("nothing", size=3).reason
        assert re.match(rf"1 of 2 hosts are left \(.*\); host \S+ \(process {killed[1]}\) was lost: ", again), again


GPU_HOST = "import conformance.runtime.multihost.host as host; host.gpus_of_host = lambda: ('GPU-a',)"


def test_the_ranks_of_a_host_may_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run says how many; a host with one GPU leases its shares and offers a slot for each."""
    monkeypatch.setenv("PARITY_LEASES", str(tmp_path / "leases"))
    with fleet(tmp_path, slots=2, codes=(GPU_HOST,), device="cuda", ranks_per_gpu=2) as (made, _):
        made.wait(limit_s=START_S)
        assert [joined.slots for joined in made.joined] == [2]
        for slot in ("GPU-a#1", "GPU-a"):
            assert Ticket((slot,), 1, folder=lease_folder()).serve() is None


def test_a_host_offers_no_more_ranks_than_its_gpus_have_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARITY_LEASES", str(tmp_path / "leases"))
    why = "it has 1 GPUs for 2 ranks each, and was told to offer 3 slots; --ranks-per-gpu 3 lets 3"
    with fleet(tmp_path, slots=3, codes=(GPU_HOST,), device="cuda", ranks_per_gpu=2) as (made, (refused,)):
        made.wait(limit_s=START_S)
        assert why in made.problem()
        ended(refused, 2, why)


@pytest.mark.exhaustive
def test_ranks_of_a_host_that_share_a_gpu_are_told_so(tmp_path: Path) -> None:
    """As those of one host. The device is the CPU, so the GPUs are names."""
    code = (
        "import conformance.runtime.multihost.host as host; made = host.Host; "
        "host.Host = lambda wire, **more: made(wire, **{**more, 'gpus': ('GPU-a#0', 'GPU-b#0', 'GPU-a#1')})"
    )
    with fleet(tmp_path, slots=3, codes=(code,)) as (made, _):
        made.wait(limit_s=START_S)
        with Pool(work_dir=tmp_path, slots=Slots(made)) as pool:
            run = Runner(pool, tmp_path)
            assert results(run("slot", size=2)) == [["GPU-a,GPU-b", own, ""] for own in ("0", "1")]
            assert results(run("slot", size=3)) == [
                ["GPU-a,GPU-b", own, host] for own, host in (("0", "GPU-a#0"), ("1", "GPU-a#0"), ("0", "GPU-a#1"))
            ]


# --- hosts that join and leave ---


@pytest.mark.exhaustive
def test_when_the_run_ends_hosts_end_by_themselves(tmp_path: Path) -> None:
    with fleet(tmp_path) as (made, (alone,)):
        made.wait(limit_s=START_S)
        with Pool(work_dir=tmp_path, slots=Slots(made)) as pool:
            (pid,) = Runner(pool, tmp_path).pids(size=1)
        made.close()
        ended(alone, 0, "")
        assert is_dead_soon(pid)


@pytest.mark.exhaustive
def test_when_the_connection_ends_no_rank_is_left(tmp_path: Path) -> None:
    with host() as (wire, process):
        made = Fleet(Hosts(wires=(wire,)), device="cpu", folder=tmp_path)
        made.wait(limit_s=START_S)
        (pid,) = Runner(pool := Pool(work_dir=tmp_path, slots=Slots(made)), tmp_path).pids(size=1)
        wire.send(closing("torchrun's store is gone"))
        ended(process, 3, "the controller is gone: torchrun's store is gone")
        assert is_dead_soon(pid)
        assert is_true_soon(lambda: not made.joined)  # until then a task starts, and is told that it lost its host
        assert Runner(pool, tmp_path)("nothing", size=1).reason.startswith("0 of 1 hosts are left (none); host ")
        made.terminate()
        assert is_true_soon(lambda: made.problem() == "the connection to the hosts has ended")
        pool.close()
        made.close()


def test_hosts_that_do_not_fit_are_refused_and_told_why(tmp_path: Path) -> None:
    """Another version of torch or of the suite, a host that does not share the folder."""
    other_torch = "import importlib.metadata as m; v = m.version; m.version = lambda n: '0.1' if n == 'torch' else v(n)"
    other_suite = "import conformance; conformance.__version__ = '0.0.1'"
    blind = "from pathlib import Path; Path.is_file = lambda self: False"
    refused = {
        f"{other_torch}; import conformance.core.packages as p; p.version = m.version": "it has torch 0.1 and not 2.",
        other_suite: "it has backend-parity 0.0.1 (sources ",
        blind: "it does not see ",
    }
    with fleet(tmp_path, codes=tuple(refused)) as (made, processes):
        for process, why in zip(processes, refused.values(), strict=True):
            ended(process, 2, why)
            assert is_true_soon(lambda why=why: why in made.problem())
        assert made.problem().startswith("0 of 3 hosts have joined (none); ")
        began = time.monotonic()
        made.wait(limit_s=START_S)  # does not wait: a host that was refused does not come again
        assert time.monotonic() - began < START_S / 2


def ended(process: Process, status: int, why: str) -> None:
    _, message = process.communicate(timeout=60)
    assert process.returncode == status, message
    assert why in message
    assert "Traceback" not in message


# --- what carries messages ---


def test_messages_travel_by_the_keys_of_torchruns_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In both directions and in order; either side hears why the other one closed."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    wire, carrier = connect(torchrun.Mailbox("to/1", "from/1"))
    with host(slots=2) as (far, process):
        node = Carrier(far, torchrun.Mailbox("from/1", "to/1"), why_closed=lambda: torchrun._why_ended(process))  # type: ignore[arg-type]
        made = Fleet(Hosts(wires=(wire,)), device="cpu", folder=tmp_path)
        made.wait(limit_s=START_S)
        with Pool(work_dir=tmp_path, slots=Slots(made)) as pool:
            run = Runner(pool, tmp_path)
            text = "0123456789" * 100_000
            assert results(run("echo", size=2, text=text)) == [text] * 2
            outcome = run("kill_host_process", size=2, rank=1)
            assert re.match(r"host \S+ \(process \d+\) was lost: its process was killed by SIGKILL", outcome.reason)
        for one in (made, carrier, node):
            one.close()


def test_a_store_that_is_gone_closes_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    mailbox = torchrun.Mailbox("to/1", "from/1")
    assert mailbox.receive(limit_s=0.1) == []
    del server
    with pytest.raises(Closed, match="torchrun's store is gone: "):
        mailbox.receive(limit_s=0.1)
    with pytest.raises(Closed, match="torchrun's store is gone: "):
        send_often(mailbox)


def send_often(mailbox: torchrun.Mailbox) -> None:
    """The kernel takes the first message although nobody receives it."""
    for _ in range(100):
        mailbox.send([{}])
