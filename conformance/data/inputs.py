"""Freezes the inputs of a scenario once per output folder: models, and batches of documents that are packed into rows.

All cells of the scenario and the oracle read them. Batches are made so that the usual bugs cannot cancel out. Documents
keep their different lengths, and for every data set but pairs of answers, of which no framework has empty ones, the
following rows have no target token:

* step 0: the last sixth of the rows (of 24 rows: 20..23). So the last of 8 ranks has no target token, nor has one
  micro-batch of dp 2 or 4 with accumulation 3;
* step 1: the last third of the rows (of 24 rows: 16..23). So one micro-batch of a single rank with accumulation 3 has
  no target token.
"""

import dataclasses
import fnmatch
import hashlib
import json
import logging
import random
import shutil
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance.core.errors import UsageError
from conformance.core.host import resolve
from conformance.core.io import check_file, complete_or_nothing, locked
from conformance.data.forms import Sample, mismatched, read_labelled, read_preferences, read_samples, read_steps
from conformance.data.images import check_images
from conformance.data.rollouts import build_rollouts, data_path, has_data
from conformance.data.tokenizer import Documents, load_tokenizer
from conformance.models.folder_checks import check_model_folder, files_of, runs_code
from conformance.models.folders import check_finite, has_weights, prepare_model, weight_files
from conformance.models.synthetic import draw_weights, random_model
from conformance.oracle.role_model import Decoder, decoder_of
from conformance.records.step_tensors import input_sha256
from conformance.spec.batch import IMAGE, Batch, Document, Row, write_batches
from conformance.spec.objectives import objective_to_json
from conformance.spec.observables import IN_PAIRS, POLICY, Reads, documents_together
from conformance.spec.scenario import DataConfig, Scenario, scenario_to_json

LOOK_AHEAD = 1000  # documents; each document that is tried is tokenized

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FrozenInputs:
    """Locates the inputs of every backend and of the oracle: a Hugging Face folder by role name, and frozen batches."""

    models: dict[str, Path]
    batches: Path


def prepare_inputs(scenario: Scenario, root: Path, *, draws: bool = True) -> FrozenInputs:
    """Makes the scenario's inputs under ``root/inputs``, unless they exist.

    ``draws``: whether to draw the weights of a random model (conformance.models.synthetic), which costs time and disk
    in proportion to its size. Raises UsageError for an unusable model or data set, and for a ``root`` inside the
    model's folder. The model's folder is checked before its code runs and before its files are copied.
    """
    source, decoder = checked_model(scenario, root)
    folder, drawn, models = root / "inputs", random_model(source), {}
    with locked(folder / "lock"):
        for role in scenario.objective.roles:
            name = f"{scenario.model_name}{'-' * bool(role.prefix)}{role.prefix}"
            adapted = [] if scenario.lora is None else [dataclasses.asdict(scenario.lora)]
            rounded = [] if scenario.tier.stored is None else [scenario.tier.stored.name]
            model = folder / f"{name}-{short_key(scenario.model, scenario.seed, role.head, *adapted, *rounded)}"
            if not model.exists():
                if not drawn:
                    decoder.check_weights(source)
                with complete_or_nothing(model) as unfinished:
                    if drawn:
                        shutil.copytree(source, unfinished)
                    else:
                        prepare_model(scenario, role, unfinished)
            if drawn and draws:
                draw_weights(drawn, scenario, role, model)
            models[role.name] = model
        values = scenario_to_json(scenario)
        used = {name: values[name] for name in ("data", "steps", "seed", "model")}
        batches = folder / f"batches-{short_key(used, objective_to_json(scenario.objective))}.safetensors"
        if not batches.exists():
            with complete_or_nothing(batches) as file:
                write_batches(file, scenario.objective.annotate(batches_of(scenario, source)))
    return FrozenInputs(models=models, batches=batches)


def checked_model(scenario: Scenario, root: Path) -> tuple[Path, Decoder]:
    """Checks the scenario's model; returns its folder and decoder. Raises UsageError for an unusable model, and for a
    ``root`` inside its folder."""
    source = resolve(scenario.model)
    check_model_folder(source)
    if (root / "inputs").resolve().is_relative_to(source):
        raise UsageError(f"{root} lies inside the model folder {source}, which is copied there; give another --out")
    runs_code(source, trusted=scenario.trust_remote_code)
    # A model that no oracle can compute cannot be judged, so it is rejected here.
    decoder = decoder_of(scenario, source)
    check_trained(scenario, decoder)
    return source, decoder


