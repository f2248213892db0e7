"""Measures what a rank holds of a model in training, as a task for tests/train/test_train_memory.py."""

import contextlib
import gc
from pathlib import Path
from typing import Any

import torch

from conformance.backends.protocol import find_backend
from conformance.core.host import resolve
from conformance.data.prepare import batches_of
from conformance.numerics.float64_tier import exact_tier
from conformance.runtime import RankContext
from conformance.spec.layout import Layout
from conformance.spec.scenario import parse_scenario

BUCKET_BYTES = 1_000_000_000  # from here on a storage is one of DeepSpeed's buckets, which hold no state


def held_bytes(
    context: RankContext, *, backend: str, scenario: dict[str, Any], layout: str, models: dict[str, str]
) -> dict[str, int]:
    """Bytes of the storages that training has made by the time the gradients of each trained model are ready in a
    second step, by the model's name; without DeepSpeed's buckets."""
    config = parse_scenario(scenario)
    found: dict[str, int] = {}
    adapter: Any = find_backend(backend).load()()
    folders = {role: Path(folder) for role, folder in models.items()}

    def look(model: str) -> None:
        sizes = [size for storage, size in _storages().items() if storage not in before]
        found[model] = sum(size for size in sizes if size < BUCKET_BYTES)

    with exact_tier() if config.precision == "exact" else contextlib.nullcontext():
        before = _storages()
        adapter.setup(config, Layout.parse(layout), folders, context.device)
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
