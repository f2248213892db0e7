"""The data of a training: every document once in each epoch, wherever it is interrupted, packed or not."""

from collections import Counter
from itertools import pairwise

import pytest

from conformance.spec.batch import Document
from conformance.spec.offline import PAIR, SIDE, Dpo
from conformance.spec.scenario import DataConfig
from impl.checkpoints.training_state import DataPosition
from impl.train.setup import held_out_batches
from impl.train.text_pipeline import DocumentSource

LENGTHS = [5, 9, 3, 12, 7, 4, 30, 6, 8, 11, 10]
DOCUMENTS = [Document((n,) * length, (False, *[True] * (length - 1))) for n, length in enumerate(LENGTHS)]


def source(*, packed: bool, rows: int, consumed: int = 0) -> DocumentSource:
    position = DataPosition(seed=3, documents=len(DOCUMENTS), consumed=consumed)
    return DocumentSource(DOCUMENTS, DataConfig(packed=packed, rows=rows, max_len=32), position)


def numbers(of: DocumentSource, steps: int) -> list[int]:
    return [d.tokens[0] for step in range(steps) for batch in of.next(step).batches for d in batch.documents]


@pytest.mark.parametrize("packed", [False, True])
def test_an_epoch_has_every_document_once_and_the_next_one_another_order(packed: bool) -> None:
    of_all = numbers(source(packed=packed, rows=3), 30)
    size = len(DOCUMENTS)
    epochs = [tuple(of_all[start : start + size]) for start in range(0, len(of_all) - size, size)]
    assert len(epochs) > 5
    assert all(Counter(epoch) == Counter(range(size)) for epoch in epochs)
    assert all(one != other for one, other in pairwise(epochs))


@pytest.mark.parametrize("packed", [False, True])
def test_pairs_stay_together_in_a_row_or_in_two_rows_of_one_micro_batch(packed: bool) -> None:
    position = DataPosition(seed=3, documents=len(DOCUMENTS) // 2)
    of = DocumentSource(DOCUMENTS, DataConfig(packed=packed, rows=4, max_len=48), position, Dpo())
    found = []
    for step in range(10):
        (batch,) = of.next(step).batches
        for (row,) in batch.micro_batches(dp_rank=0, dp_size=4, accumulation=1) if packed else ():
            assert len(row.documents) % 2 == 0
        pairs = list(zip(batch.documents[::2], batch.documents[1::2], strict=True))
        assert [(a.columns[PAIR], a.columns[SIDE], b.columns[SIDE]) for a, b in pairs] == [
            (float(n), 1.0, -1.0) for n in range(len(pairs))
        ]
        found += [(a.tokens[0], b.tokens[0]) for a, b in pairs]
    size = len(DOCUMENTS) // 2
    assert all(b == a + 1 for a, b in found)
    for start in range(0, len(found) - size, size):
        assert Counter(a for a, _ in found[start : start + size]) == Counter(range(0, 2 * size, 2))


@pytest.mark.parametrize("packed", [False, True])
def test_a_training_goes_on_where_it_stood_also_with_another_number_of_rows(packed: bool) -> None:
    whole = numbers(source(packed=packed, rows=2), 20)
    first = source(packed=packed, rows=2)
    begun = numbers(first, 7)
    rest = numbers(source(packed=packed, rows=5, consumed=first.position.consumed), 3)
    assert [*begun, *rest] == whole[: len(begun) + len(rest)]


def test_packed_rows_are_filled_in_order_as_long_as_documents_fit() -> None:
    of = source(packed=True, rows=12)
    rows = of.next(0).batches[0].rows
    assert max(row.length for row in rows) <= 32
    assert max(len(row.documents) for row in rows) > 2
    for row, following in pairwise(rows):
        assert row.length + len(following.documents[0].tokens) > 32
    assert of.position.consumed == sum(len(row.documents) for row in rows)


@pytest.mark.parametrize("packed", [False, True])
def test_held_out_batches_fill_up_without_targets(packed: bool) -> None:
    batches = held_out_batches(DOCUMENTS, DataConfig(packed=packed, rows=4, max_len=32))
    assert [len(batch.rows) for batch in batches] == [4] * len(batches)
    assert len(batches) == (2 if packed else 3)
    counted = [d for batch in batches for d in batch.documents if any(d.targets)]
    assert counted == DOCUMENTS
    assert sum(batch.target_count for batch in batches) == sum(LENGTHS) - len(LENGTHS)
