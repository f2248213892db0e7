"""MPS: where it cannot be started, a run says so and goes on; the daemon ends with its run, however that ends."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_leased_cells import cell_of

from conformance.core.process import process_state
from conformance.results.run_results import read_entry
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session
from conformance.runtime import Outcome, Pool, WorkerGroupConfig, mps
from conformance.runtime.gpu_inventory import shares_of
from conformance.runtime.leased_slots import Gpus

DAEMON = """#!/bin/sh
[ "$1" = -f ] || exit 0
echo $$ >"{folder}/pid"
touch "$CUDA_MPS_PIPE_DIRECTORY/control"
exec sleep 600
"""
DRIVER = """
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int cuInit(int n) {
  char path[300];
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (visible && *visible == '1') return 100;  /* the daemon has one GPU, number 0 */
  snprintf(path, sizeof path, "%s/broken", getenv("CUDA_MPS_PIPE_DIRECTORY"));
  return access(path, F_OK) ? 0 : 807;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { return 0; }
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


@pytest.fixture
def driver(daemon: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that lets every call succeed, until the folder of its daemon has a file ``broken``."""
    if shutil.which("cc") is None:
        pytest.skip("a C compiler makes the driver of this test")
    source = tmp_path / "driver.c"
    source.write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


def test_a_daemon_and_its_clients_mean_the_same_gpu_by_its_uuid(
    driver: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    slots = Gpus(("GPU-b#0", "GPU-b#1"), work_dir=tmp_path)
    starter = slots.starter(("GPU-b#0",))
    given = dict[str, str]()
    monkeypatch.setattr(slots._forkservers, "start", lambda config, variables, slots: given.update(variables))
    starter.start(WorkerGroupConfig(size=1, device="cuda", preload=()))
    assert given["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    assert "CUDA_MPS_PIPE_DIRECTORY" in given
    assert slots.mps == "on"
    slots.close()


def folder_of(running: mps.Mps) -> Path:
    return Path(running.variables()["CUDA_MPS_PIPE_DIRECTORY"])


def test_after_a_failure_ranks_get_a_new_daemon(driver: None, caplog: pytest.LogCaptureFixture) -> None:
    """It is started once, however many tasks have failed with the old one, which ends with the run."""
    running = mps.Mps()
    old = folder_of(running)
    assert not running.has_failed(0)
    (old / "broken").touch()
    assert running.has_failed(0)
    assert running.has_failed(0)
    new = folder_of(running)
    assert new != old
    assert old.is_dir()
    assert not running.has_failed(1)
    assert running.state == "on, started again after 1 failure"
    assert "MPS has failed (cuInit ended with CUDA error 807)" in caplog.text
    running.close()
    assert not old.exists()
    assert not new.exists()


def test_a_cell_that_lost_the_daemon_runs_again_beside_others(
    driver: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ranks of the new daemon; the verdict says that it had failed before."""
    monkeypatch.setenv("PARITY_LEASES", str(tmp_path / "leases"))
    monkeypatch.setenv("KILLED", str(tmp_path / "killed"))
    run, ran, kinds = Pool.run, list[bool](), list[str]()

    def counted(pool: Pool, **call: Any) -> Outcome:
        if call["key"] == "oracle":
            return run(pool, **call)
        slots: Any = pool._slots
        if not ran:
            (folder_of(slots._mps) / "broken").touch()
        ran.append(call.get("alone", False))
        outcome = run(pool, **call)
        kinds.append(outcome.kind)
        return outcome

    monkeypatch.setattr(Pool, "run", counted)
    where = SessionConfig(out=tmp_path / "out", budget_s=60, gpus=shares_of(["GPU-a"], 2))
    with Session(where) as session:
        cell = cell_of("dp1", 0, "plain_variants:KilledOnce")
        assert session.run(cell).verdict.state == "conforms"
        entry = read_entry(session.folder(cell) / "verdict.json")
    assert (ran, kinds) == ([False, False], ["MPS", ""])
    assert entry.before == ("infrastructure",)


def test_the_daemon_ends_with_a_killed_run(driver: None, daemon: Path, tmp_path: Path) -> None:
    code = "import sys; from conformance.runtime.mps import Mps; m = Mps(); print(m.variables(), flush=True); input()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
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
