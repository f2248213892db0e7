"""Finds out which cells of a group agree with each other and with the reference, as families and in words.

A cell's verdict says that it differs from the oracle; this module says which other cells differ in the same way. If a
single cell differs, look at that cell first. If several layouts of one backend agree with each other and not with the
oracle, look at the backend. If several backends do, look at the oracle, the scenario, or code that these backends
share.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from conformance.results.run_results import Entry
from conformance.results.side_by_side import Columns, Difference, GroupState, Member
from conformance.spec.conventions import of_oracle
from conformance.spec.observables import AGAINST_REBUILT, Observable

ORACLE = -1  # the oracle's number among the members
MemberPair = tuple[int, int]  # numbers of two members
LAYOUTS_LISTED = 4  # most layouts of one backend that a sentence names

Families = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The result for a group.

    state: ``conforms`` if all members agree, ``expected_difference`` if only members with expected differences or
        conventions do not, ``differs`` if other members do not, ``infrastructure`` if all agree but a member could not
        be compared.
    text: the result in sentences.
    families: by column, tuples of numbers of members that agree; the family of ORACLE comes first.
    """

    state: GroupState
    text: str
    families: dict[str, Families]


def declared(entry: Entry) -> tuple[str, ...]:
    """Returns the names of the conventions of the oracle that judged the cell: those that show, or if it differs,
    all."""
    names = [str(one) for one in of_oracle(entry.conventions)]
    shown = names if entry.verdict.state == "differs" else entry.verdict.conventions
    return tuple(name for name in names if name in shown)


def member(entry: Entry, records: Sequence[str], problem: str, against: Mapping[str, Difference] | None) -> Member:
    """Describes a member. against: its differences from the oracle, if one with conventions judged it."""
    found: dict[str, list[Difference]] = defaultdict(list)
    for q in entry.verdict.quantities:
        if column := column_of(entry.observables, q.stage, q.tensor):
            one = Difference(column=column, observed=q.observed, allowed=q.allowed, tensor=q.tensor, step=q.step)
            found[column].append(one)
    worst = {
        column: replace(
            max(differences, key=lambda one: one.ratio),
            since=min((one.step for one in differences if one.ratio > 1), default=None),
        )
        for column, differences in found.items()
    }
    return Member(
        cell=entry.cell,
        state=entry.verdict.state,
        records=tuple(records),
        problem=problem,
        oracle=worst if against is None else against,
        conventions=declared(entry),
    )


def column_of(observables: Sequence[Observable], stage: str, tensor: str) -> str | None:
    """Returns the column of a judged quantity; None for settings and for quantities compared within one cell."""
    if tensor.endswith(AGAINST_REBUILT):
        return None
    for observable in observables:
        shown = observable.kind == "tensors" or tensor == observable.key
        if observable.column and observable.stage == stage and shown:
            return observable.column
    return None


def agreement(
    members: Sequence[Member],
    pairs: Mapping[MemberPair, Columns],
    columns: Sequence[str],
    *,
    elsewhere: Sequence[str],
) -> Agreement:
    """Finds out which members agree with which.

    pairs: the differences between every two members in each column, by the members' numbers in ascending order.
    columns: the columns in which members are compared, in causal order. elsewhere: for each member, the first stage at
    which it differs from the oracle; empty if it conforms.
    """
    table = _Table(members, pairs, columns)
    outside = [pair for column in columns for pair in table.pairs_outside(column)]
    state: GroupState = "conforms"
    if any(m.state == "differs" for m in members) or not all(map(table.is_expected, outside)):
        state = "differs"
    elif any(m.problem for m in members):
        state = "infrastructure"
    elif outside:
        state = "expected_difference"
    families = {column: table.families(column) for column in columns}
    return Agreement(state=state, text=" ".join(_sentences(table, elsewhere)), families=families)


