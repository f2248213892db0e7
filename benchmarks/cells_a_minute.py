"""Measures judged cells a minute of `parity run`, and of the same run with each cell under its own torchrun.

python benchmarks/cells_a_minute.py OUT [--rounds 1] --device cuda --profile gpu ...   (the rest as for parity run)

Both runs plan, lease, compute oracles, judge and report with the same code, and begin with an empty cache. They differ
in the ranks of a phase: live worker groups, or a torchrun for each phase, as trainers are usually started. Prints and
writes OUT/cells.json: for each run the seconds, the states of its cells, cells a minute from start to exit, and the
lease times of GPUs. A torchrun gives each rank its own GPU and cannot plant faults, so --ranks-per-gpu and --faults are
usage errors. A phase that takes longer than its budget (--budget) has failed. If Python keeps no bytecode
(PYTHONDONTWRITEBYTECODE), each run compiles the imports of its ranks.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

from conformance.cli import main as cli
from conformance.matrix.cell import TASK
from conformance.runner import placement
from conformance.runner.earlier_run import environment
from conformance.runtime import Outcome, Pool
from conformance.runtime.gpu_inventory import gpus_of
from conformance.runtime.pool import Lane, _Threaded, failed
from conformance.runtime.preload_server import environment as environment_of_ranks
from conformance.runtime.worker_groups import Block, SlotPool, Starter

BY_TORCHRUN = "--by-torchrun"


def main() -> int:
    if sys.argv[1:2] == [BY_TORCHRUN]:
        with patch.object(placement, "Pool", TorchrunPool):
            return cli.main(["run", *sys.argv[2:]])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=1, help="rounds of both runs, one after the other")
    options, arguments = parser.parse_known_args()
    if refused := {"--ranks-per-gpu", "--faults"} & {argument.partition("=")[0] for argument in arguments}:
        parser.error(f"{', '.join(refused)} is not possible under torchrun; leave it out")
    options.out.mkdir(parents=True)
    runs: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for name, command in (
            ("pool", ["-m", "conformance.cli.main", "run"]),
            ("torchrun", [str(Path(__file__)), BY_TORCHRUN]),
        ):
            runs.append({"by": name, **timed(command, arguments, options.out / f"{name}-{number}")})
            result = {"arguments": arguments, "environment": environment(), "runs": runs}
            (options.out / "cells.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
            print(json.dumps(runs[-1]), flush=True)
    return 0


def timed(command: list[str], arguments: list[str], out: Path) -> dict[str, Any]:
    """Runs a process to its end. Raises CalledProcessError with its output if it wrote no summary."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *command, *arguments, "--verbose", "--out", str(out)],
        env={**os.environ, "PARITY_CACHE": str(out.with_name(f"{out.name}-cache").absolute())},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began
    if not (out / "summary.json").is_file():
        raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout, done.stderr[-2000:])
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    states = Counter(cell["state"] for cell in summary["cells"])
    judged = sum(states[state] for state in ("conforms", "partly_observed", "differs", "expected_difference"))
    return {
        "seconds": round(seconds, 1),
        "states": dict(states),
        "cells_a_minute": round(60 * judged / seconds, 2),
        "leased": summary["leased"],
    }


class TorchrunLane(Lane):
    """Starts a torchrun for each phase of a cell; other tasks (an oracle) run as in a pool."""

    def __init__(self, starter: Starter, block: Block) -> None:
        super().__init__(starter)
        self._block = block

    def run(self, **call: Any) -> Outcome:
        """See conformance.runtime.pool.Lane.run."""
        if call["task"] != TASK:
            return super().run(**call)
        config, log_dir, began = call["config"], Path(call["log_dir"]), time.monotonic()
        log_dir.mkdir(parents=True, exist_ok=True)
        file = log_dir / "kwargs.json"
        file.write_text(json.dumps(call["kwargs"]), encoding="utf-8")
        rendezvous = ("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--nproc-per-node={config.size}")
        script = (str(Path(__file__).with_name("torchrun_cell.py")), config.device, str(file))
        variables = environment_of_ranks() | {"PYTHONPATH": os.pathsep.join(sys.path)}
        if self._block:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_of(self._block))
        command = [sys.executable, "-m", "torch.distributed.run", *rendezvous, *script]
        with (log_dir / "torchrun.log").open("wb") as log:
            try:
                subprocess.run(command, env=variables, stdout=log, stderr=log, check=True, timeout=call["budget_s"])
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                return failed(f"{error}; its output is in {log_dir}", kind="exited", began=began)
        seconds, results = time.monotonic() - began, [dict[str, int]() for _ in range(config.size)]
        return Outcome(state="done", reason="", kind="", rank=None, seconds=seconds, results=results)


class TorchrunPool(Pool):
    """Runs the phases of cells in lanes of torchrun."""

    def __init__(self, *, work_dir: Path, slots: SlotPool | None = None) -> None:
        super().__init__(work_dir=work_dir, slots=slots)
        self._own = TorchrunLane(self._forkservers, ())

    def prepare(self, config: Any) -> None:
        """Does nothing, because no worker group of this config will be started."""

    def _lane(self, slots: SlotPool, block: Block) -> _Threaded:
        if block not in self._lanes:
            thread = ThreadPoolExecutor(max_workers=1)
            self._lanes[block] = _Threaded(lane=TorchrunLane(slots.starter(block), block), thread=thread)
        return super()._lane(slots, block)


if __name__ == "__main__":
    sys.exit(main())
