"""Locks of files and output folders: one owner at a time, whose name others are told."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from conformance.core import io
from conformance.core.errors import UsageError
from conformance.core.io import locked, owned


def test_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    code = "import sys, os; from pathlib import Path; from conformance.core.io import owned\n"
    code += "with owned(Path(sys.argv[1]), owner='run'): os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -signal.SIGKILL
    assert (tmp_path / "lock").is_file()
    with owned(tmp_path, owner="another"):
        assert (tmp_path / "lock").read_text().endswith(": another")
    assert [*tmp_path.iterdir()] == []


def test_lock_that_was_waited_for_holds_out_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its former owner removes the file: the next owner must not hold a file that nobody else finds."""
    entered, leave = threading.Event(), threading.Event()

    def wait_for_it() -> None:
        with owned(tmp_path, owner="second"):
            entered.set()
            leave.wait(10)

    waiter = threading.Thread(target=wait_for_it)
    with owned(tmp_path, owner="first"):
        waiter.start()
        time.sleep(0.1)
    assert entered.wait(10)
    monkeypatch.setattr(io, "_LOCK_S", 0.0)
    with pytest.raises(UsageError, match=r"in use by process .*: second"), owned(tmp_path, owner="third"):
        pass
    leave.set()
    waiter.join()


def test_a_folder_on_a_full_disk_is_told_and_left_free(tmp_path: Path) -> None:
    """A limit of file sizes is a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(io.Unwritable, match="lock cannot be written"), owned(tmp_path, owner="one"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_lock_does_not_follow_a_link_or_empty_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(UsageError, match="link is not a file"), locked(tmp_path / "link"):
        pass
    with locked(tmp_path / "file"):
        pass
    assert (tmp_path / "file").read_text() == "precious"


def test_lock_that_stays_held_names_its_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "_WAIT_S", 0.1)
    with (
        locked(tmp_path / "lock"),
        pytest.raises(UsageError, match=rf"lock is held by process {os.getpid()} for 0\.1 s"),
        locked(tmp_path / "lock"),
    ):
        pass
