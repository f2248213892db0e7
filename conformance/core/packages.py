"""Finds packages: what a backend lacks, the ``impl`` and ``reports`` of this distribution, reporters and commands.

A backend whose optional package is not installed is unsupported; any other import error is a failure. An adapter that
cannot be imported cannot name the packages it needs. So they are read from the metadata of its distribution: from the
extra that has the backend's name.

``impl`` and ``reports`` are common names. A folder ``impl/`` or ``reports/`` on the user's path, such as the current
one with ``PYTHONPATH=.``, comes before the installed package of this name. The processes of the suite (commands,
ranks, the servers that fork ranks) call ``prefer``; a function that a user calls in a process of the user's own runs in
``preferred``, which leaves the modules of the user as they were.

``code_digest`` tells whether the code of a user's adapter has changed.

``python -m conformance.core.packages MODULE ARGUMENTS...`` runs a module of this distribution.

Installed packages register reporters and commands as entry points; conformance imports none of them.

parity.reporters: each function takes the output folder, writes a file for readers, and returns its path.
parity.comparisons: each function takes the output folder and returns a text that compares the backends. The function
    also takes the TwoRuns of two folders (conformance.results.output_folders), and compares these.
parity.commands: each is a Command object, whose entry point has the name of the command.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import re
import runpy
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError, distribution, entry_points, version
from pathlib import Path
from pkgutil import extend_path
from types import ModuleType
from typing import Any, Protocol

from conformance.core.errors import UsageError, did_you_mean, one_line
from conformance.core.io import Unwritable

SUITE = ("conformance", "impl", "parity", "reports")  # top packages; another checkout may be on the path as well
MOST_FILES, MOST_BYTES = 10_000, 128 << 20  # with folders; what takes a second to read
_INSTALLED = frozenset(("site-packages", "dist-packages"))
UNKNOWN = "unknown: "  # begins what stands for the digest of code that has too many files
SOURCES = (".py", ".pyx", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp")  # of Python and its extensions
_TOO_MANY = f"more than {MOST_FILES} source files and folders, or {MOST_BYTES >> 20} MiB of them, below {{}}"


def entry_points_of(group: str) -> EntryPoints:
    """Returns the entry points of a group in all packages on the path. They are read once, which takes 30 ms, and again
    when the path or one of its folders has changed."""
    return _entry_points(group, tuple((folder, _changed_at(folder)) for folder in sys.path))


@functools.lru_cache(maxsize=16)
def _entry_points(group: str, path: tuple[tuple[str, int], ...]) -> EntryPoints:
    return entry_points(group=group)


def _changed_at(folder: str) -> int:
    with contextlib.suppress(OSError):
        return Path(folder).stat().st_mtime_ns
    return 0


def load_class(kind: str, name: str, known: Mapping[str, str], *, methods: Sequence[str], advice: str) -> Any:
    """Imports a class by its registered name or ``module:Class``.

    kind: such as "engine". known: targets by registered name. methods: the class needs them. advice: how to use a class
    that is not registered. Raises UsageError for an unknown one, and ImportError if a package is missing.
    """
    if ":" not in name and name not in known:
        raise UsageError(
            f"unknown {kind} {name!r}; {did_you_mean(name, known)}registered: {', '.join(known) or 'none'}. {advice}"
        )
    module_name, _, attribute = known.get(name, name).partition(":")
    try:
        found = getattr(import_module(module_name), attribute, None)
    except ModuleNotFoundError as error:
        if f"{module_name}.".startswith(f"{error.name}."):
            raise UsageError(f"{kind} {name!r}: there is no module {error.name!r}; check it and PYTHONPATH") from None
        raise
    if lacking := [one for one in methods if not callable(getattr(found, one, None))]:
        raise UsageError(f"{kind} {name!r} cannot be used, it has no {' and no '.join(lacking)}")
    return found


@dataclass(frozen=True, kw_only=True)
class MissingPackage:
    """Names a declared package that is not installed, and the extra (``DISTRIBUTION[BACKEND]``) that installs it."""

    package: str
    extra: str

    def __str__(self) -> str:
        return f"{self.package} is not installed; run: pip install '{self.extra}'"


def missing_package(entry: EntryPoint | None, module: str) -> MissingPackage | None:
    """Returns the declared package that would provide ``module`` and is not installed; None if there is none.

    ``entry``: the backend's entry point; None if no package is declared. The modules of a package that is not installed
    are unknown. So a module is matched with a package if one of the two names begins with the other, as
    ``megatron-core`` begins with ``megatron``. An adapter may also raise ModuleNotFoundError with the package's name.
    """
    if entry is None or entry.dist is None:
        return None
    wanted = canonical(module)
    for package in _extra(entry.dist.requires or [], entry.name):
        matches = f"{wanted}-".startswith(f"{package}-") or f"{package}-".startswith(f"{wanted}-")
        if matches and not is_installed(package):
            return MissingPackage(package=package, extra=f"{entry.dist.name}[{entry.name}]")
    return None


def _extra(requirements: list[str], extra: str) -> list[str]:
    """Returns the packages of an extra, from a distribution's requirements such as ``a>=1; extra == 'b'``."""
    wanted = re.compile(rf"\bextra\s*==\s*['\"]{re.escape(extra)}['\"]")
    chosen = [requirement for requirement in requirements if wanted.search(requirement.partition(";")[2])]
    return [canonical(re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]) for requirement in chosen]


