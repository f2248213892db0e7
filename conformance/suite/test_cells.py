"""The matrix: one item per cell, named by the cell's id. An item runs its cell and asserts the verdict.

    pytest --pyargs conformance.suite --parity-profile quick -n 2

Serves every claim, claim 8 in that only a cell that agrees with the oracle passes; what it does not show is in the
report.
"""

import pytest

from conformance.plan.cell import Cell
from conformance.record.results import VERDICT, read_entry
from conformance.record.states import NO_ANSWER
from conformance.run.session import JudgedCell, Session
from conformance.validation import UsageError

SHOWN = 12  # findings in a message; verdict.json has them all


@pytest.fixture
def result(cell: Cell, parity_session: Session) -> JudgedCell:
    """The cell, run and judged. Where there is no answer, pytest reports an error and not a failure of the test."""
    try:
        result = parity_session.run(cell)
    except UsageError as error:  # of a model or a data set, told as the command line tells it
        pytest.fail(str(error), pytrace=False)
    if result.verdict.state in NO_ANSWER:
        pytest.fail(_message(result, parity_session), pytrace=False)
    return result


def test_cell(result: JudgedCell, parity_session: Session) -> None:
    """The backend computes what the oracle computes; if not, the message says where they part."""
    verdict = result.verdict
    if verdict.state == "unsupported":
        pytest.skip(f"unsupported: {verdict.reason}")
    if verdict.state == "expected_difference":
        pytest.xfail(f"expected difference: {verdict.reason}")
    if verdict.state not in ("conforms", "partly_observed"):
        pytest.fail(_message(result, parity_session), pytrace=False)


def _message(result: JudgedCell, session: Session) -> str:
    """All that a person needs in order to go on."""
    verdict = result.verdict
    folder = session.config.out / "cells" / result.cell.slug
    findings = [f"  {finding}" for finding in verdict.findings[:SHOWN]]
    if len(verdict.findings) > SHOWN:
        findings.append(f"  and {len(verdict.findings) - SHOWN} more, in {VERDICT}")
    reproduce = read_entry(folder / VERDICT).reproduce
    return "\n".join(
        [f"{verdict.state}: {verdict.reason}", *findings, f"reproduce: {reproduce}", f"record and logs: {folder}"]
    )
