"""Kills runs and trainings at random moments, fills the disk under saves, and runs cells for a long time.

python benchmarks/kills.py runs FOLDER --count 200 --jobs 12     # controllers of `parity run`, each run then resumed
python benchmarks/kills.py saves FOLDER --count 120 --jobs 6     # ranks in the middle of saves, three backends
python benchmarks/kills.py disk FOLDER --jobs 6 [--stride 1]     # a full disk at every page of a save; needs root
python benchmarks/kills.py soak FOLDER --minutes 15              # memory of the controller over many cells

FOLDER is new. Each begins nothing new after --minutes, prints JSON, and ends with 1 if a verdict or a number is wrong,
or if a process, a file in TMPDIR or in /dev/shm is left. docs/measurements/reliability.md has results.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from conformance.core.process import signal_at_death_of

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "tests")]
MARK = "PARITY_KILLS"
GONE_S = 20.0  # for processes to end after the death of their controller, on a loaded machine
OF_TIME = {"seconds", "memory", "host_memory"}  # the rest of a verdict is the same in every run
GROWTH_KIB = 64  # of the controller for each cell: its verdict and its line in the summary
CHAIN = 6  # kills of one run, before it is resumed to its end
SAVES = [
    (backend, layout, asynchronous)
    for backend, layout in (("fsdp2", "dp2"), ("deepspeed", "dp2.zero1"), ("megatron", "tp2"))
    for asynchronous in (False, True)
]
PROFILE = """description = "cells for {count} scenarios"
[[cells]]
scenarios = [{scenarios}]
models = ["llama"]
layouts = ["dp1", "dp2"]
precisions = ["exact"]
"""
SCENARIO = 'steps = 1\ndata.rows = 4\n[optimizer]\nname = "sgd"\nlr = {lr}\n'


def write_profile(folder: Path, count: int) -> Path:
    """Writes a profile of tiny cells; every scenario has another learning rate, and so an oracle of its own."""
    names = [f"s{number:04d}.toml" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).write_text(SCENARIO.format(lr=0.05 + number * 1e-5))
    file = folder / "tiny.toml"
    file.write_text(PROFILE.format(count=count, scenarios=", ".join(f'"{name}"' for name in names)))
    return file


def processes_of(mark: str) -> list[int]:
    """Returns the processes with this mark in their environment, which every descendant inherits."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def left_by(mark: str, *folders: Path) -> list[str]:
    """Waits for the processes with a mark to end; returns those that do not, with the files in ``folders``."""
    deadline = time.monotonic() + GONE_S
    while (left := processes_of(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:100] for pid in left]
    compiled = "torchinductor"  # a cache of torch, which stays on purpose
    return commands + [str(path) for folder in folders for path in folder.iterdir() if compiled not in path.name]


@contextlib.contextmanager
def shared_memory_kept(problems: list[str]) -> Iterator[None]:
    before = set(Path("/dev/shm").iterdir())
    yield
    problems += [str(path) for path in set(Path("/dev/shm").iterdir()) - before if not _is_of_live(path)]


def _is_of_live(path: Path) -> bool:
    """Whether the name has the id of a live process, which belongs to somebody else."""
    return any(Path("/proc", part).exists() for part in path.name.replace("_", "-").split("-") if part.isdigit())


