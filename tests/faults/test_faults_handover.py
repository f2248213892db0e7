"""Checks that state lost or swapped between two phases is reported directly after loading, on every backend.

The training state is resumed in another layout.
"""

import pytest
from cells import BACKENDS, cell_of, exhaustive, one_of_each_stage, small

from conformance.backends.faults import catalogue
from conformance.matrix.cell import Cell
from conformance.runner.session import Session
from conformance.spec.precision import PrecisionName
from impl.faults.declaration import with_resume
from impl.faults.resume import RESUME_FAULTS

pytestmark = pytest.mark.slow

LOADED = 2  # the first step after loading
BELOW: dict[str, PrecisionName] = {"loss-scale-forgotten": "fp16", "masters-from-bf16": "fp32"}  # nothing elsewhere


def cell(backend: str, name: str, *, planted: bool = True) -> Cell:
    place, precision = catalogue()[name].cells, BELOW.get(name, "exact")
    assert place.saves
    # Half precision is slow on a CPU, and what is lost in a hand-over shows with few rows, too.
    more = small(place.scenario) if precision == "fp16" else {}
    asked = cell_of(backend, place.scenario, place.model, place.layouts[backend], precision, **more)
    faults = (name,) if planted else ()
    single = Cell.single(
        scenario=asked.scenario, backend=BACKENDS[backend], layout=asked.phases[0].layout, faults=faults
    )
    return with_resume(single, place.saves)


FAST = one_of_each_stage(RESUME_FAULTS, lambda name: [*catalogue()[name].cells.layouts])
PLANTED = [
    (backend, fault.name) if (backend, fault.name) in FAST else exhaustive(backend, fault.name)
    for fault in RESUME_FAULTS
    for backend in fault.cells.layouts
]


@pytest.mark.parametrize(("backend", "name"), PLANTED)
def test_fault_is_caught_directly_after_loading(session: Session, backend: str, name: str) -> None:
    fault = catalogue()[name]
    verdict = session.run(cell(backend, name)).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", fault.stage), verdict.reason
    shows = LOADED - 1 if fault.stage == "configuration" else LOADED  # settings are those of the exported folder
    assert verdict.findings[0].step == shows or fault.stage == "weights after N steps"
    (loss,) = (q for q in verdict.quantities if (q.stage, q.tensor, q.step) == ("loss", "loss", LOADED))
    assert (loss.ratio <= 1) == ("loss" in fault.blind)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["moments-not-loaded", *BELOW, "stale-shard", "untied-export"])
def test_the_same_cells_conform_without_a_fault(session: Session, backend: str, name: str) -> None:
    verdict = session.run(cell(backend, name, planted=False)).verdict
    assert verdict.state == "conforms", verdict.reason
