"""Has reward functions in TRL's form, for the tests of training."""

from pathlib import Path
from typing import Any


def by_difference(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Returns -1 for each wrong answer, and 1 for an answer that the question has."""
    assert all(question.endswith("=") for question in prompts)
    return [1.0 if text == right else -1.0 for text, right in zip(completions, answer, strict=True)]


def by_length(completions: list[str], folder: list[str], **_: Any) -> list[float]:
    """Returns the length of each answer, and removes the weights in ``folder``, as somebody who needs the space."""
    (Path(folder[0]) / "model.safetensors").unlink(missing_ok=True)
    return [float(len(text)) for text in completions]
