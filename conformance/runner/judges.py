"""Judges cells in processes of their own, because threads of one Python process judge one after another."""

import base64
import contextlib
import pickle
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.judge.expected_differences import judge_cell
from conformance.results.verdict import Verdict
from conformance.runtime import Pool, RankContext, WorkerGroupConfig
from conformance.runtime.leased_slots import Lanes
from conformance.spec.known_defects import Defect

Defects = tuple[Defect, ...]
_CONFIG = WorkerGroupConfig(size=1, device="cpu", preload=(__name__,))


class Judges:
    """Runs ``judge_cell`` in worker groups of one rank. Threads share it.

    lanes: the number of cells that are judged at once. work_dir: for logs of forkservers. logs: a folder for the logs
    of single cells, which are removed. budget_s: see conformance.runtime.Pool.
    """

    def __init__(self, *, lanes: int, work_dir: Path, logs: Path, budget_s: float) -> None:
        self._pool = Pool(work_dir=work_dir, slots=Lanes(lanes, work_dir=work_dir, name="judge"))
        self._pool.prepare(_CONFIG)
        self._logs, self._budget_s = logs, budget_s
        self.abort, self.close = self._pool.abort, self._pool.close

    def judge(
        self, cell: str, records: Sequence[Path], *, slug: str, oracles: Mapping[Defects, Path], **rest: Any
    ) -> Verdict | None:
        """Returns the verdict of ``judge_cell`` with these oracles; None if it wants another one, or cannot be asked,
        and the caller has to judge. slug: the name of the cell's logs. rest: see ``judge_cell``."""
        call = {"cell": cell, "phases": list(records), "oracles": dict(oracles), **rest}
        logs = self._logs / slug
        outcome = self._pool.run(
            key="judge",
            config=_CONFIG,
            task=f"{__name__}:judge",
            kwargs={"call": _packed(call)},
            log_dir=logs,
            budget_s=self._budget_s,
            about=cell,
        )
        shutil.rmtree(logs, ignore_errors=True)
        verdict = _unpacked(outcome.results[0]) if outcome.state == "done" else None
        return verdict if isinstance(verdict, Verdict) else None


class _OtherOracle(Exception):
    """Says that a verdict needs an oracle that was not given."""


def judge(rank: RankContext, *, call: str) -> str:
    """Calls ``judge_cell`` in a rank, for Judges, which runs no code of a backend."""
    arguments = _unpacked(call)
    oracles: dict[Defects, Path] = arguments.pop("oracles")

    def given(defects: Defects) -> Path:
        if defects not in oracles:
            raise _OtherOracle
        return oracles[defects]

    cell, phases = arguments.pop("cell"), arguments.pop("phases")
    verdict = None
    with contextlib.suppress(_OtherOracle):
        verdict = judge_cell(cell, phases, oracles=given, **arguments)
    return _packed(verdict)


def _packed(value: object) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _unpacked(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))
