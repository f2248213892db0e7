"""Real data and a real size: GSM8K's format on all backends, and a model of 56 million parameters.

The second takes some ten minutes and 12 GB of memory for each cell, on two cores.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cells import BACKENDS, cell_of
from gsm8k import write_problems
from memory import memory_of_tree

from conformance.core.host import FIXTURES, HostResources
from conformance.matrix.options import Selection
from conformance.matrix.profile import select_cells
from conformance.runner.preflight import needs_of
from conformance.runner.session import Session
from conformance.spec.precision import PrecisionName

pytestmark = pytest.mark.exhaustive
ROOT = Path(__file__).parents[2]
GIB = 2**30
FACTOR = 1.5  # between what was estimated and what was measured
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 512,
    "head_dim": 64,
    "intermediate_size": 1408,
    "max_position_embeddings": 2048,
    "model_type": "qwen3",
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": 32_000,
}
PROFILE = """
description = "a large model"
steps = 2
[[cells]]
scenarios = ["sft-packed"]
models = ["qwen3"]
layouts = ["dp2"]
precisions = ["exact", "fp32"]
"""


@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2", "megatron"])
def test_problems_in_the_format_of_gsm8k_conform_as_they_are(session: Session, backend: str, tmp_path: Path) -> None:
    asked = cell_of(backend, "sft-packed", "qwen3", "dp2", "exact")
    file = write_problems(tmp_path / "train.jsonl", count=200, seed=0)
    data = replace(asked.scenario.data, path=str(file), max_len=512, too_long="drop")
    verdict = session.run(replace(asked, scenario=replace(asked.scenario, data=data))).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model ``large`` and the profile ``large.toml``."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "large.toml").write_text(PROFILE)
    made = [str(ROOT / "benchmarks/random_model.py"), str(folder / "config"), str(FIXTURES / "models/qwen3")]
    subprocess.run([sys.executable, *made, str(folder / "large")], check=True, cwd=ROOT)
    return folder


@pytest.mark.parametrize("precision", ["exact", "fp32"])
@pytest.mark.parametrize("backend", sorted(set(BACKENDS) & {"deepspeed", "fsdp2", "megatron"}))
def test_a_model_of_56_million_parameters_conforms_in_the_room_that_was_estimated(
    large: Path, tmp_path: Path, backend: str, precision: PrecisionName
) -> None:
    chosen = Selection(
        profile=str(large / "large.toml"),
        backend=(backend,),
        model=str(large / "large"),
        cells=(f"*/{precision}",),
    )
    needs = needs_of(select_cells(chosen), HostResources(memory=24 * GIB, disk=1e12, cache=None))
    assert not needs.impossible
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "conformance.cli.main",
        "run",
        *chosen.arguments(without="cells"),
        "--cells",
        f"*/{precision}",
    ]
    environment = {**os.environ, "PARITY_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([*command, "--out", str(out), "--keep", "all"], cwd=ROOT, env=environment)
    peak = 0
    while run.poll() is None:
        peak = max(peak, memory_of_tree(run.pid))
        time.sleep(0.5)
    assert run.returncode == 0
    assert peak < 24 * GIB
    assert needs.total.host / FACTOR < peak < needs.total.host * FACTOR
    records = sum(file.stat().st_size for file in out.rglob("*.safetensors") if not file.is_symlink())
    batches = sum(file.stat().st_size for file in out.glob("inputs/*.safetensors"))
    assert needs.total.disk / FACTOR < records - batches < needs.total.disk * FACTOR
