"""Measures which positions, tokens and shards the batches of a profile's cells reach, and what coincides in its models.

If no document reaches a wrong row of an embedding, a wrong position or a wrong branch of a mask, the cell conforms in
every tier. So does a backend that reads one size of a model where it should read another, if the two are equal. So
``parity list --coverage`` prints both, and tests assert them for the built-in profiles and models.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, groupby, permutations
from pathlib import Path
from typing import Any

import pandas as pd

from conformance.core.host import resolve
from conformance.core.io import read_json
from conformance.data.inputs import batches_of, load_documents, variety_of
from conformance.data.tokenizer import load_tokenizer
from conformance.matrix.cell import Cell
from conformance.models.components import Layer, MixtureOfExperts
from conformance.models.families import is_written, numbers_read, read_architecture
from conformance.models.folder_checks import CONFIG, declared_by_class
from conformance.oracle.role_model import Decoder, decoder_of
from conformance.spec.batch import Batch, Row
from conformance.spec.scenario import Scenario

VOCABULARY_MULTIPLE = 128  # Megatron-LM pads a vocabulary to a multiple of this number times tp
WHOLE = 2**20  # tokens; longer than any document, so that none is cut


@dataclass(frozen=True, kw_only=True)
class DocumentReach:
    """Describes the documents of all steps of a scenario.

    different, lengths: how many different documents there are, and how many different lengths of documents.
    longest: tokens of the longest document, after documents were cut to max_len.
    beyond_N: number of tokens at positions >= N.
    window: the shortest attention window of the model in tokens, 0 without one. beyond_window: number of documents
        longer than this window.
    cut: number of documents that were longer than max_len.
    inputs, targets: percentage of the vocabulary that occurs as an input, and as a target.
    pad_inputs, pad_targets: how often the padding token occurs inside documents, as an input and as a target.
    """

    scenario: str
    model: str
    steps: int
    documents: int
    different: int
    lengths: int
    longest: int
    beyond_256: int
    beyond_1024: int
    window: int
    beyond_window: int
    cut: int
    inputs: float
    targets: float
    pad_inputs: int
    pad_targets: int


@dataclass(frozen=True, kw_only=True)
class ShardReach:
    """Describes one of the ``tp`` shards of the vocabulary.

    padded: whether the vocabulary is padded to a multiple of 128 x tp first, as in Megatron.
    rows: number of tokens in the shard. padding: number of padding rows, which every softmax must leave out.
    inputs, targets: how many of the ``rows`` occur in some step as an input, and as a target.
    """

    scenario: str
    model: str
    tp: int
    padded: bool
    shard: int
    rows: int
    padding: int
    inputs: int
    targets: int


@dataclass(frozen=True, kw_only=True)
class CutReach:
    """Describes the micro-batches of all steps and data ranks. A row is padded to the longest row of its micro-batch.

    rows_masked, micro_batches_masked: number of rows and of micro-batches without a target token.
    ranks_masked: how often a data rank has no target token in a whole step. padding: number of padding tokens.
    """

    scenario: str
    model: str
    dp: int
    accumulation: int
    rows: int
    rows_masked: int
    micro_batches: int
    micro_batches_masked: int
    ranks_masked: int
    padding: int


@dataclass(frozen=True, kw_only=True)
class ModelReach:
    """Describes what coincides in a model's configuration, so that a confusion would not show.

    coincidences: the number of pairs of sizes that are equal or in a usual ratio, of sizes that are the product of two
        other sizes, of transformers' defaults, and of other conditions that hide a confusion. in_family: those that
        hold in all measured models of the same model_type.
    """

    model: str
    model_type: str
    coincidences: int
    in_family: str


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Holds what the data of a profile's cells reaches, by scenario and model, and what coincides in its models."""

    documents: tuple[DocumentReach, ...]
    shards: tuple[ShardReach, ...]
    cuts: tuple[CutReach, ...]
    models: tuple[ModelReach, ...]

    def __str__(self) -> str:
        """Formats four plain-text tables."""
        tables = {
            "Coincidences": pd.DataFrame(self.models),
            "Documents": pd.DataFrame(self.documents),
            "Shards of the vocabulary": pd.DataFrame(self.shards),
            "Rows and micro-batches": pd.DataFrame(self.cuts),
        }
        return "\n\n".join(f"{title}\n{table.to_string(index=False)}" for title, table in tables.items())


