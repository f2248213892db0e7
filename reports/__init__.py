"""Writes reports of output folders, and compares training logs. Internal: users import ``parity``.

This package reads files only: no ranks, no backend, no judge. The suite finds its functions by the entry points
``parity.reporters`` and ``parity.comparisons`` in pyproject.toml.
"""
