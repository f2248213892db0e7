"""Frozen parameters: no gradient, no update, no decay, no part in the norm; whoever trains one is caught.

That all backends leave them alone is for tests/test_cells_*.py and the full profile.
"""

from pathlib import Path

import pytest
import torch
from conftest import make_cell

from conformance.backends.protocol import BackendEntry
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES, resolve
from conformance.data.inputs import build_batches, check_trained
from conformance.judge.direction import SCALE
from conformance.oracle.role_model import read_decoder
from conformance.oracle.run import run_oracle
from conformance.records.step_tensors import Record, read_record
from conformance.runner.session import Session
from conformance.spec.scenario import OptimizerConfig, Scenario, load_scenario
from impl.megatron.hf_mapping import all_parameters, is_trained
from impl.megatron.model_config import read_shape

FROZEN = ("model.embed_tokens.weight", "model.layers.0.self_attn.*", "*.mlp.down_proj.weight")


def scenario(model: str, frozen: tuple[str, ...] = FROZEN) -> Scenario:
    loaded = load_scenario(
        FIXTURES / "scenarios" / "sft-frozen.toml",
        model=f"models/{model}",
        precision="exact",
        data_overrides={"rows": 6},
    )
    optimizer = OptimizerConfig(name="adamw", lr=1e-2, weight_decay=0.1, frozen=frozen)
    return Scenario(**{**vars(loaded), "optimizer": optimizer})


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    asked, out = scenario("qwen3"), tmp_path_factory.mktemp("oracle") / "record"
    model = resolve(asked.model)
    batches = build_batches(asked, model)
    run_oracle(scenario=asked, models={"policy": model}, batches=batches, out=out, policy_name="float64")
    return read_record(out)


def test_the_oracle_leaves_frozen_parameters_as_they_were_loaded(record: Record) -> None:
    loaded, last = record.loaded.tensors(), record.steps[-1].tensors()
    kept = {name for name, tensor in loaded.items() if torch.equal(tensor, last[name])}
    optimizer = scenario("qwen3").optimizer
    assert kept == {name for name in loaded if not optimizer.trains(name.removeprefix("weight/"))}
    assert {name.rpartition("layers.")[2] for name in kept} >= {"0.self_attn.q_norm.weight", "1.mlp.down_proj.weight"}


def test_the_oracle_records_no_gradient_of_them_and_leaves_them_out_of_the_norm(record: Record) -> None:
    step = record.steps[0]
    gradients = {name: t for name, t in step.tensors().items() if name.startswith("gradient/")}
    assert gradients
    assert all(scenario("qwen3").optimizer.trains(name.removeprefix("gradient/")) for name in gradients)
    assert step.value("grad_norm") == pytest.approx(torch.cat([t.flatten() for t in gradients.values()]).norm().item())


@pytest.mark.parametrize(
    ("target", "stage"), [("plain_backend:Plain", "gradients"), ("thawing_backends:Secretly", "clipped update")]
)
def test_a_backend_that_trains_what_is_frozen_is_caught(session: Session, target: str, stage: str) -> None:
    optimizer = {"name": "sgd", "lr": 0.05, "frozen": list(FROZEN)}
    backend = BackendEntry(name=target.rpartition(":")[2].lower(), target=target)
    cell = make_cell("sft-sgd", "llama", "dp2", "fp32", backend=backend, rows=6, steps=3, optimizer=optimizer)
    verdict = session.run(cell).verdict
    assert (verdict.state, verdict.first_stage) == ("differs", stage), verdict.reason
    first = {
        f.tensor.partition(" (")[0]
        for f in verdict.findings
        if (f.stage, f.step) == (stage, 0) and SCALE not in f.tensor
    }
    assert not any(map(cell.scenario.optimizer.trains, first)), "no other tensor is blamed"


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (
            ("model.embed_token.*",),
            r"'model.embed_token.\*', which matches no trained parameter of llama; names look like model",
        ),
        (("*",), "leaves nothing of policy to train"),
    ],
)
def test_patterns_that_mean_nothing_or_everything_are_explained(frozen: tuple[str, ...], message: str) -> None:
    decoder = read_decoder(resolve("models/llama"))
    with pytest.raises(UsageError, match=message):
        check_trained(scenario("llama", frozen), decoder)
    check_trained(scenario("llama"), decoder)


def test_a_part_of_what_megatron_holds_in_one_parameter_cannot_be_frozen() -> None:
    shape = read_shape(Path(resolve("models/pangu")))
    all_of_it, part = (OptimizerConfig(name="sgd", lr=1, frozen=(f"*.{x}_proj.*",)) for x in ("[qkv]", "q"))
    frozen = [name for name in all_parameters(shape) if not is_trained(name, shape, all_of_it)]
    assert {name.rpartition("linear_")[2] for name in frozen} == {"qkv.weight", "qkv.bias"}
    with pytest.raises(
        UsageError, match=r"q_proj.weight, .*k_proj.weight, .*v_proj.weight are one parameter in Megatron"
    ):
        [is_trained(name, shape, part) for name in all_parameters(shape)]