def measure_coverage(cells: Iterable[Cell]) -> Coverage:
    """Measures what the data of these cells reaches in all their layouts. Backends and precisions do not matter.

    Raises UsageError for a model or data set that cannot be used.
    """

    def data(cell: Cell) -> tuple[str, str]:
        return cell.scenario.name, cell.scenario.model_name

    cells, documents, shards, cuts = list(cells), [], [], []
    for _, group in groupby(sorted(cells, key=data), key=data):
        same_data = list(group)
        scenario = same_data[0].scenario
        layouts = {phase.layout for cell in same_data for phase in cell.phases}
        batches = batches_of(scenario, resolve(scenario.model))
        documents.append(_documents(scenario, batches))
        for tp in sorted({layout.tp for layout in layouts}):
            shards += [shard for padded in (False, True) for shard in _shards(scenario, batches, tp, padded=padded)]
        cuts += [_cut(scenario, batches, dp) for dp in sorted({layout.data for layout in layouts})]
    models = measure_models({cell.scenario.model_name: resolve(cell.scenario.model) for cell in cells})
    return Coverage(documents=tuple(documents), shards=tuple(shards), cuts=tuple(cuts), models=models)


USUAL_RATIOS = (1, 2, 3, 4)
OF_LIBRARIES = ("initializer_range", "max_position_embeddings")  # numbers that the reference does not read


def measure_models(folders: Mapping[str, Path]) -> tuple[ModelReach, ...]:
    """Measures what coincides in the models, by name, that the oracle computes. Raises UsageError."""
    written = {name: folder for name, folder in sorted(folders.items()) if is_written(folder)}
    kinds = {name: str(read_json(folder / CONFIG)["model_type"]) for name, folder in written.items()}
    holds = {name: _conditions(folder) for name, folder in written.items()}

    def in_family(name: str) -> str:
        family = [holds[other] for other, kind in kinds.items() if kind == kinds[name]]
        return ", ".join(
            condition
            for condition, is_met in holds[name].items()
            if is_met and all(other.get(condition, True) for other in family)
        )

    return tuple(
        ModelReach(model=name, model_type=kinds[name], coincidences=sum(found.values()), in_family=in_family(name))
        for name, found in holds.items()
    )


def _conditions(folder: Path) -> dict[str, bool]:
    """Returns whether each condition holds in a configuration under which a confusion would not show."""
    config, read = read_json(folder / CONFIG), numbers_read(folder)
    sizes = {key: value for key, value in read.items() if isinstance(value, int)}
    defaults = _flat(declared_by_class(config["model_type"]))
    numbers = read | {key: config[key] for key in OF_LIBRARIES if key in config}
    layers = Counter(_kind(layer) for layer in read_architecture(folder, disable_dropout=True).layers)
    return {
        **{f"{b} = {k} {a}": sizes[b] == k * sizes[a] for a, b in permutations(sizes, 2) for k in USUAL_RATIOS},
        **{
            f"{c} = {a} x {b}": sizes[c] == sizes[a] * sizes[b] and 1 not in (sizes[a], sizes[b])
            for a, b in combinations(sizes, 2)
            for c in sizes
        },
        **{f"{key} is the default": value == defaults[key] for key, value in numbers.items() if key in defaults},
        # From the eleventh on, names of layers and experts are sorted otherwise as texts than as numbers.
        **{f"at most 10 {key}": sizes[key] <= 10 for key in sizes if COUNTED.fullmatch(key)},
        **{f"a single layer with {kind}": count == 1 for kind, count in layers.items()},
        "2 divides vocab_size": sizes["vocab_size"] % 2 == 0,
    }


COUNTED = re.compile(r"num_hidden_layers|num_experts|num_local_experts|n_routed_experts")


def _kind(layer: Layer) -> str:
    full = "full attention" if layer.attention.rotary else "linear attention"
    window = "a window" if layer.attention.window else full
    return f"{window} and {'experts' if isinstance(layer.feed_forward, MixtureOfExperts) else 'an MLP'}"


