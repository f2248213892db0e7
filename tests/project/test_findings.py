"""Each script in docs/findings still shows the defect that its page describes, in the releases that have it.

A script exits with 0 as long as this version of the library behaves as its page says. When one fails after an upgrade,
read its output: the library may have been fixed, and then the page and the workaround can go.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from script_forks import Forker

from conformance.core.packages import is_installed
from impl.models.support import is_older

FINDINGS = Path(__file__).parents[2] / "docs" / "findings"
HELPERS = {"flash_attn_stand_in.py", "megatron_on_cpu.py"}  # what several scripts import
# Scripts that need a GPU, each with the package that it needs as well.
ON_GPUS = {
    "deepspeed_bf16_clip.py": "",
    "inductor_ranks_choose.py": "",
    "megatron_remainder_checkpoints.py": "transformer-engine",
    "transformer_engine_tf32.py": "transformer-engine",
}
NEWER = {  # scripts about releases from this one on
    "megatron_fsdp_counted_update.py": ("megatron-core", 0, 17),
    "megatron_fsdp_kept.py": ("megatron-core", 0, 18),
}
TORCH = {  # scripts about releases of torch from the first on, and before the second
    "compiled_class_of_constants.py": ((0,), (2, 13)),
    "compiled_collective_inputs.py": ((2, 12), (99,)),
    "deepspeed_compiled_biases.py": ((2, 11), (2, 12)),
}
FURTHER = {"megatron_muon_parts.py": "emerging-optimizers"}  # scripts that need a package beside the library
SCRIPTS = sorted(path for path in FINDINGS.glob("*.py") if path.name not in HELPERS)
PLAIN = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.multiprocessing",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)


def test_each_script_has_a_page() -> None:
    assert SCRIPTS
    assert not [script for script in SCRIPTS if not script.with_name(f"{script.stem.replace('_', '-')}.md").exists()]


@pytest.fixture(scope="module")
def plain() -> Iterator[Forker]:
    """A process that has imported what all scripts import."""
    with Forker.start(FINDINGS, PLAIN) as forker:
        yield forker


@pytest.fixture(scope="module")
def deepspeed(plain: Forker) -> Iterator[Forker]:
    """DeepSpeed chooses its accelerator at import, by a variable that each of its scripts sets first."""
    pytest.importorskip("deepspeed")
    modules = "deepspeed.ops", "deepspeed.runtime.engine", "torch._inductor.compile_fx"  # the first engine imports it
    with plain.branch(modules, environment={"DS_ACCELERATOR": "cpu"}) as forker:
        yield forker


@pytest.fixture(scope="module")
def megatron(plain: Forker) -> Iterator[Forker]:
    pytest.importorskip("megatron.core")
    with plain.branch(("megatron_on_cpu",), environment={}) as forker:
        yield forker


@pytest.mark.exhaustive  # a library's defect changes with the library, not with our code
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_script_shows_the_defect(script: Path, request: pytest.FixtureRequest) -> None:
    if script.name in ON_GPUS and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if (package := ON_GPUS.get(script.name)) and not is_installed(package):
        pytest.skip(f"needs {package}")
    if (release := NEWER.get(script.name)) and is_older(*release):
        pytest.skip(f"about {release[0]} from {'.'.join(map(str, release[1:]))} on")
    if (package := FURTHER.get(script.name)) and not is_installed(package):
        pytest.skip(f"needs {package}")
    family = script.stem.partition("_")[0]
    if family in ("bridge", "llamafactory", "openrlhf", "swift", "torchao", "trl", "verl", "vllm"):  # not installed
        pytest.importorskip("megatron.bridge" if family == "bridge" else family)
    forker: Forker = request.getfixturevalue(family if family in ("deepspeed", "megatron") else "plain")
    done = forker.run(script, timeout=600 if script.name in ON_GPUS else 120)
    since, until = TORCH.get(script.name, ((0,), (99,)))
    is_gone = is_older("torch", *since) or not is_older("torch", *until)
    assert done.returncode == is_gone, f"{script.name}\n{done.stdout}\n{done.stderr}"
    assert not (is_gone and "Traceback" in done.stderr), done.stderr
