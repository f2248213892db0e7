"""Sketches of matrices in records: what they see, how well, and that the judge tells it as it does of whole tensors."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_sample import STEPS, Change, Tensors, Values, unchanged, write
from torch import Tensor

from conformance.judge.provenance import check_start
from conformance.judge.tolerance import EXACT
from conformance.judge.verdict import judge
from conformance.numerics import sketch
from conformance.numerics.sketch import (
    PROJECTIONS,
    SAMPLED,
    kept,
    numbers_kept,
    on_cpu,
    projections,
    sampled,
    sketched_above,
)
from conformance.oracle.optimizer import clip_factor
from conformance.records.record_format import RecordError
from conformance.results.verdict import Verdict
from conformance.worker.rank_state import digest_of, hash_of_bits

CPU = torch.device("cpu")
MANY_BITS = torch.randint(-(2**15), 2**15, (40, 30), generator=torch.Generator().manual_seed(1)).short()
WEIGHT = torch.randn(300, 700, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def parts(tensor: Tensor, name: str = "w", above: float = 0) -> dict[str, Tensor]:
    return kept([(f"weight/{name}", tensor)], above=above)


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_vectors_and_small_matrices_are_kept_whole() -> None:
    for tensor, above in ((torch.ones(10**5), 0), (torch.ones(4, 4), 16), (torch.tensor(1.0), 0)):
        (only,) = parts(tensor, above=above).values()
        assert torch.equal(only, tensor)
    assert len(parts(torch.ones(4, 5), above=16)) == 4
    assert sketched_above(None, 10**8) == math.inf
    assert sketched_above(None, 10**9) < 10**5
    assert sketched_above(7, 10**8) == sketched_above(7, 10**9) == 7


def test_norms_and_samples_are_the_tensors_own() -> None:
    found = parts(WEIGHT.float())
    torch.testing.assert_close(found["weight.norms/w"], WEIGHT.float().double().norm(dim=1), rtol=1e-14, atol=0)
    assert found["weight.sample/w"].dtype == torch.float32
    assert torch.equal(found["weight.sample/w"][0], WEIGHT.float().flatten()[sampled("w", *WEIGHT.shape, device=CPU)])


def test_sampled_elements_are_spread_and_each_row_and_each_column_has_one() -> None:
    height, width = 3000, 2000
    places = sampled("w", height, width, device=CPU)
    anywhere, in_rows, in_columns = places.split([SAMPLED, height, width])
    assert len(anywhere.unique()) > SAMPLED - 10
    assert torch.equal(in_rows // width, torch.arange(height))
    assert torch.equal(in_columns % width, torch.arange(width))
    for part in (anywhere, in_rows, in_columns):
        for place, size in ((part // width, height), (part % width, width)):
            assert abs(place.double().mean().item() / size - 0.5) < 5 / math.sqrt(12 * len(part))
    assert not torch.equal(sampled("other", height, width, device=CPU), places)


def test_what_is_read_in_blocks_and_pieces_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows at a time, and 512 of 700 columns."""
    monkeypatch.setattr("conformance.numerics.sketch._BLOCK", 2200)
    found = parts(WEIGHT)
    of_columns, of_rows = projections("w columns", 700, device=CPU), projections("w rows", 300, device=CPU)
    torch.testing.assert_close(found["weight/w"], WEIGHT @ of_columns, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["weight.columns/w"], WEIGHT.T @ of_rows, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["weight.norms/w"], WEIGHT.norm(dim=1), rtol=1e-14, atol=0)
    assert not torch.allclose(of_columns[:300], of_rows)


def test_what_is_kept_does_not_change_with_the_tensor() -> None:
    tensor = torch.ones(5)
    found = parts(tensor)
    tensor += 1
    assert torch.equal(found["weight/w"], torch.ones(5))


