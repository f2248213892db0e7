"""Makes small cells and verdicts for tests, and lists the stages of honest cells.

Two steps show every stage: the first update and a later one. If a scenario accumulates, eight rows give each of two
data ranks two micro-batches of two rows, one of them without a target at the second step. Cells in half precision have
all rows and micro-batches of the scenario, because noise is measured over them. A test that needs more sets it.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import make_cell

from conformance.backends.faults import Fault
from conformance.backends.protocol import BackendEntry
from conformance.backends.registry import SubprocessAdapter, adapter_of
from conformance.core.host import FIXTURES
from conformance.core.io import read_toml
from conformance.core.packages import is_installed
from conformance.matrix.cell import Cell, Phase
from conformance.records.step_tensors import Record, read_record
from conformance.results.verdict import Verdict
from conformance.runner.phases import group_config
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session
from conformance.runtime import WorkerGroupConfig
from conformance.spec.layout import Layout
from conformance.spec.precision import PrecisionName

HONEST = 1e-12  # what the exact tier shows when nothing is wrong; the bound is ten times that
STEPS, ROWS, MICRO_BATCHES = 2, 8, 2
OWN_SIZE = {  # where the scenario is about them
    "sft-long": {"steps": 2, "rows": 4},
    "sft-uneven": {"steps": 2, "rows": 9, "accumulation": 3},
    **{name: {"steps": 2, "rows": 12, "accumulation": 3} for name in ("sft-z-loss", "sft-expert-bias")},
    "sft-cosine-end": {"steps": 4, "rows": 6},
    "sft-linear-end": {"steps": 5, "rows": 6},
}
BACKENDS = {
    "fsdp2": BackendEntry(name="fsdp2", target="impl.fsdp2.adapter:Fsdp2Backend"),
    "deepspeed": BackendEntry(name="deepspeed", target="impl.deepspeed.adapter:DeepspeedBackend"),
    "megatron": BackendEntry(name="megatron", target="impl.megatron.adapter:MegatronBackend"),
}
exhaustive = functools.partial(pytest.param, marks=pytest.mark.exhaustive)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def needs(package: str) -> pytest.MarkDecorator:
    """Skips tests where a package is not installed. Unlike importorskip it imports nothing, which each worker of pytest
    would do for all test files."""
    return pytest.mark.skipif(not is_installed(package), reason=f"needs {package}")


def one_of_each_stage(faults: Sequence[Fault], having: Callable[[str], Sequence[str]]) -> set[tuple[str, str]]:
    """What a fast run plants: (backend, fault), one for each stage at which faults show, on the backends in turn: the
    first that the backend can have, or else the first of all. A nightly run plants all of them on all backends.

    having(fault): the names of backends that the fault can be planted on, one or more.
    """
    found = set()
    for turn, stage in enumerate(dict.fromkeys(fault.stage for fault in faults)):
        able = [(backend, fault.name) for fault in faults if fault.stage == stage for backend in having(fault.name)]
        found.add(next((one for one in able if one[0] == [*BACKENDS][turn % len(BACKENDS)]), able[0]))
    return found


FOLDER = Path(__file__).resolve().parents[2] / ".third-opinion"


@contextmanager
def session_with(package: str, out: Path) -> Iterator[Session]:
    """A session whose ranks import torchao from this folder."""
    with pytest.MonkeyPatch.context() as patch:
        others = [path for path in sys.path if not path.startswith(str(FOLDER / "torchao"))]
        patch.setattr(sys, "path", [*others, str(FOLDER / package)])  # ranks inherit it
        if find_spec("torchao") is None:
            pytest.skip("torchao is not here; scripts/third-opinion fetches it")
        _rest_fsdp2()  # its process began without this folder
        with Session(SessionConfig(out=out)) as session:
            yield session
    _rest_fsdp2()


def _rest_fsdp2() -> None:
    adapter = adapter_of(BACKENDS["fsdp2"])
    assert isinstance(adapter, SubprocessAdapter)
    adapter.rest()


def ranks_of(backend: str, size: int) -> WorkerGroupConfig:
    """The worker group that cells of a backend run in, for tests of other tasks."""
    return group_config(Phase(backend=BACKENDS[backend], layout=Layout(dp=size), steps=1), "cpu")


def cell_of(
    backend: str, scenario: str, model: str, layout: str, precision: PrecisionName, *faults: str, **overrides: Any
) -> Cell:
    """A small cell. A scenario with a warm-up has two phases, so it has twice the steps."""
    steps = 2 * STEPS if scenario == "sft-warmup" else STEPS
    size = {"steps": steps} if precision in ("bf16", "fp16") else {"steps": steps, **small(scenario)}
    overrides = size | OWN_SIZE.get(scenario, {}) | overrides
    return make_cell(scenario, model, layout, precision, faults=faults, backend=BACKENDS[backend], **overrides)


@functools.cache
def small(scenario: str) -> dict[str, Any]:
    """Few rows in few micro-batches, as overrides of make_cell."""
    own = read_toml(FIXTURES / "scenarios" / f"{scenario}.toml").get("accumulation", 1)
    return {"rows": ROWS, "accumulation": min(MICRO_BATCHES, own)}


def assert_honest(session: Session, cell: Cell) -> Verdict:
    """Run an exact cell: it conforms, to the digits of float64, and no float32 was left in it."""
    verdict = session.run(cell).verdict
    assert verdict.state == "conforms", verdict.reason
    assert max(quantity.observed for quantity in verdict.quantities) < HONEST
    for phase in range(len(cell.phases)):
        assert record_of(session, cell, phase).footer["leaks"] == []
    return verdict


def record_of(session: Session, cell: Cell, phase: int = 0) -> Record:
    return read_record(folder_of(session, cell) / "legs" / str(phase) / "record")


def folder_of(session: Session, cell: Cell) -> Path:
    return session.config.out / "cells" / cell.slug
