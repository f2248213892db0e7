"""No backend can talk its way past the judge: each lie with the stage at which it is caught."""

from pathlib import Path
from typing import Any

import pytest
from cells import BACKENDS, STEPS, assert_honest, exhaustive, slow, small
from conftest import make_cell

from conformance.backends.protocol import BackendEntry
from conformance.matrix.cell import Cell, Handover, Phase
from conformance.runner.session import Session
from conformance.spec.layout import Layout
from conformance.spec.observables import AGAINST_REBUILT
from conformance.spec.precision import PrecisionName, noise_runs

SUPPORT = Path(__file__).parents[1] / "support"


def liar(name: str) -> BackendEntry:
    modules = (file for file in SUPPORT.glob("*liars.py") if f"class {name}(" in file.read_text())
    return BackendEntry(name=name.lower(), target=f"{next(modules).stem}:{name}")


@pytest.mark.parametrize(
    ("name", "layout", "stage"),
    [
        exhaustive("OtherRankLoss", "dp2", "loss"),
        exhaustive("OtherRankCount", "dp2", "loss"),
        exhaustive("OtherRankNorm", "dp2", "gradient norm"),
        exhaustive("OtherRankRate", "dp2", "clipped update"),
        ("OtherRankLogprobs", "tp2", "log-probs"),
        exhaustive("OtherRankIsSilent", "dp2", "gradient norm"),
        slow("OtherRankDrifts", "dp2.rep2", "gradient replicas"),  # test_replicas compares pieces in ranks
        slow("KeepsAnOldVector", "dp2.zero3", "weight replicas"),
    ],
)
def test_every_rank_is_heard(session: Session, name: str, layout: str, stage: str) -> None:
    size = {**small("sft-padded"), "steps": STEPS + 1}  # of which the weights after the second are not read here
    verdict = session.run(make_cell("sft-padded", "llama", layout, "exact", backend=liar(name), **size)).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", stage), verdict.reason


