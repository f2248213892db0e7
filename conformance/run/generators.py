"""Generators: seeds the random generators of a rank, and compares their states before and after a handover (claim 5).

Dropout and the order of data draw random numbers; nothing that is compared with the oracle does. So generators are
checked by their states. At the start of a leg, and again at its end before it saves, every rank's generators are set to
states that occur nowhere else: not in another leg, on another rank, or in a framework that seeds itself. After loading
a checkpoint, each rank has to have the states with which the same rank ended the leg before.
"""

import hashlib
import random

import numpy
import torch


def seed_generators(seed: int, rank: int, next_step: int, *, ending: bool = False) -> None:
    """Seed all generators of this rank from the scenario's seed, the rank, the number of the next optimizer step, and
    whether a leg is ``ending`` before this step or begins with it."""
    number = ((seed * 1000 + next_step) * 1000 + rank) * 2 + ending
    random.seed(number)
    numpy.random.seed(number % 2**32)
    torch.manual_seed(number)  # of every device


def generator_digests() -> dict[str, str]:
    """SHA-256 (hexadecimal) of the state of each generator of this rank: python, numpy, torch and, with a GPU, cuda."""
    kind, keys, *rest = numpy.random.get_state()
    states = {
        "python": repr(random.getstate()).encode(),
        "numpy": repr((kind, *rest)).encode() + numpy.asarray(keys).tobytes(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return {name: hashlib.sha256(state).hexdigest() for name, state in states.items()}
