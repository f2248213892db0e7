"""benchmarks/exchange.py: what it says of two training states, and the whole of it at tiny size."""

import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conformance.core.host import FIXTURES

ROOT = Path(__file__).parents[2]
EXCHANGE = ROOT / "benchmarks" / "exchange.py"
WEIGHTS = {name: torch.full((3,), value) for name, value in (("a", 1.0), ("b", 2.0), ("c", 4.0))}


def state(folder: Path, weights: dict[str, torch.Tensor], *, files: int = 1) -> Path:
    """A folder with the tensors of one kind in several files."""
    place = folder / "checkpoint" / "policy" / "weight"
    place.mkdir(parents=True)
    for number in range(files):
        part = {name: tensor for at, (name, tensor) in enumerate(weights.items()) if at % files == number}
        save_file(part, place / f"model-{number}.safetensors")
    return folder


@pytest.mark.parametrize(
    ("wrong", "apart"),
    [(torch.full((3,), 4.0), 0.0), (torch.tensor([4.0, 4.0, 5.0]), 0.25), (torch.full((3,), math.nan), math.inf)],
)
def test_states_are_compared_by_the_names_of_tensors_whatever_file_they_are_in(
    tmp_path: Path, wrong: torch.Tensor, apart: float
) -> None:
    one, other = state(tmp_path / "one", WEIGHTS), state(tmp_path / "other", WEIGHTS | {"c": wrong}, files=2)
    assert runpy.run_path(str(EXCHANGE))["differences"](one, other) == {"weight": apart}


def test_a_folder_without_a_state_and_a_tensor_that_is_missing_are_no_agreement(tmp_path: Path) -> None:
    differences = runpy.run_path(str(EXCHANGE))["differences"]
    with pytest.raises(AssertionError, match="has no training state"):
        differences(tmp_path, tmp_path)
    with pytest.raises(AssertionError, match="have other tensors"):
        differences(state(tmp_path / "one", WEIGHTS), state(tmp_path / "other", {"a": WEIGHTS["a"]}))


@pytest.mark.exhaustive
def test_a_training_goes_on_from_backend_to_backend_as_if_it_were_one(tmp_path: Path) -> None:
    model, out = FIXTURES / "models" / "pangu", tmp_path / "out"
    command = [sys.executable, str(EXCHANGE), str(model), str(out), "--max-len", "32", "--steps", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["goes_on_alike"]
