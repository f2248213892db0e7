"""Mixtures of experts in the oracle: what routers choose, the loss that balances experts, and experts as published."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cells import exhaustive
from safetensors.torch import load_file, save_file
from test_oracle import BATCH, FLOAT64, LONG, ROUTED, folder, observe_sft, policy_model, relative

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.inputs import batches_of, prepare_inputs
from conformance.judge.measurements import _of_terms
from conformance.models.components import CORRECTION, MixtureOfExperts
from conformance.models.families import read_architecture
from conformance.numerics.float64_tier import exact_tier
from conformance.oracle.decoder import load_weights
from conformance.oracle.feed_forward import Balance, LoadsOfPart, Routing, stacked
from conformance.oracle.run import move_biases
from conformance.oracle.step import Observed, observe
from conformance.spec.batch import Batch, Document, Row, expert_column
from conformance.spec.offline import Sft
from conformance.spec.scenario import load_scenario
from impl.megatron.moe_config import Groups
from impl.models.loading import load_model


def routers(family: str) -> tuple[MixtureOfExperts, ...]:
    return read_architecture(folder(family)).routers


def weights_of_row(family: str, observed: Observed, row: int) -> torch.Tensor:
    """(T, routers, X): the factor of each expert's output."""
    return observed.rows["routing"][row].view(-1, len(routers(family)), routers(family)[0].experts)


@pytest.mark.parametrize("family", ROUTED)
def test_every_token_has_its_experts_and_their_weights(family: str) -> None:
    moe = routers(family)[0]
    weights = weights_of_row(family, observe_sft(BATCH, family), 0)
    assert weights.shape[0] == len(LONG.tokens), "prompts too"
    assert bool(((weights > 0).sum(dim=-1) == moe.chosen).all())
    sums = weights.sum(dim=-1) / moe.factor
    assert bool((sums - 1).abs().max() < 1e-15) if moe.normalised else bool((sums < 0.999).all())


@pytest.mark.parametrize("family", [ROUTED[0], *map(exhaustive, ROUTED[1:])])
def test_the_data_reach_every_expert_of_every_router(family: str) -> None:
    file = folder("").parent / "scenarios" / "sft-packed.toml"
    model: Any = {"model": f"models/{family}", "precision": "exact"}
    batch = batches_of(load_scenario(file, data_overrides={"rows": 12}, **model, steps=1), folder(family))[0]
    observed = observe_sft(batch, family)
    chosen = sum((weights_of_row(family, observed, row.index) > 0).sum(dim=0) for row in batch.rows)
    assert int(chosen.min()) > 20  # type: ignore[union-attr]


def test_families_differ_in_what_is_normalised_shared_and_dense() -> None:
    qwen3, qwen2, mixtral = (read_architecture(folder(family)) for family in ("qwen3-moe", "qwen2-moe", "mixtral"))
    assert [isinstance(u.feed_forward, MixtureOfExperts) for u in qwen3.layers] == [True, False, True]
    assert [isinstance(u.feed_forward, MixtureOfExperts) for u in qwen2.layers] == [False, True]
    assert [isinstance(u.feed_forward, MixtureOfExperts) for u in mixtral.layers] == [True, True]
    assert [a.routers[0].normalised for a in (qwen3, qwen2, mixtral)] == [True, False, True]
    assert [bool(a.routers[0].shared) for a in (qwen3, qwen2, mixtral)] == [False, True, False]
    assert [a.router_loss for a in (qwen3, qwen2, mixtral)] == [0.2, 0.0, 0.2]