class UnsupportedVersion(ImportError):
    """Reports that a package is installed in a version that the backend does not support."""


def check_version(package: str, *, supported: Sequence[str], backend: str) -> None:
    """Raises UnsupportedVersion unless the installed version begins with one of ``supported``, such as ``0.16``."""
    found = package_version(package)
    if is_installed(package) and not f"{found}.".startswith(tuple(f"{version}." for version in supported)):
        raise UnsupportedVersion(
            f"{package} {found} is installed, and only {', '.join(supported)} are supported; install one beside it: "
            f"python -m venv VENV, VENV/bin/pip install 'backend-parity[{backend}]', and add "
            f"--python {backend}=VENV/bin/python"
        )


def is_installed(package: str) -> bool:
    """Tells whether a distribution of this name is installed."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def canonical(name: str) -> str:
    """Normalizes the name of a module or package, as package indexes compare names (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def package_version(package: str) -> str:
    """Returns the version of an installed distribution, or ``not installed``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


NAMES = ("impl", "reports")
ROOT = str(Path(__file__).parents[2])


class _Finder(MetaPathFinder):
    """Finds the packages next to ``conformance``, and modules that only the user's package of the same name has.

    So an adapter that lives in a package ``impl`` of the user can be imported next to the reference backends.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in NAMES or (spec := PathFinder.find_spec(fullname, [ROOT])) is None:
            return None
        spec.submodule_search_locations = [*extend_path(spec.submodule_search_locations or [], fullname)]
        return spec


_FINDER = _Finder()
_set_aside: dict[str, ModuleType] = {}  # modules of this distribution while the user's modules have their names


def prefer() -> None:
    """Prefers the packages of this distribution from now on, in a process that belongs to the suite."""
    if _FINDER not in sys.meta_path:
        _take_out(foreign=True)
        sys.meta_path.insert(0, _FINDER)


@contextlib.contextmanager
def preferred() -> Iterator[None]:
    """Prefers the packages of this distribution inside the ``with`` statement."""
    if _FINDER in sys.meta_path or not _is_hidden():
        yield
        return
    users = _take_out(foreign=True)
    sys.modules.update(_set_aside)
    sys.meta_path.insert(0, _FINDER)
    try:
        yield
    finally:
        sys.meta_path.remove(_FINDER)
        _set_aside.update(_take_out(foreign=False))
        sys.modules.update(users)


def _is_hidden() -> bool:
    """Tells whether another package or module has, or would get, one of the names."""
    found = [PathFinder.find_spec(name) for name in NAMES]
    loaded = [sys.modules[name].__spec__ for name in NAMES if name in sys.modules]
    return any(spec is None or not _is_own(spec) for spec in (*found, *loaded))


def _is_own(spec: ModuleSpec) -> bool:
    return spec.origin == str(Path(ROOT, spec.name, "__init__.py"))


def _take_out(*, foreign: bool) -> dict[str, ModuleType]:
    """Removes packages with these names and their modules from sys.modules: the user's (``foreign``), or all."""
    packages = [
        name
        for name in NAMES
        if name in sys.modules and not (foreign and (spec := sys.modules[name].__spec__) and _is_own(spec))
    ]
    taken = [name for name in sys.modules if name.partition(".")[0] in packages]
    return {name: sys.modules.pop(name) for name in taken}


OF_MODELS = "transformers_modules"  # transformers' copies of code from the folders of all models that were ever loaded


class TooManyFiles(Exception):
    """Reports a folder with more Python code than is read for a digest; the message names it."""


def code_digest(own: str) -> str:
    """Returns a digest of the source files that the top module or package ``own`` may run, imported or not.

    These are all files below its folder but those that ``_source_files`` leaves out, or only its own if it is
    installed; and those of top packages and modules elsewhere that are imported now and not installed. Not covered are
    other modules on the path, which ranks may import, installed packages, compiled extensions, OF_MODELS, and data,
    which a run may write beside the adapter. Raises TooManyFiles.
    """
    files: dict[Path, str] = {}  # by path: the name that it has wherever the code lies
    others = {one for one in [*sys.modules] if "." not in one} - {own, "__main__", OF_MODELS, *SUITE}
    for name in (own, *sorted(others)):
        for place in _places(sys.modules[name]):
            installed = _is_installed_in(place.parent)
            if place in files or (installed and name != own):
                continue
            start = place.parent if name == own and not installed else place
            for path in _source_files(start):
                files.setdefault(path, str(path.relative_to(start.parent if start is place else start)))
            if len(files) > MOST_FILES:
                raise TooManyFiles(_TOO_MANY.format(start))
    digests = sorted((name, hashlib.sha256(_read(path)).hexdigest()) for path, name in files.items())
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16] if digests else ""


