"""The site of all nights: what broke when, by which version, with the numbers of every stage."""

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from chromium import Browser
from nights import night

from conformance.cli import main as cli
from conformance.core.host import CHECKOUT
from conformance.results.baseline import Outcome
from conformance.results.history import Summary, open_history
from conformance.results.verdict import RunVerdict

EXAMPLE = CHECKOUT / "docs/example-site"
CELLS = [f"sft/llama/{backend}/dp2/exact" for backend in ("fsdp2", "deepspeed")]
FIRST = datetime(2026, 8, 1, 3, tzinfo=UTC)


def add(history: Path, day: int, cells: Mapping[str, Outcome] | None = None, **versions: str) -> None:
    """Adds a night to a history; cells that are not given conform with an error of 1e-14."""
    right = Outcome(state="conforms", seconds=2.0, second_class="", errors={"loss": 1e-15, "gradients": 1e-14})
    ended = {**dict.fromkeys(CELLS, right), **(cells or {})}
    states = {outcome.state for outcome in ended.values()}
    verdict: RunVerdict = (
        "differs" if "differs" in states else "incomplete" if "infrastructure" in states else "conforms"
    )
    with open_history(history, change=True) as opened:
        opened.add(
            Summary(
                selection="--profile quick",
                started=FIRST + timedelta(days=day),
                seconds=5.0,
                verdict=verdict,
                versions={"torch": "2.12.1", "commit": "aaaaaaaaaaaa", **versions},
                cells=ended,
            )
        )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of five nights: a rank dies, a commit breaks a cell, it is fixed, and a new torch makes errors grow."""
    root = tmp_path_factory.mktemp("nights")
    wrong = Outcome(state="differs", second_class="", errors={"loss": 2e-15, "gradients": 1.5})
    grown = Outcome(state="conforms", seconds=2.0, second_class="", errors={"loss": 1e-15, "gradients": 1e-12})
    add(root, 0)
    add(root, 1, {CELLS[1]: Outcome(state="infrastructure")})
    add(root, 2, {CELLS[0]: wrong}, commit="bbbbbbbbbbbb")
    add(root, 3, commit="cccccccccccc")
    add(root, 4, {CELLS[0]: grown}, commit="cccccccccccc", torch="2.13.0")
    assert cli.main(["publish", str(root), "--to", str(root / "site")]) == 0
    return root / "site"


def text_of(page: Path, start: str, end: str) -> str:
    """The words between two strings of a page."""
    found = page.read_text(encoding="utf-8").partition(start)[2].partition(end)[0]
    return " ".join(re.sub(r"<[^>]*>", " ", found).split())


def test_index_shows_each_cell_night_by_night(site: Path) -> None:
    index = site / "index.html"
    assert "It passes since 2026-08-04 03:00." in index.read_text()
    assert text_of(index, f'<tr id="cell-{CELLS[0]}">', "</tr>") == (
        f"{CELLS[0]} ✓ pass 14.0 ✓ pass 14.0 ✗ fail 150 % ✓ pass 14.0 ✓ pass 12.0 drift"
    )
    assert text_of(index, f'<tr id="cell-{CELLS[1]}">', "</tr>").endswith("flaky")
    runs = text_of(index, 'aria-label="Runs"', "</table>")
    assert "pass 1 flaky, 1 drifting torch 2.12.1 → 2.13.0" in runs
    assert "fail 1 newly failing, 1 fixed, 1 flaky commit aaaaaaaaaaaa → bbbbbbbbbbbb" in runs


def test_night_names_its_commit_and_the_suspects(site: Path) -> None:
    (page,) = site.glob("nights/2026-08-03-0300-bbbbbbbbbbbb-*.html")
    text = text_of(page, "<main>", "</main>")
    assert "Suspects, because they changed in between: commit aaaaaaaaaaaa → bbbbbbbbbbbb" in text
    assert f"newly failing: 1 cell {CELLS[0]} pass, now fail" in text
    assert f"{CELLS[0]} ✗ fail 1.5 gradients" in text


def test_cell_has_the_errors_of_each_stage_by_night(site: Path) -> None:
    page = site / "cells" / f"{CELLS[0].replace('/', '_')}.html"
    rows = text_of(page, "<tbody>", "</tbody>")
    assert rows.startswith("2026-08-05 03:00 ✓ pass 1e-15 1e-12 2.0 torch 2.12.1 → 2.13.0 2026-08-04")
    assert "2026-08-03 03:00 ✗ fail 2e-15 1.5 commit" in rows
    newest = json.loads((site / "nights.json").read_text())[-1]
    assert newest["cells"][CELLS[0]]["errors"] == {"loss": 1e-15, "gradients": 1e-12}
    assert f"drift: {CELLS[0]}: error of gradients 1e-12, at most 1e-14 before" in newest["since"]


def test_addresses_stay_when_a_night_is_added(tmp_path: Path) -> None:
    site = tmp_path / "site"
    pages = []
    for day in range(2):
        add(tmp_path, day)
        assert cli.main(["publish", str(tmp_path), "--to", str(site)]) == 0
        pages.append({file.relative_to(site) for file in site.rglob("*.html")})
    assert pages[0] < pages[1]
    index = (site / "index.html").read_text()
    assert all(f'"{page.as_posix()}' in index for page in pages[1] if page.name != "index.html")
    assert 'aria-label="backend parity: pass, 2026-08-02"' in (site / "badges/profile-quick.svg").read_text()


def test_links_of_the_site_lead_to_files(site: Path) -> None:
    for page in [*site.rglob("*.html"), *EXAMPLE.rglob("*.html")]:
        for link in re.findall(r'href="([^"#:]+)[#"]', page.read_text(encoding="utf-8")):
            if not page.name.endswith("-report.html"):
                assert (page.parent / link).is_file(), (page, link)


def test_reports_of_given_runs_are_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, history, site = night(tmp_path / "out", 14), tmp_path / "history", tmp_path / "site"
    assert cli.main(["report", str(out)]) == 0
    assert cli.main(["history", str(history), "--add", str(out)]) == 0
    assert cli.main(["publish", str(history), str(out), "--to", str(site)]) == 0
    (copy,) = site.glob("nights/*-report.html")
    assert copy.read_bytes() == (out / "report.html").read_bytes()
    assert f"nights/{copy.name}" in (site / "index.html").read_text()
    other = night(tmp_path / "other", 15)
    assert cli.main(["publish", str(history), str(other), "--to", str(site)]) == 2
    assert f"the history has no run of {other}; add it first" in capsys.readouterr().err
    assert cli.main(["publish", str(history), "--to", str(site), "--against", "board.json"]) == 2


def test_names_in_a_history_are_no_markup(tmp_path: Path) -> None:
    add(tmp_path, 0, {"<b>/../x/fsdp2/dp2/exact": Outcome(state="conforms", errors={"<i>": 1.0})}, commit="../<u>")
    assert cli.main(["publish", str(tmp_path), "--to", str(tmp_path / "site")]) == 0
    pages = [file.read_text() for file in (tmp_path / "site").rglob("*.html")]
    assert not [page for page in pages if re.search("<(b>/|i>|u>)", page)]


def test_example_has_a_regression_a_flaky_cell_and_versions() -> None:
    page = (EXAMPLE / "index.html").read_text(encoding="utf-8")
    assert "7 nights" in page
    for words in (
        "1 newly failing",
        "1 fixed",
        '<b class="suspect">flaky</b>',
        "torch 2.12.1 → 2.13.0",
        "-report.html",
    ):
        assert words in page, words
    assert sum(file.stat().st_size for file in EXAMPLE.rglob("*") if file.is_file()) < 400_000


@pytest.mark.slow
def test_example_fits_a_phone(browser: Browser) -> None:
    for page in (
        "index.html",
        *(f"{name}/{next((EXAMPLE / name).glob('*.html')).name}" for name in ("nights", "cells")),
    ):
        browser.open((EXAMPLE / page).as_uri(), width=390)
        assert browser.run("document.documentElement.scrollWidth") <= 390, page
        assert browser.problems == []
