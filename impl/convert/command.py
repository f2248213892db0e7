"""Defines the commands ``parity inspect`` and ``parity convert``; conformance/core/packages.py finds them.

Their implementation is imported when they run, because the other commands do not need it.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from impl.checkpoints.training_state import Checkpoint


class Inspect:
    help = "list the contents of a checkpoint without loading it, and verify its digests if it has some"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("checkpoint", type=Path, help="its folder; for DeepSpeed, the folder with `latest`")
        parser.add_argument("--json", action="store_true", help="machine-readable output")

    def run(self, options: argparse.Namespace) -> int:
        from impl.checkpoints.manifest import verify_part
        from impl.convert.convert import open_checkpoint

        found = open_checkpoint(options.checkpoint)
        verify_part(options.checkpoint)
        print(json.dumps(_values(found), default=str) if options.json else _text(found))
        return 0


class Convert:
    help = "write a checkpoint of any backend as a training state for all of them, or as a Hugging Face folder"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("source", type=Path, metavar="FROM", help="folder of a checkpoint, as for inspect")
        parser.add_argument("target", type=Path, metavar="TO", help="new folder")
        parser.add_argument("--to", choices=("state", "hf"), required=True)
        parser.add_argument("--model", type=Path, help="Hugging Face folder that the training started from")

    def run(self, options: argparse.Namespace) -> int:
        from impl.convert.convert import convert

        convert(options.source, options.target, to=options.to, model=options.model, report=_print_progress)
        print(options.target)
        return 0


INSPECT, CONVERT = Inspect(), Convert()


def _print_progress(kind: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{kind}: {done} of {total} tensors", end="\n" if done == total else "", file=sys.stderr, flush=True)


def _values(found: "Checkpoint") -> dict[str, Any]:
    kinds = {kind: found.of_kind(kind) for kind in found.kinds()}
    return {
        "format": found.format,
        **found.facts,
        "progress": found.progress,
        "kinds": {
            kind: {
                "tensors": len(stored),
                "numbers": sum(one.size for one in stored),
                "bytes": sum(one.size * one.dtype.itemsize for one in stored),
                "dtypes": sorted({_dtype(one.dtype) for one in stored}),
            }
            for kind, stored in kinds.items()
        },
        "tensors": [
            {"kind": one.kind, "name": one.name, "shape": list(one.shape), "dtype": _dtype(one.dtype)}
            for one in found.tensors
        ],
    }


def _text(found: "Checkpoint") -> str:
    values = _values(found)
    lines = [f"{'format':<12} {found.format}"]
    lines += [f"{name:<12} {value:g}" for name, value in found.progress.items() if name not in found.facts]
    lines += [f"{name:<12} {_word(value)}" for name, value in found.facts.items() if value is not None]
    for kind, sums in values["kinds"].items():
        size, dtypes = f"{sums['bytes'] / 1e6:.1f} MB", ", ".join(sums["dtypes"])
        lines.append(f"{kind:<12} {sums['tensors']} tensors, {sums['numbers']:,} numbers, {size}, {dtypes}")
    lines.append("")
    for one in found.tensors:
        shape = "x".join(map(str, one.shape)) or "a number"
        lines.append(f"{one.kind:<12} {one.name}  {shape}  {_dtype(one.dtype)}")
    return "\n".join(lines)


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else ", ".join(value) if isinstance(value, list) else str(value)


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
