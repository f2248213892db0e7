"""How ``parity train`` starts ranks and ends: environment, signals, failures, exit codes."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.core.process import listening_store
from impl.train.launch import _Signals, run_ranks

ENVIRONMENT = """
import os, pathlib, sys
from torch.distributed import TCPStore
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
store.add("seen", 1)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(" ".join(os.environ[name] for name in names))
"""
# Of three ranks, the second fails and the others wait for it, as in a collective.
FAILURE = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("the reason", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
print("not this")
time.sleep(600)
"""
# A rank that is asked to stop writes a checkpoint, which takes a while, and ends well; the second argument is how long.
# It does not wait for ever.
STOPPED = """
import os, pathlib, signal, sys, time
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append("SIGINT"))
signal.signal(signal.SIGTERM, lambda *_: asked.append("SIGTERM"))
pathlib.Path(sys.argv[1], "ready" + os.environ["RANK"]).touch()
end = time.monotonic() + 30
while not asked and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(float(sys.argv[2]))
pathlib.Path(sys.argv[1], "saved" + os.environ["RANK"]).write_text(" ".join(asked))
"""
# The second rank computes, and the first one waits for it. Before, it prints the local addresses, as /proc has them, at
# which it and the process that started it listen.
WAITS = """
import os, sys, time
from pathlib import Path
from impl.interface.distributed import limited_waits, on_first
def computes():
    time.sleep(60)
def print_listeners():
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for pid in ("self", os.getppid())
             for fd in os.listdir(f"/proc/{pid}/fd") if os.path.islink(f"/proc/{pid}/fd/{fd}")]
    for line in open("/proc/net/tcp").readlines()[1:] + open("/proc/net/tcp6").readlines()[1:]:
        local, state, inode = line.split()[1], line.split()[3], line.split()[9]
        if state == "0A" and f"socket:[{inode}]" in links:
            print(local, flush=True)
Path(sys.argv[1], os.environ["RANK"]).touch()
for _ in range(6000):
    if len(os.listdir(sys.argv[1])) == 2:
        break
    time.sleep(0.01)
with limited_waits(3.0, device="cpu"):
    if os.environ["RANK"] == "0":
        print_listeners()
    computes() if os.environ["RANK"] == "1" else on_first("writing a file", print)
"""
LAUNCH = "import sys; from impl.train.launch import run_ranks; sys.exit(run_ranks(sys.argv[1:], ranks=2, device='cpu'))"


@pytest.fixture(autouse=True)
def handlers() -> object:
    """The signal handlers of this process are put back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


@contextmanager
def launched(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """``run_ranks`` in a process of its own, which is ended in any case, and its ranks with it."""
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    with subprocess.Popen(python(LAUNCH, *command), env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.exhaustive
def test_ranks_get_what_torchrun_gives_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert run_ranks(python(ENVIRONMENT, tmp_path), ranks=2, device="cpu") == 0
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"0": "0 0 2 2 1", "1": "1 1 2 2 1"}


@pytest.mark.parametrize(("host", "is_told"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_store_says_if_other_machines_reach_it(host: str, is_told: bool, capfd: pytest.CaptureFixture[str]) -> None:
    store = listening_store(host, 0)
    told = f"parity: listening at {host}, port {store.port}, without authentication"
    assert (told in capfd.readouterr().err) == is_told


@pytest.mark.parametrize(("code", "exit_code"), [(7, 1), (2, 2)])
def test_the_rank_that_failed_is_told_and_the_others_are_ended(
    code: int, exit_code: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("impl.train.launch.GRACE_S", 0.2)
    begun = time.monotonic()
    assert run_ranks(python(FAILURE, code), ranks=3, device="cpu") == exit_code
    assert time.monotonic() - begun < 60
    told = capfd.readouterr().err
    assert f"rank 1 failed (exit code {code})\nthe reason" in told
    assert "not this" not in told


def test_ranks_meet_at_loopback_and_a_wait_that_is_too_long_ends_all_and_names_both_sides(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Who can connect to the store decides whom the ranks connect to."""
    assert run_ranks(python(WAITS, tmp_path), ranks=2, device="cpu") == 1
    said, told = capfd.readouterr()
    assert len(said.split()) >= 2, said  # the store, and the rank itself
    assert all(address.startswith("0100007F") for address in said.split()), said
    assert "no answer of other ranks for 3 s (--ddp-timeout)\n  rank 0: writing a file, in a collective" in told
    assert re.search(r"^  rank 1: in computes ", told, re.M), told


def test_a_launcher_that_is_killed_leaves_no_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """None has a name while the ranks run."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_ranks(python("import os, sys; print(os.listdir(sys.argv[1]))", tmp_path), ranks=2, device="cpu") == 0
    assert capfd.readouterr().out == "[]\n"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("foreground")
@pytest.mark.parametrize(
    ("signals", "long"),
    [((signal.SIGINT,), 0.5), ((signal.SIGTERM, signal.SIGINT), 600)],
)
def test_a_signal_is_passed_on_once_and_waited_for_and_a_second_one_ends_all(
    signals: tuple[signal.Signals, ...], long: float, tmp_path: Path
) -> None:
    command = python(STOPPED, tmp_path, long)
    with launched(command) as process:
        wait_for(tmp_path, "ready")
        for number in signals:
            process.send_signal(number)
            time.sleep(0.3)
        assert process.wait(60) == 128 + signals[0]
    saved = sorted(file.read_text() for file in tmp_path.glob("saved*"))
    assert saved == (["SIGINT", "SIGINT"] if len(signals) == 1 else [])


@pytest.mark.usefixtures("foreground")
def test_a_signal_that_comes_while_a_rank_is_being_started_reaches_that_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start: Any = subprocess.Popen

    def start_late(*arguments: Any, env: dict[str, str], **options: Any) -> Any:
        process = start(*arguments, env=env, **options)
        if env["RANK"] == "1":
            wait_for(tmp_path, "ready")
            os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr("impl.train.launch.subprocess.Popen", start_late)
    assert run_ranks(python(STOPPED, tmp_path, 0), ranks=2, device="cpu") == 128 + signal.SIGINT
    assert sorted(file.read_text() for file in tmp_path.glob("saved*")) == ["SIGINT", "SIGINT"]


@pytest.mark.usefixtures("foreground")
def test_a_rank_that_is_started_when_a_signal_comes_gets_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same signal twice would end it without a checkpoint. A second signal of the user ends it at once."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr("impl.train.launch.signal_process", lambda pid, number: sent.append((pid, number)))
    process: Any = SimpleNamespace(pid=1)
    signals = _Signals(started=[process])
    signals.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    signals.pass_on()
    assert sent == [(1, signal.SIGTERM)]
    os.kill(os.getpid(), signal.SIGTERM)
    assert sent == [(1, signal.SIGTERM), (1, signal.SIGKILL)]


@pytest.mark.exhaustive
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(tmp_path: Path) -> None:
    """As SIGINT is in the background of a shell's script; SIGTERM still stops."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which processes inherit
    with launched(python(STOPPED, tmp_path, 0)) as process:
        signal.signal(signal.SIGINT, before)
        wait_for(tmp_path, "ready")
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert sorted(file.read_text() for file in tmp_path.glob("saved*")) == ["SIGTERM", "SIGTERM"]


def wait_for(folder: Path, name: str) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.glob(f"{name}*"))) < 2:
        assert time.monotonic() < deadline, f"no {name} in {folder}"
        time.sleep(0.02)
