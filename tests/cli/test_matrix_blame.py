"""parity matrix and parity blame: cells in environments made on demand, and the release that changed a cell."""

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from plain_profile import write_profile
from pydantic import ValidationError
from report_sample import write_sample
from wheels import write_wheel
from worker_group_helpers import is_dead_soon

from conformance.backends import registry
from conformance.cli import environments as command
from conformance.cli.environments import Answer, Bisection
from conformance.cli.main import main
from conformance.core import environments
from conformance.core.environments import Environment, Made, Unmade, read_environments
from conformance.core.errors import UsageError
from conformance.core.process import Stopped
from conformance.results.output_folders import EnvironmentRun, write_environment
from conformance.runtime.preload_server import environment
from reports.board import Board, columns_of, read_board

ROOT = Path(__file__).parents[2]


def bisected(letters: str) -> tuple[list[int], Bisection]:
    """Bisects sets whose answers are letters; a dot has no environment. Returns the ends and the bisection."""
    sets = [{"p": letter} for letter in letters]
    one = Bisection(names=[*letters], sets=sets, ask=lambda pins: Answer(state=pins["p"].strip(".")))
    return [*one.run()], one


@pytest.mark.parametrize(
    ("letters", "ends"),
    [
        ("gb", [0, 1]),
        ("gggggggb", [6, 7]),
        ("gbbbbbbb", [0, 1]),
        ("gg..bb", [1, 4]),
        ("g.g.b.b", [2, 4]),
        ("ggxxbb", [1, 4]),  # answers of a third kind are at neither side
    ],
)
def test_bisection_ends_beside_the_change(letters: str, ends: list[int]) -> None:
    found, one = bisected(letters)
    assert found == ends
    assert len(one.answers) <= 2 + len(letters) // 2 or "." in letters or "x" in letters


def test_ends_that_cannot_be_run_are_no_answer() -> None:
    sets = [{"p": "1"}, {"p": "2"}]
    one = Bisection(names=["p 1", "p 2"], sets=sets, ask=lambda _: Answer(state=command.CANNOT_BE_RUN, reason="no q"))
    with pytest.raises(UsageError, match=r"it can be run neither with p 1 nor with p 2 \(no q\)"):
        one.run()


