"""Two runs, cell by cell, as Markdown: verdicts, versions, states that changed, and the worst ratio of each stage."""

from collections.abc import Iterator

from conformance.record.states import STATES, State
from conformance.record.two_runs import CellOfTwo, TwoRuns
from reports.words import code, plain, plural, ratio

RATIOS_NOTE = (
    "Numbers are the worst observed / allowed of a stage, in the first run and in the second; one number if they are "
    "alike. 1 is the tolerance."
)


def two_runs_to_markdown(runs: TwoRuns) -> str:
    return "".join(_blocks(runs))


def _blocks(runs: TwoRuns) -> Iterator[str]:
    yield "| | run | started | verdict |\n| :-- | :-- | :-- | :-- |\n"
    for which, path, started, verdict in zip(("A", "B"), runs.paths, runs.started, runs.verdicts, strict=True):
        yield f"| {which} | {code(path)} | {plain(started)} | {plain(verdict.replace('_', ' '))} |\n"
    versions = "; ".join(map(str, runs.versions))
    yield f"\nVersions that changed: {plain(versions)}.\n" if versions else "\nNo version changed.\n"
    yield f"\n{plural(len(runs.changed), 'cell')} of {len(runs.cells)} ended otherwise.\n"
    for cell in runs.changed:
        yield f"\n- {code(cell.change.cell)}: {plain(str(cell.change))}"
    yield "\n"
    if runs.oracles:
        yield f"\n{plural(len(runs.oracles), 'cell')} judged by another oracle.\n"
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
    texts = [ratio(value) if value is not None else "not compared" for value in (before, now)]
    return texts[0] if texts[0] == texts[1] else " → ".join(texts)
