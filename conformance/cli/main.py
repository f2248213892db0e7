"""Runs the same training steps on several training backends and judges each of them by an independent reference.

Exit codes: 0 if all cells agree with the oracle (they conform, are partly observed, or differ as expected), 1 if a cell
differs, 2 for wrong usage, 3 if the run is incomplete (an infrastructure failure, no cell could be judged, fewer cells
were judged than required, or the output folder is not writable). A run that a signal stops ends with 128 + its number:
130 after Ctrl-C, 141 if the reader of its output has gone, 143 after SIGTERM.
"""

import argparse
import contextlib
import errno
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import conformance
from conformance.cli import EXIT
from conformance.core import packages
from conformance.core.errors import Parser, UsageError, limited, shown
from conformance.core.io import Unwritable, visible_output
from conformance.core.packages import Command, announced_commands, load_command
from conformance.core.process import ended_by_interrupt, import_uncollected, stop_code
from conformance.core.timeline import process_start
from conformance.matrix.options import (
    GROUPS,
    JOBS,
    NO_BISECT,
    RECORDS,
    Again,
    AtOnce,
    Demands,
    Kept,
    Options,
    Output,
    Portion,
    Ranks,
    Selection,
    positive_number,
)
from conformance.runtime.preload_server import fork_ahead, import_ahead


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. A UsageError is printed as one message to standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names may have bytes that are not UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    with packages.preferred(), visible_output():
        options = _parser(arguments).parse_args(arguments)
        options.arguments = arguments[1:]
        options.began = process_start() if argv is None else None
        if options.began is not None:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if a supervisor has it ignored, children have no status
        code = _exit_code(options)
    if options.began is not None:
        gc.freeze()  # or Python looks for garbage once more, and takes apart all that the system frees at once
    return code


def _exit_code(options: argparse.Namespace) -> int:
    code: int | None = None
    try:
        code = options.command(options)
        sys.stdout.flush()
    except UsageError as error:
        print(f"parity: {limited(str(error))}", file=sys.stderr)
        return EXIT["usage"]
    except Unwritable as error:
        print(f"parity: {limited(str(error))}", file=sys.stderr)
        return EXIT["incomplete"]
    except KeyboardInterrupt as stopped:
        print("parity: interrupted", file=sys.stderr)
        return stop_code(stopped)
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE if code is None else code  # a difference may not have been found yet
    except Exception as error:  # a defect of the suite or of a backend, not a difference: it must not exit with 1
        if isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            print(f"parity: {shown(error.filename)} cannot be used as a path: {error.strerror}", file=sys.stderr)
            return EXIT["usage"]
        if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop"):  # Path.resolve's words for ELOOP
            print(f"parity: a path cannot be used: {limited(str(error))}", file=sys.stderr)
            return EXIT["usage"]
        traceback.print_exc()
        return EXIT["incomplete"]
    assert code is not None
    return code


def _parser(arguments: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Returns the parser of all commands; with arguments, imports and declares only the command they start with."""
    parser = Parser(prog="parity", description=__doc__)
    parser.add_argument("--version", action="version", version=f"backend-parity {conformance.__version__}")
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh"),
        help='print the script that makes a shell complete parity: eval "$(parity --print-completion bash)"',
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    first = "" if not arguments else arguments[0]
    for name in command_names():
        is_declared = arguments is None or name == first
        if not is_declared and first not in ("-h", "--help"):
            commands.add_parser(name)  # a name for messages
            continue
        command = find_command(name)
        one = commands.add_parser(name, help=command.help, description=command.help)
        one.set_defaults(command=command.run)
        if is_declared:
            command.add_arguments(one)
    return parser


class _PrintCompletion(argparse.Action):
    """Implements ``--print-completion SHELL``: prints the script and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *values: object) -> None:
        _, shell, _ = values
        print(_completion(_parser(), str(shell)))
        parser.exit()


_FILES, _FOLDERS = ("data", "against"), ("out", "model", "resume")  # options, by what they take


def _completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Returns the script that completes the command line in ``bash`` or ``zsh``, with the names known now."""
    import shtab

    from conformance.backends.faults import catalogue
    from conformance.backends.protocol import registered_backends
    from conformance.matrix.profile import profile_names

    names = {"profile": profile_names(), "backend": registered_backends(), "faults": catalogue()}
    for action in _options(parser):
        if action.dest in names:
            words = " ".join(names[action.dest])
            action.complete = {"bash": f"_parity_{action.dest}", "zsh": f"({words})"}  # type: ignore[attr-defined]
        elif action.dest in _FILES + _FOLDERS:
            action.complete = shtab.FILE if action.dest in _FILES else shtab.DIRECTORY  # type: ignore[attr-defined]
    functions = [f"_parity_{name}() {{ compgen -W '{' '.join(words)}' -- \"$1\"; }}" for name, words in names.items()]
    return shtab.complete(parser, shell=shell, preamble="\n".join(functions) if shell == "bash" else "")


def _options(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    """Yields the options of the parser and of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)
        else:
            yield action


