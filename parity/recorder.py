"""Records a training loop: what each optimizer step read and wrote. It changes nothing in the loop.

Gradients are read in place when an optimizer's step begins, and weights when it has ended, by torch's optimizer hooks.
Both are kept as sketches (parity/shards.py): no parameter is copied, no random number is drawn, nothing is written to.
Ranks communicate once per step, in one all_reduce of these sketches, and agree that no rank has failed. Rank 0 writes.
"""

import platform
import warnings
from collections.abc import Sequence
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
from parity.quantities import Names
from parity.record_files import FORMAT, VERSION, Line, Writer, why_not
from parity.shards import (
    SQUARES,
    WIDTH,
    Piece,
    Reduced,
    find_holders,
    left_out,
    own_rank,
    pieces_of,
    reduce_over_ranks,
    summarize,
    tied_names,
    together,
    world_size,
)
from parity.training_loop import (
    Rows,
    fingerprint,
    grouped,
    hexadecimal,
    refusal,
    settings,
    torch_optimizers,
    watch_precision,
)

WEIGHT, GRADIENT = KINDS = ("weight", "gradient")
LIBRARIES = ("backend-parity", "torch", "transformers", "accelerate", "peft", "trl")


def record(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    out: str | Path,
    names: Names | None = None,
    full: bool = False,
) -> "Recorder":
    """Record a training loop: ``with parity.record(model, optimizer, out="run-a") as r: ... r.step(loss=loss)``.

    model, optimizer: as they train, after DDP, ``fully_shard`` or ``accelerator.prepare``; several optimizers as a
        list.
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
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        out: Path,
        names: Names | None,
        full: bool,
    ) -> None:
        self._model, self._names, self._full, self._writer = model, names, full, Writer(out)
        self._optimizers, self._pieces = together(lambda: self._observed(optimizer))
        self._trained = tuple(piece for piece in self._pieces if piece.parameter.requires_grad)
        self._frozen = tuple(piece for piece in self._pieces if not piece.parameter.requires_grad)
        self._first_group = grouped(self._optimizers)
        self._holders = find_holders(self._pieces)
        device = self._pieces[0].parameter.device
        self._device = device if device.type == "cuda" else torch.device("cpu")  # where summaries meet
        self._handles: list[RemovableHandle] = []
        self._precision: list[str] = []
        self._weights: dict[str, Tensor] = {}  # the last summary of each trained piece
        self._steps = 0
        self._begin_step()

    def _observed(self, optimizer: Optimizer | Sequence[Optimizer]) -> tuple[tuple[Optimizer, ...], tuple[Piece, ...]]:
        """Find the optimizers and parameters to record. Raises UsageError if they cannot be, or rank 0 cannot write."""
        optimizers = torch_optimizers(optimizer)
        if problem := refusal(self._model) or (why_not(self._writer.folder) if own_rank() == 0 else ""):
            raise UsageError(problem)
        pieces, group = pieces_of(self._model, self._names), grouped(optimizers)
        if not any(piece.parameter.requires_grad and id(piece.parameter) in group for piece in pieces):
            raise UsageError(
                "the optimizer has none of the model's parameters; give both as they are trained, after all wrapping"
            )
        return optimizers, pieces

    def _begin_step(self) -> None:
        self._gradients: dict[str, Tensor] = {}  # summaries
        self._tensors: dict[str, Tensor] = {}  # whole ones, by kind and name
        self._settings: dict[str, Line] = {}  # of the groups of the optimizers that stepped

    @torch.no_grad()
    def __enter__(self) -> Self:
        summaries = [self._summary(WEIGHT, piece, piece.parameter) for piece in self._pieces]
        self._weights = {piece.name: summary for piece, summary in zip(self._pieces, summaries, strict=True)}
        reduced = reduce_over_ranks(torch.stack(summaries)[None], (), names=list(self._weights), holders=self._holders)
        together(lambda: self._begin(reduced) if own_rank() == 0 else None)
        self._begin_step()
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        if watch := watch_precision(self._model, self._precision):
            self._handles.append(watch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if own_rank() == 0:
            said = "" if error is None else f"{type(error).__name__}: {one_line(error)}"
            try:
                self._writer.end({"kind": "end", "steps": self._steps, "error": said})
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
        names = [piece.name for piece in self._trained]
        nothing = torch.zeros(WIDTH, dtype=torch.float64, device=self._device)
        weights = torch.stack([self._weights[name] for name in names])
        gradients = torch.stack([self._gradients.get(name, nothing) for name in names])
        summaries = torch.stack([weights, gradients])
        reduced = reduce_over_ranks(summaries, numbers, names=names, holders=self._holders)
        counted, uncounted = reduced.numbers[3:5]
        if counted and uncounted:
            raise UsageError("some ranks hand a loss with tokens= and some without; hand tokens= with every loss")
        together(lambda: self._writer.line(self._line(reduced)) if own_rank() == 0 else None)
        self._steps += 1
        self._begin_step()

    def _line(self, reduced: Reduced) -> Line:
        total, weight, tokens, counted, _, rows, *words = reduced.numbers
        group = grouped(self._optimizers)
        known = {id(piece.parameter) for piece in self._pieces}
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
                if (own := group.get(id(piece.parameter))) != self._first_group.get(id(piece.parameter))
            },
            "unseen": len(group.keys() - known),
            "computed_in": self._precision[0] if self._precision else None,
        }
        return line | (self._files(f"step-{self._steps:06d}", reduced, KINDS) if self._settings else {})

    def _files(self, stem: str, reduced: Reduced, kinds: Sequence[str]) -> Line:
        """Write the files of a line's tensors; returns the line's fields about them."""
        line: Line = {"replicas": dict(zip(kinds, reduced.drift, strict=True))}
        if self._full:
            line["tensors"] = self._writer.file(f"{stem}-tensors.safetensors", save(self._tensors))
        return line | {"file": self._writer.file(f"{stem}.safetensors", save_arrays(reduced.arrays(kinds)))}

    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Read gradients and settings when an optimizer's step begins."""
        if getattr(optimizer, "grad_scale", None) is not None:
            raise UsageError(
                "gradients still have the loss scale in them; call scaler.unscale_(optimizer) before its step"
            )
        number = next(number for number, own in enumerate(self._optimizers) if own is optimizer)
        own = settings(optimizer, number=number)
        if own.keys() & self._settings.keys():
            raise UsageError("an optimizer has stepped twice since r.step(); call r.step() after each of its steps")
        self._settings |= own
        stepped, late = grouped([optimizer]), [p for p in self._frozen if p.parameter.requires_grad]
        if thawed := next((piece.name for piece in late if id(piece.parameter) in stepped), ""):
            raise UsageError(f"{thawed} was frozen when the recording began and is trained now; begin it afterwards")
        for piece in self._stepped_by(optimizer):
            if piece.parameter.grad is not None:
                self._gradients[piece.name] = self._summary(GRADIENT, piece, piece.parameter.grad)

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Read the weights when an optimizer's step has ended."""
        for piece in self._stepped_by(optimizer):
            self._weights[piece.name] = self._summary(WEIGHT, piece, piece.parameter)

    def _stepped_by(self, optimizer: Optimizer) -> list[Piece]:
        """Give the trained pieces of an optimizer. Pieces without an optimizer belong to the first."""
        own, every = grouped([optimizer]), grouped(self._optimizers)
        first = optimizer is self._optimizers[0]
        return [
            piece
            for piece in self._trained
            if id(piece.parameter) in own or (first and id(piece.parameter) not in every)
        ]

    def _summary(self, kind: str, piece: Piece, tensor: Tensor) -> Tensor:
        if self._full:
            whole = piece.gathered(tensor)
            if own_rank() == 0:
                self._tensors[f"{kind}/{piece.name}"] = whole.cpu().clone()
        return summarize(piece.local(tensor), piece.box, seed=piece.seed).to(self._device)

    def _begin(self, reduced: Reduced) -> None:
        self._writer.begin(self._header())
        self._writer.line({"kind": "loaded", **self._files("loaded", reduced, KINDS[:1])})

    def _header(self) -> Line:
        parameters = {
            piece.name: {
                "shape": list(piece.box.shape),
                "dtype": str(piece.parameter.dtype).removeprefix("torch."),
                "trained": piece.parameter.requires_grad,
                "group": self._first_group.get(id(piece.parameter)),
                "shards": len(self._holders.ranks[piece.name]),
            }
            for piece in self._pieces
        }
        return {
            "kind": "header",
            "format": FORMAT,
            "version": VERSION,
            "ranks": world_size(),
            "python": platform.python_version(),
            "libraries": {library: found for library in LIBRARIES if (found := _version(library))},
            "parameters": parameters,
            "tied": tied_names(self._model, self._pieces, self._names),
            "left_out": left_out(self._model, self._names),
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
