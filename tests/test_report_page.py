"""The HTML page shows every cell with its state in words, draws what it claims to draw, and works offline."""

import base64
import gzip
import json
import math
import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Browser, find_chromium
from report_sample import CELLS, CONFORMS, CRASHED, DIFFERS, EXPECTED, edit, folder_of, write_sample

from reports import words
from reports.heatmap import locate
from reports.html import write_html
from reports.junit import write_junit
from reports.load import STATES, read_report
from reports.markdown import write_markdown

HOSTILE = '<script>alert("x")</script>'


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never written to by a test, but for the reports."""
    return write_sample(tmp_path_factory.mktemp("sample") / "out")


@pytest.fixture
def out(sample: Path, tmp_path: Path) -> Path:
    """A copy of the sample that a test may damage."""
    return Path(shutil.copytree(sample, tmp_path / "out"))


@pytest.fixture(scope="module")
def address(sample: Path) -> str:
    return write_html(sample).as_uri()


@pytest.fixture(scope="module")
def page(sample: Path, address: str) -> str:
    return (sample / "report.html").read_text(encoding="utf-8")


def section(page: str, cell: str) -> str:
    found = re.search(rf'<article[^>]* id="cell-{re.escape(cell)}".*?</article>', page, re.DOTALL)
    assert found
    return found[0]


def test_the_first_screen_has_the_verdict_every_count_and_every_cell(sample: Path, page: str) -> None:
    assert "<h1>2 cells of 22 differ</h1>" in page
    assert (
        f"Start with {DIFFERS}. First difference in gradients: model.layers.1.self_attn.o_proj.bias, at step 0" in page
    )
    assert "2 more cells gave no answer" in page
    for state, count in read_report(sample).counts.items():
        shown = rf'data-filter="is:{state}".*?<b>{count}</b><span>{STATES[state].name}</span>'
        assert re.search(shown, page, re.DOTALL)
    assert len(re.findall(r'<a class="box ', page)) == len(CELLS)


def test_the_matrix_shows_symbol_and_worst_ratio(sample: Path, page: str) -> None:
    for cell in read_report(sample).cells:
        box = re.search(rf'<a class="box {cell.state}" href="#cell-{re.escape(cell.id)}".*?</a>', page)
        assert box
        assert f'aria-hidden="true">{STATES[cell.state].symbol}</span>' in box[0]
        assert (f">{words.ratio(cell.worst.ratio)}</span>" if cell.worst else "</span></a>") in box[0]


def test_a_seed_or_a_planted_fault_has_its_own_place_in_the_matrix(out: Path) -> None:
    summary = json.loads((out / "summary.json").read_text())
    for extra in ("seed1", "fault-bias"):
        summary["cells"].append({"id": f"{CONFORMS}/{extra}", "state": "not_run", "folder": None})
    edit(out / "summary.json", cells=summary["cells"], counts={})
    page = write_html(out).read_text(encoding="utf-8")
    assert len(re.findall(r'<a class="box ', page)) == len(CELLS) + 2


def test_a_differing_cell_shows_where_it_starts_and_how_to_reproduce_it(page: str) -> None:
    text = section(page, DIFFERS)
    assert "Differs first: gradients, at step 0" in text
    assert "is the bias added once per tp rank?" in text
    assert "Also outside tolerance, and to be looked at after this: clipped update, weights after N steps." in text
    assert f"parity run --cells &#39;{DIFFERS}&#39;" in text
    assert text.count('<svg class="chart" ') == 4
    assert text.count('<table class="heat') == 3
    assert "equal on all ranks: 410 shards compared" in text


def test_an_error_of_exactly_zero_is_drawn_at_the_floor_and_said_so(page: str) -> None:
    text = section(page, CONFORMS)
    assert 'class="zero"' in text
    assert "error 0 (exactly equal)" in text
    assert "drawn at the floor" in text


def test_errors_that_are_not_numbers_are_drawn_and_not_green(out: Path) -> None:
    verdict = folder_of(out, DIFFERS) / "verdict.json"
    values = json.loads(verdict.read_text())
    for quantity in values["quantities"]:
        if quantity["tensor"] == "loss":
            quantity["observed"] = math.nan if quantity["step"] else math.inf
    edit(verdict, quantities=values["quantities"])
    text = section(write_html(out).read_text(encoding="utf-8"), DIFFERS)
    assert text.count('class="nan"') == 5
    assert "error NaN" in text


def test_an_infrastructure_failure_shows_the_ranks_last_lines_without_terminal_colours(page: str) -> None:
    text = section(page, CRASHED)
    assert "RuntimeError: NCCL communicator was aborted on rank 1." in text
    assert "rank-0" in text
    assert "\x1b" not in text


def test_a_known_difference_links_to_its_bug(page: str) -> None:
    assert '<a href="https://github.com/deepspeedai/DeepSpeed/issues/7747" rel="noreferrer">' in section(page, EXPECTED)


def test_nothing_in_the_folder_can_become_markup(out: Path) -> None:
    hostile = f"sft-packed/{HOSTILE.replace('/', '')}/fsdp2/dp2/fp32"
    summary = json.loads((out / "summary.json").read_text())
    entry = next(c for c in summary["cells"] if c["id"] == DIFFERS)
    verdict = json.loads((out / entry["folder"] / "verdict.json").read_text())
    for quantity in verdict["quantities"]:
        quantity["tensor"] += HOSTILE
    verdict |= {"cell": hostile, "reason": HOSTILE, "hint": HOSTILE, "reproduce": HOSTILE}
    edit(out / entry["folder"] / "verdict.json", **verdict)
    entry |= {"id": hostile, "reason": HOSTILE}
    edit(out / "summary.json", cells=summary["cells"], command=HOSTILE, environment={HOSTILE: HOSTILE})
    (folder_of(out, CRASHED) / "logs" / "rank-0.log").write_text(HOSTILE)
    page = write_html(out).read_text(encoding="utf-8")
    assert len(re.findall("<script", page)) == 2  # the page's own: data and code
    assert "alert(" in page
    assert HOSTILE not in write_markdown(out).read_text().replace(f"`{HOSTILE}`", "")
    assert any(case.get("name") == hostile for case in ET.parse(write_junit(out)).iter("testcase"))


def test_the_page_is_one_small_file_with_all_quantities_in_it(sample: Path, page: str) -> None:
    assert len(page.encode()) / len(CELLS) < 2_000_000 / 40
    assert not re.search(r'(src|href)="(?!#|https://github.com/|data:,)', page)
    packed = re.search(r'id="quantities">([^<]*)<', page)
    assert packed
    data = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    assert data["columns"] == ["cell", "stage", "tensor", "step", "observed", "allowed", "ratio"]
    assert len(data["data"]) == sum(len(c.quantities) for c in read_report(sample).cells)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("model.embed_tokens.weight", ("in", "embed")),
        ("model.layers.11.self_attn.q_proj.bias", ("11", "q bias")),
        ("model.layers.0.self_attn.q_norm.weight", ("0", "q norm")),
        ("model.layers.0.post_attention_layernorm.weight", ("0", "mlp norm")),
        ("model.layers.0.mlp.experts.3.up_proj.weight", ("0", "expert up")),
        ("model.norm.weight (missing)", ("out", "final norm")),
        ("lm_head.weight", ("out", "head")),
    ],
)
def test_parameters_are_placed_by_layer_and_kind(name: str, where: tuple[str, str]) -> None:
    assert locate(name) == where


# In a browser, offline


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    binary = find_chromium()
    if not binary:
        pytest.skip("no chromium on PATH; install one to test the page in a browser")
    running = Browser(binary, tmp_path_factory.mktemp("profile"))
    yield running
    running.close()


OPENED = "document.querySelector('.cell:target')?.dataset.cell ?? ''"
FOCUSED = "document.activeElement.dataset.find ?? document.activeElement.dataset.cell ?? document.activeElement.id"


def test_a_click_on_a_matrix_cell_opens_its_section_offline(browser: Browser, address: str) -> None:
    browser.open(address)
    assert browser.run("[...document.querySelectorAll('.cell')].every((cell) => !cell.checkVisibility())")
    browser.click(".box.differs")
    assert browser.run(OPENED) == DIFFERS
    assert browser.run("document.querySelector('.cell:target').checkVisibility()")
    assert (
        browser.run("document.querySelector('.cell:target .first h3').innerText")
        == "Differs first: gradients, at step 0"
    )
    assert browser.run("document.title").startswith(DIFFERS)
    assert browser.problems == []
    assert all(address.startswith(("file:", "about:", "data:")) for address in browser.requests)


def test_the_keyboard_filters_walks_opens_and_closes(browser: Browser, address: str) -> None:
    browser.open(address)
    browser.press("/")
    assert browser.run(FOCUSED) == "filter"
    for letter in "pangu exact":
        browser.press(letter)
    assert browser.run("document.getElementById('matches').value") == "2 of 22"
    browser.press("ArrowDown")
    assert browser.run(FOCUSED).startswith("sft-packed/pangu/fsdp2/dp2.tp2/exact")
    browser.press("ArrowDown")
    assert browser.run(FOCUSED).startswith("sft-packed/pangu/deepspeed/dp4/exact")
    browser.press("Enter")
    assert browser.run(OPENED) == "sft-packed/pangu/deepspeed/dp4/exact"
    browser.press("Escape")
    assert browser.run(OPENED) == ""
    assert browser.problems == []


def test_the_download_holds_every_quantity(browser: Browser, sample: Path, address: str) -> None:
    browser.open(address)
    assert browser.run("quantities().then(({ data }) => data.length)") == sum(
        len(c.quantities) for c in read_report(sample).cells
    )


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_never_scrolls_sideways(browser: Browser, address: str, width: int, dark: bool) -> None:
    for cell in ("", f"#cell-{DIFFERS}", f"#cell-{CRASHED}"):
        browser.open(address + cell, width=width, dark=dark)
        assert browser.run("document.documentElement.scrollWidth") <= width


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


@pytest.mark.parametrize("dark", [False, True])
def test_all_text_has_the_contrast_that_wcag_asks_for(browser: Browser, address: str, dark: bool) -> None:
    for cell in ("", f"#cell-{DIFFERS}", f"#cell-{EXPECTED}"):
        browser.open(address + cell, dark=dark)
        assert browser.run(CONTRAST) == []
