"""Writes a complete output folder of ``parity run`` for the tests of the reports: 22 cells, every state."""

import json
import math
import random
from pathlib import Path
from typing import Any

from conformance.record.format import record_digest

STEPS = 5
LAYERS = 3
DIFFERS = "sft-packed/pangu/fsdp2/dp2.tp2/fp32"
LATE = "sft-adamw/qwen3/deepspeed/dp2/bf16"
CRASHED = "sft-packed/llama/megatron/tp2/fp32"
EXPECTED = "sft-packed/qwen3/deepspeed/dp4/fp32"
UNSUPPORTED = "sft-packed/gemma3/megatron/dp2.sp2/fp32"
NOT_RUN = "sft-adamw/llama/megatron/dp2.tp2/fp32"
CONFORMS = "sft-packed/qwen3/fsdp2/dp2/fp32"
SPECIAL = {
    DIFFERS: ("differs", "first difference at gradients, step 0, 1 of 42 tensors"),
    LATE: ("differs", "first difference at weights after N steps, step 2, 33 of 42 tensors"),
    CRASHED: (
        "infrastructure",
        "rank 1 of 2 raised RuntimeError in setup: NCCL communicator was aborted; see its log",
    ),
    EXPECTED: (
        "expected_difference",
        "ZeRO-3 rounds the reduced gradients: https://github.com/deepspeedai/DeepSpeed/issues/7747",
    ),
    UNSUPPORTED: ("unsupported", "megatron has no context parallelism for this attention; use sp1"),
    NOT_RUN: ("not_run", "the time budget of the run (600 s) was spent before this cell"),
}
CELLS = (
    *(f"sft-packed/{m}/fsdp2/{lay}/fp32" for m in ("pangu", "qwen3", "llama", "gemma3") for lay in ("dp2", "dp2.tp2")),
    *(f"sft-adamw/{m}/fsdp2/{lay}/bf16" for m in ("pangu", "qwen3") for lay in ("dp2", "dp2.tp2.seqpar")),
    *(f"sft-packed/{m}/deepspeed/dp4/fp32" for m in ("pangu", "qwen3")),
    *(f"sft-adamw/{m}/deepspeed/dp2/bf16" for m in ("pangu", "qwen3")),
    "sft-packed/pangu/megatron/tp2/fp32",
    CRASHED,
    UNSUPPORTED,
    NOT_RUN,
    "sft-packed/pangu/fsdp2/dp2.tp2/exact",
    "sft-packed/pangu/deepspeed/dp4/exact",
)
LAYER = (
    *("input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.q_proj.bias", "self_attn.k_proj.weight"),
    *("self_attn.k_proj.bias", "self_attn.v_proj.weight", "self_attn.v_proj.bias", "self_attn.o_proj.weight"),
    *("self_attn.o_proj.bias", "post_attention_layernorm.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.down_proj.weight",
)
PARAMETERS = (
    "model.embed_tokens.weight",
    *(f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in LAYER),
    *("model.norm.weight", "lm_head.weight"),
)
STAGES = (
    *("weights", "log-probs", "loss", "gradients", "replicas", "gradient norm", "clipped update"),
    "weights after N steps",
)
ALLOWED = {"exact": 1e-11, "fp32": 2.6e-6, "bf16": 2.1e-2}


def write_sample(out: Path) -> Path:
    """Write the folder and return it."""
    rng = random.Random(0)
    cells = []
    for index, cell in enumerate(CELLS):
        state, reason = SPECIAL.get(cell, ("conforms", ""))
        cells.append(_cell(out, cell, state, reason, f"{index:02d}-{cell.replace('/', '-')}", rng))
    states = [c["state"] for c in cells]
    known = ("conforms", "differs", "unsupported", "expected_difference", "infrastructure", "not_run")
    summary = {
        "schema": 1,
        "suite_version": "0.1.0",
        "started": "2026-08-14T03:12:40+00:00",
        "finished": "2026-08-14T03:14:00+00:00",
        "seconds": 80.1,
        "profile": "quick",
        "device": "cpu",
        "command": "parity run --profile quick --out out",
        "verdict": "differs",
        "counts": {state: states.count(state) for state in known},
        "cells": cells,
        "environment": {
            "backend-parity": "0.1.0",
            "python": "3.11.7",
            "torch": "2.13.0+cpu",
            "transformers": "5.17.0",
            "deepspeed": "0.19.2",
            "platform": "Linux-6.8-x86_64",
            "cpu": "AMD EPYC 7B13",
            "cores": 2,
            "collectives": "gloo",
            "OMP_NUM_THREADS": "1",
        },
    }
    write_json(out / "summary.json", summary)
    return out


def write_json(file: Path, values: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values), encoding="utf-8")


