"""Checks what groups of ranks exchange: weights, gradients, activations, keys and values, and over which ranks.

A claim counts elements, not events: one collective of one element proves nothing. Where other collectives may be taken
for the due ones, nothing is claimed (``hides_...``), and conformance.judge.work_evidence lists it as not proven.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

from conformance.judge.step_evidence import (
    LEAST,
    SLACK,
    Claims,
    Linear,
    Step,
    anywhere,
    at_least,
    below,
    in_backward,
    in_forward,
    is_of_data,
    not_forward,
    of_size,
    rows_tell,
    shards_of,
)
from conformance.judge.token_evidence import NUMBERS, gathered_for_tokens, heads_at_a_time, held_by_layout
from conformance.records.record_format import LOOKUPS_KEPT
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario

LARGEST_BUCKET = 0.4  # of all gradients of a rank; an eighth and the rest of a bucket are due, and 0.5 if there is one
IN_BUCKETS = "gradients are reduced in small buckets"
_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce", "all_to_all")
_GATHERS = ("all_gather", "broadcast")
_GATHERED_BYTES = ("all_gather of bytes",)  # as conformance.worker.evidence names it


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
        gathered = step.moved(_GATHERS, _not_update, partial(is_of_data, layout, step))
        yield at_least("layers are gathered for each forward and backward pass, as ZeRO-3 has it", gathered, passes)
    elif "mfsdp" not in layout.options and stage == 3 and shards_of(layout) > 1 and not hides_gathers(layout, step):
        again = LEAST * accumulation * linear.passed / layout.tp / layout.pp
        kinds = (*_GATHERS, *(_GATHERED_BYTES if "fp8gather" in layout.options else ()))
        gathered = step.moved(kinds, in_backward, partial(is_of_data, layout, step))
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
        of_tensor_ranks = of_size(layout.tp)
        summed = step.moved(("all_reduce", "reduce_scatter"), in_forward, of_tensor_ranks)
        yield at_least("activations of all layers are summed over tensor-parallel ranks", summed, sums * activations)
        if "seqpar" in layout.options:
            cut = step.moved(("reduce_scatter",), in_forward, of_tensor_ranks)
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
            exchanged = step.moved(("all_to_all",), where, of_size(layout.ulysses))
            yield at_least(f"heads are exchanged for parts of the sequence, {text}", exchanged, least)
    if layout.sp > 1:
        sent = step.moved(("send",), in_forward, _any)
        if {"ring", "zigzag"} & set(layout.options):
            yield at_least("keys and values are passed around a ring", sent, max(1, keys))
        elif layout.gathers:
            gathered = step.moved(("all_gather",), in_forward, of_size(layout.sp))
            # ZeRO-3 gathers weights in the same pass, and maybe over the same ranks.
            weights = trained if stage == 3 and shards_of(layout) == layout.sp else 0
            if not hides_keys(layout, stage):
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
        of_data, hidden = partial(is_of_data, layout, step), hides_whole_weights(layout, step, due)
        if "mfsdp" in layout.options:  # which gathers when weights are first used
            if not hidden:
                claim = f"weights are gathered at most once before the update, as ZeRO-{stage} has it"
                most = (1 + LEAST) / LEAST * due + gathered_numbers(layout, step)
                yield below(claim, step.moved(_GATHERS, _not_update, of_data), most)
        elif "overlap" not in layout.options and not hidden:
            whole, most = _gathered_weights(layout, step), due + gathered_numbers(layout, step)
            yield below(f"weights are whole in the forward pass, as ZeRO-{stage} has it", whole, most)
        updated = step.moved(_GATHERS, _update, of_size(shards))
        if not stage:
            yield below("all ranks update all weights, as ZeRO-0 has it", updated, due)
        elif "overlap" not in layout.options and not step.skipped:
            yield at_least(f"updated weights are gathered, as ZeRO-{stage} has it", updated, due)
        if stage == 2 and accumulation > 1 and updated >= due:
            # The same elements: all weights of a rank. Keys and values, if gathered, have gradients that are reduced.
            keys = step.moved(("all_gather",), _passes, of_size(shards)) if layout.gathers else 0
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
        reduced = step.moved(("all_reduce",), not_forward, of_size(layout.rep))
        yield at_least("gradients are reduced over replicas", reduced, due / shards)


def _gathers_of_float8(
    layout: Layout, step: Step, linear: Linear, *, layers: int, trained: float, number_bytes: int
) -> Claims:
    """Checks that cast weights are gathered as one byte each, and not as numbers, too.

    FSDP gathers a layer as bytes, with its other parameters.
    """
    cast_part = 1 - 2 * ("fp8ends" in layout.options) / layers
    of_data, cut = partial(is_of_data, layout, step), layout.tp * layout.pp
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
    of_data = partial(is_of_data, layout, step)
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
    """Tells whether ranks may hold whole weights in ZeRO-3: with offloading, of frozen models next to models that
    Megatron-FSDP shards, or if a rank's shards of the weights and of hpZ's second copy are together as large as all."""
    frozen = "mfsdp" in layout.options and not all(role.trained for role in scenario.objective.roles)
    return "offload" in layout.options or frozen or part_of_weights(layout) >= 1


def part_of_weights(layout: Layout) -> float:
    """Returns which part of the weights a rank holds in ZeRO-3, with that of hpZ's second copy."""
    return 1 / shards_of(layout) + (1 / layout.hpz if layout.hpz > 1 else 0)


