"""The controls of the report in a browser: filter, address, keyboard, touch, heads, views of curves."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cells import exhaustive
from chromium import Browser
from report_sample import (
    CELLS,
    CONFORMS,
    CRASHED,
    DIFFERS,
    EXPECTED,
    RESUMED,
    RL,
    RUN,
    STEPS,
    UNSUPPORTED,
    change,
    sample_cell,
)

from conformance.results.run_results import cell_summary, write_summary
from reports.html import write_html

pytestmark = pytest.mark.slow

STAGES = "scenario-2/pangu/megatron/dp2.tp2.pp2/fp32"
SHOWN = "boxes.filter((box) => box.checkVisibility({visibilityProperty: true})).map((box) => box.dataset.cell)"
TIP = "document.getElementById('tip')"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report whose matrix is higher than a window."""
    out, rng = tmp_path_factory.mktemp("wide") / "out", random.Random(0)
    cells = [f"scenario-{n}/pangu/{b}/dp{n}.tp2.seqpar/fp32" for n in range(2, 22) for b in ("fsdp2", "deepspeed")]
    entries = [sample_cell(out, cell, str(number), rng) for number, cell in enumerate([STAGES, *cells])]
    write_summary(out, replace(RUN, profile="wide"), [cell_summary(entry) for entry in entries])
    return write_html(out).as_uri()


def type_filter(browser: Browser, text: str) -> list[str]:
    """Type a filter and return the cells that are shown then."""
    browser.run(f"filter.value = {json.dumps(text)}; filter.dispatchEvent(new Event('input')); 0")
    found = browser.run(SHOWN)
    assert isinstance(found, list)
    return found


# Filter and address


def test_a_filter_hides_cells_and_the_rows_that_are_then_empty(browser: Browser, address: str) -> None:
    browser.open(address)
    wanted = [cell for cell in CELLS if "deepspeed" in cell and "bf16" in cell]
    assert sorted(type_filter(browser, "deepspeed bf16")) == sorted(wanted)
    rows = "[...document.querySelectorAll('#cells tbody tr')].filter((row) => row.checkVisibility()).length"
    assert browser.run(rows) == len(wanted)
    assert browser.run("document.getElementById('matches').value") == f"2 of {len(CELLS)}"
    assert len(type_filter(browser, "")) == len(CELLS)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("pangu -fsdp2 -is:conforms", lambda cell: cell == "sft-packed/pangu/megatron/tp2/fp32"),
        ("context attention", lambda cell: cell == UNSUPPORTED),
        ("o_proj gradients", lambda cell: cell == DIFFERS),
        ("advantages", lambda cell: cell == RL),
        ("-llama -pangu -qwen3", lambda cell: "gemma3" in cell),
        ("no-such-word", lambda _: False),
    ],
)
def test_a_filter_knows_what_is_not_wanted_and_searches_reasons_and_tensors(
    browser: Browser, address: str, text: str, wanted: Any
) -> None:
    browser.open(address)
    browser.wait("reasonOf.get(1).includes('o_proj')")
    assert sorted(type_filter(browser, text)) == sorted(filter(wanted, CELLS))


def test_the_address_keeps_the_filter_and_the_cell(browser: Browser, address: str) -> None:
    browser.open(address)
    type_filter(browser, "pangu -fp32")
    browser.run(f"location.hash = {json.dumps(f'#cell-{DIFFERS}')}")
    browser.wait("document.querySelector('.cell') !== null")
    shared = browser.run("location.href")
    assert shared.endswith(f"#cell-{DIFFERS}?filter=pangu%20-fp32")
    browser.open("about:blank")
    browser.open(shared)
    browser.wait("document.querySelector('.cell') !== null")
    assert browser.run("filter.value") == "pangu -fp32"
    assert set(browser.run(SHOWN)) == {cell for cell in CELLS if "pangu" in cell and "fp32" not in cell}
    assert browser.run("document.title").startswith(DIFFERS)
    assert browser.problems == []


def test_an_address_of_no_cell_is_said_so(browser: Browser, address: str) -> None:
    browser.open(f"{address}#cell-nope")
    browser.wait("document.getElementById('opened').textContent === 'This report has no cell nope.'")


# Keyboard


@pytest.mark.parametrize("text", ["", "fsdp2 tp2"])
def test_arrow_keys_reach_every_cell_that_is_shown(browser: Browser, address: str, text: str) -> None:
    browser.open(address)
    cells = type_filter(browser, text)
    reached = browser.run(
        """(() => {
          const boxes = [...document.querySelectorAll('#cells .box:not(.away)')];
          const seen = new Set([boxes[0]]), next = [boxes[0]];
          for (const box of next) for (const move of Object.values(MOVES)) {
            box.focus();
            step(box, ...move);
            const found = document.activeElement;
            if (!seen.has(found)) next.push(found);
            seen.add(found);
          }
          return [...seen].map((box) => box.dataset.cell);
        })()"""
    )
    assert sorted(reached) == sorted(cells)