# The commands: their names, what they do, and their options. Nothing here imports anything slow. The function
# ``NAME_command`` runs the command NAME; its module is imported then.
STARTING = ("run", "bisect", "matrix", "blame")  # commands that start ranks
MOST_GPUS = 4096  # a larger number is a typing error
_JSON = "machine-readable output"


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Declares a command of the suite itself. module: the module in conformance.cli that runs it."""

    name: str
    module: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]

    def run(self, options: argparse.Namespace) -> int:
        is_own = options.began is not None  # whether this process belongs to the suite
        if self.name in STARTING:  # ranks import what this process imports
            (fork_ahead if is_own else import_ahead)(("transformers",))
        with ended_by_interrupt() if is_own else contextlib.nullcontext():
            module = import_uncollected(f"conformance.cli.{self.module}")
        run: Callable[[argparse.Namespace], int] = getattr(module, f"{self.name}_command")
        if is_own:
            gc.freeze()  # what was imported is never garbage; a user's process may have garbage, which would be kept
        return run(options)


def find_command(name: str) -> Declared | Command:
    """Finds a command of the suite, or of an installed package."""
    return COMMANDS[name] if name in COMMANDS else load_command(name)


def command_names() -> list[str]:
    """Returns the names of all commands, without importing commands of other packages."""
    return [*COMMANDS, *(name for name in announced_commands() if name not in COMMANDS)]


def add_options(
    parser: argparse.ArgumentParser, *kinds: type[Options], without: Sequence[str] = ()
) -> dict[str, argparse._ArgumentGroup]:
    """Adds the options of ``kinds`` to the parser, in groups; returns the groups by their headings."""
    options = [option for kind in kinds for option in kind.options() if option.field not in without]
    used = {option.group for option in options}
    groups = {heading: parser.add_argument_group(heading) for heading in GROUPS if heading in used}
    for option in options:
        groups[option.group].add_argument(f"--{option.name}", **option.about)
    return groups


def _selecting(parser: argparse.ArgumentParser) -> None:
    add_options(parser, Selection, Ranks, Portion, without=("budget",))


def _list(parser: argparse.ArgumentParser) -> None:
    _selecting(parser)
    parser.add_argument(
        "--coverage",
        action="store_true",
        help="measure what data and models cover: positions, vocabulary, shards, masks, sizes that coincide",
    )
    parser.add_argument("--json", action="store_true", help=_JSON)


def _gpu_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_GPUS:
        raise argparse.ArgumentTypeError(f"must be a number of GPUs from 1 to {MOST_GPUS}, got {shown(text)}")
    return int(text)


def _plan(parser: argparse.ArgumentParser) -> None:
    _selecting(parser)
    parser.add_argument("--out", type=Path, default=Path("parity-out"), help="where a run would write")
    parser.add_argument("--gpus", type=_gpu_count, metavar="N", help="list the layouts of N GPUs that backends support")
    parser.add_argument(
        "--gpu-memory", type=positive_number("GB"), metavar="GB", help="with --gpus: memory of each GPU"
    )


def _run(parser: argparse.ArgumentParser) -> None:
    groups = add_options(parser, Selection, Ranks, AtOnce, Output, Demands, Portion, Again, Kept)
    groups[JOBS].add_argument("--fail-fast", action="store_true", help="end after the first cell that differs or fails")
    output = groups[RECORDS]
    output.add_argument("--no-bisect", action="store_true", help=NO_BISECT)
    output.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write what each process did when, as a Chrome trace"
    )
    loudness = output.add_mutually_exclusive_group()
    loudness.set_defaults(loudness="normal", began=None)
    for letter, name, text in (
        ("-q", "quiet", "print a line only for cells that need attention"),
        ("-v", "verbose", "also print seconds by phase, and which groups of workers are retired as planned"),
    ):
        loudness.add_argument(letter, f"--{name}", dest="loudness", action="store_const", const=name, help=text)
    output.add_argument("--json", action="store_true", help=_JSON)


def _merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("outs", type=Path, nargs="+", metavar="OUT")
    add_options(parser, Output, Kept, Demands, without=("require", "min_judged"))
    parser.add_argument("--json", action="store_true", help=_JSON)


def _folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="output folder of a run")
    parser.add_argument("--json", action="store_true", help=_JSON)


def _judge(parser: argparse.ArgumentParser) -> None:
    _folder(parser)
    parser.add_argument(
        "--objective",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="import an objective of your own that the records name; may be repeated",
    )


def _compare(parser: argparse.ArgumentParser) -> None:
    _folder(parser)
    parser.add_argument(
        "other", type=Path, nargs="?", help="another run: compares states and margins of both, cell by cell"
    )


def _bisect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cell", metavar="CELL", help="the id of a cell, as parity list and the report show it")
    add_options(parser, Selection, Ranks, without=("cells",))
    parser.add_argument("--json", action="store_true", help=_JSON)


def _matrix(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.toml", help="environments: tables [environments.NAME]")
    parser.add_argument(
        "--environment", action="append", default=[], metavar="NAME", help="only this one; may be repeated"
    )
    groups = add_options(parser, Selection, Ranks, AtOnce, Output, Kept, without=("python",))
    groups[RECORDS].add_argument("--no-bisect", action="store_true", help=NO_BISECT)
    parser.set_defaults(python=None)


def _blame(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cell", metavar="CELL", help="the id of a cell, or a script such as of docs/findings")
    parser.add_argument("--package", metavar="NAME", help="the package whose releases are tried")
    parser.add_argument("--in", dest="file", type=Path, metavar="FILE.toml", help="environments, two of which differ")
    parser.add_argument("--good", metavar="V", help="release, or environment of --in (default: the installed release)")
    parser.add_argument("--bad", metavar="V", help="release, or environment of --in (default: the newest release)")
    parser.add_argument(
        "--requirement",
        action="append",
        default=[],
        metavar="REQ",
        help="with --package: what every environment has beside it, such as triton==3.4.0; may be repeated",
    )
    add_options(parser, Selection, Ranks, without=("cells", "python"))
    parser.set_defaults(python=None)
    parser.add_argument("--json", action="store_true", help=_JSON)


def _engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        action="append",
        metavar="NAME",
        help="name or module:Class; may be repeated (default: transformers)",
    )
    parser.add_argument(
        "--against",
        default="",
        metavar="BACKENDS",
        help="training backends, with commas: each trains, and the engine takes its weights and is compared with it",
    )
    parser.add_argument(
        "--faults",
        action="append",
        default=[],
        dest="engine_faults",
        metavar="NAME",
        help="plant a fault of docs/reference/faults.md in the engine; may be repeated",
    )
    parser.add_argument(
        "--way",
        action="append",
        default=[],
        metavar="WAY",
        help="judge this way of taking new weights (docs/reference/engines.md) and nothing else; may be repeated",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of engine.json and report.html (default: none)")
    kinds = ("profile", "backend", "cells", "faults", "packing_samples", "ring_head_stride", "sketch")
    parser.set_defaults(**dict.fromkeys(kinds))
    add_options(parser, Selection, Ranks, without=kinds)
    parser.add_argument("--json", action="store_true", help=_JSON)


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help=_JSON)


def _text(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pipeline",
        action="append",
        metavar="NAME",
        help="name or module:Class, such as text:Trl; may be repeated (default: reference, that of parity train)",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", metavar="FOLDER", help="Hugging Face folder with a tokenizer and a chat template")
    source.add_argument(
        "--template",
        action="append",
        metavar="NAME",
        help="published chat template, or all; may be repeated (default: qwen2.5)",
    )
    parser.add_argument("--data", default="", metavar="FILE", help="conversations (default: eight of the suite)")
    parser.add_argument("--python", action="append", default=[], metavar="NAME=EXECUTABLE", help="environment of one")
    parser.add_argument(
        "--faults",
        action="append",
        default=[],
        dest="text_faults",
        metavar="NAME",
        help="plant a fault of docs/reference/faults.md in the pipeline; may be repeated",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code of the model folder")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of text.json (default: none)")
    parser.add_argument("--json", action="store_true", help=_JSON)


def _history(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of history.sqlite; created if missing")
    parser.add_argument("--add", type=Path, action="append", default=[], metavar="OUT", help="may be repeated")
    parser.add_argument(
        "--keep", type=int, metavar="N", help="remove runs older than the last N; the last green one is kept"
    )
    parser.add_argument("--last", type=int, metavar="N", help="how many runs to show (default: 14)")
    parser.add_argument("--json", action="store_true", help=_JSON)


COMMANDS: Mapping[str, Declared] = {
    name: Declared(name=name, module=module, help=text, add_arguments=add_arguments)
    for name, module, text, add_arguments in (
        ("list", "plan", "show backends, profiles, faults and the cells of a profile", _list),
        ("plan", "plan", "estimate the memory, disk and time of the selected cells", _plan),
        ("run", "run", "run cells, judge them, write the report", _run),
        ("merge", "run", "put the folders of several shards, or jobs, of a run together", _merge),
        ("judge", "run", "judge the records of an earlier run again", _judge),
        ("report", "report", "write report.html, report.md and junit.xml of an earlier run", _folder),
        ("compare", "report", "print the backends of a run side by side, or two runs, as Markdown", _compare),
        ("bisect", "run", "name the first wrong module of a cell, forward and backward", _bisect),
        ("matrix", "environments", "run cells in several Python environments: a site of cells by environment", _matrix),
        ("blame", "environments", "name the release of a package that changed the verdict of a cell", _blame),
        ("engine", "engine", "judge rollout engines: log-probs, sampling, and the weights that they take", _engine),
        ("text", "engine", "judge the path from text to tokens: chat template, mask, packing, order of samples", _text),
        ("doctor", "doctor", "check this machine and the installed packages", _doctor),
        ("history", "report", "keep summaries of runs in a folder, and show the trend of each backend", _history),
    )
}


if __name__ == "__main__":
    sys.exit(main())
