"""Cells side by side: how many at once, and with how many processors each of the threads that judge them computes."""

import gc
import itertools
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_cell
from recorded_bits import assert_same_bits, run_cells

from conformance.backends.protocol import BackendEntry
from conformance.core.host import HostResources, host_resources_of
from conformance.judge import cells as judging
from conformance.judge.expected_differences import judge_cell
from conformance.matrix.cell import Cell
from conformance.models import synthetic
from conformance.records import record_format
from conformance.results.run_results import read_entry, read_output_json
from conformance.results.verdict import Verdict
from conformance.runner import attempt
from conformance.runner import session as sessions
from conformance.runner.attempt import JudgedCell
from conformance.runner.placement import AtOnce, SessionConfig
from conformance.runner.preflight import Refusals, needs_of
from conformance.runner.resource_estimate import total
from conformance.runner.session import Session
from conformance.spec.precision import PrecisionName

KEPT = 64 * 1024  # bytes of a cell in the controller
PLAIN = BackendEntry(name="plain", target="plain_backend:Plain")


@pytest.fixture
def four_threads() -> Iterator[None]:
    own = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(own)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("fitting", [1, 2])
def test_lanes_run_cells_at_once_as_memory_allows(
    fitting: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cells = [
        make_cell("sft-sgd", "llama", "dp1", "exact", backend=PLAIN, seed=seed, rows=6, steps=1) for seed in range(3)
    ]
    needs = needs_of(cells, resources := host_resources_of(tmp_path))
    memory = total(needs.cells, workers=fitting).host
    monkeypatch.setattr(
        sessions,
        "host_resources_of",
        lambda out: HostResources(memory=memory, disk=resources.disk, cache=resources.cache),
    )
    done: list[JudgedCell] = []
    running, at_once, judged_alone = set[Cell](), set[int](), Session.judged

    def judged(session: Session, cell: Cell) -> JudgedCell:
        running.add(cell)
        at_once.add(len(running))
        found = judged_alone(session, cell)
        running.remove(cell)
        return found

    monkeypatch.setattr(Session, "judged", judged)
    monkeypatch.setattr(attempt, "judge_cell", lambda *_, **__: pytest.fail("judged in the controller"))
    out = tmp_path / "out"
    with Session(SessionConfig(out=out, lanes=2, oracle_lanes=2, budget_s=60)) as session:
        session.run_all(cells, progress=done.append)
    assert [one.verdict.state for one in done] == ["conforms"] * 3, [one.verdict.reason for one in done]
    assert max(at_once) == fitting
    assert caplog.text.count("memory suffices for 1 cells at once, not for 2") == (fitting < 2)
    assert read_output_json(out / "summary.json")["leased"] == {}
    verdicts = [read_entry(session.folder(cell) / "verdict.json").verdict for cell in cells]
    threads: list[int] = []

    def counted(*given: Any, **options: Any) -> Verdict:
        threads.append(torch.get_num_threads())
        return judge_cell(*given, **options)

    monkeypatch.setattr(judging, "judge_cell", counted)
    judging.rejudge(out)  # in this process
    assert threads == [1] * 3
    assert verdicts == [read_entry(session.folder(cell) / "verdict.json").verdict for cell in cells]


def test_a_session_keeps_little_of_each_cell(session: Session) -> None:
    """benchmarks/kills.py soaks with thousands of cells."""
    cell = make_cell("sft-sgd", "llama", "dp1", "exact", backend=PLAIN, rows=3, steps=1)
    kept = []
    for number in range(5):
        if number == 2:  # the first cells import and fill caches
            tracemalloc.start()
        assert session.run(cell).verdict.state == "conforms"
        record_format._small_lines.cache_clear()  # it keeps no more than 256 records
        gc.collect()
        tensors = (one for one in gc.get_objects() if type(one) is torch.Tensor)
        kept.append(tracemalloc.get_traced_memory()[0] + sum(one.untyped_storage().nbytes() for one in tensors))
    tracemalloc.stop()
    assert kept[-1] - kept[-2] < KEPT, kept


def test_as_many_cells_run_at_once_as_asked_for_and_no_more() -> None:
    """Three cells wait for one another twice, and between are counted; so do the next three."""
    layouts = ("dp1", "dp2", "dp4", "tp2", "tp4", "dp2.tp2")
    cells = [make_cell("sft-packed", "llama", layout, "exact") for layout in layouts]
    together = threading.Barrier(3)
    running: set[Cell] = set()
    most = 0

    def run(cell: Cell) -> Cell:
        nonlocal most
        running.add(cell)
        together.wait(timeout=20)
        most = max(most, len(running))
        together.wait(timeout=20)
        running.remove(cell)
        return cell

    at_once = AtOnce(3)
    try:
        assert {*at_once.run(cells, run)} == {*cells}
        assert most == 3
    finally:
        at_once.cancel()
        at_once.join()


def test_the_cheapest_cell_of_each_backend_starts_first_and_then_the_largest() -> None:
    other = BackendEntry(name="other", target="plain_backend:Plain")
    cells = [
        make_cell("sft-packed", "llama", "dp8", "exact", backend=PLAIN),
        make_cell("sft-packed", "llama", "dp1", "bf16", backend=PLAIN),
        make_cell("sft-packed", "llama", "dp2", "exact", backend=PLAIN),
        make_cell("sft-packed", "llama", "dp4", "bf16", backend=other),
        make_cell("sft-packed", "llama", "dp2", "bf16", backend=other),
    ]
    at_once = AtOnce(2)
    try:
        assert [cells.index(cell) for cell in at_once.ordered(cells)] == [2, 4, 0, 3, 1]
    finally:
        at_once.cancel()
        at_once.join()
    assert AtOnce(1).ordered(cells) == cells


def test_large_cells_of_one_weight_backend_and_oracle_start_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few worker groups give way to others on their shares."""
    monkeypatch.setattr(synthetic, "LARGE_MODELS", 0)
    other = BackendEntry(name="other", target="plain_backend:Plain")
    precisions: tuple[PrecisionName, ...] = ("bf16", "exact", "fp32")
    kinds = [
        (backend, scenario, precision)
        for scenario in ("sft-packed", "sft-sgd")
        for precision in precisions
        for backend in (other, PLAIN)
    ]
    cells = [make_cell(scenario, "llama", "dp2", precision, backend=backend) for backend, scenario, precision in kinds]
    at_once = AtOnce(2)
    try:
        ordered = at_once.ordered(cells)[2:]  # after the cheapest cell of each backend
    finally:
        at_once.cancel()
        at_once.join()
    groups = [key for key, _ in itertools.groupby((cell.scenario.tier.is_exact, cell.backend) for cell in ordered)]
    assert groups == [(True, "other"), (True, "plain"), (False, "other"), (False, "plain")]
    oracles = [
        key for key, _ in itertools.groupby((c.scenario.tier.is_exact, c.backend, c.scenario.name) for c in ordered)
    ]
    assert len(oracles) == len(set(oracles))


def test_a_cell_runs_before_the_last_inputs_are_ready() -> None:
    cells = [make_cell("sft-packed", "llama", layout, "exact") for layout in ("dp1", "dp4", "dp2")]
    first_ran = threading.Event()

    def ready(cell: Cell) -> None:
        assert cell is not cells[-1] or first_ran.wait(20)

    def run(cell: Cell) -> Cell:
        first_ran.set()
        return cell

    at_once = AtOnce(2)
    try:
        assert {*at_once.run(cells, run, ready=ready)} == {*cells}
    finally:
        at_once.cancel()
        at_once.join()


def test_cells_are_announced_without_asking_backends(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Refusals, "adapter", lambda *_: pytest.fail("a backend was asked"))
    cell = make_cell("sft-sgd", "llama", "dp1", "exact", backend=PLAIN, rows=3, steps=1)
    session.announce([cell])
    assert read_entry(session.folder(cell) / "verdict.json").verdict.state == "not_run"


@pytest.mark.usefixtures("four_threads")
def test_judging_threads_use_one_processor_each() -> None:
    """torch's own number is that of all processors; two cells side by side would start twice as many threads."""
    cells = [make_cell("sft-packed", "llama", layout, "exact") for layout in ("dp1", "dp2")]
    at_once = AtOnce(2)
    assert [*at_once.run(cells, lambda cell: torch.get_num_threads())] == [1, 1]
    at_once.join()


COUNT = """
import os, sys
from pathlib import Path
import torch
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session

def started():
    before = os.listdir("/proc/self/task")
    torch.ones(1000, 1000).mm(torch.ones(1000, 1000))
    return len({*os.listdir("/proc/self/task")} - {*before})

torch.set_num_threads(4)
with Session(SessionConfig(out=Path(sys.argv[1]))):
    inside = started()
print(inside, started())
"""


def test_a_session_starts_no_threads_of_torch(tmp_path: Path) -> None:
    """They spin while they wait for each other. Afterwards the user's own computations start them as before."""
    command = [sys.executable, "-c", COUNT, str(tmp_path / "out")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run(command, env=env, capture_output=True, text=True)
    assert said.stdout == "0 3\n", said.stderr


@pytest.mark.exhaustive
def test_packed_and_moved_cells_give_the_same_bits_as_alone(tmp_path: Path) -> None:
    """One cell at a time; then four at once, so in other worker groups, after other cells."""
    names = [f"sft-packed/llama/fsdp2/{layout}/{tier}" for layout in ("dp2", "tp2") for tier in ("exact", "fp32")]
    names += ["sft-packed/qwen3/deepspeed/dp2.zero2/fp32", "sft-packed/llama/megatron/tp2/exact"]
    chosen = [part for name in names for part in ("--profile", "gpu", "--cells", name)]
    for folder, workers in (("alone", "1"), ("packed", "4")):
        assert run_cells(tmp_path / folder, "cpu", "--workers", workers, *chosen, env=os.environ) == 0
    assert_same_bits(tmp_path / "alone", tmp_path / "packed", cells=len(names))
