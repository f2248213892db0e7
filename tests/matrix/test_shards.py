"""Jobs that share the cells of a run: each cell is run once, and the merged folder is what one job would have left."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from plain_profile import SCENARIO

from conformance.cli import main as cli
from conformance.core.errors import UsageError
from conformance.core.packages import UNKNOWN
from conformance.matrix.cell import Cell
from conformance.matrix.options import Selection
from conformance.matrix.plan import Shard, parse_shard, split
from conformance.matrix.profile import select_cells
from conformance.records.step_tensors import read_record
from conformance.results.run_results import read_run
from reports.load import read_report
from reports.summary import headline

pytestmark = pytest.mark.slow

PROFILE = """
description = "two oracles, each with a cell of one rank and one of two"
[[cells]]
scenarios = ["{folder}/tiny.toml", "{folder}/other.toml"]
models = ["llama"]
layouts = ["dp1", "dp2"]
precisions = ["fp32"]
"""
BY_DP2 = ("--require", "*/dp2/*", "--min-judged", "4")


def shards_of(cells: Sequence[Cell], total: int) -> list[list[Cell]]:
    return [split(cells, Shard(number=number, total=total)) for number in range(1, total + 1)]


def oracle_of(cell: Cell) -> str:
    return json.dumps(cell.oracle_request, sort_keys=True)


# --- which cells ---


@pytest.mark.parametrize("total", [1, 3, 5])
def test_every_cell_is_in_one_shard_and_shards_have_equal_work(total: int) -> None:
    cells = select_cells(Selection(profile="gpu"))
    shards = shards_of(cells, total)
    assert sorted(str(cell) for shard in shards for cell in shard) == sorted(map(str, cells))
    work = [sum(phase.layout.world_size for cell in shard for phase in cell.phases) for shard in shards]
    assert max(work) <= 1.03 * min(work)
    order = {str(cell): number for number, cell in enumerate(cells)}
    assert all(shard == sorted(shard, key=lambda cell: order[str(cell)]) for shard in shards)  # that of the run


def test_cells_with_one_oracle_stay_together_unless_they_are_more_than_a_shard() -> None:
    cells = select_cells(Selection(profile="gpu"))
    shards = [{oracle_of(cell) for cell in shard} for shard in shards_of(cells, 4)]
    oracles = {oracle_of(cell) for cell in cells}
    assert sum(map(len, shards)) <= len(oracles) + 1


@pytest.mark.parametrize("text", ["", "2", "0/2", "3/2", "1/0", "a/b", "1/2/3", "-1/2", "1/99999"])
def test_a_shard_is_k_of_n(text: str) -> None:
    with pytest.raises(UsageError, match="must be K/N with K from 1 to N"):
        parse_shard(text)


def test_more_shards_than_cells_are_refused() -> None:
    cells = select_cells(Selection(profile="quick"))[:2]
    with pytest.raises(UsageError, match="no cell is left for shard 3/3: 2 are selected; use fewer shards"):
        split(cells, Shard(number=3, total=3))


# --- two jobs ---


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("profile")
    (folder / "tiny.toml").write_text(SCENARIO)
    (folder / "other.toml").write_text(SCENARIO.replace("lr = 0.05", "lr = 0.04"))
    (folder / "mine.toml").write_text(PROFILE.format(folder=folder))
    return ("--backend", "plain_backend:Plain", "--profile", str(folder / "mine.toml"), *BY_DP2)


@pytest.fixture(scope="module")
def jobs(chosen: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of two jobs. Neither job can meet the demands alone."""
    folder = tmp_path_factory.mktemp("jobs")
    for number in (1, 2):
        assert cli.main(["run", *chosen, "--shard", f"{number}/2", "--out", str(folder / str(number))]) == 0
    return [folder / "1", folder / "2"]


@pytest.fixture
def copies(jobs: list[Path], tmp_path: Path) -> list[Path]:
    return [Path(shutil.copytree(job, tmp_path / job.name)) for job in jobs]


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def merge(folders: Sequence[Path], out: Path) -> int:
    return cli.main(["merge", *map(str, folders), "--out", str(out), "--keep", "all"])


