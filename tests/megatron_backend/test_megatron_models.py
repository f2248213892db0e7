"""Megatron's contexts and trainables, without the engine: several models at a time, every output, any layout.

The cells of the engine are in tests/cells/test_cells_megatron.py.
"""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cells import exhaustive, needs, ranks_of
from safetensors.torch import load_file

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.models.folders import prepare_model
from conformance.runtime import Pool
from conformance.spec.layout import Layout
from conformance.spec.observables import Role
from conformance.spec.precision import PrecisionName
from conformance.spec.scenario import load_scenario

pytestmark = needs("megatron-core")

HONEST = 1e-12  # relative error of a parameter's gradient or update in the exact tier
FAMILIES = ("pangu", "llama", "qwen3")
COMPILER = "torch._inductor.compile_fx"
ROLES = (Role(name="policy"), Role(name="reference", trained=False), Role(name="critic", head="value"))
Folders = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Of each family, the folders of policy, critic and reference, which have different weights."""
    root = tmp_path_factory.mktemp("folders")
    scenarios = {
        family: load_scenario(FIXTURES / "scenarios" / "sft-packed.toml", model=f"models/{family}", precision="exact")
        for family in FAMILIES
    }
    return {
        family: {role.name: str(prepare_model(scenario, role, root / family / role.name)) for role in ROLES}
        for family, scenario in scenarios.items()
    }


@pytest.fixture
def run_ranks(pool: Pool, tmp_path: Path) -> Any:
    def run(task: str, layout: str, **arguments: Any) -> list[Any]:
        outcome = pool.run(
            key="megatron models",
            config=ranks_of("megatron", Layout.parse(layout).world_size),
            task=task if ":" in task else f"megatron_tasks:{task}",
            kwargs={"layout": layout, **arguments},
            log_dir=tmp_path / "logs",
            budget_s=240.0,
        )
        assert outcome.state == "done", outcome.reason
        return outcome.results

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "layout", "optimizer"),
    [
        ("pangu", "dp1", "adamw"),
        ("llama", "dp2", "sgd"),
        ("qwen3", "dp2.zero1", "adamw"),
        ("qwen3", "dp2.zero1.overlap", "adamw"),
        ("pangu", "tp2", "adamw"),
        ("qwen3", "tp2", "adamw"),
        ("pangu", "tp2.seqpar", "adamw"),
        ("llama", "tp2.seqpar.ckpt", "adamw"),
        ("qwen3", "tp2.seqpar", "sgd"),
        ("pangu", "pp2", "adamw"),
        ("qwen3", "pp2.vpp2", "adamw"),
        ("llama", "pp2.vpp2.overlap", "sgd"),
        ("pangu", "sp2", "adamw"),
        ("qwen3", "sp2.zigzag", "sgd"),
        ("llama", "sp2.torchcp", "adamw"),
        ("pangu", "sp2.pp2.torchcp", "adamw"),
        ("pangu", "tp2.pp2", "adamw"),
        ("qwen3", "tp2.pp2.vpp2.seqpar", "adamw"),
        ("qwen3", "sp2.pp2.ring", "adamw"),
        ("llama", "sp2.tp2.seqpar", "adamw"),
        ("llama", "dp2.pp2.vpp2.zero1.overlap", "adamw"),
    ],
)
def test_a_policy_a_critic_and_a_frozen_reference_side_by_side_are_plain_models(
    run_ranks: Any, folders: Folders, family: str, layout: str, optimizer: str
) -> None:
    for errors in run_ranks("three_models", layout, folders=folders[family], optimizer=optimizer):
        assert max(errors.values()) < HONEST, errors
        kinds = ("weights", "gradients", "norm", "replicas")
        assert errors.keys() >= {f"{model} {kind}" for model in ("policy", "critic") for kind in kinds}
        outputs = {"policy logprobs", "policy entropy", "reference logprobs", "reference entropy", "critic values"}
        assert errors.keys() >= outputs | {"reference weights"}


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        exhaustive("dp2.zero1", "bf16"),
        ("pp2.vpp2", "fp16"),
        exhaustive("tp2.seqpar", "fp32"),
        *itertools.starmap(
            exhaustive, itertools.product(("dp2.zero1", "tp2.seqpar", "pp2.vpp2"), ("fp32", "bf16", "fp16"))
        ),
    ],
)
def test_a_frozen_model_holds_rounded_weights_and_gives_what_a_trained_one_gives(
    run_ranks: Any, folders: Folders, layout: str, precision: PrecisionName
) -> None:
    for differences in run_ranks("frozen_and_trained", layout, folders=folders["llama"], precision=precision):
        assert differences == {"logprobs": 0.0, "entropy": 0.0, "values": 0.0}


@pytest.mark.parametrize("layout", [exhaustive("dp2"), "dp2.zero1", exhaustive("pp2")])
def test_an_overflow_in_fp16_has_no_norm_and_makes_no_update(run_ranks: Any, folders: Folders, layout: str) -> None:
    for norm, changed in run_ranks("overflow", layout, folders=folders["llama"]):
        assert norm != norm
        assert not changed


@pytest.mark.exhaustive
def test_many_layouts_in_one_process_leave_nothing(run_ranks: Any, folders: Folders) -> None:
    layouts = ["tp2.seqpar", "pp2.vpp2", "sp2", "dp2.zero1"]
    for held in run_ranks("in_turn", layouts[0], others=(layouts * 2)[1:], folders=folders["qwen3"]):
        first, last = held[len(layouts) - 1], held[-1]
        assert last["groups"] == 1  # the default group
        # Threads and sockets of a destroyed group end a little later.
        assert last["fds"] <= first["fds"] + 4
        assert last["threads"] <= first["threads"] + 4
        for after in held:
            assert (after["environment"], after["cuda"], after["variables"]) == ([], "torch.cuda", [])
            assert after["models_alive"] == [False, False]
            assert not after["generator_moved"]


def test_last_megatron_context_of_layout_destroys_groups(run_ranks: Any, folders: Folders) -> None:
    for found in run_ranks("two_contexts", "tp2", other="pp2", folders=folders["llama"]):
        both, one, none = found["groups"]
        assert both == one > none == 1
        assert found["norm"] > 0
        assert "tear down its contexts before you set up pp2" in found["refused"]


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        exhaustive("pangu", "dp1"),
        ("pangu", "tp2"),
        ("qwen3", "pp2.vpp2"),
        exhaustive("llama", "tp2.pp2.zero1"),
        exhaustive("qwen3", "tp4"),
    ],
)
def test_a_saved_model_is_the_one_that_was_loaded(
    run_ranks: Any, folders: Folders, tmp_path: Path, family: str, layout: str
) -> None:
    run_ranks("save", layout, folders=folders[family], out=str(tmp_path / "saved"))
    for role, folder in folders[family].items():
        source, saved = Path(folder), tmp_path / "saved" / role
        before, after = (load_file(path / "model.safetensors") for path in (source, saved))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name].view(torch.int32), after[name].view(torch.int32)) for name in before)
        assert (saved / "config.json").read_text() == (source / "config.json").read_text()


@pytest.mark.parametrize("layout", ["pp2.vpp2.zero1", *map(exhaustive, ("dp2", "dp2.zero1", "tp2.seqpar"))])
def test_optimizer_state_has_canonical_names_and_is_whole(run_ranks: Any, folders: Folders, layout: str) -> None:
    for errors in run_ranks("optimizer_state", layout, folders=folders["qwen3"]):
        assert max(errors.values()) < HONEST


@pytest.mark.parametrize(
    ("how", "layout", "other", "precision", "optimizer", "updates"),
    [
        ("state", "pp2.vpp2", "dp2.zero1.overlap", "fp32", "adamw", 2),
        # Buckets of the critic's are padded.
        exhaustive("checkpoint", "dp2.zero1.overlap", "pp2.zero1", "fp16", "adamw", 2),
        exhaustive("checkpoint", "pp2", "tp2.seqpar", "fp16", "sgd", 2),
        exhaustive("checkpoint", "dp2.zero1.overlap", "tp2.zero1", "exact", "adamw", 0),
        exhaustive("checkpoint", "sp2", "pp2.vpp2", "exact", "sgd", 0),
        exhaustive("checkpoint", "tp2.seqpar", "pp2.vpp2", "exact", "adamw", 2),
        exhaustive("state", "tp2.zero1", "sp2", "fp16", "adamw", 2),
        exhaustive("state", "dp2", "tp2.seqpar", "bf16", "sgd", 2),
        exhaustive("state", "dp2", "pp2", "exact", "adamw", 0),
        exhaustive("state", "pp2.vpp2", "dp2.zero1.overlap", "exact", "adamw", 2),
        exhaustive("checkpoint", "dp2.zero1", "tp2.zero1", "exact", "adamw", 2),
    ],
)
def test_what_another_layout_takes_over_is_the_same_to_the_bit(
    run_ranks: Any, folders: Folders, tmp_path: Path, how: str, layout: str, other: str, precision: PrecisionName,
    optimizer: str, updates: int,
) -> None:  # fmt: skip
    options = {"how": how, "other": other, "precision": precision, "optimizer": optimizer, "updates": updates}
    out = str(tmp_path / "handed")
    for found in run_ranks("megatron_state_tasks:handed_over", layout, folders=folders["qwen3"], out=out, **options):
        assert not found["changed"]
        assert not found["shared"]
        kinds = ["exp_avg", "exp_avg_sq", "step"] if optimizer == "adamw" else ["momentum_buffer"]
        assert found["kinds"] == sorted([*kinds * bool(updates), "progress", "weight"])
        scale = {"loss_scale": 2.0**11, "good_steps": 1.0} if precision == "fp16" else {}  # one since the overflow
        assert found["progress"] == {"schedule": updates, **scale}
        if precision == "exact":
            assert found["off"] < HONEST


def test_a_checkpoint_of_another_training_is_refused_and_changes_nothing(
    run_ranks: Any, folders: Folders, tmp_path: Path
) -> None:
    told = {
        "critic": "is a checkpoint of another training: the model's head is 'causal' there and 'value' here",
        "optimizer": "'AdamW in DistributedOptimizer' there and 'AdamW in FP32Optimizer' here; .* a training state",
        "cut": "is not the list of a checkpoint of this version; save the checkpoint again",
        "list": "has no contents.json; give the folder that save_ckpt got",
    }
    out = str(tmp_path / "checkpoints")
    for said in run_ranks("megatron_state_tasks:refused", "dp2.zero1", other="dp2", folders=folders["llama"], out=out):
        assert said.keys() == told.keys()
        for name, pattern in told.items():
            assert re.search(pattern, said[name]), said[name]


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["tp2.seqpar", "pp2.vpp2", "dp2.zero1"])
def test_fsdp2_gives_the_same_bits_before_and_after_megatron(run_ranks: Any, folders: Folders, layout: str) -> None:
    plain_layout = "tp2" if "tp2" in layout else "dp2"
    assert all(run_ranks("fsdp2_around", layout, plain_layout=plain_layout, folders=folders["qwen3"]))


def test_state_of_optimizers_that_are_not_torchs_is_refused() -> None:
    from impl.megatron.tensors import refuse_foreign

    with pytest.raises(UsageError, match="before transformer_engine and apex"):
        refuse_foreign(torch.optim.Adagrad([torch.zeros(1)]))


APEX = """\
import torch


