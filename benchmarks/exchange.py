"""Resumes a training of FSDP2 in Megatron and then in DeepSpeed, and measures memory and seconds.

python benchmarks/exchange.py MODEL OUT [--device cuda] [--precision exact] [--steps 2] [--rows 4] [--max-len 512]

Each backend has two ranks in fresh processes. FSDP2 dp2 trains, exports and continues to the end; Megatron tp2 resumes
from its state, and DeepSpeed dp2.zero2 from Megatron's. Both export the imported state at once, which has to be bitwise
equal. Losses and gradient norms of each step, and the final masters and moments, are compared with FSDP2's. Documents
are random tokens. Prints JSON; exits with 1 if an imported state differs, and in the exact tier if a loss or norm is
further from FSDP2's than the tier allows.
"""

import argparse
import contextlib
import ctypes
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from conformance.backends.protocol import find_backend
from conformance.core.host import FIXTURES
from conformance.judge.tolerance import EXACT
from conformance.numerics.float64_tier import exact_tier
from conformance.spec.batch import Batch, Document, Row, read_batches, write_batches
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario, load_scenario, parse_scenario, scenario_to_json

LEGS = (("fsdp2", "dp2"), ("megatron", "tp2"), ("deepspeed", "dp2.zero2"))
RANKS = 2
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, help="Hugging Face folder; Python code in it is run")
    parser.add_argument("out", type=Path, help="new folder; up to three training states at a time")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", default="exact", choices=("exact", "fp32", "bf16"))
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of each backend")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--max-len", type=int, default=512)
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    result = exchange(options)
    print(json.dumps(result, indent=1))
    sys.exit(0 if result["imported_is_exported"] and result["goes_on_alike"] is not False else 1)


def exchange(options: argparse.Namespace) -> dict[str, Any]:
    out, steps = options.out, options.steps
    write_batches(out / "batches", random_batches(options))
    scenario = load_scenario(
        FIXTURES / "scenarios" / "sft-padded.toml",
        model=str(options.model.resolve()),
        precision=options.precision,
        steps=len(LEGS) * steps,
        trust_remote_code=True,
        optimizer={"name": "adamw", "lr": 1e-4, "weight_decay": 0.1, "eps": 1e-8, "max_grad_norm": 1.0},
    )
    common = {"scenario": scenario_to_json(scenario), "batches": str(out / "batches"), "device": options.device}
    alone: list[dict[str, Any]] = []
    legs: dict[str, Any] = {}
    for number, (backend, layout) in enumerate(LEGS):
        begun, ended = out / f"state-{number}", out / f"state-{number + 1}"
        exports = {(number + 1) * steps: ended}
        if number == 0:
            exports[len(LEGS) * steps] = out / "alone"
        else:
            exports[number * steps] = out / "again"
        measured = run_leg(
            out / f"leg-{number}.json",
            {
                **common,
                "backend": backend,
                "layout": layout,
                "begin": str(begun) if number else None,
                "first": number * steps,
                "last": max(exports),
                "exports": {step: str(folder) for step, folder in exports.items()},
            },
        )
        legs[f"{backend} {layout}"] = measured
        if number == 0:
            alone = measured["steps"]
        else:
            measured["imported"] = differences(begun, out / "again")
            shutil.rmtree(out / "again")
            shutil.rmtree(begun)
            measured["from_alone"] = {
                name: max(relative(own[name], alone[own["step"]][name]) for own in measured["steps"])
                for name in ("loss", "grad_norm")
            }
    resumed = [of_leg for of_leg in legs.values() if "imported" in of_leg]
    furthest = max(error for of_leg in resumed for error in of_leg["from_alone"].values())
    return {
        "precision": options.precision,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "state_gib": round(sum(file.stat().st_size for file in (out / "alone").rglob("*.safetensors")) / GIB, 2),
        "imported_is_exported": not any(error for of_leg in resumed for error in of_leg["imported"].values()),
        "goes_on_alike": furthest <= EXACT if options.precision == "exact" else None,
        "at_the_end": differences(out / "alone", out / f"state-{len(LEGS)}"),
        "legs": legs,
    }