def test_the_loss_that_balances_is_of_the_step_and_not_of_how_it_is_cut() -> None:
    """Of each document alone it is another number, whose mean is not that of the step."""
    packed = Batch(step=0, max_len=64, rows=(Row(0, tuple(d for row in BATCH.rows for d in row.documents)),))
    together, apart = observe_sft(packed, "qwen3-moe"), observe_sft(BATCH, "qwen3-moe")
    assert together.values["router_loss"] == pytest.approx(apart.values["router_loss"], rel=1e-15, abs=0)
    name = "model.layers.0.mlp.gate.weight"
    assert relative(together.gradients["policy"][name], apart.gradients["policy"][name]) < 1e-14
    alone = [replace(BATCH, rows=(row,)) for row in BATCH.rows if row.target_count]
    losses = [observe_sft(batch, "qwen3-moe").values["router_loss"] for batch in alone]
    assert abs(sum(losses) / len(losses) - apart.values["router_loss"]) > 1e-2


@pytest.mark.parametrize("family", ROUTED)
def test_the_z_loss_is_that_of_megatron_core_summed_over_layers(family: str) -> None:
    """Of a step that is one document. Its gradient is that of the loss with it, less that of the loss without."""
    moe = pytest.importorskip("megatron.core.transformer.moe.moe_utils", reason="megatron-core is not installed")
    step = replace(BATCH, rows=BATCH.rows[:1])
    tokens = torch.tensor(BATCH.rows[0].documents[0].tokens)
    with exact_tier():
        model = load_model(folder(family), dtype=torch.float64, attention="eager")
        seen: list[torch.Tensor] = []
        for gate in (m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")):
            gate.register_forward_hook(lambda gate, inputs, output: seen.append(output[0]))
        model(input_ids=tokens[None])
        theirs = torch.stack([moe.z_loss_func(logits, 1.0) for logits in seen]).sum()
        theirs.backward()
    with_it = observe(step, [replace(policy_model(family), z_loss=1.0)], Sft(), FLOAT64)
    without = observe_sft(step, family)
    assert (
        with_it.values["router_z_loss"]
        == without.values["router_z_loss"]
        == pytest.approx(theirs.item(), rel=1e-13, abs=0)
    )
    gates = [name for name in with_it.gradients["policy"] if name.endswith((".mlp.gate.weight", ".mlp.router.weight"))]
    assert len(gates) == len(routers(family))
    for name in gates:
        own = with_it.gradients["policy"][name] - without.gradients["policy"][name]
        assert relative(own, model.get_parameter(name).grad) < 1e-12


def test_a_z_loss_needs_routers(tmp_path: Path) -> None:
    scenario = load_scenario(FIXTURES / "scenarios" / "sft-z-loss.toml", model="models/llama", precision="exact")
    with pytest.raises(UsageError, match=r"router_z_loss=0\.025 is only for mixtures of experts .*, not for llama"):
        prepare_inputs(scenario, tmp_path)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"model": "models/qwen3-moe"}, "qwen3-moe has no such bias"),
        ({"lora": {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}}, "adapters leave the base"),
    ],
)
def test_biases_move_where_routers_have_some(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    file = FIXTURES / "scenarios" / "sft-expert-bias.toml"
    scenario = load_scenario(file, **{"model": "models/deepseek-v3", "precision": "exact"} | options)
    with pytest.raises(UsageError, match=rf"router_bias_rate=0\.02 .*{problem}"):
        prepare_inputs(scenario, tmp_path)


def test_a_bias_rises_for_experts_below_the_mean_load() -> None:
    """Two routers of 4 experts; the mean loads are 1.5 and 1, which one expert has."""
    loads = [[3, 2, 1, 0], [1, 3, 0, 0]]
    model = replace(policy_model("deepseek-v3"), weights={f"{n}.{CORRECTION}": torch.zeros(4) for n in "ab"})
    model = replace(model, decoder=Mock(routers=[replace(routers("deepseek-v3")[0], experts=4)]))
    rows = {n: torch.tensor([[float(load > n) for load in of] for of in loads]).flatten() for n in range(3)}
    move_biases(model, rows, 0.5)
    assert [w.tolist() for w in model.weights.values()] == [[-0.5, -0.5, 0.5, 0.5], [0.0, -0.5, 0.5, 0.5]]


def test_a_document_without_targets_is_routed_and_balanced_too() -> None:
    without = replace(BATCH, rows=BATCH.rows[:-1])
    assert not BATCH.rows[-1].target_count
    assert set(observe_sft(BATCH, "qwen3-moe").rows["routing"]) == {0, 1, 2, 3}
    found, other = observe_sft(BATCH, "qwen3-moe"), observe_sft(without, "qwen3-moe")
    assert found.values["loss"] == pytest.approx(other.values["loss"], rel=1e-15, abs=0)
    assert abs(found.values["router_loss"] - other.values["router_loss"]) > 1e-4


def replayed(document: Document, chosen: torch.Tensor) -> Document:
    """The document with choices (T, routers, K) in its columns."""
    columns = {
        expert_column(layer, slot): tuple(float(number) for number in chosen[:, layer, slot])
        for layer in range(chosen.shape[1])
        for slot in range(chosen.shape[2])
    }
    return replace(document, columns={**document.columns, **columns})


@pytest.mark.parametrize("family", ROUTED)
def test_choices_that_are_given_take_the_place_of_the_routers_own(family: str) -> None:
    moe, own = routers(family)[0], observe_sft(BATCH, family)
    as_chosen = [weights_of_row(family, own, row.index).topk(moe.chosen, dim=-1).indices for row in BATCH.rows]

    def run(chosen: list[torch.Tensor]) -> Observed:
        rows = [replace(row, documents=(replayed(row.documents[0], chosen[row.index]),)) for row in BATCH.rows]
        return observe(replace(BATCH, rows=tuple(rows)), [policy_model(family)], Sft(), FLOAT64)

    same = run(as_chosen)
    assert max(relative(same.rows["routing"][r], own.rows["routing"][r]) for r in range(4)) < 1e-15
    assert same.values["loss"] == pytest.approx(own.values["loss"], rel=1e-14, abs=0)
    others = run([(indices + 1) % moe.experts for indices in as_chosen])
    assert abs(others.values["loss"] - own.values["loss"]) > 1e-3
    assert all(name in others.gradients["policy"] for name in own.gradients["policy"])


@pytest.mark.parametrize("family", ROUTED)
def test_experts_may_be_apart_or_stacked(tmp_path: Path, family: str) -> None:
    architecture = read_architecture(folder(family))
    published = load_file(folder(family) / "model.safetensors")
    (tmp_path / "stacked").mkdir()
    save_file(stacked(published), tmp_path / "stacked" / "model.safetensors")
    own, other = (load_weights(at, architecture, torch.float64) for at in (folder(family), tmp_path / "stacked"))
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)


