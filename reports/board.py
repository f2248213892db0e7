"""Publishes runs of frameworks as a board (`parity publish`): versions as columns, features as rows, a static site.

``board.json`` holds the squares by framework, version and row; ``board.schema.json`` is its JSON schema. A later board
is made ``--against`` it: its columns stay, so versions add up to a history, and ``changes.md`` lists what changed.
``reports`` holds the reports of the runs, which the squares link to.
"""

import argparse
import re
import shlex
import shutil
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from conformance.core.environments import LOCKED
from conformance.core.errors import STRICT, UsageError, explain
from conformance.core.io import Unreadable, make_folder, read_file, write_file
from conformance.records.record_format import LONGEST, dumps, parse_strict_json
from conformance.results.history import HISTORY
from conformance.results.output_folders import EnvironmentRun, read_environment
from conformance.results.run_results import SUMMARY
from conformance.results.trust import CheckedCell, read_cells
from conformance.results.verdict import State as CellState
from reports import nights
from reports.ci_formats import COLOURS, badge_json, badge_svg
from reports.html import TEMPLATES, anchor, environment
from reports.wording import plural

State = Literal["differs", "gap", "partly_observed", "convention", "pass", "unsupported"]  # the most important first
STATES: dict[State, tuple[str, str]] = {  # symbol and meaning
    "differs": ("✗", "fails, with its first wrong stage"),
    "gap": ("○", "a gap: not run, or ended without a record"),
    "partly_observed": ("◐", "agrees in all that it shows"),
    "convention": ("≈", "agrees with its declared conventions"),
    "pass": ("✓", "agrees in all stages"),
    "unsupported": ("\N{EN DASH}", "refused, with the reason"),
}


def word(state: State) -> str:
    """Returns the word for a state on the site."""
    return "fail" if state == "differs" else state.replace("_", " ")


