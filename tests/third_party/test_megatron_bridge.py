"""Megatron-Bridge's conversion against ours: each tensor of a rank bit by bit, both ways, and settings of the model.

Bridge runs as released, in an environment of its lock file (frameworks/megatron_bridge), without TransformerEngine.
What differs is listed here, model by model; everything else has to agree.
"""

import json
import os
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from conformance.core.environments import Environment, Unmade, make_environment
from conformance.core.host import FIXTURES
from impl.models.lazy_weights import published_buffers

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "frameworks" / "megatron_bridge" / "requirements.lock"
PROGRAM = ROOT / "tests" / "support" / "bridge_conversion.py"
SAME = 2e-6  # relative error of logits in float32; honest ones: at most 5e-7


class Case(NamedTuple):
    """A model with changes of its configuration.

    differs: settings in which Bridge's provider differs from the configuration in silence. parallel: whether it is
    converted with tensor parallelism of 2, too.
    """

    model: str
    changes: dict[str, Any]
    differs: tuple[str, ...] = ()
    parallel: bool = False


LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SPARSE = {"num_hidden_layers": 2, "mlp_only_layers": []}
UNTIED = {"attention_bias": False, "tie_word_embeddings": False}  # as DeepSeek publishes V3
CASES = {
    "llama": Case("llama", {}, parallel=True),
    "llama3": Case("llama3", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192}}),
    "llama3-short": Case("llama3", {}, differs=("llama3",)),
    "mistral": Case("mistral", {"sliding_window": None}),
    "mistral-window": Case("mistral", {}, differs=("windows",)),
    "qwen2": Case("qwen2", {}, parallel=True),
    "qwen2-yarn": Case("qwen2-yarn", {}, differs=("position_embedding_type", "windows")),
    "qwen3": Case("qwen3", {}, parallel=True),
    "qwen3-odd": Case("qwen3-odd", {}),
    "qwen3-moe": Case("qwen3-moe", SPARSE, parallel=True),
    "qwen3-moe-dense": Case("qwen3-moe", {}, differs=("expert_layers",)),
    "gpt-oss": Case("gpt-oss", {}, differs=("windows", "yarn")),
    "deepseek-v2": Case("deepseek-v2", {}, parallel=True),
    "deepseek-v3": Case("deepseek-v3", UNTIED, parallel=True),
    "gemma3": Case("gemma3", {}),
}
pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def python() -> str:
    """An interpreter with Bridge, whose lock file's other packages are those of this one where versions agree."""
    pins = re.findall(r"^([\w.-]+)==(\S+)$", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    try:
        made = make_environment(Environment(requirements=tuple(f"{n}=={v}" for n, v in pins if installed(n) != v)))
    except Unmade as error:
        pytest.skip(f"the environment of {LOCK.relative_to(ROOT)} cannot be made: {error}")
    return made.python


def installed(name: str) -> str:
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return ""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(case, root / name) for name, case in CASES.items()}


def write_model(case: Case, out: Path) -> Path:
    """Writes a model with random weights, and its configuration as transformers 4 spells it, which Bridge pins."""
    values = json.loads((FIXTURES / "models" / case.model / "config.json").read_text()) | case.changes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    with torch.no_grad():
        for tensor in (*model.parameters(), *published_buffers(model).values()):
            tensor.copy_(torch.randn(tensor.shape) * 0.2)
    model.save_pretrained(out)
    values |= {"torch_dtype": values.pop("dtype")}
    rope = values.pop("rope_parameters")
    if "full_attention" in rope:  # Gemma 3
        values["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    values["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] != "default":
        values["rope_scaling"] = rope
    if case.model == "deepseek-v3":
        values["scoring_func"] = "sigmoid"  # a published key that transformers does not have
    (out / "config.json").write_text(json.dumps(values))
    return out


def converted(python: str, size: int, out: Path, *folders: Path) -> dict[str, Any]:
    """Runs the program in as many processes as tensor parallelism has ranks."""
    common = {"WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [python, str(PROGRAM), str(out), *map(str, folders)],
            env={**os.environ, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    texts = [rank.communicate(timeout=900)[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "\n".join(text[-3000:] for text in texts)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def whole(python: str, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return converted(python, 1, tmp_path_factory.mktemp("whole") / "found.json", *folders.values())


@pytest.mark.parametrize("name", [name for name in CASES if name != "gemma3"])
def test_weights_and_settings(whole: dict[str, Any], name: str) -> None:
    found, differs = whole[name], CASES[name].differs
    assert tuple(sorted(found["settings"])) == tuple(sorted(differs)), found["settings"]
    if "expert_layers" in differs:
        assert all(".layers.1.mlp." in one for one in found["not loaded"])
        assert found["not loaded"], "Bridge warns, and leaves a dense layer as it was initialised"
        return
    assert not found["not loaded"]
    assert not found["unlike ours"]
    assert not found["unlike the files"]
    assert found["loaded"] > 10 < found["exported"]
    if not name.startswith("deepseek"):
        assert (found["logits"] < SAME) == (not differs), found["logits"]


def test_each_tensor_of_gemma3_has_a_mapping(whole: dict[str, Any]) -> None:
    """This backend has no Gemma 3 on megatron-core, and Bridge's needs TransformerEngine."""
    assert whole["gemma3"] == {"without a mapping": []}


def test_parts_of_tensor_parallel_ranks(python: str, folders: dict[str, Path], tmp_path: Path) -> None:
    names = [name for name, case in CASES.items() if case.parallel]
    found = converted(python, 2, tmp_path / "found.json", *(folders[name] for name in names))
    for name in names:
        assert not found[name]["not loaded"], name
        assert not found[name]["unlike ours"], (name, found[name])
        assert not found[name]["unlike the files"], (name, found[name])


def test_a_configuration_of_transformers_5(python: str, tmp_path: Path) -> None:
    """transformers 4 knows no rope_parameters, so Bridge takes the default base of rotary positions, in silence."""
    folder = tmp_path / "llama"
    shutil.copytree(FIXTURES / "models" / "llama", folder)
    found = converted(python, 1, tmp_path / "found.json", folder)["llama"]
    assert found["settings"] == {"rotary_base": [10000.0, 500000.0]}
    assert not found["unlike ours"]
    assert found["logits"] < SAME, "the reference is transformers 4, which is wrong in the same way"
