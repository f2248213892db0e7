"""Defines the protocol of text pipelines, finds them, and runs each of them in a process of its own.

A text pipeline is what a framework does before any weights: chat template, mask, truncation, packing, order of samples.
It is judged by conformance.judge.text. Pipelines register in the entry-point group ``parity.text``, or are given as
module:Class. A pipeline may use another Python environment (``--python PIPELINE=EXECUTABLE``). There,

    python -P -m conformance.backends.text PIPELINE

answers calls line by line, as JSON. The process is ended with all descendants.
"""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from pydantic import TypeAdapter

from conformance.backends.engines import NotSupported, error_message
from conformance.backends.faults import faults_of, plant
from conformance.backends.query_process import EnvironmentProcess, answer_queries
from conformance.core.errors import UsageError
from conformance.core.packages import entry_points_of, load_class, package_version

ENTRY_POINT_GROUP = "parity.text"
_PLANTED = contextlib.ExitStack()  # the faults of this process, for its lifetime
Packing = Literal["in order", "best fit", "wrapped", "knapsack"]
Truncation = Literal["end", "start", "end, with an end token, or left out", "turns", "error"]


@dataclass(frozen=True, kw_only=True)
class TextInfo:
    """Describes a text pipeline and the rules that it says it follows.

    packages: distributions whose versions are reported. trains: the parts of an answer that are trained on, of
    conformance.oracle.chat.KINDS. turns: which answers. marks: whether {% generation %} decides where a template has
    it. truncates: what is left of a conversation that is too long. packs: the rule by which documents are put into
    rows; empty: the pipeline does not pack. own_templates: the framework renders by templates of its own. strips_end:
    whether white space at the end of a conversation is left out. endless: whether a step may have samples of two
    epochs. drops_last: whether the last step of an epoch is always left out. forms: whether ``encode`` also gets
    ``first`` and ``is_pair`` of conformance.data.forms.Sample and trains as that form of data says: on no turn before
    ``first`` or of a ``weight``, ``train`` or ``loss`` of 0. versions: filled in by the process.
    """

    name: str
    packages: tuple[str, ...]
    trains: tuple[str, ...] = ("content", "end")
    turns: Literal["all", "last"] = "all"
    marks: bool = False
    truncates: Truncation = "end"
    packs: Packing | Literal[""] = ""
    own_templates: bool = False
    strips_end: bool = False
    endless: bool = False
    drops_last: bool = False
    forms: bool = False
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class OrderPlan:
    """Asks for an order of samples. samples: their number. rows: of a rank at a step. epochs: how many passes.

    after: steps that were done before a resume in the middle of an epoch; 0: no resume.
    """

    samples: int
    ranks: int
    rows: int
    epochs: int = 2
    seed: int = 0
    shuffles: bool = True
    drops_last: bool = False
    after: int = 0


class TextPipeline(Protocol):
    """Shows the text stages of a framework. A method that raises NotSupported has no such stage.

    Any other exception of ``encode`` is the framework's own refusal of a conversation.
    """

    @classmethod
    def describe(cls) -> TextInfo: ...

    def load(self, folder: Path, template: str) -> None:
        """Loads the tokenizer of a Hugging Face folder. template: the framework's own name of its template, or ''."""
        ...

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], max_len: int) -> Mapping[str, Any]:
        """Returns ``tokens`` and ``targets`` (whether each token is trained on); neither if the sample is left out."""
        ...

    def pack(self, documents: Sequence[Mapping[str, Any]], max_len: int) -> Sequence[Mapping[str, Any]]:
        """Returns rows with ``tokens``, ``targets`` and ``positions`` of documents with ``tokens`` and ``targets``.

        Padding has the token -1.
        """
        ...

    def order(self, plan: OrderPlan) -> Sequence[Sequence[Sequence[Sequence[int]]]]:
        """Returns the samples of each epoch, rank and step. After a resume: those that are left of the first epoch.

        An endless order has one epoch with as many steps as all of them take.
        """
        ...

    def micro_batches(self, lengths: Sequence[int], max_tokens: int) -> Sequence[Sequence[int]]:
        """Returns the samples of each micro-batch of at most ``max_tokens`` tokens."""
        ...


