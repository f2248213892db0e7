"""Checks that every rank does its share of the work of a step: its rows, its products, its masks, with its weights.

The least work of a layout is computed from the model and the batch; whoever does less has not trained. The most work of
a rank is its share of the layout, with padding; whoever does more shares nothing. Where padding could hide a whole
share, the share is listed as not proven, as is all else that no claim decides (``not_proven``).
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from types import MappingProxyType
from typing import Any

import torch

from conformance.judge.exchange_evidence import (
    gather_keys_again,
    hides_gathers,
    hides_keys,
    hides_passes,
    hides_whole_weights,
    keeps_weights,
)
from conformance.judge.step_evidence import BLOCK, LEAST, SLACK, Claims, Linear, Step, at_least, below, shards_of
from conformance.judge.token_evidence import heads_at_a_time, shows_what_enters
from conformance.numerics.sketch import is_projected
from conformance.records.record_format import number
from conformance.records.step_tensors import Record
from conformance.spec.layout import Layout
from conformance.spec.objectives import PolicyGradient
from conformance.spec.observables import Role, is_unread
from conformance.spec.precision import BF16
from conformance.spec.scenario import Scenario, is_adapter

# Of the sum of magnitudes: a result in bf16 is 2^-9 off, and Hopper adds up with 2^-13 unless it is told not to.
FLOAT8_ERROR = 2.0**-7
SCALE_ERROR = 2.0**-20  # scales and magnitudes are float32 numbers
# Weights that only some tokens or rows need, which a later micro-batch may not have.
_SOMETIMES = re.compile(r"\.experts\.|visual|vision|projector|audio")
SAME = 1e-9  # of sums of the same numbers in float64, in any order

Sums = tuple[int, int, float, float]  # dimensions, elements, sum and norm


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
    if "te" in layout.options and layout.float8:
        kept = Fraction(layers - 2 * ("fp8ends" in layout.options), layers)
        options: dict[str, Any] = {"frozen": linear.frozen, "stages": layout.pp}
        if scenario.lora:
            options["adapted"] = scenario.accumulation
        if "seqpar" in layout.options:
            options["gathers"] = layout.float8 in ("fp8tensor", "fp8delayed")
        passes = _passes(scenario, step.number)
        options["trained"] = Fraction(passes.trained, passes.trained + passes.ahead)
        # Histories of an input and a weight, and of a gradient.
        options["moved"] = {
            "forward": Fraction(2 * passes.models, passes.trained + passes.ahead),
            "backward": Fraction(passes.trained, scenario.accumulation * (passes.trained + passes.ahead)),
        }
        # A micro-batch without targets on all ranks has gradients of zeros, which leave histories as they are.
        of_micro_batches = zip(*step.rows, strict=True)
        passed = sum(any(row[2] for rows in ranks for row in rows) for ranks in of_micro_batches)
        updates = {"forward": scenario.accumulation + passes.ends_alone, "backward": passed}
        yield from _te_casts(layout.float8, step.ranks, kept=kept, updates=updates, **options)
    forward, backward = step.work("forward"), step.work("backward")
    if "te" not in layout.options:  # whose kernels are no operators of torch
        least, unit = LEAST * step.tokens * linear.layers, "multiplications"
        yield at_least("linear layers multiply all tokens, forward", sum(forward), least, unit)
        least = LEAST * step.tokens * linear.passed * (1 if linear.frozen else 2)
        yield at_least("linear layers multiply all tokens, backward", sum(backward), least, unit)
        most = most_work(layout, step, scenario, linear, layers=layers, experts=experts)
        yield below("no rank multiplies more than its share", max(backward), most, unit)


def remainder_claim(step: Step, trained: int, *, copies: int = 0) -> tuple[str, bool, str]:
    """Returns the claim that updates have computed with masters that are parameters and remainders.

    trained: elements of all trained parameters. copies: elements of those that further tensor-parallel ranks hold whole
    and update as well. TransformerEngine's kernel gets remainders as integers.
    """
    updates = [tuple(update) for rank in step.ranks for update in rank.get("updated", ())]
    numbers = sum(count for *_, count in updates)
    due = trained + copies
    holds = step.skipped or (numbers >= due and all(update[:2] == (BF16.name, "int16") for update in updates))
    where = f"requested {due} numbers of {BF16.name} with int16, observed {updates} on all ranks"
    return "masters are parameters and their remainders", holds, where


@dataclass(frozen=True, kw_only=True)
class _Passes:
    """Counts the micro-batches that pass models at a step: trained, and ahead of a rollout's first update, of models
    that have as many layers. models: that run. ends_alone: whether the histories of a trained model end the passes
    ahead by themselves, because another model is trained before."""

    trained: int
    ahead: int
    models: int
    ends_alone: bool


def _passes(scenario: Scenario, number: int | None) -> _Passes:
    objective = scenario.objective
    trained = [role for role in objective.roles if role.trained]
    ahead: Sequence[Role] = ()
    if isinstance(objective, PolicyGradient) and number is not None and not number % objective.steps_per_rollout:
        ahead = objective.rollout_roles
    batches = getattr(objective, "mini_batches", 0)
    return _Passes(
        trained=len(trained) * scenario.accumulation,
        ahead=len(ahead) * batches * scenario.accumulation,
        models=len({*trained, *ahead}),
        ends_alone=any(role in ahead for role in trained[1:]),
    )


OPERANDS = ("input", "weight", "gradient")
# Formats of operands in TransformerEngine's recipes, and what has a scale of its own.
_TENSORS = {("input", "e4m3fn", "tensor"), ("weight", "e4m3fn", "tensor"), ("gradient", "e5m2", "tensor")}
CASTS: Mapping[str, set[tuple[str, str, str]]] = {
    "fp8tensor": _TENSORS,
    "fp8delayed": _TENSORS,
    "fp8block": {("input", "e4m3fn", "rows"), ("weight", "e4m3fn", "squares"), ("gradient", "e4m3fn", "rows")},
}


def _te_casts(
    recipe: str,
    ranks: Sequence[Mapping[str, Any]],
    *,
    kept: Fraction,
    frozen: bool,
    updates: Mapping[str, int],
    stages: int = 1,
    trained: Fraction | int = 1,
    adapted: int = 0,
    gathers: bool = False,
    moved: Mapping[str, Fraction] = MappingProxyType({}),
) -> Claims:
    """Yields the claims about the operands that TransformerEngine has cast on each rank, which no rounding hides.

    kept: the share of layers that multiply in float8. frozen: whether some weights have no gradients, and so no product
    for them. updates: those of histories that are due, by direction. stages: of the pipeline; those of other layers
    than the first and the last may have more products in float8. trained: the share of passes that have a backward
    pass. adapted: micro-batches, if all weights are frozen and have adapters; then the first layer's input may need no
    gradient. gathers: whether ranks gather what they have cast. moved: the number of histories that move, for each
    forward product, by direction. An input is an operand forward and for the gradient of the weight, a weight forward
    and for that of the input.
    """
    due, of_ranks = CASTS[recipe], [rank.get("float8_casts", ()) for rank in ranks]
    observed = [{(operand, *cast[:2]) for operand, *cast in casts} for casts in of_ranks]
    shown = ", ".join(sorted({" ".join(cast) for found in observed for cast in found ^ due}))
    uneven = stages > 1 and kept < 1  # a stage may have no other layer than the first or the last one
    holds = all(found == due or (uneven and not found) for found in observed) and due in observed
    yield "operands are cast as the recipe says", holds, f"missing or not in the recipe: {shown or 'none'}"
    operands = [{one: sum(cast[-1] for cast in casts if cast[0] == one) for one in OPERANDS} for casts in of_ranks]
    # Of each product two operands are counted, and the third kind is none of them.
    forward, of_input, of_weight = (
        [Fraction(sum(n.values()), 2) - n[third] for n in operands] for third in ("gradient", "input", "weight")
    )
    # Products of adapters are recomputed as well, and are not TransformerEngine's.
    again = [trained * rank.get("te", 0) if adapted and rank.get("again") else rank.get("again", 0) for rank in ranks]
    wanted = [kept * (rank.get("te", 0) + more) for rank, more in zip(ranks, again, strict=True)]
    where = f"requested {[*map(float, wanted)]} by rank, observed {[*map(float, forward)]}"
    holds = sum(forward) == sum(wanted) if uneven else forward == wanted
    yield "forward products of these layers are in float8", holds, where
    once = [kept * trained * rank.get("te", 0) for rank in ranks]
    where = f"requested {[*map(float, once)]} each, observed {[*map(float, of_input)]}, {[*map(float, of_weight)]}"
    if adapted:
        holds = all(0 <= due - found <= adapted for due, found in zip(once, of_input, strict=True))
        yield (
            "products for gradients of inputs are in float8, and frozen weights have none",
            not any(of_weight) and (holds or uneven),
            where,
        )
    else:
        holds = of_input == of_weight and (sum(of_input) == sum(once) if uneven else of_input == once)
        yield "products for gradients are in float8 as well", frozen or holds, where
    if gathers:
        yield _gathered_alike(ranks)
    other = sum(cast[-1] for casts in of_ranks for cast in casts if not cast[5])
    yield "backward products multiply by the numbers of forward ones", other == 0, f"observed {other} other operands"
    if recipe == "fp8delayed":
        yield from _delayed_scales(ranks, stages, updates)
        for name, share in moved.items():
            counts = [(share * rank.get("te", 0), rank.get("float8_moved", {}).get(name, 0)) for rank in ranks]
            spared = name == "backward" and adapted  # the first layer's input
            holds = all(0 <= due - found <= bool(spared) for due, found in counts)
            where = f"requested and observed {[(float(due), found) for due, found in counts]} by rank"
            yield f"histories of all operands are updated, {name}", holds, where
    else:
        by_power = recipe == "fp8block"
        powers = [{one: _of_powers(casts, one) for one in OPERANDS} for casts in of_ranks]
        shares = [share for of_rank in powers for share in of_rank.values() if share is not None]
        holds = all(share == 1 if by_power else share < LEAST for share in shares) and bool(shares)
        claim = f"scales are {'' if by_power else 'not '}rounded to powers of two"
        yield claim, holds, f"observed shares of powers of two by rank {powers}"
    own = sum(cast[-1] for casts in of_ranks for cast in casts if not cast[4])
    whose = "that updates gave, from magnitudes of casts" if recipe == "fp8delayed" else "of the operands themselves"
    where = " or magnitudes that histories lack" if recipe == "fp8delayed" else ""
    yield f"scales are those {whose}", own == 0, f"observed {own} operands with other scales{where}"


def _gathered_alike(ranks: Sequence[Mapping[str, Any]]) -> tuple[str, bool, str]:
    """Returns the claim that ranks cast the parts of an operand that they gather by one scale."""
    gathered = [{tuple(group): rest for group, *rest in rank.get("float8_gathered", ())} for rank in ranks]
    other = {
        group
        for own in gathered
        for group, scales in own.items()
        if any(member >= len(ranks) or gathered[member].get(group) != scales for member in group)
    }
    where = f"observed other scales in {len(other)} groups, and {sum(not own for own in gathered)} ranks without any"
    return "operands that ranks gather have one scale", all(gathered) and not other, where


def _delayed_scales(ranks: Sequence[Mapping[str, Any]], stages: int, updates: Mapping[str, int]) -> Claims:
    """Yields the claims about the histories of delayed scaling, from which each scale follows.

    Each of the pipeline's stages has its own layers, and so its own scales, by which its ranks are known.
    """
    alike: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for rank in ranks:
        alike[rank.get("float8_scales", "")].append(rank)
    holds = "" not in alike and [len(of_stage) * stages for of_stage in alike.values()] == [len(ranks)] * stages
    yield "ranks scale alike", holds, f"observed scales of {len(alike)} kinds, requested {stages}"
    ratios = [number(ratio) for rank in ranks for ratio in rank.get("float8_scale_ratios") or (math.nan,)]
    where = f"observed {min(ratios):.4g} to {max(ratios):.4g} of what histories prescribe"
    yield "scales follow from the histories", all(abs(ratio - 1) <= SCALE_ERROR for ratio in ratios), where
    counts = [{name: rank.get("float8_updates", {}).get(name, 0) for name in updates} for rank in ranks]
    holds = all(count == updates for count in counts)
    yield "histories are updated once a micro-batch", holds, f"requested {updates}, observed {counts} by rank"
    amaxes = [[rank.get("float8_amaxes", ()) for rank in of_stage] for of_stage in alike.values()]
    operands = [one for of_stage in amaxes for one in zip(*of_stage, strict=False)]  # what each rank has, and all have
    pairs = [[*zip(*of_ranks, strict=True)] for of_ranks in operands]
    wrong = sum({max(map(number, own))} != {*map(number, of_all)} for own, of_all in pairs)
    holds = all(len({*map(len, of_stage)}) == 1 and of_stage[0] for of_stage in amaxes) and not wrong
    where = f"observed {wrong} of {len(pairs)} that are not the largest of the ranks'"
    yield "histories hold the largest magnitudes of all ranks", holds, where


def _of_powers(casts: Sequence[Any], operand: str) -> float | None:
    """Returns the share of an operand's casts whose scales are all powers of two; None if all are of zeros."""
    counts = [(cast[3], cast[-1]) for cast in casts if cast[0] == operand and cast[3] is not None]
    return sum(count for powers, count in counts if powers) / sum(count for _, count in counts) if counts else None