def test_tensors_copied_together_keep_order_and_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    nan = torch.tensor([2**62 + 2**61 + 12345]).view(torch.float64)
    given = [WEIGHT.T, nan, torch.ones(()), torch.empty(0, 3), MANY_BITS, MANY_BITS.view(torch.bfloat16)[:, ::3]]
    buffer = torch.zeros(5)

    def pieces() -> Iterator[tuple[int, Tensor]]:
        yield from enumerate(given)
        for number in range(10, 20):
            yield number, buffer.fill_(number)

    alone = on_cpu(pieces())
    monkeypatch.setattr(sketch, "is_small", lambda tensor: tensor is not given[-2])
    monkeypatch.setattr(sketch, "_TOGETHER", 2**10)
    together = on_cpu(pieces())
    assert [*together] == [*alone] == [*range(len(given)), *range(10, 20)]
    for key, tensor in alone.items():
        assert (together[key].dtype, together[key].shape) == (tensor.dtype, tensor.shape)
        assert digest_of(together[key]) == digest_of(tensor)


def test_a_sketch_is_linear_and_depends_on_the_parameters_name_alone() -> None:
    step = WEIGHT.flip(0)
    before, after, moved = (parts(tensor)["weight/w"] for tensor in (WEIGHT, WEIGHT + step, step))
    torch.testing.assert_close(after - before, moved, rtol=1e-12, atol=1e-12)
    assert torch.equal(kept([("gradient/w", WEIGHT)], above=0)["gradient/w"], before)
    assert not torch.equal(parts(WEIGHT, "other")["weight/other"], before)


def test_what_is_kept_of_several_dimensions_is_that_of_a_matrix() -> None:
    experts = WEIGHT.reshape(300, 7, 100)
    assert all(torch.equal(found, parts(WEIGHT)[name]) for name, found in parts(experts).items())
    assert numbers_kept((300, 7, 100), above=0) == sum(found.numel() for found in parts(experts).values())
    assert numbers_kept((300, 7, 100), above=10**6) == WEIGHT.numel()


# --- how well it sees -------------------------------------------------------------------------------------------------

DIRECTIONS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "dense": lambda n, g: torch.randn(n, generator=g, dtype=torch.float64),
    "one element": lambda n, g: torch.eye(n, dtype=torch.float64)[n // 3],
    "two elements that cancel": lambda n, g: (
        torch.eye(n, dtype=torch.float64)[5] - torch.eye(n, dtype=torch.float64)[9]
    ),
    "all alike": lambda n, g: torch.ones(n, dtype=torch.float64),
}


RUNS = 10_000


@functools.cache
def drawn(length: int) -> Tensor:
    """The vectors (RUNS, length, PROJECTIONS) of as many parameters: what is drawn for other columns is independent."""
    return projections("many", RUNS * length, device=CPU).view(RUNS, length, PROJECTIONS)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_norm_of_any_row_is_estimated_as_well_as_is_proven(direction: str) -> None:
    """docs/explanations/tolerances.md: mean 1, the variance of the square, and what the tail is at most."""
    row = DIRECTIONS[direction](40, torch.Generator().manual_seed(1))
    ratios = torch.einsum("n,rnk->rk", row, drawn(40)).square().sum(dim=1) / row.square().sum()
    variance = (2 - 1.2 * row.pow(4).sum() / row.square().sum() ** 2).item() / PROJECTIONS
    assert abs(ratios.mean().item() - 1) < 5 * math.sqrt(variance / RUNS)
    assert ratios.var().item() == pytest.approx(variance, rel=0.06)
    for factor in (2, 2.5, 3):  # errors that are so much larger than they look
        share = (ratios < factor**-2).double().mean().item()
        assert share <= missed(factor) + 5 * math.sqrt(missed(factor) / RUNS)


