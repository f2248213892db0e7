"""GPUs of which somebody without a lease has taken memory: told before cells run there and find none."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import make_cell

from conformance.matrix.options import Elsewhere, Ranks
from conformance.runner.session import Session
from conformance.runner.session_config import SessionConfig
from conformance.runtime import Device, gpu_inventory
from conformance.runtime.gpu_leases import Ticket, filled, lease_folder
from conformance.suite import conftest as suite

GPUS = ("GPU-a", "GPU-b", "GPU-c")
LISTED = """\
GPU-a, 60000, 81559
GPU-b, 2000, 81559
GPU-c, [N/A], [N/A]
GPU-z, 80000, 81559
"""


@pytest.fixture(autouse=True)
def _host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose nvidia-smi says that GPU-a is filled, and GPU-z, which is not ours."""
    nvidia_smi(tmp_path, LISTED)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PARITY_LEASES", str(tmp_path / "leases"))


def nvidia_smi(folder: Path, listed: str, also: str = "") -> None:
    (folder / "listed").write_bytes(listed.encode("utf-8", "surrogateescape"))
    (program := folder / "nvidia-smi").write_text(f"#!/bin/sh\ncat {folder}/listed\n{also}\n")
    program.chmod(0o755)


def test_a_gpu_is_told_of_that_holds_much_which_no_run_has_leased() -> None:
    (said,) = filled(GPUS)
    assert said.startswith("58.6 of the 79.6 GiB of GPU-a are taken without a lease")
    assert said.endswith("leave the GPU out of CUDA_VISIBLE_DEVICES")
    assert filled(GPUS[1:]) == []
    assert len(filled(("GPU-a#0", "GPU-b#0", "GPU-a#1"))) == 1


def test_what_the_ranks_of_another_run_hold_is_not_told() -> None:
    lease = Ticket(("GPU-a#0", "GPU-a#1"), 1, folder=lease_folder()).serve()
    assert lease is not None
    assert filled(("GPU-a#0", "GPU-a#1")) == []
    lease.release()
    assert len(filled(GPUS)) == 1


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        ("", 0),
        ("No devices were found\n", 0),
        ("GPU-a\nGPU-a, 60000\nGPU-a, 60000, 81559, 3\nGPU-a, \udcff, 81559\n", 0),
        (f"Failed to initialize NVML: \udcff\n{LISTED}", 1),
    ],
)
def test_what_else_nvidia_smi_says_stops_no_run(tmp_path: Path, listed: str, told: int) -> None:
    nvidia_smi(tmp_path, listed)
    assert len(filled(GPUS)) == told


def test_an_nvidia_smi_that_hangs_or_is_not_there_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, LISTED, also="exec sleep 60")
    monkeypatch.setattr(gpu_inventory, "LIMIT_S", 0.2)
    assert filled(GPUS) == []
    monkeypatch.setenv("PATH", "")
    assert filled(GPUS) == []


def test_a_run_says_it_once_when_it_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only cell wants two GPUs, of which this process sees none, so nothing is run."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    cell = make_cell("sft-packed", "pangu", "dp2", "fp32", steps=1)
    devices: list[tuple[Device, int]] = [("cuda", 1), ("cpu", 0)]
    for device, count in devices:
        caplog.clear()
        with Session(SessionConfig(out=tmp_path / device, device=device, gpus=GPUS)) as session:
            session._prepare([cell] if device == "cuda" else [])
        assert caplog.text.count("are taken without a lease") == count


def test_pytest_says_it_once_and_leaves_it_to_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    workers: list[tuple[dict[str, Any], int]] = [({}, 1), ({"workerinput": {}}, 0)]
    monkeypatch.setattr(suite, "ranks", lambda _: Ranks(device="cuda"))
    monkeypatch.setattr(suite, "elsewhere", lambda _: Elsewhere())
    monkeypatch.setattr(suite, "leased_gpus", lambda _: GPUS)
    for worker, count in workers:
        said.clear()
        config = SimpleNamespace(
            option=SimpleNamespace(collectonly=False),
            issue_config_time_warning=lambda warning, stacklevel: said.append(str(warning)),
            **worker,
        )
        suite.pytest_sessionstart(SimpleNamespace(config=config))  # type: ignore[arg-type]
        assert len(said) == count
