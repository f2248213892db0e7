"""What a run says whose ranks share GPUs. Ranks compute on the CPU; a GPU is a name that they hold a lease of."""

import re
from pathlib import Path

import pytest
from conftest import make_cell

from conformance.backends.protocol import BackendEntry
from conformance.matrix.options import Ranks, Selection
from conformance.results.requirements import summary_lines
from conformance.results.run_results import read_entry, read_output_json
from conformance.runner.earlier_run import environment
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session
from conformance.runtime.gpu_inventory import shares_of
from reports.html import write_html
from reports.load import read_report
from reports.markdown import write_markdown
from reports.summary import headline


@pytest.mark.exhaustive
def test_a_run_whose_ranks_share_gpus_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell of two ranks on one GPU: its command, the summary, the terminal and the reports tell that it is shared."""
    monkeypatch.setenv("PARITY_LEASES", str(tmp_path / "leases"))
    out, where = tmp_path / "out", Ranks(device="cuda", ranks_per_gpu=2)
    shares = shares_of(["GPU-a"], 2)
    plain = BackendEntry(name="plain", target="plain_backend:Plain")
    cell = make_cell("sft-sgd", "llama", "dp2", "exact", backend=plain, steps=1, rows=12)
    config = SessionConfig(out=out, gpus=shares, ranks_per_gpu=2, arguments=where.arguments(), budget_s=60)
    with Session(config) as session:
        session.run_all([cell], progress=lambda judged: None)
        entry = read_entry(session.folder(cell) / "verdict.json")
    assert entry.verdict.state == "conforms", entry.verdict.reason
    assert entry.reproduce.startswith("parity run --device cuda --ranks-per-gpu 2 --cells ")
    summary = read_output_json(out / "summary.json")
    assert summary["environment"]["ranks_per_gpu"] == 2
    said = "p to 2 ranks shared a GPU: times and free memory are not those of one GPU each"
    assert summary_lines(summary)[-1] == f"u{said}"
    assert re.fullmatch(r"share of the time with a lease: GPU-a [1-9]\d?%", summary_lines(summary)[-2])
    assert all("GPU-a" in write(out).read_text(encoding="utf-8") for write in (write_html, write_markdown))
    assert headline(read_report(out))[1].endswith(f" U{said}.")
    assert "ranks_per_gpu" not in environment()
    assert Selection().text(where) != Selection().text(Ranks(device="cuda"))  # a history keeps them apart