@pytest.mark.parametrize(("rows", "alike"), [(5, True), (5, False), (30, False)])
def test_the_norm_of_a_matrix_is_estimated_worst_if_all_rows_are_wrong_alike(rows: int, alike: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    wrong = torch.randn(1 if alike else rows, 40, dtype=torch.float64, generator=generator).expand(rows, 40)
    ratios = torch.einsum("mn,rnk->rmk", wrong, drawn(40)).square().sum(dim=(1, 2)) / wrong.square().sum()
    proven = 2 / PROJECTIONS * (torch.linalg.matrix_norm(wrong, 2) / wrong.norm()).item() ** 2
    assert ratios.var().item() <= proven * 1.06
    assert ratios.var().item() > 0.8 * 2 / PROJECTIONS if alike else ratios.var().item() < 0.8 * 2 / PROJECTIONS


def missed(factor: float) -> float:
    """The proven bound of the probability that a row looks smaller than 1 / factor of what it is."""
    volume = math.pi ** (PROJECTIONS / 2) / math.gamma(PROJECTIONS / 2 + 1)
    return float(volume * (math.sqrt(PROJECTIONS / 6) / factor) ** PROJECTIONS)


def test_the_bounds_in_the_docs_are_those_of_the_formula() -> None:
    assert missed(10) < 1e-13
    assert missed(5) < 1e-8
    assert missed(4) < 2e-7


# --- how it is judged -------------------------------------------------------------------------------------------------


def sketched(change: Change = unchanged, *, above: float = 0) -> Change:
    """``change``, and then sketches in the place of all matrices."""

    def changed(step: int, values: Values, tensors: Tensors) -> None:
        change(step, values, tensors)
        for name in [name for name, tensor in tensors.items() if tensor.ndim > 1]:
            tensors |= kept([(name, tensors.pop(name))], above=above)

    return changed


def verdict_of(tmp_path: Path, change: Change, **options: Any) -> Verdict:
    oracle = write(tmp_path / "oracle", sketched(), **options)
    return judge([write(tmp_path / "cell", sketched(change), **options)], oracle=oracle, noise=())


def at(step: int, key: str, row: int, column: int, by: float) -> Change:
    def change(now: int, values: Values, tensors: Tensors) -> None:
        if now == step:
            tensors[key][row, column] += by

    return change


def test_an_honest_cell_conforms_and_says_how_it_was_compared(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, unchanged)
    assert verdict.state == "conforms", verdict.reason
    assert "2 of 2 parameters are compared by sketches" in verdict.reason
    assert {q.stage for q in verdict.quantities} >= {"gradients", "clipped update", "weights after N steps"}
    assert any(q.tensor == "a against rebuilt" for q in verdict.quantities)
    assert any(q.tensor == "grad_norm against rebuilt" for q in verdict.quantities)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (3, 1), (2, 2)])
def test_an_element_is_found_with_its_row_and_its_column(tmp_path: Path, row: int, column: int) -> None:
    verdict = verdict_of(tmp_path, at(0, "gradient/b", row, column, 1e-9))
    first, worst = verdict.findings[:2]
    assert (first.stage, first.tensor, first.step) == ("gradients", "b", 0)
    assert first.where == f"[{row}, {column}] by sketch"
    assert worst.where == f"row {row} by sketch"
    assert first.max_abs == pytest.approx(1e-9, rel=0.7)  # an estimate
    assert {f.tensor.partition(" ")[0] for f in verdict.findings if f.stage == "gradients"} == {"b"}


def test_a_wrong_update_is_found_in_the_sample(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, at(1, "weight/a", 1, 1, 1e-12))  # of a weight: within what the oracle can tell
    assert verdict.state == "differs"
    assert all(f.tensor.startswith("a") for f in verdict.findings if "rebuilt" in f.tensor)
    assert any(f.tensor == "a against rebuilt" for f in verdict.findings)


def test_a_norm_is_rebuilt_from_the_rows_own_norms_and_not_from_estimates(tmp_path: Path) -> None:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 0:
            values["grad_norm"] *= 1 + 1e-10

    verdict = verdict_of(tmp_path, change)
    assert {f.tensor for f in verdict.findings} == {"grad_norm", "grad_norm against rebuilt"}


def test_a_sketch_is_not_compared_with_a_tensor(tmp_path: Path) -> None:
    oracle = write(tmp_path / "oracle", sketched())
    verdict = judge([write(tmp_path / "cell", sketched(above=12))], oracle=oracle, noise=())
    assert verdict.findings[0].tensor == "a (one record keeps it whole, the other a sketch)"