# test_work_evidence and test_judge_evidence show the slow ones on records.
@pytest.mark.parametrize(
    ("name", "layout", "claim"),
    [
        exhaustive("Fsdp2DropsItsOptions", "dp2.ckpt", "activations of all layers are recomputed"),
        exhaustive("Fsdp2DropsItsOptions", "dp2.compile", "layers are compiled"),
        exhaustive("Fsdp2DropsItsOptions", "tp2.seqpar", "activations are cut along the sequence"),
        exhaustive("Fsdp2DropsItsOptions", "tp2.losspar", "no rank holds logits of the whole vocabulary"),
        ("Fsdp2DropsItsOptions", "dp2.lastsync", "gradients are reduced after the last micro-batch only"),
        exhaustive(
            "Fsdp2DropsItsOptions", "dp2.tp2.seqpar.lastsync", "gradients are reduced after the last micro-batch"
        ),
        exhaustive("Fsdp2DropsItsOptions", "sp2.ring", "keys and values are passed around a ring"),
        exhaustive("DeepspeedDropsItsOptions", "dp2.ckpt", "activations of all layers are recomputed"),
        exhaustive("DeepspeedDropsItsOptions", "sp2.ring", "keys and values are passed around a ring"),
        exhaustive("DeepspeedDropsItsOptions", "dp2.zero3.leaf", "weights of a layer are gathered together"),
        exhaustive("DeepspeedRunsStage1", "dp2.zero3", "weights are gathered for the forward pass"),
        exhaustive("DeepspeedRunsStage0", "dp2.zero2", "updated weights are gathered"),
        exhaustive("DeepspeedRunsStage0", "dp2.zero1", "updated weights are gathered"),
        slow("DeepspeedRunsStage1", "dp2.zero2", "gradients of every micro-batch are reduced"),
        exhaustive("DeepspeedRunsStage2", "dp2.zero3", "weights are gathered for the forward pass"),
        ("DeepspeedKeepsNoSecondCopy", "dp4.hpz2", "2 ranks gather weights for the backward pass"),
        exhaustive("Fsdp2ReplicatesItsWeights", "dp2", "weights are gathered for the forward pass"),
        exhaustive("Fsdp2ReplicatesItsWeights", "dp2.tp2.seqpar", "no rank holds whole weights"),
        exhaustive("DeepspeedRunsStage3", "dp2.zero1", "weights are whole in the forward pass"),
        exhaustive("DeepspeedRunsStage1", "dp2.zero0", "all ranks update all weights"),
        exhaustive("MegatronDropsItsOptions", "tp2.ckpt", "activations of all layers are recomputed"),
        exhaustive("MegatronDropsItsOptions", "tp2.seqpar", "activations are cut along the sequence"),
        exhaustive("MegatronDropsItsOptions", "dp2.zero1.overlap", "updated weights are gathered in the forward pass"),
        exhaustive("MegatronRunsPlainStages", "pp2.vpp2", "pipeline stages are interleaved"),
        slow("MegatronRunsStage0", "dp2.zero1", "updated weights are gathered"),
        slow("MegatronShardsLess", "dp2.zero3.mfsdp", "layers are gathered for each forward and backward pass"),
        exhaustive("MegatronShardsLess", "dp2.zero2.mfsdp", "gradients of every micro-batch are reduced"),
        exhaustive("MegatronRunsStage0", "dp2.tp2.zero1", "updated weights are gathered"),
        exhaustive("MegatronRunsStage0", "dp2.pp2.zero1", "updated weights are gathered"),
        exhaustive("DeepspeedRunsStage0", "dp2.tp2.zero1", "updated weights are gathered"),
        exhaustive("DeepspeedRunsStage1", "dp2.tp2.zero2", "gradients of every micro-batch are reduced"),
        exhaustive("DeepspeedRunsStage1", "sp2.zero2", "gradients of every micro-batch are reduced"),
        slow("Fsdp2CutsRows", "sp2", "each rank gives the rows of its micro-batches"),
        exhaustive("DeepspeedCutsRows", "sp2.zero1", "each rank gives the rows of its micro-batches"),
        exhaustive("DeepspeedCutsRows", "ulysses2", "each rank gives the rows of its micro-batches"),
        exhaustive("MegatronCutsRows", "sp2", "each rank gives the rows of its micro-batches"),
        exhaustive("DeepspeedGathersKeys", "ulysses2", "heads are exchanged for parts of the sequence"),
        exhaustive("Fsdp2PassesKeysAround", "sp2", "keys and values are gathered"),
        slow("Fsdp2SwapsTheOrder", "sp2.zigzag", "each rank holds the tokens of its place"),
        exhaustive("Fsdp2SwapsTheOrder", "sp2.ring", "each rank holds the tokens of its place"),
        exhaustive("Fsdp2SwapsTheOrder", "tp2.sp2.zigzag", "each rank holds the tokens of its place"),
        exhaustive("Fsdp2SwapsTheOrder", "sp2.stride2", "keys and values are gathered 2 heads at a time"),
        exhaustive("DeepspeedSwapsTheOrder", "sp2.zigzag", "each rank holds the tokens of its place"),
        exhaustive("DeepspeedSwapsTheOrder", "sp2.ulysses2.zigzag", "each rank holds the tokens of its place"),
        exhaustive("DeepspeedSwapsTheOrder", "sp2.stride2", "keys and values are gathered 2 heads at a time"),
        exhaustive("MegatronSwapsTheOrder", "sp2.zigzag", "each rank holds the tokens of its place"),
        exhaustive("MegatronSwapsTheOrder", "tp2.sp2.seqpar.ring", "each rank holds the tokens of its place"),
        exhaustive("MegatronSwapsTheOrder", "sp2.stride2", "keys and values are gathered 2 heads at a time"),
        exhaustive("Fsdp2ScattersOneNumber", "tp2.seqpar", "activations are cut along the sequence"),
    ],
)
def test_what_ran_is_what_was_asked(session: Session, name: str, layout: str, claim: str) -> None:
    cell = make_cell("sft-packed", "llama", layout, "exact", backend=liar(name), steps=1, **small("sft-packed"))
    verdict = session.run(cell).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", "configuration"), verdict.reason
    assert f"{layout}: {claim}" in verdict.findings[0].tensor
    assert {finding.stage for finding in verdict.findings} == {"configuration"}


