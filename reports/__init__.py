"""Reports: the output folder of a run as HTML, Markdown and JUnit. Reads files only: no ranks, no backend, no judge."""

from pathlib import Path

from reports.html import write_html
from reports.junit import write_junit
from reports.markdown import write_markdown


def write_all(out: Path) -> tuple[Path, Path, Path]:
    """Write ``report.html``, ``junit.xml`` and ``report.md`` into ``out``; ValueError for a folder that is no run's."""
    return write_html(out), write_junit(out), write_markdown(out)
