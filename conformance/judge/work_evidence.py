"""Checks that every rank does its share of a step: its rows, its matrix products, and what its groups exchange.

A claim counts work, not events: one collective of one element proves nothing. The least work of a layout is computed
from the model and the batch; whoever does less has not trained. The most work of a rank is its share of the layout,
with padding; whoever does more shares nothing. Where padding could hide a whole share, the share is listed as not
proven.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from conformance.judge.token_evidence import (
    NUMBERS,
    computed_rows,
    gathered_for_tokens,
    heads_at_a_time,
    held_by_layout,
    shows_tokens,
    shows_what_enters,
)
from conformance.records.record_format import LOOKUPS_KEPT, number
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario

LEAST = 0.5  # of the elements and multiplications that a layout implies; a claim that is not kept gives nearly none
LARGEST_BUCKET = 0.4  # of all gradients of a rank; an eighth and the rest of a bucket are due, and 0.5 if there is one
# Of the sum of magnitudes: a result in bf16 is 2^-9 off, and Hopper adds up with 2^-13 unless it is told not to.
FLOAT8_ERROR = 2.0**-7
IN_BUCKETS = "gradients are reduced in small buckets"
SLACK = 1.1  # of the largest share of a rank
BLOCK = 128  # libraries pad rows to a multiple of this
_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce", "all_to_all")
_GATHERS = ("all_gather", "broadcast")
_GATHERED_BYTES = ("all_gather of bytes",)  # as conformance.worker.evidence names it

Claims = Iterator[tuple[str, bool, str]]  # the claim, whether it holds, and what was requested and observed
# For each data rank and each of its micro-batches: index, length and number of targets of each row.
Rows = Sequence[Sequence[Sequence[Sequence[int]]]]


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Elements of the matrices of linear layers that a training step multiplies by.

    layers: in layers, without experts. passed: those of them that gradients pass. outside: outside of layers. frozen:
    whether some of them are not trained. uncut: whether some layers are whole on all tensor-parallel ranks. keys: rows
    of all projections to keys and values. hidden: columns of the embedding. float8: elements of matrices in layers that
    can be cast to float8. beside: of all other trained parameters of layers.
    """

    layers: int
    passed: int
    outside: int
    frozen: bool
    uncut: bool
    keys: int
    hidden: int
    float8: int
    beside: int

    @property
    def passed_part(self) -> float:
        """Returns which part of the matrices in layers gradients pass."""
        return self.passed / self.layers if self.layers else 1.0

    def passes_all(self, layers: int) -> bool:
        """Tells whether gradients pass all of the layers, of the first one at least a part."""
        return self.passed_part > 1 - 1 / layers


