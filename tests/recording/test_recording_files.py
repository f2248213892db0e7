"""A record may come from anybody: what is not its own file is not opened, what is damaged is refused in one line."""

import json
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recording_tasks import recorded
from safetensors.numpy import load_file, save_file
from torch import nn
from torch.optim import SGD

import parity
from conformance.core.errors import UsageError
from parity.compare import compare_records
from parity.record_files import Writer, read_run


def short(out: Path, *, scale: float = 1.0) -> Path:
    """A record of one step, with whole tensors."""
    model = nn.Linear(4, 4)
    for weight in model.parameters():
        nn.init.ones_(weight)
        weight.grad = torch.full_like(weight, scale)
    optimizer = SGD(model.parameters(), lr=0.1)
    with parity.record(model, optimizer, out=out, full=True) as recorder:
        optimizer.step()
        recorder.step(loss=1.0)
    return out


Damage = Callable[[list[Any]], None]


def refusal(tmp_path: Path, damage: Damage) -> str:
    """What is said of a record with changed lines, beside one with other gradients."""
    first, second = short(tmp_path / "first"), short(tmp_path / "second", scale=2.0)
    path = second / "record.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    damage(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with pytest.raises(UsageError) as error:
        compare_records([first, second], threshold=None).text()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("line", "field"), [(1, "file"), (2, "file"), (2, "tensors")])
@pytest.mark.parametrize("name", ["../first/{}", "/etc/passwd", "..", "sub/../{}"])
def test_a_file_that_is_not_one_of_the_records_folder_is_refused(
    name: str, field: str, line: int, tmp_path: Path
) -> None:
    def damage(lines: list[Any]) -> None:
        lines[line][field] = name.format(lines[line][field])

    assert "which is not one of its folder" in refusal(tmp_path, damage)


def change(place: int, **fields: Any) -> Damage:
    return lambda lines: lines[place].update(fields)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda lines: lines.__setitem__(2, [1]), r"line 3 of .* is damaged"),
        (lambda lines: lines[2].pop("loss"), r"line 3 of .* is damaged \(loss: Field required\)"),
        (change(2, tokens="5"), r"line 3 of .* is damaged \(tokens: "),
        (change(2, replicas={"weight": {}}), r"line 3 of .* is damaged \(replicas: "),
        (change(1, replicas={}), r"line 2 of .* is damaged \(replicas: "),
        (change(1, kind="step"), r"line 2 of .* is damaged \(kind: "),
        (change(3, error=None), r"line 4 of .* is damaged \(error: "),
        (change(0, parameters={"weight": {"shape": [4, 4]}}), r"line 1 of .* is damaged \(parameters.weight.dtype: "),
        (change(0, version=1), r"is a record of version 1; this parity reads 2"),
    ],
)
def test_lines_that_are_not_what_they_should_be_are_refused(damage: Damage, said: str, tmp_path: Path) -> None:
    assert re.search(said, refusal(tmp_path, damage))


@pytest.mark.parametrize("name", ["step-000000.safetensors", "step-000000-tensors.safetensors"])
@pytest.mark.parametrize("kind", ["a link", "a named pipe", "there is no"])
def test_only_regular_files_are_read(kind: str, name: str, tmp_path: Path) -> None:
    def damage(lines: list[Any]) -> None:
        path = tmp_path / "second" / name
        path.unlink()
        if kind == "a link":
            path.symlink_to(tmp_path / "first" / name)
        elif kind == "a named pipe":
            os.mkfifo(path)

    assert kind in refusal(tmp_path, damage)


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"gradient.rows": np.zeros((1, 64))},
        {"gradient.rows": np.zeros((2, 63))},
        {"gradient.rows": np.zeros((2, 64), dtype=np.float32)},
    ],
    ids=["none", "of fewer parameters", "narrower", "of another dtype"],
)
def test_arrays_that_do_not_fit_the_parameters_are_refused(arrays: dict[str, Any], tmp_path: Path) -> None:
    def damage(lines: list[Any]) -> None:
        path = tmp_path / "second" / "step-000000.safetensors"
        save_file((load_file(path) | arrays) if arrays else {"other": np.zeros(1)}, path)

    assert "of float64 [2, " in refusal(tmp_path, damage)


def test_a_record_is_never_appended_to_another(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    first, second = (parity.record(model, optimizer, out=tmp_path / "run") for _ in range(2))
    with first:
        pass
    lines = (tmp_path / "run" / "record.jsonl").read_bytes()
    for one in (first, second):
        with pytest.raises(UsageError, match="holds a record already; remove it or choose another folder"), one:
            pass
    assert (tmp_path / "run" / "record.jsonl").read_bytes() == lines


def test_a_record_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="holds a record already"):
        recorded(tmp_path / "run", model=nn.Linear(2, 2))
    assert not (tmp_path / "elsewhere").exists()


def test_a_line_that_the_disk_refuses_in_its_middle_leaves_those_before(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.begin({"kind": "header"})
    path = tmp_path / "record.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
    try:
        with pytest.raises(UsageError, match=r"record.jsonl cannot be written: .*; record into another folder"):
            writer.line({"kind": "step", "step": 0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    writer.end({"kind": "end"})
    assert [json.loads(line)["kind"] for line in path.read_text(encoding="utf-8").splitlines()] == ["header", "end"]


def test_an_end_that_cannot_be_written_is_warned_of(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    recorder = parity.record(model, SGD(model.parameters(), lr=0.1), out=tmp_path / "run").__enter__()
    with Path("/dev/full").open("wb", buffering=0) as full:
        os.dup2(full.fileno(), recorder._writer._lines.fileno())  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match=r"the end of the record is not in it: .*record.jsonl cannot be written"):
        recorder.__exit__(None, None, None)
    assert not read_run(tmp_path / "run").complete
