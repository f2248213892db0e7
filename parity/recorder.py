"""Records a training loop: what each optimizer step read and wrote. It changes nothing in the loop.

Gradients are read in place when an optimizer's step begins, and weights when it has ended, by torch's optimizer hooks.
Where an optimizer steps masters or flat shards, parity/optimizer_shards.py finds the parameters' elements in them.
Both are kept as sketches (parity/summaries.py): no parameter is copied or written to, and no random number is drawn.
A group of an optimizer is known by its place, ``0.1`` for the second group of the first optimizer, because
``load_state_dict`` puts a new group into the place of each, and ``add_param_group`` appends one.
Ranks communicate once per step, in one all_reduce of these sketches, and agree that no rank has failed. Rank 0 writes.
"""

import hashlib
import platform
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from safetensors.numpy import save as save_arrays
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from conformance.core.errors import UsageError, one_line
from parity.differences import Names
from parity.optimizer_shards import held_parameters, torch_optimizers
from parity.record_files import FORMAT, VERSION, Line, Writer, why_not
from parity.summaries import (
    PRESENT,
    SQUARES,
    WIDTH,
    Piece,
    Reduced,
    assemble,
    find_layout,
    left_out,
    own_rank,
    pieces_of,
    reduce_over_ranks,
    tied_names,
    together,
    world_size,
)