@pytest.mark.parametrize(
    ("name", "layout", "claim", "step"),
    [
        ("Fsdp2ChangesAfterFirstStep", "dp2.ckpt", "activations of all layers are recomputed", 1),
        exhaustive("Fsdp2ChangesAfterFirstStep", "dp2.lastsync", "gradients are reduced after the last micro-batch", 1),
        exhaustive("Fsdp2ChangesAfterFirstStep", "dp2", "weights are gathered again", 1),
        slow("Fsdp2RepairsWhenRead", "dp2.rep2", "weights are the same before and after they are read", 1),
    ],
)
def test_every_step_is_as_the_first_one(session: Session, name: str, layout: str, claim: str, step: int) -> None:
    size = small("sft-packed")
    cell = make_cell("sft-packed", "llama", layout, "exact", backend=liar(name), steps=STEPS, **size)
    verdict = session.run(cell).verdict
    found = [(finding.tensor, finding.step) for finding in verdict.findings if finding.stage == "configuration"]
    assert any(tensor.startswith(f"{layout}: {claim}") and at == step for tensor, at in found), verdict.reason


@pytest.mark.slow  # test_work_evidence shows it on records
def test_numbers_without_work_are_not_believed(session: Session) -> None:
    cell = make_cell("sft-packed", "llama", "dp2", "exact", backend=liar("TrainsUnseen"), steps=1)
    verdict = session.run(cell).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", "configuration"), verdict.reason
    assert "dp2: linear layers multiply all tokens, forward" in {finding.tensor for finding in verdict.findings}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["dp2.tp2", "dp2"])
def test_buckets_of_gradients_are_no_weights(session: Session, layout: str) -> None:
    """At real size DeepSpeed's bucket, of 500 million elements, is smaller than a model."""
    backend = liar("DeepspeedHasSmallBuckets")
    cell = make_cell("sft-packed", "llama", layout, "exact", backend=backend, steps=1, **small("sft-packed"))
    verdict = session.run(cell).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps", [1, 2])
def test_modules_that_are_gathered_each_by_itself_are_seen_after_a_roll_out(session: Session, steps: int) -> None:
    """And the honest backend conforms: passes of a roll-out, and what is fetched ahead, count for neither."""
    layout, honest = "dp2.zero3.leaf", BACKENDS["deepspeed"]
    for backend, state in ((honest, "conforms"), (liar("DeepspeedDropsItsOptions"), "differs")):
        verdict = session.run(make_cell("grpo", "llama", layout, "exact", backend=backend, steps=steps)).verdict
        assert verdict.state == state, verdict.reason
    assert {finding.tensor for finding in verdict.findings} == {f"{layout}: weights of a layer are gathered together"}


@pytest.mark.slow  # test_recomputation_after_forward_passes_without_training shows it on records
def test_recomputation_shows_in_a_step_that_begins_a_rollout(session: Session) -> None:
    """Its forward passes without a backward pass hide nothing, and an honest backend conforms."""
    partial = liar("Fsdp2RecomputesOneLayer")
    for backend, state in ((BACKENDS["fsdp2"], "conforms"), (partial, "differs")):
        verdict = session.run(make_cell("grpo", "llama", "dp2.ckpt", "exact", backend=backend, steps=1)).verdict
        assert verdict.state == state, verdict.reason
    assert {finding.tensor for finding in verdict.findings} == {"dp2.ckpt: activations of all layers are recomputed"}


