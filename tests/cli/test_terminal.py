"""What `parity run` says while cells run: plain lines in a pipe, and a bar with the ranks' phase on a terminal."""

import contextlib
import io
import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import pytest
from plain_profile import write_profile
from rich.console import Console

from conformance.backends.protocol import BackendEntry
from conformance.cli import main as cli
from conformance.cli.report import Loudness, Terminal, duration, print_summary, seconds_left
from conformance.core.host import FIXTURES
from conformance.core.io import visible_output
from conformance.matrix.cell import Cell
from conformance.results.verdict import Verdict
from conformance.runner.placement import Activity
from conformance.spec.layout import Layout
from conformance.spec.scenario import load_scenario
from reports import ci_formats, wording
from reports.html import environment

SLOW = """
import time
from plain_backend import Plain

class Slow(Plain):
    def train_step(self, batch, on_gradients):
        time.sleep(0.6)
        return super().train_step(batch, on_gradients)
"""


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def tty(monkeypatch: pytest.MonkeyPatch) -> Tty:
    """Standard error as a terminal that shows colours."""
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    return Tty()


def cell(backend: str = "b", layout: str = "dp2") -> Cell:
    scenario = load_scenario(FIXTURES / "scenarios" / "sft-sgd.toml", model="models/llama", precision="exact")
    return Cell.single(scenario=scenario, backend=BackendEntry(name=backend, target=""), layout=Layout.parse(layout))


def activity(phase: str = "step 2") -> Activity:
    return Activity(cell=cell(), phase=phase, since=time.monotonic() - 14, waiting=(cell("c"),))


def say(loudness: Loudness = "normal", *, to: TextIO | None = None) -> None:
    """Three cells that are judged."""
    with contextlib.redirect_stderr(to or sys.stderr), Terminal(total=9, now=activity, loudness=loudness) as terminal:
        terminal.judged(cell(), Verdict(state="conforms", reason=""), 1.0)
        terminal.judged(cell("c"), Verdict(state="differs", reason="first [red]difference[/] at loss\nmore"), 2.0)
        terminal.judged(cell("d"), Verdict(state="unsupported", reason="use dp2"), 0.0)


def test_a_pipe_gets_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    say()
    assert capsys.readouterr().err.splitlines() == [
        "[1/9]   1.0 s  pass     sft-sgd/llama/b/dp2/exact  ",
        "[2/9]   2.0 s  FAIL     sft-sgd/llama/c/dp2/exact  first [red]difference[/] at loss",
        "[3/9]   0.0 s  unsupported sft-sgd/llama/d/dp2/exact  use dp2",
    ]


def test_quiet_is_about_what_needs_attention(capsys: pytest.CaptureFixture[str]) -> None:
    say("quiet")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[2/9]   2.0 s  FAIL")


def test_a_terminal_gets_colours_and_a_bar(tty: Tty) -> None:
    say(to=tty)
    assert "\x1b[1;31mFAIL    " in tty.getvalue()
    assert "0/9 cells" in tty.getvalue()


