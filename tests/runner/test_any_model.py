"""Models that the oracle does not know: transformers' own implementation is the reference; every verdict says so."""

import functools
import json
import re
import shutil
from dataclasses import replace
from itertools import filterfalse
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from any_models import RECURRENT, cell_with, make_model
from cells import assert_honest, exhaustive, slow
from fsdp2_tasks import value_folder
from safetensors.torch import load_file, save_file
from test_oracle import BASE, BATCH, FLOAT64, FURTHER, ROUTED, folder, relative, worst

from conformance.backends.protocol import BackendEntry, Unsupported
from conformance.cli.main import main
from conformance.core.errors import UsageError
from conformance.matrix.cell import Cell
from conformance.models.folders import model_sizes
from conformance.numerics.float64_tier import exact_tier
from conformance.oracle.decoder import is_buffer
from conformance.oracle.primitives import HONEST as RIGHT
from conformance.oracle.role_model import Decoder, read_decoder
from conformance.oracle.step import Model, Observed, observe
from conformance.oracle.transformers_reference import TransformersDecoder
from conformance.results.requirements import summary_lines
from conformance.results.run_results import Run, cell_summary, read_entry, summary_of
from conformance.runner.session import Session
from conformance.spec.batch import Row
from conformance.spec.layout import Layout
from conformance.spec.observables import POLICY
from conformance.spec.offline import Sft
from conformance.spec.precision import PrecisionName
from conformance.spec.scenario import LoraConfig
from impl.interface.micro_batches import collate
from impl.models.loading import load_model

NAMED = "second-class reference, transformers .*: errors that transformers itself makes are not seen"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Each kind of any_models.py is made once, when it is asked for."""
    parent = tmp_path_factory.mktemp("models")
    return functools.cache(lambda kind: make_model(kind, parent / kind.lower()))


def edited(model: Path, to: Path, **changes: Any) -> Path:
    """A folder with the configuration of another, changed, and with its weights."""
    to.mkdir()
    values = json.loads((model / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**values, **changes}))
    (to / "model.safetensors").symlink_to(model / "model.safetensors")
    return to


def decoder_of_transformers(model: Path) -> TransformersDecoder:
    return TransformersDecoder(model, disable_dropout=False, trusted=False)


def observed(decoder: Decoder, model: Path) -> Observed:
    """A step of SFT in float64, on documents that any of the fixtures' tokenizers could give."""
    weights = decoder.load(model, torch.float64, RIGHT, trained=True, devices=["cpu"])
    role = Model(role=POLICY, decoder=decoder, weights=weights, trained=frozenset(filterfalse(is_buffer, weights)))
    return observe(BATCH, [role], Sft(), FLOAT64)


# --- the two oracles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*BASE, *map(exhaustive, FURTHER)])
def test_on_every_family_of_the_oracle_transformers_agrees_with_it(family: str, tmp_path: Path) -> None:
    model = folder(family)
    if family in ROUTED:  # with the loss of their routers, transformers' own is refused
        model = edited(model, tmp_path / family, output_router_logits=False)
    own = observed(read_decoder(model), model)
    with exact_tier():
        other = observed(decoder_of_transformers(model), model)
    assert other.values["loss"] == pytest.approx(own.values["loss"], rel=1e-14, abs=0)
    assert max(relative(other.rows["logprob"][i], row) for i, row in own.rows["logprob"].items()) < 1e-14
    assert other.gradients["policy"].keys() == own.gradients["policy"].keys()
    assert worst(other.gradients["policy"], own.gradients["policy"]) < 1e-13


@pytest.mark.parametrize("family", ["pangu", exhaustive("gemma3")])
def test_and_so_it_does_as_a_value_model(family: str, tmp_path: Path) -> None:
    critic = value_folder(family, tmp_path / "critic")
    tokens = torch.tensor(BATCH.documents[0].tokens)
    with exact_tier():
        found = []
        for decoder in (read_decoder(critic), decoder_of_transformers(critic)):
            weights = decoder.load(critic, torch.float64, RIGHT, trained=True, devices=["cpu"])
            assert set(decoder.parameter_names("value")) == weights.keys()
            found.append(decoder.forward(tokens, weights, FLOAT64))
    own, other = found
    assert other.shape == (len(tokens), 1)
    assert relative(other, own) < 1e-14


