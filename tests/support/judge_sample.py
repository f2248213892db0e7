"""Writes records of an SGD run of two tensors, with the changes of a test, for tests of the judge."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from conformance.judge.verdict import judge
from conformance.records.step_tensors import Record, RecordWriter, read_record
from conformance.results.verdict import Verdict
from conformance.spec.known_defects import Defect, defects_to_json
from conformance.spec.layout import Layout
from conformance.spec.objectives import all_observables
from conformance.spec.offline import Sft
from conformance.spec.precision import PRECISIONS
from conformance.spec.scenario import parse_scenario, scenario_to_json

Values = dict[str, Any]  # a step's values, and its replicas under "replicas"
Tensors = dict[str, torch.Tensor]
Change = Callable[[int, Values, Tensors], None]

STEPS = 3
OBSERVABLES = all_observables(Sft())
EQUAL = {"offered": 8, "compared": 4, "differing": []}


def both(*changes: Change) -> Change:
    """Returns the change that makes all ``changes``, one after another."""

    def change(step: int, values: Values, tensors: Tensors) -> None:
        for one in changes:
            one(step, values, tensors)

    return change


def unchanged(step: int, values: Values, tensors: Tensors) -> None:
    """Leave the step as the oracle has it."""


def write(
    path: Path,
    change: Change = unchanged,
    *,
    precision: str = "exact",
    layout: str = "dp2.tp2",
    lr: float = 0.1,
    first: int = 0,
    until: int = STEPS,
    leaks: Sequence[dict[str, Any]] = (),
    oracle: str = "",
    defects: tuple[Defect, ...] = (),
    shape: tuple[int, int] = (4, 3),
    reseeded: Sequence[Sequence[tuple[int, str]]] = (),
    drawn: int | None = None,
) -> Record:
    """A record of the steps from ``first`` to before ``until``; of the oracle in the precision ``oracle``, if given.

    ``change`` edits a step's values and tensors before they are written; the weights as loaded are step first - 1.
    defects: those that a record of the oracle says it has. shape: of both weights. reseeded: see the record's footer.
    drawn: the step after which weights are not read, nor the gradients of the next step.
    """
    optimizer = {"name": "sgd", "lr": lr, "max_grad_norm": 1.0}
    scenario = parse_scenario(
        {"name": "x", "model": "m", "precision": precision, "optimizer": optimizer, "steps": STEPS, "accumulation": 3}
    )
    backend: Values = {"name": "oracle", "precision": oracle, "defects": defects_to_json(defects)}
    header: Values = {"cell": "oracle", "layout": "dp1", "backend": backend}
    if not oracle:
        backend = {"name": "b", "url": "", "default_zero": None, "defects": []}
        header = {"cell": f"x/m/b/{layout}/{precision}", "layout": layout, "backend": backend}
    header |= {"scenario": scenario_to_json(scenario), "optimizer": "loaded" if first else "new"}
    header["loads"] = "checkpoint" if first else ""
    writer = RecordWriter(path, header, observables=OBSERVABLES, first_step=first)
    ranks = Layout.parse(layout).world_size
    generators = [{"torch": f"of rank {rank}"} for rank in range(ranks)]
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in ("a", "b")}
    for step in range(-1, until):
        tensors = {f"weight/{name}": weight.clone() for name, weight in weights.items()}
        if step >= 0:
            gradients = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in weights}
            norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
            for name, gradient in gradients.items():
                weights[name] = weights[name] - 0.1 * (min(1.0, 1 / (norm + 1e-6)) * gradient)
                tensors |= {f"gradient/{name}": gradient, f"weight/{name}": weights[name].clone()}
            logprobs = torch.randn(5, generator=generator, dtype=torch.float64)
            more = {"logprob/0": logprobs[:2].clone(), "logprob/7": logprobs[2:].clone()}
            values: Values = {"loss": 2.0, "token_count": 5, "grad_norm": norm, "lr": 0.1}
            values["replicas"] = {o.key: EQUAL for o in OBSERVABLES if o.replicated != "no"}
        if step == first - 1:
            loaded = {f"weight/{name}": weight.clone() for name, weight in weights.items()}
            change(step, {}, loaded)
            writer.loaded(loaded, generators=generators if first else ())
        elif step >= first:
            change(step, values, tensors := tensors | more)
            replicas = values.pop("replicas")
            generators = values.pop("generators", generators)
            handed = generators if step == until - 1 < STEPS - 1 else ()
            known = {k: v for k, v in values.items() if v is not None}
            unread = [*(["weight"] if step == drawn else []), *(["gradient"] if step - 1 == drawn else [])]
            tensors = {name: t for name, t in tensors.items() if name.partition("/")[0] not in unread}
            replicas = {key: found for key, found in replicas.items() if key not in unread}
            writer.step(known, tensors, replicas=replicas, seconds=0.0, generators=handed, unread=unread)
    footer = {"leaks": list(leaks), "evidence": [evidence(precision)] * ranks, "reseeded": list(reseeded)}
    writer.finish({"seconds": 0.0, **footer})
    return read_record(path)


def evidence(precision: str) -> dict[str, Any]:
    """What is seen of a rank that does what the layouts here ask for."""
    dtype = next(tier.compute.name for name, tier in PRECISIONS.items() if name == precision)
    return {
        "collectives": [["all_reduce", 2, dtype, "forward", 4], ["all_reduce", 2, dtype, "later", 4]],
        "products": [[dtype, "backward", 8], [dtype, "forward", 4]],
        "widths": [3],
    }


def verdict_of(tmp_path: Path, change: Change, **options: Any) -> Verdict:
    oracle = write(tmp_path / "oracle")
    return judge([write(tmp_path / "cell", change, **options)], oracle=oracle, noise=())


def clauses(verdict: Verdict) -> list[str]:
    """Returns the parts of the verdict's reason, without the list of what is not proven.

    Records of tests lack evidence, so each new item that a judge cannot prove is in many lists. tests/judge/
    test_work_evidence.py and test_judge_evidence.py check the lists.
    """
    return [clause for clause in verdict.reason.split("; ") if not clause.startswith("not proven: ")]


def scale(key: str, factor: float, *, at: int = 0) -> Change:
    def change(step: int, values: Values, tensors: Tensors) -> None:
        if step == at and key in values:
            values[key] *= factor
        elif step == at:
            tensors[key] *= factor

    return change
