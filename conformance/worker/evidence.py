"""Observes the collectives, matrix products and storages of a rank in one training step, below all libraries.

It proves that the requested layout ran (docs/principles.md): the judge compares it with the layout
(conformance.judge.layout_evidence). A dispatch mode sees each collective and each matrix product of the step, in Python
and in the autograd engine, with its dtype, the size of its group, and the pass. Operations of the suite are not
counted. No dispatch mode sees the products of TransformerEngine, so its Python calls are counted. Linear layers of
libraries that are autograd functions are patched so that their products are recognised as recomputed or not.
"""

import contextlib
import math
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from conformance.numerics.float64_tier import (
    PLAIN,
    InPlaceOfLifting,
    LeakWatch,
    lifted_below,
)
from conformance.numerics.sketch import on_cpu
from conformance.records.record_format import LOOKUPS_KEPT
from conformance.worker.operators import (
    LINEAR,
    OPERATORS,
    Collective,
    Operator,
    collective_of,
    dtype_name,
    in_compiled_code,
    operator_of,
    product_error,
    sums_of_tensor,
    tensors_in,
)
from conformance.worker.rank_state import digest_of
from conformance.worker.transformer_engine import TransformerEngineWatch

WORD = 8  # bytes
_current_graph_task_id, _NoTorchFunction = torch._C._current_graph_task_id, torch._C.DisableTorchFunction
_NUMBERS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))  # arguments that hold no tensors
BYTES = "all_gather of bytes"  # a kind of its own in Watch.moved
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
LEAST_OPERAND = 8  # elements of a vector
_PADDED_ROWS = 128  # Megatron pads the vocabulary of each tensor-parallel rank to a multiple of them
_DROPS_ALONE = ("dropout", "attention")  # in the names of operators that draw a mask and apply it
# Methods with which a caller, not the library, tells which micro-batches come before the last: module, class, method.
BY_CALLER = (
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "set_gradient_accumulation_boundary"),
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel", "no_sync"),
)
# Autograd functions of libraries' linear layers, which record no graph of the products inside of them: module, class.
FUNCTIONS = (
    ("deepspeed.runtime.zero.linear", "LinearFunctionForZeroStage3"),
    ("megatron.core.tensor_parallel.layers", "LinearWithFrozenWeight"),
    ("megatron.core.tensor_parallel.layers", "LinearWithGradAccumulationAndAsyncCommunication"),
    ("megatron.core.transformer.moe.moe_utils", "RouterGatingLinearFunction"),
    ("torchao.float8.float8_linear", "matmul_with_hp_or_float8_args"),
    ("torchao.float8.stateful_float8_linear", "manual_float8_matmul_with_args_in_float8"),
)


