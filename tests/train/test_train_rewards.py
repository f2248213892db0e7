"""Rewards: numbers in texts, GSM8K's answers, and the embedded arithmetic."""

from decimal import Decimal

import pytest

from conformance.core.errors import UsageError
from impl.train.data import arithmetic
from impl.train.rewards import ARITHMETIC, exact_answer, last_number, near_answer, reference_answer, reward_of


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 72", "72"),
        ("#### 1,234,567", "1234567"),
        ("it is $-1,000.50.", "-1000.50"),
        ("= \u22125", "-5"),
        ("7-2", "2"),
        ("7 - -2", "-2"),
        ("+3", "3"),
        ("1,2", "2"),
        ("12,3456", "3456"),
        ("42.", "42"),
        ("3.0", "3"),
        ("-.5", "-0.5"),
        ("so ...5", "5"),
        ("\u0663", None),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


def test_a_reference_is_what_stands_behind_its_mark() -> None:
    assert reference_answer("5 and 6 #### 7 apples", "here") == 7
    assert reference_answer("94 - 5 = 89.", "here") == 89
    with pytest.raises(UsageError, match=r"line 3: the reference .* no number after ####"):
        reference_answer("5 #### none", "line 3")


def test_an_exact_answer_is_all_or_nothing() -> None:
    assert [exact_answer(text, Decimal(1000)) for text in ("so 1,000", "1000.0 apples", "1001", "")] == [1, 1, 0, 0]


def test_reward_grows_with_closeness_below_right_answer() -> None:
    rewards = [near_answer(text, Decimal(5)) for text in ("?", "99", "9", "6", "5")]
    assert rewards == pytest.approx([0.0, 0.2, 0.38, 0.47, 1.0])


@pytest.mark.parametrize(
    ("path", "name", "reward"),
    [("x.jsonl", None, exact_answer), (ARITHMETIC, None, near_answer), (ARITHMETIC, "exact-answer", exact_answer)],
)
def test_reward_is_found_by_name_or_data_set(path: str, name: str | None, reward: object) -> None:
    assert reward_of(path, name) is reward


def test_the_embedded_questions_have_their_answers() -> None:
    questions = arithmetic()
    assert len(set(questions)) == 110
    for question, answer in questions:
        assert eval(question.removesuffix("=")) == int(answer)
        assert len(answer) == 1
