"""Sets up a backend in ranks and trains a step or two: what is exported, asked for, held in memory, and read back."""

import contextlib
import gc
import importlib
import traceback
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from conformance.backends.protocol import BackendInfo, Support, Supported, find_backend
from conformance.core.host import resolve
from conformance.data.inputs import batches_of
from conformance.numerics.float64_tier import exact_tier
from conformance.runtime import RankContext
from conformance.spec.batch import read_batches
from conformance.spec.layout import Layout
from conformance.spec.observables import POLICY
from conformance.spec.scenario import Scenario, parse_scenario


def set_up(context: RankContext, backend: str, scenario: Scenario, layout: str, models: dict[str, str]) -> Any:
    adapter: Any = find_backend(backend).load()()
    folders = {role: Path(folder) for role, folder in models.items()}
    adapter.setup(scenario, Layout.parse(layout), folders, context.device)
    return adapter


def export(
    context: RankContext,
    *,
    backend: str,
    scenario: dict[str, Any],
    layout: str,
    models: dict[str, str],
    batches: str,
    out: str,
) -> None:
    """Train a step, and export the policy as adapter and merged."""
    with exact_tier():
        adapter = set_up(context, backend, parse_scenario(scenario), layout, models)
        adapter.train_step(read_batches(Path(batches))[0], lambda _: None)
        adapter.export(Path(out) / "apart", POLICY.name)
        adapter.export_merged(Path(out) / "merged", POLICY.name)
        adapter.teardown()


class Unaware:
    """A backend that has never heard of adapters."""

    @classmethod
    def describe(cls) -> BackendInfo:
        return BackendInfo(name="unaware")

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Support:
        return Supported()


def asked_for(
    context: RankContext, *, backend: str, scenario: dict[str, Any], layout: str, models: dict[str, str]
) -> list[bool]:
    """Whether a backend that is set up asks for layers that are compiled alike; nothing is compiled."""
    asked: list[bool] = []
    trainable = importlib.import_module(f"impl.{backend}.model")
    with patch.object(trainable, "compile_layers", lambda _, *, deterministic, shipped: asked.append(deterministic)):
        set_up(context, backend, parse_scenario(scenario), layout, models).teardown()
    return asked


BUCKET_BYTES = 1_000_000_000  # from here on a storage is one of DeepSpeed's buckets, which hold no state


def held_bytes(
    context: RankContext, *, backend: str, scenario: dict[str, Any], layout: str, models: dict[str, str]
) -> dict[str, int]:
    """Bytes of the storages that training has made by the time the gradients of each trained model are ready in a
    second step, by the model's name; without DeepSpeed's buckets."""
    config = parse_scenario(scenario)
    found: dict[str, int] = {}

    def look(model: str) -> None:
        sizes = [size for storage, size in _storages().items() if storage not in before]
        found[model] = sum(size for size in sizes if size < BUCKET_BYTES)

    with exact_tier() if config.precision == "exact" else contextlib.nullcontext():
        before = _storages()
        adapter = set_up(context, backend, config, layout, models)
        batches = batches_of(config, resolve(config.model))
        adapter.train_step(batches[0], lambda _: None)
        adapter.train_step(batches[1], look)
        adapter.teardown()
    return found


def _storages() -> dict[int, int]:
    """Bytes of the storages that floating-point tensors of Python have, by address; gradients as well, but no
    activations, which have three dimensions or more."""
    gc.collect()
    sizes: dict[int, int] = {}
    activations = set()
    for one in gc.get_objects():
        if not isinstance(one, torch.Tensor):
            continue
        for tensor in (one, one.grad if one.is_leaf else None):
            local = getattr(tensor, "_local_tensor", tensor)
            if local is not None and local.device.type != "meta" and local.is_floating_point():
                storage = local.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
                if local.ndim > 2:
                    activations.add(storage.data_ptr())
    return {address: size for address, size in sizes.items() if address not in activations}


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
            own = [file for file in files[:-1] if not file.endswith(("device_placement.py", "on_cpu.py"))]
            self.count[f"{READS[func]} in {Path(own[-1]).name}"] += 1
        return func(*args, **(kwargs or {}))


def reads_of_a_step(
    context: RankContext, *, backend: str, scenario: dict[str, Any], layout: str, models: dict[str, str]
) -> dict[str, Any]:
    """The calls of a second step, and how many rows it gave, by whether rows are asked for."""
    config = parse_scenario(scenario)
    adapter = set_up(context, backend, config, layout, models)
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
