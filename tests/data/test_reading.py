"""Reading: whatever a file is, it is text of the promised form, or one message with its name."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.core.errors import UsageError
from conformance.core.io import MIB, read_json, read_text, read_toml

Read = Callable[[Path], Any]


def text(path: Path) -> str:
    return read_text(path, limit=MIB)


@pytest.mark.parametrize("read", [text, read_json, read_toml])
def test_what_is_no_file_is_refused_without_waiting_for_it(read: Read, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to-pipe").symlink_to(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("pipe", "to-pipe", "/dev/zero"):
        with pytest.raises(UsageError, match=r"/(pipe|to-pipe|zero) is a pipe, a socket or a device; give a file"):
            read(tmp_path / name)
    with pytest.raises(UsageError, match="is a folder; give a file"):
        read(tmp_path)
    with pytest.raises(UsageError, match=r"loop cannot be read: .*symbolic links"):
        read(tmp_path / "loop")
    with pytest.raises(UsageError, match=r"cannot be read: .*too long"):
        read(tmp_path / ("x" * 300))
    with pytest.raises(UsageError, match=r"cannot be read: .*null byte"):
        read(tmp_path / "\0")
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nowhere")


@pytest.mark.parametrize("read", [text, read_json, read_toml])
def test_what_is_not_utf8_is_told_with_its_line(read: Read, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a = 1\nb = 2\n\n# caf\xe9\n")
    with pytest.raises(UsageError, match=r"file, line 4: not UTF-8 \(.*byte 0xe9\); save the file as UTF-8"):
        read(tmp_path / "file")


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * MIB)
    assert len(text(file)) == MIB
    file.write_bytes(b"x" * (MIB + 1))
    with pytest.raises(UsageError, match="file has more than 1 MiB"):
        text(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "file is not JSON: Expecting"),
        ("[" * 100_000, "file cannot be read: its JSON is nested too deeply"),
        ('{"a": ' * 100_000, "file cannot be read: its JSON is nested too deeply"),
        ("9" * 5000, "file is not JSON: Exceeds the limit"),
        ("[1]", r"file must hold a JSON object \({...}\), got \[1\]"),
        ("null", r"file must hold a JSON object \({...}\), got None"),
    ],
)
def test_json_that_is_no_object_is_told(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(UsageError, match=message):
        read_json(tmp_path / "file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a = = 1", r"file is not valid TOML: Invalid value \(at line 1"),
        (f"a = {'[' * 3000}", "file is not valid TOML: it is nested too deeply"),
        (f"a = {'9' * 5000}", "file is not valid TOML: Exceeds the limit"),
    ],
)
def test_broken_toml_is_told(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(content)
    with pytest.raises(UsageError, match=message):
        read_toml(tmp_path / "file")


def test_values_are_read(tmp_path: Path) -> None:
    (tmp_path / "json").write_text('{"é": [1, null]}', encoding="utf-8")
    (tmp_path / "toml").write_text('"é" = [1, 2]', encoding="utf-8")
    assert read_json(tmp_path / "json") == {"é": [1, None]}
    assert read_toml(tmp_path / "toml") == {"é": [1, 2]}
