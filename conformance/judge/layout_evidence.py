"""Checks that a training step ran in the requested layout and precision, by the evidence of its first step.

The numbers of a cell do not change if an option has no effect or if another ZeRO stage runs, so numbers cannot detect
it. The evidence can (conformance.worker.evidence): collectives by kind, group size and pass, matrix products by dtype,
the width of activations, and the bytes of weights that are alive when gradients are ready. Each claim below is one
sentence, true or false.

In float64, ranks of ZeRO-1 and ZeRO-2 hold equally many bytes when gradients are ready: measured on DeepSpeed with two
ranks, weights and half of the gradients, 1.53 times the weights (ZeRO-0: 2.03, ZeRO-3 and FSDP2: 1.03). One difference
shows in every precision: ZeRO-2 never holds whole gradients, so it has to reduce the gradients of every micro-batch,
and ZeRO-1 reduces once.

What no claim decides is listed in the verdict as not proven (conformance.judge.work_evidence).
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.judge.exchange_evidence import IN_BUCKETS, exchange_claims, keeps_weights, part_of_weights
from conformance.judge.step_evidence import (
    Claims,
    Linear,
    Ranks,
    Step,
    anywhere,
    in_backward,
    in_forward,
    not_forward,
    shards_of,
)
from conformance.judge.tolerance import Measurement
from conformance.judge.work_evidence import (
    mask_claims,
    not_proven,
    other_weights,
    remainder_claim,
    why_unknown,
    work_claims,
    wrong_operands,
)
from conformance.numerics.sketch import whole_shapes
from conformance.records.step_tensors import Record
from conformance.results.trust import second_class
from conformance.spec.layout import Layout
from conformance.spec.objectives import PolicyGradient
from conformance.spec.observables import CONFIGURATION, SKIPPED
from conformance.spec.scenario import Scenario, is_adapter

# Ratio of matrix products in backward passes to those in forward passes: 2 (one for the input, one for the weight), up
# to 2.4 with attention that is written out; recomputing a layer adds nearly 1. A higher ratio reveals recomputation
# inside of a library's own autograd functions, where no graph is recorded. It fails where forward passes that count
# experts or evaluate a rollout come before the training pass; there a nested backward pass reveals recomputation.
RECOMPUTED = 2.6
# Least ratio of recomputed products of linear layers to those of forward passes, where recomputed ones are recognised.
# All layers of a dense model give 0.67 (Phi-3) and more, half of that where forward passes count experts before the
# training pass. Attention does not count: its number of products depends on the kernel, and ring attention computes
# them inside of its own autograd functions (with it, 32 honest cells of the full profile had 0.19 to 0.60).
AGAIN, AGAIN_ROUTED = 0.6, 0.4
# Least share of the products of linear layers in the requested half precision. Some routers compute in float32; with
# one expert per token and small models these are a seventh.
IN_HALF, IN_HALF_ROUTED = 0.95, 0.8
TOGETHER = "weights of a layer are gathered together"
SHOWN = "layers compute with the weights that are shown"
OF_A_LAYER = 4  # products of the linear layers of one layer, where q, k and v are fused, and gate and up
# Modules with weights outside of layers: embeddings of tokens and positions, the last norm, and the head.
AROUND = 4
_NORM = re.compile(r"norm\.weight$")  # of parameters that every tensor-parallel rank holds whole
Shapes = Mapping[str, tuple[int, ...]]
Truths = Iterator[tuple[str, bool]]  # a claim, and whether it holds
PADDING = 128  # Megatron pads the vocabulary to a multiple of this times tp


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the models of a cell. vocabulary: rows of the policy's embedding. adapters: its matrices. columns: of
    all gradients that have a row for each token of the vocabulary. frozen: matrices of linear layers of the policy that
    are not trained. layers: of the policy. sums: least number of sums over tensor-parallel ranks in a forward pass
    through them. weights, gradients: elements, of all models. norms: elements of the gradients of norms. experts:
    elements of the gradients of experts, by layer. linear: of all models that are trained."""

    vocabulary: int
    adapters: int
    columns: int
    frozen: int
    layers: int
    sums: int
    weights: int
    gradients: int
    norms: int
    experts: tuple[int, ...]
    linear: Linear


