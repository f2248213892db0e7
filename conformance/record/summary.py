"""Summary: what the terminal says about a run, from its ``summary.json`` alone, without the files of its cells."""

from collections.abc import Mapping
from typing import Any

from conformance.record.baseline import RANKS_PER_GPU
from conformance.record.verdict import NOT_SEEN


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """The lines for the terminal, from the values of ``summary.json``: verdict, counts, unmet demands, and what has
    changed since earlier runs."""
    counts = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in summary["counts"].items() if count)
    since = summary["since"]["text"] if summary["since"] else ()
    lent = sum(bool(cell["second_class"]) for cell in summary["cells"])
    whose = f"second-class oracle: {lent} judged by transformers' own implementation; {NOT_SEEN}"
    had, shared = leased(summary["leased"]), shared_gpus(summary["environment"])
    told = (f"leased for this part of the time: {had}" if had else "", whose if lent else "", shared)
    return [f"{summary['verdict']}: {counts}", *summary["unmet"], *since, *filter(None, told)]


def shared_gpus(environment: Mapping[str, Any]) -> str:
    """What it means for times and memory that ranks shared GPUs; empty if they did not."""
    each = environment.get(RANKS_PER_GPU, 1)
    return f"up to {each} ranks shared a GPU: times and free memory are not those of one GPU each" if each != 1 else ""


def leased(shares: Mapping[str, float]) -> str:
    """For how much of a run cells and oracles had each of its GPUs; empty where none was leased."""
    return ", ".join(f"{gpu} {share:.0%}" for gpu, share in shares.items())
