"""The position in shuffled data: nothing is repeated or lost when a training goes on with other ranks."""

from collections import Counter
from dataclasses import replace

import pytest
from test_checkpoint_pickles import ABOUT

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.forms import read_samples
from conformance.spec.scenario import DataConfig
from impl.checkpoints import manifest
from impl.checkpoints.manifest import Manifest
from impl.checkpoints.training_state import DataPosition

SEED = 7


def train(position: DataPosition, *, ranks: int, rows: int, steps: int) -> tuple[list[list[int]], DataPosition]:
    """The documents of each step, put together from the shares of all ranks, each of which counts for itself."""
    trained, after = [], position
    for _ in range(steps):
        shares = [position.take(rows)[0][rank::ranks] for rank in range(ranks)]
        trained.append(sorted(document for share in shares for document in share))
        (after,) = {position.take(rows)[1] for _ in range(ranks)}
        position = after
    return trained, after


def test_epoch_resumed_on_more_ranks_uses_documents_once() -> None:
    """In the middle of the epoch the position goes through a manifest."""
    samples = [
        sample.answer for sample in read_samples(DataConfig(path=str(FIXTURES / "data" / "word_problems.jsonl")))
    ]
    position = DataPosition(seed=SEED, documents=len(samples))
    first, position = train(position, ranks=2, rows=6, steps=5)
    text = manifest.to_text(Manifest(suite_version="", about=replace(ABOUT, data=position), files={}))
    loaded = manifest.from_text(text, source="").about.data
    assert loaded == position
    left = len(samples) - 30
    second, position = train(loaded, ranks=3, rows=3, steps=left // 3)
    third, position = train(position, ranks=1, rows=left % 3, steps=1)
    counted = Counter(samples[document] for step in (*first, *second, *third) for document in step)
    assert counted == Counter(samples)
    assert position.consumed == len(samples)


@pytest.mark.parametrize("lost", [{"consumed": 0}, {"seed": SEED + 1}], ids=["position", "order"])
def test_resume_with_lost_position_repeats_documents(lost: dict[str, int]) -> None:
    """The fault of resuming at the beginning of the epoch, or in another order of it; the same count tells."""
    position = DataPosition(seed=SEED, documents=50)
    first, at = train(position, ranks=2, rows=6, steps=5)
    second, _ = train(replace(at, **lost), ranks=2, rows=10, steps=2)
    counted = Counter(document for step in (*first, *second) for document in step)
    assert max(counted.values()) == 2
    assert len(counted) < 50


def test_an_epoch_is_shuffled_by_the_seed_and_the_next_one_anew() -> None:
    position = DataPosition(seed=SEED, documents=50)
    (one, after), (other, _) = position.take(50), replace(position, seed=SEED + 1).take(50)
    assert sorted(one) == sorted(other) == list(range(50))
    assert len({tuple(one), tuple(other), tuple(after.take(50)[0]), tuple(range(50))}) == 4
    across, _ = replace(position, consumed=48).take(4)
    assert across == [*one[48:], *after.take(2)[0]]


def test_other_data_is_refused() -> None:
    position = DataPosition(seed=SEED, documents=50)
    position.check_same_data(replace(position, consumed=3))
    with pytest.raises(
        UsageError, match="position in 40 documents shuffled by seed 7, but this training has 50 by seed"
    ):
        position.check_same_data(replace(position, documents=40))
