"""Rows to tensors: padding, documents side by side in a row, labels shifted inside each, columns where labels stand."""

import torch

from conformance.spec.batch import Document, Row
from impl.engine.trainer import target_rows
from impl.interface.micro_batches import NO_TARGET, collate

N = NO_TARGET
FIRST = Document((1, 2, 3), (False, False, True), {"weight": (0.1, 0.2, 0.3), "reward": 7.0})
SECOND = Document((4, 5), (False, True), {"weight": (0.4, 0.5), "reward": 8.0})
SINGLE = Document((6,), (False,), {"weight": (0.6,), "reward": 9.0})
ROWS = (Row(4, (FIRST, SINGLE, SECOND)), Row(5, (SECOND,)))


def test_labels_are_shifted_inside_documents_and_positions_restart() -> None:
    inputs = collate(ROWS)
    assert inputs.tokens.tolist() == [[1, 2, 3, 6, 4, 5], [4, 5, 0, 0, 0, 0]]
    assert inputs.labels.tolist() == [[N, 3, N, N, 5, N], [5, N, N, N, N, N]]
    assert inputs.positions.tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 0, 1, 2, 3]]
    assert inputs.real.tolist() == [[True] * 6, [True] * 2 + [False] * 4]
    assert inputs.targets.tolist() == (inputs.labels != N).tolist()


def test_rows_are_padded_to_a_multiple_and_padding_is_a_document_of_its_own() -> None:
    inputs = collate(ROWS, multiple_of=4)
    assert inputs.tokens.shape == (2, 8)
    assert inputs.positions[:, 4:].tolist() == [[0, 1, 0, 1], [2, 3, 4, 5]]
    assert not inputs.real[0, 6:].any()


def test_collate_aligns_columns_with_labels() -> None:
    columns = collate(ROWS).columns
    expected = torch.tensor([[0.2, 0.3, 0, 0, 0.5, 0], [0.5, 0, 0, 0, 0, 0]])
    assert torch.equal(columns["weight"], expected)
    assert columns["reward"].tolist() == [[7, 7, 0, 0, 8, 0], [8, 0, 0, 0, 0, 0]]


def test_columns_have_the_default_dtype_and_keep_its_digits() -> None:
    row = Row(0, (Document((1, 2), (False, True), {"weight": (0.0, 1 / 3)}),))
    assert collate((row,)).columns["weight"].dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert collate((row,)).columns["weight"][0, 0].item() == 1 / 3
    finally:
        torch.set_default_dtype(torch.float32)


def test_everything_moves_to_another_device() -> None:
    moved = collate(ROWS).to("meta")
    assert {tensor.device.type for tensor in (moved.tokens, moved.labels, moved.positions, moved.real)} == {"meta"}
    assert {column.device.type for column in moved.columns.values()} == {"meta"}


def test_what_stands_at_the_targets_is_found_by_the_rows_index_in_the_step() -> None:
    inputs = collate(ROWS, multiple_of=4)
    numbers = torch.arange(16.0).view(2, 8)
    found = target_rows(ROWS, inputs, numbers)
    assert {index: row.tolist() for index, row in found.items()} == {4: [1, 4], 5: [8]}


def test_a_row_without_targets_has_nothing_to_tell() -> None:
    rows = (Row(0, (SINGLE,)), Row(1, (SECOND,)))
    assert target_rows(rows, collate(rows), torch.ones(2, 2)).keys() == {1}
