"""Describes what all ranks did in one training step, and the rows and sizes by which claims about it are decided.

The claims are in conformance.judge.layout_evidence, work_evidence, exchange_evidence and token_evidence.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.judge.token_evidence import computed_rows, shows_tokens
from conformance.spec.layout import Layout

LEAST = 0.5  # of the elements and multiplications that a layout implies; a claim that is not kept gives nearly none
SLACK = 1.1  # of the largest share of a rank
BLOCK = 128  # libraries pad rows to a multiple of this

Claims = Iterator[tuple[str, bool, str]]  # the claim, whether it holds, and what was requested and observed
# For each data rank and each of its micro-batches: index, length and number of targets of each row.
Rows = Sequence[Sequence[Sequence[Sequence[int]]]]


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Elements of the matrices of linear layers that a training step multiplies by.

    layers: in layers, without experts. passed: those of them that gradients pass. outside: outside of layers. frozen:
    whether some of them are not trained. uncut: whether some layers are whole on all tensor-parallel ranks. keys: rows
    of all projections to keys and values. hidden: columns of the embedding. float8: elements of matrices in layers that
    can be cast to float8. beside: of all other trained parameters of layers.
    """

    layers: int
    passed: int
    outside: int
    frozen: bool
    uncut: bool
    keys: int
    hidden: int
    float8: int
    beside: int

    @property
    def passed_part(self) -> float:
        """Returns which part of the matrices in layers gradients pass."""
        return self.passed / self.layers if self.layers else 1.0

    def passes_all(self, layers: int) -> bool:
        """Tells whether gradients pass all of the layers, of the first one at least a part."""
        return self.passed_part > 1 - 1 / layers