class Runs:
    """Runs, kills and resumes `parity run` in folders below ``folder``."""

    def __init__(self, folder: Path, backend: str, cells: int) -> None:
        self._folder, self._profile, self._backend = folder, write_profile(folder, cells // 2), backend
        self._env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]),
            "PARITY_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
        }
        self.expected: dict[str, Any] = {}
        self.seconds, self.until = 0.0, math.inf

    def start(self, name: str, out: Path) -> subprocess.Popen[bytes]:
        temporary = self._folder / f"{name}.tmp"
        temporary.mkdir(exist_ok=True)
        if not (out / "summary.json").exists():  # it was killed before there was anything to resume
            shutil.rmtree(out, ignore_errors=True)
        where = ["--resume" if out.exists() else "--out", str(out)]
        command = [sys.executable, "-m", "conformance.cli.main", "run", "--profile", str(self._profile)]
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, "--backend", self._backend, *where],
                env={**self._env, "TMPDIR": str(temporary), MARK: name},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self._folder,  # the profile names scenarios by paths from here
                start_new_session=True,
                preexec_fn=partial(signal_at_death_of, os.getpid(), signal.SIGKILL),
            )

    def whole(self, name: str) -> dict[str, Any]:
        """Runs to the end, undisturbed; returns the verdicts by cell."""
        began, out = time.monotonic(), self._folder / name
        code = self.start(name, out).wait(300)
        self.seconds = time.monotonic() - began
        return {"code": code, **verdicts(out)}

    def chain(self, number: int, kills: int) -> tuple[int, list[str]]:
        """Kills a run up to ``kills`` times and resumes it to the end; returns the kills and what is wrong."""
        name, drawn = f"run-{number:03d}", random.Random(number)
        out, problems, killed = self._folder / name, list[str](), 0
        if time.monotonic() > self.until:
            return 0, []
        for kill in range(kills):
            run = self.start(name, out)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a resumed run is shorter
                run.wait(drawn.uniform(0.02, 0.5 if kill else 1.0) * self.seconds)
            is_killed = run.poll() is None
            run.kill()
            run.wait()
            problems += [f"{name}: left {left}" for left in left_by(name)]
            killed += is_killed
            if not is_killed:
                break
        found = {"code": self.start(name, out).wait(300), **verdicts(out)}
        problems += [f"{name}: left {left}" for left in left_by(name, self._folder / f"{name}.tmp")]
        problems += [f"{name}: left {path}" for path in out.rglob("*.unfinished")]
        problems += [f"{name}: left {path}" for path in self._folder.glob(f".{name}.*")]
        if found != self.expected:
            problems.append(f"{name}: other verdicts: {found}")
        elif not problems:
            shutil.rmtree(out)
        print(f"{name}: {killed} kills, {problems or 'as undisturbed'}", file=sys.stderr, flush=True)
        return killed, problems


def verdicts(out: Path) -> dict[str, Any]:
    """Returns the verdict of every cell, with all of its numbers."""
    entries = [json.loads(file.read_text()) for file in out.glob("cells/*/verdict.json")]
    return {entry["cell"]: {key: entry[key] for key in entry.keys() - OF_TIME} for entry in entries}


