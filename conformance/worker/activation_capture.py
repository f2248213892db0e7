"""Records the input and output of every module of this rank in one optimizer step, their gradients and collectives.

The suite hooks the modules itself. The gradient of an input covers the path through this module only, without the
contribution of a residual to the same tensor: the module gets an alias of its input, and the hook is on the alias.
Collectives are counted by module, or between two modules.
"""

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch._subclasses import FakeTensor

from conformance.backends.protocol import Backend, Cut, Traced, TracedModule
from conformance.numerics.float64_tier import PLAIN, EagerMode
from conformance.results.bisection import Direction, First, Issued, Side
from conformance.spec.batch import Batch
from conformance.worker.operators import collective_of

BETWEEN = " -> "  # joins two modules in the name of a place
Place = tuple[str, Direction]  # a module, or ``A -> B``
Kind = tuple[str, int, str]  # kind, size of the group, dtype


class Issuing(EagerMode):
    """Counts collectives inside its ``with`` block, by the active modules.

    A collective counts for the module and all modules that contain it. In the backward pass, a module is active from
    the gradient of its output to that of its input. Collectives between two modules count for the pair; those before
    the first or after the last module do not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.times: Counter[tuple[Place, Kind]] = Counter()
        self.elements: Counter[tuple[Place, Kind]] = Counter()
        self._active: dict[Direction, list[str]] = {"forward": [], "backward": []}
        self._direction: Direction = "forward"
        self._last = ""
        self._between: list[tuple[Kind, int]] = []
        self._is_paused = False

    def enter(self, name: str, direction: Direction) -> None:
        for kind, elements in self._between:
            if self._last:
                self._count((f"{self._last}{BETWEEN}{name}", direction), kind, elements)
        self._between = []
        modules = self._active[direction]
        while modules and not name.startswith(f"{modules[-1]}."):
            modules.pop()  # no gradient came back to its input
        modules.append(name)
        self._last, self._direction = name, direction

    def leave(self, name: str, direction: Direction) -> None:
        modules = self._active[direction]
        if name in modules:
            del modules[modules.index(name) :]
        self._last, self._direction = name, direction

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the collectives inside this block, which belong to the suite, from the counts."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not PLAIN.issuperset(types):
            return NotImplemented  # DTensor handles its own ops, whose local ops come here
        if not self._is_paused and FakeTensor not in types and (found := collective_of(func, args)):
            kind = (found.kind, found.size, str(found.dtype).removeprefix("torch."))
            modules = self._active[self._direction]
            if not modules:
                self._between.append((kind, found.elements))
            for name in modules:
                self._count((name, self._direction), kind, found.elements)
        return func(*args, **(kwargs or {}))

    def _count(self, place: Place, kind: Kind, elements: int) -> None:
        self.times[place, kind] += 1
        self.elements[place, kind] += elements

    def write(self, folder: Path, rank: int) -> None:
        counts = [[*place, *kind, times, self.elements[place, kind]] for (place, kind), times in self.times.items()]
        (folder / f"collectives-{rank}.json").write_text(json.dumps([rank, counts]))


def read_issued(folder: Path, first: First) -> tuple[Issued, ...]:
    """Returns the collectives of all ranks at the place of a first wrong value, grouped by ranks that did the same."""
    ranks_by_count: dict[tuple[Kind, int, int], list[int]] = defaultdict(list)
    for file in sorted(folder.glob("collectives-*.json")):
        rank, counts = json.loads(file.read_text())
        found: dict[Kind, list[int]] = defaultdict(lambda: [0, 0])
        for name, direction, kind, size, dtype, times, elements in counts:
            if direction == first.direction and _is_there(name, first):
                found[kind, size, dtype][0] += times
                found[kind, size, dtype][1] += elements
        for each, (times, elements) in found.items():
            ranks_by_count[each, times, elements].append(rank)
    return tuple(
        Issued(kind=kind, size=size, dtype=dtype, times=times, elements=elements, ranks=tuple(sorted(ranks)))
        for ((kind, size, dtype), times, elements), ranks in sorted(ranks_by_count.items())
    )


def _is_there(name: str, first: First) -> bool:
    """Whether a place is the module of the defect. For a defect between two modules, whether the place begins or ends
    like it: one of the two may be on another rank."""
    if first.inside or first.before is None:
        return name == first.module
    before, arrow, after = name.partition(BETWEEN)
    return bool(arrow) and (before == first.before[0] or after == first.module)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One rank's part of a value in one micro-batch, without padding.

    tokens: int64 (n,), the numbers of its tokens in the step. values: (n, features). first_feature: the position of its
    first feature in the whole value.
    """

    name: str
    side: Side
    rank: int
    micro_batch: int
    first_feature: int
    tokens: Tensor
    values: Tensor


@contextlib.contextmanager
def capturing(backend: Backend, model: str, batch: Batch, *, rank: int, folder: Path) -> Iterator[None]:
    """Hooks the modules of ``model`` until the end of the block, and writes their values and collectives into
    ``folder``, two files for each rank. Forward passes without autograd, which belong to no update, are ignored.

    Raises ValueError if a module is not run exactly once for each micro-batch, or if its activations are not cut as the
    backend says.
    """
    traced: Traced = backend.traced(model, batch)  # type: ignore[attr-defined]
    capture = _Capture(traced, rank)
    handles = [handle for module in traced.modules for handle in capture.hook(module)]
    try:
        with capture.issued:
            yield
    finally:
        for handle in handles:
            handle.remove()
    capture.check()
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"rank-{rank}.safetensors", capture.pieces)
    capture.issued.write(folder, rank)


