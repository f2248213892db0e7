"""Words: sentences and number formats that all reports share, so that HTML, Markdown and JUnit agree."""

import math
import re

from conformance.bisect.tell import told
from conformance.record.states import ANSWERED, NO_ANSWER, STATES
from conformance.record.verdict import Quantity
from reports.load import Cell, Report

FINDINGS = 50  # of a cell in a test report; the rest is in verdict.json
WHOLE_RUN = "the whole run"


def plural(count: int, word: str) -> str:
    """``1 cell``, ``2 cells``."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def number(value: float | None) -> str:
    """An error in three significant digits: ``0``, ``1.2e-7``, ``0.0153``, ``NaN``."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{float(f'{value:.3g}'):g}" if abs(value) < 1000 else f"{value:.0f}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


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


def times(quantity: Quantity) -> str:
    """How far a quantity exceeds its tolerance, in words: ``3.4 × allowed``."""
    value = quantity.ratio
    if math.isinf(value):
        return "beyond any tolerance"
    text = f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else ratio(value)
    return f"{text} \N{MULTIPLICATION SIGN} allowed"


def tensor_at_step(quantity: Quantity) -> str:
    """The tensor and the step of a quantity: ``model.norm.weight, at step 3``; step -1 is ``as loaded``."""
    when = "as loaded" if quantity.step < 0 else f"at step {quantity.step}"
    return f"{quantity.tensor}, {when}"


def first_finding(cell: Cell) -> Quantity | None:
    """The worst finding of the first stage and step that differ; None without findings (which are in causal order)."""
    first = [f for f in cell.findings if (f.stage, f.step) == (cell.findings[0].stage, cell.findings[0].step)]
    return max(first, key=lambda f: f.ratio, default=None)


def explain(cell: Cell) -> str:
    """One phrase about a cell: what differs first, how close it came to its tolerance, or the reason of its verdict;
    and how it had ended before it was run again."""
    before = ", then ".join(STATES[state].name for state in cell.entry.before)
    return _explain(cell) + (f" (run again; before: {before})" if before else "")


def _explain(cell: Cell) -> str:
    finding = first_finding(cell)
    if cell.state == "differs" and finding:
        return f"{finding.stage}: {tensor_at_step(finding)}, {times(finding)}"
    if cell.state == "conforms" and cell.worst:
        return f"worst {ratio(cell.worst.ratio)} of what is allowed, in {cell.worst.stage}"
    return cell.reason or STATES[cell.state].meaning


def details(cell: Cell) -> str:
    """What a test report says of a cell that did not pass: the reason, its first findings or the ends of its logs, and
    the command that runs it again."""
    lines = [
        f"{f.stage}: {tensor_at_step(f)}: observed {number(f.observed)}, allowed {number(f.allowed)}, "
        f"ratio {ratio(f.ratio)}" + (f" ({f.hint})" if f.hint else "")
        for f in cell.findings[:FINDINGS]
    ]
    if len(cell.findings) > FINDINGS:
        lines.append(f"... and {len(cell.findings) - FINDINGS} more")
    if cell.bisection:
        lines.append(f"bisected: {told(cell.bisection).answer}")
    reproduce = f"reproduce: {cell.entry.reproduce}" if cell.entry.reproduce else ""
    logs = [f"--- {rank}\n{text}" for rank, text in cell.logs.items()] if cell.state in NO_ANSWER else []
    return "\n".join(part for part in (cell.reason, *lines, reproduce, *logs) if part)


def incomplete_as_a_whole(report: Report) -> tuple[str, str] | None:
    """(title, text) of the additional test case WHOLE_RUN of a run that did not finish although no cell is without an
    answer, or that judged less than was demanded; None if there is nothing to say."""
    if not report.unmet and (report.verdict != "incomplete" or _unanswered(report)):
        return None
    title, text = headline(report)
    return title, "\n".join([text, *report.unmet])


def attention(report: Report) -> list[Cell]:
    """The cells that need attention: those that differ, the earliest stage first, then those that were not judged."""

    def urgency(cell: Cell) -> tuple[int, int, float]:
        finding, stages = first_finding(cell), cell.entry.stages
        stage = stages.index(finding.stage) if finding and finding.stage in stages else len(stages)
        return list(STATES).index(cell.state), stage, -(cell.worst.ratio if cell.worst else 0.0)

    return sorted((c for c in report.cells if c.state in ("differs", *NO_ANSWER)), key=urgency)


def headline(report: Report) -> tuple[str, str]:
    """(title, text): the verdict of the run, and one or two sentences that say what to do next."""
    said = {"differs": _differs, "incomplete": _incomplete, "partly_observed": _partly, "conforms": _conforms}
    return said[report.verdict](report)


def _differs(report: Report) -> tuple[str, str]:
    differing, unanswered = report.counts["differs"], _unanswered(report)
    first = attention(report)[0]
    text = f"Start with {first.id}. First difference in {explain(first)}."
    if unanswered:
        text += f" {plural(unanswered, 'more cell')} gave no answer."
    return f"{plural(differing, 'cell')} of {len(report.cells)} {'differs' if differing == 1 else 'differ'}", text


def _incomplete(report: Report) -> tuple[str, str]:
    title, unanswered = "Incomplete: not a pass", _unanswered(report)
    if report.run.finished is None:
        return title, "The run did not finish: cells may be missing. Run it again."
    if not any(report.counts[state] for state in ANSWERED) and not unanswered:
        return title, "No cell was judged. Choose cells that the backends support, and run again."
    if not unanswered:
        return title, f"No difference was found, but less was judged than was demanded. {_sentence(report.unmet[0])}"
    first = attention(report)[0]
    text = f"No difference was found, but {plural(unanswered, 'cell')} of {len(report.cells)} gave no answer. "
    return title, f"{text}Run again, beginning with {first.id}: {explain(first)}"


def _partly(report: Report) -> tuple[str, str]:
    count = report.counts["partly_observed"]
    does = "does not show" if count == 1 else "do not show"
    title = f"{plural(count, 'cell')} of {len(report.cells)} {does} every stage"
    return title, "No difference was found in what was shown. " + _conforms(report)[0] + " in every stage."


def _sentence(text: str) -> str:
    """``text`` with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def _conforms(report: Report) -> tuple[str, str]:
    conforming, known = report.counts["conforms"], report.counts["expected_difference"]
    text = "Every cell that was judged computes what the oracle computes"
    text += f", but for {plural(known, 'known difference')}." if known else "."
    judged = [(cell.worst, cell) for cell in report.cells if cell.state == "conforms" and cell.worst]
    if judged:
        worst, closest = max(judged, key=lambda pair: pair[0].ratio)
        text += f" Closest to its tolerance: {closest.id}, {worst.stage}, {ratio(worst.ratio)} of what is allowed."
    return f"{plural(conforming, 'cell')} of {len(report.cells)} conform{'s' if conforming == 1 else ''}", text


def _unanswered(report: Report) -> int:
    return sum(report.counts[state] for state in NO_ANSWER)


def plain(value: str) -> str:
    """Plain text as Markdown: markup is escaped, and line breaks become spaces, so that it fits into a table."""
    flat = re.sub(r"\s+", " ", value)
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;"))


def code(value: str) -> str:
    """Text as a Markdown code span. Backticks become apostrophes, and bars are escaped for tables."""
    flat = re.sub(r"\s+", " ", value).replace("`", "'").replace("|", "\\|")
    return f"`{flat}`" if flat.strip() else ""