def runs(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Kills controllers at random moments, from their start to their end."""
    of, problems = Runs(options.folder, options.backend, options.cells), list[str]()
    of.until = options.until
    processors, begun = sorted(os.sched_getaffinity(0)), itertools.count()

    def take_processors() -> None:
        """Gives this thread, and so the runs that it starts, two processors."""
        first = 2 * next(begun) % len(processors)
        os.sched_setaffinity(0, processors[first : first + 2])

    with shared_memory_kept(problems), ThreadPoolExecutor(options.jobs, initializer=take_processors) as pool:
        of.whole("warm-up")  # fills the cache
        first, *others = pool.map(of.whole, [f"whole-{number}" for number in range(options.jobs)])
        assert first["code"] == 0
        assert all(other == first for other in others), "undisturbed runs differ"
        of.expected = first
        killed = 0
        chains = pool.map(of.chain, range(-(-options.count // CHAIN)), [CHAIN] * options.count)
        for count, found in chains:
            killed, problems = killed + count, problems + found
        number = options.count
        while (
            killed < options.count and not problems and time.monotonic() < of.until
        ):  # some runs had ended before their kill
            count, found = of.chain(number, min(CHAIN, options.count - killed))
            killed, problems, number = killed + count, problems + found, number + 1
    problems += [str(path) for path in (options.folder / "cache").rglob("*.unfinished")]
    return {"kills": killed, "cells": options.cells, "seconds of a run": round(of.seconds, 1)}, problems


def ranks_of(pool: Any, folder: Path, backend: str, layout: str) -> Any:
    from resume_runs import Ranks

    folder.mkdir(parents=True)
    return Ranks(pool=pool, folder=folder, backend=backend, layout=layout)


def kill_saves(
    folder: Path, backend: str, layout: str, asynchronous: bool, *, count: int, until: float
) -> tuple[list[bool], list[str]]:
    """Kills a rank in ``count`` saves, and resumes; returns whether each was half-written, and problems."""
    from conformance.runtime import Pool

    drawn, half, problems = random.Random(f"{backend} {asynchronous}"), list[bool](), list[str]()
    with Pool(work_dir=folder / "logs") as pool:
        ranks = ranks_of(pool, folder / "whole", backend, layout)
        losses = ranks("train_behind_a_save", root=str(folder / "whole" / "training"))[0]["losses"]
        while len(half) < count and time.monotonic() < until:
            number = len(half)
            root, name = folder / str(number), f"{folder.name} {number}"
            killed = ranks.outcome(
                "train_until_killed",
                root=str(root),
                victim=number % 2,
                fraction=drawn.uniform(0.0, 1.0),
                asynchronous=asynchronous,
            )
            if "SIGKILL" not in killed.reason:
                problems.append(f"{name}: not killed: {killed.reason}")
            half.append((root / "step-000002.partial").exists())
            step, *after = ranks("load_latest", root=str(root))[0]
            if after != losses[step - 1 :]:
                problems.append(f"{name}: from step {step} {after} instead of {losses}")
            shutil.rmtree(root)
    print(f"{folder.name}: {len(half)} kills, {sum(half)} half-written", file=sys.stderr, flush=True)
    return half, problems


def saves(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    chosen, problems = chosen_saves(options), list[str]()
    each = -(-options.count // len(chosen))
    temporary = options.folder / "tmp"
    temporary.mkdir()
    os.environ |= {MARK: "saves", "TMPDIR": str(temporary)}

    def kill(of: tuple[str, str, bool]) -> tuple[str, list[bool], list[str]]:
        return name_of(of), *kill_saves(options.folder / name_of(of), *of, count=each, until=options.until)

    with shared_memory_kept(problems), ThreadPoolExecutor(options.jobs) as pool:
        half = {}
        for name, found, wrong in pool.map(kill, chosen):
            half[name] = {"kills": len(found), "half-written": sum(found)}
            problems += wrong
        problems += _after_the_pools(temporary)
    return half, problems


def name_of(of: tuple[str, str, bool]) -> str:
    return f"{of[0]}-{'asynchronous' if of[2] else 'synchronous'}"


def chosen_saves(options: argparse.Namespace) -> list[tuple[str, str, bool]]:
    return [of for of in SAVES if re.search(options.only, name_of(of))]


def _after_the_pools(temporary: Path) -> list[str]:
    from conformance.runtime import preload_server

    if preload_server._preload_server:
        preload_server._preload_server._close()
    own = {os.getpid()}
    deadline = time.monotonic() + GONE_S
    while (left := set(processes_of("saves")) - own) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [f"process {pid}" for pid in left] + [str(p) for p in temporary.iterdir() if "inductor" not in p.name]


def disk(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Saves with more and more room, until all files have had a write that failed."""
    from conformance.runtime import Pool

    def fill(of: tuple[str, str, bool]) -> tuple[str, dict[str, Any], list[str]]:
        (backend, layout, asynchronous), name = of, name_of(of)
        small = options.folder / f"{name}.disk"
        small.mkdir()
        with mounted(small, megabytes=64), Pool(work_dir=options.folder / f"{name}.logs") as pool:
            ranks = ranks_of(pool, options.folder / name, backend, layout)
            root = small / "training"
            arguments = {"root": str(root), "asynchronous": asynchronous, "stride": options.stride}
            left_s = options.until - time.monotonic()
            outcome = ranks.outcome("save_while_the_disk_fills", limit_s=left_s, **arguments)
            if outcome.state != "done":
                return name, {}, [f"{name}: {outcome.reason}"]
            resumed, found = ranks("load_latest", fresh=True, root=str(root)), outcome.results[0]
            print(f"{name}: {found['failed']} failed saves", file=sys.stderr, flush=True)
            wrong = [] if resumed[0] == [2, found["loss"]] else [f"{name}: resumed with {resumed}, not {found['loss']}"]
            messages = [one["told"] for one in outcome.results]
            return name, {key: found[key] for key in ("failed", "whole_kib")} | {"messages": messages}, wrong

    with ThreadPoolExecutor(options.jobs) as pool:
        filled = list(pool.map(fill, chosen_saves(options)))
    return {name: found for name, found, _ in filled}, [problem for _, _, found in filled for problem in found]


@contextlib.contextmanager
def mounted(folder: Path, *, megabytes: int) -> Iterator[None]:
    """Mounts a file system in memory of this size."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def soak(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Runs cells in one session for some minutes; measures the memory of its controller and of its largest rank."""
    of, name, samples = Runs(options.folder, options.backend, options.cells), "soak", list[dict[str, int]]()
    run = of.start(name, options.folder / name)
    while run.poll() is None and time.monotonic() < options.until:
        time.sleep(5)
        ranks = [anonymous_memory(pid) for pid in processes_of(name) if pid != run.pid]
        done = (options.folder / f"{name}.log").read_text().count(" ok ")
        samples.append({"cells": done, "controller": anonymous_memory(run.pid), "largest other": max(ranks, default=0)})
    run.send_signal(signal.SIGTERM)
    code = run.wait(60)
    most = max(sample["cells"] for sample in samples)  # the controller writes reports then, from all verdicts
    samples = [sample for sample in samples if 0 < sample["cells"] < most]
    if len(samples) < 2:
        return {}, [f"no cell has ended in {options.minutes:g} minutes"]
    first, last = samples[len(samples) // 4], samples[-1]  # the first cells fill caches
    cells = last["cells"] - first["cells"]
    growth = {who: round((last[who] - first[who]) / cells, 1) for who in ("controller", "largest other")}
    problems = left_by(name, options.folder / f"{name}.tmp")
    problems += [f"{who} grows by {kib} KiB a cell" for who, kib in growth.items() if kib > GROWTH_KIB]
    problems += [f"exit code {code}"] if code not in (0, 143) else []
    shown = samples[:: max(1, len(samples) // 10)]
    return {"cells": last["cells"], "KiB a cell": growth, "KiB": shown}, problems


def anonymous_memory(pid: int) -> int:
    """Returns KiB; 0 of a process that has ended."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)
    return 0


COMMANDS = {"runs": runs, "saves": saves, "disk": disk, "soak": soak}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=12, help="kills")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs or backends at once")
    parser.add_argument("--cells", type=int, default=8, help="cells of a run that is killed")
    parser.add_argument("--backend", default="plain_backend:Plain", help="backend of a run that is killed")
    parser.add_argument("--stride", type=int, default=1, help="pages of 4 KiB that a save has more than the one before")
    parser.add_argument("--only", default="", help="expression for saves, such as megatron or fsdp2-asynchronous")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which nothing new is begun")
    options = parser.parse_args(arguments)
    options.until = time.monotonic() + 60 * options.minutes
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True)
    if options.command in ("saves", "disk"):
        from transformers import GenerationConfig  # noqa: F401  # threads that import it at once fail
    began = time.monotonic()
    found, problems = COMMANDS[options.command](options)
    print(json.dumps({**found, "problems": problems, "seconds": round(time.monotonic() - began)}, indent=1))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
