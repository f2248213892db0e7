"""Runs one optimizer step document by document, and the passes over a rollout before its first update.

Rows are never packed or padded here, and gradients are summed over documents. In float64 short documents go through a
model together, end to end: each has its own positions and attends to itself only, and every other module computes
token by token.

The columns that all updates of a rollout read are computed once. Forward passes run over all documents of all
mini-batches and give old log-probs, log-probs of the reference and values of the critic. The choices of routers are
recorded for each pass under a key of its own (conformance.spec.observables.rollout_routing).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from conformance.oracle.feed_forward import Balance, LoadsOfPart, Routing
from conformance.oracle.loss_terms import (
    OracleFunctions,
    PairedFunctions,
    RolloutFunctions,
    ScoringFunctions,
    target_positions,
)
from conformance.oracle.objectives import functions_of, rollout_functions_of
from conformance.oracle.optimizer import AdamW, LossScale, Muon, Sgd
from conformance.oracle.primitives import HONEST, NO_TAP, OneLookup, Policy, Tap, Variant, Weights
from conformance.oracle.role_model import Decoder
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.objectives import Objective
from conformance.spec.observables import (
    ROUTER_LOSS,
    ROUTER_TERMS,
    ROUTER_Z_LOSS,
    ROUTING,
    TOKEN_COUNT,
    VALUE_GRADIENT,
    Role,
    model_key,
    rollout_routing,
)

EMBEDDING = "model.embed_tokens.weight"
JOINT_LOGITS = 2**18  # numbers that the logits of several short documents may have together


def value_positions(functions: OracleFunctions, document: Document) -> Tensor:
    """Returns the positions of the values that have a loss, int64: by default those that predict targets."""
    if isinstance(functions, ScoringFunctions):
        return functions.value_positions(document)
    return target_positions(document) - 1


def value_gradient(loss: Tensor, values: Tensor, positions: Tensor, *, scale: float) -> Tensor:
    """Returns the gradients of ``loss`` with respect to the values at ``positions`` (N,), float64 (N,).

    ``values``: (T, 1). ``scale``: multiplies the loss during the backward pass. Graphs are kept.
    """
    (gradient,) = torch.autograd.grad(loss * scale, values, retain_graph=True, materialize_grads=True)
    return gradient[positions, 0].double() / scale


class Shifted:
    """Measures how far rows of a value model's embedding move if all values of a document move by the same number.

    The loss of a value model pulls some values of a document up and earlier down, and their contributions to a row may
    nearly cancel. Values of nearly equal hidden states have nearly equal errors, which do not cancel. So the norm of
    the row says nothing about its error, and another backward pass measures it (docs/explanations/tolerances.md).
    """

    def __init__(self, batch: Batch) -> None:
        self._copies = Counter(_content(document) for document in batch.documents)
        self._squares: Tensor | None = None

    def add(self, document: Document, values: Tensor, embedding: Tensor, positions: Tensor) -> None:
        """Adds a document. ``values``: (T, 1), whose graph is kept, of which those at ``positions`` have a loss.
        ``embedding``: (V, D), a leaf of that graph."""
        total = values[positions].sum()
        (moved_VD,) = torch.autograd.grad(total, embedding, retain_graph=True)
        # Documents have independent errors. C copies of one document have equal errors, so their sum is C times one.
        squares = self._copies[_content(document)] * moved_VD.square().sum(1)
        self._squares = squares if self._squares is None else self._squares + squares

    @property
    def norms(self) -> Tensor:
        """Returns for each row how far it moves, (V,) in the dtype of the weights.

        The gradients of the loss with respect to values are off by 1, equally within a document, with random signs
        between documents.
        """
        assert self._squares is not None, "a step without target tokens is rejected before"
        return self._squares.sqrt()


def _content(document: Document) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    return document.tokens, document.targets


# Without a scale, gradients of a mean over thousands of tokens fall below float16's smallest number (6e-8). A power of
# two adds no rounding; 4096 keeps a factor of 16 to GradScaler's initial 65536, which is near float16's largest number.
FP16_LOSS_SCALE = 2.0**12


@dataclass(kw_only=True)
class Model:
    """Holds the model of one role.

    ``trained``: names of the parameters that get gradients. ``optimizers``: by matrix. ``loss_scale``: None
    if it is not judged. ``updates``: counted by the schedule. ``z_loss``: the factor of the routers' z-loss.
    """

    role: Role
    decoder: Decoder
    weights: Weights
    trained: frozenset[str]
    optimizers: dict[str, Sgd | AdamW | Muon] = field(default_factory=dict)
    loss_scale: LossScale | None = None
    updates: int = 0
    z_loss: float = 0.0

    @property
    def routing_key(self) -> str:
        """Returns the key of the routers' choices in an update."""
        return model_key(self.role.prefix, ROUTING)

    def scale(self, policy: Policy) -> float:
        """Returns the factor of the loss in the backward pass: the loss scale in fp16, otherwise 1."""
        if policy.compute != torch.float16:
            return 1.0
        return self.loss_scale.scale if self.loss_scale else FP16_LOSS_SCALE


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Holds the result of one optimizer step: unclipped gradients by role, numbers and rows by observable.

    ``rows[key][index]``: a tensor (targets,) of the row with this index. ``shifted``: by role, for value models
    (Shifted.norms).
    """

    gradients: dict[str, Weights]
    values: dict[str, float]
    rows: dict[str, dict[int, Tensor]]
    shifted: dict[str, Tensor]


def observe(
    batch: Batch,
    models: Sequence[Model],
    objective: Objective,
    policy: Policy,
    variant: Variant = HONEST,
    taps: Mapping[str, Tap] = MappingProxyType({}),
    *,
    shifts: bool = False,
) -> Observed:
    """Runs every document of ``batch`` forward and backward, and sums gradients in the dtype of the weights.

    ``taps`` observe the modules of the models of these roles. ``shifts``: whether to compute ``shifted``, which takes
    another backward pass that taps would observe as well. Raises ValueError if the batch has no target token, or if a
    gradient is not finite and the scenario has no judged loss scale.
    """
    if batch.target_count == 0:
        raise ValueError(f"step {batch.step} has no target token, so its mean loss is undefined; check the data")
    batch = variant.trained(batch)
    functions = functions_of(objective, variant)
    totals = functions.totals(batch)
    leaves = {m.role.name: {n: w.detach().requires_grad_(n in m.trained) for n, w in m.weights.items()} for m in models}
    values: dict[str, float] = defaultdict(float, totals)
    highest: dict[str, float] = {}
    parts: dict[str, dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))  # of rows, by document
    # The outputs of a frozen model over a rollout are already in its columns.
    running = [m for m in models if m.role.trained or objective.reads != "rollouts"]
    if isinstance(functions, PairedFunctions):
        _look_ahead(batch, running, functions, policy, variant)
    tokens_of_step = sum(row.length for row in batch.rows)
    balances = {m.role.name: Balance() for m in running}
    chosen = {m.role.name: _choices(batch, m, policy, variant) for m in running}
    parted = {m.role.name: _loads(batch, m, policy, variant) for m in running}
    embeds = {m.role.name for m in running if EMBEDDING in m.trained and m.role.head == "value"}
    shifted = {name: Shifted(batch) for name in embeds if shifts}
    alone = () if variant.joins(False) else embeds
    looks_up = variant.looks_up_at_once(policy.lookups > 0)
    lookups = {m.role.name: OneLookup(taps.get(m.role.name, NO_TAP)) for m in running if looks_up}
    taps = {**taps, **lookups}
    most = 0 if any(parted.values()) else _tokens_at_once(batch, running, policy)
    for part in variant.micro_batches([batch.rows], batch):
        _begin_micro_batch(leaves, variant)
        totals_of = {row.index: _divisors(totals, row, batch, variant) for row in part}
        for group in grouped(part, most, variant):
            earlier: dict[tuple[int, int], dict[str, Tensor]] = defaultdict(dict)  # outputs of a document, by role
            for model, together in _passes(running, group, alone=alone):
                name, prefix, scale = model.role.name, model.role.prefix, model.scale(policy)
                tap, routed = taps.get(name, NO_TAP), model.routing_key if model.role.trained else None
                passed = _run(together, model, leaves[name], policy, variant, tap, routed=routed)
                losses: list[Tensor] = []
                if routing := passed.routing:
                    for (index, _, _), weights in zip(passed.documents, passed.router_weights, strict=True):
                        parts[model_key(prefix, ROUTING)][index].append(weights)
                    balances[name].add(routing)
                    loads = parted[name].get(passed.documents[0][0])
                    share = _router_share(model, routing, chosen[name], tokens_of_step, loads)
                    losses.append(share.to(passed.outputs[0].device))
                for (index, at, document), output in passed.taught:
                    before, of_row = earlier[index, at], totals_of[index]
                    term = functions.term(name, output, document, totals=of_row, earlier=before, stable=policy.stable)
                    before[name] = output.detach()
                    values.update({key: values[key] + number for key, number in term.values.items()})
                    highest |= {key: max(number, highest.get(key, number)) for key, number in term.highest.items()}
                    for key, tensor in term.recorded.items():
                        parts[key][index].append(tensor.detach())
                    if not model.role.trained:
                        continue
                    assert term.loss is not None, f"the objective gives no loss for {name}, which is trained"
                    losses.append(term.loss)
                    if model.role.head == "value":
                        positions = value_positions(functions, document)
                        gradient = value_gradient(term.loss, output, positions, scale=scale)
                        parts[model_key(prefix, VALUE_GRADIENT)][index].append(gradient)
                        if name in shifted:
                            shifted[name].add(document, output, leaves[name][EMBEDDING], positions)
                if losses and (whole := sum(losses[1:], losses[0])).requires_grad:
                    (whole * scale).backward()
    rows = {key: {index: torch.cat(found) for index, found in of.items()} for key, of in parts.items()}
    for part in batch.micro_batches(dp_rank=0, dp_size=1, accumulation=policy.lookups) if lookups else ():
        for lookup in lookups.values():
            lookup.finish({row.index for row in part})
    for model in running:
        if (balance := balances[model.role.name]).probabilities is not None:
            values[model_key(model.role.prefix, ROUTER_LOSS)] = balance.loss(balance.probabilities).item()
            values[model_key(model.role.prefix, ROUTER_Z_LOSS)] = balance.squares / tokens_of_step
            rows[model_key(model.role.prefix, ROUTER_TERMS)] = {0: balance.terms()}
    gradients = {}
    for model in (model for model in models if model.trained):
        name = variant.runs(model.role.name)
        gradients[name] = variant.reduced(_gradients(batch.step, model, leaves[name], policy))
    norms = {name: found.norms for name, found in shifted.items()}
    return Observed(gradients=gradients, values=variant.numbers(values) | highest, rows=rows, shifted=norms)


@torch.no_grad()
def _look_ahead(
    batch: Batch, models: Sequence[Model], functions: PairedFunctions, policy: Policy, variant: Variant
) -> None:
    """Shows the functions the outputs of all documents with targets, before the first of them has a loss."""
    for group in grouped(batch.rows, _tokens_at_once(batch, models, policy), variant):
        outputs: dict[tuple[int, int], dict[str, Tensor]] = defaultdict(dict)
        taught = [placed for placed in group if any(placed[2].targets)]
        for model in models if taught else ():
            key = model.routing_key if model.role.trained else None
            for (index, at, _), output in _run(taught, model, model.weights, policy, variant, routed=key).taught:
                outputs[index, at][model.role.name] = output
        for index, at, document in taught:
            functions.see(document, outputs[index, at], stable=policy.stable)


@torch.no_grad()
def _choices(batch: Batch, model: Model, policy: Policy, variant: Variant) -> Balance | None:
    """Counts the choices of all routers in the whole step; returns None if no loss depends on them."""
    if not (model.decoder.router_loss and model.role.trained):
        return None
    balance = Balance()
    for group in grouped(batch.rows, _tokens_at_once(batch, [model], policy), variant):
        routing = _run(group, model, model.weights, policy, variant, routed=model.routing_key).routing
        assert routing is not None
        balance.add(routing)
    return balance


@torch.no_grad()
def _loads(batch: Batch, model: Model, policy: Policy, variant: Variant) -> dict[int, LoadsOfPart]:
    """Counts the choices of each router in each part that the variant balances, by the index of a row of the part."""
    found: dict[int, LoadsOfPart] = {}
    counts: dict[int, list[Tensor]] = {}  # by row, one for each router
    parts = variant.balanced((), batch) if model.decoder.router_loss and model.role.trained else ()
    for part in parts:
        for row in part.rows:
            placed = [(row.index, at, document) for at, document in enumerate(row.documents)]
            runs = (_run([one], model, model.weights, policy, variant, routed=model.routing_key) for one in placed)
            routings = [run.routing for run in runs]
            loads = [[count for count, _ in routing.loads] for routing in routings if routing is not None]
            counts[row.index] = [torch.stack(of_router).sum(dim=0) for of_router in zip(*loads, strict=True)]
        own = LoadsOfPart(
            counts=tuple(sum(each) for each in zip(*(counts[row.index] for row in part.counted), strict=True)),
            tokens=sum(len(document.tokens) for row in part.rows for document in row.documents),
            weight=part.weight,
        )
        found |= {row.index: own for row in part.rows}
    return found


def _router_share(
    model: Model, routing: Routing, step: Balance | None, tokens: int, part: LoadsOfPart | None
) -> Tensor:
    """Returns the share that documents have of their routers' losses, times their factors; 0 without such losses.

    ``tokens``: number of tokens of the whole step. ``part``: replaces ``step`` if the variant balances parts.
    """
    assert routing.squares is not None
    assert routing.probabilities is not None
    share = model.z_loss * routing.squares / tokens
    if step is None:
        return share
    return share + model.decoder.router_loss * (part.loss(routing) if part else step.loss(routing.probabilities))


Placed = tuple[int, int, Document]  # the index of the row, the number of the document in the row, and the document


@dataclass(frozen=True, kw_only=True)
class Passed:
    """Holds what a model gives for documents that went through it together.

    outputs: of each document. routing: of all of them; None for a model without routers.
    """

    documents: Sequence[Placed]
    outputs: Sequence[Tensor]
    routing: Routing | None

    @property
    def taught(self) -> list[tuple[Placed, Tensor]]:
        """Returns the documents that have targets, with their outputs."""
        both = zip(self.documents, self.outputs, strict=True)
        return [(placed, output) for placed, output in both if any(placed[2].targets)]

    @property
    def router_weights(self) -> list[Tensor]:
        """Returns the weights (T, routers, X) of each document as one vector."""
        if self.routing is None:
            return [torch.zeros(0) for _ in self.documents]
        weights = torch.stack(self.routing.weights, dim=1).detach()
        return [own.flatten() for own in weights.split([len(document.tokens) for *_, document in self.documents])]


def _run(
    documents: Sequence[Placed],
    model: Model,
    weights: Weights,
    policy: Policy,
    variant: Variant,
    tap: Tap = NO_TAP,
    *,
    routed: str | None = None,
) -> Passed:
    """Runs a model on documents together, end to end; those without targets only for the losses of routers.

    ``routed``: the key of the choices that the routers record and may replay; None if nothing of them is kept.
    """
    routing = model.decoder.routing([document for *_, document in documents], routed) if routed else None
    if not (routing or variant.joins(False)):
        documents = [placed for placed in documents if any(placed[2].targets)]
    if not documents:
        return Passed(documents=(), outputs=(), routing=None)
    tokens = torch.tensor([token for *_, document in documents for token in document.tokens])
    lengths = [len(document.tokens) for *_, document in documents]
    variant.runs(model.role.name)
    if any(any(document.targets) for *_, document in documents):
        tap.begins(documents)
    else:
        tap = NO_TAP
    if len(documents) == 1:
        inputs = tokens, weights, policy, variant, tap, routing
        outputs: Sequence[Tensor] = [model.decoder.forward(*inputs, columns=documents[0][2].columns)]
    else:
        joint = model.decoder.forward(tokens, weights, policy, variant, tap, routing, lengths)
        outputs = joint.split(lengths, dim=-2)
    return Passed(documents=documents, outputs=outputs, routing=routing)


def _tokens_at_once(batch: Batch, models: Sequence[Model], policy: Policy) -> int:
    """Returns how many tokens may go through the models together, in several documents; 0 if each goes alone.

    They take as much memory as the longest document, or as little as the logits of a small vocabulary.
    """
    if not policy.joins or any(model.decoder.second_class for model in models):
        return 0
    longest = max(len(document.tokens) for document in batch.documents)
    return max(longest, JOINT_LOGITS // max(model.decoder.vocab_size for model in models))


def grouped(rows: Sequence[Row], most: int, variant: Variant) -> Iterator[list[Placed]]:
    """Yields the documents in groups of at most ``most`` tokens, or of one document; all of them if the variant joins
    a micro-batch."""
    group: list[Placed] = []
    tokens = 0
    for placed in ((row.index, at, document) for row in rows for at, document in enumerate(row.documents)):
        tokens += len(placed[2].tokens)
        if group and tokens > most and not variant.joins(False):
            yield group
            group, tokens = [], len(placed[2].tokens)
        group.append(placed)
    yield group


def _passes(
    models: Sequence[Model], group: list[Placed], *, alone: Collection[str]
) -> Iterator[tuple[Model, list[Placed]]]:
    """Yields the models with the documents that go through each together.

    ``alone``: models that take one document at a time, because ``Shifted`` needs the gradient of each.
    """
    for model in models:
        for documents in [[placed] for placed in group] if model.role.name in alone else [group]:
            yield model, documents


def _begin_micro_batch(leaves: Mapping[str, Weights], variant: Variant) -> None:
    """Lets the variant change accumulated gradients."""
    for role, own in leaves.items():
        variant.runs(role)
        for name, gradient in variant.carried({n: w.grad for n, w in own.items() if w.grad is not None}).items():
            own[name].grad = gradient


def _divisors(totals: Mapping[str, float], row: Row, batch: Batch, variant: Variant) -> dict[str, float]:
    """Returns the sums over the step by which the terms of a row are divided."""
    return {
        key: variant.divisor(total, row, batch) if key == TOKEN_COUNT.key else total for key, total in totals.items()
    }


def _gradients(step: int, model: Model, leaves: Weights, policy: Policy) -> Weights:
    scale = model.scale(policy)
    given = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    gradients = given if scale == 1.0 else {name: gradient / scale for name, gradient in given.items()}
    if without := sorted(model.trained - gradients.keys()):
        raise ValueError(
            f"step {step}: no gradient reaches {without[0]} and {len(without) - 1} more, so the model's code trains "
            f"them by other means, or not at all; name them in optimizer.frozen of the scenario"
        )
    wrong = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    if wrong and not model.loss_scale:
        if step == 0 and (damaged := [name for name, leaf in leaves.items() if not leaf.isfinite().all()]):
            raise ValueError(
                f"the model's file has weights that are not finite: {damaged[0]}; copy or download it again"
            )
        raise ValueError(
            f"step {step}: the gradient of {wrong[0]} and of {len(wrong) - 1} more is not finite in "
            f"{policy.compute}; lower the learning rate, or use a precision with a wider range"
        )
    if policy.stored:
        gradients = {name: gradient.to(policy.stored).to(gradient.dtype) for name, gradient in gradients.items()}
    return gradients


RowsByKey = Mapping[str, Mapping[int, Tensor]]  # by the key of an observable, then by the row's index in its batch


@dataclass(frozen=True)
class AnnotatedBatch:
    """Holds a batch with all columns that its update reads, and in ``rows`` the router weights of the rollout pass."""

    batch: Batch
    rows: RowsByKey = field(default_factory=dict)


def annotated(
    batches: Sequence[Batch], models: Sequence[Model], objective: Objective, policy: Policy, variant: Variant = HONEST
) -> Iterator[AnnotatedBatch]:
    """Yields batches lazily.

    At the first mini-batch of a rollout, it computes old log-probs, reference log-probs, values and advantages for the
    whole rollout with the current weights. Later epochs repeat the mini-batches with the same columns.
    """
    if objective.reads != "rollouts":
        yield from map(AnnotatedBatch, batches)
        return
    functions = rollout_functions_of(objective, variant)
    known: list[AnnotatedBatch] = []
    first = 0
    for batch in batches:
        if batch.rollout:
            known = run_rollout_pass(batch.rollout, models, functions, policy.before_updates, variant)
            first = batch.step
        annotation = known[(batch.step - first) % len(known)]
        yield replace(annotation, batch=with_columns(batch, annotation.batch))


def with_columns(batch: Batch, known: Batch) -> Batch:
    """Adds the columns of ``known`` to ``batch``, the same mini-batch in a later epoch, and takes its targets.

    Columns of ``batch`` take precedence, for example the choices of experts, which belong to this step.
    """
    rows = []
    for own, other in zip(batch.rows, known.rows, strict=True):
        pairs = zip(own.documents, other.documents, strict=True)
        documents = tuple(replace(d, targets=of.targets, columns={**of.columns, **d.columns}) for d, of in pairs)
        rows.append(replace(own, documents=documents))
    return replace(batch, rows=tuple(rows))


@torch.no_grad()
def run_rollout_pass(
    batches: Sequence[Batch],
    models: Sequence[Model],
    functions: RolloutFunctions,
    policy: Policy,
    variant: Variant,
) -> list[AnnotatedBatch]:
    """Returns the mini-batches of a rollout with all their columns."""
    found: dict[str, list[list[Tensor]]] = {}
    rows: list[dict[str, dict[int, Tensor]]] = [{} for _ in batches]
    for model in (model for model in models if functions.needs_rollout_pass(model.role.name)):
        key, outputs = rollout_routing(model.role.prefix, trained=model.role.trained), []
        for number, batch in enumerate(batches):
            numbers: dict[tuple[int, int], Tensor] = {}
            routed: dict[int, list[Tensor]] = defaultdict(list)
            most = _tokens_at_once(batch, [model], policy)
            for part in variant.micro_batches([batch.rows], batch) if variant.joins(False) else [batch.rows]:
                for group in grouped(part, most, variant):
                    passed = _run(group, model, model.weights, policy, variant, routed=key)
                    for (index, at, document), output in passed.taught:
                        kept = functions.rollout_numbers(model.role.name, output, document, stable=policy.stable)
                        numbers[index, at] = kept
                    for (index, _, _), weights in zip(passed.documents, passed.router_weights, strict=True):
                        routed[index].append(weights)
            none = torch.zeros(0, dtype=policy.stable)
            places = ((row.index, at) for row in batch.rows for at, _ in enumerate(row.documents))
            outputs.append([numbers.get(place, none) for place in places])
            if model.decoder.routers:
                rows[number][key] = {row: torch.cat(parts) for row, parts in routed.items()}
        found[model.role.name] = outputs
    made = functions.annotate(batches, found, stable=policy.stable)
    return [AnnotatedBatch(batch, of) for batch, of in zip(made, rows, strict=True)]
