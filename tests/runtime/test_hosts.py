"""Worlds of several hosts: real agents, each of which takes this machine for its own host (claim 8).

Whatever becomes of an agent, the task ends with a reason that names it, and no rank is left.
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
from host_agents import A_SECRET, Process, agent, fleet, is_true_soon
from world_helpers import Runner, is_dead_soon, results

from conformance.core.errors import UsageError
from conformance.runtime import Pool
from conformance.runtime.gpu_leases import Ticket, lease_folder
from conformance.runtime.multihost.controller import Fleet, Hosts, Slots
from conformance.runtime.multihost.handshake import SECRET, Stream

pytestmark = pytest.mark.slow

START_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Two:
    """A pool of two agents with two slots each, of which the second takes itself for another host."""

    fleet: Fleet
    pool: Pool
    agents: dict[int, Process]


ANOTHER_HOST = (
    "import conformance.core.host_resources, socket; socket.gethostname = lambda: 'far'; "
    "conformance.core.host_resources.available_memory = lambda: 10**15"
)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("two")
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(fleet(2, folder))
        one, other = (stack.enter_context(agent(made.address, slots=2, code=code)) for code in ("pass", ANOTHER_HOST))
        made.wait(limit_s=START_S)
        assert made.problem() == ""
        with Pool(work_dir=folder, places=Slots(made)) as pool:
            yield Two(fleet=made, pool=pool, agents={process.pid: process for process in (one, other)})


@pytest.fixture
def run(two: Two, tmp_path: Path) -> Runner:
    return Runner(two.pool, tmp_path)


def test_ranks_of_two_agents_are_one_world(run: Runner) -> None:
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
    zygotes = {result["zygote"] for result in results(run("pids", size=3))}
    assert len(zygotes) == 2  # one on each host
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
    assert len(results(run("pids", size=3))) == 3  # the next task has a world again


def test_tasks_run_side_by_side_on_slots_of_their_own(run: Runner, tmp_path: Path) -> None:
    """Two of two ranks at once, one on each host, in worlds that are used again; one of three waits for both."""
    with ThreadPoolExecutor(3) as threads:
        met: dict[str, Any] = {"of": 5, "folder": str(tmp_path / "met")}
        ask = [threads.submit(Runner(run.pool, tmp_path / str(n)), "meet", **met) for n in range(2)]
        assert is_true_soon(lambda: (tmp_path / "met").is_dir() and len(list((tmp_path / "met").iterdir())) == 4)
        both = threads.submit(run, "pids", size=3)
        time.sleep(0.5)  # it would have run
        assert not both.done()
        (tmp_path / "met" / "the test").touch()
    worlds = [{pid for _, pid in results(asked.result())} for asked in ask]
    assert worlds[0].isdisjoint(worlds[1])
    assert len({result["zygote"] for result in results(both.result())}) == 2
    assert set(run.pids(size=2)) in worlds


def test_agents_tell_which_host_has_what_room(two: Two) -> None:
    here = {agent.host: agent for agent in two.fleet.agents}
    far, near = here.pop("far"), here.pop(socket.gethostname())
    assert not here
    assert (far.slots, far.room.memory) == (2, 10**15)
    assert 0 < near.room.memory < 10**15
    assert near.room.disk > 0


def test_more_ranks_than_the_agents_offer_are_refused(run: Runner) -> None:
    assert run("nothing", size=5).reason == "5 ranks, and there are 4 slots of agents"


def test_an_agent_that_is_killed_is_named_and_its_ranks_end(run: Runner, two: Two) -> None:
    """Those of the other agent too. It is the last test of these two."""
    found = results(run("pids", size=3))
    outcome = run("kill_agent", size=3, rank=2)
    killed = re.match(r"agent \S+ \(process (\d+)\) was lost: ", outcome.reason)
    assert killed, outcome.reason
    assert two.agents[int(killed[1])].wait(timeout=10) == -signal.SIGKILL
    assert all(is_dead_soon(result["rank"]) for result in found)
    assert "1 of 2 agents are left" in run("nothing", size=3).reason


def test_the_ranks_of_an_agent_may_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run says how many; an agent with one GPU leases its shares and offers a slot for each. It refuses to offer
    more, and says which option would allow it."""
    monkeypatch.setenv(SECRET, A_SECRET)
    monkeypatch.setenv("PARITY_LEASES", str(tmp_path / "leases"))
    code = "import conformance.runtime.multihost.agent as agent; agent.gpus_of_host = lambda: ('GPU-a',)"
    made = Fleet(Hosts(count=1, listen="127.0.0.1:0", ranks_per_gpu=2), device="cuda", folder=tmp_path)
    with contextlib.closing(made):
        with agent(made.address, slots=3, code=code) as refused:
            assert refused.wait(timeout=START_S) == 2
            assert refused.stderr is not None
            said = refused.stderr.read()
        assert "it has 1 GPUs for 2 ranks each, and was told to offer 3 (--slots); --ranks-per-gpu 3 lets 3" in said
        with agent(made.address, slots=2, code=code):
            made.wait(limit_s=START_S)
            assert [one.slots for one in made.agents] == [2]
            for place in ("GPU-a#1", "GPU-a"):
                assert Ticket((place,), 1, folder=lease_folder()).serve() is None


