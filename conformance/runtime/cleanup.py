"""Frees the resources that a task left in a rank, and reports those that it could not free.

Device meshes and Megatron's parallel state never destroy their process groups, and each group keeps threads and
sockets. So the clean-up destroys every group except WORLD. A destroyed group lives on while objects of the task
reference it, for example a model in a cycle through its autograd graph, which Python does not see. Each gloo group has
threads with a name of their own, so such groups are counted exactly, and a single one is a leak.

Other threads belong to pools of libraries, or are leaks. A pool starts once, at its first use, with as many threads as
there are processors or devices; a leak repeats. So the first growth beyond the allowance counts as a pool, and any
later growth as a leak. If anything leaks, the worker group is retired.

Memory that is not freed is measured as well. oneDNN keeps a compiled kernel for each shape of a matrix product in half
precision, 0.7 MiB each on a CPU with AMX. Experts have other shapes at every step, and nothing empties this cache, so a
worker group whose ranks keep much memory is retired. On a GPU torch returns a block of memory when all of it is free;
cuBLAS's workspaces, which torch puts into any block with space, would keep that block for ever.

Three leftovers of a destroyed group have harmed the next task: DTensor's caches return an equal mesh of an earlier
task; the meshes in these caches keep their groups, and thus threads, alive; and a group with the same name as an
earlier group finds the addresses of the earlier group in the store.
"""

import contextlib
import ctypes
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from conformance.core.process import open_files, thread_count, threads_called


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """Counts the resources of a rank after a clean-up.

    undead: gloo groups that were destroyed and live on. open_on: see conformance.core.process.open_files.
    """

    groups: int
    undead: int
    fds: int
    threads: int
    open_on: Counter[str] = field(default_factory=Counter)


# Growth since the first clean-up that does not count as a leak: libraries open some resources at their first use (a
# device, a log). Leaks are far larger: Megatron's parallel state left 17 groups, 75 descriptors and 51 threads a task.
ALLOWANCE = Holdings(groups=0, undead=0, fds=16, threads=8)
_MIN_REPORTED = 4  # new descriptors of a kind that a message names; a task's logs are fewer
_GLOO_THREAD, _THREADS_PER_GROUP = "pt_gloo_runloop", 2  # they run a group's collectives
SETTLE_S = 2.0  # limit of the wait for threads of destroyed groups, which end with a delay on a loaded machine
_TICK_S = 0.01
# Importing these takes a second, so they are only imported if the task has used DTensor; else no cache exists.
_DTENSOR, _CACHES = "torch.distributed.tensor", "torch.distributed.tensor.debug"
_SHAPES = "_propagate_tensor_meta_non_cached"  # a method of DTensor's ShardingPropagator
MOST_SHAPES = 10_000  # that a process keeps
_PLAIN = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))


def freeze() -> None:
    """Exempts all current objects from garbage collection, which makes it faster and lets forked ranks share memory.

    Imports leave so little garbage that it is not looked for.
    """
    if _DTENSOR in sys.modules:
        import_module(_CACHES)  # imported here, or else in the first clean-up of every rank
        keep_shapes()
    gc.freeze()


def keep_shapes() -> None:
    """Lets DTensor compute the shape and dtype of an operator's result once in a process, for all tasks.

    DTensor's own caches hold meshes, so they are emptied after each task. Shapes do not depend on meshes. And DTensor
    makes a fake mode for each operator, which reads the whole stack of Python calls; one mode serves all operators. A
    fake mode takes ten times as long as the meta device, which gives the same shapes for most operators.
    """
    propagator: Any = import_module("torch.distributed.tensor._sharding_prop").ShardingPropagator
    if (compute := getattr(propagator, _SHAPES, None)) is None or hasattr(compute, "__wrapped__"):
        return  # another torch, or it is done already
    known: dict[Any, Any] = {}
    own = threading.local()  # a mode serves one thread; made in a rank, because making one asks for devices

    def shapes(self: Any, schema: Any) -> Any:
        if detect_fake_mode() is not None:  # torch.compile has a mode, in which sizes may be symbols
            return compute(self, schema)
        try:
            key = schema.op, torch.get_default_dtype(), _shape_key(schema.args_schema), _shape_key(schema.kwargs_schema)
        except TypeError:
            return compute(self, schema)
        if (shape := known.get(key, known)) is known:
            if (shape := _shape_on_meta(schema)) is None:
                own.mode = getattr(own, "mode", None) or FakeTensorMode()
                with own.mode:
                    shape = compute(self, schema)
            if len(known) >= MOST_SHAPES:  # a factor that changes at each step is another argument each time
                known.clear()
            known[key] = shape
        return shape

    setattr(propagator, _SHAPES, wraps(compute)(shapes))


