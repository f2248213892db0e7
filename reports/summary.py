"""Summarizes a run: its headline, the causes of failures, and the changes since earlier runs.

Cells that differ have one likely cause if the same tensors of the same stage differ first, in any layer, or if the same
module is the first wrong one. Cells without an answer have one cause if their reasons are equal up to numbers. The
cell with the smallest worker group represents its cause, because it is the cheapest to examine.

The comparison with earlier runs comes from conformance.results.changes; this module formats it as Markdown, and
computes the bars that templates/earlier.html draws.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from conformance.results.baseline import Counts, by_backend, counts_text
from conformance.results.bisection import OUTSIDE, PARAMETERS, UNKNOWN
from conformance.results.changes import KINDS, Comparison, Since
from conformance.results.requirements import shared_gpus
from conformance.results.verdict import ANSWERED, NO_ANSWER, NOT_SEEN, PASSES, STATES, State, margin
from reports.load import Cell, Report
from reports.wording import code, explain, first_finding, first_line, likely_causes, plain, plural


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Holds the cells with one cause, at least one: by size of the worker group, then by simplicity of the layout.

    shared: a sentence if no backend that ran the same scenarios is right; else empty. passing: names a cell that passes
    and in what its model differs, if no likely cause is known; else empty.
    """

    cells: tuple[Cell, ...]
    shared: str
    passing: str = ""

    @property
    def first(self) -> Cell:
        return self.cells[0]

    @property
    def other_cells(self) -> tuple[Cell, ...]:
        return self.cells[1:]

    @property
    def bisected(self) -> Cell | None:
        """Returns the first cell in which a module was searched and found."""
        return next((cell for cell in self.cells if cell.bisection and cell.bisection.models), None)

    @cached_property
    def urgency(self) -> tuple[int, int, int, float]:
        """Sorts causes: by state, then by the earliest stage, the fewest ranks, and the highest ratio."""
        finding, stages = first_finding(self.first), self.first.entry.stages
        stage = stages.index(finding.stage) if finding and finding.stage in stages else len(stages)
        worst = max((cell.closest.ratio for cell in self.cells if cell.closest), default=0.0)
        return list(STATES).index(self.first.state), stage, self.first.entry.world_size, -worst


def causes(report: Report) -> list[Cause]:
    """Returns the causes of all cells that differ, then of all cells that were not judged."""
    by_key: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for cell in report.cells:
        if cell.state in ("differs", *NO_ANSWER):
            by_key[_key(cell)].append(cell)
    by_backends = {(*key, i): part for key, cells in by_key.items() for i, part in enumerate(_by_backends(cells))}
    groups: dict[tuple[object, ...], list[Cell]] = defaultdict(list)
    for key, cells in by_backends.items():
        module = next(filter(None, map(_module, cells)), None)
        groups[(*key[:2], module) if module else key] += cells
    passing = {_but_model(cell): cell for cell in report.cells if cell.state == "conforms"}
    found = [
        Cause(cells=(first, *rest), shared=_shared(cells, report), passing=_passing(first, passing))
        for cells in groups.values()
        for first, *rest in [sorted(cells, key=_effort)]
    ]
    return sorted(found, key=lambda cause: cause.urgency)


def _but_model(cell: Cell) -> tuple[str, ...]:
    entry = cell.entry
    return entry.scenario, entry.backend, entry.layout, entry.variant


PARTS = {"attn": "attention", "mlp": "feed_forward"}  # of the name of a module: the key of its values


def _passing(cell: Cell, passing: Mapping[tuple[str, ...], Cell]) -> str:
    """Names the cell that passes with another model, and the values of the first wrong module that both models do not
    share, for a cell without a likely cause."""
    other = passing.get(_but_model(cell))
    if cell.state != "differs" or not other or likely_causes(cell):
        return ""
    here, there = (dict(_values(one.oracle.header.get("resolved", {}))) if one.oracle else {} for one in (cell, other))
    part = next((part for name, part in PARTS.items() if name in (_module(cell) or "")), "")
    names = [name for name in here if name in there and here[name] != there[name]]
    listed = [
        f"{name} {here[name]}, there {there[name]}" for name in names if part in name or name.endswith(".hidden_size")
    ]
    return f"{other.id} passes. Its model differs: {'; '.join(listed[:MOST])}." if listed else ""