class FusedAdam(torch.optim.AdamW):
    def step(self, closure=None):
        raise RuntimeError("float64 is not supported")


class FusedSGD(torch.optim.SGD):
    pass
"""


@pytest.fixture
def with_apex(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds an Apex, as in the containers that people train with Megatron in."""
    (folder := tmp_path / "site" / "apex" / "optimizers").mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").write_text(APEX)
    return os.environ | {"PYTHONPATH": str(tmp_path / "site")}


@pytest.mark.exhaustive
def test_apex_and_transformer_engine_are_not_taken_where_they_are_installed(with_apex: dict[str, str]) -> None:
    of_library, of_ours = "from megatron.core import optimizer", "import impl.megatron.context"
    for lines, taken in (((of_library,), "apex.optimizers"), ((of_ours, of_library), "torch.optim.adamw")):
        program = "; ".join([*lines, "print(optimizer.Adam.__module__)"])
        done = subprocess.run(
            [sys.executable, "-c", program], env=with_apex, capture_output=True, text=True, check=False
        )
        assert done.stdout.split() == [taken], done.stderr


@pytest.mark.exhaustive
def test_a_cell_conforms_where_apex_is_installed(with_apex: dict[str, str], tmp_path: Path) -> None:
    cell = ["--profile", "full", "--cells", "sft-packed/llama/megatron/dp2.zero1/exact", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "conformance.cli.main", "run", *cell]
    done = subprocess.run(command, env=with_apex, capture_output=True, text=True, check=False)
    assert "pass: 1 pass" in done.stdout, done.stdout + done.stderr


