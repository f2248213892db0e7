"""Objectives: a kind that somebody does not know is named before anything runs, and never trains something else."""

from pathlib import Path
from typing import Any

import pytest
import toy_objectives
from conftest import make_cell
from toy_objectives import Nobodys, OfSft, OfTable, OfToys, Willing

import conformance.oracle.objectives
import impl.objectives.policy_gradient
from conformance.backends.protocol import BackendEntry
from conformance.cli import main as cli
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session
from conformance.spec.objectives import BUILT_IN, Objective, all_observables, objective_to_json, parse_objective
from conformance.spec.observables import stages
from conformance.spec.offline import Sft
from conformance.spec.scenario import load_scenario, parse_scenario, scenario_to_json

WILLING = BackendEntry(name="willing", target="toy_objectives:Willing")


def with_objective(text: str, tmp_path: Path) -> Path:
    """A scenario file with an ``[objective]`` table."""
    file = tmp_path / "mine.toml"
    file.write_text(f'steps = 2\n[objective]\n{text}\n[optimizer]\nname = "sgd"\nlr = 0.1\n')
    return file


# --- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'kind = "grpo9"',
            r"mine.toml is not .*\n  objective: .*unknown objective 'grpo9'; known: sft.*, or module:Class",
        ),
        (
            'kind = "no_such_module:Loss"',
            r"objective 'no_such_module:Loss' cannot be imported .*check the spelling and PYTHONPATH",
        ),
        ('kind = "toy_objectives:Typo"', r"'toy_objectives:Typo' cannot be imported .*check the spelling"),
        (
            'kind = "sft"\nbeta = 1',
            r"of kind 'sft' is not a valid objective:\n  beta: there is no such key",
        ),
        (
            'kind = "toy_objectives:WeightedSft"\npower = "big"',
            r"of kind 'toy_objectives:WeightedSft' is not a valid objective:\n  power: Input should be a valid number",
        ),
    ],
)
def test_an_objective_that_cannot_be_used_is_an_error_when_the_scenario_is_loaded(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        load_scenario(with_objective(text, tmp_path), model="models/llama", precision="exact")


@pytest.mark.parametrize("value", ["sft", None, 3, ["sft"]])
def test_an_objective_is_a_table(value: Any) -> None:
    with pytest.raises(UsageError, match=r"\[objective\] must be a table with a kind, such as kind = \"sft\", got "):
        parse_objective(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('kind = "sft"', Sft()),
        ("", Sft()),
        ('kind = "toy_objectives:WeightedSft"\npower = 2.0', toy_objectives.WeightedSft(power=2.0)),
        ('kind = "toy_objectives:PolicyAndValue"', toy_objectives.PolicyAndValue()),
    ],
)
def test_an_objective_is_what_the_file_says_and_survives_json(text: str, expected: Objective, tmp_path: Path) -> None:
    scenario = load_scenario(with_objective(text, tmp_path), model="models/llama", precision="exact")
    assert scenario.objective == expected
    assert parse_objective(objective_to_json(expected)) == expected
    assert parse_scenario(scenario_to_json(scenario)) == scenario


@pytest.mark.parametrize("file", sorted((FIXTURES / "scenarios").glob("*.toml")), ids=lambda path: path.stem)
def test_built_in_scenarios_have_built_in_objectives(file: Path) -> None:
    assert load_scenario(file, model="models/llama", precision="exact").objective.kind in BUILT_IN


# --- who knows what --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_built_in_kind_has_functions_on_both_sides(kind: str) -> None:
    objective: Objective = BUILT_IN[kind]()
    assert objective.kind == kind
    for side in (conformance.oracle.objectives, impl.objectives.policy_gradient):
        assert isinstance(side.functions_of(objective), side.FUNCTIONS[kind])
    functions: list[Any] = [
        side.FUNCTIONS[kind] for side in (conformance.oracle.objectives, impl.objectives.policy_gradient)
    ]
    assert functions[0] is not functions[1]


