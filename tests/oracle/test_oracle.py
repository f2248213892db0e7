"""Checks that the oracle agrees with transformers' models and torch's optimizers to the last digits of float64, and
shares no code with the backends."""

import ast
import inspect
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next

import conformance.oracle
from conformance.core.host import FIXTURES
from conformance.models.components import Attention
from conformance.models.families import read_architecture
from conformance.numerics.float64_tier import Leak, LeakWatch, exact_tier
from conformance.oracle import attention
from conformance.oracle.attention import delta_rule
from conformance.oracle.decoder import is_buffer, load_weights
from conformance.oracle.optimizer import AdamW, Sgd, clip, global_norm
from conformance.oracle.primitives import HONEST, NO_TAP, OneLookup, Policy, Weights, frequencies
from conformance.oracle.role_model import Written
from conformance.oracle.run import POLICIES
from conformance.oracle.step import Model, Observed, grouped, observe
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.observables import POLICY
from conformance.spec.offline import Sft
from conformance.spec.scenario import OptimizerConfig

BASE = ("pangu", "llama", "qwen3", "gemma3")
ROUTED = ("qwen3-moe", "qwen2-moe", "mixtral", "gpt-oss", "deepseek-v3", "deepseek-v2", "qwen3-next")
FURTHER = ("qwen2", "qwen2-yarn", "llama3", "mistral", "gemma2", "phi3", "olmo2", "seed-oss", *ROUTED)
FAMILIES = (*BASE, *FURTHER)
LONG_RUN = (*BASE, *(pytest.param(family, marks=pytest.mark.exhaustive) for family in FURTHER))
FLOAT64 = POLICIES["float64"]


