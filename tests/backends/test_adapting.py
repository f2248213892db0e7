"""Helpers for adapters: documents end to end, log-probs by row, and the pieces of DTensors."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut

from conformance.backends.adapter_helpers import NO_TARGET, by_row, flatten, shards, target_logprobs, whole_tensors
from conformance.backends.protocol import StepMetrics
from conformance.runtime import RankContext
from conformance.spec.batch import Document, Row
from conformance.worker.phase import _Observer

ROWS = (
    Row(4, (Document((5, 6, 7), (False, False, True)), Document((8, 9), (False, True)))),
    Row(5, (Document((3,), (False,)),)),  # without a target
    Row(6, (Document((1, 2, 4), (False, True, True)),)),
)


def test_documents_lie_end_to_end_and_none_predicts_the_next() -> None:
    flat = flatten(ROWS)
    assert flat.tokens.tolist() == [[5, 6, 7, 8, 9, 3, 1, 2, 4]]
    assert flat.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1, 2]]
    x = NO_TARGET
    assert flat.labels.tolist() == [[x, x, 7, x, 9, x, x, 2, 4]]
    assert flat.as_inputs.keys() == {"input_ids", "labels", "position_ids"}


def test_logprobs_are_those_of_the_targets_by_row() -> None:
    logits = torch.randn(1, 9, 10, generator=torch.Generator().manual_seed(0), requires_grad=True)
    found = by_row(target_logprobs(logits, flatten(ROWS)), ROWS)
    every = torch.log_softmax(logits[0], dim=-1)
    assert {index: len(row) for index, row in found.items()} == {4: 2, 5: 0, 6: 2}
    torch.testing.assert_close(found[4], torch.stack([every[1, 7], every[3, 9]]))
    torch.testing.assert_close(found[6], torch.stack([every[6, 2], every[7, 4]]))
    assert not found[4].requires_grad


@pytest.mark.parametrize(("numbers", "lengths"), [(1, [1, 0, 0]), (3, [2, 0, 1]), (6, [2, 0, 4])])
def test_numbers_of_a_wrong_mask_reach_the_judge(numbers: int, lengths: list[int]) -> None:
    assert [len(row) for row in by_row(torch.zeros(numbers), ROWS).values()] == lengths


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_pieces_of_dtensors_are_named_by_where_they_are_cut(group: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("rep", "dp"))
    full = torch.arange(6.0).reshape(3, 2).requires_grad_()
    cut = distribute_tensor(full.detach(), mesh, [Replicate(), Cut(0)])
    same = distribute_tensor(full.detach(), mesh, [Replicate(), Replicate()])
    pieces = list(shards([("cut", cut), ("same", same), ("plain", full)]))
    assert [(piece.name, piece.region) for piece in pieces] == [("cut", "1:0"), ("same", "full"), ("plain", "full")]
    for name, tensor in whole_tensors([("cut", cut), ("plain", full)]):
        assert type(tensor) is torch.Tensor, name
        assert not tensor.requires_grad
        torch.testing.assert_close(tensor, full.detach())
    partial = DTensor.from_local(full.detach(), mesh, [Replicate(), Partial()])
    with pytest.raises(ValueError, match="sum is a partial sum"):
        next(shards([("sum", partial)]))


def test_a_row_without_targets_may_be_given_as_an_empty_tensor(group: None) -> None:
    observer: Any = SimpleNamespace(rank=RankContext(rank=0, world_size=1, device="cpu", beat=lambda phase: None))
    rows = by_row(torch.zeros(4), ROWS)
    given = _Observer._rows(observer, StepMetrics(rows={"logprob": rows}))
    assert rows.keys() == {4, 5, 6}
    assert given.keys() == {"logprob/4", "logprob/6"}
