"""Packs documents into rows by the rules that libraries name, in plain Python.

Each function takes lengths and the capacity of a row, and returns the documents of each row by their numbers. None of
them cuts a document; ``wrapped`` rows, which do, are the stream of all tokens in pieces of the capacity.
"""

from collections.abc import Callable, Sequence

Rows = list[list[int]]


def in_order(lengths: Sequence[int], capacity: int) -> Rows:
    """Fills a row with the next documents, and begins another row with the first one that does not fit."""
    rows: Rows = []
    for number, length in enumerate(lengths):
        if not rows or sum(lengths[i] for i in rows[-1]) + length > capacity:
            rows.append([])
        rows[-1].append(number)
    return rows


def best_fit(lengths: Sequence[int], capacity: int) -> Rows:
    """Puts the longest document first, each into the row with the least room that suffices (best fit decreasing)."""
    rows: Rows = []
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        room = [capacity - sum(lengths[i] for i in row) for row in rows]
        fitting = [i for i in range(len(rows)) if room[i] >= lengths[number]]
        if fitting:
            rows[min(fitting, key=lambda i: room[i])].append(number)
        else:
            rows.append([number])
    return rows


def knapsack(lengths: Sequence[int], capacity: int) -> Rows:
    """Fills one row after another, always with the longest of the documents left that fits."""
    left, rows = sorted(range(len(lengths)), key=lambda i: lengths[i]), []
    while left:
        row: list[int] = []
        while fitting := [i for i in left if sum(lengths[j] for j in row) + lengths[i] <= capacity]:
            row.append(fitting[-1])
            left.remove(fitting[-1])
        rows.append(row)
    return rows


RULES: dict[str, Callable[[Sequence[int], int], Rows]] = {
    "in order": in_order,
    "best fit": best_fit,
    "knapsack": knapsack,
}
