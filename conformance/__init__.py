"""Conformance suite for LLM training backends: do they compute the same thing, and if not, where do they diverge?"""

__version__ = "0.1.0"