def test_no_color_is_honoured(tty: Tty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    say(to=tty)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", tty.getvalue())
    assert "FAIL" in tty.getvalue()


@pytest.mark.parametrize("name", ["CI", "TERM"])
def test_ci_and_a_dumb_terminal_get_no_bar(name: str, tty: Tty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "dumb")
    say(to=tty)
    assert "cells" not in tty.getvalue()
    assert "FAIL" in tty.getvalue()


def test_the_bar_says_what_is_done_what_runs_and_how_long_the_rest_takes() -> None:
    terminal = Terminal(total=9, now=activity)
    terminal.judged(cell(), Verdict(state="differs", reason=""), 60.0)
    Console(file=(shown := io.StringIO()), width=100).print(terminal.picture())
    first, second = shown.getvalue().splitlines()
    assert first.split(maxsplit=1)[1].strip() == "1/9 cells · 1 fail · about 2 min left"
    assert re.fullmatch(r"sft-sgd/llama/b/dp2/exact  step 2, (1[4-9]|[2-5]\d) s", second)


def test_time_left_is_that_of_cells_like_those_that_wait() -> None:
    took = [(cell("fast"), 1.0), (cell("fast"), 3.0), (cell("slow", "dp4"), 20.0)]
    assert seconds_left([], [cell()]) is None
    assert seconds_left(took, [cell("fast"), cell("slow", "dp4")]) == 22
    assert seconds_left(took, [cell("new")]) == 8
    assert [duration(x) for x in (40, 89, 720, 9000)] == ["40 s", "89 s", "12 min", "2.5 h"]


def test_the_verdict_has_its_colour_on_a_terminal_only(tty: Tty, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary("differs", ["differs: 1", "b"])
    assert capsys.readouterr().out == "differs: 1\nb\n"
    with contextlib.redirect_stdout(tty):
        print_summary("differs", ["differs: 1", "b"])
    assert tty.getvalue() == "\x1b[1;31mdiffers: 1\x1b[0m\nb\n"


HOSTILE = "a\x1b]0;t\x07b\rc\x9b2Jd\u202eef\x01"
SHOWN = "a\\x1b]0;t\\x07b\\rc\\x9b2Jd\\u202eef\\x01"


def test_escape_sequences_of_files_are_visible(tty: Tty, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", HOSTILE]) == 2
    with pytest.raises(SystemExit):
        cli.main(["list", f"--{HOSTILE}"])
    print_summary("differs", ["", HOSTILE])
    with Terminal(total=2, now=lambda: None) as shown:
        shown.judged(cell(), Verdict(state="differs", reason=HOSTILE), 1)
        shown.say(HOSTILE)
        logging.getLogger("conformance").info(HOSTILE)
    said = capsys.readouterr()
    assert (said.out + said.err).count(SHOWN) == 6
    assert not re.search("[\x01\x1b\r\x9b\u202e]", said.out + said.err)


@pytest.mark.parametrize(
    "write", [wording.plain, wording.code, ci_formats._clean, environment().from_string("{{ x }}").render]
)
def test_escape_sequences_are_visible_in_reports(write: Callable[..., str]) -> None:
    text = write(x=HOSTILE) if write.__name__ == "render" else write(HOSTILE)
    assert "\\x1b" in text
    assert not re.search("[\x01\x1b\r\x9b\u202e]", text)


def test_the_bar_has_its_colours_where_other_output_is_made_visible(tty: Tty) -> None:
    with contextlib.redirect_stderr(tty), visible_output():
        with Terminal(total=2, now=lambda: None) as shown:
            shown.judged(cell(), Verdict(state="differs", reason=""), 1)
            print(HOSTILE, file=sys.stderr)
        print(HOSTILE, file=sys.stderr)
    assert tty.getvalue().count(SHOWN) == 2
    assert tty.getvalue().count("\\x1b") == 2  # of SHOWN, and none of the bar's own
    assert "\x1b[1;31mFAIL" in tty.getvalue()


def test_a_worker_group_that_is_retired_is_a_line_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("conformance.runtime.pool")
    for loudness in ("quiet", "normal", "verbose"):
        with Terminal(total=9, now=activity, loudness=loudness):
            logger.info("worker group 1 (b, 2 ranks) is retired: it leaks")
            logger.debug("worker group 2 (b, 2 ranks) is retired: the next task wants a fresh one")
        logger.info("after the run")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[0] for line in lines] == ["worker group 1", "worker group 1", "worker group 2"]


@pytest.mark.exhaustive
def test_a_run_shows_the_phase_of_its_ranks(tmp_path: Path, tty: Tty, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_adapter.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(tmp_path))
    chosen = ["--backend", "slow_adapter:Slow", "--profile", write_profile(tmp_path), "--cells", "*/dp2/*"]
    with contextlib.redirect_stderr(tty):
        assert cli.main(["run", *chosen, "--out", str(tmp_path / "out")]) == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", tty.getvalue())
    assert re.search(r"tiny/llama/slow/dp2/fp32 +step [01], \d+ s", shown)
