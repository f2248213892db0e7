"""TransformerEngine's layers under megatron-core, the layout option ``te``: who claims it, where it runs, what is seen.

They need the package and a GPU, so cells of them run on GPU machines only, at the end of this file.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from cells import BACKENDS, cell_of
from conftest import make_cell
from judge_sample import evidence, unchanged, verdict_of
from torch.utils.checkpoint import checkpoint

from conformance.backends.protocol import BackendEntry, BackendInfo, Unsupported
from conformance.backends.registry import adapter_of
from conformance.core.errors import UsageError
from conformance.core.packages import is_installed
from conformance.matrix.cell import PhaseSpec
from conformance.runner.phases import group_config
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session
from conformance.runtime.gpu_inventory import gpus_of_host, shares_of
from conformance.runtime.messages import RankContext
from conformance.spec.layout import Layout
from conformance.spec.precision import PrecisionName
from conformance.worker.evidence import Watch
from conformance.worker.phase import run_phase
from conformance.worker.transformer_engine import TRANSFORMER_ENGINE
from impl.interface.trainable import ContextConfig
from impl.megatron import adapter as startup
from impl.megatron import refusals
from impl.megatron.adapter import MegatronBackend, megatron_context
from impl.megatron.hf_mapping import FUSED

INSTALLED = is_installed("transformer-engine")
GPUS = torch.cuda.device_count()


@pytest.mark.parametrize(
    ("model", "layout", "precision", "advice"),
    [
        ("llama", "dp2.te", "exact", "no float64; use fp32, bf16 or fp16, or leave te out"),
        ("qwen3-moe", "dp2.te", "bf16", "without experts, .*; leave te out"),
        ("deepseek-v2", "dp2.te", "bf16", "latent attention"),
        ("gpt-oss", "dp2.te", "bf16", "sinks"),
        ("mistral", "dp2.te", "bf16", "sliding windows; leave te out"),
        ("llama", "sp2.te", "bf16", "use sp without te, or te without sp"),
    ],
)
def test_what_transformer_engine_cannot_do_says_what_would_work(
    model: str, layout: str, precision: PrecisionName, advice: str
) -> None:
    cell = cell_of("megatron", "sft-packed", model, layout, precision)
    answer = adapter_of(BACKENDS["megatron"]).supports(cell.scenario, cell.phases[0].layout)
    assert isinstance(answer, Unsupported)
    assert re.search(advice, answer.reason), answer.reason


@pytest.mark.parametrize(
    ("gpus", "advice"),
    [
        ((), "^there is no GPU, and te needs one .*--device cuda.*; leave te out, or use a machine with a GPU$"),
        (("GPU-1",), r"--device cuda; run: pip install --no-build-isolation 'transformer-engine\[pytorch\]'$"),
    ],
)
def test_an_installation_is_advised_only_where_there_is_a_gpu(
    gpus: tuple[str, ...], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "gpus_of_host", lambda: gpus)
    monkeypatch.setattr(refusals, "is_installed", lambda name: name != "transformer-engine" and is_installed(name))
    cell = cell_of("megatron", "sft-packed", "llama", "dp2.te", "bf16")
    answer = BACKENDS["megatron"].load().supports(cell.scenario, cell.phases[0].layout)
    assert isinstance(answer, Unsupported)
    assert re.search(advice, answer.reason), answer.reason


def test_cells_with_transformer_engine_have_ranks_of_their_own() -> None:
    """megatron-core asks once in a process whether it is there, and peft imports it; a GPU must not be asked for before
    a fork."""

    def preload(layout: str) -> tuple[str, ...]:
        return group_config(cell_of("megatron", "sft-packed", "llama", layout, "bf16").phases[0], "cuda").preload

    assert "impl.megatron.context" in preload("dp2")
    assert preload("dp2") == preload("tp2.seqpar")
    without = {"impl.megatron.context", "transformers.optimization"}
    assert preload("dp2.te") == preload("tp2.seqpar.te") == tuple(m for m in preload("dp2") if m not in without)
    kinds = {preload(layout) for layout in ("dp2", "dp2.te", "dp2.zero1.remainders", "dp2.zero1.te.remainders")}
    assert len(kinds) == 3  # the last two are of one kind


def test_a_checkpoint_with_transformer_engines_norms_goes_on_with_them_only() -> None:
    adapter, cell = adapter_of(BACKENDS["megatron"]), cell_of("megatron", "sft-warmup", "llama", "dp2", "bf16")
    for before, after in (("dp2", "dp2.te"), ("tp2.te", "tp2")):
        answer = adapter.supports_checkpoint(cell.scenario, Layout.parse(before), Layout.parse(after))
        assert "transfer a training state" in str(answer)
    both = Layout.parse("dp2.te"), Layout.parse("tp2.te")
    assert str(adapter.supports_checkpoint(cell.scenario, *both)) == "Supported()"


def config(layout: str) -> ContextConfig:
    return ContextConfig(layout=Layout.parse(layout), precision="bf16", device="cpu", accumulation=1, packed=True)


def test_a_process_is_for_transformer_engine_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(megatron_context(config("dp1"))).__name__ == "MegatronContext"  # with it, megatron-core is imported
    with pytest.raises(UsageError, match=r"without TransformerEngine, and dp1\.te needs it with"):
        megatron_context(config("dp1.te"))
    monkeypatch.setattr(startup, "_admitted", "te")
    with pytest.raises(UsageError, match=r"with .* but its optimizers, and dp1 needs it without .*; start a new proc"):
        megatron_context(config("dp1"))
    for other, layout in (("te", "dp2.zero1.te.remainders"), ("remainders", "dp2.te")):
        monkeypatch.setattr(startup, "_admitted", other)
        with pytest.raises(UsageError, match=f"and {layout} needs it with TransformerEngine"):
            startup.begin(Layout.parse(layout))
    startup.begin(Layout.parse("dp2.zero1.remainders"))


def test_without_a_gpu_or_the_package_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", SimpleNamespace())  # somebody has imported it
    with pytest.raises(UsageError, match=r"needs a GPU \(--device cuda\); leave the layout's option te out"):
        megatron_context(config("dp1.te"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, "transformer_engine.pytorch")
    with pytest.raises(UsageError, match=r"cannot be imported: .*; run: pip install .*, or leave .* te out"):
        megatron_context(config("dp1.te"))


@pytest.mark.parametrize("users", ["", "1"])
def test_float32_is_not_tf32_and_optimizers_are_torchs(monkeypatch: pytest.MonkeyPatch, users: str) -> None:
    """Whoever has imported TransformerEngine before; and what the user has said of TF32 counts."""
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    monkeypatch.setattr(startup, "_admitted", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", users)
    if not users:
        monkeypatch.delenv("NVIDIA_TF32_OVERRIDE")
    optimizers = SimpleNamespace(FusedAdam=1, FusedSGD=2, multi_tensor_applier=3)
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.optimizers", optimizers)
    startup.begin(Layout.parse("tp2"))
    assert "FusedAdam" in vars(optimizers)
    for _ in range(2):
        startup.begin(Layout.parse("tp2.te"))
        assert os.environ["NVIDIA_TF32_OVERRIDE"] == (users or "0")
        assert vars(optimizers) == {"multi_tensor_applier": 3}
    for other in ("tp2", "dp2.zero1.remainders"):  # although megatron-core is not imported yet
        with pytest.raises(UsageError, match=f"with TransformerEngine but its optimizers, and {other} needs it with"):
            startup.begin(Layout.parse(other))
    optimizers.FusedAdam = 1
    monkeypatch.setattr(startup, "_admitted", "")
    startup.begin(Layout.parse("dp2.zero1.remainders"))
    assert "FusedAdam" in vars(optimizers)


class BeginsFirst(MegatronBackend):
    """Notes in which order it is asked."""

    asked: ClassVar[list[str]] = []

    @classmethod
    def begin(cls, layout: Layout) -> None:
        cls.asked.append(f"begin {layout}")

    @classmethod
    def describe(cls) -> BackendInfo:
        cls.asked.append("describe")
        raise ValueError("that is enough")


def test_a_backend_begins_with_its_layout_before_faults_are_planted(tmp_path: Path) -> None:
    """Planting imports what faults are planted in, so megatron-core, too."""
    rank = RankContext(rank=0, world_size=1, device="cpu", beat=lambda place: None)
    spec = PhaseSpec(
        cell="any",
        target=f"{__name__}:BeginsFirst",
        scenario=cell_of("megatron", "sft-packed", "llama", "dp2", "bf16").scenario,
        layout=Layout.parse("tp2.te"),
        models={},
        batches=Path(),
        first_step=0,
        steps=1,
        record=tmp_path / "record",
        planted=("dropped-o-bias",),
    )
    with pytest.raises(ValueError, match="that is enough"):
        run_phase(rank, spec=spec.to_json())
    assert BeginsFirst.asked == ["begin tp2.te", "describe"]


@pytest.mark.parametrize("fused", [False, True])
def test_modules_whose_norms_are_in_linear_layers_are_not_traced(monkeypatch: pytest.MonkeyPatch, fused: bool) -> None:
    """What goes into them is another number than at Hugging Face, because it is not normed yet."""
    from megatron.core.transformer.identity_op import IdentityOp

    from impl.megatron import gpt_model

    alone = SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 1, get_tensor_model_parallel_rank=lambda: 0)
    monkeypatch.setattr(gpt_model, "parallel_state", alone)
    norms, others = ("input_layernorm", "pre_mlp_layernorm"), ("self_attention", "self_attention.linear_proj", "mlp")
    found = {name: IdentityOp() if fused else torch.nn.RMSNorm(4) for name in norms}
    found |= {name: torch.nn.Identity() for name in (*others, "mlp.linear_fc2")}
    chunk = SimpleNamespace(
        config=SimpleNamespace(sequence_parallel=False),
        named_modules=lambda: [(f"decoder.layers.0.{name}", module) for name, module in found.items()],
    )
    shape: Any = SimpleNamespace(attended=4, ffn=8, mixture=None)
    names = {one.name.removeprefix("model.layers.0.") for one in gpt_model._of_chunk(chunk, range(1), shape)}
    assert {"self_attn.o_proj", "mlp.down_proj"} <= names
    assert len(names) == (2 if fused else 6)


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


def test_adapters_read_what_the_norm_inside_of_a_layer_gives() -> None:
    """And the layer returns what it returned, behind the hooks of all its adapters."""
    from impl.megatron.lora import Adapter, _without_norm

    raw, normed, rows = torch.ones(5, 1, 4), torch.full((5, 1, 4), 3.0), torch.tensor([1, 2])

    class Twice:
        by_rows = True

        def __init__(self) -> None:
            self.rows = rows

        def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
            return 2 * inputs[..., :2]

    output: Any = (raw.new_zeros(5, 1, 6), normed), None
    for _ in range(2):
        output = Adapter.add(Twice(), None, (raw,), output)  # type: ignore[arg-type]
    result, bias = _without_norm(None, (raw,), output)
    assert bias is None
    assert result[0, 0].tolist() == [0, 12, 12, 0, 0, 0]
    apart, _ = Adapter.add(Twice(), None, (raw,), (raw.new_zeros(5, 1, 6), None))  # type: ignore[arg-type]
    assert apart[0, 0].tolist() == [0, 2, 2, 0, 0, 0]


class Product(torch.autograd.Function):
    """A linear layer that asks a library for its products, as TransformerEngine's does; ``again``: once more before the
    backward pass, as where activations are recomputed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, again: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.again = again
        out: torch.Tensor = sys.modules[TRANSFORMER_ENGINE].generic_gemm(weight, True, x, False)[0]
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (gradient,), (x, weight), gemm = gradients, ctx.saved_tensors, sys.modules[TRANSFORMER_ENGINE].generic_gemm
        if ctx.again:
            gemm(weight, True, x, False)
        return gemm(weight, False, gradient, False)[0], gemm(x, False, gradient, True)[0], None


