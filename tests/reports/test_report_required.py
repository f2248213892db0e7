"""The requirements R1 to R23 of a report are visible in a browser, on a phone and on wide screens.

The headings of each requirement, and other parts of the page that show it, have to be visible. The other tests of
reports test how these parts behave.
"""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from chromium import Browser
from nights import night
from report_sample import CRASHED, DIFFERS, LATE, RL, rewrite, sample_cell, write_sample
from side_sample import write_run

from conformance.cli import main as cli
from conformance.core.packages import write_reports
from reports.html import write_html

FAULT = "sft/pangu/fsdp2/dp2/fp32/fault-lost-bias"
ENDS = ("dp2", "tp2", "dp2-to-tp2", "tp2-to-dp2")
HANDED = [f"sft-warmup/qwen3/megatron/{ends}/exact/state" for ends in ENDS]
SAMPLE, NIGHT, OTHERS, SIDES = "sample", "night", "others", "sides"
HEADS = "h2, h3"
# What shows the requirements (docs/explanations/report.md): by page and opened cell, selectors with a text.
SEEN: dict[tuple[str, str], dict[str, tuple[tuple[str, str], ...]]] = {
    (SAMPLE, ""): {
        "R1": ((".banner h1", "fail"), (".counts", "infrastructure failure")),
        "R2": ((HEADS, "Every cell"), ("#cells", "sft-packed")),
        "R3": ((".count.differs .symbol", "✗"), (".count.conforms .symbol", "✓")),
        "R13": ((HEADS, "This run"), ("footer dl", "torch")),
        "R20": (("[data-download=csv]", "CSV"), ("[data-download=json]", "JSON")),
    },
    (SAMPLE, DIFFERS): {
        "R4": ((HEADS, "Curves"),),
        "R5": ((".cell", "signed"), (".cell", "noise: ")),
        "R6": ((HEADS, "First difference"), (".first .said", "o_proj.bias is")),
        "R7": ((HEADS, "Where in the network"),),
        "R8": (("table.stages th", "clipped update"), ("table.stages th", "weights after N steps")),
        "R10": ((HEADS, "Denominators"),),
        "R12": ((HEADS, "Resolved configuration and environment"),),
        "R14": ((HEADS, "What to run next"), (".command code", "parity run"), (".command button", "Copy")),
        "R15": ((HEADS, "Stages"), (".scroll:has(table.stages) + .note", "Tolerance"), (".note a", "Why")),
        "R23": ((".cell .meta", " s"), (".cell .meta", "tokens/s")),
    },
    (SAMPLE, RL): {
        "R9": ((HEADS, "Policy and critic"), (HEADS, "Distributions over tokens"), (HEADS, "Where in the batch")),
    },
    (SAMPLE, CRASHED): {
        "R18": ((".cell .reason", "rank 1 of 2 raised RuntimeError in setup"), (".logs pre", "")),
        "R19": ((HEADS, "Last lines of each rank"), (".logs summary a", "whole file")),
    },
    (NIGHT, ""): {
        "R16": ((HEADS, "Since earlier runs"), (".earlier", "newly failing")),
        "R17": ((HEADS, "Since earlier runs"), (".trend", "pass")),
    },
    (OTHERS, ""): {
        "R11": ((HEADS, "Resume"),),
        "R22": ((HEADS, "Mutation score"), (".score table", "lost-bias")),
    },
    (SIDES, ""): {"R4": ((HEADS, "Curves"),), "R12": ((HEADS, "Configuration of the members"),)},
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1024, False), (1440, True)])
def test_every_requirement_is_seen_where_the_table_says(
    browser: Browser, pages: dict[str, str], width: int, dark: bool
) -> None:
    problems = []
    for (page, cell), rows in SEEN.items():
        browser.open(pages[page] + (f"#cell-{cell}" if cell else ""), width=width, dark=dark)
        if cell:
            browser.wait(f"document.querySelector('.cell')?.dataset.cell === {json.dumps(cell)}")
        browser.run("document.querySelectorAll('details').forEach((part) => (part.open = true))")
        if page == SIDES:
            browser.wait("document.querySelector('.side .chart') !== null")
        for row, selector, words in ((row, *shown) for row, places in rows.items() for shown in places):
            if wrong := browser.page.evaluate(VISIBLE, [selector, words]):
                problems.append(f"{row}: {words!r} in {selector} of {page} {cell} {wrong}")
        assert browser.problems == []
    assert "\n".join(problems) == ""


@pytest.mark.exhaustive
def test_all_files_of_r1_and_r21_are_written(tmp_path: Path) -> None:
    out = write_run(tmp_path / "out")
    write_reports(out)
    assert {file.name for file in out.iterdir()} >= FILES
