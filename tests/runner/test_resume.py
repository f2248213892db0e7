"""Going on in the folder of an earlier run: what has a verdict is not run again, and what failed once is told."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cells import exhaustive
from plain_profile import SCENARIO
from plain_variants import BROKEN

from conformance.backends import registry
from conformance.cli import main as cli
from conformance.cli import run as cli_run
from conformance.core import io, packages
from conformance.core.host import FIXTURES
from conformance.core.io import is_unused, owned
from conformance.results.run_results import read_run
from conformance.results.verdict import FAILED_BEFORE, NOT_STARTED, OTHER_CODE
from reports.markdown import write_markdown

PROFILE = """
description = "two cells"
[[cells]]
scenarios = ["{folder}/tiny.toml"]
models = ["llama"]
layouts = ["dp1", "dp2"]
precisions = ["fp32"]
"""
FIRST, SECOND = "tiny/llama/flaky/dp1/fp32", "tiny/llama/flaky/dp2/fp32"


@contextmanager
def broken(layout: str) -> Iterator[None]:
    """The adapter fails at this layout: its process, which starts within, inherits the variable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_there", {})
        patch.setenv(BROKEN, layout)
        yield


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("profile")
    (folder / "tiny.toml").write_text(SCENARIO.replace("steps = 2", "steps = 1").replace("rows = 8", "rows = 4"))
    (folder / "mine.toml").write_text(PROFILE.format(folder=folder))
    model = shutil.copytree(FIXTURES / "models" / "llama", folder / "llama")
    data = shutil.copy(FIXTURES / "data" / "word_problems.jsonl", folder)
    own = ["--model", str(model), "--data", str(data)]
    return ["--backend", "plain_variants:Flaky", "--profile", str(folder / "mine.toml"), *own]


@pytest.fixture(scope="module")
def run(chosen: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose first cell failed."""
    out = tmp_path_factory.mktemp("run") / "out"
    with broken("dp1"):
        assert cli.main(["run", *chosen, "--out", str(out)]) == 3
    return out


@pytest.fixture(scope="module")
def done(chosen: list[str], run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run, gone on with to its end."""
    out = Path(shutil.copytree(run, tmp_path_factory.mktemp("done") / "out"))
    assert cli.main(["run", *chosen, "--resume", str(out)]) == 0
    return out


@pytest.fixture
def out(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "out"))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def states(out: Path) -> dict[str, str]:
    return {entry.cell: entry.verdict.state for entry in read_run(out)[1]}