WEIGHT, GRADIENT = KINDS = ("weight", "gradient")
LIBRARIES = ("backend-parity", "torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "megatron-core")
HOW = {"foreach", "fused", "capturable", "differentiable", "initial_lr"}  # how an optimizer computes, not what
WORDS = 4  # 32-bit words of a row's SHA-256 that are added up; in float64, exact for two million rows

Rows = Tensor | Iterable[Tensor | Sequence[int]]
"""Token ids: [rows, length], or rows of any lengths, without padding."""


def record(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    *,
    out: str | Path,
    names: Names | None = None,
    full: bool = False,
) -> "Recorder":
    """Record a training loop: ``with parity.record(model, optimizer, out="run-a") as r: ... r.step(loss=loss)``.

    model, optimizer: as they train, after DDP, ``fully_shard``, ``accelerator.prepare``, ``deepspeed.initialize`` or
        ``get_megatron_optimizer``; several optimizers, and the models of a pipeline stage, as a list.
    out: a folder that holds no record.
    names: maps a parameter's name without wrappers to its Hugging Face name, or, for a fused parameter, to the rows of
        each part (``{"q_proj.weight": slice(0, 64), ...}``).
    full: whether to keep whole tensors as well, for exact distances and places. Every tensor is gathered, so this is
        for small models.

    Call it on every rank, before the first step. Raises UsageError for what it cannot observe. An error of one rank is
    raised on all ranks.
    """
    return Recorder(model, optimizer, out=Path(out), names=names, full=full)


class Recorder:
    """A running record, as a context manager. Call ``step`` once after every optimizer step, on every rank."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any,
        *,
        out: Path,
        names: Names | None,
        full: bool,
    ) -> None:
        self._models = (model,) if isinstance(model, nn.Module) else tuple(model)
        self._names, self._full, self._writer = names, full, Writer(out)
        together(lambda: self._observe(optimizer))
        self._local = {piece.name: piece for piece in self._pieces}
        self._trained = tuple(piece for piece in self._pieces if piece.parameter.requires_grad)
        self._frozen = tuple(piece for piece in self._pieces if not piece.parameter.requires_grad)
        self._first_group = grouped(self._optimizers)
        self._groups = {id(piece.stepped): piece.group for piece in self._pieces if piece.group}
        self._layout = find_layout(self._pieces, self._first_group)
        device = self._pieces[0].parameter.device
        self._device = device if device.type == "cuda" else torch.device("cpu")  # where summaries meet
        self._handles: list[RemovableHandle] = []
        self._precision: list[str] = []
        self._weights: dict[str, Tensor] = {}  # the last summary of each trained piece
        self._steps = 0
        self._begin_step()

    def _observe(self, optimizer: Any) -> None:
        """Find the optimizers and parameters to record. Raises UsageError if they cannot be, or rank 0 cannot write."""
        found = torch_optimizers(optimizer)
        self._optimizers = tuple(inner for _, inner in found)
        if problem := why_not(self._writer.folder) if own_rank() == 0 else "":
            raise UsageError(problem)
        self._held = held_parameters(self._models, found)
        self._pieces, group = pieces_of(self._held, self._names), grouped(self._optimizers)
        if not any(p.parameter.requires_grad and (id(p.stepped) in group or p.group) for p in self._pieces):
            raise UsageError(
                "the optimizer has none of the model's parameters; give both as they are trained, after all wrapping"
            )

    def _begin_step(self) -> None:
        self._gradients: dict[str, Tensor] = {}  # summaries
        self._values: dict[str, dict[str, list[Tensor]]] = {kind: {} for kind in KINDS}  # of fragments, by name
        self._stepped: set[int] = set()  # tensors that an optimizer has stepped
        self._settings: dict[str, Line] = {}  # of the groups of the optimizers that stepped

    @torch.no_grad()
    def __enter__(self) -> Self:
        self._weights = {piece.name: self._summary(WEIGHT, piece, piece.stepped) for piece in self._pieces}
        reduced = self._reduced(list(self._layout.parameters), [self._weights], ())
        whole = self._whole(list(self._layout.parameters), reduced, KINDS[:1])
        together(lambda: self._begin(reduced, whole) if own_rank() == 0 else None)
        self._begin_step()
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        if watch := watch_precision(self._models[0], self._precision):
            self._handles.append(watch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if own_rank() == 0:
            problem = "" if error is None else f"{type(error).__name__}: {one_line(error)}"
            try:
                self._writer.end({"kind": "end", "steps": self._steps, "error": problem})
            except UsageError as unwritable:  # ranks that die before they come here cannot be met: nothing is raised
                warnings.warn(f"the end of the record is not in it: {unwritable}", stacklevel=2)

    @torch.no_grad()
    def step(
        self, *, loss: Tensor | float | None = None, tokens: Tensor | int | None = None, batch: Rows | None = None
    ) -> None:
        """Record a step: call it on every rank, once after every optimizer step.

        loss: the mean over this rank's tokens. The record holds the mean over the ranks, weighted by ``tokens`` if
            these are given.
        tokens: the number of this rank's targets.
        batch: the rows of token ids of all of this rank's micro-batches, without padding. Their fingerprint tells
            whether another run had the same rows. Of ranks that share their rows (tensor parallelism), one passes them.

        A step that a loss scaler skipped is recorded as such. Raises UsageError for a batch that is not rows of whole
        numbers, for losses of which only some have tokens, and if the record cannot be written. An error of one rank
        is raised on all ranks.
        """
        numbers = together(lambda: _numbers(loss, tokens, batch))
        names = self._layout.trained
        reduced = self._reduced(names, [self._weights, self._gradients], numbers)
        counted, uncounted = reduced.numbers[3:5]
        if counted and uncounted:
            raise UsageError("some ranks hand a loss with tokens= and some without; hand tokens= with every loss")
        whole = self._whole(names, reduced, KINDS)
        together(lambda: self._writer.line(self._line(reduced, whole)) if own_rank() == 0 else None)
        self._steps += 1
        self._begin_step()

    def _reduced(
        self, names: Sequence[str], summaries: Sequence[Mapping[str, Tensor]], numbers: Sequence[float]
    ) -> Reduced:
        nothing = torch.zeros(WIDTH, dtype=torch.float64, device=self._device)
        stacked = torch.stack([torch.stack([one.get(name, nothing) for name in names]) for one in summaries])
        return reduce_over_ranks(stacked, numbers, names=names, layout=self._layout)

    def _whole(self, names: Sequence[str], reduced: Reduced, kinds: Sequence[str]) -> dict[str, Tensor]:
        """Assemble the whole tensors that ``full`` keeps, of what any rank has read in this step; collective."""
        return {
            f"{kind}/{name}": assemble(self._local, self._values[kind], self._layout, name)
            for row, name in enumerate(names)
            for kind, summaries in zip(kinds, reduced.summaries, strict=True)
            if self._full and summaries[row, PRESENT]
        }

    def _line(self, reduced: Reduced, whole: dict[str, Tensor]) -> Line:
        total, weight, tokens, counted, _, rows, *words = reduced.numbers
        group = grouped(self._optimizers)
        known = {id(piece.stepped) for piece in self._pieces}
        line: Line = {
            "kind": "step",
            "step": self._steps,
            "stepped": bool(self._settings),
            "loss": total / weight if weight else None,
            "tokens": int(tokens) if counted else None,
            "batch": {"rows": int(rows), "hash": hexadecimal(words)} if rows else None,
            "norm": float(np.sqrt(reduced.summaries[1, :, SQUARES].sum())),
            "settings": self._settings,
            "regrouped": {
                piece.name: own
                for piece in self._trained
                if not piece.group and (own := group.get(id(piece.stepped))) != self._first_group.get(id(piece.stepped))
            },
            "unseen": len(group.keys() - known),
            "computed_in": self._precision[0] if self._precision else None,
        }
        return line | (self._files(f"step-{self._steps:06d}", reduced, whole, KINDS) if self._settings else {})

    def _files(self, stem: str, reduced: Reduced, whole: dict[str, Tensor], kinds: Sequence[str]) -> Line:
        """Write the files of a line's tensors; returns the line's fields about them."""
        line: Line = {"replicas": dict(zip(kinds, reduced.drift, strict=True))}
        if self._full:
            line["tensors"] = self._writer.file(f"{stem}-tensors.safetensors", save(whole))
        return line | {"file": self._writer.file(f"{stem}.safetensors", save_arrays(reduced.arrays(kinds)))}

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Read gradients and settings when an optimizer's step begins."""
        if getattr(optimizer, "grad_scale", None) is not None:
            raise UsageError(
                "gradients still have the loss scale in them; call scaler.unscale_(optimizer) before its step"
            )
        number = next(number for number, own in enumerate(self._optimizers) if own is optimizer)
        stepped, late = grouped([optimizer]), [p for p in self._frozen if p.parameter.requires_grad]
        if stepped.keys() & self._stepped:
            raise UsageError("an optimizer has stepped twice since r.step(); call r.step() after each of its steps")
        self._stepped |= stepped.keys()
        self._settings |= settings(optimizer, number=number, places=self._groups)
        if thawed := next((piece.name for piece in late if id(piece.parameter) in stepped), ""):
            raise UsageError(f"{thawed} was frozen when the recording began and is trained now; begin it afterwards")
        for piece in self._stepped_by(optimizer):
            gradient = (
                piece.stepped.grad if piece.stepped.grad is not None else getattr(piece.stepped, "decoupled_grad", None)
            )
            if gradient is not None:
                self._gradients[piece.name] = self._summary(GRADIENT, piece, gradient)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Read the weights when an optimizer's step has ended."""
        for piece in self._stepped_by(optimizer):
            self._weights[piece.name] = self._summary(WEIGHT, piece, piece.stepped)

    def _stepped_by(self, optimizer: Optimizer) -> list[Piece]:
        """Give the trained pieces of an optimizer. Pieces without an optimizer belong to the first."""
        own, every = grouped([optimizer]), grouped(self._optimizers)
        first = optimizer is self._optimizers[0]
        return [
            piece
            for piece in self._trained
            if id(piece.stepped) in own or (first and not piece.group and id(piece.stepped) not in every)
        ]

    def _summary(self, kind: str, piece: Piece, tensor: Tensor) -> Tensor:
        values = piece.values(tensor)
        if self._full:
            self._values[kind][piece.name] = [value.clone() for value in values]
        return piece.summary(values, device=self._device)

    def _begin(self, reduced: Reduced, whole: dict[str, Tensor]) -> None:
        self._writer.begin(self._header())
        self._writer.line({"kind": "loaded", **self._files("loaded", reduced, whole, KINDS[:1])})

    def _header(self) -> Line:
        return {
            "kind": "header",
            "format": FORMAT,
            "version": VERSION,
            "ranks": world_size(),
            "python": platform.python_version(),
            "libraries": {library: found for library in LIBRARIES if (found := _version(library))},
            "parameters": self._layout.parameters,
            "tied": tied_names(self._models, self._held, self._names),
            "left_out": left_out(self._held, self._names),
        }


def _numbers(loss: Tensor | float | None, tokens: Tensor | int | None, batch: Rows | None) -> list[float]:
    """Give the numbers that are summed over ranks.

    They are the weighted loss and its weight, tokens, ranks that counted tokens and ranks that did not, and rows.
    """
    weight = 0.0 if loss is None else 1.0 if tokens is None else float(tokens)
    total = weight * float(loss) if loss is not None and weight else 0.0
    uncounted = loss is not None and tokens is None
    return [total, weight, float(tokens or 0), tokens is not None, uncounted, *fingerprint(batch)]


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def fingerprint(batch: Rows | None) -> list[float]:
    """Fingerprint rows whatever their order, rank and micro-batch.

    Returns the number of rows and the sums of the words of their hashes: 1 + WORDS numbers to be summed over ranks.
    """
    total = np.zeros(1 + WORDS)
    for row in () if batch is None else batch:
        ids = torch.as_tensor(row)
        if ids.dim() != 1 or ids.is_floating_point():
            raise UsageError(
                f"batch= has to be rows of token ids; it has a row of shape {tuple(ids.shape)}, {ids.dtype}"
            )
        digest = hashlib.sha256(ids.cpu().numpy().astype("<i8").tobytes()).digest()
        total += [1, *np.frombuffer(digest, dtype="<u4", count=WORDS)]
    return [float(number) for number in total]


def hexadecimal(words: Sequence[float]) -> str:
    """Format the sums of WORDS words as a record holds them."""
    return "".join(f"{int(word) % 2**32:08x}" for word in words)


def grouped(optimizers: Sequence[Optimizer]) -> dict[int, str]:
    """Give the current group of each parameter of the optimizers, by the parameter's id."""
    return {
        id(parameter): f"{number}.{place}"
        for number, optimizer in enumerate(optimizers)
        for place, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }


def settings(optimizer: Optimizer, *, number: int, places: Mapping[int, str]) -> dict[str, Line]:
    """Give the optimizer's class and its numeric settings (a list for betas), by group.

    places: the groups of tensors that a library steps a group at a time, under another number.
    """
    found: dict[str, Line] = {}
    for place, group in enumerate(optimizer.param_groups):
        known = next((places[id(one)] for one in group["params"] if id(one) in places), f"{number}.{place}")
        found[known] = {"optimizer": type(optimizer).__name__, **_settings(group)}
    return found


def _settings(group: dict[str, Any]) -> Line:
    found = {}
    for name, value in group.items():
        values = [float(one) for one in (value if isinstance(value, tuple | list) else [value]) if _is_number(one)]
        if name not in HOW and values:
            found[name] = values if len(values) > 1 else values[0]
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1 and value.dim() == 0)


def watch_precision(model: nn.Module, dtypes: list[str]) -> RemovableHandle | None:
    """Add to ``dtypes`` the dtype of the first forward pass: autocast's dtype, or that of the weights at that moment.

    Nothing is watched in a compiled model, where a hook would be compiled too.
    """
    modules = list(model.modules())
    if any(hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in modules):
        return None
    inner = next((module for module in modules if list(module.parameters(recurse=False))), None)
    if inner is None:
        return None

    def look(module: nn.Module, _: Any) -> None:
        weight = next(module.parameters(recurse=False))
        device = weight.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        dtypes.append(str(dtype).removeprefix("torch."))
        handle.remove()

    handle: RemovableHandle = inner.register_forward_pre_hook(look)
    return handle
