"""Generators: the random generators of a rank, seeded for a leg and compared over a handover (claim 5).

Nothing that is judged by the oracle draws a random number; dropout does, and data order. So a leg begins with states
that no other leg and no other rank has, and a checkpoint has to bring those of the leg before, rank by rank.
"""

import hashlib
import random

import numpy
import torch


def seed_generators(seed: int, rank: int, first_step: int) -> None:
    """Seed all generators of this rank, by the scenario's seed, the rank, and the step that its leg begins with."""
    number = (seed * 1000 + first_step) * 1000 + rank
    random.seed(number)
    numpy.random.seed(number % 2**32)
    torch.manual_seed(number)  # of every device


def generator_digests() -> dict[str, str]:
    """A digest of the state of each generator of this rank, by its name."""
    kind, keys, *rest = numpy.random.get_state()
    states = {
        "python": repr(random.getstate()).encode(),
        "numpy": repr((kind, *rest)).encode() + numpy.asarray(keys).tobytes(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return {name: hashlib.sha256(state).hexdigest() for name, state in states.items()}
