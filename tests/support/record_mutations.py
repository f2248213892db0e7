"""Mutates at random the output folder that run_sample.py writes (for fuzz_records.py).

A mutation changes one thing: bytes, a JSON value, a tensor, a file, a folder, a path, or the place of a record. Some
mutations also correct digests, which makes the change harder to notice. A mutation names the cells that it ``spoils``:
their records no longer hold what was observed.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from run_sample import CELLS, EXACT, FOLDERS, FP32, JUDGED, ORACLE, OTHER, RESUMED, record_folders
from safetensors.torch import load_file, save_file

from conformance.records.record_format import RECORD_FILE, record_digest
from conformance.spec.precision import noise_runs

Values = dict[str, Any]
NOISE = tuple(f"{ORACLE}/{run}" for run in noise_runs("fp32"))
UNOBSERVED = "step-0001.safetensors"  # of the cells of one phase


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """What was done. ``spoils``: cells that must not conform any more. ``isolated``: the others have to."""

    what: str
    spoils: tuple[str, ...] = ()
    isolated: bool = False


Mutate = Callable[[Path, random.Random], Mutation]


# What is put in the place of something


def hostile(rng: random.Random) -> Any:
    """A JSON value that nobody expects."""
    deep: Any = []
    for _ in range(rng.choice((3, 70, 400))):
        deep = [deep] if rng.random() < 0.5 else {"a": deep}
    return rng.choice(
        (
            *(None, True, False, -1, 0, 10**18, 10**400, 1e308, -1e308, 0.5, "nan", "inf", "-inf", "NaN", ""),
            *("x" * 10_000, "\ud800", "\x00", "../../..", "/", "<script>alert(1)</script>", "{{ 7 * 7 }}", "٣"),
            *([], {}, [[]], {"": None}, [None] * 1000, {"a": {"b": []}}, ["x"], deep),
        )
    )


def nested(rng: random.Random) -> bytes:
    """JSON, or nearly, that is nested without end or says what JSON cannot say."""
    depth = rng.choice((100, 5_000, 200_000))
    return rng.choice((b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth, b"NaN", b"-Infinity", b"1" * 9_000))


def replace_file(file: Path, rng: random.Random, outside: Path) -> str:
    """Put something that is no file, or no such file, in the place of a file or of nothing."""
    with contextlib.suppress(FileNotFoundError):
        file.unlink()
    kind = rng.choice(("pipe", "zero", "full", "loop", "dangling", "outside", "folder", "sparse", "empty", "socket"))
    links = {"zero": "/dev/zero", "full": "/dev/full", "loop": file.name}
    links |= {"dangling": str(outside / "none"), "outside": str(outside / "victim.json")}
    if kind == "pipe":
        os.mkfifo(file)
    elif kind in links:
        file.symlink_to(links[kind])
    elif kind == "folder":
        file.mkdir()
        (file / "x").touch()
    elif kind == "socket":
        os.mknod(file, stat.S_IFSOCK | 0o600)
    else:
        file.touch()
        os.truncate(file, 2**41 if kind == "sparse" else 0)
    return kind


# Kinds of mutations


def record_bytes(out: Path, rng: random.Random) -> Mutation:
    folder, spoiled = _any_record(rng)
    file = rng.choice(sorted((out / folder).iterdir()))
    before = file.read_bytes()
    file.write_bytes(after := _bytes(before, rng))
    return Mutation(what=f"bytes of {file.name} of {folder}", spoils=spoiled if after != before else (), isolated=True)


def result_bytes(out: Path, rng: random.Random) -> Mutation:
    file = _any_result(out, rng)
    file.write_bytes(_bytes(file.read_bytes(), rng))
    return Mutation(what=f"bytes of {file.relative_to(out)}")


def record_value(out: Path, rng: random.Random) -> Mutation:
    """A value in a line of a record, with its digest mended."""
    folder, spoiled = _any_record(rng)
    lines = _lines(out / folder)
    line = rng.choice(lines)
    path, told = _edit(line, rng)
    _mend(out / folder, lines)
    what = f"{folder}: {line.get('type')} {path} = {told}"
    judged = _is_judged(path, told, folder)
    spoiled = _surely(folder, spoiled) if path[0] == "values" else spoiled
    return Mutation(what=what, spoils=spoiled if judged else (), isolated=path[0] != "values")


def result_value(out: Path, rng: random.Random) -> Mutation:
    file = _any_result(out, rng)
    values = json.loads(file.read_text())
    path, told = _edit(values, rng)
    file.write_text(json.dumps(values))
    return Mutation(what=f"{file.relative_to(out)}: {path} = {told}")


def tensor(out: Path, rng: random.Random) -> Mutation:
    """A tensor of a record, with the digests mended."""
    folder, spoiled = _any_record(rng)
    file = rng.choice(sorted((out / folder).glob("*.safetensors")))
    held = load_file(file)
    name = rng.choice(sorted(held))
    is_fp32 = folder in record_folders(FP32)
    edits = dict(TENSOR_EDITS)
    if is_fp32 or folder in NOISE:  # which is what this tier allows
        del edits["float32"]
    kind = rng.choice(sorted(edits))
    edits[kind](held, name)
    save_file({key: value.contiguous() for key, value in held.items()}, file)
    _mend(out / folder, _lines(out / folder))
    spoiled = spoiled if file.name == "loaded.safetensors" else _surely(folder, spoiled)
    if file.name == UNOBSERVED and not name.startswith("logprob/"):
        spoiled = tuple(cell for cell in spoiled if cell == RESUMED)
    return Mutation(what=f"{kind} of {name} in {file.name} of {folder}", spoils=spoiled)


def swapped(out: Path, rng: random.Random) -> Mutation:
    """Whole records in each other's place, or one in the place of all."""
    one, first = _any_record(rng)
    other, second = _any_record(rng)
    if one == other:
        return Mutation(what="nothing")
    if rng.random() < 0.5:
        (out / one).rename(out / "between")
        (out / other).rename(out / one)
        (out / "between").rename(out / other)
        return Mutation(what=f"{one} and {other} swapped", spoils=(*first, *second), isolated=True)
    shutil.rmtree(out / one)
    shutil.copytree(out / other, out / one)
    return Mutation(what=f"{other} in the place of {one}", spoils=first, isolated=True)


