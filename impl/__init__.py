"""The reference backends, ``parity train`` and ``parity convert``. Internal: users import ``parity``."""
