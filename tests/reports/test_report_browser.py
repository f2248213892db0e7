"""The report in a browser, offline: cells are unpacked and drawn when they are opened, and draw what they claim to."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from cells import exhaustive
from chromium import Browser
from report_sample import (
    CELLS,
    CONFORMS,
    CRASHED,
    CRITIC,
    DIFFERS,
    EXPECTED,
    PARTLY,
    RESUMED,
    RL,
    STEPS,
    TARGETS,
    WRONG_ROW,
    change,
    entries_of,
    entry_of,
    folder_of,
)

from conformance.results.verdict import BARS, margin
from conformance.spec.objectives import Ppo, all_observables
from reports.html import PER_BLOCK, write_html
from reports.wording import number, share, tensor_at_step

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=alert(1)>"
OPENED = "document.querySelector('.cell')?.dataset.cell ?? ''"
FOCUSED = "document.activeElement.dataset.find ?? document.activeElement.dataset.cell ?? document.activeElement.id"
TEXT = "document.querySelector('.cell').textContent"


# Reading


def test_a_click_on_a_matrix_cell_opens_it_offline(browser: Browser, address: str) -> None:
    browser.open(address)
    assert browser.run(OPENED) == ""
    browser.click(".box.differs")
    browser.wait(f"({OPENED}) === {json.dumps(DIFFERS)}")
    assert browser.text(".first h3") == "First difference: gradients, at step 0 in 1 of 42 numbers"
    assert browser.run("document.title").startswith(DIFFERS)
    assert browser.run("document.querySelector('.box[aria-current=\"true\"]').dataset.cell") == DIFFERS
    assert browser.problems == []
    assert all(request.startswith(("file:", "about:", "data:")) for request in browser.requests)


def test_an_address_names_a_cell_and_leads_to_its_neighbours(browser: Browser, address: str) -> None:
    browser.open_cell(address, DIFFERS)
    number = CELLS.index(DIFFERS)
    browser.click(".cell nav a:nth-child(2)")
    browser.wait(f"({OPENED}) === {json.dumps(CELLS[number + 1])}")
    browser.click(".cell nav a:nth-child(1)")
    browser.wait(f"({OPENED}) === {json.dumps(DIFFERS)}")
    assert browser.count(".cell") == 1


def test_the_keyboard_filters_walks_opens_and_closes(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.press("/")
    assert browser.run(FOCUSED) == "filter"
    for letter in "pangu exact":
        browser.press(letter)
    assert browser.run("document.getElementById('matches').value") == "2 of 25"
    browser.press("ArrowDown")
    assert browser.run(FOCUSED).startswith("sft-packed/pangu/fsdp2/dp2.tp2/exact")
    browser.press("ArrowRight")
    assert browser.run(FOCUSED).startswith("sft-packed/pangu/deepspeed/dp4/exact")
    browser.press("Enter")
    browser.wait(f"({OPENED}) === 'sft-packed/pangu/deepspeed/dp4/exact'")
    browser.wait(f"({FOCUSED}) === 'sft-packed/pangu/deepspeed/dp4/exact'")
    browser.press("Escape")
    browser.wait(f"({OPENED}) === ''")
    assert browser.run(FOCUSED).startswith("sft-packed/pangu/deepspeed/dp4/exact")
    browser.press("/")
    browser.press("Enter")
    browser.wait(f"({OPENED}) === 'sft-packed/pangu/fsdp2/dp2.tp2/exact'")
    assert browser.problems == []


def test_the_command_that_reproduces_a_cell_can_be_copied(browser: Browser, address: str) -> None:
    browser.open_cell(address, DIFFERS)
    again = f"parity run --cells '{DIFFERS}' --out out-again"
    assert browser.texts(".command code") == [f"parity bisect '{DIFFERS}'", again, again.replace("/fp32", "/exact")]
    browser.click("[data-copy]")
    browser.wait("document.querySelector('[data-copy]').textContent !== 'Copy'")


def test_without_a_script_a_square_leads_to_the_reason_of_its_cell(browser: Browser, address: str) -> None:
    browser.open(f"{address}#cell-{CRASHED}", scripts=False)
    assert browser.run(OPENED) == ""
    assert "NCCL communicator was aborted" in browser.text("li:target")
    assert "A script draws curves" in browser.text("noscript")


# What is drawn


def test_a_differing_cell_is_drawn_with_curves_heat_maps_and_what_to_look_at_next(
    browser: Browser, address: str
) -> None:
    browser.open_cell(address, DIFFERS)
    shown = browser.run(TEXT)
    assert "is the bias added once per tp rank?" in shown
    assert "Also outside tolerance, perhaps as a consequence: clipped update, weights after N steps." in shown
    assert browser.count(".charts svg:not(:has(.own))") == 4
    assert browser.count(".heat") == 3
    assert "Exactly equal in every parameter: weights." in shown
    assert (
        browser.run("[...document.querySelectorAll('.heat .out')].map((e) => e.closest('tr').cells[0].innerText)")
        == ["o bias"] * 3
    )
    assert all("%" in text for text in browser.texts(".heat .out, .stages .square.out"))
    assert not any("%" in text for text in browser.texts(".heat td:not(.out)"))
    assert browser.problems == []


def test_stages_are_in_causal_order_and_the_first_that_differs_is_marked(
    browser: Browser, sample: Path, address: str
) -> None:
    browser.open_cell(address, DIFFERS)
    rows = "[...document.querySelectorAll('.stages tbody tr')]"
    names = [name.removesuffix(" first") for name in browser.run(f"{rows}.map((row) => row.cells[0].innerText)")]
    assert names == list(entry_of(sample, DIFFERS).stages)
    assert browser.text(".stages .origin th") == "gradients first"
    verdict = entry_of(sample, DIFFERS).verdict
    margins = browser.run(f"{rows}.map((row) => row.querySelector('.least').innerText)")
    assert margins == [margin(verdict.worst[name].ratio) for name in names]
    colours = browser.run(f"{rows}.map((row) => [...row.querySelectorAll('.square')].map((one) => one.className))")
    red = {(name, at - 1) for name, row in zip(names, colours, strict=True) for at, c in enumerate(row) if "out" in c}
    first, *_ = findings = verdict.findings
    assert red == {(found.stage, found.step) for found in findings}
    assert browser.run("document.querySelector('.stages .begins').dataset.tip").startswith(f"{tensor_at_step(first)}\n")


def test_every_observable_that_asks_for_it_has_a_curve_and_an_error(browser: Browser, address: str) -> None:
    browser.open_cell(address, CRITIC)
    titles = browser.run("[...document.querySelectorAll('section > .charts figcaption')].map((e) => e.firstChild.data)")
    drawn = ("loss", "gradient norm", "critic gradient norm")
    assert titles == [title for name in drawn for title in (name, f"{name}: error")]
    maps = browser.run("[...document.querySelectorAll('.maps figcaption')].map((e) => e.innerText)")
    plain = ["gradients", "clipped update", "weights after N steps"]
    assert maps == [*plain, *(f"critic {name}" for name in plain)]


STRIPS = """[...document.querySelectorAll('.strip')].map((strip) => {
  const [name, step] = [...strip.closest('tr').cells].map((cell) => cell.textContent);
  return [name, step, [...strip.children].map((bin) => [bin.classList[0], bin.textContent, bin.dataset.tip])];
})"""
PANELS = "[...document.querySelectorAll('.cell summary h3')].map((e) => e.firstChild.data.trim())"


def test_the_strip_of_a_wrong_advantage_is_red_at_the_tokens_of_its_response(browser: Browser, address: str) -> None:
    browser.open_cell(address, RL)
    name, red = "", {}
    for label, step, bins in browser.run(STRIPS):
        name = label or name
        red[name, int(step)] = {tip.splitlines()[1] for shade, _, tip in bins if shade >= "h5"}
    wrong = {f"2 tokens from row {WRONG_ROW}, target {target}" for target in range(0, TARGETS, 2)}
    assert {key: found for key, found in red.items() if found} == {("advantages", step): wrong for step in (0, 1)}
    assert len({name for name, _ in red}) == len(
        [o for o in all_observables(Ppo(kl_loss_coef=0.1)) if o.kind == "rows"]
    )
    worst = browser.run("document.querySelector('.strips .over').closest('tr').lastChild.innerText")
    assert worst == f"row {WRONG_ROW}, target 2"
    assert browser.problems == []


@pytest.mark.exhaustive
def test_tokens_that_are_not_numbers_are_drawn_as_such(browser: Browser, out: Path) -> None:
    verdict = entry_of(out, RL).verdict
    strip = next(strip for strip in verdict.strips if strip.stage == "values")
    broken = replace(strip, errors=(math.nan, math.inf, *strip.errors[2:]), max_abs=math.nan)
    quantities = tuple(
        replace(q, observed=math.inf) if (q.tensor, q.step) == (strip.tensor, strip.step) else q
        for q in verdict.quantities
    )
    change(out, RL, verdict={"quantities": quantities, "strips": (broken,)})
    browser.open_cell(write_html(out).as_uri(), RL)
    [(_, _, bins)] = browser.run(STRIPS)
    assert [bins[0][:2], bins[1][:2]] == [["h9", "N"], ["h9", "∞"]]
    assert [tip.splitlines()[-1] for _, _, tip in bins[:2]] == ["NaN", "infinite"]
    assert not any(text for _, text, _ in bins[2:])
    assert "N NaN" in browser.text(".cell section:has(.strip)")
    assert browser.problems == []


def test_curves_of_policy_and_critic_are_in_a_panel_of_their_own(browser: Browser, address: str) -> None:
    browser.open_cell(address, RL)
    titles = "[...document.querySelectorAll('details:not(:has(.own)) .charts figcaption')].map((e) => e.innerText)"
    found = browser.run(titles)
    assert len(found) == 2 * 9
    assert "clip fraction (pg_clipfrac) per step" in found
    assert (
        "KL to the old policy (ppo_kl): error against its own tokens; dashed: against the reference, log axis" in found
    )
    assert browser.count("details .charts svg .mark, details .charts svg .zero") == 2 * 9 * STEPS
    assert browser.problems == []


def test_distributions_show_tokens_of_both_and_their_differences(browser: Browser, address: str) -> None:
    browser.open_cell(address, RL)
    names = [o.key for o in all_observables(Ppo(kl_loss_coef=0.1)) if o.kind == "rows"]
    panel = "details:has(.own)"
    assert [text.split()[0] for text in browser.texts(f"{panel} figcaption")] == names
    assert browser.count(f"{panel} rect.own") == browser.count(f"{panel} rect.reference") == BARS * len(names)
    assert browser.text(f"{panel} figure .note") == "difference: p50 1e-9, p99 2e-9, max 3e-9"
    assert " tokens are masked: prompts, padding" in browser.text(f"{panel} > .note")
    cell = """{ strips: [{ tensor: "advantage", spread: [-1, 1] }],
        oracle: { series: { values: new Map([["pg_loss", new Map([[0, 1e-9], [1, 0.2]])]]) } } }"""
    assert str(browser.run(f"zeroLoss({cell})")).startswith("The policy loss is 0 by construction at step 0: ")
    assert not browser.run(f"zeroLoss({cell.replace('1e-9', '0.1')})")


def test_a_number_held_against_its_tokens_shows_both_errors(browser: Browser, address: str) -> None:
    browser.open_cell(address, RL)
    tips = browser.run("[...document.querySelectorAll('figure:has(.apart) .hover')].map((e) => e.dataset.tip)")
    assert tips
    assert all("\nagainst the reference " in tip for tip in tips)


def test_what_a_cell_has_not_got_has_no_panel(browser: Browser, address: str) -> None:
    for cell, found in {
        RL: {"Policy and critic", "Where in the batch"},
        CONFORMS: {"Where in the batch"},
        PARTLY: set(),
    }.items():
        browser.open_cell(address, cell)
        assert {"Policy and critic", "Where in the batch"} & set(browser.run(PANELS)) == found


def test_the_curve_of_a_cell_with_phases_says_where_the_next_begins(browser: Browser, address: str) -> None:
    browser.open_cell(address, RESUMED)
    assert browser.count(".chart .phase") == 4
    assert "the next phase begins" in browser.run(TEXT)
    heads = ".config thead th"  # of keys that differ, and of others
    assert browser.texts(heads) == ["key", "phase 0", "phase 1", "reference"] * 2
    browser.open_cell(address, CONFORMS)
    assert browser.count(".chart .phase") == 0
    assert browser.texts(heads) == ["key", "this cell", "reference"] * 2


def test_an_error_of_exactly_zero_is_drawn_at_the_floor_and_said_so(browser: Browser, address: str) -> None:
    browser.open_cell(address, CONFORMS)
    assert browser.count(".charts .zero") == 1
    assert "error 0 (exactly equal)" in browser.run("document.querySelectorAll('.hover')[8].dataset.tip")
    assert "drawn at the bottom" in browser.run(TEXT)


def test_errors_that_are_not_numbers_are_drawn_and_not_green(browser: Browser, out: Path) -> None:
    losses = {0: math.inf, 1: math.nan, 2: math.nan, 3: math.nan, 4: math.nan}
    quantities = tuple(
        replace(q, observed=losses[q.step]) if q.tensor == "loss" else q
        for q in entry_of(out, DIFFERS).verdict.quantities
    )
    change(out, DIFFERS, verdict={"quantities": quantities})
    browser.open_cell(write_html(out).as_uri(), DIFFERS)
    assert browser.count(".chart .nan") == 5
    assert "error NaN" in browser.run("document.querySelectorAll('.hover')[6].dataset.tip")
    assert browser.text(".stages .origin th") == "loss first"
    assert browser.problems == []


def test_an_infrastructure_failure_shows_the_ranks_last_lines(browser: Browser, address: str) -> None:
    browser.open_cell(address, CRASHED)
    assert "RuntimeError: NCCL communicator was aborted on rank 1." in browser.text(".logs")
    assert "rank-0" in browser.text(".logs")


def test_a_damaged_record_is_named_in_a_cell_that_differs(browser: Browser, out: Path) -> None:
    (folder_of(out, DIFFERS) / "legs/0/record/record.jsonl").unlink()
    browser.open_cell(write_html(out).as_uri(), DIFFERS)
    assert "The record of this cell is damaged:" in browser.run(TEXT)


def test_what_was_recorded_is_shown_as_text(browser: Browser, out: Path) -> None:
    entry = entry_of(out, DIFFERS)
    quantities = tuple(replace(q, tensor=q.tensor + HOSTILE, hint=HOSTILE) for q in entry.verdict.quantities)
    verdict = {"quantities": quantities, "reason": HOSTILE}
    change(out, DIFFERS, verdict=verdict, reproduce=HOSTILE)
    browser.open_cell(write_html(out).as_uri(), DIFFERS)
    assert browser.run(TEXT).count(HOSTILE) > 10
    assert browser.count("img") == 0
    assert browser.problems == []


def test_no_script_but_the_pages_own_can_run(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.run("document.body.append(make('script', 'window.ran = true')), 0")
    assert browser.run("window.ran ?? false") is False
    assert any("Content Security Policy" in problem for problem in browser.problems)


def test_a_block_that_cannot_be_unpacked_is_said_so(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.run(f"document.getElementById('block-{CELLS.index(CONFORMS) // PER_BLOCK}').textContent = 'AAAA'")
    browser.run(f"location.hash = {json.dumps(f'#cell-{CONFORMS}')}")
    browser.wait(f"({OPENED}) === {json.dumps(CONFORMS)}")
    assert "The details of this cell cannot be drawn" in browser.run(TEXT)


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_the_download_holds_every_quantity(browser: Browser, sample: Path, address: str, kind: str) -> None:
    browser.open(address)
    found = browser.run(f"exported('{kind}', [...boxOf.keys()]).then((parts) => parts.join(''))")
    held = [(entry.cell, q) for entry in entries_of(sample) for q in entry.verdict.quantities]
    if kind == "csv":
        lines = found.splitlines()
        assert lines[0] == "cell,stage,tensor,step,observed,allowed,ratio"
        assert len(lines) == 1 + len(held)
    else:
        rows = {(r["cell"], r["stage"], r["tensor"], r["step"]): r for r in json.loads(found)}
        assert len(rows) == len(held)
        for cell, q in held:
            row = rows[cell, q.stage, q.tensor, q.step]
            assert [row["observed"], row["ratio"]] == pytest.approx([q.observed, q.ratio], rel=1e-3, abs=0)


def test_the_script_writes_numbers_as_the_other_reports_do(browser: Browser, address: str) -> None:
    browser.open(address)
    rng = random.Random(0)
    values = [10 ** rng.uniform(-16, 9) for _ in range(300)]
    values += [0.0, 1.0, 0.9999, 1.0001, 0.0049, 0.995, 9.96, 999.96, 9999.4, 9999.6, 99999.7, 1e-3, 2e5]
    script = f"{json.dumps(values)}.map((value) => [number(value), margin(value)])"
    assert browser.run(script) == [[number(value), margin(value)] for value in values]
    assert browser.run(f"{json.dumps(values)}.map(share)") == [share(value) for value in values]
    special = "[NaN, Infinity].map((value) => [number(value), margin(value)])"
    assert browser.run(special) == [[number(v), margin(v)] for v in (math.nan, math.inf)]


# How it looks


CONTRAST = """(() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const colour = getComputedStyle(element).backgroundColor;
    return /^rgba.* 0\\)$/.test(colour) && element.parentElement ? ground(element.parentElement) : colour;
  };
  const seen = [...document.querySelectorAll("body *")].filter(
    (e) => e.checkVisibility({ checkOpacity: true }) && !e.matches(".none *, .empty, svg *") &&
      [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()));
  return seen.map((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), `${e.tagName}.${e.className}: ${e.textContent.trim().slice(0, 40)}`];
  }).filter(([ratio]) => ratio < 4.5).map(([ratio, text]) => `${ratio.toFixed(2)} ${text}`);
})()"""


@pytest.mark.parametrize("dark", [False, exhaustive(True)])
def test_all_text_has_the_contrast_that_wcag_asks_for(browser: Browser, address: str, dark: bool) -> None:
    for cell in (DIFFERS, EXPECTED, CRASHED, RL):
        browser.open_cell(address, cell, dark=dark)
        assert browser.run(CONTRAST) == []
