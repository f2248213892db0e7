"""Reports: the output folder of a run as HTML, Markdown and JUnit. Reads files only: no ranks, no backend, no judge.

The suite finds them by their entry points (``parity.reporters`` and ``parity.comparisons`` in pyproject.toml).
"""
