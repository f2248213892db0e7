"""What a model's folder has beside parameters. Apart from models.py, because it needs no transformers.

Models whose numbers are still in files, so that a rank reads only those that it holds.

transformers loads a model by renaming, casting and stacking the tensors of its files. It is given tensors here that
have no numbers (on torch's meta device) and note what is done to them: their *origin*. So a model is built as
transformers alone knows how, of any family and version, and every region of a parameter can be read by itself.
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

from impl.interface.sharded_safetensors import SAFETENSORS_DTYPES, SliceReader, strips


def published_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What a model's folder has beside parameters, by name: it is not trained, and is exported with them."""
    kept = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._buffers.keys() - module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


if TYPE_CHECKING:
    from transformers import PreTrainedModel

Indices = Sequence[int]
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Origin(Protocol):
    """Where the numbers of a tensor come from."""

    def region(self, read: SliceReader, start: Indices, shape: Indices) -> Tensor:
        """The region that begins at the indices ``start`` and has this ``shape``."""
        ...


@dataclass(frozen=True)
class Stored:
    """A tensor of a file."""

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
    """Tensors of one shape along a new first dimension, such as the experts of a layer."""

    parts: tuple[Origin, ...]

    def region(self, read: SliceReader, start: Indices, shape: Indices) -> Tensor:
        own = self.parts[start[0] : start[0] + shape[0]]
        return torch.stack([part.region(read, start[1:], shape[1:]) for part in own])


@dataclass(frozen=True)
class Joined:
    """Tensors end to end along a dimension; ``lengths``: along this dimension."""

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
    """The result of any other function of torch, which needs all of its arguments; ``pick``: of several results."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    pick: int | None

    def region(self, read: SliceReader, start: Indices, shape: Indices) -> Tensor:
        # On the host, which need not copy a whole argument for each strip of the result.
        found = self.function(*_read(self.arguments, read.on_host()), **_read(self.options, read.on_host()))
        whole: Tensor = found if self.pick is None else found[self.pick]
        return whole[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))].to(read.device)


class Unread(Tensor):
    """A tensor on the meta device that knows its origin, and the origins of what is made of it."""

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
        if func is Tensor.to:  # it stays without numbers, whatever the device
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
    """Of what a function of torch has made of unread tensors."""
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
    """An argument of a function: all of an unread tensor."""

    origin: Origin
    shape: tuple[int, ...]


def _origins(value: Any) -> Any:
    """``value`` with the whole of its origin in the place of every unread tensor."""
    if isinstance(value, Unread):
        return _Whole(value.origin, tuple(value.shape))
    if isinstance(value, (tuple, list)):
        return type(value)(map(_origins, value))
    return {key: _origins(one) for key, one in value.items()} if isinstance(value, dict) else value


def _read(value: Any, read: SliceReader) -> Any:
    """The other way: ``value`` with numbers."""
    if isinstance(value, _Whole):
        return value.origin.region(read, [0] * len(value.shape), value.shape)
    if isinstance(value, (tuple, list)):
        return type(value)(_read(one, read) for one in value)
    return {key: _read(one, read) for key, one in value.items()} if isinstance(value, dict) else value


@dataclass(kw_only=True)
class UnreadWeights:
    """The origins of a model's parameters by name, and the files that they lie in."""

    files: list[Path]
    origins: dict[str, Origin] = field(default_factory=dict)

    @contextlib.contextmanager
    def opened(self, device: str) -> Iterator["WeightReader"]:
        """Give regions on ``device``. Tensors are cast, stacked and joined there, too."""
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
    """In the place of safetensors' ``safe_open``: the tensors of a file, unread."""

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
    """transformers reads no numbers of weights meanwhile, and builds models of unread tensors."""
    with mock.patch("transformers.modeling_utils.safe_open", _Headers):
        yield


def take_origins(model: "PreTrainedModel", files: list[Path]) -> UnreadWeights:
    """Put empty parameters (on the meta device) in the place of unread ones, and read the buffers; returns what there
    is to read. What is tied stays tied, and so becomes what the configuration ties if both tensors are in the files and
    are equal."""
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
    """Put parameters with memory, by ``make``, in the place of empty ones; what is tied stays tied."""
    made = dict[int, torch.nn.Parameter]()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if id(parameter) not in made:
                    made[id(parameter)] = torch.nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]


def untouched_zeros(shape: Indices, dtype: torch.dtype) -> Tensor:
    """Zeros on the host that take no memory until they are written to: the kernel has one page of zeros for all.

    A library that wants whole parameters can so be given some, to make of them what it keeps.
    """
    count = math.prod(shape)
    if not count:
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize, flags=_PRIVATE), dtype=dtype).view(*shape)


def _tie_equals(model: "PreTrainedModel", read: SliceReader) -> None:
    """As transformers does where it has the numbers."""
    tied: dict[str, str] = model.all_tied_weights_keys
    for name, other in list(tied.items()):
        own, source = model.get_parameter(name), model.get_parameter(other)
        if own is source or not (isinstance(own, Unread) and isinstance(source, Unread)):
            continue
        if own.shape == source.shape and all(
            torch.equal(*(one.origin.region(read, start, shape) for one in (own, source)))
            for start, shape in strips([0] * own.dim(), own.shape)
        ):
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, source)
        else:
            del tied[name]