_OF_CELL: dict[CellState, State] = {
    "conforms": "pass",
    "partly_observed": "partly_observed",
    "differs": "differs",
    "expected_difference": "differs",  # of a known bug, which the reason names
    "infrastructure": "gap",
    "not_run": "gap",
    "unsupported": "unsupported",
}
FAMILIES = ("sft", "grpo", "ppo")
OTHER_OBJECTIVE = "does not train the objective"  # in the cause of a square of an adapter without the row's objective
NOT_RUN = "not run"  # the device of a column without a run
NOT_CAUSE = ("    ", "logs: ", "end of ", "traceback of ")  # lines of logs and tracebacks, which the report has
FOLDERS = re.compile(r"(?<![\w./:~-])/(?:[\w.+@~-]+/)+(?=[\w.+@-])")  # of the machine that ran the cells
OF_SCRIPT = ("--profile", "--backend", "--python", "--out")  # options that scripts/framework gives itself
OF_MATRIX = ("--python", "--out")
LONGEST_NOTE = 2000
Text = Annotated[str, Field(max_length=20_000)]
Name = Annotated[str, Field(pattern=r"^[\w.+-]+$", max_length=100)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Square:
    """Holds one cell of a framework. cause: the reason of the verdict. reproduce: the command that runs it again.

    report: the address of the cell in the report of its run, from the folder of the site.
    """

    state: State
    cause: Text
    reproduce: Text
    conventions: tuple[Text, ...] = ()
    report: Annotated[str, Field(pattern=r"^(reports/[\w.+-]+\.html#[\w./-]+)?$", max_length=500)] = ""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Column:
    """Holds one version of a framework, or a backend in one environment of parity matrix, whose name is the version.

    squares: by row, a cell's id without its backend. started: the UTC time of its newest run. versions: of the packages
    that its records name. note: why nothing was run. command: runs it again; empty: scripts/framework.
    """

    framework: Name
    version: Name
    started: Text
    device: Text
    versions: dict[str, Text]
    squares: dict[Text, Square]
    note: Text = ""
    command: Text = ""

    @property
    def name(self) -> str:
        return f"{self.framework} {self.version}" + " on GPUs" * (self.device == "cuda")

    @property
    def again(self) -> str:
        return self.command or f"scripts/framework {self.framework} {self.version}"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Board:
    """Holds all columns, by framework and ascending version."""

    schema: Literal[1] = 1
    columns: tuple[Column, ...]

    @property
    def rows(self) -> list[str]:
        """Returns all rows: SFT, GRPO and PPO, in each family the plain scenario first."""
        return sorted({row for column in self.columns for row in column.squares}, key=_place)

    def square(self, column: Column, row: str) -> Square:
        """Returns the square of a row, which is a gap if the column has none."""
        scenario, model, rest = row.split("/", maxsplit=2)
        device = " --device cuda" * (column.device == "cuda")
        again = f"{column.again}{device} --cells '{scenario}/{model}/*/{rest}'"
        return column.squares.get(row) or Square(state="gap", cause=column.note or "not run", reproduce=again)

    def counts(self, column: Column) -> dict[State, int]:
        found = Counter(self.square(column, row).state for row in self.rows)
        return {state: found[state] for state in STATES if found[state]}

    def before(self, column: Column) -> list[Column]:
        """Returns the earlier versions of its framework, the newest first; of two devices, those on the same."""
        same = [
            one
            for one in self.columns
            if one.framework == column.framework and len({one.device, column.device} - {NOT_RUN}) < 2
        ]
        return same[: same.index(column)][::-1]


BOARD = TypeAdapter(Board)


class Publish:
    help = "write a static site: frameworks by version, or environments, from their runs, or all nights of a history"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "outs",
            type=Path,
            nargs="+",
            metavar="OUT",
            help="output folders, such as of scripts/framework, or board.json files; or the folder of a history, "
            "and output folders of its runs",
        )
        parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder of the site")
        parser.add_argument(
            "--against",
            type=Path,
            metavar="BOARD",
            help="an earlier board.json: its columns stay, and changes.md tells which squares changed",
        )

    def run(self, options: argparse.Namespace) -> int:
        make_folder(options.to, option="--to")
        histories = [out for out in options.outs if (out / HISTORY).is_file()]
        if histories:
            if options.against or len(histories) > 1:
                raise UsageError("a site of nights is made of one history; give one, and no --against")
            return nights.publish(histories[0], [out for out in options.outs if out not in histories], options.to)
        earlier = read_board(options.against) if options.against else Board(columns=())
        found = {out: columns_of(out) for out in options.outs}
        columns = [column for one in found.values() for column in one]
        board = joined(earlier, columns)
        for out, one in found.items():
            copy_report(out, one, options.to)
        changed = write_site(board, earlier, options.to)
        print(f"{options.to / 'index.html'}: {plural(len(board.columns), 'column')}, {plural(len(board.rows), 'row')}")
        if options.against:
            print(f"{plural(changed, 'square')} changed" + (f": {options.to / 'changes.md'}" if changed else ""))
        empty: dict[tuple[str, str], list[str]] = {}  # the columns of one environment have one reason
        for column in (column for column in columns if not column.squares):
            empty.setdefault((column.note, column.again), []).append(column.name)
        for (note, again), names in empty.items():
            print(f"{', '.join(names)}: nothing was run{f' ({note})' * bool(note)}; run: {again}")
        return 3 if empty else 0


PUBLISH = Publish()


def columns_of(out: Path) -> list[Column]:
    """Returns the columns of a run, or of a board.json. A folder NAME-VERSION, as scripts/framework makes it, is one
    framework, with only gaps if it holds no run; otherwise each backend is one. Raises UsageError for a folder that
    cannot be trusted, or of another version than it says."""
    if out.suffix == ".json":
        return list(read_board(out).columns)
    if about := read_environment(out):
        return _of_environment(out, about)
    framework, _, version = out.resolve().name.rpartition("-")
    named = framework if framework and version[:1].isdigit() else ""
    if named and not (out / SUMMARY).exists():  # its environment was not made, or its run never began
        return [Column(framework=named, version=version, started="", device=NOT_RUN, versions={}, squares={})]
    return _of_run(out, named, version)