def test_merged_shards_are_one_run(jobs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert merge(jobs[::-1], out) == 0
    assert capsys.readouterr().out.startswith("pass: 4 pass\n")
    run, entries = read_run(out)
    assert [entry.cell for entry in entries] == list(run.floor.planned)
    assert len({entry.cell for entry in entries}) == 4
    assert run.finished is not None
    assert run.seconds == pytest.approx(sum(read_run(job)[0].seconds for job in jobs))
    for entry in entries:
        read_record(out / entry.folder / entry.records[0])
    assert {path.name for path in out.iterdir()} >= {"report.html", "report.md", "junit.xml", "side_by_side.json"}
    assert cli.main(["judge", str(out)]) == 0  # what the judge needs came along


def test_tensors_of_cells_that_conform_go_when_all_shards_were_compared(jobs: list[Path], tmp_path: Path) -> None:
    shards = [set(job.rglob("*.safetensors")) for job in jobs]
    assert all(any("cells" in file.parts for file in shard) for shard in shards)
    assert cli.main(["merge", str(jobs[0]), "--out", str(tmp_path / "half")]) == 3
    assert cli.main(["merge", str(tmp_path / "half"), str(jobs[1]), "--out", str(tmp_path / "whole")]) == 0
    assert any((tmp_path / "half" / "cells").rglob("*.safetensors"))
    assert not any((tmp_path / "whole" / "cells").rglob("*.safetensors"))
    assert [set(job.rglob("*.safetensors")) for job in jobs] == shards


def test_a_merged_folder_owns_its_files(jobs: list[Path], tmp_path: Path) -> None:
    """Files are linked, and the folder can be judged again without a change of the jobs' folders."""
    assert merge(jobs, tmp_path / "out") == 0
    (record,) = {path.relative_to(jobs[0]) for path in jobs[0].glob("cells/*dp1*/legs/0/record/record.jsonl")}
    assert (jobs[0] / record).stat().st_ino == (tmp_path / "out" / record).stat().st_ino
    before = [(path, path.stat().st_mtime_ns) for path in sorted(jobs[0].glob("cells/*/verdict.json"))]
    assert cli.main(["judge", str(tmp_path / "out")]) == 0
    assert [(path, path.stat().st_mtime_ns) for path, _ in before] == before


def test_a_shard_that_is_missing_is_named_and_the_run_is_incomplete(
    jobs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert merge(jobs[:1], out) == 3
    (absent,) = {entry.scenario for entry in read_run(jobs[1])[1]}
    said = f"shard 2/2 is missing: 2 of 4 cells, {absent}/llama/plain/dp1/fp32 (not in the run), "
    assert said in capsys.readouterr().out
    assert "Shard 2/2 is missing" in headline(read_report(out))[1]
    assert merge([out, jobs[1]], tmp_path / "whole") == 0


def test_demands_are_held_against_all_shards_together(copies: list[Path], tmp_path: Path) -> None:
    for copy in copies:
        summary = json.loads((copy / "summary.json").read_text())
        assert (summary["verdict"], summary["unmet"]) == ("conforms", [])
        edit(copy / "summary.json", floor=summary["floor"] | {"min_judged": 5})
    assert merge(copies, tmp_path / "out") == 3
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["unmet"] == ["judged: 4 of at least 5 cells"]


def test_a_shard_that_was_stopped_leaves_the_whole_incomplete(copies: list[Path], tmp_path: Path) -> None:
    summary = json.loads((copies[0] / "summary.json").read_text())
    edit(copies[0] / "summary.json", finished=None)
    edit(copies[0] / summary["cells"][0]["folder"] / "verdict.json", state="not_run", records=[], oracle=None)
    assert merge(copies, tmp_path / "out") == 3
    merged = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (merged["finished"], merged["counts"]["not_run"]) == (None, 1)


def test_a_package_that_only_one_jobs_backend_names_does_not_part_jobs(copies: list[Path], tmp_path: Path) -> None:
    edit(copies[0] / "summary.json", environment={"torch": "1.0", "numpy": "2.0"})
    edit(copies[1] / "summary.json", environment={"torch": "1.0", "openrlhf": "0.11"})
    assert merge(copies, tmp_path / "out") in (0, 1)
    merged = json.loads((tmp_path / "out" / "summary.json").read_text())["environment"]
    assert {name: merged[name] for name in ("torch", "numpy", "openrlhf")} == {
        "torch": "1.0",
        "numpy": "2.0",
        "openrlhf": "0.11",
    }


def refused(folders: Sequence[Path], out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert merge(folders, out) == 2
    assert not out.exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selected": "another"}, "selected cells (digest) "),
        ({"device": "cuda"}, "device 'cpu' and 'cuda'"),
        ({"suite_version": "0.0.1"}, "suite version "),
        ({"inputs": {"llama/config.json": "0"}}, "content (SHA-256) of llama/config.json "),
        ({"environment": {"torch": "1.0"}}, "version of torch "),
        ({"environment": {"ranks_per_gpu": 2}}, "--ranks-per-gpu 1 and 2"),
        ({"environment": {"NVIDIA_TF32_OVERRIDE": "1"}}, "version of OMP_NUM_THREADS "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_folders_of_different_runs_are_not_merged(
    change: dict[str, Any], message: str, copies: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(copies[1] / "summary.json", **change)
    error = refused(copies, tmp_path / "out", capsys)
    assert f"{copies[0]} and {copies[1]} do not belong together: {message}" in error


def test_shards_whose_code_has_no_digest_are_merged_with_a_word(
    copies: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for copy in copies:  # each of which names the folder of its own machine
        edit(copy / "summary.json", inputs={"code of mine": f"{UNKNOWN}too many files below {copy}"})
    assert merge(copies, tmp_path / "out") == 0
    word = f"whether all folders are of the same code of mine is not known: too many files below {copies[-1]}"
    assert word in caplog.messages


@pytest.mark.parametrize("place", [0, 1, 2])
def test_code_without_a_digest_hides_no_other_code(
    place: int, copies: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = Path(shutil.copytree(copies[0], tmp_path / "twin"))
    folders, digests = [*copies[:2], twin], ["1111", "2222"]
    digests.insert(place, f"{UNKNOWN}too many files")
    for folder, digest in zip(folders, digests, strict=True):
        edit(folder / "summary.json", inputs={"code of mine": digest})
    error = refused(folders, tmp_path / "out", capsys)
    assert "do not belong together: content (SHA-256) of code of mine '1111' and '2222'" in error
    for folder in folders:
        edit(
            folder / "summary.json", inputs={"code of mine": digests[place if folder == folders[place] else place - 1]}
        )
    assert merge(folders, tmp_path / "out") == 0
    assert read_run(tmp_path / "out")[0].inputs["code of mine"].startswith(UNKNOWN)


def test_two_verdicts_of_a_cell_are_not_merged(
    copies: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    twin = Path(shutil.copytree(copies[0], tmp_path / "twin"))
    assert merge([*copies, twin], tmp_path / "same") == 0
    entry = read_run(twin)[1][0]
    edit(twin / entry.folder / "verdict.json", state="infrastructure", reason="rank 0 raised")
    error = refused([*copies, twin], tmp_path / "out", capsys)
    assert f"{entry.cell} is conforms in {copies[0]} and infrastructure in {twin}" in error


def test_no_file_from_outside_of_a_folder_is_merged(
    copies: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").mkdir()
    shutil.rmtree(copies[0] / "inputs")
    (copies[0] / "inputs").mkdir()
    (copies[0] / "inputs" / "model").symlink_to(tmp_path / "secret")
    assert f"lies outside of {copies[0]}" in refused(copies, tmp_path / "out", capsys)