# Of operators whose results a fake mode handles in a way of its own: random numbers, sizes that depend on numbers.
_NOT_ON_META = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_aten = torch.ops.aten
_OTHER_ON_META = {
    _aten.equal,  # for its result, a number, DTensor computes no shape
    *(_aten.native_layer_norm, _aten.native_layer_norm_backward),  # a CPU has float32 statistics of bfloat16 at times
    *(_aten.convolution, _aten.convolution_backward),  # strides of channels_last
}


def _shape_on_meta(schema: Any) -> Any:
    """Returns the shape and dtype of the result of an operator on DTensors; None if only a fake mode tells them.

    An operator that is given a dtype may be lifted to another one (conformance.numerics.float64_tier), which only a
    mode sees.
    """
    if schema.op.namespace != "aten" or not _NOT_ON_META.isdisjoint(schema.op.tags):
        return None
    if schema.op.overloadpacket in _OTHER_ON_META:
        return None
    try:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return _metas(schema.op(*_on_meta(schema.args_schema), **_on_meta(schema.kwargs_schema)))
    except (TypeError, NotImplementedError, RuntimeError):
        return None


def _on_meta(argument: Any) -> Any:
    """Returns tensors without memory for the specs in the arguments of an operator. Raises TypeError for a dtype."""
    if (meta := getattr(argument, "tensor_meta", None)) is not None:
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
    if isinstance(argument, torch.dtype):
        raise TypeError
    if isinstance(argument, dict):
        return {name: _on_meta(value) for name, value in argument.items()}
    return type(argument)(map(_on_meta, argument)) if type(argument) in (list, tuple) else argument


