"""Writes report.md for a job summary: verdict and counts, then failures, then everything else.

``annotations.txt`` has commands of GitHub Actions, which a job prints to annotate a commit. ``issue.md`` is there if
cells newly fail since the run before: the title of an issue, and its text.

GitHub rejects a summary of more than 1024 kB, so the text ends before LIMIT, after a complete block and with a note.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from conformance.bisect.explain import describe
from conformance.core.io import encoded, write_file
from conformance.results.requirements import leased
from conformance.results.verdict import NO_ANSWER, STATES, margin, number
from reports import side_by_side, summary, tables
from reports.load import Report, read_report
from reports.summary import Cause, causes, headline
from reports.wording import circumstances, code, explain, likely_causes, plain, plural, worst_first

LIMIT = 900_000  # bytes
ROOM = 1_000  # bytes reserved for the note about omitted blocks
FINDINGS = 10  # per cell
ANNOTATIONS = 10  # that GitHub shows of a step
LIST_HEAD = "| cell | margin | |\n| :-- | --: | :-- |\n"


def write_markdown(out: Path) -> Path:
    """Writes ``out/report.md`` for the run in ``out``. Raises UsageError for a folder that cannot be trusted, and
    Unwritable."""
    report = read_report(out)
    text, left_out = "", 0
    groups = side_by_side.read_groups(out, report) or ()
    for block in _blocks(report, groups):
        if left_out or len(encoded(text + block)) > LIMIT - ROOM:
            left_out += 1
        else:
            text += block
    if left_out:
        text += f"\n**Cut short here:** {plural(left_out, 'part')} omitted. `report.html` has everything.\n"
    file = out / "report.md"
    write_file(file, text)
    write_file(out / "annotations.txt", "".join(f"{line}\n" for line in annotations(report)))
    (out / "issue.md").unlink(missing_ok=True)
    if issue := "".join(_issue(report)):
        write_file(out / "issue.md", issue)
    return file


def annotations(report: Report) -> list[str]:
    """Returns an error for each cause, and a warning for each flaky or drifting cell, as far as GitHub shows them."""
    found = [("error", cause.first.id, explain(cause.first)) for cause in causes(report)]
    if since := report.since:
        found += [("warning", one.cell, f"flaky: {one.why}") for one in since.flaky]
        found += [("warning", one.cell, f"drift: {one}") for one in since.grown]
    return [f"::{kind} title={_escaped(cell, ':,')}::{_escaped(text)}" for kind, cell, text in found[:ANNOTATIONS]]


def _escaped(text: str, more: str = "") -> str:
    """Escapes text for a command of GitHub Actions."""
    return re.sub(f"[%\r\n{more}]", lambda found: f"%{ord(found[0]):02X}", text)


def _issue(report: Report) -> Iterator[str]:
    """Yields the text of an issue about the cells that newly fail; nothing if none does."""
    last = report.since.last if report.since else None
    failing = [change.cell for change in last.changes if change.kind in ("new", "unjudged")] if last else []
    if not (report.since and failing):
        return
    more = f" and {plural(len(failing) - 1, 'more cell')}" if len(failing) > 1 else ""
    yield f"# Parity: {failing[0]}{more} newly {'fail' if more else 'fails'}\n\n"
    yield from summary.blocks(report.since)
    yield from (_failure(cause) for cause in causes(report) if {cell.id for cell in cause.cells} & set(failing))


def _blocks(report: Report, groups: tuple[side_by_side.Group, ...]) -> Iterator[str]:
    """Yields blocks of Markdown, the most important first; each block is written completely or omitted."""
    title, text = headline(report)
    symbol = {"conforms": "✅", "partly_observed": "◐", "differs": "❌", "incomplete": "⚠️"}[report.verdict]
    yield f"## {symbol} {plain(title)}\n\n{plain(text)}\n\n"
    names = " | ".join(f"{state.symbol} {state.name}" for state in STATES.values())
    counts = " | ".join(str(count) for count in report.counts.values())
    yield f"| {names} |\n|{' --: |' * len(STATES)}\n| {counts} |\n"
    yield from _coverage(report)
    if report.since:
        yield from summary.blocks(report.since)
    for cause in causes(report):
        yield _failure(cause)
    if score := tables.mutation_score(report):
        yield _planted(score)
    if groups:
        yield f"\n### Backends side by side\n\n{side_by_side.NOTE}\n"
        yield from side_by_side.blocks(groups)
    for table in tables.tables(report):
        yield _handed(table)
    for state in STATES:
        cells = [c for c in report.cells if c.state == state]
        if cells and state not in ("differs", *NO_ANSWER):
            yield f"\n### {STATES[state].symbol} {STATES[state].name} ({len(cells)})\n\n{LIST_HEAD}"
            for cell in cells:
                closest = margin(cell.closest.ratio) if cell.closest else ""
                yield f"| {code(cell.id)} | {plain(closest)} | {plain(explain(cell))} |\n"
    if report.run.repeated:
        yield "\n### Repeated\n\n" + "".join(f"- {plain(sentence)}\n" for sentence in report.run.repeated)
    shares = leased(report.run.leased)
    head = {"profile": report.run.profile, "device": report.run.device, **({"leased": shares} if shares else {})}
    facts = {**head, **report.run.environment}
    yield f"\n<sub>{plain(', '.join(f'{key} {value}' for key, value in facts.items()))}</sub>\n"


def _handed(table: tables.Table) -> str:
    """Formats a table of resumes, with the symbol of each cell's state."""
    lines = [f"\n### {plain(table.title)}: {table.conform} of {plural(len(table.cells), 'cell')} pass\n"]
    lines.append(f"| saved / loaded | {' | '.join(map(plain, table.columns))} |")
    lines.append(f"|{' :-- |' * (len(table.columns) + 1)}")
    for row in table.rows:
        found = [table.cells.get((row, column)) for column in table.columns]
        lines.append(f"| {plain(row)} | {' | '.join(STATES[cell.state].symbol if cell else '' for cell in found)} |")
    return "\n".join(lines) + "\n"