class Step:
    """What all ranks did in the step at which evidence was taken, and the rows that the layout gives to them."""

    def __init__(self, ranks: Sequence[Mapping[str, Any]], rows: Rows, *, skipped: bool = False) -> None:
        self.ranks, self.rows = ranks, rows
        self.skipped = skipped  # gradients overflowed, so no weight is updated

    @property
    def number(self) -> int:
        return int(self.ranks[0]["step"])

    def work(self, phase: str) -> list[int]:
        """Returns the multiplications of linear layers of each rank."""
        return [dict(rank.get("work", ())).get(phase, 0) for rank in self.ranks]

    def moved(
        self,
        kinds: tuple[str, ...],
        passes: Callable[[str], bool],
        groups: Callable[[Sequence[int]], bool],
    ) -> int:
        """Returns the elements of these collectives, of the rank with the most."""
        most: int = max(
            sum(
                elements
                for kind, group, where, _, elements in rank.get("moved", ())
                if kind in kinds and passes(where) and groups(group)
            )
            for rank in self.ranks
        )
        return most

    def has_other_rows(self, group: Sequence[int]) -> bool:
        """Tells whether the ranks of a group gave different rows."""
        return len({tuple(self.ranks[rank]["rows"]) for rank in group if rank < len(self.ranks)}) > 1

    @property
    def shows_tokens(self) -> bool:
        """Tells whether ranks showed which tokens they look up."""
        return shows_tokens(self.ranks)

    def computed_rows(self, layout: Layout) -> tuple[str, bool, str] | None:
        """Returns the claim that ranks compute the rows that they give; None where tokens do not tell."""
        return computed_rows(layout, self.ranks, self.rows) if self.shows_tokens else None

    @property
    def tokens(self) -> int:
        """Returns the number of tokens of all rows that have targets."""
        return sum(length for rows in self._micro_batches() for _, length, targets in rows if targets)

    @property
    def first_tokens(self) -> int:
        """Returns the least number of tokens of a first micro-batch of a data rank."""
        return min(sum(length for _, length, targets in parts[0] if targets) for parts in self.rows)

    @property
    def first_padded(self) -> int:
        """Returns the most tokens of a first micro-batch of a data rank, if its rows are as long as the longest."""
        return max(len(parts[0]) * max(length for _, length, _ in parts[0]) for parts in self.rows)

    def padded(self, max_len: int, *, stages: int) -> int:
        """Returns the most tokens of a data rank, if all its rows are as long as the longest activations that a library
        makes of rows of ``max_len`` tokens. With pipeline stages, each micro-batch is as large as the largest."""
        most = -(-max_len // BLOCK) * BLOCK
        longest = max(length for rows in self._micro_batches() for _, length, _ in rows)
        seen = [length for rank in self.ranks for length in rank.get("lengths", ()) if length <= most]
        rows = (len(parts) * max(map(len, parts)) if stages > 1 else sum(map(len, parts)) for parts in self.rows)
        return max(rows) * int(max(longest, *seen, 0))

    @property
    def has_rows(self) -> bool:
        """Tells whether the backend shows rows; else nobody knows which ranks have other rows."""
        return any(rank.get("rows") for rank in self.ranks)

    def _micro_batches(self) -> Iterator[Sequence[Sequence[int]]]:
        for parts in self.rows:
            yield from parts


def at_least(claim: str, observed: float, due: float, unit: str = "elements") -> tuple[str, bool, str]:
    return claim, observed >= due, f"requested at least {due:,.0f} {unit}, observed {observed:,.0f}"


def below(claim: str, observed: float, most: float, unit: str = "elements") -> tuple[str, bool, str]:
    return claim, observed < most, f"requested fewer than {most:,.0f} {unit}, observed {observed:,.0f}"


def work_claims(layout: Layout, step: Step, scenario: Scenario, linear: Linear, *, layers: int, experts: int) -> Claims:
    """Yields the claims about rows and matrix products. layers: of the policy. experts: elements of all experts."""
    if step.has_rows:
        observed = {frozenset(rank["rows"]) for rank in step.ranks if rank["rows"]}
        due = {frozenset(row for rows in parts for row, _, targets in rows if targets) for parts in step.rows}
        shown = " and ".join(str(sorted(rows)) for rows in sorted(observed, key=min))
        holds = observed == due - {frozenset()}
        yield "each rank gives the rows of its micro-batches and no others", holds, f"observed rows {shown}"
        if layout.data > 1 and (computed := step.computed_rows(layout)):
            yield computed
    if "overlap" not in layout.options:  # which gathers updated weights when they are used or read
        changed = max(rank.get("changed_by_reading", 0) for rank in step.ranks)
        yield below("weights are the same before and after they are read", changed, 1, "changed storages")
    if errors := [number(rank.get("float8_error", math.inf)) for rank in step.ranks if rank.get("float8")]:
        where = f"requested at most {FLOAT8_ERROR:.1e} of the magnitudes, observed {max(errors):.1e}"
        yield "products in float8 are those of their operands", max(errors) <= FLOAT8_ERROR, where
    forward, backward = step.work("forward"), step.work("backward")
    if "te" not in layout.options:  # whose kernels are no operators of torch
        least, unit = LEAST * step.tokens * linear.layers, "multiplications"
        yield at_least("linear layers multiply all tokens, forward", sum(forward), least, unit)
        least = LEAST * step.tokens * linear.passed * (1 if linear.frozen else 2)
        yield at_least("linear layers multiply all tokens, backward", sum(backward), least, unit)
        most = most_work(layout, step, scenario, linear, layers=layers, experts=experts)
        yield below("no rank multiplies more than its share", max(backward), most, unit)


def mask_claims(layout: Layout, step: Step) -> Claims:
    """Yields the claims about the masks of dropout.

    A recomputed layer has to draw the masks of its forward pass, or gradients belong to another loss. Ranks that hold
    the same activations have to drop the same numbers; ranks that hold different activations, different numbers. Each
    layer and each micro-batch has to draw new masks.
    """
    of_ranks = [rank.get("drawn", ()) for rank in step.ranks]
    first, again = (
        [Counter({(own, mask): n for where, own, mask, n in drawn if where == wanted}) for drawn in of_ranks]
        for wanted in ("forward", "recomputed")
    )
    yield "every rank draws masks of dropout", all(first), f"observed {[masks.total() for masks in first]} masks"
    if "ckpt" in layout.options:
        new = [(_completed(masks, own) - own).total() for own, masks in zip(first, again, strict=True)]
        observed = f"requested 0 masks that are new, observed {new} of {[masks.total() for masks in again]}"
        yield "recomputed layers draw the masks of their forward pass", all(again) and not any(new), observed
    states = [Counter(mask for _, mask in masks) for masks in first]
    again_drawn = [sum(count - 1 for count in drawn.values()) for drawn in states]
    observed = f"requested 0 masks for several activations, observed {again_drawn}"
    yield "other layers and micro-batches draw other masks", not any(again_drawn), observed
    other = [
        pair
        for number, own in enumerate(first)
        for masks in first[:number]
        for pair in (_shared(own, masks) - _shared(masks, own))
    ]
    observed = f"requested 0 masks that do not fit those of another rank, observed {len(other)}"
    yield "ranks with the same activations draw the same masks, and others other masks", not other, observed


def _completed(masks: Counter[tuple[str, str]], forward: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Returns recomputed masks with the activations of the forward pass, where they are not known."""
    activations = {mask: own for own, mask in forward}
    return Counter({(own or activations.get(mask, ""), mask): n for (own, mask), n in masks.items()})


def _shared(own: Counter[tuple[str, str]], others: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Returns the activations and masks of which ``others`` has the same activations or the same mask."""
    activations, masks = {pair[0] for pair in others}, {pair[1] for pair in others}
    return Counter({pair: n for pair, n in own.items() if pair[0] in activations or pair[1] in masks})


def most_work(layout: Layout, step: Step, scenario: Scenario, linear: Linear, *, layers: int, experts: int) -> float:
    """Returns the most multiplications of a rank's backward pass, if its rows and its vocabulary are padded as much as
    libraries do. Where recomputed products are not recognised, as in a library's own autograd function, they cannot be
    told from those for gradients."""
    multiple = BLOCK * max(1, linear.hidden)
    outside = -(-linear.outside // multiple) * multiple
    share = -(-layers // layout.pp) / layers / (1 if linear.uncut else layout.tp)
    tokens = step.padded(scenario.data.max_len, stages=layout.pp) / (layout.sp * layout.ulysses)
    seen = sum(step.work("recomputed")) >= LEAST * step.tokens * linear.layers
    again = linear.layers * share * (not seen) + experts if "ckpt" in layout.options else 0
    return SLACK * tokens * (2 * (linear.layers * share + experts + outside) + again)


def exchange_claims(
    layout: Layout,
    step: Step,
    linear: Linear,
    *,
    stage: int | None,
    layers: int,
    trained: float,
    sums: float,
    accumulation: int,
    number_bytes: int,
) -> Claims:
    """Yields the claims about the elements that groups of ranks exchange.

    layers: of the policy. trained: gradients of one model on one rank, in elements. sums: least number of sums over
    tensor-parallel ranks in a forward pass of one pipeline stage. number_bytes: of a number of the compute dtype.
    """
    due, tokens = LEAST * trained, LEAST * step.first_tokens / (layout.sp * layout.ulysses)
    yield from _of_data_groups(layout, step, stage=stage, due=due, accumulation=accumulation)
    if "mfsdp" in layout.options and stage == 3 and not hides_passes(layout, step, accumulation):
        # Megatron-FSDP gathers ahead: for the first forward pass after the update before, for a backward pass in a
        # small model before it begins.
        passes = (2 * accumulation - 1 - LEAST) * linear.passed / layout.tp / layout.pp
        gathered = step.moved(_GATHERS, _not_update, partial(_is_of_data, layout, step))
        yield at_least("layers are gathered for each forward and backward pass, as ZeRO-3 has it", gathered, passes)
    elif "mfsdp" not in layout.options and stage == 3 and shards_of(layout) > 1 and not hides_gathers(layout, step):
        again = LEAST * accumulation * linear.passed / layout.tp / layout.pp
        kinds = (*_GATHERS, *(_GATHERED_BYTES if "fp8gather" in layout.options else ()))
        gathered = step.moved(kinds, in_backward, partial(_is_of_data, layout, step))
        if layout.hpz > 1:
            among = step.moved(kinds, in_backward, _of_second_copy(layout, step))
            yield at_least(f"{layout.hpz} ranks gather weights for the backward pass, as hpZ has it", among, again)
        if layout.hpz in (1, shards_of(layout)):
            yield at_least("weights are gathered again for the backward pass, as ZeRO-3 has it", gathered, again)
        else:
            yield below("other ranks gather no weights for the backward pass, as hpZ has it", gathered, again)
    if "fp8gather" in layout.options and shards_of(layout) > 1:
        yield from _gathers_of_float8(layout, step, linear, layers=layers, trained=trained, number_bytes=number_bytes)
    yield from _of_micro_batches(layout, step, trained=trained, accumulation=accumulation)
    activations = tokens * linear.hidden
    if layout.tp > 1:
        of_size = _of_size(layout.tp)
        summed = step.moved(("all_reduce", "reduce_scatter"), in_forward, of_size)
        yield at_least("activations of all layers are summed over tensor-parallel ranks", summed, sums * activations)
        if "seqpar" in layout.options:
            cut = step.moved(("reduce_scatter",), in_forward, of_size)
            yield at_least("activations are cut along the sequence", cut, sums * activations)
    if layout.pp > 1:
        sent = step.moved(("send",), anywhere, _any)
        yield at_least("pipeline stages send activations of all tokens to each other", sent, activations / layout.tp)
    keys = tokens * linear.keys / layout.tp / layout.pp
    if layout.stride > 1 and (heads := heads_at_a_time(layout, step.ranks)):
        claim = f"keys and values are gathered {layout.stride} heads at a time"
        yield claim, heads == {layout.stride}, f"observed {', '.join(map(str, sorted(heads)))}"
    if layout.ulysses > 1:
        for text, where, least in (
            ("forward", in_forward, max(1, keys)),
            ("backward", in_backward, max(1, keys) * linear.passed_part),
        ):
            exchanged = step.moved(("all_to_all",), where, _of_size(layout.ulysses))
            yield at_least(f"heads are exchanged for parts of the sequence, {text}", exchanged, least)
    if layout.sp > 1:
        sent = step.moved(("send",), in_forward, _any)
        if {"ring", "zigzag"} & set(layout.options):
            yield at_least("keys and values are passed around a ring", sent, max(1, keys))
        elif layout.gathers:
            gathered = step.moved(("all_gather",), in_forward, _of_size(layout.sp))
            # ZeRO-3 gathers weights in the same pass, and maybe over the same ranks.
            weights = trained if stage == 3 and shards_of(layout) == layout.sp else 0
            yield at_least("keys and values are gathered", gathered, weights + max(1, keys * layout.sp))
            if layout.pp == 1:
                yield below("keys and values go around no ring", sent, 1)
    if layout.sp * layout.ulysses > 1 and step.shows_tokens:
        yield held_by_layout(layout, step.ranks)


def _of_data_groups(layout: Layout, step: Step, *, stage: int | None, due: float, accumulation: int) -> Claims:
    shards = shards_of(layout)
    if stage == 2 and shards > 1 and "fsdp1" in layout.options:
        yield from _until_backward(layout, step, due=due, accumulation=accumulation)
    elif stage is not None and stage < 3 and shards > 1:
        of_data, hidden = partial(_is_of_data, layout, step), hides_whole_weights(layout, step, due)
        if "mfsdp" in layout.options:  # which gathers when weights are first used
            if not hidden:
                claim = f"weights are gathered at most once before the update, as ZeRO-{stage} has it"
                most = (1 + LEAST) / LEAST * due + gathered_numbers(layout, step)
                yield below(claim, step.moved(_GATHERS, _not_update, of_data), most)
        elif "overlap" not in layout.options and not hidden:
            whole, most = _gathered_weights(layout, step), due + gathered_numbers(layout, step)
            yield below(f"weights are whole in the forward pass, as ZeRO-{stage} has it", whole, most)
        updated = step.moved(_GATHERS, _update, _of_size(shards))
        if not stage:
            yield below("all ranks update all weights, as ZeRO-0 has it", updated, due)
        elif "overlap" not in layout.options and not step.skipped:
            yield at_least(f"updated weights are gathered, as ZeRO-{stage} has it", updated, due)
        if stage == 2 and accumulation > 1 and updated >= due:
            # The same elements: all weights of a rank. Keys and values, if gathered, have gradients that are reduced.
            keys = step.moved(("all_gather",), _passes, _of_size(shards)) if layout.gathers else 0
            reduced = step.moved(_REDUCTIONS, _not_update, of_data) - keys
            claim = "gradients of every micro-batch are reduced, as ZeRO-2 has it"
            yield at_least(claim, reduced, (accumulation - 0.5) * updated)
    if layout.data > 1 and step.has_rows:
        reduced = step.moved(_REDUCTIONS, not_forward, step.has_other_rows)
        yield at_least("gradients are reduced over ranks with other rows", reduced, due)
        if "ddp" in layout.options:
            reduced = step.moved(("all_reduce",), in_backward, step.has_other_rows)
            yield at_least("gradients are all-reduced in the backward pass, as DDP has it", reduced, due)
    if layout.rep > 1:
        reduced = step.moved(("all_reduce",), not_forward, _of_size(layout.rep))
        yield at_least("gradients are reduced over replicas", reduced, due / shards)


def _gathers_of_float8(
    layout: Layout, step: Step, linear: Linear, *, layers: int, trained: float, number_bytes: int
) -> Claims:
    """Checks that cast weights are gathered as one byte each, and not as numbers, too.

    FSDP gathers a layer as bytes, with its other parameters.
    """
    cast_part = 1 - 2 * ("fp8ends" in layout.options) / layers
    of_data, cut = partial(_is_of_data, layout, step), layout.tp * layout.pp
    gathered = step.moved(_GATHERED_BYTES, in_forward, of_data)
    yield at_least("weights are gathered in float8", gathered, LEAST * linear.float8 * cast_part / cut)
    # Norms and biases may be whole on all tensor-parallel ranks.
    most = SLACK * cast_part * (linear.float8 / cut + linear.beside * number_bytes)
    yield below("weights are gathered in float8, one byte each", gathered, most, "bytes")
    if not hides_whole_weights(layout, step, LEAST * trained):
        numbers = _gathered_weights(layout, step)
        outside = linear.outside + (1 - cast_part) * (linear.float8 + linear.beside) + linear.hidden  # of the last norm
        most = SLACK * outside + gathered_numbers(layout, step)
        yield below("weights in float8 are not gathered as numbers", numbers, most)


def _until_backward(layout: Layout, step: Step, *, due: float, accumulation: int) -> Claims:
    """Checks SHARD_GRAD_OP of FSDP1: weights are sharded, but stay gathered from the forward to the backward pass."""
    of_data = partial(_is_of_data, layout, step)
    gathered = step.moved(_GATHERS, in_forward, of_data)
    yield at_least("weights are gathered for the forward pass, as SHARD_GRAD_OP has it", gathered, due)
    again = step.moved(_GATHERS, lambda where: where == "backward 0", of_data)
    if not hides_gathers(layout, step):
        yield below("weights are not gathered again for the backward pass, as SHARD_GRAD_OP has it", again, due)
    if "lastsync" not in layout.options and not layout.gathers:
        reduced = step.moved(_REDUCTIONS, _not_update, of_data)
        claim = "gradients of every micro-batch are reduced, as SHARD_GRAD_OP has it"
        yield at_least(claim, reduced, (accumulation - 0.5) * gathered)


def keeps_weights(layout: Layout, scenario: Scenario) -> bool:
    """Tells whether ranks may hold whole weights in ZeRO-3: on the CPU, of frozen models beside Megatron-FSDP's, or if
    a share and one of hpZ's second copy are as large."""
    frozen = "mfsdp" in layout.options and not all(role.trained for role in scenario.objective.roles)
    return "offload" in layout.options or frozen or part_of_weights(layout) >= 1


def part_of_weights(layout: Layout) -> float:
    """Returns which part of the weights a rank holds in ZeRO-3, with that of hpZ's second copy."""
    return 1 / shards_of(layout) + (1 / layout.hpz if layout.hpz > 1 else 0)


def hides_gathers(layout: Layout, step: Step) -> bool:
    """Tells whether groups that gather activations in backward passes may be taken for those that share weights."""
    return shards_of(layout) in {layout.tp, *_gather_keys_again(layout)} and not _rows_tell(layout, step)


def hides_passes(layout: Layout, step: Step, accumulation: int) -> bool:
    """Tells whether the gathers of Megatron-FSDP's ZeRO-3 may be those of kept weights, or of keys and values."""
    return accumulation == 1 or layout.gathers or hides_gathers(layout, step)


def _gather_keys_again(layout: Layout) -> set[int]:
    """Returns the size of groups that gather keys and values in backward passes. Ring attention's library does."""
    return {layout.sp} if layout.gathers or {"ckpt", "torchcp"} & set(layout.options) else set()


def hides_whole_weights(layout: Layout, step: Step, due: float) -> bool:
    """Tells whether other gathers in the passes that claims read may be taken for those of weights."""
    if layout.gathers or "torchcp" in layout.options:  # keys and values, over the same ranks
        return True
    if "mfsdp" in layout.options and hides_gathers(layout, step):
        return True
    # A rank with as many may have looked up more before, in a rollout, and gathered numbers of any size for these.
    shares_sequences = layout.sp * layout.ulysses > 1
    if shares_sequences and any(len(rank.get("embedded", ())) >= LOOKUPS_KEPT for rank in step.ranks):
        return True
    if layout.tp > 1 and not (step.has_rows and (_rows_tell(layout, step) or layout.tp != shards_of(layout))):
        return True
    return gathered_numbers(layout, step) >= due


def gathered_numbers(layout: Layout, step: Step) -> int:
    """Returns the most numbers of tokens that ranks of one sequence gather in the passes that claims read, where they
    cannot be told from weights: some rank looks no token up, or Megatron-FSDP's passes are not the first alone."""
    if layout.sp * layout.ulysses == 1:
        return 0
    if "mfsdp" in layout.options:
        return NUMBERS * step.first_padded * max(map(len, step.rows))
    shown = step.shows_tokens and all(rank.get("embedded") for rank in step.ranks)
    return 0 if shown else NUMBERS * step.first_padded


def _gathered_weights(layout: Layout, step: Step) -> int:
    """Returns the elements that data ranks gather in the first forward pass, without those that are numbers of tokens,
    of the rank with the most. Pipeline stages gather numbers of the tokens that the first one looks up."""
    of_data = partial(_is_of_data, layout, step)
    lookups = [lookup for rank in step.ranks for lookup in rank.get("embedded", ())]
    held = max(sum(len(row) for _, seen in rank.get("embedded", ()) for row in seen) for rank in step.ranks)
    numbers = NUMBERS * held * layout.sp * layout.ulysses
    most: int = max(
        sum(
            elements
            for kind, group, where, _, elements in rank.get("moved", ())
            if kind in _GATHERS and in_forward(where) and of_data(group)
        )
        - min(numbers, gathered_for_tokens(layout, {**rank, "embedded": lookups}, of_data))
        for rank in step.ranks
    )
    return most


def _of_micro_batches(layout: Layout, step: Step, *, trained: float, accumulation: int) -> Claims:
    """Checks when gradients are reduced, and in pieces of which size."""
    if "buckets" in layout.options:
        sizes = [
            elements / count
            for kind, group, where, count, elements in step.ranks[0].get("moved", ())
            if kind in _REDUCTIONS and where not in ("forward", "update") and len(group) == shards_of(layout)
        ]
        largest = max(sizes, default=math.inf)
        yield below(IN_BUCKETS, largest, trained * LARGEST_BUCKET, "elements at a time")
    if "manual" in layout.options and layout.rep > 1:
        early = sum(
            elements
            for kind, group, where, _, elements in step.ranks[0].get("moved", ())
            if kind == "all_reduce" and len(group) == layout.rep and step.has_other_rows(group)
            if where.startswith("backward") and (int(where.split()[1]) + 1) % accumulation
        )
        yield below("gradients are reduced over replicas after the last micro-batch", early, 1)
    elif "manual" in layout.options and layout.pp == 1:
        told = min(rank.get("boundaries", 0) for rank in step.ranks)
        yield at_least("the caller says which micro-batches come before the last", told, accumulation - 1, "calls")


def shards_of(layout: Layout) -> int:
    return layout.data * layout.sp * layout.ulysses // layout.rep


def _is_of_data(layout: Layout, step: Step, group: Sequence[int]) -> bool:
    return len(group) == shards_of(layout) and (not _rows_tell(layout, step) or step.has_other_rows(group))


def _of_second_copy(layout: Layout, step: Step) -> Callable[[Sequence[int]], bool]:
    """Tells which groups may keep a second copy of weights together. Ranks of one sequence do, too."""
    rows_tell = layout.sp * layout.ulysses == 1 and step.has_rows
    return lambda group: len(group) == layout.hpz and (not rows_tell or step.has_other_rows(group))


def _rows_tell(layout: Layout, step: Step) -> bool:
    """Tells whether ranks that share weights have other rows, and the backend shows them."""
    return layout.data > layout.rep and step.has_rows


def not_proven(
    layout: Layout,
    step: Step,
    scenario: Scenario,
    linear: Linear,
    *,
    stage: int | None,
    layers: int,
    experts: int,
    trained: float,
) -> Iterator[tuple[str, bool]]:
    """Yields what the layout asks for, and whether no claim decides it. trained: see exchange_claims."""
    options = set(layout.options)
    for option in ("plan", "ownopt", "torchcp", "offload", "fsdp1"):
        yield option, option in options
    yield "manual", "manual" in options and layout.pp > 1
    yield "what dropout does with numbers that it drops", "dropout" in options
    shares_sequences = layout.sp * layout.ulysses > 1
    yield "which tokens each rank holds, and their order", shares_sequences and not step.shows_tokens
    entering = not step.shows_tokens or shows_what_enters(step.ranks)
    yield "which of the looked up tokens enter the layers", shares_sequences and not entering
    yield "order of tokens behind the first linear layer", shares_sequences and step.shows_tokens
    yield "stride", layout.stride > 1 and not heads_at_a_time(layout, step.ranks)
    products = [(rank.get("float8", 0), sum(count for _, count in rank.get("linear", ()))) for rank in step.ranks]
    emulated = any(by_kernel < max(1, LEAST * all_) for by_kernel, all_ in products)
    yield "a kernel for products in float8, which are emulated", layout.float8 is not None and emulated
    is_cut = bool(stage) and shards_of(layout) > 1
    hidden = stage in (0, 1, 2) and shards_of(layout) > 1 and hides_whole_weights(layout, step, LEAST * trained)
    yield "whole weights in the forward pass", hidden
    hidden = "fp8gather" in options and shards_of(layout) > 1 and hides_whole_weights(layout, step, LEAST * trained)
    yield "weights in float8 that are gathered as numbers", hidden
    accumulation = scenario.accumulation if "mfsdp" in options else 0
    hidden = hides_passes(layout, step, accumulation) if accumulation else hides_gathers(layout, step)
    yield "weights that are gathered again", is_cut and stage == 3 and hidden
    yield "bytes of optimizer states", is_cut
    yield "bytes of gradients", is_cut and stage in (2, 3)
    yield "bytes of weights", is_cut and stage == 3 and (scenario.tier.is_half or keeps_weights(layout, scenario))
    yield "share of each rank in attention", layout.tp * layout.sp * layout.ulysses > 1
    again = _gather_keys_again(layout) | ({layout.tp} if shares_sequences else set())
    hidden = layout.hpz in {shards_of(layout), *again}
    yield "second copy of the weights", layout.hpz > 1 and hidden
    yield "which ranks are replicas", layout.rep > 1 and layout.rep == shards_of(layout)
    yield "overlap", "overlap" in options and not (layout.zero == 1 and layout.world_size == layout.data)
    yield "leaf", "leaf" in options and (layout.world_size > layout.data or not linear.passes_all(layers))
    yield "linear layers and attention of TransformerEngine", "te" in options
    yield "exchange of keys and values", layout.sp * layout.ulysses > 1 and not linear.keys
    yield "which rank has which rows", layout.data > 1 and not step.has_rows
    computed = layout.data == 1 or not step.has_rows or step.computed_rows(layout)
    yield "which rank computes which rows", not computed
    models = sum(role.trained for role in scenario.objective.roles)
    due = models * max(sum(any(targets for *_, targets in rows) for rows in parts) for parts in step.rows)
    yield "a backward pass for each micro-batch", max(rank.get("backwards", due) for rank in step.ranks) < due
    most = most_work(layout, step, scenario, linear, layers=layers, experts=experts)
    whole = 2 * step.tokens * (linear.layers + linear.outside)
    yield "share of each rank in the work", layout.world_size > 1 and whole <= most


def _of_size(size: int) -> Callable[[Sequence[int]], bool]:
    return lambda group: len(group) == size


def _any(group: Sequence[int]) -> bool:
    return True


def anywhere(where: str) -> bool:
    return True


def in_forward(where: str) -> bool:
    return where == "forward"


def in_backward(where: str) -> bool:
    return where.startswith("backward")


def not_forward(where: str) -> bool:
    return where != "forward"


def _update(where: str) -> bool:
    return where == "update"


def _passes(where: str) -> bool:
    return where in ("forward", "later")


def _not_update(where: str) -> bool:
    return where != "update"
