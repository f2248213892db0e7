"""Checks which tokens each rank holds where ranks share sequences, and in which pieces they exchange keys and values.

The watch shows the tokens that a rank looks up in its embedding. The judge cuts the documents of the first micro-batch
as the layout says and compares. Rows of a vocabulary that is cut over tensor-parallel ranks show the tokens of their
part only; together the ranks show all of them. A lookup proves nothing by itself. So what layers multiply first has to
be equal for equal tokens, and to differ for most others.
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
COMPUTED = "each rank computes the rows that it gives"
OTHERS = 0.5  # least part of the tokens of a rank by which what layers multiply differs
NUMBERS = 4  # of a token that ranks of one sequence gather: log-prob and entropy, once or twice


def shows_tokens(ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Tells whether ranks that share sequences showed the tokens of the first micro-batch, each in one lookup.

    Ranks that compute the rows of a micro-batch one after another look up a part of them at a time.
    """
    due = sum(len(document) for rows in ranks[0].get("documents", ()) for row in rows for document in row)
    most = (max((sum(map(len, observed)) for _, observed in rank.get("embedded", ())), default=0) for rank in ranks)
    return 0 < due <= sum(most)


def shows_what_enters(ranks: Sequence[Mapping[str, Any]]) -> bool:
    """Tells whether each rank that looks tokens up showed what its layers multiply first."""
    looking = [rank for rank in ranks if rank.get("embedded")]
    return bool(looking) and all(any(rank.get("entered", ())) for rank in looking)


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
    return any(_is_held_padded(layout, ranks, order, multiple) for multiple in _ways(order))


def _entered(rank: Mapping[str, Any]) -> Sequence[Sequence[int]]:
    """Returns the groups of each lookup; records that do not have them know none."""
    entered: Sequence[Sequence[int]] = rank.get("entered") or [()] * len(rank.get("embedded", ()))
    return entered


def _ways(order: str) -> Sequence[int]:
    return (0, LEFT, *MULTIPLES) if order != SLICES else (0,)


def _is_held_padded(layout: Layout, ranks: Sequence[Mapping[str, Any]], order: str, multiple: int) -> bool:
    fits, padding = _places(layout, ranks, order, multiple)
    held = {place for places in fits.values() for place in places}
    if len(held) < len(ranks[0]["documents"]) * layout.sp * layout.ulysses or not all(fits.values()):
        return False
    # A part of the vocabulary may show too little to tell the places of a rank apart.
    firsts: dict[tuple[int, int], int] = {}
    for number, places in sorted(fits.items()):
        if len(certain := places - padding) == 1:
            firsts.setdefault(certain.pop(), number)
    return all(firsts[first] < firsts[second] for first, second in pairwise(sorted(firsts)) if first[0] == second[0])


def computed_rows(
    layout: Layout, ranks: Sequence[Mapping[str, Any]], rows: Sequence[Sequence[Sequence[Sequence[int]]]]
) -> tuple[str, bool, str] | None:
    """Returns the claim that ranks compute the rows that they give, by the tokens of the first micro-batch; None where
    these do not tell.

    rows: for each data rank and each of its micro-batches, index, length and number of targets of each row.
    """
    firsts = [{row for row, _, targets in parts[0] if targets} for parts in rows]
    orders = (ZIGZAG, CONTIGUOUS, SLICES) if layout.sp > 1 else (CONTIGUOUS, SLICES)
    for order, multiple in ((one, way) for one in orders for way in _ways(one)):
        fits, _ = _places(layout, ranks, order, multiple)
        if all(fits.values()) and len({data for places in fits.values() for data, _ in places}) == len(rows):
            other = [
                number
                for number, places in fits.items()
                if (given := {*ranks[number]["rows"]}) and not any(firsts[data] <= given for data, _ in places)
            ]
            return COMPUTED, not other, f"observed the tokens of other rows on ranks {other}" if other else ""
    return None


def _places(
    layout: Layout, ranks: Sequence[Mapping[str, Any]], order: str, multiple: int
) -> tuple[dict[int, set[tuple[int, int]]], set[tuple[int, int]]]:
    """Returns the places, as data rank and place in its sequences, that each rank's lookups fit, and the places that
    hold no token."""
    entering = shows_what_enters(ranks)
    calls = [
        (number, of_rows, observed, groups if entering else ())
        for number, rank in enumerate(ranks)
        for (of_rows, observed), groups in zip(rank.get("embedded", ()), _entered(rank), strict=False)
        if groups or not entering
    ]
    largest = max(of_rows for _, of_rows, *_ in calls)
    begins = [part * largest for part in range(layout.tp)]
    shapes = {(len(observed), len(observed[0])) for _, _, observed, _ in calls if observed}
    fits: dict[int, set[tuple[int, int]]] = {number: set() for number, *_ in calls}  # data rank and place, by rank
    padding = set()
    for data, rows in enumerate(ranks[0]["documents"]):
        for place in range(layout.sp * layout.ulysses):
            due = {shape: _due(layout, rows, shape, order, multiple, place) for shape in shapes}
            for number, of_rows, observed, groups in calls:
                wanted = due[len(observed), len(observed[0])] if observed else None
                if _fits(observed, wanted, begins, of_rows) and _enter(
                    observed, wanted or [], groups, cut=layout.tp > 1
                ):
                    fits[number].add((data, place))
            if not any(token != PADDED for tokens in due.values() for token in tokens or ()):
                padding.add((data, place))
    return fits, padding


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


def _fits(observed: Sequence[Tokens], due: list[int] | None, begins: Sequence[int], of_rows: int) -> bool:
    """Tells whether tokens that were looked up in ``of_rows`` rows, from one of ``begins`` on, are those that are due.
    Tokens of other rows show as 0."""
    tokens = [token for row in observed for token in row]
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


def _enter(observed: Sequence[Tokens], due: list[int], groups: Sequence[int], *, cut: bool) -> bool:
    """Tells whether rows that layers multiply are equal where tokens are, by the groups of equal rows, and differ where
    most tokens do. Libraries may have transposed the tokens.

    cut: tokens that show as 0 may be any of another rank's part of the vocabulary.
    """
    if not groups:
        return True
    across = [row * len(observed[0]) + column for column in range(len(observed[0])) for row in range(len(observed))]
    tokens = [token for row in observed for token in row]
    for order in (range(len(tokens)), across):
        by_place = dict(zip(order, groups, strict=True))
        shown = {
            (token, by_place[place])
            for place, (token, wanted) in enumerate(zip(tokens, due, strict=False))
            if wanted != PADDED and not (cut and not token)
        }
        different = {token for token, _ in shown}
        if len(shown) == len(different) and len({group for _, group in shown}) >= OTHERS * len(different):
            return True
    return False


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
    return {times * sum(map(len, observed)) for _, observed in rank.get("embedded", ())}