@pytest.mark.parametrize("shape", [(4, 5), (5, 3), (3, 4)])
def test_a_tensor_of_another_shape_differs_and_its_own_shape_is_told(tmp_path: Path, shape: tuple[int, int]) -> None:
    """Of a wider one the vectors begin with the same ones, and what is kept of rows has the same shape."""

    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == 0:
            tensors["gradient/a"] = torch.ones(shape, dtype=torch.float64)

    verdict = verdict_of(tmp_path, change)
    assert verdict.findings[0].tensor == f"a (shape {shape} instead of (4, 3))"
    assert verdict.state == "differs"


def test_a_noise_run_that_loaded_other_weights_is_refused(tmp_path: Path) -> None:
    oracle = write(tmp_path / "oracle", sketched(), oracle="float64")
    check_start(write(tmp_path / "same", sketched(), oracle="fp32"), oracle)
    other = write(tmp_path / "other", sketched(at(-1, "weight/a", 1, 1, 1e-9)), oracle="fp32")
    with pytest.raises(RecordError, match="has loaded different values of weight"):
        check_start(other, oracle)


# --- what it does not see ---------------------------------------------------------------------------------------------

LAST, RATE, CLIPPED_TO = STEPS - 1, 0.1, 1.0  # of the sample
WIDE = (4, 40)  # more columns than vectors
LARGE = (6000, 8)  # more elements than are sampled
FEW, SHARE_OF_DECAY = 240, 3e-2  # elements, and what a lost weight decay is of an update


def unsampled(name: str) -> list[int]:
    """The places of elements of a LARGE matrix that are in no sample."""
    return sorted({*range(math.prod(LARGE))} - {*sampled(name, *LARGE, device=CPU).tolist()})


def hidden(tensor: Tensor, name: str) -> Tensor:
    """What of each row is orthogonal to all vectors that the rows of a parameter are multiplied by."""
    basis: Tensor = torch.linalg.qr(projections(f"{name} columns", tensor.shape[1], device=CPU)).Q
    return tensor - tensor @ basis @ basis.T


def test_sketch_orthogonal_change_shows_outside_rows() -> None:
    change = hidden(WEIGHT, "w")
    assert change.norm() > 0.98 * WEIGHT.norm()  # 684 of 700 dimensions
    before, after = parts(WEIGHT), parts(WEIGHT + change)
    in_rows = (after["weight/w"] - before["weight/w"]).norm(dim=1) / after["weight.norms/w"]
    assert 0 < in_rows.max() < 2**-53 * math.sqrt(WEIGHT.shape[1])  # as roundings of a sum add up that are independent
    for part in ("columns", "norms", "sample"):
        own, changed = before[f"weight.{part}/w"], after[f"weight.{part}/w"]
        assert (changed - own).norm() > 0.8 * own.norm(), part


@pytest.mark.parametrize(
    ("times", "follows", "found"),
    [
        # It is as long as before where what is hidden has the other sign.
        (1.0, False, {"a against rebuilt", "b against rebuilt", "grad_norm against rebuilt"}),
        (-2.0, False, {"a against rebuilt"}),
        (-2.0, True, set()),
    ],
)
def test_sketch_gradient_hidden_from_vectors_differs_in_norm(
    tmp_path: Path, times: float, follows: bool, found: set[str]
) -> None:
    """Columns only say where a difference is. So a backend that knows the vectors could hide."""

    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == LAST:
            added = times * hidden(tensors["gradient/a"], "a")
            tensors["gradient/a"] += added
            tensors["weight/a"] -= follows * RATE * clip_factor(values["grad_norm"], CLIPPED_TO) * added

    verdict = verdict_of(tmp_path, change, shape=WIDE)
    assert {finding.tensor for finding in verdict.findings} == found


