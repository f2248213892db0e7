"""Recording: it changes nothing in the training, says what it saw, and refuses what it cannot see."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import ranks_of
from recording_tasks import adamw, batches, recorded, tiny, train
from safetensors.torch import load_file
from torch import nn

import parity
from conformance.core.errors import UsageError
from conformance.numerics.sketch import seed_of
from conformance.runtime import Pool
from parity.compare import Comparison, compare_records
from parity.differences import setting
from parity.optimizer_shards import whole
from parity.record_files import read_run
from parity.summaries import ROWS_AT, SKETCH_AT, summarize


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of one process without any wrapper."""
    return recorded(tmp_path_factory.mktemp("plain") / "run")


def run_ranks(pool: Pool, tmp_path: Path, task: str, size: int) -> list[Any]:
    outcome = pool.run(
        key="recording",
        config=ranks_of("fsdp2", size),
        task=f"recording_tasks:{task}",
        kwargs={"out": str(tmp_path / task)},
        log_dir=tmp_path,
        budget_s=120,
    )
    assert outcome.state == "done", outcome.reason
    return outcome.results


def agree_closely(compared: Comparison) -> None:
    """To the rounding of sums in another order, of which Adam makes a hundred times as much."""
    assert not compared.differs, compared.text()
    for stage in compared.pairs[0].stages:
        bound = 1e-3 if stage.name == "update" else 1e-5
        assert all(quantity.observed < bound for quantity in stage.quantities), compared.text()
        assert not stage.undetermined


def test_a_recorded_training_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    ends = []
    for record in (False, True):
        model = tiny()
        optimizer = adamw(model)
        if record:
            with parity.record(model, optimizer, out=tmp_path / "run", full=True) as recorder:
                train(model, optimizer, recorder)
        else:
            train(model, optimizer, None)
        weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
        ends.append((weights, optimizer.state_dict()["state"], torch.get_rng_state()))
        assert not [module for module in model.modules() if module._forward_pre_hooks or module._forward_hooks]
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0)


def test_two_sharded_ranks_agree_with_one_process_that_has_all_rows(pool: Pool, plain: Path, tmp_path: Path) -> None:
    run_ranks(pool, tmp_path, "fsdp2", 2)
    compared = compare_records([plain, tmp_path / "fsdp2"], threshold=None)
    agree_closely(compared)
    run = read_run(tmp_path / "fsdp2")
    assert run.header["ranks"] == 2
    assert {parameter["shards"] for parameter in run.parameters.values()} == {2}
    assert {stage.name for stage in compared.pairs[0].stages} >= {"batch", "loss", "gradients", "update"}


@pytest.mark.exhaustive
@pytest.mark.parametrize(("task", "size"), [("fsdp2", 3), ("ddp", 2), ("sharded_twice", 4)])
def test_other_layouts_agree_as_well(task: str, size: int, pool: Pool, plain: Path, tmp_path: Path) -> None:
    run_ranks(pool, tmp_path, task, size)
    agree_closely(compare_records([plain, tmp_path / task], threshold=None))


@pytest.mark.exhaustive
def test_ranks_that_train_apart_are_told(pool: Pool, plain: Path, tmp_path: Path) -> None:
    run_ranks(pool, tmp_path, "unreduced", 2)
    replicas = read_run(tmp_path / "unreduced").steps[0]["replicas"]
    assert set(replicas["gradient"]) == set(replicas["weight"]) == set(read_run(plain).parameters)
    divergence = compare_records([plain, tmp_path / "unreduced"], threshold=None).pairs[0].divergence
    assert divergence is not None
    assert (divergence.step, divergence.name) == (0, "gradients")


def test_what_one_rank_fails_in_all_ranks_raise(pool: Pool, tmp_path: Path) -> None:
    first, second = run_ranks(pool, tmp_path, "failing", 2)
    out = tmp_path / "failing"
    assert (first.pop("names"), second.pop("names")) == (
        "RuntimeError: rank 1 failed: 'weight'",
        "KeyError: 'weight'",
    )
    assert first == second
    assert first["taken"].startswith(f"UsageError: out={out}/taken holds a record already")
    assert first["usage"] == "UsageError: names= gives '' for weight; it has to give a name, or the rows of several"
    assert first["rows"].startswith("UsageError: batch= has to be rows of token ids")
    assert (
        first["tokens"]
        == "UsageError: some ranks hand a loss with tokens= and some without; hand tokens= with every loss"
    )
    assert first["disk"].startswith(f"UsageError: {out}/run/step-000001.safetensors cannot be written: ")
    assert [line["loss"] for line in read_run(out / "run").steps] == [1.0]


