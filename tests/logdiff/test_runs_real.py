"""Real trainings compared: honest ones of other seeds are not flagged, and every planted difference is named."""

from collections.abc import Sequence

import pytest
from small_runs import Recipe, train

from reports.logdiff.comparison import Comparison, Side, compare
from reports.logdiff.rows import Log, Row
from reports.logdiff.run import Run, run_of

STEPS = 120
PAIRS = 20
THRESHOLD = 0.05
BASE = Recipe(steps=STEPS)
SWIFT = Recipe(steps=STEPS, lr=6e-2)  # where a lost state of the optimizer shows


def runs_of(recipe: Recipe, seeds: Sequence[int], *, without: Sequence[str] = (), **facts: int) -> list[Run]:
    return [
        run_of(
            Log(
                format="test",
                rows=[
                    Row(int(row["step"]), {k: v for k, v in row.items() if k not in ("step", *without)}) for row in log
                ],
                facts=facts,
            ),
            name=f"seed {seed}",
        )
        for seed, log in zip(seeds, train(recipe, seeds), strict=True)
    ]


def compared(a: Sequence[Run], b: Sequence[Run]) -> Comparison:
    return compare(Side(name="A", runs=tuple(a)), Side(name="B", runs=tuple(b)), by="step", threshold=THRESHOLD)


def names(comparison: Comparison) -> list[str]:
    return [cause.name for cause in comparison.likely_causes]


@pytest.fixture(scope="module")
def base() -> list[Run]:
    """Three seeds of the right training."""
    return runs_of(BASE, range(3))


@pytest.fixture(scope="module")
def honest() -> list[Run]:
    """Four seeds for each of twenty pairs of sides."""
    return runs_of(BASE, range(1000, 1000 + 4 * PAIRS))


def test_twenty_of_twenty_honest_pairs_of_seeds_are_not_flagged(honest: list[Run]) -> None:
    fours = [honest[4 * pair : 4 * pair + 4] for pair in range(PAIRS)]
    assert [bool(compared(four[:2], four[2:]).differs) for four in fours] == [False] * PAIRS


@pytest.mark.exhaustive
def test_more_seeds_and_one_side_of_one_seed_are_not_flagged_either(honest: list[Run]) -> None:
    sets = [honest[8 * place : 8 * place + 8] for place in range(10)]
    assert not any(compared(eight[:4], eight[4:]).differs for eight in sets)
    assert not any(compared(eight[:3], eight[3:4]).differs for eight in sets)


@pytest.mark.exhaustive
def test_honest_runs_of_one_seed_stay_within_the_threshold(base: list[Run]) -> None:
    """Right accumulation and right data parallelism add up the same gradients in another order."""
    for recipe in (Recipe(steps=STEPS, accumulation=4), Recipe(steps=STEPS, accumulation=2, ranks=2)):
        found = compared(base[:1], runs_of(recipe, [0]))
        assert not found.differs
        assert names(found) == []


def test_a_loss_that_is_summed_over_micro_batches_is_named_with_their_number(base: list[Run]) -> None:
    wrong = runs_of(Recipe(steps=STEPS, accumulation=4, undivided=True), range(3), gradient_accumulation_steps=4)
    for a, b in ((base[:1], wrong[:1]), (base, wrong)):
        found = compared(a, b)
        assert found.first
        assert (found.first.name, found.first.first and found.first.first.position) == ("loss", 1)
        assert names(found)[0] == "loss and gradient factor"
        assert "4 times larger" in found.likely_causes[0].text or "4 within its error" in found.likely_causes[0].text
        assert "gradient_accumulation_steps in the logs' headers" in found.likely_causes[0].text


def test_gradients_that_are_summed_over_ranks_are_named_with_their_number(base: list[Run]) -> None:
    wrong = runs_of(Recipe(steps=STEPS, ranks=8, summed=True), range(3))
    for a, b in ((base[:1], wrong[:1]), (base, wrong)):
        found = compared(a, b)
        assert [one.name for one in found.metrics if one.first] == ["grad_norm"]
        assert names(found) == ["gradient factor"]
        assert "is 8 times larger on side B" in found.likely_causes[0].text
        assert "data-parallel" in found.likely_causes[0].text


@pytest.mark.parametrize("side", ["A", "B"])
def test_twice_the_learning_rate_is_named(side: str, base: list[Run]) -> None:
    wrong = runs_of(Recipe(steps=STEPS, lr=2 * BASE.lr), [0])
    found = compared(base[:1], wrong) if side == "B" else compared(wrong, base[:1])
    assert names(found) == ["learning rate: factor"]  # and not that the loss grows apart, which follows
    assert f"2 times {'larger' if side == 'B' else 'smaller'} on side B" in found.likely_causes[0].text


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", [Recipe(steps=STEPS, lr=2 * BASE.lr), Recipe(steps=STEPS, weight_decay=0.5)])
def test_where_no_learning_rate_is_logged_the_growth_from_the_first_step_is(recipe: Recipe) -> None:
    right, wrong = (runs_of(one, [0], without=("lr",)) for one in (BASE, recipe))
    assert names(compared(right, wrong)) == ["growing"]


def test_a_resume_without_the_optimizers_state_is_named_with_its_step() -> None:
    right, wrong = runs_of(SWIFT, [0]), runs_of(Recipe(steps=STEPS, lr=SWIFT.lr, lost_at=60), [0])
    found = compared(right, wrong)
    assert names(found)[0] == "jump"
    assert found.first
    assert found.first.first
    assert 61 <= found.first.first.position <= 66  # the state's absence shows after the next update


def test_a_resume_that_begins_the_schedule_again_is_named_with_its_step(base: list[Run]) -> None:
    found = compared(base[:1], runs_of(Recipe(steps=STEPS, restarted_at=60), [0]))
    assert names(found)[0] == "learning rate: begins again"
    assert "begins again at step 61" in found.likely_causes[0].text


@pytest.mark.exhaustive
def test_another_order_of_the_data_is_named(base: list[Run]) -> None:
    found = compared(base[:1], runs_of(Recipe(steps=STEPS, data_seed=500), [0]))
    assert names(found) == ["data order"]
    assert "from the first step on" in found.likely_causes[0].text