def own_oracle(out: Path, rng: random.Random) -> Mutation:
    """A cell's own record where its verdict says that the oracle is."""
    cell = rng.choice(JUDGED)
    folder = out / FOLDERS[cell]
    for precision in ("float64", *noise_runs("fp32")):
        shutil.copytree(out / record_folders(cell)[0], folder / "fake" / precision)
    _set(folder / "verdict.json", "oracle", "fake")
    return Mutation(what=f"{cell} as its own oracle", spoils=(cell,), isolated=True)


def record_file(out: Path, rng: random.Random) -> Mutation:
    folder, spoiled = _any_record(rng)
    file = rng.choice(sorted((out / folder).iterdir()))
    kind = replace_file(file, rng, out.parent / "outside")
    return Mutation(what=f"{file.name} of {folder} is {kind}", spoils=spoiled, isolated=True)


def record_folder(out: Path, rng: random.Random) -> Mutation:
    folder, spoiled = _any_record(rng)
    shutil.move(out / folder, out.parent / "outside" / "moved")
    if rng.random() < 0.5:
        (out / folder).symlink_to(out.parent / "outside" / "moved")
        return Mutation(what=f"{folder} is a link to itself outside", spoils=spoiled, isolated=True)
    kind = replace_file(out / folder, rng, out.parent / "outside")
    return Mutation(what=f"{folder} is {kind}", spoils=spoiled, isolated=True)


def other_file(out: Path, rng: random.Random) -> Mutation:
    """A result, a log, or a name under which something is about to be written."""
    logs = sorted(out.glob("cells/*/legs/*/logs/*.log"))
    written = [out / name for name in ("report.html", "report.md", "junit.xml", "side_by_side.json", "summary.json")]
    written += [out / FOLDERS[cell] / "verdict.json" for cell in CELLS]
    unfinished = [file.with_name(f"{file.name}.unfinished") for file in written]
    file = rng.choice((*logs, *written, *unfinished))
    return Mutation(what=f"{file.relative_to(out)} is {replace_file(file, rng, out.parent / 'outside')}")


