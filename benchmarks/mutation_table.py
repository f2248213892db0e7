"""Counts which planted faults the suite caught, at which stage, and which faults the usual gates would have caught.

benchmarks/mutation_score.py runs the cells; this module counts and prints the rows. The usual gates compare the loss,
or the loss and the gradient norm, of two runs. Every cell also runs without a fault, as a control: a gate that also
raises an alarm for the control has not detected the fault.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

from pydantic import TypeAdapter

from conformance.core.io import read_file, write_file
from conformance.records.record_format import LONGEST, dumps, parse_strict_json
from conformance.spec.precision import PRECISIONS

QUICK = "quick"  # instead of a tier: the fault was planted in cells of the quick profile
BLANK = "blank"  # instead of a state: the fault changes nothing in this tier
ANY = "any"
ORDER = (*PRECISIONS, QUICK)
HONEST = ("conforms", "expected_difference", "unsupported")  # states of cells without a fault that are no false alarm
# Stages of an update, also of the critic's. If its weights are not read, the next step shows what it did wrong.
UPDATES = ("clipped update", "weights after N steps", "weight replicas")
JSON, MARKDOWN = "mutation-score.json", "mutation-score.md"


@dataclass(frozen=True, kw_only=True)
class Row:
    """Holds the result of one fault in one cell, or of one cell without a fault (``fault`` is empty).

    predicted, stage: the first stage at which the fault should be found, and at which it was found. after_unread:
        whether it was found at the step after weights that were not read, so that what the update did wrong shows at
        whatever comes first there.
    state: the state of the cell's verdict, or BLANK. A cell that differs has caught the fault only if the same cell
        without it conforms (Score.caught). reason: the reason of the verdict in one line, or why the fault
        changes nothing.
    margins: by stage, the largest observed / allowed.
    loss, norm: relative errors of the loss and of the gradient norm at the first and at the last step; the larger of
        policy and critic. None if they were not recorded.
    """

    fault: str
    predicted: str
    backend: str
    tier: str
    cell: str
    state: str
    stage: str = ""
    reason: str = ""
    margins: dict[str, float] | None = None
    loss: tuple[float, float] | None = None
    norm: tuple[float, float] | None = None
    after_unread: bool = False

    @property
    def is_as_predicted(self) -> bool:
        return self.stage == self.predicted or (self.after_unread and self.predicted.endswith(UPDATES))


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Checks relative errors as usual: of the loss and, ``with_norm``, of the gradient norm, at most ``limit``."""

    name: str
    limit: float
    with_norm: bool = False

    def alarms(self, row: Row) -> bool:
        errors = (*(row.loss or ()), *(row.norm or () if self.with_norm else ()))
        return any(error > self.limit for error in errors)


GATES = (
    Gate(name="loss, 1 %", limit=0.01),
    Gate(name="loss, 5 %", limit=0.05),
    Gate(name="loss and norm, 1 %", limit=0.01, with_norm=True),
)


