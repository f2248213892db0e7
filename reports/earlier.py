"""Earlier: what the reports say about earlier runs: what has changed since, and the trend of each backend.

The texts and the comparison come from conformance.record.since; this module formats them as Markdown, and lays out the
bars that templates/earlier.html draws.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from conformance.record.since import KINDS, Comparison, Since
from conformance.record.states import NO_ANSWER, STATES, State
from conformance.record.trend import Counts, by_backend, fared
from reports.load import Report
from reports.words import code, plain, plural

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