def sizes_of(oracle: Record) -> Sizes:
    """Reads the sizes from the weights that the oracle loaded and from its first step."""
    loaded = whole_shapes(oracle.loaded.shapes())
    first = whole_shapes(oracle.steps[0].shapes()) if oracle.steps else {}
    policy = {name.removeprefix("weight/"): shape for name, shape in loaded.items() if name.startswith("weight/")}
    vocabulary = next((shape[0] for name, shape in policy.items() if name.endswith("embed_tokens.weight")), 0)
    matrices = [shape for name, shape in first.items() if _is_gradient(name) and len(shape) == 2]
    layers = 1 + max((int(number) for name in policy for number in _LAYER.findall(name)), default=0)
    experts = Counter[str]()
    for name, shape in first.items():
        if _is_gradient(name) and ".experts." in name:
            experts[name.partition(".experts.")[0]] += math.prod(shape)
    return Sizes(
        vocabulary=vocabulary,
        adapters=sum(map(is_adapter, policy)),
        columns=sum(columns for rows, columns in matrices if rows == vocabulary),
        frozen=sum(
            len(shape) == 2 and f"gradient/{name}" not in first and not name.endswith("embed_tokens.weight")
            for name, shape in policy.items()
        ),
        layers=layers,
        sums=layers if second_class(oracle.header) else max(layers, _sums(policy)),
        weights=sum(map(math.prod, loaded.values())),
        gradients=sum(math.prod(shape) for name, shape in first.items() if _is_gradient(name)),
        norms=sum(math.prod(shape) for name, shape in first.items() if _is_gradient(name) and _NORM.search(name)),
        experts=tuple(experts.values()),
        linear=_linear(policy, first, layers),
    )


def _linear(policy: Shapes, first: Shapes, layers: int) -> Linear:
    """``first``: the tensors of the first step. Frozen matrices of the policy are multiplied as well."""
    trained = {name: shape for name, shape in first.items() if _is_gradient(name)}
    frozen = {name: shape for name, shape in policy.items() if f"gradient/{name}" not in trained}
    is_lora = any(len(shape) == 2 and _LAYER.search(name) for name, shape in frozen.items())
    used = [*trained.items(), *(frozen.items() if is_lora else ())]
    matrices = {name: shape for name, shape in used if len(shape) == 2 and ".experts." not in name}
    inner = {name for name in matrices if _LAYER.search(name)}
    embedding = next((shape for name, shape in policy.items() if name.endswith("embed_tokens.weight")), (0, 0))
    in_float8 = sum(math.prod(matrices[name]) for name in inner if not any(size % 16 for size in matrices[name]))
    modules = sum(name.endswith("eh_proj.weight") for name in policy)  # for multi-token prediction; all share the head
    return Linear(
        layers=sum(math.prod(matrices[name]) for name in inner),
        passed=_passed({name: matrices[name] for name in inner}, trained),
        outside=sum(math.prod(shape) for name, shape in matrices.items() if name not in inner)
        + modules * math.prod(embedding),
        frozen=is_lora,
        uncut=_sums(policy) < 2 * layers,
        keys=sum(shape[0] for name, shape in policy.items() if name.endswith(("k_proj.weight", "v_proj.weight"))),
        hidden=embedding[1],
        float8=in_float8,
        beside=sum(math.prod(shape) for name, shape in trained.items() if _LAYER.search(name)) - in_float8,
    )


def _passed(matrices: Shapes, trained: Collection[str]) -> int:
    """Counts the elements of matrices in layers that gradients pass: the trained ones, and all behind the first place
    in the model where something is trained."""
    first = min(map(_place, trained), default=(math.inf, 0))
    return sum(math.prod(shape) for name, shape in matrices.items() if name in trained or _place(name) > first)


def _place(name: str) -> tuple[float, int]:
    """Returns the layer of a parameter (infinity behind all), and the part of the layer, in the order of the model."""
    if layer := _LAYER.search(name):
        return int(layer[1]), 0 if "input_layernorm" in name else 1 if "attn" in name else 2
    return (-1, 0) if _BEFORE.search(name) else (math.inf, 0)


