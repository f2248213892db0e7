"""Objectives that the suite does not have run through everything: record, judge, pairs and report, on all backends.

tests/support/toy_objectives.py has them whole; no other file knows of them.
"""

from pathlib import Path
from typing import Any

import pytest
from cells import BACKENDS, HONEST, STEPS, assert_honest, cell_of, exhaustive, record_of, small
from conftest import make_cell

from conformance.backends.protocol import BackendEntry
from conformance.core.packages import write_reports
from conformance.judge.side_by_side import write_side_by_side
from conformance.matrix.cell import Cell
from conformance.results.run_results import SIDE_BY_SIDE, read_output_json
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session

WEIGHTED = {"kind": "toy_objectives:WeightedSft", "power": 2.0}
SEVERAL = {"kind": "toy_objectives:PolicyAndValue"}
PLAIN = {  # two backends that start in a moment
    name.lower(): BackendEntry(name=name.lower(), target=f"plain_backend:{name}") for name in ("Plain", "OtherPlain")
}
LAYOUTS = {
    "fsdp2": ("tp2.losspar", "sp2.zigzag", "dp2.tp2.seqpar.losspar"),
    "deepspeed": ("dp2.zero2", "tp2.zero3", "ulysses2.zero1"),
    "megatron": ("tp2.pp2.seqpar", "sp2", "dp2.zero1"),
}


def weighted(backend: str, layout: str) -> Cell:
    scenario = "sft-padded" if "zigzag" in layout else "sft-packed"
    return cell_of(backend, scenario, "llama", layout, "exact", name="toy", objective=WEIGHTED)


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("deepspeed", LAYOUTS["deepspeed"][0]),
        exhaustive("deepspeed", LAYOUTS["deepspeed"][1]),
        *(exhaustive(name, layout) for name in ("fsdp2", "megatron") for layout in LAYOUTS[name][:2]),
    ],
)
def test_an_objective_of_ones_own_conforms_with_the_outputs_that_it_asks_for(
    session: Session, backend: str, layout: str
) -> None:
    verdict = assert_honest(session, weighted(backend, layout))
    assert {"entropy", "log-probs", "loss", "gradients", "weights after N steps"} <= verdict.worst.keys()
    assert any(quantity.tensor == "weight_sum" for quantity in verdict.quantities)


@pytest.mark.parametrize(("scenario", "backends"), [exhaustive("sft-sgd", PLAIN), exhaustive("sft-packed", BACKENDS)])
def test_its_cells_are_compared_with_each_other_and_shown_in_the_reports(
    tmp_path: Path, scenario: str, backends: dict[str, BackendEntry]
) -> None:
    asked: dict[str, Any] = {**small(scenario), "steps": STEPS, "name": "toy", "objective": WEIGHTED}
    cells = [make_cell(scenario, "llama", "dp2", "exact", backend=entry, **asked) for entry in backends.values()]
    with Session(SessionConfig(out=tmp_path / "out")) as session:
        session.run_all(cells, progress=lambda judged: None)
    write_side_by_side(tmp_path / "out")
    groups = {group["group"]: group for group in read_output_json(tmp_path / "out" / SIDE_BY_SIDE)["groups"]}
    assert groups.keys() == {"toy/llama/exact"}
    group = groups["toy/llama/exact"]
    assert (group["state"], len(group["members"])) == ("conforms", len(backends))
    assert group["columns"] == ["loss", "gradients", "gradient norm", "update"]
    written = [line.partition(":")[0] for line in write_reports(tmp_path / "out")]
    assert written == ["badge", "ctrf", "junit", "markdown", "report"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert all(f"toy/llama/{name}/dp2/exact" in page for name in backends)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("deepspeed", LAYOUTS["deepspeed"][0]),
        *((name, layout) for name, layouts in LAYOUTS.items() for layout in layouts if name != "deepspeed"),
        *(("deepspeed", layout) for layout in LAYOUTS["deepspeed"][1:]),
    ],
)
def test_a_policy_a_value_model_and_a_frozen_reference_train_in_one_cell(
    session: Session, backend: str, layout: str
) -> None:
    scenario = "sft-padded" if "zigzag" in layout else "sft-packed"
    cell = cell_of(backend, scenario, "qwen3", layout, "exact", name="several", objective=SEVERAL)
    verdict = assert_honest(session, cell)
    both = {"gradients", "clipped update", "weights after N steps"}
    assert {*both, *(f"critic {stage}" for stage in both), "values", "reference log-probs"} <= verdict.worst.keys()
    names = record_of(session, cell).steps[STEPS - 1].names()
    assert "critic.weight/score.weight" in names
    assert not any(name.startswith("reference.weight/") for name in names)
    assert max(q.observed for q in verdict.quantities if q.stage.startswith("critic")) < HONEST


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed", "megatron"])
def test_several_models_are_saved_and_loaded_together(session: Session, backend: str) -> None:
    cell = cell_of(backend, "sft-warmup", "llama", "dp2", "exact", name="several", objective=SEVERAL)
    verdict = assert_honest(session, cell)
    assert {q.stage for q in verdict.quantities if q.step == 2} >= {"weights", "critic weights"}
