"""Reads the output folder of a run and checks that it can be trusted: the one way into every report.

Serves claim 8 (a run that stopped half-way is never green): a cell whose record has no footer, or does not match its
digest, is shown as a failure of the infrastructure whatever its verdict file says; a folder that contradicts itself is
an error. Only JSON is read here, never a tensor.
"""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.record.format import record_digest

SCHEMA = 1

# Causal order: a difference in one stage explains those after it. A stage of a later suite comes after these.
STAGES = (
    "weights",
    "log-probs",
    "loss",
    "gradients",
    "replicas",
    "gradient norm",
    "clipped update",
    "weights after N steps",
)


@dataclass(frozen=True, kw_only=True)
class State:
    """How a state is called and drawn; never by colour alone."""

    name: str
    symbol: str
    meaning: str


# In the order in which a reader wants to see them.
STATES = {
    "differs": State(name="differs", symbol="✗", meaning="a quantity is outside its tolerance"),
    "infrastructure": State(
        name="infrastructure failure", symbol="!", meaning="ended without a complete record; nothing to judge"
    ),
    "not_run": State(name="not run", symbol="○", meaning="planned, but not started"),
    "expected_difference": State(name="expected difference", symbol="≈", meaning="differs, by a known bug"),
    "unsupported": State(name="unsupported", symbol="\N{EN DASH}", meaning="the backend does not offer this"),
    "conforms": State(name="conforms", symbol="✓", meaning="every compared quantity is within its tolerance"),
}
NO_ANSWER = ("infrastructure", "not_run")
LOG_LINES = 40
LOG_BYTES = 6000


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """One compared number. ``max_abs``, ``where`` and ``hint`` are known for findings only."""

    stage: str
    tensor: str
    step: int | None
    observed: float
    allowed: float
    max_abs: float | None = None
    where: str = ""
    hint: str = ""

    @property
    def ratio(self) -> float:
        """Observed / allowed; infinite for NaN, and for any error where none is allowed."""
        if self.observed == 0:
            return 0.0
        if math.isnan(self.observed) or not self.allowed > 0:
            return math.inf
        return self.observed / self.allowed


@dataclass(frozen=True, kw_only=True)
class Run:
    """The lines of one record, and its digest. ``problem`` says why it cannot be trusted; empty for a complete one."""

    header: dict[str, Any] = field(default_factory=dict)
    steps: tuple[dict[str, Any], ...] = ()
    digest: str = ""
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell as a reader sees it. Its parts are read from its id: scenario/model/backend/layout/precision...

    ``stages`` holds the worst quantity of each stage that was compared.
    """

    id: str
    state: str
    reason: str
    world_size: int
    seconds: float
    reproduce: str = ""
    hint: str = ""
    stages: dict[str, Quantity] = field(default_factory=dict)
    findings: tuple[Quantity, ...] = ()
    quantities: tuple[Quantity, ...] = ()
    run: Run | None = None
    oracle: Run | None = None
    logs: dict[str, str] = field(default_factory=dict)

    @property
    def scenario(self) -> str:
        return self.id.split("/")[0]

    @property
    def model(self) -> str:
        return self.id.split("/")[1]

    @property
    def backend(self) -> str:
        return self.id.split("/")[2]

    @property
    def layout(self) -> str:
        return self.id.split("/")[3]

    @property
    def variant(self) -> str:
        """Precision, and seed and planted faults where there are any."""
        return "/".join(self.id.split("/")[4:])

    @property
    def replicas(self) -> int:
        """How many shards were compared between ranks that should hold the same numbers."""
        lines = [step.get("replicas") for step in self.run.steps] if self.run else []
        return sum(line.get("compared", 0) for line in lines if isinstance(line, dict))

    @property
    def worst(self) -> Quantity | None:
        """The quantity with the highest ratio of all stages."""
        return max(self.stages.values(), key=lambda q: q.ratio, default=None)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A whole run: what summary.json says about it, and its cells in the order in which they were planned."""

    summary: dict[str, Any]
    cells: tuple[Cell, ...]

    @property
    def counts(self) -> dict[str, int]:
        return {state: sum(c.state == state for c in self.cells) for state in STATES}

    @property
    def several_backends(self) -> bool:
        return len({c.backend for c in self.cells if c.state != "unsupported"}) > 1

    @property
    def verdict(self) -> str:
        """differs, incomplete or conforms; worked out from the cells, so that no file can claim more than they show."""
        if self.counts["differs"]:
            return "differs"
        unanswered = any(self.counts[state] for state in NO_ANSWER)
        if unanswered or not self.counts["conforms"] or not self.summary.get("finished"):
            return "incomplete"
        return "conforms"


