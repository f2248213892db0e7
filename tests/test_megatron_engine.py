"""TransformerEngine's layers under megatron-core, the layout option ``te``: who claims it, where it runs, what is seen.

They need the package and a GPU, so cells of them run on GPU machines only, at the end of this file.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cells import BACKENDS, cell_of
from conftest import make_cell
from judge_sample import evidence, unchanged, verdict_of

from conformance.asking import adapter_of
from conformance.backend import BackendEntry, Unsupported
from conformance.gpus.inventory import gpus_of_host
from conformance.gpus.shares import shares_of
from conformance.layout import Layout
from conformance.packages import is_installed
from conformance.run.evidence import ENGINE, Watch
from conformance.run.legs import world_config
from conformance.run.session import Session, SessionConfig
from conformance.scenario import Precision
from conformance.validation import UsageError
from impl.megatron.convert import FUSED
from impl.megatron.start import megatron_context
from impl.strategy import ContextConfig

INSTALLED = is_installed("transformer-engine")
GPUS = torch.cuda.device_count()


@pytest.mark.parametrize(
    ("model", "layout", "precision", "advice"),
    [
        ("llama", "dp2.te", "exact", "no float64; use fp32 or bf16, or leave te out"),
        ("qwen3-moe", "dp2.te", "bf16", "without experts, latent attention and sinks; leave it out"),
        ("llama", "sp2.te", "bf16", "use sp without te, or te without sp"),
        pytest.param(
            *("llama", "dp2.te", "bf16", r"pip install --no-build-isolation 'transformer-engine\[pytorch\]'"),
            marks=pytest.mark.skipif(INSTALLED, reason="TransformerEngine is installed here"),
        ),
    ],
)
def test_what_transformer_engine_cannot_do_says_what_would_work(
    model: str, layout: str, precision: Precision, advice: str
) -> None:
    cell = cell_of("megatron", "sft-packed", model, layout, precision)
    answer = adapter_of(BACKENDS["megatron"]).supports(cell.scenario, cell.legs[0].layout)
    assert isinstance(answer, Unsupported)
    assert re.search(advice, answer.reason), answer.reason


def test_cells_with_transformer_engine_have_ranks_of_their_own() -> None:
    """megatron-core asks once in a process whether it is there; and asking for a GPU must not happen before a fork."""

    def preload(layout: str) -> tuple[str, ...]:
        return world_config(cell_of("megatron", "sft-packed", "llama", layout, "bf16").legs[0], "cuda").preload

    assert "impl.megatron.context" in preload("dp2")
    assert preload("dp2") == preload("tp2.seqpar")
    assert (
        preload("dp2.te")
        == preload("tp2.seqpar.te")
        == tuple(module for module in preload("dp2") if module != "impl.megatron.context")
    )


def config(layout: str) -> ContextConfig:
    return ContextConfig(layout=Layout.parse(layout), precision="bf16", device="cpu", accumulation=1, packed=True)


def test_a_process_is_for_transformer_engine_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(megatron_context(config("dp1"))).__name__ == "MegatronContext"  # with it, megatron-core is imported
    with pytest.raises(UsageError, match=r"without TransformerEngine, and dp1\.te needs the contrary"):
        megatron_context(config("dp1.te"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", SimpleNamespace())
    with pytest.raises(UsageError, match="with TransformerEngine, and dp1 needs the contrary; begin in a new process"):
        megatron_context(config("dp1"))


def test_without_a_gpu_or_the_package_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"need a GPU \(--device cuda\); leave the layout's option te out"):
        megatron_context(config("dp1.te"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)  # as if it were not installed
    with pytest.raises(UsageError, match=r"cannot be imported: .*; run: pip install .*, or leave .* te out"):
        megatron_context(config("dp1.te"))


def test_norms_in_linear_layers_have_the_names_that_they_have_apart() -> None:
    from impl.megatron.tensors import parameter_names

    def chunk(names: list[str]) -> Any:
        held = [(f"decoder.layers.0.{name}", None) for name in names]
        layer = SimpleNamespace(layer_number=3)
        return SimpleNamespace(
            named_parameters=lambda: held, named_buffers=list, decoder=SimpleNamespace(layers=[layer])
        )

    for apart, fused in FUSED.items():
        assert parameter_names(chunk([fused])) == {f"decoder.layers.0.{fused}": f"decoder.layers.2.{apart}"}
        assert parameter_names(chunk([apart])) == {f"decoder.layers.0.{apart}": f"decoder.layers.2.{apart}"}


class Product(torch.autograd.Function):
    """A linear layer that asks a library for its products, as TransformerEngine's does; ``again``: once more before the
    backward pass, as where activations are recomputed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, again: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.again = again
        out: torch.Tensor = sys.modules[ENGINE].generic_gemm(weight, True, x, False)[0]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (gradient,), (x, weight), gemm = gradients, ctx.saved_tensors, sys.modules[ENGINE].generic_gemm
        if ctx.again:
            gemm(weight, True, x, False)
        return gemm(weight, False, gradient, False)[0], gemm(x, False, gradient, True)[0], None