@pytest.mark.parametrize(("letters", "words"), [("ggg", "give the same answer"), (".gb", "has no answer")])
def test_ends_without_a_change_are_refused(letters: str, words: str) -> None:
    with pytest.raises(UsageError, match=rf"{words}.*give other --good and --bad"):
        bisected(letters)


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that fails with b from release 3 on, but for releases of a after 1; b 2 cannot be installed."""

    def make(wanted: Environment) -> Made:
        pins = dict(one.split("==") for one in wanted.requirements)
        if pins.get("b") == "2":
            raise Unmade("no wheel of b 2")
        python = tmp_path / "-".join(["python", *pins.values()])
        fails = pins.get("b", "0") >= "3" and pins.get("a", "1") == "1"
        python.write_text(f"#!/bin/sh\necho b is {pins.get('b')}; exit {int(fails)}\n")
        python.chmod(0o755)
        return Made(python=str(python), lock="\n".join(wanted.requirements))

    monkeypatch.setattr(command, "make_environment", make)
    monkeypatch.setattr(command, "releases", lambda package, wanted: [*"12345"])
    monkeypatch.setattr(command, "package_version", lambda package: "1")
    script = tmp_path / "script.py"
    script.touch()
    return script


def test_blame_names_the_release_and_what_was_skipped(stubs: Path, capsys: Any) -> None:
    assert main(["blame", str(stubs), "--package", "b", "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["package"], told["before"]["release"], told["after"]["release"]) == ("b", "1", "3")
    assert (told["before"]["state"], told["after"]["state"]) == ("exit code 0", "exit code 1")
    assert told["skipped"] == {"2": "no environment: no wheel of b 2"}
    assert main(["blame", str(stubs), "--package", "B", "--requirement", "b==1", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["after"]["release"] == "3"
    assert main(["blame", str(stubs), "--package", "b", "--good", "5", "--bad", "3"]) == 2
    assert "b 5 and b 3 give the same answer (exit code 1: b is 5)" in capsys.readouterr().err


def test_of_several_packages_blame_first_finds_the_package(stubs: Path, capsys: Any) -> None:
    file = stubs.with_name("two.toml")
    file.write_text(
        '[environments.old]\nrequirements = ["a==1", "b==3", "c==1"]\n'
        '[environments.new]\nrequirements = ["a==4", "b==1", "c==5"]\n'
    )
    assert main(["blame", str(stubs), "--in", str(file), "--good", "new", "--bad", "old"]) == 3
    out = capsys.readouterr().out
    assert "changed with b 3 (1 before)\n  before: exit code 0: b is 1\n  after:  exit code 1: b is 3\n" in out
    assert "b 2 was skipped, and may have changed it already: no environment: no wheel of b 2" in out


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("import no_such", "raised ModuleNotFoundError: No module named 'no_such'"),
        ("try: 1 / 0\nexcept ZeroDivisionError: raise OSError('a\\nHint: b')", "raised OSError: Hint: b"),
        (
            "import sys; sys.exit('[rank1]: Traceback (most recent call last):\\n[rank1]:   c\\n[rank1]: E: d')",
            "raised E",
        ),
        ("import sys; print('Traceback', file=sys.stderr); print('b'); sys.exit(4)", "exit code 4: b"),
    ],
)
def test_a_script_answers_by_what_it_raised(text: str, answer: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(text)
    found = command._answer_of_script(tmp_path / "script.py", Made(python=sys.executable, lock=""))
    assert str(found).startswith(answer)


def test_a_script_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("sleep 60 & echo $! > pid; wait")
    found = command._answer_of_script(tmp_path / "script.py", Made(python="sh", lock=""), seconds=1)
    assert str(found) == "timed out: after 1 s"
    assert is_dead_soon(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        ('["b==1", "c @ file:///c.whl"]', '["b==2", "c @ file:///c.whl"]', "'c @ file:///c.whl' is not from an index"),
        ('["b==1"]\npython = "3.12"', '["b==2"]', "old and new may differ in requirements only"),
    ],
)
def test_ends_that_blame_cannot_vary_are_refused(
    stubs: Path, monkeypatch: pytest.MonkeyPatch, first: str, last: str, message: str, capsys: Any
) -> None:
    def made(wanted: Environment) -> Made:
        return Made(python="", lock="".join(f"{one} --hash=sha256:1\n" for one in wanted.requirements))

    monkeypatch.setattr(command, "make_environment", made)
    file = stubs.with_name("two.toml")
    file.write_text(f"[environments.old]\nrequirements = {first}\n[environments.new]\nrequirements = {last}\n")
    assert main(["blame", str(stubs), "--in", str(file), "--good", "old", "--bad", "new"]) == 2
    assert message in capsys.readouterr().err
    direct = ["--package", "b", "--requirement", "c @ git+https://c"]
    assert main(["blame", str(stubs), *direct]) == 2
    assert "'c @ git+https://c' is not from an index" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --package NAME, or --in FILE.toml"),
        (["--package", "b", "--bad", "9"], "the index has no b 9 for this Python; it has 1, 2, 3, 4, 5"),
        (["--package", "b", "--bad", "1"], "--good and --bad are both 1"),
        (["--in", "no.toml", "--good", "a", "--bad", "b"], "there is no file no.toml"),
        (["--in", "no.toml", "--good", "a"], "needs two of its environments"),
    ],
)
def test_wrong_use_of_blame_is_told(stubs: Path, words: list[str], message: str, capsys: Any) -> None:
    assert main(["blame", str(stubs), *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no environments"),
        ("[environments.a]\nrequirement = []", "there is no such key"),
        ("[environments.a]\nrequirements = 'torch'", "must be a list"),
        ("[environments.'../a']\nrequirements = []", "should match pattern"),
        ("[environments.a]\nrequirements = []\nvariables = {NCCL_ALGO = 1}", "should be a valid string"),
        ("[environments.a]\nrequirements = []\nvariables = {'A B' = '1'}", "should match pattern"),
        *(
            (f"[environments.a]\nrequirements = []\nvariables = {{{name} = '1'}}", f"{name} is read before .* whole")
            for name in ("LD_PRELOAD", "PYTHONPATH", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
        ),
        *(
            (f"[environments.a]\nrequirements = []\nvariables = {{{name} = '1'}}", f"the suite sets {name}.*leave it")
            for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "MASTER_PORT", "NCCL_HOSTID", "TMPDIR")
        ),
    ],
)
def test_a_wrong_file_of_environments_is_told(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_environments(tmp_path / "e.toml")


def test_variables_of_an_environment_are_set_in_its_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path))
    asked = "import os; print(os.environ.get('NCCL_ALGO'))"
    printed = []
    for variables in ({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": 'it\'s "Tree"'}, {}):
        made = environments.make_environment(Environment(requirements=(), variables=variables))
        printed.append(subprocess.run([made.python, "-c", asked], check=True, capture_output=True, text=True).stdout)
    assert printed == ["Ring\n", 'it\'s "Tree"\n', "None\n"]


def test_variables_that_the_suite_sets_for_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it takes from the user may be set."""
    names = environment("cpu").keys() - os.environ.keys() | {"OMP_NUM_THREADS", "PYTHONPATH"}
    for name in names:
        monkeypatch.setenv(name, "users")
    own = {name for name in names if environment("cpu")[name] != "users"}
    assert own >= {"OMP_NUM_THREADS", "PYTHONPATH", "GLOO_SOCKET_IFNAME"}
    for name in own:
        with pytest.raises(ValidationError, match=f"{name}.*(whole command|leave it out)"):
            Environment(requirements=(), variables={name: "1"})
    Environment(requirements=(), variables={"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Ring"})


