"""Causes: cells that failed alike, so that nine cells with one cause are read once.

Cells that differ have one cause if the same tensors of the same stage differ first, whatever the layer. Cells without
an answer have one cause if they say the same, but for numbers. The smallest world is the cheapest to look into, so it
stands for the others.

Earlier: what the reports say about earlier runs: what has changed since, and the trend of each backend.

The texts and the comparison come from conformance.results.changes; this module formats them as Markdown, and lays out
the bars that templates/earlier.html draws.

Headline: the verdict of a run in one line, and what to do next in one or two sentences.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from conformance.results.baseline import Counts, by_backend, fared
from conformance.results.changes import KINDS, Comparison, Since
from conformance.results.requirements import shared_gpus
from conformance.results.verdict import ANSWERED, NO_ANSWER, NOT_SEEN, STATES, State
from reports.load import Cell, Report
from reports.wording import code, explain, first_finding, first_line, plain, plural, ratio


@dataclass(frozen=True, kw_only=True)
class Cause:
    """``cells``: at least one, the smallest world first, and of these the plainest layout."""

    cells: tuple[Cell, ...]

    @property
    def first(self) -> Cell:
        return self.cells[0]

    @property
    def others(self) -> tuple[Cell, ...]:
        return self.cells[1:]

    @cached_property
    def urgency(self) -> tuple[int, int, int, float]:
        """Sorts causes: by state, then the earliest stage, the smallest world, and the highest ratio."""
        finding, stages = first_finding(self.first), self.first.entry.stages
        stage = stages.index(finding.stage) if finding and finding.stage in stages else len(stages)
        worst = max((cell.worst.ratio for cell in self.cells if cell.worst), default=0.0)
        return list(STATES).index(self.first.state), stage, self.first.entry.world_size, -worst


def causes(report: Report) -> list[Cause]:
    """The causes of all cells that need attention: of those that differ, then of those that were not judged."""
    groups: dict[object, list[Cell]] = defaultdict(list)
    for cell in report.cells:
        if cell.state in ("differs", *NO_ANSWER):
            groups[_key(cell)].append(cell)
    found = [Cause(cells=tuple(sorted(cells, key=_effort))) for cells in groups.values()]
    return sorted(found, key=lambda cause: cause.urgency)


def _effort(cell: Cell) -> tuple[int, int]:
    """How much there is to a cell: its ranks, and the parts of its layout."""
    return cell.entry.world_size, cell.entry.layout.count(".") + cell.entry.layout.count("-")


def _key(cell: Cell) -> object:
    planted = tuple(part for part in cell.entry.variant.split("/") if part.startswith("fault-"))
    first = first_finding(cell) if cell.state == "differs" else None
    if not first:
        return cell.state, planted, re.sub(r"\d+", "N", first_line(cell.reason))
    tensors = {f.tensor for f in cell.findings if (f.stage, f.step) == (first.stage, first.step)}
    return cell.state, planted, first.stage, frozenset(re.sub(r"\.\d+\.|\d+", ".N.", tensor) for tensor in tensors)


HEIGHT, STEP = 34, 16  # px of the tallest bar, and from bar to bar
# From the foot of a bar to its top, so that what should worry is at the edge.
STACKED: tuple[State, ...] = (
    *("conforms", "partly_observed", "expected_difference", "unsupported", "not_run", "infrastructure", "differs"),
)
ATTENTION: tuple[State, ...] = ("differs", *NO_ANSWER)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One run of one backend. parts: (state, y, height) in px. mark: the symbol of the worst state, if not a pass."""

    x: int
    parts: tuple[tuple[State, float, float], ...]
    mark: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Trend:
    """The bars of a backend, from the earliest run to this one. text: how its cells ended in this run."""

    backend: str
    bars: tuple[Bar, ...]
    text: str

    @property
    def width(self) -> int:
        return STEP * len(self.bars)


def trends(report: Report) -> list[Trend]:
    """The trend of each backend; empty if there is no earlier run."""
    baseline = report.run.floor.baseline
    if not baseline or not baseline.runs or not report.since:
        return []
    runs = [(run.started, by_backend(baseline.outcomes(run))) for run in baseline.runs]
    runs.append((report.run.started, by_backend(report.outcomes)))
    now = runs[-1][1]
    found = []
    for backend in dict.fromkeys([*now, *(backend for _, counts in runs for backend in counts)]):
        most = max(sum(counts.get(backend, {}).values()) for _, counts in runs)
        bars = [_bar(place, when, counts.get(backend, {}), most) for place, (when, counts) in enumerate(runs)]
        found.append(Trend(backend=backend, bars=tuple(bars), text=fared(now.get(backend, {})) or "not in this run"))
    return found


def _bar(place: int, started: str, counts: Counts, most: int) -> Bar:
    parts, top = [], float(HEIGHT)
    for state in STACKED:
        if height := HEIGHT * counts.get(state, 0) / most:
            top -= height
            parts.append((state, round(top, 2), round(height, 2)))
    worst = next((state for state in ATTENTION if counts.get(state)), None)
    when = started[:16].replace("T", " ")
    return Bar(
        x=STEP * place,
        parts=tuple(parts),
        mark=STATES[worst].symbol if worst else "",
        title=f"{when}: {fared(counts) or 'not in this run'}".removeprefix(": "),
    )


def blocks(since: Since) -> Iterator[str]:
    """Blocks of Markdown: the comparisons, the last run first; then what is flaky, and what is slower."""
    if not since.last:
        yield f"\n### No earlier run of these cells in {code(since.path)}\n"
    for name, beside in since.comparisons:
        yield f"\n### Since {name}{plain(beside.when)}\n\n{_suspects(beside)}"
        for kind, changes in beside.by_kind.items():
            lines = [f"- {code(change.cell)}: {plain(str(change))}" for change in changes]
            yield "\n".join([f"**{KINDS[kind].capitalize()}: {plural(len(changes), 'cell')}**\n", *lines, "\n"])
        if beside.oracles:
            lines = [f"- {code(change.cell)}: {plain(str(change))}" for change in beside.oracles]
            yield "\n".join([f"**Judged by another oracle: {plural(len(lines), 'cell')}**\n", *lines, "\n"])
    for title, lines in (
        ("Flaky", [f"- {code(flaky.cell)}: {plain(flaky.why)}" for flaky in since.flaky]),
        ("Slower", [f"- {plain(str(slower))}" for slower in since.slower]),
    ):
        if lines:
            yield "\n".join([f"\n### {title} ({len(lines)})\n", *lines, ""])


def _suspects(beside: Comparison) -> str:
    """The versions that changed in between, as the suspects if a cell changed."""
    if not beside.suspects:
        return "No version changed in between.\n\n" if beside.changes else "No cell and no version changed.\n"
    why = "Suspects, because they changed in between" if beside.changes else "No cell changed. Changed in between"
    return f"{why}: {plain('; '.join(map(str, beside.suspects)))}\n\n"


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