def _of_environment(out: Path, about: EnvironmentRun) -> list[Column]:
    """Returns a column for each backend in an environment; with only gaps, and the reason, if nothing was run."""
    found = {column.framework: column for column in _of_run(out)} if (out / SUMMARY).exists() else {}
    # Of an address only the file: the rest names folders of one machine, or holds a password.
    own = {name: re.split("[?#]", found)[0].rpartition("/")[2][:100] for name, found in LOCKED.findall(about.lock)}
    columns, of_environment = [], shlex.join(shlex.split(about.command)[:5])  # the run's options follow in a square
    for backend in dict.fromkeys([*found, *([] if found else about.backends)]):
        empty = Column(framework=backend, version=about.name, started="", device=NOT_RUN, versions={}, squares={})
        column = found.get(backend, empty)
        squares = {
            row: replace(square, reproduce=_again(of_environment, square.reproduce, without=OF_MATRIX))
            for row, square in column.squares.items()
        }
        about_it = {"version": about.name, "note": _cause(about.note)[:LONGEST_NOTE], "command": about.command}
        columns.append(replace(column, **about_it, squares=squares, versions={**column.versions, **own}))
    return columns


def _of_run(out: Path, named: str = "", version: str = "") -> list[Column]:
    """Returns the columns of a run. named: the framework that all cells are of; empty: each backend is a column."""
    run, cells = read_cells(out)
    columns: dict[str, Column] = {}
    for cell in cells:
        name, verdict = named or cell.entry.backend, cell.entry.verdict
        found = _versions(cell, run.environment)
        installed = found.get(name.replace("_", "-"))  # as packages are named
        if named and installed and installed != version:
            raise UsageError(f"{out}: its cells ran {name} {installed}; rename the folder to {name}-{installed}")
        given = version if named else installed or found.get("backend-parity", "0")
        again = cell.entry.reproduce
        square = Square(
            state="convention" if verdict.conventions and verdict.state == "conforms" else _OF_CELL[verdict.state],
            cause=_cause(verdict.reason),
            reproduce=_again(f"scripts/framework {name} {given}", again) if named else again,
            conventions=verdict.conventions,
            report=f"{_report_of(out, run.started)}#{anchor(cell.entry.cell)}",
        )
        made = Column(
            framework=name,
            version=given,
            started=run.started,
            device=run.device,
            versions=found,
            squares={_row(cell): square},
        )
        columns[name] = united(columns[name], made) if name in columns else made
    return list(columns.values())


def _cause(reason: str) -> str:
    """Returns a reason without tracebacks, logs and names of folders, which are those of one machine."""
    lines = [line.partition("; end of ")[0] for line in reason.splitlines() if not line.startswith(NOT_CAUSE)]
    return FOLDERS.sub("", "\n".join(lines))


def _again(command: str, of_run: str, *, without: Sequence[str] = OF_SCRIPT) -> str:
    """Returns the command that runs what a command of parity run does. without: options that it gives itself."""
    words = shlex.split(of_run)[2:]
    own = {i + k for i, word in enumerate(words) if word in without for k in (0, 1)}
    return f"{command} {shlex.join(word for i, word in enumerate(words) if i not in own)}"


def _report_of(out: Path, started: str) -> str:
    """Returns where the site has the report of a run."""
    name = f"{out.resolve().name}-{started[:19]}"
    return f"reports/{re.sub('[^A-Za-z0-9_.+-]', '-', name)}.html"


def copy_report(out: Path, columns: Sequence[Column], to: Path) -> None:
    """Copies the report of a run to where its squares say that it is."""
    if (report := out / "report.html").is_file():
        for address in {s.report.partition("#")[0] for column in columns for s in column.squares.values()}:
            copy = to / address
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(report, copy)


def _row(cell: CheckedCell) -> str:
    entry = cell.entry
    return "/".join((entry.scenario, entry.model, entry.layout, entry.variant))


def _versions(cell: CheckedCell, of_run: Mapping[str, Any]) -> dict[str, str]:
    """Returns the versions of packages; those of the cell's own environment replace those of the run's. A cell that
    did not run has none."""
    named = ("backend-parity", "torch", "transformers") if cell.phases else ("backend-parity",)
    found = {name: of_run[name] for name in named if of_run.get(name)}
    for phase in cell.phases:
        recorded = phase.header.get("environment")
        versions = recorded.items() if isinstance(recorded, dict) else ()
        found |= {k: v for k, v in versions if isinstance(v, str) and re.match(r"\d", v)}
    return found


def _place(row: str) -> tuple[int, bool, str]:
    words = row.partition("/")[0].split("-")
    family = next((FAMILIES.index(word) for word in words if word in FAMILIES), len(FAMILIES))
    return family, "plain" not in words, row