def most_work(layout: Layout, step: Step, scenario: Scenario, linear: Linear, *, layers: int, experts: int) -> float:
    """Returns the most multiplications of a rank's backward pass, if its rows and its vocabulary are padded as much as
    libraries do. Where recomputed products are not recognised, as in a library's own autograd function, they cannot be
    distinguished from those for gradients."""
    multiple = BLOCK * max(1, linear.hidden)
    outside = -(-linear.outside // multiple) * multiple
    share = -(-layers // layout.pp) / layers / (1 if linear.uncut else layout.tp)
    tokens = step.padded(scenario.data.max_len, stages=layout.pp) / (layout.sp * layout.ulysses)
    seen = sum(step.work("recomputed")) >= LEAST * step.tokens * linear.layers
    again = linear.layers * share * (not seen) + experts if "ckpt" in layout.options else 0
    return SLACK * tokens * (2 * (linear.layers * share + experts + outside) + again)


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
    """Returns those pairs of activations and mask whose activations or mask are also in a pair of ``others``."""
    activations, masks = {pair[0] for pair in others}, {pair[1] for pair in others}
    return Counter({pair: n for pair, n in own.items() if pair[0] in activations or pair[1] in masks})


def other_weights(phase: Record, scenario: Scenario) -> Iterator[tuple[int, str]]:
    """Yields each step after the first evidence at which weights can be compared with what layers multiply by, and
    where they differ: the weights that were shown before the step are not among the operands, as the weights that were
    shown before the first evidence are. Weights that are not among these, as where ranks cut them, tell nothing."""
    known: list[set[str]] | None = None
    for ranks in [phase.footer.get("evidence", []), *phase.footer.get("later_evidence", ())]:
        number = ranks[0].get("step") if ranks else None
        if number is None or not all(rank.get("operands") for rank in ranks):
            continue
        shown = _shown_before(phase, number, scenario)
        found = [{name for name, sums in shown.items() if _is_among(sums, rank["operands"])} for rank in ranks]
        if known is None:
            known = found
        elif shown:
            other = sorted(
                {name for before, now in zip(known, found, strict=True) for name in (before - now) & shown.keys()}
            )
            yield number, f"observed other numbers than those of {', '.join(other[:3])}" if other else ""


def why_unknown(phase: Record, scenario: Scenario) -> str:
    """Says why ``other_weights`` yields no step. The steps of later evidence, and those after which weights are not
    read, are drawn in each run, so that a cell may have this claim in one run and not in the next."""
    later = [ranks[0]["step"] for ranks in phase.footer.get("later_evidence", ()) if ranks and "step" in ranks[0]]
    if not later:
        return "products were observed at the first step only"
    hidden = [step.step + 1 for step in phase.steps if is_unread("weight", step.line) and step.step + 1 in later]
    if hidden:
        return f"products were observed at step {hidden[0]}, and the weights before it were not read, as both are drawn"
    if not any(_shown_before(phase, step, scenario) for step in later):
        return "no weight is recorded whole"
    return "no weight that is recorded whole enters a product as it is"


def wrong_operands(phase: Record, scenario: Scenario, layers: int) -> Iterator[tuple[str, int, str]]:
    """Yields claims about which weights TransformerEngine's layers in float8 multiply in higher precision, with the
    step of the evidence and where one fails: the first and the last layer, with fp8ends, and all adapters.

    Weights are recognised by sum and norm, so they have to be whole, or the parts of tensor-parallel ranks together.
    """
    layout = phase.layout
    if "te" not in layout.options or not layout.float8:
        return
    for ranks in [phase.footer.get("evidence", []), *phase.footer.get("later_evidence", ())]:
        number = ranks[0].get("step") if ranks else None
        if number is None or not (shown := _shown_before(phase, number, scenario)):
            continue
        if "fp8ends" in layout.options:
            of_ranks = {tuple(one) for rank in ranks for one in rank.get("float8_left_out", ())}
            matched = {name: int(match[1]) for name in shown if (match := _CUT_BY_COLUMNS.search(name))}
            found = sorted({layer for name, layer in matched.items() if _is_made_of(shown[name], of_ranks, layout.tp)})
            where = "" if found == [0, layers - 1] else f"observed layers {found}"
            yield "the first and the last layer are left out of float8", number, where
        if scenario.lora:
            operands = [one for rank in ranks for one in rank.get("operands", ())]
            as_they_are: dict[str, list[bool]] = defaultdict(list)  # by adapter: A and B
            for name in filter(is_adapter, shown):
                as_they_are[name.rpartition(".lora_")[0]].append(_is_among(shown[name], operands))
            enough = all if layout.tp == 1 else any  # tensor-parallel ranks cut one of both
            cast = sorted(name for name, both in as_they_are.items() if not enough(both))
            where = f"observed other operands than those of {', '.join(cast[:3])}" if cast or not as_they_are else ""
            yield "adapters multiply as they are, and not in float8", number, where


# Weights that one product reads alone, of which tensor-parallel ranks hold equal parts.
_CUT_BY_COLUMNS = re.compile(r"layers\.(\d+)\.(?:self_attn\.o_proj|mlp\.down_proj)\.weight$")


def _is_made_of(sums: Sequence[Sums], operands: Collection[Sums], parts: int) -> bool:
    """Tells whether a tensor with one of ``sums`` is made of so many of the operands."""
    whole = [
        (dimensions, parts * elements, sum(one[2] for one in chosen), math.hypot(*(one[3] for one in chosen)))
        for (dimensions, elements), alike in _by_size(operands).items()
        for chosen in combinations(alike, parts)
    ]
    return _is_among(sums, whole)


def _by_size(operands: Collection[Sums]) -> dict[tuple[int, int], list[Sums]]:
    found: dict[tuple[int, int], list[Sums]] = defaultdict(list)
    for one in operands:
        found[one[:2]].append(one)
    return found


def _shown_before(phase: Record, step: int, scenario: Scenario) -> dict[str, list[Sums]]:
    """Returns the sums of each weight that was shown before a step: of its numbers, and of those in the dtype of
    products. Empty if the weights were not read."""
    entry = phase.loaded if step == phase.header["first_step"] else None
    entry = entry or next((one for one in phase.steps if one.step == step - 1), None)
    if entry is None:
        return {}
    found, keeps_remainders = {}, "remainders" in phase.layout.options
    with entry.open() as file:
        names = {*file.keys()}
        for name in names:
            is_weight = name.partition("/")[0].rpartition(".")[2] == "weight"
            if is_weight and not is_projected(name, names) and not _SOMETIMES.search(name):
                tensor = file.get_tensor(name)
                rounded = _away_from_zero(tensor) if keeps_remainders else tensor.to(scenario.tier.compute.dtype)
                casts = {one.dtype: one for one in (tensor, rounded)}
                found[name] = [sums_of(one.double()) for one in casts.values()]
    return found


def _away_from_zero(masters: torch.Tensor) -> torch.Tensor:
    """Rounds float32 to the nearest bf16 numbers, of two the one away from zero."""
    return ((masters.float().view(torch.int32) + 2**15 >> 16) << 16).view(torch.float32).bfloat16()


def sums_of(tensor: torch.Tensor) -> Sums:
    return tensor.ndim, tensor.numel(), float(tensor.sum()), float(tensor.norm())


def _is_among(sums: Sequence[Sums], operands: Sequence[Sums]) -> bool:
    return any(
        shape == of and abs(norm - own) <= SAME * norm and abs(total - other) <= SAME * norm * math.sqrt(shape[1])
        for *shape, total, norm in sums
        for *of, other, own in operands
    )


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
    hidden = scenario.tier.is_half or keeps_weights(layout, scenario)
    hidden |= "mfsdp" in options and layout.tp * layout.pp > 1  # ranks keep as much as a small model's whole weights
    yield "bytes of weights", is_cut and stage == 3 and hidden
    yield "share of each rank in attention", layout.tp * layout.sp * layout.ulysses > 1
    again = gather_keys_again(layout) | ({layout.tp} if shares_sequences else set())
    hidden = layout.hpz in {shards_of(layout), *again}
    yield "second copy of the weights", layout.hpz > 1 and hidden
    yield "which ranks are replicas", layout.rep > 1 and layout.rep == shards_of(layout)
    yield "overlap", "overlap" in options and not (layout.zero == 1 and layout.world_size == layout.data)
    yield "leaf", "leaf" in options and (layout.world_size > layout.data or not linear.passes_all(layers))
    yield "linear layers and attention of TransformerEngine", "te" in options
    hidden = not linear.keys or (layout.gathers and hides_keys(layout, stage))
    yield "exchange of keys and values", layout.sp * layout.ulysses > 1 and hidden
    yield "which rank has which rows", layout.data > 1 and not step.has_rows
    computed = layout.data == 1 or not step.has_rows or step.computed_rows(layout)
    yield "which rank computes which rows", not computed
    models = sum(role.trained for role in scenario.objective.roles)
    due = models * max(sum(any(targets for *_, targets in rows) for rows in parts) for parts in step.rows)
    yield "a backward pass for each micro-batch", max(rank.get("backwards", due) for rank in step.ranks) < due
    most = most_work(layout, step, scenario, linear, layers=layers, experts=experts)
    whole = 2 * step.tokens * (linear.layers + linear.outside)
    yield "share of each rank in the work", layout.world_size > 1 and whole <= most