@pytest.mark.exhaustive
def test_ranks_of_an_agent_that_share_a_gpu_are_told_so(tmp_path: Path) -> None:
    """As those of one host. Of an agent whose device is the CPU, so its GPUs are names."""
    code = (
        "import conformance.runtime.multihost.agent as agent; made = agent.Agent; "
        "agent.Agent = lambda stream, **more: made(stream, **{**more, 'gpus': ('GPU-a#0', 'GPU-b#0', 'GPU-a#1')})"
    )
    with fleet(1, tmp_path) as made, agent(made.address, slots=3, code=code):
        made.wait(limit_s=START_S)
        with Pool(work_dir=tmp_path, places=Slots(made)) as pool:
            run = Runner(pool, tmp_path)
            assert results(run("seat", size=2)) == [["GPU-a,GPU-b", own, ""] for own in ("0", "1")]
            assert results(run("seat", size=3)) == [
                ["GPU-a,GPU-b", own, host] for own, host in (("0", "GPU-a#0"), ("1", "GPU-b#0"), ("0", "GPU-a#1"))
            ]


# --- agents ---


@pytest.mark.exhaustive
def test_an_agent_that_is_killed_ends_its_task_and_another_may_come(tmp_path: Path) -> None:
    with fleet(2, tmp_path) as made, Pool(work_dir=tmp_path, places=Slots(made)) as pool, agent(made.address) as stays:
        run = Runner(pool, tmp_path)
        with agent(made.address) as dies:
            made.wait(limit_s=START_S)
            pids = run.pids(size=2)
            dies.kill()
            outcome = run("never_enter", size=2, rank=0)
            assert outcome.state == "failed"
            assert all(is_dead_soon(pid) for pid in pids)
        assert re.match(rf"agent \S+ \(process {dies.pid}\) was lost: ", outcome.reason) or "1 of 2" in outcome.reason
        again = run("nothing", size=2)
        left = rf"1 of 2 agents are left \(.*{stays.pid}\)\); agent \S+ \(process {dies.pid}\) was lost"
        assert re.match(left, again.reason), again.reason
        with agent(made.address):
            assert is_true_soon(lambda: made.problem() == "")
            assert results(run("add", size=2, value=0.0)) == [{"rank": rank, "sum": 1.0} for rank in range(2)]
        pool.close()
        made.close()
        assert stays.wait(timeout=10) == 0  # told that the run has ended