def read_report(out: Path) -> Report:
    """Read the output folder ``out`` of ``parity run``.

    Raises ValueError when it is missing, of another tool or version, incomplete, or contradicts itself.
    """
    if not out.is_dir():
        raise ValueError(f"there is no folder {out}; give the --out folder of a finished `parity run`")
    if not (out / "summary.json").is_file():
        raise ValueError(
            f"{out} holds no summary.json: not the output of `parity run`, or the run was killed before it could write "
            "one; run it again"
        )
    summary = read_json(out / "summary.json")
    entries = summary.get("cells")
    if not isinstance(entries, list) or not all(isinstance(e, dict) and {"id", "state"} <= e.keys() for e in entries):
        raise ValueError(f"{out / 'summary.json'} lists no cells: it was not written by `parity run`")
    twice = {e["id"] for e in entries if sum(e["id"] == other["id"] for other in entries) > 1}
    if twice:
        raise ValueError(f"{out / 'summary.json'} names {', '.join(sorted(twice))} twice; run into an empty folder")
    for state, count in summary.get("counts", {}).items():
        if count != (listed := sum(e["state"] == state for e in entries)):
            raise ValueError(
                f"{out / 'summary.json'} counts {count} cells as {state} but lists {listed}: it was edited; judge again"
            )
    report = Report(summary=summary, cells=tuple(_read_cell(out, entry) for entry in entries))
    if summary.get("verdict") == "conforms" and any(e["state"] in ("differs", *NO_ANSWER) for e in entries):
        raise ValueError(f"{out / 'summary.json'} says conforms, its cells do not: it was edited; judge again")
    return report


def stage_order(stages: list[str]) -> list[str]:
    """``stages`` in causal order; unknown ones last, in the order given."""
    return [s for s in STAGES if s in stages] + [s for s in stages if s not in STAGES]


def _read_cell(out: Path, entry: dict[str, Any]) -> Cell:
    folder = _inside(out, out / entry["folder"]) if entry.get("folder") else None
    if folder is not None and (folder / "verdict.json").is_file():
        verdict = read_json(folder / "verdict.json")
    elif entry["state"] in ("unsupported", *NO_ANSWER):
        verdict = {"cell": entry["id"], "state": entry["state"]}
    else:
        raise ValueError(
            f"{out} holds no verdict of {entry['id']}, which its summary calls {entry['state']}; copy the whole output "
            "folder, or run the cell again"
        )
    if (verdict.get("cell"), verdict.get("state")) != (entry["id"], entry["state"]):
        raise ValueError(
            f"{folder}/verdict.json is about {verdict.get('cell')} ({verdict.get('state')}), the summary says "
            f"{entry['id']} ({entry['state']}): one of them was edited or comes from another run; judge again"
        )
    if str(entry["id"]).count("/") < 4:
        raise ValueError(f"{entry['id']!r} is not the id of a cell (scenario/model/backend/layout/precision)")
    if (state := entry["state"]) not in STATES:
        raise ValueError(f"{entry['id']} has state {state!r}; known: {', '.join(STATES)}. Update backend-parity")

    findings = tuple(_quantity(q) for q in verdict.get("findings", ()))
    quantities = tuple(_quantity(q) for q in verdict.get("quantities", ()))
    worst = {name: _quantity({"stage": name, **values}) for name, values in verdict.get("stages", {}).items()}
    outside = [q for q in (*findings, *quantities, *worst.values()) if q.ratio > 1]
    if state == "conforms" and outside:
        raise ValueError(
            f"{entry['id']} is said to conform, yet {outside[0].stage} of {outside[0].tensor} is outside its "
            f"tolerance: {folder}/verdict.json was edited; judge again"
        )
    run = _read_run(_inside(out, folder / verdict["record"])) if folder and verdict.get("record") else None
    oracle = _read_run(_inside(out, folder / verdict["oracle"])) if folder and verdict.get("oracle") else None

    reason = verdict.get("reason") or entry.get("reason") or ""
    if state in ("conforms", "expected_difference") and (damage := _damage(run, oracle, quantities)):
        state, reason = "infrastructure", f"Judged as {STATES[state].name}, but that cannot be trusted: {damage}"
    return Cell(
        id=entry["id"],
        state=state,
        reason=reason,
        world_size=int(verdict.get("world_size") or entry.get("world_size") or 0),
        seconds=float(verdict.get("seconds") or entry.get("seconds") or 0.0),
        reproduce=verdict.get("reproduce") or "",
        hint=verdict.get("hint") or "",
        stages={name: worst[name] for name in stage_order(list(worst))},
        findings=findings,
        quantities=quantities,
        run=run,
        oracle=oracle,
        logs=_read_logs(folder / "logs") if folder else {},
    )


