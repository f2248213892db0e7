"""The findings in docs/findings: each script still shows what its page says, and each is written up and listed.

A script exits with 0 as long as this version of the library behaves as its page says. When one fails here after an
upgrade, read its output: the library may have been fixed, and then page, index and our work-around can go.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from script_forks import Forker

from conformance.core.packages import is_installed

FINDINGS = Path(__file__).parents[2] / "docs" / "findings"
HELPERS = {"flash_attn_stand_in.py", "megatron_on_cpu.py"}  # what several scripts import
# Scripts that need a GPU, each with the package that it needs as well.
ON_GPUS = {"inductor_ranks_choose.py": "", "transformer_engine_tf32.py": "transformer-engine"}
SCRIPTS = sorted(path for path in FINDINGS.glob("*.py") if path.name not in HELPERS)
PLAIN = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.multiprocessing",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)


def page_of(script: Path) -> Path:
    return script.with_name(script.stem.replace("_", "-") + ".md")


def index_rows() -> list[str]:
    return [line for line in (FINDINGS / "README.md").read_text().splitlines() if line.startswith("| [")]


def test_there_are_findings() -> None:
    assert SCRIPTS


@pytest.fixture(scope="module")
def plain() -> Iterator[Forker]:
    """What all scripts import, whatever they are about."""
    with Forker.start(FINDINGS, PLAIN) as forker:
        yield forker


@pytest.fixture(scope="module")
def deepspeed(plain: Forker) -> Iterator[Forker]:
    """DeepSpeed chooses its accelerator when it is imported, by a variable that each of its scripts sets before."""
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
    family = script.stem.partition("_")[0]
    forker: Forker = request.getfixturevalue(family if family in ("deepspeed", "megatron") else "plain")
    done = forker.run(script, timeout=600 if script.name in ON_GPUS else 120)
    assert done.returncode == 0, f"{script.name}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_page_names_its_script_and_the_index_lists_it(script: Path) -> None:
    page = page_of(script)
    assert f"python docs/findings/{script.name}" in page.read_text()
    assert sum(f"]({page.name})" in row for row in index_rows()) == 1


def test_index_links_lead_to_pages_with_a_script() -> None:
    linked = {link for row in index_rows() for link in re.findall(r"\]\(([\w-]+\.md)\)", row)}
    assert linked == {page_of(script).name for script in SCRIPTS}
