"""The cache of the oracle's records: no run is made twice, and none stands in for a run that could differ."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_objectives
from cells import exhaustive
from conftest import make_cell

import conformance.oracle
from conformance.core.host import cache_folder, resolve
from conformance.data.inputs import FrozenInputs, prepare_inputs
from conformance.matrix.cell import Cell, Phase
from conformance.oracle.run import POLICIES
from conformance.records.step_tensors import read_record
from conformance.runner.oracle_jobs import COMPUTED_WITH, Oracles, _cache_key, prune
from conformance.spec.batch import read_batches, write_batches
from conformance.spec.conventions import RoundedMasters
from conformance.spec.known_defects import DividedGradients
from conformance.spec.precision import PrecisionName, noise_runs


def cell(precision: PrecisionName = "exact", layout: str = "dp1", **changes: Any) -> Cell:
    small = {"steps": 1, "accumulation": 1, "rows": 2}
    return make_cell("sft-sgd", "llama", layout, precision, **(small | changes))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own."""
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path / "cache"))
    return cache_folder() / "oracle"


def ask(root: Path, *cells: Cell, inputs: FrozenInputs | None = None) -> list[str]:
    """Have oracles run for cells in a session of their own; gives why they failed, or nothing.

    Its folder ``worker_groups`` is made by the first run that is not in the cache.
    """
    with Oracles(root=root, device="cpu", budget_s=120.0) as oracles:
        for each in cells:
            oracles.request(each, inputs or prepare_inputs(each.scenario, root))
        return [oracles.wait(each) for each in cells]


