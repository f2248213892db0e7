"""Runs cells in several environments (`parity matrix`), and finds the release that changed a cell (`parity blame`).

The ranks of a cell run in an environment, as with ``--python``; oracle and judge stay in this one, so that all
environments are held against the same numbers.
"""

import argparse
import contextlib
import io
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from conformance.backends.protocol import registered_backends
from conformance.backends.registry import end_processes
from conformance.cli import EXIT
from conformance.cli.main import COMMANDS
from conformance.cli.run import output_folder, run_options
from conformance.core.environments import Environment, Made, Unmade, make_environment, read_environments, releases
from conformance.core.errors import Parser, UsageError, did_you_mean
from conformance.core.packages import canonical, load_command, package_version
from conformance.core.process import Stopped, signal_group, stop_code
from conformance.matrix.cell import Cell
from conformance.matrix.options import AtOnce, Kept, Options, Ranks, Selection
from conformance.matrix.profile import select_cells
from conformance.records.record_format import dumps
from conformance.results.output_folders import EnvironmentRun, write_environment
from conformance.results.run_results import SUMMARY, read_run, read_summary
from conformance.results.verdict import STATES
from conformance.runner.preflight import check_device

SEVERITY = (0, 3, 1)  # exit codes, the most important last
Pins = Mapping[str, str]  # exact versions by package
_RANK = r"(?:\[rank\d+\]: )?"  # torch's prefix
_RAISED = re.compile(
    rf"Traceback \(most recent call last\):\n(?:{_RANK}  .*\n)*{_RANK}([\w.]+)"
)  # the exception's type


def matrix_command(options: argparse.Namespace) -> int:
    """Makes each environment and runs the cells in it; publishes cells by environment. An environment that cannot be
    made, or in which nothing can be run, has a column that says why."""
    chosen = _chosen(read_environments(options.file), options.environment, options.file)
    backends = tuple(options.backend or registered_backends())
    out, arguments = output_folder(options.out), _given(options, Selection, Ranks, AtOnce, Kept)
    arguments += ["--no-bisect"] * options.no_bisect
    _check_selection(options)
    codes, notes, stopped = list[int](), dict[str, tuple[str, str]](), 0
    for name, wanted in chosen.items():
        setting = [f"{key}={value}" for key, value in wanted.variables.items()]
        _say(f"environment {name}: {', '.join([*wanted.requirements, *setting]) or 'what is installed'}")
        note, lock = "", ""
        try:
            made = make_environment(wanted)
            lock = made.lock
            codes.append(run_in(made, out / name, backends, arguments))
        except (Unmade, UsageError) as error:
            note = str(error)
            _say(f"environment {name}: {note}")
            codes.append(EXIT["usage"] if isinstance(error, UsageError) else EXIT["incomplete"])
        except KeyboardInterrupt as error:
            note, stopped = "stopped", stop_code(error)
        notes[name] = lock, note
        if stopped:
            break
    if codes and all(code == EXIT["usage"] for code in codes):
        return EXIT["usage"]
    folders = [out / name for name in notes]
    cells = [cell.id for folder in folders if (folder / SUMMARY).is_file() for cell in read_summary(folder)[1]]
    called = {cell.split("/")[2] for cell in cells} or {name.rpartition(":")[2].lower() for name in backends}
    patterns = [word for pattern in options.cells or () for word in ("--cells", pattern)]
    others = [*Selection.from_options(options).arguments(without="cells"), *_given(options, Ranks, AtOnce, Kept)]
    others += ["--no-bisect"] * options.no_bisect  # squares of the site add their own --cells
    again = {}
    for name, (lock, note) in notes.items():
        command = ["parity", "matrix", str(options.file), "--environment", name, *others]
        again[name] = shlex.join([*command, *patterns])
        about = EnvironmentRun(
            name=name, lock=lock, note=note, command=shlex.join(command), backends=tuple(sorted(called))
        )
        write_environment(out / name, about)
    with contextlib.redirect_stdout(io.StringIO()) as printed:  # a line for each backend in an environment
        load_command("publish").run(argparse.Namespace(outs=folders, to=out, against=None))
    print(printed.getvalue().partition("\n")[0], *_summary(folders, again), sep="\n")
    return stopped or max((code if code in SEVERITY else EXIT["incomplete"] for code in codes), key=SEVERITY.index)


