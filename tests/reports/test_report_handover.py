"""Cells that save here and load there are shown as tables from row to column, in the page and in Markdown."""

import random
import re
from itertools import product
from pathlib import Path

import pytest
from report_sample import RUN, SPECIAL, sample_cell

from conformance.results.run_results import cell_summary, write_summary
from reports.html import write_html
from reports.load import Report, read_report
from reports.markdown import write_markdown
from reports.tables import tables

LAYOUTS, BACKENDS = ("dp2", "tp2", "pp2"), ("fsdp2", "megatron")
WRONG = "sft-warmup/qwen3/megatron/tp2-to-dp2/exact/state"


def chain(one: str, other: str) -> str:
    return one if one == other else f"{one}-to-{other}"


CELLS = (
    *(f"sft-warmup/qwen3/megatron/{chain(*ends)}/exact/state" for ends in product(LAYOUTS, LAYOUTS)),
    *(f"sft-warmup/llama/{chain(*ends)}/dp2-to-tp2/fp32/state" for ends in product(BACKENDS, BACKENDS)),
    *(f"sft-warmup/pangu/fsdp2/{layout}/exact/seed1" for layout in ("dp2", "dp4", "tp2", "sp2")),  # hand nothing over
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("handed") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SPECIAL, WRONG, ("differs", "first difference at training state, step 2"))
        entries = [sample_cell(folder, cell, f"{n:02d}", random.Random(n)) for n, cell in enumerate(CELLS)]
    write_summary(folder, RUN, [cell_summary(entry) for entry in entries])
    return folder


@pytest.fixture(scope="module")
def report(out: Path) -> Report:
    return read_report(out)


def test_a_table_has_a_row_for_what_saved_and_a_column_for_what_loaded(report: Report) -> None:
    layouts, backends = tables(report)
    assert layouts.title == "sft-warmup, qwen3, exact, state: megatron, from layout to layout"
    assert layouts.rows == layouts.columns == LAYOUTS
    assert {ends: cell.id for ends, cell in layouts.cells.items()} == dict(
        zip(product(LAYOUTS, LAYOUTS), CELLS[: len(LAYOUTS) ** 2], strict=True)
    )
    assert layouts.conform == len(LAYOUTS) ** 2 - 1
    assert backends.title == "sft-warmup, llama, fp32, state: from backend to backend, dp2 to tp2"
    assert backends.rows == backends.columns == BACKENDS


def test_the_page_and_the_markdown_show_each_cell_in_its_place(out: Path) -> None:
    page = write_html(out).read_text(encoding="utf-8")
    assert page.index('<section class="handed"') < page.index('id="cells"')  # most cells are transfers
    section = page.partition('<section class="handed"')[2].partition("</section>")[0]
    (row,) = re.findall(r'<tr><th class="layout" scope="row">tp2</th>(.*?)</tr>', section, re.DOTALL)
    states = re.findall(r'class="box (\w+)" href="#cell-([^"]*)"', row)
    assert states[0] == ("differs", WRONG)
    assert [state for state, _ in states] == ["differs", "conforms", "conforms"]
    text = write_markdown(out).read_text(encoding="utf-8")
    assert "| saved / loaded | dp2 | tp2 | pp2 |\n| :-- | :-- | :-- | :-- |\n" in text
    (line,) = (line for line in text.splitlines() if line.startswith("| tp2 |"))
    assert line.count("|") == 5
    assert line.split("|")[2].strip() != line.split("|")[3].strip()