def edit(file: Path, **changes: Any) -> None:
    """Change top-level values of a JSON file, as a careless or a hostile hand would."""
    write_json(file, {**json.loads(file.read_text(encoding="utf-8")), **changes})


def set_state(out: Path, cell: str, state: str, **changes: Any) -> None:
    """Give one cell another state, consistently in the summary and in its verdict."""
    edit(folder_of(out, cell) / "verdict.json", state=state, **changes)
    summary = json.loads((out / "summary.json").read_text())
    for entry in summary["cells"]:
        entry["state"] = state if entry["id"] == cell else entry["state"]
    edit(out / "summary.json", cells=summary["cells"], counts={}, verdict="")


def only_conforming(out: Path) -> None:
    """Leave only the cells that conform."""
    cells = json.loads((out / "summary.json").read_text())["cells"]
    edit(out / "summary.json", cells=[c for c in cells if c["state"] == "conforms"], counts={}, verdict="conforms")


def folder_of(out: Path, cell: str) -> Path:
    """The folder of ``cell`` in ``out``."""
    entries = json.loads((out / "summary.json").read_text(encoding="utf-8"))["cells"]
    return out / str(next(entry["folder"] for entry in entries if entry["id"] == cell))


def _cell(out: Path, cell: str, state: str, reason: str, slug: str, rng: random.Random) -> dict[str, Any]:
    scenario, model, backend, layout, precision = cell.split("/")
    folder = out / "cells" / slug
    ran = state in ("conforms", "differs", "expected_difference")
    key = f"{scenario}-{model}"
    quantities = _quantities(cell, precision, rng) if ran else []
    findings = [{**q, "max_abs": q["observed"] / 40, "where": "[17]", "hint": _hint(q)} for q in quantities if _over(q)]
    findings.sort(key=lambda f: (f["step"], STAGES.index(f["stage"])))
    stages: dict[str, dict[str, Any]] = {}
    for quantity in quantities:
        ratio = quantity["observed"] / quantity["allowed"]
        if ratio >= stages.get(quantity["stage"], {"ratio": -1})["ratio"]:
            stages[quantity["stage"]] = {**quantity, "ratio": ratio}
    for worst in stages.values():
        worst.pop("stage")
    world = math.prod(int(part[2:]) for part in layout.split(".") if part[2:].isdigit())
    seconds = round(rng.uniform(1, 4), 1) if ran else 0.4
    verdict = {
        "schema": 1,
        **{"cell": cell, "scenario": scenario, "model": model, "backend": backend, "layout": layout},
        **{"precision": precision, "world_size": world, "state": state, "reason": reason, "seconds": seconds},
        "record": "record" if ran else None,
        "oracle": f"../../oracle/{key}/float64" if ran else None,
        "reproduce": f"parity run --cells '{cell}' --out out-again",
        **{"stages": stages, "findings": findings, "quantities": quantities},
    }
    write_json(folder / "verdict.json", verdict)
    if ran:
        write_record(folder / "record", cell, _curve(model, 2e-7 if precision != "bf16" else 3e-3, rng))
        write_record(out / "oracle" / key / "float64", f"oracle of {key}", _curve(model, 0, rng))
    if state == "infrastructure":
        _write_logs(folder / "logs")
    ratios = {name: worst["ratio"] for name, worst in stages.items()}
    return {
        **{"id": cell, "state": state, "reason": reason, "world_size": world, "seconds": seconds, "ratios": ratios},
        "folder": f"cells/{slug}",
    }


