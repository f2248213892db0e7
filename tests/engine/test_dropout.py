"""Dropout in a model's configuration: GRPO and PPO run without it, in looks as in updates; SFT is refused.

tests/faults/test_faults_rl.py leaves it on, and sees that it is caught.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cells import assert_honest, cell_of, record_of
from torch import Tensor, nn

from conformance.backends.protocol import Supported, Unsupported
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.models.families import read_architecture
from conformance.runner.session import Session
from conformance.spec.layout import Layout
from impl.engine.adapter import switch_off_dropout
from impl.faults.declaration import DROPOUT, with_dropout

EPOCHS_AND_ONE = 5  # steps: all updates of a roll-out, and the first of the next
FIRST = (0, 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "scenario", "model", "layout"),
    [
        ("fsdp2", "grpo", "llama", "dp2"),
        ("fsdp2", "ppo", "gemma3", "tp2"),
        ("fsdp2", "grpo", "pangu", "tp2.seqpar.losspar"),
        ("fsdp2", "ppo", "qwen3", "sp2.zigzag"),
        ("fsdp2", "grpo", "qwen3", "dp2.ckpt"),
        ("deepspeed", "ppo", "llama", "dp2.zero2"),
        ("deepspeed", "grpo", "pangu", "dp2.zero3"),
        ("deepspeed", "ppo", "gemma3", "tp2.zero1"),
        ("deepspeed", "grpo", "qwen3", "sp2.zero1"),
        ("deepspeed", "grpo", "llama", "ulysses2.zero2"),
        ("megatron", "grpo", "qwen3", "tp2"),
        ("megatron", "ppo", "pangu", "dp2.zero1"),
        ("megatron", "ppo", "llama", "sp2"),
        ("megatron", "grpo", "llama", "pp2.vpp2"),
    ],
)
def test_dropout_configuration_conforms_with_ratio_one(
    session: Session, models: Path, backend: str, scenario: str, model: str, layout: str
) -> None:
    cell = with_dropout(cell_of(backend, scenario, model, layout, "exact", steps=EPOCHS_AND_ONE), models)
    assert json.loads(Path(cell.scenario.model, "config.json").read_text(encoding="utf-8"))["attention_dropout"]
    assert_honest(session, cell)
    for step in record_of(session, cell).steps:
        ratios = torch.cat([numbers for name, numbers in step.tensors().items() if name.startswith("ratio/")])
        assert ((ratios - 1).abs().max() < 1e-14) == (step.step in FIRST)


def test_sft_of_a_model_with_dropout_is_refused_with_advice(session: Session, models: Path) -> None:
    session.run(with_dropout(cell_of("fsdp2", "grpo", "llama", "dp1", "exact", steps=1), models))  # its folder is there
    cell = with_dropout(cell_of("fsdp2", "sft-packed", "llama", "dp1", "exact"), models)
    with pytest.raises(UsageError, match=r"sets attention_dropout=0\.1; .* set attention_dropout to 0\.0"):
        session.run(cell)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of Llama; its configuration is to be changed."""
    shutil.copyfile(FIXTURES / "models" / "llama" / "config.json", tmp_path / "config.json")
    return tmp_path


def with_share(folder: Path, share: Any) -> Path:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"attention_dropout": share}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_the_oracle_computes_the_same_model_where_dropout_is_switched_off(folder: Path) -> None:
    without = read_architecture(folder)
    assert read_architecture(with_share(folder, DROPOUT), disable_dropout=True) == without
    with pytest.raises(UsageError, match=r"attention_dropout=0\.1"):
        read_architecture(folder)


@pytest.mark.parametrize("share", [None, "0.1", True, -0.1, 1.5])
def test_what_is_no_share_is_refused_for_every_objective(folder: Path, share: Any) -> None:
    for disabled in (False, True):
        with pytest.raises(UsageError, match=r"sets attention_dropout=.*a number from 0 to 1"):
            read_architecture(with_share(folder, share), disable_dropout=disabled)


def test_attention_of_megatron_has_no_dropout_and_says_so() -> None:
    attention = pytest.importorskip("impl.megatron.attention")
    config = SimpleNamespace(
        kv_channels=8, attention_dropout=DROPOUT, window_size=None, window_attn_skip_freq=None, softmax_type="vanilla"
    )
    layer = attention.RingCoreAttention(config, layer_number=1)
    documents = attention.Documents(ring=lambda q, k, v, **_: q)
    x = torch.ones(2, 1, 1, 8)
    with pytest.raises(ValueError, match="set attention_dropout to 0"):
        layer.train()(x, x, x, None, packed_seq_params=documents)
    assert layer.eval()(x, x, x, None, packed_seq_params=documents).shape == (2, 1, 8)
    switch_off_dropout(layer)
    assert layer.train()(x, x, x, None, packed_seq_params=documents).shape == (2, 1, 8)


def test_megatron_claims_such_a_model_where_dropout_is_switched_off(models: Path) -> None:
    supports, layout = pytest.importorskip("impl.megatron.adapter").MegatronBackend.supports, Layout.parse("dp2")
    sft, grpo = (with_dropout(cell_of("megatron", s, "llama", "dp2", "exact"), models) for s in ("sft-packed", "grpo"))
    assert isinstance(supports(grpo.scenario, layout), Supported)
    refused = supports(sft.scenario, layout)
    assert isinstance(refused, Unsupported)
    assert "set attention_dropout to 0.0" in refused.reason


class Dropping(nn.Module):
    """A module's dropout, and a number that attention reads, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.attention_dropout = nn.Dropout(0.5), 0.5

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.dropout(x), p=self.attention_dropout, training=self.training)


def test_nothing_is_dropped_in_training_mode() -> None:
    model, x = nn.Sequential(Dropping(), Dropping()).train(), torch.ones(100)
    assert not torch.equal(model(x), x)
    switch_off_dropout(model)
    assert model.training
    assert torch.equal(model(x), x)
