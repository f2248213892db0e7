"""The file of a history may come from anybody: what the suite did not write is one message, and nothing of it runs."""

import os
import sqlite3
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from conformance.cli import main as cli
from conformance.core.errors import UsageError
from conformance.results.baseline import Outcome
from conformance.results.history import HISTORY, Summary, open_history

SELECTION = "--profile quick"


def summary(day: int) -> Summary:
    whose = {1: "", 2: "transformers' own PhiForCausalLM", 4: None}
    cells = {
        f"sft/llama/fsdp2/dp{ranks}/exact": Outcome(
            state="conforms", seconds=1.5, second_class=whose[ranks], errors={"loss": 1e-15, "gradients": 3.2e-15}
        )
        for ranks in (1, 2, 4)
    }
    started = datetime(2026, 8, day, tzinfo=UTC)
    return Summary(
        selection=SELECTION, started=started, seconds=9.5, verdict="conforms", versions={"torch": "2"}, cells=cells
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with open_history(tmp_path / "kept", change=True) as history:
        history.add(summary(1))
        history.add(summary(2))
    return tmp_path / "kept"


def read(folder: Path) -> list[Summary]:
    with open_history(folder) as history:
        return history.runs(SELECTION, last=9)


def test_what_was_added_is_read_back(folder: Path) -> None:
    assert read(folder) == [summary(1), summary(2)]
    assert list(folder.iterdir()) == [folder / HISTORY]


OLDER = (  # as version 0.1.0 wrote them
    "CREATE TABLE cells (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE)",
    "CREATE TABLE outcomes (run INTEGER NOT NULL, cell INTEGER NOT NULL, state TEXT NOT NULL, seconds REAL, "
    "PRIMARY KEY (run, cell)) WITHOUT ROWID",
    "CREATE TABLE runs (number INTEGER PRIMARY KEY, selection TEXT NOT NULL, started TEXT NOT NULL, "
    "seconds REAL NOT NULL, verdict TEXT NOT NULL, versions TEXT NOT NULL, UNIQUE (selection, started, versions))",
    "PRAGMA user_version = 1",
    "INSERT INTO cells VALUES (7, 'sft/llama/fsdp2/dp2/exact')",
    "INSERT INTO runs VALUES (3, '--profile quick', '2026-07-31T00:00:00+00:00', 9.5, 'conforms', "
    '\'{"torch": "2"}\')',
    "INSERT INTO outcomes VALUES (3, 7, 'conforms', 1.5)",
)


SECOND = (
    "ALTER TABLE outcomes RENAME TO older",
    OLDER[1].replace("seconds REAL, ", "seconds REAL, second_class TEXT, "),
)
MOVED = ("INSERT INTO outcomes SELECT run, cell, state, seconds, NULL FROM older", "DROP TABLE older")


@pytest.mark.parametrize("more", [(), (*SECOND, *MOVED, "PRAGMA user_version = 2")], ids=["first", "second"])
def test_a_history_of_an_older_schema_is_read_and_goes_on(more: tuple[str, ...], tmp_path: Path) -> None:
    """Its runs do not say whose the oracles were, and a file that is only read is not changed."""
    file = tmp_path / HISTORY
    _sql(*OLDER, *more)(file)
    before = file.read_bytes()
    (older,) = read(tmp_path)
    assert older.cells == {"sft/llama/fsdp2/dp2/exact": Outcome(state="conforms", seconds=1.5, second_class=None)}
    assert file.read_bytes() == before
    with open_history(tmp_path, change=True) as history:
        history.add(summary(1))
    assert read(tmp_path) == [older, summary(1)]


def test_a_history_that_is_not_there_is_one_message_that_says_how_to_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["history", str(tmp_path / "none")]) == 2
    assert f"parity history {tmp_path / 'none'} --add OUT starts a history" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def _sql(*statements: str) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        with sqlite3.connect(file) as opened:
            for statement in statements:
                opened.execute(statement)
        opened.close()

    return change


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4096])