class _Capture:
    def __init__(self, traced: Traced, rank: int) -> None:
        from torch.distributed.tensor import DTensor  # takes a second, and the controller imports this module

        self._dtensor = DTensor
        self.traced, self.rank = traced, rank
        self.pieces: list[Piece] = []
        self.calls: Counter[str] = Counter()
        self.issued = Issuing()

    def hook(self, traced: TracedModule) -> Iterator[Any]:
        """Hooks a module outside of a library's own hooks, so that it records what other modules see."""

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if not torch.is_grad_enabled():
                return args, kwargs
            self.issued.enter(traced.name, "forward")
            position = next((i for i, value in enumerate(args) if isinstance(value, Tensor)), None)
            key = next((name for name, value in kwargs.items() if isinstance(value, Tensor)), "")
            x = kwargs[key] if position is None else args[position]
            alias = x.view_as(x) if x.is_floating_point() else x
            self._see(traced.name, "input", traced.input, alias)
            if position is None:
                return args, {**kwargs, key: alias}
            return (*args[:position], alias, *args[position + 1 :]), kwargs

        def after(_: Any, __: Any, result: Any) -> None:
            if not torch.is_grad_enabled():
                return
            output, bias = result if traced.leaves_bias else (result, None)
            output = next(part for part in output if isinstance(part, Tensor)) if isinstance(output, tuple) else output
            self._see(traced.name, "output", traced.output, output, bias=bias)
            self.calls[traced.name] += 1
            self.issued.leave(traced.name, "forward")

        yield traced.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        yield traced.module.register_forward_hook(after)

    def _see(self, name: str, end: Literal["input", "output"], cut: Cut, x: Tensor, bias: Tensor | None = None) -> None:
        number = self.calls[name]
        if number >= len(self.traced.tokens):
            return  # ``check`` raises for it
        self._keep(name, end, number, cut, x.detach() if bias is None else x.detach() + bias.detach())
        if not x.requires_grad:
            return
        placed = (x.device_mesh, x.placements) if isinstance(x, self._dtensor) else None
        side: Side = "gradient of the input" if end == "input" else "gradient of the output"

        def of_gradient(gradient: Tensor) -> None:
            if end == "input":
                self.issued.leave(name, "backward")
            with self.issued.paused():
                if placed:
                    gradient = cast(Any, gradient).redistribute(*placed)
                self._keep(name, side, number, cut, gradient.detach() / self.traced.gradient_scale)
            if end == "output":
                self.issued.enter(name, "backward")

        x.register_hook(of_gradient)

    def _keep(self, name: str, side: Side, number: int, cut: Cut, x: Tensor) -> None:
        x = x.to_local() if isinstance(x, self._dtensor) else x
        x = x[..., None] if not x.is_floating_point() else x
        x = (x.transpose(0, 1) if cut.length_first else x).to("cpu", torch.float64, copy=True)
        tokens = self.traced.tokens[number].cpu().chunk(cut.parts, dim=1)[cut.part]
        if x.shape[:-1] != tokens.shape:
            raise ValueError(
                f"the {side} of {name} is {tuple(x.shape[:-1])} (rows, length) on this rank, but the backend says that "
                f"its tokens are {tuple(tokens.shape)}; correct the adapter's traced()"
            )
        real = tokens >= 0
        self.pieces.append(
            Piece(
                name=name,
                side=side,
                rank=self.rank,
                micro_batch=number,
                first_feature=cut.first_feature,
                tokens=tokens[real],
                values=x[real],
            )
        )

    def check(self) -> None:
        count = len(self.traced.tokens)
        wrong = {module.name: self.calls[module.name] for module in self.traced.modules}
        if wrong := {name: calls for name, calls in wrong.items() if calls != count}:
            name, calls = next(iter(wrong.items()))
            raise ValueError(
                f"{name} was run {calls} times in a step of {count} micro-batches, and {len(wrong) - 1} more modules "
                f"were not run once for each; what runs again (recomputation) cannot be bisected"
            )


def _write(path: Path, pieces: list[Piece]) -> None:
    tensors = {f"tokens/{i}": piece.tokens.contiguous() for i, piece in enumerate(pieces)}
    tensors |= {f"values/{i}": piece.values.contiguous() for i, piece in enumerate(pieces)}
    descriptions = [{key: value for key, value in vars(p).items() if not isinstance(value, Tensor)} for p in pieces]
    save_file(tensors, path, metadata={"pieces": json.dumps(descriptions)})


def read_pieces(folder: Path) -> list[Piece]:
    """Reads the pieces that ``capturing`` wrote in all ranks."""
    found = []
    for path in sorted(folder.glob("rank-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for i, one in enumerate(json.loads(file.metadata()["pieces"])):
                tokens, values = (file.get_tensor(f"{what}/{i}") for what in ("tokens", "values"))
                found.append(Piece(**one, tokens=tokens, values=values))
    return found