def _values(architecture: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of an architecture by name, of layers those of the first one."""
    if isinstance(architecture, dict):
        for key, value in architecture.items():
            if name or key == "architecture":
                yield from _values(value, f"{name}.{key}".removeprefix("."))
    elif isinstance(architecture, list) and architecture and isinstance(architecture[0], dict):
        yield from _values(architecture[0], f"{name}.0")
    else:
        yield name.removeprefix("architecture."), architecture


def _module(cell: Cell) -> str | None:
    """Returns the first wrong module, if the cell was bisected to one."""
    models = cell.bisection.models if cell.bisection else ()
    return models[0].where if models and models[0].where not in (OUTSIDE, UNKNOWN, PARAMETERS) else None


def _shared(cells: list[Cell], report: Report) -> str:
    scenarios = {cell.entry.scenario for cell in cells}
    judged = {c.entry.backend for c in report.cells if c.entry.scenario in scenarios and c.state in ANSWERED}
    if len(judged) < 2 or {cell.entry.backend for cell in cells if cell.state == "differs"} != judged:
        return ""
    shared = "code, data, configuration and the reference"
    return f"All {len(judged)} backends differ alike, so look at what they share: {shared}."


def _effort(cell: Cell) -> tuple[int, int]:
    """Sorts cells by their ranks, then by the number of parts of their layout."""
    return cell.entry.world_size, cell.entry.layout.count(".") + cell.entry.layout.count("-")


def _by_backends(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Puts cells that differ apart by backend, unless two backends have the same number wrong in some scenario.

    Backends with different bugs often differ first at the same stage, such as the loss.
    """
    if cells[0].state != "differs":
        return [list(cells)]
    groups: list[tuple[set[object], list[Cell]]] = []
    for backend in dict.fromkeys(cell.entry.backend for cell in cells):
        own = [cell for cell in cells if cell.entry.backend == backend]
        errors = {_first_error(cell) for cell in own}
        with_same = next((group for group in groups if group[0] & errors), None)
        if with_same:
            with_same[0].update(errors)
            with_same[1].extend(own)
        else:
            groups.append((errors, own))
    return [members for _, members in groups]


def _first_error(cell: Cell) -> object:
    """Returns the number that is wrong first, to two digits, and where; cells of one cause share it."""
    first, entry = first_finding(cell), cell.entry
    error = (first.stage, first.step, f"{first.observed:.1e}") if first else ()
    return entry.scenario, entry.model, entry.variant, error


def _key(cell: Cell) -> tuple[object, ...]:
    planted = tuple(part for part in cell.entry.variant.split("/") if part.startswith("fault-"))
    first = first_finding(cell) if cell.state == "differs" else None
    if not first:
        words = ("N" if "/" in word else re.sub(r"\d+", "N", word) for word in first_line(cell.reason).split())
        return cell.state, planted, " ".join(words)  # without folders and numbers
    tensors = {f.tensor for f in cell.findings if (f.stage, f.step) == (first.stage, first.step)}
    return cell.state, planted, first.stage, frozenset(re.sub(r"\.\d+\.|\d+", ".N.", tensor) for tensor in tensors)


MOST = 12  # values of a model that are listed
HEIGHT, STEP = 34, 16  # px: height of the tallest bar, and distance of bars
# From the bottom of a bar to its top, so that failures are at the edge.
STACKED: tuple[State, ...] = (
    *("conforms", "partly_observed", "expected_difference", "unsupported", "not_run", "infrastructure", "differs"),
)
ATTENTION: tuple[State, ...] = ("differs", *NO_ANSWER)


@dataclass(frozen=True, kw_only=True)
class Bar:
    """Describes the bar of one run of one backend.

    parts: (state, y, height) in px. mark: the symbol of the worst state, if it needs attention.
    """

    x: int
    parts: tuple[tuple[State, float, float], ...]
    mark: str
    title: str


@dataclass(frozen=True, kw_only=True)
class Trend:
    """Holds the bars of a backend, from the earliest run to this one. text: the counts of this run."""

    backend: str
    bars: tuple[Bar, ...]
    text: str

    @property
    def width(self) -> int:
        return STEP * len(self.bars)


def trends(report: Report) -> list[Trend]:
    """Returns the trend of each backend; empty if there is no earlier run."""
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
        text = counts_text(now.get(backend, {})) or "not in this run"
        found.append(Trend(backend=backend, bars=tuple(bars), text=text))
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
        title=f"{when}: {counts_text(counts) or 'not in this run'}".removeprefix(": "),
    )