def test_a_record_holds_norms_sketches_losses_and_settings_of_each_step(plain: Path) -> None:
    run, model = read_run(plain), tiny()
    assert run.complete
    assert [line["step"] for line in run.steps] == [0, 1, 2]
    rows = batches()[0]
    tokens = sum(len(row) - 1 for row in rows)
    losses = [nn.functional.cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="sum") for row in rows]
    loss = torch.stack(losses).sum() / tokens
    loss.backward()
    line = run.steps[0]
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert (line["tokens"], line["batch"]["rows"]) == (tokens, 6)
    assert line["settings"]["0.0"].items() >= {"lr": 1e-3, "betas": [0.9, 0.999], "optimizer": "AdamW"}.items()
    assert line["computed_in"] == "float32"
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert line["norm"] == pytest.approx(float(norm), rel=1e-6)
    arrays = run.arrays(line)
    for row, (name, parameter) in enumerate(model.named_parameters()):
        expected = summarize(parameter.grad, whole(tuple(parameter.shape)), seed=seed_of(name))
        for array, part in (
            ("sums", slice(0, ROWS_AT)),
            ("rows", slice(ROWS_AT, SKETCH_AT)),
            ("sketch", slice(SKETCH_AT, None)),
        ):
            found = torch.from_numpy(arrays[f"gradient.{array}"][row])
            torch.testing.assert_close(found, expected[part], rtol=1e-4, atol=1e-6)


