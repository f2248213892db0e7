"""Markdown of a run, for a job summary: verdict, counts, then failures first, then everything else.

GitHub drops a summary of more than 1024 kB whole, so this one stops before LIMIT, at the end of a block, and says so.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from reports.load import NO_ANSWER, STATES, Cell, Report, read_report
from reports.words import attention, explain, headline, number, plural, ratio

LIMIT = 900_000  # bytes
ROOM = 1_000  # bytes kept for the line that says what was left out
FINDINGS = 10  # per cell
LIST_HEAD = "| cell | worst ratio | |\n| :-- | --: | :-- |\n"


def write_markdown(out: Path) -> Path:
    """Write ``out/report.md`` from the output folder ``out``; raises ValueError for one that cannot be trusted."""
    report = read_report(out)
    text, left_out = "", 0
    for block in _blocks(report):
        if left_out or len((text + block).encode()) > LIMIT - ROOM:
            left_out += 1
        else:
            text += block
    if left_out:
        text += f"\n**Cut short here:** {plural(left_out, 'part')} left out. All of it is in `report.html`.\n"
    file = out / "report.md"
    file.write_text(text, encoding="utf-8")
    return file


def _blocks(report: Report) -> Iterator[str]:
    """Pieces that are kept or left out whole; the most urgent first."""
    title, text = headline(report)
    symbol = {"conforms": "✅", "differs": "❌", "incomplete": "⚠️"}[report.verdict]
    yield f"## {symbol} {_text(title)}\n\n{_text(text)}\n\n"
    names = " | ".join(f"{state.symbol} {state.name}" for state in STATES.values())
    counts = " | ".join(str(count) for count in report.counts.values())
    yield f"| {names} |\n|{' --: |' * len(STATES)}\n| {counts} |\n"
    for cell in attention(report):
        yield _failure(cell)
    for state in STATES:
        cells = [c for c in report.cells if c.state == state]
        if cells and state not in ("differs", *NO_ANSWER):
            yield f"\n### {STATES[state].symbol} {STATES[state].name} ({len(cells)})\n\n{LIST_HEAD}"
            for cell in cells:
                worst = ratio(cell.worst.ratio) if cell.worst else ""
                yield f"| {_code(cell.id)} | {_text(worst)} | {_text(explain(cell))} |\n"
    summary = report.summary
    facts = {"profile": summary.get("profile"), "device": summary.get("device"), **summary.get("environment", {})}
    yield f"\n<sub>{_text(', '.join(f'{key} {value}' for key, value in facts.items()))}</sub>\n"


def _failure(cell: Cell) -> str:
    lines = [
        f"\n### {STATES[cell.state].symbol} {_code(cell.id)}: {STATES[cell.state].name}\n",
        _text(explain(cell)),
        "",
    ]
    if cell.findings:
        lines += ["| stage | tensor | step | observed | allowed | ratio |", "| :-- | :-- | --: | --: | --: | --: |"]
        lines += [
            f"| {_text(f.stage)} | {_code(f.tensor)} | {'' if f.step is None else f.step} | {number(f.observed)} | "
            f"{number(f.allowed)} | **{_text(ratio(f.ratio))}** |"
            for f in cell.findings[:FINDINGS]
        ]
        if len(cell.findings) > FINDINGS:
            lines += ["", f"... and {len(cell.findings) - FINDINGS} more findings."]
        lines += ["", *(f"Hint: {_text(hint)}" for hint in dict.fromkeys(f.hint for f in cell.findings) if hint)]
    if cell.reproduce:
        lines += ["", f"Reproduce: {_code(cell.reproduce)}"]
    return "\n".join(lines) + "\n"


def _text(value: str) -> str:
    """Plain text: nothing in it is markup, and it stays on one line of a table."""
    flat = re.sub(r"\s+", " ", value)
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def _code(value: str) -> str:
    """A code span, which cannot hold a backtick, nor a bar inside a table."""
    flat = re.sub(r"\s+", " ", value).replace("`", "'").replace("|", "\\|")
    return f"`{flat}`" if flat.strip() else ""