# Touch and pointer


def test_tooltips_explain_layouts_and_stages(browser: Browser, address: str) -> None:
    browser.open_cell(address, DIFFERS)
    browser.hover(f"#cells .box[data-cell='{DIFFERS}']")
    browser.wait("document.getElementById('tip').textContent.includes('dp2: 2 data-parallel ranks')")
    assert "\ntp2: 2 tensor-parallel ranks" in browser.run("document.getElementById('tip').textContent")
    stages = browser.run("[...document.querySelectorAll('.stages th[scope=row]')].map((e) => e.dataset.tip ?? '')")
    assert all(stages)


def test_a_tap_reads_out_a_square_and_a_tap_elsewhere_hides_it(browser: Browser, address: str) -> None:
    browser.open_cell(address, DIFFERS, width=390)
    browser.tap(".heat .out")
    assert not browser.run(f"{TIP}.hidden")
    assert "model.layers.1.self_attn.o_proj.bias, at step" in browser.run(f"{TIP}.textContent")
    browser.tap(".cell h3")
    assert browser.run(f"{TIP}.hidden")
    browser.tap(".charts .hover rect")
    assert "step 0" in browser.run(f"{TIP}.textContent")
    assert browser.problems == []


# Heads


@pytest.mark.parametrize("width", [1024, 1440])
def test_names_of_backends_stay_when_the_page_is_scrolled(browser: Browser, wide: str, width: int) -> None:
    browser.open(wide, width=width, height=300)
    browser.run("document.querySelector('#cells tbody:nth-of-type(15)').scrollIntoView({behavior: 'instant'})")
    assert browser.run("document.querySelector('#cells thead th').getBoundingClientRect().top") == 0
    assert browser.run("document.documentElement.scrollWidth") <= width


# Views of curves

AXES = "[...document.querySelectorAll('.cell .charts figcaption')].map((e) => e.textContent)"


def test_printed_heads_cover_no_row(browser: Browser, wide: str) -> None:
    browser.open_cell(wide, STAGES)  # scrolled to the cell, below the matrix
    browser.page.emulate_media(media="print")
    covers = (
        "const head = document.querySelector('#cells thead th').getBoundingClientRect();"
        "[...document.querySelectorAll('#cells tbody tr')].filter((row) => {"
        "  const { top, bottom } = row.getBoundingClientRect(); return top < head.bottom - 2 && bottom > head.top + 2;"
        "}).length"
    )
    assert browser.run(covers) == 0


def test_errors_are_drawn_on_a_log_axis_a_linear_one_or_with_their_sign(browser: Browser, address: str) -> None:
    browser.open_cell(address, CONFORMS)
    assert browser.run(AXES)[1] == "loss: error relative, log axis"
    browser.click("[data-of=errors][data-choice=linear]")
    assert browser.run(AXES)[1] == "loss: error relative, linear axis"
    browser.click("[data-of=errors][data-choice=signed]")
    assert browser.run(AXES)[1] == "loss: difference relative, signed"
    tips = browser.run("[...document.querySelectorAll('.charts figure:nth-child(2) .hover')].map((e) => e.dataset.tip)")
    assert len(tips) == STEPS
    assert any(": -" in tip for tip in tips)
    assert any(": +" in tip for tip in tips)
    browser.click("[data-of=values][data-choice=log]")
    assert browser.run("document.querySelector('[data-choice=log][data-of=values]').ariaPressed") == "true"
    assert browser.problems == []


def test_steps_are_chosen_by_dragging_or_by_their_numbers(browser: Browser, address: str) -> None:
    browser.open_cell(address, CONFORMS)
    count = "document.querySelectorAll('.charts figure:first-child .hover').length"
    browser.hover(".charts .hover[data-step='1'] rect")
    browser.page.mouse.down()
    browser.hover(".charts .hover[data-step='3'] rect")
    browser.page.mouse.up()
    assert browser.run(count) == 3
    browser.page.locator(".views input").nth(0).fill("2")
    browser.page.keyboard.press("Tab")
    assert browser.run(count) == 2
    browser.click(".views .choice > button:last-child:not([data-of])")
    assert browser.run(count) == STEPS