def _flat(values: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """Names values inside objects as ``numbers_read`` does: by the last object and the key."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{key}.") if isinstance(value, Mapping) else {f"{name}{key}": value}
    return found


def _documents(scenario: Scenario, batches: Sequence[Batch]) -> DocumentReach:
    folder, data = resolve(scenario.model), scenario.data
    decoder = _decoder(scenario)
    documents = [document for batch in batches for document in batch.documents]
    lengths = [len(document.tokens) for document in documents]
    cut: set[tuple[int, ...]] = set()  # rollouts are never cut
    if scenario.objective.reads == "samples":
        whole = load_documents(dataclasses.replace(data, max_len=WHOLE), load_tokenizer(folder))
        cut = {document.tokens[: data.max_len] for document in whole if len(document.tokens) > data.max_len}
    window = decoder.window or 0
    inputs, targets, variety = _inputs(batches), _targets(batches), variety_of(batches)
    return DocumentReach(
        scenario=scenario.name,
        model=scenario.model_name,
        steps=len(batches),
        documents=len(documents),
        different=variety.documents,
        lengths=variety.lengths,
        longest=max(lengths),
        beyond_256=sum(max(0, length - 256) for length in lengths),
        beyond_1024=sum(max(0, length - 1024) for length in lengths),
        window=window,
        beyond_window=sum(length > window for length in lengths) if window else 0,
        cut=sum(document.tokens in cut for document in documents),
        inputs=round(100 * len(set(inputs)) / decoder.vocab_size, 1),
        targets=round(100 * len(set(targets)) / decoder.vocab_size, 1),
        pad_inputs=sum(token == decoder.padding_token for token in inputs),
        pad_targets=sum(token == decoder.padding_token for token in targets),
    )


def _shards(scenario: Scenario, batches: Sequence[Batch], tp: int, *, padded: bool) -> list[ShardReach]:
    vocabulary = _decoder(scenario).vocab_size
    multiple = VOCABULARY_MULTIPLE * tp if padded else tp
    each = -(-vocabulary // multiple) * multiple // tp
    inputs, targets = set(_inputs(batches)), set(_targets(batches))
    found = []
    for shard in range(tp):
        rows = range(min(shard * each, vocabulary), min((shard + 1) * each, vocabulary))
        found.append(
            ShardReach(
                scenario=scenario.name,
                model=scenario.model_name,
                tp=tp,
                padded=padded,
                shard=shard,
                rows=len(rows),
                padding=each - len(rows),
                inputs=len(inputs.intersection(rows)),
                targets=len(targets.intersection(rows)),
            )
        )
    return found


def _decoder(scenario: Scenario) -> Decoder:
    return decoder_of(scenario, resolve(scenario.model))


def _cut(scenario: Scenario, batches: Sequence[Batch], dp: int) -> CutReach:
    accumulation = scenario.accumulation
    ranks = [
        batch.micro_batches(dp_rank=rank, dp_size=dp, accumulation=accumulation)
        for batch in batches
        for rank in range(dp)
    ]
    micro_batches = list(chain.from_iterable(ranks))
    rows = list(chain.from_iterable(micro_batches))
    return CutReach(
        scenario=scenario.name,
        model=scenario.model_name,
        dp=dp,
        accumulation=accumulation,
        rows=len(rows),
        rows_masked=sum(_masked([row]) for row in rows),
        micro_batches=len(micro_batches),
        micro_batches_masked=sum(map(_masked, micro_batches)),
        ranks_masked=sum(_masked(list(chain.from_iterable(rank))) for rank in ranks),
        padding=sum(max(r.length for r in part) - row.length for part in micro_batches for row in part),
    )


def _masked(rows: Sequence[Row]) -> bool:
    return not any(row.target_count for row in rows)


def _inputs(batches: Sequence[Batch]) -> list[int]:
    """Returns the input tokens of all documents with targets, without each last token, which predicts nothing."""
    documents = [document for batch in batches for document in batch.documents if any(document.targets)]
    return [token for document in documents for token in document.tokens[:-1]]


def _targets(batches: Sequence[Batch]) -> list[int]:
    documents = [document for batch in batches for document in batch.documents]
    return [t for document in documents for t, target in zip(document.tokens, document.targets, strict=True) if target]
