"""scripts/generate-docs writes the reference pages, and with --check fails if one of them is stale."""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

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