@pytest.mark.parametrize(
    ("name", "model", "layout", "precision", "claim"),
    [
        ("Fsdp2RecomputesOneLayer", "llama", "dp2.ckpt", "exact", "activations of all layers are recomputed"),
        exhaustive("Fsdp2RecomputesOneLayer", "qwen3-moe", "dp2.ckpt", "exact", "activations of all layers"),
        exhaustive("CompilesOneLayer", "llama", "dp2.compile", "exact", "layers are compiled"),
        exhaustive("CompilesUnasked", "llama", "dp2", "exact", "layers run as they are written"),
        exhaustive(
            "MegatronRecomputesOneLayer", "llama", "tp2.ckpt", "exact", "activations of all layers are recomputed"
        ),
        exhaustive("CutsOneLayer", "llama", "tp2.plan", "exact", "all layers are summed over tensor-parallel ranks"),
        exhaustive(
            "GathersOneLayer", "qwen2-moe", "dp2.zero3.leaf", "exact", "weights of a layer are gathered together"
        ),
        exhaustive("GathersOneLayer", "llama", "dp2.zero3.leaf", "bf16", "weights of a layer are gathered together"),
        exhaustive(
            "CutsExpertsOfOneLayer", "qwen3-moe", "ep2", "exact", "gradients of experts are not reduced over all data"
        ),
        ("LooksUpOtherTokens", "llama", "sp2.zigzag", "exact", "each rank holds the tokens of its place"),
        exhaustive("LooksUpOtherTokens", "llama", "sp2.zigzag", "bf16", "each rank holds the tokens of its place"),
        slow("ReusesItsMasks", "llama", "dp2.dropout", "exact", "other layers and micro-batches draw other masks"),
        slow("ComputesAttentionInFloat32", "qwen2", "dp2", "bf16", "products in bfloat16"),
    ],
)
def test_a_part_of_what_was_asked_is_not_enough(
    session: Session, name: str, model: str, layout: str, precision: PrecisionName, claim: str
) -> None:
    backend = liar(name)
    cell = make_cell("sft-packed", model, layout, precision, backend=backend, steps=1, **small("sft-packed"))
    verdict = session.run(cell).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", "configuration"), verdict.reason
    assert any(f"{layout}: {claim}" in finding.tensor for finding in verdict.findings), verdict.reason


@pytest.mark.exhaustive
def test_layers_that_zero3_gathers_again_ahead_of_later_micro_batches_are_gathered_together(session: Session) -> None:
    cell = make_cell("sft-packed", "pangu-odd", "dp2.zero3.leaf", "exact", backend=BACKENDS["deepspeed"], steps=1)
    verdict = session.run(cell).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.parametrize(
    ("name", "precision", "stage"),
    [
        exhaustive("ShowsAShadow", "exact", "log-probs"),
        exhaustive("ShowsAShadow", "bf16", "configuration"),
        exhaustive("SkipsChunkEdges", "exact", "gradients"),
        exhaustive("SkipsChunkEdges", "bf16", "gradients"),
    ],
)
def test_numbers_that_are_wrong_in_few_places(
    session: Session, name: str, precision: PrecisionName, stage: str
) -> None:
    """What half precision hides shows where layers compute with other weights than those that are shown."""
    size: dict[str, Any] = {"steps": STEPS, **small("sft-packed")} if precision == "exact" else {"steps": 5}
    backend = liar(name)
    verdict = session.run(make_cell("sft-packed", "llama", "dp2", precision, backend=backend, **size)).verdict
    assert verdict.first_stage == stage, verdict.reason
    if stage == "configuration":
        assert "layers compute with the weights that are shown" in verdict.findings[0].tensor


