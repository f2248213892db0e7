"""Observes the random generators, peak memory, exported settings and replicas of a rank.

Generators: dropout and the order of data draw random numbers; nothing that is compared with the oracle does. So
generators are checked by their states. At the start of a phase, and again at its end before it saves, every rank's
generators get states that occur nowhere else: not in another phase, on another rank, or in a framework that seeds
itself. After loading a checkpoint, each rank has to have the states with which the same rank ended the previous phase,
and after each step the states that they reach by drawing (docs/principles.md).

Settings: the weights of an exported folder are judged in the phase that begins with it, by its backend. Other programs
also read settings that this backend ignores there, so these are compared with the model's own.

Replicas: ranks that claim to share numbers exchange digests of them (docs/principles.md). Pieces whose bits differ
are then exchanged themselves, one at a time, to measure the distance. A rank copies only a few of them at once,
because together they may be as large as its part of the model. For the next ones it walks all its pieces again: an
adapter may make them for the walk only.
"""

import contextlib
import hashlib
import math
import random
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist

from conformance.backends.protocol import Shard
from conformance.core.io import read_json
from conformance.models.folder_checks import CONFIG
from conformance.numerics.sketch import is_small, kept, on_cpu, splitmix64, without_all_modes, without_modes
from conformance.runtime import mark
from conformance.spec.scenario import ADAPTER, CONFIG_FILE


