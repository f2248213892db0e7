"""Formats sentences and numbers for all reports, so that HTML, Markdown and JUnit agree."""

import math
import re
from collections.abc import Iterable

from conformance.bisect.explain import describe
from conformance.core.errors import visible
from conformance.results.verdict import NO_ANSWER, STATES, Quantity, margin, number, off
from conformance.spec.layout import AXES, OPTIONS, ZERO, ZERO_STAGES
from reports.load import Cell

FINDINGS = 50  # maximum number of findings of a cell in a test report; verdict.json has all
WHOLE_RUN = "the whole run"


def plural(count: int, word: str) -> str:
    """Returns ``1 cell``, ``2 cells``."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def percent(value: float) -> str:
    """Formats a relative difference with three significant digits: ``+5.76%``, ``-0.0012%``, ``+300%``, ``NaN``."""
    text = number(100 * value)
    return text if text == "NaN" else f"{'+' if value >= 0 else ''}{text}%"


def share(error: float) -> str:
    """Formats a relative error in percent with two digits: ``150 %``, ``0.0012 %``, ``NaN``."""
    return f"{number(float(f'{100 * error:.2g}'))} %" if math.isfinite(error) else number(error)


def in_square(cell: Cell) -> str:
    """Returns the number of a cell's square: the margin in digits, or the error of its first difference in percent."""
    if finding := first_finding(cell):
        return share(finding.observed)
    return margin(cell.closest.ratio) if cell.closest else ""


def layout_terms(layouts: Iterable[str]) -> dict[str, str]:
    """Returns the meaning of each part of the layouts, such as ``dp2`` or ``lastsync``."""
    parts = sorted({part for layout in layouts for part in re.split(r"\.|-to-", layout)})
    return {part: meaning for part in parts if (meaning := _meaning(part))}


def _meaning(part: str) -> str:
    axis = part.rstrip("0123456789")
    size = part.removeprefix(axis)
    if axis == ZERO and size:
        return ZERO_STAGES[int(size)].meaning if int(size) in ZERO_STAGES else ""
    if size:
        return f"{size} {AXES[axis].meaning}" if axis in AXES else ""
    return OPTIONS[axis].meaning if axis in OPTIONS else ""


def tensor_at_step(quantity: Quantity) -> str:
    """Formats tensor and step of a quantity: ``model.norm.weight, at step 3``; step -1 is ``as loaded``."""
    when = "as loaded" if quantity.step < 0 else f"at step {quantity.step}"
    return f"{quantity.tensor}, {when}"


def first_finding(cell: Cell) -> Quantity | None:
    """Returns the worst finding of the first stage and step that differ, in causal order; None without findings."""
    first = [f for f in cell.findings if (f.stage, f.step) == (cell.findings[0].stage, cell.findings[0].step)]
    return max(first, key=lambda f: f.urgency, default=None)


def worst_first(cell: Cell) -> list[Quantity]:
    """Returns the findings of the first stage and step that differ, the worst first; then all others, in causal
    order."""
    first = first_finding(cell)
    if not first:
        return []
    begins = [f for f in cell.findings if (f.stage, f.step) == (first.stage, first.step)]
    return sorted(begins, key=lambda f: f.urgency, reverse=True) + [f for f in cell.findings if f not in begins]


def likely_causes(cell: Cell) -> dict[str, str]:
    """Returns the hints of the first stage and step that differ, each with its worst tensor, the worst first. Hints of
    later stages are about consequences."""
    first = first_finding(cell)
    hints: dict[str, str] = {}
    for f in worst_first(cell):
        if first and f.hint and (f.stage, f.step) == (first.stage, first.step):
            hints.setdefault(f.hint, f.tensor)
    return hints


def circumstances(cell: Cell) -> str:
    """Returns the reason of a cell without its first difference, which is shown elsewhere; all of it without one."""
    if not (first := first_finding(cell)):
        return cell.reason
    _, found, more = cell.reason.partition(str(first))
    return more.removeprefix("; ") if found else cell.reason


def first_line(text: str) -> str:
    """Returns the first line of a reason, which is a sentence; tracebacks and ends of logs may follow."""
    return text.partition("\n")[0]


def explain(cell: Cell) -> str:
    """Returns one phrase about a cell: its first difference, its distance to the tolerance, or the first line of its
    reason; and its earlier states if it ran again."""
    before = ", then ".join(STATES[state].name for state in cell.entry.before)
    reference = f", by {second_class}" if (second_class := cell.entry.verdict.second_class) else ""
    return _explain(cell) + reference + (f" (run again; before: {before})" if before else "")


def _explain(cell: Cell) -> str:
    finding = first_finding(cell)
    if cell.state == "differs" and finding:
        return f"{finding.stage}: {tensor_at_step(finding)}, {off(finding)}"
    if cell.state == "conforms" and cell.closest:
        conventions = ", ".join(cell.entry.verdict.conventions)
        shown = f", with the convention {conventions}" if conventions else ""
        return f"margin {margin(cell.closest.ratio)} digits, in {cell.closest.stage}{shown}"
    return first_line(cell.reason) or STATES[cell.state].meaning


def details(cell: Cell) -> str:
    """Returns the details of a cell that did not pass: the reason, its first findings or the ends of its logs, and the
    command that runs it again."""
    lines = [
        f"{f.stage}: {tensor_at_step(f)}: {off(f)}, margin {margin(f.ratio)}" + (f" ({f.hint})" if f.hint else "")
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
    """Escapes plain text for Markdown; line breaks become spaces, so that it fits into a table."""
    flat = visible(re.sub(r"\s+", " ", value))
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def code(value: str) -> str:
    """Formats text as a Markdown code span. Backticks become apostrophes, and bars are escaped for tables."""
    flat = visible(re.sub(r"\s+", " ", value)).replace("`", "'").replace("|", "\\|")
    return f"`{flat}`" if flat.strip() else ""
