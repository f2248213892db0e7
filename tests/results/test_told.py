"""What a record says beside its numbers: denominators, memory, and which rank holds which piece of a parameter."""

import json

import pytest
import torch

from conformance.records.record_format import wrong_line
from conformance.spec.batch import Batch, Document, Row
from conformance.worker.phase import batch_counts
from conformance.worker.rank_state import PeakMemory


def test_the_targets_of_each_ranks_micro_batches_are_told() -> None:
    rows = tuple(Row(i, (Document((1,) * 5, (False,) * (5 - i) + (True,) * i),)) for i in range(4))
    told = batch_counts(Batch(step=3, max_len=8, rows=rows), dp_size=2, accumulation=2)
    given = [[[[0, 5, 0]], [[1, 5, 1]]], [[[2, 5, 2]], [[3, 5, 3]]]]
    assert told == {"step": 3, "tokens": 20, "targets": [[0, 1], [2, 3]], "rows": given}


def test_the_peak_of_memory_begins_anew_and_is_of_this_rank() -> None:
    torch.ones(2**26)  # 256 MiB, freed at once
    peak = PeakMemory("cpu")
    before = peak.read()
    if not before:
        pytest.skip("this machine does not let a process reset its peak")
    held = torch.ones(2**25)
    assert 100 * 2**20 < peak.read() - before < 200 * 2**20
    assert held.numel() == 2**25


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory", [-1]),
        ("memory", ["much"]),
        ("host_memory", [0.5]),
        ("batches", [{"step": 0, "tokens": 1}]),
        ("pieces", {"a": {"full": [-1]}}),
    ],
)
def test_what_is_told_in_another_form_is_refused(field: str, value: object) -> None:
    footer = json.loads(json.dumps({"type": "footer", "steps": 1, "sha256": "", field: value}))
    assert wrong_line(footer)