@pytest.mark.parametrize("again", [False, True])
def test_products_that_torch_does_not_see_are_counted(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    def gemm(a: torch.Tensor, flipped: bool, b: torch.Tensor, b_flipped: bool) -> list[torch.Tensor]:
        with torch._C._DisableTorchDispatch():
            return [(b.T if b_flipped else b) @ (a.T if flipped else a)]

    library: Any = SimpleNamespace(generic_gemm=gemm)
    monkeypatch.setitem(sys.modules, ENGINE, library)
    x, weight = torch.randn(5, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    watch = Watch()
    with watch.step():
        Product.apply(x, weight, again).sum().backward()  # type: ignore[no-untyped-call]
        with watch.reading():
            library.generic_gemm(weight, True, x, False)  # the suite's own
    assert library.generic_gemm is gemm
    recomputed = {("float32", "recomputed"): 1} if again else {}
    assert watch.products == {("float32", "forward"): 1, ("float32", "backward"): 2, **recomputed}
    assert (watch.linear, watch.engine, watch.again) == ({"float32": 1}, 1, int(again))


@pytest.mark.parametrize(
    ("layout", "engine", "claim"),
    [
        ("dp2.tp2.te", 24, ""),  # of six micro-batches, each a layer's four and the head's
        ("dp2.tp2.te", 23, "layers are TransformerEngine's"),
        ("dp2.tp2.te", 0, "layers are TransformerEngine's"),
        ("dp2.tp2", 0, ""),
        ("dp2.tp2", 1, "layers are not TransformerEngine's"),
    ],
)
def test_all_layers_are_transformer_engines_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, engine: int, claim: str
) -> None:
    seen = evidence("exact") | {"linear": [["float64", 30]], "engine": engine}
    seen["products"] = [["float64", "forward", 30], ["float64", "backward", 60]]
    monkeypatch.setattr("judge_sample.evidence", lambda _: seen)
    verdict = verdict_of(tmp_path, unchanged, layout=layout)
    assert [finding.tensor for finding in verdict.findings] == ([f"{layout}: {claim}"] if claim else [])


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    gpus = shares_of(gpus_of_host()[:2], 1 if GPUS > 1 else 2)
    config = SessionConfig(
        out=tmp_path_factory.mktemp("engine"), device="cuda", gpus=gpus, ranks_per_gpu=1 if GPUS > 1 else 2
    )
    with Session(config) as session:
        yield session


needs_engine = pytest.mark.skipif(not (INSTALLED and GPUS), reason="needs TransformerEngine and a GPU")


@pytest.mark.exhaustive
@needs_engine
@pytest.mark.parametrize("layout", ["dp2.te", "tp2.te", "pp2.te", "tp2.seqpar.ckpt.te", "dp2.zero1.te"])
@pytest.mark.parametrize("model", ["pangu", "llama", "qwen3"])
def test_transformer_engine_conforms_in_bf16(on_gpus: Session, model: str, layout: str) -> None:
    verdict = on_gpus.run(make_cell("sft-packed", model, layout, "bf16", backend=BACKENDS["megatron"])).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.exhaustive
@needs_engine
def test_a_backend_that_leaves_transformer_engine_out_is_told_from_one_that_runs_it(on_gpus: Session) -> None:
    liar = BackendEntry(name="liar", target="liars:MegatronDropsItsOptions")
    verdict = on_gpus.run(make_cell("sft-packed", "llama", "dp2.te", "bf16", backend=liar)).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", "configuration"), verdict.reason
    assert {finding.tensor for finding in verdict.findings} == {"dp2.te: layers are TransformerEngine's"}
