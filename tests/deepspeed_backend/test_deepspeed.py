"""DeepSpeed's contexts and trainables, without the engine of cells: what they leave behind, and several side by side.

Its cells are in tests/cells/test_cells_deepspeed.py.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cells import HONEST, cell_of, exhaustive, needs, ranks_of
from fsdp2_tasks import value_folder
from test_fsdp2_models import trio
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from conformance.core.host import FIXTURES
from conformance.data.inputs import prepare_inputs
from conformance.matrix.cell import TASK, Cell
from conformance.records.step_tensors import read_record
from conformance.runner.phases import phase_spec
from conformance.runtime import Outcome, Pool
from conformance.spec.layout import Layout
from conformance.spec.precision import PrecisionName
from conformance.spec.scenario import scenario_to_json
from conformance.worker.evidence import Watch
from impl.interface.trainable import ContextConfig

pytestmark = needs("deepspeed")


@pytest.mark.parametrize(
    ("stage", "options", "leaves"),
    [(3, (), "layers.1.mlp.experts"), (3, ("leaf",), "layers.1"), (2, (), "")],
)
def test_experts_are_leaves_because_ranks_run_different_ones(stage: int, options: tuple[str, ...], leaves: str) -> None:
    from impl.deepspeed.model import DeepspeedModel

    trainable: Any = SimpleNamespace(stage=stage, options=options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FIXTURES / "models" / "deepseek-v3"))
    expected = {type(model.model.get_submodule(leaves))} if leaves else set()
    assert {*DeepspeedModel._leaves(trainable, model)} == expected


def in_ranks(
    pool: Pool,
    folder: Path,
    task: str,
    layout: str,
    *,
    worker_group: str = "shared",
    precision: PrecisionName = "exact",
    scenario: str = "sft-padded",
) -> list[Any]:
    """Results of a task of deepspeed_tasks, in the ranks of a worker group, with a scenario's frozen inputs."""
    asked = cell_of("deepspeed", scenario, "qwen3", layout, precision)
    inputs = prepare_inputs(asked.scenario, folder)
    arguments = {
        "scenario": scenario_to_json(asked.scenario),
        "layout": layout,
        "models": {role: str(model) for role, model in inputs.models.items()},
        "batches": str(inputs.batches),
    }
    return run_task(pool, folder, f"deepspeed_tasks:{task}", asked.world_size, worker_group=worker_group, **arguments)


def run_task(
    pool: Pool, folder: Path, task: str, size: int, *, worker_group: str = "shared", **arguments: Any
) -> list[Any]:
    outcome = pool.run(
        key=worker_group,
        config=ranks_of("deepspeed", size),
        task=task,
        kwargs=arguments,
        log_dir=folder / "logs",
        budget_s=120.0,
    )
    assert outcome.state == "done", outcome.reason
    return outcome.results


LEAVING = [
    exhaustive("dp2.zero0"),
    exhaustive("dp2.zero1"),
    exhaustive("dp2.zero2"),
    "dp2.zero3",
    exhaustive("tp2.zero1"),
    exhaustive("ulysses2.zero2"),
    exhaustive("tp2.ulysses2.zero3"),
]


@pytest.mark.parametrize("layout", LEAVING)
def test_nothing_outlives_a_teardown(pool: Pool, tmp_path: Path, layout: str) -> None:
    for left in in_ranks(pool, tmp_path, "train", layout, worker_group=f"fresh {layout}"):
        assert left == {"changed": [], "attention": False, "groups": [], "autotp": False, "model_alive": False}


@pytest.mark.parametrize("layout", ["dp2.zero3", "dp2.zero3.ckpt", exhaustive("dp2.zero3.compile.leaf")])
def test_zero3_keeps_no_weight_that_it_has_gathered_for_the_backward_pass(
    pool: Pool, tmp_path: Path, layout: str
) -> None:
    """With torch's linear layers one remains: that of the head, which is not compiled."""
    of_torch = "compile" in layout  # docs/findings/deepspeed-compiled-biases.md
    for kept in in_ranks(pool, tmp_path, "kept_weights", layout):
        assert kept == of_torch


def test_frozen_vectors_that_zero3_has_left_whole_are_those_that_are_written(pool: Pool, tmp_path: Path) -> None:
    """A rank writes its pieces, and DeepSpeed gathers no parameter that it has whole."""
    for written in in_ranks(pool, tmp_path, "rewritten", "dp2.zero3", scenario="sft-frozen"):
        assert any(name.endswith("norm.weight") for name in written)
        assert all(written.values()), written


