"""Claim 5: what is lost or exchanged between two legs is told directly after loading, on every backend.

Training state goes from one layout to another.
"""

import re
from pathlib import Path

import pytest
from cells import BACKENDS, cell_of, exhaustive, one_of_each_stage, small

from conformance.matrix.cell import Cell
from conformance.runner.session import Session
from conformance.spec.precision import PrecisionName
from impl.faults.expected_cells import PLACES, with_handover
from impl.faults.resume import HANDOVER_FAULTS

pytestmark = pytest.mark.slow

LOADED = 2  # the first step after loading
BELOW: dict[str, PrecisionName] = {"loss-scale-forgotten": "fp16", "masters-from-bf16": "fp32"}  # nothing elsewhere


def cell(backend: str, name: str, *, planted: bool = True) -> Cell:
    place, precision = PLACES[name], BELOW.get(name, "exact")
    assert place.hands_over
    # Half precision is slow on a CPU, and what is lost in a hand-over shows with few rows, too.
    more = small(place.scenario) if precision == "fp16" else {}
    asked = cell_of(backend, place.scenario, place.model, place.layouts[backend], precision, **more)
    faults = (name,) if planted else ()
    single = Cell.single(scenario=asked.scenario, backend=BACKENDS[backend], layout=asked.legs[0].layout, faults=faults)
    return with_handover(single, place.hands_over)


FAST = one_of_each_stage(HANDOVER_FAULTS, lambda name: list(BACKENDS))
PLANTED = [
    (backend, fault.name) if (backend, fault.name) in FAST else exhaustive(backend, fault.name)
    for fault in HANDOVER_FAULTS
    for backend in BACKENDS
]


@pytest.mark.parametrize(("backend", "name"), PLANTED)
def test_fault_is_caught_directly_after_loading(session: Session, backend: str, name: str) -> None:
    (fault,) = (fault for fault in HANDOVER_FAULTS if fault.name == name)
    verdict = session.run(cell(backend, name)).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", fault.stage), verdict.reason
    shows = LOADED - 1 if fault.stage == "configuration" else LOADED  # settings are those of the exported folder
    assert verdict.findings[0].step == shows or fault.stage == "weights after N steps"
    (loss,) = (q for q in verdict.quantities if (q.stage, q.tensor, q.step) == ("loss", "loss", LOADED))
    assert (loss.ratio <= 1) == fault.loss_blind


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["moments-not-loaded", *BELOW, "stale-shard", "untied-export"])
def test_the_same_cells_conform_without_a_fault(session: Session, backend: str, name: str) -> None:
    verdict = session.run(cell(backend, name, planted=False)).verdict
    assert verdict.state == "conforms", verdict.reason


def test_the_table_of_faults_says_what_is_tested_here() -> None:
    text = (Path(__file__).parents[2] / "docs" / "faults.md").read_text(encoding="utf-8")
    table = text.partition("## Faults of handing over")[2]
    rows = re.findall(r"^\| `([a-z0-9-]+)`: (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", table, re.MULTILINE)
    answer = {True: "yes", False: "no"}
    assert rows == [(f.name, f.summary, f.stage, answer[f.loss_blind], f.source) for f in HANDOVER_FAULTS]
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    blind = sum(fault.loss_blind for fault in HANDOVER_FAULTS)
    link = "([table](docs/faults.md#faults-of-handing-over))"
    assert f"Of {len(HANDOVER_FAULTS)} faults of handing over a training {link} {blind} leave the first loss" in readme
