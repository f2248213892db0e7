"""A cell that is wrong in ranks that had run others is run again in fresh ones, and both are told."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import make_cell

from conformance.backends.protocol import BackendEntry
from conformance.judge.cells import combine, combine_verdicts, rejudge
from conformance.matrix.cell import Cell, Phase
from conformance.results.run_results import Attempt
from conformance.results.verdict import Quantity, Verdict
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session
from conformance.spec.layout import Layout
from reports.load import read_report


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with Session(SessionConfig(out=tmp_path_factory.mktemp("isolation") / "out", budget_s=120.0)) as session:
        yield session


def cell_of(backend: str, seed: int, *faults: str) -> Cell:
    entry = BackendEntry(name=backend.lower(), target=f"plain_variants:{backend}")
    return make_cell("sft-sgd", "llama", "dp2", "fp32", backend=entry, faults=faults, seed=seed, steps=2, rows=12)


Ran = tuple[Verdict, dict[str, Any]]


def run(session: Session, backend: str, *faults: str) -> Ran:
    """The verdict of a backend's second cell in the same ranks, and its file."""
    session.run(cell_of(backend, 0, *faults))
    second = cell_of(backend, 1, *faults)
    verdict = session.run(second).verdict
    values: dict[str, Any] = json.loads((folder_of(session, second) / "verdict.json").read_text())
    return verdict, values


def folder_of(session: Session, cell: Cell) -> Path:
    return session.config.out / "cells" / cell.slug


@pytest.fixture(scope="module")
def leftover(session: Session) -> Ran:
    return run(session, "Leftover")


@pytest.fixture(scope="module")
def breaks(session: Session) -> Ran:
    return run(session, "Breaks")


@pytest.mark.exhaustive
def test_a_cell_that_differs_only_after_other_cells_differs_and_says_so(session: Session, leftover: Ran) -> None:
    verdict, values = leftover
    assert verdict.state == "differs"
    assert verdict.reason.startswith("differs only after other cells: first difference at loss, step 0, ")
    assert "; in fresh workers pass: " in verdict.reason
    assert verdict.findings
    assert values["records"] == ["legs/0/record"]
    other = values["other"]
    assert (other["state"], other["fresh"], other["records"]) == ("conforms", True, ["fresh/0/record"])
    assert (folder_of(session, cell_of("Leftover", 1)) / "fresh/0/record/record.jsonl").is_file()


@pytest.mark.exhaustive
def test_a_backend_that_asks_for_fresh_ranks_gets_them_for_every_cell(session: Session) -> None:
    verdict, values = run(session, "Isolated")
    assert (verdict.state, values["other"]) == ("conforms", None)


@pytest.mark.exhaustive
def test_each_phase_of_a_cell_runs_in_ranks_that_have_seen_no_other(session: Session) -> None:
    entry = BackendEntry(name="legs", target="plain_variants:Leftover")  # ranks of its own, by the name
    scenario = make_cell("sft-sgd", "llama", "dp2", "fp32", steps=4, rows=12).scenario
    before = Phase(backend=entry, layout=Layout(dp=2), steps=2, save="checkpoint")
    after = Phase(backend=entry, layout=Layout(dp=2), steps=2)
    verdict = session.run(Cell(scenario=scenario, phases=(before, after), program="resume")).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.exhaustive
def test_a_cell_that_differs_in_fresh_ranks_too_says_so(session: Session) -> None:
    verdict, values = run(session, "Wrong")
    assert verdict.state == values["other"]["state"] == "differs"
    assert verdict.reason.startswith("first difference at loss, step 0, ")
    assert verdict.reason.endswith("; in fresh workers, too")


def test_a_cell_that_fails_only_after_other_cells_is_no_pass(breaks: Ran) -> None:
    verdict, values = breaks
    assert verdict.state == "infrastructure"
    assert verdict.reason.startswith("fails only after other cells: rank ")
    assert "it is set up already; in fresh workers pass: " in verdict.reason.partition("\n")[0]
    assert (values["records"], values["other"]["fresh"]) == (["fresh/0/record"], False)


