"""Checks which tokens each rank holds where ranks share sequences, and in which pieces they exchange keys and values.

The watch shows the tokens that a rank looks up in its embedding. The judge cuts the documents of the first micro-batch
as the layout says and compares. Rows of a vocabulary that is cut over tensor-parallel ranks show the tokens of their
part only; together the ranks show all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from conformance.spec.layout import Layout

Tokens = Sequence[int]
PADDED = -1  # the place of a token that a library may fill with anything
# Libraries pad each document to a multiple of its pieces, times one of these.
MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128)
LEFT = -1  # in place of a multiple: rows are padded to equal lengths on the left, as prompts are
ZIGZAG, CONTIGUOUS, SLICES = "zigzag parts", "contiguous parts", "slices of all tokens"
HELD = "each rank holds the tokens of its place, in their order"
NUMBERS = 4  # of a token that ranks of one sequence gather: log-prob and entropy, once or twice


def shows_tokens(ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Tells whether ranks that share sequences showed the tokens of the first micro-batch, each in one lookup.

    Ranks that compute the rows of a micro-batch one after another look up a part of them at a time.
    """
    due = sum(len(document) for rows in ranks[0].get("documents", ()) for row in rows for document in row)
    most = (max((sum(map(len, seen)) for _, seen in rank.get("embedded", ())), default=0) for rank in ranks)
    return 0 < due <= sum(most)


def held_by_layout(layout: Layout, ranks: Sequence[Mapping[str, Any]]) -> tuple[str, bool, str]:
    """Returns the claim that each rank holds the tokens of its place, in their order, whether it holds, and why."""
    options = set(layout.options)
    if "zigzag" in options:
        asked: tuple[str, ...] = (ZIGZAG,)
    elif "ring" in options:
        asked = (CONTIGUOUS,)
    else:  # PyTorch's own context parallelism may balance its work or not
        asked = (ZIGZAG, CONTIGUOUS) if "torchcp" in options else (SLICES, CONTIGUOUS)
    holds = any(_is_held(layout, ranks, order) for order in asked)
    orders = [] if holds else [order for order in (ZIGZAG, CONTIGUOUS, SLICES) if _is_held(layout, ranks, order)]
    observed = "these" if holds else " or ".join(orders) or "another order"
    return HELD, holds, f"requested {' or '.join(asked)}, observed {observed}"


def _is_held(layout: Layout, ranks: Sequence[Mapping[str, Any]], order: str) -> bool:
    """Tells whether some way to pad gives every place its tokens, and places are in the order of the ranks."""
    ways = [0, LEFT, *MULTIPLES] if order != SLICES else [0]
    return any(_is_held_padded(layout, ranks, order, multiple) for multiple in ways)


def _is_held_padded(layout: Layout, ranks: Sequence[Mapping[str, Any]], order: str, multiple: int) -> bool:
    calls = [(number, of_rows, seen) for number, rank in enumerate(ranks) for of_rows, seen in rank.get("embedded", ())]
    largest = max(of_rows for _, of_rows, _ in calls)
    begins = [part * largest for part in range(layout.tp)]
    shapes = {(len(seen), len(seen[0])) for *_, seen in calls if seen}
    fits: dict[int, set[tuple[int, int]]] = {number: set() for number, *_ in calls}  # data rank and place, by rank
    held, padding = set(), set()  # all places that some rank fits, and those that hold no token
    for data, rows in enumerate(ranks[0]["documents"]):
        for place in range(layout.sp * layout.ulysses):
            due = {shape: _due(layout, rows, shape, order, multiple, place) for shape in shapes}
            for number, of_rows, seen in calls:
                if seen and _fits(seen, due[len(seen), len(seen[0])], begins, of_rows):
                    fits[number].add((data, place))
                    held.add((data, place))
            if not any(token != PADDED for tokens in due.values() for token in tokens or ()):
                padding.add((data, place))
    if len(held) < len(ranks[0]["documents"]) * layout.sp * layout.ulysses or not all(fits.values()):
        return False
    # A part of the vocabulary may show too little to tell the places of a rank apart.
    firsts: dict[tuple[int, int], int] = {}
    for number, places in sorted(fits.items()):
        if len(certain := places - padding) == 1:
            firsts.setdefault(certain.pop(), number)
    return all(firsts[first] < firsts[second] for first, second in pairwise(sorted(firsts)) if first[0] == second[0])


