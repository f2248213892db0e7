"""Reads ``side_by_side.json`` and formats it as Markdown, and formats the comparison of two runs.

The tables show loss, gradients, norms and updates of one scenario on every backend, against the oracle and against each
other. conformance.judge.side_by_side computes them. This module needs no records, so it also works for a published run.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from conformance.core.errors import UsageError
from conformance.records.record_format import first_error
from conformance.results import side_by_side
from conformance.results.output_folders import CellOfTwo, TwoRuns
from conformance.results.run_results import SUMMARY, Listed, read_output_json
from conformance.results.side_by_side import Difference, Group, GroupState, Pair
from conformance.results.verdict import STATES, State, margin, number
from reports.load import Report
from reports.wording import code, plain, plural

RATIOS_NOTE = (
    "Numbers are the margins of a stage in digits, log10(allowed / observed), in the first run and in the second; one "
    "number if they are equal. A number below 0 is a difference."
)


def two_runs_to_markdown(runs: TwoRuns) -> str:
    """Formats verdicts, changed versions and states, and the margins of two runs."""
    return "".join(_blocks(runs))


def _blocks(runs: TwoRuns) -> Iterator[str]:
    yield "| | run | started | verdict |\n| :-- | :-- | :-- | :-- |\n"
    for which, path, started, verdict in zip(("A", "B"), runs.paths, runs.started, runs.verdicts, strict=True):
        yield f"| {which} | {code(path)} | {plain(started)} | {plain(verdict.replace('_', ' '))} |\n"
    versions = "; ".join(map(str, runs.versions))
    yield f"\nVersions that changed: {plain(versions)}.\n" if versions else "\nNo version changed.\n"
    yield f"\n{plural(len(runs.changed), 'cell')} of {len(runs.cells)} changed.\n"
    for cell in runs.changed:
        yield f"\n- {code(cell.change.cell)}: {plain(str(cell.change))}"
    yield "\n"
    if runs.oracles:
        yield f"\n{plural(len(runs.oracles), 'cell')} judged by another reference.\n"
        yield "".join(f"\n- {code(change.cell)}: {plain(str(change))}" for change in runs.oracles) + "\n"
    compared = [cell for cell in runs.cells if cell.ratios]
    if compared:
        yield f"\n{RATIOS_NOTE}\n"
    tables: dict[tuple[str, tuple[str, ...]], list[CellOfTwo]] = {}
    for cell in compared:
        tables.setdefault((cell.change.cell.partition("/")[0], tuple(cell.ratios)), []).append(cell)
    for (scenario, stages), cells in tables.items():
        yield f"\n#### {code(scenario)}\n\n| cell | A | B | {' | '.join(map(plain, stages))} |\n"
        yield f"| :-- | :-- | :-- |{' --: |' * len(stages)}\n"
        for cell in cells:
            squares = " | ".join(plain(_pair_square(*pair)) for pair in cell.ratios.values())
            states = f"{_state(cell.change.before)} | {_state(cell.change.now)}"
            yield f"| {code(cell.change.cell)} | {states} | {squares} |\n"


def _state(state: State | None) -> str:
    return f"{STATES[state].symbol} {STATES[state].name}" if state else "not in the run"


def _pair_square(before: float | None, now: float | None) -> str:
    texts = [margin(value) if value is not None else "not compared" for value in (before, now)]
    return texts[0] if texts[0] == texts[1] else " → ".join(texts)


WORDS: dict[GroupState, str] = {
    "conforms": "all agree",
    "differs": "not all agree",
    "expected_difference": "not all agree, as expected",
    "infrastructure": "not all compared",
}
APART = "agree with each other, not with the reference"


def words_of(group: Group) -> str:
    """Returns in a phrase which members of a group agree."""
    agree = group.pairs and not group.outside and all(member.state == "differs" for member in group.members)
    return APART if group.state == "differs" and agree else WORDS[group.state]


SYMBOLS: dict[GroupState, str] = {"conforms": "✅", "differs": "❌", "expected_difference": "✅", "infrastructure": "⚠️"}
NOTE = (
    "Numbers are the largest relative error against the reference, over all steps, for the worst tensor; in the last "
    "row, the largest difference between two backends; in brackets, the margin in digits, log10(allowed / observed)."
)
PAIRS = 10  # maximum number of pairs per group that are listed as outside their tolerance
STALE = (
    "This comparison does not belong to the present verdicts and records. Run `parity judge` on the folder to compare "
    "them again."
)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Holds the fields of the summary that are shown. A published run may have only these fields."""

    command: str
    device: str
    environment: dict[str, Any]
    cells: tuple[Listed, ...]


