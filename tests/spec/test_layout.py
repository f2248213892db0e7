"""Layouts: ids are stable, and what does not fit is refused with numbers and a layout that would."""

import pytest

from conformance.core.errors import UsageError
from conformance.spec.layout import Layout


@pytest.mark.parametrize(
    "text",
    [
        "dp1",
        "dp2",
        "tp2",
        "dp4.rep2",
        "dp4.hpz2",
        "dp4.rep2.ep2.tp2",
        "dp2.tp2.sp2",
        "dp2.zero0",
        "dp4.tp2.zero3.ckpt",
        "sp4.stride2",
        "tp2.sp2.ulysses2.zero1",
        "dp2.tp2.pp2.vpp2.zero1.overlap",
        "dp2.sp2.zigzag.shipped",
        "dp4.rep2.tp2.seqpar.losspar.lastsync",
    ],
)
def test_ids_are_read_as_they_are_written(text: str) -> None:
    assert str(Layout.parse(text)) == text


def test_the_order_of_an_ids_parts_does_not_matter() -> None:
    assert str(Layout.parse("losspar.tp2.seqpar.dp2")) == "dp2.tp2.seqpar.losspar"


def test_cp_is_accepted_for_sp_and_not_written() -> None:
    assert str(Layout.parse("dp2.cp4.zigzag")) == "dp2.sp4.zigzag"
    with pytest.raises(ValueError, match="names sp twice"):
        Layout.parse("sp2.cp2")


