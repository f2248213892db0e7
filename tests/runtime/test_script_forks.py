"""A forked script ends as the same script under ``python`` does: statuses, output, signals, time-outs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from script_forks import Forker
from worker_group_helpers import is_dead_soon

SCRIPTS = {
    "succeeds": "print('fine')",
    "exits with 0": "import sys; print('before'); sys.exit(0)",
    "exits with 1": "import sys; print('defect not as described'); sys.exit(1)",
    "exits with words": "import sys; sys.exit('not reproduced')",
    "exits without clean-up": "import os; os._exit(7)",
    "is killed": "import os, signal; print('lost in a buffer'); os.kill(os.getpid(), signal.SIGKILL)",
    "aborts": "import os; print('said', flush=True); os.abort()",
    "speaks on both and in a child": (
        "import subprocess, sys\n"
        "print('out', flush=True); print('err', file=sys.stderr); subprocess.run(['echo', 'hello'])"
    ),
    "does something at its end": "import atexit; atexit.register(print, 'last words')",
    "looks at itself": "import sys; print(__name__, __file__, sys.argv, sys.path[0], sys.modules['__main__'].__file__)",
    "imports its neighbour": "import neighbour; print(neighbour.__file__)",
    "forks ranks": (
        "import multiprocessing as mp\n"
        "def rank(queue): queue.put(3)\n"
        "if __name__ == '__main__':\n"
        "    queue = mp.get_context('fork').SimpleQueue()\n"
        "    process = mp.get_context('fork').Process(target=rank, args=(queue,))\n"
        "    process.start(); process.join(); print(queue.get(), process.exitcode)\n"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "neighbour.py").write_text("")
    return folder


@pytest.fixture(scope="module")
def forker(folder: Path) -> Iterator[Forker]:
    with Forker.start(folder, ("colorsys",)) as forker:
        yield forker


def write(folder: Path, source: str) -> Path:
    script = folder / "script.py"
    script.write_text(source)
    return script


@pytest.mark.parametrize("source", SCRIPTS.values(), ids=SCRIPTS)
def test_a_fork_ends_as_a_subprocess_does(forker: Forker, folder: Path, source: str) -> None:
    script = write(folder, source)
    by_hand = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    forked = forker.run(script, timeout=60)
    assert (forked.returncode, forked.stdout, forked.stderr) == (by_hand.returncode, by_hand.stdout, by_hand.stderr)


def test_an_exception_is_told_with_its_traceback(forker: Forker, folder: Path) -> None:
    done = forker.run(write(folder, "def loss():\n    return 1 / 0\n\nloss()"), timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):\n")
    assert f'File "{folder}/script.py", line 2, in loss' in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_script_that_hangs_is_ended_with_all_that_it_started(forker: Forker, folder: Path) -> None:
    hangs = "import subprocess; child = subprocess.Popen(['sleep', '1000']); print(child.pid, flush=True); child.wait()"
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        forker.run(write(folder, hangs), timeout=0.5)
    assert is_dead_soon(int(str(caught.value.stdout)))
    assert forker.run(write(folder, "print('next')"), timeout=60).stdout == "next\n"


def test_scripts_find_imports_done_and_nothing_of_each_other(forker: Forker, folder: Path) -> None:
    source = "import sys; print([name for name in ('colorsys', 'wave') if name in sys.modules]); import wave"
    for _ in range(2):
        assert forker.run(write(folder, source), timeout=60).stdout == "['colorsys']\n"


def test_a_branch_has_more_imported_in_an_environment_of_its_own(forker: Forker, folder: Path) -> None:
    script = write(folder, "import os, sys; print('wave' in sys.modules, os.environ.get('FAMILY'))")
    with forker.branch(("wave",), environment={"FAMILY": "one"}) as branch:
        assert branch.run(script, timeout=60).stdout == "True one\n"
        assert forker.run(script, timeout=60).stdout == "False None\n"


def test_what_cannot_be_forked_is_told(folder: Path) -> None:
    (folder / "threaded.py").write_text("import threading; threading.Thread(target=threading.Event().wait).start()")
    with pytest.raises(RuntimeError, match=r"cannot fork after importing threaded: \{'threads': 2\}"):
        Forker.start(folder, ("threaded",)).__enter__()
    with pytest.raises(RuntimeError, match="cannot fork after importing no_such_module: it failed, see stderr"):
        Forker.start(folder, ("no_such_module",)).__enter__()


def test_no_process_is_left(folder: Path) -> None:
    with Forker.start(folder, ()) as forker, forker.branch((), environment={}) as branch:
        script = write(folder, "import os; print(os.getppid())")
        processes = [int(each.run(script, timeout=60).stdout) for each in (forker, branch)]
        assert processes[0] != processes[1] != os.getpid()
    assert all(is_dead_soon(process) for process in processes)
