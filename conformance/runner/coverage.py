"""Measures which positions, tokens and shards the batches of a profile's cells reach.

If no document reaches a wrong row of an embedding, a wrong position or a wrong branch of a mask, the cell conforms in
every tier. So ``parity list --coverage`` prints what is reached, and a test asserts it for the built-in profiles.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import pandas as pd

from conformance.core.host import resolve
from conformance.data.documents import load_documents, variety_of
from conformance.data.prepare import batches_of
from conformance.data.tokenizer import load_tokenizer
from conformance.matrix.cell import Cell
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
class Coverage:
    """Holds what the data of a profile's cells reaches, by scenario and model."""

    documents: tuple[DocumentReach, ...]
    shards: tuple[ShardReach, ...]
    cuts: tuple[CutReach, ...]

    def __str__(self) -> str:
        """Formats three plain-text tables."""
        tables = {
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

    documents, shards, cuts = [], [], []
    for _, group in groupby(sorted(cells, key=data), key=data):
        same_data = list(group)
        scenario = same_data[0].scenario
        layouts = {phase.layout for cell in same_data for phase in cell.phases}
        batches = batches_of(scenario, resolve(scenario.model))
        documents.append(_documents(scenario, batches))
        for tp in sorted({layout.tp for layout in layouts}):
            shards += [shard for padded in (False, True) for shard in _shards(scenario, batches, tp, padded=padded)]
        cuts += [_cut(scenario, batches, dp) for dp in sorted({layout.data for layout in layouts})]
    return Coverage(documents=tuple(documents), shards=tuple(shards), cuts=tuple(cuts))


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