@pytest.mark.exhaustive
def test_when_the_controller_is_gone_nothing_is_left(tmp_path: Path) -> None:
    with fleet(1, tmp_path) as made, agent(made.address) as alone:
        made.wait(limit_s=START_S)
        (pid,) = Runner(pool := Pool(work_dir=tmp_path, places=Slots(made)), tmp_path).pids(size=1)
        made._process.kill()
        assert alone.wait(timeout=20) == 3
        assert alone.stderr is not None
        assert "is gone: it closed the connection" in alone.stderr.read()
        assert is_dead_soon(pid)
        assert Runner(pool, tmp_path)("nothing", size=1).reason == "the process that agents connect to has ended"
        pool.close()


def test_agents_that_do_not_fit_are_refused_and_told_why(tmp_path: Path) -> None:
    """A wrong secret, another version of torch or of the suite, a host that does not share the folder."""
    other_torch = "import importlib.metadata as m; v = m.version; m.version = lambda n: '0.1' if n == 'torch' else v(n)"
    other_suite = "import conformance; conformance.__version__ = '0.0.1'"
    blind = "from pathlib import Path; Path.is_file = lambda self: False"
    with fleet(1, tmp_path) as made:
        refused = [
            (agent(made.address, secret="x" * 20), "it does not know the secret; PARITY_SECRET has to be the same"),
            (agent(made.address, code=patched_torch(other_torch)), "it has torch 0.1 and not 2."),
            (agent(made.address, code=other_suite), "it has backend-parity 0.0.1 (sources "),
            (agent(made.address, code=blind), "it does not see "),
        ]
        for started, why in refused:
            with started as one:
                ended(one, 2, why)
            assert is_true_soon(lambda why=why: why in made.problem())
        assert made.problem().startswith("0 of 1 agents ")


def patched_torch(code: str) -> str:
    return f"{code}; import conformance.core.packages as p; p.version = m.version"


def ended(process: Process, status: int, why: str) -> None:
    _, said = process.communicate(timeout=60)
    assert process.returncode == status, said
    assert why in said
    assert "Traceback" not in said


def test_an_agent_does_not_work_for_somebody_without_the_secret(tmp_path: Path) -> None:
    """Both sides show that they know it; this one only repeats what it is sent."""
    with socket.create_server(("127.0.0.1", 0)) as server, agent(f"127.0.0.1:{server.getsockname()[1]}") as asked:
        end, _ = server.accept()
        stream = Stream(end)
        stream.send({"challenge": "x"})
        stream.send({"answer": stream.next()["answer"], "device": "cpu", "cwd": "/", "sign": ""})
        ended(asked, 2, "what listens there does not know the secret")


def test_what_is_no_agent_stops_nobody(tmp_path: Path) -> None:
    with fleet(1, tmp_path) as made:
        host, _, port = made.address.rpartition(":")
        with socket.create_connection((host, int(port))) as stranger, socket.create_connection((host, int(port))):
            stranger.send(b"GET / HTTP/1.1\r\n\r\n" * 10)
            assert is_true_soon(lambda: "was no agent" in made.problem())


def test_an_agent_that_never_comes_is_told_with_the_command_that_starts_it(tmp_path: Path) -> None:
    with fleet(2, tmp_path) as made:
        made.wait(limit_s=0.2)
        assert made.problem() == f"0 of 2 agents have come (none); start parity agent {made.address} on the others"


@pytest.mark.parametrize(("secret", "listen", "message"), [
    ("", "127.0.0.1:0", "PARITY_SECRET has to hold 16 characters or more"),
    ("short", "127.0.0.1:0", "PARITY_SECRET has to hold 16 characters or more"),
    ("x" * 20, "127.0.0.1", "is no address; give HOST:PORT"),
    ("x" * 20, "192.0.2.1:0", "nothing can listen at 192.0.2.1:0"),
])  # fmt: skip
def test_what_cannot_work_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str, listen: str, message: str
) -> None:
    monkeypatch.setenv(SECRET, secret)
    with pytest.raises(UsageError, match=message):
        Fleet(Hosts(count=1, listen=listen), device="cpu", folder=tmp_path)
