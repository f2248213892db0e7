"""Files of an output folder: only regular ones are read, and nothing is written through a link or outside of it."""

import ast
import contextlib
import json
import os
import re
import resource
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from report_sample import edit
from run_sample import EXACT, FOLDERS, record_folders, write_sample_run

from conformance.cli import main as cli
from conformance.core.host import CHECKOUT
from conformance.core.io import Unreadable, Unwritable, encoded, no_link, read_end, read_file, write_file
from conformance.records import step_tensors
from conformance.records.record_format import RecordError, parse_strict_json, read_lines, record_digest
from conformance.records.step_tensors import read_record


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link_without_end(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_in_a_circle(path: Path) -> None:
    path.symlink_to(path.name)


def link_to_a_file(path: Path) -> None:
    (path.parent / "another").write_text("secret")
    path.symlink_to(path.parent / "another")


def bound_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def larger_than_the_disk(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**41)


NO_FILES: list[tuple[Callable[[Path], None], str]] = [
    (pipe, "is a named pipe and not a file"),
    (link_without_end, "is a link and not a file"),
    (link_in_a_circle, "is a link and not a file"),
    (link_to_a_file, "is a link and not a file"),
    (bound_socket, "is a socket and not a file"),
    (Path.mkdir, "is a folder and not a file"),
]


@pytest.mark.parametrize(("make", "words"), [*NO_FILES, (larger_than_the_disk, "bytes, more than the 100")])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None], words: str) -> None:
    make(tmp_path / "x")
    with pytest.raises(Unreadable, match=words):
        read_file(tmp_path / "x", limit=100)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        *((name, Unreadable) for name in ("a" * 5000, "a\x00b", "\ud800")),
        *((name, FileNotFoundError) for name in ("nothing", "file/in/a/file")),
    ],
)
def test_no_name_and_no_file_are_told_apart(tmp_path: Path, path: str, error: type[Exception]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(error):
        read_file(tmp_path / path, limit=100)


def test_of_a_log_only_the_end_is_read(tmp_path: Path) -> None:
    larger_than_the_disk(tmp_path / "log")
    with (tmp_path / "log").open("ab") as file:
        file.write(b"the end")
    assert read_end(tmp_path / "log", limit=7) == b"the end"


@pytest.mark.parametrize("make", [pipe, link_without_end, link_in_a_circle, link_to_a_file, bound_socket])
@pytest.mark.parametrize("name", ["x", "x.unfinished"])
def test_what_is_written_replaces_what_is_there_and_never_goes_through_it(
    tmp_path: Path, make: Callable[[Path], None], name: str
) -> None:
    make(tmp_path / name)
    write_file(tmp_path / "x", "new")
    assert not (tmp_path / "x").is_symlink()
    assert (tmp_path / "x").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("x", "another")] == []
    assert make is not link_to_a_file or (tmp_path / "another").read_text() == "secret"


@pytest.mark.parametrize("name", ["x", "x.unfinished"])
def test_a_folder_is_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name / "held").mkdir(parents=True)
    with pytest.raises(Unwritable, match="x cannot be written: Is a directory"):
        write_file(tmp_path / "x", "new")
    assert (tmp_path / name / "held").is_dir()


@contextlib.contextmanager
def _no_room() -> Iterator[None]:
    """This process may not make a file longer than 10 bytes: nor may pytest, so no longer than need be."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_cannot_be_written_whole_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    with pytest.raises(Unwritable, match="x cannot be written: File too large"), _no_room():
        write_file(tmp_path / "x", "new" * 10)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_text() == "old"


def test_the_name_of_a_folder_in_another_encoding_can_be_written(tmp_path: Path) -> None:
    write_file(tmp_path / "x", os.fsdecode(b"\xff"))
    assert (tmp_path / "x").read_text() == r"\udcff"
    assert encoded("\N{MULTIPLICATION SIGN}") == b"\xc3\x97"


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 70 + "1" + "}" * 70, "NaN", "-Infinity", "1" * 5000, "{", ""]
)
def test_what_is_no_json_or_has_no_end_is_one_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse_strict_json(text.encode())


def test_json_that_the_suite_writes_is_read() -> None:
    assert parse_strict_json(b'{"a": [1, 2.5, null, true, "nan", {"b": []}]}') == {
        "a": [1, 2.5, None, True, "nan", {"b": []}]
    }
    assert parse_strict_json(b"1") == 1


# --- a whole folder --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every cell conforms. Never written to by a test."""
    return write_sample_run(tmp_path_factory.mktemp("run") / "out")


