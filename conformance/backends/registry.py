"""Queries a backend adapter (supported cells, packages) in a process of its own.

An adapter never runs in the process that judges it, because it could change the judge there. Its process is forked
from the preload server (conformance.runtime.preload_server), so that it need not import torch and transformers again,
and is free of CUDA and NVML, which do not survive a fork. It answers queries line by line, as JSON.

A framework may also pin packages that conflict with those of oracle and judge. So an adapter and its ranks may use
another environment (`--python BACKEND=EXECUTABLE`), where the process is

    python -P -m conformance.backends.registry BACKEND

The environment needs this version of backend-parity (``pip install --no-deps``), what ranks of every backend import
(OF_RANKS), and the imports of the adapter. `parity matrix` makes such environments.
"""

import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from pydantic import TypeAdapter, ValidationError

import conformance
from conformance.backends.protocol import (
    Backend,
    BackendEntry,
    BrokenBackend,
    MissingExtra,
    Support,
    Supported,
    Unsupported,
    is_registered,
)
from conformance.backends.protocol import find_backend as find_here
from conformance.backends.query_process import (
    NEEDS,
    EnvironmentProcess,
    ForkedProcess,
    answer_in_fork,
    answer_queries,
    serve_queries,
)
from conformance.core.errors import UsageError, one_line
from conformance.core.packages import SUITE, UNKNOWN, TooManyFiles, code_digest, package_version
from conformance.runtime.failure import StartError
from conformance.spec.conventions import Convention, Conventions, in_cell
from conformance.spec.known_defects import ExpectedDifference, Known
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario, parse_scenario, scenario_to_json

logger = logging.getLogger(__name__)
LIMIT_S = 300.0  # seconds for an answer; for the first one, seconds in which the imports neither compute nor read
OPTIONAL = ("export_merged", "export_state", "host_bytes", "import_state", "supports_checkpoint", "traced")
CODE = "code of "  # begins the name of a digest of code, among those of files
MOST_PROCESSES = 8  # of adapters, the last ones that were asked; each keeps some 50 MB
_PRELOAD = ("torch._dynamo",)  # torch.optim imports it, which takes a second in every rank


class AskFailed(Exception):
    """Reports that the adapter raised when it was queried, or that its process ended; the message says where."""


_KINDS: dict[str, type[Exception]] = {
    "usage": UsageError,
    "missing": MissingExtra,
    "broken": BrokenBackend,
    "failed": AskFailed,
}


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Holds the properties of an adapter that do not depend on the cell.

    packages: versions of the distributions that it names. seams: the names of its patch points. methods: those of
    OPTIONAL that it has. preload: modules to import before ranks are forked, including its own module. preload_apart:
    the modules to import instead, by layout option. code: see ``code_of``. For the other fields, see
    conformance.backends.protocol.
    """

    default_zero: int | None
    packages: dict[str, str]
    seams: tuple[str, ...]
    methods: tuple[str, ...]
    preload: tuple[str, ...]
    fresh_ranks: bool
    # These are missing in answers of an older suite.
    preload_apart: dict[str, tuple[str, ...]] = field(default_factory=dict)
    gpu_backend: str = "nccl"
    code: str = ""

    def preload_for(self, layout: Layout) -> tuple[str, ...]:
        """Returns the modules to import before the ranks of a cell in this layout are forked."""
        instead = (modules for option, modules in self.preload_apart.items() if option in layout.options)
        return next(instead, self.preload)


class Adapter(Protocol):
    """Answers queries about an adapter. The methods raise UsageError, and AskFailed if the adapter raises anything
    else."""

    @property
    def traits(self) -> Traits: ...

    def supports(self, scenario: Scenario, layout: Layout) -> Support: ...

    def supports_checkpoint(self, scenario: Scenario, before: Layout, after: Layout) -> Support: ...

    def known(self, scenario: Scenario, layout: Layout) -> tuple[Known, ...]:
        """Returns the expected differences of a cell of one phase."""
        ...

    def conventions(self, scenario: Scenario, layout: Layout) -> Conventions:
        """Returns the declared conventions that can change a cell of one phase."""
        ...

    def host_bytes(self, scenario: Scenario, layout: Layout) -> int:
        """Returns the bytes of the host's memory that a rank on a GPU needs for its models; 0 if unknown."""
        ...


def code_of(adapter: type[Backend]) -> str:
    """Returns ``code_digest`` of an adapter, or UNKNOWN with the reason if it has too many files. Empty for one of this
    suite, whose commit a run records."""
    own = adapter.__module__.partition(".")[0]
    if own in SUITE:
        return ""
    try:
        return code_digest(own)
    except TooManyFiles as error:
        return f"{UNKNOWN}{error}"