@pytest.mark.parametrize("lost", ["experts.3.up_proj", "experts.7.down_proj"])
def test_a_lost_expert_is_told(tmp_path: Path, lost: str) -> None:
    tensors = load_file(folder("qwen3-moe") / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if f"layers.2.mlp.{lost}." not in n}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"layers\.2\.mlp\.experts\.(gate_up_proj|down_proj) (is missing|has shape)"):
        load_weights(tmp_path, read_architecture(folder("qwen3-moe")), torch.float64)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3-moe", {"num_experts_per_tok": 9}, "chooses 9 of 8 experts"),
        ("qwen3-moe", {"mlp_only_layers": "1"}, "must be a list of layer numbers"),
        ("qwen3-moe", {"norm_topk_prob": None}, "does not say 'norm_topk_prob'"),
        ("qwen3-moe", {"router_aux_loss_coef": None}, "does not say 'router_aux_loss_coef'"),
        ("qwen3-moe", {"num_experts": 0}, "num_experts=0"),
        ("qwen2-moe", {"shared_expert_intermediate_size": None}, "does not say 'shared_expert_intermediate_size'"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise, which is random"),
    ],
)
def test_what_a_configuration_lacks_is_told(tmp_path: Path, family: str, changes: dict[str, Any], message: str) -> None:
    shutil.copy(folder(family) / "config.json", tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    with pytest.raises(UsageError, match=message):
        read_architecture(tmp_path)


@pytest.mark.parametrize("shared", [True, False])
def test_the_noise_of_the_loss_that_balances_is_that_of_its_terms(shared: bool) -> None:
    """What an error of the routers' matrix makes of the loss, in 200 draws; the errors of tokens are one error then, so
    that they say too little of it as if they were independent. Probabilities of a token add up to 1, which spares the
    loss most of an error of its experts."""
    generator = torch.Generator().manual_seed(0)
    hidden, matrix = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((900, 32), (32, 4)))
    hidden += 1.0  # a norm's outputs have a mean

    def balance(error: torch.Tensor) -> Balance:
        logits = (hidden @ matrix + error) / 6
        routing, chosen = Routing(), (hidden @ matrix).topk(2).indices  # which are given
        routing.note(logits, probabilities := logits.softmax(dim=-1), chosen, probabilities.gather(-1, chosen))
        found = Balance()
        found.add(routing)
        return found

    def drawn() -> torch.Tensor:
        shape = matrix.shape if shared else (900, 4)
        error = 1e-3 * torch.randn(shape, generator=generator, dtype=torch.float64)
        return hidden @ error if shared else error

    right = balance(torch.zeros(900, 4))
    loss, terms = right.loss(right.probabilities), {"0": right.terms()}  # type: ignore[arg-type]
    assert terms["0"].sum().item() == pytest.approx(loss.item(), rel=1e-14, abs=0)
    wrong = [balance(drawn()) for _ in range(200)]
    errors = torch.stack([(one.loss(one.probabilities) - loss) / loss for one in wrong])  # type: ignore[arg-type]
    estimates = torch.tensor([_of_terms({"0": one.terms()}, terms, unit=loss.item()) for one in wrong])
    assert 0.5 < estimates.square().mean().sqrt() / errors.square().mean().sqrt() < 2
    assert _of_terms({}, terms, unit=loss.item()) == 0.0  # a cell has none


