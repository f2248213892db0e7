"""Sketches of matrices in records: what they see, how well, and that the judge tells it as it does of whole tensors."""

import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from judge_sample import Change, Tensors, Values, unchanged, write
from torch import Tensor

from conformance.judge.belongs import check_start
from conformance.judge.verdict import judge
from conformance.record.format import RecordError
from conformance.record.sketch import PROJECTIONS, SAMPLED, kept, numbers_kept, projections, sampled, sketched_above
from conformance.record.verdict import Verdict
from conformance.run.replicas import hash_of_bits

CPU = torch.device("cpu")
WEIGHT = torch.randn(300, 700, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def parts(tensor: Tensor, name: str = "w", above: float = 0) -> dict[str, Tensor]:
    return kept(f"weight/{name}", tensor, above=above)


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
    assert torch.equal(found["weight.sample/w"][0], WEIGHT.float().flatten()[sampled("w", WEIGHT.numel(), device=CPU)])
    assert len(set(sampled("w", 10**9, device=CPU).tolist())) > SAMPLED - 10  # they are spread


def test_a_sketch_is_linear_and_depends_on_the_parameters_name_alone() -> None:
    step = WEIGHT.flip(0)
    before, after, moved = (parts(tensor)["weight/w"] for tensor in (WEIGHT, WEIGHT + step, step))
    torch.testing.assert_close(after - before, moved, rtol=1e-12, atol=1e-12)
    assert torch.equal(kept("gradient/w", WEIGHT, above=0)["gradient/w"], before)
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
    """docs/tolerances.md: mean 1, the variance of the square, and what the tail is at most."""
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
            tensors |= kept(name, tensors.pop(name), above=above)

    return changed


def verdict_of(tmp_path: Path, change: Change) -> Verdict:
    oracle = write(tmp_path / "oracle", sketched())
    return judge([write(tmp_path / "cell", sketched(change))], oracle=oracle, noise=())


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
    assert verdict.findings[0].tensor.startswith("a (shape (4, 3) instead of (4, 16)")


def test_a_noise_run_that_loaded_other_weights_is_refused(tmp_path: Path) -> None:
    oracle = write(tmp_path / "oracle", sketched(), oracle="float64")
    check_start(write(tmp_path / "same", sketched(), oracle="fp32"), oracle)
    other = write(tmp_path / "other", sketched(at(-1, "weight/a", 1, 1, 1e-9)), oracle="fp32")
    with pytest.raises(RecordError, match="has loaded another weight"):
        check_start(other, oracle)


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