class _Table:
    """Holds the members, the columns, and the differences between members and from the oracle."""

    def __init__(self, members: Sequence[Member], pairs: Mapping[MemberPair, Columns], columns: Sequence[str]) -> None:
        self.members, self._pairs, self.columns = members, pairs, columns

    def nodes(self, column: str) -> list[int]:
        """Returns the numbers of the oracle and of members with the column; a backend may report no gradient norm."""
        return [ORACLE, *(n for n, m in enumerate(self.members) if not m.problem and column in m.oracle)]

    def difference(self, a: int, b: int, column: str) -> Difference | None:
        """Returns the difference between two members or a member and the oracle; None if neither has the column."""
        a, b = min(a, b), max(a, b)
        return (self.members[b].oracle if a == ORACLE else self._pairs[a, b]).get(column)

    def pairs_outside(self, column: str, among: Sequence[int] | None = None) -> list[MemberPair]:
        """Returns the pairs (of all nodes, or of those in ``among``) that exceed their tolerance, the worst first."""
        pairs = combinations(self.nodes(column) if among is None else among, 2)
        found = [(d.ratio, pair) for pair in pairs if (d := self.difference(*pair, column)) and not d.ratio <= 1]
        return [pair for _, pair in sorted(found, reverse=True)]

    def first_step_outside(self, column: str) -> int:
        """Returns the first step at which any pair exceeds its tolerance in ``column``."""
        differences = [self.difference(*pair, column) for pair in self.pairs_outside(column)]
        return min(d.since for d in differences if d and d.since is not None)

    def families(self, column: str) -> Families:
        """Returns the connected components of the graph "within tolerance of each other", the oracle's first."""
        outside = set(self.pairs_outside(column))
        rest, families = self.nodes(column), []
        while rest:
            family = [rest.pop(0)]
            for member in family:
                near = [n for n in rest if (min(member, n), max(member, n)) not in outside]
                family += near
                rest = [n for n in rest if n not in near]
            families.append(tuple(sorted(family)))
        return tuple(families)

    def cause(self, number: int) -> str:
        """Returns why a member is expected to differ from the oracle and other members, in words; empty if it is not.

        A member with a convention agrees with the reference that has it, or its state is ``differs``.
        """
        member = self.members[number]
        if member.state == "expected_difference":
            return "a known difference"
        if member.state == "differs" or not member.conventions:
            return ""
        return _conventions(member.conventions)

    def is_expected(self, pair: MemberPair) -> bool:
        """Whether one of the two members is expected to differ from the other."""
        return any(n != ORACLE and self.cause(n) for n in pair)

    def name(self, number: int) -> str:
        return "the reference" if number == ORACLE else str(self.members[number])

    def names(self, numbers: Sequence[int]) -> str:
        """Names the members by backend: ``deepspeed (dp2, dp4) and fsdp2 dp2``."""
        layouts: dict[str, list[str]] = {}
        for number in numbers:
            layouts.setdefault(self.members[number].backend, []).append(self.members[number].layout)
        parts = []
        for backend, names in layouts.items():
            if len(names) > LAYOUTS_LISTED:
                parts.append(f"{len(names)} layouts of {backend}")
            else:
                parts.append(f"{backend} {names[0]}" if len(names) == 1 else f"{backend} ({', '.join(names)})")
        return _joined(parts)


def _sentences(table: _Table, elsewhere: Sequence[str]) -> list[str]:
    compared = [number for number, member in enumerate(table.members) if not member.problem]
    agreed = [column for column in table.columns if not table.pairs_outside(column)]
    disputed: dict[Families, list[str]] = {}  # columns with the same families share a sentence
    for column in sorted(
        set(table.columns) - set(agreed), key=lambda one: (table.first_step_outside(one), table.columns.index(one))
    ):
        disputed.setdefault(table.families(column), []).append(column)
    lines = []
    if not disputed and len(compared) > 1:
        lines.append(_all_agree(table, compared))
    elif not disputed and compared:
        lines.append(f"{table.names(compared)} agrees with the reference.")
    elif compared and agreed:
        lines.append(f"All agree in {_joined(agreed)}.")
    for families, columns in disputed.items():
        lines += _dispute(table, families, columns)
    for number in compared:
        if elsewhere[number] and not any((ORACLE, number) in table.pairs_outside(column) for column in table.columns):
            stage = elsewhere[number]
            lines.append(f"{table.members[number]} differs from the reference at a stage without a column: {stage}.")
    for problem in dict.fromkeys(member.problem for member in table.members if member.problem):
        whose = [number for number, member in enumerate(table.members) if member.problem == problem]
        lines.append(f"Not compared: {table.names(whose)}, {problem}")
    return lines