@pytest.mark.exhaustive
def test_a_cell_with_a_planted_fault_is_not_run_twice(session: Session) -> None:
    verdict, values = run(session, "Leftover", "inverted-clip")
    assert (verdict.state, values["other"]) == ("differs", None)
    assert not (folder_of(session, cell_of("Leftover", 1, "inverted-clip")) / "fresh").exists()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("leftover", "breaks")
def test_old_records_of_both_are_judged_again_and_shown(session: Session, tmp_path: Path) -> None:
    session.results.write_summary(finished=True)
    out = Path(shutil.copytree(session.config.out, tmp_path / "out"))
    shutil.copytree(session._oracles.folder(cell_of("Breaks", 1)).parent, out / "oracle", dirs_exist_ok=True)
    before = {file: json.loads(file.read_text()) for file in out.glob("cells/*/verdict.json")}
    rejudge(out)
    assert before == {file: json.loads(file.read_text()) for file in before}
    cells = {cell.id: cell for cell in read_report(out).cells}
    assert set(cells[str(cell_of("Breaks", 1))].logs) == {"phase 0, rank-0", "phase 0, rank-1"} | {
        "fresh phase 0, rank-0",
        "fresh phase 0, rank-1",
    }


# --- the words -------------------------------------------------------------------------------------------------------


def verdict_of(state: Any, reason: str, *, stage: str = "") -> Verdict:
    wrong = Quantity(stage=stage, tensor="x", step=0, observed=2.0, allowed=1.0)
    return Verdict(state=state, reason=reason, quantities=(wrong,) if stage else ())


PASS = verdict_of("conforms", "9 quantities agree")
LOSS, NORM = (verdict_of("differs", f"first at {stage}", stage=stage) for stage in ("loss", "gradient norm"))
DEAD = verdict_of("infrastructure", "rank 1 was killed\nend of log")
RAISED = verdict_of("infrastructure", "rank 0 raised\nend of log")


@pytest.mark.parametrize(
    ("used", "fresh", "state", "reason"),
    [
        (LOSS, PASS, "differs", "differs only after other cells: first at loss; in fresh workers pass: 9"),
        (LOSS, LOSS, "differs", "first at loss; in fresh workers, too"),
        (LOSS, NORM, "differs", "first at loss; in fresh workers: first at gradient norm"),
        (LOSS, DEAD, "differs", "first at loss; in fresh workers: rank 1 was killed"),
        (PASS, LOSS, "differs", "differs only in fresh workers: first at loss; after other cells pass: 9"),
        (DEAD, PASS, "infrastructure", "fails only after other cells: rank 1 was killed; in fresh workers pass: 9"),
        (DEAD, DEAD, "infrastructure", "rank 1 was killed; in fresh workers, too\nend of log"),
        (DEAD, RAISED, "infrastructure", "rank 1 was killed; in fresh workers: rank 0 raised\nend of log"),
        (DEAD, LOSS, "differs", "first at loss; after other cells: rank 1 was killed"),
        (PASS, PASS, "conforms", "9 quantities agree"),
    ],
)
def test_both_verdicts_are_told_and_the_worse_one_counts(
    used: Verdict, fresh: Verdict, state: str, reason: str
) -> None:
    verdict = combine_verdicts(used, fresh)
    assert verdict.state == state
    assert verdict.reason.startswith(reason)


@pytest.mark.parametrize(
    ("used_ended", "fresh_ended", "fresh_is_told"), [(True, True, False), (False, True, True), (False, False, False)]
)
def test_a_verdict_rests_on_the_first_attempt_that_came_to_its_end(
    used_ended: bool, fresh_ended: bool, fresh_is_told: bool
) -> None:
    used = Attempt(fresh=False, verdict=PASS, completed=used_ended)
    fresh = Attempt(fresh=True, verdict=PASS, completed=fresh_ended)
    own, other, _ = combine(used, fresh, leased=False)
    assert (own, other) == ((fresh, used) if fresh_is_told else (used, fresh))


@pytest.mark.parametrize(("leased", "state"), [(True, "conforms"), (False, "infrastructure")])
def test_failed_attempt_on_leased_slots_says_nothing(leased: bool, state: str) -> None:
    used = Attempt(fresh=False, verdict=DEAD, completed=False)
    fresh = Attempt(fresh=True, verdict=PASS, completed=True)
    assert combine(used, fresh, leased=leased)[2].state == state
