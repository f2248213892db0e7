"""Leases of GPUs between processes: real locks, a real queue and real deaths; a GPU is a name, so none is needed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_group_helpers import is_dead_soon

from conformance.core.errors import UsageError
from conformance.runtime.gpu_inventory import Gpu, gpu_of, network_of, shares_of, slots_of, visible_gpus, visible_to
from conformance.runtime.gpu_leases import Busy, Ticket, blocks, holders, lease_folder
from conformance.runtime.worker_groups import Lease, Slot

GPUS = tuple(f"GPU-{letter}" for letter in "abcdefgh")
# The last GPU is divided into parts.
INSTALLED = [Gpu(uuid="GPU-0aa1"), Gpu(uuid="GPU-0bb2"), Gpu(uuid="GPU-1cc3", parts=("MIG-5d5d",))]
# Leases GPUs, says which, and keeps them until its input ends.
HOLDER = """\
import json, sys, time
from pathlib import Path
from conformance.runtime.gpu_leases import Ticket
gpus, size, folder = json.loads(sys.argv[1])
ticket = Ticket(gpus, size, folder=Path(folder))
print("waits", flush=True)
while (lease := ticket.serve()) is None:
    time.sleep(0.01)
print(json.dumps(lease.block), flush=True)
sys.stdin.read()
"""


# --- which GPUs there are ---


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, ("GPU-0aa1", "GPU-0bb2", "GPU-1cc3")),
        ("", ()),
        ("1", ("GPU-0bb2",)),
        ("2, 0", ("GPU-1cc3", "GPU-0aa1")),
        ("GPU-1cc3,GPU-0b", ("GPU-1cc3", "GPU-0bb2")),
        ("MIG-5d5d", ("MIG-5d5d",)),
    ],
)
def test_the_variable_says_which_gpus_are_ours_and_in_which_order(visible: str | None, found: tuple[str, ...]) -> None:
    assert visible_gpus(INSTALLED, visible) == found


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ("0,3", "'3' is not a GPU of this host, which has 3 GPUs"),  # CUDA would say nothing and use GPU 0
        ("GPU-0", "'GPU-0' is 2 GPUs"),
        ("GPU-dead", "'GPU-dead' is not a GPU"),
        ("-1", "'-1' is not a GPU"),
        ("1,GPU-0b", "names a GPU twice"),
    ],
)
def test_a_variable_that_cuda_would_cut_short_is_refused(visible: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        visible_gpus(INSTALLED, visible)


def test_blocks_of_two_four_and_eight_leave_no_gpu_between_them() -> None:
    assert blocks(GPUS, 8) == [GPUS]
    assert blocks(GPUS, 4) == [GPUS[:4], GPUS[4:]]
    assert blocks(GPUS, 3) == [GPUS[:3], GPUS[3:6]]
    assert blocks(GPUS[:2], 3) == []


# --- shares of GPUs ---


def test_one_rank_per_gpu_is_the_gpu_and_more_are_shares_round_by_round() -> None:
    """So the ranks of a worker group share a GPU only if there are more of them than GPUs."""
    assert shares_of(GPUS[:2], 1) == GPUS[:2]
    shares = shares_of(GPUS[:2], 3)
    assert shares == ("GPU-a#0", "GPU-b#0", "GPU-a#1", "GPU-b#1", "GPU-a#2", "GPU-b#2")
    assert [gpu_of(share) for share in shares] == ["GPU-a", "GPU-b"] * 3
    assert all({gpu_of(slot) for slot in block} == {"GPU-a", "GPU-b"} for block in blocks(shares, 2))


@pytest.mark.parametrize("slot", ["GPU-a", "MIG-GPU-5d5d/1/0", "host#1 (process 7) slot 0", "#0"])
def test_what_is_no_share_is_a_place_of_its_own(slot: str) -> None:
    assert gpu_of(slot) == slot


@pytest.mark.parametrize(
    ("block", "visible", "gpus", "hosts"),
    [
        (("GPU-a", "GPU-b"), "GPU-a,GPU-b", (0, 1), ("", "")),
        (("GPU-a#0", "GPU-b#0"), "GPU-a,GPU-b", (0, 1), ("", "")),  # each has its own, as if nothing was shared
        (("GPU-a#0", "GPU-a#1"), "GPU-a", (0, 0), ("GPU-a#0", "GPU-a#1")),
        (("GPU-a#1", "GPU-b#0"), "GPU-a,GPU-b", (0, 1), ("", "")),
        (("GPU-b#1", "GPU-a#0", "GPU-b#0"), "GPU-b,GPU-a", (0, 1, 0), ("GPU-b#1", "GPU-b#0", "GPU-b#0")),
        (("GPU-a#0", "GPU-b#0", "GPU-a#1"), "GPU-a,GPU-b", (0, 1, 0), ("GPU-a#0", "GPU-a#0", "GPU-a#1")),
    ],
)
def test_a_rank_is_told_which_of_the_gpus_that_it_sees_is_its_own(
    block: tuple[str, ...], visible: str, gpus: tuple[int, ...], hosts: tuple[str, ...]
) -> None:
    """And where ranks share, those of one GPU have hosts of their own, or NCCL would refuse them."""
    assert visible_to(block) == {"CUDA_VISIBLE_DEVICES": visible}
    assert slots_of(block) == tuple(Slot(gpu=gpu, host=host) for gpu, host in zip(gpus, hosts, strict=True))
    assert len({(slot.gpu, slot.host) for slot in slots_of(block)}) == len(block)


def test_ranks_of_two_hosts_that_share_gpus_have_no_host_name_in_common() -> None:
    here, there = (slots_of((f"{gpu}#0", f"{gpu}#1")) for gpu in ("GPU-a", "GPU-b"))
    assert not {slot.host for slot in here} & {slot.host for slot in there}


def test_network_of_shared_gpu_defaults_to_loopback() -> None:
    assert network_of(GPUS[:2]) == network_of(("GPU-a#0", "GPU-b#0")) == {}
    assert network_of(("GPU-a#0", "GPU-a#1")) == {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=lo"}


# --- leases ---


class Holder:
    """A process that wants GPUs."""

    def __init__(self, gpus: tuple[str, ...], size: int, folder: Path) -> None:
        asked = json.dumps([gpus, size, str(folder)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, asked], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "waits"

    def gpus(self) -> tuple[str, ...]:
        """Wait for the lease."""
        return tuple(json.loads(self._line()))

    def ends(self) -> None:
        self.process.communicate()

    def is_killed(self) -> None:
        self.process.kill()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def holders_of(tmp_path: Path) -> Iterator[list[Holder]]:
    made: list[Holder] = []
    yield made
    for holder in made:
        holder.is_killed()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARITY_LEASES", str(tmp_path / "leases"))
    return lease_folder()


def served(ticket: Ticket, *, limit_s: float = 20.0) -> Lease:
    deadline = time.monotonic() + limit_s
    while (lease := ticket.serve()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return lease


def test_a_gpu_is_one_processs_until_that_ends_or_is_killed(folder: Path, holders_of: list[Holder]) -> None:
    """Whatever the numbers of the GPUs in each process: what is leased is the UUID."""
    other = Holder(GPUS[:2], 1, folder)
    holders_of.append(other)
    assert other.gpus() == (GPUS[0],)
    assert holders(GPUS[:2], folder) == f"{GPUS[0]} by process {other.process.pid}"
    ticket = Ticket((GPUS[2], GPUS[0]), 2, folder=folder)
    assert ticket.serve() is None
    other.is_killed()
    lease = served(ticket)
    assert lease.block == (GPUS[2], GPUS[0])
    lease.release()
    assert holders(GPUS, folder) == ""
    assert not list(folder.glob("*.ticket"))


def test_a_gpu_stays_leased_while_a_rank_of_a_dead_controller_has_it(folder: Path) -> None:
    lease = served(Ticket(GPUS, 1, folder=folder))
    rank = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=lease.fds
    )
    lease.release()  # as the kernel does when the controller dies
    ticket = Ticket(GPUS[:1], 1, folder=folder)
    assert ticket.serve() is None
    rank.kill()
    rank.wait()
    served(ticket).release()


def test_the_queue_is_served_in_order_and_a_large_block_is_not_starved(folder: Path) -> None:
    """Two GPUs: while one of them is in use, a lease of both waits, and what comes later may not overtake it."""
    two = GPUS[:2]
    first = served(Ticket(two, 1, folder=folder))
    large, later = Ticket(two, 2, folder=folder), Ticket(two, 1, folder=folder)
    assert later.serve() is None
    assert large.serve() is None
    first.release()
    assert later.serve() is None
    both = served(large)
    assert later.serve() is None
    both.release()
    served(later).release()


def test_small_leases_use_what_an_earlier_large_one_cannot_use(folder: Path) -> None:
    """Eight GPUs, one in use in the second half: a lease of four takes the first half, and the next waits alone."""
    used = served(Ticket(GPUS[4:], 1, folder=folder))
    half = served(Ticket(GPUS, 4, folder=folder))
    assert half.block == GPUS[:4]
    again = Ticket(GPUS, 4, folder=folder)  # waits for the second half, where three are free
    assert again.serve() is None
    other = Ticket(("GPU-x", *GPUS[5:]), 1, folder=folder)
    assert served(other).block == ("GPU-x",)  # not of the block that somebody waits for
    for lease in (used, half):
        lease.release()
    served(again).release()


def test_who_dies_in_the_queue_holds_up_nobody(folder: Path, holders_of: list[Holder]) -> None:
    first = served(Ticket(GPUS[:2], 1, folder=folder))
    dies = Holder(GPUS[:2], 2, folder)
    holders_of.append(dies)
    after = Ticket(GPUS[:2], 1, folder=folder)
    assert after.serve() is None
    dies.is_killed()
    assert served(after).block == GPUS[1:2]
    first.release()


def test_two_runs_that_always_want_more_take_turns(folder: Path) -> None:
    """Each asks again as soon as it has been served; neither gets two leases while the other waits."""
    order = []
    tickets = {name: Ticket(GPUS[:1], 1, folder=folder) for name in ("one", "other")}
    for _ in range(6):
        name, lease = next((name, lease) for name, ticket in tickets.items() if (lease := ticket.serve()) is not None)
        order.append(name)
        tickets[name] = Ticket(GPUS[:1], 1, folder=folder)
        lease.release()
    assert order == ["one", "other"] * 3


def test_many_processes_never_hold_the_same_gpu(folder: Path, holders_of: list[Holder]) -> None:
    """Six processes for four GPUs; who has leases is what they say, and a lease ends before the next one begins."""
    holders_of += [Holder(GPUS[:4], size, folder) for size in (1, 2, 1, 4, 2, 1)]
    held = [holders_of[at].gpus() for at in (0, 1, 2)]
    assert sorted(gpu for block in held for gpu in block) == sorted(GPUS[:4])
    for holder in holders_of[:3]:
        holder.ends()
    assert holders_of[3].gpus() == GPUS[:4]
    holders_of[3].is_killed()
    assert not set(holders_of[4].gpus()) & set(holders_of[5].gpus())


@pytest.mark.parametrize("junk", ["link", "pipe", "text"])
def test_what_others_leave_in_the_folder_stops_nobody(folder: Path, junk: str) -> None:
    served(Ticket(GPUS, 1, folder=folder)).release()
    path = folder / f"{1:012d}.0.ticket"
    if junk == "link":
        path.symlink_to("/dev/zero")
    elif junk == "pipe":
        os.mkfifo(path)
    else:
        path.write_text("no ticket")
    served(Ticket(GPUS, 8, folder=folder), limit_s=2).release()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="PARITY_LEASES names another"):
        Ticket(GPUS, 1, folder=tmp_path / "file")


def test_a_controller_that_is_stopped_while_it_waits_leaves_the_queue(folder: Path, holders_of: list[Holder]) -> None:
    waits = [Holder(GPUS[:1], 1, folder) for _ in range(2)]
    holders_of += waits
    waits[0].gpus()
    waits[1].process.send_signal(signal.SIGTERM)
    assert is_dead_soon(waits[1].process.pid)
    ticket = Ticket(GPUS[:1], 1, folder=folder)
    waits[0].ends()
    served(ticket).release()


# --- leases of shares ---

SHARES = shares_of(GPUS[:1], 2)


def test_shares_are_leased_side_by_side_and_each_by_one(folder: Path, holders_of: list[Holder]) -> None:
    other = Holder(SHARES, 1, folder)
    holders_of.append(other)
    assert other.gpus() == ("GPU-a#0",)
    lease = served(Ticket(SHARES, 1, folder=folder))
    assert lease.block == ("GPU-a#1",)
    third = Ticket(SHARES, 1, folder=folder)
    assert third.serve() is None
    assert holders(SHARES, folder) == f"GPU-a#0 by process {other.process.pid}, GPU-a#1 by process {os.getpid()}"
    other.is_killed()
    assert served(third).block == ("GPU-a#0",)


def test_many_places_of_one_process_are_counted_and_not_listed(folder: Path) -> None:
    many = shares_of(GPUS[:2], 8)
    lease = served(Ticket(many, 16, folder=folder))
    assert holders(many, folder) == f"16 of them by process {os.getpid()}"
    assert holders(many[:2], folder) == f"GPU-a#0 and GPU-b#0 by process {os.getpid()}"
    lease.release()


def test_of_a_gpu_with_many_places_the_mean_of_their_leases_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("conformance.runtime.gpu_leases.time.monotonic", lambda: now[0])
    busy = Busy([*SHARES, "GPU-b"])
    assert busy.shares() == {}
    now[0] = 110.0
    busy.add(SHARES, 4.0)
    busy.add(SHARES[:1], 6.0)
    assert busy.shares() == {"GPU-a": 0.7, "GPU-b": 0.0}


def test_a_run_that_shares_a_gpu_and_one_that_does_not_wait_for_each_other(folder: Path) -> None:
    share = served(Ticket(SHARES, 1, folder=folder))
    whole = Ticket(GPUS[:1], 1, folder=folder)
    assert whole.serve() is None
    assert holders(GPUS[:1], folder) == f"GPU-a by process {os.getpid()}"
    share.release()
    lease = served(whole)
    for wanted in (SHARES, shares_of(GPUS[:1], 4)):
        waits = Ticket(wanted, 1, folder=folder)
        assert waits.serve() is None
        assert holders(wanted, folder) == f"GPU-a by process {os.getpid()}"
        waits.withdraw()
    lease.release()
    served(Ticket(SHARES, 2, folder=folder)).release()
    assert holders((*SHARES, *GPUS), folder) == ""


def test_a_gpu_that_is_wanted_as_a_whole_is_reserved_with_its_shares(folder: Path) -> None:
    """Or tasks that share it would take turns for ever."""
    share = served(Ticket(SHARES, 1, folder=folder))
    whole, later = Ticket(GPUS[:1], 1, folder=folder), Ticket(SHARES, 1, folder=folder)
    assert later.serve() is None  # although a share is free
    share.release()
    assert later.serve() is None
    lease = served(whole)
    lease.release()
    served(later).release()


def test_a_gpu_with_a_share_that_is_reserved_is_not_leased_as_a_whole(folder: Path) -> None:
    """Two GPUs; a share of the first is in use, so who wants two shares waits, and has one of the second reserved."""
    share = served(Ticket(SHARES, 2, folder=folder))
    two, whole = Ticket(("GPU-a#0", "GPU-b#0"), 2, folder=folder), Ticket(GPUS[1:2], 1, folder=folder)
    assert two.serve() is None
    assert whole.serve() is None  # although nobody uses the second GPU
    share.release()
    served(two).release()
    served(whole).release()


def test_runs_with_different_numbers_of_shares_share_them(folder: Path) -> None:
    """The shares of the smaller number are among those of the larger one."""
    two, four = (shares_of(GPUS[:1], number) for number in (2, 4))
    both = served(Ticket(two, 2, folder=folder))
    assert Ticket(two, 1, folder=folder).serve() is None
    assert served(Ticket(four[2:], 2, folder=folder)).block == ("GPU-a#2", "GPU-a#3")
    both.release()