class Score:
    """Evaluates all rows of one mutation score."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = every = sorted(rows, key=_sort_key)
        self.planted = [row for row in every if row.fault and row.state != BLANK]
        self.blank = [row for row in every if row.state == BLANK]
        self.honest = {row.cell: row for row in every if not row.fault}

    @property
    def in_tiers(self) -> list[Row]:
        """Returns the rows of faults in the cells that were chosen for them, without those of the quick profile."""
        return [row for row in self.planted if row.tier != QUICK]

    @property
    def never_caught(self) -> list[tuple[str, str]]:
        """Returns the (fault, backend) pairs for which no tier catches the fault at the predicted stage."""
        pairs = dict.fromkeys((row.fault, row.backend) for row in self.in_tiers)
        caught = {(row.fault, row.backend) for row in self.in_tiers if self.as_predicted(row)}
        return [pair for pair in pairs if pair not in caught]

    @property
    def false_alarms(self) -> list[Row]:
        """Returns the cells without a fault that do not conform, but for differences that a backend declares."""
        return [row for row in self.honest.values() if row.state not in HONEST]

    @property
    def is_complete(self) -> bool:
        """Whether every cell ran."""
        return all(row.state != "not_run" for row in (*self.planted, *self.honest.values()))

    @property
    def holds(self) -> bool:
        """Whether every fault is caught in some tier on every backend, and every cell without a fault conforms."""
        return self.is_complete and not self.never_caught and not self.false_alarms

    def caught(self, row: Row) -> bool:
        """Whether the cell with the fault differs, and the same cell without it conforms."""
        honest = self._honest(row)
        return row.state == "differs" and honest is not None and honest.state == "conforms"

    def as_predicted(self, row: Row) -> bool:
        return self.caught(row) and row.is_as_predicted

    def _honest(self, row: Row) -> Row | None:
        return self.honest.get(row.cell.removesuffix(f"/fault-{row.fault}"))

    def sees(self, gate: Gate, row: Row) -> bool:
        """Whether the gate raises an alarm for the cell with the fault, and none for the same cell without it."""
        honest = self._honest(row)
        return gate.alarms(row) and not (honest and gate.alarms(honest))


def write_score(out: Path, rows: Sequence[Row], facts: dict[str, object]) -> Score:
    """Writes ``mutation-score.json`` and ``mutation-score.md`` into ``out``. facts: the machine and versions."""
    values = {"facts": facts, "rows": [vars(row) for row in rows]}
    write_file(out / JSON, dumps(values, indent=1))
    score = Score(rows)
    write_file(out / MARKDOWN, to_markdown(score, facts))
    return score


def read_score(file: Path) -> tuple[Score, dict[str, object]]:
    """Reads the score and the facts that ``write_score`` wrote."""
    values = parse_strict_json(read_file(file, limit=LONGEST))
    return Score(TypeAdapter(list[Row]).validate_python(values["rows"])), values["facts"]


def to_markdown(score: Score, facts: dict[str, object]) -> str:
    """Formats the score as Markdown: totals, missed faults, and every row."""
    results = (_totals, _honest, _quick, _missed, _blank, _every_fault)
    return "\n".join([*_head(score, facts), *chain.from_iterable(part(score) for part in results), ""])


def _head(score: Score, facts: dict[str, object]) -> Iterator[str]:
    faults = {row.fault for row in score.in_tiers}
    pairs = {(row.fault, row.backend) for row in score.in_tiers}
    caught = len(pairs) - len(score.never_caught)
    yield "# Mutation score\n"
    done = sum(row.state not in ("not_run", "unsupported") for row in score.honest.values())
    yield (
        f"{len(faults)} faults, planted {len(score.in_tiers)} times. Of {len(pairs)} pairs of fault and backend, "
        f"{caught} are caught at the predicted stage in at least one tier. Of {done} cells without a fault "
        f"that were judged, {done - sum(row.state != 'not_run' for row in score.false_alarms)} conform.\n"
    )
    yield f"{', '.join(f'{key} {value}' for key, value in facts.items())}\n"


def _totals(score: Score) -> Iterator[str]:
    yield "## By backend and tier\n"
    yield "A gate sees a fault if it raises its alarm at the cell and not at the same cell without the fault.\n"
    yield _line("backend", "tier", "planted", "caught", "at the predicted stage", *(gate.name for gate in GATES))
    yield "|" + " :-- |" * 2 + " --: |" * (3 + len(GATES))
    backends = list(dict.fromkeys(row.backend for row in score.in_tiers))
    tiers = list(dict.fromkeys(row.tier for row in score.in_tiers))
    for backend, tier in product([*sorted(backends), "all"], [*tiers, ANY]):
        rows = [row for row in score.in_tiers if backend in (row.backend, "all") and tier in (row.tier, ANY)]
        if not rows:
            continue
        counts = [_pairs(rows), _pairs(filter(score.caught, rows)), _pairs(filter(score.as_predicted, rows))]
        detected = [_pairs(row for row in rows if score.sees(gate, row)) for gate in GATES]
        yield _line(backend, tier, *counts, *detected)
    yield ""


def _pairs(rows: Iterable[Row]) -> int:
    """Counts the different (fault, backend) pairs of the rows."""
    return len({(row.fault, row.backend) for row in rows})


def _honest(score: Score) -> Iterator[str]:
    yield "## Cells without a fault\n"
    yield "Margins are observed / allowed: the three stages that came nearest to their bounds.\n"
    yield _line("tier", "judged", "expected difference", "false alarms", "not run", "unsupported", "largest margins")
    yield "|" + " :-- |" + " --: |" * 5 + " :-- |"
    for tier in dict.fromkeys(row.tier for row in sorted(score.honest.values(), key=lambda row: ORDER.index(row.tier))):
        rows = [row for row in score.honest.values() if row.tier == tier]
        states = Counter(row.state for row in rows)
        alarms = sum(row in score.false_alarms and row.state != "not_run" for row in rows)
        largest: dict[str, tuple[float, str]] = {}
        for row in rows:
            for stage, ratio in (row.margins or {}).items() if row.state == "conforms" else ():
                largest[stage] = max(largest.get(stage, (0.0, "")), (ratio, row.cell))
        worst = sorted(((ratio, stage, cell) for stage, (ratio, cell) in largest.items()), reverse=True)[:3]
        margins = "; ".join(f"{stage} {ratio:.2f} (`{cell}`)" for ratio, stage, cell in worst)
        judged = sum(row.state not in ("not_run", "unsupported") for row in rows)
        yield _line(
            tier, judged, states["expected_difference"], alarms, states["not_run"], states["unsupported"], margins
        )
    yield ""


def _quick(score: Score) -> Iterator[str]:
    rows = [row for row in score.planted if row.tier == QUICK]
    if not rows:
        return
    yield "## The quick profile\n"
    for backend in sorted({row.backend for row in rows}):
        own = [row for row in rows if row.backend == backend]
        missed = [f"`{row.fault}`" for row in own if not score.caught(row)]
        suffix = f"; missed: {', '.join(missed)}" if missed else ""
        yield f"* {backend}: {len(own) - len(missed)} of {len(own)} faults are caught by one of its cells{suffix}"
    yield ""


def _missed(score: Score) -> Iterator[str]:
    if all(map(score.as_predicted, score.in_tiers)) and not score.false_alarms:
        return
    yield "## Not as predicted\n"
    for tier in ORDER:
        missed: dict[str, list[str]] = {}
        for row in score.in_tiers:
            if row.tier == tier and not score.caught(row) and row.state != "not_run":
                missed.setdefault(row.fault, []).append(row.backend)
        if missed:
            names = (f"`{fault}` ({', '.join(backends)})" for fault, backends in missed.items())
            yield f"* missed in {tier}: {', '.join(names)}"
    for row in score.in_tiers:
        if not score.as_predicted(row):
            alone = row.state == "differs" and not score.caught(row)
            too = ", and the same cell without the fault does not conform" if alone else ""
            yield f"* `{row.cell}`: {row.state}, {row.stage or row.reason}; predicted: {row.predicted}{too}"
    for row in score.false_alarms:
        yield f"* `{row.cell}`, without a fault: {row.state}, {row.reason}"
    yield ""


def _blank(score: Score) -> Iterator[str]:
    if not score.blank:
        return
    yield "## Where a fault changes nothing\n"
    for reason in dict.fromkeys(row.reason for row in score.blank):
        where: dict[str, list[str]] = {}
        for row in score.blank:
            if row.reason == reason and row.tier not in where.setdefault(row.fault, []):
                where[row.fault].append(row.tier)
        faults = [f"`{fault}` ({', '.join(tiers)})" for fault, tiers in where.items()]
        yield f"* {reason}: {'; '.join(faults)}"
    yield ""


def _every_fault(score: Score) -> Iterator[str]:
    yield "## Every fault\n"
    yield "Errors are relative, at the first and at the last step. A dash: see above.\n"
    errors = ("loss", "loss, last", "norm", "norm, last")
    yield _line("fault", "backend", "tier", "caught", "first stage", "predicted", *errors, *(g.name for g in GATES))
    yield "|" + " :-- |" * 6 + " --: |" * 4 + " :-- |" * len(GATES)
    for row in sorted([*score.planted, *score.blank], key=_sort_key):
        names = (f"`{row.fault}`", row.backend, row.tier)
        if row.state == BLANK:
            yield _line(*names, *"-" * (7 + len(GATES)))
        elif row.tier == QUICK:
            yield _line(*names, _yes(score.caught(row)), row.stage, row.predicted, *[""] * (4 + len(GATES)))
        else:
            results = (_yes(score.caught(row)), row.stage, row.predicted)
            gates = [_yes(score.sees(gate, row)) for gate in GATES]
            yield _line(*names, *results, *_errors(row.loss), *_errors(row.norm), *gates)


def _sort_key(row: Row) -> tuple[str, str, int]:
    return row.fault, row.backend, ORDER.index(row.tier)


def _errors(pair: tuple[float, float] | None) -> tuple[str, ...]:
    return tuple(f"{error:.1e}" for error in pair) if pair else ("", "")


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"
