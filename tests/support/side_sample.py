"""Writes the output folder of a run in which several backends trained one scenario, with synthetic records.

Every member computes the oracle's numbers with its own rounding; a test gives some members a ``Change``.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from judge_sample import evidence
from report_sample import RUN, edit, write_cell

from conformance.judge.cells import rejudge
from conformance.judge.side_by_side import write_side_by_side
from conformance.records.step_tensors import RecordWriter
from conformance.results.run_results import cell_summary, write_summary
from conformance.results.verdict import Verdict
from conformance.spec.conventions import OracleConvention
from conformance.spec.known_defects import Defect, defects_to_json
from conformance.spec.layout import Layout
from conformance.spec.objectives import all_observables
from conformance.spec.scenario import Scenario, parse_scenario, scenario_to_json

Values = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Change = Callable[[int, Values, Tensors], None]

STEPS = 3
GROUP = "sft-tiny/pangu/exact"
MEMBERS = ("deepspeed/dp2", "fsdp2/dp2", "fsdp2/dp2.tp2", "megatron/tp2")
NAMES = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias")
ROUNDING = 1e-15
SCENARIO = parse_scenario(
    {
        **{"name": "sft-tiny", "model": "pangu", "precision": "exact", "steps": STEPS},
        "optimizer": {"name": "sgd", "lr": 0.1},
    }
)


def _unchanged(step: int, values: Values, tensors: Tensors) -> None:
    """Leave the step as it is."""


def cell_id(member: str) -> str:
    return f"sft-tiny/pangu/{member}/exact"


def write_run(out: Path, changes: Mapping[str, Change] | None = None, *, members: tuple[str, ...] = MEMBERS) -> Path:
    """Write records and verdicts of ``members`` (backend/layout) into ``out``, compare them, and return it."""
    write_oracle(out / "oracle" / "tiny" / "float64", SCENARIO)
    entries = []
    for number, member in enumerate(members, start=1):
        backend, layout = member.split("/")
        folder = f"cells/{number:02d}"
        change = (changes or {}).get(member, _unchanged)
        header = {"cell": cell_id(member), "layout": layout, "backend": {"name": backend, "default_zero": None}}
        header["environment"] = {}
        write_record(out / folder / "legs/0/record", SCENARIO, header, change, rounding=ROUNDING, seed=number)
        entry = write_cell(
            out,
            cell_id(member),
            folder=folder,
            records=("legs/0/record",),
            oracle="../../oracle/tiny",
            observables=all_observables(SCENARIO.objective),
            verdict=Verdict(state="not_run", reason=""),
        )
        entries.append(entry)
    write_summary(out, RUN, [cell_summary(entry) for entry in entries])
    rejudge(out)
    write_side_by_side(out)
    return out


def declare(out: Path, members: tuple[str, ...], convention: OracleConvention, change: Change) -> None:
    """Let members of a run declare a convention, which is ``change`` to the oracle, and judge the run again."""
    write_oracle(out / "oracle" / convention.kind / "float64", SCENARIO, change, defects=(convention,))
    for member in members:
        (file,) = (f for f in out.glob("cells/*/verdict.json") if json.loads(f.read_text())["cell"] == cell_id(member))
        (own,) = defects_to_json((convention,))
        variants = [{"defects": [own], "folder": f"../../oracle/{convention.kind}"}]
        edit(file, conventions=[own], variants=variants)
    rejudge(out)
    write_side_by_side(out)


def scaled(tensor: str, by: float, *, at: int = 0) -> Change:
    """A change of one tensor at one step."""

    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == at:
            tensors[tensor] *= by

    return change


def wrong_loss(step: int, values: Values, tensors: Tensors) -> None:
    if step >= 0:
        values["loss"] *= 1.01


def write_oracle(
    path: Path,
    scenario: Scenario,
    change: Change = _unchanged,
    *,
    precision: str = "float64",
    rounding: float = 0.0,
    defects: tuple[Defect, ...] = (),
) -> None:
    """The oracle's record in a precision; with ``defects`` it says so, and ``change`` is what they do."""
    backend = {"name": "oracle", "precision": precision, "defects": defects_to_json(defects)}
    write_record(path, scenario, {"cell": "oracle", "layout": "dp1", "backend": backend}, change, rounding=rounding)


def write_record(
    path: Path,
    scenario: Scenario,
    header: Values,
    change: Change = _unchanged,
    *,
    rounding: float,
    seed: int = 0,
    first: int = 0,
    until: int = STEPS,
    unread: int | None = None,
) -> None:
    """A record of the steps from ``first`` to before ``until``; ``rounding`` is relative and drawn with ``seed``.

    unread: the step after which weights are not read, nor the gradients of the next step.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    declared = all_observables(scenario.objective)
    begins = {"scenario": scenario_to_json(scenario), "optimizer": "loaded" if first else "new"}
    begins["loads"] = "checkpoint" if first else ""
    ranks = Layout.parse(header["layout"]).world_size
    generators = [{"torch": f"of rank {rank}"} for rank in range(ranks)]
    writer = RecordWriter(path, header | begins, observables=declared, first_step=first)
    training, noise = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(4, 3, generator=training, dtype=torch.float64) for name in NAMES}
    loaded = {f"weight/{name}": weight.clone() for name, weight in weights.items()}
    if first == 0:
        change(-1, {}, loaded)
        writer.loaded(loaded)
    for step in range(until):
        gradients = {name: torch.randn(4, 3, generator=training, dtype=torch.float64) for name in NAMES}
        tensors: Tensors = {}
        for name, gradient in gradients.items():
            own = gradient + rounding * torch.randn(4, 3, generator=noise, dtype=torch.float64)
            weights[name] = weights[name] - 0.1 * own
            tensors |= {f"gradient/{name}": own, f"weight/{name}": weights[name].clone()}
        for row, targets in (("0", 3), ("7", 2)):
            logprobs = -torch.linspace(1.0 + step, 4.0, targets, dtype=torch.float64).sqrt() / 3
            tensors[f"logprob/{row}"] = logprobs * (1 + rounding * torch.randn((), generator=noise).item())
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        loss = (3.0 - 0.2 * step) * (1 + rounding * torch.randn((), generator=noise).item())
        values = {"loss": loss, "token_count": 5, "grad_norm": norm, "lr": 0.1}
        change(step, values, tensors)
        momentum = {f"momentum_buffer/{name}": 0.5 * weight for name, weight in weights.items()}
        if step == first - 1:
            begun = {name: tensor for name, tensor in tensors.items() if name.startswith("weight/")}
            writer.loaded(begun | momentum, generators=generators)
        elif step >= first:
            kinds = ["weight"] * (step == unread) + ["gradient"] * (step - 1 == unread)
            shown = [o for o in declared if o.key not in kinds]
            kept = {name: t for name, t in tensors.items() if name.startswith(tuple(f"{o.key}/" for o in shown))}
            replicas = {o.key: {"offered": 6, "compared": 6, "differing": []} for o in shown if o.replicated != "no"}
            handed = step == until - 1 < STEPS - 1
            kept |= momentum if handed else {}
            its_own = generators if handed else ()
            writer.step(values, kept, replicas=replicas, seconds=0.0, generators=its_own, unread=kinds)
    writer.finish({"seconds": 0.0, "leaks": [], "evidence": [evidence(scenario.precision)] * ranks})