def _all_agree(table: _Table, compared: Sequence[int]) -> str:
    found = [
        (difference.ratio, column, difference, pair)
        for pair in combinations(compared, 2)
        for column in table.columns
        if (difference := table.difference(*pair, column))
    ]
    ratio, column, difference, (a, b) = max(found, key=lambda one: one[0])
    count = "Both" if len(compared) == 2 else f"All {len(compared)}"
    return (
        f"{count} agree with the reference and with each other. Furthest apart are {table.name(a)} and "
        f"{table.name(b)}: {column} {difference.observed:.1e}, {ratio:.2g} of what the two may show."
    )


def _dispute(table: _Table, families: Families, columns: Sequence[str]) -> list[str]:
    """Writes sentences about columns in which not all members agree. The column that differs first comes first in
    ``columns``; the errors in the text are those of this column."""
    column = columns[0]
    home = [number for number in families[0] if number != ORACLE]
    if len(home) > 1:
        first = f"{table.names(home)} {_agree(table, families[0], column)} with each other and with the reference."
    else:
        first = f"{table.names(home)} agrees with the reference." if home else "none agrees with the reference."
    since = [f" (from step {step})" if (step := table.first_step_outside(c)) else "" for c in columns]
    lines = [f"In {_joined([c + step for c, step in zip(columns, since, strict=True)])}, {first}"]
    alone: dict[tuple[str, str], list[int]] = {}
    for family in families[1:]:
        if len(family) == 1:
            alone.setdefault((table.members[family[0]].backend, table.cause(family[0])), []).append(family[0])
        else:
            near = _largest_distance(table, combinations(family, 2), column)
            because = _because(table, family)
            text = f"{table.names(family)} {_agree(table, family, column)} with each other and not with the reference"
            text += f"{because}: {column} {near} apart, {_distance_to_oracle(table, family, column)} from it"
            lines.append(text + ("." if because else f"; {_look(table, family, _shared(table, family, home))}."))
    for (backend, _), members in alone.items():
        because = _because(table, members)
        stands = "stands alone" if len(members) == 1 else "stand alone, each of them"
        far = f"{column} {_distance_to_oracle(table, members, column)} from the reference"
        where = backend if len(members) > 1 else table.names(members)
        nobody = table.nodes(column) == [ORACLE, *members] and len(members) == 1
        advice = "there is nobody to compare it with" if nobody else _look(table, members, where)
        lines.append(f"{table.names(members)} {stands}{because}: {far}{'' if because else f'; {advice}'}.")
    for family in families:
        if within := table.pairs_outside(column, family):
            (a, b), far = within[0], _largest_distance(table, within[:1], column)
            lines.append(f"Yet {table.name(b)} and {table.name(a)} are further apart than they may be: {column} {far}.")
    return lines


def _agree(table: _Table, family: Sequence[int], column: str) -> str:
    return "agree in part" if table.pairs_outside(column, family) else "agree"


def _look(table: _Table, members: Sequence[int], where: str) -> str:
    names = list(dict.fromkeys(name for number in members for name in table.members[number].conventions))
    return f"look first at {where}" + (f", judged with {_conventions(names)}" if names else "")


def _conventions(names: Sequence[str]) -> str:
    return f"the convention{'s' * (len(names) > 1)} {_joined(names)}"


def _because(table: _Table, members: Sequence[int]) -> str:
    """Names the causes of the members' differences; returns an empty text if one of them has none."""
    causes = [table.cause(number) for number in members]
    return f" because of {' and '.join(dict.fromkeys(causes))}" if all(causes) else ""


def _shared(table: _Table, family: Sequence[int], home: Sequence[int]) -> str:
    """Says where to look first if the members of ``family`` agree with each other, and not with the reference.

    ``home``: the members that agree with the reference.
    """
    backends = list(dict.fromkeys(table.members[number].backend for number in family))
    if len(backends) == 1:
        return backends[0]
    if home:
        return f"what only they share, and not {table.names(home)}"
    return "the reference, the scenario, and the code that they share"


def _distance_to_oracle(table: _Table, members: Sequence[int], column: str) -> str:
    return _largest_distance(table, [(ORACLE, number) for number in members], column)


def _largest_distance(table: _Table, pairs: Iterable[MemberPair], column: str) -> str:
    return f"{max((d.observed for pair in pairs if (d := table.difference(*pair, column))), default=0.0):.1e}"


def _joined(words: Sequence[str]) -> str:
    """Joins words: ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
