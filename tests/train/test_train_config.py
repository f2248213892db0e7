"""The configuration of a training as JSON, and what is made of it before ranks train."""

import contextlib
import json
import os
import shutil
import signal
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_runs import training

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.spec.batch import Batch, Document, Row
from impl.interface.distributed import FileFailure
from impl.models.loading import load_model
from impl.train import launch
from impl.train.config import TrainConfig, from_json, to_json
from impl.train.loop import ModelSize, Speed, Stop, crosses, model_size, peak_of
from impl.train.setup import LARGE, check_same_settings, check_save_path, is_value_model, settings_of, write_critic

MODELS = FIXTURES / "models"


@pytest.mark.parametrize("kind", ["sft", "grpo", "ppo", "dpo"])
def test_a_configuration_survives_json(tmp_path: Path, kind: str) -> None:
    config = replace(training(tmp_path, kind, layout="dp2.tp2.seqpar"), options={"lr": 1e-3}, eval_dataset=tmp_path)
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layout": "dp3x"}, "layout: .*'dp3x'"),
        ({"device": "tpu"}, "device: .*'cpu' or 'cuda'"),
        ({"scenario": {"name": "x"}}, r"(?s)file\.json.*scenario.*model"),
        ({"output": {}}, r"output\.log"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_name_of_the_field(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        from_json({**to_json(training(tmp_path, "sft")), **change}, source="file.json")


def test_a_model_that_could_not_be_written_at_the_end_is_refused_at_the_beginning(tmp_path: Path) -> None:
    config = training(tmp_path, "sft")
    for folder, said in ((tmp_path, "would replace the log"), (config.models["policy"], "was loaded from")):
        with pytest.raises(UsageError, match=said):
            check_save_path(replace(config, output=replace(config.output, save_path=folder)))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_critic_is_made_of_a_language_models_layers_and_a_small_new_head(tmp_path: Path, name: str) -> None:
    source, made = MODELS / name, tmp_path / "critic"
    assert not is_value_model(source)
    write_critic(made, source=source, seed=1)
    assert is_value_model(made)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, made))
    assert before.keys() - after.keys() == ({"lm_head.weight"} & before.keys())
    assert all(torch.equal(after[key], before[key]) for key in before.keys() & after.keys())
    assert after["score.weight"].shape == (1, 64)
    assert 0 < after["score.weight"].std() < 2 / 65
    model = load_model(made, dtype=torch.float32, attention="eager", head="value")
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 1)
    write_critic(tmp_path / "again", source=source, seed=1)
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")["score.weight"], after["score.weight"])


@pytest.mark.usefixtures("foreground")
def test_the_first_signal_is_noted_and_the_second_does_what_it_always_does() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with Stop():
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == before


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop.requested
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_something_is_due_when_a_multiple_of_its_steps_has_passed() -> None:
    assert [after for after in range(1, 10) if crosses(after - 1, after, 3)] == [3, 6, 9]
    assert [after for after in range(4, 20, 4) if crosses(after - 4, after, 6)] == [8, 12]