def test_only_cells_without_a_verdict_are_run(chosen: list[str], out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert states(out) == {FIRST: "infrastructure", SECOND: "conforms"}
    earlier = read_run(out)[0]
    before = next(out.glob("cells/*dp2*/verdict.json")).stat().st_mtime_ns
    assert cli.main(["run", *chosen, "--resume", str(out)]) == 0
    said = capsys.readouterr()
    assert f"running 1 cells; results: {out}" in said.err
    assert f"pass     {FIRST}" in said.err
    assert said.out.startswith("pass: 2 pass\n")
    assert next(out.glob("cells/*dp2*/verdict.json")).stat().st_mtime_ns == before
    run, entries = read_run(out)
    assert [entry.cell for entry in entries] == [FIRST, SECOND]
    assert run.finished
    assert run.started == earlier.started
    assert run.seconds > earlier.seconds
    (out / "report.html").unlink()  # as if a signal had come after the last cell
    assert cli.main(["run", *chosen, "--resume", str(out)]) == 0
    assert "running 0 cells" in capsys.readouterr().err
    assert (out / "report.html").is_file()
    assert read_run(out)[0].environment == run.environment


def test_cells_need_not_be_given_again(chosen: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with broken("dp1"):
        assert cli.main(["run", *chosen, "--cells", "*/dp1/*", "--out", str(tmp_path / "out")]) == 3
    for left in ("running 1 cells", "running 0 cells"):  # the command of the first resume names no cells
        assert cli.main(["run", *chosen, "--resume", str(tmp_path / "out")]) == 0
        assert left in capsys.readouterr().err
        assert states(tmp_path / "out") == {FIRST: "conforms"}


@pytest.mark.exhaustive
def test_a_cell_that_failed_once_says_so_for_ever(
    chosen: list[str], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", *chosen, "--resume", str(out), "--rerun", "failed"]) == 0
    assert [entry.before for entry in read_run(out)[1]] == [("infrastructure",), ()]
    assert cli.main(["judge", str(out)]) == 0
    assert [entry.before for entry in read_run(out)[1]] == [("infrastructure",), ()]
    (line,) = [line for line in write_markdown(out).read_text().splitlines() if line.startswith(f"| `{FIRST}`")]
    assert line.endswith("(run again; before: infrastructure failure) |")
    assert cli.main(["run", *chosen, "--resume", str(out), "--rerun", "failed"]) == 2
    assert f"no cell of {out} failed; parity report {out} shows all" in capsys.readouterr().err


def test_a_run_that_was_killed_goes_on_from_the_verdicts_that_it_wrote(
    chosen: list[str], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SIGKILL leaves a summary that knows less than the verdicts."""
    edit(next(out.glob("cells/*dp1*/verdict.json")), state="not_run", reason=NOT_STARTED)
    cells = [cell | {"state": "not_run"} for cell in json.loads((out / "summary.json").read_text())["cells"]]
    edit(out / "summary.json", finished=None, cells=cells)
    (unfinished,) = (file.parent / "legs" / "0" / "record" for file in out.glob("cells/*dp1*/verdict.json"))
    unfinished.mkdir(parents=True)
    (unfinished / "record.jsonl").write_text("{")
    (out / "oracle").rename(withheld := out.with_name(f".{out.name}.withheld-1"))
    assert cli.main(["run", *chosen, "--resume", str(out)]) == 0
    assert "running 1 cells" in capsys.readouterr().err
    assert [entry.before for entry in read_run(out)[1]] == [(), ()]
    assert not withheld.exists()


def test_a_verdict_whose_record_is_damaged_counts_as_failed(chosen: list[str], out: Path) -> None:
    next(out.glob("cells/*dp2*/legs/0/record/record.jsonl")).unlink()
    with broken("dp2"):
        assert cli.main(["run", *chosen, "--resume", str(out)]) == 3
    assert states(out) == {FIRST: "conforms", SECOND: "infrastructure"}


def test_the_first_failure_ends_a_run_that_is_asked_to(chosen: list[str], tmp_path: Path) -> None:
    with broken("dp1"):
        assert cli.main(["run", *chosen, "--fail-fast", "--out", str(tmp_path / "out")]) == 3
    assert states(tmp_path / "out") == {FIRST: "infrastructure", SECOND: "not_run"}
    assert read_run(tmp_path / "out")[0].finished is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rerun", "failed"], "--rerun selects cells of an earlier run; add --resume OUT"),
        (["--resume", "OUT", "--out", "new"], "--resume continues in the folder of the earlier run; omit --out"),
        (["--resume", "nowhere"], "there is no nowhere/summary.json"),
        (
            ["--resume", "OUT", "--seed", "1"],
            "has other options than this run: this one has --seed 1; go on with it: parity run ",
        ),
        (
            ["--resume", "OUT", "--max-len", "90", "--cells", "*"],
            "this one has --max-len 90 --cells *; go on with it: parity",
        ),
        (["--resume", "OUT", "--min-judged", "1"], "do not belong together: demand min_judged 0 and 1"),
        (["--resume", "OUT", "--shard", "1/2"], "do not belong together: number of shards '1' and '2'"),
    ],
)
def test_a_folder_of_another_run_is_not_continued(
    arguments: list[str], message: str, chosen: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("verdict.json")}
    given = [str(run) if argument == "OUT" else argument for argument in arguments]
    assert cli.main(["run", *chosen, *given]) == 2
    told = capsys.readouterr().err
    assert message in told
    if "go on with it" in told:
        assert told.endswith(f" --resume {run}\n")
        assert "--out" not in told
    assert {path: path.stat().st_mtime_ns for path in run.rglob("verdict.json")} == before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("word_problems.jsonl", b"a", b"e"),
        ("llama/config.json", b'"rms_norm_eps": 1e', b'"rms_norm_eps": 2e'),
        ("llama/model.safetensors", None, None),
        ("llama/tokenizer.json", b"a", b"e"),
        ("tiny.toml", b"lr = 0.", b"lr = 0.0"),
    ],
)
@pytest.mark.parametrize("is_done", [True, False], ids=["done", "half done"])
def test_a_run_that_read_other_files_is_not_continued(
    name: str,
    old: bytes | None,
    new: bytes | None,
    *,
    is_done: bool,
    chosen: list[str],
    run: Path,
    done: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its verdicts would count for files that it has not read; and cells left would be judged on others than those."""
    out = Path(shutil.copytree(done if is_done else run, tmp_path / "out"))
    file = Path(chosen[3]).parent / name
    given, before = file.read_bytes(), _contents(out)
    changed = given.replace(old, new, 1) if old and new else given[:-4] + bytes(4)  # the last weight
    assert changed != given
    try:
        file.write_bytes(changed)
        assert cli.main(["run", *chosen, "--resume", str(out)]) == 2
    finally:
        file.write_bytes(given)
    said = capsys.readouterr().err
    named = "mine.toml" if name == "tiny.toml" else name  # the profile names it
    assert f"{named} changed since the run in {out}" in said
    assert "give a new --out" in said
    assert _contents(out) == before


OWN = """
from own_numbers import WRONG
from plain_backend import Plain

class Own(Plain):
    @classmethod
    def supports(cls, scenario, layout):
        if str(layout) in WRONG:
            raise ConnectionError("the machine is away")
        return super().supports(scenario, layout)
"""


Runs = Callable[..., tuple[int, str]]


@pytest.fixture
def run_own(
    chosen: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Runs:
    """Runs a backend of the user's own that fails in the layouts ``wrong``; returns the exit code and what was said."""
    monkeypatch.syspath_prepend(tmp_path)

    def run(
        *options: str, code: str = OWN, wrong: str = "dp1", own: bool = True, beside: str = "own_numbers.py"
    ) -> tuple[int, str]:
        monkeypatch.setattr(registry, "_there", {})
        (tmp_path / "own_backend.py").write_text(code)
        (tmp_path / beside).parent.mkdir(exist_ok=True)
        (tmp_path / beside).write_text(f"WRONG = {wrong!r}\n")
        backend = ["--backend", "own_backend:Own", *chosen[2:]] if own else []
        return cli.main(["run", *backend, *options]), capsys.readouterr().err

    return run


def test_a_rerun_of_mended_code_goes_on_where_it_was_stopped(run_own: Runs, tmp_path: Path) -> None:
    out, first, second = tmp_path / "out", FIRST.replace("flaky", "own"), SECOND.replace("flaky", "own")
    again = ("--resume", str(out), "--rerun", "failed")
    assert run_own("--out", str(out), wrong="dp1 dp2")[0] == 3
    assert states(out) == {first: "infrastructure", second: "infrastructure"}
    status, said = run_own(*again, "--fail-fast", wrong="dp1 ")
    assert (status, "running 2 cells" in said) == (3, True), said
    assert states(out) == {first: "infrastructure", second: "not_run"}
    assert read_run(out)[1][1].verdict.reason == FAILED_BEFORE
    for cells, told in (("*/dp2.pp9/*", "no cell matches"), ("*/dp2/*", "running 1 cells")):
        assert told in run_own(*again, "--cells", cells, wrong="dp1 ")[1]
    assert states(out) == {first: "infrastructure", second: "conforms"}
    status, said = run_own(*again, "--cells", "*/dp1/*", own=False)
    assert status == 2
    assert f"{out} has other options than this run: it had --" in said
    assert said.endswith(f"--resume {out} --rerun failed --cells '*/dp1/*'\n")


@pytest.mark.parametrize("beside", [exhaustive("own_numbers.py"), "own_numbers/__init__.py"])
def test_after_a_mend_no_verdict_of_the_code_before_counts(
    beside: str, run_own: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Failed cells run first, with the new code; the run is incomplete until it has run the other ones, too. The change
    is in a module beside the adapter, or in a package, as of a trainer to which the adapter is thin."""
    run, out = partial(run_own, beside=beside), tmp_path / "out"
    first, second = FIRST.replace("flaky", "own"), SECOND.replace("flaky", "own")
    assert run("--out", str(out))[0] == 3
    assert states(out) == {first: "infrastructure", second: "conforms"}
    assert run("--resume", str(out), "--rerun", "failed", code="import nothing_of_this_name")[0] == 3
    assert states(out) == {first: "infrastructure", second: "conforms"}
    status, said = run("--resume", str(out), "--rerun", "failed", wrong="")
    assert (status, "running 1 cells" in said) == (3, True), said
    assert "its 2 cells lose their verdicts; 1 of them wait for --resume without --rerun" in caplog.text
    assert states(out) == {first: "conforms", second: "not_run"}
    assert read_run(out)[1][1].verdict.reason == OTHER_CODE
    status, said = run("--resume", str(out), wrong="")
    assert (status, "running 1 cells" in said) == (0, True), said
    assert states(out) == {first: "conforms", second: "conforms"}
    assert [entry.before for entry in read_run(out)[1]] == [(), ()]  # another code's failure is not a flaky cell
    status, said = run("--resume", str(out), code=f"{OWN}\nWRONG = ()\n", wrong="")
    assert (status, "running 2 cells" in said) == (0, True), said


def test_a_run_of_too_much_code_says_that_it_cannot_be_resumed(
    run_own: Runs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, told = tmp_path / "out", f"or 128 MiB of them, below {tmp_path}"
    with (tmp_path / "large.py").open("wb") as file:
        file.truncate(packages.MOST_BYTES + 1)
    assert run_own("--out", str(out))[0] == 3
    assert "the code of own has no digest, so --resume will refuse this run: " in caplog.text
    assert told in caplog.text
    status, said = run_own("--resume", str(out))
    assert (status, told in said, "give a new --out" in said) == (2, True, True), said


def test_a_run_that_does_not_say_what_it_read_is_not_continued(
    chosen: list[str], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(out / "summary.json", inputs={})
    assert cli.main(["run", *chosen, "--resume", str(out)]) == 2
    assert f"{out} does not say what it read" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["run", "--resume"], ["judge"]])
def test_folder_in_use_is_refused_with_its_owner(
    command: list[str],
    chosen: list[str],
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(io, "_LOCK_S", 0.0)
    before = _contents(run)
    with owned(run, owner="parity run --profile mine"):
        assert cli.main([*command, str(run), *(chosen if command[0] == "run" else ())]) == 2
    said = capsys.readouterr().err
    assert f"{run} is in use by process {os.getpid()} on " in said
    assert ": parity run --profile mine; wait for its end" in said
    assert _contents(run) == before


def test_run_begins_in_a_folder_with_a_dead_lock(
    chosen: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lock").write_text("process 1 on here: parity run")
    assert cli.main(["run", *chosen, "--resume", str(tmp_path)]) == 2
    assert "give --out instead of --resume" in capsys.readouterr().err
    (tmp_path / "lock").write_text("process 1 on here: parity run")
    with owned(tmp_path, owner="a live run"):
        assert not is_unused(tmp_path)
    (tmp_path / "lock").write_text("process 1 on here: parity run")
    assert cli_run.output_folder(tmp_path) == tmp_path


@pytest.mark.parametrize("command", ["judge", "report"])
@pytest.mark.parametrize("at", ["older summary", "withheld oracle"])
def test_killed_run_says_how_it_is_completed(
    command: str, at: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(run, tmp_path / "out")
    summary = json.loads((out / "summary.json").read_text())
    if at == "withheld oracle":
        (out / "oracle").rename(out.with_name(f".{out.name}.withheld-1"))
    else:
        summary["cells"] = [cell | {"state": "not_run"} for cell in summary["cells"]]
    edit(
        out / "summary.json",
        **summary | {"finished": None, "command": f"parity run --seed 1 --out {run} --cells a --cells=b -q"},
    )
    assert cli.main([command, str(out)]) in (2, 3)
    advice = f"the run in {out} has not ended; go on with it: parity run --seed 1 -q --resume {out}"
    assert advice in capsys.readouterr().err


@pytest.mark.parametrize("place", ["inputs/lock", "inputs", "cells", "run.json", "cells/new", "oracles/a/b.lock"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_resume_refuses_links_and_pipes_in_the_folder(
    chosen: list[str], out: Path, place: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    victim, path = out.with_name("victim"), out / place
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        path.rename(victim)
    else:
        victim.write_text("precious")
    before = _contents(victim)
    path.symlink_to(victim) if kind == "link" else os.mkfifo(path)
    assert cli.main(["run", *chosen, "--resume", str(out)]) == 2
    assert f"{path} is a link, pipe or device" in capsys.readouterr().err
    assert _contents(victim) == before


def _contents(path: Path) -> dict[str, bytes]:
    return {str(one): one.read_bytes() for one in (path, *path.rglob("*")) if one.is_file()}
