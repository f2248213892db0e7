"""The common core: each scenario changes one option of its base, and the option changes the numbers."""

from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import torch

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.core.io import read_toml
from conformance.data.inputs import prepare_inputs
from conformance.data.rollouts import read_groups
from conformance.matrix.profile import load_profile
from conformance.oracle.run import run_oracle
from conformance.records.step_tensors import read_record
from conformance.spec.batch import read_batches
from conformance.spec.scenario import Scenario, load_scenario

FILES = FIXTURES / "scenarios"
CORE = sorted(path.stem for path in FILES.glob("core-*.toml"))
OPTIONS = [name for name in CORE if not name.endswith("-plain")]
BY_MICRO_BATCH = [name for name in CORE if name.endswith("-accumulation")]


def core(name: str) -> Scenario:
    return load_scenario(FILES / f"{name}.toml", model="models/llama", precision="exact")


@pytest.mark.parametrize("name", OPTIONS)
def test_a_scenario_changes_a_single_idea_of_its_base(name: str) -> None:
    values = read_toml(FILES / f"{name}.toml")
    assert values.pop("base") == f"{name[: name.index('-', len('core-'))]}-plain"
    values.pop("steps", None)
    assert len(values) == 1 or name in BY_MICRO_BATCH


def test_the_profile_has_every_core_scenario_in_at_most_40_cells() -> None:
    tables = load_profile("frameworks").cells
    padded = {"dpo-padded", "kto-padded", "reward-padded", "distillation-padded"}
    assert {name for table in tables for name in table.scenarios} == {*CORE, *padded}
    sizes = [[len(table.scenarios), len(table.models), len(table.layouts), len(table.precisions)] for table in tables]
    assert sum(torch.tensor(size).prod().item() for size in sizes) <= 40


def test_responses_are_groups_of_four_without_an_empty_one() -> None:
    groups = read_groups(core("core-grpo-plain"), vocabulary=400)
    assert {len(group) for group in groups} == {4}
    assert all(any(response.targets) for group in groups for response in group)


@pytest.mark.parametrize("name", ["core-grpo-accumulation", "core-grpo-minis"])
def test_each_micro_batch_of_a_rank_has_whole_groups(name: str, tmp_path: Path) -> None:
    scenario = core(name)
    for batch in read_batches(prepare_inputs(scenario, tmp_path).batches):
        for rank in (0, 1):
            for rows in batch.micro_batches(dp_rank=rank, dp_size=2, accumulation=scenario.accumulation):
                groups = [row.documents[0].columns["group"] for row in rows]
                assert {groups.count(group) for group in groups} == {4}


@pytest.mark.parametrize("name", BY_MICRO_BATCH)
def test_micro_batches_have_different_numbers_of_targets(name: str, tmp_path: Path) -> None:
    scenario = core(name)
    for batch in read_batches(prepare_inputs(scenario, tmp_path).batches):
        parts = batch.micro_batches(dp_rank=0, dp_size=2, accumulation=scenario.accumulation)
        assert len({sum(row.target_count for row in rows) for rows in parts}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["core-sft", "core-grpo", "core-ppo"])
def test_no_two_options_have_the_same_numbers(family: str, tmp_path: Path) -> None:
    """More than a thousand times the tolerance of the exact tier, in the gradients of three steps."""

    @cache
    def gradients(name: str) -> torch.Tensor:
        scenario = core(name)
        inputs = prepare_inputs(scenario, tmp_path / name)
        given, out = read_batches(inputs.batches), tmp_path / name / "oracle"
        run_oracle(scenario=scenario.reference, models=inputs.models, batches=given, out=out, policy_name="float64")
        steps = [step.tensors() for step in read_record(out).steps[:3]]
        return torch.cat([t.flatten() for step in steps for key, t in step.items() if "gradient/" in key])

    names = [name for name in CORE if name.startswith(family) and name not in BY_MICRO_BATCH]
    names = [name for name in names if name != "core-sft-resume"]  # core-sft-cosine, with a program
    for one, other in combinations(names, 2):
        apart = (gradients(one) - gradients(other)).norm() / gradients(one).norm()
        assert apart > 1e-8, f"{one} and {other} differ by {apart:.1e} only"


@pytest.mark.parametrize("base", ["core-sft-packed", "../scenarios/core-sft-plain", "No Such"])
def test_a_base_is_a_scenario_of_the_folder_without_a_base(base: str, tmp_path: Path) -> None:
    for name in ("core-sft-plain", "core-sft-packed"):
        (tmp_path / f"{name}.toml").write_text((FILES / f"{name}.toml").read_text())
    (tmp_path / "own.toml").write_text(f'base = "{base}"\n')
    with pytest.raises(UsageError, match=r"own\.toml: base must name a scenario of this folder that has no base"):
        load_scenario(tmp_path / "own.toml", model="models/llama", precision="exact")