class HuggingFaceText:
    """Is the base of text pipelines whose loop is a Hugging Face trainer. A subclass has ``make_trainer``."""

    def make_trainer(self, dataset: Any, **options: Any) -> Any:
        """Returns a trainer on a data set. options: of ``TrainingArguments``."""
        raise NotImplementedError

    def order(self, plan: OrderPlan) -> list[list[list[list[int]]]]:
        """Asks the trainer's own loader for each rank, as ``train()`` does; accelerate deals samples to ranks."""
        from accelerate.data_loader import prepare_data_loader, skip_first_batches
        from torch import manual_seed
        from torch.utils.data import SequentialSampler

        ranks: list[list[list[list[int]]]] = []
        for rank in range(plan.ranks):
            manual_seed(plan.seed)
            rows = [{"input_ids": [number, number], "labels": [number, number]} for number in range(plan.samples)]
            options = {"per_device_train_batch_size": plan.rows, "dataloader_drop_last": plan.drops_last}
            trainer = self.make_trainer(rows, seed=plan.seed, **options)
            trainer.data_collator = lambda examples: [one["input_ids"][0] for one in examples]
            trainer.accelerator.prepare = lambda loader, rank=rank: prepare_data_loader(
                loader, num_processes=plan.ranks, process_index=rank, use_seedable_sampler=True
            )
            if not plan.shuffles:
                trainer._get_train_sampler = SequentialSampler
            manual_seed(plan.seed)
            loader = trainer.get_train_dataloader()
            epochs = []
            for epoch in range(plan.epochs):
                one = loader
                if plan.after and not epoch:
                    one = skip_first_batches(loader, plan.after)
                one.set_epoch(epoch)
                sampler = getattr(one.batch_sampler, "batch_sampler", one.batch_sampler)
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(epoch)
                epochs.append([[int(number) for number in step] for step in one])
            ranks.append(epochs)
        return [[epochs[number] for epochs in ranks] for number in range(plan.epochs)]

    def micro_batches(self, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
        raise NotSupported("micro-batches have a number of rows, not of tokens")


class TextFailed(Exception):
    """Reports that a pipeline raised, died, hung, or answered with something that cannot be judged."""


def load_pipeline(name: str) -> type[TextPipeline]:
    """Imports a text pipeline by its registered name or ``module:Class``.

    Raises UsageError for an unknown one, and ImportError if a package is missing.
    """
    found: type[TextPipeline] = load_class(
        "text pipeline",
        name,
        {entry.name: entry.value for entry in entry_points_of(ENTRY_POINT_GROUP)},
        methods=("describe", "load", "encode", "pack", "order", "micro_batches"),
        advice="To judge another one, give module:Class, such as text:Trl with PYTHONPATH=frameworks/trl",
    )
    return found


class ServedPipeline:
    """Calls a text pipeline of this process. Calls raise NotSupported and TextFailed. Use it in a ``with`` statement.

    faults: are planted while it is in use.
    """

    def __init__(self, pipeline: TextPipeline, *, faults: Sequence[str] = ()) -> None:
        self._pipeline, self.info = pipeline, pipeline.describe()
        self._stack = contextlib.ExitStack()
        if faults:
            self._stack.enter_context(plant(faults, type(pipeline), faults_of(type(pipeline))))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def load(self, folder: Path, template: str) -> None:
        self._call("load", folder=str(folder), template=template)

    def encode(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], max_len: int, **form: Any
    ) -> tuple[list[int], list[bool]] | None:
        """Returns the tokens of a conversation, and whether each is trained on; None if the sample is left out.

        form: ``first`` and ``is_pair``, which only pipelines with ``forms`` get.
        """
        form = form if self.info.forms else {}
        found = self._call("encode", messages=list(messages), tools=list(tools), max_len=max_len, **form)
        if not found:
            return None
        return _checked(found, "the conversation")

    def pack(
        self, documents: Sequence[Mapping[str, Any]], max_len: int
    ) -> list[tuple[list[int], list[bool], list[int]]]:
        """Returns tokens, targets and positions of each row."""
        found = self._call("pack", documents=list(documents), max_len=max_len)
        rows = []
        for number, row in enumerate(found):
            positions = row.get("positions")
            tokens, targets = _checked(row, f"row {number}")
            if not isinstance(positions, list) or len(positions) != len(tokens):
                raise TextFailed(f"returned no position for each of the {len(tokens)} tokens of row {number}")
            rows.append((tokens, targets, positions))
        return rows

    def order(self, plan: OrderPlan) -> list[list[list[list[int]]]]:
        found: list[list[list[list[int]]]] = self._call("order", plan=asdict(plan))
        return found

    def micro_batches(self, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
        found: list[list[int]] = self._call("micro_batches", lengths=list(lengths), max_tokens=max_tokens)
        return found

    def _call(self, method: str, **arguments: Any) -> Any:
        try:
            return _answer(self._pipeline, method, arguments)
        except (NotSupported, UsageError):
            raise
        except Exception as error:
            raise TextFailed(error_message(error)["message"]) from error


class PipelineProcess(ServedPipeline):
    """Calls a text pipeline in a process of its own, which may use another Python environment.

    limit_s: seconds for one call. Raises UsageError for an unknown pipeline or fault.
    """

    def __init__(self, name: str, *, python: str = "", limit_s: float, faults: Sequence[str] = ()) -> None:
        what = f"--python {name}={python}" if python else f"pipeline {name}"
        self._stack = contextlib.ExitStack()
        self._errors = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="parity-text-"))) / "stderr"
        self._process = EnvironmentProcess(
            what, python or sys.executable, __name__, name, limit_s=limit_s, errors=self._errors
        )
        self._stack.callback(self._process.end)
        try:
            hello = self._received(self._process.hello)
            if faults:
                self._call("plant", names=list(faults))
        except BaseException:
            self._stack.close()
            raise
        self.info: TextInfo = TypeAdapter(TextInfo).validate_python(hello["info"])

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._received(self._process.ask({"method": method, "arguments": arguments})).get("answer")

    def _received(self, answer: dict[str, Any]) -> dict[str, Any]:
        if "message" not in answer:
            return answer
        message = answer["message"]
        if "ended" in message:
            lines = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            message = f"{message}: {lines[-1][:300]}" if lines else message
        raise {"usage": UsageError, "unsupported": NotSupported}.get(answer["kind"], TextFailed)(message)