_BEFORE = re.compile("embed|visual|vision|projector|wte|wpe")
_LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")


def _sums(policy: Collection[str]) -> int:
    """Counts attentions and MLPs that every plan cuts: latent attention and experts with biases are not cut."""
    whole = any("kv_a_proj" in name for name in policy)
    attention = 0 if whole else sum(name.endswith("self_attn.o_proj.weight") for name in policy)
    biased = any(name.endswith("experts.down_proj_bias") for name in policy)
    ends = ("mlp.down_proj.weight",) if biased else ("mlp.down_proj.weight", "mlp.experts.down_proj")
    return attention + sum(name.endswith(ends) for name in policy)


def _is_gradient(name: str) -> bool:
    return name.partition("/")[0].endswith("gradient")


def configurations(phases: Sequence[Record], scenario: Scenario, sizes: Sizes) -> Iterator[Measurement]:
    """Measures every claim of every phase, at the step before its first one and at the step that was drawn: 0 if the
    claim holds, else infinite. Also measures each setting of an exported folder that differs from the model's."""
    for phase in phases:
        for key in phase.footer.get("changed_settings", []):
            yield _measured(f"exported {key}", phase.header["first_step"] + phase.footer["steps"] - 1, holds=False)
        layout, stage = phase.layout, _stage_of(phase)
        for step, where in other_weights(phase, scenario):
            yield _measured(f"{layout}: {SHOWN}", step, holds=not where, where=where)
        for claim, step, where in wrong_operands(phase, scenario, sizes.layers):
            yield _measured(f"{layout}: {claim}", step, holds=not where, where=where)
        steps = [phase.footer.get("evidence", []), *phase.footer.get("later_evidence", ())]
        for n, ranks in enumerate(ranks for ranks in steps if ranks):
            for claim, holds, where in _claims_of(phase, ranks, scenario, sizes, stage=stage, first=not n):
                step = ranks[0]["step"] if n else phase.header["first_step"] - 1
                yield _measured(f"{layout}: {claim}", step, holds=holds, where=where)


def _measured(text: str, step: int, *, holds: bool, where: str = "") -> Measurement:
    error = 0.0 if holds else math.inf
    return Measurement(stage=CONFIGURATION.stage, tensor=text, step=step, error=error, where=where, fixed=0.0)


def _claims_of(
    phase: Record, ranks: Sequence[dict[str, Any]], scenario: Scenario, sizes: Sizes, *, stage: int | None, first: bool
) -> Claims:
    """``first``: this is the first evidence of the phase."""
    step = _step_of(phase, ranks)
    for claim, holds in _claims(phase.layout, Ranks(ranks), scenario, sizes, stage=stage, step=step):
        # From the second step on, ZeRO-3 gathers ahead, many modules at a time.
        if claim == TOGETHER and not first:
            continue
        yield claim, holds, ""
    if step:
        for claim, holds, where in _work(phase.layout, step, scenario, sizes, stage=stage):
            # DDP has one bucket in its first step, before it knows in which order gradients become ready.
            if not (claim == IN_BUCKETS and first and "ddp" in phase.layout.options):
                yield claim, holds, where


def _stage_of(phase: Record) -> int | None:
    """Returns the ZeRO stage of a phase; None if it is not known."""
    return phase.layout.stage(phase.header["backend"]["default_zero"])


def _step_of(phase: Record, ranks: Sequence[dict[str, Any]]) -> Step | None:
    """Returns the step of this evidence; None for older records, which do not say which rows each rank was given."""
    batches = {batch["step"]: batch.get("rows", ()) for batch in phase.footer.get("batches", ())}
    number = ranks[0].get("step")
    values: dict[str, float] = next((s.line.get("values", {}) for s in phase.steps if s.step == number), {})
    skipped = any(value for key, value in values.items() if key.rpartition(".")[2] == SKIPPED)
    return Step(ranks, rows, skipped=skipped) if (rows := batches.get(number)) else None