def _due(
    layout: Layout, rows: Sequence[Sequence[Tokens]], shape: tuple[int, int], order: str, multiple: int, place: int
) -> list[int] | None:
    """Returns the tokens of a place, row by row; None where a rank's tokens cannot have this ``shape``.

    multiple: documents are padded to that many times their pieces; 0 or LEFT: rows are padded to equal lengths, as
    ``shape`` tells. Slices have the documents of all rows laid end to end.
    """
    ring, slice_ = divmod(place, layout.ulysses)
    whole = shape[1] * layout.sp * layout.ulysses
    if order == SLICES:
        lines = [[token for row in rows for document in row for token in document]]
    elif multiple > 0:
        lines = [list(document) for row in rows for document in row]
    else:
        lines = [[token for document in row for token in document] for row in rows]
    if multiple <= 0 and (shape[0] != len(lines) or max(map(len, lines)) > whole):
        return None
    pieces = layout.sp * (2 if order == ZIGZAG else 1)
    lengths = [-(-len(line) // (pieces * multiple)) * pieces * multiple if multiple > 0 else whole for line in lines]
    if any(length % pieces for length in lengths):
        return None
    cut = [
        _cut(line, length, ring, pieces, layout.sp, left=multiple == LEFT)
        for line, length in zip(lines, lengths, strict=True)
    ]
    if multiple > 0:  # what is left of the shape is padding
        cut = [[token for own in cut for token in own]]
        if len(cut[0]) > whole // layout.sp:
            return None
    share = shape[1]
    return [token for own in cut for token in own[slice_ * share : (slice_ + 1) * share]]


def _cut(line: list[int], length: int, ring: int, pieces: int, size: int, *, left: bool) -> list[int]:
    """Returns the part of a ring's rank of tokens that are padded to ``length``: one of its pieces, or two of them."""
    padding = [PADDED] * (length - len(line))
    padded = padding + line if left else line + padding
    part = length // pieces
    own = (ring,) if pieces == size else (ring, pieces - 1 - ring)
    return [token for piece in own for token in padded[piece * part : (piece + 1) * part]]


def _fits(seen: Sequence[Tokens], due: list[int] | None, begins: Sequence[int], of_rows: int) -> bool:
    """Tells whether tokens that were looked up in ``of_rows`` rows, from one of ``begins`` on, are those that are due.
    Tokens of other rows show as 0."""
    tokens = [token for row in seen for token in row]
    if due is None or len(tokens) < len(due):
        return False
    if not any(token != PADDED for token in due):  # any tokens would fit
        return len(set(tokens)) == 1
    return any(
        all(
            wanted == PADDED or token == (wanted - begin if 0 <= wanted - begin < of_rows else 0)
            for token, wanted in zip(tokens, due, strict=False)
        )
        for begin in begins
    )


def heads_at_a_time(layout: Layout, ranks: Sequence[Mapping[str, Any]]) -> set[int]:
    """Returns how many heads of keys or values the ranks of a ring gather at a time, of inputs (tokens, heads, E)."""
    return {
        shape[-2]
        for rank in ranks
        for group, shape, *_ in rank.get("gathered", ())
        if len(group) == layout.sp and len(shape) == 3 and shape[0] in _held_numbers(rank, layout.ulysses)
    }


def gathered_for_tokens(layout: Layout, rank: Mapping[str, Any], is_of_data: Callable[[Sequence[int]], bool]) -> int:
    """Returns the elements that groups gathered one or a few for each token: log-probs, not weights."""
    parts = {layout.ulysses, layout.sp, layout.sp * layout.ulysses}
    held = _held_numbers(rank, 1)
    sizes = {tokens * part * n for tokens in held for part in parts - {1} for n in range(1, NUMBERS + 1)}
    gathered = rank.get("gathered", ())
    return sum(size * count for group, _, size, count in gathered if is_of_data(group) and size in sizes)


def _held_numbers(rank: Mapping[str, Any], times: int) -> set[int]:
    """Returns the numbers of tokens that were looked up at a time, multiplied."""
    return {times * sum(map(len, seen)) for _, seen in rank.get("embedded", ())}
