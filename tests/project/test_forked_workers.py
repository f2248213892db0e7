"""Checks that forks run test files as one process does: the same results, fixtures of their own, deaths reported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT, ROOT = Path(__file__).parents[1] / "support", Path(__file__).parents[2]
HEAD = """
import os, warnings
from pathlib import Path
import pytest

HERE = Path(__file__).parent
"""
CONFTEST = """
@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    yield tmp_path_factory.mktemp("own")
    (HERE / f"ended-{os.getpid()}").touch()
"""
FILE = """
@pytest.mark.parametrize("number", range(3))
def test_numbers(number, folder, capfd):
    warnings.warn(f"careful with {Path(__file__).stem}")
    os.system("echo printed by a process")
    assert capfd.readouterr().out == "printed by a process\\n"
    with (HERE / f"{Path(__file__).stem}.pids").open("a") as file:
        file.write(f"{os.getpid()} {folder}\\n")

def test_fails():
    os.system("echo seen with the failure")
    assert [1, 2] == [1, 3]

@pytest.mark.skip(reason="not here")
def test_skipped(): ...

@pytest.mark.xfail
def test_expected(): raise ValueError

@pytest.fixture
def broken():
    yield
    raise ValueError

def test_teardown(broken): ...
"""
DIES = "import os\ndef test_before(): ...\ndef test_dies(): os._exit(3)\ndef test_after(): ...\n"


def run(folder: Path, *options: str) -> str:
    path = os.pathsep.join((str(SUPPORT), str(ROOT)))
    command = [sys.executable, "-m", "pytest", "-p", "forked_workers", "-p", "no:cacheprovider", "-rA", *options]
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120).stdout


def results(said: str) -> list[str]:
    lines = re.findall(r"^(?:PASSED|FAILED|ERROR|XFAIL|SKIPPED) .*", said, re.MULTILINE)
    return sorted(lines) + re.findall(r"(\d+ failed, .* warnings?, 1? ?.*) in ", said)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(HEAD + FILE)
    (tmp_path / "conftest.py").write_text(HEAD + CONFTEST)
    return tmp_path


def test_forks_have_the_results_of_one_process(folder: Path) -> None:
    said = run(folder, "--forks", "2")
    assert "3 failed, 12 passed, 3 skipped, 3 xfailed, 9 warnings, 3 errors in " in said
    assert len(re.findall(r"^E +assert \[1, 2\] == \[1, 3\]$", said, re.MULTILINE)) == 3
    assert said.count("\nseen with the failure\n") == 3
    assert "careful with test_a" in said
    files = [set((folder / f"test_{name}.pids").read_text().splitlines()) for name in "abc"]
    assert all(len(lines) == 1 for lines in files), "a file runs whole in one fork, with one session"
    pids, own = zip(*(line.split() for line in set.union(*files)), strict=True)
    assert len({*pids}) == len({*own}) == 2
    assert {path.name for path in folder.glob("ended-*")} == {f"ended-{pid}" for pid in pids}
    assert results(said) == results(run(folder))


def test_a_fork_that_dies_fails_its_test_and_another_one_runs_the_rest(folder: Path) -> None:
    (folder / "test_c.py").write_text(DIES)
    said = run(folder, "--forks", "2")
    assert "3 failed, 10 passed, 2 skipped, 2 xfailed, 6 warnings, 2 errors in " in said
    assert "the fork of pytest that ran this test has ended with 3" in said
    assert "PASSED test_c.py::test_after" in said


def test_the_first_failure_ends_all_forks(folder: Path) -> None:
    (folder / "test_b.py").write_text("def test_fails(): assert False\n")
    (folder / "test_c.py").write_text("import time, pytest\n@pytest.mark.parametrize('n', range(600))\n")
    with (folder / "test_c.py").open("a") as file:
        file.write("def test_waits(n): time.sleep(0.1)\n")
    said = run(folder, "--forks", "2", "-x", "test_c.py", "test_b.py", "test_a.py")
    assert re.search(r" 1 failed, \d+ passed.* in ", said), said
    assert "stopping after 1 failures" in said
    assert "test_waits[599]" not in said
