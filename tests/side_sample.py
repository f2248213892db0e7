"""Writes the output folder of a run in which several backends trained one scenario: real records, made by hand.

Every member computes what the oracle computes, with a rounding of its own; a test gives some of them a ``Change``.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from report_sample import RUN, write_cell

from conformance.judge.again import rejudge
from conformance.objective import all_observables
from conformance.peers.side_by_side import write_side_by_side
from conformance.record.results import Verdict, write_summary
from conformance.record.tensors import RecordWriter
from conformance.scenario import parse_scenario, scenario_to_json

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


def cell_id(member: str) -> str:
    return f"sft-tiny/pangu/{member}/exact"


def write_run(out: Path, changes: Mapping[str, Change] | None = None, *, members: tuple[str, ...] = MEMBERS) -> Path:
    """Write records and verdicts of ``members`` (backend/layout) into ``out``, compare them, and return it."""
    _record(out / "oracle" / "tiny" / "float64", _unchanged, layout="dp1", rounding=0.0)
    entries = []
    for number, member in enumerate(members, start=1):
        layout = member.split("/")[1]
        folder = f"cells/{number:02d}"
        change = (changes or {}).get(member, _unchanged)
        _record(out / folder / "legs/0/record", change, layout=layout, rounding=ROUNDING, seed=number)
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
    write_summary(out, RUN, entries)
    rejudge(out)
    write_side_by_side(out)
    return out


def scaled(tensor: str, by: float, *, at: int = 0) -> Change:
    """A change of one tensor at one step."""

    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == at:
            tensors[tensor] *= by

    return change


def _unchanged(step: int, values: Values, tensors: Tensors) -> None:
    """Leave the step as it is."""


def _record(path: Path, change: Change, *, layout: str, rounding: float, seed: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"cell": "tiny", "scenario": scenario_to_json(SCENARIO), "layout": layout, "optimizer": "new"}
    writer = RecordWriter(path, header, observables=all_observables(SCENARIO.objective))
    training, noise = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(4, 3, generator=training, dtype=torch.float64) for name in NAMES}
    loaded = {f"weight/{name}": weight.clone() for name, weight in weights.items()}
    change(-1, {}, loaded)
    writer.loaded(loaded)
    same = {"offered": 6, "compared": 6, "differing": []}
    for step in range(STEPS):
        gradients = {name: torch.randn(4, 3, generator=training, dtype=torch.float64) for name in NAMES}
        tensors: Tensors = {}
        for name, gradient in gradients.items():
            own = gradient + rounding * torch.randn(4, 3, generator=noise, dtype=torch.float64)
            weights[name] = weights[name] - 0.1 * own
            tensors |= {f"gradient/{name}": own, f"weight/{name}": weights[name].clone()}
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        loss = (3.0 - 0.2 * step) * (1 + rounding * torch.randn((), generator=noise).item())
        values = {"loss": loss, "token_count": 5, "grad_norm": norm, "lr": 0.1}
        change(step, values, tensors)
        writer.step(values, tensors, replicas={"gradient": same, "weight": same}, seconds=0.0)
    writer.finish({"seconds": 0.0, "leaks": []})