def _read(path: Path) -> bytes:
    with contextlib.suppress(OSError):  # nobody who may not read it can import it
        return path.read_bytes()
    return b""


def _places(module: ModuleType) -> list[Path]:
    """Returns the folders of a package, or the file of a module; none if it is not from files."""
    file: str | None = getattr(module, "__file__", None)
    return [Path(one).absolute() for one in getattr(module, "__path__", ()) or ([file] if file else [])]


def _is_installed_in(folder: Path) -> bool:
    return (
        folder.is_relative_to(sysconfig.get_path("stdlib"))
        or not _INSTALLED.isdisjoint(folder.parts)
        or next(folder.glob("*.dist-info"), None) is not None  # of pip install --target
    )


def _source_files(place: Path) -> Iterator[Path]:
    """Yields the SOURCES below a folder, or the file ``place``, in no order. Raises TooManyFiles.

    It follows no links to folders, and leaves out hidden folders, environments, installed packages, output folders and
    checkouts of this suite; of a checkout that ``place`` is only the packages of the suite.
    """
    if place.is_file():
        yield place
    read = size = 0
    for name, folders, files in os.walk(place):
        folder = Path(name)
        is_suite = "conformance" in folders and (folder / "conformance" / "backends" / "registry.py").is_file()
        is_output = {"cells", "inputs"} <= {*folders} and "summary.json" in files
        is_environment = "pyvenv.cfg" in files or any(one.endswith(".dist-info") for one in folders)
        if folder != place and (is_suite or is_output or is_environment):
            folders.clear()
            continue
        left_out = {*_INSTALLED, "__pycache__", *(SUITE if is_suite else ())}
        folders[:] = [one for one in folders if one not in left_out and not one.startswith(".")]
        found = [path for one in files if one.endswith(SOURCES) and (path := folder / one).is_file()]
        read, size = read + 1 + len(found), size + sum(path.stat().st_size for path in found)
        if read > MOST_FILES or size > MOST_BYTES:
            raise TooManyFiles(_TOO_MANY.format(place))
        yield from found


def main() -> None:
    """Runs the module that the first argument names, as ``python -m`` does."""
    prefer()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()


COMMANDS, REPORTERS, COMPARISONS = "parity.commands", "parity.reporters", "parity.comparisons"


def write_reports(out: Path, *, only: str = "") -> list[str]:
    """Calls all reporters, or ``only`` one; returns one line for the user about each, the HTML report last.

    If files cannot be written, raises Unwritable after all reporters were called.
    """
    lines, failed = [], []
    reporters = [one for one in entry_points_of(REPORTERS) if only in ("", one.name)]
    for entry in sorted(reporters, key=lambda entry: (entry.name == "html", entry.name)):
        try:
            write: Callable[[Path], Path] = entry.load()
        except ImportError as error:
            missing = f"{error.name} is not installed" if isinstance(error, ModuleNotFoundError) else str(error)
            lines.append(f"no {entry.name} report: {missing}; run: pip install 'backend-parity[report]'")
        else:
            try:
                lines.append(f"{'report' if entry.name == 'html' else entry.name}: {write(out)}")
            except Unwritable as error:
                failed.append(str(error))
    if failed:
        raise Unwritable("; ".join(failed))
    return lines or ["no report: no reporter is installed"]


def compare(runs: object) -> str:
    """Returns the text of the first installed comparison.

    runs: the path of an output folder, to compare its backends; or the TwoRuns of two folders.

    Raises LookupError if none is installed.
    """
    for entry in entry_points_of(COMPARISONS):
        to_text: Callable[[object], str] = entry.load()
        return to_text(runs)
    raise LookupError(f"no package registers a comparison under the entry-point group {COMPARISONS!r}")


class Command(Protocol):
    help: str  # one line

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace) -> int:
        """Runs the command and returns the exit code. A UsageError is shown to the user in one line."""
        ...


def announced_commands() -> dict[str, EntryPoint]:
    """Returns the entry points of the commands of installed packages, by name. None is imported."""
    return {entry.name: entry for entry in sorted(entry_points_of(COMMANDS), key=lambda entry: entry.name)}


def load_command(name: str) -> Command:
    """Imports a command. A command that cannot be imported raises UsageError with the reason when it is run."""
    try:
        command: Command = announced_commands()[name].load()
    except Exception as error:  # one broken plugin must not stop the others
        return _Missing(f"{type(error).__name__}: {one_line(error)}")
    return command


class _Missing:
    """Stands for a command that cannot be imported; ``run`` raises UsageError with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = f"not available: {reason}"
        self.help = self.reason.replace("%", "%%")  # argparse formats help texts with %

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.prefix_chars = "\0"  # accept all arguments and options: ``run`` only reports what is missing
        parser.add_argument("ignored", nargs="*")

    def run(self, options: argparse.Namespace) -> int:
        raise UsageError(f"this command is {self.reason}")
