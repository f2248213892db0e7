"""Runs at real size, with shapes of a few thousand parameters: random weights, sketches, planted bugs, devices."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import BACKENDS, exhaustive
from conftest import make_cell
from safetensors import safe_open

from conformance.backends.protocol import BackendEntry, find_backend
from conformance.cli import main as cli
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.core.packages import is_installed
from conformance.data.inputs import prepare_inputs
from conformance.data.tokenizer import load_tokenizer
from conformance.matrix.cell import Cell
from conformance.models import synthetic
from conformance.models.components import parameter_shapes
from conformance.models.families import read_architecture
from conformance.models.folders import weight_shapes
from conformance.models.synthetic import RECIPE, draw_weights, is_large, is_sketched, shapes_of, with_skeleton
from conformance.oracle.decoder import device_of, load_weights
from conformance.oracle.role_model import SPARE, bytes_needed, devices_for
from conformance.oracle.run import POLICIES, run_oracle
from conformance.records.step_tensors import Record, read_record
from conformance.results.run_results import read_run
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session
from conformance.runtime.gpu_inventory import gpus_of_host
from conformance.spec.batch import read_batches
from conformance.spec.layout import Layout
from conformance.spec.observables import CRITIC, Role
from conformance.spec.scenario import ADAPTER, WEIGHTS_FILE, LoraConfig, Scenario, load_scenario

SMALL = {
    **{"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 3000},
}
POLICY = Role(name="policy")


def shrunk(folder: Path, **changes: Any) -> Path:
    """A random model in the shape of openPangu-1B with smaller numbers, beside the small model that it is like."""
    for name in ("pangu", "openpangu-embedded-1b"):
        shutil.copytree(FIXTURES / "models" / name, folder / name)
    config = folder / "openpangu-embedded-1b" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | SMALL | changes))
    return config.parent


def scenario_of(model: Path, name: str = "sft-real", **changes: Any) -> Scenario:
    file = FIXTURES / "scenarios" / f"{name}.toml"
    return load_scenario(file, model=with_skeleton(str(model)), precision="exact", **changes)


# --- random models ----------------------------------------------------------------------------------------------------


def test_drawn_weights_are_reproducible_and_never_neutral(tmp_path: Path) -> None:
    scenario = scenario_of(shrunk(tmp_path / "models"), "grpo-real")
    planned = prepare_inputs(scenario, tmp_path / "out", draws=False)
    assert not list(planned.models["policy"].glob("*.safetensors"))
    folders = [prepare_inputs(scenario, tmp_path / out).models for out in ("out", "again")]
    architecture = read_architecture(folders[0]["policy"])
    first, again = (load_weights(models["policy"], architecture, torch.float64) for models in folders)
    assert {name: tuple(weight.shape) for name, weight in first.items()} == parameter_shapes(architecture)
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())
    assert all(weight.std() > 0.01 for weight in first.values())
    assert all(abs(w.mean() - 1) < 0.1 for name, w in first.items() if name.endswith("norm.weight"))
    reference = load_weights(folders[0]["reference"], architecture, torch.float64)
    apart = {name: ((weight - first[name]).norm() / weight.norm()).item() for name, weight in reference.items()}
    assert all(0.01 < distance < 0.1 for distance in apart.values())


def test_tokens_reach_the_whole_vocabulary_and_special_ones_stay(tmp_path: Path) -> None:
    scenario = scenario_of(shrunk(tmp_path / "models"), "sft-real", steps=1)
    small, large = (load_tokenizer(folder) for folder in (FIXTURES / "models" / "pangu", Path(scenario.model)))
    assert (large.eos_token_id, large.pad_token_id) == (small.eos_token_id, small.pad_token_id)
    text = "94 minus 5? Sum of 92, 7 and 6?"
    assert large.decode(large.encode(text)) == text
    for name in ("sft-real", "grpo-real"):
        batches = prepare_inputs(scenario_of(tmp_path / "models" / "openpangu-embedded-1b", name), tmp_path / "out")
        with safe_open(batches.batches, framework="pt") as file:
            tokens = torch.cat([file.get_tensor(key).flatten() for key in file.keys() if "tokens" in key])  # noqa: SIM118
        assert 2700 < int(tokens.max()) < 3000
        assert len(tokens.unique()) > 60


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"like": "nothing"}, "nothing"),
        ({"like": "../pangu"}, "like"),
        ({"seed": -1}, "seed"),
        ({"sead": 1}, "sead"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    model = shrunk(tmp_path / "models")
    values = {"seed": 0, "like": "pangu"} | change
    (model / RECIPE).write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items()))
    with pytest.raises(UsageError, match=said):
        with_skeleton(str(model))


def test_a_vocabulary_smaller_than_the_small_models_is_refused_and_a_value_model_has_a_head(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be the smaller one"):
        with_skeleton(str(shrunk(tmp_path / "models", vocab_size=300)))
    model = synthetic.random_model(Path(with_skeleton(str(shrunk(tmp_path / "others")))))
    assert model
    shutil.copytree(tmp_path / "others/openpangu-embedded-1b", critic := tmp_path / "critic")
    draw_weights(model, scenario_of(tmp_path / "others/openpangu-embedded-1b"), CRITIC, critic)
    shapes = weight_shapes(critic)
    assert shapes["score.weight"] == (1, model.architecture.hidden_size)
    assert shapes.keys() ^ model.shapes().keys() <= {"score.weight", "lm_head.weight"}
    (kind,) = json.loads((critic / "config.json").read_text())["architectures"]
    assert kind.endswith("ForSequenceClassification")


LORA = LoraConfig(r=2, lora_alpha=3, target_modules=("q_proj", "down_proj"))


def test_an_adapter_is_drawn_beside_random_weights_and_a_reference_is_its_base(tmp_path: Path) -> None:
    scenario = replace(scenario_of(shrunk(tmp_path / "models"), "grpo-real"), lora=LORA)
    models = prepare_inputs(scenario, tmp_path / "out").models
    architecture = read_architecture(models["policy"])
    policy, reference = (load_weights(models[name], architecture, torch.float64) for name in ("policy", "reference"))
    assert all(torch.equal(weight, reference[name]) for name, weight in policy.items())
    assert (models["policy"] / ADAPTER / WEIGHTS_FILE).is_file()
    assert not (models["reference"] / ADAPTER).exists()


@pytest.mark.exhaustive
def test_adapters_on_random_weights_are_judged_by_sketches_and_not_merged(session: Session, tmp_path: Path) -> None:
    scenario = replace(scenario_of(shrunk(tmp_path / "models"), steps=2), lora=LORA, sketch=64)
    assert is_sketched(scenario)
    cell = Cell.single(scenario=scenario, backend=BACKENDS["fsdp2"], layout=Layout.parse("dp2"))
    verdict = session.run(cell).verdict
    assert verdict.state == "conforms", verdict.reason
    first = replace(cell.phases[0], steps=1, save="merge")
    with pytest.raises(UsageError, match="give --sketch a number that no matrix exceeds"):
        session.refusal(replace(cell, phases=(first, replace(first, save=None)), program="merge"))


@pytest.mark.parametrize(("size", "elements"), [("1b", 1.16e9), ("7b", 8.03e9)])
def test_the_published_shapes_are_large_and_sketched(size: str, elements: float) -> None:
    folder = FIXTURES / "models" / f"openpangu-embedded-{size}"
    scenario = scenario_of(folder)
    assert sum(torch.Size(shape).numel() for shape in shapes_of(Path(scenario.model)).values()) == pytest.approx(
        elements, rel=0.01
    )
    assert is_large(scenario)
    assert is_sketched(scenario)
    assert not is_sketched(scenario_of(folder, sketch=10**10))


# --- where the oracle computes ----------------------------------------------------------------------------------------


def test_layers_are_placed_in_turn_and_what_is_around_them_at_the_ends() -> None:
    architecture = read_architecture(FIXTURES / "models" / "openpangu-embedded-7b")
    devices = [device_of(name, architecture, ["a", "b", "c"]) for name in parameter_shapes(architecture)]
    assert devices == sorted(devices)
    assert {devices.count(device) for device in "abc"} <= {11 * 13, 11 * 13 + 1, 12 * 13 + 1, 11 * 13 + 2}
    assert {device_of(name, architecture, ["cpu"]) for name in parameter_shapes(architecture)} == {"cpu"}


def test_a_model_takes_as_many_gpus_as_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 139 * 2**30
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free, free))
    one_b, seven_b = (FIXTURES / "models" / f"openpangu-embedded-{size}" for size in ("1b", "7b"))
    for folder, name, gpus in ((one_b, "grpo-real", 1), (seven_b, "sft-real-sgd", 2)):
        scenario = scenario_of(folder, name)
        roles = {role.name: Path(scenario.model) for role in scenario.objective.roles}
        each = sum(torch.Size(shape).numel() for shape in shapes_of(Path(scenario.model)).values())
        monkeypatch.setattr("conformance.oracle.role_model.elements_of", lambda models, each=each: each)
        needed = bytes_needed(scenario, roles, POLICIES["float64"])
        assert devices_for("cuda:0", needed) == [f"cuda:{gpu}" for gpu in range(gpus)]
        assert needed / gpus < free * (1 - SPARE)
    assert devices_for("cpu", 10**15) == ["cpu"]


@pytest.mark.parametrize(
    ("free", "needed", "taken"),
    [
        ([80, 80], 50, [0]),
        ([80, 80], 60, [0, 1]),
        ([1, 80], 50, [1]),  # another program has filled the first one
        ([80, 1, 80], 100, [0, 2]),
        ([80, 40, 80], 110, [0, 2]),
        ([10, 10], 50, [0, 1]),  # too little anyway
    ],
)
def test_gpus_that_another_program_has_filled_are_left_out(
    monkeypatch: pytest.MonkeyPatch, free: list[int], needed: int, taken: list[int]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free[gpu], 80))
    assert devices_for("cuda:0", needed) == [f"cuda:{gpu}" for gpu in taken]


def conditioned_size(key: str, tensors: dict[str, torch.Tensor]) -> float:
    """What the error of a tensor is relative to: its norm, but of small differences of log-probs, and of the terms
    that are their squares, the norm of what the errors of two log-probs make of them."""
    kind, _, row = key.partition("/")
    if kind == "reference_kl":
        return 2 * float(tensors[f"reference.logprob/{row}"].norm())
    if kind == "kl_loss_terms":
        return 2 * float((tensors[f"reference.logprob/{row}"] * tensors[f"reference_kl/{row}"]).norm())
    return float(tensors[key].norm())


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU, or two")
@pytest.mark.parametrize(
    ("name", "size"),
    [("sft-real", "shrunk"), ("grpo-real", "shrunk"), exhaustive("sft-real", "1.16 B")],
)
def test_the_oracle_computes_the_same_on_one_gpu_and_on_two_as_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, size: str
) -> None:
    real = FIXTURES / "models" / "openpangu-embedded-1b"
    scenario = scenario_of(shrunk(tmp_path / "models") if size == "shrunk" else real, name)
    inputs = prepare_inputs(scenario, tmp_path / "out")

    def run(*devices: str) -> Record:
        monkeypatch.setattr("conformance.oracle.run.devices_for", lambda *_: devices)
        run_oracle(
            scenario=scenario,
            models=inputs.models,
            batches=read_batches(inputs.batches),
            out=(out := tmp_path / "-".join(devices)),
            policy_name="float64",
            device="cpu" if devices == ("cpu",) else "cuda:0",
        )
        return read_record(out)

    right = run("cpu")
    placed = [["cuda:0"], ["cuda:0", "cuda:1"], ["cuda:1"]]  # the last where another program has filled the first GPU
    for found in [run(*devices) for devices in placed[: 1 if torch.cuda.device_count() < 2 else None]]:
        for own, reference in zip((found.loaded, *found.steps), (right.loaded, *right.steps), strict=True):
            theirs = reference.tensors()
            for key, tensor in own.tensors().items():
                assert (tensor - theirs[key]).norm() <= 1e-13 * conditioned_size(key, theirs), key


def test_ranks_of_a_large_model_begin_when_its_oracle_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = make_cell("sft-packed", "pangu", "dp2", "exact", steps=1, rows=6)
    monkeypatch.setattr(synthetic, "LARGE_MODELS", 0)
    with Session(SessionConfig(out=tmp_path / "out")) as session:
        monkeypatch.setattr(session._oracles, "wait", lambda *_: "the oracle failed")
        verdict = session.run(cell).verdict
    assert (verdict.state, verdict.reason) == ("infrastructure", "the oracle failed")
    assert not (session.folder(cell) / "legs").exists()


# --- planted bugs -----------------------------------------------------------------------------------------------------


def planted(name: str) -> BackendEntry:
    return BackendEntry(name=name.lower(), target=f"planted_backends:{name}")


HEAD_NORMS = [f"model.layers.{i}.self_attn.{x}_norm.weight" for i in (1, 0) for x in "qk"]


@pytest.mark.parametrize(
    ("backend", "fault", "model", "layout", "tensors", "where"),
    [
        exhaustive(planted("WrongBias"), (), "pangu", "dp2", ["model.layers.1.self_attn.o_proj.bias"], ""),
        (planted("WrongRow"), (), "pangu", "dp2", ["lm_head.weight"], "row 203 by sketch"),
        exhaustive(planted("WrongRow"), (), "pangu", "dp2.tp2", ["lm_head.weight"], ""),
        (find_backend("megatron"), ("norms-not-summed",), "qwen3", "tp2", HEAD_NORMS, ""),
    ],
)
def test_a_planted_bug_is_located_to_the_tensor(
    session: Session,
    backend: BackendEntry,
    fault: tuple[str, ...],
    model: str,
    layout: str,
    tensors: list[str],
    where: str,
) -> None:
    cell = make_cell("sft-packed", model, layout, "exact", backend=backend, steps=1, rows=6, faults=fault, sketch=64)
    verdict = session.run(cell).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", "gradients"), verdict.reason
    assert "by sketches" in verdict.reason
    found = [f for f in verdict.findings if f.stage == "gradients"]
    assert {f.tensor.partition(" ")[0] for f in found} == set(tensors)
    assert where in {f.where for f in found} or not where


# https://huggingface.co/Qwen/Qwen3-1.7B/blob/main/config.json: 1.72 billion parameters, and norms of queries and keys
QWEN3_1_7B = {
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "vocab_size": 151936},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960},
}


@pytest.fixture(scope="module")
def real_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random models of published shapes, beside the small ones that they are like."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("pangu", "qwen3", "openpangu-embedded-1b"):
        shutil.copytree(FIXTURES / "models" / name, folder / name)
    (qwen := folder / "qwen3-1.7b").mkdir()
    (qwen / "config.json").write_text(json.dumps(json.loads((folder / "qwen3/config.json").read_text()) | QWEN3_1_7B))
    (qwen / RECIPE).write_text('seed = 0\nlike = "qwen3"\n')
    return folder


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    config = SessionConfig(out=tmp_path_factory.mktemp("on-gpus"), device="cuda", gpus=gpus_of_host()[:2])
    with Session(config) as session:
        yield session


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("backend", "fault", "model", "layout", "tensors"),
    [
        (planted("WrongBias"), (), "openpangu-embedded-1b", "dp2", {"model.layers.1.self_attn.o_proj.bias"}),
        (planted("WrongRow"), (), "openpangu-embedded-1b", "dp2", {"model.embed_tokens.weight"}),
        (
            find_backend("megatron"),
            ("norms-not-summed",),
            "qwen3-1.7b",
            "tp2",
            {f"model.layers.{i}.self_attn.{x}_norm.weight" for i in range(28) for x in "qk"},
        ),
    ],
)
def test_a_planted_bug_is_located_to_the_tensor_among_a_billion_parameters(
    on_gpus: Session,
    real_models: Path,
    backend: BackendEntry,
    fault: tuple[str, ...],
    model: str,
    layout: str,
    tensors: set[str],
) -> None:
    scenario = scenario_of(real_models / model, steps=1)
    cell = Cell.single(scenario=scenario, backend=backend, layout=Layout.parse(layout), faults=fault)
    verdict = on_gpus.run(cell).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", "gradients"), verdict.reason
    assert "by sketches" in verdict.reason
    assert {f.tensor.partition(" ")[0] for f in verdict.findings if f.stage == "gradients"} == tensors


# --- the profile ------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "cells",
    [
        ["sft-real/*/exact", "sft-real-sgd/*/exact", "grpo-real/*/exact"],
        ["grpo-real/*/fp32", "grpo-real-half/*/bf16"],
    ],
)
def test_the_profile_real_size_conforms_in_a_shape_that_fits_here(tmp_path: Path, cells: list[str]) -> None:
    model = shrunk(tmp_path / "models")
    chosen = [option for pattern in cells for option in ("--cells", pattern)]
    all_conform(tmp_path / "out", "--profile", "real-size", "--model", str(model), *chosen)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cells", ["sft-real/*/megatron/pp4/exact", "*"])
def test_the_profile_of_four_gpus_conforms_in_a_shape_that_fits_here(tmp_path: Path, cells: str) -> None:
    model = shrunk(tmp_path / "models", num_hidden_layers=6)  # four stages of a pipeline, not all of one size
    all_conform(tmp_path / "out", "--profile", "real-size-4gpus", "--model", str(model), "--cells", cells)


def all_conform(out: Path, *arguments: str) -> None:
    assert cli.main(["run", *arguments, "--sketch", "64", "--out", str(out)]) == 0
    for entry in read_run(out)[1]:
        state, reason = entry.verdict.state, entry.verdict.reason
        if "te" in Layout.parse(entry.layout).options and not is_installed("transformer-engine"):
            assert state == "unsupported"
            assert re.match("te needs TransformerEngine|there is no GPU, and te needs one", reason)
        else:
            assert state == "conforms", reason
            assert "parameters are compared by sketches" in reason
