"""A step of DPO multiplies as much as a step of SFT on the same rows and one forward pass of the reference; no more."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cells import BACKENDS, exhaustive, record_of
from conftest import make_cell

from conformance.runner.session import Session

ROWS, MOST = 8, 1.1  # of two forward passes of SFT
PROMPT, CHOSEN, REJECTED = "94 minus 5?", "94 - 5 = 89.", "94 - 5 = 98."  # of equal lengths, so all rows cost the same
SCENARIO = """
steps = 1
accumulation = 2
[objective]
kind = "{kind}"
[data]
path = "{path}"
max_len = 96
rows = 8
[optimizer]
name = "adamw"
lr = 1e-3
eps = 1e-3
"""


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of both scenarios, which all backends share, and so their references."""
    folder = tmp_path_factory.mktemp("scenarios")
    pairs, answers = folder / "pairs.jsonl", folder / "answers.jsonl"
    pairs.write_text("\n".join([json.dumps({"prompt": PROMPT, "chosen": CHOSEN, "rejected": REJECTED})] * (ROWS // 2)))
    rows = [json.dumps({"prompt": PROMPT, "completion": answer}) for answer in (CHOSEN, REJECTED)] * (ROWS // 2)
    answers.write_text("\n".join(rows))
    for kind, path in (("sft", answers), ("dpo", pairs)):
        (folder / f"cost-{kind}.toml").write_text(SCENARIO.format(kind=kind, path=path))
    return folder


@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        ("fsdp2", "dp2"),
        exhaustive("fsdp2", "tp2"),
        exhaustive("fsdp2", "sp2"),
        ("deepspeed", "dp2.zero3"),
        exhaustive("deepspeed", "ulysses2.zero2"),
        ("megatron", "dp2"),
        exhaustive("megatron", "tp2.seqpar"),
        exhaustive("megatron", "pp2"),
    ],
)
def test_dpo_multiplies_as_sft_and_one_reference_pass(
    session: Session, scenarios: Path, backend: str, layout: str
) -> None:
    sft, dpo = (work(session, scenarios, backend, layout, kind=kind) for kind in ("sft", "dpo"))
    assert 2 * sft["forward"] <= dpo["forward"] <= MOST * 2 * sft["forward"]
    assert sft["backward"] <= dpo["backward"] <= MOST * sft["backward"]
    assert dpo["recomputed"] == sft["recomputed"] == 0


def work(session: Session, folder: Path, backend: str, layout: str, *, kind: str) -> Mapping[str, Any]:
    """The multiplications of linear layers in a step, of all ranks, by phase."""
    cell = make_cell(f"cost-{kind}", "llama", layout, "exact", backend=BACKENDS[backend], scenarios=folder)
    verdict = session.run(cell).verdict
    assert verdict.state == "conforms", verdict.reason
    total = Counter[str]()
    for rank in record_of(session, cell).footer["evidence"]:
        total.update(dict(rank["work"]))
    return total
