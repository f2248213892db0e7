"""Writes output folders of the same cells for several nights, for the tests of histories.

Verdicts and summaries are written by conformance.results.run_results, from a sample in which every cell conforms unless
a night changes it.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from report_sample import (
    CONFORMS,
    DIFFERS,
    LATE,
    PARTLY,
    RESUMED,
    RL,
    RUN,
    UNSUPPORTED,
    entries_of,
    rewrite,
    write_sample,
)

from conformance.records.record_format import RECORD_FILE, dumps, record_digest
from conformance.results.history import read_baseline
from conformance.results.requirements import Floor
from conformance.results.run_results import Entry
from conformance.results.verdict import Quantity, Verdict

SELECTION = "--profile nightly"
VERSIONS = {**RUN.environment, "torch": "2.13.0", "backend-parity": "0.1.0", "commit": "1f2e3d4c5b6a"}
NIGHTLY = (DIFFERS, LATE, RL, CONFORMS, PARTLY, RESUMED, UNSUPPORTED)
LENT = "transformers' own Qwen3ForCausalLM"
WRONG = (DIFFERS, LATE, RL)  # what differs in the sample, each in a stage of its own


def night(
    out: Path,
    day: int,
    *,
    against: Path | None = None,
    versions: Mapping[str, Any] = VERSIONS,
    wrong: Sequence[str] = (),
    crashed: Sequence[str] = (),
    refused: Sequence[str] = (),
    without: Sequence[str] = (),
    lent: Sequence[str] = (),
) -> Path:
    """The run of the night of 2026-08-DAY, compared with the history or folder ``against``.

    wrong: the cells of WRONG that differ as in the sample. crashed, refused, without: cells that end so, or are not
        there. lent: cells whose oracle was of the second class.
    """
    sample = out.parent / "sample"
    if not sample.exists():
        write_sample(sample)
    shutil.copytree(sample, out, copy_function=os.link)  # every file is replaced as a whole, so nights share nothing
    kept = [entry for entry in entries_of(out) if entry.cell in NIGHTLY and entry.cell not in without]
    told = [entry if entry.cell in (*wrong, UNSUPPORTED) else _healed(entry) for entry in kept]
    told = [_failed(entry) if entry.cell in crashed else entry for entry in told]
    told = [_refused(entry) if entry.cell in refused else entry for entry in told]
    told = [_lent(out, entry) if entry.cell in lent else entry for entry in told]
    baseline = read_baseline(str(against), SELECTION) if against else None
    started = datetime(2026, 8, day, 3, 12, tzinfo=UTC).isoformat(timespec="seconds")
    rewrite(
        out,
        told,
        started=started,
        finished=started,
        environment=dict(versions),
        selection=SELECTION,
        floor=Floor(baseline=baseline),
    )
    return out


def _lent(out: Path, entry: Entry) -> Entry:
    """The same cell, judged by a record of transformers' own implementation."""
    own, lent = (out / "oracle" / name / "float64" / RECORD_FILE for name in (Path(entry.oracle or "").name, "lent"))
    header, *lines, footer = map(json.loads, own.read_text().splitlines())
    header["resolved"]["second_class"] = LENT
    text = "".join(dumps(line) + "\n" for line in (header, *lines))
    footer["sha256"] = record_digest(text.encode(), footer)
    lent.parent.mkdir(parents=True, exist_ok=True)
    lent.write_text(text + dumps(footer) + "\n")
    return replace(entry, oracle="../../oracle/lent", verdict=replace(entry.verdict, second_class=LENT))


def _healed(entry: Entry) -> Entry:
    right = [replace(q, observed=min(q.observed, 0.5 * q.allowed), hint="") for q in entry.verdict.quantities]
    if entry.cell == PARTLY:  # shows its log-probs again
        steps = sorted({q.step for q in right if q.step >= 0})
        rows = (Quantity(stage="log-probs", tensor="logprob", step=s, observed=0.0, allowed=1e-5) for s in steps)
        right += rows
    verdict = Verdict(state="conforms", reason="all quantities agree with the reference", quantities=tuple(right))
    return replace(entry, verdict=verdict)


def _failed(entry: Entry) -> Entry:
    verdict = Verdict(state="infrastructure", reason="rank 1 of 2 was killed by SIGKILL in step 1")
    return replace(entry, verdict=verdict, completed=False)


def _refused(entry: Entry) -> Entry:
    verdict = Verdict(state="unsupported", reason="this layout is not offered any more")
    return replace(entry, verdict=verdict, completed=False, records=(), oracle=None)
