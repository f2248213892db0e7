"""benchmarks/throughput.py: how the steps of two programs alternate, and what is said of them."""

import argparse
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import throughput  # noqa: E402
import timing  # noqa: E402

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


def test_throughput_takes_slowest_rank_and_largest_memory() -> None:
    first = {**measured(2.0, 2.5), "tokens_per_second": 9, "mfu": 0.2, "loss": 0.0}
    last = {**measured(1.0, 3.0), "fastest": 12, "mfu": 0.3, "peak_gib": 4.0, "host_gib": 2.0, "loss": 7.0}
    told = {**first, "peak_gib": 4.0, "host_gib": 2.0, "loss": 7.0}  # a loss of zero is of a stage that knows none
    assert timing.of_all_ranks([first, last]) == told
    assert timing.of_all_ranks([last, first]) == told


def test_of_steps_in_turn_each_is_compared_with_the_one_that_follows() -> None:
    seen = ([measured(2.0, 4.0)], [measured(3.0, 3.0)])
    ratios = throughput.summary_of(PAIR, seen, in_turn=True)["ours_by_plain"]
    # 1.5: ours took two thirds of the time
    assert ratios["of_steps"] == {"median": 1.125, "all": [1.5, 0.75], "quartiles": [0.9375, 1.3125]}
    assert "of_steps" not in throughput.summary_of(PAIR, seen, in_turn=False)["ours_by_plain"]


def test_a_program_that_failed_has_no_ratio() -> None:
    told = throughput.summary_of(PAIR, ([measured(2.0)], [{"failed": "out of memory"}]), in_turn=True)
    assert told["ours_by_plain"] == {}
    assert told["of_plain"] == [{"failed": "out of memory"}]


def test_a_run_writes_the_scaling_of_its_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds = {"ours.py": 10, "plain_fsdp2.py": 20}
    monkeypatch.setattr(
        throughput, "run", lambda program, options: {**measured(1.0), "tokens_per_second": speeds[program[0]]}
    )
    monkeypatch.setattr(throughput, "environment", lambda: {"gpus": ["NVIDIA H200, 1.2"]})
    first, second = tmp_path / "two.json", tmp_path / "four.json"
    for gpus, out, more in (("2", first, ()), ("4", second, ("--scaling-of", str(first)))):
        only = ("--gpus", gpus, "--rounds", "1", "--only", f"fsdp2 dp{gpus}.ckpt plain", *more)
        monkeypatch.setattr(sys, "argv", ["throughput.py", "MODEL", str(out), *only])
        throughput.main()
        speeds = {"ours.py": 9, "plain_fsdp2.py": 22}
    told = json.loads(second.read_text())
    assert told["scaling_of"] == {"file": "two.json", "gpus": 2}
    assert [pair["by_fewer_gpus"] for pair in told["pairs"]] == [{"ours": 0.9, "plain": 1.1}]
    assert capsys.readouterr().out.endswith(second.read_text() + "\n")
    assert "by_fewer_gpus" not in json.loads(first.read_text())["pairs"][0]


def test_what_failed_has_no_scaling_and_rounds_count_by_their_median() -> None:
    def pair(*plain: int) -> dict[str, Any]:
        rounds = [{"tokens_per_second": speed} for speed in plain]
        return {"ours": "fsdp2 dp2", "of_ours": [{"failed": "no"}], "plain": "a.py dp2", "of_plain": rounds}

    assert throughput.by_fewer_gpus(pair(30, 50, 10), [pair(20, 20, 90)]) == {"plain": 1.5}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"gpus": 2}, "that file has 2 GPUs"),
        ({"rows": 1}, "other rows"),
        ({"in_turn": True}, "other in_turn"),
        ({"environment": {"gpus": ["NVIDIA H100, 1.2"]}}, "other GPUs"),
    ],
)
def test_scaling_of_another_measurement_is_refused(other: dict[str, Any], said: str) -> None:
    result = {"model": "m", "gpus": 2, "seq": 8, "rows": 4, "in_turn": False, "environment": {"gpus": ["NVIDIA H200"]}}
    throughput.comparable(result, {**result, "gpus": 1})
    with pytest.raises(SystemExit, match=said):
        throughput.comparable(result, {**result, "gpus": 1, **other})
    with pytest.raises(SystemExit, match="does not name its GPUs"):  # as those of 2026-11-22
        throughput.comparable(result, {name: value for name, value in result.items() if name != "environment"})


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