def hides_gathers(layout: Layout, step: Step) -> bool:
    """Tells whether groups that gather activations in backward passes may be taken for those that share weights."""
    return shards_of(layout) in {layout.tp, *gather_keys_again(layout)} and not rows_tell(layout, step)


def hides_passes(layout: Layout, step: Step, accumulation: int) -> bool:
    """Tells whether the gathers of Megatron-FSDP's ZeRO-3 may be those of kept weights, or of keys and values."""
    return accumulation == 1 or layout.gathers or hides_gathers(layout, step)


def hides_keys(layout: Layout, stage: int | None) -> bool:
    """Tells whether gathers of keys and values may be those of weights, some of which Megatron-FSDP keeps."""
    return "mfsdp" in layout.options and stage == 3 and shards_of(layout) == layout.sp


def gather_keys_again(layout: Layout) -> set[int]:
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
    if layout.tp > 1 and not (step.has_rows and (rows_tell(layout, step) or layout.tp != shards_of(layout))):
        return True
    return gathered_numbers(layout, step) >= due


def gathered_numbers(layout: Layout, step: Step) -> int:
    """Returns the largest number of values (NUMBERS for each token) that ranks of one sequence may gather in the passes
    that claims read, where they cannot be distinguished from weights: some rank looks no token up, or Megatron-FSDP's
    passes are not the first alone."""
    if layout.sp * layout.ulysses == 1:
        return 0
    if "mfsdp" in layout.options:
        return NUMBERS * step.first_padded * max(map(len, step.rows))
    shown = step.shows_tokens and all(rank.get("embedded") for rank in step.ranks)
    return 0 if shown else NUMBERS * step.first_padded


def _gathered_weights(layout: Layout, step: Step) -> int:
    """Returns the elements that data ranks gather in the first forward pass, without those that are numbers of tokens,
    of the rank with the most. Pipeline stages gather numbers of the tokens that the first one looks up."""
    of_data = partial(is_of_data, layout, step)
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
        announced = min(rank.get("boundaries", 0) for rank in step.ranks)
        yield at_least("the caller says which micro-batches come before the last", announced, accumulation - 1, "calls")


def _of_second_copy(layout: Layout, step: Step) -> Callable[[Sequence[int]], bool]:
    """Tells which groups may keep a second copy of weights together. Ranks of one sequence do, too."""
    rows_tell = layout.sp * layout.ulysses == 1 and step.has_rows
    return lambda group: len(group) == layout.hpz and (not rows_tell or step.has_other_rows(group))


def _any(group: Sequence[int]) -> bool:
    return True


def _update(where: str) -> bool:
    return where == "update"


def _passes(where: str) -> bool:
    return where in ("forward", "later")


def _not_update(where: str) -> bool:
    return where != "update"
