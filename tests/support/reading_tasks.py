"""Counts the reads from the device in a step, as a task for tests/runner/test_step_reads.py."""

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from conformance.backends.protocol import find_backend
from conformance.core.host import resolve
from conformance.data.prepare import batches_of
from conformance.runtime import RankContext
from conformance.spec.layout import Layout
from conformance.spec.scenario import parse_scenario

READS = {getattr(Tensor, name): name for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")}
# AdamW is one kernel on GPUs, the plain kernels of rings are for CPUs alone, and starts of documents are on the CPU.
NOT_OF_THE_DEVICE = (
    *("torch/optim/adam.py", "impl/context_parallel/reference_kernel.py"),
    *("ring_flash_attn/llama3_flash_attn_varlen.py", "impl/context_parallel/ring_attention.py"),
)


class Reads(TorchFunctionMode):
    """Counts what makes a program wait for a GPU: each call that gives Python the numbers of a tensor.

    count: of all calls, by their name and the file that makes them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        files = [frame.filename for frame in traceback.extract_stack(limit=8)]
        if func in READS and not any(file.endswith(NOT_OF_THE_DEVICE) for file in files):
            own = [file for file in files[:-1] if not file.endswith("impl/megatron/device_placement.py")]
            self.count[f"{READS[func]} in {Path(own[-1]).name}"] += 1
        return func(*args, **(kwargs or {}))


def reads_of_a_step(
    context: RankContext, *, backend: str, scenario: dict[str, Any], layout: str, models: dict[str, str]
) -> dict[str, Any]:
    """The calls of a second step, and how many rows it gave, by whether rows are asked for."""
    config = parse_scenario(scenario)
    adapter: Any = find_backend(backend).load()()
    folders = {role: Path(folder) for role, folder in models.items()}
    adapter.setup(config, Layout.parse(layout), folders, context.device)
    batches = batches_of(config, resolve(config.model))
    found = {}
    adapter.train_step(batches[0], lambda _: None)
    for with_rows in (True, False):
        adapter.with_rows = with_rows
        with Reads() as reads:
            metrics = adapter.train_step(batches[1], lambda _: None)
        found[str(with_rows)] = [dict(reads.count), sum(map(len, metrics.rows.values()))]
    adapter.teardown()
    return found