def result_folder(out: Path, rng: random.Random) -> Mutation:
    folder = out / rng.choice((*FOLDERS.values(), "cells", "oracle", f"{FOLDERS[EXACT]}/legs"))
    if rng.random() < 0.5:
        shutil.move(folder, out.parent / "outside" / "moved")
        folder.symlink_to(out.parent / "outside" / "moved")
        return Mutation(what=f"{folder.relative_to(out)} is a link to itself outside")
    shutil.rmtree(folder)
    return Mutation(what=f"{folder.relative_to(out)} is {replace_file(folder, rng, out.parent / 'outside')}")


def result_path(out: Path, rng: random.Random) -> Mutation:
    """A path in a verdict or in the summary, or in both alike."""
    cell = rng.choice(JUDGED)
    outside = str(out.parent / "outside" / "planted")
    path = rng.choice(("../outside/planted", outside, "..", ".", "", "\x00", "a" * 5000, "\ud800", "cells/02", "/dev"))
    where = rng.choice(("folder", "folder of both", "records", "oracle"))
    verdict = out / FOLDERS[cell] / "verdict.json"
    _set(verdict, where.split()[0], [path] if where == "records" else path)
    if where == "folder of both":
        summary = json.loads((out / "summary.json").read_text())
        next(entry for entry in summary["cells"] if entry["id"] == cell)["folder"] = path
        (out / "summary.json").write_text(json.dumps(summary))
    return Mutation(what=f"{where} of {cell} is {path[:30]!r}")


def endless(out: Path, rng: random.Random) -> Mutation:
    folder, spoiled = _any_record(rng)
    if rng.random() < 0.5:
        file = _any_result(out, rng)
        file.write_bytes(nested(rng))
        return Mutation(what=f"{file.relative_to(out)} is nested")
    lines = (out / folder / RECORD_FILE).read_bytes().splitlines(keepends=True)
    lines[rng.randrange(len(lines))] = nested(rng) + b"\n"
    (out / folder / RECORD_FILE).write_bytes(b"".join(lines))
    return Mutation(what=f"a line of {folder} is nested", spoils=spoiled, isolated=True)


def _drop(held: dict[str, torch.Tensor], name: str) -> None:
    del held[name]


def _rename(held: dict[str, torch.Tensor], name: str) -> None:
    held[f"{name}.bias"] = held.pop(name)


def _first_of(value: float) -> Callable[[dict[str, torch.Tensor], str], None]:
    def edit(held: dict[str, torch.Tensor], name: str) -> None:
        held[name].view(-1)[0] = value

    return edit


def _by(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor], str], None]:
    def edit(held: dict[str, torch.Tensor], name: str) -> None:
        held[name] = change(held[name])

    return edit


TENSOR_EDITS: dict[str, Callable[[dict[str, torch.Tensor], str], None]] = {
    "nan": _first_of(float("nan")),
    "inf": _first_of(float("inf")),
    "1e30": _first_of(1e30),
    "x 1.01": _by(lambda t: t * 1.01),
    "x (1 + 1e-5)": _by(lambda t: t * (1 + 1e-5)),
    "zeros": _by(torch.zeros_like),
    "sign": _by(torch.neg),
    "flat": _by(lambda t: t.reshape(1, -1)),
    "empty": _by(lambda t: t[:0]),
    "scalar": _by(torch.sum),
    "float32": _by(lambda t: t.float()),
    "bfloat16": _by(lambda t: t.bfloat16()),
    "float8": _by(lambda t: t.to(torch.float8_e4m3fn)),
    "complex": _by(lambda t: t.to(torch.complex64)),
    "int": _by(lambda t: t.to(torch.int64)),
    "bool": _by(lambda t: t.bool()),
    "missing": _drop,
    "renamed": _rename,
}


# Parts of mutations


