"""What each rank computes and exchanges in a step, against the share that its layout implies."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from evidence_ranks import (
    AGAIN,
    AMONG,
    AS_NUMBERS,
    IN_FLOAT8,
    LENGTH,
    LINEAR,
    MODEL,
    OPTIMIZER,
    OTHERS,
    PASSES,
    ROWS,
    TRAINED,
    Ranks,
    changes_when_read,
    gathers,
    gathers_bytes,
    gathers_in_passes,
    gathers_metrics,
    gathers_over_all,
    gathers_over_all_again,
    gathers_over_neighbors,
    gathers_weights,
    gives_all_rows,
    gives_half_of_its_rows,
    honest,
    keeps,
    looks_up,
    moves_gathers,
    moves_little,
    multiplies_in_float8,
    recomputes,
    reduces,
    reduces_once,
    rows_of,
    says_when,
    sends,
    works,
    wrong,
)

from conformance.judge import step_evidence
from conformance.judge.exchange_evidence import exchange_claims
from conformance.judge.layout_evidence import _claims, _passed, unproven
from conformance.judge.step_evidence import Step
from conformance.judge.token_evidence import NUMBERS
from conformance.judge.work_evidence import mask_claims, not_proven, work_claims
from conformance.records.record_format import LOOKUPS_KEPT
from conformance.spec.layout import Layout
from conformance.spec.scenario import parse_scenario
from conformance.worker.evidence import BYTES, Watch
from conformance.worker.operators import Collective, product_error


@pytest.mark.parametrize(
    ("trained", "passed"),
    [
        (["embed_tokens.weight"], 100 + 10 + 1 + 200 + 20 + 2),  # as all of it
        (["layers.0.input_layernorm.weight"], 100 + 10 + 1 + 200 + 20 + 2),
        (["layers.0.self_attn.q_proj.lora_B.weight"], 1 + 10 + 200 + 20 + 2),
        (["layers.0.mlp.up_proj.weight", "lm_head.weight"], 10 + 200 + 20 + 2),
        (["layers.1.self_attn.q_norm.weight"], 20),
        (["layers.1.post_attention_layernorm.weight"], 0),
        (["norm.weight", "lm_head.weight"], 0),
    ],
)
def test_gradients_pass_what_is_behind_the_first_trained_parameter(trained: list[str], passed: int) -> None:
    shapes = {
        "layers.0.self_attn.q_proj.weight": (10, 10),
        "layers.0.mlp.up_proj.weight": (2, 5),
        "layers.0.self_attn.q_proj.lora_B.weight": (1, 1),
        "layers.1.self_attn.q_proj.weight": (10, 20),
        "layers.1.mlp.up_proj.weight": (4, 5),
        "layers.1.self_attn.q_proj.lora_B.weight": (1, 2),
    }
    ids = {name: f"gradient/model.{name}" if name in trained else f"model.{name}" for name in (*shapes, *trained)}
    assert _passed({ids[name]: shape for name, shape in shapes.items()}, [ids[name] for name in trained]) == passed


@pytest.mark.parametrize(
    ("layout", "change", "claim"),
    [
        ("dp2.zero2.buckets", reduces("later"), "gradients are reduced in small buckets"),
        ("dp2.zero2.buckets", reduces("later", pieces=8), ""),
        ("dp2.zero2.manual", keeps, "the caller says which micro-batches come before the last"),
        ("dp2.zero2.manual", says_when, ""),
        (
            "dp2.rep2.manual",
            reduces("backward 0"),
            "gradients are reduced over replicas after the last micro-batch",
        ),
        ("dp2.rep2.manual", reduces("backward 1"), ""),
        ("dp2.zero1", keeps, ""),
        ("dp2.tp2.seqpar.zero2", keeps, ""),
        ("dp2.sp2.zero1", keeps, ""),
        ("ulysses2.zero2", keeps, ""),
        ("dp2.zero1", gives_all_rows, "each rank gives the rows of its micro-batches and no others"),
        ("dp2.rep2", changes_when_read, "weights are the same before and after they are read"),
        ("sp2.zero1", gives_half_of_its_rows, "each rank gives the rows of its micro-batches and no others"),
        ("dp2.zero1", works("forward", 0.1), "linear layers multiply all tokens, forward"),
        ("dp2.zero1", works("forward", 0), "linear layers multiply all tokens, forward"),
        ("dp2.zero1.te", works("forward", 0), ""),
        ("dp2.zero1", works("backward", 0.1), "linear layers multiply all tokens, backward"),
        ("dp2.tp2.zero1", works("backward", 2), "no rank multiplies more than its share"),
        ("dp2.zero1.ckpt", works("backward", 1.5), ""),
        ("dp2.zero1.ckpt", recomputes(1), ""),
        ("dp2.zero1.ckpt", recomputes(1.5), "no rank multiplies more than its share"),
        ("dp2.zero1.ckpt", works("backward", 2.5), "no rank multiplies more than its share"),
        ("dp2.zero1", moves_little("all_gather"), "updated weights are gathered, as ZeRO-1 has it"),
        ("dp2.tp2.zero1", moves_little("all_gather"), "updated weights are gathered, as ZeRO-1 has it"),
        ("sp2.zero1", moves_little("all_gather", "update"), "updated weights are gathered, as ZeRO-1 has it"),
        ("dp2.tp2.zero1", gathers_weights, "weights are whole in the forward pass, as ZeRO-1 has it"),
        ("dp2.zero1", gathers_metrics, ""),
        ("ulysses2.zero2", gathers(TRAINED // 2 + 3 * LENGTH), ""),  # three numbers of each token beside half of this
        ("ulysses2.zero2", gathers_weights, "weights are whole in the forward pass, as ZeRO-2 has it"),
        ("sp2.torchcp.zero1", gathers_weights, ""),  # keys and values of long rows
        ("dp2.zero3", keeps, ""),
        ("dp4.tp2.zero3", keeps, ""),
        ("dp4.tp2.zero3", moves_little("all_gather", "backward"), AGAIN),
        ("dp4.hpz2.zero3", keeps, ""),
        ("dp4.hpz2.zero3", moves_little("all_gather", "backward"), AMONG),
        ("dp4.hpz2.zero3", gathers_over_all, AMONG),
        ("dp4.hpz2.zero3", gathers_over_all_again(10), ""),  # numbers of a step
        ("dp4.hpz2.zero3", gathers_over_all_again(LINEAR.layers), OTHERS),
        ("dp2.hpz2.zero3", moves_little("all_gather", "backward"), AGAIN),
        ("dp4.hpz2.tp2.zero3", keeps, ""),
        ("dp4.hpz2.tp2.zero3", gathers_over_neighbors, AMONG),
        ("dp2.hpz2.sp2.zero3", keeps, ""),
        ("sp2.ring.zero3", moves_little("all_gather", "backward"), AGAIN),
        ("dp2.zero3", gathers_bytes(LINEAR.layers, "forward"), AGAIN),
        ("dp2.zero1", gathers_bytes(TRAINED, "forward", "later"), ""),  # no weights
        ("dp2.zero3.fp8tensor.fp8gather", keeps, IN_FLOAT8),
        ("dp2.zero3.fp8tensor.fp8gather", gathers_bytes(1, "forward"), IN_FLOAT8),
        ("dp2.zero3.fp8tensor.fp8gather", gathers_bytes(LINEAR.layers, "later"), IN_FLOAT8),
        ("dp2.zero3.fp8tensor.fp8gather", gathers_bytes(LINEAR.layers, "forward"), ""),
        ("dp2.zero3.fp8tensor.fp8gather", gathers_bytes(8 * LINEAR.layers, "forward"), f"{IN_FLOAT8}, one byte each"),
        ("dp2.zero3.fp8tensor.fp8gather", gathers_bytes(LINEAR.layers, "forward", numbers=5000), AS_NUMBERS),
        ("dp2.tp2.zero3.fp8tensor.fp8gather", gathers_bytes(LINEAR.layers // 2, "forward"), ""),
        ("dp2.zero3.fp8tensor.fp8gather.fp8ends", gathers_bytes(LINEAR.layers // 4, "forward"), ""),
        ("dp2.zero3.fp8tensor.fp8gather.fp8ends", gathers_bytes(LINEAR.layers // 5, "forward"), IN_FLOAT8),
        ("dp2.ddp", moves_gathers(), ""),
        ("dp2.ddp", moves_gathers("update"), "all ranks update all weights, as ZeRO-0 has it"),
        ("dp2.ddp", moves_gathers(reduced="later"), "gradients are all-reduced in the backward pass, as DDP has it"),
        ("dp2.zero2.fsdp1", moves_gathers("forward"), ""),
        ("dp2.zero2.fsdp1", moves_gathers(), "weights are gathered for the forward pass, as SHARD_GRAD_OP has it"),
        (
            "dp2.zero2.fsdp1",
            moves_gathers("forward", "backward 0"),
            "weights are not gathered again for the backward pass, as SHARD_GRAD_OP has it",
        ),
        ("dp2.zero1.mfsdp", moves_gathers("forward", "update"), ""),
        (
            "dp2.zero2.mfsdp",
            moves_gathers("forward", "later", "update"),
            "weights are gathered at most once before the update, as ZeRO-2 has it",
        ),
        ("sp2.ring.zero1.mfsdp", looks_up(5, 5, pieces=2 * NUMBERS), ""),  # log-probs of both micro-batches
        ("dp2.zero3.mfsdp", gathers_in_passes(forward=1, backward=2, update=1), ""),  # the first is gathered before
        ("dp2.zero3.mfsdp", gathers_in_passes(forward=2, backward=0, update=1), PASSES),  # kept for backward passes
        ("sp2.zero3.mfsdp", gathers_in_passes(forward=1, backward=0, update=1), ""),  # beside keys and values
        ("sp2.zero3.mfsdp", moves_little("all_gather", "forward"), ""),  # weights that are kept; not proven
        ("sp2.zero1.mfsdp", moves_little("all_gather", "forward"), "keys and values are gathered"),
        ("dp2.rep2.sp2.ring.zero3", keeps, ""),
        ("dp2.rep2.sp2.ring.zero3", moves_little("all_gather", "backward"), AGAIN),
        ("dp2.rep2.sp2.zero3", moves_little("all_gather", "backward"), ""),  # keys and values may be gathered again
        ("dp2.tp2.zero0", keeps, "all ranks update all weights, as ZeRO-0 has it"),
        ("dp2.tp2.zero2", reduces_once, "gradients of every micro-batch are reduced, as ZeRO-2 has it"),
        ("dp2.tp2.zero1", moves_little("all_reduce"), "gradients are reduced over ranks with other rows"),
        ("tp2.seqpar", moves_little("reduce_scatter"), "activations are cut along the sequence"),
        ("dp2.sp2.zero1", moves_little("all_gather", "forward"), "keys and values are gathered"),
        ("sp2.zero1", sends, "keys and values go around no ring"),
        ("sp2.ring", moves_little("send"), "keys and values are passed around a ring"),
        ("ulysses2.zero2", moves_little("all_to_all"), "heads are exchanged for parts of the sequence, backward"),
    ],
)
def test_each_rank_does_its_share(layout: str, change: Callable[[Ranks], None], claim: str) -> None:
    found = wrong(layout, change)
    assert claim in found if claim else not found


@pytest.mark.parametrize(
    ("layout", "missed", "listed"),
    [
        ("dp2.tp2.zero3.seqpar", AGAIN, "weights that are gathered again"),
        ("dp2.tp2.zero1.seqpar", "weights are whole in the forward pass, as ZeRO-1 has it", "whole weights"),
    ],
)
@pytest.mark.parametrize("shown", [True, False])
def test_activations_are_told_from_weights_by_rows(layout: str, missed: str, listed: str, shown: bool) -> None:
    """``missed``: the claim about weights, which they break and activations of tensor-parallel ranks would hide."""

    def change(ranks: Ranks) -> None:
        moves_little("all_gather", "backward")(ranks)
        gathers_weights(ranks)
        for number, rank in enumerate(ranks):
            rank["moved"].append(["all_gather", [number // 2 * 2, number // 2 * 2 + 1], "backward 0", 4, 10 * TRAINED])
            rank["rows"] = rank["rows"] if shown else []

    assert wrong(layout, change) == ({missed} if shown else set())
    of, scenario = Layout.parse(layout), parse_scenario({"name": "x", "model": "m", "precision": "exact"} | OPTIMIZER)
    change(ranks := honest(of))
    options: dict[str, Any] = {"stage": of.zero, "layers": 2, "experts": 0, "trained": TRAINED}
    found = not_proven(of, Step(ranks, rows_of(of)), scenario, LINEAR, **options)
    assert any(name.startswith(listed) for name, is_open in found if is_open) is not shown


def test_gathered_bytes_are_a_kind_of_their_own() -> None:
    watch = Watch()
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.int64):
        watch._collective(Collective("all_gather", (0, 1), dtype, 8))
    moved = [[kind, elements] for kind, *_, elements in watch.to_json()["moved"]]
    assert moved == [["all_gather", 8], [BYTES, 16]]


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("bias", [None, torch.linspace(-9.0, 9.0, 48).bfloat16()])
def test_a_product_in_float8_is_that_of_its_operands(by_row: bool, bias: torch.Tensor | None) -> None:
    draw = partial(torch.rand, generator=torch.Generator().manual_seed(0))
    a, b = (draw(rows, 64).to(torch.float8_e4m3fn) for rows in (300, 48))
    scales = (draw(300, 1), draw(1, 48)) if by_row else (torch.tensor(0.5), torch.tensor(3.0))
    with (watch := Watch()).step():
        result = torch._scaled_mm(a, b.t(), *scales, bias=bias, out_dtype=torch.bfloat16)
    assert watch.float8 == 1
    product, unknown = (a, b.t(), *scales, bias), (a, b.t(), scales[0].expand(300, 2), scales[1], bias)
    lost = result.clone()
    lost[0, 0] = math.nan
    others = product_error(product, 1.02 * result), product_error(product, lost), product_error(unknown, result)
    assert others[1:] == (math.inf, math.inf)  # NaN would not be the largest error
    found = [wrong("dp2", partial(multiplies_in_float8, error=error)) for error in (watch.float8_error, *others, "inf")]
    assert found == [set(), *[{"products in float8 are those of their operands"}] * 4]


@pytest.mark.parametrize(
    ("precision", "by_kernel", "holds"), [("exact", 0, False), ("bf16", 0, True), ("bf16", 1, False)]
)
def test_float32_stands_for_float8_without_a_kernel(precision: str, by_kernel: int, holds: bool) -> None:
    scenario = parse_scenario({"name": "x", "model": "m", "precision": precision} | OPTIMIZER)
    dtype, sizes = scenario.tier.compute.name, SimpleNamespace(experts=())
    ranks = step_evidence.Ranks(
        [{"products": [[dtype, "forward", 8]], "linear": [[dtype, 1], ["float32", 7]], "float8": by_kernel}]
    )
    claims = _claims(Layout.parse("dp2.fp8tensor"), ranks, scenario, sizes, stage=3, step=None)  # type: ignore[arg-type]
    assert next(claims) == (f"products in {dtype}", holds)


@pytest.mark.parametrize(("by_kernel", "is_listed"), [((1, 8), True), ((0, 0), True), ((4, 8), False)])
def test_a_few_products_in_float8_prove_no_kernel(by_kernel: tuple[int, int], is_listed: bool) -> None:
    of, scenario = (
        Layout.parse("dp2.fp8row"),
        parse_scenario({"name": "x", "model": "m", "precision": "bf16"} | OPTIMIZER),
    )
    ranks = [
        rank | {"linear": [["bfloat16", 8]], "float8": count} for rank, count in zip(honest(of), by_kernel, strict=True)
    ]
    options: dict[str, Any] = {"stage": of.zero, "layers": 2, "experts": 0, "trained": TRAINED}
    found = dict(not_proven(of, Step(ranks, rows_of(of)), scenario, LINEAR, **options))
    assert found["a kernel for products in float8, which are emulated"] == is_listed


ANEW, ALIKE = "recomputed layers draw the masks", "ranks with the same activations"
MASKS: list[list[Any]] = [
    [where, own, f"mask of {own}", 1] for where in ("forward", "recomputed") for own in ("x", "y")
]
OTHER: list[list[Any]] = [[where, f"{own}'", f"mask of {own}'", n] for where, own, _, n in MASKS]


@pytest.mark.parametrize(
    ("ranks", "claim"),
    [
        ([MASKS, OTHER], None),
        ([MASKS, MASKS], None),
        ([MASKS, [*OTHER[:3], ["recomputed", "", OTHER[3][2], 1]]], None),
        ([MASKS, OTHER[:2]], ANEW),
        ([MASKS, [*OTHER[:3], ["recomputed", "y'", "another", 1]]], ANEW),
        ([MASKS, [*OTHER[:3], ["recomputed", "another", "mask of y'", 1]]], ANEW),
        ([MASKS, [*OTHER[:3], [*OTHER[3][:3], 2]]], ANEW),
        ([MASKS, [[where, own, mask[:-1], n] for where, own, mask, n in OTHER]], ALIKE),
        ([MASKS, [[where, own, f"{mask}'", n] for where, own, mask, n in MASKS]], ALIKE),
        ([MASKS, []], "every rank draws masks"),
        ([[[where, own, "mask", n] for where, own, _, n in MASKS]], "other layers and micro-batches draw other masks"),
        ([[["forward", "x", mask, 1] for mask in "ab"] + [["recomputed", "x", mask, 1] for mask in "ab"]], None),
    ],
)
def test_masks_of_dropout_are_followed(ranks: list[list[Any]], claim: str | None) -> None:
    step = Step([{"drawn": drawn} for drawn in ranks], [])
    missed = [text for text, holds, _ in mask_claims(Layout.parse("dp2.ckpt.dropout"), step) if not holds]
    assert missed and missed[0].startswith(claim) if claim else not missed


STATES, ATTENTION = "bytes of optimizer states", "share of each rank in attention"
KEYS = "exchange of keys and values"
TOKENS, WHOLE = "which tokens each rank holds, and their order", "whole weights in the forward pass"


@pytest.mark.parametrize(
    ("layout", "listed"),
    [
        ("dp2", set()),
        ("sp2.zigzag", {TOKENS, ATTENTION}),
        ("sp2.stride2", {"stride", TOKENS, ATTENTION}),
        ("ulysses2.zero1", {STATES, TOKENS, ATTENTION}),
        ("dp2.zero2.offload", {"offload", STATES, "bytes of gradients"}),
        ("dp2.zero3.offload", {"offload", STATES, "bytes of gradients", "bytes of weights"}),
        ("sp2.zero3.ckpt", {TOKENS, "weights that are gathered again", STATES, "bytes of gradients", ATTENTION}),
        ("dp2.sp2.zero3.ckpt", {TOKENS, STATES, "bytes of gradients", ATTENTION}),
        ("dp4.hpz2.zero3", {STATES, "bytes of gradients"}),
        ("dp2.hpz2.zero3", {STATES, "bytes of gradients", "bytes of weights", "second copy of the weights"}),
        ("sp2.zero1", {TOKENS, WHOLE, STATES, ATTENTION}),
        ("sp2.ring.zero1.mfsdp.ckpt", {TOKENS, WHOLE, STATES, ATTENTION}),
        ("sp2.ring.zero3", {TOKENS, STATES, "bytes of gradients", ATTENTION}),
        ("sp2.zero3", {TOKENS, "weights that are gathered again", STATES, "bytes of gradients", ATTENTION}),
        ("sp2.zero3.mfsdp", {TOKENS, "weights that are gathered again", KEYS, STATES, "bytes of gradients", ATTENTION}),
        ("dp2.hpz2.sp2.zero3", {TOKENS, "second copy of the weights", STATES, "bytes of gradients", ATTENTION}),
        ("dp4.rep2.zero3", {STATES, "bytes of gradients", "which ranks are replicas"}),
        ("dp2.zero1.overlap", {STATES}),
        ("pp2.zero1.overlap.manual", {"manual", "overlap"}),
        ("dp2.tp2.zero1.overlap", {"overlap", STATES, ATTENTION}),
    ],
)
def test_what_no_claim_decides_is_listed(layout: str, listed: set[str]) -> None:
    of, scenario = Layout.parse(layout), parse_scenario({"name": "x", "model": "m", "precision": "exact"} | OPTIMIZER)
    step = Step(honest(of), rows_of(of))
    options: dict[str, Any] = {"stage": of.zero, "layers": 2, "experts": 0, "trained": TRAINED}
    listed = listed | ({ROWS} if of.data > 1 else set())  # no lookups are shown
    assert {name for name, is_open in not_proven(of, step, scenario, LINEAR, **options) if is_open} == listed


@pytest.mark.parametrize(
    "resolved", [{"replaced": ["loss"]}, {"policy": {"replaced": []}, "critic": {"replaced": ["loss"]}}]
)
def test_what_a_backend_replaces_is_listed(resolved: dict[str, Any]) -> None:
    phase: Any = SimpleNamespace(header={"resolved": resolved, "loads": None, "first_step": 0}, footer={})
    scenario = parse_scenario({"name": "x", "model": "m", "precision": "exact"} | OPTIMIZER)
    assert unproven([phase], scenario, sizes=None) == ["the library's own loss"]  # type: ignore[arg-type]


@pytest.mark.parametrize(("trained", "is_listed"), [(TRAINED, False), (8 * LENGTH, True)])
def test_few_trained_weights_may_hide_among_log_probs(trained: int, is_listed: bool) -> None:
    of, scenario = (
        Layout.parse("ulysses2.zero2"),
        parse_scenario({"name": "x", "model": "m", "precision": "exact"} | OPTIMIZER),
    )
    step, options = Step(honest(of), rows_of(of)), {"stage": of.zero, "layers": 2, "experts": 0, "trained": trained}
    listed = {name for name, is_open in not_proven(of, step, scenario, LINEAR, **options) if is_open}  # type: ignore[arg-type]
    assert ("whole weights in the forward pass" in listed) == is_listed
    ranks = honest(of)
    gathers(trained)(ranks)
    claims = exchange_claims(of, Step(ranks, rows_of(of)), LINEAR, stage=2, trained=trained, **MODEL, accumulation=1)
    assert ("weights are whole" in " ".join(text for text, holds, _ in claims if not holds)) != is_listed


@pytest.mark.parametrize(
    ("layout", "trained", "change", "is_missed"),
    [
        ("ulysses2.zero2", 10, looks_up(5, 5, pieces=NUMBERS), False),
        ("ulysses2.zero2", 10, looks_up(5, 5, pieces=10 * NUMBERS), True),  # weights in pieces of as many elements
        ("ulysses2.zero2", 10, looks_up(5, 5, pieces=10 * NUMBERS, of=LENGTH - 1), True),
        ("pp2.sp2.ring.zero1", 6, looks_up(5, 5, 0, 0, pieces=NUMBERS), False),  # the last stage looks nothing up
        ("pp2.sp2.ring.zero1", 10, looks_up(5, 5, 0, 0, pieces=NUMBERS, of=LENGTH - 1), False),
        ("pp2.sp2.ring.zero1", 10, looks_up(5, 5, 0, 0, pieces=10 * NUMBERS), True),
        ("ulysses2.zero2", 10, looks_up(5, 5, pieces=10 * NUMBERS, of=LENGTH - 1, times=LOOKUPS_KEPT), False),
    ],
)
def test_log_probs_are_told_from_few_trained_weights(
    layout: str, trained: int, change: Callable[[Ranks], None], is_missed: bool
) -> None:
    """``trained``: weights for each token."""
    of = Layout.parse(layout)
    change(ranks := honest(of))
    step = Step(ranks, rows_of(of))
    claims = exchange_claims(of, step, LINEAR, stage=of.zero, trained=trained * LENGTH, **MODEL, accumulation=1)
    missed = [text for text, holds, _ in claims if not holds]
    assert any(text.startswith("weights are whole") for text in missed) == is_missed


def test_share_of_work_is_not_proven_if_padding_hides_it() -> None:
    of, scenario = Layout.parse("dp2"), parse_scenario({"name": "x", "model": "m", "precision": "exact"} | OPTIMIZER)
    ranks = [rank | {"lengths": [2 * LENGTH]} for rank in honest(of)]
    step = Step(ranks, rows_of(of))
    options: dict[str, Any] = {"stage": of.zero, "layers": 2, "experts": 0, "trained": TRAINED}
    listed = [name for name, is_open in not_proven(of, step, scenario, LINEAR, **options) if is_open]
    assert listed == [ROWS, "share of each rank in the work"]


@pytest.mark.parametrize(("lengths", "factor"), [([[10], [10]], 1), ([[10, 10], [10]], 4 / 3)])
def test_a_stage_may_pad_vocabulary_and_micro_batches(lengths: list[list[int]], factor: float) -> None:
    """The stage with the head of 25 rows computes 128, and both micro-batches as large as the larger one."""
    scenario = parse_scenario({"name": "x", "model": "m", "precision": "exact"} | OPTIMIZER)
    linear = replace(LINEAR, outside=25 * LINEAR.hidden)
    rows = [[[[number, length, 5] for number, length in enumerate(part)] for part in lengths]]
    padded = 2 * factor * sum(map(sum, lengths)) * (linear.layers // 2 + 128 * linear.hidden)
    for work, holds in ((padded, True), (1.2 * padded, False)):
        ranks = [{"rows": [], "moved": [], "work": [["forward", padded], ["backward", work]], "lengths": []}]
        step = Step(ranks, rows)
        claims = work_claims(Layout.parse("pp2"), step, scenario, linear, layers=2, experts=0)
        assert {text: held for text, held, _ in claims}["no rank multiplies more than its share"] == holds
