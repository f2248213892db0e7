"""Two records side by side: honest pairs agree, and a planted bug is told with its step, its stage and its parameter.

The trainings are the scripts of examples/record, real libraries on a tiny model.
"""

import json
import math
import re
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from recording_tasks import EXAMPLES, adamw, recorded, script, tiny, train
from torch import Tensor, nn
from transformers import AutoTokenizer

import parity
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from parity.compare import Comparison, compare_records
from parity.differences import Stage
from parity.record_files import read_run

pytestmark = pytest.mark.slow

O_PROJ = "model.layers.1.self_attn.o_proj"


@pytest.fixture(scope="module")
def rows() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / "models" / "llama")
    lines = (FIXTURES / "data" / "word_problems.jsonl").read_text(encoding="utf-8").splitlines()[:16]
    return [tokenizer(" ".join(json.loads(line).values())).input_ids for line in lines]


TrainerRun = Callable[..., Path]


@pytest.fixture(scope="module")
def trainer_run(tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]]) -> TrainerRun:
    """Runs the Trainer's script."""

    def run(*, model: nn.Module | None = None, **changes: Any) -> Path:
        out = tmp_path_factory.mktemp("trainer") / "run"
        tokenizer = AutoTokenizer.from_pretrained(FIXTURES / "models" / "llama")
        dataset = [{"input_ids": row} for row in rows]
        changes |= {"use_cpu": True, "disable_tqdm": True}
        script("hf_trainer").train(model or tiny(), tokenizer, dataset, out, **changes)
        return out

    return run


@pytest.fixture(scope="module")
def honest(trainer_run: TrainerRun) -> Path:
    """The Trainer's script as it is."""
    return trainer_run()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain loop."""
    return recorded(tmp_path_factory.mktemp("plain") / "run")


def accelerate_run(
    out: Path, rows: list[list[int]], *, model: nn.Module | None = None, without: Sequence[str] = (), lr: float = 1e-3
) -> Path:
    """Runs Accelerate's script; the optimizer is made without some parameters."""
    model = model or tiny()
    kept = [parameter for name, parameter in model.named_parameters() if name not in without]
    script("accelerate_loop").train(model, torch.optim.AdamW(kept, lr=lr, weight_decay=0.0), rows, out)
    return out


def divergence(*folders: Path) -> tuple[Stage, str]:
    compared = compare_records(folders, threshold=None)
    assert compared.differs
    stage = compared.pairs[0].divergence
    assert stage is not None
    json.dumps(compared.to_json(), allow_nan=False)
    return stage, compared.text()


def agree(compared: Comparison) -> None:
    assert not compared.differs, compared.text()
    assert "The records agree." in compared.text()


@pytest.mark.parametrize(("name", "part"), [("verl_engine", "def recorded"), ("openrlhf_sft", "class Recording")])
def test_recording_in_a_framework_takes_few_lines(name: str, part: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").partition(part)[2].partition("\n\n\n")[0]
    code = [line for line in text.splitlines() if line.strip() and '"""' not in line]
    assert len(code) <= 16, "a line that opens it, and fifteen"


@pytest.mark.parametrize("name", ["hf_trainer", "accelerate_loop", "trl_grpo", "deepspeed_loop"])
def test_a_script_is_short_and_recording_takes_three_lines_of_it(name: str) -> None:
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 60
    code = [line for line in lines if not line.startswith('"""')]
    assert len([line for line in code if re.search(r"\bparity\b|\br[.]step", line)]) <= 3


def test_the_trainer_and_a_loop_of_ones_own_agree_on_the_same_rows(
    honest: Path, tmp_path: Path, rows: list[list[int]]
) -> None:
    compared = compare_records([accelerate_run(tmp_path / "loop", rows), honest], threshold=None)
    agree(compared)
    steps = [stage.step for stage in compared.pairs[0].stages if stage.name in ("batch", "loss", "gradients", "update")]
    assert steps == sorted([*range(4)] * 4)


def test_another_order_of_summation_agrees(plain: Path, tmp_path: Path) -> None:
    folders = [plain, recorded(tmp_path / "b", order=lambda rows: rows[::-1])]
    agree(compare_records(folders, threshold=None))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["pangu", "llama", "qwen3", "gemma3"])