def codes(entries: Iterable[BackendEntry]) -> dict[str, str]:
    """Returns the digests of adapters that are not of this suite, by ``CODE`` and their names.

    An adapter that cannot be imported has none: its cells say why.
    """
    found = {}
    for entry in dict.fromkeys(entries):
        if entry.target.startswith("impl."):  # of this suite; asking would wait for its imports
            continue
        with contextlib.suppress(UsageError, MissingExtra, BrokenBackend, AskFailed):
            if code := adapter_of(entry).traits.code:
                found[CODE + entry.name] = code
            if code.startswith(UNKNOWN):
                why = code.removeprefix(UNKNOWN)
                logger.warning("the code of %s has no digest, so --resume will refuse this run: %s", entry.name, why)
    return found


class InProcessAdapter:
    """Queries an adapter in this process, which is the adapter's."""

    def __init__(self, adapter: type[Backend]) -> None:
        self._adapter: Any = adapter

    @cached_property
    def traits(self) -> Traits:
        adapter = self._adapter
        info = adapter.describe()
        # An adapter that inherits ``preload`` gets the same modules as the class that defines it, so that the worker
        # groups of both are forked from one process.
        defining = next((one for one in adapter.__mro__ if "preload" in vars(one)), adapter)
        always = (defining.__module__, "conformance.worker.phase")
        by_option: dict[str, tuple[str, ...]] = getattr(adapter, "preload_apart", {})
        return Traits(
            default_zero=info.default_zero,
            packages={package: package_version(package) for package in info.packages},
            seams=tuple(getattr(adapter, "seams", ())),
            methods=tuple(name for name in OPTIONAL if callable(getattr(adapter, name, None))),
            preload=(*always, *getattr(adapter, "preload", _PRELOAD)),
            preload_apart={option: (*always, *modules) for option, modules in by_option.items()},
            fresh_ranks=bool(getattr(adapter, "fresh_ranks", False)),
            gpu_backend=getattr(adapter, "gpu_backend", "nccl"),
            code=code_of(adapter),
        )

    def supports(self, scenario: Scenario, layout: Layout) -> Support:
        kind = scenario.objective.kind  # reading a scenario may have added it to those of the adapter
        if kind not in tuple(getattr(self._adapter, "objectives", ("sft",))):
            return Unsupported(f"{self._adapter.describe().name} does not train the objective {kind!r}")
        if (optimizer := scenario.optimizer.name) not in tuple(getattr(self._adapter, "optimizers", ("sgd", "adamw"))):
            why = dict(getattr(self._adapter, "lacking_optimizers", {})).get(optimizer, "")
            name, reason = self._adapter.describe().name, f" ({why})" if why else ""
            return Unsupported(f"{name} does not train with {optimizer}{reason}; use adamw, or sgd")
        return self._answer("supports", scenario, layout)

    def supports_checkpoint(self, scenario: Scenario, before: Layout, after: Layout) -> Support:
        return self._answer("supports_checkpoint", scenario, before, after)

    def known(self, scenario: Scenario, layout: Layout) -> tuple[Known, ...]:
        expected: tuple[ExpectedDifference, ...] = getattr(self._adapter, "expected", ())
        if not expected:
            return ()
        zero = self._adapter.describe().default_zero
        about = (one for one in expected if one.is_about(scenario, layout, default_zero=zero))
        found = (one.known_for(scenario, layout) for one in about)
        return tuple(known for known in found if known.defects or known.unmodelled)

    def conventions(self, scenario: Scenario, layout: Layout) -> Conventions:
        declared = getattr(self._adapter, "conventions", ())
        if not isinstance(declared, tuple) or not all(isinstance(one, Convention) for one in declared):
            raise AskFailed(
                f"{self._adapter.__name__}.conventions is {declared!r}; it has to be a tuple of conventions, such as "
                f"(parity.DecaysAll(),)"
            )
        return in_cell(declared, scenario, layout)

    def host_bytes(self, scenario: Scenario, layout: Layout) -> int:
        if "host_bytes" not in self.traits.methods:
            return 0
        answer = self._called("host_bytes", scenario, layout)
        if not isinstance(answer, int) or answer < 0:
            raise AskFailed(f"host_bytes() returned {answer!r}; it has to return a whole number of bytes")
        return answer

    def _answer(self, method: str, *arguments: Any) -> Support:
        answer: Support = self._called(method, *arguments)
        if not isinstance(answer, Supported) and not (isinstance(answer, Unsupported) and answer.reason):
            raise AskFailed(f"{method}() returned {answer!r}; it has to return Supported, or Unsupported with a reason")
        return answer

    def _called(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._adapter, method)(*arguments)
        except UsageError:
            raise
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            first = _first_cause(error)
            why = f" (because of {type(first).__name__}: {one_line(first)})" if first is not error else ""
            message = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}{why}"
            raise AskFailed(message) from error