def document(seed: int, length: int, prompt: int) -> Document:
    tokens = torch.randint(3, 260, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Document(tuple(tokens), tuple(i >= prompt for i in range(length)))


# Longer than gemma3's sliding window, one with the padding token inside, one whose targets are interrupted.
LONG = document(0, 40, 9)
PADDED = Document((5, 0, 17, 0, 30), (False, True, True, True, True))
GAPS = replace(document(1, 13, 4), targets=tuple(i % 3 == 1 for i in range(13)))
UNTAUGHT = document(2, 6, 6)
DOCUMENTS = (LONG, PADDED, GAPS)
BATCH = Batch(step=0, max_len=64, rows=tuple(Row(i, (d,)) for i, d in enumerate((*DOCUMENTS, UNTAUGHT))))


def folder(family: str) -> Path:
    return FIXTURES / "models" / family


def relative(x: Tensor, reference: Tensor) -> float:
    return float((x.double() - reference).norm() / reference.norm())


def worst(gradients: Weights, reference: Weights) -> float:
    return max(relative(gradients[name], reference[name]) for name in reference)


@dataclass(frozen=True)
class Observation:
    """Logits of each document, mean loss of BATCH and its gradients; what leaked when transformers computed it; the
    load-balancing loss, where it is in the loss."""

    logits: list[Tensor]
    loss: float
    gradients: Weights
    leaks: tuple[Leak, ...] = ()
    balance: float | None = None


def policy_model(family: str, *, precision: str = "float64") -> Model:
    architecture = read_architecture(folder(family))
    weights = load_weights(folder(family), architecture, POLICIES[precision].stable)
    trained = (name for name in weights if not is_buffer(name))
    return Model(role=POLICY, decoder=Written(architecture=architecture), weights=weights, trained=frozenset(trained))


def observe_sft(batch: Batch, family: str, *, policy: Policy = FLOAT64) -> Observed:
    return observe(batch, [policy_model(family)], Sft(), policy)


@cache
def oracle(family: str) -> Observation:
    model, observed = policy_model(family), observe_sft(BATCH, family)
    logits = [model.decoder.forward(torch.tensor(d.tokens), model.weights, FLOAT64) for d in DOCUMENTS]
    balance = observed.values["router_loss"] if model.decoder.router_loss else None
    return Observation(logits, observed.values["loss"], observed.gradients["policy"], balance=balance)


@cache
def transformers_model(family: str, *, exact: bool) -> Observation:
    """The same with transformers' model in float64, its own loss, and autograd; ``exact``: in the exact tier."""
    with exact_tier() if exact else nullcontext():
        model = AutoModelForCausalLM.from_pretrained(
            folder(family),
            dtype=torch.float64,
            attn_implementation="eager",
            trust_remote_code=True,
            **({"experts_implementation": "eager"} if family in ROUTED else {}),
        ).train()
        balanced = getattr(model.config, "output_router_logits", False)
        model.config.output_router_logits = False  # of a document alone it is another loss
        logits, loss, routers = [], 0.0, []
        with LeakWatch() as watch:
            for d in (*DOCUMENTS, UNTAUGHT) if family in ROUTED else DOCUMENTS:
                tokens = torch.tensor([d.tokens])
                labels = torch.where(torch.tensor([d.targets]), tokens, -100)
                found = {"output_router_logits": True} if family in ROUTED else {}
                output = model(input_ids=tokens, use_cache=False, **found)
                if any(d.targets):
                    count = BATCH.target_count
                    own = model.loss_function(output.logits, labels, model.config.vocab_size, num_items_in_batch=count)
                    own.backward(retain_graph=balanced)
                    logits.append(output.logits[0].detach())
                    loss += own.item()
                if balanced:
                    routers.append(output.router_logits)
            if balanced:
                balance = router_loss(model, routers)
                (model.config.router_aux_loss_coef * balance).backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    return Observation(logits, loss, gradients, watch.leaks, balance.item() if balanced else None)


@pytest.mark.parametrize("rule", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_delta_rule_equals_transformers_beyond_a_chunk(rule: str) -> None:
    torch.manual_seed(0)
    q, k, v = (F.normalize(torch.randn(70, 3, size, dtype=torch.float64), dim=-1) for size in (8, 8, 12))
    decay, strength = torch.rand(2, 70, 3, dtype=torch.float64)
    with exact_tier():
        own = getattr(modeling_qwen3_next, rule)
        found, _ = own(q[None], k[None], v[None], g=decay.log()[None], beta=strength[None])
    assert relative(found[0], delta_rule(q * 8**-0.5, k, v, decay, strength)) < 1e-14


@pytest.mark.parametrize("family", ["gemma3", "qwen3-next"])
def test_joint_documents_equal_single_ones(family: str) -> None:
    model, lengths = policy_model(family), [len(d.tokens) for d in DOCUMENTS]
    tokens = torch.tensor([token for d in DOCUMENTS for token in d.tokens])
    joint = model.decoder.forward(tokens, model.weights, FLOAT64, lengths=lengths)
    assert relative(joint, torch.cat(oracle(family).logits)) < 1e-14


@pytest.mark.parametrize("family", ["gemma3", "qwen3-next", "deepseek-v2"])
def test_step_of_joint_documents_equals_that_of_single_ones(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    joint = observe_sft(BATCH, family)
    monkeypatch.setattr(Policy, "joins", False)
    single = observe_sft(BATCH, family)
    assert worst(joint.gradients["policy"], single.gradients["policy"]) < 1e-13
    assert joint.values == pytest.approx(single.values, rel=1e-14, abs=0)
    assert joint.rows.keys() == single.rows.keys()
    for key, rows in single.rows.items():
        assert joint.rows[key].keys() == rows.keys()
        assert all(relative(joint.rows[key][row], rows[row]) < 1e-13 for row in rows)


def test_documents_are_joint_up_to_a_number_of_tokens() -> None:
    lengths = [[len(d.tokens) for *_, d in group] for group in grouped(BATCH.rows, 40, HONEST)]
    assert lengths == [[40], [5, 13, 6]]
    assert all(len(group) == 1 for group in grouped(BATCH.rows, 0, HONEST))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_heads_one_after_another_have_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(70, 4, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    hidden, sinks, found = attention.hidden_keys(70, 20), torch.ones(4, dtype=dtype), []
    run = partial(attention.attend, hidden=hidden, scale=0.3, softcap=5.0, sinks=sinks)
    for limit in (70 * 70, 0):
        monkeypatch.setattr(attention, "LONG", limit)
        output = run(q, k, v, stable=torch.promote_types(dtype, torch.float32))
        found.append((output, *torch.autograd.grad(output.square().sum(), (q, k, v))))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def router_loss(model: torch.nn.Module, documents: list[tuple[Tensor, ...]]) -> Tensor:
    """transformers' load-balancing loss, of all documents as one; ``documents``: the logits of each layer's router."""
    layers = tuple(torch.cat(parts) for parts in zip(*documents, strict=True))
    function = inspect.getmodule(type(model)).load_balancing_loss_func  # type: ignore[union-attr]
    return function(layers, model.num_experts, model.num_experts_per_tok)  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_transformers_in_the_exact_tier(family: str) -> None:
    found, reference = transformers_model(family, exact=True), oracle(family)
    for logits, expected in zip(found.logits, reference.logits, strict=True):
        assert relative(logits, expected) < 1e-13
    assert found.loss == pytest.approx(reference.loss, rel=1e-14, abs=0)
    assert found.balance == (reference.balance and pytest.approx(reference.balance, rel=1e-14, abs=0))
    assert found.gradients.keys() == reference.gradients.keys()
    assert worst(found.gradients, reference.gradients) < 1e-13


@pytest.mark.parametrize("family", LONG_RUN)
def test_a_float64_model_is_not_computed_in_float64_without_the_exact_tier(family: str) -> None:
    found, reference = transformers_model(family, exact=False), oracle(family)
    assert all(logits.dtype == torch.float64 for logits in found.logits)
    assert relative(found.logits[0], reference.logits[0]) > 1e-9
    assert worst(found.gradients, reference.gradients) > 1e-9


@pytest.mark.parametrize("family", LONG_RUN)
def test_no_lower_precision_leaks_into_an_exact_step(family: str) -> None:
    assert transformers_model(family, exact=True).leaks == ()
    leaks = transformers_model(family, exact=False).leaks
    assert any("modeling_" in leak.where for leak in leaks)
    assert "aten._to_copy.default" in {leak.op for leak in leaks}


def test_fixtures_cannot_hide_a_bug() -> None:
    """Biases that are not zero, norm weights that differ from their neutral value, windows shorter than a document."""
    for family in FAMILIES:
        architecture = read_architecture(folder(family))
        for name, weight in load_weights(folder(family), architecture, torch.float64).items():
            neutral = 0.0 if name.endswith("bias") or architecture.norm.plus_one else 1.0
            assert weight.ndim > 1 or (weight - neutral).abs().mean() > 1e-3, name
        grouped = [layer.attention for layer in architecture.layers if isinstance(layer.attention, Attention)]
        assert all(attention.kv_heads < attention.heads for attention in grouped)
    pangu = read_architecture(folder("pangu")).layers[0].attention
    assert isinstance(pangu, Attention)
    assert pangu.biases == ("q", "k", "v", "o")
    for family in ("gemma2", "gemma3", "gpt-oss", "mistral", "phi3", "qwen2-yarn"):
        windows = [layer.attention.window for layer in read_architecture(folder(family)).layers]
        assert min(window for window in windows if window is not None) < len(LONG.tokens)
    kinds = {(u.attention.window, u.attention.rotary) for u in read_architecture(folder("gemma3")).layers}
    assert len(kinds) == 2


@pytest.mark.parametrize("family", ["llama3", "qwen2-yarn", "gpt-oss", "deepseek-v3", "deepseek-v2"])
def test_scaled_rope_has_kept_scaled_and_mixed_frequencies(family: str) -> None:
    rotary = read_architecture(folder(family)).layers[0].attention.rotary
    assert rotary
    assert rotary.scaling is not None
    plain, scaled = (frequencies(one, torch.float64) for one in (replace(rotary, scaling=None), rotary))
    assert scaled[0] == plain[0]
    assert plain[1] / rotary.scaling.factor < scaled[1] < plain[1]
    assert torch.allclose(scaled[2:], plain[2:] / rotary.scaling.factor, rtol=1e-15)


def test_a_packed_row_equals_its_documents_alone() -> None:
    packed = observe_sft(Batch(0, 64, (Row(0, (*DOCUMENTS, UNTAUGHT)),)), "gemma3")
    alone = observe_sft(BATCH, "gemma3")
    assert packed.values["loss"] == pytest.approx(alone.values["loss"], rel=1e-15, abs=0)
    assert packed.values["token_count"] == alone.values["token_count"] == BATCH.target_count
    together, apart = packed.rows["logprob"], alone.rows["logprob"]
    assert torch.equal(together[0], torch.cat([apart[i] for i in range(3)]))
    assert together[0].shape == (BATCH.target_count,)
    assert worst(packed.gradients["policy"], alone.gradients["policy"]) < 1e-15
    assert 3 not in apart, "a row without targets has no log-probs"


@pytest.mark.parametrize("family", ["pangu", "phi3", "qwen2-moe", "deepseek-v3"])
def test_products_of_more_tokens_are_the_same_but_for_rounding(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, sizes = observe_sft(BATCH, family), []

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        sizes.append(len(x))
        return F.linear(x, weight, bias)

    monkeypatch.setattr("conformance.oracle.primitives.F", SimpleNamespace(linear=linear, pad=F.pad))
    padded = observe_sft(BATCH, family, policy=replace(FLOAT64, tokens=64))
    assert set(sizes) == {64}
    assert padded.values["loss"] == pytest.approx(plain.values["loss"], rel=1e-15, abs=0)
    assert worst(padded.gradients["policy"], plain.gradients["policy"]) < 1e-14


def test_a_step_without_targets_is_an_error() -> None:
    with pytest.raises(ValueError, match="no target token"):
        observe_sft(Batch(0, 64, (Row(0, (UNTAUGHT,)),)), "llama")


def test_gradients_that_are_not_finite_are_an_error() -> None:
    model = policy_model("llama", precision="fp16")
    model.weights["lm_head.weight"] *= 1e6
    with pytest.raises(ValueError, match=r"not finite in torch\.float16"):
        observe(BATCH, [model], Sft(), POLICIES["fp16"])
    model = policy_model("llama")
    model.weights["model.norm.weight"][0] = float("nan")
    with pytest.raises(ValueError, match=r"weights that are not finite: model\.norm\.weight"):
        observe(BATCH, [model], Sft(), FLOAT64)


# Optimizers and clipping ------------------------------------------------------------------------------------


def random_tensors(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (5, 7), "bias": (5,), "norm": (7,)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def largest_difference(mine: Weights, theirs: list[Tensor]) -> float:
    return max(relative(w, t.detach()) for w, t in zip(mine.values(), theirs, strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_torchs(momentum: float) -> None:
    config = OptimizerConfig(name="sgd", lr=0.1, momentum=momentum)
    mine, own = random_tensors(0), Sgd(config)
    theirs = [w.clone().requires_grad_() for w in mine.values()]
    optimizer = torch.optim.SGD(theirs, lr=0.1, momentum=momentum)
    for step in range(6):
        gradients = random_tensors(1 + step)
        mine = own.step(mine, gradients, lr=0.1)
        for parameter, gradient in zip(theirs, gradients.values(), strict=True):
            parameter.grad = gradient
        optimizer.step()
    assert largest_difference(mine, theirs) < 2e-15


def test_adamw_is_torchs_and_decays_matrices_only() -> None:
    config = OptimizerConfig(name="adamw", lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.3)
    mine, own = random_tensors(0), AdamW(config)
    theirs = [w.clone().requires_grad_() for w in mine.values()]
    groups = [{"params": theirs[:1], "weight_decay": 0.3}, {"params": theirs[1:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for step in range(6):
        lr = 0.01 / (step + 1)
        gradients = random_tensors(1 + step)
        mine = own.step(mine, gradients, lr=lr)
        for parameter, gradient in zip(theirs, gradients.values(), strict=True):
            parameter.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    assert largest_difference(mine, theirs) < 2e-15


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_clipping_is_torchs(max_norm: float) -> None:
    gradients = random_tensors(3)
    theirs = [torch.zeros_like(g, requires_grad=True) for g in gradients.values()]
    for parameter, gradient in zip(theirs, gradients.values(), strict=True):
        parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert global_norm(gradients) == pytest.approx(norm.item(), rel=1e-15, abs=0)
    clipped = clip(gradients, global_norm(gradients), max_norm)
    assert largest_difference(clipped, [p.grad for p in theirs if p.grad is not None]) < 1e-15
    unclipped = clip(gradients, global_norm(gradients), None)
    assert all(torch.equal(unclipped[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("family", ["gemma3", "qwen3"])  # of tied weights and of others
def test_one_lookup_of_a_micro_batch_gives_the_gradients_of_its_documents(family: str) -> None:
    apart, at_once = (
        observe(BATCH, [policy_model(family)], Sft(), replace(FLOAT64, lookups=count)).gradients["policy"]
        for count in (0, 2)
    )
    assert largest_difference(at_once, [apart[name] for name in at_once]) < 1e-15


def test_in_bf16_one_lookup_of_a_micro_batch_loses_what_torch_loses_on_a_cpu() -> None:
    """Two micro-batches of two documents, each with one token 300 times."""
    generator = torch.Generator().manual_seed(1)
    gradients = (1 + torch.randn(4, 300, 8, generator=generator)).bfloat16()
    tokens = torch.ones(300, dtype=torch.long)
    matrix, lookup = torch.zeros(2, 8, requires_grad=True), OneLookup(NO_TAP)
    embed = partial(embedding_of, matrix)
    for row, gradient in enumerate(gradients):
        lookup.begins([(row, 0, Document(tuple(tokens.tolist()), (False,) * 300))])
        lookup.module("model.embed_tokens", embed, tokens).backward(gradient)
    for rows in ({0, 1}, {2, 3}):
        lookup.finish(rows)
    expected = torch.zeros(2, 8, requires_grad=True)
    for part in gradients.view(2, 600, 8):
        embedding_of(expected, torch.cat([tokens, tokens])).backward(part)
    assert matrix.grad is not None
    assert expected.grad is not None
    assert torch.equal(matrix.grad, expected.grad)
    right = gradients.double().sum(dim=(0, 1))
    assert (matrix.grad[1].double() - right).norm() > 0.01 * right.norm()


def embedding_of(matrix: Tensor, tokens: Tensor) -> Tensor:
    return F.embedding(tokens, matrix.bfloat16())


# Independence ------------------------------------------------------------------------------------------------------


def test_the_oracle_shares_no_code_with_backends_or_transformers() -> None:
    allowed = {"torch", "safetensors", "conformance"} | sys.stdlib_module_names
    for file in Path(conformance.oracle.__path__[0]).glob("*.py"):
        if file.name == "transformers_reference.py":  # of models that the oracle does not know; nothing else imports it
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                if file.name != "chat.py" or not module.startswith("jinja2"):  # the language of chat templates
                    assert module.partition(".")[0] in allowed, f"{file.name} imports {module}"
                assert not module.startswith(("torch.optim", "torch.nn.utils")), f"{file.name} imports {module}"
