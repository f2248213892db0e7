"""Replay: the choices of the oracle's routers as columns of the frozen batches, for cells below the exact tier.

Rounding turns over which experts a token goes to, and then nothing after it can be compared: a single process in bf16
is as far from float64 as a wrong backend. So where numbers are rounded, the choices are input, like the tokens: the
oracle's own in float64, of the step that they are for. In the exact tier a backend makes its own, and they are judged.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from conformance.batch import Batch, Document, Row, expert_column, read_batches, write_batches
from conformance.inputs.prepare import FrozenInputs, complete_or_nothing, locked
from conformance.observable import ROUTING
from conformance.oracle.architecture import read_architecture
from conformance.oracle.decoder import is_routed
from conformance.oracle.parts import MixtureOfExperts
from conformance.record.tensors import read_record
from conformance.role import POLICY
from conformance.scenario import Scenario

CHOICES = "choices.safetensors"  # in the oracle's folder, beside its records


def is_replayed(scenario: Scenario, inputs: FrozenInputs) -> bool:
    """Whether a cell is given the oracle's choices. Roll-outs are not: each of their forward passes, which other
    weights make, would need choices of its own."""
    below, samples = scenario.precision != "exact", scenario.objective.reads == "samples"
    return below and samples and is_routed(inputs.models[POLICY.name])


def with_choices(inputs: FrozenInputs, oracle: Path) -> FrozenInputs:
    """The inputs with batches that have the choices of the float64 record ``oracle``; they are made once."""
    file = oracle.with_name(CHOICES)
    with locked(file.with_suffix(".lock")):
        if not file.exists():
            routers = read_architecture(inputs.models[POLICY.name]).routers
            steps = read_record(oracle).steps
            batches = [
                _chosen(batch, step.tensors(), routers)
                for batch, step in zip(read_batches(inputs.batches), steps, strict=False)
            ]
            with complete_or_nothing(file) as unfinished:
                write_batches(unfinished, batches)
    return replace(inputs, batches=file)


def _chosen(batch: Batch, recorded: dict[str, Tensor], routers: tuple[MixtureOfExperts, ...]) -> Batch:
    rows = tuple(_row(row, recorded[f"{ROUTING}/{row.index}"], routers) for row in batch.rows)
    return replace(batch, rows=rows)


def _row(row: Row, weights: Tensor, routers: tuple[MixtureOfExperts, ...]) -> Row:
    of_tokens = weights.view(row.length, len(routers), routers[0].experts)
    chosen = of_tokens.topk(routers[0].chosen, dim=-1).indices  # (T, routers, K); what is not chosen has weight 0
    parts = chosen.split([len(document.tokens) for document in row.documents])
    return replace(row, documents=tuple(map(_document, row.documents, parts)))


def _document(document: Document, chosen: Tensor) -> Document:
    columns = {
        expert_column(layer, slot): tuple(chosen[:, layer, slot].to(torch.float64).tolist())
        for layer in range(chosen.shape[1])
        for slot in range(chosen.shape[2])
    }
    return replace(document, columns={**document.columns, **columns})