@pytest.mark.parametrize(("times", "found"), [(4.0, {"a"}), (0.5, set())])
def test_an_update_that_is_wrong_outside_of_the_sample_is_found_in_its_rows(
    tmp_path: Path, times: float, found: set[str]
) -> None:
    """An error of one element looks at most sqrt(3) times as large as it is, because the numbers are uniform, and
    almost never a quarter of it. It is relative to the distance that the whole tensor has moved."""
    loaded = Tensors()
    place = unsampled("a")[0]

    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step < 0:
            loaded["a"] = tensors["weight/a"].clone()
        elif step == LAST:
            moved = (tensors["weight/a"] - loaded["a"]).norm().item()
            tensors["weight/a"].view(-1)[place] += times * EXACT * moved

    verdict = verdict_of(tmp_path, change, shape=LARGE)
    assert {finding.tensor for finding in verdict.findings} == found
    assert all(f.where == f"[{place // LARGE[1]}, {place % LARGE[1]}] by sketch" for f in verdict.findings)


def trained(noise: float, *, seed: int = 0, lost: Sequence[int] = ()) -> Change:
    """The sample's run with a relative error ``noise`` in each gradient, from which updates follow but for a share in
    the elements ``lost`` of one weight."""
    generator, weights = torch.Generator().manual_seed(seed), Tensors()

    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step < 0:
            weights.update({name: tensors[f"weight/{name}"].clone() for name in ("a", "b")})
            return
        gradients = [tensors[f"gradient/{name}"] for name in weights]
        for gradient in gradients:
            gradient *= 1 + noise * torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
        values["grad_norm"] = math.hypot(*(gradient.norm().item() for gradient in gradients))
        for name, gradient in zip(weights, gradients, strict=True):
            update = RATE * clip_factor(values["grad_norm"], CLIPPED_TO) * gradient
            if name == "a":
                update.view(-1)[[*lost]] *= 1 - SHARE_OF_DECAY
            weights[name] = weights[name] - update
            tensors[f"weight/{name}"] = weights[name].clone()

    return change


IN_ROWS = (sampled("a", *LARGE, device=CPU) // LARGE[1]).bincount().tolist()  # how many of each row are sampled
LOST = {
    "a row": [IN_ROWS.index(1) * LARGE[1] + column for column in range(LARGE[1])],
    "a column": [row * LARGE[1] + 5 for row in range(LARGE[0])],
    "elements": unsampled("a")[:: len(unsampled("a")) // FEW][:FEW],
}


@pytest.mark.parametrize(
    ("precision", "noise", "lost", "found"),
    [
        ("bf16", 0.01, "a row", {"a against rebuilt"}),
        ("bf16", 0.01, "a column", {"a against rebuilt"}),
        ("bf16", 0.01, "elements", set()),
        ("exact", 0.0, "elements", {"a"}),
    ],
)
def test_sketch_lost_decay_of_few_elements_hides_in_bf16_noise(
    tmp_path: Path, precision: str, noise: float, lost: str, found: set[str]
) -> None:
    """It is SHARE_OF_DECAY x sqrt(FEW / elements) of the update, 2e-3, where three times the noise may be. Of each row
    and of each column an element is sampled."""
    runs = {name: trained(noise, seed=seed) for seed, name in enumerate(("noise", "honest"))}
    runs["lost"] = trained(noise, seed=1, lost=LOST[lost])
    oracle = write(tmp_path / "oracle", sketched(), precision=precision, shape=LARGE)
    records = {
        name: write(tmp_path / name, sketched(change), precision=precision, shape=LARGE)
        for name, change in runs.items()
    }
    single = [records["noise"]] if noise else []
    assert judge([records["honest"]], oracle=oracle, noise=single).state == "conforms"
    assert {f.tensor for f in judge([records["lost"]], oracle=oracle, noise=single).findings} == found


# --- replicas on a GPU ------------------------------------------------------------------------------------------------


def test_the_hash_of_bits_tells_values_places_and_lengths_apart() -> None:
    bits = torch.randint(0, 256, (1001,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    swapped = bits.clone()
    swapped[:16] = bits[:16].roll(8)  # two words change places
    flipped = bits.clone()
    flipped[-1] ^= 1
    others = [swapped, flipped, bits[:-1], torch.cat([bits, bits.new_zeros(1)])]
    assert hash_of_bits(bits) == hash_of_bits(bits.clone())
    assert len({hash_of_bits(one) for one in (bits, *others)}) == 5