@pytest.fixture
def out(sample: Path, tmp_path: Path) -> Path:
    """A copy of the sample that a test may damage, beside a folder that is nobody's business."""
    (tmp_path / "victim").mkdir()
    return Path(shutil.copytree(sample, tmp_path / "out"))


@pytest.mark.parametrize("name", ["record.jsonl", "loaded.safetensors", "step-0000.safetensors"])
@pytest.mark.parametrize(("make", "words"), [*NO_FILES, (larger_than_the_disk, "more than the|header")])
def test_a_record_of_what_is_no_file_is_none(out: Path, name: str, make: Callable[[Path], None], words: str) -> None:
    record = out / record_folders(EXACT)[0]
    (record / name).unlink()
    make(record / name)
    with pytest.raises(RecordError, match=words):
        read_record(record)


@pytest.mark.parametrize("name", ["/etc/passwd", "../../../../01/legs/0/record/loaded.safetensors", "a/b", ".", ""])
def test_the_tensors_of_a_record_lie_in_its_own_folder(out: Path, name: str) -> None:
    record = out / record_folders(EXACT)[0]
    text = (record / "record.jsonl").read_text()
    (record / "record.jsonl").write_text(text.replace("loaded.safetensors", name))
    with pytest.raises(RecordError):
        read_lines(record)


@pytest.mark.parametrize("change", ["folder of the verdict", "folder of both", "absolute", "linked"])
def test_nothing_is_written_outside_of_the_folder(out: Path, change: str, capsys: pytest.CaptureFixture[str]) -> None:
    victim, folder = out.parent / "victim", out / FOLDERS[EXACT]
    if change == "linked":
        shutil.move(folder, victim / "planted")
        folder.symlink_to(victim / "planted")
        before = (victim / "planted/verdict.json").stat().st_mtime_ns
    else:
        where = str(victim / "planted") if change == "absolute" else "../victim/planted"
        edit(folder / "verdict.json", folder=where)
        if change == "folder of both":
            summary = parse_strict_json((out / "summary.json").read_bytes())
            summary["cells"][0]["folder"] = where
            edit(out / "summary.json", **summary)
    assert cli.main(["judge", str(out)]) == 2
    assert cli.main(["report", str(out)]) == 2
    error = capsys.readouterr().err
    assert "lies outside of" in error or "was edited or comes from another run" in error
    assert "Traceback" not in error
    if change == "linked":
        assert (victim / "planted/verdict.json").stat().st_mtime_ns == before
    else:
        assert list(victim.iterdir()) == []


@pytest.mark.parametrize("name", ["report.html", "report.md", "junit.xml", "side_by_side.json"])
@pytest.mark.parametrize("suffix", ["", ".unfinished"])
def test_reports_and_comparisons_are_not_written_through_links(out: Path, name: str, suffix: str) -> None:
    victim = out.parent / "victim" / "precious"
    victim.write_text("precious")
    (out / f"{name}{suffix}").unlink(missing_ok=True)
    (out / f"{name}{suffix}").symlink_to(victim)
    assert cli.main(["judge", str(out)]) == 0
    assert victim.read_text() == "precious"
    assert (out / name).stat().st_size > 100
    assert not (out / name).is_symlink()