def records(root: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of the first step of every record of a session, by its place in the folder."""
    found = sorted(root.glob("oracle/*/*/record.jsonl"))
    return {str(file.parent.relative_to(root)): read_record(file.parent).steps[0].tensors() for file in found}


def equal(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.is_dir())


# --- what is computed ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A session that has computed a float64 record and one of fp32, and the cache that it has filled."""
    root = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARITY_CACHE", str(root / "cache"))
        assert ask(root / "out", cell("exact"), cell("fp32", "dp2")) == ["", ""]
    return root / "out", root / "cache"


def test_cells_that_need_the_same_runs_share_them(first: tuple[Path, Path]) -> None:
    out, cached = first
    (folder,) = out.glob("oracle/*/")
    assert sorted(path.name for path in folder.iterdir() if (path / "record.jsonl").exists()) == ["float64", "fp32"]
    assert len(entries(cached / "oracle")) == 2
    assert (out / "worlds").is_dir()


def test_another_session_computes_nothing_again(first: tuple[Path, Path], cache: Path, tmp_path: Path) -> None:
    shutil.copytree(first[1], cache.parent)
    for entry in entries(cache):
        os.utime(entry, (0, 0))
    assert ask(tmp_path / "out", cell("fp32", "dp4")) == [""]
    assert not (tmp_path / "out" / "worlds").exists()
    theirs = records(first[0])
    assert theirs.keys() == records(tmp_path / "out").keys()
    assert all(equal(tensors, theirs[name]) for name, tensors in records(tmp_path / "out").items())
    assert all(entry.stat().st_mtime > 0 for entry in entries(cache)), "what was used is not what is thrown away next"


def test_no_reference_lies_in_the_output_folder_before_the_end(first: tuple[Path, Path], tmp_path: Path) -> None:
    """Neither a new one nor that of an earlier session in this folder, and one that a rank changes is not judged by."""
    shutil.copytree(first[1], tmp_path / "cache")
    shutil.copytree(first[0], tmp_path / "out")
    asked, earlier = cell("exact", "dp2"), records(tmp_path / "out").keys()
    with pytest.MonkeyPatch.context() as patch, Oracles(root=tmp_path / "out", device="cpu", budget_s=120.0) as oracles:
        patch.setenv("PARITY_CACHE", str(tmp_path / "cache"))
        oracles.request(asked, prepare_inputs(asked.scenario, tmp_path / "out"))
        assert oracles.wait(asked) == ""
        assert not list((tmp_path / "out").rglob("float64/*"))
        file = oracles.folder(asked) / "float64" / "record.jsonl"
        whole = file.read_text()
        file.write_text(whole.replace('"loss":', '"loss" :', 1))
        assert "float64 was changed while cells ran" in oracles.wait(asked)
        file.write_text(whole)
        assert oracles.wait(asked) == ""
    assert records(tmp_path / "out").keys() == earlier
    assert not oracles.folder(asked).exists()


def damaged(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


@pytest.mark.exhaustive
def test_a_record_that_is_not_whole_is_computed_again(first: tuple[Path, Path], cache: Path, tmp_path: Path) -> None:
    shutil.copytree(first[1], cache.parent)
    for entry, damage, name in zip(
        entries(cache), (damaged, cut_short), ("step-0000.safetensors", "record.jsonl"), strict=True
    ):
        damage(entry / name)
    left = tmp_path / "out" / next(iter(records(first[0])))  # of a session in this folder that was interrupted
    shutil.copytree(first[0] / left.relative_to(tmp_path / "out"), left)
    cut_short(left / "record.jsonl")
    assert ask(tmp_path / "out", cell("fp32")) == [""]
    assert (tmp_path / "out" / "worlds").is_dir()
    theirs, mine = records(first[0]), records(tmp_path / "out")
    assert theirs.keys() == mine.keys()
    assert all(equal(mine[name], theirs[name]) for name in theirs)
    assert all(read_record(entry).footer["steps"] == 1 for entry in entries(cache))


def test_a_run_that_failed_says_why_and_is_not_kept(cache: Path, tmp_path: Path) -> None:
    long = cell(steps=2)
    inputs = prepare_inputs(cell().scenario, tmp_path)  # of one step
    (reason,) = ask(tmp_path, long, inputs=inputs)
    assert reason.startswith("the oracle's float64 run failed: ")
    assert "has 2 steps but only 1 batches" in reason
    assert entries(cache) == []
    assert not records(tmp_path)


# --- what makes another record ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> FrozenInputs:
    return prepare_inputs(cell().scenario, tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def inputs(frozen: FrozenInputs, tmp_path: Path) -> FrozenInputs:
    """A copy, to be changed."""
    models = {role: Path(shutil.copytree(folder, tmp_path / role)) for role, folder in frozen.models.items()}
    return FrozenInputs(models=models, batches=Path(shutil.copy(frozen.batches, tmp_path / "batches")))


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conformance's sources, which the key is made from."""
    package = Path(conformance.oracle.__file__).parent.parent
    copy = shutil.copytree(package, tmp_path / "sources", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(conformance.oracle, "__file__", str(copy / "oracle" / "__init__.py"))
    return Path(copy)


def key(inputs: FrozenInputs, of: Cell | None = None, *, policy: Any = "float64") -> str:
    return _cache_key(of or cell(), inputs, policy, "cpu")


@pytest.mark.parametrize(
    "other",
    [
        cell(layout="dp8"),
        cell(precision="bf16"),
        cell(accumulation=2),
        cell(name="other"),
        dataclasses.replace(cell(), faults=("cleared-gradients",)),
    ],
    ids=str,
)
def test_what_the_oracle_does_not_see_makes_no_other_record(inputs: FrozenInputs, other: Cell) -> None:
    assert key(inputs, other) == key(inputs)


def test_the_place_of_the_inputs_makes_no_other_record(frozen: FrozenInputs, inputs: FrozenInputs) -> None:
    assert key(inputs) == key(frozen)


@pytest.mark.exhaustive
def test_the_same_model_in_another_folder_is_judged_by_a_record_that_names_it(cache: Path, tmp_path: Path) -> None:
    scenario = cell().scenario
    moved = Path(shutil.copytree(resolve(scenario.model), tmp_path / "moved"))
    there = dataclasses.replace(cell(), scenario=dataclasses.replace(scenario, model=str(moved)))
    assert ask(tmp_path / "out", cell(), there) == ["", ""]
    named = {
        read_record(path.parent).header["scenario"]["model"] for path in tmp_path.glob("out/oracle/*/*/record.jsonl")
    }
    assert named == {scenario.model, str(moved)}


def export_after_one(scenario_cell: Cell) -> Cell:
    """The same training in two phases, of which the second has a new optimizer."""
    (phase,) = scenario_cell.phases
    phases = (
        Phase(backend=phase.backend, layout=phase.layout, steps=1, save="export"),
        dataclasses.replace(phase, steps=1),
    )
    return dataclasses.replace(scenario_cell, phases=phases, program="mine")


def test_a_new_optimizer_in_the_middle_makes_another_record(inputs: FrozenInputs) -> None:
    assert key(inputs, export_after_one(cell(steps=2))) != key(inputs, cell(steps=2))


@pytest.mark.parametrize(
    "other",
    [
        cell(steps=2),
        cell(seed=1),
        cell(optimizer={"name": "sgd", "lr": 0.051, "momentum": 0.9, "max_grad_norm": 0.5}),
        cell(schedule={"name": "linear", "total_steps": 9}),
        cell(objective=toy_objectives.WeightedSft()),
    ],
    ids=["steps", "seed", "optimizer", "schedule", "objective"],
)
def test_another_training_makes_another_record(inputs: FrozenInputs, other: Cell) -> None:
    assert key(inputs, other) != key(inputs)


def test_other_defects_make_another_record(inputs: FrozenInputs) -> None:
    several = ((), (DividedGradients(by=2),), (DividedGradients(by=3),), (RoundedMasters(precision="bf16"),))
    assert len({_cache_key(cell(), inputs, "float64", "cpu", defects) for defects in several}) == 4


def test_an_oracle_with_a_defect_has_a_folder_of_its_own_and_so_has_its_noise(cache: Path, tmp_path: Path) -> None:
    defects = (RoundedMasters(precision="bf16"),)
    asked = cell("bf16")
    with Oracles(root=tmp_path, device="cpu", budget_s=120.0) as oracles:
        inputs = prepare_inputs(asked.scenario, tmp_path)
        oracles.request(asked, inputs, defects)
        assert oracles.wait(asked, defects) == ""
        honest, wrong = oracles.published(asked), oracles.published(asked, defects)
        (further,) = noise_runs("bf16", asked.phases[0].layout.data)[1:]
        assert not (oracles.folder(asked, defects) / further).exists()
        assert oracles.more_noise(asked, inputs, [defects])
    assert len(entries(cache)) == 6
    assert wrong.name.startswith("llama-rounded-masters-")
    for policy in ("float64", "bf16", further):
        said = read_record(wrong / policy).header["backend"]["defects"]
        assert said == [{"kind": "rounded-masters", "precision": "bf16"}]
        assert read_record(honest / policy).header["backend"]["defects"] == []
        loaded = read_record(wrong / policy).loaded.tensors()
        assert all(torch.equal(weight, weight.bfloat16().to(weight.dtype)) for weight in loaded.values())


def test_an_objectives_options_make_another_record(inputs: FrozenInputs) -> None:
    one, two = (cell(objective=toy_objectives.WeightedSft(power=power)) for power in (1.0, 2.0))
    assert key(inputs, one) != key(inputs, two)


def test_another_precision_of_the_oracle_makes_another_record(inputs: FrozenInputs) -> None:
    assert len({key(inputs, policy=policy) for policy in POLICIES}) == len(POLICIES)


def change_a_token(inputs: FrozenInputs) -> None:
    first, *rest = read_batches(inputs.batches)
    row = first.rows[0]
    document = dataclasses.replace(row.documents[0], tokens=(7, *row.documents[0].tokens[1:]))
    rows = (dataclasses.replace(row, documents=(document, *row.documents[1:])), *first.rows[1:])
    write_batches(inputs.batches, [dataclasses.replace(first, rows=rows), *rest])


def change_a_weight(inputs: FrozenInputs) -> None:
    damaged(inputs.models["policy"] / "model.safetensors")


def change_the_configuration(inputs: FrozenInputs) -> None:
    file = inputs.models["policy"] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-3}))


@pytest.mark.parametrize("change", [change_a_token, change_a_weight, change_the_configuration])
def test_other_inputs_make_another_record(inputs: FrozenInputs, change: Callable[[FrozenInputs], None]) -> None:
    contents = [file.read_bytes() for file in (inputs.batches, *sorted(inputs.models["policy"].glob("[cm]*.[js]*")))]
    before = key(inputs)
    change(inputs)
    now = [file.read_bytes() for file in (inputs.batches, *sorted(inputs.models["policy"].glob("[cm]*.[js]*")))]
    assert contents != now
    assert key(inputs) != before


ORACLE = Path(conformance.oracle.__file__).parent
ALWAYS = ("spec/scenario.py", "numerics/float64_tier.py", "numerics/sketch.py", "models/families.py")


@pytest.mark.parametrize(
    "file",
    [
        "oracle/decoder.py",
        *(exhaustive(f"oracle/{path.name}") for path in ORACLE.glob("*.py") if path.name != "decoder.py"),
        *ALWAYS,
        *(exhaustive(file) for file in COMPUTED_WITH if file not in ALWAYS),
    ],
)
def test_other_sources_make_another_record(inputs: FrozenInputs, sources: Path, file: str) -> None:
    before = key(inputs)
    (sources / "judge" / "verdict.py").write_text("# what only judges does not matter")
    assert key(inputs) == before
    (sources / file).write_text((sources / file).read_text() + "\n")
    assert key(inputs) != before


def test_all_that_the_oracle_imports_makes_another_record_but_what_is_said_not_to() -> None:
    told = "import sys, conformance.oracle.run; print(*(m for m in sys.modules if m.startswith('conformance.')))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    package, files = ORACLE.parent, set[str]()
    for module in (module.split(".")[1:] for module in done.stdout.split()):
        file = Path(*module).with_suffix(".py")
        if module[0] not in ("oracle", "runtime") and (package / file).exists():  # ranks of any kind are started alike
            files.add(str(file))
    apart = {f"core/{name}.py" for name in ("errors", "host", "packages", "process", "timeline")}  # where and whether
    assert files - apart == set(COMPUTED_WITH)
    assert apart < files


def test_sources_of_an_objective_of_ones_own_count(
    inputs: FrozenInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the file that declares it and the one that computes it for the oracle."""
    one_of_both = "from {0} import *\nclass {1}({0}.{1}): pass\n"
    (tmp_path / "functions_of_mine.py").write_text(
        "from toy_objectives import OracleWeightedSft\nclass Mine(OracleWeightedSft):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import functions_of_mine  # type: ignore[import-not-found]

    own = cell(objective=toy_objectives.WeightedSft())
    monkeypatch.setitem(conformance.oracle.objectives.FUNCTIONS, "toy_objectives:WeightedSft", functions_of_mine.Mine)
    before = key(inputs, own)
    (tmp_path / "functions_of_mine.py").write_text(one_of_both)
    assert key(inputs, own) != before


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [(torch, "__version__", "9.9.9"), (torch.backends.cpu, "get_cpu_capability", lambda: "ABACUS")],
    ids=["torch", "processor"],
)
def test_another_torch_or_processor_makes_another_record(
    inputs: FrozenInputs, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any
) -> None:
    before = key(inputs)
    monkeypatch.setattr(owner, name, value)
    assert key(inputs) != before


# --- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "kept"), [(35, "abcd"), (30, "abc"), (29, "ab"), (10, "a"), (5, ""), (10**9, "abcd")])
def test_what_was_used_least_recently_goes_first(tmp_path: Path, size: int, kept: str) -> None:
    """Four records of 10 bytes (the last: 5), from the most to the least recently used."""
    for age, name in enumerate("abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.jsonl").write_bytes(b"x" * (10 if name != "d" else 5))
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    (tmp_path / "a.lock").touch()
    prune(tmp_path, size=size)
    assert "".join(entry.name for entry in entries(tmp_path)) == kept
    assert (tmp_path / "a.lock").exists()


def test_a_session_prunes_when_it_ends(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.runner.oracle_jobs.CACHE_SIZE", 10)
    (cache / "large").mkdir(parents=True)
    (cache / "large" / "record.jsonl").write_bytes(b"x" * 11)
    ask(tmp_path / "out")
    assert entries(cache) == []


@pytest.mark.exhaustive
def test_where_the_cache_cannot_be_written_to_a_run_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PARITY_CACHE", str(tmp_path / "file" / "cache"))
    assert ask(tmp_path / "out", cell()) == [""]
    assert len(entries(tmp_path / "out" / "oracle" / "cache")) == 1
