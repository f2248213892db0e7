"""What docs/reading-a-report.md says that a report has, R1 to R23: seen in a browser, on a phone and on wide screens.

Each row's words in italics are looked for where the row says that they are, and what else it names beside them. How
these parts behave is in the other tests of the reports.
"""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from chromium import Browser
from nights import night
from report_sample import CRASHED, DIFFERS, LATE, RL, rewrite, sample_cell, write_sample
from side_sample import write_run

from conformance.cli import main as cli
from conformance.core.plugins import write_reports
from reports.html import write_html

ROOT = Path(__file__).parents[2]
FAULT = "sft/pangu/fsdp2/dp2/fp32/fault-lost-bias"
ENDS = ("dp2", "tp2", "dp2-to-tp2", "tp2-to-dp2")
HANDED = [f"sft-warmup/qwen3/megatron/{ends}/exact/state" for ends in ENDS]
SAMPLE, NIGHT, OTHERS, SIDES = "sample", "night", "others", "sides"
# Of each row the pages, and the cells there that are opened, in which it is to be seen; and selectors with a text.
WHERE: dict[str, tuple[tuple[str, str], ...]] = {
    **{"R1": ((SAMPLE, ""),), "R2": ((SAMPLE, ""),), "R3": ((SAMPLE, ""),), "R4": ((SAMPLE, DIFFERS), (SIDES, ""))},
    **{"R5": ((SAMPLE, DIFFERS),), "R6": ((SAMPLE, DIFFERS),), "R7": ((SAMPLE, DIFFERS),), "R8": ((SAMPLE, DIFFERS),)},
    **{"R9": ((SAMPLE, RL),), "R10": ((SAMPLE, DIFFERS),), "R11": ((OTHERS, ""),), "R13": ((SAMPLE, ""),)},
    **{"R14": ((SAMPLE, DIFFERS),), "R15": ((SAMPLE, DIFFERS),), "R16": ((NIGHT, ""),), "R17": ((NIGHT, ""),)},
    **{"R18": ((SAMPLE, CRASHED),), "R19": ((SAMPLE, CRASHED),), "R20": ((SAMPLE, ""),), "R22": ((OTHERS, ""),)},
    **{"R12": ((SAMPLE, DIFFERS), (SIDES, "")), "R21": (), "R23": ((SAMPLE, DIFFERS),)},
}
BESIDE: dict[str, tuple[tuple[str, str], ...]] = {
    "R1": ((".banner h1", "differ"), (".counts", "infrastructure failure")),
    "R2": (("#cells", "sft-packed"),),
    "R3": (*((f".count.{state} .symbol", symbol) for state, symbol in (("differs", "✗"), ("conforms", "✓"))),),
    "R5": ((".cell", "signed"), (".cell", "noise floor")),
    "R6": ((".first .said", "o_proj.bias is"),),
    "R8": (("table.stages", "clipped update"), ("table.stages", "weights after N steps")),
    "R13": (("footer dl", "torch"),),
    "R14": ((".command code", "parity run"), (".command button", "Copy")),
    "R15": (("table.stages + .note", "Allowed, by rule"),),
    "R16": ((".earlier", "newly differing"),),
    "R17": ((".trend", "conform"),),
    "R18": ((".cell .reason", "rank 1 of 2 raised RuntimeError in setup"), (".logs pre", "")),
    "R19": ((".logs summary a", "whole file"),),
    "R20": (("[data-download=csv]", "CSV"), ("[data-download=json]", "JSON")),
    "R22": ((".score table", "lost-bias"),),
    "R23": ((".cell .meta", " s"), (".cell .meta", "tokens/s")),
}
FILES = {"badge.svg", "report.md", "junit.xml", "ctrf.json", "badge.json", "summary.json", "side_by_side.json"}
VISIBLE = """([selector, text]) => {
  const found = [...document.querySelectorAll(selector)].find((element) =>
    element.checkVisibility({visibilityProperty: true}) && element.innerText.includes(text));
  if (!found) return "is not there";
  found.scrollIntoView({block: "center", inline: "center", behavior: "instant"});
  const box = found.getBoundingClientRect();
  const scrolled = found.closest(".scroll, pre, .charts");
  if (!box.width || !box.height) return "has no size";
  return !scrolled && (box.left < -1 || box.right > document.documentElement.clientWidth + 1) ? "is cut off" : "";
}"""


def rows() -> dict[str, list[str]]:
    """Of each row of the table in the documentation the words in italics, which are titles."""
    text = (ROOT / "docs/reading-a-report.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| (R\d+) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    return {row: re.findall(r"(?<!\*)\*([^*]+)\*(?!\*)", where) for row, where in found}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The addresses of the pages."""
    root = tmp_path_factory.mktemp("required")
    write_sample(root / "sample")
    first = night(root / "first", 14)
    assert cli.main(["history", str(root / "history"), "--add", str(first)]) == 0
    second = night(root / "second", 15, against=root / "history", wrong=[DIFFERS, LATE])
    planted, rng = root / "planted", random.Random(0)
    names = (FAULT, FAULT.rpartition("/")[0], *HANDED)
    cells = [sample_cell(planted, cell, str(number), rng) for number, cell in enumerate(names)]
    verdict = cells[0].verdict
    wrong = tuple(replace(q, observed=2 * q.allowed or 1.0) for q in verdict.quantities)
    cells[0] = replace(cells[0], verdict=replace(verdict, state="differs", quantities=wrong, strips=()))
    rewrite(planted, cells)
    made = {SAMPLE: root / "sample", NIGHT: second, OTHERS: planted, SIDES: write_run(root / "sides")}
    return {name: write_html(out).as_uri() for name, out in made.items()}


def test_each_row_of_the_table_is_looked_for() -> None:
    assert list(rows()) == [f"R{number}" for number in range(1, 24)]
    assert WHERE.keys() == rows().keys()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1024, False), (1440, True)])
def test_every_requirement_is_seen_where_the_table_says(
    browser: Browser, pages: dict[str, str], width: int, dark: bool
) -> None:
    titles, problems = rows(), []
    for page, cell in dict.fromkeys(place for places in WHERE.values() for place in places):
        browser.open(pages[page] + (f"#cell-{cell}" if cell else ""), width=width, dark=dark)
        if cell:
            browser.wait(f"document.querySelector('.cell')?.dataset.cell === {json.dumps(cell)}")
        browser.run("document.querySelectorAll('details').forEach((part) => (part.open = true))")
        if page == SIDES:
            browser.wait("document.querySelector('.side .chart') !== null")
        for row in (row for row, places in WHERE.items() if (page, cell) in places):
            here = [] if len(WHERE[row]) > 1 else BESIDE.get(row, ())
            elsewhere = "Configuration of the members" if page == SAMPLE else "Resolved configuration and environment"
            looked = [("h2, h3, table.stages th", title) for title in titles[row] if title != elsewhere]
            for selector, words in (*looked, *here):
                if wrong := browser.page.evaluate(VISIBLE, [selector, words]):
                    problems.append(f"{row}: {words!r} in {selector} of {page} {cell} {wrong}")
        assert browser.problems == []
    assert "\n".join(problems) == ""


@pytest.mark.exhaustive
def test_all_files_of_r1_and_r21_are_written(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    write_reports(out)
    assert {file.name for file in out.iterdir()} >= FILES