def batches_of(scenario: Scenario, model: Path) -> list[Batch]:
    """Builds the batches of a scenario for the Hugging Face folder ``model``, from what its objective reads."""
    return (build_rollouts if scenario.objective.reads == "rollouts" else build_batches)(scenario, model)


def check_trained(scenario: Scenario, decoder: Decoder) -> None:
    """Raises UsageError if the scenario's training options do not fit the model.

    That is: adapters that do not fit, a z-loss without routers, a rate of biases that no router has, a pattern of
    frozen parameters that matches no trained parameter, and no parameter left to train.
    """
    if scenario.router_z_loss and not decoder.routers:
        raise UsageError(
            f"router_z_loss={scenario.router_z_loss:g} is only for mixtures of experts that the oracle computes "
            f"(docs/explanations/mixture-of-experts.md), not for {scenario.model_name}; set it to 0, or give another "
            f"model"
        )
    if scenario.router_bias_rate and (scenario.lora or not any(part.corrected for part in decoder.routers)):
        lacking = "adapters leave the base as it is" if scenario.lora else f"{scenario.model_name} has no such bias"
        raise UsageError(
            f"router_bias_rate={scenario.router_bias_rate:g} moves the bias by which DeepSeek-V3's routers choose "
            f"experts, but {lacking}; set it to 0, or give another model"
        )
    for role in scenario.objective.roles:
        if not role.trained:
            continue
        names = decoder.parameter_names(role.head)
        if scenario.lora and role == POLICY:
            names = decoder.adapted(scenario.lora).adapter_names
        for pattern in scenario.optimizer.frozen:
            if not fnmatch.filter(names, pattern):
                raise UsageError(
                    f"optimizer.frozen names {pattern!r}, which matches no trained parameter of {scenario.model_name}; "
                    f"names look like {', '.join([*names][:3])}"
                )
        if not any(scenario.trains(role, name) for name in names):
            raise UsageError(f"optimizer.frozen leaves nothing of {role.name} to train; freeze less")


def input_digests(scenarios: Iterable[Scenario]) -> dict[str, str]:
    """Returns 16 hexadecimal digits of the SHA-256 of every file of the scenarios' models and data, by its name.

    A name is that of the model or data set, and below a folder the path there, because folders differ between
    machines. It is the whole path if two folders have the same name. Raises UsageError for an unusable folder,
    and for weights that are not finite: all of them are read here.
    """
    files: dict[Path, tuple[str, list[Path]]] = {}
    weights: set[Path] = set()
    for scenario in scenarios:
        if (model := resolve(scenario.model)) not in files:
            check_model_folder(model)
            weights |= set(weight_files(model) if has_weights(model) else ())
            files[model] = scenario.model_name, [file for file, _ in files_of(model)]
        if has_data(scenario) and (data := data_path(scenario)) not in files:
            found = sorted(data.rglob("*")) if data.is_dir() else [data]
            files[data] = data.name, [file for file in found if not file.is_dir()]
    counts, digests = Counter(name for name, _ in files.values()), dict[str, str]()
    for source, (name, found) in files.items():
        for file in found:
            check_file(file)
            if file in weights:
                check_finite(file)  # before the digest, which then finds what was read in the page cache
            label = Path(name if counts[name] == 1 else source, file.relative_to(source))
            digests[str(label)] = input_sha256(file)[:16]
    return digests


