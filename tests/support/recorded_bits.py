"""Runs cells with `parity run`, and compares all tensors that two runs have recorded, bit by bit."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from conformance.records.step_tensors import read_record


def run_cells(out: Path, device: str, *arguments: str, env: Mapping[str, str]) -> int:
    """Runs cells on a device, keeps all tensors in ``out``, and returns the exit code."""
    command = [sys.executable, "-m", "conformance.cli.main", "run", "--device", device, "--keep", "all"]
    command += ["--no-bisect", "--out", str(out), *arguments]
    with out.with_suffix(".log").open("w") as log:
        return subprocess.run(command, env=dict(env), stdout=log, stderr=log, check=False).returncode


def assert_same_bits(first: Path, second: Path, *, cells: int) -> None:
    """Checks that all cells of two runs have the same bits in every tensor that both have recorded.

    Weights are read at a few steps, which nobody knows in advance, so not in both runs at the same ones.
    """
    records = [
        {path.relative_to(out): read_record(path) for path in out.glob("cells/*/legs/*/record")}
        for out in (first, second)
    ]
    assert len(records[0]) >= cells
    assert records[0].keys() == records[1].keys()
    for where, record in records[0].items():
        compared = 0
        for step, other in zip(record.steps, records[1][where].steps, strict=True):
            tensors, others = step.tensors(), other.tensors()
            for name in tensors.keys() & others.keys():
                assert torch.equal(tensors[name], others[name]), f"{where}, step {step.step}: {name}"
                compared += 1
        assert compared > 20, where
