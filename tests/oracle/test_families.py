"""Families beside openPangu, Llama, Qwen3 and Gemma 3: each computes what the oracle computes, however it is cut.

A fast run holds the oracle of every family against transformers (tests/oracle/test_oracle.py), and the profile
`quick`, which CI runs too, has cells of Gemma 2 and Llama 3; the cells here are the nightly's, and the profile
`families`.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
from cells import BACKENDS, STEPS, assert_honest, cell_of

from conformance.backends.protocol import Supported, Unsupported, find_backend
from conformance.core.host import FIXTURES
from conformance.matrix.cell import Cell
from conformance.matrix.profile import Overrides, expand, load_profile
from conformance.runner.session import Session
from conformance.spec.layout import Layout
from conformance.spec.precision import PrecisionName
from conformance.spec.scenario import load_scenario

EVERYWHERE = ("qwen2", "llama3", "mistral")
HUGGING_FACE = (*EVERYWHERE, "qwen2-yarn", "gemma2", "phi3", "olmo2")
ROUTED = ("qwen3-moe", "qwen2-moe", "mixtral")  # their cells are in tests/cells/test_mixture_cells.py


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "scenario", "model", "layout"),
    [
        ("deepspeed", "sft-packed", "qwen2", "tp2.zero1"),
        ("megatron", "grpo", "llama3", "pp2"),
        ("megatron", "sft-packed", "mistral", "sp2"),
        ("megatron", "sft-packed", "phi3", "tp2.seqpar"),
        ("megatron", "grpo", "phi3", "sp2"),
        ("megatron", "sft-packed", "qwen2-yarn", "sp2.pp2"),
        ("fsdp2", "sft-packed", "gemma2", "tp2.losspar"),
        ("fsdp2", "sft-packed", "phi3", "tp2.seqpar"),
        ("fsdp2", "grpo", "olmo2", "tp2"),
        ("deepspeed", "sft-packed", "qwen2-yarn", "sp2.zero2"),
        ("megatron", "sft-packed", "qwen2", "pp2.vpp2"),
        ("megatron", "sft-packed", "qwen2", "tp2.seqpar"),
        ("fsdp2", "sft-packed", "olmo2", "tp2.seqpar.losspar"),
        ("deepspeed", "grpo", "phi3", "ulysses2.zero2"),
    ],
)
def test_exact(session: Session, backend: str, scenario: str, model: str, layout: str) -> None:
    assert_honest(session, cell_of(backend, scenario, model, layout, "exact"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("backend", "layout"), [("megatron", "pp2"), ("megatron", "pp2.vpp2"), ("fsdp2", "sp2")])
def test_a_window_is_of_the_layer_with_its_number_in_the_whole_model(
    session: Session, tmp_path: Path, backend: str, layout: str
) -> None:
    folder = tmp_path / "qwen2-windowed"
    shutil.copytree(FIXTURES / "models" / "qwen2", folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    windowed = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    (folder / "config.json").write_text(json.dumps(config | windowed), encoding="utf-8")
    source = FIXTURES / "scenarios" / "sft-packed.toml"
    scenario = load_scenario(source, model=str(folder), precision="exact", steps=STEPS)
    cell = Cell.single(scenario=scenario, backend=BACKENDS[backend], layout=Layout.parse(layout))
    assert_honest(session, cell)


MEGATRON = (*EVERYWHERE, "qwen2-yarn", "phi3")
LOWER = [("fsdp2", model) for model in HUGGING_FACE] + [("megatron", model) for model in MEGATRON]


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("backend", "model"), LOWER)
def test_lower_precisions_are_as_good_as_a_single_process(
    session: Session, backend: str, model: str, precision: PrecisionName
) -> None:
    verdict = session.run(cell_of(backend, "sft-packed", model, "dp2", precision)).verdict
    assert verdict.state == "conforms", verdict.reason


def test_families_profile_has_sft_and_grpo_on_every_backend() -> None:
    backends = [find_backend(name) for name in ("fsdp2", "deepspeed", "megatron")]
    claimed = {
        (cell.phases[0].backend.name, cell.scenario.model_name, cell.scenario.objective.kind)
        for cell in expand(load_profile("families"), backends, Overrides())
        if all(
            isinstance(phase.backend.load().supports(cell.scenario, phase.layout), Supported) for phase in cell.phases
        )
    }
    anywhere = (*HUGGING_FACE, *ROUTED)
    for backend, families in (("fsdp2", anywhere), ("deepspeed", anywhere), ("megatron", (*MEGATRON, "gpt-oss"))):
        assert {(backend, family, kind) for family in families for kind in ("sft", "grpo")} <= claimed


@pytest.mark.parametrize(
    ("backend", "model", "layout", "advice"),
    [
        ("fsdp2", "gemma2", "sp2", "no soft-capping of scores; use sp1"),
        ("deepspeed", "gemma2", "ulysses2", "no soft-capping of scores; use sp1"),
        (
            "deepspeed",
            "phi3",
            "tp2",
            "self_attn.qkv_proj and mlp.gate_up_proj, but the code of phi3 needs whole outputs",
        ),
        ("deepspeed", "olmo2", "tp2", "the code of olmo2 needs whole outputs; use tp1, or fsdp2"),
        ("fsdp2", "mistral", "sp2.zigzag", "the default is right"),
        ("fsdp2", "qwen3-odd", "tp2.plan", "tp=2 does not divide intermediate_size=59; leave plan out"),
        ("megatron", "qwen3-odd", "tp2", "tp=2 does not divide intermediate_size=59; use tp1, or fsdp2"),
        ("fsdp2", "seed-oss", "tp2.dropout", "would drop other numbers of activations that all of them hold; use tp1"),
        ("deepspeed", "llama", "ulysses2.dropout", "have no dropout; use sp1, or leave dropout out"),
        ("megatron", "llama", "pp2.vpp2.varlen", "swap the lengths .*; leave varlen out, or use vpp1"),
        (
            "megatron",
            "gemma2",
            "dp2",
            "Gemma2ForCausalLM needs .*: soft-capped scores and logits, .*; use fsdp2 or deepspeed",
        ),
    ],
)
def test_what_a_backend_lacks_for_a_family_is_unsupported_with_advice(
    backend: str, model: str, layout: str, advice: str
) -> None:
    cell = cell_of(backend, "sft-packed", model, layout, "exact")
    answer = cell.phases[0].backend.load().supports(cell.scenario, cell.phases[0].layout)
    assert isinstance(answer, Unsupported)
    assert re.search(advice, answer.reason)


@pytest.mark.parametrize(("layout", "supported"), [("tp2", False), ("tp2.plan", True), ("dp2", True)])
def test_older_plans_cut_no_uneven_vocabulary(monkeypatch: pytest.MonkeyPatch, layout: str, supported: bool) -> None:
    monkeypatch.setattr(
        "impl.fsdp2.adapter.is_older", lambda package, *version: package == "transformers" and version > (5, 17)
    )
    cell = cell_of("fsdp2", "sft-packed", "llama3-odd", layout, "exact")
    answer = cell.phases[0].backend.load().supports(cell.scenario, cell.phases[0].layout)
    assert isinstance(answer, Unsupported) != supported
    assert supported or "tp=2 does not divide vocab_size=421; use transformers 5.23" in str(answer)
