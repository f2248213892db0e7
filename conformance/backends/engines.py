"""Defines the protocol of rollout engines, finds engines, and runs each of them in a process of its own.

An engine is a kind of backend that does not train: it scores tokens, samples, and takes new weights. It is judged by
conformance.judge.engines. Engines register in the entry-point group ``parity.engines``, or are given as module:Class.
An engine may use another Python environment (``--python ENGINE=EXECUTABLE``). There,

    python -P -m conformance.backends.engines ENGINE

answers calls line by line, as JSON; numbers travel in a safetensors file. The process is ended with all descendants.
"""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor

from conformance.backends.faults import faults_of, plant
from conformance.backends.query_process import EnvironmentProcess, answer_queries
from conformance.core.errors import UsageError, one_line
from conformance.core.packages import entry_points_of, load_class, package_version
from conformance.spec.precision import PrecisionName

ENTRY_POINT_GROUP = "parity.engines"
_PLANTED = contextlib.ExitStack()  # the faults of this process, for its lifetime
Reported = Literal["raw", "processed"]


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """Describes an engine.

    packages: distributions whose versions are reported. reports: the distributions that the log-probs of sampled tokens
    can be of: the model's (raw), or the one that was sampled from (processed), with the settings of each; the first is
    the default. ways: how the engine takes new weights, by the name of the way. adapter_ways: those that take a LoRA
    adapter alone. variants: settings that may not change a number, such as chunked prefill, by the name of the variant.
    experts: the settings with which it returns the experts that its routers choose; None: it cannot. interrupts: the
    ways of updating that may come in the middle of requests. versions: filled in by the process of the engine.
    """

    name: str
    reports: dict[Reported, dict[str, Any]]
    ways: dict[str, str]
    adapter_ways: tuple[str, ...] = ()
    packages: tuple[str, ...] = ("torch",)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    experts: dict[str, Any] | None = None
    interrupts: tuple[str, ...] = ()
    precisions: tuple[PrecisionName, ...] = ("fp32", "bf16")
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Configures sampling; conformance.oracle.scoring.processed is the definition.

    temperature: 0 takes the likeliest token. top_k: 0 for all tokens. stop: tokens that end a response, which keeps
    them; no other token does.
    """

    max_new_tokens: int = 1
    temperature: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[int, ...] = ()


GREEDY = Decoding(temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Holds the response to one prompt, and the log-prob of each of its tokens as the engine reports it.

    version: how many updates the engine had taken when the last token was sampled. before: how many tokens were sampled
    before the last update.
    """

    tokens: tuple[int, ...]
    logprobs: Tensor
    version: int = 0
    before: int = 0


class NotSupported(Exception):
    """Is raised by an engine that cannot do what it is asked for; the message is the engine's own reason."""


class EngineFailed(Exception):
    """Reports that the engine raised, died, hung, or answered with something that cannot be judged."""


class Engine(Protocol):
    """Serves one model. Requests and prompts are token ids; the requests of one call are one batch.

    Two more methods are called if EngineInfo declares ``experts`` and ``interrupts``:

        experts(requests) -> the experts that each token of each request was sent to, (tokens, routers, K)
        interrupted(prompts, seeds, decoding, after, way, folder) -> tokens, log-probs and the number of tokens that
            were sampled before the update, for each prompt: ``generate``, with an update after about ``after`` tokens
    """

    @classmethod
    def describe(cls) -> EngineInfo: ...

    def start(self, folder: Path, precision: PrecisionName, settings: Mapping[str, Any]) -> None:
        """Loads the Hugging Face folder; may be called again, with another folder or other settings.

        The folder has a folder ``adapter`` if the engine has ``adapter_ways``, and serves a LoRA adapter. settings:
        those of a variant, and ``device``, if it is not the CPU. Raises NotSupported for what the engine cannot serve.
        """
        ...

    def score(self, requests: Sequence[Sequence[int]]) -> list[Sequence[float]]:
        """Returns the log-prob of each token after the first, given those before it, for each request."""
        ...

    def next_token(self, prompts: Sequence[Sequence[int]], decoding: Decoding) -> Tensor:
        """Returns the log-probs of all tokens that may follow each prompt, float32 (prompts, vocabulary).

        They are of the distribution that the engine reports; ``decoding`` decides the processed one.
        """
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], decoding: Decoding
    ) -> list[tuple[list[int], list[float]]]:
        """Returns the tokens of one response to each prompt, and their log-probs. Each has a seed of its own.

        Raises NotSupported for a decoding that the engine lacks.
        """
        ...

    def update(self, way: str, folder: Path) -> None:
        """Replaces all weights by those of a Hugging Face folder, in one of the ``ways``; one of ``adapter_ways``
        replaces only the adapter. An update that raises leaves the old weights, or an engine that answers nothing until
        it is started again."""
        ...


def registered_engines() -> dict[str, str]:
    """Returns ``module:Class`` of all engines of the entry-point group, by name. Nothing is imported."""
    return {entry.name: entry.value for entry in sorted(entry_points_of(ENTRY_POINT_GROUP), key=lambda e: e.name)}


