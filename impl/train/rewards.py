"""Scores responses to prompts: REWARDS has each reward of ``parity train --reward`` by name.

``--reward MODULE:FUNCTION`` takes a function of the user instead, in TRL's form.

A reward compares the last number of a response with the reference's answer: the text after ``####``, as GSM8K writes
it, or else its last number. A sign belongs to a number unless a digit stands in front of it ("7-2" ends with 2, "-2"
and "= -2" with -2), commas may separate thousands, 3.0 is 3, and .5 is 0.5.
"""

import importlib
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from conformance.core.errors import UsageError, did_you_mean, one_line, shown

ARITHMETIC = "arithmetic"  # path of the embedded data set (impl/train/data.py)
Reward = Callable[[str, Decimal], float]  # (response, answer) -> reward

MARK = "####"
NUMBER_REWARD, NEARNESS_REWARD, FAR = 0.2, 0.3, 10
_WHOLE, _PART = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)", r"\.[0-9]+"
_NUMBER = re.compile(rf"(?:(?<![0-9])[-+\u2212])?(?:{_WHOLE}(?:{_PART})?|(?<![0-9.]){_PART})")


def last_number(text: str) -> Decimal | None:
    """Returns the last number in a text; None if there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def reference_answer(reference: str, place: str) -> Decimal:
    """Returns the number that a right response ends with. Raises UsageError that names ``place`` if there is none."""
    answer = last_number(reference.rpartition(MARK)[2])
    if answer is None:
        raise UsageError(
            f"{place}: the reference {shown(reference)} has no number{' after ' + MARK if MARK in reference else ''}, "
            f"but the reward compares numbers; give answers that end with a number, or leave the sample out"
        )
    return answer


def exact_answer(response: str, answer: Decimal) -> float:
    """Returns 1 if the response ends with the right number, else 0."""
    return float(last_number(response) == answer)


def near_answer(response: str, answer: Decimal) -> float:
    """Returns 1 for the right number; for a wrong number 0.2, plus up to 0.3 for its nearness within a distance of 10.

    It serves the embedded arithmetic, which a tiny random model learns: this model hardly ever gives the right number
    by chance, and it cannot learn from rewards that are all 0.
    """
    given = last_number(response)
    if given is None:
        return 0.0
    if given == answer:
        return 1.0
    return NUMBER_REWARD + NEARNESS_REWARD * (1 - min(float(abs(given - answer)), FAR) / FAR)


REWARDS: Mapping[str, Reward] = {"exact-answer": exact_answer, "near-answer": near_answer}


def reward_name(path: str, name: str | None) -> str:
    """Returns ``name``, or without a name the reward for the data set at ``path``."""
    return name or ("near-answer" if path == ARITHMETIC else "exact-answer")


@dataclass(frozen=True, kw_only=True)
class FunctionReward:
    """Calls a function in TRL's form: ``function(prompts, completions, **columns)`` returns a number per completion.

    prompts, completions: texts for a data set of texts, else lists of messages.
    columns: the columns of the data set, and ``reference``, the text of the reference answer.
    """

    name: str
    function: Callable[..., Any]

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
    ) -> list[float]:
        """Raises UsageError that names the function if it returns anything but a finite number per completion."""
        found = self.function(prompts=prompts, completions=completions, **columns)
        try:
            rewards = [float(reward) for reward in found]
        except (TypeError, ValueError):
            rewards = []
        if len(rewards) != len(completions) or not all(map(math.isfinite, rewards)):
            raise UsageError(
                f"--reward {self.name} must return a list of {len(completions)} finite numbers, one for each "
                f"completion, got {shown(found)}"
            )
        return rewards


def reward_of(path: str, name: str | None) -> Reward | FunctionReward:
    """Returns a reward of REWARDS, or the function MODULE:FUNCTION, whose module may lie in the working directory.

    Raises UsageError if there is none.
    """
    name = reward_name(path, name)
    if name in REWARDS:
        return REWARDS[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise UsageError(
            f"--reward {name}: {did_you_mean(name, REWARDS)}give one of {', '.join(REWARDS)}, or MODULE:FUNCTION"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # the user's module may raise anything
        raise UsageError(f"--reward {name} cannot be imported: {one_line(error)}") from None
    if not callable(found):
        raise UsageError(f"--reward {name} must be a function, got {shown(found)}")
    return FunctionReward(name=name, function=found)