def test_rounding_is_no_difference_also_where_adam_turns_it_into_whole_steps(family: str, tmp_path: Path) -> None:
    how: dict[str, dict[str, Any]] = {
        "plain": {},
        "reversed": {"order": lambda rows: rows[::-1]},
        "bf16": {"autocast": True},
    }
    folders = [recorded(tmp_path / out, model=tiny(family), epochs=2, **options) for out, options in how.items()]
    compared = compare_records(folders, threshold=None)
    agree(compared)
    in_fp32, in_bf16 = compared.pairs
    assert (in_fp32.threshold, in_bf16.threshold) == (2**-11.5, 2**-3.5)
    updates = [q.observed for stage in in_bf16.stages if stage.name == "update" for q in stage.quantities]
    assert max(updates) > in_bf16.threshold  # which a gradient's noise allows, and nothing else


def test_a_scaled_gradient_is_located_in_the_trainer(trainer_run: TrainerRun) -> None:
    model = tiny()
    model.get_parameter(f"{O_PROJ}.weight").register_hook(lambda gradient: 0.5 * gradient)
    stage, text = divergence(trainer_run(max_grad_norm=0.0), trainer_run(max_grad_norm=0.0, model=model))
    assert (stage.step, stage.name) == (0, "gradients")
    (only,) = stage.different
    assert only.what == f"{O_PROJ}.weight"
    assert only.scale == pytest.approx(0.5, rel=1e-6)
    assert f"- {O_PROJ}.weight: " in text
    assert "wrong by itself is 0.5 times that of A" in text
    assert f"Nearest to the loss of these is model.layers.1 ({O_PROJ}.weight)" in text


@pytest.mark.exhaustive
def test_where_gradients_are_clipped_the_scaled_one_still_comes_first(honest: Path, trainer_run: TrainerRun) -> None:
    model = tiny()
    model.get_parameter(f"{O_PROJ}.weight").register_hook(lambda gradient: 0.5 * gradient)
    stage, text = divergence(honest, trainer_run(model=model))
    assert (stage.step, stage.name) == (0, "gradients")
    assert len(stage.different) == 21
    assert stage.different[0].what == f"{O_PROJ}.weight"
    assert re.search(r"20 gradients of B are 1[.]0\d+ times those of A, as clipping makes them", text)
    assert f"The others: {O_PROJ}.weight." in text
    assert "wrong by itself is 0.5 times that of A" in text


def test_a_loss_that_is_a_mean_per_micro_batch_is_told_at_the_loss(honest: Path, trainer_run: TrainerRun) -> None:
    model = tiny()
    model.accepts_loss_kwargs = False  # the Trainer then takes a mean of each micro-batch, and the mean of these
    stage, _ = divergence(honest, trainer_run(model=model))
    assert (stage.step, stage.name) == (0, "loss")


def test_recorder_keeps_non_finite_loss_behind_logged_mean(
    trainer_run: TrainerRun, capsys: pytest.CaptureFixture[str]
) -> None:
    model, losses = tiny(), []

    def third_is_no_number(module: nn.Module, args: Any, outputs: Any) -> Any:
        losses.append(outputs.loss)
        outputs.loss = outputs.loss * (math.nan if len(losses) == 3 else 1.0)
        return outputs

    model.register_forward_hook(third_is_no_number)
    run = trainer_run(model=model, max_steps=2)
    logged = re.findall(r"'loss': '?([^,'}]+)", capsys.readouterr().out)
    assert [math.isfinite(float(loss)) for loss in logged] == [True, True]
    assert [math.isfinite(line["loss"]) for line in read_run(run).steps] == [True, False]


