"""Recording inside the loops of libraries whose optimizers step masters and flat shards of the parameters."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cells import BACKENDS, ranks_of
from recording_tasks import adamw, batches, recorded, script, tiny
from rl_libraries import root
from test_recording import agree_closely

from conformance.cli.main import main
from conformance.core.host import FIXTURES
from conformance.runtime import Pool, WorkerGroupConfig
from parity.compare import compare_records
from parity.explain import likely_causes
from parity.record_files import read_run

ROOT = Path(__file__).parents[2]
UP = "layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("plain") / "run", full=True)


@pytest.fixture(scope="module")
def run_ranks(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    def run(task: str, size: int, python: str = "", **kwargs: Any) -> Path:
        """``python``: of another environment. Else the ranks are forked where the cells of a backend are."""
        other = WorkerGroupConfig(size=size, device="cpu", preload=("recording_libraries",), python=python)
        out = tmp_path_factory.mktemp(task)
        outcome = pool.run(
            key=f"recording {task}",
            config=other if python else ranks_of(task if task in BACKENDS else "fsdp2", size),
            task=f"recording_libraries:{task}",
            kwargs={"out": str(out / "run"), **kwargs},
            log_dir=out,
            budget_s=240,
        )
        assert outcome.state == "done", outcome.reason
        return out / "run"

    return run


def exhaustive(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.exhaustive)


OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("stage", "changes"),
    [exhaustive(0, {}), exhaustive(1, {}), (2, {}), (3, {}), exhaustive(2, OFFLOADED)],
    ids=["0", "1", "2", "3", "offloaded"],
)
def test_deepspeed_agrees_with_one_process(stage: int, changes: Any, plain: Path, run_ranks: Any) -> None:
    pytest.importorskip("deepspeed")
    run = run_ranks("deepspeed", 2, stage=stage, **changes)
    agree_closely(compare_records([plain, run], threshold=None))
    assert all(line["replicas"] == {"weight": {}, "gradient": {}} for line in read_run(run).steps)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_in_bf16_agrees_to_its_rounding(stage: int, plain: Path, run_ranks: Any) -> None:
    pytest.importorskip("deepspeed")
    run = run_ranks("deepspeed", 2, stage=stage, bf16={"enabled": True})
    compared = compare_records([plain, run], threshold=None)
    assert not compared.differs, compared.text()
    assert read_run(run).steps[0]["computed_in"] == "bfloat16"


@pytest.mark.parametrize("stage", [exhaustive(0), 1, exhaustive(2), exhaustive(3)])
def test_deepspeed_fault_is_named_by_parameter(stage: int, plain: Path, run_ranks: Any) -> None:
    pytest.importorskip("deepspeed")
    pair = compare_records([plain, run_ranks("deepspeed", 2, stage=stage, fault=UP)], threshold=None).pairs[0]
    assert pair.divergence is not None
    assert (pair.divergence.step, pair.divergence.name) == (0, "gradients")
    different = {quantity.what: quantity.scale for quantity in pair.divergence.different}
    assert different == {f"model.{UP}": pytest.approx(3, rel=1e-3)}


LLAMA = str(FIXTURES / "models" / "llama")


@pytest.fixture(scope="module")
def tensor_parallel(run_ranks: Any) -> Path:
    pytest.importorskip("megatron.core")
    return Path(run_ranks("megatron", 2, layout="tp2", folder=LLAMA))


@pytest.mark.parametrize("layout", ["tp2", exhaustive("dp2.zero1"), exhaustive("pp2"), exhaustive("pp2.vpp2")])
def test_megatron_agrees_with_one_rank(layout: str, tensor_parallel: Path, run_ranks: Any) -> None:
    one = run_ranks("megatron", 1, layout="dp1", folder=LLAMA)
    many = tensor_parallel if layout == "tp2" else run_ranks("megatron", 2, layout=layout, folder=LLAMA)
    agree_closely(compare_records([one, many], threshold=None))
    assert list(read_run(many).parameters) == list(read_run(one).parameters)


def test_megatron_fault_is_named_by_parameter(tensor_parallel: Path, run_ranks: Any) -> None:
    fault = "decoder.layers.0.mlp.linear_fc2.weight"
    wrong = run_ranks("megatron", 2, layout="tp2", folder=LLAMA, fault=fault)
    pair = compare_records([tensor_parallel, wrong], threshold=None).pairs[0]
    assert pair.divergence is not None
    assert (pair.divergence.step, pair.divergence.name) == (0, "gradients")
    assert any(cause.startswith("What is wrong by itself is 3 times") for cause in likely_causes(pair, pair.divergence))
    assert f"The others: {fault}." in next(likely_causes(pair, pair.divergence))


@pytest.mark.parametrize("zero", [None, exhaustive(2)])
def test_trl_fault_is_named_by_parameter(zero: int | None, run_ranks: Any) -> None:
    options = {"library": str(root("trl")), "zero": zero}
    runs = [run_ranks("trl", 2, fault=bad, **options) for bad in ("", UP)]
    again = run_ranks("trl", 2, **options)
    assert not compare_records([runs[0], again], threshold=None).differs
    pair = compare_records(runs, threshold=None).pairs[0]
    assert pair.divergence is not None
    assert (pair.divergence.step, pair.divergence.name) == (0, "gradients")
    causes = list(likely_causes(pair, pair.divergence))
    assert f"The others: model.{UP}." in causes[0]
    assert causes[1].startswith("What is wrong by itself is 3 times")


@pytest.mark.slow
@pytest.mark.parametrize("library", ["verl", "openrlhf"])
def test_fault_in_a_framework_is_named(library: str, run_ranks: Any) -> None:
    pythons = sorted(ROOT.glob(f".frameworks/{library}-*/bin/python"))
    if not pythons:
        pytest.skip(f"scripts/framework {library} makes its environment")
    runs = [run_ranks(library, 2, python=str(pythons[-1]), fault=bad) for bad in ("", UP)]
    pair = compare_records(runs, threshold=None).pairs[0]
    assert pair.divergence is not None
    assert (pair.divergence.step, pair.divergence.name) == (0, "gradients")
    assert {quantity.what for quantity in pair.divergence.different} == {f"model.{UP}"}


def test_openrlhf_record_comes_to_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Strategy:
        def prepare(self, *models: Any) -> Any:
            return models

        def backward(self, loss: torch.Tensor) -> None:
            loss.backward()

        def optimizer_step(self) -> None:
            engine.optimizer.step()
            engine.optimizer.zero_grad()

    def train_sft(*_: Any, **__: Any) -> None:
        strategy = library.DeepspeedStrategy()
        strategy.prepare(SimpleNamespace(model=engine))
        for row in batches()[0]:
            strategy.backward(engine(input_ids=row[None], labels=row[None]).loss)
            strategy.optimizer_step()

    library: Any = ModuleType("openrlhf.utils.deepspeed")
    library.DeepspeedStrategy = Strategy
    utils, package = ModuleType("openrlhf.utils"), ModuleType("openrlhf")
    for module, name, child in ((utils, "deepspeed", library), (package, "utils", utils)):
        setattr(module, name, child)
    for module in (package, utils, library):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    engine = tiny()
    engine.optimizer, engine.is_gradient_accumulation_boundary = adamw(engine), lambda: True
    monkeypatch.setattr("runpy.run_module", train_sft)
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    script("openrlhf_sft").main()
    run = read_run(tmp_path / "record")
    assert (len(run.steps), run.complete) == (6, True)


def test_records_diff_writes_html(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = recorded(tmp_path / "other", order=lambda rows: [row.flip(0) for row in rows])
    assert main(["diff", str(plain), str(plain.parent / "run"), "--out", str(tmp_path / "same")]) == 2
    assert main(["diff", str(plain), str(other), "--out", str(tmp_path / "html")]) == 1
    html = (tmp_path / "html" / "diff.html").read_text(encoding="utf-8")
    assert "<h1>The records diverge</h1>" in html
    assert f"{plain} and {other} diverge at step 0, batch" in html
    markdown = (tmp_path / "html" / "diff.md").read_text(encoding="utf-8")
    assert markdown.startswith(f"{plain}: 3 steps")
    command = f"parity diff {plain} {other} --out diff"
    assert f"Next: {command}" in markdown
    assert command in html
    assert capsys.readouterr().out.rstrip().endswith("diff.html")


@pytest.mark.parametrize("originals", [True, False])
def test_fsdp1_agrees_with_one_process(originals: bool, plain: Path, run_ranks: Any) -> None:
    agree_closely(compare_records([plain, run_ranks("fsdp1", 2, originals=originals)], threshold=None))
