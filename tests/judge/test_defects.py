"""Each defect of the oracle is the one that its finding describes, and nothing else: by a formula of its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_oracle import BATCH, FLOAT64, folder, policy_model

from conformance.models.components import Architecture
from conformance.oracle.attention import hidden_keys
from conformance.oracle.decoder import forward
from conformance.oracle.defects import VARIANTS, variant_of
from conformance.oracle.optimizer import make_optimizer
from conformance.oracle.primitives import HONEST, UNNAMED, UNNAMED_NORM, Weights
from conformance.oracle.role_model import Written
from conformance.oracle.run import run_oracle
from conformance.oracle.step import Model, Observed, observe
from conformance.records.step_tensors import Record, read_record
from conformance.spec.batch import Batch
from conformance.spec.conventions import (
    AdvantageEpsilon,
    BiasedWhitening,
    CountEpsilon,
    DecaysAll,
    EntropyByMicroBatch,
    Float8Products,
    GenerationDenominator,
    MetricsByMicroBatch,
    MuonEpsilon,
    RoundedMasters,
    RouterLossByMicroBatch,
    RouterLossSoFar,
    SchedulePerRollout,
    TrainedPaddingToken,
)
from conformance.spec.known_defects import (
    AdvantagesOfAll,
    ClippedBeforeReduction,
    CountsByLastTokens,
    Defect,
    DividedGradients,
    DividedLoss,
    L2Decay,
    LostDecay,
    LostEmbeddingGradient,
    LostMicroBatches,
    MeanOfMeans,
    OrthogonalizedShares,
    PaddedSoftmax,
    ResummedHeadNorms,
    TrainedPrompts,
    WindowPerBlock,
    defects_to_json,
    parse_defects,
)
from conformance.spec.offline import Sft
from conformance.spec.scenario import OptimizerConfig, parse_scenario

EPSILON = torch.finfo(torch.float64).eps
ALL: tuple[Defect, ...] = (
    RoundedMasters(precision="bf16"),
    PaddedSoftmax(multiple=128),
    TrainedPaddingToken(),
    ResummedHeadNorms(ranks=2, data_ranks=2, micro_batches=2),
    DividedGradients(by=2),
    DividedLoss(by=2),
    MeanOfMeans(parts=2, of=("ranks",)),
    WindowPerBlock(ranks=2),
    ClippedBeforeReduction(ranks=2, averaged=True, max_norm=1.0),
    LostMicroBatches(lost="the last micro-batch", of="gradients", data_ranks=2, micro_batches=2),
    TrainedPrompts(),
    AdvantagesOfAll(centred=True),
    L2Decay(everything=True),
    LostDecay(of="the embedding"),
    LostEmbeddingGradient(),
    OrthogonalizedShares(ranks=2),
    DecaysAll(),
    MuonEpsilon(),
    AdvantageEpsilon(value=1e-4),
    BiasedWhitening(),
    CountEpsilon(whitening=True),
    SchedulePerRollout(),
    GenerationDenominator(),
    EntropyByMicroBatch(data_ranks=2, micro_batches=3),
    MetricsByMicroBatch(data_ranks=2, micro_batches=3),
    RouterLossByMicroBatch(data_ranks=2, micro_batches=3),
    RouterLossSoFar(data_ranks=2, micro_batches=3),
    CountsByLastTokens(),
    Float8Products(recipe="fp8row", ends=True, multiple=32, data_ranks=2, micro_batches=3),
)


def test_gradients_are_divided_and_the_loss_if_asked() -> None:
    right = observed("llama")
    for divides in (False, True):
        found = observed("llama", DividedGradients(by=2, loss=divides))
        assert found.values == {**right.values, "loss": right.values["loss"] / (2 if divides else 1)}
        assert all(
            torch.equal(gradient, right.gradients["policy"][name] / 2)
            for name, gradient in found.gradients["policy"].items()
        )


def test_every_kind_is_one_of_the_oracle_and_survives_json() -> None:
    assert {type(defect) for defect in ALL} == set(VARIANTS)
    assert parse_defects(defects_to_json(ALL)) == ALL


def model_with(family: str, *defects: Defect) -> Model:
    model, variant = policy_model(family), variant_of(defects)
    decoder = model.decoder.varied(variant)
    assert isinstance(decoder, Written)
    weights = variant.loaded(model.weights, decoder.architecture, trained=True)
    return replace(model, decoder=decoder, weights=weights, trained=frozenset(weights))


def architecture_of(model: Model) -> Architecture:
    assert isinstance(model.decoder, Written)
    return model.decoder.architecture


def observed(family: str, *defects: Defect, batch: Batch = BATCH) -> Observed:
    return observe(batch, [model_with(family, *defects)], Sft(), FLOAT64, variant_of(defects))


def gradients(family: str, *defects: Defect, batch: Batch = BATCH) -> Weights:
    return observed(family, *defects, batch=batch).gradients["policy"]


def record_of(out: Path, family: str, *defects: Defect) -> Record:
    values = {"name": "x", "model": str(folder(family)), "precision": "exact", "steps": 1}
    scenario = parse_scenario({**values, "optimizer": {"name": "adamw", "lr": 0.1, "max_grad_norm": 1e-3}})
    models = {"policy": folder(family)}
    run_oracle(scenario=scenario, models=models, batches=[BATCH], out=out, policy_name="float64", defects=defects)
    return read_record(out)


@pytest.mark.parametrize(("precision", "bits"), [("bf16", 8), ("fp16", 11)])
def test_rounded_masters_are_numbers_of_the_half_precision(precision: str, bits: int) -> None:
    weights = policy_model("llama").weights
    rounded = model_with("llama", *parse_defects([{"kind": "rounded-masters", "precision": precision}])).weights
    for name, weight in rounded.items():
        mantissa, _ = torch.frexp(weight)
        assert torch.equal((mantissa * 2**bits).round(), mantissa * 2**bits), name
        assert (weight - weights[name]).abs().max() <= weights[name].abs().max() * 2**-bits
    frozen = variant_of((RoundedMasters(precision="bf16"),)).loaded(
        weights, architecture_of(policy_model("llama")), trained=False
    )
    assert all(torch.equal(frozen[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_padding_of_the_softmax_is_zero_logits_and_is_trained(family: str) -> None:
    defect = PaddedSoftmax(multiple=256)
    model, plain = model_with(family, defect), policy_model(family)
    tokens = torch.tensor(BATCH.documents[0].tokens)
    logits = forward(tokens, model.weights, architecture_of(model), FLOAT64, variant_of((defect,)))
    right = forward(tokens, plain.weights, architecture_of(plain), FLOAT64)
    assert logits.shape[1] == 512
    torch.testing.assert_close(
        logits[:, :400], right, rtol=0, atol=8 * EPSILON * right.abs().max().item()
    )  # another shape of product
    assert not logits[:, 400:].any()
    found = gradients(family, defect)
    (padding,) = (gradient for name, gradient in found.items() if name.startswith(UNNAMED))
    assert padding.shape == (112, 64)
    assert padding.any(dim=1).all()
    torch.testing.assert_close(padding, padding[:1].expand(112, -1))
    if not architecture_of(plain).tied:  # probabilities add up to 1, and so do targets
        torch.testing.assert_close(padding.sum(dim=0), -found["lm_head.weight"].sum(dim=0))


def test_what_is_unnamed_is_clipped_with_the_rest_and_recorded_as_a_norm_alone(tmp_path: Path) -> None:
    (step,) = record_of(tmp_path / "defective", "llama", PaddedSoftmax(multiple=256)).steps
    named = [g for name, g in step.tensors().items() if name.startswith("gradient/")]
    squares = sum(g.square().sum().item() for g in named) + (step.value(UNNAMED_NORM) or 0.0) ** 2
    assert step.value("grad_norm") == pytest.approx(squares**0.5, rel=1e-14, abs=0)
    assert (step.value(UNNAMED_NORM) or 0.0) > 1e-3
    assert not any(UNNAMED in name for name in step.names())
    (honest,) = record_of(tmp_path / "honest", "llama").steps
    assert step.names() == honest.names()
    assert honest.value(UNNAMED_NORM) is None


def test_a_vocabulary_that_needs_no_padding_has_none() -> None:
    assert model_with("llama", PaddedSoftmax(multiple=8)).weights.keys() == policy_model("llama").weights.keys()


def test_a_padding_token_that_is_trained_has_a_gradient_and_nothing_else_changes() -> None:
    found, right = gradients("llama", TrainedPaddingToken()), gradients("llama")
    token = architecture_of(policy_model("llama")).padding_token
    embedding = "model.embed_tokens.weight"
    assert found[embedding][token].any()
    assert not right[embedding][token].any()
    found[embedding][token] = 0
    assert all(torch.equal(found[name], gradient) for name, gradient in right.items())


def test_an_embedding_that_gets_no_gradient_changes_no_other_gradient() -> None:
    found, right = gradients("llama", LostEmbeddingGradient()), gradients("llama")
    embedding = "model.embed_tokens.weight"
    assert right[embedding].any()
    assert torch.equal(found.pop(embedding), torch.zeros_like(right[embedding]))
    assert all(torch.equal(gradient, right[name]) for name, gradient in found.items())


def test_head_norms_are_summed_again_with_every_micro_batch() -> None:
    found = gradients("qwen3", ResummedHeadNorms(ranks=3, data_ranks=1, micro_batches=2))
    (first, second) = (
        observed("qwen3", batch=replace(BATCH, rows=rows)).gradients["policy"]
        for rows in BATCH.micro_batches(dp_rank=0, dp_size=1, accumulation=2)
    )
    targets = [
        sum(row.target_count for row in rows) / BATCH.target_count
        for rows in BATCH.micro_batches(dp_rank=0, dp_size=1, accumulation=2)
    ]
    for name, gradient in found.items():
        again = 3 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1
        torch.testing.assert_close(gradient, again * targets[0] * first[name] + targets[1] * second[name])


def test_micro_batches_of_data_ranks_run_at_once() -> None:
    variant = variant_of((ResummedHeadNorms(ranks=2, data_ranks=2, micro_batches=2),))
    parts = variant.micro_batches([BATCH.rows], BATCH)
    assert [[row.index for row in part] for part in parts] == [[0, 2], [1, 3]]


def test_running_counts_are_of_all_ranks_and_of_the_micro_batches_so_far() -> None:
    tokens = [sum(len(document.tokens) for document in row.documents) for row in BATCH.rows]
    convention = RouterLossSoFar(data_ranks=2, micro_batches=2)
    for defects, of_second in (
        ((convention,), 1.0),
        ((convention, CountsByLastTokens()), sum(tokens) / (2 * (tokens[1] + tokens[3]))),
    ):
        first, second = variant_of(defects).balanced((), BATCH)
        assert [row.index for row in first.rows] == [row.index for row in first.counted] == [0, 2]
        assert [row.index for row in second.rows] == [1, 3]
        assert [row.index for row in second.counted] == [0, 2, 1, 3]
        assert (first.weight, second.weight) == pytest.approx((1 / 4, of_second / 4), rel=1e-14, abs=0)
    assert tokens[0] + tokens[2] != tokens[1] + tokens[3]


def test_divided_gradients_are_all_divided() -> None:
    found, right = gradients("llama", DividedGradients(by=4)), gradients("llama")
    assert all(torch.equal(found[name], gradient / 4) for name, gradient in right.items())


def seen(tokens: int, defect: WindowPerBlock, window: int | None) -> list[str]:
    """For each query, the keys that it sees, in digits."""
    hidden = variant_of((defect,)).hidden_keys(hidden_keys(tokens, window), window)
    return ["".join(str(key) for key in range(tokens) if not hidden[query, key]) for query in range(tokens)]


def test_a_window_of_a_ring_is_that_of_the_place_in_every_earlier_block() -> None:
    assert seen(8, WindowPerBlock(ranks=2), 2) == ["0", "01", "12", "23", "04", "0145", "1256", "2367"]
    assert seen(5, WindowPerBlock(ranks=2), 2) == ["0", "01", "12", "03", "0134"]  # the second block has padding
    assert seen(6, WindowPerBlock(ranks=3), 1) == ["0", "1", "02", "13", "024", "135"]


def test_in_zigzag_queries_that_see_no_key_of_an_earlier_block_see_none_at_all() -> None:
    # Pieces 01 and 67 are rank 0's, 23 and 45 are rank 1's.
    assert seen(8, WindowPerBlock(ranks=2, zigzag=True), 2) == ["0", "01", "", "", "034", "0145", "1346", "4567"]


def test_a_layer_without_a_window_is_right() -> None:
    right = ["".join(map(str, range(query + 1))) for query in range(8)]
    assert seen(8, WindowPerBlock(ranks=2), None) == right
    assert seen(8, WindowPerBlock(ranks=2, zigzag=True), None) == right


def test_a_query_that_sees_no_key_has_output_0_and_gives_no_gradient() -> None:
    found = gradients("gemma3", WindowPerBlock(ranks=2, zigzag=True))
    assert all(gradient.isfinite().all() for gradient in found.values())
    model = policy_model("gemma3")
    tokens = torch.tensor(BATCH.documents[0].tokens)
    variant = variant_of((WindowPerBlock(ranks=2, zigzag=True),))
    for policy in (FLOAT64, replace(FLOAT64, fused=True)):
        logits = forward(tokens, model.weights, architecture_of(model), policy, variant)
        torch.testing.assert_close(logits, forward(tokens, model.weights, architecture_of(model), FLOAT64, variant))


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("self_attn.k_proj", lambda g: [g[:16], g[16:]]),
        ("mlp.down_proj", lambda g: [g[:, :24], g[:, 24:]]),
        ("mlp.gate_up_proj", lambda g: [g[[*range(8), *range(16, 24)]], g[[*range(8, 16), *range(24, 32)]]]),
    ],
)
@pytest.mark.parametrize("adjust_lr", ["original", "spectral"])
def test_shares_are_moved_as_matrices_of_their_own(name: str, cut: Any, adjust_lr: str) -> None:
    """A rank's shares of gate and up projections are one matrix, and its factor is that of the share's shape."""
    config = OptimizerConfig(name="muon", lr=0.1, momentum=0.9, nesterov=True, adjust_lr=adjust_lr)  # type: ignore[arg-type]
    weight = f"model.layers.0.{name}.weight"

    def moved(gradient: torch.Tensor, *defects: Defect) -> torch.Tensor:
        optimizer = make_optimizer(config, weight, 2, variant_of(defects))
        return optimizer.step({weight: torch.zeros_like(gradient)}, {weight: gradient}, 0.1)[weight]

    gradient = torch.randn(32, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = moved(gradient, OrthogonalizedShares(ranks=2))
    for share, part in zip(cut(found), cut(gradient), strict=True):
        torch.testing.assert_close(share, moved(part.contiguous()), rtol=0, atol=1e-13)
    assert (found - moved(gradient)).norm() > 0.1 * found.norm()


def test_without_defects_nothing_changes() -> None:
    for family in ("llama", "gemma3"):
        right = observe(BATCH, [policy_model(family)], Sft(), FLOAT64, HONEST).gradients["policy"]
        assert all(torch.equal(gradient, right[name]) for name, gradient in gradients(family).items())
