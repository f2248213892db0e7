"""Scores responses to prompts: REWARDS has each reward of ``parity train --reward`` by name.

``--reward MODULE:FUNCTION`` takes a function of the user instead, in TRL's form. The reward math-verify compares
expressions with the package of this name, which reads LaTeX.

The other rewards compare the last number of a response with the reference's answer: the text after ``####``, as GSM8K
writes it, or else its last number. A sign belongs to a number unless a digit stands in front of it ("7-2" ends with 2,
"-2" and "= -2" with -2), commas may separate thousands, 3.0 is 3, and .5 is 0.5.
"""

import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from conformance.core.errors import UsageError, did_you_mean, one_line, shown

ARITHMETIC = "arithmetic"  # path of the embedded data set (impl/train/text_pipeline.py)

MARK = "####"
MATH = "math-verify"
NUMBER_REWARD, NEARNESS_REWARD, FAR = 0.2, 0.3, 10
_WHOLE, _PART = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)", r"\.[0-9]+"
_PROSE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}|\\boxed")
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


def math_verify() -> Any:
    """Imports the package math-verify. Raises UsageError if it is not installed."""
    try:
        import math_verify  # an optional package
    except ImportError as error:
        raise UsageError(
            f"--reward {MATH} needs the package of this name ({error}); run: pip install 'backend-parity[{MATH}]'"
        ) from None
    return math_verify


def reference_expression(reference: str, place: str) -> Any:
    """Returns what a right response equals: the expression after ``####``, in a box, or the whole reference.

    Raises UsageError that names ``place`` if there is none.
    """
    text = reference.rpartition(MARK)[2].strip()
    written = [f"\\boxed{{{text}}}", text]  # without a box, the package finds only numbers in an expression
    if "$" in text or _PROSE.search(text):
        written.reverse()
    if not (found := next(filter(None, map(math_verify().parse, written)), None)):
        raise UsageError(
            f"{place}: math-verify finds no expression in the reference {shown(reference)}; write it as a number or as "
            f"LaTeX, such as $\\frac{{1}}{{2}}$ or \\boxed{{x + 1}}, or leave the sample out"
        )
    return found


def equal_expression(response: str, answer: Any) -> float:
    """Returns 1 if math-verify finds an expression in the response that equals the answer, else 0."""
    library = math_verify()
    return float(library.verify(answer, library.parse(response)))


@dataclass(frozen=True, kw_only=True)
class Reward:
    """Compares each response with an answer.

    score: (response, answer) -> reward. reference: (reference, place) -> answer, before anything is trained.
    """

    score: Callable[[str, Any], float]
    reference: Callable[[str, str], Any] = reference_answer

    def reads(self, column: str) -> bool:
        """Returns whether the reward reads a column beside the reference answer."""
        return False


REWARDS: Mapping[str, Reward] = {
    "exact-answer": Reward(score=exact_answer),
    "near-answer": Reward(score=near_answer),
    MATH: Reward(score=equal_expression, reference=reference_expression),
}


def reward_name(path: str, name: str | None) -> str:
    """Returns ``name``, or without a name the reward for the data set at ``path``."""
    return name or ("near-answer" if path == ARITHMETIC else "exact-answer")


@dataclass(frozen=True, kw_only=True)
class FunctionReward:
    """Calls a function in TRL's form: ``function(prompts, completions, **columns)`` returns a number per completion.

    The function gets the arguments that its signature names, or all if it has ``**columns``.

    prompts, completions: texts for a data set of texts, else lists of messages.
    columns: the columns of the data set, and ``reference``, the text of the reference answer.
    """

    name: str
    function: Callable[..., Any]

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        try:
            return inspect.signature(self.function).parameters
        except ValueError:  # of some functions in C
            return {"columns": inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)}

    def reads(self, column: str) -> bool:
        """Returns whether the function gets an argument or a column of this name."""
        return column in self.parameters or any(one.kind == one.VAR_KEYWORD for one in self.parameters.values())

    def check_columns(self, columns: Collection[str], path: str) -> None:
        """Raises UsageError if the function needs a column that the data set does not have."""
        given = {"prompts", "completions", "reference", *columns}
        named = [one for one in self.parameters.values() if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        if missing := [one.name for one in named if one.default is one.empty and one.name not in given]:
            raise UsageError(
                f"--reward {self.name} takes {', '.join(missing)}, but {path} has the columns "
                f"{', '.join(sorted(columns))}; name parameters as columns, prompts, completions or reference"
            )

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
    ) -> list[float]:
        """Raises UsageError that names the function if it returns anything but a finite number per completion."""
        arguments = {"prompts": prompts, "completions": completions, **columns}
        found = self.function(**{name: values for name, values in arguments.items() if self.reads(name)})
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

    Raises UsageError if there is none, or if its package is not installed.
    """
    name = reward_name(path, name)
    if name == MATH:
        math_verify()
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
