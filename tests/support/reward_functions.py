"""Has reward functions in TRL's form, for the tests of training."""

from typing import Any


def by_difference(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Returns -1 for each wrong answer, and 1 for an answer that the question has."""
    assert all(question.endswith("=") for question in prompts)
    return [1.0 if text == right else -1.0 for text, right in zip(completions, answer, strict=True)]