def blocks(since: Since) -> Iterator[str]:
    """Yields blocks of Markdown: the comparisons, the last run first; then flaky cells, and slower ones."""
    if not since.last:
        yield f"\n### No earlier run of these cells in {code(since.path)}\n"
    for name, comparison in since.comparisons:
        yield f"\n### Since {name}{plain(comparison.when)}\n\n{_suspects(comparison)}"
        for kind, changes in comparison.by_kind.items():
            lines = [f"- {code(change.cell)}: {plain(str(change))}" for change in changes]
            yield "\n".join([f"**{KINDS[kind].capitalize()}: {plural(len(changes), 'cell')}**\n", *lines, "\n"])
        if comparison.oracles:
            lines = [f"- {code(change.cell)}: {plain(str(change))}" for change in comparison.oracles]
            yield "\n".join([f"**Judged by another reference: {plural(len(lines), 'cell')}**\n", *lines, "\n"])
    for title, lines in (
        ("Flaky", [f"- {code(flaky.cell)}: {plain(flaky.why)}" for flaky in since.flaky]),
        ("Drift", [f"- {code(grown.cell)}: {plain(str(grown))}" for grown in since.grown]),
        ("Slower", [f"- {plain(str(slower))}" for slower in since.slower]),
    ):
        if lines:
            yield "\n".join([f"\n### {title} ({len(lines)})\n", *lines, ""])


def _suspects(comparison: Comparison) -> str:
    """Formats the versions that changed in between, as suspects if a cell changed."""
    if not comparison.suspects:
        return "No version changed in between.\n\n" if comparison.changes else "No cell and no version changed.\n"
    why = "Suspects, because they changed in between" if comparison.changes else "No cell changed. Changed in between"
    return f"{why}: {plain('; '.join(map(str, comparison.suspects)))}\n\n"


def incomplete_as_a_whole(report: Report) -> tuple[str, str] | None:
    """Returns (title, text) of the additional test case WHOLE_RUN, for a run that did not finish although every cell
    has an answer, or that misses a minimum requirement; else None."""
    if not report.unmet and (report.verdict != "incomplete" or _unanswered(report)):
        return None
    title, text = headline(report)
    return title, "\n".join([text, *report.unmet])


def headline(report: Report) -> tuple[str, str]:
    """Returns (title, text): the verdict of the run, and the next action in one or two sentences."""
    title, text = _by_verdict(report)
    return title, text + _caveats(report)


def _by_verdict(report: Report) -> tuple[str, str]:
    found = {"differs": _differs, "incomplete": _incomplete, "partly_observed": _partly, "conforms": _conforms}
    return found[report.verdict](report)


def first_screen(report: Report) -> str:
    """Returns what was compared with what, since when the verdict is as it is, and what the page does not say below."""
    entries = [cell.entry for cell in report.cells]
    backends, precisions = (
        _listed(list(dict.fromkeys(found)))
        for found in ([e.backend for e in entries], [e.variant.partition("/")[0] for e in entries])
    )
    counts = (plural(len({getattr(e, name) for e in entries}), name) for name in ("scenario", "model"))
    compared = f"{backends} against a float64 reference: {', '.join(counts)}, {precisions}." if entries else ""
    text = "" if report.verdict == "differs" else _by_verdict(report)[1]
    return " ".join(filter(None, (compared, _streak(report), text))) + _caveats(report)


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1])] * (len(words) > 1) + words[-1:])


