"""A report of thousands of cells stays one file that opens at once: size and times, measured on a synthetic run.

The full size runs under the marker ``exhaustive``: python -m pytest -m exhaustive tests/reports/test_report_size.py
"""

import json
import time
from pathlib import Path

import pytest
from chromium import Browser
from report_large import write_large
from report_sample import CELLS, write_sample

from reports.html import write_html
from reports.load import read_report

FULL, FULL_BYTES = 2000, 6_000_000
QUICK, QUICK_BYTES = 28, 2_000_000
OPEN_SECONDS = 1.0
LOADS = 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("cells", [100, FULL])
def test_a_large_report_is_small_and_opens_at_once(browser: Browser, tmp_path: Path, cells: int) -> None:
    out = write_large(tmp_path / "out", cells)
    began = time.perf_counter()
    file = write_html(out)
    written, size = time.perf_counter() - began, file.stat().st_size
    measured = [_times(browser, file.as_uri()) for _ in range(LOADS)]
    interactive, filtered, opened = map(min, zip(*measured, strict=True))  # other work of the machine adds to the rest
    print(
        f"{cells} cells: {size / 1e6:.2f} MB, written in {written:.1f} s, interactive after {interactive:.2f} s, "
        f"filtered in {filtered:.3f} s, a cell opened in {opened:.2f} s"
    )
    assert read_report(out).counts["differs"] + read_report(out).counts["conforms"] == cells
    assert size < (FULL_BYTES if cells == FULL else 2 * FULL_BYTES * cells / FULL)
    assert interactive < OPEN_SECONDS
    assert filtered + opened < OPEN_SECONDS
    assert browser.problems == []


def _times(browser: Browser, address: str) -> tuple[float, float, float]:
    """Seconds until the page can be used, until it is filtered, and until a cell is open."""
    browser.open(address)
    interactive = browser.run("performance.getEntriesByType('navigation')[0].domInteractive") / 1000
    began = time.perf_counter()
    browser.run("filter.value = 'tp2 is:fail'; applyFilter()")
    filtered = time.perf_counter() - began
    cell = browser.run("boxes.at(-1).dataset.cell")
    began = time.perf_counter()
    browser.run("location.hash = boxes.at(-1).hash")
    browser.wait(f"document.querySelector('.cell')?.dataset.cell === {json.dumps(cell)}")
    return interactive, filtered, time.perf_counter() - began


def test_large_run_has_judged_cells(tmp_path: Path) -> None:
    counts = read_report(write_large(tmp_path / "out", 50)).counts
    assert {state: count for state, count in counts.items() if count} == {"differs": 1, "conforms": 49}


def test_the_report_of_a_quick_run_is_small(tmp_path: Path) -> None:
    page = write_html(write_sample(tmp_path / "out"))
    assert page.stat().st_size / len(CELLS) < QUICK_BYTES / QUICK
