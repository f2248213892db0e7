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

ROWS, MOST = 16, 1.1  # of two forward passes of SFT
PROMPT, CHOSEN, REJECTED = "94 minus 5?", "94 - 5 = 89.", "94 - 5 = 98."  # of equal lengths, so all rows cost the same
SCENARIO = """
steps = 1
accumulation = 2
[objective]
kind = "{kind}"
[data]
path = "{path}"
max_len = 96
rows = 16
[optimizer]
name = "adamw"
lr = 1e-3
eps = 1e-3
"""


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
    session: Session, tmp_path: Path, backend: str, layout: str
) -> None:
    pairs, answers = tmp_path / "pairs.jsonl", tmp_path / "answers.jsonl"
    pairs.write_text("\n".join([json.dumps({"prompt": PROMPT, "chosen": CHOSEN, "rejected": REJECTED})] * (ROWS // 2)))
    rows = [json.dumps({"prompt": PROMPT, "completion": answer}) for answer in (CHOSEN, REJECTED)] * (ROWS // 2)
    answers.write_text("\n".join(rows))
    sft = work(session, tmp_path, backend, layout, kind="sft", path=answers)
    dpo = work(session, tmp_path, backend, layout, kind="dpo", path=pairs)
    assert 2 * sft["forward"] <= dpo["forward"] <= MOST * 2 * sft["forward"]
    assert sft["backward"] <= dpo["backward"] <= MOST * sft["backward"]
    assert dpo["recomputed"] == sft["recomputed"] == 0


def work(session: Session, folder: Path, backend: str, layout: str, *, kind: str, path: Path) -> Mapping[str, Any]:
    """The multiplications of linear layers in a step, of all ranks, by phase."""
    (folder / f"cost-{kind}.toml").write_text(SCENARIO.format(kind=kind, path=path))
    cell = make_cell(f"cost-{kind}", "llama", layout, "exact", backend=BACKENDS[backend], scenarios=folder)
    verdict = session.run(cell).verdict
    assert verdict.state == "conforms", verdict.reason
    total = Counter[str]()
    for rank in record_of(session, cell).footer["evidence"]:
        total.update(dict(rank["work"]))
    return total
