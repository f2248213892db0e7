"""Trains the same cells under variations, and compares every recorded tensor bit by bit with that of a first run.

python benchmarks/determinism.py OUT [--device cuda] [--ranks N] [--precisions P,...] [--only NAME ...]

A variation changes one thing: nothing (run to run), the cells that ran in the same processes before, a restart from a
checkpoint, an option of the layout, or an environment variable of all ranks. Each is one ``parity run``, which judges
its cells against the oracle. Prints a Markdown table, which docs/measurements/determinism.md holds, and writes
OUT/determinism.json.

Exit status: 1 if a cell does not conform, or differs where its library promises the same bits; 2 if OUT is not empty,
or a run cannot be judged, or nothing was compared; else 0.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from conformance.records.step_tensors import Record, read_record
from conformance.results.run_results import VERDICT, read_entry

SCENARIO, MODEL = "sft-warmup", "llama"  # five steps with a schedule, clipping and AdamW
CELLS = {"fsdp2": "", "deepspeed": "zero2", "megatron": ""}  # options beside dp
TORCH = "torch.use_deterministic_algorithms"  # https://docs.pytorch.org/docs/stable/notes/randomness.html
RING = "Megatron's deterministic mode"  # https://docs.nvidia.com/megatron-core/developer-guide/nightly/user-guide/deterministic-training.html


@dataclass(frozen=True, kw_only=True)
class Variation:
    """Describes a run. options: added to the layouts of a backend, which has no cell in this run if it is not named.
    promise: who promises the same bits outside of half precision; empty: nobody."""

    name: str
    device: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(CELLS, ""))
    beside: bool = False
    resumes: bool = False
    promise: str = ""


FIRST = Variation(name="first run")
VARIATIONS = (
    Variation(name="run to run", promise=TORCH),
    Variation(name="after other cells in the same processes", beside=True, promise=TORCH),
    Variation(name="after a restart from its own checkpoint at step 2", resumes=True),
    Variation(name="activations recomputed", options=dict.fromkeys(CELLS, "ckpt")),
    Variation(name="communication overlapped", options={"megatron": "overlap"}),
    Variation(name="layers compiled", options={"fsdp2": "compile"}),
    Variation(name="kernels without AVX", device="cpu", environment={"ATEN_CPU_CAPABILITY": "default"}),
    Variation(name="NCCL_ALGO=Ring", device="cuda", environment={"NCCL_ALGO": "Ring"}),
    # NCCL gathers and scatters by rings only, and refuses Tree for these.
    Variation(name="NCCL_ALGO=Ring;allreduce:Tree", device="cuda", environment={"NCCL_ALGO": "Ring;allreduce:Tree"}),
    Variation(name="NCCL_ALGO=Ring, again", device="cuda", environment={"NCCL_ALGO": "Ring"}, promise=RING),
    *(
        Variation(name=f"NCCL_PROTO={one}", device="cuda", environment={"NCCL_PROTO": one})
        for one in ("Simple", "LL", "LL128")
    ),
)
AGAINST = {"NCCL_ALGO=Ring, again": "NCCL_ALGO=Ring"}  # else the first run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--backends", default=",".join(CELLS))
    parser.add_argument("--only", nargs="*", default=[], help="these variations, by the beginning of their names")
    options = parser.parse_args()
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"{options.out} is not empty; give a new folder")
    rows: list[dict[str, object]] = []
    for variation in (FIRST, *VARIATIONS):
        wanted = not options.only or any(variation.name.startswith(name) for name in options.only)
        if variation is not FIRST and (not wanted or variation.device not in ("", options.device)):
            continue
        if (code := run(variation, options)) not in (0, 1):
            log = options.out / f"{_folder(variation.name)}.log"
            parser.error(f"{variation.name}: parity run ended with {code}; {log} says why")
        if variation is not FIRST:
            base = options.out / _folder(AGAINST.get(variation.name, FIRST.name))
            rows += compared(variation, base, options.out / _folder(variation.name))
            (options.out / "determinism.json").write_text(json.dumps(rows, indent=1))
    print(to_markdown(rows))
    if not rows or any(row["state"] == "conforms" and not row["tensors"] for row in rows):
        parser.error("nothing was compared in some variations; choose others with --only")
    broken = [row for row in rows if row["state"] != "conforms" or (row["promise"] and row["differing"])]
    if broken:
        print(f"{len(broken)} cells do not conform, or differ against a promise", file=sys.stderr)
    return bool(broken)


def run(variation: Variation, options: argparse.Namespace) -> int:
    """Runs the cells of a variation with ``parity run``, whose log is beside its folder; returns its exit code."""
    out = options.out / _folder(variation.name)
    options.out.mkdir(parents=True, exist_ok=True)
    profile = out.with_suffix(".toml")
    profile.write_text(profile_of(variation, options))
    command = [sys.executable, "-m", "conformance.cli.main", "run", "--profile", str(profile), "--keep", "all"]
    command += ["--no-bisect", "--device", options.device, "--workers", "1", "--out", str(out)]
    with out.with_suffix(".log").open("w") as log:
        done = subprocess.run(command, env=os.environ | variation.environment, stdout=log, stderr=log, check=False)
    return done.returncode


def profile_of(variation: Variation, options: argparse.Namespace) -> str:
    """Returns a profile with the cells of a variation; cells that run before them have other models and layouts."""
    precisions = json.dumps(options.precisions.split(","))
    lines = [
        f'description = "determinism: {variation.name}"',
        '[programs]\ncheckpoint = [{ steps = 2, save = "checkpoint" }, {}]',
    ]
    for backend in options.backends.split(","):
        own = [f"dp{options.ranks}", *filter(None, (CELLS[backend], variation.options.get(backend, "")))]
        if variation.beside:
            lines.append(cells(backend, "qwen3", f"dp{options.ranks}", precisions, scenario="sft-padded"))
        if backend in variation.options:
            more = 'program = "checkpoint"' if variation.resumes else ""
            lines.append(cells(backend, MODEL, ".".join(own), precisions, more=more))
    return "\n".join(lines)


def cells(backend: str, model: str, layout: str, precisions: str, *, scenario: str = SCENARIO, more: str = "") -> str:
    return (
        f'[[cells]]\nbackends = ["{backend}"]\nscenarios = ["{scenario}"]\nmodels = ["{model}"]\n'
        f'layouts = ["{layout}"]\nprecisions = {precisions}\n{more}\n'
    )


def compared(variation: Variation, base: Path, out: Path) -> Iterator[dict[str, object]]:
    """Yields a row for each cell of the variation, with what differs from the cell of its backend and precision in
    ``base``."""
    first = dict(records_of(base))
    for (backend, precision), (state, phases) in sorted(dict(records_of(out)).items()):
        row = {"variation": variation.name, "backend": backend, "precision": precision, "state": state}
        promise = variation.promise if precision in ("exact", "fp32") else ""
        tensors = differing = 0
        largest = 0.0
        if (backend, precision) in first and phases and first[backend, precision][1]:
            known = {step.step: step for phase in first[backend, precision][1] for step in phase.steps}
            for step in (step for phase in phases for step in phase.steps):
                of_first = known[step.step].tensors()
                # Weights are read at a few steps, which nobody knows in advance, so not in all runs at the same.
                both = {name: tensor for name, tensor in step.tensors().items() if name in of_first}
                tensors += len(both)
                for name, tensor in both.items():
                    if not torch.equal(tensor, of_first[name]):
                        differing += 1
                        error = (tensor.double() - of_first[name].double()).norm() / of_first[name].double().norm()
                        largest = max(largest, float(error))
        yield {**row, "promise": promise, "tensors": tensors, "differing": differing, "largest": largest}


def records_of(out: Path) -> Iterator[tuple[tuple[str, str], tuple[str, list[Record]]]]:
    """Yields state and records of each cell of ``MODEL``, by backend and precision."""
    for file in sorted(out.glob(f"cells/*/{VERDICT}")):
        entry = read_entry(file)
        _, model, backend, _, precision = str(entry.cell).split("/")[:5]
        if model == MODEL:
            phases = [read_record(folder) for folder in sorted(file.parent.glob("legs/*/record"))]
            yield (backend, precision), (entry.verdict.state, phases)


def to_markdown(rows: list[dict[str, object]]) -> str:
    """Returns a table with a row for each variation, and a column for each backend."""
    backends = sorted({str(row["backend"]) for row in rows})
    lines = [f"| variation | same bits promised by | {' | '.join(backends)} |", "|---|---|" + "---|" * len(backends)]
    for name in dict.fromkeys(str(row["variation"]) for row in rows):
        own = [row for row in rows if row["variation"] == name]
        promise = next(
            (f"{row['promise']} (on GPUs, not in half precision)" for row in own if row["promise"]), "nobody"
        )
        seen = ["; ".join(map(_seen, (row for row in own if row["backend"] == backend))) for backend in backends]
        lines.append(f"| {name} | {promise} | {' | '.join(seen)} |")
    return "\n".join(lines)


def _seen(row: dict[str, object]) -> str:
    if row["state"] != "conforms" or not row["tensors"]:
        return f"{row['precision']}: {row['state']}"
    differ = f"{row['differing']} of {row['tensors']} tensors differ, by {row['largest']:.0e} at most"
    return f"{row['precision']}: {differ if row['differing'] else 'same bits'}"


def _folder(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


if __name__ == "__main__":
    sys.exit(main())
