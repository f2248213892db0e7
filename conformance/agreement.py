"""Agreement: which members of a group agree with each other and which with the oracle, as families and in words.

Serves claim 1 across backends. A cell's verdict says that it differs from the oracle; this says who differs with it.
One member alone points at that member, several layouts of one backend at the backend, several backends that agree with
each other and not with the oracle at the oracle, the scenario, or a library that they share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from conformance.judge import State
from conformance.pairs import COLUMNS, Difference, Pair

ORACLE = -1  # as a member's number
LISTED = 4  # layouts of one backend that a sentence names


@dataclass(frozen=True, kw_only=True)
class Member:
    """One cell of a group. ``oracle``: its worst difference from the oracle in each column.

    ``elsewhere``: the stage at which it differs first. ``problem``: why it is not compared with the others, or not in
    all columns; empty for a complete one.
    """

    backend: str
    layout: str
    state: State
    oracle: Mapping[str, Difference] = field(default_factory=dict)
    elsewhere: str = ""
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.backend} {self.layout}"


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What is said of a group. ``families``: numbers of members that agree, one family with ORACLE in it.

    ``state``: ``conforms`` if all agree, ``infrastructure`` if a member could not be compared.
    """

    state: State
    text: str
    families: tuple[tuple[int, ...], ...]


def agreement(members: Sequence[Member], pairs: Mapping[Pair, Mapping[str, Difference]]) -> Agreement:
    """Say who agrees with whom. ``pairs`` holds the differences of every two members, by their numbers in order."""
    table = _Table(members, pairs)
    families = table.families()
    apart = table.apart()
    unexpected = any(table.known(pair) == 0 for pair in apart) or any(m.state == "differs" for m in members)
    missing = [m for m in members if m.problem]
    state: State = (
        "differs" if unexpected else "infrastructure" if missing else "expected_difference" if apart else "conforms"
    )
    return Agreement(state=state, text=" ".join(_sentences(table, families, missing)), families=families)


class _Table:
    """The oracle and the members that were compared in every column, with their differences."""

    def __init__(self, members: Sequence[Member], pairs: Mapping[Pair, Mapping[str, Difference]]) -> None:
        self.members, self._pairs = members, pairs
        self.compared = [number for number, member in enumerate(members) if not member.problem]

    def of(self, a: int, b: int) -> Mapping[str, Difference]:
        """Differences of two members, or of a member and the oracle, by column."""
        a, b = min(a, b), max(a, b)
        return self.members[b].oracle if a == ORACLE else self._pairs[a, b]

    def outside(self, a: int, b: int) -> str:
        """The first column, in causal order, in which two are further apart than they may be; empty if they agree."""
        differences = self.of(a, b)
        return next((c for c in COLUMNS if c in differences and not differences[c].ratio <= 1), "")

    def apart(self) -> list[Pair]:
        return [pair for pair in combinations([ORACLE, *self.compared], 2) if self.outside(*pair)]

    def known(self, pair: Pair) -> int:
        """How many of the two are known to differ."""
        return sum(n != ORACLE and self.members[n].state == "expected_difference" for n in pair)

    def families(self) -> tuple[tuple[int, ...], ...]:
        """Everybody with all those whom they agree with, directly or through others; the oracle's family first."""
        rest, families = [ORACLE, *self.compared], []
        while rest:
            family = [rest.pop(0)]
            for member in family:
                near = [other for other in rest if not self.outside(member, other)]
                family += near
                rest = [other for other in rest if other not in near]
            families.append(tuple(sorted(family)))
        return tuple(families)

    def names(self, numbers: Sequence[int]) -> str:
        """Members by backend: ``deepspeed dp2, dp4 and fsdp2 dp2``."""
        layouts: dict[str, list[str]] = {}
        for number in numbers:
            layouts.setdefault(self.members[number].backend, []).append(self.members[number].layout)
        parts = [
            f"{backend} {', '.join(held)}" if len(held) <= LISTED else f"{len(held)} layouts of {backend}"
            for backend, held in layouts.items()
        ]
        return " and ".join(parts)