def _metas(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return import_module(f"{_DTENSOR}._dtensor_spec").TensorMeta(result.shape, result.stride(), result.dtype)
    return type(result)(map(_metas, result)) if type(result) in (list, tuple) else None


def _shape_key(argument: Any) -> Any:
    """Returns what the shape and dtype of a result depend on, of an argument of an operator on DTensors. Raises
    TypeError for an argument of another kind, such as a random generator, which is not to be kept."""
    if hasattr(argument, "tensor_meta"):
        return argument.tensor_meta
    if isinstance(argument, dict):
        return tuple((name, _shape_key(value)) for name, value in sorted(argument.items()))
    if isinstance(argument, (list, tuple)):
        return tuple(map(_shape_key, argument))
    if not isinstance(argument, _PLAIN):
        raise TypeError(f"{type(argument)} is not kept")
    return type(argument), argument  # 1, 1.0 and True are equal


class Cleaner:
    """Cleans up one rank. All ranks of a worker group have to call ``clean_up`` equally often."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._store: Any = None
        self._count = 0
        self._first: Holdings | None = None
        self._has_pool = False
        self._memory_before = _memory() if device == "cpu" else 0

    def kept_memory(self) -> int:
        """Returns the bytes by which the memory of this process has grown since its start. On a GPU: the bytes that
        torch does not free, because each of their blocks holds a live tensor."""
        return _memory() - self._memory_before if self._device == "cpu" else torch.cuda.memory_reserved()

    def clean_up(self) -> str:
        """Frees the resources of the task. Returns a description of the leaks, or "" if there are none."""
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        worker_group = dist.distributed_c10d._world
        everybody = dist.distributed_c10d._get_default_group()
        _destroy_all_but(everybody)
        if self._store is None:
            self._store = dist.distributed_c10d._get_default_store()
        self._count += 1
        backend, _ = worker_group.pg_map[everybody]
        worker_group.pg_map[everybody] = backend, PrefixStore(f"after-{self._count}", self._store)
        _forget_meshes()
        _empty_caches()
        # Also without a cache: torch's CUDA builds start a pool of threads at the first backward pass, even on a CPU.
        _run_in_backward(_empty_caches, self._device)
        gc.collect()
        _give_back_memory()
        deadline = time.monotonic() + SETTLE_S
        now = _current_holdings()
        self._first = self._first or replace(now, undead=0)
        while growth(self._first, now) and time.monotonic() < deadline:
            time.sleep(_TICK_S)
            now = _current_holdings()
        if not self._has_pool and now.threads > self._first.threads + ALLOWANCE.threads:
            self._has_pool, self._first = True, replace(self._first, threads=now.threads)
        return growth(self._first, now)


def _destroy_all_but(everybody: dist.ProcessGroup) -> None:
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not everybody:
            dist.destroy_process_group(group)


def _give_back_memory() -> None:
    """Returns freed memory to the system. glibc keeps 2 GB a rank after a model of 56 million parameters, and torch
    keeps memory of the GPU."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # other worker groups share the GPU


def _memory() -> int:
    """Returns the bytes of anonymous memory of this process, including those shared with the process that it was forked
    from; 0 where the kernel does not report them."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def _current_holdings() -> Holdings:
    groups, open_on = dist.distributed_c10d._world.pg_map, open_files()
    return Holdings(
        groups=len(groups),
        undead=max(
            0,
            threads_called(_GLOO_THREAD) // _THREADS_PER_GROUP
            - sum("gloo" in backend for backend, _ in groups.values()),
        ),
        fds=open_on.total(),
        threads=thread_count(),
        open_on=open_on,
    )


def growth(first: Holdings, now: Holdings) -> str:
    """Describes the resources that have grown by more than ALLOWANCE; "" if there are none."""
    names = {"groups": "process groups", "undead": "process groups that were destroyed and live on"}
    names |= {"fds": "open file descriptors", "threads": "threads"}
    grown = [
        f"{text} {getattr(first, name)} -> {getattr(now, name)}"
        for name, text in names.items()
        if getattr(now, name) > getattr(first, name) + getattr(ALLOWANCE, name)
    ]
    if now.fds > first.fds + ALLOWANCE.fds:
        more = (now.open_on - first.open_on).most_common()
        kinds = ", ".join(f"{count} {kind}" for kind, count in more if count >= _MIN_REPORTED)
        grown += [f"among them {kinds}"] if kinds else []
    return ", ".join(grown)


def _forget_meshes() -> None:
    """Removes the process groups from all meshes of the task."""
    for mesh in [item for item in gc.get_objects() if type(item) is DeviceMesh]:
        getattr(mesh, "_pg_registry", {}).clear()  # older meshes hold names only


def _empty_caches() -> None:
    """Empties DTensor's caches and cuBLAS's workspaces, of which each thread may have its own."""
    if _DTENSOR in sys.modules:
        import_module(_CACHES)._clear_sharding_prop_cache()
    if torch.cuda.is_initialized():
        # There is no public function: https://github.com/pytorch/pytorch/issues/184084
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def _run_in_backward(run: Callable[[], None], device: str) -> None:
    """Calls ``run`` in the thread of backward passes, which on a GPU is not the current thread."""
    _InBackward.apply(torch.zeros(1, device=device, requires_grad=True), run).backward()  # type: ignore[no-untyped-call]


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: Callable[[], None]) -> torch.Tensor:
        ctx.run = run
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.run()
        return gradient, None