def _damage(run: Run | None, oracle: Run | None, quantities: tuple[Quantity, ...]) -> str:
    """Why a verdict that is not a failure rests on nothing; empty when it is sound."""
    if run is None:
        return "there is no record of the cell. Run it again."
    if run.problem or (oracle and oracle.problem):
        return run.problem or f"of the oracle: {oracle.problem if oracle else ''}"
    return "" if quantities else "nothing was compared. Judge it again."


def _read_run(folder: Path) -> Run:
    """The lines of a record; what is left of a damaged one, with the problem named."""
    file = folder / "record.jsonl"
    if not file.is_file():
        return Run(problem=f"its record {folder.name}/record.jsonl is missing. Copy the whole folder, or run it again.")
    lines = file.read_bytes().splitlines(keepends=True)
    values = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            break
        values.append(value if isinstance(value, dict) else {})
    steps = tuple(v for v in values if v.get("type") == "step" and v.get("step", -1) >= 0)
    footer = values[-1] if values and len(values) == len(lines) else {}
    problem = ""
    if footer.get("type") != "footer":
        last = f"after step {steps[-1]['step']}" if steps else "before its first step"
        problem = f"its record has no footer, so it stopped {last}. Run it again."
    elif record_digest(b"".join(lines[:-1]), footer) != footer.get("sha256"):
        problem = "its record does not match its own digest, so it was edited. Run it again."
    header = values[0] if values and values[0].get("type") == "header" else {}
    return Run(header=header, steps=steps, digest=footer.get("sha256", ""), problem=problem)


def _read_logs(folder: Path) -> dict[str, str]:
    """The last lines of each rank's log, without terminal colours."""
    logs = {}
    for file in sorted(folder.glob("rank-*.log"), key=lambda f: (len(f.name), f.name)):
        text = file.read_bytes()[-LOG_BYTES:].decode("utf-8", errors="replace")
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
        logs[file.stem] = "\n".join(text.splitlines()[-LOG_LINES:])
    return logs


def _quantity(values: dict[str, Any]) -> Quantity:
    max_abs, where = values.get("max_abs"), values.get("where")
    return Quantity(
        stage=str(values["stage"]),
        tensor=str(values.get("tensor") or ""),
        step=values.get("step"),
        observed=_number(values.get("observed")),
        allowed=_number(values.get("allowed")),
        max_abs=None if max_abs is None else float(max_abs),
        where="" if where is None else str(where),
        hint=values.get("hint") or "",
    )


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def read_json(file: Path) -> dict[str, Any]:
    """A file of the output folder; raises ValueError for one that was cut short or is of another version."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{file} is not JSON: it was cut short or edited; run again") from None
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        found = values.get("schema") if isinstance(values, dict) else type(values).__name__
        raise ValueError(
            f"{file} has schema {found}, this version reads {SCHEMA}: not the output of `parity run`, or of another "
            "version; report it with the version that wrote it"
        )
    return values


def _inside(out: Path, path: Path) -> Path:
    """``path``, provided that it lies in the output folder: a report shows nothing else of this machine."""
    if not path.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"{path} lies outside of {out}: the folder was edited; run again")
    return path
