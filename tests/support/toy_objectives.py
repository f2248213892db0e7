"""Defines two objectives outside the suite, each complete in this file, and one that nobody computes.

``toy_objectives:WeightedSft`` weighs every target token. ``toy_objectives:PolicyAndValue`` trains a policy and a value
model side by side, with a frozen reference whose log-probs enter the policy's loss.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from conformance.backends.protocol import BackendInfo, Supported
from conformance.core.errors import STRICT
from conformance.oracle import objectives as oracle
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.observables import CRITIC, LOGPROBS, LOSS, POLICY, REFERENCE, TOKEN_COUNT, Observable, Reads, Role
from impl.interface.micro_batches import Evaluation, MicroBatch, Outputs, Wanted
from impl.objectives import policy_gradient as impl


def number_of(document: Document, place: int) -> float:
    """A number between 0 and 2 that looks random, and is the same for the same document."""
    return zlib.crc32(repr((document.tokens, place)).encode()) / 2**31


def with_column(batches: list[Batch], name: str, *, per_token: bool) -> list[Batch]:
    def annotated(document: Document) -> Document:
        numbers = tuple(number_of(document, i) for i in range(len(document.tokens)))
        return replace(document, columns={**document.columns, name: numbers if per_token else numbers[0]})

    return [
        replace(batch, rows=tuple(replace(r, documents=tuple(map(annotated, r.documents))) for r in batch.rows))
        for batch in batches
    ]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WeightedSft:
    """The sum of -weight log p, divided by the sum of the weights; ``power`` of the column is the weight."""

    kind: Literal["toy_objectives:WeightedSft"] = "toy_objectives:WeightedSft"
    power: float = 1.0
    roles: ClassVar[tuple[Role, ...]] = (POLICY,)
    reads: ClassVar[Reads] = "samples"
    disable_dropout: ClassVar[bool] = False

    def observables(self) -> tuple[Observable, ...]:
        weight = Observable(key="weight_sum", stage="loss", kind="scalar", replicated="all ranks")
        entropy = Observable(key="entropy", stage="entropy", kind="rows", replicated="holders")
        return (LOGPROBS, entropy, weight, LOSS)

    def annotate(self, batches: list[Batch]) -> list[Batch]:
        return with_column(batches, "weight", per_token=True)


class OracleWeightedSft:
    def __init__(self, objective: WeightedSft) -> None:
        self.power = objective.power

    def weights(self, document: Document) -> Tensor:
        column: Any = document.columns["weight"]
        chosen = [w for w, target in zip(column, document.targets, strict=True) if target]
        return torch.tensor(chosen, dtype=torch.float64) ** self.power

    def totals(self, batch: Batch) -> dict[str, float]:
        return {"weight_sum": sum(self.weights(document).sum().item() for document in batch.documents)}

    def term(
        self,
        model: str,
        output: Tensor,
        document: Document,
        *,
        totals: Mapping[str, float],
        earlier: Mapping[str, Tensor],
        stable: torch.dtype,
    ) -> oracle.Term:
        logprobs = oracle.target_logprobs(output, document, stable=stable)
        loss = -(self.weights(document).to(stable) * logprobs).sum() / totals["weight_sum"]
        every = torch.log_softmax(output[oracle.target_positions(document) - 1].detach(), dim=-1, dtype=stable)
        rows = {"logprob": logprobs, "entropy": -(every.exp() * every).sum(-1)}
        return oracle.Term(loss=loss, values={"loss": loss.item()}, rows=rows)


class ImplWeightedSft:
    temperature = 1.0

    def __init__(self, objective: WeightedSft) -> None:
        self.power = objective.power

    def wants(self, model: str) -> Wanted:
        return frozenset({"logprobs", "entropy"})

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        total = 0.0
        for document in (document for row in rows for document in row.documents):
            column: Any = document.columns["weight"]
            total += sum(w**self.power for w, target in zip(column, document.targets, strict=True) if target)
        return {"weight_sum": total}

    def summary(self, batch: Batch) -> dict[str, float]:
        return {}

    def evaluate(
        self,
        model: str,
        outputs: Outputs,
        inputs: MicroBatch,
        *,
        totals: Mapping[str, Tensor],
        others: Mapping[str, Outputs],
    ) -> Evaluation:
        assert outputs.logprobs is not None
        assert outputs.entropy is not None
        weights = inputs.columns["weight"].where(inputs.targets, 0) ** self.power
        loss = -(weights * outputs.logprobs).sum() / totals["weight_sum"]
        rows = {"logprob": outputs.logprobs, "entropy": outputs.entropy}
        return Evaluation(loss=loss, values={"loss": loss}, rows=rows)


RETURNS = 0.5  # what a return is multiplied with, so that it is of the size of a value


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PolicyAndValue:
    """Policy: the mean of (log p - log p_reference)^2 / 2. Value model: the mean of (value - return)^2 / 2."""

    kind: Literal["toy_objectives:PolicyAndValue"] = "toy_objectives:PolicyAndValue"
    roles: ClassVar[tuple[Role, ...]] = (REFERENCE, POLICY, CRITIC)
    reads: ClassVar[Reads] = "samples"
    disable_dropout: ClassVar[bool] = False

    def observables(self) -> tuple[Observable, ...]:
        reference = replace(LOGPROBS, key="reference.logprob", stage="reference log-probs", required=True)
        values = Observable(key="critic.value", stage="values", kind="rows", replicated="holders")
        return (reference, LOGPROBS, values, TOKEN_COUNT, LOSS, replace(LOSS, key="critic.loss", column="critic loss"))

    def annotate(self, batches: list[Batch]) -> list[Batch]:
        return with_column(batches, "return", per_token=False)


class OraclePolicyAndValue:
    def __init__(self, objective: PolicyAndValue) -> None:
        pass

    def totals(self, batch: Batch) -> dict[str, float]:
        return {"token_count": batch.target_count}

    def term(
        self,
        model: str,
        output: Tensor,
        document: Document,
        *,
        totals: Mapping[str, float],
        earlier: Mapping[str, Tensor],
        stable: torch.dtype,
    ) -> oracle.Term:
        if model == "critic":
            values = output[oracle.target_positions(document) - 1, 0].to(stable)
            wanted: Any = document.columns["return"]
            loss = (values - RETURNS * wanted).square().sum() / (2 * totals["token_count"])
            return oracle.Term(loss=loss, values={"critic.loss": loss.item()}, rows={"critic.value": values})
        logprobs = oracle.target_logprobs(output, document, stable=stable)
        if model == "reference":
            return oracle.Term(loss=None, rows={"reference.logprob": logprobs})
        known = oracle.target_logprobs(earlier["reference"], document, stable=stable)
        loss = (logprobs - known).square().sum() / (2 * totals["token_count"])
        return oracle.Term(loss=loss, values={"loss": loss.item()}, rows={"logprob": logprobs})


class ImplPolicyAndValue:
    temperature = 1.0

    def __init__(self, objective: PolicyAndValue) -> None:
        pass

    def wants(self, model: str) -> Wanted:
        return frozenset({"values"}) if model == "critic" else frozenset({"logprobs", "targets"})

    def totals(self, rows: Sequence[Row]) -> dict[str, float]:
        return {"token_count": sum(row.target_count for row in rows)}

    def summary(self, batch: Batch) -> dict[str, float]:
        return {}

    def evaluate(
        self,
        model: str,
        outputs: Outputs,
        inputs: MicroBatch,
        *,
        totals: Mapping[str, Tensor],
        others: Mapping[str, Outputs],
    ) -> Evaluation:
        count = 2 * totals["token_count"]
        if outputs.values is not None:
            off = (outputs.values - RETURNS * inputs.columns["return"]).where(inputs.targets, 0)
            loss = off.square().sum() / count
            return Evaluation(loss=loss, values={"critic.loss": loss}, rows={"critic.value": outputs.values})
        assert outputs.logprobs is not None
        if model == "reference":
            return Evaluation(loss=None, rows={"reference.logprob": outputs.logprobs})
        known = others["reference"].logprobs
        assert known is not None
        assert outputs.targets is not None
        loss = (outputs.logprobs - known).square().sum() / count
        values = {"loss": loss, "token_count": outputs.targets.sum()}
        return Evaluation(loss=loss, values=values, rows={"logprob": outputs.logprobs})


oracle.FUNCTIONS |= {
    "toy_objectives:WeightedSft": OracleWeightedSft,
    "toy_objectives:PolicyAndValue": OraclePolicyAndValue,
}
impl.FUNCTIONS |= {
    "toy_objectives:WeightedSft": ImplWeightedSft,
    "toy_objectives:PolicyAndValue": ImplPolicyAndValue,
}


# --- an objective and backends for what is said of kinds that nobody knows ---


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Nobodys:
    """An objective that nobody has functions for."""

    kind: Literal["toy_objectives:Nobodys"] = "toy_objectives:Nobodys"
    roles: ClassVar[tuple[Role, ...]] = (POLICY,)
    reads: ClassVar[Reads] = "samples"
    disable_dropout: ClassVar[bool] = False

    def observables(self) -> tuple[Observable, ...]:
        return (LOGPROBS, LOSS)

    def annotate(self, batches: list[Batch]) -> list[Batch]:
        return batches


class Willing:
    """A backend that says yes to every scenario, and does not say what objectives it knows."""

    @classmethod
    def describe(cls) -> BackendInfo:
        return BackendInfo(name="willing")

    @classmethod
    def supports(cls, scenario: object, layout: object) -> Supported:
        return Supported()


class OfSft(Willing):
    objectives = ("sft",)


class OfTable(Willing):
    objectives: ClassVar[Any] = {"sft": object()}


class OfToys(Willing):
    objectives = ("toy_objectives:WeightedSft",)