def test_what_transformers_gets_wrong_this_reference_gets_wrong_too(monkeypatch: pytest.MonkeyPatch) -> None:
    right = observed(read_decoder(folder("llama")), folder("llama")).values["loss"]
    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda self, x: 1.5 * forward(self, x))
    with exact_tier():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder("llama"), dtype=torch.float64)
        losses = [model(torch.tensor([d.tokens]), labels=torch.tensor([_labels(d)])).loss for d in BATCH.documents[:3]]
        counts = [sum(d.targets) for d in BATCH.documents[:3]]
        wrong = sum(loss.item() * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
        other = observed(decoder_of_transformers(folder("llama")), folder("llama")).values["loss"]
    assert other == pytest.approx(wrong, rel=1e-13, abs=0)
    assert abs(other - right) > 1e-3


def _labels(document: Any) -> list[int]:
    return [token if is_target else -100 for token, is_target in zip(document.tokens, document.targets, strict=True)]


def test_the_oracle_of_its_own_is_taken_wherever_there_is_one(models: Any) -> None:
    assert not read_decoder(folder("qwen3")).second_class
    whose = read_decoder(models("GPTNeoX")).second_class
    assert whose == f"transformers {transformers.__version__}'s own GPTNeoXForCausalLM"


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_dropout": 0.1}, "sets hidden_dropout=0.1, which makes two runs differ at random"),
        ({"output_router_logits": True}, "no objective includes a router's auxiliary loss"),
        ({"model_type": "no-such"}, "which the oracle does not know, and transformers' own code cannot build"),
        ({"model_type": "t5"}, "which the oracle does not know, and transformers' own code cannot build"),
        ({"model_type": "mamba"}, "names MambaForCausalLM, which takes no position_ids"),
        ({"model_type": "minimax", "layer_types": ["linear_attention"] * 2}, "layers of kind linear_attention carry"),
    ],
)
def test_a_model_that_no_oracle_can_compute_is_refused(
    models: Any, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read_decoder(edited(models("GPTNeoX"), tmp_path / "edited", **changes))


def test_sizes_are_read_under_the_names_that_gpt2_has_for_them(models: Any, tmp_path: Path) -> None:
    assert model_sizes(models("GPT2")) == {"heads": 4, "kv_heads": 4, "layers": 2, "experts": 0}
    assert model_sizes(edited(models("GPT2"), tmp_path / "one", multi_query=True))["kv_heads"] == 1
    for missing in ("n_head", "n_layer"):
        with pytest.raises(
            UsageError, match=r"config.json has none of num_(attention_heads|hidden_layers), .*; add one"
        ):
            model_sizes(edited(models("GPT2"), tmp_path / missing, **{missing: None}))


def test_weights_of_another_model_are_refused(models: Any, tmp_path: Path) -> None:
    larger = edited(models("GPTNeoX"), tmp_path / "larger", num_hidden_layers=3)
    with pytest.raises(UsageError, match=r"do not fit its config.json: missing keys \['gpt_neox.layers.2"):
        read_decoder(larger).check_weights(larger)


@pytest.mark.parametrize(
    ("backend", "layout", "reason"),
    [
        # transformers 5.17 has no plan for it; 5.23 has one, for layers that this model lacks.
        (
            "fsdp2",
            "tp2",
            "(the .* plan of Granite.* shards nothing of this model|Granite.* carries no .* plan); use tp1",
        ),
        ("fsdp2", "tp2", "StableLmForCausalLM carries no tensor-parallel plan; use tp1"),
        ("deepspeed", "tp2", "StableLmForCausalLM carries no tensor-parallel plan; use tp1"),
        ("fsdp2", "sp2", "the attention of StableLmForCausalLM cannot be replaced"),
        ("deepspeed", "ulysses2", "the attention of StableLmForCausalLM cannot be replaced"),
        ("fsdp2", "tp2.seqpar", "seqpar has no tensor-parallel plan for 'stablelm'; leave it out"),
        ("fsdp2", "tp2", "layers of BambaForCausalLM carry state from token to token, .*; use tp1 and sp1"),
        ("deepspeed", "sp2", "layers of BambaForCausalLM carry state"),
        ("fsdp2", "dp2.compile", "layers of Bamba.* carry state and get documents one by one"),
        ("megatron", "dp2", "StableLmForCausalLM is not among the architectures that are built here on megatron-core"),
    ],
)
def test_a_layout_that_the_model_does_not_allow_is_refused_with_the_reason(
    models: Any, backend: str, layout: str, reason: str
) -> None:
    kind = "GraniteMoeHybrid" if "Granite" in reason else "Bamba" if "Bamba" in reason else "StableLm"
    cell = cell_with(models(kind), backend=backend, scenario="sft-packed", layout=layout, precision="exact")
    answer = cell.phases[0].backend.load().supports(cell.scenario, Layout.parse(layout))
    assert isinstance(answer, Unsupported)
    assert re.match(reason, answer.reason)


@pytest.mark.parametrize(
    ("option", "value"), [("lora", LoraConfig(r=2, lora_alpha=4, target_modules=("q_proj",))), ("router_z_loss", 0.1)]
)
def test_what_only_the_oracle_computes_is_unsupported(session: Session, models: Any, option: str, value: Any) -> None:
    cell = cell_with(models("Olmoe"), backend="fsdp2", scenario="sft-packed", layout="dp2", precision="exact")
    refused = session.refusal(replace(cell, scenario=replace(cell.scenario, **{option: value})))
    assert refused
    assert refused.state == "unsupported"
    assert "are judged only for families that the oracle computes itself" in refused.reason


@pytest.mark.parametrize("kind", ["GPTNeoX", "llama"])
def test_a_plan_needs_a_configuration_only(
    kind: str, models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = folder(kind) if kind == "llama" else models(kind)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(whole / "config.json", bare)
    chosen = ["--backend", "fsdp2", "--scenario", "sft-packed", "--layout", "dp2,tp2", "--precision", "fp32"]
    planned = []
    capsys.readouterr()  # making a model may import DeepSpeed, which prints a warning
    for model in (whole, bare):
        assert main(["plan", "--model", str(model), *chosen]) == 0
        planned.append(capsys.readouterr().out.replace(f"/{model.name}/", "/any/").splitlines())
    assert [line.split()[1:5] for line in planned[0][:3]] == [line.split()[1:5] for line in planned[1][:3]]
    assert f"{bare} has no safetensors weights: shapes are those of its config.json" in planned[1][-1]
    assert main(["run", "--model", str(bare), *chosen, "--out", str(tmp_path / "out")]) == 2
    assert "has no model.safetensors" in capsys.readouterr().err
    (bare / "pytorch_model.bin").touch()
    assert main(["plan", "--model", str(bare), *chosen]) == 0
    unread = "(pytorch_model.bin is not read; convert it to safetensors before a run)"
    assert f"{bare} has no safetensors weights {unread}: shapes" in capsys.readouterr().out


def test_a_plan_with_what_autotp_does_not_know_is_refused(models: Any) -> None:
    cell = cell_with(models("Glm4Moe"), backend="deepspeed", scenario="sft-packed", layout="tp2", precision="exact")
    answer = cell.phases[0].backend.load().supports(cell.scenario, cell.phases[0].layout)
    assert isinstance(answer, Unsupported)
    assert answer.reason.startswith("AutoTP does not know moe_tp_experts, packed_colwise, which")


def test_what_autotp_knows_is_what_deepspeed_says() -> None:
    converter = pytest.importorskip("deepspeed.module_inject.tp_plan_converter")
    from impl.deepspeed.adapter import STYLES

    assert converter.SUPPORTED_STYLES == STYLES


# --- cells -----------------------------------------------------------------------------------------------------------


def test_unknown_architecture_conforms_and_names_reference(session: Session, models: Any, tmp_path: Path) -> None:
    published = Path(shutil.copytree(models("GPTNeoX"), tmp_path / "published"))
    file = published / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"num_mtp_layers": 1, "use_magic": 3, "use_mrope": False})
    )
    cell = cell_with(published, backend="fsdp2", scenario="sft-packed", layout="dp2", precision="exact")
    verdict = assert_honest(session, cell)
    unread = "num_mtp_layers=1 (multi-token prediction), use_magic=3 (transformers does not read it)"
    assert f"not judged: {unread}" in verdict.reason
    assert verdict.second_class == read_decoder(models("GPTNeoX")).second_class
    entry = read_entry(session.config.out / "cells" / cell.slug / "verdict.json")
    assert entry.verdict == verdict
    told = cell_summary(entry)
    assert told["second_class"] == verdict.second_class
    assert re.search(NAMED, verdict.reason)
    summary = summary_of(Run(started="", finished="", seconds=0.0, profile="", device="cpu", command=""), [told])
    assert summary_lines(summary)[-1].startswith("second-class reference: 1 judged by transformers' own implementation")


