"""Measures training steps and makes random tokens, for every program of benchmarks/throughput.py."""

import argparse
import gc
import json
import os
import resource
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from waits import waits_of

GIB = 2**30
WARM_UP = 4  # steps
BATCHES = 3  # steps with tokens of their own
DENSE_BF16_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # of NVIDIA's data sheets, without sparsity


def parse(description: str | None) -> argparse.Namespace:
    """Parses the options of a program that trains a folder's model on rows of random tokens."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("--seq", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=4, help="rows of a data rank in a step")
    parser.add_argument("--steps", type=int, default=8, help=f"timed steps, after {WARM_UP} steps of warm-up")
    parser.add_argument("--layout", default="dp2", help="of ours; of plain DeepSpeed its stage counts")
    parser.add_argument("--backend", default="fsdp2", help="of ours")
    parser.add_argument("--profile", type=Path, help="write a Chrome trace of one more step there")
    parser.add_argument("--waits", action="store_true", help="tell where the host waits for the GPU in one more step")
    return parser.parse_args()


def random_rows(vocabulary: int, *, rows: int, seq: int, step: int, rank: int) -> torch.Tensor:
    """Returns the random tokens of a data rank in a step, int64 (rows, seq); they repeat after BATCHES steps."""
    generator = torch.Generator().manual_seed(BATCHES * rank + step % BATCHES)
    return torch.randint(0, vocabulary, (rows, seq), generator=generator)


def measure(step: Callable[[int], float], *, options: argparse.Namespace, data_ranks: int) -> None:
    """Times ``step(number)``, which returns the loss, and prints the measurements as a line of JSON on rank 0.

    Speeds and seconds are those of the slowest rank. tokens_per_second: of one GPU in the median step, which other work
    on the machine affects less than the mean. fastest: the same of the fastest step. seconds: of every step, which ends
    when its loss is read, or with --in-turn when the GPU is done. mfu: model floating-point operations (6 per parameter
    outside of the embedding and token, and attention's 6 x layers x hidden x seq per token, without recomputation)
    divided by the GPU's dense bf16 peak. peak_gib: peak memory of tensors on a GPU. host_gib: largest resident memory
    of a rank.
    """
    turns = Turns()
    for number in range(WARM_UP):
        turns.take(number)
        step(number)
        if number == WARM_UP - 1:
            gc.collect()
            gc.freeze()  # a full collection takes 0.2 s, and would affect the timed steps of only some programs
            torch.cuda.reset_peak_memory_stats()
            _wait()
        turns.give(number)
    seconds, loss = list[float](), 0.0
    for number in range(WARM_UP, WARM_UP + options.steps):
        turns.take(number)
        began = time.perf_counter()
        loss = step(number)
        if turns.store:  # an update may continue after the loss is known, but not in the other program's turn
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        turns.give(number)
    turns.end(WARM_UP + options.steps)
    tokens = options.rows * options.seq * data_ranks / dist.get_world_size()
    own = {
        "tokens_per_second": round(tokens / median(seconds)),
        "fastest": round(tokens / min(seconds)),
        "mfu": round(_operations(options) * tokens / median(seconds) / _peak_operations(), 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
        "host_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 2),
        "seconds": [round(one, 4) for one in seconds],
        "loss": loss,
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    if dist.get_rank() == 0:
        print("MEASURED", json.dumps(of_all_ranks(every)), flush=True)
    if options.profile:
        _profile(step, options.profile)
    if options.waits:
        waits = waits_of(lambda: step(WARM_UP))
        if dist.get_rank() == 0:
            print("WAITS", json.dumps(waits), flush=True)


def of_all_ranks(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combines the measurements of all ranks: the speeds and seconds of the slowest, for which all others wait, and the
    largest memory."""
    slowest = min(every, key=lambda one: one["tokens_per_second"])
    memory = {key: max(one[key] for one in every) for key in ("peak_gib", "host_gib")}
    # In plain Megatron, only the last pipeline stage knows the loss.
    return {**slowest, **memory, "loss": every[0]["loss"] or every[-1]["loss"]}


class Turns:
    """Alternates the steps of two programs that share the GPUs, under throughput.py --in-turn; does nothing otherwise.

    TURNS in the environment is the port of a store on this host, a colon, and the number of this program: 0, whose step
    comes first, or 1. A program that has waited for ten minutes fails.
    """

    def __init__(self) -> None:
        port, _, me = os.environ.get("TURNS", "").partition(":")
        self.me = int(me or 0)
        self.store = dist.TCPStore("127.0.0.1", int(port), timeout=timedelta(minutes=10)) if port else None
        self.give(-1)  # the second program is ready

    def take(self, number: int) -> None:
        if self.store:
            self.store.wait([f"{1 - self.me}/{number + self.me - 1}"])

    def give(self, number: int) -> None:
        if self.store:
            _wait()
            if dist.get_rank() == 0:
                self.store.set(f"{self.me}/{number}", "")

    def end(self, number: int) -> None:
        """Waits, after ``number`` steps, for the other program's last step, so that ending does not slow it."""
        if self.me == 0:
            self.take(number)


def _profile(step: Callable[[int], float], path: Path) -> None:
    with torch.profiler.profile() as profiler:
        step(WARM_UP)
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(str(path))


def _wait() -> None:
    torch.cuda.synchronize()
    dist.barrier()


def _operations(options: argparse.Namespace) -> float:
    """Returns the floating-point operations for a token, forward and backward."""
    config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    hidden, layers, heads = (config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    each = config.get("head_dim") or hidden // heads
    attention = 2 * hidden * each * (heads + config["num_key_value_heads"])
    numbers = layers * (attention + 3 * hidden * config["intermediate_size"]) + config["vocab_size"] * hidden
    return float(6 * numbers + 6 * layers * hidden * options.seq)


def _peak_operations() -> float:
    name = torch.cuda.get_device_name()
    return next((flops for key, flops in DENSE_BF16_FLOPS.items() if key in name), float("nan"))