def load_engine(name: str) -> type[Engine]:
    """Imports an engine by its registered name or ``module:Class``.

    Raises UsageError for an unknown one, and ImportError if a package is missing.
    """
    found: type[Engine] = load_class(
        "engine",
        name,
        registered_engines(),
        methods=("describe", "start", "score", "next_token", "generate", "update"),
        advice=f"To use your own engine, register it in the entry-point group {ENTRY_POINT_GROUP!r}, or give "
        "module:Class",
    )
    return found


class ServedEngine:
    """Calls an engine and checks its answers. Calls raise NotSupported and EngineFailed. Use it in a ``with``
    statement.

    This class calls an engine of this process; an EngineProcess one that may die or hang. failed: whether a call has
    raised EngineFailed.
    """

    failed = False
    version = 0

    def __init__(self, engine: Engine) -> None:
        self._engine, self.info = engine, engine.describe()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Leaves nothing running."""

    @property
    def is_running(self) -> bool:
        return True

    def start(self, folder: Path, precision: PrecisionName, settings: Mapping[str, Any]) -> None:
        if precision not in self.info.precisions:
            raise NotSupported(f"computes in {', '.join(self.info.precisions)}, not in {precision}")
        self._call("start", folder=str(folder), precision=precision, settings=dict(settings))

    def score(self, requests: Sequence[Sequence[int]]) -> list[Tensor]:
        found = self._call("score", requests=[list(map(int, one)) for one in requests])
        return [_finite(found, f"{i}", (len(one) - 1,), f"request {i}") for i, one in enumerate(requests)]

    def next_token(self, prompts: Sequence[Sequence[int]], vocab_size: int, decoding: Decoding = Decoding()) -> Tensor:
        found = self._call("next_token", prompts=[list(map(int, one)) for one in prompts], decoding=asdict(decoding))
        rows = found["rows"]
        if rows.dim() == 2 and rows.shape[1] > vocab_size:
            rows = rows[:, :vocab_size]  # a padded vocabulary
        return _finite({"rows": rows}, "rows", (len(prompts), vocab_size), "the next token")

    def generate(
        self, prompts: Sequence[Sequence[int]], decoding: Decoding, seeds: Sequence[int] | None = None
    ) -> list[Sampled]:
        """Samples a response to each prompt. seeds: by default the numbers of the prompts."""
        asked = [list(map(int, one)) for one in prompts]
        own = [*(range(len(asked)) if seeds is None else seeds)]
        return self._sampled(prompts, self._call("generate", prompts=asked, seeds=own, decoding=asdict(decoding)))

    def interrupted(
        self, prompts: Sequence[Sequence[int]], decoding: Decoding, *, after: int, way: str, folder: Path
    ) -> list[Sampled]:
        """Samples a response to each prompt, with an update after about ``after`` tokens."""
        asked = {"prompts": [list(map(int, one)) for one in prompts], "seeds": [*range(len(prompts))]}
        update = {"after": after, "way": way, "folder": str(folder)}
        found = self._call("interrupted", **asked, decoding=asdict(decoding), **update)
        self.version += 1
        return self._sampled(prompts, found)

    def experts(self, requests: Sequence[Sequence[int]], shape: tuple[int, int]) -> list[Tensor]:
        """Returns the experts of each token, (tokens, routers, K). shape: routers and K."""
        found = self._call("experts", requests=[list(map(int, one)) for one in requests])
        return [_checked_rows(found, f"{i}", (len(one), *shape), f"request {i}") for i, one in enumerate(requests)]

    def _sampled(self, prompts: Sequence[Sequence[int]], found: Mapping[str, Tensor]) -> list[Sampled]:
        responses = []
        for i in range(len(prompts)):
            tokens = tuple(found.get(f"{i}.tokens", torch.zeros(0)).tolist())
            if not tokens:
                raise EngineFailed(f"returned no token for prompt {i}")
            logprobs, before = _finite(found, str(i), (len(tokens),), f"prompt {i}"), found.get(f"{i}.before", 0)
            responses.append(Sampled(tokens=tokens, logprobs=logprobs, version=self.version, before=int(before)))
        return responses

    def update(self, way: str, folder: Path) -> None:
        self._call("update", way=way, folder=str(folder))
        self.version += 1

    def _call(self, method: str, **arguments: Any) -> dict[str, Tensor]:
        try:
            return _numbers(self._engine, method, arguments)
        except (NotSupported, UsageError):
            raise
        except Exception as error:
            self.failed = True
            raise EngineFailed(error_message(error)["message"]) from error


class EngineProcess(ServedEngine):
    """Calls an engine in a process of its own, which may use another Python environment.

    limit_s: seconds for one call. faults: are planted in the process. Raises UsageError for an unknown engine or fault.
    """

    def __init__(self, name: str, *, python: str = "", limit_s: float, faults: Sequence[str] = ()) -> None:
        self._stack = contextlib.ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="parity-engine-")))
        what = f"--python {name}={python}" if python else f"engine {name}"
        errors = self._folder / "stderr"
        self._process = EnvironmentProcess(
            what, python or sys.executable, __name__, name, limit_s=limit_s, errors=errors
        )
        self._stack.callback(self._process.end)
        self._errors = errors
        try:
            hello = self._checked(self._process.hello)
            if faults:
                self._call("plant", names=list(faults))
        except BaseException:
            self._stack.close()
            raise
        self.info: EngineInfo = TypeAdapter(EngineInfo).validate_python(hello["info"])

    def end(self) -> None:
        self._stack.close()

    @property
    def is_running(self) -> bool:
        return self._process.process.poll() is None

    def _call(self, method: str, **arguments: Any) -> dict[str, Tensor]:
        file = self._folder / "answer.safetensors"
        file.unlink(missing_ok=True)
        self._checked(self._process.ask({"method": method, "arguments": arguments, "file": str(file)}))
        return load_file(file) if file.exists() else {}

    def _checked(self, answer: dict[str, Any]) -> dict[str, Any]:
        if "message" not in answer:
            return answer
        kinds = {"usage": UsageError, "unsupported": NotSupported}
        message: str = answer["message"]
        self.failed = answer["kind"] not in kinds
        if "ended" in message:
            self._process.end()
            message = f"{message} ({_ending(self._process.process.returncode)}){self._last_words()}"
        raise kinds.get(answer["kind"], EngineFailed)(message)

    def _last_words(self) -> str:
        """Returns the last line of the engine's standard error, which tells why it has ended."""
        lines = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f": {lines[-1][:300]}" if lines else ""


