"""Writes a complete output folder of ``parity run`` for the tests of the reports: 25 cells, every state.

Verdicts and summary are written by conformance.results.run_results, records as lines with a real digest, as the suite
would write them. Nothing is trained: errors are random numbers below the tolerance.
"""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from conformance.records import record_format
from conformance.results.run_results import Entry, Run, cell_summary, read_entry, write_entry, write_summary
from conformance.results.verdict import ANSWERED, BARS, Quantity, Spread, State, TokenErrors, Verdict
from conformance.spec.layout import Layout
from conformance.spec.objectives import Ppo, all_observables
from conformance.spec.observables import Observable, loaded_observables, observables_to_json, trained_observables
from conformance.spec.offline import Sft
from reports.page_data import locate

STEPS = 5
LAYERS = 3
DIFFERS = "sft-packed/pangu/fsdp2/dp2.tp2/fp32"
LATE = "sft-adamw/qwen3/deepspeed/dp2/bf16"
CRASHED = "sft-packed/llama/megatron/tp2/fp32"
EXPECTED = "sft-packed/qwen3/deepspeed/dp4/fp32"
UNSUPPORTED = "sft-packed/gemma3/megatron/dp2.sp2/fp32"
NOT_RUN = "sft-adamw/llama/megatron/dp2.tp2/fp32"
PARTLY = "sft-packed/pangu/megatron/tp2/fp32"
CONFORMS = "sft-packed/qwen3/fsdp2/dp2/fp32"
RESUMED = "sft-packed/qwen3/deepspeed-to-fsdp2/dp4-to-dp2.tp2/fp32/switch"
CRITIC = "two-models/qwen3/fsdp2/dp2/fp32/seed1"
RL = "ppo/qwen3/megatron/dp4/fp32"
ROWS, TARGETS = 12, 8  # of a step, and of each of its rows
WRONG_ROW = 5  # of RL, a response whose advantages are wrong
SPECIAL: dict[str, tuple[State, str]] = {
    DIFFERS: ("differs", "first difference at gradients, step 0, 1 of 42 tensors"),
    LATE: ("differs", "first difference at weights after N steps, step 2, 33 of 42 tensors"),
    RL: ("differs", "first difference at advantages, step 0, 1 of 1 tensors"),
    CRASHED: ("infrastructure", "rank 1 of 2 raised RuntimeError in setup: NCCL communicator was aborted"),
    EXPECTED: ("expected_difference", "rounded gradients: https://github.com/deepspeedai/DeepSpeed/issues/7747"),
    UNSUPPORTED: ("unsupported", "megatron has no context parallelism for this attention; use sp1"),
    PARTLY: ("partly_observed", "612 quantities agree with the reference; not observed: log-probs"),
    NOT_RUN: ("not_run", "the time budget of the run (600 s) was spent before this cell"),
}
CELLS = (
    *(f"sft-packed/{m}/fsdp2/{lay}/fp32" for m in ("pangu", "qwen3", "llama", "gemma3") for lay in ("dp2", "dp2.tp2")),
    *(f"sft-adamw/{m}/fsdp2/{lay}/bf16" for m in ("pangu", "qwen3") for lay in ("dp2", "dp2.tp2.seqpar")),
    *(f"sft-packed/{m}/deepspeed/dp4/fp32" for m in ("pangu", "qwen3")),
    *(f"sft-adamw/{m}/deepspeed/dp2/bf16" for m in ("pangu", "qwen3")),
    PARTLY,
    CRASHED,
    UNSUPPORTED,
    NOT_RUN,
    "sft-packed/pangu/fsdp2/dp2.tp2/exact",
    "sft-packed/pangu/deepspeed/dp4/exact",
    RESUMED,
    CRITIC,
    RL,
)
LAYER = (
    *("input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.q_proj.bias", "self_attn.k_proj.weight"),
    *("self_attn.k_proj.bias", "self_attn.v_proj.weight", "self_attn.v_proj.bias", "self_attn.o_proj.weight"),
    *("self_attn.o_proj.bias", "post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down_proj.weight",
)
ALLOWED = {"exact": 1e-11, "fp32": 2.6e-6, "bf16": 2.1e-2}
RUN = Run(
    started="2026-08-14T03:12:40+00:00",
    finished="2026-08-14T03:14:00+00:00",
    seconds=80.1,
    profile="quick",
    device="cpu",
    command="parity run --profile quick --out out",
    environment={
        "python": "3.11.7",
        "torch": "2.13.0+cpu",
        "transformers": "5.17.0",
        "deepspeed": "0.19.2",
        "cores": 2,
        "collectives": "gloo",
        "OMP_NUM_THREADS": "1",
    },
)
SCENARIO = {
    "objective": {"kind": "sft"},
    "accumulation": 1,
    "optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.95]},
}
Error = Callable[[Observable, str, int], float]
"""The error of one tensor of an observable at a step, in units of what is allowed."""


def parameters(layers: int) -> tuple[str, ...]:
    """The names of a small model's parameters."""
    inner = (f"model.layers.{layer}.{name}" for layer in range(layers) for name in LAYER)
    return ("model.embed_tokens.weight", *inner, "model.norm.weight", "lm_head.weight")


def write_sample(out: Path) -> Path:
    """Write the folder and return it."""
    rng = random.Random(0)
    entries = [sample_cell(out, cell, f"{index:02d}", rng) for index, cell in enumerate(CELLS)]
    write_summary(out, RUN, [cell_summary(entry) for entry in entries])
    return out


def sample_cell(out: Path, cell: str, number: str, rng: random.Random) -> Entry:
    """Write one cell with its records and logs, and the records of its oracle."""
    state, reason = SPECIAL.get(cell, ("conforms", "all quantities agree with the reference"))
    scenario, model, _, layout, *variant = cell.split("/")
    folder = f"cells/{number}-{cell.replace('/', '-')}"
    ran = state in ANSWERED
    observables = all_observables(Sft())
    if cell == CRITIC:
        observables = (*loaded_observables("critic", trained=True), *observables, *trained_observables("critic"))
    if cell == RL:
        observables = all_observables(Ppo(kl_loss_coef=0.1))
    quantities: tuple[Quantity, ...] = ()
    if ran:
        key, noise = f"{scenario}-{model}", 3e-3 if variant[0] == "bf16" else 2e-7
        allowed = ALLOWED[variant[0]]
        shown = [o for o in observables if cell != PARTLY or o.key != "logprob"]
        quantities = tuple(_judged(cell, shown, allowed, rng))
        header = {"cell": cell, "layout": layout, "scenario": SCENARIO, "environment": RUN.environment}
        header |= {"resolved": {"optimizer": "AdamW", "layout": layout, "buckets": [1, 2]}}
        steps = curve(model, observables, noise, rng)
        for phase, (first, part) in enumerate([(0, steps[:2]), (2, steps[2:])] if cell == RESUMED else [(0, steps)]):
            footer = told(layout, range(first, first + len(part)), layers=LAYERS)
            write_record(
                out / folder / f"legs/{phase}/record", header, observables, part, first_step=first, told=footer
            )
        write_oracle(out / "oracle" / key / "float64", observables, curve(model, observables, 0, rng))
        if variant[0] != "exact":
            noisy = curve(model, observables, noise / 3, random.Random(0))
            write_oracle(out / "oracle" / key / variant[0], observables, noisy)
    if state == "infrastructure":
        write_logs(out / folder / "legs/0/logs")
    phases = 2 if cell == RESUMED else 1
    return write_cell(
        out,
        cell,
        folder=folder,
        records=tuple(f"legs/{phase}/record" for phase in range(phases)) if ran else (),
        oracle=f"../../oracle/{scenario}-{model}" if ran else None,
        observables=observables,
        verdict=Verdict(
            state=state, reason=reason, quantities=quantities, strips=strips_of(observables, quantities, rng)
        ),
    )


def write_logs(folder: Path) -> None:
    """The logs of two ranks, one of which raised an error in colour."""
    error = "\x1b[31mRuntimeError: NCCL communicator was aborted on rank 1.\x1b[0m"
    folder.mkdir(parents=True)
    (folder / "rank-0.log").write_text("rank 0: waiting for rank 1 in all_reduce (32 elements, tp)\n" * 8)
    (folder / "rank-1.log").write_text(f"Traceback (most recent call last):\n{error}\n")


def write_cell(
    out: Path,
    cell: str,
    *,
    folder: str,
    records: tuple[str, ...],
    oracle: str | None,
    observables: tuple[Observable, ...],
    verdict: Verdict,
) -> Entry:
    """Write the verdict of a cell whose id has the usual parts, and return what was written."""
    scenario, model, backend, layout, *variant = cell.split("/")
    entry = Entry(
        cell=cell,
        scenario=scenario,
        model=model,
        backend=backend,
        layout=layout,
        variant="/".join(variant),
        world_size=math.prod(int(part[2:]) for part in layout.split("-")[0].split(".") if part[2:].isdigit()),
        seconds=2.5,
        folder=folder,
        completed=bool(records),
        records=records,
        oracle=oracle,
        expected=(),
        reproduce=f"parity run --cells '{cell}' --out out-again",
        observables=observables,
        verdict=verdict,
    )
    write_entry(out, entry)
    return entry


def quantities_of(
    observables: Sequence[Observable], names: Sequence[str], steps: int, allowed: float, error: Error
) -> Iterator[Quantity]:
    """What would be judged of all observables, by step and then in causal order."""
    for step in range(-1, steps):
        for o in observables:
            bound = o.exact_bound or allowed
            if not o.applies(step):
                continue
            for tensor in names if o.kind == "tensors" else (o.judged_as,):
                yield _quantity(o.stage, tensor, step, bound * error(o, tensor, step), bound)
            if o.norm_of:
                yield _quantity(o.stage, f"{o.key} against rebuilt", step, 0.1 * allowed, allowed)
            if o.replica_stage and o.kind == "tensors" and step >= 0:
                yield _quantity(o.replica_stage, f"{o.key}: 82 held by several ranks", step, 0.0, 2.0**-24)


SPREAD = Spread(low=-1.0, high=1.0, observed=(2,) * BARS, reference=(3,) * BARS, quantiles=(1e-9, 2e-9, 3e-9))


def strips_of(
    observables: Sequence[Observable], quantities: Sequence[Quantity], rng: random.Random
) -> tuple[TokenErrors, ...]:
    """What would be kept of the tokens of all rows, two in a bin; what is outside its tolerance is so in WRONG_ROW."""
    rows = {(o.stage, o.key) for o in observables if o.kind == "rows"}
    starts = [(row, target) for row in range(ROWS) for target in range(0, TARGETS, 2)]
    strips = []
    for q in quantities:
        if (q.stage, q.tensor) not in rows:
            continue
        worst = (WRONG_ROW, 2) if q.ratio > 1 else rng.choice(starts)
        small = min(q.observed, 0.9 * q.allowed)
        errors = [float(f"{small * rng.random():.2e}") if at != worst else q.observed for at in starts]
        if q.ratio > 1:
            errors = [
                q.observed / 2 if row == WRONG_ROW and (row, t) != worst else e
                for (row, t), e in zip(starts, errors, strict=True)
            ]
        strips.append(
            TokenErrors(
                stage=q.stage,
                tensor=q.tensor,
                step=q.step,
                tokens=ROWS * TARGETS,
                starts=tuple(starts),
                errors=tuple(errors),
                max_abs=q.observed / 40,
                where=f"row {worst[0]}, target {worst[1]}",
                spread=SPREAD,
            )
        )
    return tuple(strips)


def _quantity(stage: str, tensor: str, step: int, observed: float, allowed: float) -> Quantity:
    over = observed > allowed
    hint = "Only biases after a row-parallel product differ: is the bias added once per tp rank?"
    return Quantity(
        stage=stage,
        tensor=tensor,
        step=step,
        observed=observed,
        allowed=allowed,
        max_abs=observed / 40 if over else None,
        where="[17]" if over else "",
        hint=hint if over and stage == "gradients" else "",
    )


def _judged(cell: str, observables: Sequence[Observable], allowed: float, rng: random.Random) -> Iterator[Quantity]:
    def error(o: Observable, tensor: str, step: int) -> float:
        if o.kind == "setting" or o.when == "loaded" or (o.key == "loss" and step == 3):
            return 0.0
        if cell == DIFFERS and o.kind == "tensors" and tensor.endswith("layers.1.self_attn.o_proj.bias"):
            return 6.1e4 * rng.uniform(0.5, 2)
        if cell == LATE and o.stage == "weights after N steps" and step > 1:
            return rng.uniform(0.6, 3.4)
        if cell == RL and o.key == "advantage" and step < 2:
            return 4e4 * rng.uniform(0.5, 2)
        if cell == EXPECTED and o.stage == "gradients" and "down_proj" in tensor:
            return rng.uniform(1.1, 6)
        return float(10 ** rng.uniform(-2.5, -0.05))

    return quantities_of(observables, parameters(LAYERS), STEPS, allowed, error)


def curve(model: str, observables: Sequence[Observable], noise: float, rng: random.Random) -> list[dict[str, Any]]:
    """The values of each step."""

    def value(o: Observable, step: int) -> float:
        if o.key == "token_count":
            return 811 + 13 * step
        if o.kind == "setting":
            return 1e-3 * (1 - step / 10)
        start = 5.2 + len(model) / 10 if o.key == "loss" else 2.6
        return float(start * 0.85**step * (1 + noise * rng.gauss(0, 1)))

    keys = [o for o in observables if o.kind in ("scalar", "setting")]
    return [{o.key: value(o, step) for o in keys} for step in range(STEPS)]


def write_record(
    folder: Path,
    header: dict[str, Any],
    observables: Sequence[Observable],
    steps: Sequence[dict[str, Any]],
    *,
    first_step: int = 0,
    told: Mapping[str, Any] | None = None,
) -> None:
    """A record's lines; the tensor files are left out, no report reads them."""
    schema = {"type": "header", "schema": record_format.RECORD_SCHEMA, "first_step": first_step}
    lines: list[dict[str, Any]] = [{**schema, **header, "observables": observables_to_json(observables)}]
    lines.append({"type": "step", "step": first_step - 1, "values": {}})
    lines += [
        {"type": "step", "step": step, "values": values, "seconds": 0.5}
        for step, values in enumerate(steps, start=first_step)
    ]
    text = "".join(record_format.dumps(line) + "\n" for line in lines)
    footer: dict[str, Any] = {"type": "footer", "steps": len(steps), **(told or {})}
    footer["sha256"] = record_format.record_digest(text.encode(), footer)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / record_format.RECORD_FILE).write_text(text + record_format.dumps(footer) + "\n", encoding="utf-8")


