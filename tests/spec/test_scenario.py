"""Scenarios: what is written in a TOML file is what is trained, and what is wrong in it is named."""

import math
from pathlib import Path

import pytest
import torch
import transformers

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.spec.scenario import ScheduleConfig, load_scenario, parse_scenario, scenario_to_json

VALID = {"name": "x", "model": "models/llama", "precision": "fp32", "optimizer": {"name": "sgd", "lr": 0.1}}


@pytest.mark.parametrize("file", sorted((FIXTURES / "scenarios").glob("*.toml")), ids=lambda path: path.stem)
def test_built_in_scenarios_load_and_survive_json(file: Path) -> None:
    scenario = load_scenario(file, model="models/llama", precision="exact")
    assert scenario.name == file.stem
    assert parse_scenario(scenario_to_json(scenario)) == scenario


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"precision": "fp8"},
            r"precision: Input should be 'exact', 'fp32', 'bf16', 'bf16-reduce', 'bf16-nearest', 'bf16-stochastic' or "
            r"'fp16' \(got 'fp8'\)",
        ),
        ({"optimizer": {"name": "sgd", "lr": -1}}, r"optimizer.lr: Input should be greater than 0 \(got -1\)"),
        ({"optimizer": {"name": "sgd", "lr": 1, "beta": 1}}, r"optimizer.beta: there is no such key"),
        ({"optimizer": {"name": "adamw", "lr": 1, "nesterov": True}}, "settings of muon, not of adamw; leave them out"),
        ({"optimizer": {"name": "sgd", "lr": 1, "adjust_lr": "original"}}, "settings of muon, not of sgd"),
        ({"optimizer": {"name": "muon", "lr": 1, "nesterov": True, "adjust_lr": "original"}}, "muon needs momentum"),
        ({"optimizer": {"name": "muon", "lr": 1, "momentum": 0.95, "nesterov": True}}, "adjust_lr='original'"),
        ({"optimizer": {"name": "adamw", "lr": 1, "fused_matrices": ["qkv_proj"]}}, "settings of muon, not of adamw"),
        ({"accumulation": 0}, "accumulation: Input should be greater than or equal to 1"),
        ({"accumulation": 5}, "data.rows=24 is not divisible by accumulation=5; use data.rows=25"),
        ({"data": {"rows": 24, "shuffle": True}}, "data.shuffle: there is no such key"),
        ({"name": "No Spaces"}, "name: String should match pattern"),
        ({"schedule": {"name": "linear", "min_factor": 0.1}}, "the schedule linear has no minimum; use min_factor=0"),
        ({"stepz": 4}, "stepz: there is no such key"),
        ({"resume_after": 2}, "resume_after: there is no such key"),
        ({"steps": "5"}, r"steps: Input should be a valid integer \(got '5'\)"),
        ({"steps": True}, "steps: Input should be a valid integer"),
        ({"steps": 5.0}, "steps: Input should be a valid integer"),
        ({"steps": 10**26}, "steps: Input should be less than or equal to 1048576"),
        ({"steps": 10**5000}, "steps: Input should be less than or equal to 1048576"),
        ({"steps": 2**20}, "steps=1048576 of data.rows=24 are more than 4194304 rows"),
        ({"data": {"rows": 2**21}}, "data.rows: Input should be less than or equal to 1048576"),
        ({"data": {"max_len": 2**63}}, "data.max_len: Input should be less than or equal to 1048576"),
        ({"data": {"packed": "yes"}}, "data.packed: Input should be a valid boolean"),
        ({"data": {"packed": 1}}, "data.packed: Input should be a valid boolean"),
        ({"data": {"path": ""}}, "data.path: String should have at least 1 character"),
        ({"data": {"path": "a\0b"}}, "data.path: String should match pattern"),
        ({"model": "x" * 5000}, "model: String should have at most 4096 characters"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0"),
        ({"seed": 2**32}, "seed: Input should be less than 4294967296"),
        ({"optimizer": {"name": "sgd", "lr": "0.1"}}, "optimizer.lr: Input should be a valid number"),
        ({"optimizer": {"name": "sgd", "lr": True}}, "optimizer.lr: Input should be a valid number"),
        ({"optimizer": {"name": "sgd", "lr": 1e308}}, "optimizer.lr: Input should be less than or equal to 1000"),
        ({"optimizer": {"name": "sgd", "lr": math.nan}}, "optimizer.lr: Input should be"),
        ({"optimizer": {"name": "adamw", "lr": 1, "eps": 1e26}}, "optimizer.eps: Input should be less than or equal"),
        (
            {"optimizer": {"name": "adamw", "lr": 1, "weight_decay": math.inf}},
            "optimizer.weight_decay: Input should be",
        ),
        ({"optimizer": {"name": "adamw", "lr": 1, "betas": [0.9, math.nan]}}, "optimizer.betas.1: Input should be"),
        ({"optimizer": {"name": "sgd", "lr": 1, "max_grad_norm": math.inf}}, "optimizer.max_grad_norm: Input should"),
        ({"schedule": {"total_steps": 10**8}}, "schedule.total_steps: Input should be less than or equal"),
        ({"trust_remote_code": "yes"}, "trust_remote_code: Input should be a valid boolean"),
        ({"objective": {"kind": []}}, r"unknown objective \[\]; known: sft"),
        ({"objective": {"kind": "os:system"}}, "'os:system' is not the class of an objective"),
        ({"objective": {"kind": ":Sft"}}, "unknown objective ':Sft'"),
        ({"objective": {"kind": "..x:Sft"}}, "objective '..x:Sft' cannot be imported"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_may_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_scenario({**VALID, **change})


def test_a_missing_file_lists_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").touch()
    with pytest.raises(UsageError, match=r"no scenario file .*yours.toml; scenarios there: mine"):
        load_scenario(tmp_path / "yours.toml")


def test_broken_toml_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("steps = = 5")
    with pytest.raises(UsageError, match=r"broken.toml is not valid TOML: .*line 1"):
        load_scenario(tmp_path / "broken.toml")


def test_a_file_that_is_not_utf8_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"steps = 5\n# caf\xe9\n")
    with pytest.raises(UsageError, match=r"latin.toml, line 2: not UTF-8"):
        load_scenario(tmp_path / "latin.toml")


def test_a_file_cannot_say_that_code_is_trusted(tmp_path: Path) -> None:
    (tmp_path / "sly.toml").write_text("trust_remote_code = true")
    with pytest.raises(UsageError, match=r"sly.toml: a file cannot set trust_remote_code; use the option --tru"):
        load_scenario(tmp_path / "sly.toml", trust_remote_code=True)


def test_the_oracle_does_not_depend_on_trust_in_code_that_it_does_not_run() -> None:
    trusted, untrusted = (parse_scenario({**VALID, "trust_remote_code": trust}) for trust in (True, False))
    assert trusted.trust_remote_code
    assert trusted.reference == untrusted.reference


def test_data_that_is_no_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "flat.toml").write_text('data = "mine.jsonl"')
    with pytest.raises(UsageError, match=r"flat.toml: data must be a table \(\[data\]\), got 'mine.jsonl'"):
        load_scenario(tmp_path / "flat.toml", data_overrides={"rows": 6})


def test_the_reference_does_not_depend_on_how_a_step_is_cut() -> None:
    whole = parse_scenario({**VALID, "steps": 5})
    cut = parse_scenario({**VALID, "steps": 5, "accumulation": 3})
    assert cut.reference == whole.reference


@pytest.mark.parametrize(
    ("name", "library", "options"),
    [
        ("constant", "constant_with_warmup", {}),
        ("linear", "linear", {}),
        ("cosine", "cosine", {}),
        ("cosine", "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ],
)
@pytest.mark.parametrize("warmup", [0, 3])
def test_schedules_are_those_of_transformers(name: str, library: str, options: dict[str, float], warmup: int) -> None:
    lowest = options.get("min_lr_rate", 0.0)
    schedule = ScheduleConfig(name=name, warmup_steps=warmup, total_steps=8, min_factor=lowest)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = transformers.get_scheduler(
        library, optimizer, num_warmup_steps=warmup, num_training_steps=8, scheduler_specific_kwargs=options
    )
    for step in range(12):
        assert schedule.factor(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-15, abs=1e-16)
        optimizer.step()
        theirs.step()