@dataclass(slots=True)
class _Storage:
    """An observed storage. is_used: it was used as weights are. is_activation: see Watch.held_weights for both."""

    ref: weakref.ref[torch.UntypedStorage]
    is_used: bool = False
    is_activation: bool = False


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Tells a model's embedding of ``rows`` times ``columns`` numbers, or the part of it on one of ``tp`` ranks, from
    other matrices."""

    rows: int
    columns: int
    tp: int

    def may_be(self, matrix: Tensor) -> bool:
        """Tells whether a matrix has the size of the embedding or of a part of it, padded as libraries pad."""
        if matrix.ndim != 2 or matrix.shape[1] != self.columns:
            return False
        part = -(-self.rows // self.tp)
        return (
            part <= len(matrix) <= part + _PADDED_ROWS or self.rows <= len(matrix) <= self.rows + _PADDED_ROWS * self.tp
        )


class Watch(InPlaceOfLifting):
    """Counts collectives and matrix products inside its ``with`` block.

    The pass is ``forward`` before the first call of the autograd engine, ``backward N`` inside its call number N
    (counted from 0), and ``later`` otherwise: forward passes of later micro-batches, clipping, the optimizer.

    collectives: number by (kind, size of the group, dtype, pass), for groups of at least two ranks.
    products: number of matrix products by (dtype, phase), without those of the update. The phase is ``forward``,
        ``backward``, or ``recomputed``: a forward pass inside a backward pass, recognised by the autograd graph that it
        records, or that records one of FUNCTIONS.
    linear: number of products of linear layers in forward passes, by dtype. All other products are batched, as in
        attention, and their number depends on the kernel.
    compiled: number of products of linear layers in forward passes that code of torch.compile makes.
    widths, lengths: the last and the last but one dimension of 3-dimensional floating-point results, such as logits
        (rows, length, width), outside of the autograd engine.
    again: number of recomputed products of linear layers.
    nested: how often a call of the autograd engine went on after a nested call, as where a layer is recomputed with its
        own graph.
    reduced: number of elements that were summed over a group, by size of the group.
    moved: number of collectives of floating-point numbers or gathered bytes, and of their elements, by (kind or BYTES,
        ranks of the group, pass). After ``begin_update`` the pass is ``update``.
    work: multiplications of the products of linear layers, by phase.
    backwards: number of backward passes that multiply in linear layers.
    leaks: if set, it receives every operator, including the suite's own, except those for records and comparisons of
        replicas, of which it receives the input tensor.
    boundaries: number of calls of the methods in BY_CALLER.
    float8: number of products that a kernel made of operands in float8. float8_error: their largest distance from the
        product of the same operands in float64, relative to the sum of the magnitudes of what is added up.
    library: what TransformerEngine does; see TransformerEngineWatch, also for ``sequence_parts`` and ``leaves_out``.
    embedded: for each lookup of tokens in the forward pass the rows of the embedding on this rank, and the tokens, as
        lists of each row. Lookups in other matrices, as of the tokens of an expert, are none.
    entered: for each of these lookups, what the first product of as many tokens got that followed it: for each token
        the number of the group of rows that are equal except for their size. Empty if there was none.
    gathered: number of all-gathers of floating-point numbers in the forward pass, by (ranks of the group, shape of the
        input, elements). All three only if there is an ``embedding``, as where ranks have other tokens.
    operands: dimensions, elements, sum and norm of each vector that is added or multiplied and of each matrix that a
        linear layer multiplies by, in the first forward pass: of a model's weights, among others.
    drawn: number of masks of dropout by (``forward`` or ``recomputed``, digest of the activations that were dropped
        from or an empty text, digest of the random generator before it drew the mask).
    held_weights: number of live storages by size in bytes, at the moment when the gradients of the first model have
        been read. Only storages that were used as weights are count: by an operator of the first forward pass, or by a
        matrix product of any pass, for which weights may be gathered again. Gradients and a library's buckets for them
        are not used so. Activations do not count: storages that were ever seen as a tensor of three or more dimensions.
    """

    def __init__(
        self, *, embedding: Embedding | None = None, sequence_parts: int = 1, leaves_out: bool = False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embedding = embedding
        self.library = TransformerEngineWatch(self, parts=sequence_parts, leaves_out=leaves_out)
        self.embedded: deque[tuple[int, list[list[int]]]] = deque(maxlen=LOOKUPS_KEPT)
        self.entered: deque[list[int]] = deque(maxlen=LOOKUPS_KEPT)
        self._awaited: list[tuple[int, list[int]]] = []  # tokens of lookups that no product has followed, and groups
        self.gathered: Counter[tuple[tuple[int, ...], tuple[int, ...], int]] = Counter()
        self.leaks: LeakWatch | None = None
        self.collectives: Counter[tuple[str, int, str, str]] = Counter()
        self.products: Counter[tuple[str, str]] = Counter()
        self.linear: Counter[str] = Counter()
        self.compiled = 0
        self.widths: set[int] = set()
        self.lengths: set[int] = set()
        self.again = 0
        self.nested = 0
        self.reduced: Counter[int] = Counter()
        self.moved: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
        self.work: Counter[str] = Counter()
        self._multiplying: set[str] = set()  # backward passes
        self._operands: list[tuple[tuple[int, int], Tensor]] = []  # dimensions and elements, and sum and norm (2)
        self.boundaries = 0
        self.float8, self.float8_error = 0, 0.0
        self.drawn: Counter[tuple[str, str, str]] = Counter()
        self._masks: dict[int, str] = {}  # digests of masks that no operator has applied yet, by storage
        self.held_weights: Counter[int] = Counter()
        self._storages: dict[int, _Storage] = {}
        self._tasks: dict[int, int] = {}
        self._last = 0  # the number of the latest call of the engine
        self._task, self._where = -1, "forward"  # what the latest operator was part of
        self._recorded = False  # a function runs without gradients whose graph is recorded as a whole
        self._reading = False
        self._updating = False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Counts inside this block. Also counts the products of TransformerEngine, and classifies those of FUNCTIONS,
        if this process has imported these libraries."""
        with contextlib.ExitStack() as all_:
            for module, kind, method in BY_CALLER:
                if (owner := getattr(sys.modules.get(module), kind, None)) is not None:
                    all_.enter_context(mock.patch.object(owner, method, self._counted(getattr(owner, method))))
            for patch in self.library.patches():
                all_.enter_context(patch)
            for module, kind in FUNCTIONS:
                if (function := getattr(sys.modules.get(module), kind, None)) is not None:
                    all_.enter_context(mock.patch.object(function, "apply", partial(self._of_function, function.apply)))
            all_.enter_context(self)
            yield

    def _counted(self, own: Any) -> Any:
        """Wraps a method in BY_CALLER."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.boundaries += 1
            return own(*args, **kwargs)

        return counted

    def _of_function(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps ``apply`` of one of FUNCTIONS. It computes its products without gradients; a forward pass is recognised
        by the graph that is recorded of the whole function."""
        self._recorded = torch.is_grad_enabled()
        try:
            return own(*args, **kwargs)
        finally:
            self._recorded = False

    def library_product(self, dtype: torch.dtype, *, of_forward: bool, work: int) -> str:
        """Counts a product that no operator of torch makes; see conformance.worker.transformer_engine.Counts."""
        if self._reading:
            return ""
        in_backward, name = self._pass().startswith("backward"), dtype_name(dtype)
        phase = ("recomputed" if of_forward else "backward") if in_backward else "forward"
        self.products[name, phase] += 1
        self.linear[name] += phase == "forward"
        self.again += phase == "recomputed"
        if in_backward:
            self._multiplying.add(self._pass())
        self.work[phase] += work
        return phase

    def float8_product(self, error: float) -> None:
        self.float8 += 1
        self.float8_error = max(self.float8_error, error)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Excludes the operations inside this block, which belong to the suite, from the counts."""
        self._reading = True
        try:
            yield
        finally:
            self._reading = False

    def begin_update(self) -> None:
        """Ends the passes of the step: what follows outside of the autograd engine is the last model's update."""
        self._updating = True

    def count_live_storages(self) -> None:
        """Fills ``held_weights``, when the gradients of a model are complete. Only the first call counts: later, the
        optimizer state of the first model may be alive as well."""
        if not self.held_weights:
            alive = [one.ref() for one in self._storages.values() if one.is_used and not one.is_activation]
            self.held_weights.update(storage.nbytes() for storage in alive if storage is not None and storage.nbytes())

    def checksums(self) -> dict[int, tuple[int, int]]:
        """Returns the size in bytes and a checksum of each live storage that was used as weights are."""
        sizes: dict[int, int] = {}

        def sums() -> Iterator[tuple[int, Tensor]]:
            for key, one in self._storages.items():
                storage = one.ref()
                if storage is not None and one.is_used and not one.is_activation and storage.nbytes() >= WORD:
                    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                    sizes[key] = storage.nbytes()
                    yield key, data[: len(data) // WORD * WORD].view(torch.int64).sum()

        return {key: (sizes[key], int(total)) for key, total in on_cpu(sums()).items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if types and not PLAIN.issuperset(types):
            return NotImplemented  # DTensor handles its own ops, whose local ops come here
        # In a backward pass the mode of the exact tier would be called for each attribute of a tensor.
        with _NoTorchFunction():
            kwargs = kwargs or {}
            operator = OPERATORS.get(id(func)) or operator_of(func)
            lifted = lifted_below(func, args, kwargs) if self.lifts and operator.may_be_lifted else None
            given, named = lifted or (args, kwargs)
            if self._reading:
                result = operator.call(*given, **named)
            else:
                before = _generator(args, kwargs) if operator.draws else None
                result = operator.call(*given, **named)
                if before is not None and not before.equal(_generator(args, kwargs)):
                    self._mask(operator, args, result, digest_of(before).hex()[:16])
                if not types or FakeTensor not in types:
                    self._see(operator, args, kwargs, result)
            if self.leaks:
                self.leaks.see(func, result)
            return result

    def _see(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        is_plain = type(result) is Tensor
        if operator.kind and (found := collective_of(operator.func, args)):
            self._collective(found)
            self.library.collective(found, (*args, result))
        elif operator.is_counted and (is_plain or isinstance(result, Tensor)):
            self._tensor(operator, result, args)
        is_forward = not self._tasks and _current_graph_task_id() == -1
        is_read = is_forward and operator.is_reading
        is_used = is_read or operator.is_product
        self._remember_storages(args, is_used)
        if kwargs:
            self._remember_storages(kwargs.values(), is_used)
        if is_forward or not is_plain or result.ndim > 2:
            self._remember_storages((result,), is_read)

    def _mask(self, operator: Operator, args: tuple[Any, ...], result: Any, state: str) -> None:
        """Follows a mask that was drawn from a generator in this state to the activations that it is applied to."""
        if any(stem in operator.name for stem in _DROPS_ALONE):
            self._drop(next(tensors_in(args)), state)
        elif isinstance(result, Tensor):
            self._masks[result.untyped_storage()._cdata] = state

    def _drop(self, activations: Tensor, state: str) -> None:
        where = "recomputed" if self._pass().startswith("backward") else "forward"
        # torch ends the recomputation of a layer before its last product, so a gradient may be the first factor.
        known = where == "forward" or torch.is_grad_enabled()
        self.drawn[where, digest_of(activations).hex()[:16] if known else "", state] += 1

    def _remember_storages(self, values: Iterable[Any], is_used: bool) -> None:
        for tensor in values:
            if (kind := type(tensor)) in PLAIN:
                # What is neither used nor an activation need not be known.
                is_activation = tensor.ndim > 2
                if is_used or is_activation:
                    storage = tensor.untyped_storage()
                    known = self._storages.get(key := storage._cdata)
                    if known is None or known.ref() is not storage:  # the address is used again
                        if tensor.is_floating_point() and not tensor.is_meta:  # a meta tensor has no numbers
                            self._storages[key] = _Storage(weakref.ref(storage), is_used, is_activation)
                    elif (is_used > known.is_used or is_activation > known.is_activation) and (
                        tensor.is_floating_point() and not tensor.is_meta
                    ):
                        known.is_used |= is_used
                        known.is_activation |= is_activation
            elif kind is list or kind is tuple or (kind not in _NUMBERS and isinstance(tensor, (list, tuple))):
                self._remember_storages(tensor, is_used)

    def _collective(self, found: Collective) -> None:
        where = self._pass()
        self.collectives[found.kind, found.size, dtype_name(found.dtype), where] += 1
        # Weights in float8 are gathered as bytes, and so is what has nothing to do with weights.
        in_bytes = found.kind == "all_gather" and found.dtype.itemsize == 1
        if found.dtype.is_floating_point or in_bytes:
            kind = BYTES if in_bytes else found.kind
            moved = self.moved.setdefault((kind, found.ranks, "update" if self._updating else where), [0, 0])
            moved[0] += 1
            moved[1] += found.elements
            if self.embedding and found.kind == "all_gather" and where == "forward":
                self.gathered[found.ranks, found.shape, found.elements] += 1
        if found.kind in REDUCTIONS and found.dtype.is_floating_point:
            # The input, which is summed, is at least as large as the output, so these are its elements.
            self.reduced[found.size] += found.elements

    def _tensor(self, operator: Operator, result: Tensor, args: tuple[Any, ...]) -> None:
        if result.is_meta or (type(result) is not Tensor and isinstance(result, FakeTensor)):
            return  # DTensor computes shapes of whole tensors this way; no rank holds them
        where = self._pass()
        if self._masks and operator.multiplies_factors and len(factors := [*tensors_in(args)]) == 2:
            for activations, mask in (factors, factors[::-1]):
                if (state := self._masks.pop(mask.untyped_storage()._cdata, None)) is not None:
                    self._drop(activations, state)
        if self.embedding and operator.looks_up and where == "forward":
            self._lookup(self.embedding, args)
        if where == "forward" and operator.reads_weights:
            vectors = (arg for arg in args if type(arg) in PLAIN and arg.ndim == 1 and arg.numel() >= LEAST_OPERAND)
            matrices = args[-1:] if operator.name in ("mm", "addmm") else ()
            self._operands += (sums_of_tensor(tensor) for tensor in (*vectors, *matrices) if tensor.is_floating_point())
        if operator.is_product and not self._updating:
            again = "recomputed" if torch.is_grad_enabled() or self._recorded else "backward"
            phase = again if where.startswith("backward") else "forward"
            self.products[dtype_name(result.dtype), phase] += 1
            if operator.name == "_scaled_mm":
                self.float8_product(product_error(args, result))
            if operator.name in LINEAR:
                if phase == "backward":
                    self._multiplying.add(where)
                elif self._awaited and phase == "forward":
                    self._enter(args[operator.name == "addmm"])
                self.work[phase] += result.numel() * args[operator.name == "addmm"].shape[-1]
                self.linear[dtype_name(result.dtype)] += phase == "forward"
                self.compiled += phase == "forward" and operator.func._overloadname == "out" and in_compiled_code()
                self.again += phase == "recomputed"
        if result.ndim == 3 and not where.startswith("backward") and result.is_floating_point():
            _, length, width = result.shape
            self.widths.add(width)
            self.lengths.add(length)

    def _lookup(self, embedding: Embedding, args: tuple[Any, ...]) -> None:
        """Remembers the tokens (rows, length) or (length,) that are looked up in the embedding."""
        weight, *at = tensors_in(args)
        if not embedding.may_be(weight):
            return
        known = self._storages.get(weight.untyped_storage()._cdata)
        if known and known.is_activation and not isinstance(weight, torch.nn.Parameter):
            return
        if len(at) == 1 and not at[0].is_floating_point() and at[0].dtype != torch.bool and at[0].numel():
            tokens = at[0].reshape(-1, at[0].shape[-1]) if at[0].ndim else at[0][None, None]
            self.embedded.append((len(weight), tokens.remainder(len(weight)).tolist()))
            self.entered.append([])
            self._awaited.append((tokens.numel(), self.entered[-1]))

    def _enter(self, inputs: Tensor) -> None:
        """Follows lookups to the inputs (..., hidden) of the product that gets as many tokens."""
        if self.embedding and inputs.shape[-1] == self.embedding.columns:
            length = inputs.numel() // inputs.shape[-1]
            for groups in (groups for tokens, groups in self._awaited if tokens == length):
                groups += _groups(inputs.reshape(length, -1))
            self._awaited = [one for one in self._awaited if one[0] != length]

    def _pass(self) -> str:
        task = _current_graph_task_id()
        if task == self._task:  # as nearly always
            return self._where
        self._task = task
        if task == -1:
            self._where = "later" if self._tasks else "forward"
        else:
            number = self._tasks.setdefault(task, len(self._tasks))
            self.nested += number < self._last
            self._last, self._where = number, f"backward {number}"
        return self._where

    def _read_operands(self) -> list[tuple[int, int, float, float]]:
        sizes = [size for size, _ in self._operands]
        device = self._operands[0][1].device if sizes else None  # a rollout's columns may be computed on the CPU
        numbers = torch.stack([sums.to(device) for _, sums in self._operands]).tolist() if sizes else []
        found = {(*size, *sums) for size, sums in zip(sizes, numbers, strict=True) if all(map(math.isfinite, sums))}
        return sorted(found)

    def to_json(self) -> dict[str, Any]:
        """Returns plain JSON values for the footer of a record, which has them for each rank."""
        return {
            "collectives": [[*key, count] for key, count in sorted(self.collectives.items())],
            "products": [[*key, count] for key, count in sorted(self.products.items())],
            "linear": [[*entry] for entry in sorted(self.linear.items()) if entry[1]],
            "compiled": self.compiled,
            "again": self.again,
            "widths": sorted(self.widths),
            "lengths": sorted(self.lengths),
            "nested": self.nested,
            "boundaries": self.boundaries,
            "float8": self.float8,
            "float8_error": self.float8_error,
            **self.library.to_json(),
            "moved": [
                [kind, list(ranks), *rest, *counts] for (kind, ranks, *rest), counts in sorted(self.moved.items())
            ],
            "operands": self._read_operands(),
            "backwards": len(self._multiplying),
            "work": [[*entry] for entry in sorted(self.work.items())],
            "reduced": [[*entry] for entry in sorted(self.reduced.items())],
            "held_weights": [[*entry] for entry in sorted(self.held_weights.items())],
            **({"embedded": [*self.embedded]} if self.embedded else {}),
            **({"entered": [*self.entered]} if self.embedded else {}),
            **({"gathered": [[*key, count] for key, count in sorted(self.gathered.items())]} if self.gathered else {}),
            **({"drawn": [[*key, count] for key, count in sorted(self.drawn.items())]} if self.drawn else {}),
        }


def _groups(rows: Tensor) -> list[int]:
    """Numbers the groups of rows (N, E) that point in the same direction, up to rounding.

    Rows are compared by one number each, along a fixed direction. Kernels may compute a row in another order than the
    next one; in half precision the results differ in few elements, in others by a few roundings.
    """
    precision = rows.dtype if rows.dtype.itemsize > 1 else torch.bfloat16
    eps, wide = torch.finfo(precision).eps, rows.double()
    apart = 4 * eps / rows.shape[1] if precision.itemsize == 2 else 64 * eps
    direction = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64, device=rows.device).cos()
    along = wide @ direction / direction.norm() / wide.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    ordered, order = along.sort()
    found = torch.zeros_like(order)
    found[order[1:]] = (ordered.diff() > apart).cumsum(0)
    groups: list[int] = found.tolist()
    return groups


def _generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the state of the generator that a drawing operator draws from; None if its tensor has no numbers."""
    tensor = next(tensors_in(args), None)
    if tensor is None or tensor.is_meta or isinstance(tensor, FakeTensor):
        return None
    if (own := kwargs.get("generator")) is not None:
        return own.get_state()
    return torch.cuda.get_rng_state(tensor.device) if tensor.is_cuda else torch.get_rng_state()
