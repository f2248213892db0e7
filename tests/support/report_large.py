"""Writes the output folder of a large run for the tests of the reports: as many cells and quantities as a nightly.

Every tenth scenario is PPO, with the tensors and the tokens of a policy and a critic.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

from report_sample import (
    RUN,
    SCENARIO,
    curve,
    parameters,
    quantities_of,
    strips_of,
    told,
    write_cell,
    write_oracle,
    write_record,
)

from conformance.results.run_results import cell_summary, write_summary
from conformance.results.verdict import Quantity, Verdict
from conformance.spec.objectives import Ppo, all_observables
from conformance.spec.observables import Observable
from conformance.spec.offline import Sft

LAYERS = 5
NAMES = parameters(LAYERS)
STEPS = 5
MODELS = ("pangu", "qwen3", "llama", "gemma3", "pangu-moe", "value")
PRECISIONS = {"exact": 1e-11, "fp32": 2.6e-6, "bf16": 2.1e-2}
BACKENDS = ("deepspeed", "fsdp2", "megatron")
LAYOUTS = (
    *("dp2", "dp4", "dp8", "tp2", "tp4", "dp2.tp2", "dp2.tp4", "dp2.sp2", "sp2.ring", "rep2.dp2", "dp2.pp2"),
    "tp2.pp2.seqpar",
)
SCENARIOS = tuple(f"scenario-{n}" for n in range(10))
GROUPS = [(scenario, model, precision) for model, precision, scenario in product(MODELS, PRECISIONS, SCENARIOS)]
SFT, PPO = all_observables(Sft()), all_observables(Ppo(kl_loss_coef=0.1))


def write_large(out: Path, cells: int) -> Path:
    """Write ``cells`` cells, of which each fiftieth differs; return ``out``."""
    rng = random.Random(0)
    entries = []
    numbered = enumerate(islice(product(GROUPS, BACKENDS, LAYOUTS), cells))
    judged: list[Quantity] = []
    observables = SFT
    for number, ((scenario, model, precision), backend, layout) in numbered:
        if (backend, layout) == (BACKENDS[0], LAYOUTS[0]):  # a new group, with bounds and an oracle of its own
            observables = PPO if scenario == SCENARIOS[-1] else SFT
            judged = _bounds(observables, PRECISIONS[precision], rng)
            oracle = f"oracle/{scenario}-{model}-{precision}"
            write_oracle(out / oracle / "float64", observables, curve(model, observables, 0, rng))
        cell, folder = f"{scenario}/{model}/{backend}/{layout}/{precision}", f"cells/{number:04d}"
        resolved = {f"setting {n}": f"{backend} value {n}" for n in range(40)} | {"layout": layout}
        header = {"cell": cell, "layout": layout, "scenario": SCENARIO, "environment": RUN.environment}
        header["resolved"] = resolved
        steps = curve(model, observables, PRECISIONS[precision], rng)
        seen = told(layout, range(STEPS), layers=LAYERS)
        write_record(out / folder / "legs/0/record", header, observables, steps, told=seen)
        differs = number % 50 == 49
        quantities = _errors(judged, 3.0 if differs else 0.9, rng)
        verdict = Verdict(
            state="differs" if any(not q.ratio <= 1 for q in quantities) else "conforms",
            reason=f"{len(quantities)} quantities were compared with the oracle",
            quantities=quantities,
            strips=strips_of(observables, quantities, rng),
        )
        entry = write_cell(
            out,
            cell,
            folder=folder,
            records=("legs/0/record",),
            oracle=f"../../{oracle}",
            observables=observables,
            verdict=verdict,
        )
        entries.append(entry)
    write_summary(out, replace(RUN, profile="nightly"), [cell_summary(entry) for entry in entries])
    return out


def _bounds(observables: Sequence[Observable], allowed: float, rng: random.Random) -> list[Quantity]:
    """What is judged in a group of cells, each quantity with a bound of its own, as noise gives it."""
    found = quantities_of(observables, NAMES, STEPS, allowed, lambda *_: 0.0)
    return [replace(q, allowed=q.allowed * (1 if allowed < 1e-9 else rng.uniform(0.5, 2))) for q in found]


def _errors(judged: Sequence[Quantity], worst: float, rng: random.Random) -> tuple[Quantity, ...]:
    def error(q: Quantity) -> float:
        return q.allowed * worst * float(10 ** rng.uniform(-3, 0))

    found = [(error(q), rng.randrange(512)) for q in judged]
    return tuple(
        replace(q, observed=observed, max_abs=observed / (7 + at), where=f"[{at}, {at % 7}]")
        for q, (observed, at) in zip(judged, found, strict=True)
    )
