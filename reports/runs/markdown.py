"""Markdown of comparisons, for a pull request or a job summary."""

from collections.abc import Sequence

from reports.runs import text
from reports.runs.comparison import Comparison
from reports.words import plain


def to_markdown(comparisons: Sequence[Comparison]) -> str:
    return f"## {plain(text.title(comparisons))}\n\n" + "\n".join(map(_block, comparisons))


def _block(comparison: Comparison) -> str:
    symbol = "❌" if comparison.differs else "✅" if comparison.comparable else "⚠️"
    lines = [f"{symbol} {plain(text.headline(comparison))}", ""]
    lines += [f"- {plain(sentence)}" for sentence in (*text.sides(comparison), text.band(comparison))]
    if comparison.metrics:
        lines += ["", f"| {' | '.join(text.HEADS)} |", f"| :-- |{' --: |' * (len(text.HEADS) - 1)}"]
        lines += [f"| {' | '.join(map(plain, row))} |" for row in text.rows(comparison)]
    said = text.hint_texts(comparison)
    if said:
        lines += ["", "Why, perhaps:", "", *(f"{place}. {plain(hint)}" for place, hint in enumerate(said, 1))]
    notes = text.notes(comparison)
    if notes:
        lines += ["", "Notes:", "", *(f"- {plain(note)}" for note in notes)]
    return "\n".join(lines) + "\n"
