"""Checks that an incomplete or changed record is a named error and never a pass."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.records.record_format import (
    DigestMismatch,
    MissingFooter,
    RecordError,
    WrongSchema,
    read_lines,
    record_digest,
)
from conformance.records.step_tensors import RecordWriter, read_record
from conformance.spec.objectives import all_observables
from conformance.spec.offline import Sft

OBSERVABLES = all_observables(Sft())
NO_HEADER = ("", "[]\n", "{}\n", '{"type": "step", "step": 0}\n')


@pytest.fixture
def record(tmp_path: Path) -> Path:
    header = {"cell": "x", "environment": {"backend-parity": "0.1.0"}}
    writer = RecordWriter(tmp_path / "record", header, observables=OBSERVABLES)
    writer.loaded({"weight/a": torch.zeros(2)})
    for step in range(2):
        weight = torch.full((2,), 1.0 / 3, dtype=torch.float64)
        writer.step({"loss": 0.1 + step, "grad_norm": math.inf}, {"weight/a": weight}, seconds=0.1)
    writer.finish({"seconds": 1.5})
    return tmp_path / "record"


def lines(record: Path) -> list[str]:
    return (record / "record.jsonl").read_text().splitlines(keepends=True)


def rewrite(record: Path, content: list[str]) -> None:
    (record / "record.jsonl").write_text("".join(content))


def test_what_is_written_is_read_to_the_last_digit(record: Path) -> None:
    read = read_record(record)
    assert [(s.step, s.value("loss"), s.value("lr")) for s in read.steps] == [(0, 0.1, None), (1, 1.1, None)]
    assert read.steps[0].value("grad_norm") == math.inf
    assert read.observables == OBSERVABLES
    assert read.header["cell"] == "x"
    assert read.footer["seconds"] == 1.5
    weight = read.steps[1].tensors()["weight/a"]
    assert weight.dtype == torch.float64
    assert weight.tolist() == [1 / 3, 1 / 3]
    assert read.loaded.tensors()["weight/a"].tolist() == [0, 0]


def test_a_record_is_never_overwritten(record: Path) -> None:
    with pytest.raises(FileExistsError):
        RecordWriter(record, {}, observables=OBSERVABLES)


def test_no_record(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"holds no record\.jsonl"):
        read_record(tmp_path)


def _of_schema_99(content: list[str]) -> list[str]:
    return [json.dumps({**json.loads(content[0]), "schema": 99}) + "\n", *content[1:]]


STOPPED = r"has no footer: the cell stopped after step .*run it again"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda content: content[:1], MissingFooter, STOPPED),
        (lambda content: content[:3], MissingFooter, STOPPED),
        (lambda content: ["".join(content)[:-40]], MissingFooter, STOPPED),
        (lambda content: [line.replace("1.1", "1.2") for line in content], DigestMismatch, "own digest: it was edited"),
        (lambda content: content[:2] + content[3:], DigestMismatch, "own digest: it was edited"),
        (lambda content: [content[0], "no json\n", *content[2:]], DigestMismatch, r"record.jsonl:2 is not JSON"),
        (_of_schema_99, WrongSchema, r"has schema 99, this version reads 5.*backend-parity 0.1.0"),
        *((lambda _, text=text: [text], RecordError, "does not begin with a header line") for text in NO_HEADER),
    ],
)
def test_lines_that_were_lost_or_changed_are_an_error(
    record: Path, change: Callable[[list[str]], list[str]], error: type[RecordError], words: str
) -> None:
    rewrite(record, change(lines(record)))
    with pytest.raises(error, match=words):
        read_record(record)


def test_a_changed_tensor_file_is_noticed(record: Path) -> None:
    file = record / "step-0001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(DigestMismatch, match=r"step-0001.safetensors was changed after the run"):
        read_record(record)


def test_a_missing_tensor_file_is_noticed(record: Path) -> None:
    (record / "step-0000.safetensors").unlink()
    with pytest.raises(DigestMismatch, match="is missing; copy the whole record folder"):
        read_record(record)


def test_the_lines_are_json_that_every_reader_accepts(record: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for line in lines(record):
        json.loads(line, parse_constant=refuse)


def test_of_a_damaged_record_the_lines_that_are_left_can_be_read(record: Path) -> None:
    rewrite(record, lines(record)[:3])
    with pytest.raises(MissingFooter) as caught:
        read_lines(record)
    assert caught.value.left is not None
    assert [line["values"]["loss"] for line in caught.value.left.steps] == [0.1]


def test_a_phase_that_goes_on_begins_with_the_step_that_comes_next(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / "leg", {}, observables=OBSERVABLES, first_step=3)
    writer.loaded({"weight/a": torch.zeros(2)})
    writer.step({}, {}, seconds=0.0)
    writer.finish({})
    read = read_record(tmp_path / "leg")
    assert (read.loaded.step, [step.step for step in read.steps]) == (2, [3])


def change_line(record: Path, number: int, **changes: Any) -> None:
    """Change values of a line, and mend the digest."""
    values = [json.loads(line) for line in lines(record)]
    values[number] |= changes
    body = "".join(json.dumps(value) + "\n" for value in values[:-1])
    rewrite(record, [body, json.dumps(values[-1] | {"sha256": record_digest(body.encode(), values[-1])}) + "\n"])


WATCHED: dict[str, Any] = {"collectives": [], "products": [], "widths": []}
DIFFERING = {"name": "a", "region": "full", "ranks": [0, 1], "relative": "nan"}


@pytest.mark.parametrize(
    ("number", "changes", "words"),
    [
        (0, {"observables": None}, "observables: Input should be a valid tuple"),
        (0, {"observables": [{"key": "a", "stage": "b", "kind": "scalar", "new": 1}]}, "unexpected keyword"),
        (0, {"observables": [{"key": "a", "stage": "b", "kind": "guess"}]}, "observables.0.kind"),
        (0, {"first_step": True}, "first_step: Input should be a valid integer"),
        (0, {"scenario": []}, "scenario: Input should be a valid dictionary"),
        (2, {"type": "footer"}, "a line of type 'footer' cannot stand there"),
        (2, {"step": "0"}, "step: Input should be a valid integer"),
        (2, {"values": {"loss": None}}, "values.loss: Input should be a valid number"),
        (2, {"values": {"loss": 10**400}}, "values.loss: Input should be a valid number"),
        (2, {"replicas": {"loss": {"offered": 1}}}, "replicas.loss.compared: Field required"),
        (2, {"replicas": {"a": {"offered": 1, "compared": 1, "differing": [DIFFERING | {"ranks": 1}]}}}, "ranks"),
        (2, {"tensors": {"file": "../x", "sha256": ""}}, "tensors.file: String should match pattern"),
        (-1, {"steps": -1}, "steps: Input should be greater than or equal to 0"),
        (-1, {"leaks": [{}]}, "leaks.0.op: Field required"),
        (-1, {"evidence": [WATCHED | {"float8_error": "small"}]}, "float8_error: Input should be a valid number"),
        (-1, {"evidence": [WATCHED | {"float8_error": "nan"}]}, "float8_error: Input should be greater than or equal"),
    ],
)
def test_a_line_of_another_type_is_an_error_although_its_digest_is_right(
    record: Path, number: int, changes: dict[str, Any], words: str
) -> None:
    change_line(record, 2, replicas={"a": {"offered": 1, "compared": 1, "differing": [DIFFERING]}})
    assert read_lines(record).steps[0]["replicas"]
    change_line(record, number, **changes)
    with pytest.raises(DigestMismatch, match=f"is not as the suite writes it .*{re.escape(words)}") as caught:
        read_lines(record)
    assert caught.value.left is not None
    assert len(caught.value.left.steps) <= 2


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_tensors_of_a_type_that_nothing_is_computed_in_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    writer = RecordWriter(tmp_path / "record", {}, observables=OBSERVABLES)
    writer.loaded({"weight/a": torch.zeros(2).to(dtype)})
    writer.finish({})
    with pytest.raises(DigestMismatch, match=r"holds weight/a in .*, and no backend computes that"):
        read_record(tmp_path / "record")
