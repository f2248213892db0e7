"""Builds models whose numbers stay in files until a rank reads those that it holds.

transformers loads a model by renaming, casting and stacking the tensors of its files. Here it gets tensors without
numbers (on torch's meta device), which record these operations: their *origin*. So transformers itself builds the
model, of any family and version, and every region of a parameter can be read separately.
"""

import contextlib
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from unittest import mock

import torch
from safetensors import safe_open
from torch import Tensor

from impl.interface.sharded_safetensors import SAFETENSORS_DTYPES, SliceReader, chunks

WRAPPED = "._fsdp_wrapped_module"  # what FullyShardedDataParallel adds to the names of the modules that it wraps


def published_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the buffers that a model's folder has beside parameters, by name. They are not trained, but exported."""
    persistent = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }
    return {name.replace(WRAPPED, ""): buffer for name, buffer in model.named_buffers() if name in persistent}


if TYPE_CHECKING:
    from transformers import PreTrainedModel

Indices = Sequence[int]
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Origin(Protocol):
    """Declares where the numbers of a tensor come from."""

    def region(self, read: SliceReader, start: Indices, shape: Indices) -> Tensor:
        """Reads the region that begins at the indices ``start`` and has this ``shape``."""
        ...


@dataclass(frozen=True)
class Stored:
    """Refers to a tensor of a file."""

    name: str

    def region(self, read: SliceReader, start: Indices, shape: Indices) -> Tensor:
        return read.region(self.name, start, shape)


@dataclass(frozen=True)
class Cast:
    of: Origin
    dtype: torch.dtype

    def region(self, read: SliceReader, start: Indices, shape: Indices) -> Tensor:
        return self.of.region(read, start, shape).to(self.dtype)


@dataclass(frozen=True)
class Stacked:
    """Stacks tensors of one shape along a new first dimension, such as the experts of a layer."""

    parts: tuple[Origin, ...]

    def region(self, read: SliceReader, start: Indices, shape: Indices) -> Tensor:
        own = self.parts[start[0] : start[0] + shape[0]]
        return torch.stack([part.region(read, start[1:], shape[1:]) for part in own])


@dataclass(frozen=True)
class Joined:
    """Concatenates tensors along a dimension; ``lengths`` are their sizes along this dimension."""

    parts: tuple[Origin, ...]
    lengths: tuple[int, ...]
    dim: int

    def region(self, read: SliceReader, start: Indices, shape: Indices) -> Tensor:
        first, last, found, at = start[self.dim], start[self.dim] + shape[self.dim], [], 0
        for part, length in zip(self.parts, self.lengths, strict=True):
            begin, end = max(first, at), min(last, at + length)
            if begin < end:
                inside, size = [*start], [*shape]
                inside[self.dim], size[self.dim] = begin - at, end - begin
                found.append(part.region(read, inside, size))
            at += length
        return torch.cat(found, dim=self.dim)


@dataclass(frozen=True)
class Computed:
    """Calls any other function of torch with whole arguments; ``pick`` selects one of several results."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    pick: int | None

    def region(self, read: SliceReader, start: Indices, shape: Indices) -> Tensor:
        # On the host: the device would need a copy of the whole arguments for each chunk of the result.
        found = self.function(*_read(self.arguments, read.on_host()), **_read(self.options, read.on_host()))
        whole: Tensor = found if self.pick is None else found[self.pick]
        return whole[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))].to(read.device)


class Unread(Tensor):
    """Records the origins of a meta-device tensor and of the tensors that are computed from it."""

    origin: Origin

    @classmethod
    def of_file(cls, file: Any, name: str) -> "Unread":
        piece = file.get_slice(name)
        empty = torch.empty(piece.get_shape(), dtype=SAFETENSORS_DTYPES[piece.get_dtype()], device="meta")
        made: Unread = empty.as_subclass(cls)
        made.origin = Stored(name)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to:  # stays on the meta device, whatever the target
            dtypes = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.dtype)]
            args, kwargs = (args[0], *(dtypes or [args[0].dtype])), {}
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        several = isinstance(result, (tuple, list))
        for number, one in enumerate(result if several else (result,)):
            if isinstance(one, Unread) and not hasattr(one, "origin"):
                one.origin = _origin(func, args, kwargs, number if several else None)
        return result


_SAME = (Tensor.detach, Tensor.contiguous, Tensor.clone, Tensor.data.__get__)  # type: ignore[attr-defined]


def _origin(function: Any, arguments: Any, options: Any, pick: int | None) -> Origin:
    """Returns the origin of the result of a torch function on unread tensors."""
    first = arguments[0]
    if function in _SAME or (function is Tensor.__getitem__ and arguments[1] is Ellipsis):
        return _origin_of(first)
    if function is Tensor.to:
        return Cast(_origin_of(first), arguments[1])
    dim = options.get("dim", arguments[1] if len(arguments) > 1 else 0)
    listed = isinstance(first, (tuple, list)) and all(isinstance(one, Unread) for one in first)
    if function is torch.stack and listed and dim == 0:
        return Stacked(tuple(map(_origin_of, first)))
    if function is torch.cat and listed:
        dim = dim % first[0].dim()
        return Joined(tuple(map(_origin_of, first)), tuple(one.shape[dim] for one in first), dim)
    return Computed(function, _origins(arguments), _origins(options), pick)


def _origin_of(tensor: Unread) -> Origin:
    return tensor.origin


@dataclass(frozen=True)
class _Whole:
    """Stands for a whole unread tensor as the argument of a function."""

    origin: Origin
    shape: tuple[int, ...]


def _origins(value: Any) -> Any:
    """Replaces every unread tensor in ``value`` by the whole of its origin."""
    if isinstance(value, Unread):
        return _Whole(value.origin, tuple(value.shape))
    if isinstance(value, (tuple, list)):
        return type(value)(map(_origins, value))
    return {key: _origins(one) for key, one in value.items()} if isinstance(value, dict) else value


def _read(value: Any, read: SliceReader) -> Any:
    """Reverses ``_origins``: returns ``value`` with numbers."""
    if isinstance(value, _Whole):
        return value.origin.region(read, [0] * len(value.shape), value.shape)
    if isinstance(value, (tuple, list)):
        return type(value)(_read(one, read) for one in value)
    return {key: _read(one, read) for key, one in value.items()} if isinstance(value, dict) else value


@dataclass(kw_only=True)
class UnreadWeights:
    """Holds the origins of a model's parameters by name, and the files that contain them."""

    files: list[Path]
    origins: dict[str, Origin] = field(default_factory=dict)

    @contextlib.contextmanager
    def opened(self, device: str) -> Iterator["WeightReader"]:
        """Opens the files for reading on ``device``. Tensors are also cast, stacked and joined there."""
        with SliceReader(self.files, device=device) as read:
            yield WeightReader(self.origins, read)