@pytest.mark.parametrize("side", [conformance.oracle.objectives, impl.objectives.policy_gradient])
def test_neither_side_takes_an_unknown_kind_for_another(side: Any) -> None:
    who = "the oracle" if "oracle" in side.__name__ else "impl/objectives/policy_gradient.py"
    with pytest.raises(UsageError, match=rf"{who}.* does not know the objective 'toy_objectives:Nobodys' \(known: sft"):
        side.functions_of(Nobodys())


def test_a_kind_that_the_oracle_does_not_know_is_wrong_usage(tmp_path: Path) -> None:
    cell = make_cell("sft-sgd", "llama", "dp1", "exact", backend=WILLING, objective=Nobodys())
    with Session(SessionConfig(out=tmp_path)) as session, pytest.raises(UsageError, match=r"the oracle .*Nobodys"):
        session.run(cell)
    assert not list(tmp_path.glob("cells/*/legs"))


def test_the_command_line_says_so_in_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_objective('kind = "toy_objectives:Nobodys"', tmp_path)
    table = 'scenarios = ["mine.toml"]\nmodels = ["llama"]\nlayouts = ["dp1"]\nprecisions = ["exact"]'
    (tmp_path / "profile.toml").write_text(f'description = "x"\n[[cells]]\n{table}\n')
    monkeypatch.chdir(tmp_path)
    arguments = ["--profile", "profile.toml", "--backend", "toy_objectives:Willing", "--out", "out"]
    assert cli.main(["run", *arguments]) == 2
    error = capsys.readouterr().err
    assert "does not know the objective 'toy_objectives:Nobodys'" in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("adapter", [Willing, OfSft, OfTable])
def test_a_kind_that_the_backend_does_not_know_is_unsupported_by_name(adapter: type[Willing], tmp_path: Path) -> None:
    entry = BackendEntry(name="willing", target=f"toy_objectives:{adapter.__name__}")
    cell = make_cell("sft-sgd", "llama", "dp1", "exact", backend=entry, objective=toy_objectives.WeightedSft())
    with Session(SessionConfig(out=tmp_path)) as session:
        assert not session.refusal(make_cell("sft-sgd", "llama", "dp1", "exact", backend=entry))
        verdict = session.run(cell).verdict
    assert verdict.state == "unsupported"
    assert verdict.reason == "willing does not train the objective 'toy_objectives:WeightedSft'"
    assert not list(tmp_path.glob("cells/*/legs"))


def test_a_kind_that_the_backend_knows_is_run(tmp_path: Path) -> None:
    entry = BackendEntry(name="willing", target=f"toy_objectives:{OfToys.__name__}")
    cell = make_cell("sft-sgd", "llama", "dp1", "exact", backend=entry, objective=toy_objectives.WeightedSft())
    with Session(SessionConfig(out=tmp_path)) as session:
        assert not session.refusal(cell)


# --- what is declared ------------------------------------------------------------------------------------------------


def test_stages_of_sft_are_in_causal_order() -> None:
    assert stages(all_observables(Sft())) == (
        "configuration",
        "weights",
        "training state",
        "log-probs",
        "loss",
        "gradients",
        "gradient replicas",
        "gradient norm",
        "clipped update",
        "weights after N steps",
        "weight replicas",
        "generators",
    )


def test_observables_in_steps_cover_trained_models_only() -> None:
    observables = all_observables(toy_objectives.PolicyAndValue())
    loaded = [o.key for o in observables if o.when == "loaded"]
    assert loaded == ["evidence", "reference.weight", "weight", "critic.weight"]
    later = {o.key for o in observables if o.when != "loaded"}
    assert {"gradient", "lr", "grad_norm", "weight"} <= later
    assert {f"critic.{key}" for key in ("gradient", "lr", "grad_norm", "weight", "loss", "value")} <= later
    assert {key for key in later if key.startswith("reference.")} == {"reference.logprob"}


def test_a_stage_names_its_model_unless_it_is_the_policys() -> None:
    found = stages(all_observables(toy_objectives.PolicyAndValue()))
    assert {"gradients", "critic gradients", "critic gradient replicas", "reference weights"} <= set(found)
    assert found.index("loss") < found.index("gradients") < found.index("critic gradients")