def test_whole_tensors_are_kept_when_asked_for(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run", full=True)
    loaded, first = (load_file(folder / f"{stem}-tensors.safetensors") for stem in ("loaded", "step-000000"))
    for name, weight in tiny().named_parameters():
        assert torch.equal(loaded[f"weight/{name}"], weight)
        assert first[f"gradient/{name}"].shape == first[f"weight/{name}"].shape == weight.shape


def test_parameters_that_are_frozen_tied_or_without_gradient_are_told(tmp_path: Path) -> None:
    model = tiny("qwen3")
    model.model.norm.weight.requires_grad_(False)
    unused = model.model.layers[0].register_parameter("unused", nn.Parameter(torch.ones(3)))
    assert unused is None
    run = read_run(recorded(tmp_path / "run", model=model))
    assert run.header["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert not run.parameters["model.norm.weight"]["trained"]
    present = dict(zip(run.trained, run.arrays(run.steps[0])["gradient.sums"][:, 0].tolist(), strict=True))
    assert {name for name, part in present.items() if not part} == {"model.layers.0.unused"}


def test_parameters_of_several_optimizers_and_of_none_are_each_seen_once(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.AdamW(model[1].parameters(), lr=0.2)
    with parity.record(model, [first, second], out=tmp_path / "run") as recorder:
        model(torch.ones(2, 4)).sum().backward()
        first.step()
        second.step()
        recorder.step()
        recorder.step()  # as where a loss scaler has skipped the step
    run = read_run(tmp_path / "run")
    assert [parameter["group"] for parameter in run.parameters.values()] == ["0.0"] * 2 + ["1.0"] * 2 + [None] * 2
    assert [line["stepped"] for line in run.steps] == [True, False]
    settings = run.steps[0]["settings"]
    assert [(settings[group]["optimizer"], settings[group]["lr"]) for group in ("0.0", "1.0")] == [
        ("SGD", 0.1),
        ("AdamW", 0.2),
    ]
    arrays = run.arrays(run.steps[0])
    assert arrays["gradient.sums"][:, 0].tolist() == [1.0] * 6
    moved = (arrays["weight.sketch"] - run.arrays(run.loaded)["weight.sketch"]).any(axis=1)
    assert moved.tolist() == [True] * 4 + [False] * 2


def test_groups_are_known_by_their_place_and_not_by_their_dictionaries(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    for weight in model.parameters():
        nn.init.constant_(weight, 0.5)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with parity.record(model, optimizer, out=tmp_path / "run") as recorder:
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.3
        optimizer.load_state_dict(state)
        for step in range(2):
            (model[0](torch.ones(2, 4)) + model[1](torch.ones(2, 4))).sum().backward()
            optimizer.step()
            recorder.step()
            if step == 0:
                optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.2})
                optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    run = read_run(tmp_path / "run")
    assert [line["stepped"] for line in run.steps] == [True, True]
    assert {group: of["lr"] for group, of in run.steps[0]["settings"].items()} == {"0.0": 0.3}
    assert {group: of["lr"] for group, of in run.steps[1]["settings"].items()} == {"0.0": 0.3, "0.1": 0.2, "0.2": 0.1}
    assert [line["regrouped"] for line in run.steps] == [{}, {"1.weight": "0.1"}]
    assert [line["unseen"] for line in run.steps] == [0, 1]
    assert setting(run, run.steps[1], "1.weight")["lr"] == 0.2


def test_a_parameter_that_is_trained_only_later_is_refused_when_it_is(tmp_path: Path) -> None:
    model = nn.ModuleDict({"base": nn.Linear(2, 2, bias=False), "head": nn.Linear(2, 2, bias=False)})
    model["base"].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parity.record(model, optimizer, out=tmp_path / "run") as recorder:
        optimizer.step()
        recorder.step()
        model["base"].requires_grad_(True)
        with pytest.raises(UsageError, match=r"base.weight was frozen when the recording began and is trained now"):
            optimizer.step()


def test_names_rename_and_take_fused_parameters_apart(tmp_path: Path) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 6, bias=False)

    def parts(name: str) -> dict[str, slice]:
        return {f"{part}_proj.weight": slice(2 * i, 2 * i + 2) for i, part in enumerate("qkv")}

    fused, split = Fused(), nn.ModuleDict({f"{part}_proj": nn.Linear(4, 2, bias=False) for part in "qkv"})
    with torch.no_grad():
        for i, weight in enumerate(split.parameters()):
            weight.copy_(fused.qkv.weight[2 * i : 2 * i + 2])
    x = torch.linspace(-1, 1, 12).view(3, 4)
    for model, forward, names, out in (
        (fused, fused.qkv, parts, "fused"),
        (split, lambda x: torch.cat([part(x) for part in split.values()], -1), None, "split"),
        (split, lambda x: torch.cat([part(x) for part in split.values()], -1), lambda name: f"attn.{name}", "renamed"),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with parity.record(model, optimizer, out=tmp_path / out, names=names) as recorder:
            forward(x).square().sum().backward()
            optimizer.step()
            recorder.step()
    compared = compare_records([tmp_path / "split", tmp_path / "fused"], threshold=None)
    assert not compared.differs, compared.text()
    renamed = list(read_run(tmp_path / "renamed").parameters)
    assert renamed == ["attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight"]


def test_autocast_is_seen_although_parameters_do_not_show_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parity.record(model, optimizer, out=tmp_path / "run") as recorder:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        recorder.step()
    assert read_run(tmp_path / "run").steps[0]["computed_in"] == "bfloat16"


def test_what_a_training_wrote_before_it_died_is_read(tmp_path: Path) -> None:
    model = tiny()
    optimizer = adamw(model)
    with contextlib.suppress(KeyError), parity.record(model, optimizer, out=tmp_path / "run") as recorder:
        train(model, optimizer, recorder)
        raise KeyError("a bug of the user")
    run = read_run(tmp_path / "run")
    assert (len(run.steps), run.complete) == (3, False)
    path = tmp_path / "run" / "record.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join(lines[:4]) + lines[4][:40], encoding="utf-8")  # killed while it wrote
    assert len(read_run(tmp_path / "run").steps) == 2
    path.write_text("".join(lines[:2]) + lines[2][:40] + "\n" + lines[3], encoding="utf-8")
    with pytest.raises(UsageError, match=r"line 3 of .* is damaged"):
        read_run(tmp_path / "run")


def test_what_cannot_be_seen_is_refused_with_what_to_do(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"none of the model's parameters; give both as they are trained"):
        parity.record(nn.Linear(4, 4), optimizer, out=tmp_path / "run")
    sliced = nn.Linear(4, 4)
    sliced.weight.tensor_model_parallel = True  # type: ignore[attr-defined]  # as Megatron marks its slices
    with pytest.raises(UsageError, match=r"weight is cut by tensor parallelism outside of megatron.core"):
        parity.record(sliced, torch.optim.SGD(sliced.parameters(), lr=0.1), out=tmp_path / "run")
    with pytest.raises(UsageError, match=r"StepLR is not a torch.optim.Optimizer; give the ones that it steps"):
        parity.record(model, torch.optim.lr_scheduler.StepLR(optimizer, 1), out=tmp_path / "run")
    with pytest.raises(UsageError, match=r"weight the rows slice\(5, 9, None\) of weight, which has 4; give some"):
        parity.record(model, optimizer, out=tmp_path / "run", names=lambda name: {name: slice(5, 9)})
    with pytest.raises(UsageError, match="names= gives rows of weight to q and again to k; give each to one"):
        parity.record(model, optimizer, out=tmp_path / "run", names=lambda name: {"q": slice(0, 3), "k": slice(2, 4)})
    with pytest.raises(UsageError, match="names= gives None for weight; it has to give a name, or the rows of several"):
        parity.record(model, optimizer, out=tmp_path / "run", names=lambda name: None)  # type: ignore[arg-type,return-value]
    with parity.record(model, optimizer, out=tmp_path / "run") as recorder:
        with pytest.raises(UsageError, match="rows of token ids; it has a row of shape"):
            recorder.step(batch=torch.zeros(2, 3))
        optimizer.step()
        with pytest.raises(UsageError, match="stepped twice since"):
            optimizer.step()
    with pytest.raises(UsageError, match="holds a record already"):
        parity.record(model, optimizer, out=tmp_path / "run")


def test_importing_parity_imports_no_torch() -> None:
    program = "import sys, parity; print('torch' in sys.modules, {'record', 'TrainerRecord'} <= {*parity.__all__})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"


def test_a_record_is_json_lines(plain: Path) -> None:
    kinds = [json.loads(line)["kind"] for line in (plain / "record.jsonl").read_text(encoding="utf-8").splitlines()]
    assert kinds == ["header", "loaded", "step", "step", "step", "end"]
