"""Makes random rollouts, and converts them to the shapes that the functions take.

Documents are lists of 1-D float64 tensors, one for each response.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cells import exhaustive
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from impl.objectives.advantages import Response

Documents = list[Tensor]
PHASES = (Phase.generate, Phase.shrink)
FEW = 10  # random cases of each test, in the fast run
GARBAGE = 3.25  # stands where nothing may be looked at


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Responses in any order of their groups; ``generator`` gives more numbers of the same roll-out."""

    groups: list[int]
    lengths: list[int]
    rewards: list[float]
    old: Documents
    new: Documents
    reference: Documents
    sampled: Documents
    old_values: Documents
    values: Documents
    advantages: Documents
    generator: torch.Generator

    @property
    def count(self) -> int:
        return len(self.groups)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@st.composite
def rollouts(
    draw: st.DrawFn, *, empty: bool = True, equal_groups: bool = False, one_advantage: bool = False, wild: bool = True
) -> Rollout:
    """``empty``: with responses of no tokens. ``equal_groups``: all of one size, two or more, side by side.
    ``one_advantage``: the same for every token of a response. ``wild``: log-probs that clamps of all kinds bite on."""
    if equal_groups:
        size = draw(st.integers(2, 4))
        groups = [group for group in range(draw(st.integers(1, 4))) for _ in range(size)]
    else:
        groups = [group for group, size in enumerate(draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
                  for _ in range(size)]  # fmt: skip
        groups = draw(st.permutations(groups))
    lengths = draw(st.lists(st.integers(0 if empty else 1, 7), min_size=len(groups), max_size=len(groups)))
    if sum(lengths) < 2:
        lengths[0] = 2
    equal = draw(st.sets(st.sampled_from(groups)))  # groups whose rewards are all the same
    apart = draw(st.sampled_from([0.0, 0.1, 1.0, 15.0] if wild else [0.0, 0.1, 1.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale

    def moved(documents: Documents, scale: float) -> Documents:
        return [document + normal(len(document), scale=scale) for document in documents]

    numbers = normal(len(groups), scale=draw(st.sampled_from([0.01, 1.0, 5.0])))
    rewards = [0.7 + group if group in equal else float(number) for group, number in zip(groups, numbers, strict=True)]
    old = [-normal(length).exp() for length in lengths]
    old_values = [normal(length) for length in lengths]
    signs = [torch.randint(-1, 2, (length,), generator=generator) for length in lengths]  # some are 0
    if one_advantage:
        signs = [sign[:1].expand(len(sign)) for sign in signs]
    sizes = [normal(1).abs().expand(length) if one_advantage else normal(length).abs() for length in lengths]
    return Rollout(
        groups=groups,
        lengths=lengths,
        rewards=rewards,
        old=old,
        new=moved(old, apart),
        reference=moved(old, apart or 0.3),
        sampled=moved(old, apart or 0.3),
        old_values=old_values,
        values=moved(old_values, apart),
        advantages=[sign * size for sign, size in zip(signs, sizes, strict=True)],
        generator=generator,
    )


def cases(number: int, **strategies: Any) -> Callable[[Any], Any]:
    """A test of FEW random cases in the fast run and of ``number`` in the exhaustive one, the same ones every time."""

    def decorate(function: Any) -> Any:
        shown = inspect.signature(given(**strategies)(function))  # what is left for pytest to give
        parameters = [*shown.parameters.values(), inspect.Parameter("count", inspect.Parameter.KEYWORD_ONLY)]

        def test(*, count: int, **others: Any) -> None:
            chosen = settings(max_examples=count, deadline=None, derandomize=True, phases=PHASES)
            chosen(given(**strategies)(function))(**others)

        test.__name__, test.__doc__, test.__module__ = function.__name__, function.__doc__, function.__module__
        test.__signature__ = shown.replace(parameters=parameters)  # type: ignore[attr-defined]
        test.pytestmark = getattr(function, "pytestmark", [])  # type: ignore[attr-defined]
        return pytest.mark.parametrize("count", [FEW, exhaustive(number)])(test)

    return decorate


def responses(case: Rollout) -> list[Response]:
    return [
        Response(group=group, reward=reward, old_logprobs=old, reference_logprobs=reference, values=values)
        for group, reward, old, reference, values in zip(
            case.groups, case.rewards, case.old, case.reference, case.old_values, strict=True
        )
    ]


# Layouts


@dataclass(frozen=True, kw_only=True)
class Padded:
    """A row for each response, whose tokens stand at ``mask`` (int64); ``holes``: not side by side, but in order."""

    mask: Tensor

    @classmethod
    def of(cls, case: Rollout, *, holes: bool = False) -> "Padded":
        width = max(case.lengths) + 2
        mask = torch.zeros(case.count, width, dtype=torch.int64)
        for row, length in zip(mask, case.lengths, strict=True):
            places = torch.randperm(width, generator=case.generator)[:length] if holes else torch.arange(length)
            row[places] = 1
        return cls(mask=mask)

    def __call__(self, documents: Sequence[Tensor], *, fill: float = GARBAGE) -> Tensor:
        matrix = torch.full(self.mask.shape, fill, dtype=torch.float64)
        return matrix.masked_scatter(self.mask.bool(), torch.cat(list(documents)))

    def last(self, numbers: Sequence[float]) -> Tensor:
        """A number at the last token of each row; without tokens at the last place of the row, as verl has it."""
        matrix = torch.zeros(self.mask.shape, dtype=torch.float64)
        for row, mask, number in zip(matrix, self.mask, numbers, strict=True):
            row[int(mask.nonzero().max()) if mask.any() else -1] = number
        return matrix

    def back(self, matrix: Tensor) -> Documents:
        return [row[mask.bool()] for row, mask in zip(matrix.expand(self.mask.shape), self.mask, strict=True)]


def pack(lengths: Sequence[int], generator: torch.Generator) -> tuple[Tensor, Tensor, Callable[[Documents], Tensor]]:
    """(mask, documents, layout): rows of one to three documents with prompts before them and padding behind."""
    rows: list[list[int]] = []
    for index in range(len(lengths)):
        if not rows or len(rows[-1]) == 3 or torch.rand((), generator=generator) < 0.4:
            rows.append([])
        rows[-1].append(index)
    prompts = torch.randint(0, 3, (len(lengths),), generator=generator).tolist()
    width = max(sum(prompts[i] + lengths[i] for i in row) for row in rows) + 1
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    documents = torch.zeros(len(rows), width, dtype=torch.int64)
    for r, row in enumerate(rows):
        start = 0
        for number, i in enumerate(row):
            mask[r, start + prompts[i] : start + prompts[i] + lengths[i]] = True
            documents[r, start:] = number  # what follows, padding too, until the next one
            start += prompts[i] + lengths[i]
    return (
        mask,
        documents,
        lambda parts: torch.full(mask.shape, GARBAGE, dtype=torch.float64).masked_scatter(mask, torch.cat(parts)),
    )


def total(parts: Documents, weights: Sequence[float | Tensor]) -> Tensor:
    """The loss of a mini-batch: the weighted sum over all tokens."""
    return sum(((part * weight).sum() for part, weight in zip(parts, weights, strict=True)), torch.zeros(()))


def with_gradient(documents: Documents) -> Documents:
    return [document.detach().clone().requires_grad_() for document in documents]


def gradients(loss: Tensor, documents: Documents) -> Documents:
    found = torch.autograd.grad(loss, documents, allow_unused=True)
    return [torch.zeros_like(d) if g is None else g for g, d in zip(found, documents, strict=True)]


def gap(got: Documents, wanted: Documents) -> float:
    """The largest difference of two lists of tensors, of each number relative to 1 + the second one."""
    mine, theirs = torch.cat(got).detach(), torch.cat(wanted).detach()
    return float(((mine - theirs).abs() / (1 + theirs.abs())).max()) if len(mine) else 0.0