def _garbage(file: Path) -> None:
    file.write_bytes(b"\0" * 8192)


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _scrambled(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[4096:] = bytes(byte ^ 0x5A for byte in content[4096:])
    file.write_bytes(content)


def _link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _null(file: Path) -> None:
    """A row that only the check of the whole file finds, because no run names it."""
    rewrite = "UPDATE sqlite_schema SET sql = replace(sql, '{}', '{}') WHERE name = 'cells'"
    _sql("PRAGMA writable_schema = ON", rewrite.format("TEXT NOT NULL UNIQUE", "TEXT UNIQUE"))(file)
    _sql("INSERT INTO cells (id) VALUES (NULL)")(file)
    _sql("PRAGMA writable_schema = ON", rewrite.format("TEXT UNIQUE", "TEXT NOT NULL UNIQUE"))(file)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut short": (_cut, "is damaged"),
    "zeros": (_garbage, "is damaged"),
    "empty": (_empty, "is damaged"),
    "scrambled": (_scrambled, "is damaged"),
    "a row that cannot be": (_null, "is damaged .*NULL value"),
    "a link": (_link, "is a link"),
    "a folder": (_folder, "is a folder"),
    "a pipe": (_pipe, "is a named pipe"),
    "another schema": (
        _sql("PRAGMA user_version = 4"),
        r"is not a history of schema 1 or 2 or 3 \(its schema is 4\); use the version",
    ),
    "the number of another": (
        _sql("PRAGMA user_version = 1"),
        r"is not a history .* \(its schema is 1\); use",
    ),
    "an oracle that is a blob": (_sql("UPDATE outcomes SET second_class = x'ff'"), "is damaged"),
    "another table": (_sql("CREATE TABLE more (x)"), "is not a history"),
    "a column more": (_sql("ALTER TABLE runs ADD COLUMN more TEXT"), "is not a history"),
    "a trigger": (
        _sql("CREATE TRIGGER t AFTER INSERT ON runs BEGIN DELETE FROM runs; END"),
        "is not a history",
    ),
    "a view": (_sql("ALTER TABLE runs RENAME TO r", "CREATE VIEW runs AS SELECT * FROM r"), "is not a history"),
    "an unknown state": (_sql("UPDATE outcomes SET state = 'splendid'"), "is damaged .*state"),
    "an unknown verdict": (_sql("UPDATE runs SET verdict = 'green'"), "is damaged .*verdict"),
    "no time": (_sql("UPDATE runs SET started = 'yesterday' WHERE number = 1"), "is damaged .*started"),
    "seconds of words": (_sql("UPDATE outcomes SET seconds = 'long'"), "is damaged .*seconds"),
    "versions that are no table": (_sql("UPDATE runs SET versions = '[1]'"), "is damaged .*versions"),
    "versions that are no JSON": (_sql("UPDATE runs SET versions = '{'"), "is damaged"),
    "versions without end": (_sql("UPDATE runs SET versions = replace(hex(zeroblob(99999)), '00', '[')"), "is damaged"),
    "a text that is no UTF-8": (_sql("UPDATE runs SET versions = CAST(x'ff' AS TEXT)"), "is damaged"),
    "a cell that is a blob": (_sql("UPDATE cells SET id = x'ff00' WHERE number = 1"), "is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_the_suite_did_not_write_is_one_message_with_advice(damage: str, folder: Path) -> None:
    change, words = DAMAGES[damage]
    change(folder / HISTORY)
    with pytest.raises(UsageError, match=rf"{HISTORY} {words}.*replace it by an intact copy") as raised:
        read(folder)
    assert "\n" not in str(raised.value)


def test_nothing_is_added_to_a_history_that_is_damaged(folder: Path) -> None:
    (folder / HISTORY).write_bytes(b"not a database")
    with pytest.raises(UsageError), open_history(folder, change=True) as history:
        history.add(summary(3))
    assert (folder / HISTORY).read_bytes() == b"not a database"


def test_a_change_that_fails_changes_nothing(folder: Path) -> None:
    before = (folder / HISTORY).read_bytes()

    def add_and_fail() -> None:
        with open_history(folder, change=True) as history:
            history.add(summary(3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        add_and_fail()
    assert (folder / HISTORY).read_bytes() == before


def test_two_who_add_take_turns(folder: Path) -> None:
    def add(day: int) -> None:
        with open_history(folder, change=True) as history:
            history.add(summary(day))

    others = [threading.Thread(target=add, args=(day,)) for day in range(3, 13)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    with open_history(folder) as history:
        assert len(history.runs(SELECTION, last=99)) == 12
