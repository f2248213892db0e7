"""Speed and memory of the reference backends beside plain programs of the same library, on the GPUs of one host.

python benchmarks/throughput.py MODEL OUT.json [--gpus 2] [--seq 4096] [--rows 4] [--rounds 3] [--only fsdp2 ...]

MODEL: a Hugging Face folder, such as benchmarks/random_model.py writes. Every program trains it in bf16 with float32
masters, activation checkpointing and clipping, on random tokens, in processes of its own; each round runs all of them
once, so that a slow minute of the machine meets all alike. Prints and writes, for each pair, tokens per second and
peak memory of both, and the ratios ours / plain of every round. OUT.json is written after each program, so that a run
which is stopped loses none of them, with the versions and GPUs of the run. All programs train on the same tokens; those
of plain FSDP2 and DeepSpeed give their losses in bf16.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from conformance.run.environment import environment

HERE = Path(__file__).parent
# By the number of GPUs: ours (backend, layout) beside the plain program, its layout.
ONE_GPU = (
    ("fsdp2", "dp1.ckpt", "plain_fsdp2.py", "dp1"),
    ("deepspeed", "dp1.zero2.ckpt", "plain_deepspeed.py", "dp1.zero2"),
    ("megatron", "dp1.ckpt", "plain_fsdp2.py", "dp1"),
    ("megatron", "dp1.ckpt", "plain_megatron.py", "dp1"),
)
TWO_GPUS = (
    ("fsdp2", "dp2.ckpt", "plain_fsdp2.py", "dp2"),
    ("fsdp2", "dp2.ckpt.compile", "plain_fsdp2.py", "dp2"),
    ("deepspeed", "dp2.zero2.ckpt", "plain_deepspeed.py", "dp2.zero2"),
    ("deepspeed", "dp2.zero2.ckpt.compile", "plain_deepspeed.py", "dp2.zero2"),
    ("deepspeed", "dp2.zero3.ckpt", "plain_deepspeed.py", "dp2.zero3"),
    ("deepspeed", "dp2.zero3.ckpt.leaf", "plain_deepspeed.py", "dp2.zero3"),
    ("deepspeed", "dp2.zero3.ckpt.compile.leaf", "plain_deepspeed.py", "dp2.zero3"),
    ("megatron", "dp2.zero1.overlap.ckpt", "plain_fsdp2.py", "dp2"),
    ("megatron", "dp2.zero1.overlap.ckpt", "plain_megatron.py", "dp2.zero1"),
    ("megatron", "tp2.ckpt", "plain_megatron.py", "tp2"),
)
FOUR_GPUS = (
    ("fsdp2", "dp4.ckpt", "plain_fsdp2.py", "dp4"),
    ("deepspeed", "dp4.zero2.ckpt", "plain_deepspeed.py", "dp4.zero2"),
    ("deepspeed", "dp4.zero3.ckpt", "plain_deepspeed.py", "dp4.zero3"),
    ("deepspeed", "dp4.zero3.ckpt.leaf", "plain_deepspeed.py", "dp4.zero3"),
    ("megatron", "dp4.zero1.overlap.ckpt", "plain_fsdp2.py", "dp4"),
    ("megatron", "dp2.tp2.zero1.overlap.ckpt", "plain_megatron.py", "dp2.tp2.zero1"),
)
PAIRS = {1: ONE_GPU, 2: TWO_GPUS, 4: FOUR_GPUS}
Program = tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=2, choices=sorted(PAIRS))
    parser.add_argument("--seq", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=4, help="rows of a data rank; ranks that share rows get as many")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a program in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", help="pairs with this in their names, such as a backend or a layout")
    options = parser.parse_args()
    pairs = [pair for pair in PAIRS[options.gpus] if any(name in " ".join(pair) for name in options.only or [""])]
    programs = dict.fromkeys(program for pair in pairs for program in (ours(pair), plain(pair)))
    seen: dict[Program, list[dict[str, Any]]] = {program: [] for program in programs}
    sizes = {name: getattr(options, name) for name in ("gpus", "seq", "rows", "steps")}
    made_by = {"environment": environment()}
    for number in range(options.rounds):
        for program in programs:
            seen[program].append(run(program, options))
            print(f"round {number + 1}: {' '.join(program)}: {seen[program][-1]}", file=sys.stderr, flush=True)
            result = {"model": options.model.name, **sizes, **made_by, "pairs": [told(pair, seen) for pair in pairs]}
            options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result, indent=1))


def ours(pair: tuple[str, str, str, str]) -> Program:
    return ("ours.py", "--backend", pair[0], "--layout", pair[1])


def plain(pair: tuple[str, str, str, str]) -> Program:
    return (pair[2], "--layout", pair[3])


def run(program: Program, options: argparse.Namespace) -> dict[str, Any]:
    """What the first rank of a program has measured (benchmarks/timing.py); {"failed": its last line} if it failed."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus))
    sizes = [f"--{name}={getattr(options, name)}" for name in ("seq", "rows", "steps")]
    command = [sys.executable, *launcher, str(HERE / program[0]), str(options.model), *program[1:], *sizes]
    environment = {"OMP_NUM_THREADS": "4", **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("MEASURED ")]
    if done.returncode or not lines:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        return {"failed": (errors or ["no result"])[0][:300]}
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("MEASURED "))
    return found


def told(pair: tuple[str, str, str, str], seen: dict[Program, list[dict[str, Any]]]) -> dict[str, Any]:
    mine, other = seen[ours(pair)], seen[plain(pair)]
    both = [(a, b) for a, b in zip(mine, other, strict=False) if "failed" not in a | b]  # one may be a round ahead
    keys = ("tokens_per_second", "fastest", "peak_gib", "host_gib")
    ratios = {key: [round(a[key] / b[key], 4) for a, b in both] for key in keys}
    return {
        "ours": " ".join(pair[:2]),
        "plain": " ".join(pair[2:]),
        "of_ours": mine,
        "of_plain": other,
        "ours_by_plain": {key: {"median": median(all_), "all": all_} for key, all_ in ratios.items() if all_},
    }


if __name__ == "__main__":
    main()
