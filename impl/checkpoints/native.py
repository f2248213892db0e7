"""Writes and reads the content of a backend's own checkpoint: trained models, and random generators of every rank.

impl.checkpoints.folder writes the folder around this content. Each rank has a JSON file with the states of its
generators, so a resumed training has the same dropout as an uninterrupted one. The states fit only the same ranks with
the same work, so they are restored only for the same layout and number of ranks.
"""

import base64
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import torch.distributed as dist
from pydantic import BeforeValidator, PlainSerializer, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from conformance.core.errors import STRICT, UsageError, explain, one_line
from conformance.core.io import read_json
from impl.checkpoints.folder import Draft, verified
from impl.checkpoints.manifest import About
from impl.interface.distributed import on_all_ranks
from impl.interface.trainable import Context, Trainable

FOLDER = "generators"
Bytes = Annotated[  # a state is a tensor of bytes
    bytes,
    BeforeValidator(lambda value: base64.b64decode(value, validate=True) if isinstance(value, str) else value),
    PlainSerializer(lambda value: base64.b64encode(value).decode("ascii"), when_used="json"),
]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GeneratorStates:
    """Holds the states of one rank's generators.

    cuda: state of its GPU's generator, if it has one. library: states of the backend library's own generators, by name.
    """

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, tuple[int, ...], int, int, float]
    torch: Bytes
    cuda: Bytes | None
    library: dict[str, Bytes]


_ADAPTER = TypeAdapter(GeneratorStates)


def read_generators(library: Mapping[str, torch.Tensor]) -> GeneratorStates:
    """Returns the current states of this process. ``library``: the result of Context.library_generators."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state(legacy=True)
    return GeneratorStates(
        python=random.getstate(),
        numpy=(kind, tuple(numpy.asarray(keys).tolist()), int(position), int(has_gauss), float(gauss)),
        torch=_to_bytes(torch.get_rng_state()),
        cuda=_to_bytes(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        library={name: _to_bytes(state) for name, state in library.items()},
    )


def set_generators(states: GeneratorStates) -> dict[str, torch.Tensor]:
    """Sets the generators of this process; returns the states for Context.set_library_generators.

    Raises UsageError for invalid states.
    """
    try:
        random.setstate(states.python)
        kind, keys, position, has_gauss, gauss = states.numpy
        numpy.random.set_state((kind, numpy.asarray(keys, dtype=numpy.uint32), position, has_gauss, gauss))
        torch.set_rng_state(_to_tensor(states.torch))
        if states.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(_to_tensor(states.cuda))
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise UsageError(f"the checkpoint has invalid states of random generators: {one_line(error)}") from None
    return {name: _to_tensor(state) for name, state in states.library.items()}


def write_file(folder: Path, rank: int, states: GeneratorStates) -> None:
    """Writes the states of a rank into the folder of a checkpoint."""
    (folder / FOLDER).mkdir(exist_ok=True)
    _file(folder, rank).write_bytes(_ADAPTER.dump_json(states))


def read_file(folder: Path, rank: int) -> GeneratorStates:
    """Reads the states of a rank. Raises UsageError for a file that ``write_file`` did not write."""
    file = _file(folder, rank)
    try:
        values: dict[str, Any] = read_json(file)
        return _ADAPTER.validate_python(values)
    except FileNotFoundError:
        raise UsageError(f"{file} is missing; give a checkpoint that was saved with these ranks") from None
    except ValidationError as error:
        raise explain(error, source=str(file), what="state of random generators") from None


def read_together(folder: Path) -> GeneratorStates:
    """Reads the states of this rank; if a file is wrong, all ranks raise. Collective."""
    rank = dist.get_rank()
    return on_all_ranks(f"reading {folder / FOLDER}", lambda: read_file(folder, rank))[rank]


def _file(folder: Path, rank: int) -> Path:
    return folder / FOLDER / f"rank-{rank}.json"


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _to_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def write(draft: Draft, context: Context, models: Mapping[str, Trainable]) -> None:
    """Adds the current training state to the draft of a checkpoint; collective."""
    states = read_generators(context.library_generators())  # first: writing a model may draw random numbers
    for name, trainable in models.items():
        trainable.save_ckpt(draft.path / name, draft.when)
    write_file(draft.path, dist.get_rank(), states)


def read(folder: Path, wanted: About, context: Context, models: Mapping[str, Trainable]) -> About:
    """Restores the models, and in the same layout the generators; returns the checkpoint's description. Collective.

    Raises UsageError, before anything changes, if ``wanted`` cannot resume from the checkpoint or if it is damaged.
    """
    found = verified(folder, wanted).about
    same_ranks = (found.layout, found.world_size) == (wanted.layout, wanted.world_size)
    states = read_together(folder) if same_ranks else None
    for name, trainable in models.items():
        trainable.load_ckpt(folder / name)
    if states:
        context.set_library_generators(set_generators(states))
    return found