def test_a_defect_of_the_model_on_the_ranks_alone_is_caught(session: Session, models: Any) -> None:
    cell = cell_with(models("GPTNeoX"), backend="fsdp2", scenario="sft-packed", layout="dp2", precision="exact")
    wrong = BackendEntry(name="wrong", target="any_models:WrongMlp")
    verdict = session.run(Cell.single(scenario=cell.scenario, backend=wrong, layout=Layout.parse("dp2"))).verdict
    assert verdict.state == "differs"
    assert verdict.first_stage == "log-probs"
    assert re.search(NAMED, verdict.reason)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["exact", "fp32"])
@pytest.mark.parametrize(
    ("kind", "backend", "layout"),
    [
        *(("GPTNeoX", "fsdp2", layout) for layout in ("dp2", "tp2", "sp2", "sp2.ring", "dp2.tp2")),
        *(("GPTNeoX", "deepspeed", layout) for layout in ("dp2.zero2", "dp2.zero3", "tp2", "sp2", "ulysses2")),
        *(("StableLm", *rest) for rest in (("fsdp2", "dp2"), ("deepspeed", "dp2.zero2"), ("deepspeed", "dp2.zero3"))),
        *(("Olmoe", *rest) for rest in (("fsdp2", "dp2"), ("fsdp2", "tp2"), ("deepspeed", "dp2.zero2"))),
        *(("GPT2", *rest) for rest in (("fsdp2", "dp2"), ("fsdp2", "sp2"), ("deepspeed", "dp2.zero3"))),
        ("GPT2", "deepspeed", "dp2.zero3.leaf"),
        *(("Glm4Moe", "fsdp2", layout) for layout in ("tp2", "sp2")),
        *(("Glm4Moe", "deepspeed", layout) for layout in ("dp2.zero2", "dp2.zero3", "sp2")),
    ],
)
def test_models_that_nobody_made_a_fixture_of_conform(
    session: Session, models: Any, kind: str, backend: str, layout: str, precision: PrecisionName
) -> None:
    cell = cell_with(models(kind), backend=backend, scenario="sft-packed", layout=layout, precision=precision)
    if precision == "exact":
        assert_honest(session, cell)
    else:
        verdict = session.run(cell).verdict
        assert verdict.state == "conforms", verdict.reason