def short_key(*parts: object) -> str:
    """Returns ten hexadecimal digits of a digest of JSON values, for names of files and folders."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:10]


def build_batches(scenario: Scenario, model: Path) -> list[Batch]:
    """Builds ``scenario.steps`` batches with the tokenizer of the Hugging Face folder ``model``.

    ``scenario.seed`` shuffles the samples once; when they run out, they are used again from the start. Only the samples
    that are needed are tokenized. Without packing, a row is one document. With packing, a row holds as many documents
    as fit into ``max_len``, in order: usually two or more, or a single long one. The answers of a preference are two
    documents in a row, or in two consecutive rows; so are a labelled answer and the next sample's answer to another
    prompt, both after the prompt of the first. The rows that the module's docstring names lose their target tokens.

    Raises UsageError if the data, the tokenizer or ``max_len`` do not allow this.
    """
    data = scenario.data
    samples = samples_in_turn(data, scenario.objective.reads, seed=scenario.seed)
    tokenizer = load_tokenizer(model, trusted=scenario.trust_remote_code)
    documents = Documents(samples, data, tokenizer, likely=scenario.steps * data.rows)
    units = Units(documents, documents_together(scenario.objective.reads))
    if data.packed and units.size == 1:
        documents.check_packing()
    rows = pack(units, max_len=data.max_len) if data.packed else one_by_one(units)
    try:
        batches = [_batch(step, rows, scenario) for step in range(scenario.steps)]
    except StopIteration:
        raise documents.none_left() from None
    documents.warn_of_length()
    _check_variety(batches, documents, model)
    decoder = decoder_of(scenario, model)
    for _, sample in sorted(samples, key=lambda each: each[0]):
        if IMAGE in sample.columns:
            check_images(sample.tokens, sample.columns, decoder.image_config, sample.place)
    used = [document for batch in batches for document in batch.documents]
    _check_vocabulary(used, samples, model, decoder.vocab_size)
    return batches


def samples_in_turn(data: DataConfig, reads: Reads, *, seed: int | None = None) -> list[tuple[int, Sample]]:
    """Reads a data set: (number in the data set, sample), with the two of a pair in turn. ``seed``: shuffles it."""
    read: list[tuple[Sample, ...]]
    if reads == "preferences":
        read = [*read_preferences(data)]
    else:
        readers = {"labelled answers": read_labelled, "labelled steps": read_steps}
        read = [(sample,) for sample in readers.get(reads, read_samples)(data)]
    numbered = list(enumerate(read, start=1))
    if seed is not None:
        random.Random(seed).shuffle(numbered)
    samples = [(number, sample) for number, together in numbered for sample in together]
    if reads != "labelled answers":
        return samples
    others = _of_other_prompts([sample for _, sample in samples], data)
    pairs = zip(samples, others, strict=True)
    return [(number, one) for (number, own), other in pairs for one in (own, mismatched(own, other))]


def _of_other_prompts(samples: Sequence[Sample], data: DataConfig) -> list[Sample]:
    """Returns for each sample the next one with another prompt; the first one follows the last.

    Raises UsageError if all have the same prompt.
    """
    prompts = [(sample.messages[: sample.trained[0]], sample.tools) for sample in samples]
    following = [*range(1, len(samples)), 0]
    if all(prompt == prompts[0] for prompt in prompts):
        raise UsageError(
            f"all samples of {data.path} have the same prompt, and KTO compares an answer with the answer to another "
            f"prompt; give samples of two prompts or more"
        )
    for _ in range(2):  # the last samples find theirs at the start, so the second pass completes them
        for at in reversed(range(len(samples))):
            after = (at + 1) % len(samples)
            following[at] = after if prompts[at] != prompts[after] else following[after]
    return [samples[at] for at in following]


@dataclass(frozen=True, kw_only=True)
class Variety:
    """Counts the different documents, and the different lengths of documents in tokens, in batches."""

    documents: int
    lengths: int


def variety_of(batches: Sequence[Batch]) -> Variety:
    different = {document.tokens for batch in batches for document in batch.documents}
    return Variety(documents=len(different), lengths=len({len(tokens) for tokens in different}))


def _check_variety(batches: Sequence[Batch], documents: Documents, model: Path) -> None:
    """Raises UsageError for batches of a single document: ranks may exchange or double their shares unnoticed.

    Warns if all documents have one length, because a mean of means is then nearly the mean.
    """
    variety, config = variety_of(batches), documents.config
    if variety.documents == 1:
        left_out = config.too_long == "drop" and documents.advice()
        advice = left_out or "raise --max-samples (data.max_samples), or give data with more samples"
        raise UsageError(
            f"all rows are the same document of {config.path} with the tokenizer of {model}, so nothing would differ "
            f"if ranks exchanged their shares or left them out; {advice}"
        )
    if variety.lengths == 1:
        logger.warning(
            "%s: all %d documents that are trained on have the same length, so a mean of means is hardly "
            "distinguishable from the mean over tokens; raise --max-len, or give texts of several lengths",
            *(config.path, variety.documents),
        )


def _check_vocabulary(
    documents: Sequence[Document], samples: Sequence[tuple[int, Sample]], model: Path, size: int
) -> None:
    """Raises UsageError for tokens beyond the ``size`` of the vocabulary of the Hugging Face folder ``model``.

    samples: (number in the data set, sample), from which the documents are. Those that were tokenized before are named.
    """
    largest = max(max(document.tokens) for document in documents)
    if largest < size:
        return
    for _, sample in sorted(samples, key=lambda each: each[0]):
        if beyond := [token for token in sample.tokens if token >= size]:
            raise UsageError(
                f"{sample.place}: token {beyond[0]} is beyond the vocabulary of {size} of {model}; tokenize the data "
                f"with the tokenizer of this model, or give the model that they were tokenized for"
            )
    raise UsageError(
        f"the tokenizer in {model} gives token {largest}, and the vocabulary of its config.json has {size}; give "
        f"the folder the tokenizer of this model"
    )


def load_documents(
    config: DataConfig, tokenizer: Any, reads: Reads = "samples", *, vocabulary: int | None = None
) -> list[Document]:
    """Returns all documents of a data set, in its order, those of a pair in turn; see conformance.data.tokenizer.

    Raises UsageError if the tokenizer cannot encode a sample, if ``config.max_len`` is too short, if all documents are
    left out, and for tokens beyond the ``vocabulary``, if it is given.
    """
    samples = samples_in_turn(config, reads)
    documents = Documents(samples, config, tokenizer, likely=len(samples))
    units = Units(documents, documents_together(reads))
    kept = [document for index in range(len(units)) for document in units[index] or ()]
    documents.warn_of_length()
    if not kept:
        raise documents.none_left()
    if vocabulary is not None:
        _check_vocabulary(kept, samples, Path(tokenizer.name_or_path), vocabulary)
    return kept


Unit = tuple[Document, ...]  # documents that stay together: one, or the chosen and the rejected answer of a preference


class Units(Sequence[Unit | None]):
    """Takes ``size`` consecutive documents together. None stands for a unit of which a document is left out."""

    def __init__(self, documents: Documents, size: int) -> None:
        self.documents, self.size = documents, size

    def __len__(self) -> int:
        return len(self.documents) // self.size

    def __getitem__(self, index: Any) -> Any:  # a Sequence may be sliced; this one is not
        """Returns the unit, or None. Raises UsageError for one that does not fit into a packed row."""
        config = self.documents.config
        found = tuple(d for i in range(self.size) if (d := self.documents[self.size * index + i]) is not None)
        if len(found) < self.size:
            return None
        if self.size > 1 and config.packed and (length := length_of(found)) > config.max_len:
            if config.too_long == "drop":
                return None
            raise UsageError(
                f"two answers to a prompt of {config.path} have {length} tokens together, and packing puts them into "
                f"one row of --max-len {config.max_len} (data.max_len); raise it, use --too-long drop, or leave out "
                f"--packing-samples (data.packed=false)"
            )
        return found


def length_of(unit: Sequence[Document]) -> int:
    """Returns the number of tokens of some documents."""
    return sum(len(document.tokens) for document in unit)


def one_by_one(units: Sequence[Unit | None]) -> Iterator[tuple[Document, ...]]:
    """Yields rows of one document, in order, and again from the start; ends if every unit is left out."""
    is_left = True
    while is_left:
        is_left = False
        for index in range(len(units)):
            for document in units[index] or ():
                is_left = True
                yield (document,)


def pack(units: Sequence[Unit | None], *, max_len: int) -> Iterator[tuple[Document, ...]]:
    """Yields rows of units, taken in order while they fit, and reused from the start.

    None stands for a unit that is left out; if all are None, no row is yielded. If the second unit does not fit into
    the row of the first, the next one that fits is taken instead, of at most LOOK_AHEAD, so that a row of a single unit
    is rare.
    """
    queue = deque(range(len(units)))

    def take(room: int, *, ahead: int) -> Unit | None:
        """Moves the first unit that fits to the end of the queue, and returns it."""
        place = 0
        while place < min(ahead, len(queue)):
            unit = units[queue[place]]
            if unit is not None and length_of(unit) > room:
                place += 1
                continue
            index = queue[place]
            del queue[place]
            if unit is not None:
                queue.append(index)
                return unit
        return None

    while first := take(max_len, ahead=1):
        row, room = [first], max_len - length_of(first)
        while another := take(room, ahead=LOOK_AHEAD if len(row) == 1 else 1):
            row.append(another)
            room -= length_of(another)
        yield tuple(document for unit in row for document in unit)


def _batch(step: int, rows: Iterator[tuple[Document, ...]], scenario: Scenario) -> Batch:
    data = scenario.data
    masked_from = data.rows
    if scenario.objective.reads not in IN_PAIRS and step < 2:
        masked_from = -(-data.rows * 5 // 6) if step == 0 else -(-data.rows * 2 // 3)
    chosen = [next(rows) for _ in range(data.rows)]
    for i in range(masked_from, data.rows):
        chosen[i] = tuple(replace(d, targets=(False,) * len(d.tokens)) for d in chosen[i])
    return Batch(step, data.max_len, tuple(Row(i, documents) for i, documents in enumerate(chosen)))