@pytest.mark.parametrize(
    ("name", "scenario", "layout", "precision", "stage"),
    [
        exhaustive("DropsTheLastMicroBatch", "sft-packed", "dp2", "exact", "gradients"),
        exhaustive("DropsTheLastMicroBatch", "sft-packed", "dp2", "bf16", "gradients"),
        exhaustive("UpdatesEverySecondParameter", "sft-packed", "dp2", "exact", "clipped update"),
        exhaustive("CopiesTheFirstRank", "sft-packed", "tp2", "exact", "configuration"),
        exhaustive("CopiesTheFirstRank", "sft-packed", "tp2", "bf16", "configuration"),
        exhaustive("EvaluatesThePolicyAsCritic", "ppo", "dp2", "exact", "old values"),
        exhaustive("KeepsRoundedMoments", "sft-packed", "dp2", "bf16", "weights after N steps"),
        slow("ExchangesRows", "sft-packed", "dp2", "exact", "configuration"),
    ],
)
def test_what_is_left_out_shows(
    session: Session, name: str, scenario: str, layout: str, precision: PrecisionName, stage: str
) -> None:
    size: dict[str, Any] = {"steps": 5} if precision == "bf16" else {"steps": 3}
    size |= small(scenario) if precision == "exact" and scenario == "sft-packed" else {}
    backend = liar(name)
    verdict = session.run(make_cell(scenario, "llama", layout, precision, backend=backend, **size)).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", stage), verdict.reason


