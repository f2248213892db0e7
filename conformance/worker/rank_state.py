"""Observes the random generators, the peak memory and the exported settings of a rank.

Generators: dropout and the order of data draw random numbers; nothing that is compared with the oracle does. So
generators are checked by their states. At the start of a phase, and again at its end before it saves, every rank's
generators get states that occur nowhere else: not in another phase, on another rank, or in a framework that seeds
itself. After loading a checkpoint, each rank has to have the states with which the same rank ended the previous phase
(docs/principles.md).

Settings: the weights of an exported folder are judged in the phase that begins with it, by its backend. Other programs
also read settings that this backend ignores there, so these are compared with the model's own.
"""

import contextlib
import hashlib
import random
from pathlib import Path
from typing import Any

import numpy
import torch

from conformance.core.io import read_json
from conformance.models.folder_checks import CONFIG
from conformance.spec.lora import ADAPTER, CONFIG_FILE


def seed_generators(seed: int, rank: int, next_step: int, *, ending: bool = False) -> None:
    """Seeds all generators of this rank from the scenario's seed, the rank, the number of the next optimizer step, and
    whether a phase is ``ending`` before this step or begins with it."""
    number = ((seed * 1000 + next_step) * 1000 + rank) * 2 + ending
    random.seed(number)
    numpy.random.seed(number % 2**32)
    torch.manual_seed(number)  # of every device


def generator_digests() -> dict[str, str]:
    """Returns the SHA-256 (hexadecimal) of the state of each generator: python, numpy, torch and, with a GPU, cuda."""
    kind, keys, *rest = numpy.random.get_state()
    states = {
        "python": repr(random.getstate()).encode(),
        "numpy": repr((kind, *rest)).encode() + numpy.asarray(keys).tobytes(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return {name: hashlib.sha256(state).hexdigest() for name, state in states.items()}


_PROCESS = Path("/proc/self")


class PeakMemory:
    """Measures the peaks since its creation: of the resident set, and of the GPU's memory as torch allocated it.

    Worker groups are kept alive, so the peak of the process would be that of another cell; Linux and torch can both
    reset it. The suite's own tensors are included, which are largest on rank 0.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._host_known = False
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        with contextlib.suppress(OSError):  # not Linux, or a container that does not allow it
            (_PROCESS / "clear_refs").write_text("5")  # resets "VmHWM": proc_pid_clear_refs(5)
            self._host_known = True

    def read(self) -> int:
        """Returns the peak of the rank's device in bytes; 0 if it is not known."""
        return torch.cuda.max_memory_allocated() if self._on_gpu else self.read_host()

    def read_host(self) -> int:
        """Returns the peak of the resident set in bytes, mapped files included; 0 if it is not known."""
        if not self._host_known:
            return 0
        status = (_PROCESS / "status").read_text(encoding="ascii", errors="replace")
        return 1024 * next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)


# The writer, the path and dtype of the base, and settings of generation only.
OTHER = frozenset(
    (
        "_name_or_path",
        "base_model_name_or_path",
        "transformers_version",
        "peft_version",
        "dtype",
        "torch_dtype",
        "use_cache",
    )
)
UNORDERED = "target_modules"  # peft writes a set
POSITIONS = "rope_parameters"  # where transformers 5 writes former top-level settings
MOVED = ("rope_theta", "partial_rotary_factor", "rope_scaling")


def changed_settings(folder: Path, source: Path) -> list[str]:
    """Returns the settings of ``source``, a Hugging Face folder with or without an adapter, that ``folder`` lacks or
    changes, each as ``FILE: KEY``. Settings that a library adds are left out."""
    changed: list[str] = []
    for name in (CONFIG, f"{ADAPTER}/{CONFIG_FILE}"):
        if (source / name).is_file():
            before = read_json(source / name)
            after: dict[str, Any] = read_json(folder / name) if (folder / name).is_file() else {}
            keys = before.keys() - OTHER
            same = {key for key in keys if key in after and _sorted(key, after[key]) == _sorted(key, before[key])}
            same |= {key for key in keys.intersection(MOVED) - after.keys() if _is_among(key, before[key], after)}
            changed += [f"{name}: {key}" for key in sorted(keys - same)]
    return changed


def _sorted(key: str, value: Any) -> Any:
    return sorted(value) if key == UNORDERED and isinstance(value, list) else value


def _is_among(key: str, value: Any, after: dict[str, Any]) -> bool:
    """Whether transformers 5 wrote this position setting with the same value under POSITIONS."""
    together = after.get(POSITIONS)
    if not isinstance(together, dict):
        return False
    if key != "rope_scaling":
        return bool(together.get(key) == value)
    scaling = value or {"rope_type": "default"}
    return all(together.get({"type": "rope_type"}.get(name, name)) == number for name, number in scaling.items())
