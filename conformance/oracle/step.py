"""Runs one optimizer step document by document, and the passes over a rollout before its first update.

Rows are never packed or padded here, and gradients are summed over documents.

The columns that all updates of a rollout read are computed once. Forward passes run document by document over all
mini-batches and give old log-probs, log-probs of the reference and values of the critic. The choices of routers are
recorded for each pass under a key of its own (conformance.spec.observables.rollout_routing).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
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

    def routing(self, document: Document) -> Routing | None:
        """Returns the routing of the document's forward pass in an update."""
        return self.decoder.routing(document, model_key(self.role.prefix, ROUTING))

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
    rows: dict[str, dict[int, Tensor]] = defaultdict(dict)
    # The outputs of a frozen model over a rollout are already in its columns.
    running = [m for m in models if m.role.trained or objective.reads != "rollouts"]
    if isinstance(functions, PairedFunctions):
        _look_ahead(batch, running, functions, policy, variant)
    tokens_of_step = sum(row.length for row in batch.rows)
    balances = {m.role.name: Balance() for m in running}
    chosen = {m.role.name: _choices(batch, m, policy, variant) for m in running}
    parted = {m.role.name: _loads(batch, m, policy, variant) for m in running}
    embeds = [m.role for m in running if EMBEDDING in m.trained]
    shifted = {role.name: Shifted(batch) for role in embeds if shifts and role.head == "value"}
    pending: list[Tensor] = []  # losses of documents that go through the model together
    looks_up = variant.looks_up_at_once(policy.lookups > 0)
    lookups = {m.role.name: OneLookup(taps.get(m.role.name, NO_TAP)) for m in running if looks_up}
    taps = {**taps, **lookups}
    for row, outputs in _rows(batch, running, leaves, policy, variant, taps, pending):
        parts: dict[str, list[Tensor]] = defaultdict(list)
        of_row = {
            key: variant.divisor(total, row, batch) if key == TOKEN_COUNT.key else total
            for key, total in totals.items()
        }
        for at, document in enumerate(row.documents):
            has_targets = any(document.targets)
            for tap in taps.values() if has_targets else ():
                tap.begins([(row.index, at, document)])
            earlier: dict[str, Tensor] = {}
            for model in running:
                name, routing = model.role.name, model.routing(document) if model.role.trained else None
                # A document without targets contributes to the loss of routers only.
                if not (has_targets or routing):
                    continue
                if (output := outputs.get((name, at))) is None:
                    tokens, tap = torch.tensor(document.tokens), taps.get(name, NO_TAP) if has_targets else NO_TAP
                    inputs = tokens, leaves[name], policy, variant, tap, routing
                    output = model.decoder.forward(*inputs, columns=document.columns)
                loss = torch.zeros((), dtype=policy.stable, device=output.device)
                if routing:
                    parts[model_key(model.role.prefix, ROUTING)].append(routing.rows)
                    balances[name].add(routing)
                    loads = parted[name].get(row.index)
                    share = _router_share(model, routing, chosen[name], tokens_of_step, loads)
                    loss = loss + share.to(output.device)
                if not has_targets:
                    if loss.requires_grad:
                        (loss * model.scale(policy)).backward()
                    continue
                term = functions.term(name, output, document, totals=of_row, earlier=earlier, stable=policy.stable)
                if model.role.trained:
                    assert term.loss is not None, f"the objective gives no loss for {name}, which is trained"
                    if model.role.head == "value":
                        positions = value_positions(functions, document)
                        gradient = value_gradient(term.loss, output, positions, scale=model.scale(policy))
                        parts[model_key(model.role.prefix, VALUE_GRADIENT)].append(gradient)
                        if name in shifted:
                            shifted[name].add(document, output, leaves[name][EMBEDDING], positions)
                    whole = (term.loss + loss) * model.scale(policy)
                    if outputs:
                        pending.append(whole)
                    else:
                        whole.backward()
                earlier[name] = output.detach()
                for key, number in term.values.items():
                    values[key] += number
                for key, number in term.highest.items():
                    highest[key] = max(number, highest.get(key, number))
                for key, tensor in term.recorded.items():
                    parts[key].append(tensor.detach())
        for key, tensors in parts.items():
            rows[key][row.index] = torch.cat(tensors)
    for part in batch.micro_batches(dp_rank=0, dp_size=1, accumulation=policy.lookups) if lookups else ():
        for lookup in lookups.values():
            lookup.finish({row.index for row in part})
    for model in running:
        if (balance := balances[model.role.name]).probabilities is not None:
            values[model_key(model.role.prefix, ROUTER_LOSS)] = balance.loss(balance.probabilities).item()
            values[model_key(model.role.prefix, ROUTER_Z_LOSS)] = balance.squares / tokens_of_step
            rows[model_key(model.role.prefix, ROUTER_TERMS)][0] = balance.terms()
    gradients = {}
    for model in (model for model in models if model.trained):
        name = variant.runs(model.role.name)
        gradients[name] = variant.reduced(_gradients(batch.step, model, leaves[name], policy))
    norms = {name: found.norms for name, found in shifted.items()}
    return Observed(gradients=gradients, values=variant.numbers(values) | highest, rows=dict(rows), shifted=norms)


