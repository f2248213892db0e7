"""Forks of this process compute in parallel: results keep their order, errors arrive, and no fork is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from conformance.core.errors import UsageError
from conformance.core.process import map_in_forks, process_state

SLOW = """
import os, time
from conformance.core.process import map_in_forks

def wait(_):
    os.write(1, f"{os.getpid()}\\n".encode())  # in one piece, as print may not
    time.sleep(600)

os.sched_getaffinity = lambda _: range(2)
map_in_forks(wait, [0, 1], most=2)
"""


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))


@pytest.mark.usefixtures("processors")
def test_results_have_the_order_of_the_items_and_come_from_other_processes() -> None:
    factor = 3  # a function that cannot be pickled

    def product(item: int) -> tuple[int, int]:
        time.sleep(0.1 / item)  # the last is the first to end
        return item * factor, os.getpid()

    found = map_in_forks(product, [1, 2, 3, 4], most=3)
    assert [value for value, _ in found] == [3, 6, 9, 12]
    pids = {pid for _, pid in found}
    assert os.getpid() not in pids
    assert len(pids) == 3
    assert not any(process_state(pid) for pid in pids)


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize("most", [0, 1])
def test_what_is_not_worth_forks_is_computed_here(most: int) -> None:
    assert set(map_in_forks(lambda _: os.getpid(), range(4), most=most)) == {os.getpid()}


class OfTwo(Exception):  # cannot be read from a pickle
    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file}, line {line}")


def edited(item: int) -> None:
    raise UsageError(f"file {item} was edited")


def of_two(item: int) -> None:
    raise OfTwo("a", item)


def killed(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("processors")
@pytest.mark.parametrize(
    ("fail", "kind", "words"),
    [
        (edited, UsageError, "file 3 was edited"),
        (of_two, RuntimeError, "OfTwo: a, line 3"),
        (killed, RuntimeError, "a fork was killed"),
    ],
)
def test_an_error_of_a_fork_is_raised_here(fail: Callable[[int], None], kind: type[Exception], words: str) -> None:
    def read(item: int) -> None:
        if item == 3:
            fail(item)

    with pytest.raises(kind, match=words):
        map_in_forks(read, range(4), most=2)


@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_forks_end_with_the_process_that_made_them(number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout
    try:
        forks = [int(parent.stdout.readline()) for _ in range(2)]
        parent.send_signal(number)
        until = time.monotonic() + 60
        while any(process_state(pid) not in ("", "Z") for pid in forks) and time.monotonic() < until:
            time.sleep(0.02)
        left = [pid for pid in forks if process_state(pid) not in ("", "Z")]
    finally:
        parent.kill()
        parent.communicate()
    assert not left