def _sentences(table: _Table, families: Sequence[Sequence[int]], missing: Sequence[Member]) -> list[str]:
    home = [number for number in families[0] if number != ORACLE]
    said = []
    if len(table.compared) > 1 and not table.apart():
        said.append(_all_agree(table, home))
    elif len(home) > 1:
        said.append(f"{table.names(home)} {_agree(table, families[0])} with each other and with the oracle.")
    elif home:
        said.append(f"{table.names(home)} agrees with the oracle.")
    alone = [family[0] for family in families[1:] if len(family) == 1]
    if len(alone) > 1 and len(alone) == len(table.compared):
        said.append("No two agree.")
    said += [_family(table, family, home) for family in families[1:]]
    said += [text for family in families if (text := _within(table, family))]
    for number in home:
        member = table.members[number]
        if member.elsewhere and not table.outside(ORACLE, number):
            said.append(f"{member} differs from the oracle in what is not set side by side here: {member.elsewhere}.")
    for problem in dict.fromkeys(member.problem for member in missing):
        whose = [number for number, member in enumerate(table.members) if member.problem == problem]
        said.append(f"Not compared: {table.names(whose)}, {problem}")
    return said


def _all_agree(table: _Table, home: Sequence[int]) -> str:
    worst = [
        (difference, column, pair) for pair in combinations(home, 2) for column, difference in table.of(*pair).items()
    ]
    difference, column, (a, b) = max(worst, key=lambda found: found[0].ratio)
    count = "Both" if len(home) == 2 else f"All {len(home)}"
    return (
        f"{count} agree with the oracle and with each other. Furthest apart are {table.members[a]} and "
        f"{table.members[b]}: {column} {difference.observed:.1e}, {difference.ratio:.2g} of what the two may show."
    )


def _family(table: _Table, family: Sequence[int], home: Sequence[int]) -> str:
    """Members that are not with the oracle: how far from it, how near each other, and what that points at."""
    column = min((table.outside(ORACLE, number) for number in family), key=COLUMNS.index)
    off = max(table.of(ORACLE, number)[column].observed for number in family)
    names = table.names(family)
    known = all(table.members[number].state == "expected_difference" for number in family)
    others = [number for number in table.compared if number not in family]
    if len(family) == 1:
        near = [d.observed for other in others if (d := table.of(family[0], other).get(column))]
        nearest = f" and {min(near):.1e} or more from every other" if near else ""
        text = f"{names} stands alone: {column} {off:.1e} from the oracle{nearest}"
        advice = f"look first at {names}"
    else:
        near = max(d.observed for pair in combinations(family, 2) if (d := table.of(*pair).get(column)))
        agree = f"{names} {_agree(table, family)} with each other and not with the oracle"
        text = f"{agree}: {column} {near:.1e} apart, {off:.1e} from it"
        backends = list(dict.fromkeys(table.members[number].backend for number in family))
        if len(backends) == 1:
            advice = f"look first at {backends[0]}"
        elif others:
            advice = f"look first at what only they share, and not {table.names(home or others)}"
        else:
            advice = "look first at the oracle, the scenario, and the libraries that they share"
    return f"{text}; {'a known difference' if known else advice}."


def _agree(table: _Table, family: Sequence[int]) -> str:
    return "agree in part" if _apart_within(table, family) else "agree"


def _apart_within(table: _Table, family: Sequence[int]) -> list[Pair]:
    """Pairs of a family that do not agree directly, only through others."""
    return [pair for pair in combinations(family, 2) if table.outside(*pair)]


def _within(table: _Table, family: Sequence[int]) -> str:
    """The worst two of a family that do not agree directly; empty if all do."""
    worst = max(
        ((table.of(*p)[column], column, p) for p in _apart_within(table, family) for column in table.of(*p)),
        key=lambda found: found[0].ratio,
        default=None,
    )
    if worst is None:
        return ""
    difference, column, (a, b) = worst
    first = "the oracle" if a == ORACLE else str(table.members[a])
    return (
        f"Yet {table.members[b]} and {first} are further apart than they may be: {column} {difference.observed:.1e}, "
        f"{difference.ratio:.2g} times what is allowed."
    )
