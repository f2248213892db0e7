"""GPUs that programs without leases have filled: told before cells run there and find no memory."""

import os
from pathlib import Path

import pytest

from conformance.gpus.filled import filled
from conformance.gpus.lease import Ticket, lease_folder
from conformance.run.where import Where
from conformance.world import Device

GPUS = ("GPU-a", "GPU-b", "GPU-c")
NVIDIA_SMI = """\
#!/bin/sh
cat <<'LISTED'
GPU-a, 60000, 81559
GPU-b, 2000, 81559
GPU-c, [N/A], [N/A]
GPU-z, 80000, 81559
LISTED
"""


@pytest.fixture(autouse=True)
def _host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose nvidia-smi says that GPU-a is filled, and GPU-z, which is not ours."""
    (program := tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PARITY_LEASES", str(tmp_path / "leases"))


def test_a_gpu_is_told_of_that_holds_much_which_no_run_has_leased() -> None:
    (said,) = filled(GPUS)
    assert said.startswith("other programs have 58.6 of the 79.6 GiB of GPU-a; ")
    assert said.endswith("leave the GPU out of CUDA_VISIBLE_DEVICES")
    assert filled(GPUS[1:]) == []
    assert len(filled(("GPU-a#0", "GPU-b#0", "GPU-a#1"))) == 1


def test_what_the_ranks_of_another_run_hold_is_not_told() -> None:
    lease = Ticket(("GPU-a#0", "GPU-a#1"), 1, folder=lease_folder()).serve()
    assert lease is not None
    assert filled(("GPU-a#0", "GPU-a#1")) == []
    lease.release()
    assert len(filled(GPUS)) == 1


def test_a_run_says_it_once_when_it_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said: list[tuple[Device, int]] = [("cuda", 1), ("cpu", 0)]
    for device, count in said:
        caplog.clear()
        Where(device=device, gpus=GPUS, hosts=None, work_dir=tmp_path / "worlds").close()
        assert caplog.text.count("other programs have 58.6") == count