def _quantities(cell: str, precision: str, rng: random.Random) -> list[dict[str, Any]]:
    allowed = ALLOWED[precision]
    found = [_one("weights", name, -1, 0.0, allowed) for name in PARAMETERS]
    for step in range(STEPS):
        found.append(_one("log-probs", "log-probs", step, allowed * rng.uniform(0.1, 0.6), allowed))
        found.append(_one("loss", "token_count", step, 0.0, 1e-9))
        found.append(_one("loss", "loss", step, rng.choice((0.0, allowed * rng.uniform(0.001, 0.3))), allowed))
        found += [_tensor(cell, "gradients", name, step, allowed, rng) for name in PARAMETERS]
        found.append(_one("gradient norm", "reported", step, allowed * rng.uniform(0.02, 0.5), allowed))
        found.append(_one("gradient norm", "reported against rebuilt", step, 1.1e-7, 1.9e-6))
        found.append(_one("clipped update", "lr", step, 0.0, 1e-9))
        moved = "weights after N steps" if step else "clipped update"
        found += [_tensor(cell, moved, name, step, allowed, rng) for name in PARAMETERS]
    return found


def _tensor(cell: str, stage: str, name: str, step: int, allowed: float, rng: random.Random) -> dict[str, Any]:
    factor = 10 ** rng.uniform(-2.5, -0.05)
    if cell == DIFFERS and name.endswith("layers.1.self_attn.o_proj.bias"):
        factor = 6.1e4 * rng.uniform(0.5, 2)
    if cell == LATE and stage == "weights after N steps" and step > 1:
        factor = rng.uniform(0.6, 3.4)
    if cell == EXPECTED and stage == "gradients" and "down_proj" in name:
        factor = rng.uniform(1.1, 6)
    return _one(stage, name, step, allowed * factor, allowed)


def _one(stage: str, tensor: str, step: int, observed: float, allowed: float) -> dict[str, Any]:
    return {"stage": stage, "tensor": tensor, "step": step, "observed": observed, "allowed": allowed}


def _over(quantity: dict[str, Any]) -> bool:
    return bool(quantity["observed"] > quantity["allowed"])


def _hint(quantity: dict[str, Any]) -> str:
    if quantity["stage"] == "gradients":
        return "Only biases after a row-parallel product differ: is the bias added once per tp rank?"
    return ""


def _curve(model: str, noise: float, rng: random.Random) -> list[dict[str, Any]]:
    start = 5.2 + len(model) / 10
    return [
        {
            **{"step": step, "loss": start * 0.82**step * (1 + noise * rng.gauss(0, 1)), "lr": 1e-3 * (1 - step / 10)},
            "grad_norm": 2.6 * 0.9**step * (1 + noise * rng.gauss(0, 1)),
            "token_count": 811 + 13 * step,
            "replicas": {"compared": 82, "differing": []},
        }
        for step in range(STEPS)
    ]


def write_record(folder: Path, cell: str, steps: list[dict[str, Any]]) -> None:
    """A record's lines, as conformance.record writes them; the tensor files are left out, no report reads them."""
    config = {"objective": "sft", "accumulation": 1, "optimizer": {"name": "adamw", "lr": 1e-3, "betas": [0.9, 0.95]}}
    lines: list[dict[str, Any]] = [
        {"type": "header", "schema": 1, "cell": cell, "scenario": config, "environment": {"torch": "2.13.0+cpu"}},
        {"type": "step", "step": -1, "tensors": {"file": "initial.safetensors", "sha256": "0"}},
        *({"type": "step", **values} for values in steps),
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    footer: dict[str, Any] = {"type": "footer", "steps": len(steps)}
    footer["sha256"] = record_digest(text.encode(), footer)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "record.jsonl").write_text(text + json.dumps(footer) + "\n", encoding="utf-8")


def _write_logs(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "rank-0.log").write_text(
        "".join(f"03:13:0{i} rank 0: waiting for rank 1 in all_reduce (32 elements, tp)\n" for i in range(8))
    )
    (folder / "rank-1.log").write_text(
        "03:13:01 rank 1: setup tp2 from weights.safetensors\n"
        "Traceback (most recent call last):\n"
        '  File "conformance/world/rank.py", line 88, in run_cell\n'
        "    backend.setup(scenario, layout, weights)\n"
        '  File "impl/megatron/strategy.py", line 141, in prepare\n'
        "    torch.distributed.broadcast(parameter, src=0, group=group)\n"
        "\x1b[31mRuntimeError: NCCL communicator was aborted on rank 1.\x1b[0m\n"
    )