def test_the_noise_floor_is_drawn_under_the_errors_and_told(browser: Browser, address: str) -> None:
    browser.open_cell(address, CONFORMS)
    assert browser.run("document.querySelectorAll('.cell .chart .noise').length") == 2
    assert "noise: a single process in fp32" in browser.run("document.querySelector('.cell').textContent")
    tips = browser.run("[...document.querySelectorAll('.charts figure:nth-child(2) .hover')].map((e) => e.dataset.tip)")
    assert all("noise " in tip for tip in tips)


# What a cell tells

ROWS = (
    "[...document.querySelectorAll('[aria-label=\"{}\"] tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))"
)


def test_boundaries_of_stages_and_cuts_over_tensor_parallel_ranks_are_marked(browser: Browser, wide: str) -> None:
    browser.open_cell(wide, STAGES)
    heads = "[...document.querySelectorAll('.maps figure:first-child tr:first-child th')]"
    names = browser.run(f"{heads}.map((head) => head.textContent)")
    assert names == ["", "in", "0", "1", "2", "out"]
    assert browser.run(f"{heads}.filter((head) => head.matches('.seam')).map((head) => head.textContent)") == ["2"]
    kinds = browser.run(
        "[...document.querySelectorAll('.maps figure:first-child tr th:first-child')].map((e) => e.innerText)"
    )
    assert {"q \u00f72", "o \u00f72", "q bias", "attn norm"} <= set(kinds)
    tips = browser.run("[...document.querySelectorAll('.maps figure:first-child td')].map((e) => e.dataset.tip ?? '')")
    assert any("in 2 pieces on ranks 0, 1, 2, 3, cut over 2 tensor-parallel ranks" in tip for tip in tips)


def test_denominators_evidence_memory_and_speed_are_told(browser: Browser, wide: str) -> None:
    browser.open_cell(wide, STAGES)
    first, *_ = browser.run(ROWS.format("Denominators"))
    assert first == ["0", "1000", "100 + 7 = 107", "101 + 7 = 108", "215", "811", "811"]
    ran = browser.run(ROWS.format("Observed"))
    assert ran[0] == ["dp2.tp2.pp2", "all_reduce", "2 ranks", "float32", "backward 0", "8", "3"]
    asked = browser.run(ROWS.format("Requested"))
    assert asked == [["\u2713 yes", "evidence"]]
    facts = browser.run("document.querySelector('.cell .meta').innerText")
    assert "peak 263 MiB of a rank" in facts
    assert "2000 tokens/s" in facts


# Reasons and findings


def test_an_infrastructure_reason_keeps_its_lines_and_is_said_once(browser: Browser, out: Path) -> None:
    reason = "rank 1 raised during 'setup': RuntimeError: aborted\n\nTraceback (most recent call last):\n  a line of it"
    change(out, CRASHED, verdict={"reason": reason})
    browser.open_cell(write_html(out).as_uri(), CRASHED)
    assert browser.run("document.querySelector('.cell .reason').textContent") == reason.splitlines()[0]
    assert "(most recent call last):\n  a line" in browser.run("document.querySelector('.cell .more').innerText")
    assert browser.run("document.querySelector('.attention').textContent.includes('a line of it')") is False
    assert browser.run("[...document.querySelectorAll('.logs details')].some((log) => log.open)") is False
    link = browser.run("document.querySelector('.logs summary a').getAttribute('href')")
    assert (out / link).is_file()


def test_a_finding_that_a_reason_names_is_in_the_page(browser: Browser, out: Path) -> None:
    change(out, EXPECTED, verdict={"reason": "rounded masters: docs/findings/deepspeed-rounded-masters.md"})
    browser.open_cell(write_html(out).as_uri(), EXPECTED)
    browser.click(".cell .reason a")
    browser.wait("document.querySelector('#finding-deepspeed-rounded-masters').open")
    assert browser.run("document.querySelector('.cell').dataset.cell") == EXPECTED
    assert "DeepSpeed" in browser.run("document.querySelector('#finding-deepspeed-rounded-masters pre').textContent")
    assert browser.problems == []


# How it looks


@pytest.mark.parametrize(
    ("width", "dark"), [(390, False), exhaustive(390, True), exhaustive(1024, True), exhaustive(1440, False)]
)
def test_no_page_scrolls_sideways(browser: Browser, address: str, wide: str, width: int, dark: bool) -> None:
    browser.open(wide, width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    for cell in (DIFFERS, CRASHED, RESUMED, RL, EXPECTED):
        browser.open_cell(address, cell, width=width, dark=dark)
        browser.run("document.querySelectorAll('.cell details').forEach((part) => (part.open = true))")
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.problems == []
