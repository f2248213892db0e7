"""Model folders that are wrong: a usage error that names the file, before ranks are started."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import cell_of
from safetensors.torch import load_file, save_file

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.data.inputs import prepare_inputs

Damage = Callable[[Path], object]
WEIGHTS = "model.safetensors"


def cut(size: int) -> Damage:
    return lambda model: (model / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[:size])


def tensors(**changes: torch.Tensor | None) -> Damage:
    def damage(model: Path) -> None:
        held = load_file(model / WEIGHTS) | {name.replace("_dot_", "."): t for name, t in changes.items()}
        save_file({name: t for name, t in held.items() if t is not None}, model / WEIGHTS, metadata={"format": "pt"})

    return damage


def config(**changes: Any) -> Damage:
    def damage(model: Path) -> None:
        values = json.loads((model / "config.json").read_text()) | changes
        (model / "config.json").write_text(json.dumps(values))

    return damage


def text(file: str, content: str) -> Damage:
    return lambda model: (model / file).write_text(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(cut(-1000), "{model}/model.safetensors is not a readable safetensors file: .*", id="cut"),
        pytest.param(
            cut(50),
            "{model}/model.safetensors is not a readable .*; copy or download it again$",
            id="cut in its header",
        ),
        pytest.param(cut(0), "{model}/model.safetensors is not a readable safetensors file: ", id="empty"),
        pytest.param(
            tensors(model_dot_norm_dot_weight=torch.zeros(3)),
            r"{model} do not fit its config.json: model.norm.weight has shape \(3,\) instead of \(64,\)",
            id="shape",
        ),
        pytest.param(
            tensors(model_dot_norm_dot_weight=None), "{model} do not fit .*: model.norm.weight is missing", id="missing"
        ),
        pytest.param(
            tensors(model_dot_other=torch.zeros(3)), "{model} do not fit .*: model.other is not expected", id="extra"
        ),
        pytest.param(text("config.json", "{\n x"), "{model}/config.json is not JSON: .* line 2 column 2", id="no JSON"),
        pytest.param(
            text("config.json", '{"model_type": "qwen3"}'), "{model}/config.json does not say 'num_", id="short config"
        ),
        pytest.param(config(hidden_size="big"), "{model}/config.json sets hidden_size='big'; it must be", id="type"),
        pytest.param(
            text("config.json", '{"a": {"b": 1},\n"b": 2,\n"c": {"d": "}", "e": 1},\n"b": 3}'),
            "{model}/config.json, lines 2 and 4: an object has the key 'b' twice; remove one of them",
            id="a key twice",
        ),
        pytest.param(text("tokenizer_config.json", "{"), "{model}/tokenizer_config.json is not JSON", id="tokenizer"),
    ],
)
def test_a_model_folder_that_is_wrong_is_a_usage_error(tmp_path: Path, damage: Damage, said: str) -> None:
    model = Path(shutil.copytree(FIXTURES / "models" / "qwen3", tmp_path / "mine"))
    damage(model)
    scenario = replace(cell_of("fsdp2", "sft-packed", "llama", "dp2", "exact").scenario, model=str(model))
    with pytest.raises(UsageError, match=said.replace("{model}", re.escape(str(model)))):
        prepare_inputs(scenario, tmp_path / "out")
