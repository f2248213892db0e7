"""Writes the experts that routers chose in each forward pass of a run as columns of its batches.

Below the exact tier, every backend replays these choices (conformance.runner.oracle_jobs). A pass is identified by its
recording key: an update, or a pass over a rollout before its first update, by each model's own weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from conformance.models.components import MixtureOfExperts
from conformance.oracle.rollout_pass import RowsByKey
from conformance.spec.batch import Batch, Column, Document, Row, expert_column, write_batches
from conformance.spec.observables import OLD_ROUTING, ROUTING

NO_PASS = -1.0  # replaces an expert's number where the run ends before the pass


@dataclass
class Choices:
    """Collects the choices of a run on ``batches``.

    ``routers``: the same for all its models. ``of``: the chosen experts of each row, (T, routers, K), by step and key.
    """

    batches: Sequence[Batch]
    routers: Sequence[MixtureOfExperts]
    of: dict[tuple[int, str], dict[int, Tensor]] = field(default_factory=dict)

    def note(self, step: int, rows: RowsByKey) -> None:
        """Adds ``rows`` of a step, by key; observables other than routing are ignored."""
        for key, weights in rows.items():
            if self.routers and key.rpartition(".")[2] in (ROUTING, OLD_ROUTING):
                self.of[step, key] = {row: self._chosen(tensor) for row, tensor in weights.items()}

    def _chosen(self, weights: Tensor) -> Tensor:
        of_tokens = weights.view(-1, len(self.routers), self.routers[0].experts)
        return of_tokens.topk(self.routers[0].chosen, dim=-1).indices.cpu()  # unchosen experts have weight 0

    def write(self, path: Path) -> None:
        """Writes the batches with these columns."""
        keys = sorted({key for _, key in self.of})
        chosen = [replace(b, rows=tuple(self._row(b.step, row, keys) for row in b.rows)) for b in self.batches]
        write_batches(path, chosen)

    def _row(self, step: int, row: Row, keys: Sequence[str]) -> Row:
        parts: dict[str, Sequence[Tensor]] = {}
        for key in keys:
            known = self.of.get((step, key))
            if known:
                parts[key] = known[row.index].split([len(document.tokens) for document in row.documents])
        documents = []
        for number, document in enumerate(row.documents):
            own = {key: parts[key][number] for key in parts}
            documents.append(replace(document, columns={**document.columns, **self._columns(document, keys, own)}))
        return replace(row, documents=tuple(documents))

    def _columns(self, document: Document, keys: Sequence[str], chosen: Mapping[str, Tensor]) -> dict[str, Column]:
        columns: dict[str, Column] = {}
        for key in keys:
            for layer in range(len(self.routers)):
                for slot in range(self.routers[0].chosen):
                    numbers = [NO_PASS] * len(document.tokens)
                    if key in chosen:
                        numbers = chosen[key][:, layer, slot].double().tolist()
                    columns[expert_column(layer, slot, key)] = tuple(numbers)
        return columns