def test_a_loss_that_is_not_seen_is_warned_of_while_the_trainer_may_replace_it(trainer_run: TrainerRun) -> None:
    model = tiny()
    model.register_forward_hook(lambda module, args, outputs: outputs.to_tuple())
    with pytest.warns(UserWarning, match="pass logging_nan_inf_filter=False for losses as they were computed"):
        trainer_run(model=model, max_steps=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the model gives no loss")
        trainer_run(model=model, max_steps=1, logging_nan_inf_filter=False)


@pytest.mark.exhaustive
def test_another_schedule_is_told_with_the_first_rate_that_differs(honest: Path, trainer_run: TrainerRun) -> None:
    stage, text = divergence(honest, trainer_run(lr_scheduler_type="linear"))
    assert (stage.step, stage.name) == (1, "optimizer")
    assert [quantity.what for quantity in stage.different] == ["lr of model.embed_tokens.weight"]
    assert "A 0.001, B 0.00075" in text


@pytest.mark.exhaustive
def test_other_rows_are_told_before_what_follows_from_them(honest: Path, trainer_run: TrainerRun) -> None:
    stage, text = divergence(honest, trainer_run(train_sampling_strategy="random"))
    assert (stage.step, stage.name) == (0, "batch")
    assert "not the same rows of tokens (4 and 4 rows)" in text


@pytest.mark.exhaustive
def test_a_bias_that_the_optimizer_was_not_given_is_located(tmp_path: Path, rows: list[list[int]]) -> None:
    a = accelerate_run(tmp_path / "a", rows, model=tiny("pangu"))
    b = accelerate_run(tmp_path / "b", rows, model=tiny("pangu"), without=[f"{O_PROJ}.bias"])
    stage, text = divergence(a, b)
    assert (stage.step, stage.name) == (None, "parameters")
    assert f"{O_PROJ}.bias: is in no optimizer of {b}" in text


def test_a_wrong_backward_pass_is_followed_back_to_the_module_that_has_it(
    tmp_path: Path, rows: list[list[int]]
) -> None:
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 0.5

    halved: Callable[[Tensor], Tensor] = Halved.apply
    model = tiny()
    model.get_submodule("model.layers.0.mlp.down_proj").register_forward_hook(lambda *call: halved(call[2]))
    a, b = accelerate_run(tmp_path / "a", rows), accelerate_run(tmp_path / "b", rows, model=model)
    stage, text = divergence(a, b)
    assert (stage.step, stage.name) == (0, "gradients")
    assert "11 gradients of B are" in text  # the last layer's, the norm's and the head's
    assert "Nearest to the loss of these is model.layers.0 (" in text


def test_an_update_that_is_undone_is_told_at_the_update(plain: Path, tmp_path: Path) -> None:
    model = tiny()
    optimizer, norm = adamw(model), model.get_parameter("model.norm.weight")
    before = norm.detach().clone()
    optimizer.register_step_post_hook(lambda *_: norm.data.copy_(before))
    with parity.record(model, optimizer, out=tmp_path / "b") as recorder:
        train(model, optimizer, recorder)
    stage, text = divergence(plain, tmp_path / "b")
    assert (stage.step, stage.name) == (0, "update")
    assert [quantity.what for quantity in stage.different] == ["model.norm.weight"]
    assert f"model.norm.weight does not move in {tmp_path / 'b'}." in text


def test_weights_that_were_loaded_otherwise_are_told_first(plain: Path, tmp_path: Path) -> None:
    model = tiny()
    model.get_parameter(f"{O_PROJ}.weight").data[5, 7] += 1e-4
    stage, _ = divergence(plain, recorded(tmp_path / "b", model=model))
    assert (stage.step, stage.name) == (None, "weights")
    assert [quantity.what for quantity in stage.different] == [f"{O_PROJ}.weight"]


def test_a_gradient_that_one_side_lacks_is_a_difference_and_one_of_zeros_is_none(tmp_path: Path) -> None:
    folders = []
    for out, used in (("a", 1.0), ("zeros", 0.0), ("none", None)):
        first, second = (nn.Linear(3, 3, bias=False) for _ in range(2))
        for linear in (first, second):
            nn.init.constant_(linear.weight, 0.5)
        model = nn.ModuleList([first, second])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with parity.record(model, optimizer, out=tmp_path / out) as recorder:
            y = first(torch.ones(2, 3)).sum()
            (y if used is None else y + used * second(torch.ones(2, 3)).sum()).backward()
            optimizer.step()
            recorder.step()
        folders.append(tmp_path / out)
    agree(compare_records(folders[1:], threshold=None))
    stage, text = divergence(folders[0], folders[2])
    assert (stage.name, [quantity.what for quantity in stage.different]) == ("gradients", ["1.weight"])
    assert f"1.weight: no gradient in {folders[2]}" in text


def test_parameters_of_one_side_are_told_with_the_nearest_name(tmp_path: Path) -> None:
    for name in ("norm", "norms"):
        model = nn.ModuleDict({"layer": nn.Linear(2, 2), name: nn.Linear(2, 2)})
        with parity.record(model, torch.optim.SGD(model.parameters(), lr=0.1), out=tmp_path / name):
            pass
    stage, text = divergence(tmp_path / "norm", tmp_path / "norms")
    assert stage.name == "parameters"
    assert f"- norm.weight: not in {tmp_path / 'norms'}; the nearest name there is norms.weight" in text


def test_numbers_that_are_not_finite_are_a_difference(plain: Path, tmp_path: Path) -> None:
    model = tiny()
    model.get_parameter(f"{O_PROJ}.weight").register_hook(lambda gradient: gradient / 0)
    stage, text = divergence(plain, recorded(tmp_path / "b", model=model))
    assert (stage.step, stage.name) == (0, "gradients")
    assert f"- {O_PROJ}.weight: numbers that are not finite: 0 in {plain} and 4096 in {tmp_path / 'b'}" in text


def test_a_threshold_that_is_given_comes_in_place_of_the_derived_one(plain: Path, tmp_path: Path) -> None:
    model = tiny()
    model.get_parameter(f"{O_PROJ}.weight").register_hook(lambda gradient: gradient * 1.01)
    folders = [plain, recorded(tmp_path / "b", model=model)]
    assert compare_records(folders, threshold=None).differs
    agree(compare_records(folders, threshold=0.05))
    assert compare_records(folders, threshold=1e-3).differs


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "a")
    with pytest.raises(UsageError, match="name two or more"):
        compare_records([folder], threshold=None)
    with pytest.raises(UsageError, match="threshold 5: it has to lie between 0 and 1"):
        compare_records([folder, folder], threshold=5)
    with pytest.raises(UsageError, match=r"there is no .*; name a folder that parity.record wrote"):
        compare_records([folder, tmp_path], threshold=None)
    (tmp_path / "record.jsonl").write_text('{"schema": 3}\n', encoding="utf-8")
    with pytest.raises(UsageError, match="records of parity run are for parity compare"):
        compare_records([folder, tmp_path], threshold=None)
    damaged = Path(shutil.copytree(folder, tmp_path / "damaged"))
    (damaged / "step-000001.safetensors").write_bytes(b"damaged")
    with pytest.raises(UsageError, match=r"step-000001.safetensors cannot be read"):
        compare_records([folder, damaged], threshold=None)


