"""FSDP2's contexts and trainables, without the engine: several models at a time, every output, any layout."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsdp2_tasks import value_folder

from conformance.layout import Layout
from conformance.paths import FIXTURES
from conformance.world import Pool, WorldConfig

FAMILIES = ["pangu", "llama", "qwen3", "gemma3"]
HONEST = 1e-12  # relative error of a parameter's gradient or update in the exact tier

Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(work_dir=tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture
def run_ranks(pool: Pool, tmp_path: Path) -> Run:
    def run(task: str, layout: str, **arguments: Any) -> list[Any]:
        size = Layout.parse(layout).world_size
        outcome = pool.run(
            key="fsdp2",
            config=WorldConfig(size=size, device="cpu", preload=("fsdp2_tasks",)),
            task=f"fsdp2_tasks:{task}",
            kwargs={"layout": layout, **arguments},
            log_dir=tmp_path,
            budget_s=120,
        )
        assert outcome.state == "done", outcome.reason
        return outcome.results

    return run


@pytest.fixture(scope="module")
def critics(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: value_folder(family, tmp_path_factory.mktemp("critic") / family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "layout",
    ["dp2", "dp2.rep2.lastsync", "tp2", "tp2.plan", "tp2.seqpar", "tp2.losspar", "sp2", "dp2.ckpt.offload", "dp2.tp2"],
)
def test_an_actor_a_critic_and_a_frozen_reference_side_by_side_are_plain_models(
    run_ranks: Run, critics: dict[str, Path], family: str, layout: str
) -> None:
    results = run_ranks("errors_of_models", layout, models=trio(family, critics), packed=True)
    assert max(error for result in results for model in result.values() for error in model.values()) < HONEST, results


def trio(family: str, critics: dict[str, Path]) -> dict[str, dict[str, Any]]:
    policy = str(FIXTURES / "models" / family)
    return {
        "reference": {"folder": policy, "head": "causal", "want": ["logprobs"], "trained": False},
        "policy": {"folder": policy, "head": "causal", "want": ["logprobs", "entropy"], "trained": True},
        "critic": {"folder": str(critics[family]), "head": "value", "want": ["values"], "trained": True},
    }