def seed_generators(
    seed: int,
    rank: int,
    next_step: int,
    *,
    ending: bool = False,
    library: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Seeds all generators of this rank from the scenario's seed, the rank, the number of the next optimizer step, and
    whether a phase is ``ending`` before this step or begins with it.

    library: live states of the library's own generators. They are overwritten in place, because a library's function
    that restores them is what is tested.
    """
    number = ((seed * 1000 + next_step) * 1000 + rank) * 2 + ending
    random.seed(number)
    numpy.random.seed(number % 2**32)
    torch.manual_seed(number)  # of every device
    for place, (name, state) in enumerate(sorted(library.items()), start=1):
        if state.numel() not in (_TORCH_BYTES, _PHILOX_BYTES):
            raise ValueError(
                f"library_generators() gave {name} with {state.numel()} bytes; give the states of torch's generators, "
                f"as torch.get_rng_state() and torch.cuda.get_rng_state() return them"
            )
        seeded = torch.Generator().manual_seed(number * 64 + place).get_state()
        philox = torch.tensor([number * 64 + place, 0]).view(torch.uint8)
        state.copy_(seeded if state.numel() == _TORCH_BYTES else philox)


# Bytes of the state of a torch generator on the CPU, of one on a GPU, and of the words of a Mersenne twister.
_TORCH_BYTES, _PHILOX_BYTES, _WORDS = 5056, 16, 624
TWISTS = 10_000  # of 624 numbers: the largest number of draws of a step that is followed
_AT_ONCE = 250  # twists whose numbers are compared together


def generator_states(library: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Returns the state of each generator: python, numpy, torch, with a GPU cuda, and those of the ``library``."""
    _, words, position, *rest = numpy.random.get_state()
    _, own, gauss = random.getstate()
    states = {
        "python": numpy.asarray([own[-1], *own[:-1]], dtype="<u4").tobytes() + repr(gauss).encode(),
        "numpy": numpy.asarray([position, *words], dtype="<u4").tobytes() + repr(rest).encode(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return states | {f"{name} of the library": state.cpu().numpy().tobytes() for name, state in library.items()}


def generator_digests(states: Mapping[str, bytes]) -> dict[str, str]:
    """Returns the SHA-256 (hexadecimal) of each state."""
    return {name: hashlib.sha256(state).hexdigest() for name, state in states.items()}


def goes_on(before: bytes, after: bytes) -> bool:
    """Whether a generator with the state ``before`` reaches the state ``after`` by drawing numbers."""
    if before == after:
        return True
    if len(before) != len(after) and _PHILOX_BYTES in (len(before), len(after)):
        return False
    if len(before) == _PHILOX_BYTES:  # the seed, and the number of numbers drawn
        return before[:8] == after[:8] and int.from_bytes(after[8:], "little") >= int.from_bytes(before[8:], "little")
    (words, position), (reached, end) = _twister(before), _twister(after)
    if (words == reached).all():
        return end >= position
    stream: Any = numpy.random.MT19937()
    stream.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": _WORDS}}
    numbers = _tempered(reached)
    for done in range(0, TWISTS, _AT_ONCE):
        drawn = stream.random_raw(min(_AT_ONCE, TWISTS - done) * _WORDS).reshape(-1, _WORDS)
        if (drawn == numbers).all(axis=1).any():
            return True
    return False


def _tempered(words: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """Returns the numbers that a Mersenne twister makes of its words, one of each; other words give other numbers."""
    numbers: numpy.ndarray[Any, Any] = words ^ (words >> 11)
    numbers ^= (numbers << 7) & 0x9D2C5680
    numbers ^= (numbers << 15) & 0xEFC60000
    numbers ^= numbers >> 18
    return numbers


def _twister(state: bytes) -> tuple[numpy.ndarray[Any, Any], int]:
    """Returns the words of a Mersenne twister and the number of them that are used up."""
    if len(state) == _TORCH_BYTES:
        _, left, _, used = struct.unpack_from("<QiiQ", state)
        return numpy.frombuffer(state, "<u8", _WORDS, offset=24).astype(numpy.uint32), _WORDS if left == 1 else used
    position, *_ = struct.unpack_from("<I", state)
    return numpy.frombuffer(state, "<u4", _WORDS, offset=4).astype(numpy.uint32), position


_PROCESS = Path("/proc/self")


class PeakMemory:
    """Measures the peaks since its creation: of the resident set, and of the GPU's memory as torch allocated it.

    Worker groups are kept alive, so the peak of the process would be that of another cell; Linux and torch can both
    reset it. The suite's own tensors are included, which are largest on rank 0.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._host_known = False
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        with contextlib.suppress(OSError):  # not Linux, or a container that does not allow it
            (_PROCESS / "clear_refs").write_text("5")  # resets "VmHWM": proc_pid_clear_refs(5)
            self._host_known = True

    def read(self) -> int:
        """Returns the peak of the rank's device in bytes; 0 if it is not known."""
        return torch.cuda.max_memory_allocated() if self._on_gpu else self.read_host()

    def read_host(self) -> int:
        """Returns the peak of the resident set in bytes, mapped files included; 0 if it is not known."""
        if not self._host_known:
            return 0
        status = (_PROCESS / "status").read_text(encoding="ascii", errors="replace")
        return 1024 * next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)


# The writer, the path and dtype of the base, and settings of generation only.
OTHER = frozenset(
    (
        "_name_or_path",
        "base_model_name_or_path",
        "transformers_version",
        "peft_version",
        "dtype",
        "torch_dtype",
        "use_cache",
    )
)
UNORDERED = "target_modules"  # peft writes a set
POSITIONS = "rope_parameters"  # where transformers 5 writes former top-level settings
MOVED = ("rope_theta", "partial_rotary_factor", "rope_scaling")


def changed_settings(folder: Path, source: Path) -> list[str]:
    """Returns the settings of ``source``, a Hugging Face folder with or without an adapter, that ``folder`` lacks or
    changes, each as ``FILE: KEY``. Settings that a library adds are left out."""
    changed: list[str] = []
    for name in (CONFIG, f"{ADAPTER}/{CONFIG_FILE}"):
        if (source / name).is_file():
            before = read_json(source / name)
            after: dict[str, Any] = read_json(folder / name) if (folder / name).is_file() else {}
            keys = before.keys() - OTHER
            same = {key for key in keys if key in after and _sorted(key, after[key]) == _sorted(key, before[key])}
            same |= {key for key in keys.intersection(MOVED) - after.keys() if _is_among(key, before[key], after)}
            changed += [f"{name}: {key}" for key in sorted(keys - same)]
    return changed


def _sorted(key: str, value: Any) -> Any:
    return sorted(value) if key == UNORDERED and isinstance(value, list) else value


def _is_among(key: str, value: Any, after: dict[str, Any]) -> bool:
    """Whether transformers 5 wrote this position setting with the same value under POSITIONS."""
    together = after.get(POSITIONS)
    if not isinstance(together, dict):
        return False
    if key != "rope_scaling":
        return bool(together.get(key) == value)
    scaling = value or {"rope_type": "default"}
    return all(together.get({"type": "rope_type"}.get(name, name)) == number for name, number in scaling.items())


T = TypeVar("T")


def of_all_ranks(value: T) -> list[T]:
    """Returns the value of each rank. Collective. Modes are disabled, which cost more than the exchange."""
    found: list[Any] = [None] * dist.get_world_size()
    with without_all_modes():
        dist.all_gather_object(found, value)
    return found


def rows_on_first_rank(rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gathers the rows of all ranks on rank 0, and returns there those of the first rank that has each; empty on other
    ranks. Collective.

    Rows of one dtype are sent end to end, because torch pickles each tensor as a file. Raises ValueError as ``kept``
    does.
    """
    copies = kept(rows.items(), above=math.inf)  # modes see subclasses, such as a row that still waits for other ranks
    by_dtype: dict[torch.dtype, list[str]] = defaultdict(list)
    for name in sorted(copies):
        by_dtype[copies[name].dtype].append(name)
    with without_all_modes():
        sent = [
            ([(name, copies[name].shape) for name in names], torch.cat([copies[name].flatten() for name in names]))
            for names in by_dtype.values()
        ]
        gathered: list[Any] = [[]] * dist.get_world_size()
        dist.gather_object(sent, gathered if dist.get_rank() == 0 else None)
        return {
            name: piece.clone().view(shape)
            for of_rank in reversed(gathered)
            for shapes, numbers in of_rank
            for (name, shape), piece in zip(shapes, numbers.split([shape.numel() for _, shape in shapes]), strict=True)
        }


Source = Callable[[], Iterable[Shard]]  # yields this rank's pieces again with every call
Piece = tuple[str, str, str]  # group, name, region
HASHED_AT_ONCE = 2**24  # words of 64 bits
COPIED_AT_ONCE = 2**28  # bytes of differing pieces, or one larger piece; fewer bytes need more walks


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The comparison of one group of pieces.

    offered: number of pieces of all ranks together.
    compared: number of distinct (name, region) keys that at least two ranks hold.
    differing: one JSON object for each key whose bytes are not identical on all ranks that hold it.
    """

    offered: int
    compared: int
    differing: list[dict[str, Any]]


def compare(groups: Mapping[str, Source]) -> dict[str, Replicas]:
    """Compares every piece of each group between the ranks that hold it. Collective; all ranks pass the same groups.

    An entry of ``differing`` has ``name``, ``region``, ``ranks``, and ``relative``: the largest ||x - x_0|| / ||x_0||
    in float64, where x_0 is the piece of the first of these ranks.
    """
    everyone = of_all_ranks(_digests(groups))
    holders: dict[Piece, list[int]] = defaultdict(list)
    for rank, of_rank in enumerate(everyone):
        for piece in of_rank:
            holders[piece].append(rank)
    sizes = {
        piece: max(everyone[rank][piece][1] for rank in ranks)
        for piece, ranks in holders.items()
        if len({everyone[rank][piece][0] for rank in ranks}) > 1
    }
    differing: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for together in _portions(sizes):
        for piece, relative in _distances(groups, {piece: holders[piece][0] for piece in together}).items():
            key, name, region = piece
            differing[key].append({"name": name, "region": region, "ranks": holders[piece], "relative": relative})
    return {
        key: Replicas(
            offered=sum(piece[0] == key for of_rank in everyone for piece in of_rank),
            compared=sum(piece[0] == key and len(ranks) > 1 for piece, ranks in holders.items()),
            differing=differing[key],
        )
        for key in groups
    }


def _digests(groups: Mapping[str, Source]) -> dict[Piece, tuple[bytes, int]]:
    """Returns the digest and the number of bytes of this rank's pieces. Raises ValueError if a piece is named twice."""
    found: dict[Piece, tuple[bytes, int]] = {}

    def small() -> Iterator[tuple[Piece, torch.Tensor]]:
        for key, source in groups.items():
            for shard in source():
                piece = (key, shard.name, shard.region)
                if piece in found:
                    raise ValueError(
                        f"local_shards names {shard.name}, region {shard.region}, twice for {key}; yield each piece of "
                        f"a rank once"
                    )
                found[piece] = b"", shard.tensor.nbytes
                with without_modes(shard.tensor) as tensor:
                    if is_small(tensor):
                        yield piece, tensor
                    else:
                        found[piece] = digest_of(tensor), tensor.nbytes

    copies = on_cpu(small())
    return found | {piece: (digest_of(copy), copy.nbytes) for piece, copy in copies.items()}


def _portions(sizes: Mapping[Piece, int]) -> Iterator[list[Piece]]:
    """Splits the pieces, in order, into groups that may be copied at once. ``sizes``: in bytes."""
    portion: list[Piece] = []
    total = 0
    for piece, size in sizes.items():
        if portion and total + size > COPIED_AT_ONCE:
            yield portion
            portion, total = [], 0
        portion.append(piece)
        total += size
    if portion:
        yield portion


def _distances(groups: Mapping[str, Source], first: Mapping[Piece, int]) -> dict[Piece, float]:
    """Returns the largest distance of a copy of each piece from that of its ``first`` rank. Collective."""
    named = (((key, s.name, s.region), s.tensor) for key, source in groups.items() for s in source())
    copied = {piece: tensor.detach().to("cpu", copy=True) for piece, tensor in named if piece in first}
    distances: dict[Piece, float] = {}
    for piece, rank in first.items():
        copies = [copied.get(piece)]
        dist.broadcast_object_list(copies, src=rank)
        if copies[0] is not None and piece in copied:
            distances[piece] = _distance(copies[0], copied.pop(piece))
        mark()
    everyone = of_all_ranks(distances)
    return {piece: max(of_rank[piece] for of_rank in everyone if piece in of_rank) for piece in first}


def pieces(groups: Mapping[str, Source]) -> dict[str, dict[str, list[int]]]:
    """Returns the ranks that hold each piece, by the name of the tensor and the region of the piece. Collective.

    Two models with a tensor of the same name are merged.
    """
    own_pieces = {(shard.name, shard.region) for source in groups.values() for shard in source()}
    everyone = of_all_ranks(own_pieces)
    holders: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, of_rank in enumerate(everyone):
        for name, region in sorted(of_rank):
            holders[name][region].append(rank)
    return holders


def _distance(first: torch.Tensor, copy: torch.Tensor) -> float:
    """Returns ||copy - first|| / ||first||; infinite if shapes differ or a number is not finite."""
    if copy.shape != first.shape or not (first.isfinite().all() and copy.isfinite().all()):
        return math.inf
    norm = float(first.norm(dtype=torch.float64)) or 1.0
    relative = float(copy.double().sub(first).norm()) / norm
    return relative if math.isfinite(relative) else math.inf


def digest_of(tensor: torch.Tensor) -> bytes:
    """Returns the SHA-256 of the bits of a tensor on the CPU, and a 64-bit hash on a GPU, which has no SHA-256."""
    with without_modes(tensor) as tensor:
        bits = tensor.contiguous().flatten().view(torch.uint8)
        if bits.device.type == "cpu":
            return hashlib.sha256(bits.numpy().tobytes()).digest()
        return hash_of_bits(bits).to_bytes(8, "little", signed=True)


def hash_of_bits(bits: torch.Tensor) -> int:
    """Returns the sum of splitmix64(word xor splitmix64(position)) over the 64-bit words of uint8 (bytes,). Different
    tensors collide with probability 2^-64."""
    total = 0
    for begin in range(0, len(bits), 8 * HASHED_AT_ONCE):
        block = bits[begin : begin + 8 * HASHED_AT_ONCE]
        words = torch.nn.functional.pad(block, (0, -len(block) % 8)).view(torch.int64)
        places = splitmix64(torch.arange(len(words), device=bits.device) + begin // 8, seed=len(bits))
        total += int(splitmix64(places.bitwise_xor_(words), seed=1).sum())
    return (total + 2**63) % 2**64 - 2**63