def test_an_environment_without_variables_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another name than that of earlier releases would make each environment again."""
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path))
    made = environments.make_environment(Environment(requirements=()))
    about = ["", "{}.{}.{}".format(*sys.version_info), *environments._inherited()]
    assert Path(made.python).parents[1].name == hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("WARNING: slow\nERROR: No version of b\nERROR: No matching b", "No version of b; No matching b"),
        ("error: No solution found\n  cause: b is not in the registry", "error: No solution found; cause: b is not"),
        ("python3.12: not found", "python3.12: not found"),
        ("", "no output"),
        (
            f"ERROR: Ignored the following yanked versions: 1.5\nERROR: No b (from versions: {', '.join('123456789')})",
            "No b (the newest: 6, 7, 8, 9)",
        ),
    ],
)
def test_the_words_of_an_installer_are_kept(told: str, words: str) -> None:
    with pytest.raises(Unmade, match=f"^{re.escape(words)}"):
        environments.called([sys.executable, "-c", f"import sys; sys.exit({told!r})"])


def test_torch_for_cuda_is_never_installed_beside_cpu_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "package_version", lambda package: "2.13.0+cpu")
    for lock in ("torch==2.12.0 --hash=sha256:1\n", "nvidia-cublas-cu12==12.8\ntorch==2.12.0\n"):
        with pytest.raises(Unmade, match="belongs to torch for CUDA, several GB"):
            environments._check_torch(lock)
    environments._check_torch("torch==2.12.0+cpu\nnvidia-ml-py==13\n")
    monkeypatch.setattr(environments, "package_version", lambda package: "2.13.0")
    environments._check_torch("torch==2.12.0\n")


def test_finding_pip_leaves_distutils_to_setuptools() -> None:
    """Which DeepSpeed and Megatron import in this process: setuptools fails after another distutils was imported."""
    code = (
        "import sys; from importlib.util import find_spec; from conformance.core import environments;"
        "environments._pip(sys.executable); print(find_spec('distutils').origin)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "setuptools" in found


def test_the_index_of_an_environment_is_read_beside_the_configured_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch for CPUs has an index of its own, and what else is required lies in the configured one."""
    folders = {"needed": ["1"], "shared": ["2"]}, {"shared": ["1", "2+cpu"]}
    addresses = [(tmp_path / str(number)).as_uri() for number in range(len(folders))]
    for number, packages in enumerate(folders):
        for name, versions in packages.items():
            folder = tmp_path / str(number) / name
            folder.mkdir(parents=True)
            for version in versions:
                write_wheel(folder, name, version, {f"{name}.py": ""})
            links = [f'<a href="{file.name}">{file.name}</a>' for file in sorted(folder.iterdir())]
            (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")
    settings = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": addresses[0], "PATH": "/bin"}
    for name, value in {**settings, "PARITY_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    wanted = Environment(requirements=("needed", "shared"), index=addresses[1])
    assert environments.make_environment(wanted).pins == {"needed": "1", "shared": "2+cpu"}
    assert environments.releases("shared", wanted) == ["1", "2", "2+cpu"]


def test_an_environment_is_a_column_that_says_why_it_is_empty(tmp_path: Path) -> None:
    again = "parity matrix m.toml --environment"
    for name, note in (("new", ""), ("old", "no wheel of b 2")):
        out = tmp_path / name if note else write_sample(tmp_path / name)
        about: Any = {"name": name, "note": note, "command": f"{again} {name}", "backends": ("deepspeed",)}
        write_environment(
            out,
            EnvironmentRun(
                lock="b==2 --hash=sha256:1\nc[d] @ https://me:password@host/secret/c-1.whl?token=1\n", **about
            ),
        )
    columns = {one.version: one for one in [*columns_of(tmp_path / "new"), *columns_of(tmp_path / "old")]}
    ran, empty = columns["new"], columns["old"]
    assert (ran.versions["b"], ran.versions["c"]) == ("2", "c-1.whl")
    assert all(square.reproduce.startswith(f"{again} new --") for square in ran.squares.values())
    board = Board(columns=(ran, empty))
    gap = board.square(empty, board.rows[0])
    assert (gap.state, gap.cause) == ("gap", "no wheel of b 2")
    assert gap.reproduce.startswith(f"{again} old --cells")


ADAPTER = """
import planted, plain_backend
from conformance.backends.protocol import BackendInfo

if planted.WRONG:
    plain_backend.clip_coefficient = lambda norm, most: 1.0

class Planted(plain_backend.Plain):
    @classmethod
    def describe(cls):
        return BackendInfo(name="planted", packages=("planted",))
"""
RELEASES = {"1.0": "WRONG = False", "1.1": "WRONG = False", "1.2": "WRONG = True", "1.3": "raise OSError('no symbol')"}


@pytest.mark.exhaustive
def test_cells_run_in_environments_made_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Real environments, by venv and pip: one release is wrong, one needs another Python, one breaks on import."""
    wheels, paths = tmp_path / "wheels", [str(ROOT), str(ROOT / "tests" / "support")]
    settings = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", "PIP_FIND_LINKS": str(wheels), "PATH": "/bin"}
    settings |= {"PARITY_CACHE": str(tmp_path / "cache"), "PYTHONPATH": ":".join(paths)}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for version, text in RELEASES.items():
        more = "Requires-Python: >=4\n" * (version == "1.1")
        write_wheel(wheels, "planted", version, {"planted.py": text, "planted_adapter.py": ADAPTER}, more=more)
    file, out = tmp_path / "m.toml", tmp_path / "out"
    file.write_text("".join(f'[environments."{v}"]\nrequirements = ["planted=={v}"]\n' for v in (*RELEASES, "9")))
    backend = ["--backend", "planted_adapter:Planted", "--profile", write_profile(tmp_path)]
    assert main(["matrix", str(file), *backend, "--cells", "*/dp2/*", "--no-bisect", "--out", str(out)]) == 1
    assert "tiny/llama/planted/dp2/fp32: 1.0 pass, 1.2 fail, 1.3 infrastructure" in capsys.readouterr().out
    board = read_board(out / "board.json")
    found = {one.version: board.square(one, board.rows[0]) for one in board.columns}
    assert {version: square.state for version, square in found.items()} == {
        **{"1.0": "pass", "1.1": "gap", "1.2": "differs", "1.3": "gap", "9": "gap"}
    }
    assert "requires a different Python" in found["1.1"].cause
    assert "cannot be imported: OSError" in found["1.3"].cause
    assert "No matching distribution found for planted==9" in found["9"].cause
    cell = "tiny/llama/planted/dp2/fp32"
    assert main(["blame", cell, *backend, "--package", "planted", "--good", "1.0", "--bad", "1.2", "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["before"]["release"], told["after"]["release"]) == ("1.0", "1.2")
    assert (told["before"]["state"], told["after"]["stage"]) == ("pass", "clipped update")
    assert "requires a different Python" in told["skipped"]["1.1"]
    assert not [python for _, python in registry._there if python.startswith(str(tmp_path))]  # no process is left


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["blame", "sft-packd/llama/fsdp2/dp2/exact", "--package", "b"], "no cell matches 'sft-packd/.*'sft-packed'"),
        (["blame", "*/*/fsdp2/*/exact", "--package", "b"], r"is \d+ cells; give the id of one"),
        (["blame", "no.py", "--package", "b"], "there is no script no.py"),
        (["matrix", "one.toml", "--cells", "sft-packed/llama/fsdp2/dp9/exact"], "no cell matches 'sft-packed/llama"),
        (["matrix", "one.toml", "--profile", "quik"], "no profile 'quik'"),
    ],
)
def test_wrong_cells_are_told_before_an_environment_is_made(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def make(wanted: Environment) -> Made:
        pytest.fail("an environment was made")

    monkeypatch.setattr(command, "make_environment", make)
    monkeypatch.chdir(tmp_path)
    Path("one.toml").write_text("[environments.one]\nrequirements = []\n")
    assert main(words) == 2
    told = capsys.readouterr().err
    assert re.search(message, told)
    assert told.count("\n") == 1
    assert [*tmp_path.iterdir()] == [tmp_path / "one.toml"]


def test_why_an_environment_cannot_be_made_is_told_once(stubs: Path, capsys: Any) -> None:
    """The command that runs it again has the options that were given, but for the folder, which is in use."""
    file, out = stubs.with_name("one.toml"), stubs.with_name("out")
    file.write_text('[environments.one]\nrequirements = ["b==2"]\n')
    given = "--profile gpu --backend fsdp2 --backend megatron"
    cells = "--cells 'sft-packed/*/dp2/exact'"
    assert main(["matrix", str(file), *shlex.split(f"{given} {cells}"), "--out", str(out)]) == 3
    told = capsys.readouterr()
    assert (told.out + told.err).count("no wheel of b 2") == 1
    assert f"one: nothing was run; run: parity matrix {file} --environment one {given} {cells}\n" in told.out
    assert [column.command for column in read_board(out / "board.json").columns] == [
        f"parity matrix {file} --environment one {given}"
    ] * 2


def test_a_matrix_that_is_stopped_shows_what_was_run(stubs: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def run_in(made: Made, out: Path, *_: object) -> int:
        if out.name == "two":
            raise Stopped(signal.SIGTERM)
        write_sample(out)
        return 0

    monkeypatch.setattr(command, "run_in", run_in)
    file, out = stubs.with_name("three.toml"), stubs.with_name("out")
    file.write_text("".join(f"[environments.{name}]\nrequirements = []\n" for name in ("one", "two", "three")))
    assert main(["matrix", str(file), "--backend", "deepspeed", "--out", str(out)]) == 143
    found = {column.version: column.note for column in read_board(out / "board.json").columns}
    assert found == {"one": "", "two": "stopped"}
    assert "two: nothing was run" in capsys.readouterr().out
