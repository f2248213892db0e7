"""benchmarks/host_time.py: what a step of ZeRO-3 asks of the host, in ours and in a plain program."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_a_step_of_zero3_calls_fewer_python_functions_than_the_plain_program() -> None:
    """The host is what limits ZeRO-3, and its seconds differ from one to the next; calls do not."""
    calls = [
        _calls("benchmarks/host_time.py", "fixtures/models/pangu", "dp2.zero3.ckpt", *which)
        for which in ((), ("--plain",))
    ]
    assert 0 < calls[0] < calls[1]


def _calls(*program: str) -> int:
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    told = [line for line in ended.stdout.splitlines() if line.startswith('{"layout"')]
    assert told, ended.stderr[-3000:]
    return int(json.loads(told[0])["calls"])