def _first_cause(error: BaseException) -> BaseException:
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:  # an error may be its own cause
        chain.append(cause)
    return chain[-1]


class SubprocessAdapter:
    """Queries an adapter in a process of its own, which ends with this one."""

    def __init__(self, name: str, python: str = "") -> None:
        """name: the adapter's name as registered in its environment, or module:Class. python: the executable of that
        environment; empty: this one.

        Raises UsageError if the environment cannot be used or has no such adapter, and what BackendEntry.load raises if
        the adapter cannot be imported.
        """
        self._what = f"--python {name}={python}: " if python else ""
        self._name, self._python = name, python
        self._asking, self._rests = threading.Lock(), False
        self.asked = time.monotonic()
        self._latest: tuple[Scenario, Any] | None = None
        self._process = begun if (begun := _begun.pop(name, None) if not python else None) else self._started()
        hello, needs = self._process.hello, NEEDS.format(conformance.__version__)
        if "message" in hello:
            self.end()
            raise self._error(hello)
        self.entry = BackendEntry(name=hello["name"], target=hello["target"], python=python)
        try:
            self.traits: Traits = TypeAdapter(Traits).validate_python(hello["traits"])
        except ValidationError as error:
            raise UsageError(f"{self._what}the environment has another suite ({one_line(error)}); it {needs}") from None
        self.version: str = hello["python"]

    def _started(self) -> EnvironmentProcess:
        if not self._python:
            return forked_process(self._name)
        return EnvironmentProcess(self._what[:-2], self._python, __name__, self._name, limit_s=LIMIT_S)

    def supports(self, scenario: Scenario, layout: Layout) -> Support:
        return self._answer("supports", scenario, layout)

    def supports_checkpoint(self, scenario: Scenario, before: Layout, after: Layout) -> Support:
        return self._answer("supports_checkpoint", scenario, before, after)

    def known(self, scenario: Scenario, layout: Layout) -> tuple[Known, ...]:
        try:
            return _KNOWN.validate_python(self._ask("known", scenario, layout).get("known"))
        except ValidationError as error:
            raise AskFailed(f"{self._what}its expected differences are invalid: {one_line(error)}") from None

    def conventions(self, scenario: Scenario, layout: Layout) -> Conventions:
        try:
            return _CONVENTIONS.validate_python(self._ask("conventions", scenario, layout).get("conventions"))
        except ValidationError as error:
            raise AskFailed(f"{self._what}its conventions are invalid: {one_line(error)}") from None

    def host_bytes(self, scenario: Scenario, layout: Layout) -> int:
        if "host_bytes" not in self.traits.methods:
            return 0
        answer = self._ask("host_bytes", scenario, layout).get("bytes")
        if not isinstance(answer, int):
            raise AskFailed(f"{self._what}host_bytes() returned {answer!r}")
        return answer

    def rest(self) -> None:
        """Ends the process, unless it is being asked. The next question starts another one."""
        if not self._rests and self._asking.acquire(blocking=False):
            self._rests = True
            self.end()
            self._asking.release()

    def end(self) -> None:
        """Ends the process."""
        self._process.end()

    def _answer(self, method: str, scenario: Scenario, *layouts: Layout) -> Support:
        answer = self._ask(method, scenario, *layouts)
        match answer.get("supported"), answer.get("reason"):
            case True, _:
                return Supported()
            case False, str(reason) if reason:
                return Unsupported(reason)
        raise AskFailed(f"{self._what}{method}() returned {answer!r}")

    def _ask(self, method: str, scenario: Scenario, *layouts: Layout) -> dict[str, Any]:
        with self._asking:
            if self._latest is None or self._latest[0] is not scenario:
                self._latest = scenario, scenario_to_json(scenario)
            query = {"method": method, "scenario": self._latest[1], "layouts": [str(one) for one in layouts]}
            self.asked = time.monotonic()
            if self._rests:
                started = self._started()
                if "message" in started.hello:  # as when files of the backend are being changed
                    started.end()
                    raise self._error(started.hello)
                self._process, self._rests = started, False
            answer = self._process.ask(query | {"folder": str(Path.cwd())})
        if "message" in answer:
            raise self._error(answer)
        return answer

    def _error(self, answer: Mapping[str, str]) -> Exception:
        return _KINDS.get(answer["kind"], AskFailed)(f"{self._what}{answer['message']}")


_KNOWN, _CONVENTIONS = TypeAdapter(tuple[Known, ...]), TypeAdapter(Conventions)
_begun: dict[str, EnvironmentProcess] = {}  # by the name of an adapter in this environment: those that import
_there: dict[tuple[str, str], SubprocessAdapter] = {}  # by the requested name or target, and the executable