def _coverage(report: Report) -> Iterator[str]:
    """Yields a block about unmet minimum requirements."""
    if report.unmet:
        yield "\n### Less than required\n\n" + "".join(f"- {plain(sentence)}\n" for sentence in report.unmet)


def _planted(score: tables.MutationScore) -> str:
    """Formats the mutation score of a run with planted faults."""
    pairs = plural(len(score.counted), "pair")
    lines = [f"\n### Planted faults: {len(score.caught)} of {pairs} of fault and backend caught\n"]
    lines += [
        "| fault | backend | caught | nothing differs | also differs without it | no answer | first found at |",
        "| :-- | :-- | --: | --: | --: | --: | :-- |",
    ]
    for row in score.rows:
        counts = " | ".join(str(len(cells)) for cells in (row.caught, row.silent, row.unproven, row.unanswered))
        lines.append(f"| {code(row.fault)} | {plain(row.backend)} | {counts} | {plain(', '.join(row.stages))} |")
    return "\n".join(lines) + "\n"


def _failure(cause: Cause) -> str:
    """Formats the first cell of a cause in full, and the names of the other cells."""
    cell = cause.first
    lines = [
        f"\n### {STATES[cell.state].symbol} {code(cell.id)}: {STATES[cell.state].name}\n",
        plain(explain(cell)),
        "",
    ]
    if cause.other_cells:
        named = ", ".join(code(other.id) for other in cause.other_cells[:FINDINGS])
        more = f" and {len(cause.other_cells) - FINDINGS} more" if len(cause.other_cells) > FINDINGS else ""
        lines += [f"{plural(len(cause.other_cells), 'more cell')} with the same cause: {named}{more}", ""]
    if found := worst_first(cell):
        lines += ["| stage | tensor | step | observed | allowed | margin |", "| :-- | :-- | --: | --: | --: | --: |"]
        lines += [
            f"| {plain(f.stage)} | {code(f.tensor)} | {f.step} | {number(f.observed)} | "
            f"{number(f.allowed)} | **{plain(margin(f.ratio))}** |"
            for f in found[:FINDINGS]
        ]
        if len(found) > FINDINGS:
            lines += ["", f"... and {len(found) - FINDINGS} more findings."]
        lines += ["", *(f"Likely cause: {code(name)}: {plain(hint)}\n" for hint, name in likely_causes(cell).items())]
        lines += [f"{plain(text)}\n" for text in (cause.shared, circumstances(cell)) if text]
    if cell.bisection:
        bisected = describe(cell.bisection)
        lines += ["", f"Bisected: **{plain(bisected.answer)}**", ""]
        lines += [f"- {plain(word)}: {plain(text)}" for word, text in bisected.facts]
    if cell.entry.reproduce:
        lines += ["", f"Reproduce: {code(cell.entry.reproduce)}"]
    return "\n".join(lines) + "\n"
