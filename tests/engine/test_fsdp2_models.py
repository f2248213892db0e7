"""FSDP2's contexts and trainables, without the engine: several models at a time, every output, any layout."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cells import exhaustive, ranks_of
from fsdp2_tasks import OPTIMIZER, smaller_vocabulary, value_folder

from conformance.core.host import FIXTURES
from conformance.runtime import Pool
from conformance.spec.layout import Layout

FAMILIES = ["pangu", "llama", "qwen3", "gemma3"]
HONEST = 1e-12  # relative error of a parameter's gradient or update in the exact tier

Run = Callable[..., list[Any]]


@pytest.fixture
def run_ranks(pool: Pool, tmp_path: Path) -> Run:
    def run(task: str, layout: str, **arguments: Any) -> list[Any]:
        size = Layout.parse(layout).world_size
        outcome = pool.run(
            key="fsdp2 models",
            config=ranks_of("fsdp2", size),
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


def trio(family: str, critics: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """A frozen reference, the policy that starts from it, and a value model."""
    policy = str(FIXTURES / "models" / family)
    return {
        "reference": {"folder": policy, "head": "causal", "want": ["logprobs"], "trained": False},
        "policy": {"folder": policy, "head": "causal", "want": ["logprobs", "entropy"], "trained": True},
        "critic": {"folder": str(critics[family]), "head": "value", "want": ["values"], "trained": True},
    }


def worst(results: list[dict[str, dict[str, float]]]) -> float:
    return max(error for result in results for errors in result.values() for error in errors.values())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("layout", "family"),
    [
        *itertools.product(["tp2", "tp2.plan", "tp2.seqpar.losspar", "sp2"], FAMILIES),
        ("dp2.ckpt.offload", "llama"),
        ("dp2", "pangu"),
        ("dp2.ckpt.offload", "gemma3"),
        ("dp2.rep2.lastsync", "llama"),
        ("dp2.tp2", "qwen3"),
        ("tp2.losspar", "gemma3"),
        ("tp2.seqpar", "pangu"),
        ("sp2.zigzag", "llama"),
        ("sp2.tp2.seqpar.losspar", "qwen3"),
    ],
)
def test_a_policy_a_critic_and_a_frozen_reference_side_by_side_are_plain_models(
    run_ranks: Run, critics: dict[str, Path], layout: str, family: str
) -> None:
    results = run_ranks("errors_of_models", layout, models=trio(family, critics))
    assert worst(results) < HONEST, results


@pytest.mark.parametrize("layout", ["dp2", exhaustive("sp2.torchcp"), exhaustive("tp2.seqpar.losspar")])
def test_the_same_holds_for_rows_of_one_document_that_are_padded(
    run_ranks: Run, critics: dict[str, Path], layout: str
) -> None:
    results = run_ranks("errors_of_models", layout, models=trio("llama", critics), packed=False)
    assert worst(results) < HONEST, results


@pytest.mark.parametrize("layout", ["tp2.losspar", exhaustive("dp2.tp2.seqpar.losspar")])
def test_indivisible_vocabulary_is_sharded(run_ranks: Run, tmp_path: Path, layout: str) -> None:
    odd = smaller_vocabulary("gemma3", tmp_path / "odd")
    models = {"policy": {"folder": str(odd), "head": "causal", "want": ["logprobs", "entropy"], "trained": True}}
    results = run_ranks("errors_of_models", layout, models=models)
    assert worst(results) < HONEST, results


def test_offload_keeps_parameters_on_host_and_not_buffers(
    run_ranks: Run,
) -> None:
    results = run_ranks("offloaded", "dp2.offload", folder=str(FIXTURES / "models" / "qwen3"))
    assert results == [{"parameters": ["cpu"], "buffers": ["meta"]}] * 2


@pytest.mark.parametrize("layout", ["tp2", exhaustive("dp2.tp2")])
def test_gathered_tensors_are_copies_of_those_that_were_cut(run_ranks: Run, layout: str) -> None:
    assert not any(run_ranks("gathered_wrongly", layout))


@pytest.mark.parametrize(("vocabulary", "sizes"), [(264, [88, 88, 88]), (7, [3, 3, 1]), (4, [2, 2, 0])])
def test_vocabulary_shards_begin_where_dtensor_cuts(run_ranks: Run, vocabulary: int, sizes: list[int]) -> None:
    results = run_ranks("vocabulary_shards", "tp3", vocabulary=vocabulary)
    assert [result["size"] for result in results] == sizes
    assert [result["start"] for result in results] == [0, sizes[0], sizes[0] + sizes[1]]
    assert max(result["error"] for result in results) < 1e-15


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("tp2.losspar", "bf16"),
        *(exhaustive(*one) for one in (("sp2", "fp16"), ("tp2.losspar", "fp16"), ("sp2", "bf16"))),
    ],
)
def test_outputs_of_models_in_half_precision_are_float32_and_near(
    run_ranks: Run, critics: dict[str, Path], layout: str, precision: str
) -> None:
    for result in run_ranks("low_precision", layout, precision=precision, models=trio("qwen3", critics)):
        for output, found in result.items():
            assert found["dtypes"] == ["torch.float32"], output
            assert found["error"] < 0.02, (output, found)


@pytest.mark.parametrize(
    ("layout", "precision"), [("dp2", "fp16"), exhaustive("tp2.seqpar", "fp32"), exhaustive("sp2", "fp16")]
)
def test_a_checkpoint_holds_all_that_a_step_depends_on(
    run_ranks: Run, critics: dict[str, Path], tmp_path: Path, layout: str, precision: str
) -> None:
    models = trio("gemma3", critics)
    for result in run_ranks("resume", layout, precision=precision, models=models, out=str(tmp_path / "saved")):
        for found in result.values():
            assert found["same"]
            assert found["lr"] == pytest.approx(0.75 * OPTIMIZER.lr)
            assert found["loss scale"] == (2.0**9 if precision == "fp16" else 1.0)


@pytest.mark.parametrize(
    ("family", "layout"), [("pangu", "dp2"), exhaustive("gemma3", "tp2"), exhaustive("qwen3", "tp2.seqpar.losspar")]
)
def test_a_written_model_is_the_folder_that_was_loaded_with_the_weights_of_now(
    run_ranks: Run, critics: dict[str, Path], tmp_path: Path, family: str, layout: str
) -> None:
    models = trio(family, critics)
    for result in run_ranks("export", layout, models=models, out=str(tmp_path / "written")):
        for name, found in result.items():
            assert found == {"stored": True, "loaded": True, "files": True, "changed": models[name]["trained"]}