def test_the_operations_of_a_step_count_each_documents_attention_for_itself() -> None:
    size = ModelSize(parameters=1000, attention=10)
    assert size.flops([2, 3]) == 6 * 1000 * 5 + 12 * 10 * (4 + 9)
    documents = tuple(Document((1,) * n, (False,) * n) for n in (2, 3))
    speed = Speed(models={"policy": size}, peak=1e6).of(Batch(0, 8, (Row(0, documents),)), seconds=0.5)
    assert speed == {
        "training/tokens": 5,
        "training/samples": 2,
        "timing_s/update": 0.5,
        "perf/tokens_per_second": 10.0,
        "perf/mfu": pytest.approx(31560 / 0.5 / 1e6),
    }
    assert Speed(models={"policy": size}, peak=None).of(Batch(0, 8, (Row(0, documents),)), 0.5)["perf/mfu"] is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("Tesla V100-PCIE-16GB", None),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),  # as fast as that without a slot, by the data sheet
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA L40", None),
        ("NVIDIA H20", None),
    ],
)
def test_the_peak_of_a_device_is_known_by_a_whole_word_of_its_name(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


@pytest.mark.parametrize("name", ["llama", "qwen3", "pangu", "gemma3"])
def test_the_size_of_a_model_leaves_out_an_embedding_that_is_no_head(name: str) -> None:
    model = load_model(MODELS / name, dtype=torch.float32, attention="eager")
    embedding = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    size = model_size(MODELS / name, "causal")
    assert size.parameters == sum(p.numel() for p in model.parameters()) - embedding
    attention = {layer.self_attn.q_proj.out_features for layer in model.get_decoder().layers}
    assert size.attention == model.config.get_text_config().num_hidden_layers * attention.pop()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_size_of_a_critic_has_neither_embedding_nor_language_head(tmp_path: Path, name: str) -> None:
    """Of a value model, and of a language model that is made one: the folder of the tied one has no head of its own."""
    write_critic(tmp_path / "critic", source=MODELS / name, seed=1)
    model = load_model(tmp_path / "critic", dtype=torch.float32, attention="eager", head="value")
    computing = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    for folder in (tmp_path / "critic", MODELS / name):
        assert model_size(folder, "value").parameters == computing


@pytest.mark.parametrize(("error", "code"), [(FileFailure("the disk is full"), 1), (UsageError("a wrong option"), 2)])
def test_exit_code_of_a_rank_tells_a_failure_from_wrong_usage(
    error: Exception, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise error

    (file := tmp_path / "config.json").write_text(json.dumps(to_json(training(tmp_path, "sft"))))
    monkeypatch.setattr(launch, "limited_waits", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(launch, "train", fail)
    assert launch.main(str(file)) == code
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize(
    ("schedule", "lr", "words"),
    [
        ("cosine", 3e-3, "schedule.total_steps 2, now 3; the learning rate would jump"),
        ("constant", 0.1, "optimizer.lr 0.003, now 0.1"),
        ("constant", 3e-3, ""),
    ],
)
def test_only_a_schedule_of_the_same_rates_is_lengthened(tmp_path: Path, schedule: str, lr: float, words: str) -> None:
    before, now = (
        training(
            tmp_path,
            "sft",
            steps=steps,
            schedule={"name": schedule, "total_steps": steps, "warmup_steps": 1},
            optimizer={"name": "adamw", "lr": rate},
        )
        for steps, rate in ((2, 3e-3), (3, lr))
    )
    with refused(words):
        resume(before, now)


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (("sft", {}), ("dft", {}), "objective.kind 'sft', now 'dft'"),
        (("dpo", {"beta": 0.1}), ("dpo", {"beta": 0.5}), "objective.beta 0.1, now 0.5; .* the loss would be another"),
        (("dpo", {}), ("dpo", {}), ""),
    ],
)
def test_a_training_does_not_resume_with_another_objective(tmp_path: Path, before: Any, now: Any, words: str) -> None:
    with refused(words):
        resume(*(training(tmp_path, kind, objective=fields) for kind, fields in (before, now)))


@pytest.mark.parametrize(("beta", "words"), [(0.1, ""), (0.5, "objective.beta 0.1, now 0.5")])
def test_a_field_that_a_checkpoint_lacks_had_its_default(tmp_path: Path, beta: float, words: str) -> None:
    now = training(tmp_path, "dpo", objective={"beta": beta})
    default = training(tmp_path, "dpo").scenario
    before = settings_of(default, now.models)
    for part in ("optimizer", "schedule", "objective"):
        known = asdict(getattr(default, part))
        for field in fields(getattr(default, part)):
            if field.default is not MISSING and known[field.name] == field.default:
                before[part].pop(field.name, None)
    with refused(words):
        check_same_settings(now, before, step=2, source=tmp_path)


@pytest.mark.parametrize(("kind", "role"), [("dpo", "reference"), ("distillation", "teacher")])
def test_a_training_does_not_resume_with_another_frozen_model(tmp_path: Path, kind: str, role: str) -> None:
    before, copied = training(tmp_path, kind), tmp_path / "moved"
    shutil.copytree(before.models[role], copied)
    resume(before, replace(before, models={**before.models, role: copied}))
    with refused(f"trained with another {role} than the model in .*pangu"):
        resume(before, replace(before, models={**before.models, role: FIXTURES / "models" / "pangu"}))


def test_a_frozen_model_that_differs_in_one_byte_is_another(tmp_path: Path) -> None:
    before, copied = training(tmp_path, "dpo"), tmp_path / "moved"
    shutil.copytree(before.models["reference"], copied)
    weights = copied / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with refused("trained with another reference"):
        resume(before, replace(before, models={**before.models, "reference": copied}))


def test_a_large_frozen_model_is_read_again_once_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path / "cache"))
    now = training(tmp_path, "dpo")
    reference = shutil.copytree(now.models["reference"], tmp_path / "reference")
    now = replace(now, models={**now.models, "reference": reference})
    weights = reference / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(LARGE)
    before = settings_of(now.scenario, now.models)
    kept = list((tmp_path / "cache" / "digests").iterdir())
    assert settings_of(now.scenario, now.models) == before
    assert list((tmp_path / "cache" / "digests").iterdir()) == kept
    modified = weights.stat()
    with weights.open("r+b") as file:
        file.seek(LARGE // 2)
        file.write(b"1")
    os.utime(weights, ns=(modified.st_atime_ns, modified.st_mtime_ns))
    assert settings_of(now.scenario, now.models) != before


def resume(before: TrainConfig, now: TrainConfig) -> None:
    check_same_settings(now, settings_of(before.scenario, before.models), step=2, source=Path("checkpoints"))


def refused(words: str) -> contextlib.AbstractContextManager[object]:
    return pytest.raises(UsageError, match=words) if words else contextlib.nullcontext()