@pytest.mark.exhaustive
def test_whole_tensors_say_where_and_how_far_exactly(tmp_path: Path) -> None:
    def planted(gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        changed[5, 7] += 1.0
        return changed

    model = tiny()
    model.get_parameter(f"{O_PROJ}.weight").register_hook(planted)
    folders = [recorded(tmp_path / "a", full=True), recorded(tmp_path / "b", full=True, model=model)]
    stage, text = divergence(*folders)
    assert [quantity.what for quantity in stage.different] == [f"{O_PROJ}.weight"]
    assert "row groups 5 of 64" in text
    found = re.search(rf"{O_PROJ}.weight: exactly ([0-9.]+) apart, in 1 of 4096 elements, most at \[5, 7\]", text)
    assert found
    size = stage.different[0].norms[1] if stage.different[0].norms else 0.0
    assert float(found.group(1)) == pytest.approx(6 / size, rel=1e-4)  # of six rows, a micro-batch each
    assert stage.different[0].observed == pytest.approx(6 / size, rel=1e-4)  # the sketch sees one element exactly


@pytest.mark.exhaustive
def test_what_is_not_finite_in_both_is_no_agreement(tmp_path: Path) -> None:
    for name in ("a", "b"):
        model = tiny()
        model.get_parameter(f"{O_PROJ}.weight").register_hook(lambda gradient: gradient / 0)
        recorded(tmp_path / name, model=model)
    stage, _ = divergence(tmp_path / "a", tmp_path / "b")
    assert (stage.step, stage.name) == (0, "gradients")


def test_a_record_is_not_compared_with_itself(plain: Path) -> None:
    with pytest.raises(UsageError, match="given twice"):
        compare_records([plain, plain.parent / "." / plain.name], threshold=None)


def test_records_without_a_step_are_not_comparable(tmp_path: Path) -> None:
    for name in ("a", "b"):
        model = nn.Linear(2, 2)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        with parity.record(model, adamw(model), out=tmp_path / name):
            pass
    compared = compare_records([tmp_path / "a", tmp_path / "b"], threshold=None)
    assert not compared.differs
    assert not compared.comparable