def unproven(phases: Sequence[Record], scenario: Scenario, sizes: Sizes) -> list[str]:
    """Lists what layouts and phases ask for and no claim decides, and what a backend replaces in its library."""
    listed: dict[str, None] = {}
    for phase in phases:
        resolved = phase.header.get("resolved", {})
        models = [resolved, *(own for own in resolved.values() if isinstance(own, dict))]  # of one model or of several
        listed |= dict.fromkeys(f"the library's own {part}" for one in models for part in one.get("replaced", ()))
        if phase.header["loads"] == "checkpoint" and not phase.header.get("shows_generators", True):
            listed["random generators of the library (library_generators)"] = None
        if phase.header["first_step"] and not phase.control:
            listed["nothing loaded but what was saved"] = None
        ranks = phase.footer.get("evidence", [])
        if any(rank.get("operands") for rank in ranks) and not any(True for _ in other_weights(phase, scenario)):
            listed[f"that {SHOWN} ({why_unknown(phase, scenario)})"] = None
        if ranks and (step := _step_of(phase, ranks)):
            stage, trained = _stage_of(phase), _trained(phase.layout, scenario, sizes)
            work: dict[str, int] = {"layers": sizes.layers, "experts": sum(sizes.experts)}
            found = not_proven(phase.layout, step, scenario, sizes.linear, stage=stage, trained=trained, **work)
            listed |= dict.fromkeys(name for name, is_open in found if is_open)
    return [*listed]


def _trained(layout: Layout, scenario: Scenario, sizes: Sizes) -> float:
    """Returns the gradients of one model on one rank, in elements."""
    models = sum(role.trained for role in scenario.objective.roles)
    return (sizes.gradients - sum(sizes.experts) * (1 - 1 / layout.ep)) / models / layout.tp / layout.pp


def _work(layout: Layout, step: Step, scenario: Scenario, sizes: Sizes, *, stage: int | None) -> Claims:
    experts = sum(sizes.experts)
    yield from work_claims(layout, step, scenario, sizes.linear, layers=sizes.layers, experts=experts)
    if "dropout" in layout.options:
        yield from mask_claims(layout, step)
    if "remainders" in layout.options:
        yield remainder_claim(step, sizes.gradients, copies=(layout.tp - 1) * sizes.norms)
    yield from exchange_claims(
        layout,
        step,
        sizes.linear,
        stage=stage,
        layers=sizes.layers,
        trained=_trained(layout, scenario, sizes),
        sums=sizes.sums / layout.pp,
        accumulation=scenario.accumulation,
        number_bytes=scenario.tier.compute.bytes,
    )


def _outside(where: str) -> bool:
    return not in_backward(where)


def _only(wanted: str) -> Callable[[str], bool]:
    return lambda where: where == wanted


def _claims(
    layout: Layout, ranks: Ranks, scenario: Scenario, sizes: Sizes, *, stage: int | None, step: Step | None
) -> Truths:
    forward = ranks.products("forward")
    if forward:
        dtype = scenario.tier.compute.name
        in_half = IN_HALF_ROUTED if sizes.experts else IN_HALF
        in_dtype = ranks.linear(dtype)
        if layout.float8 and in_dtype and not (scenario.tier.is_exact or ranks.total("float8")):
            in_dtype += ranks.linear("float32")  # where a GPU has no kernel, float32 stands for float8
        yield f"products in {dtype}", in_dtype >= in_half * ranks.linear()
        left_out = sizes.frozen * scenario.accumulation * layout.world_size // layout.pp  # products for their gradients
        if "compile" in layout.options:  # of every model, all but the product of its head
            models = sum(role.trained for role in scenario.objective.roles)
            heads = models * scenario.accumulation * layout.world_size // layout.pp
            yield "layers are compiled", ranks.linear() - ranks.total("compiled") <= heads
        else:
            yield "layers run as they are written", ranks.total("compiled") == 0
        if "te" in layout.options:  # all but the product of the head
            not_te = ranks.linear() - ranks.total("te")
            beside = OF_A_LAYER * sizes.layers * not_te
            yield "layers are TransformerEngine's", beside <= ranks.total("te") * (1 + sizes.adapters)
        else:
            yield "layers are not TransformerEngine's", ranks.total("te") == 0
        again = ranks.products("recomputed")
        more = ranks.products("backward") + left_out > RECOMPUTED * forward
        if "ckpt" in layout.options:
            every = _all_are_recomputed(layout, ranks, scenario, sizes, step)
            yield "activations of all layers are recomputed", every if again or ranks.total("nested") else more
            if "reentrant" in layout.options:
                yield "recomputed layers have backward passes of their own", ranks.total("nested") > 0
        else:
            yield "activations are kept", not (again or ranks.total("nested") or more)
    for of_part in (_of_data_ranks, _of_shares, _of_model_ranks, _of_experts):
        yield from of_part(layout, ranks, scenario, sizes, stage)