@dataclass(frozen=True)
class WeightReader:
    """Reads regions of a model's parameters in the dtype that they had when the model was built."""

    origins: Mapping[str, Origin]
    files: SliceReader

    def region(self, name: str, start: Indices, shape: Indices) -> Tensor:
        return self.origins[name].region(self.files, start, shape)


class _Headers:
    """Replaces safetensors' ``safe_open``: returns the tensors of a file unread."""

    def __init__(self, path: str | Path, **_: Any) -> None:
        with safe_open(path, framework="pt") as file:
            self._tensors = {name: Unread.of_file(file, name) for name in file.keys()}  # noqa: SIM118

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> Unread:
        return self._tensors[name]

    def __exit__(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def reading_headers() -> Iterator[None]:
    """Makes transformers build models of unread tensors inside the ``with`` block; it reads no numbers of weights."""
    with mock.patch("transformers.modeling_utils.safe_open", _Headers):
        yield


def take_origins(model: "PreTrainedModel", files: list[Path]) -> UnreadWeights:
    """Replaces unread parameters by empty ones (on the meta device), and reads the buffers; returns the unread weights.

    Tied parameters stay tied. Parameters that the configuration ties become tied if the files have both and they are
    equal.
    """
    with SliceReader(files) as read:
        _tie_equals(model, read)
        unread, empty = UnreadWeights(files=files), dict[int, torch.nn.Parameter]()
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if isinstance(parameter, Unread):
                    plain = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                    made = torch.nn.Parameter(plain, requires_grad=parameter.requires_grad)
                    module._parameters[name] = empty.setdefault(id(parameter), made)
                    unread.origins[f"{prefix}.{name}".lstrip(".")] = parameter.origin
            for name, buffer in module._buffers.items():
                if isinstance(buffer, Unread):
                    module._buffers[name] = _read(_origins(buffer), read)
    return unread


def give_memory(model: torch.nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replaces empty parameters by parameters with memory from ``make``; tied parameters stay tied."""
    made = dict[int, torch.nn.Parameter]()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = torch.nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]


def untouched_zeros(shape: Indices, dtype: torch.dtype) -> Tensor:
    """Returns zero-filled full-size placeholders for libraries that need materialized parameters before sharding.

    They take no host memory until they are written to: the kernel maps one page of zeros for all.
    """
    count = math.prod(shape)
    if not count:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=_PRIVATE), dtype=dtype).view(*shape)


def _tie_equals(model: "PreTrainedModel", read: SliceReader) -> None:
    """Ties equal weights as transformers does when it has the numbers."""
    tied: dict[str, str] = model.all_tied_weights_keys
    for name, other in list(tied.items()):
        own, source = model.get_parameter(name), model.get_parameter(other)
        if own is source or not (isinstance(own, Unread) and isinstance(source, Unread)):
            continue
        if own.shape == source.shape and all(
            torch.equal(*(one.origin.region(read, start, shape) for one in (own, source)))
            for start, shape in chunks([0] * own.dim(), own.shape)
        ):
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, source)
        else:
            del tied[name]
