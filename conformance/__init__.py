"""Judges training backends by an independent oracle. Internal: users import ``parity``."""

__version__ = "0.1.0"
