"""Sketches: what they see of a tensor, and that they add up over shards of any shape."""

import hashlib
import itertools
import math

import pytest
import torch
from torch import Tensor

from conformance.numerics.sketch import seed_of
from parity.differences import canonical
from parity.optimizer_shards import Box, whole
from parity.recorder import fingerprint
from parity.summaries import BUCKETS, ROWS_AT, SKETCH_AT, SUMS, WIDTH, summarize

SEED = seed_of("model.norm.weight")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def summary(values: Tensor) -> Tensor:
    return summarize(values, whole(tuple(values.shape)), seed=SEED)


def sketch(values: Tensor) -> Tensor:
    return summary(values)[SKETCH_AT:]


@pytest.mark.parametrize(
    "cuts",
    [
        ((0, 7), (0, 50), (0, 30)),
        ((0, 2, 2, 7), (0, 50), (0, 30)),
        ((0, 7), (0, 1, 33, 50), (0, 30)),
        ((0, 3, 7), (0, 9, 50), (0, 12, 30)),
    ],
    ids=["whole", "rows", "columns", "all"],
)
def test_sketches_of_shards_add_up_to_the_sketch_of_the_whole(cuts: tuple[tuple[int, ...], ...]) -> None:
    values = normal(7, 50, 30)
    total = torch.zeros(WIDTH, dtype=torch.float64)
    for edges in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
        part = values[tuple(slice(low, high) for low, high in edges)]
        offsets = tuple(low for low, _ in edges)
        box = Box(shape=(7, 50, 30), offsets=offsets, sizes=tuple(part.shape))
        total += summarize(part, box, seed=SEED)
    expected = summary(values)
    torch.testing.assert_close(total[1:], expected[1:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(300, 512), (3, 70_000), (140_000,)], ids=["rows", "long rows", "one dimension"])
def test_a_tensor_of_several_blocks_is_the_sum_of_its_elements(shape: tuple[int, ...]) -> None:
    values = normal(*shape)
    places = torch.arange(values.numel())
    one_by_one = torch.zeros(BUCKETS, dtype=torch.float64)
    for low in range(0, values.numel(), 10_000):  # blocks that are none of the sketch's
        piece = values.flatten()[low : low + 10_000]
        box = Box(shape=(values.numel(),), offsets=(int(places[low]),), sizes=(len(piece),))
        one_by_one += summarize(piece, box, seed=SEED)[SKETCH_AT:]
    torch.testing.assert_close(sketch(values), one_by_one, rtol=1e-12, atol=1e-12)


def test_squared_distances_are_estimated_without_bias_and_within_the_stated_error() -> None:
    ratios = []
    for seed in range(400):
        difference = normal(40, 50, seed=seed)
        ratios.append(float(sketch(difference).square().sum() / difference.square().sum()))
    found = torch.tensor(ratios)
    stated = math.sqrt(2 / BUCKETS)
    assert abs(float(found.mean()) - 1) < 4 * stated / math.sqrt(len(ratios))
    assert 0.85 * stated < float(found.std()) < 1.15 * stated


@pytest.mark.parametrize("place", [0, 1, 77_777, 199_999])
def test_a_change_of_a_single_element_is_seen_exactly(place: int) -> None:
    values = normal(400, 500)
    changed = values.clone()
    changed.view(-1)[place] += 1e-4
    assert float((sketch(changed) - sketch(values)).norm()) == pytest.approx(1e-4, rel=1e-6)


def test_sketch_signs_keep_rows_from_cancelling() -> None:
    moved = torch.zeros(64, 64, dtype=torch.float64)
    moved[3], moved[4] = 1.0, -1.0  # a row that has gone to the next: every sum stays
    assert 0.5 < float(sketch(moved).norm() / moved.norm()) < 1.5


def test_sketch_hash_is_splitmix64_of_name_and_index() -> None:
    expected = torch.zeros(BUCKETS, dtype=torch.float64)
    mask, seed = 2**64 - 1, int.from_bytes(hashlib.sha256(b"model.norm.weight").digest()[:8], "little")
    for place in range(1000):
        x = (place * 0x9E3779B97F4A7C15 + seed) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        x ^= x >> 31
        expected[x % BUCKETS] += -place if x >> 63 else place
    assert sketch(torch.arange(1000.0)).tolist() == expected.tolist()


def test_sums_count_what_is_not_finite_and_leave_it_out() -> None:
    found = summary(torch.tensor([[3.0, 0.0, math.nan], [-4.0, math.inf, 0.0]], dtype=torch.bfloat16))
    assert dict(zip(SUMS, found.tolist(), strict=False)) == {"present": 1, "squares": 25, "not_finite": 2}
    assert found[ROWS_AT:SKETCH_AT].tolist()[:3] == [9, 16, 0]


def test_rows_are_folded_into_64_groups() -> None:
    rows = torch.ones(130, 2)
    found = summary(rows)[ROWS_AT:SKETCH_AT]
    assert found.sum() == 260
    assert set(found.tolist()) == {4.0, 6.0}


@pytest.mark.parametrize(
    "values", [torch.tensor(2.0), torch.zeros(0, 4), normal(6, 4).T], ids=["scalar", "none", "transposed"]
)
def test_any_shape_has_a_summary(values: Tensor) -> None:
    assert float(summary(values)[1]) == pytest.approx(float(values.square().sum()))
    torch.testing.assert_close(sketch(values), sketch(values.contiguous()))


@pytest.mark.parametrize(
    "name",
    [
        "module.model.layers.0.mlp.up_proj.weight",
        "_orig_mod.module.model.layers.0._orig_mod.mlp.up_proj.weight",
        "module.module.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight",
        "_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight",
        "base_model.model.model.layers.0.mlp.up_proj.base_layer.weight",
    ],
)
def test_names_are_those_of_the_model_without_its_wrappers(name: str) -> None:
    assert canonical(name) == "model.layers.0.mlp.up_proj.weight"


def test_a_fingerprint_does_not_depend_on_the_order_of_rows_but_on_every_token() -> None:
    rows = [[5, 6, 7], [8, 9], [5, 6, 7]]
    first, second = fingerprint(rows[:1]), fingerprint([torch.tensor(row) for row in reversed(rows[1:])])
    assert [x + y for x, y in zip(first, second, strict=True)] == fingerprint(rows)
    assert fingerprint(rows) != fingerprint([[5, 6, 7], [8, 9], [5, 7, 6]])
    assert fingerprint(rows) != fingerprint([[5, 6, 7], [8, 9]])
    assert fingerprint(torch.tensor(rows[:1])) == first