def _streak(report: Report) -> str:
    """Says since which earlier run the run passes, or does not."""
    runs = report.run.floor.baseline.runs if report.run.floor.baseline and report.since else ()
    passes = report.verdict in PASSES
    same = list(takewhile(lambda run: run.is_green == passes, reversed(runs)))
    if not runs or not same:
        return f"It {'passes' if passes else 'fails'} since this run." if runs else ""
    when = same[-1].started[:16].replace("T", " ")
    return f"It {'passes' if passes else 'fails'} since {when}, for {plural(len(same) + 1, 'run')}."


def _caveats(report: Report) -> str:
    second = sorted({cell.entry.verdict.second_class for cell in report.cells} - {""})
    reference = f" The reference was {' and '.join(second)}, a second-class reference: {NOT_SEEN}." if second else ""
    shared = shared_gpus(report.run.environment)
    return reference + (f" {_sentence(shared)}" if shared else "")


def _differs(report: Report) -> tuple[str, str]:
    differing, unanswered = report.counts["differs"], _unanswered(report)
    cause, *further = causes(report)
    text = f"Start with {cause.first.id}. First difference in {explain(cause.first)}."
    if cause.other_cells:
        verb = "has" if len(cause.other_cells) == 1 else "have"
        text += f" {plural(len(cause.other_cells), 'more cell')} {verb} the same cause."
    if also := sum(other.first.state == "differs" for other in further):
        text += f" {plural(also, 'other cause')} below."
    if unanswered:
        text += f" {plural(unanswered, 'more cell')} gave no answer."
    return f"{plural(differing, 'cell')} of {len(report.cells)} {'fails' if differing == 1 else 'fail'}", text


def _incomplete(report: Report) -> tuple[str, str]:
    title, unanswered = "Incomplete: not a pass", _unanswered(report)
    if report.run.finished is None:
        again = "the same command with --resume OUT in place of --out OUT judges them"
        return title, f"The run did not finish, so cells may be missing: {again}."
    if not any(report.counts[state] for state in ANSWERED) and not unanswered:
        return title, "No cell was judged. Choose cells that the backends support, and run again."
    if not unanswered:
        return title, f"No difference was found, but less was judged than required. {_sentence(report.unmet[0])}"
    first = causes(report)[0].first
    text = f"No difference was found, but {plural(unanswered, 'cell')} of {len(report.cells)} gave no answer. "
    return title, f"{text}Run again, starting with {first.id}: {explain(first)}"


def _partly(report: Report) -> tuple[str, str]:
    count = report.counts["partly_observed"]
    does = "does not show" if count == 1 else "do not show"
    title = f"{plural(count, 'cell')} of {len(report.cells)} {does} every stage"
    return title, "No difference was found in the observed stages. " + _conforms(report)[0] + " in every stage."


def _sentence(text: str) -> str:
    """Adds a capital letter and a full stop to ``text``."""
    return f"{text[:1].upper()}{text[1:]}."


def _conforms(report: Report) -> tuple[str, str]:
    conforming, known = report.counts["conforms"], report.counts["expected_difference"]
    text = "Every judged cell agrees with the reference"
    text += f", but for {plural(known, 'known difference')}." if known else "."
    judged = [(cell.closest, cell) for cell in report.cells if cell.state == "conforms" and cell.closest]
    if judged:
        worst, closest = max(judged, key=lambda pair: pair[0].ratio)
        text += f" Closest to its tolerance: {closest.id}, {worst.stage}, margin {margin(worst.ratio)} digits."
    return f"{plural(conforming, 'cell')} of {len(report.cells)} pass{'es' if conforming == 1 else ''}", text


def _unanswered(report: Report) -> int:
    return sum(report.counts[state] for state in NO_ANSWER)