@pytest.mark.exhaustive
def test_a_compiled_layer_is_without_the_hooks_of_deepspeed(pool: Pool, tmp_path: Path) -> None:
    """They differ from layer to layer, so torch would compile them anew for each, and give up after the eighth."""
    for files in in_ranks(pool, tmp_path, "compiled_code", "dp2.zero3.compile.leaf"):
        assert any(file.endswith("/hugging_face.py") for file in files)
        assert not [file for file in files if "/deepspeed/" in file]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "layouts", [("tp2.zero3", "ulysses2.zero3.ckpt"), ("dp2.zero2.offload", "tp2.zero3", "ulysses2.zero3.ckpt")]
)
def test_deepspeed_ranks_hold_no_more_after_second_cell(pool: Pool, tmp_path: Path, layouts: tuple[str, ...]) -> None:
    held = []
    for layout in (*layouts, *layouts):
        in_ranks(pool, tmp_path, "train", layout, worker_group=f"cells {layouts}")
        held.append(run_task(pool, tmp_path, "deepspeed_tasks:holdings", 2, worker_group=f"cells {layouts}"))
    assert held[len(layouts) - 1 :] == [held[-1]] * (len(layouts) + 1)
    assert all(of_rank["models"] == of_rank["parameters"] == 0 for of_rank in held[-1])


@pytest.mark.parametrize(
    "layout",
    [
        exhaustive("dp2.zero0"),
        exhaustive("dp2.zero2"),
        "dp2.zero3",
        exhaustive("tp2.zero3"),
        exhaustive("sp2.zero1"),
        exhaustive("ulysses2.zero3"),
    ],
)
def test_the_first_of_two_contexts_leaves_the_other_intact(pool: Pool, tmp_path: Path, layout: str) -> None:
    ulysses = "ulysses" in layout
    for result in in_ranks(pool, tmp_path, "one_beside_another", layout):
        assert result == {"equal": True, "replaced": [ulysses, False]}


def test_what_one_process_cannot_hold_at_a_time_is_refused(pool: Pool, tmp_path: Path) -> None:
    for said in in_ranks(pool, tmp_path, "refusals", "ulysses2.zero1"):
        assert "use the same tp, ulysses and hpz" in said[0]
        assert "use models with the same heads" in said[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", "dp2.zero1"),
        ("pangu", "tp2.zero3"),
        ("qwen3", "tp2.zero0"),
        ("gemma3", "ulysses2.zero2"),
        ("llama", "dp2.zero3.ownopt"),
        *(("llama", f"{cut}.zero{stage}") for cut in ("dp2", "tp2", "sp2", "ulysses2") for stage in range(4)),
        ("llama", "dp2.zero3.ckpt.offload"),
        ("llama", "tp2.ulysses2.zero2"),
        ("gemma3", "sp2.zero3"),
    ],
)
def test_an_actor_a_critic_and_a_frozen_reference_side_by_side_are_plain_models(
    pool: Pool, tmp_path: Path, family: str, layout: str
) -> None:
    results = run_task(
        pool,
        tmp_path,
        "fsdp2_tasks:errors_of_models",
        Layout.parse(layout).world_size,
        backend="deepspeed",
        layout=layout,
        models=trio(family, {family: value_folder(family, tmp_path / "critic")}),
        packed=True,
    )
    for result in results:
        assert max(error for model in result.values() for error in model.values()) < HONEST, result
        assert all(("norm" in result[model]) == ("zero0" not in layout) for model in ("policy", "critic"))


@pytest.mark.parametrize("family", ["pangu", "llama", "gemma3"])
def test_the_one_row_of_a_value_head_stays_whole(pool: Pool, tmp_path: Path, family: str) -> None:
    model = str(value_folder(family, tmp_path / "critic"))
    for cut in run_task(pool, tmp_path, "deepspeed_tasks:cut_by_tensor_parallelism", 2, layout="tp2", model=model):
        assert "score.weight" not in cut
        assert "model.layers.0.self_attn.q_proj.weight" in cut


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
# Of a laptop, and of servers without AVX512-FP16. Continuous integration runs every test with a lower one.
@pytest.mark.exhaustive
@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_half_precision_needs_nothing_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str, precision: PrecisionName
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    with Pool(work_dir=tmp_path / "pool") as pool:
        for layout in ("dp2.zero0", "dp2.zero2"):
            results = in_ranks(pool, tmp_path, "half_precision", layout, precision=precision)
            dtype = {"fp16": "torch.float16", "bf16": "torch.bfloat16"}[precision]
            assert results == [{"onednn": False, "computed": dtype, "moved": True}] * 2


@pytest.mark.parametrize(
    "layout", ["dp2.zero3", *map(exhaustive, ("dp2.zero0", "dp2.zero1", "dp2.zero2", "tp2.zero2"))]
)
def test_optimizer_state_has_canonical_names_and_is_whole(pool: Pool, tmp_path: Path, layout: str) -> None:
    for errors in in_ranks(pool, tmp_path, "optimizer_state", layout):
        assert max(errors.values()) < HONEST


