"""scripts/generate-docs writes the reference pages, and with --check fails if one of them is stale."""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
import transformers
from cells import cell_of

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate-docs"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which writes one page and one marked table into a folder of its own."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = SourceFileLoader("generate_docs", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "REFERENCE", tmp_path / "docs" / "reference")
    monkeypatch.setattr(module, "PAGES", {"faults": module.PAGES["faults"]})
    monkeypatch.setattr(module, "SECTIONS", {"support": lambda: "| new |\n"})
    (tmp_path / "README.md").write_text("before\n<!-- generated: support -->\n| old |\n<!-- end -->\nafter\n")
    (tmp_path / "docs").mkdir()
    return module


def test_check_fails_for_stale_or_missing_files(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    page, readme = script.REFERENCE / "faults.md", script.ROOT / "README.md"
    assert script.main(["--check"]) == 1
    assert "docs/reference/faults.md is stale" in capsys.readouterr().out
    assert script.main([]) == 0
    assert readme.read_text() == "before\n<!-- generated: support -->\n| new |\n<!-- end -->\nafter\n"
    assert script.main(["--check"]) == 0
    page.write_text(page.read_text().replace("inverted-clip", "another-clip"))
    assert script.main(["--check"]) == 1


def test_faults_page_has_a_row_for_each_fault(script: ModuleType) -> None:
    text = script.faults()
    assert all(text.count(f"| `{fault.name}`: ") == 1 for group in script.GROUPS.values() for fault in group)


def test_newest_verdict_counts_by_the_time_of_its_run_and_of_its_fixture(script: ModuleType) -> None:
    one, two, old = "grpo/llama/fsdp2/dp2/exact", "grpo/llama/fsdp2/tp2/exact", "grpo/qwen3-next/fsdp2/dp2/fp32"
    later = {"started": "2026-11-29T12:00:00+00:00", "cells": {one: ["differs", 3.1], old: ["conforms"]}}
    earlier = {"started": "2026-11-29T11:00:00+00:00", "cells": [{"id": one, "state": "conforms"}]}
    lacks_a_package = {"started": "2026-11-29T13:00:00+00:00", "cells": {one: ["unsupported"], two: ["not_run"]}}
    files = [later, earlier, lacks_a_package, {"cells": {two: ["conforms"]}}]
    assert script.newest_states(("2026-11-29", file) for file in files) == {one: "differs", two: "conforms"}


def test_objectives_page_counts_models_without_a_verdict(script: ModuleType) -> None:
    judged = [("llama", "dp2", "passes"), ("qwen3", "dp2", ""), ("llama", "tp2", "passes"), ("llama", "sp2", "")]
    cells = [(cell_of("fsdp2", "grpo", model, layout, "exact"), outcome) for model, layout, outcome in judged]
    assert script.list_layouts(cells) == "tp2 (exact)<br>dp2 (exact: 1 of 2 models)<br>sp2 (exact: not judged)"
    assert script.count_outcomes(cells) == "exact 2 of 4"
    failing = (cell_of("fsdp2", "grpo", "qwen3", "tp2", "exact"), "fails")
    assert script.count_outcomes([*cells, failing]) == "exact 2 of 5, **1 fails**"
    assert "tp2 (exact: 1 of 2 models, **1 fails**)" in script.list_layouts([*cells, failing])


@pytest.mark.slow
def test_page_of_configurations_holds_the_answers_of_now(script: ModuleType) -> None:
    page = (SCRIPT.parents[1] / "docs" / "reference" / "configurations.md").read_text()
    if f"({transformers.__version__})" not in page:
        pytest.skip("the page was written with another transformers, which has other classes")
    assert page.endswith(script.configurations())
