"""Compares speed and memory of the reference backends with plain programs of the same library, on one host's GPUs.

python benchmarks/throughput.py MODEL OUT.json [--gpus 2] [--rows 4] [--rounds 3] [--in-turn] [--only fsdp2 ...]
    [--scaling-of EARLIER.json]

MODEL: a Hugging Face folder, such as benchmarks/random_model.py writes. Every program trains it in bf16 with float32
masters, activation checkpointing and clipping, on random tokens, in its own processes. Each round runs all programs
once, so that a slow minute of the machine affects all. With --in-turn, the two programs of a pair share the GPUs and
alternate their steps, so that slow minutes affect both; the GPUs need memory for both.

Prints and writes, for each pair, tokens per second and peak memory of both, and the ratios ours / plain of every round;
with --in-turn also the speed of each step of ours relative to the next plain step (of_steps, with quartiles). With
--scaling-of, also the tokens per second of a GPU relative to an earlier OUT.json of fewer GPUs, for the same backend
with smaller sizes of the same layout, such as dp2 and dp4 (by_fewer_gpus). OUT.json has the versions and GPUs of the
run. It is written after each program, or each pair in turn, so that a stopped run keeps its results. All programs train
on the same tokens; plain FSDP2 and DeepSpeed report their losses in bf16.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from timing import WARM_UP
from torch.distributed import TCPStore

from conformance.runner.earlier_run import environment

HERE = Path(__file__).parent
# By number of GPUs: backend and layout of ours, then the plain program and its layout.
ONE_GPU = (
    ("fsdp2", "dp1.ckpt", "plain_fsdp2.py", "dp1"),
    ("deepspeed", "dp1.zero2.ckpt", "plain_deepspeed.py", "dp1.zero2"),
    ("megatron", "dp1.ckpt", "plain_fsdp2.py", "dp1"),
    ("megatron", "dp1.ckpt", "plain_megatron.py", "dp1"),
)
TWO_GPUS = (
    ("fsdp2", "dp2.ckpt", "plain_fsdp2.py", "dp2"),
    ("fsdp2", "dp2.ckpt.compile", "plain_fsdp2.py", "dp2"),
    ("deepspeed", "dp2.zero1.ckpt", "plain_deepspeed.py", "dp2.zero1"),
    ("deepspeed", "dp2.zero2.ckpt", "plain_deepspeed.py", "dp2.zero2"),
    ("deepspeed", "dp2.zero2.ckpt.compile", "plain_deepspeed.py", "dp2.zero2"),
    ("deepspeed", "dp2.zero3.ckpt", "plain_deepspeed.py", "dp2.zero3"),
    ("deepspeed", "dp2.zero3.ckpt.leaf", "plain_deepspeed.py", "dp2.zero3"),
    ("deepspeed", "dp2.zero3.ckpt.compile.leaf", "plain_deepspeed.py", "dp2.zero3"),
    ("megatron", "dp2.zero1.overlap.ckpt", "plain_fsdp2.py", "dp2"),
    ("megatron", "dp2.zero1.overlap.ckpt", "plain_megatron.py", "dp2.zero1"),
    ("megatron", "tp2.ckpt", "plain_megatron.py", "tp2"),
    ("megatron", "pp2.ckpt", "plain_megatron.py", "pp2"),
    *(
        ("megatron", f"{layout}.ckpt{te}", "plain_megatron.py", f"{layout}.te")  # te needs TransformerEngine
        for layout in ("dp2.zero1.overlap", "tp2", "pp2")
        for te in ("", ".te")
    ),
)
FOUR_GPUS = (
    ("fsdp2", "dp4.ckpt", "plain_fsdp2.py", "dp4"),
    ("deepspeed", "dp4.zero2.ckpt", "plain_deepspeed.py", "dp4.zero2"),
    ("deepspeed", "dp4.zero3.ckpt", "plain_deepspeed.py", "dp4.zero3"),
    ("deepspeed", "dp4.zero3.ckpt.leaf", "plain_deepspeed.py", "dp4.zero3"),
    ("megatron", "dp4.zero1.overlap.ckpt", "plain_fsdp2.py", "dp4"),
    ("megatron", "dp2.tp2.zero1.overlap.ckpt", "plain_megatron.py", "dp2.tp2.zero1"),
    ("megatron", "dp2.tp2.zero1.overlap.ckpt", "plain_megatron.py", "dp2.tp2.zero1.overlap.te"),
)
PAIRS = {1: ONE_GPU, 2: TWO_GPUS, 4: FOUR_GPUS}
Pair = tuple[str, str, str, str]
Program = tuple[str, ...]
Both = tuple[list[dict[str, Any]], list[dict[str, Any]]]  # of the rounds of ours, and of the plain program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=2, choices=sorted(PAIRS))
    parser.add_argument("--seq", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=4, help="rows of a data rank; ranks that share rows get as many")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a program in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-turn", action="store_true", help="the steps of a pair's programs alternate")
    parser.add_argument("--only", action="append", help="pairs with this in their names, such as a backend or a layout")
    parser.add_argument("--scaling-of", type=Path, help="an OUT.json of fewer GPUs, which speeds are divided by")
    options = parser.parse_args()
    pairs = [pair for pair in PAIRS[options.gpus] if any(name in " ".join(pair) for name in options.only or [""])]
    results: dict[Pair, Both] = {pair: ([], []) for pair in pairs}
    sizes = {name: getattr(options, name) for name in ("gpus", "seq", "rows", "steps", "in_turn")}
    made_by: dict[str, Any] = {"environment": environment()}
    earlier = None
    if options.scaling_of:
        earlier = json.loads(options.scaling_of.read_text(encoding="utf-8"))
        comparable({"model": options.model.name, **sizes, **made_by}, earlier)
        made_by["scaling_of"] = {"file": options.scaling_of.name, "gpus": earlier["gpus"]}
    for number in range(options.rounds):
        for pair, of, found in one_round(pairs, options):
            results[pair][of].append(found)
            print(f"round {number + 1}: {' '.join((ours, plain)[of](pair))}: {found}", file=sys.stderr, flush=True)
            result = {
                "model": options.model.name,
                **sizes,
                **made_by,
                "pairs": [summary_of(pair, results[pair], in_turn=options.in_turn) for pair in pairs],
            }
            if earlier:
                for one in result["pairs"]:
                    one["by_fewer_gpus"] = by_fewer_gpus(one, earlier["pairs"])
            options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result, indent=1))


def ours(pair: Pair) -> Program:
    return ("ours.py", "--backend", pair[0], "--layout", pair[1])


def plain(pair: Pair) -> Program:
    return (pair[2], "--layout", pair[3])


def one_round(pairs: list[Pair], options: argparse.Namespace) -> Iterator[tuple[Pair, int, dict[str, Any]]]:
    """Runs all programs once. Yields a pair, 0 for ours or 1 for the plain program, and its measurements."""
    if options.in_turn:
        for pair in pairs:
            for of, found in enumerate(in_turn(pair, options)):
                yield pair, of, found
        return
    for program in dict.fromkeys(program for pair in pairs for program in (ours(pair), plain(pair))):
        found = run(program, options)
        for pair in pairs:
            if program in (ours(pair), plain(pair)):
                yield pair, (ours(pair), plain(pair)).index(program), found


def in_turn(pair: Pair, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs both programs of a pair with alternating steps; if one fails, the other continues alone."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def one(me: int) -> dict[str, Any]:
        try:
            return run((ours, plain)[me](pair), options, f"{store.port}:{me}")
        finally:  # a program that ended well has given all its turns
            for number in range(-1, WARM_UP + options.steps):
                store.set(f"{me}/{number}", "")

    with ThreadPoolExecutor() as pool:
        return list(pool.map(one, (0, 1)))


def run(program: Program, options: argparse.Namespace, turns: str = "") -> dict[str, Any]:
    """Returns the measurements of a program (benchmarks/timing.py), or {"failed": its error} if it failed.

    turns: TURNS of the program's environment (timing.Turns).
    """
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus))
    sizes = [f"--{name}={getattr(options, name)}" for name in ("seq", "rows", "steps")]
    command = [sys.executable, *launcher, str(HERE / program[0]), str(options.model), *program[1:], *sizes]
    environment = {"OMP_NUM_THREADS": "4", **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TURNS": turns}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("MEASURED ")]
    if done.returncode or not lines:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        return {"failed": (errors or ["no result"])[0][:300]}
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("MEASURED "))
    return found


def summary_of(pair: Pair, results: Both, *, in_turn: bool) -> dict[str, Any]:
    both = [(a, b) for a, b in zip(*results, strict=False) if "failed" not in a | b]  # one may be a round ahead
    keys = ("tokens_per_second", "fastest", "peak_gib", "host_gib")
    ratios = {key: [round(a[key] / b[key], 4) for a, b in both] for key in keys}
    if in_turn:  # a step, and the one that followed it
        ratios["of_steps"] = [round(y / x, 4) for a, b in both for x, y in zip(a["seconds"], b["seconds"], strict=True)]
    by_plain = {key: {"median": median(all_), "all": all_} for key, all_ in ratios.items() if all_}
    if len(steps := ratios.get("of_steps", ())) > 1:
        by_plain["of_steps"]["quartiles"] = quantiles(steps, n=4, method="inclusive")[::2]
    return {
        "ours": " ".join(pair[:2]),
        "plain": " ".join(pair[2:]),
        "of_ours": results[0],
        "of_plain": results[1],
        "ours_by_plain": by_plain,
    }


def comparable(result: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Checks that a file has the same measurement on fewer GPUs of the same kind. Raises SystemExit."""
    if "environment" not in earlier:
        raise SystemExit("--scaling-of: the file does not name its GPUs; give a newer one")
    cards = [{name.partition(",")[0] for name in of["environment"]["gpus"]} for of in (result, earlier)]
    different = [key for key in ("model", "seq", "rows", "in_turn") if result[key] != earlier.get(key, False)]
    if cards[0] != cards[1]:
        different.append("GPUs")
    if different or earlier["gpus"] >= result["gpus"]:
        problem = f"other {', '.join(different)}" if different else f"{earlier['gpus']} GPUs"
        raise SystemExit(f"--scaling-of: that file has {problem}; give one of fewer GPUs that is the same in all else")


def by_fewer_gpus(pair: dict[str, Any], earlier: list[dict[str, Any]]) -> dict[str, float]:
    """Returns for both programs of a pair the tokens per second of a GPU in the median round, relative to the earlier
    program with the same backend and the same layout of other sizes, if there is one."""
    found = {}
    for side, name in (("of_ours", "ours"), ("of_plain", "plain")):
        before = [one for other in earlier if kind(other[name]) == kind(pair[name]) for one in other[side]]
        speeds = [[one["tokens_per_second"] for one in runs if "failed" not in one] for runs in (pair[side], before)]
        if all(speeds):
            found[name] = round(median(speeds[0]) / median(speeds[1]), 4)
    return found


def kind(program: str) -> str:
    """Returns a program's name without the sizes of the axes: "fsdp2 dp4.ckpt" is "fsdp2 dp.ckpt"; zero2 stays."""
    return re.sub(r"\b(dp|tp|pp)\d+", r"\1", program)


if __name__ == "__main__":
    main()
