"""The README: its table of backends is what ``parity compare`` prints for a published run, and its numbers of cells are
those of the profiles."""

import re
from pathlib import Path

from conformance.matrix.options import Selection
from conformance.matrix.profile import select_cells
from reports.side_by_side import to_markdown

ROOT = Path(__file__).parents[2]


def test_the_side_by_side_table_is_generated() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- parity compare (\S+) -->\n(.*?)<!-- end -->", readme, re.DOTALL)
    assert found, "README has no table of backends side by side"
    published, table = found.groups()
    assert table.strip() == to_markdown(ROOT / published).strip(), "run scripts/readme-table"


def test_it_holds_every_backend_and_all_agree() -> None:
    from reports.side_by_side import read_groups

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    published = readme.partition("<!-- parity compare ")[2].partition(" -->")[0]
    groups = read_groups(ROOT / published)
    assert groups
    for group in groups:
        assert set(group.backends) == {"deepspeed", "fsdp2", "megatron"}
        assert group.state == "conforms"


def test_it_says_how_many_cells_profiles_have() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    full, families, real, four = (
        len(select_cells(Selection(profile=name))) for name in ("full", "families", "real-size", "real-size-4gpus")
    )
    assert f"The full profile has {full:,} cells" in readme
    assert f"`families` has {families:,} more" in readme
    assert f"All {real} cells of `parity run --device cuda --profile real-size` conform" in readme
    assert f"so do the {four} of `real-size-4gpus`" in readme