def _checked(found: Mapping[str, Any], what: str) -> tuple[list[int], list[bool]]:
    """Returns tokens and targets. Raises TextFailed if they do not belong together."""
    tokens, targets = found.get("tokens"), found.get("targets")
    if not isinstance(tokens, list) or not isinstance(targets, list):
        raise TextFailed(f"returned no lists of tokens and targets for {what}")
    if len(targets) != len(tokens):
        raise TextFailed(f"returned {len(targets)} targets for the {len(tokens)} tokens of {what}")
    return tokens, [bool(one) for one in targets]


def main() -> None:
    """Answers calls on standard input for the pipeline that the first argument names."""

    def made(name: str) -> tuple[TextPipeline, dict[str, Any]]:
        pipeline = load_pipeline(name)
        info = TypeAdapter(TextInfo).dump_python(pipeline.describe(), mode="json")
        info["versions"] = {package: package_version(package) for package in info["packages"]}
        return pipeline(), {"info": info}

    def reply(pipeline: TextPipeline, query: dict[str, Any]) -> dict[str, Any]:
        return {"answer": _answer(pipeline, query["method"], query["arguments"])}

    answer_queries(made, reply, error_message)


def _answer(pipeline: TextPipeline, method: str, arguments: Mapping[str, Any]) -> Any:
    if method == "plant":
        _PLANTED.enter_context(plant(arguments["names"], type(pipeline), faults_of(type(pipeline))))
        return None
    made: dict[str, Callable[[Any], Any]] = {"folder": Path, "plan": lambda values: OrderPlan(**values)}
    return getattr(pipeline, method)(**{name: made.get(name, lambda x: x)(value) for name, value in arguments.items()})


if __name__ == "__main__":
    import_module("conformance.backends.text").main()  # pipelines raise the exceptions of this module
