"""Generators: the random generators of a rank, seeded for a leg and compared over a handover (claim 5).

Nothing that is judged by the oracle draws a random number; dropout does, and data order. So a leg begins, and ends
before it saves, with states that nothing else has: no other leg, no other rank, and no framework that seeds itself. A
checkpoint has to bring those with which the leg before ended, rank by rank.
"""

import hashlib
import random

import numpy
import torch


def seed_generators(seed: int, rank: int, next_step: int, *, ending: bool = False) -> None:
    """Seed all generators of this rank, by the scenario's seed, the rank, the optimizer step that comes next, and
    whether a leg is ``ending`` before it or begins with it."""
    number = ((seed * 1000 + next_step) * 1000 + rank) * 2 + ending
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
