"""Backend-parity conformance suite: do two LLM training backends compute the same thing, and if not, where do they part?"""

__version__ = "0.1.0"