def _all_are_recomputed(layout: Layout, ranks: Ranks, scenario: Scenario, sizes: Sizes, step: Step | None) -> bool:
    share = (AGAIN_ROUTED if sizes.experts else AGAIN) * sizes.linear.passed_part
    passes = sizes.layers * scenario.accumulation * layout.world_size // layout.pp
    if ranks.recomputed() > share or ranks.total("nested") >= share * passes:
        return True
    # A step that begins a rollout has forward passes that are not trained. So what is recomputed is held against the
    # tokens that are.
    objective = scenario.objective
    begins = isinstance(objective, PolicyGradient) and step and not step.number % objective.steps_per_rollout
    return bool(begins and step and sum(step.work("recomputed")) >= share * step.tokens * sizes.linear.layers)


def _of_data_ranks(layout: Layout, ranks: Ranks, scenario: Scenario, sizes: Sizes, stage: int | None) -> Truths:
    """Checks ZeRO stages, replicas, and when gradients are reduced."""
    data = layout.data * layout.sp * layout.ulysses
    alone = data == layout.data and layout.tp == layout.pp == 1  # every collective is one of data ranks
    shards = data // layout.rep
    if stage == 3 and shards > 1:
        # Megatron-FSDP gathers ahead: after an update, for the first forward pass of the next step.
        is_due = _outside if "mfsdp" in layout.options else in_forward
        gathered = ranks.most(("all_gather", "broadcast"), shards, is_due)
        yield "weights are gathered for the forward pass, as ZeRO-3 has it", gathered > 0
    if "leaf" in layout.options and shards > 1 and alone and sizes.linear.passes_all(sizes.layers):
        # The first backward pass only: forward passes may also evaluate a rollout or count the tokens of experts, and
        # in later passes ZeRO-3 knows the order of modules, and gathers again what it gathered too far ahead.
        size = layout.hpz if layout.hpz > 1 else shards
        gathered = ranks.most(("all_gather", "broadcast"), size, _only("backward 0"))
        yield TOGETHER, sizes.layers <= gathered <= sizes.layers + AROUND
    if data > 1 and alone:
        summing = scenario.tier.summing
        if summing == scenario.tier.compute and scenario.tier.is_half:  # other sums show in their digits
            kinds = ("all_reduce", "reduce_scatter", "reduce", "all_to_all")
            reduced = ranks.most(kinds, None, not_forward, dtype=summing.name)
            yield f"gradients are reduced in {summing.name}", reduced > 0
    if "pertoken" in layout.options and data > 1:
        counts = ranks.most(("all_reduce",), data, _only("later"), dtype="int32")
        yield "the library sums up the tokens of all ranks", counts > 0
    if "lastsync" in layout.options:
        numbers = sorted(int(where.split()[1]) for where in ranks.passes() if where.startswith("backward"))
        reductions = ("all_reduce" if "ddp" in layout.options else "reduce_scatter",)
        *early, last = [ranks.most(reductions, data, _only(f"backward {n}")) for n in numbers] or [0]
        # If equally many ranks cut activations along the sequence, every backward pass has such collectives as well.
        of_layers = "seqpar" in layout.options and layout.tp == data
        text = "gradients are reduced after the last micro-batch only"
        yield text, all(count < last if of_layers else count == 0 for count in early)
    if "overlap" in layout.options and stage == 1 and alone:
        gathered = ranks.most(("all_gather",), data, in_forward)
        yield "updated weights are gathered in the forward pass", gathered > 0