@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "layout"), [("fsdp2", "dp2"), ("deepspeed", "dp2.zero2")])
def test_documents_are_kept_apart_in_code_that_makes_masks_without_positions(
    session: Session, models: Any, backend: str, layout: str
) -> None:
    """AFMoE's code balances experts by a parameter that it freezes."""
    cell = cell_with(models("Afmoe"), backend=backend, scenario="sft-packed", layout=layout, precision="exact")
    verdict = assert_honest(session, cell)
    assert "not judged: updates of model.layers.1.mlp.expert_bias, which the model's code freezes" in verdict.reason


@pytest.mark.parametrize("kind", ["Bamba", *(slow(kind) for kind in RECURRENT if kind != "Bamba")])
def test_recurrent_layers_keep_packed_documents_apart(models: Any, kind: str) -> None:
    documents = tuple(BATCH.documents[:3])
    packed = collate([Row(index=0, documents=documents), *BATCH.rows[:1]])
    with exact_tier():
        decoder = decoder_of_transformers(models(kind))
        weights = decoder.load(models(kind), torch.float64, RIGHT, trained=False, devices=["cpu"])
        model = load_model(models(kind), dtype=torch.float64, attention=None)
        found = model(input_ids=packed.tokens, position_ids=packed.positions, use_cache=False).logits[0]
        right = torch.cat([decoder.forward(torch.tensor(d.tokens), weights, FLOAT64) for d in documents])
    assert relative(found[: len(right)].detach(), right) < 1e-14


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "backend", "layout"),
    [
        *((kind, *rest) for kind in RECURRENT for rest in (("fsdp2", "dp2"), ("deepspeed", "dp2.zero2"))),
        *(("Bamba", "deepspeed", layout) for layout in ("dp2.zero1", "dp2.zero3", "dp2.zero3.ckpt")),
        *(("Bamba", "fsdp2", layout) for layout in ("dp2.ckpt", "dp2.rep2")),
    ],
)
@pytest.mark.parametrize("precision", ["exact", "fp32"])
def test_recurrent_models_conform(
    session: Session, models: Any, kind: str, backend: str, layout: str, precision: PrecisionName
) -> None:
    cell = cell_with(models(kind), backend=backend, scenario="sft-packed", layout=layout, precision=precision)
    verdict = session.run(cell).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.exhaustive
