"""Checks whole runs on real GPUs: next to a program without leases, next to each other, and on fewer GPUs."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from recorded_bits import assert_same_bits, run_cells

from conformance.results.run_results import read_run
from conformance.results.verdict import Verdict
from conformance.runtime.gpu_inventory import gpus_of_host
from conformance.runtime.gpu_leases import lease_folder, leases_by_process

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")

PROFILE = """
description = "a rank, and two"
[[cells]]
scenarios = ["sft-packed"]
models = ["pangu"]
layouts = ["dp1", "dp2"]
precisions = ["fp32"]
"""
# Leaves less of a GPU than a context of CUDA takes, says so, and keeps the rest until its input ends.
FILLER = """
import sys, torch
left, kept = 100 << 20, [torch.empty(1, device="cuda")]
while (free := torch.cuda.mem_get_info()[0]) > left + (2 << 20):
    kept.append(torch.empty(free - left, dtype=torch.uint8, device="cuda"))
print("filled", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _leases(leased_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_LEASES", str(tmp_path / "leases"))


def on(gpu: str) -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}


def begin(folder: Path, *, gpu: str) -> subprocess.Popen[str]:
    """Begin a run of both cells, with results in ``folder``, where this GPU is all that CUDA_VISIBLE_DEVICES names."""
    (profile := folder.with_suffix(".toml")).write_text(PROFILE)
    command = [sys.executable, "-m", "conformance.cli.main", "run", "--device", "cuda", "--backend", "fsdp2"]
    command += ["--profile", str(profile), "--out", str(folder)]
    with folder.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, env=on(gpu), stdout=log, stderr=log, text=True)


def said_by(run: subprocess.Popen[str], folder: Path) -> str:
    """All that a run has said, when it has ended."""
    with run:
        run.wait()
    return folder.with_suffix(".log").read_text()


def verdicts(folder: Path) -> dict[str, Verdict]:
    return {entry.cell: entry.verdict for entry in read_run(folder)[1]}


PACKED = [
    f"sft-packed/{model}/fsdp2/{layout}/{tier}"
    for tier in ("exact", "fp32")
    for model, layout in (("llama", "dp2"), ("llama", "tp2"), ("qwen3", "dp2"))
]
ONE, TWO = (f"sft-packed/pangu/fsdp2/{layout}/fp32" for layout in ("dp1", "dp2"))


def test_full_gpu_is_reported_and_works_after_program_ends(tmp_path: Path) -> None:
    gpu = gpus_of_host()[0]
    filler = [sys.executable, "-c", FILLER]
    with subprocess.Popen(filler, env=on(gpu), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout
        assert program.stdout.readline() == "filled\n"
        said = said_by(begin(tmp_path / "beside", gpu=gpu), tmp_path / "beside")
        program.communicate()
    assert "are taken without a lease" in said
    assert f"GiB of {gpu}" in said
    verdict = verdicts(tmp_path / "beside")[ONE]
    assert verdict.state == "infrastructure", said
    assert "ran out of memory" in verdict.reason
    said = said_by(begin(tmp_path / "afterwards", gpu=gpu), tmp_path / "afterwards")
    assert verdicts(tmp_path / "afterwards")[ONE].state == "conforms", said
    assert "without a lease" not in said


def test_runs_on_one_gpu_take_turns_and_a_cell_of_two_is_not_run(tmp_path: Path) -> None:
    """The last GPU of the host, where CUDA_VISIBLE_DEVICES is shrunken to it."""
    gpu = gpus_of_host()[-1]
    seen = set[int]()
    with ExitStack() as stack:
        runs = [stack.enter_context(begin(tmp_path / name, gpu=gpu)) for name in ("first", "second")]
        for one in runs:
            stack.callback(one.kill)
        while any(one.poll() is None for one in runs):
            having = leases_by_process(gpus_of_host(), lease_folder())
            assert all(names == {gpu} for names in having.values())
            seen |= having.keys()
            time.sleep(0.02)
    assert seen == {one.pid for one in runs}
    for folder in ("first", "second"):
        found = verdicts(tmp_path / folder)
        assert found[ONE].state == "conforms", found[ONE].reason
        assert (found[TWO].state, found[TWO].reason.partition(";")[0]) == ("not_run", "needs 2 GPUs, 1 visible")


def test_cells_that_share_a_gpu_give_the_same_bits_as_alone(tmp_path: Path) -> None:
    """Two ranks on one GPU, one cell at a time; then four at once, so in other worker groups, after other cells."""
    gpu = gpus_of_host()[0]
    chosen = [part for name in PACKED for part in ("--profile", "gpu", "--cells", name)]
    for folder, workers in (("alone", "1"), ("packed", "4")):
        arguments = ("--ranks-per-gpu", "2", "--workers", workers, *chosen)
        assert run_cells(tmp_path / folder, "cuda", *arguments, env=on(gpu)) == 0
    assert_same_bits(tmp_path / "alone", tmp_path / "packed", cells=len(PACKED))