@pytest.mark.parametrize("layout", [exhaustive("dp2.zero0"), "dp2.zero3", exhaustive("tp2.zero1")])
def test_a_saved_model_is_what_was_loaded(pool: Pool, tmp_path: Path, layout: str) -> None:
    assert in_ranks(pool, tmp_path, "save_model", layout) == [[], []]


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["dp2.zero1", "dp2.zero3", "tp2.zero2", "ulysses2.zero3"])
def test_fsdp2_gives_the_same_bits_before_and_after_deepspeed(pool: Pool, tmp_path: Path, layout: str) -> None:
    between = cell_of("deepspeed", "sft-sgd", "qwen3", layout, "fp32")
    plain = "tp2" if "tp2" in layout else "dp2"
    fsdp2 = cell_of("fsdp2", "sft-sgd", "qwen3", plain, "fp32")
    digests = []
    for asked, name in ((fsdp2, "before"), (between, "between"), (fsdp2, "after")):
        outcome = train(pool, asked, tmp_path / name, worker_group=f"before {layout}")
        assert outcome.state == "done", outcome.reason
        record = read_record(tmp_path / name / "record")
        digests.append([{k: t.numpy().tobytes() for k, t in step.tensors().items()} for step in record.steps])
    assert digests[0] == digests[2]


def train(pool: Pool, asked: Cell, folder: Path, *, worker_group: str) -> Outcome:
    inputs = prepare_inputs(asked.scenario, folder.with_name("inputs"))
    return pool.run(
        key=worker_group,
        config=ranks_of("deepspeed", asked.world_size),
        task=TASK,
        kwargs=phase_spec(asked, 0, inputs, folder, None).kwargs,
        log_dir=folder / "logs",
        budget_s=120.0,
    )


def test_no_timer_of_the_library_waits_for_the_gpu() -> None:
    from deepspeed.utils.config import get_timers_config

    from impl.deepspeed.config import cutting_settings

    config = ContextConfig(layout=Layout(dp=2), precision="bf16", device="cpu", accumulation=1, packed=False)
    assert get_timers_config({}).enabled
    assert not get_timers_config(cutting_settings(config, torch.nn.Linear(2, 2))).enabled


def test_zero3_whole_parameters_limit_share_of_model() -> None:
    """DeepSpeed's default number of elements is larger than any matrix of the fixtures."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from impl.deepspeed.config import cutting_settings

    def left_whole(layout: str, *sizes: tuple[int, int]) -> int:
        config = ContextConfig(
            layout=Layout.parse(layout), precision="bf16", device="cpu", accumulation=1, packed=False
        )
        model = torch.nn.Sequential(*(torch.nn.Linear(*size, device="meta") for size in sizes))
        zero = DeepSpeedZeroConfig(**cutting_settings(config, model)["zero_optimization"])
        return int(zero.param_persistence_threshold)

    default, small, large = DeepSpeedZeroConfig().param_persistence_threshold, (300, 300), (300, 1000)
    assert left_whole("dp2.zero3", (2, 3)) == 3
    assert left_whole("dp2.zero3", (4096, 4097)) == default
    assert left_whole("dp2.zero3", large, small) == default  # 23 % of the model
    assert left_whole("dp2.zero3", large, small, small) == 1000  # 38 %
    assert left_whole("dp2.zero3", *[(400, 400)] * 2) == default
    assert left_whole("dp2.tp2.zero3", *[(400, 400)] * 2) == 400  # halves of matrices
    assert left_whole("dp2.zero3", (1, 2 * default), *[small] * 9) == default  # a vector that DeepSpeed would cut


@pytest.mark.parametrize(("size", "share"), [((300, 300), 1 / 7), ((8_000, 100_000), 1 / 8)])
def test_zero3_frees_small_models_between_passes(size: tuple[int, int], share: float) -> None:
    """DeepSpeed's defaults, a billion numbers, keep all of a small model from its forward to its backward pass."""
    from impl.deepspeed.config import BUCKET, cutting_settings, states_of

    config = ContextConfig(layout=Layout(dp=2), precision="bf16", device="cpu", accumulation=1, packed=False)
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(*size) for _ in range(10)))
    zero = cutting_settings(config, model)["zero_optimization"]
    assert zero["stage3_max_reuse_distance"] == zero["stage3_max_live_parameters"]
    assert zero["stage3_max_reuse_distance"] / (10 * math.prod(size)) == pytest.approx(share, rel=0.01)
    assert zero["stage3_prefetch_bucket_size"] == zero["stage3_max_reuse_distance"] // 20
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    frozen, trained = (states_of(config.layout, config.tier, shapes, trained).passing for trained in (False, True))
    assert frozen == trained - 4 * BUCKET == 2 * zero["stage3_max_live_parameters"], "the estimate counts what is set"
    largest = states_of(config.layout, config.tier, {"weight": size}, False).passing
    assert largest == 2 * math.prod(size), "a parameter in use is whole"


@pytest.mark.parametrize("recomputed", [False, True])
def test_zero3_linear_recomputation_differs_from_backward(
    recomputed: bool,
) -> None:
    """ZeRO-3 puts them in the place of torch's. Their forward pass records no graph of the products inside of it."""
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)

    def layer(x: torch.Tensor) -> Any:
        return LinearFunctionForZeroStage3.apply(x, weight)

    with (watch := Watch()).step():
        (checkpoint(layer, x, use_reentrant=False) if recomputed else layer(x)).sum().backward()
    once = {("float32", "forward"): 1, ("float32", "backward"): 2}
    assert dict(watch.products) == (once | {("float32", "recomputed"): 1} if recomputed else once)
    assert watch.again == recomputed
