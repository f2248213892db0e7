"""Fuzzes output folders, and checks the results of every mutation.

``parity judge`` and ``parity report`` end with one of their exit codes, without a traceback and in time. Nothing is
written outside the folder, no cell with falsified records conforms, and no other cell changes.

Run it for longer, or for one seed: ``python tests/support/fuzz_records.py FIRST COUNT``.
"""

import contextlib
import io
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from record_mutations import Mutation, mutate
from run_sample import JUDGED, write_sample_run

from conformance.cli import main as cli
from conformance.judge.verdict import DEFECT

LIMIT_S = 20.0  # for one command, which takes a fraction of a second; what hangs never ends
MEMORY_KIB = 2**20  # that a command may take beyond what the process has taken before


# What holds


def check(seed: int, sample: Path) -> Mutation:
    """Mutate a copy of ``sample``, judge it and report it. Raises AssertionError for whatever must not happen."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        out, outside = Path(folder) / "out", Path(folder) / "outside"
        shutil.copytree(sample, out)
        outside.mkdir()
        (outside / "victim.json").write_text('{"schema": 2, "type": "header"}')
        mutation = mutate(out, rng)
        before = _state_of(outside)
        try:
            if again := rng.random() < 0.3:
                run("report", out)
            code = run("judge", out)
            _check_verdicts(mutation, out, code)
            if again and code in (0, 1):
                assert run("report", out) == code, "the report says something else"
            assert _state_of(outside) == before, "something was written outside of the output folder"
            assert sorted(path.name for path in Path(folder).iterdir()) == ["out", "outside"]
        except (AssertionError, OSError) as error:
            raise AssertionError(f"seed {seed}, {mutation.what}: {error}") from error
    return mutation


def run(command: str, out: Path) -> int:
    """One command of the suite; returns its exit code."""
    said, memory = io.StringIO(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), _time_limit():
        code = cli.main([command, str(out)])
    assert code in cli.EXIT.values()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < memory + MEMORY_KIB
    assert "Traceback" not in said.getvalue(), said.getvalue()
    assert DEFECT not in said.getvalue(), said.getvalue()
    return code


def _check_verdicts(mutation: Mutation, out: Path, code: int) -> None:
    assert not (mutation.spoils and code == cli.EXIT["conforms"]), "conforms"
    if not mutation.isolated:
        return
    assert code != cli.EXIT["usage"], "one bad record stops the others from being judged"
    for cell in json.loads((out / "summary.json").read_text())["cells"]:
        verdict = json.loads((out / cell["folder"] / "verdict.json").read_text())
        assert cell["state"] == verdict["state"]
        if cell["id"] in JUDGED:
            is_spoiled = cell["id"] in mutation.spoils
            assert not is_spoiled or cell["state"] in ("differs", "infrastructure"), f"{cell['id']} {cell['state']}"
            assert is_spoiled or cell["state"] == "conforms" or not mutation.spoils, f"{cell['id']}: {cell['reason']}"


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(_: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {LIMIT_S:.0f} s, at {frame}")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _state_of(folder: Path) -> list[tuple[str, int, int, bytes]]:
    found = []
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found.append((str(path), status.st_mode, status.st_mtime_ns, content))
    return found


def main(first: int, count: int) -> int:
    """Check ``count`` seeds from ``first`` on; prints what does not hold, and returns how many."""
    failed = 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    with tempfile.TemporaryDirectory() as folder:
        sample = write_sample_run(Path(folder) / "out")
        for seed in range(first, first + count):
            try:
                check(seed, sample)
            except AssertionError as error:
                failed += 1
                print(error, flush=True)
    print(f"{count} mutations from seed {first} on, {failed} of which failed")
    return failed


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]))))
