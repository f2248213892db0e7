"""Rewards: numbers in texts, GSM8K's answers, and the embedded arithmetic."""

import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from cells import exhaustive
from train_runs import Trainings, training

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.forms import Sample, pair
from conformance.data.tokenizer import load_tokenizer
from conformance.runtime import Pool
from conformance.spec.scenario import DataConfig
from impl.train.experience import function_arguments
from impl.train.rewards import (
    ARITHMETIC,
    FunctionReward,
    Reward,
    equal_expression,
    exact_answer,
    last_number,
    near_answer,
    reference_answer,
    reference_expression,
    reward_of,
)
from impl.train.text_pipeline import Prompt, arithmetic, load_prompts

LLAMA = FIXTURES / "models" / "llama"
FUNCTIONS = """
SEEN = {}
def told(**arguments):
    SEEN.update(arguments)
    return arguments["level"]
def too_few(**_):
    return [1.0]
def infinite(completions, **_):
    return [float("inf")] * len(completions)
def nothing(**_):
    pass
def by_level(completions, level):
    return level
def by_grade(completions, grade):
    return grade
"""


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


@pytest.mark.parametrize(
    ("reference", "response", "reward"),
    [
        ("5 - 4.5 = 0.5 #### 0.5", "so it is $\\frac12$", 1),
        ("Then \\boxed{2x + 2}.", "\\boxed{2(x + 1)}", 1),
        ("x + 1", "The answer is $1 + x$.", 1),
        ("72", "71", 0),
        ("72", "I do not know", 0),
        ("72", "", 0),
    ],
)
def test_expressions_are_compared_by_math_verify(reference: str, response: str, reward: float) -> None:
    pytest.importorskip("math_verify", reason="math-verify is an optional package, and not installed")
    assert equal_expression(response, reference_expression(reference, "here")) == reward


def test_reference_without_expression_is_refused() -> None:
    pytest.importorskip("math_verify", reason="math-verify is an optional package, and not installed")
    with pytest.raises(UsageError, match="line 3: math-verify finds no expression in the reference ' '"):
        reference_expression(" ", "line 3")


def test_missing_math_verify_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UsageError, match=r"pip install 'backend-parity\[math-verify\]'"):
        reward_of("x.jsonl", "math-verify")


def test_reward_grows_with_closeness_below_right_answer() -> None:
    rewards = [near_answer(text, Decimal(5)) for text in ("?", "99", "9", "6", "5")]
    assert rewards == pytest.approx([0.0, 0.2, 0.38, 0.47, 1.0])


@pytest.mark.parametrize(
    ("path", "name", "reward"),
    [("x.jsonl", None, exact_answer), (ARITHMETIC, None, near_answer), (ARITHMETIC, "exact-answer", exact_answer)],
)
def test_reward_is_found_by_name_or_data_set(path: str, name: str | None, reward: object) -> None:
    assert isinstance(found := reward_of(path, name), Reward)
    assert found.score is reward


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return "my_rewards"


def test_function_gets_trls_arguments(module: str) -> None:
    record = {"question": "2+3=", "level": 4, "prompt": "hidden"}
    texts = replace(pair("2+3=", "5"), record=record)
    turns = ({"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"})
    chat = Sample(messages=turns, first=1, record={"level": 6})
    arguments = function_arguments([(Prompt((1,), None, texts), "five"), (Prompt((1,), None, chat), "5")])
    reward = reward_of("x.jsonl", f"{module}:told")
    assert isinstance(reward, FunctionReward)
    assert reward(*arguments) == [4.0, 6.0]
    function: Any = sys.modules[module]
    assert {
        "prompts": ["2+3=", [turns[0]]],
        "completions": ["five", [{"role": "assistant", "content": "5"}]],
        "question": ["2+3=", None],
        "level": [4, 6],
        "reference": ["5", "5"],
    } == function.SEEN


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact-anser", "did you mean 'exact-answer'"),
        ("no_such_module:f", "cannot be imported: .*no_such_module"),
        ("my_rewards:missing", "cannot be imported: .*missing"),
        ("my_rewards:SEEN", "must be a function"),
        ("my_rewards:too_few", "list of 2 finite numbers.*got \\[1.0\\]"),
        ("my_rewards:infinite", "list of 2 finite numbers"),
        ("my_rewards:nothing", "list of 2 finite numbers.*got None"),
    ],
)
def test_unusable_function_is_refused(module: str, name: str, message: str) -> None:
    def call() -> None:
        reward: Any = reward_of("x.jsonl", name)
        reward(["", ""], ["", ""], {})

    with pytest.raises(UsageError, match=message):
        call()


@pytest.mark.parametrize("kind", ["grpo", exhaustive("ppo")])
def test_training_uses_the_function(pool: Pool, tmp_path: Path, kind: str) -> None:
    config = training(tmp_path, kind, steps=1)
    assert config.rollout
    config = replace(config, rollout=replace(config.rollout, reward="reward_functions:by_difference"))
    (line,) = Trainings(pool, tmp_path / "logs")(config)
    assert line["critic/score/mean"] in {hits / 4 - 1 for hits in range(5)}  # near-answer is never below 0
    assert line["critic/score/mean"] < 0


def test_columns_of_function_are_used_or_missed(module: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.jsonl").write_text('{"question": "2+3=", "answer": "5", "level": 4, "topic": "sums"}\n')
    data, tokenizer = DataConfig(path=str(tmp_path / "x.jsonl"), max_len=64), load_tokenizer(LLAMA)

    def load(name: str) -> list[str]:
        caplog.clear()
        reward = reward_of(data.path, f"{module}:{name}")
        load_prompts(data, tokenizer, vocabulary=400, max_new_tokens=4, reward=reward)
        return [record.getMessage().partition(": ")[2] for record in caplog.records]

    assert load("by_level") == ["columns that are not used: topic"]
    assert load("told") == []
    reward: Any = reward_of(data.path, f"{module}:by_level")
    assert reward(["a"], ["b"], {"level": [4], "topic": ["sums"]}) == [4.0], "only the named arguments are given"
    with pytest.raises(UsageError, match=r"by_grade takes grade, but .*x.jsonl has the columns answer, level"):
        load("by_grade")


def test_the_embedded_questions_have_their_answers() -> None:
    questions = arithmetic()
    assert len(set(questions)) == 110
    for question, answer in questions:
        assert eval(question.removesuffix("=")) == int(answer)
        assert len(answer) == 1
