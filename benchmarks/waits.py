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
SHOWN = 3  # functions of a place, the innermost last


def waits_of(step: Callable[[], object]) -> dict[str, int]:
    """How often the host waits for the GPU while ``step`` runs, by place: the innermost Python functions around it.

    A wait is a call of CUDA's runtime that returns when the GPU has done what was asked of it before: of a stream, of
    an event, of the device, or a copy that is not asynchronous. After a copy from or to memory that is not pinned,
    PyTorch waits for the stream, unless it was told not to (``non_blocking``); then CUDA itself may wait inside of the
    copy, which is not counted.
    """
    with torch.profiler.profile(with_stack=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return dict(Counter(places(events)))


def places(events: list[dict[str, Any]]) -> list[str]:
    """The place of each wait in a Chrome trace's events; its functions are of any thread, because a backward pass has
    threads of its own, and the thread that waits for them waits inside of functions that begin earlier."""
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
