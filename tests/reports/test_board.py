"""parity publish: runs of frameworks become a board, whose squares have a cause, a command and a history."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from report_sample import (
    CELLS,
    CONFORMS,
    CRASHED,
    DIFFERS,
    EXPECTED,
    NOT_RUN,
    PARTLY,
    RUN,
    SPECIAL,
    UNSUPPORTED,
    write_sample,
)
from side_sample import MEMBERS, declare, write_run, wrong_loss

from conformance.cli.main import main
from conformance.core.errors import UsageError
from conformance.spec.conventions import DecaysAll
from reports.board import (
    BOARD,
    Board,
    Column,
    Square,
    State,
    _again,
    changes,
    columns_of,
    joined,
    read_board,
    united,
    write_site,
)
from reports.ci_formats import COLOURS
from reports.html import write_html
from reports.load import read_report
from reports.page_data import Shared, cell_data

ROW = "core-sft-plain/llama/dp2/exact"


def column(version: str = "1.0", state: State = "pass", *, row: str = ROW, **values: Any) -> Column:
    square = Square(state=state, cause="why <b>", reproduce=f"scripts/framework toy {version}")
    known = {"framework": "toy", "started": "2026-11-28T01:00:00+00:00", "device": "cpu", "versions": {"toy": version}}
    return Column(version=version, squares={row: square}, **{**known, **values})


def board(*columns: Column) -> Board:
    return joined(Board(columns=()), columns)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_sample(tmp_path_factory.mktemp("runs") / "toy-2.0")
    (folder / "report.html").write_text("the report")
    return folder


def test_each_state_of_a_cell_has_its_square(out: Path) -> None:
    (found,) = columns_of(out)
    assert found.name == "toy 2.0"
    wanted = {CONFORMS: "pass", PARTLY: "partly_observed", DIFFERS: "differs", EXPECTED: "differs"}
    wanted |= {CRASHED: "gap", NOT_RUN: "gap", UNSUPPORTED: "unsupported"}
    for cell, state in wanted.items():
        scenario, model, _, *rest = cell.split("/")
        square = found.squares["/".join((scenario, model, *rest))]
        assert square.state == state
        assert cell not in SPECIAL or square.cause == SPECIAL[cell][1]
        assert square.reproduce == f"scripts/framework toy 2.0 --cells {cell}"


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        (
            "rank 0 raised: FileNotFoundError: /data/me/x-1/a.bin, see https://a.b/c/d or docs/findings/e.md\n"
            "  then rank 1 raised: KeyError: 'a/b'\nlogs: rank-0.log; stacks: none\n"
            'traceback of rank 0:\n    File "/data/me/adapter.py", line 7\n      load()',
            "rank 0 raised: FileNotFoundError: a.bin, see https://a.b/c/d or docs/findings/e.md\n"
            "  then rank 1 raised: KeyError: 'a/b'",
        ),
        ("no answer within 9 s; end of forkserver-1.log:\n    /data/me/a.py:3: a warning", "no answer within 9 s"),
        ("rank 0 died\nend of rank-0.log:\n    at /data/me/a.py", "rank 0 died"),
    ],
)
def test_a_gap_has_no_tracebacks_and_no_folders(
    reason: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPECIAL, CRASHED, ("infrastructure", reason))
    (found,) = columns_of(write_sample(tmp_path / "toy-2.0"))
    assert {square.cause for square in found.squares.values() if square.state == "gap"} >= {cause}


def test_a_folder_without_a_version_has_a_column_a_backend(tmp_path: Path) -> None:
    found = columns_of(write_sample(tmp_path / "out"))
    assert {one.framework for one in found} == {cell.split("/")[2] for cell in CELLS}
    assert {one.framework: one.version for one in found}["deepspeed"] == "0.19.2"  # as its records say


def test_records_without_versions_are_published(tmp_path: Path) -> None:
    out = write_sample(tmp_path / "toy-2.0")
    for file in out.glob("cells/**/record.jsonl"):
        header, *lines = file.read_text().splitlines()
        kept = {key: value for key, value in json.loads(header).items() if key != "environment"}
        file.write_text("\n".join([json.dumps(kept), *lines]) + "\n")
    assert columns_of(out)[0].squares


@pytest.mark.parametrize(("name", "ran"), [("deepspeed", "0.19.2"), ("two_words", "1.5")])
def test_a_folder_of_another_version_is_refused(name: str, ran: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(RUN.environment, "two-words", "1.5")
    with pytest.raises(UsageError, match=f"its cells ran {name} {ran}; rename the folder to {name}-{ran}"):
        columns_of(write_sample(tmp_path / f"{name}-0.18"))


@pytest.mark.parametrize(
    ("states", "shown"),
    [(("unsupported", "pass"), "pass"), (("pass", "gap"), "gap"), (("partly_observed", "differs"), "differs")],
)
def test_two_adapters_of_a_framework_share_a_column(states: tuple[State, State], shown: State) -> None:
    for one, other in (states, states[::-1]):
        assert united(column(state=one), column(state=other)).squares[ROW].state == shown


def test_a_refusal_of_another_objective_gives_way() -> None:
    own = column(state="unsupported")
    elsewhere = replace(own.squares[ROW], cause="toy-sft does not train the objective 'grpo'")
    for pair in (own, replace(own, squares={ROW: elsewhere})), (replace(own, squares={ROW: elsewhere}), own):
        assert united(*pair).squares[ROW].cause == "why <b>"


def test_a_later_run_replaces_squares_and_versions_add_up() -> None:
    grpo = "core-grpo-plain/llama/dp2/exact"
    later = column(state="differs", started="2026-11-29T01:00:00+00:00")
    grpo_alone = column(row=grpo, versions={"torch": "2.13"})
    found = board(later, column("0.9"), column("0.10"), grpo_alone, column(framework="abc"))
    assert found.columns[-1].versions == {"torch": "2.13", "toy": "1.0"}
    assert [one.name for one in found.columns] == ["abc 1.0", "toy 0.9", "toy 0.10", "toy 1.0"]
    assert {row: square.state for row, square in found.columns[-1].squares.items()} == {ROW: "differs", grpo: "pass"}
    assert [one.version for one in found.before(found.columns[-1])] == ["0.10", "0.9"]
    assert found.rows == [ROW, grpo]


def test_runs_on_gpus_are_a_column_of_their_own(tmp_path: Path) -> None:
    both = board(column("1.0"), column("1.0", "differs", device="cuda"), column("1.1"))
    assert [one.name for one in both.columns] == ["toy 1.0", "toy 1.0 on GPUs", "toy 1.1"]
    assert [one.name for one in both.before(both.columns[-1])] == ["toy 1.0"]
    write_site(both, Board(columns=()), tmp_path)
    assert json.loads((tmp_path / "badges" / "toy.json").read_text())["message"] == "1 pass"
    assert columns_of(tmp_path / "board.json") == list(both.columns)


def test_the_command_of_a_square_keeps_options_of_its_run() -> None:
    options = "--profile frameworks --backend adapter:A --python adapter:A=/v/bin/python --backend adapter:B"
    command = f"parity run --device cuda --ranks-per-gpu 2 {options} --cells core-a/llama/a/dp2/exact"
    wanted = "scripts/framework toy 1.0 --device cuda --ranks-per-gpu 2 --cells core-a/llama/a/dp2/exact"
    assert _again("scripts/framework toy 1.0", command) == wanted


def test_squares_show_history_and_what_did_not_run_is_a_gap(tmp_path: Path) -> None:
    absent = replace(column("2.0"), squares={}, device="not run")
    write_site(board(column("1.0"), column("1.1", "differs"), absent), Board(columns=()), tmp_path)
    page = " ".join((tmp_path / "index.html").read_text().split())
    history = "<p>1.1: ✗ fail: why &lt;b&gt;</p> <p>1.0: ✓ pass: why &lt;b&gt;</p> </details>"
    assert f"<pre>scripts/framework toy 2.0 --cells &#39;core-sft-plain/llama/*/dp2/exact&#39;</pre> {history}" in page
    assert "<pre>scripts/framework toy 1.1</pre> <p>1.0: ✓ pass</p> </details>" in page
    badge = json.loads((tmp_path / "badges" / "toy.json").read_text())
    assert (badge["label"], badge["message"], badge["color"]) == ("toy 2.0", "1 gap", COLOURS["incomplete"][0])
    write_site(board(column("3.0", "unsupported")), Board(columns=()), tmp_path)
    badge = json.loads((tmp_path / "badges" / "toy.json").read_text())
    assert (badge["message"], badge["color"]) == ("1 unsupported", COLOURS["incomplete"][0])


def test_changes_name_what_a_square_was() -> None:
    old = board(column("1.0"))
    assert changes(old, old) == []
    assert changes(board(column("1.0", "differs")), old)[0] == (f"- **toy 1.0**, `{ROW}`: fail (pass before): why <b>")
    newer = joined(old, [column("2.0", "gap")])
    assert changes(newer, old)[0].startswith(f"- **toy 2.0**, `{ROW}`: gap (pass in 1.0)")
    assert changes(joined(old, [column("2.0")]), old) == []
    assert changes(joined(old, [column("1.0", framework="new")]), old) == []  # nothing to compare with


def test_the_command_writes_a_static_site(out: Path, tmp_path: Path, capsys: Any) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write_site(board(column("1.0", row="sft-packed/qwen3/dp2/fp32")), Board(columns=()), first)
    absent = str(tmp_path / "other-3.0")
    assert main(["publish", str(out), absent, "--to", str(second), "--against", str(first / "board.json")]) == 3
    told = capsys.readouterr().out
    assert "3 columns" in told
    assert "other 3.0: nothing was run; run: scripts/framework other 3.0" in told
    page = (second / "index.html").read_text()
    assert "<script" not in page
    assert "why &lt;b&gt;" in page
    assert "toy<br>1.0" in page
    assert "toy<br>2.0" in page
    badge = json.loads((second / "badges" / "toy.json").read_text())
    assert (badge["label"], badge["color"]) == ("toy 2.0", "red")
    assert re.match(r"\d+ fail, \d+ gap, 1 partly observed, \d+ pass, 1 unsupported$", badge["message"])
    values, schema = (json.loads((second / name).read_text()) for name in ("board.json", "board.schema.json"))
    jsonschema.validate(values, schema)
    values["columns"][0]["squares"][ROW] = {"state": "green"}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, schema)
    (link,) = set(re.findall(r'href="(reports/toy-2.0[^"#]*)#cell-', page))
    assert (second / link).read_text() == "the report"
    assert main(["publish", str(second / "board.json"), "--to", str(tmp_path / "third")]) == 3
    assert "reports/" not in (tmp_path / "third" / "index.html").read_text()
    assert read_board(second / "board.json") == BOARD.validate_json((second / "board.json").read_bytes())
    assert (second / "changes.md").read_text() == ""
    assert (
        main(["publish", str(tmp_path / "toy-3.0"), "--to", str(first), "--against", str(second / "board.json")]) == 3
    )
    assert f"- **toy 3.0**, `{next(iter(columns_of(out)[0].squares))}`: gap (pass in 2.0): not run" in (
        (first / "changes.md").read_text()
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "not a readable board.json"),
        ("{", "not a readable board.json"),
        ('{"schema": 2, "columns": []}', "schema: Input should be 1"),
        ('{"columns": [{"framework": "../up"}]}', "framework: String should match pattern"),
    ],
)
def test_a_board_that_is_none_is_told(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "board.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_board(path)


def test_conventions_are_a_colour_of_their_own(tmp_path: Path) -> None:
    out = write_run(tmp_path / "runs", {MEMBERS[0]: wrong_loss}, members=MEMBERS[:2])
    declare(out, MEMBERS[:1], DecaysAll(), wrong_loss)
    found = {column.framework: column for column in columns_of(out)}
    (own,), (plain,) = (found[name].squares.values() for name in ("deepspeed", "fsdp2"))
    assert (own.state, own.conventions, plain.state, plain.conventions) == ("convention", ("DecaysAll",), "pass", ())
    write_site(board(*found.values()), Board(columns=()), tmp_path / "site")
    page = (tmp_path / "site" / "index.html").read_text()
    assert '<summary title="convention, DecaysAll">' in page
    assert "Conventions: DecaysAll" in page


def test_reports_name_conventions(tmp_path: Path) -> None:
    out = write_run(tmp_path / "runs", {MEMBERS[0]: wrong_loss}, members=MEMBERS[:2])
    declare(out, MEMBERS[:1], DecaysAll(), wrong_loss)
    page = write_html(out).read_text(encoding="utf-8")
    assert "declared convention of its backend: <b>DecaysAll</b> (weight decay on norms and biases)." in page
    (box,) = (b for b in re.findall(r'<a class="box .*?</a>', page) if "≈" in b)
    assert re.search(r"pass: margin \S+ digits, in .*, with the convention DecaysAll&#10;", box)
    shown, other = (cell_data(cell, Shared())["conventions"] for cell in read_report(out).cells)
    assert (shown, other) == ([["DecaysAll", "weight decay on norms and biases", True]], [])