def united(one: Column, other: Column) -> Column:
    """Returns the squares of two adapters of one framework. Where both have a square, the more important one stays, and
    of two refusals that of the adapter that trains the objective."""
    squares = dict(one.squares)
    for row, square in other.squares.items():
        both = [square, *([squares[row]] if row in squares else [])]
        squares[row] = min(both, key=lambda one: (list(STATES).index(one.state), OTHER_OBJECTIVE in one.cause))
    return replace(one, squares=squares, versions={**one.versions, **other.versions})


def joined(earlier: Board, columns: Sequence[Column]) -> Board:
    """Returns a board of the earlier and the new columns. A later run of a version replaces the squares that it has."""
    found = {column.name: column for column in earlier.columns}
    for column in sorted(columns, key=lambda column: column.started):
        before = found.get(column.name, column)
        squares, versions = {**before.squares, **column.squares}, {**before.versions, **column.versions}
        found[column.name] = replace(column, squares=squares, versions=versions)
    return Board(columns=tuple(sorted(found.values(), key=_age)))


def _age(column: Column) -> tuple[str, list[tuple[bool, int, str]], str]:
    """Sorts columns by framework, version and device; a release comes after its candidates."""
    parts = [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in column.version.split(".")]
    return column.framework, parts, column.device


def read_board(path: Path) -> Board:
    """Reads ``board.json``. Raises UsageError for a file that is missing or not one."""
    try:
        return BOARD.validate_python(parse_strict_json(read_file(path, limit=LONGEST)))
    except ValidationError as error:
        raise explain(error, source=str(path), what="board") from None
    except (FileNotFoundError, Unreadable, ValueError) as error:
        raise UsageError(f"{path}: not a readable board.json ({error}); give one that parity publish wrote") from None


def write_site(board: Board, earlier: Board, to: Path) -> int:
    """Writes index.html, board.json, its schema, badges and changes.md. Returns how many squares changed."""
    (to / "badges").mkdir(parents=True, exist_ok=True)
    write_file(to / "board.json", dumps(BOARD.dump_python(board, mode="json")))
    write_file(to / "board.schema.json", dumps(BOARD.json_schema()))
    page = (
        environment()
        .get_template("board.html")
        .render(
            board=board,
            states=STATES,
            word=word,
            newest=newest(board),
            has_report=lambda square: square.report and (to / square.report.partition("#")[0]).is_file(),
            style=(TEMPLATES / "style.css").read_text(encoding="utf-8"),
        )
    )
    write_file(to / "index.html", page)
    for column in newest(board):
        _write_badge(column, board.counts(column), to / "badges" / column.framework)
    lines = changes(board, earlier)
    text = "# Squares of the board that changed\n\n" + "\n".join(lines) + "\n" if lines else ""
    write_file(to / "changes.md", text)
    return len(lines) // 2


def newest(board: Board) -> list[Column]:
    """Returns the newest column of each framework; one from a CPU, where there is one."""
    columns = sorted(board.columns, key=lambda column: column.device != "cuda")
    return list({column.framework: column for column in columns}.values())


def _write_badge(column: Column, counts: Mapping[State, int], path: Path) -> None:
    judged = "gap" not in counts and counts.keys() != {"unsupported"}
    verdict = "differs" if "differs" in counts else "conforms" if judged else "incomplete"
    text = ", ".join(f"{count} {word(state)}" for state, count in counts.items())
    name, colour = COLOURS[verdict]  # type: ignore[index]
    write_file(path.with_suffix(".json"), badge_json(text, name, label=column.name))
    write_file(path.with_suffix(".svg"), ET.tostring(badge_svg(text, colour, label=column.name), encoding="utf-8"))


def changes(board: Board, earlier: Board) -> list[str]:
    """Returns a line of Markdown for each square whose state is another than before, or in the version before."""
    old, lines = {column.name: column for column in earlier.columns}, []
    for column in board.columns:
        if column == (known := old.get(column.name)):
            continue
        before = known or next((one for one in board.before(column) if one.name in old), None)
        since = f"in {before.version}" if before and before.version != column.version else "before"
        for row, was in before.squares.items() if before else ():
            square = board.square(column, row)
            if was.state != square.state:
                lines.append(
                    f"- **{column.name}**, `{row}`: {word(square.state)} ({word(was.state)} {since}): {square.cause}"
                )
                lines.append(f"  `{square.reproduce}`")
    return lines
