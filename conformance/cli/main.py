"""Runs the same training steps on several training backends and judges each of them by an independent reference.

Exit codes: 0 if all cells agree with the oracle (they conform, are partly observed, or differ as expected), 1 if a cell
differs, 2 for wrong usage, 3 if the run is incomplete (an infrastructure failure, no cell could be judged, fewer cells
were judged than required, or the output folder is not writable). A run that a signal stops ends with 128 + its number:
130 after Ctrl-C, 141 if the reader of its output has gone, 143 after SIGTERM.
"""

import argparse
import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence

import conformance
from conformance.cli import EXIT
from conformance.cli.commands import command_names, find_command
from conformance.core import packages
from conformance.core.errors import Parser, UsageError, limited, shown
from conformance.core.io import Unwritable, visible_output
from conformance.core.process import stop_code
from conformance.core.timeline import process_start


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. A UsageError is printed as one message to standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # file names may have bytes that are not UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    with packages.preferred(), visible_output():
        options = _parser(arguments).parse_args(arguments)
        options.arguments = arguments[1:]
        options.began = process_start() if argv is None else None
        return _run(options)


def _run(options: argparse.Namespace) -> int:
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


if __name__ == "__main__":
    sys.exit(main())
