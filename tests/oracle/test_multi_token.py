"""Multi-token prediction: the oracle's modules against transformers', which targets count, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from test_oracle import folder
from transformers import AutoModelForCausalLM, modeling_layers

from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.core.io import read_json
from conformance.data.inputs import prepare_inputs
from conformance.oracle.decoder import is_buffer
from conformance.oracle.objectives import functions_of
from conformance.oracle.primitives import HONEST
from conformance.oracle.role_model import read_decoder
from conformance.oracle.run import POLICIES
from conformance.oracle.step import Model, observe
from conformance.spec.batch import Batch, Document, Row
from conformance.spec.observables import MULTI_TOKEN
from conformance.spec.offline import MultiToken
from conformance.spec.scenario import load_scenario
from impl.objectives.policy_gradient import functions_of as functions_of_impl

NAME = "deepseek-v3-mtp"
FLOAT64 = POLICIES["float64"]
DOCUMENTS = (
    Document((9, 40, 17, 230, 8, 77, 301), (False, True, True, False, True, True, True)),
    Document((11, 12), (False, True)),
    Document((21, 22, 23), (False, False, True)),
)
BATCH = Batch(0, 16, (Row(0, DOCUMENTS[:2]), Row(1, DOCUMENTS[2:])))


def model_of() -> Model:
    decoder = read_decoder(folder(NAME), disable_dropout=True, mtp_layers=2)
    weights = decoder.load(folder(NAME), torch.float64, HONEST, trained=True, devices=["cpu"])
    trained = frozenset(name for name in weights if not is_buffer(name))
    return Model(role=MULTI_TOKEN, decoder=decoder, weights=weights, trained=trained)


@pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="this transformers has no MtpModel; 5.23 has")
def test_modules_give_the_logits_of_transformers() -> None:
    tokens, model = torch.tensor(DOCUMENTS[0].tokens), model_of()
    ours = model.decoder.forward(tokens, model.weights, FLOAT64)
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    main = AutoModelForCausalLM.from_pretrained(folder(NAME), dtype=torch.float64, **plain).eval()
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[12]\."]  # it knows those of the published size
    modules = modeling_layers.MtpModel.from_pretrained(main).double().eval()
    length = len(tokens) - 2  # positions from which both modules predict
    with torch.no_grad():
        hidden = main.model(tokens[None, :length], use_cache=False).last_hidden_state
        for k in (1, 2):
            places = torch.arange(length)[None]
            ahead = tokens[None, k : k + length]
            hidden = modules.forward_layer(k - 1, hidden, places, None, input_ids=ahead)
            torch.testing.assert_close(ours[k, :length], modules.shared_head(hidden)[0], rtol=0, atol=1e-5)
    assert not torch.allclose(ours[1, :length], ours[2, :length], atol=0.1)


def test_targets_count_where_a_module_predicts_them() -> None:
    objective = MultiToken(mtp_num_layers=2)
    totals = functions_of(objective).totals(BATCH)
    assert totals == {"token_count": 7, "mtp_1_token_count": 5, "mtp_2_token_count": 3}
    assert functions_of_impl(objective).totals(BATCH.rows) == totals


def test_loss_is_the_mean_over_targets_of_each_depth() -> None:
    objective = MultiToken(mtp_num_layers=2, mtp_loss_scaling_factor=0.3)
    observed = observe(BATCH, [model_of()], objective, FLOAT64)
    sums = {key: sum(row.sum().item() for row in rows.values()) for key, rows in observed.rows.items() if "prob" in key}
    due = -sums["logprob"] / 7 - 0.15 * sums["mtp_1_logprob"] / 5 - 0.15 * sums["mtp_2_logprob"] / 3
    assert observed.values["loss"] == pytest.approx(due, rel=1e-12, abs=0)
    assert observed.rows["mtp_2_logprob"][0][:1].tolist() == [0]  # its first target is too near the beginning


def test_a_step_without_predictions_is_refused() -> None:
    batch = Batch(3, 16, (Row(0, DOCUMENTS[1:2]),))
    with pytest.raises(ValueError, match="step 3 has no target for mtp_1_token_count; use longer documents"):
        functions_of(MultiToken()).totals(batch)


def test_other_objectives_refuse_the_modules(tmp_path: Path) -> None:
    path = FIXTURES / "scenarios" / "sft-packed.toml"
    with pytest.raises(UsageError, match="it has modules for multi-token prediction; use the objective mtp, or a fol"):
        prepare_inputs(load_scenario(path, model=f"models/{NAME}", precision="exact"), tmp_path)


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("llama", {}, "has no modules for multi-token prediction"),
        ("deepseek-v3", {}, "num_nextn_predict_layers=0, and the objective mtp has mtp_num_layers=2; make them equal"),
        (NAME, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1"),
    ],
)
def test_a_model_without_these_modules_is_refused(
    tmp_path: Path, model: str, changes: dict[str, int], message: str
) -> None:
    at = tmp_path / "model"
    shutil.copytree(folder(model), at)
    (at / "config.json").write_text(json.dumps(read_json(at / "config.json") | changes))
    scenario = load_scenario(FIXTURES / "scenarios" / "mtp.toml", model=str(at), precision="exact")
    with pytest.raises(UsageError, match=message):
        prepare_inputs(scenario, tmp_path / "out")
