"""The list of mutations of the suite itself: what the nightly plants has to be in the sources as they are."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MUTATIONS = tomllib.loads((ROOT / "tests" / "mutations.toml").read_text(encoding="utf-8"))["mutations"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation["name"] for mutation in MUTATIONS])
def test_a_mutation_changes_one_place_and_names_a_test(mutation: dict[str, str]) -> None:
    source = (ROOT / mutation["file"]).read_text(encoding="utf-8")
    assert source.count(mutation["find"]) == 1
    assert mutation["replace"] != mutation["find"]
    if mutation["file"].endswith(".py"):
        ast.parse(source.replace(mutation["find"], mutation["replace"]))  # or no test would run, which kills nothing
    assert (ROOT / mutation["tests"].split()[0]).is_file()