def write_oracle(folder: Path, observables: Sequence[Observable], steps: Sequence[dict[str, Any]]) -> None:
    """Write the record of the oracle in the precision that names the folder."""
    header = {"cell": "oracle", "layout": "dp1", "scenario": SCENARIO, "environment": RUN.environment}
    header |= {"resolved": {"optimizer": "oracle"}}
    header |= {"backend": {"name": "oracle", "precision": folder.name, "defects": []}}
    write_record(folder, header, observables, steps)


def told(layout: str, steps: Sequence[int], *, layers: int) -> dict[str, Any]:
    """What ranks of a layout would tell in the footer: pipeline stages hold a part of the layers each."""
    parsed = Layout.parse(layout.rpartition("-to-")[2])
    size = parsed.world_size // parsed.pp
    pieces = {}
    for name in parameters(layers):
        column, _ = locate(name)
        layer = int(column) if column.isdigit() else 0 if column == "in" else layers - 1
        first = layer * parsed.pp // layers * size
        cut = parsed.tp if "_proj.weight" in name else 1
        regions = [f"tp{part}" if cut > 1 else "full" for part in range(cut)]
        pieces[name] = {region: [*range(first + part, first + size, cut)] for part, region in enumerate(regions)}
    seen = {"collectives": [["all_reduce", 2, "float32", "backward 0", 3]], "products": [["float32", "forward", 9]]}
    return {
        "evidence": [{**seen, "widths": []}] * parsed.world_size,
        "batches": [
            {"step": step, "tokens": 1000, "targets": [[100 + rank, 7] for rank in range(parsed.dp)]} for step in steps
        ],
        "memory": [2**28 + 2**20 * rank for rank in range(parsed.world_size)],
        "pieces": pieces,
    }