def run_in(made: Made, out: Path, backends: Iterable[str], arguments: Sequence[str]) -> int:
    """Runs `parity run` with the ranks of the backends in an environment; returns the exit code. Raises UsageError."""
    parser = Parser(prog="parity run")
    COMMANDS["run"].add_arguments(parser)
    where = [word for name in backends for word in ("--python", f"{name}={made.python}")]
    words = [*arguments, *where, "--out", str(out)]
    options = parser.parse_args(words)
    options.arguments = words
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # where its reports are: this command has one of its own
            code = run_options(options)[1]
    finally:
        end_processes(made.python)
    if code > max(EXIT.values()):
        raise Stopped(code - 128)
    return code


def _given(options: argparse.Namespace, *kinds: type[Options]) -> list[str]:
    """Returns the arguments of `parity run` for the options that were given."""
    return [word for kind in kinds for word in kind.from_options(options).arguments()]


def _check_selection(options: argparse.Namespace) -> list[Cell]:
    """Returns the selected cells before an environment is made; none where an adapter is given as module:Class, whose
    name may be known in the environments only. Raises UsageError."""
    check_device(Ranks.from_options(options))
    is_known = all(":" not in name for name in options.backend or ())
    return select_cells(Selection.from_options(options)) if is_known else []


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _chosen(found: Mapping[str, Environment], names: Sequence[str], file: Path) -> dict[str, Environment]:
    for name in names:
        if name not in found:
            known = ", ".join(found)
            raise UsageError(f"{file} has no environment {name!r}; {did_you_mean(name, found)}it has {known}")
    return {name: found[name] for name in names or found}