def test_a_buffer_of_a_router_is_compared_and_not_trained(session: Session, models: Any) -> None:
    """As a weight of the model that is loaded, by both sides."""
    cell = cell_with(models("Glm4Moe"), backend="fsdp2", scenario="sft-packed", layout="dp2", precision="exact")
    verdict = assert_honest(session, cell)
    assert any(q.tensor.endswith("e_score_correction_bias") for q in verdict.quantities if q.stage == "weights")


@pytest.mark.exhaustive
@pytest.mark.parametrize("scenario", ["grpo", "ppo", "sft-padded"])
@pytest.mark.parametrize(("backend", "layout"), [("fsdp2", "dp2"), ("fsdp2", "tp2"), ("deepspeed", "dp2.zero2")])
def test_roll_outs_and_critics_work_with_any_model(
    session: Session, models: Any, scenario: str, backend: str, layout: str
) -> None:
    cell = cell_with(models("GPTNeoX"), backend=backend, scenario=scenario, layout=layout, precision="exact")
    verdict = assert_honest(session, cell)
    assert verdict.second_class


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("        super().__init__(config)", "KeyError: 'type'"),
        ("        outputs = self.model(", "AttributeError: 'HomeMadeConfig' object has no attribute 'type'"),
    ],
)
def test_code_older_than_transformers_is_refused(place: str, message: str, tmp_path: Path) -> None:
    """As InternLM2.5's, which reads rope_scaling as transformers 4 gave it."""
    mine = home_made(tmp_path)
    file = mine / "modeling_openpangu_dense.py"
    fails = "{}['type']" if "KeyError" in message else "self.config.type"
    before, _, last = file.read_text().rpartition(place)
    file.write_text(f"{before}        {fails}\n{place}{last}")
    with pytest.raises(UsageError, match=f"the Python code of the folder cannot build .* transformers .*: {message}"):
        read_decoder(mine, trusted=True)


def home_made(tmp_path: Path) -> Path:
    """A folder with code of a model type that nobody knows, whose tied weights are a list."""
    mine = Path(shutil.copytree(folder("pangu"), tmp_path / "mine"))
    for file in (*mine.glob("*.py"), mine / "config.json"):
        text = file.read_text().replace("PanguEmbedded", "HomeMade").replace(*LISTED)
        file.write_text(text.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    weights = load_file(mine / "model.safetensors")
    save_file({n: w for n, w in weights.items() if n != "lm_head.weight"}, mine / "model.safetensors", {"format": "pt"})
    return mine


LISTED = '{"lm_head.weight": "model.embed_tokens.weight"}', '["lm_head.weight"]'  # as in transformers 4


@pytest.mark.exhaustive
def test_code_of_a_folder_is_the_reference_where_nobody_else_knows_the_model(session: Session, tmp_path: Path) -> None:
    mine = home_made(tmp_path)
    cell = cell_with(mine, backend="fsdp2", scenario="sft-packed", layout="dp2", precision="exact", trusted=True)
    assert assert_honest(session, cell).second_class == "the folder's own HomeMadeForCausalLM"
    with pytest.raises(UsageError, match="add --trust-remote-code if you trust it"):
        session.run(replace(cell, scenario=replace(cell.scenario, trust_remote_code=False)))