def test_world_size_is_the_product_of_the_axes_and_replicas_are_part_of_dp() -> None:
    assert Layout.parse("dp4.rep2.tp2").world_size == 8
    assert (Layout.parse("dp2.ep2.tp2").world_size, Layout.parse("dp2.ep2.tp2").data) == (8, 4)
    assert Layout.for_world(8, tp=2, sp=2) == Layout(dp=2, tp=2, sp=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp0", "dp=0: every axis of a layout needs at least one rank; use dp1"),
        ("dp4.rep3", r"rep=3 does not divide dp=4 .*use rep2"),
        ("dp4.hpz3", r"hpz=3 does not divide dp x sp x ulysses=4, .*use hpz2"),
        ("dp4.hpz2.zero2", "zero2 shards no weights, of which hpz keeps a copy; use zero3"),
        ("dp2.dp4", "names dp twice"),
        ("zz2", "'zz2' is neither an axis with a size"),
        ("seqpar.dp2tp2zero1", "'dp2tp2zero1' lacks dots between its axes; give dp2.tp2.zero1"),
        ("dp2.fast", "'fast' is neither an axis .* nor an option"),
        ("dp2.zero3.qwZ", "'qwZ' is not built in: ZeRO.. quantizes weights on GPUs only, .*use hpz2, or zero3"),
        ("dp2.superoffload", "'superoffload' is not built in: SuperOffload runs on NVIDIA's GPUs only; use offload"),
        ("dp2.fp8nv", r"no recipe of float8 is named 'fp8nv'; known: fp8tensor, .*, fp8ends and fp8gather"),
        ("dp2.te.fp8block.fp8delayed", "options fp8block, fp8delayed are different recipes of float8; keep one"),
        ("dp2.zero4", "there is no ZeRO stage 4; use zero0, zero1, zero2 or zero3"),
        ("dp2.zero1.zero2", "names zero twice"),
        ("dp2.seqpar", "option seqpar needs tensor parallelism; add tp2"),
        ("dp2.zigzag", "option zigzag needs a ring; add sp2"),
        ("dp2.varlen", "option varlen is for pipeline stages; add pp2"),
        ("dp2.vpp2", "vpp=2 divides the work of pipeline stages further; add pp2"),
        ("dp2.ddp.fsdp1", "options ddp, fsdp1 are different wrappers of a model; keep one"),
        ("dp2.zero1.ddp", "with ddp every rank is a replica; leave zero and rep out, or use fsdp1"),
        ("sp2.ring.zigzag", "options ring, zigzag are different rings; keep one"),
        ("dp2.stride2", "stride=2 is for rings that gather keys and values; use sp2"),
        ("sp2.stride2.ring", "stride=2 is for rings that gather .* without ring or zigzag"),
        ("", "'' is neither an axis"),
        ("dp02", r"layout 'dp02': the size in 'dp02' has to be ASCII digits without leading zeros, .*; e.g. dp2"),
        ("dp٢", r"the size in 'dp٢' has to be ASCII digits"),
        ("dp2.zero01", r"the size in 'zero01' has to be ASCII digits"),
        ("dp" + "9" * 5000, r"the size in 'dp9+\.\.\. has to be ASCII digits .* below a billion"),
        ("dp65537", r"65537 ranks or parts are more than any machine has \(65536\)"),
        ("dp256.tp257", r"65792 ranks or parts are more than any machine has"),
        ("sp2.stride65537", r"65537 ranks or parts are more"),
    ],
)
def test_a_wrong_id_says_what_to_change(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Layout.parse(text)


@pytest.mark.parametrize("world_size", [1, 6])
def test_a_world_that_the_model_axes_do_not_divide_is_refused(world_size: int) -> None:
    with pytest.raises(
        ValueError, match=rf"world size {world_size} is not divisible by sp x tp x pp = 2 x 2 x 1 = 4; use 4"
    ):
        Layout.for_world(world_size, tp=2, sp=2)


def test_a_head_is_not_cut() -> None:
    with pytest.raises(
        ValueError, match=r"tp=8 must divide .* 8 attention heads and its 4 key-value heads.*tp4 would work"
    ):
        Layout.parse("tp8").validate(heads=8, kv_heads=4, layers=2, rows=24, accumulation=1)


def test_an_expert_is_not_cut() -> None:
    sizes = {"heads": 8, "kv_heads": 4, "layers": 2, "rows": 24, "accumulation": 1}
    Layout.parse("ep4").validate(**sizes, experts=8)
    with pytest.raises(UsageError, match=r"ep=3 must divide the model's 8 experts; ep2 would work"):
        Layout.parse("ep3").validate(**sizes, experts=8)
    with pytest.raises(UsageError, match=r"ep=2 must divide the model's missing experts; dp2 would work"):
        Layout.parse("dp2.ep2").validate(**sizes)
    with pytest.raises(UsageError, match=r"24 rows .* dp=5 x ep=2 x accumulation=1; dp4.ep2 would work.*data.rows=30"):
        Layout.parse("dp5.ep2").validate(**sizes, experts=8)
    with pytest.raises(UsageError, match=r"24 rows .* dp=1 x ep=3 x accumulation=3; ep2 would work, or data.rows=27"):
        Layout.parse("ep3").validate(**sizes | {"accumulation": 3}, experts=6)


def test_rows_have_to_fill_every_micro_batch_of_every_rank() -> None:
    with pytest.raises(ValueError, match=r"24 rows .* dp=5 x accumulation=3; dp4 would work, or data.rows=30"):
        Layout.parse("dp5").validate(heads=8, kv_heads=4, layers=2, rows=24, accumulation=3)
    Layout.parse("dp8").validate(heads=8, kv_heads=4, layers=2, rows=24, accumulation=3)


def test_a_ring_need_not_divide_the_length_of_rows() -> None:
    Layout.parse("sp5").validate(heads=8, kv_heads=4, layers=2, rows=24, accumulation=1)


def test_ulysses_has_to_divide_heads_and_gives_copies_of_few_key_value_heads() -> None:
    with pytest.raises(ValueError, match=r"ulysses=3 must divide a rank's 8 attention heads.*; ulysses2 would work"):
        Layout.parse("ulysses3").validate(heads=8, kv_heads=4, layers=2, rows=24, accumulation=1)
    with pytest.raises(ValueError, match=r"ulysses=8 must divide a rank's 4 attention heads.*; tp2.ulysses2 would"):
        Layout.parse("tp2.ulysses8").validate(heads=8, kv_heads=4, layers=2, rows=24, accumulation=1)
    Layout.parse("ulysses8").validate(heads=8, kv_heads=4, layers=2, rows=24, accumulation=1)
    Layout.parse("tp2.ulysses4").validate(heads=8, kv_heads=4, layers=2, rows=24, accumulation=1)
    with pytest.raises(ValueError, match=r"stride=2 must divide a rank's 1 key-value heads"):
        Layout.parse("sp2.ulysses4.stride2").validate(heads=8, kv_heads=4, layers=2, rows=24, accumulation=1)


def test_a_stride_has_to_divide_a_ranks_key_value_heads() -> None:
    with pytest.raises(ValueError, match=r"must divide a rank's 2 key-value heads; tp2.sp2.stride2 would"):
        Layout.parse("tp2.sp2.stride4").validate(heads=8, kv_heads=4, layers=2, rows=24, accumulation=1)
    Layout.parse("sp2.stride4").validate(heads=8, kv_heads=4, layers=2, rows=24, accumulation=1)


def test_pipeline_stages_need_a_layer_an_embedding_or_a_head_each() -> None:
    sizes = {"heads": 8, "kv_heads": 4, "rows": 24, "accumulation": 8}
    Layout.parse("pp4").validate(layers=2, **sizes)
    Layout.parse("pp2.vpp2").validate(layers=2, **sizes)
    with pytest.raises(ValueError, match=r"pp=8 x vpp=1 = 8 stages .* has 2 layers, .*; pp4 would work"):
        Layout.parse("pp8").validate(layers=2, **sizes)
    with pytest.raises(ValueError, match=r"pp=2 x vpp=4 = 8 stages .*; pp2.vpp2 would work"):
        Layout.parse("pp2.vpp4").validate(layers=2, **sizes)


def test_the_interleaved_schedule_needs_a_micro_batch_for_each_stage() -> None:
    sizes = {"heads": 8, "kv_heads": 4, "layers": 2, "rows": 24}
    Layout.parse("pp2.vpp2").validate(accumulation=3, **sizes)
    with pytest.raises(ValueError, match=r"vpp=2 needs at least as many micro-batches as pp=2, .* is 1; pp2 would"):
        Layout.parse("pp2.vpp2").validate(accumulation=1, **sizes)


@pytest.mark.parametrize("nothing", ["heads", "kv_heads", "layers", "rows", "accumulation"])
def test_a_model_or_scenario_with_nothing_to_cut_is_refused(nothing: str) -> None:
    sizes = {"heads": 8, "kv_heads": 4, "layers": 2, "rows": 24, "accumulation": 1} | {nothing: 0}
    for text in ("dp1", "dp2.tp2", "ulysses2", "sp2.stride2", "pp2"):
        with pytest.raises(UsageError, match=f"cannot cut what is not there: {nothing} has to be at least 1"):
            Layout.parse(text).validate(**sizes)


def test_fewer_rows_than_micro_batches_name_a_number_that_would_do() -> None:
    with pytest.raises(UsageError, match=r"2 rows per step cannot be divided .* or data.rows=8"):
        Layout.parse("dp2").validate(heads=8, kv_heads=4, layers=2, rows=2, accumulation=4)
