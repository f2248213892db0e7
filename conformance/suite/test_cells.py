"""Runs each cell as one test, named by the cell's id, and asserts the verdict.

    pytest --pyargs conformance.suite --parity-profile quick -n 2

Only a cell that agrees with the oracle passes. The report lists the stages that a partly observed cell did not show.
"""

import pytest

from conformance.core.errors import UsageError, visible
from conformance.matrix.cell import Cell
from conformance.results.run_results import VERDICT, read_entry
from conformance.results.verdict import NO_ANSWER
from conformance.runner.attempt import JudgedCell
from conformance.runner.session import Session

SHOWN = 12  # maximum number of findings in a message; verdict.json has all


@pytest.fixture
def result(cell: Cell, parity_session: Session) -> JudgedCell:
    """Runs and judges the cell. Fails if the cell could not be judged, so that pytest reports an error."""
    try:
        result = parity_session.run(cell)
    except UsageError as error:  # a model or data set that cannot be used; the message is for the user
        pytest.fail(visible(str(error)), pytrace=False)
    if result.verdict.state in NO_ANSWER:
        pytest.fail(_message(result, parity_session), pytrace=False)
    return result


def test_cell(result: JudgedCell, parity_session: Session) -> None:
    """Checks that the backend agrees with the oracle; otherwise the message has the first difference."""
    verdict = result.verdict
    if verdict.state == "unsupported":
        pytest.skip(f"unsupported: {visible(verdict.reason)}")
    if verdict.state == "expected_difference":
        pytest.xfail(f"expected difference: {visible(verdict.reason)}")
    if verdict.state not in ("conforms", "partly_observed"):
        pytest.fail(_message(result, parity_session), pytrace=False)


def _message(result: JudgedCell, session: Session) -> str:
    """Returns the reason, the first findings, the reproduce command, and the folder of records and logs."""
    verdict = result.verdict
    folder = session.config.out / "cells" / result.cell.slug
    findings = [f"  {finding}" for finding in verdict.findings[:SHOWN]]
    if len(verdict.findings) > SHOWN:
        findings.append(f"  and {len(verdict.findings) - SHOWN} more, in {VERDICT}")
    reproduce = read_entry(folder / VERDICT).reproduce
    return visible(
        "\n".join(
            [f"{verdict.state}: {verdict.reason}", *findings, f"reproduce: {reproduce}", f"record and logs: {folder}"]
        )
    )