def _any_record(rng: random.Random) -> tuple[str, tuple[str, ...]]:
    """A record's folder, and the cells that are judged by it."""
    cell = rng.choice(JUDGED)
    records: dict[str, tuple[str, ...]] = dict.fromkeys(record_folders(cell), (cell,))
    records |= {f"{ORACLE}/float64": JUDGED} | dict.fromkeys(NOISE, (FP32,))
    return rng.choice(sorted(records.items()))


def _any_result(out: Path, rng: random.Random) -> Path:
    results = ["summary.json", "side_by_side.json", *(f"{FOLDERS[cell]}/verdict.json" for cell in CELLS)]
    return out / rng.choice(results)


def _bytes(content: bytes, rng: random.Random) -> bytes:
    at, length = rng.randrange(len(content)), rng.choice((1, 1, 8, 100))
    before, part, after = content[:at], content[at : at + length], content[at + length :]
    flipped = bytes(byte ^ 1 << rng.randrange(8) for byte in part)
    new = rng.choice((rng.randbytes(length), b"", part + part, b"\x00" * length, flipped))
    return rng.choice((before, before + new + after, before + new + after))


def _lines(folder: Path) -> list[Values]:
    return [json.loads(line) for line in (folder / RECORD_FILE).read_text().splitlines()]


def _mend(folder: Path, lines: list[Values]) -> None:
    """Write the lines with the digests that they should have."""
    for line in lines:
        tensors = line.get("tensors")
        if isinstance(tensors, dict) and isinstance(name := tensors.get("file"), str) and name.endswith("tensors"):
            with contextlib.suppress(OSError, ValueError):
                tensors["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    body = "".join(json.dumps(line) + "\n" for line in lines[:-1])
    if "sha256" in lines[-1]:
        with contextlib.suppress(RecursionError):
            lines[-1]["sha256"] = record_digest(body.encode(), lines[-1])
    (folder / RECORD_FILE).write_text(body + json.dumps(lines[-1]) + "\n")


def _edit(values: Values, rng: random.Random) -> tuple[tuple[str | int, ...], str]:
    """Change something within ``values``: returns where, and what it is now. What is equal is not a change."""
    path: tuple[str | int, ...] = ()
    held: Any = values
    while True:
        key = rng.choice(sorted(held) if isinstance(held, dict) else range(len(held)))
        path = (*path, key)
        if not isinstance(held[key], dict | list) or not held[key] or rng.random() < 0.25:
            break
        held = held[key]
    if rng.random() < 0.2:
        del held[key]
        return path, "missing"
    old = held[key]
    new = hostile(rng)
    while new == old:
        new = hostile(rng)
    held[key] = new
    return path, json.dumps(new)[:60]


def _surely(folder: str, judged_by: tuple[str, ...]) -> tuple[str, ...]:
    """The cells that a wrong number in a record is sure to spoil.

    What the noise of fp32 is, against the float64 run, is measured and not known.
    """
    if folder in NOISE:
        return ()
    return (EXACT, OTHER, RESUMED) if folder == f"{ORACLE}/float64" else judged_by


def _is_judged(path: tuple[str | int, ...], told: str, folder: str) -> bool:
    """Whether a value of a record's line decides what is judged, or what it is judged as."""
    if (path[0] == "values" and len(path) == 2) or (path[0] == "leaks" and told != "missing"):
        return True
    if folder.startswith(ORACLE) and path[0] == "backend":
        return True
    if path[0] == "observables":
        return told != "missing" or len(path) < 3  # a field that has its default may be missing
    return path[0] in ("type", "schema", "cell", "layout", "step", "tensors") and path[-1] != "sha256"


def _set(file: Path, key: str, value: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))


KINDS: dict[Mutate, int] = {
    record_bytes: 3,
    result_bytes: 2,
    record_value: 6,
    result_value: 5,
    tensor: 5,
    swapped: 2,
    own_oracle: 1,
    record_file: 3,
    record_folder: 1,
    other_file: 3,
    result_folder: 1,
    result_path: 2,
    endless: 1,
}


def mutate(out: Path, rng: random.Random) -> Mutation:
    """Change one thing in ``out``; ``outside``, beside it, is a folder that no command may change."""
    return rng.choices(list(KINDS), weights=list(KINDS.values()))[0](out, rng)
