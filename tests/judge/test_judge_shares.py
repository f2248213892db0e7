"""What ranks hold and reduce, as it was seen, against what a layout implies; on records made by hand.

That each backend does so is for tests/test_cells_*.py, that a lie shows for tests/judge/test_liars.py.
"""

from pathlib import Path
from typing import Any

import judge_sample
import pytest
from judge_sample import unchanged, verdict_of

ELEMENTS, WIDTH = 24, 8  # of the sample: two matrices of 4 x 3, in float64
WHOLE = "no rank holds whole weights, as ZeRO-3 has it"


def wrong_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, *, precision: str = "exact", **seen: Any
) -> set[str]:
    """What is found of a cell in which this was seen, beside what the layout asks for."""
    honest = judge_sample.evidence(precision)
    gathered = ["all_gather", 2, "float64", "forward", 1], ["all_gather", 2, "float64", "later", 1]
    honest["collectives"] += gathered[0:1] if "zero3" in layout else gathered[1:2]
    monkeypatch.setattr(judge_sample, "evidence", lambda _: honest | seen)
    verdict = verdict_of(tmp_path, unchanged, layout=layout)
    assert {finding.stage for finding in verdict.findings} <= {"configuration"}
    return {finding.tensor.partition(": ")[2] for finding in verdict.findings}


def held(share_of_weights: float) -> list[list[int]]:
    return [[int(share_of_weights * ELEMENTS * WIDTH / 2), 2]]


@pytest.mark.parametrize(
    ("layout", "seen", "wrong"),
    [
        ("dp2.zero3", held(0.5), set()),
        ("dp2.zero3", held(0.7), set()),  # and tables of positions
        ("dp2.zero3", held(0.8), {WHOLE}),  # not all of it cut
        ("dp2.zero3", held(1), {WHOLE}),
        ("dp4.rep2.zero3", held(0.5), set()),
        ("dp4.zero3", held(0.5), set()),
        ("dp4.zero3", held(0.7), {WHOLE}),
        ("dp2.tp2.zero3", held(0.25), set()),
        ("dp2.tp2.zero3", held(0.45), set()),  # what is whole on all tensor-parallel ranks
        ("dp2.tp2.zero3", held(0.5), {WHOLE}),
        ("dp2.zero3.offload", held(1), set()),
        ("dp2.zero3.mfsdp", held(1.45), set()),  # these matrices lie outside of layers, so whole and a share
        ("dp2.zero3.mfsdp", held(1.55), {WHOLE}),
        ("dp2.tp2.zero3.mfsdp", held(0.5), set()),  # cannot be told from whole parts
    ],
)
def test_ranks_that_cut_weights_do_not_hold_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, seen: list[list[int]], wrong: set[str]
) -> None:
    found = wrong_claims(tmp_path, monkeypatch, layout, held_weights=seen)
    assert {claim for claim in found if claim == WHOLE} == wrong


def test_a_record_of_before_there_was_such_evidence_is_judged_by_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not wrong_claims(tmp_path, monkeypatch, "dp2.zero2")