@torch.no_grad()
def _look_ahead(
    batch: Batch, models: Sequence[Model], functions: PairedFunctions, policy: Policy, variant: Variant
) -> None:
    """Shows the functions the outputs of all documents with targets, before the first of them has a loss."""
    for document in (document for document in batch.documents if any(document.targets)):
        outputs = {}
        for model in models:
            routing = model.routing(document) if model.role.trained else None
            tokens = torch.tensor(document.tokens)
            outputs[model.role.name] = model.decoder.forward(tokens, model.weights, policy, variant, routing=routing)
        functions.see(document, outputs, stable=policy.stable)


@torch.no_grad()
def _choices(batch: Batch, model: Model, policy: Policy, variant: Variant) -> Balance | None:
    """Counts the choices of all routers in the whole step; returns None if no loss depends on them."""
    if not (model.decoder.router_loss and model.role.trained):
        return None
    balance = Balance()
    for document in batch.documents:
        routing = model.routing(document)
        assert routing is not None
        model.decoder.forward(torch.tensor(document.tokens), model.weights, policy, variant, routing=routing)
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
            routings = [model.routing(document) for document in row.documents]
            for document, routing in zip(row.documents, routings, strict=True):
                assert routing is not None
                model.decoder.forward(torch.tensor(document.tokens), model.weights, policy, variant, routing=routing)
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
    """Returns a document's share of its routers' losses, times their factors; 0 without such losses.

    ``tokens``: number of tokens of the whole step. ``part``: replaces ``step`` if the variant balances parts.
    """
    assert routing.squares is not None
    assert routing.probabilities is not None
    share = model.z_loss * routing.squares / tokens
    if step is None:
        return share
    return share + model.decoder.router_loss * (part.loss(routing) if part else step.loss(routing.probabilities))


def _rows(
    batch: Batch,
    models: Sequence[Model],
    leaves: Mapping[str, Weights],
    policy: Policy,
    variant: Variant,
    taps: Mapping[str, Tap],
    pending: list[Tensor],
) -> Iterator[tuple[Row, Mapping[tuple[str, int], Tensor]]]:
    """Yields the rows in the variant's order; the variant may change accumulated gradients between micro-batches.

    If the variant joins a micro-batch, its rows come with their outputs by role and document, and the losses that the
    caller collects in ``pending`` have one backward pass.
    """
    for part in variant.micro_batches([batch.rows], batch):
        for role, own in leaves.items():
            variant.runs(role)
            for name, gradient in variant.carried({n: w.grad for n, w in own.items() if w.grad is not None}).items():
                own[name].grad = gradient
        if not variant.joins(False):
            yield from ((row, {}) for row in part)
            continue
        outputs: dict[int, dict[tuple[str, int], Tensor]] = defaultdict(dict)
        for model in models:
            name = model.role.name
            joint = _joint_outputs(part, model, leaves[name], policy, variant, taps.get(name, NO_TAP))
            for (index, at), output in joint.items():
                outputs[index][name, at] = output
        yield from ((row, outputs[row.index]) for row in part)
        if pending:
            torch.stack(pending).sum().backward()
            pending.clear()


def _joint_outputs(
    part: Sequence[Row], model: Model, weights: Weights, policy: Policy, variant: Variant, tap: Tap = NO_TAP
) -> dict[tuple[int, int], Tensor]:
    """Returns the outputs of the documents of a micro-batch, which go through a model together, by row and document."""
    documents = [(row.index, at, document) for row in part for at, document in enumerate(row.documents)]
    lengths = [len(document.tokens) for *_, document in documents]
    tokens = torch.tensor([token for *_, document in documents for token in document.tokens])
    variant.runs(model.role.name)
    tap.begins(documents)
    joint = model.decoder.forward(tokens, weights, policy, variant, tap, lengths=lengths)
    return {(index, at): output for (index, at, _), output in zip(documents, joint.split(lengths), strict=True)}


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
            routed: dict[int, list[Tensor]] = defaultdict(list)
            joint: dict[tuple[int, int], Tensor] = {}
            for part in variant.micro_batches([batch.rows], batch) if variant.joins(False) else ():
                joint |= _joint_outputs(part, model, model.weights, policy, variant)
            outputs.append(
                [
                    _document_numbers(
                        model, document, functions, policy, variant, key, routed[row.index], joint.get((row.index, at))
                    )
                    for row in batch.rows
                    for at, document in enumerate(row.documents)
                ]
            )
            if model.decoder.routers:
                rows[number][key] = {row: torch.cat(parts) for row, parts in routed.items()}
        found[model.role.name] = outputs
    made = functions.annotate(batches, found, stable=policy.stable)
    return [AnnotatedBatch(batch, of) for batch, of in zip(made, rows, strict=True)]


def _document_numbers(
    model: Model,
    document: Document,
    functions: RolloutFunctions,
    policy: Policy,
    variant: Variant,
    key: str,
    routed: list[Tensor],
    output: Tensor | None,
) -> Tensor:
    """Returns the numbers of one document, (targets,), and appends its router weights to ``routed``. ``output``: of the
    model, if the document went through it with others."""
    routing = model.decoder.routing(document, key)
    if not (any(document.targets) or routing):
        return torch.zeros(0, dtype=policy.stable)
    if output is None:
        tokens = torch.tensor(document.tokens)
        output = model.decoder.forward(tokens, model.weights, policy, variant, routing=routing)
    if routing:
        routed.append(routing.rows)
    if not any(document.targets):
        return torch.zeros(0, dtype=policy.stable)
    return functions.rollout_numbers(model.role.name, output, document, stable=policy.stable)