@pytest.mark.parametrize("again", [False, True])
def test_products_that_torch_does_not_see_are_counted(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    def gemm(a: torch.Tensor, flipped: bool, b: torch.Tensor, b_flipped: bool) -> list[torch.Tensor]:
        with torch._C._DisableTorchDispatch():
            return [(b.T if b_flipped else b) @ (a.T if flipped else a)]

    library: Any = SimpleNamespace(generic_gemm=gemm)
    monkeypatch.setitem(sys.modules, TRANSFORMER_ENGINE, library)
    x, weight = torch.randn(5, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    watch = Watch()
    with watch.step():
        Product.apply(x, weight, again).sum().backward()  # type: ignore[no-untyped-call]
        with watch.reading():
            library.generic_gemm(weight, True, x, False)  # the suite's own
    assert library.generic_gemm is gemm
    recomputed = {("float32", "recomputed"): 1} if again else {}
    assert watch.products == {("float32", "forward"): 1, ("float32", "backward"): 2, **recomputed}
    assert (watch.linear, watch.library.te, watch.again) == ({"float32": 1}, 1, int(again))


@pytest.mark.parametrize("frozen", [False, True])
def test_recomputed_products_of_the_library_are_no_backward_ones(frozen: bool) -> None:
    from megatron.core.tensor_parallel import layers

    x, weight = torch.randn(5, 3, requires_grad=True), torch.randn(4, 3, requires_grad=not frozen)

    def layer(x: torch.Tensor) -> Any:
        kind = layers.linear_with_frozen_weight if frozen else layers.linear_with_grad_accumulation_and_async_allreduce
        flags = ("gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel")
        return kind(x, weight, None, **dict.fromkeys(flags, False), tp_group=None)

    with (watch := Watch()).step():
        checkpoint(layer, x, use_reentrant=True).sum().backward()
    assert watch.work == {"forward": 60, "recomputed": 60, "backward": 60 * (2 - frozen)}


@pytest.mark.parametrize(
    ("layout", "products", "claim"),
    [
        ("dp2.tp2.te", 24, ""),  # of six micro-batches, each a layer's four and the head's
        ("dp2.tp2.te", 23, "layers are TransformerEngine's"),
        ("dp2.tp2.te", 0, "layers are TransformerEngine's"),
        ("dp2.tp2", 0, ""),
        ("dp2.tp2", 1, "layers are not TransformerEngine's"),
    ],
)
def test_all_layers_are_transformer_engines_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, products: int, claim: str
) -> None:
    seen = evidence("exact") | {"linear": [["float64", 30]], "te": products}
    seen["products"] = [["float64", "forward", 30], ["float64", "backward", 60]]
    monkeypatch.setattr("judge_sample.evidence", lambda _: seen)
    verdict = verdict_of(tmp_path, unchanged, layout=layout)
    assert [finding.tensor for finding in verdict.findings] == ([f"{layout}: {claim}"] if claim else [])


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    gpus = shares_of(gpus_of_host()[:2], 1 if GPUS > 1 else 2)
    config = SessionConfig(
        out=tmp_path_factory.mktemp("te"), device="cuda", gpus=gpus, ranks_per_gpu=1 if GPUS > 1 else 2
    )
    with Session(config) as session:
        yield session


needs_te = pytest.mark.skipif(not (INSTALLED and GPUS), reason="needs TransformerEngine and a GPU")


@pytest.mark.exhaustive
@needs_te
@pytest.mark.parametrize("layout", ["dp2.te", "tp2.te", "pp2.te", "tp2.seqpar.ckpt.te", "dp2.zero1.te"])
@pytest.mark.parametrize("model", ["pangu", "llama", "qwen3"])
def test_transformer_engine_conforms_in_bf16(on_gpus: Session, model: str, layout: str) -> None:
    verdict = on_gpus.run(make_cell("sft-packed", model, layout, "bf16", backend=BACKENDS["megatron"])).verdict
    assert verdict.state == "conforms", verdict.reason


@pytest.mark.exhaustive
@needs_te
def test_missing_transformer_engine_differs_at_configuration(on_gpus: Session) -> None:
    liar = BackendEntry(name="liar", target="layout_liars:MegatronDropsItsOptions")
    verdict = on_gpus.run(make_cell("sft-packed", "llama", "dp2.te", "bf16", backend=liar)).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", "configuration"), verdict.reason
    assert {finding.tensor for finding in verdict.findings} == {"dp2.te: layers are TransformerEngine's"}
