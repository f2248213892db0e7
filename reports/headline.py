"""Headline: the verdict of a run in one line, and what to do next in one or two sentences."""

from conformance.record.states import ANSWERED, NO_ANSWER
from conformance.record.summary import shared_gpus
from conformance.record.verdict import NOT_SEEN
from reports.causes import causes
from reports.load import Report
from reports.words import explain, plural, ratio


def incomplete_as_a_whole(report: Report) -> tuple[str, str] | None:
    """(title, text) of the additional test case WHOLE_RUN of a run that did not finish although no cell is without an
    answer, or that judged less than was demanded; None if there is nothing to say."""
    if not report.unmet and (report.verdict != "incomplete" or _unanswered(report)):
        return None
    title, text = headline(report)
    return title, "\n".join([text, *report.unmet])


def headline(report: Report) -> tuple[str, str]:
    """(title, text): the verdict of the run, and one or two sentences that say what to do next."""
    said = {"differs": _differs, "incomplete": _incomplete, "partly_observed": _partly, "conforms": _conforms}
    title, text = said[report.verdict](report)
    lent = sorted({cell.entry.verdict.second_class for cell in report.cells} - {""})
    whose = f" The reference was {' and '.join(lent)}, a second-class oracle: {NOT_SEEN}." if lent else ""
    shared = shared_gpus(report.run.environment)
    return title, text + whose + (f" {_sentence(shared)}" if shared else "")


def _differs(report: Report) -> tuple[str, str]:
    differing, unanswered = report.counts["differs"], _unanswered(report)
    cause, *others = causes(report)
    text = f"Start with {cause.first.id}. First difference in {explain(cause.first)}."
    if cause.others:
        text += f" {plural(len(cause.others), 'more cell')} {'differs' if len(cause.others) == 1 else 'differ'} alike."
    if also := sum(other.first.state == "differs" for other in others):
        text += f" {plural(also, 'other cause')} below."
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
    first = causes(report)[0].first
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