_RUN = TypeAdapter(_Run)


def read_groups(out: Path, report: Report | None = None) -> tuple[Group, ...] | None:
    """Reads the groups, first those in which not all members agree; None if the backends have not been compared.

    If ``report`` is given, a group whose comparison does not belong to the present verdicts and records gets the state
    ``infrastructure`` and the text STALE. Raises UsageError for a file that cannot be trusted.
    """
    groups = side_by_side.read_groups(out)
    if groups is None:
        return None
    if report:
        groups = tuple(
            group if _is_current(group, report) else replace(group, state="infrastructure", text=STALE)
            for group in groups
        )
    return tuple(sorted(groups, key=lambda group: list(STATES).index(group.state)))


def to_markdown(out: Path | TwoRuns) -> str:
    """Formats all groups of a folder as Markdown, with command and environment; or two runs, cell by cell.

    Raises UsageError if there is nothing to compare.
    """
    if isinstance(out, TwoRuns):
        return two_runs_to_markdown(out)
    groups, run = read_groups(out), _read_run(out / SUMMARY)
    if groups is None:
        raise UsageError(f"the backends of {out} have not been compared with each other; run: parity judge {out}")
    if not groups:
        ran = dict.fromkeys("".join(cell.id.split("/")[2:3]) for cell in run.cells if cell.state != "unsupported")
        found = ", ".join(ran) or "none"
        raise UsageError(
            f"nothing to compare in {out}: no two backends ran the same scenario, model and precision (backends that "
            f"ran: {found}); run the same cells with two or more backends"
        )
    facts = {"command": run.command, "device": run.device, **run.environment}
    return "".join(
        [
            f"{NOTE}\n",
            *blocks(groups),
            f"\n<sub>{plain(', '.join(f'{key} {value}' for key, value in facts.items()))}</sub>\n",
        ]
    )


def blocks(groups: tuple[Group, ...]) -> Iterator[str]:
    """Yields one block of Markdown per group."""
    for group in groups:
        lines = [f"\n#### {code(group.group)}: {words_of(group)} {SYMBOLS[group.state]}\n", plain(group.text), ""]
        heads = " | ".join(plain(column) for column in group.columns)
        lines += [f"| backend | layout | {heads} |", f"| :-- | :-- |{' --: |' * len(group.columns)}"]
        for member in group.members:
            squares = [_square(member.oracle.get(column)) for column in group.columns]
            lines.append(f"| {plain(member.backend)} | {code(member.layout)} | {' | '.join(squares)} |")
        squares = [_square(group.worst_over_pairs(column)) for column in group.columns]
        lines.append(f"| *any two of them* | | {' | '.join(squares)} |")
        if group.outside:
            lines += ["", "| outside their tolerance | in | step | observed | allowed | margin |"]
            lines += ["| :-- | :-- | --: | --: | --: | --: |"]
            lines += [_outside(group, pair) for pair in group.outside[:PAIRS]]
        if len(group.outside) > PAIRS:
            lines += ["", f"... and {plural(len(group.outside) - PAIRS, 'more pair')}."]
        yield "\n".join(lines) + "\n"


def _outside(group: Group, pair: Pair) -> str:
    worst = pair.furthest
    assert worst
    where = worst.column if worst.tensor == worst.column else f"{worst.column}: {worst.tensor}"
    values = f"{worst.step} | {number(worst.observed)} | {number(worst.allowed)} | **{plain(margin(worst.ratio))}**"
    return f"| {plain(pair_name(group, pair))} | {plain(where)} | {values} |"


def pair_name(group: Group, pair: Pair) -> str:
    """Names the members of a pair: ``fsdp2 dp2 and megatron tp2``."""
    return " and ".join(str(group.members[number]) for number in pair.members)


def _square(worst: Difference | None) -> str:
    return f"{number(worst.observed)} ({plain(margin(worst.ratio))})" if worst else "not compared"


def _is_current(group: Group, report: Report) -> bool:
    cells = {cell.id: cell for cell in report.cells}
    for member in group.members:
        cell = cells.get(member.cell)
        if cell is None or cell.state != member.state:
            return False
        if member.records and member.records != tuple(phase.digest for phase in cell.phases):
            return False
    return True


def _read_run(file: Path) -> _Run:
    try:
        return _RUN.validate_python(read_output_json(file))
    except ValidationError as error:
        raise UsageError(f"{file} is not as the suite wrote it ({first_error(error)}): it was edited") from None
