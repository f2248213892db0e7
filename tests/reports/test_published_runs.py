"""reports/published/README.md: that each run has all columns, and that the files it links to exist."""

import re
from pathlib import Path

import pytest

PUBLISHED = Path(__file__).parents[2] / "reports" / "published"
TEXT = (PUBLISHED / "README.md").read_text(encoding="utf-8")
HEADER = "| run | hardware and versions | cells | result |"
RUNS = TEXT.partition(HEADER)[2].partition("\n\n")[0].strip().splitlines()[1:]  # below the header's line of dashes


@pytest.mark.parametrize("row", RUNS, ids=lambda row: row[:40])
def test_a_run_has_four_columns_and_none_is_empty(row: str) -> None:
    columns = [column.strip() for column in row.removeprefix("|").removesuffix("|").split("|")]
    assert len(columns) == 4
    assert all(columns)


def test_what_is_linked_to_exists_and_every_folder_is_linked_to() -> None:
    linked = {PUBLISHED / link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", TEXT) if "://" not in link}
    assert not [path for path in linked if not path.exists()]
    folders = {path for path in PUBLISHED.iterdir() if path.is_dir()}
    assert folders <= {parent for path in linked for parent in (path, *path.parents)}