def test_a_folder_with_another_head_is_refused(folders: Folders) -> None:
    from impl.interface.trainable import ContextConfig
    from impl.megatron.context import MegatronContext

    config = ContextConfig(layout=Layout.parse("dp1"), precision="fp32", device="cpu", accumulation=1, packed=True)
    for role, asked in (("critic", "causal"), ("policy", "value")):
        with pytest.raises(UsageError, match=f"but a {asked} head is required"):
            MegatronContext(config).new_trainable(asked).load_model(Path(folders["llama"][role]))  # type: ignore[arg-type]


def test_no_rank_has_imported_torchs_compiler(pool: Pool, tmp_path: Path) -> None:
    outcome = pool.run(
        key="compilers",
        config=ranks_of("megatron", 2),
        task="worker_group_tasks:imported",
        kwargs={"modules": ["megatron.core", COMPILER]},
        log_dir=tmp_path / "logs",
        budget_s=240.0,
    )
    assert outcome.results == [["megatron.core"]] * 2, outcome.reason


def test_what_megatron_core_decorates_is_compiled_on_gpus_when_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from impl.megatron.releases import on_gpus_at_first_call

    compiled: list[Any] = []

    def compile_(function: Any) -> Any:
        compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    call = on_gpus_at_first_call(lambda tensor: tensor)
    on_gpu = mock.Mock(spec=torch.Tensor, is_cuda=True)
    call(torch.ones(1))
    assert not compiled
    assert [call(on_gpu), call(tensor=on_gpu)] == [on_gpu, on_gpu]
    assert len(compiled) == 1
