"""Words: sentences and number formats that all reports share, so that HTML, Markdown and JUnit agree."""

import math
import re

from conformance.bisect.explain import describe
from conformance.results.verdict import NO_ANSWER, STATES, Quantity, number, off
from reports.load import Cell

FINDINGS = 50  # of a cell in a test report; the rest is in verdict.json
WHOLE_RUN = "the whole run"


def plural(count: int, word: str) -> str:
    """``1 cell``, ``2 cells``."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def percent(value: float) -> str:
    """A relative difference in three significant digits: ``+5.76%``, ``-0.0012%``, ``+300%``, ``NaN``."""
    text = number(100 * value)
    return text if text == "NaN" else f"{'+' if value >= 0 else ''}{text}%"


def ratio(value: float) -> str:
    """Observed / allowed, short enough for a matrix: ``0``, ``<0.01``, ``0.31``, ``12``, ``3e5``, ``∞``.

    Never rounded onto 1, the line between conforming and not: ``<1`` and ``>1`` say on which side it is.
    """
    if not math.isfinite(value):
        return "∞"
    if value == 0:
        return "0"
    if value < 0.01:
        return "<0.01"
    if value >= 9999.5:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    text = f"{value:.2f}" if value < 0.995 else f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
    if text == "1.0" and value != 1:
        return "<1" if value < 1 else ">1"
    return text


def tensor_at_step(quantity: Quantity) -> str:
    """The tensor and the step of a quantity: ``model.norm.weight, at step 3``; step -1 is ``as loaded``."""
    when = "as loaded" if quantity.step < 0 else f"at step {quantity.step}"
    return f"{quantity.tensor}, {when}"


def first_finding(cell: Cell) -> Quantity | None:
    """The worst finding of the first stage and step that differ; None without findings (which are in causal order)."""
    first = [f for f in cell.findings if (f.stage, f.step) == (cell.findings[0].stage, cell.findings[0].step)]
    return max(first, key=lambda f: f.ratio, default=None)


def worst_first(cell: Cell) -> list[Quantity]:
    """The findings of the first stage and step that differ, the worst first; then all others, in causal order."""
    first = first_finding(cell)
    if not first:
        return []
    begins = [f for f in cell.findings if (f.stage, f.step) == (first.stage, first.step)]
    return sorted(begins, key=lambda f: -f.ratio) + [f for f in cell.findings if f not in begins]


def first_line(text: str) -> str:
    """The first line of a reason, which is a sentence; tracebacks and ends of logs may follow."""
    return text.partition("\n")[0]


def explain(cell: Cell) -> str:
    """One phrase about a cell: what differs first, how close it came to its tolerance, or the first line of the reason
    of its verdict; and how it had ended before it was run again."""
    before = ", then ".join(STATES[state].name for state in cell.entry.before)
    lent = f", by {whose}" if (whose := cell.entry.verdict.second_class) else ""
    return _explain(cell) + lent + (f" (run again; before: {before})" if before else "")


def _explain(cell: Cell) -> str:
    finding = first_finding(cell)
    if cell.state == "differs" and finding:
        return f"{finding.stage}: {tensor_at_step(finding)}, {off(finding)}"
    if cell.state == "conforms" and cell.worst:
        return f"worst {ratio(cell.worst.ratio)} of what is allowed, in {cell.worst.stage}"
    return first_line(cell.reason) or STATES[cell.state].meaning


def details(cell: Cell) -> str:
    """What a test report says of a cell that did not pass: the reason, its first findings or the ends of its logs, and
    the command that runs it again."""
    lines = [
        f"{f.stage}: {tensor_at_step(f)}: {off(f)}, ratio {ratio(f.ratio)}" + (f" ({f.hint})" if f.hint else "")
        for f in cell.findings[:FINDINGS]
    ]
    if len(cell.findings) > FINDINGS:
        lines.append(f"... and {len(cell.findings) - FINDINGS} more")
    if cell.bisection:
        lines.append(f"bisected: {describe(cell.bisection).answer}")
    reproduce = f"reproduce: {cell.entry.reproduce}" if cell.entry.reproduce else ""
    logs = [f"--- {rank}\n{text}" for rank, text in cell.logs.items()] if cell.state in NO_ANSWER else []
    return "\n".join(part for part in (cell.reason, *lines, reproduce, *logs) if part)


def plain(value: str) -> str:
    """Plain text as Markdown: markup is escaped, and line breaks become spaces, so that it fits into a table."""
    flat = re.sub(r"\s+", " ", value)
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def code(value: str) -> str:
    """Text as a Markdown code span. Backticks become apostrophes, and bars are escaped for tables."""
    flat = re.sub(r"\s+", " ", value).replace("`", "'").replace("|", "\\|")
    return f"`{flat}`" if flat.strip() else ""
