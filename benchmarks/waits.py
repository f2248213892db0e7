"""Counts how often the host waits for the GPU during a step, and where: each such wait empties the GPU's queue."""

import json
import re
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
SHOWN = 3  # functions of a location, the innermost last


def waits_of(step: Callable[[], object]) -> dict[str, int]:
    """Counts by code location (the innermost Python functions) how often the host waits for the GPU during ``step``.

    A wait is a call of CUDA's runtime that returns when the GPU has done earlier work: of a stream, of an event, of the
    device, or a synchronous copy. After a copy from or to memory that is not pinned, PyTorch waits for the stream,
    unless the copy is ``non_blocking``; then CUDA itself may wait inside the copy, which is not counted.
    """
    with torch.profiler.profile(with_stack=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return dict(Counter(places(events)))


def places(events: list[dict[str, Any]]) -> list[str]:
    """Returns the code location of each wait in a Chrome trace's events. It includes functions of any thread, because a
    backward pass has its own threads, and the thread that started it waits inside functions that began earlier."""
    functions = sorted(
        (event for event in events if event.get("cat") == "python_function"), key=lambda event: event["ts"]
    )
    begins = [function["ts"] for function in functions]
    found = []
    for event in events:
        if event.get("cat") != "cuda_runtime" or event["name"] not in WAITS:
            continue
        before = functions[: bisect_right(begins, event["ts"])]
        around = [one["name"] for one in before if one["ts"] + one["dur"] >= event["ts"] + event["dur"]]
        if any("torch/profiler/" in name for name in around):
            continue  # the profiler's own
        named = [re.sub(r"\.py\(\d+\):", ".py:", name) for name in around if ".py(" in name]
        found.append(" > ".join(named[-SHOWN:]) + f" [{event['name']}]")
    return found
