"""benchmarks/throughput.py: how the steps of two programs alternate, and what is said of them."""

import argparse
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import throughput  # noqa: E402

PAIR = ("fsdp2", "dp2.ckpt", "plain_fsdp2.py", "dp2")
# A program of one rank without a GPU, whose step writes a line to a file that both programs share.
PROGRAM = """
import sys, time
import timing
import torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
timing._wait = lambda: None
turns = timing.Turns()
for number in range(3):
    turns.take(number)
    time.sleep(0 if turns.me else 0.3)
    with open(sys.argv[1], "a") as file:
        print(turns.me, number, file=file)
    turns.give(number)
"""


def measured(*seconds: float) -> dict[str, Any]:
    return {"tokens_per_second": 10, "fastest": 10, "peak_gib": 1.0, "host_gib": 1.0, "seconds": list(seconds)}


def test_of_steps_in_turn_each_is_compared_with_the_one_that_follows() -> None:
    seen = ([measured(2.0, 4.0)], [measured(3.0, 3.0)])
    ratios = throughput.told(PAIR, seen, in_turn=True)["ours_by_plain"]
    # 1.5: ours took two thirds of the time
    assert ratios["of_steps"] == {"median": 1.125, "all": [1.5, 0.75], "quartiles": [0.9375, 1.3125]}
    assert "of_steps" not in throughput.told(PAIR, seen, in_turn=False)["ours_by_plain"]


def test_a_program_that_failed_has_no_ratio() -> None:
    told = throughput.told(PAIR, ([measured(2.0)], [{"failed": "out of memory"}]), in_turn=True)
    assert told["ours_by_plain"] == {}
    assert told["of_plain"] == [{"failed": "out of memory"}]


@pytest.mark.exhaustive
def test_steps_of_two_programs_alternate_and_ours_comes_first(tmp_path: Path) -> None:
    store, log = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), tmp_path / "log"
    programs = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(log)],
            env={**os.environ, "TURNS": f"{store.port}:{me}", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for me in (1, 0)
    ]
    try:
        assert [program.wait(120) for program in programs] == [0, 0]
    finally:
        for program in programs:
            program.kill()
    assert log.read_text().split("\n")[:-1] == ["0 0", "1 0", "0 1", "1 1", "0 2", "1 2"]


def test_where_one_program_fails_the_other_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    options, waited = argparse.Namespace(steps=2), []

    def run(program: tuple[str, ...], options: argparse.Namespace, turns: str) -> dict[str, Any]:
        port, _, me = turns.partition(":")
        if me == "0":
            return {"failed": "out of memory"}
        store = TCPStore("127.0.0.1", int(port), timeout=timedelta(seconds=20))
        for number in range(-1, throughput.WARM_UP + options.steps):
            store.wait([f"0/{number}"])
            waited.append(number)
        return measured(1.0)

    monkeypatch.setattr(throughput, "run", run)
    assert throughput.in_turn(PAIR, options) == [{"failed": "out of memory"}, measured(1.0)]
    assert len(waited) == 1 + throughput.WARM_UP + 2
