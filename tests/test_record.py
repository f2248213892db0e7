"""Claim 8: a record that is not whole, or not what was written, is an error with a name and never a pass."""

import json
from pathlib import Path

import pytest
import torch

from conformance.record.tensors import (
    DigestMismatch,
    MissingFooter,
    RecordError,
    RecordWriter,
    WrongSchema,
    read_record,
)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    writer = RecordWriter(tmp_path / "record", {"cell": "x", "environment": {"backend-parity": "0.1.0"}})
    writer.step(-1, {}, {"weight/a": torch.zeros(2)})
    for step in range(2):
        writer.step(step, {"loss": 0.1 + step}, {"weight/a": torch.full((2,), 1.0 / 3, dtype=torch.float64)})
    writer.finish({"seconds": 1.5})
    return tmp_path / "record"


def lines(record: Path) -> list[str]:
    return (record / "record.jsonl").read_text().splitlines(keepends=True)


def rewrite(record: Path, content: list[str]) -> None:
    (record / "record.jsonl").write_text("".join(content))


def test_what_is_written_is_read_to_the_last_digit(record: Path) -> None:
    read = read_record(record)
    assert [s.values["loss"] for s in read.steps] == [0.1, 1.1]
    assert read.header["cell"] == "x"
    assert read.footer["seconds"] == 1.5
    weight = read.steps[1].tensors()["weight/a"]
    assert weight.dtype == torch.float64
    assert weight.tolist() == [1 / 3, 1 / 3]
    assert read.initial.tensors()["weight/a"].tolist() == [0, 0]


def test_a_record_is_never_overwritten(record: Path) -> None:
    with pytest.raises(FileExistsError):
        RecordWriter(record, {})


def test_no_record(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"holds no record\.jsonl"):
        read_record(tmp_path)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_run_that_stopped_has_no_footer(record: Path, kept: int) -> None:
    rewrite(record, lines(record)[:kept])
    with pytest.raises(MissingFooter, match=r"has no footer: the cell stopped after step .*run it again"):
        read_record(record)


def test_a_line_cut_in_the_middle_is_a_missing_footer(record: Path) -> None:
    content = "".join(lines(record))
    rewrite(record, [content[: len(content) - 40]])
    with pytest.raises(MissingFooter):
        read_record(record)


def test_an_edited_number_is_noticed(record: Path) -> None:
    rewrite(record, [line.replace("1.1", "1.2") for line in lines(record)])
    with pytest.raises(DigestMismatch, match="does not match its own digest: it was edited"):
        read_record(record)


def test_a_removed_step_is_noticed(record: Path) -> None:
    content = lines(record)
    rewrite(record, content[:2] + content[3:])
    with pytest.raises(DigestMismatch):
        read_record(record)


def test_a_line_that_is_not_json_is_named_by_number(record: Path) -> None:
    content = lines(record)
    rewrite(record, [content[0], "not json\n", *content[2:]])
    with pytest.raises(DigestMismatch, match=r"record.jsonl:2 is not JSON"):
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


def test_another_schema_names_the_version_that_wrote_it(record: Path) -> None:
    header, *rest = lines(record)
    rewrite(record, [json.dumps({**json.loads(header), "schema": 99}) + "\n", *rest])
    with pytest.raises(WrongSchema, match=r"has schema 99, this version reads 1.*backend-parity 0.1.0"):
        read_record(record)


@pytest.mark.parametrize("content", ["", "[]\n", "{}\n", '{"type": "step", "step": 0}\n'])
def test_something_else_is_not_a_record(record: Path, content: str) -> None:
    rewrite(record, [content])
    with pytest.raises(RecordError, match="does not begin with a header line"):
        read_record(record)