class Step:
    """What all ranks did in the step at which evidence was taken, and the rows that the layout gives to them."""

    def __init__(self, ranks: Sequence[Mapping[str, Any]], rows: Rows, *, skipped: bool = False) -> None:
        self.ranks, self.rows = ranks, rows
        self.skipped = skipped  # gradients overflowed, so no weight is updated

    @property
    def number(self) -> int:
        return int(self.ranks[0]["step"])

    def work(self, phase: str) -> list[int]:
        """Returns the multiplications of linear layers of each rank."""
        return [dict(rank.get("work", ())).get(phase, 0) for rank in self.ranks]

    def moved(
        self,
        kinds: tuple[str, ...],
        passes: Callable[[str], bool],
        groups: Callable[[Sequence[int]], bool],
    ) -> int:
        """Returns the elements of these collectives, of the rank with the most."""
        most: int = max(
            sum(
                elements
                for kind, group, where, _, elements in rank.get("moved", ())
                if kind in kinds and passes(where) and groups(group)
            )
            for rank in self.ranks
        )
        return most

    def has_other_rows(self, group: Sequence[int]) -> bool:
        """Tells whether the ranks of a group gave different rows."""
        return len({tuple(self.ranks[rank]["rows"]) for rank in group if rank < len(self.ranks)}) > 1

    @property
    def shows_tokens(self) -> bool:
        """Tells whether ranks showed which tokens they look up."""
        return shows_tokens(self.ranks)

    def computed_rows(self, layout: Layout) -> tuple[str, bool, str] | None:
        """Returns the claim that ranks compute the rows that they give; None where tokens do not tell."""
        return computed_rows(layout, self.ranks, self.rows) if self.shows_tokens else None

    @property
    def tokens(self) -> int:
        """Returns the number of tokens of all rows that have targets."""
        return sum(length for rows in self._micro_batches() for _, length, targets in rows if targets)

    @property
    def first_tokens(self) -> int:
        """Returns the least number of tokens of a first micro-batch of a data rank."""
        return min(sum(length for _, length, targets in parts[0] if targets) for parts in self.rows)

    @property
    def first_padded(self) -> int:
        """Returns the most tokens of a first micro-batch of a data rank, if its rows are as long as the longest."""
        return max(len(parts[0]) * max(length for _, length, _ in parts[0]) for parts in self.rows)

    def padded(self, max_len: int, *, stages: int) -> int:
        """Returns the most tokens of a data rank, if all its rows are as long as the longest activations that a library
        makes of rows of ``max_len`` tokens. With pipeline stages, each micro-batch is as large as the largest."""
        most = -(-max_len // BLOCK) * BLOCK
        longest = max(length for rows in self._micro_batches() for _, length, _ in rows)
        padded = [length for rank in self.ranks for length in rank.get("lengths", ()) if length <= most]
        rows = (len(parts) * max(map(len, parts)) if stages > 1 else sum(map(len, parts)) for parts in self.rows)
        return max(rows) * int(max(longest, *padded, 0))

    @property
    def has_rows(self) -> bool:
        """Tells whether the backend shows rows; else nobody knows which ranks have other rows."""
        return any(rank.get("rows") for rank in self.ranks)

    def _micro_batches(self) -> Iterator[Sequence[Sequence[int]]]:
        for parts in self.rows:
            yield from parts


class Ranks:
    """The evidence of all ranks."""

    def __init__(self, ranks: Sequence[dict[str, Any]]) -> None:
        self._ranks = ranks

    def most(
        self, kinds: tuple[str, ...], size: int | None, passes: Callable[[str], bool], *, dtype: str = "float"
    ) -> int:
        """Returns how many collectives in groups of ``size`` (None: any size) the busiest rank made.

        dtype: a part of the dtype's name.
        """
        counts = [
            sum(
                count
                for kind, group, its_dtype, where, count in rank["collectives"]
                if kind in kinds and size in (None, group) and passes(where) and dtype in its_dtype
            )
            for rank in self._ranks
        ]
        return int(max(counts))

    def passes(self) -> set[str]:
        return {where for rank in self._ranks for *_, where, _ in rank["collectives"]}

    def products(self, where: str, dtype: str | None = None) -> int:
        """Counts matrix products of all ranks in forward, backward or recomputed passes."""
        return sum(
            count
            for rank in self._ranks
            for its_dtype, its_pass, count in rank["products"]
            if its_pass == where and dtype in (None, its_dtype)
        )

    def linear(self, dtype: str | None = None) -> int:
        """Counts products of linear layers in forward passes, of all ranks. Records that do not separate these give all
        products."""
        counts = [dict(rank.get("linear", ())) for rank in self._ranks]
        if not any(counts):
            return self.products("forward", dtype)
        return sum(count for known in counts for its_dtype, count in known.items() if dtype in (None, its_dtype))

    def total(self, name: str) -> int:
        """Sums up a number of conformance.worker.evidence.Watch over all ranks; older records may not have it."""
        return sum(rank.get(name, 0) for rank in self._ranks)

    def recomputed(self) -> float:
        """Returns recomputed products of linear layers / those of forward passes, of all ranks. Records that do not
        separate linear layers give the ratio of all products."""
        if all("again" in rank for rank in self._ranks):
            return self.total("again") / max(1, self.linear())
        return self.products("recomputed") / max(1, self.products("forward"))

    def reduced(self, size: int) -> int:
        """Returns the number of elements summed over groups of this size, of the rank with the most."""
        return int(max(dict(rank.get("reduced", ())).get(size, 0) for rank in self._ranks))

    def held_weights(self) -> int:
        """Returns the bytes that were used as weights and are alive when gradients are ready, of the rank with the
        most."""
        return int(max(sum(size * count for size, count in rank.get("held_weights", ())) for rank in self._ranks))

    def is_wide(self, width: int) -> bool:
        return any(width in rank["widths"] for rank in self._ranks)

    def is_long(self, length: int) -> bool:
        return any(length in rank.get("lengths", ()) for rank in self._ranks)


def at_least(claim: str, observed: float, due: float, unit: str = "elements") -> tuple[str, bool, str]:
    return claim, observed >= due, f"requested at least {due:,.0f} {unit}, observed {observed:,.0f}"


def below(claim: str, observed: float, most: float, unit: str = "elements") -> tuple[str, bool, str]:
    return claim, observed < most, f"requested fewer than {most:,.0f} {unit}, observed {observed:,.0f}"


def shards_of(layout: Layout) -> int:
    return layout.data * layout.sp * layout.ulysses // layout.rep


def is_of_data(layout: Layout, step: Step, group: Sequence[int]) -> bool:
    return len(group) == shards_of(layout) and (not rows_tell(layout, step) or step.has_other_rows(group))


def rows_tell(layout: Layout, step: Step) -> bool:
    """Tells whether ranks that share weights have other rows, and the backend shows them."""
    return layout.data > layout.rep and step.has_rows


def of_size(size: int) -> Callable[[Sequence[int]], bool]:
    return lambda group: len(group) == size


def anywhere(where: str) -> bool:
    return True


def in_forward(where: str) -> bool:
    return where == "forward"


def in_backward(where: str) -> bool:
    return where.startswith("backward")


def not_forward(where: str) -> bool:
    return where != "forward"
