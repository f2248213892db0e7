"""Hashing: random numbers that follow from a name and a place alone, to the bit the same on every device and version.

Sketches of tensors (conformance.record.sketch, parity.sketch) are made of them in several processes, and subtracted.
"""

import hashlib

from torch import Tensor


def seed_of(name: str) -> int:
    """The seed of a parameter's hash, a signed 64-bit number that its name alone decides."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def splitmix64(places: Tensor, *, seed: int) -> Tensor:
    """splitmix64 (Steele, Lea, Flood, OOPSLA 2014) of int64; shifts of int64 carry the sign, hence the masks."""
    x = places.mul(-7046029254386353131).add_(seed)
    x.bitwise_xor_((x >> 30).bitwise_and_((1 << 34) - 1)).mul_(-4658895280553007687)
    x.bitwise_xor_((x >> 27).bitwise_and_((1 << 37) - 1)).mul_(-7723592293110705685)
    return x.bitwise_xor_((x >> 31).bitwise_and_((1 << 33) - 1))