def _of_shares(layout: Layout, ranks: Ranks, scenario: Scenario, sizes: Sizes, stage: int | None) -> Truths:
    """Checks which share of the weights each rank holds, and whether whole gradients could be accumulated."""
    shards = shards_of(layout)
    model = layout.tp * layout.pp
    width = None if scenario.tier.is_half else scenario.tier.master.bytes  # in half precision, weights have two widths
    if stage == 3 and shards > 1 and width and not keeps_weights(layout, scenario):
        # Ranks with sharded weights hold a share of them, and small buffers such as position tables; so the bound is
        # halfway to whole weights. Tensor-parallel ranks hold some weights whole, so there the bound is the amount
        # that pure tensor parallelism would hold.
        share = part_of_weights(layout)
        most = sizes.weights * width * ((1 + share) / 2 if model == 1 else 1 / model)
        kept = 0.0  # beside shares
        if "mfsdp" in layout.options:
            # It keeps what lies outside of layers gathered, from 0.18 on also when gradients are ready; with padding.
            padding = (_padded(sizes.vocabulary, layout.tp) - sizes.vocabulary) * sizes.columns
            kept = (sizes.linear.outside + 2 * padding) * width
        if model == 1:
            most += kept * (1 + share) / 2
        held = ranks.held_weights()
        # Of a small model, tensor-parallel ranks of Megatron-FSDP keep as much as whole weights would be.
        if held and (model == 1 or not kept or kept + sizes.weights * width * share < sizes.weights * width):
            yield "no rank holds whole weights, as ZeRO-3 has it", held < most


def _of_experts(layout: Layout, ranks: Ranks, scenario: Scenario, sizes: Sizes, stage: int | None) -> Truths:
    """Checks expert parallelism: tokens travel, and experts' gradients are reduced over fewer ranks than the rest."""
    if layout.ep == 1:
        return
    for text, where in (("tokens go to the ranks of their experts", _outside), ("gradients come back", in_backward)):
        yield text, ranks.most(("all_to_all",), layout.ep, where) > 0
    shards = shards_of(layout)
    # ZeRO-0 and ZeRO-1 reduce once, others the gradients of every micro-batch.
    steps = 1 if "lastsync" in layout.options or stage in (0, 1) else scenario.accumulation
    # Other collectives in groups of the same size would be counted as reductions of gradients.
    if shards not in (layout.tp, layout.rep, layout.pp) and sizes.experts:
        # A library that pads the vocabulary also reduces the padding.
        padded = _padded(sizes.vocabulary, layout.tp)
        is_padded = ranks.is_wide(padded) or ranks.is_wide(padded // layout.tp)
        padding = (padded - sizes.vocabulary) * sizes.columns if is_padded else 0
        most = steps * (sizes.gradients - sum(sizes.experts) + min(sizes.experts) / 2 + padding)
        yield "gradients of experts are not reduced over all data ranks", ranks.reduced(shards) < most
    same = shards // layout.ep
    if same not in (1, layout.tp, layout.ep, layout.rep):
        yield "gradients of experts are reduced over the ranks that hold them", ranks.reduced(same) > 0


def _padded(vocabulary: int, tp: int) -> int:
    return -(-vocabulary // (PADDING * tp)) * PADDING * tp


def _of_model_ranks(layout: Layout, ranks: Ranks, scenario: Scenario, sizes: Sizes, _: int | None) -> Truths:
    """Checks tensor, sequence, pipeline and context parallelism."""
    vocabulary = sizes.vocabulary
    if layout.tp > 1:
        summed = ranks.most(("all_reduce", "reduce_scatter"), layout.tp, _outside)
        every = sizes.sums / layout.pp * scenario.accumulation
        yield "all layers are summed over tensor-parallel ranks", summed >= every
        if "losspar" in layout.options:
            padded = _padded(vocabulary, layout.tp)
            # Attention scores are as wide as the row is long, which may equal the size of the vocabulary.
            wide = [width for width in (vocabulary, padded) if ranks.is_wide(width) and not ranks.is_long(width)]
            yield "no rank holds logits of the whole vocabulary", not wide
    if "varlen" in layout.options:
        yield "pipeline stages send lengths to each other", ranks.most(("send",), None, anywhere, dtype="int64") > 0
    if layout.vpp > 1:
        sends = ranks.most(("send",), None, anywhere)
        yield "pipeline stages are interleaved", sends > 2 * scenario.accumulation