def _summary(folders: Sequence[Path], again: Mapping[str, str]) -> list[str]:
    """Returns how many cells each environment has in each state, and the cells whose state is not the same in all.

    again: for each environment, the command that runs it once more.
    """
    states: dict[str, dict[str, str]] = {}
    for out in folders:
        listed = read_summary(out)[1] if (out / SUMMARY).is_file() else []
        states[out.name] = {cell.id: STATES[cell.state].name for cell in listed}  # type: ignore[index]
    lines = []
    for name, cells in states.items():
        counts = ", ".join(f"{count} {state}" for state, count in Counter(cells.values()).items())
        lines.append(f"{name}: {counts or f'nothing was run; run: {again[name]}'}")
    for cell in dict.fromkeys(cell for cells in states.values() for cell in cells):
        found = {name: cells[cell] for name, cells in states.items() if cell in cells}
        if len({*found.values()}) > 1:
            lines.append(f"{cell}: " + ", ".join(f"{name} {state}" for name, state in found.items()))
    return lines


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Holds what a cell or script says in one environment. state: its verdict; empty if there is no environment.

    stage: the first wrong stage of a cell.
    """

    state: str
    stage: str = ""
    reason: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.state, self.stage

    def __str__(self) -> str:
        first, *rest = self.reason.strip().splitlines() or [""]
        traceback = f" {rest[-1].strip()}" if rest and first.endswith(":") else ""
        return ": ".join(filter(None, (self.state or "no environment", first + traceback)))


CANNOT_BE_RUN = "cannot be run"  # a state: neither of two such answers says what a cell does
Ask = Callable[[Pins], Answer]


@dataclass(kw_only=True)
class Bisection:
    """Finds the first of several sets of versions that answers as the last one does; the first set answers otherwise.

    A set that has no environment, or answers like neither end, is left out. names: of the sets.
    """

    names: Sequence[str]
    sets: Sequence[Pins]
    ask: Ask
    answers: dict[int, Answer] = field(default_factory=dict)

    def run(self) -> tuple[int, int]:
        """Returns the last set that answers as the first does, and the first that answers as the last does. Raises
        UsageError if the first and the last set answer the same, or cannot be asked."""
        good, bad = 0, len(self.sets) - 1
        first, last = self._answer(good), self._answer(bad)
        for place, answer in ((good, first), (bad, last)):
            if not answer.state:
                raise UsageError(f"{self.names[place]} has no answer ({answer.reason}); give other --good and --bad")
        if first.key == last.key and first.state == CANNOT_BE_RUN:
            raise UsageError(
                f"it can be run neither with {self.names[good]} nor with {self.names[bad]} ({last.reason}); give other "
                f"--good and --bad"
            )
        if first.key == last.key:
            raise UsageError(
                f"{self.names[good]} and {self.names[bad]} give the same answer ({first}); give other --good and --bad"
            )
        while open_places := [place for place in range(good + 1, bad) if place not in self.answers]:
            middle = open_places[len(open_places) // 2]
            answer = self._answer(middle)
            if answer.key == first.key:
                good = middle
            elif answer.key == last.key:
                bad = middle
        return good, bad

    def _answer(self, place: int) -> Answer:
        if place not in self.answers:
            self.answers[place] = self.ask(self.sets[place])
            _say(f"  {self.names[place]}: {self.answers[place]}")
        return self.answers[place]


def blame_command(options: argparse.Namespace) -> int:
    """Names the package, and its release, at which a cell or a script changed, with the answers before and after."""
    options.cells = [options.cell]
    if options.cell.endswith(".py"):
        _check_script(Path(options.cell))
    else:
        options.backend = options.backend or [_backend_of(options.cell)]
        if cells := _check_selection(options):
            _check_number(options.cell, len(cells))
    wanted, good, bad = _ends(options)
    with tempfile.TemporaryDirectory() as folder:
        ask = _ask(options, wanted, Path(folder))
        changed = [name for name in {**good, **bad} if good.get(name) != bad.get(name)]
        if len(changed) > 1:
            sets = [{**good, **{name: bad[name] for name in changed[:count]}} for count in range(len(changed) + 1)]
            names = ["good", *(f"and {name} {good[name]} -> {bad[name]}" for name in changed)]
            before, after = Bisection(names=names, sets=sets, ask=ask).run()
            if after - before > 1:
                raise UsageError(f"one of {', '.join(changed[before:after])} changed it; these cannot be told apart")
            package, good, bad = changed[before], sets[before], sets[after]
        else:
            package = changed[0]
        versions = _between(package, good[package], bad[package], wanted)
        sets = [{**good, package: version} for version in versions]
        found = Bisection(names=[f"{package} {version}" for version in versions], sets=sets, ask=ask)
        _say(f"{options.cell} by {package}: {len(versions)} releases")
        before, after = found.run()
    skipped = {versions[place]: str(found.answers[place]) for place in range(before + 1, after)}
    first, last = found.answers[before], found.answers[after]
    if options.json:
        ends = [{"release": versions[place], **asdict(found.answers[place])} for place in (before, after)]
        values = {"cell": options.cell, "package": package, "before": ends[0], "after": ends[1], "skipped": skipped}
        print(dumps(values))
    else:
        print(f"{options.cell} changed with {package} {versions[after]} ({versions[before]} before)")
        print(f"  before: {first}", f"  after:  {last}", sep="\n")
        for version, why in skipped.items():
            print(f"  {package} {version} was skipped, and may have changed it already: {why}")
    return EXIT["incomplete"] if skipped else EXIT["conforms"]


def _ends(options: argparse.Namespace) -> tuple[Environment, Pins, Pins]:
    """Returns the environment to vary, and the versions at both ends. Raises UsageError."""
    if bool(options.package) == bool(options.file):
        raise UsageError("give --package NAME, or --in FILE.toml with environments as --good and --bad")
    try:
        if options.file:
            names = [name for name in (options.good, options.bad) if name]
            if len(names) < 2:
                raise UsageError("--in needs two of its environments: --good NAME --bad NAME")
            chosen = _chosen(read_environments(options.file), names, options.file)
            start, end = (chosen[name] for name in names)
            if replace(start, requirements=()) != replace(end, requirements=()):
                raise UsageError(
                    f"{names[0]} and {names[1]} may differ in requirements only; give both one python, index, "
                    "find_links, dependencies and variables"
                )
            good, bad = (make_environment(one).pins for one in (start, end))
            if good.keys() != bad.keys() or good == bad:
                raise UsageError(f"{names[0]} and {names[1]} need the same packages in different versions")
            return start, good, bad
        wanted = Environment(requirements=tuple(options.requirement))
        fixed = make_environment(wanted).pins
        newest = releases(options.package, wanted)[-1]
    except Unmade as error:
        raise UsageError(str(error)) from None
    first, last = options.good or package_version(options.package), options.bad or newest
    if first == last:
        raise UsageError(f"--good and --bad are both {first}; give another, such as --good with an older release")
    name = canonical(options.package)  # as the pins of the requirements are named
    return wanted, {**fixed, name: first}, {**fixed, name: last}


def _between(package: str, good: str, bad: str, wanted: Environment) -> list[str]:
    """Returns the releases from ``good`` to ``bad``, which may be the older one. Raises UsageError."""
    try:
        known = releases(package, wanted)
    except Unmade as error:
        raise UsageError(str(error)) from None
    if missing := [one for one in (good, bad) if one not in known]:
        raise UsageError(f"the index has no {package} {missing[0]} for this Python; it has {', '.join(known[-12:])}")
    first, last = known.index(good), known.index(bad)
    return known[first : last + 1] if first < last else known[last : first + 1][::-1]


def _ask(options: argparse.Namespace, wanted: Environment, folder: Path) -> Ask:
    """Returns the function that runs the cell, or the script, with the given versions."""
    arguments = [*_given(options, Selection, Ranks), "--no-bisect", "--quiet"]

    def ask(pins: Pins) -> Answer:
        requirements = tuple(f"{name}=={version}" for name, version in pins.items())
        try:
            made = make_environment(replace(wanted, requirements=requirements))
        except Unmade as error:
            return Answer(state="", reason=str(error))
        if options.cell.endswith(".py"):
            return _answer_of_script(Path(options.cell), made)
        out = folder / str(len([*folder.iterdir()]))
        try:
            run_in(made, out, options.backend, arguments)
        except UsageError as error:
            return Answer(state=CANNOT_BE_RUN, reason=str(error))
        _, entries = read_run(out)
        _check_number(options.cell, len(entries))
        verdict = entries[0].verdict
        return Answer(state=STATES[verdict.state].name, stage=verdict.first_stage, reason=verdict.reason)

    return ask


def _check_number(cell: str, cells: int) -> None:
    if cells != 1:
        raise UsageError(f"{cell} is {cells} cells; give the id of one, as parity list shows it")


def _check_script(script: Path) -> None:
    if not script.is_file():
        raise UsageError(f"there is no script {script}")


def _backend_of(cell: str) -> str:
    parts = cell.split("/")
    if len(parts) < 5:
        raise UsageError(f"{cell!r} is not the id of a cell, such as sft-packed/qwen3/megatron/dp2/exact, or a script")
    return parts[2]


def _answer_of_script(script: Path, made: Made, *, seconds: float = 600) -> Answer:
    """Runs a script, such as of docs/findings: its exit code is the answer, or what it raised, or that it timed out."""
    command = [made.python, script.name]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=script.parent, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            told, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return Answer(state="timed out", reason=f"after {seconds:g} s")
        finally:
            signal_group(process.pid, signal.SIGKILL)  # its ranks, too
    raised = _RAISED.findall(errors)[-1:] if process.returncode else []
    last = ((errors if raised else told).strip().splitlines() or [""])[-1]
    if raised:
        return Answer(state=f"raised {raised[0]}", reason=last.removeprefix(f"{raised[0]}: "))
    return Answer(state=f"exit code {process.returncode}", reason=last)
