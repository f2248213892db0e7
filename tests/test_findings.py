"""The findings in docs/findings: each script still shows its defect, and each is written up and listed.

A script exits with 0 as long as the library behaves as its page says. When one fails here after an upgrade, read its
output: the library may have been fixed, and then page, index and our work-around can go.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FINDINGS = Path(__file__).parent.parent / "docs" / "findings"
HELPER = "flash_attn_stand_in.py"  # what several scripts import
SCRIPTS = sorted(path for path in FINDINGS.glob("*.py") if path.name != HELPER)


def page_of(script: Path) -> Path:
    return script.with_name(script.stem.replace("_", "-") + ".md")


def index_rows() -> list[str]:
    return [line for line in (FINDINGS / "README.md").read_text().splitlines() if line.startswith("| [")]


def test_there_are_findings() -> None:
    assert SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_script_shows_the_defect(script: Path) -> None:
    if script.stem.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    if script.stem.startswith("megatron"):
        pytest.importorskip("megatron.core")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{script.name}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_page_names_its_script_and_the_index_lists_it(script: Path) -> None:
    page = page_of(script)
    assert f"python docs/findings/{script.name}" in page.read_text()
    assert sum(f"]({page.name})" in row for row in index_rows()) == 1


def test_index_links_lead_to_pages_with_a_script() -> None:
    linked = {link for row in index_rows() for link in re.findall(r"\]\(([\w-]+\.md)\)", row)}
    assert linked == {page_of(script).name for script in SCRIPTS}
