"""Tests the table of what model families ask of the backends' code."""

import json
import subprocess
import sys

import pytest
import torch

from conformance.core.host import resolve
from impl.models.family_quirks import PLANNED, QUIRKS, ROUTED, quirks_in, quirks_of
from impl.models.loading import causal_class, read_config

FIXTURES = {
    json.loads((file.parent / "config.json").read_text())["model_type"]: file.parent
    for file in sorted(resolve("models").glob("*/model.safetensors"))
}


def test_table_is_read_without_torch() -> None:
    code = "import sys; import impl.models.family_quirks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_family_without_row_has_defaults() -> None:
    assert not quirks_of("gpt2").has_plan
    assert not quirks_of(None).has_routers


def test_row_is_found_by_folder() -> None:
    assert quirks_in(resolve("models/gpt-oss")) is QUIRKS["gpt_oss"]


def test_explicit_plan_leaves_experts_whole() -> None:
    assert {kind for kind in ROUTED if not QUIRKS[kind].tp_cuts_experts} == {"gpt_oss"}


@pytest.mark.parametrize("kind", PLANNED)
def test_modules_of_row_exist_in_every_layer(kind: str) -> None:
    config = read_config(FIXTURES[kind], trusted=True)
    with torch.device("meta"):
        model = causal_class(config, FIXTURES[kind], code=kind == "PanguEmbedded")._from_config(config)
    quirks = QUIRKS[kind]
    for layer in model.model.layers:
        names = {name for name, _ in layer.named_modules()}
        assert {*quirks.stream_norms, *quirks.whole_outputs, *quirks.recut_inputs} <= names
        # Every norm of the layer is named, but those inside of attention.
        norms = {name for name in names if name.endswith("layernorm") and "." not in name}
        assert norms == set(quirks.stream_norms)
        assert ("self_attn.q_norm" in names and not quirks.whole_outputs) == (quirks.head_dimension is not None)