# Changing a sample


def entries_of(out: Path) -> list[Entry]:
    """The cells of ``out`` as they stand in its files, whatever these say."""
    return [read_entry(folder / "verdict.json") for folder in _folders(out).values()]


def entry_of(out: Path, cell: str) -> Entry:
    """One cell of ``out``."""
    return read_entry(folder_of(out, cell) / "verdict.json")


def folder_of(out: Path, cell: str) -> Path:
    """The folder of ``cell`` in ``out``."""
    return _folders(out)[cell]


def _folders(out: Path) -> dict[str, Path]:
    listed = json.loads((out / "summary.json").read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: out / cell["folder"] for cell in listed}


def rewrite(out: Path, entries: Sequence[Entry], **run: Any) -> None:
    """Write ``entries`` as the cells of ``out``; ``run``: fields of the run that change."""
    for entry in entries:
        write_entry(out, entry)
    write_summary(out, replace(RUN, **run), [cell_summary(entry) for entry in entries])


def change(out: Path, cell: str, *, verdict: dict[str, Any] | None = None, **fields: Any) -> None:
    """Change fields of one cell and of its verdict, consistently in both files. Other quantities have no strips."""
    if verdict and "quantities" in verdict:
        verdict = {"strips": (), **verdict}
    listed = json.loads((out / "summary.json").read_text(encoding="utf-8"))["cells"]
    entry = entry_of(out, cell)
    entry = replace(entry, verdict=replace(entry.verdict, **(verdict or {})), **fields)
    write_entry(out, entry)
    write_summary(out, RUN, [cell_summary(entry) if one["id"] == cell else one for one in listed])


def only_conforming(out: Path, **run: Any) -> None:
    """Leave only the cells that conform."""
    rewrite(out, [entry for entry in entries_of(out) if entry.verdict.state == "conforms"], **run)


def edit(file: Path, **changes: Any) -> None:
    """Change top-level values of a JSON file, as a careless or a hostile hand would."""
    values = {**json.loads(file.read_text(encoding="utf-8")), **changes}
    file.write_text(json.dumps(values), encoding="utf-8")