def test_a_report_that_cannot_be_written_does_not_keep_the_others_from_it(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("junit.xml", "report.md", "report.html"):
        (out / name).unlink(missing_ok=True)
    (out / "junit.xml").mkdir()
    assert cli.main(["report", str(out)]) == 3
    assert "junit.xml cannot be written: Is a directory" in capsys.readouterr().err
    assert (out / "report.html").is_file()


def test_judge_imports_no_module_that_a_record_names(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "planted_objective.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nclass Planted: roles = ()")
    monkeypatch.syspath_prepend(tmp_path)
    kind, record = "planted_objective:Planted", out / record_folders(EXACT)[0] / "record.jsonl"
    *lines, footer = map(parse_strict_json, record.read_bytes().splitlines())
    lines[0]["scenario"]["objective"]["kind"] = kind
    body = "".join(f"{json.dumps(line)}\n" for line in lines)
    record.write_text(body + json.dumps(footer | {"sha256": record_digest(body.encode(), footer)}) + "\n")
    assert cli.main(["judge", str(out)]) == 3
    assert f"names the objective '{kind}'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    cli.main(["judge", str(out), "--objective", kind])
    assert (tmp_path / "run").exists()


NAMES = ("open", "json.loads", "TCPStore", ".listen", "create_server", "HTTPServer")  # of functions that offend


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where code writes through a link, reads JSON past the limits of read_json, or may listen at every address."""
    last_parts = tuple(name.rpartition(".")[2] for name in NAMES)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
        if not called.endswith(last_parts) or not ast.unparse(node.func).endswith(NAMES):  # which takes long
            continue
        text = ast.unparse(node)
        is_open = re.match(r"(os\.)?open\(|.*\.open\($", ast.unparse(node.func) + "(")
        modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        writes = is_open and any(re.fullmatch("[wa]b?[+]?", mode) for mode in modes)
        if writes and not re.search("opener=no_link|closefd=False", text):
            yield node.lineno, "opens through a link; add opener=no_link"
        if text.startswith("os.open(") and "O_CREAT" in text and not re.search("O_NOFOLLOW|O_EXCL|_FLAGS", text):
            yield node.lineno, "opens through a link; add O_NOFOLLOW"
        if re.match(r"json\.loads\(.*\.read_text\(", text):
            yield node.lineno, "reads any file whole; use read_json"
        if re.match(r"[\w.]*(TCPStore\(.*is_master=True|\.listen\(\w|create_server\(|HTTPServer\()", text):
            yield node.lineno, "listens; use listening_store"


EXEMPT = {
    "conformance/worker/activation_capture.py",  # files of a folder that its own process has just made
    "conformance/core/process.py",  # listening_store
}


def test_no_code_follows_links_or_listens_everywhere() -> None:
    found = [
        f"{file.relative_to(CHECKOUT)}:{line} {what}"
        for package in ("conformance", "reports", "impl", "parity")
        for file in sorted((CHECKOUT / package).rglob("*.py"))
        if str(file.relative_to(CHECKOUT)) not in EXEMPT
        for line, what in offences(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ('path.open("w")', 1),
        ('open(path, "ab")', 1),
        ('open(path, "ab", opener=no_link)', 0),
        ('path.open("rb")', 0),
        ("os.open(path, os.O_WRONLY | os.O_CREAT)", 1),
        ("json.loads((folder / NAME).read_text())", 1),
        ("dist.TCPStore(host, 0, is_master=True)", 1),
        ("dist.TCPStore(host, port, is_master=False)", 0),
        ("listener.listen(8)", 1),
        ("signals.listen()", 0),
    ],
)
def test_the_lint_finds_offences(code: str, count: int) -> None:
    assert len(list(offences(ast.parse(code)))) == count


def test_opener_refuses_a_link_and_leaves_its_target(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="symbolic links"), open(tmp_path / "link", "w", opener=no_link):
        pass
    assert (tmp_path / "file").read_text() == "precious"


def test_a_large_file_of_inputs_is_read_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(step_tensors.LARGE))
    first = step_tensors.input_sha256(file)
    with monkeypatch.context() as patch:
        patch.delattr(step_tensors, "file_sha256")
        assert step_tensors.input_sha256(file) == first
    time.sleep(0.02)  # file systems count time in steps of up to 10 ms
    file.write_bytes(b"1" + bytes(step_tensors.LARGE - 1))
    os.utime(file, (0, 0))
    assert step_tensors.input_sha256(file) == step_tensors.file_sha256(file) != first
