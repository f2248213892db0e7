"""Measures seconds per cell in a pool of live ranks, cold and warm, and under torchrun.

python benchmarks/worlds.py [--device cpu|cuda] [--json] [--world-sizes 2 4 8] [--warm 5] [--torchrun 2]

The cell trains a tiny model for two steps (fp32, data parallel over all ranks) and writes its record; judging is not
part of it. Runs in the pool and under torchrun alternate, since the speed of a shared machine drifts. Times are those
of whole runs: under torchrun from its start to its exit, in the pool from the call to the outcome.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conformance.backends.protocol import find_backend
from conformance.core.host import FIXTURES
from conformance.data.prepare import prepare_inputs
from conformance.matrix.cell import Cell
from conformance.records.step_tensors import read_record
from conformance.runner.phases import group_config, phase_spec
from conformance.runtime import Device, Pool
from conformance.spec.layout import Layout
from conformance.spec.scenario import load_scenario
from conformance.worker.phase_spec import TASK


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Holds seconds, medians of several runs. ``not_training``: the time of a warm cell outside of its steps."""

    torchrun: float
    pool_cold: float
    pool_warm: float
    torchrun_over_pool: float
    not_training: float
    not_training_share: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--warm", type=int, default=5, help="warm runs in the pool")
    parser.add_argument("--torchrun", type=int, default=2, help="runs under torchrun")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        timings = {
            str(size): measure(
                size, Path(folder) / str(size), options.device, warm=options.warm, torchruns=options.torchrun
            )
            for size in options.world_sizes
        }
    if options.json:
        print(json.dumps({"world_sizes": {size: asdict(timing) for size, timing in timings.items()}}))
        return
    print(f"{'ranks':>5} {'torchrun':>9} {'pool cold':>10} {'pool warm':>10} {'ratio':>6} {'not training':>20}")
    for size, t in timings.items():
        share = f"{t.not_training:.2f} s ({t.not_training_share:.0%})"
        row = f"{t.torchrun:>7.1f} s {t.pool_cold:>8.1f} s {t.pool_warm:>8.2f} s {t.torchrun_over_pool:>6.1f}"
        print(f"{size:>5} {row} {share:>20}")


def measure(size: int, out: Path, device: Device, *, warm: int, torchruns: int) -> Timing:
    """Times one world size. The pool is new, so its first cell includes imports and the start of the ranks."""
    scenario = load_scenario(
        FIXTURES / "scenarios" / "sft-padded.toml", model="models/llama", precision="fp32", steps=2
    )
    cell = Cell.single(scenario=scenario, backend=find_backend("fsdp2"), layout=Layout(dp=size))
    inputs = prepare_inputs(scenario, out)
    pooled: list[float] = []
    started: list[float] = []
    steps: list[float] = []
    with Pool(work_dir=out / "worlds") as pool:
        for i in range(1 + warm):
            folder = out / f"pool-{i}"
            began = time.perf_counter()
            outcome = pool.run(
                key="benchmark",
                config=group_config(cell.phases[0], device),
                task=TASK,
                kwargs=phase_spec(cell, 0, inputs, folder, None).kwargs,
                log_dir=out / f"logs-{i}",
                budget_s=300,
            )
            pooled.append(time.perf_counter() - began)
            assert outcome.state == "done", outcome.reason
            steps.append(sum(step.line["seconds"] for step in read_record(folder / "record").steps))
            if i < torchruns:
                kwargs = phase_spec(cell, 0, inputs, out / f"torchrun-{i}", None).kwargs
                started.append(_torchrun(size, kwargs, out, device))
    pool_warm, torchrun = statistics.median(pooled[1:]), statistics.median(started)
    not_training = statistics.median(total - training for total, training in zip(pooled[1:], steps[1:], strict=True))
    return Timing(
        torchrun=torchrun,
        pool_cold=pooled[0],
        pool_warm=pool_warm,
        torchrun_over_pool=torchrun / pool_warm,
        not_training=not_training,
        not_training_share=not_training / pool_warm,
    )


def _torchrun(size: int, kwargs: dict[str, Any], out: Path, device: Device) -> float:
    file = out / "kwargs.json"
    file.write_text(json.dumps(kwargs), encoding="utf-8")
    script = Path(__file__).with_name("torchrun_cell.py")
    launch = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--nproc-per-node={size}"]
    command = [sys.executable, "-m", "torch.distributed.run", *launch, str(script), device, str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    began = time.perf_counter()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