def test_each_router_balances_its_load_in_a_micro_batch() -> None:
    """Two documents of 3 and 2 tokens, two routers of four experts, in one of three micro-batches."""
    generator = torch.Generator().manual_seed(0)
    tokens, routers = (3, 2), 2
    documents = [Routing() for _ in tokens]
    for routing, count in zip(documents, tokens, strict=True):
        for _ in range(routers):
            logits = torch.randn(count, 4, generator=generator, dtype=torch.float64)
            probabilities = logits.softmax(dim=-1)
            chosen = probabilities.topk(2).indices
            routing.note(logits, probabilities, chosen, probabilities.gather(-1, chosen))
    of_routers = zip(*([counts for counts, _ in routing.loads] for routing in documents), strict=True)
    part = LoadsOfPart(
        counts=tuple(torch.stack(one).sum(dim=0) for one in of_routers), tokens=sum(tokens), weight=1 / 3
    )
    expected = 0.0
    for router in range(routers):
        loads = [routing.loads[router] for routing in documents]
        counts, sums = (sum(one) for one in zip(*loads, strict=True))
        expected += 4 * float((counts / (2 * 5)) @ (sums / 5)) / 3
    assert sum(part.loss(routing).item() for routing in documents) == pytest.approx(expected, rel=1e-14, abs=0)


@pytest.mark.parametrize("best", [1, 2])
def test_on_megatron_experts_are_chosen_in_the_groups_with_the_best_scores(best: int) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from impl.megatron.router import chosen_in_groups

    scores = torch.rand(50, 12, generator=torch.Generator().manual_seed(0)) - 0.5  # with a bias some are below 0
    found = chosen_in_groups(scores, Groups(4, 2, best), 5)
    for own, chosen in zip(scores.tolist(), found.tolist(), strict=True):
        sums = [sum(sorted(own[3 * group : 3 * group + 3])[-best:]) for group in range(4)]
        inside = [expert for expert in range(12) if sums[expert // 3] >= sorted(sums)[-2]]
        assert sorted(chosen) == sorted(sorted(inside, key=lambda expert: own[expert])[-5:])
