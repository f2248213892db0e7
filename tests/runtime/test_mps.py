"""MPS: where it cannot be started, a run says so and goes on; the daemon ends with its run, however that ends."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conformance.core.process import process_state
from conformance.runtime import mps
from conformance.runtime.leased_slots import Gpus

DAEMON = """#!/bin/sh
[ "$1" = -f ] || exit 0
echo $$ >"{folder}/pid"
touch "$CUDA_MPS_PIPE_DIRECTORY/control"
exec sleep 600
"""


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a program that stands for NVIDIA's daemon onto the path, and returns the file with its process id."""
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(DAEMON.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv(mps.SWITCH, "1")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return tmp_path / "pid"


def has_ended(file: Path) -> bool:
    deadline = time.monotonic() + 20
    while process_state(int(file.read_text())) not in ("", "Z") and time.monotonic() < deadline:
        time.sleep(0.05)
    return process_state(int(file.read_text())) in ("", "Z")


def test_where_no_client_connects_a_run_says_so_and_goes_on(
    daemon: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its driver is a file that cannot be loaded, which is found before one of the system."""
    (tmp_path / "libcuda.so.1").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    slots = Gpus(("GPU-a#0", "GPU-a#1"), work_dir=tmp_path / "worlds")
    assert "CUDA_MPS_PIPE_DIRECTORY" not in slots.starter(("GPU-a#0", "GPU-a#1")).more()
    slots.close()
    assert "ranks that share a GPU take turns: MPS does not start: " in caplog.text
    assert "libcuda.so.1: file too short" in caplog.text
    assert has_ended(daemon)


def test_without_the_drivers_programs_a_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(mps.SWITCH, "1")
    assert mps.Mps().variables() == {}
    assert "nvidia-cuda-mps-control is not installed" in caplog.text


def test_a_daemon_of_the_user_is_left_alone(daemon: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/of-the-user")
    running = mps.Mps()
    assert running.variables() == {}
    assert running.state == "the user's (CUDA_MPS_PIPE_DIRECTORY)"
    assert not daemon.exists()


@pytest.mark.parametrize(
    ("switch", "shared", "starts"), [(None, True, True), (None, False, False), ("0", True, False), ("1", False, True)]
)
def test_a_daemon_starts_where_ranks_of_a_cell_share_a_gpu(
    switch: str | None, shared: bool, starts: bool, daemon: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if switch is None:
        monkeypatch.delenv(mps.SWITCH)
    else:
        monkeypatch.setenv(mps.SWITCH, switch)
    slots = Gpus(("GPU-a#0", "GPU-a#1"), work_dir=tmp_path, shared=shared)
    assert (slots.mps == "starting") == starts
    if starts:
        assert slots.starter(("GPU-a#0",)).more() == {}  # no client connects
        assert slots.mps.startswith("off: MPS does not start: ")
    slots.close()
    assert daemon.exists() == starts


@pytest.mark.skipif(shutil.which("cc") is None, reason="a C compiler makes the driver of this test")
def test_the_daemon_ends_with_a_killed_run(daemon: Path, tmp_path: Path) -> None:
    """Its client is a driver that lets every call succeed."""
    source = tmp_path / "driver.c"
    source.write_text("int cuInit(int n) { return 0; } int cuDevicePrimaryCtxRetain(void **c, int d) { return 0; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    code = "import sys; from conformance.runtime.mps import Mps; m = Mps(); print(m.variables(), flush=True); input()"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with run:
        assert run.stdout is not None
        said = run.stdout.readline()
        assert "CUDA_MPS_PIPE_DIRECTORY" in said
        assert process_state(int(daemon.read_text())) not in ("", "Z")
        run.send_signal(signal.SIGKILL)
    assert has_ended(daemon)
    folder = Path(said.split("'")[3])
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()