@pytest.mark.parametrize(
    ("name", "layout", "listed"),
    [
        exhaustive("DropsHalfAsOften", "dp2.dropout", "what dropout does with numbers that it drops"),
        slow("Fsdp2MergesMicroBatches", "dp2", "a backward pass for each micro-batch"),
        exhaustive("DeepspeedMergesMicroBatches", "dp2.zero1", "a backward pass for each micro-batch"),
        exhaustive("MegatronMergesMicroBatches", "dp2", "a backward pass for each micro-batch"),
    ],
)
def test_what_changes_no_number_is_listed(session: Session, name: str, layout: str, listed: str) -> None:
    backend = liar(name)
    cell = make_cell("sft-packed", "llama", layout, "exact", backend=backend, steps=1, **small("sft-packed"))
    assert listed in session.run(cell).verdict.reason.partition("not proven: ")[2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("save", ["checkpoint", "state"])
def test_weights_that_nothing_trains_are_restored_as_well(session: Session, save: Handover) -> None:
    backend = liar("RestoresNoFrozenWeights")
    scenario = make_cell("sft-lora", "llama", "dp2", "exact", steps=4, **small("sft-lora")).scenario
    phases = [Phase(backend=backend, layout=Layout(dp=2), steps=2, save=kind) for kind in (save, None)]
    verdict = session.run(Cell(scenario=scenario, phases=tuple(phases), program=f"by-{save}")).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", "weights"), verdict.reason
    loaded = {finding.tensor for finding in verdict.findings if (finding.stage, finding.step) == ("weights", 2)}
    assert loaded
    assert not any("lora" in tensor for tensor in loaded)


@pytest.mark.exhaustive
def test_settings_of_an_exported_folder_are_the_models(session: Session) -> None:
    backend = liar("ExportsOtherSettings")
    scenario = make_cell("sft-lora", "llama", "dp2", "exact", steps=4, **small("sft-lora")).scenario
    phases = [Phase(backend=backend, layout=Layout(dp=2), steps=2, save=kind) for kind in ("export", None)]
    verdict = session.run(Cell(scenario=scenario, phases=tuple(phases), program="by-export")).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", "configuration"), verdict.reason
    assert {(finding.tensor, finding.step) for finding in verdict.findings} == {
        ("exported policy/adapter/adapter_config.json: lora_alpha", 1),
        ("exported policy/config.json: rms_norm_eps", 1),
    }


def of_two_phases(backend: BackendEntry, save: Handover) -> Cell:
    scenario = make_cell("sft-padded", "llama", "dp2", "exact", steps=4, **small("sft-padded")).scenario
    phases = (Phase(backend=backend, layout=Layout(dp=2), steps=2, save=save),)
    return Cell(
        scenario=scenario, phases=(*phases, Phase(backend=backend, layout=Layout(dp=2), steps=2)), program=f"by-{save}"
    )


@pytest.mark.exhaustive  # cells that resume and programs that hand over show it, too
@pytest.mark.parametrize("save", ["checkpoint", "export"])
def test_an_honest_backend_saves_what_it_has_trained(session: Session, save: Handover) -> None:
    assert_honest(session, of_two_phases(BACKENDS["fsdp2"], save))


@pytest.mark.parametrize(
    ("name", "save", "stage"),
    [
        exhaustive("WritesNoCheckpoint", "checkpoint", "weights"),
        slow("ForgetsTheOptimizer", "checkpoint", "training state"),
        exhaustive("SeedsItself", "checkpoint", "generators"),
        slow("SavesElsewhere", "checkpoint", "weights"),
        exhaustive("SavesTheStepBefore", "checkpoint", "weights"),
        slow("RestoresThenSeeds", "checkpoint", "generators"),
        slow("ShowsOldMoments", "checkpoint", "weights after N steps"),
        slow("KeepsNoTracker", "checkpoint", "generators"),
        slow("FirstRanksTracker", "checkpoint", "generators"),
        exhaustive("ExportsOtherWeights", "export", "weights"),
    ],
)
def test_what_was_not_saved_shows_at_the_first_step_after_loading(
    session: Session, name: str, save: Handover, stage: str
) -> None:
    verdict = session.run(of_two_phases(liar(name), save)).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", stage), verdict.reason
    assert verdict.findings[0].step == 2


@pytest.mark.slow  # test_a_phase_reaches_nothing_of_the_one_before shows it without ranks
def test_a_phase_finds_no_record_of_the_one_before(session: Session) -> None:
    verdict = session.run(of_two_phases(liar("LoadsTheRecord"), "checkpoint")).verdict
    assert verdict.state == "infrastructure"
    assert "found 0 records of phases before" in verdict.reason


@pytest.mark.parametrize(
    ("name", "model", "layout", "precision"),
    [
        exhaustive("DeepspeedDoublesTheRate", "llama", "dp2.zero1.shipped", "bf16"),  # rounded masters
        exhaustive("DeepspeedDoublesTheRate", "llama", "dp2.zero0.shipped", "bf16"),  # and sums in half precision
        exhaustive("DeepspeedDoublesTheRate", "llama", "dp2.zero0", "bf16"),
        exhaustive("DeepspeedDoublesTheRate", "llama", "ulysses2.zero3.shipped", "exact"),  # divided gradients
        slow("MegatronDoublesTheRate", "llama", "dp1.shipped", "exact"),  # padding in the softmax, and trained
        exhaustive("MegatronDoublesTheRate", "llama", "dp2.zero1.shipped", "fp16"),
        exhaustive("Fsdp2DoublesTheRate", "qwen3", "dp2.tp2.lastsync.shipped", "exact"),  # head norms
        exhaustive("Fsdp2DoublesTheRate", "gemma3", "sp2.zigzag.shipped", "bf16"),  # windows of rings
        exhaustive("Fsdp2DoublesTheRate", "llama", "sp2.ring.shipped", "fp32"),  # gradients that no oracle can have
    ],
)
def test_an_expected_difference_hides_no_lie(
    session: Session, name: str, model: str, layout: str, precision: PrecisionName
) -> None:
    # Below the exact tier, noise is measured over all rows.
    size: dict[str, Any] = {"steps": STEPS, **small("sft-packed")} if precision == "exact" else {"steps": 3}
    cell = make_cell("sft-packed", model, layout, precision, backend=liar(name), **size)
    verdict = session.run(cell).verdict
    assert verdict.state == "differs", verdict.reason
    assert "but not like this: clipped update, step 0: " in verdict.reason
    assert any(f.tensor.endswith(AGAINST_REBUILT) and f.step == 0 for f in verdict.findings)
    # A second noise run was made before it was told.
    (*_, further) = noise_runs(precision, Layout.parse(layout).data) or ("float64",)
    assert (session._oracles.folder(cell) / further).exists()