def _ending(code: int | None) -> str:
    return f"signal {-code}" if code and code < 0 else f"exit code {code}"


def _finite(found: Mapping[str, Tensor], name: str, shape: tuple[int, ...], what: str) -> Tensor:
    """Returns a tensor of an answer in float64. Raises EngineFailed for another shape or numbers that are not finite,
    but for -inf, which is the log-prob of a token that cannot be."""
    rows = _checked_rows(found, name, shape, what).double()
    if rows.isnan().any() or (rows == torch.inf).any():
        raise EngineFailed(f"returned {int((~rows.isfinite()).sum())} log-probs that are not finite for {what}")
    return rows


def _checked_rows(found: Mapping[str, Tensor], name: str, shape: tuple[int, ...], what: str) -> Tensor:
    rows = found.get(name)
    if rows is None or tuple(rows.shape) != shape:
        got = "nothing" if rows is None else "x".join(map(str, rows.shape))
        kind = "experts" if len(shape) > 2 else "log-probs"
        raise EngineFailed(f"returned {got} {kind} for {what}, not {'x'.join(map(str, shape))}")
    return rows


def main() -> None:
    """Answers calls on standard input for the engine that the first argument names."""

    def made(name: str) -> tuple[Engine, dict[str, Any]]:
        engine = load_engine(name)
        info = TypeAdapter(EngineInfo).dump_python(engine.describe(), mode="json")
        info["versions"] = {package: package_version(package) for package in info["packages"]}
        return engine(), {"info": info}

    answer_queries(made, _reply, error_message)


def _reply(engine: Engine, query: dict[str, Any]) -> dict[str, Any]:
    numbers = _numbers(engine, query["method"], query["arguments"])
    if numbers:
        save_file({name: tensor.contiguous() for name, tensor in numbers.items()}, query["file"])
    return {}


def _numbers(engine: Engine, method: str, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Calls a method; returns the tensors of its answer by name."""
    if method == "plant":
        _PLANTED.enter_context(plant(arguments["names"], type(engine), faults_of(type(engine))))
        return {}
    made: dict[str, Callable[[Any], Any]] = {
        "folder": Path,
        "decoding": lambda values: Decoding(**values | {"stop": tuple(values["stop"])}),
    }
    answer = getattr(engine, method)(**{name: made.get(name, lambda x: x)(value) for name, value in arguments.items()})
    if method == "next_token":
        return {"rows": answer}
    if method in ("generate", "interrupted"):
        parts = dict(zip(("tokens", "", "before"), zip(*answer, strict=True), strict=False))
        logprobs = _rows(parts.pop(""))
        return logprobs | {f"{i}.{n}": torch.tensor(one) for n, part in parts.items() for i, one in enumerate(part)}
    if method == "experts":
        return {str(i): torch.tensor(one) for i, one in enumerate(answer)}
    return _rows(answer) if method == "score" else {}


def _rows(answer: Sequence[Sequence[float]]) -> dict[str, Tensor]:
    return {str(i): torch.as_tensor(one, dtype=torch.float64) for i, one in enumerate(answer)}


def error_message(error: Exception) -> dict[str, str]:
    if isinstance(error, UsageError):
        return {"kind": "usage", "message": str(error)}
    if isinstance(error, NotSupported | ImportError):
        return {"kind": "unsupported", "message": one_line(error)}
    return {"kind": "failed", "message": f"{type(error).__name__}: {one_line(error)}"}


if __name__ == "__main__":
    import_module("conformance.backends.engines").main()  # engines raise the exceptions of this module
