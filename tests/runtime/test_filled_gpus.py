"""GPUs of which somebody without a lease has taken memory: told before cells run there and find none."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import make_cell

from conformance.matrix.options import Ranks
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session
from conformance.runtime import Device, gpu_inventory
from conformance.runtime.gpu_leases import Ticket, lease_folder, unleased_use
from conformance.suite import conftest as suite

GPUS = ("GPU-a", "GPU-b", "GPU-c")
MIB = 2**20
MEMORY = {"GPU-a": (60000, 81559), "GPU-b": (2000, 81559), "GPU-c": None, "GPU-z": (80000, 81559)}  # MiB, as below


@dataclass(kw_only=True)
class Nvml:
    """Stands for pynvml. A device's handle is its UUID; ``failing`` names the functions that raise."""

    memory: dict[str, tuple[int, int] | None] = field(default_factory=lambda: dict(MEMORY))
    parts: dict[str, list[str | None]] = field(default_factory=dict)
    failing: set[str] = field(default_factory=set)
    takes_s: float = 0.0
    NVMLError = LookupError
    nvmlMemory_v2 = 2  # noqa: N815

    def _call(self, name: str, result: Any = None) -> Any:
        if name in self.failing:
            raise LookupError(name)
        return result

    def nvmlInit(self) -> None:  # noqa: N802
        time.sleep(self.takes_s)
        self._call("nvmlInit")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers: dict[str, Callable[..., Any]] = {
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "580.1",
            "nvmlDeviceGetCount": lambda: len(self.memory),
            "nvmlDeviceGetHandleByIndex": lambda number: list(self.memory)[number],
            "nvmlDeviceGetUUID": lambda handle: handle,
            "nvmlDeviceGetName": lambda handle: "H200",
            "nvmlDeviceGetMaxMigDeviceCount": lambda handle: len(self.parts.get(handle, ())),
            "nvmlDeviceGetMigDeviceHandleByIndex": self._part,
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetCudaComputeCapability": lambda handle: [9, 0],
        }
        return lambda *arguments: self._call(name, answers[name](*arguments))

    def _part(self, handle: str, number: int) -> str:
        if (part := self.parts[handle][number]) is None:
            raise LookupError(number)
        return part

    def _memory(self, handle: str, version: int) -> SimpleNamespace:
        if (memory := self.memory[handle]) is None:
            raise LookupError(handle)
        return SimpleNamespace(used=memory[0] * MIB, total=memory[1] * MIB)


@pytest.fixture(autouse=True)
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """A host where GPU-a is filled, and GPU-z, which is not ours."""
    monkeypatch.setitem(sys.modules, "pynvml", fake := Nvml())
    monkeypatch.setenv("PARITY_LEASES", str(tmp_path / "leases"))
    return fake


def test_nvml_lists_gpus_with_their_parts_and_memory(nvml: Nvml) -> None:
    nvml.parts["GPU-c"] = ["MIG-1", None, "MIG-2"]
    first, *_, third, _ = gpu_inventory.installed_gpus()
    expected = gpu_inventory.Gpu(
        uuid="GPU-a", name="H200", driver="580.1", memory=(60000 * MIB, 81559 * MIB), capability=(9, 0)
    )
    assert first == expected
    nvml.failing.add("nvmlDeviceGetCudaComputeCapability")
    assert gpu_inventory.installed_gpus()[0].capability is None
    assert (third.parts, third.memory) == (("MIG-1", "MIG-2"), None)


def test_a_gpu_is_told_of_that_holds_much_which_no_run_has_leased() -> None:
    (said,) = unleased_use(GPUS)
    assert said.startswith("58.6 of the 79.6 GiB of GPU-a are taken without a lease")
    assert said.endswith("leave the GPU out of CUDA_VISIBLE_DEVICES")
    assert unleased_use(GPUS[1:]) == []
    assert len(unleased_use(("GPU-a#0", "GPU-b#0", "GPU-a#1"))) == 1


def test_what_the_ranks_of_another_run_hold_is_not_told() -> None:
    lease = Ticket(("GPU-a#0", "GPU-a#1"), 1, folder=lease_folder()).serve()
    assert lease is not None
    assert unleased_use(("GPU-a#0", "GPU-a#1")) == []
    lease.release()
    assert len(unleased_use(GPUS)) == 1


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetUUID"])
def test_without_a_driver_there_are_no_gpus(function: str, nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.failing.add(function)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert unleased_use(GPUS) == []
    assert gpu_inventory.gpus_of_host() == ()


def test_gpus_that_cannot_be_divided_are_listed(nvml: Nvml) -> None:
    nvml.failing.add("nvmlDeviceGetMaxMigDeviceCount")
    assert len(unleased_use(GPUS)) == 1


def test_a_driver_that_hangs_stops_no_run(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.takes_s = 1.0
    monkeypatch.setattr(gpu_inventory, "LIMIT_S", 0.1)
    assert unleased_use(GPUS) == []


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