def random_batches(options: argparse.Namespace) -> list[Batch]:
    """Makes rows of one document of ``max_len`` random tokens; all tokens but the first are targets."""
    vocabulary = json.loads((options.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    numbers, length = random.Random(0), options.max_len
    targets = (False, *(True,) * (length - 1))

    def row(index: int) -> Row:
        return Row(index, (Document(tuple(numbers.choices(range(vocabulary), k=length)), targets),))

    return [
        Batch(step=step, max_len=length, rows=tuple(map(row, range(options.rows))))
        for step in range(len(LEGS) * options.steps)
    ]


def run_leg(path: Path, arguments: dict[str, Any]) -> Any:
    """Runs ``leg`` in fresh ranks; returns seconds and memory by section, and the losses and norms of each step."""
    path.write_text(json.dumps(arguments), encoding="utf-8")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    command = [sys.executable, *launcher, __file__, "--leg", str(path)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)  # libraries print, and the result is JSON
    return json.loads(path.with_suffix(".told").read_text(encoding="utf-8"))


def leg(path: Path) -> None:
    """Sets up, imports a state, trains and exports in one rank; rank 0 writes the measurements beside ``path``."""
    of = json.loads(path.read_text(encoding="utf-8"))
    scenario, device = parse_scenario(of["scenario"]), of["device"]
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    with exact_tier() if scenario.precision == "exact" else contextlib.nullcontext():
        phases, steps = train(of, scenario, device)
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, phases)
    if dist.get_rank() == 0:
        measured = {
            name: {"seconds": seconds, "peak_host_gib": [phases[name][1] for phases in every]}
            for name, (seconds, _) in phases.items()
        }
        path.with_suffix(".told").write_text(json.dumps({"phases": measured, "steps": steps}), encoding="utf-8")
    dist.destroy_process_group()


def train(of: dict[str, Any], scenario: Scenario, device: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Trains one phase; returns seconds and GiB of host memory by section, and loss and norm by step."""
    backend: Any = find_backend(of["backend"]).load()()
    phases, steps = {}, []

    @contextlib.contextmanager
    def measured(name: str) -> Iterator[None]:
        give_back()
        dist.barrier()
        began = time.perf_counter()
        yield
        dist.barrier()
        phases[name] = round(time.perf_counter() - began, 2), round(peak() / GIB, 2)

    with measured("setup"):
        backend.setup(scenario, Layout.parse(of["layout"]), {"policy": Path(scenario.model)}, device)
    if of["begin"]:
        with measured("import"):
            backend.import_state(Path(of["begin"]))
    batches = read_batches(Path(of["batches"]))
    for step in range(of["first"], of["last"] + 1):
        if str(step) in of["exports"]:
            with measured(f"export at {step}"):
                backend.export_state(Path(of["exports"][str(step)]))
        if step < of["last"]:
            with measured(f"step {step}"):
                values = backend.train_step(batches[step], lambda model: None).values
            steps.append({"step": step, "loss": values["loss"], "grad_norm": values["grad_norm"]})
    backend.teardown()
    return phases, steps


def differences(one: Path, other: Path) -> dict[str, float]:
    """Returns by kind the largest difference of a tensor in two training states, relative to its largest value.

    Infinite if the difference is not finite.
    """
    found: dict[str, float] = {}
    folders = sorted({file.parent for file in (one / "checkpoint").rglob("*.safetensors")})
    assert folders, f"{one} has no training state"
    for folder in folders:
        twin = other / folder.relative_to(one)
        with tensors(folder) as these, tensors(twin) as those:
            assert these.keys() == those.keys(), f"{folder} and {twin} have other tensors"
            for name, read in these.items():
                a, b = read(name), those[name](name)
                assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{name} has another dtype or shape in {twin}"
                error = 0.0 if torch.equal(a, b) else float((a - b).abs().max() / a.abs().max())
                found[folder.name] = max(found.get(folder.name, 0.0), error if math.isfinite(error) else math.inf)
    return found


@contextlib.contextmanager
def tensors(folder: Path) -> Iterator[dict[str, Callable[[str], torch.Tensor]]]:
    """Yields a reader for every tensor in a folder, by name."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in folder.glob("*.safetensors")]
        yield {name: file.get_tensor for file in files for name in file.keys()}  # noqa: SIM118


def relative(one: float, other: float) -> float:
    """Returns the relative error of ``one`` to ``other``; infinite if one of them is not finite."""
    error = abs(one - other) / abs(other)
    return error if math.isfinite(error) else math.inf


def give_back() -> None:
    """Makes glibc return freed memory at once, and restarts the count of the largest resident memory; see proc(5)."""
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak() -> int:
    """Returns the largest resident memory of this process since ``give_back``, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text("ascii").splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    leg(Path(sys.argv[2])) if sys.argv[1] == "--leg" else main()