def find_backend(name: str, python: str = "") -> BackendEntry:
    """Finds an adapter by its name or by module:Class, in the environment of ``python`` if it is given.

    Raises UsageError if there is none, or if the environment cannot be used.
    """
    if not python and ":" not in name:
        return find_here(name)
    if (name, python) not in _there:
        try:
            found = SubprocessAdapter(name, python)
        except (MissingExtra, BrokenBackend):  # it is said when the adapter is needed
            return BackendEntry(name=name.rpartition(":")[2].lower(), target=name, python=python)
        _there[name, python] = _there[found.entry.target, python] = found
    return _there[name, python].entry


def adapter_of(entry: BackendEntry) -> Adapter:
    """Returns the adapter of an entry that was found. Raises what BackendEntry.load raises."""
    key = entry.target, entry.python
    if key not in _there:
        _there[key] = SubprocessAdapter(_own_name(entry), entry.python)
    for other in sorted({*_there.values()} - {_there[key]}, key=lambda one: -one.asked)[MOST_PROCESSES - 1 :]:
        other.rest()
    return _there[key]


def end_processes(python: str) -> None:
    """Ends the processes of the adapters in the environment of ``python``, each of which has imported a backend."""
    keys = [key for key in _there if key[1] == python]
    for adapter in {_there.pop(key) for key in keys}:
        adapter.end()


def _own_name(entry: BackendEntry) -> str:
    return entry.name if is_registered(entry) else entry.target


def import_adapters(entries: Sequence[BackendEntry]) -> None:
    """Starts processes of adapters that do not run yet, so that they import at the same time.

    The first question to an adapter whose process cannot be started raises the reason.
    """
    for entry in entries:
        if not entry.python and (entry.target, "") not in _there and (name := _own_name(entry)) not in _begun:
            with contextlib.suppress(StartError, OSError):
                _begun[name] = forked_process(name)


def forked_process(name: str) -> ForkedProcess:
    """Starts the process of an adapter in this environment."""
    return ForkedProcess(name, f"{answer.__module__}:{answer.__name__}", name, limit_s=LIMIT_S)


def answer(name: str, end: int, parent_lives: int) -> NoReturn:
    """Answers queries about an adapter, in a process of the preload server. See ``answer_in_fork``."""

    def serve(queries: IO[str], answers: IO[str]) -> None:
        serve_queries(queries, answers, name, _made, _reply, _error_message)

    answer_in_fork(end, parent_lives, serve)


def versions_of(entries: Sequence[BackendEntry]) -> dict[str, str]:
    """Returns the versions of the adapters' packages, by package, or ``package (backend)`` for another environment.

    Adapters that cannot be imported are left out.
    """
    import_adapters(entries)
    found: dict[str, str] = {}
    for entry in entries:
        try:
            adapter = adapter_of(entry)
            packages = adapter.traits.packages
        except (MissingExtra, BrokenBackend, UsageError):
            continue
        if entry.python and isinstance(adapter, SubprocessAdapter):
            packages = {"python": adapter.version} | packages
        found |= {f"{name} ({entry.name})" if entry.python else name: value for name, value in packages.items()}
    return found


def main() -> None:
    """Answers queries on standard input about the adapter that the first argument names."""
    answer_queries(_made, _reply, _error_message)


def _made(name: str) -> tuple[InProcessAdapter, dict[str, Any]]:
    entry = find_here(name)
    adapter = InProcessAdapter(entry.load())
    traits = TypeAdapter(Traits).dump_python(adapter.traits, mode="json")
    return adapter, {"name": entry.name, "target": entry.target, "traits": traits}


def _reply(adapter: InProcessAdapter, query: dict[str, Any]) -> dict[str, Any]:
    os.chdir(query["folder"])
    scenario, layouts = parse_scenario(query["scenario"]), [Layout.parse(one) for one in query["layouts"]]
    if query["method"] == "known":
        return {"known": _KNOWN.dump_python(adapter.known(scenario, *layouts), mode="json")}
    if query["method"] == "conventions":
        return {"conventions": _CONVENTIONS.dump_python(adapter.conventions(scenario, *layouts), mode="json")}
    if query["method"] == "host_bytes":
        return {"bytes": adapter.host_bytes(scenario, *layouts)}
    answer: Support = getattr(adapter, query["method"])(scenario, *layouts)
    return {"supported": isinstance(answer, Supported), "reason": getattr(answer, "reason", "")}


def _error_message(error: Exception) -> dict[str, str]:
    kind = next((kind for kind, of in _KINDS.items() if isinstance(error, of)), "")
    message = str(error) if kind else f"{type(error).__name__}: {one_line(error)}"
    return {"kind": kind or "failed", "message": message}


if __name__ == "__main__":
    main()
