"""Evidence: what a rank really did in one training step, seen below every library, whatever the backend says of it.

Serves claim 4: what ran is what was asked. A dispatch mode sees each collective and each matrix product of the step, in
Python and in the autograd engine, with its dtype, its group's size and the micro-batch. The judge holds that against
the layout (conformance.judge.configuration). The suite's own reading is left out.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor

from conformance.run.exact import PLAIN, EagerMode

# Names of operators of torch.distributed, of its functional collectives and of their variants, by what they do.
COLLECTIVE_KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "send": "send",
}
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")


class Watch(EagerMode):
    """Counts collectives and matrix products inside its ``with`` block.

    A pass is ``forward`` until the autograd engine is called first, ``backward N`` inside its N-th call, else
    ``later``: forward passes of later micro-batches, clipping, the optimizer. ``collectives``: by kind, size of the
    group, dtype and pass, for groups of two ranks or more. ``products``: by dtype and whether they are of a ``forward``
    pass, of a ``backward`` one, or of a forward pass that is ``recomputed`` in a backward one: the engine runs, and a
    graph is recorded. ``widths`` and ``lengths``: the last two dimensions of floating-point tensors (rows, length,
    width), such as logits, outside of the engine. ``reduced``: by size of the group, elements that were summed over it.
    ``held``: how many storages of how many bytes are alive when gradients of the first model have been read, of those
    that an operator of the step was given or has made, without activations: what was ever seen with three dimensions.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: Counter[tuple[str, int, str, str]] = Counter()
        self.products: Counter[tuple[str, str]] = Counter()
        self.widths: set[int] = set()
        self.lengths: set[int] = set()
        self.reduced: Counter[int] = Counter()
        self.held: Counter[int] = Counter()
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], bool]] = {}
        self._tasks: dict[int, int] = {}
        self._reading = False

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """What happens inside is the suite's."""
        self._reading = True
        try:
            yield
        finally:
            self._reading = False

    def count_live_storages(self) -> None:
        """Gradients of a model are ready: see what is alive. Of several models only the first is told, because
        afterwards the state of its optimizer is there as well."""
        if not self.held:
            alive = [ref() for ref, is_activation in self._storages.values() if not is_activation]
            self.held.update(storage.nbytes() for storage in alive if storage is not None and storage.nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not PLAIN.issuperset(types):
            return NotImplemented  # a DTensor goes first, so that the ops on its local tensors come here
        result = func(*args, **kwargs)
        if not self._reading and FakeTensor not in types:
            space, _, operator = func._schema.name.partition("::")
            if space in ("c10d", "_c10d_functional"):
                self._collective(operator.strip("_"), args)
            elif isinstance(result, Tensor):
                self._tensor(operator, result)
            self._remember_storages([*args, *kwargs.values(), result])
        return result

    def _remember_storages(self, values: Any) -> None:
        for tensor in _tensors(values):
            if type(tensor) in PLAIN and tensor.is_floating_point():
                storage = tensor.untyped_storage()
                known, is_activation = self._storages.get(storage._cdata, (None, False))
                if known is None or known() is not storage:  # the address is used again
                    known, is_activation = weakref.ref(storage), False
                self._storages[storage._cdata] = known, is_activation or tensor.ndim > 2

    def _collective(self, operator: str, args: tuple[Any, ...]) -> None:
        kind = next(
            (
                COLLECTIVE_KINDS[stem]
                for stem in sorted(COLLECTIVE_KINDS, key=len, reverse=True)
                if operator.startswith(stem)
            ),
            None,
        )
        tensor = next((t for t in _tensors(args)), None)
        if kind and tensor is not None and (size := _group_size(args)) > 1:
            self.collectives[kind, size, _name(tensor.dtype), self._pass()] += 1
            if kind in REDUCTIONS and tensor.is_floating_point():
                # What is summed is the input, and the larger one; an output that is a shard stands beside it.
                self.reduced[size] += max(sum(t.numel() for t in _tensors([value])) for value in args)

    def _tensor(self, operator: str, result: Tensor) -> None:
        where = self._pass()
        if operator in _PRODUCTS:
            again = "recomputed" if torch.is_grad_enabled() else "backward"
            self.products[_name(result.dtype), again if where.startswith("backward") else "forward"] += 1
        if result.ndim == 3 and result.is_floating_point() and not where.startswith("backward"):
            self.widths.add(result.shape[-1])
            self.lengths.add(result.shape[-2])

    def _pass(self) -> str:
        task = torch._C._current_graph_task_id()
        if task == -1:
            return "later" if self._tasks else "forward"
        return f"backward {self._tasks.setdefault(task, len(self._tasks))}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, as the footer of a record has them for each rank."""
        return {
            "collectives": [[*key, count] for key, count in sorted(self.collectives.items())],
            "products": [[*key, count] for key, count in sorted(self.products.items())],
            "widths": sorted(self.widths),
            "lengths": sorted(self.lengths),
            "reduced": [[*entry] for entry in sorted(self.reduced.items())],
            "held": [[*entry] for entry in sorted(self.held.items())],
        }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _group_size(args: tuple[Any, ...]) -> int:
    for value in args:
        if isinstance(value, torch._C.ScriptObject):
            with contextlib.suppress(Exception):
                return dist.ProcessGroup.unbox(value).size()
        if isinstance(value, dist.ProcessGroup):
            return value.size()
        if isinstance(value, str):
            with contextlib.suppress(Exception):
                return dist.distributed_c10d._resolve_process_group(value).size()  # type: ignore[arg-type]
    return 0
