"""``parity diff``: what it prints and writes, what it refuses, and its exit code."""

import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from chromium import Browser
from log_diff import STEPS, constant_columns, diff, write

from conformance.core.errors import UsageError
from reports.logdiff.command import compare_sides


def test_runs_that_agree_end_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(write(tmp_path, "a.jsonl"), write(tmp_path, "b.jsonl", factor=1.04)) == 0
    told = capsys.readouterr().out
    assert told.startswith("a.jsonl and b.jsonl agree within the band in 3 metrics, at 80 steps.")
    assert "Likely causes" not in told


@pytest.mark.parametrize(
    ("steps", "code", "headline"),
    [
        (range(1, 2), 3, "cannot be compared: they have only 1 of 60 steps in common."),
        (range(1, 7), 3, "cannot be compared: they have only 6 of 60 steps in common."),
        (range(1, 8), 0, "agree within the band in 1 metric, at 7 of 60 steps."),
        (range(10, 61, 10), 0, "agree within the band in 1 metric, at 6 of 60 steps."),
        (range(1, 61), 0, "agree within the band in 1 metric, at 60 steps."),
        (range(30, 130, 10), 3, "cannot be compared: they have only 4 of 60 steps in common."),
        (range(51, 71), 0, "agree within the band in 1 metric, at 10 of 60 steps."),
    ],
)
def test_agreement_says_at_how_many_steps(
    steps: range, code: int, headline: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = []
    for name, own in (("a.jsonl", range(1, 61)), ("b.jsonl", steps)):
        (tmp_path / name).write_text("".join(json.dumps({"step": i, "loss": 2.5 - i / 100}) + "\n" for i in own))
        logs.append(str(tmp_path / name))
    assert diff(*logs) == code
    told = capsys.readouterr().out.splitlines()
    assert headline in told[0]
    assert told[-1].endswith("(log both runs at the same steps, such as every tenth)") == bool(code)
    assert diff(logs[1], logs[0], "--json") == code


def test_short_logs_of_the_same_step_agree(tmp_path: Path) -> None:
    logs = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    for log in logs:
        Path(log).write_text('{"step": 1, "loss": 2.5}\n')
    assert diff(*logs) == 0


def test_runs_that_part_end_with_1_and_say_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path, "a.jsonl"), write(tmp_path, "b.jsonl", factor=1.04, from_step=40)
    assert diff(a, b) == 0
    assert diff(a, b, "--threshold", "0.03") == 1
    told = capsys.readouterr().out.split("agree within the band")[1]
    assert "diverge at step 40: loss +4% where ±3% is allowed." in told
    assert "loss       80 steps     40             +4%         ±3%      41 of 80  +4% at " in told
    assert "1. both agree before step 40" in told


def test_a_threshold_may_be_a_percentage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = write(tmp_path, "a.jsonl"), write(tmp_path, "b.jsonl", factor=1.04)
    assert [diff(*logs, "--threshold", text) for text in ("3%", "4.5%", "0.045")] == [1, 0, 0]
    with pytest.raises(SystemExit):
        diff(*logs, "--threshold", "five")
    assert "must be a number such as 0.05 or 5%, got 'five'" in capsys.readouterr().err


def test_the_threshold_is_a_twentieth_if_none_is_given(tmp_path: Path) -> None:
    a = write(tmp_path, "a.jsonl")
    assert diff(a, write(tmp_path, "b.jsonl", factor=1.049)) == 0
    assert diff(a, write(tmp_path, "c.jsonl", factor=1.051)) == 1


@pytest.mark.parametrize(("metric", "is_noisy"), [("ppo_kl", True), ("grad_norm", False)])
def test_band_names_metrics_with_noise(metric: str, is_noisy: bool, tmp_path: Path) -> None:
    for name in "ab":
        rows = "".join(f"{step},2.5,0.{step + 1}\n" for step in range(8))
        (tmp_path / name).write_text(f"step,loss,{metric}\n{rows}", encoding="utf-8")
    text = compare_sides([[str(tmp_path / name)] for name in "ab"]).text()
    assert (f"; of {metric}, also the scatter from step to step." in text) == is_noisy


def test_every_log_is_held_against_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = [write(tmp_path, f"{name}.jsonl", factor=factor) for name, factor in (("a", 1), ("b", 1.001), ("c", 2))]
    assert diff(*logs, "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert [(one["sides"][0]["name"], one["sides"][1]["name"]) for one in told["comparisons"]] == [
        ("a.jsonl", "b.jsonl"),
        ("a.jsonl", "c.jsonl"),
    ]
    assert [bool(one["hints"]) for one in told["comparisons"]] == [False, True]
    assert told["comparisons"][1]["hints"][0]["name"] == "loss factor"
    assert told["comparisons"][1]["metrics"][0] == {
        "name": "loss",
        "positions": 80,
        "outside": 80,
        "allowed": pytest.approx(0.05),
        "untold": "",
        "first": {
            "position": 1.0,
            "span": 1,
            "last": 1.0,
            "difference": pytest.approx(1),
            "allowed": pytest.approx(0.05),
        },
        "largest": {"position": pytest.approx(40, abs=40), "difference": pytest.approx(1)},
    }


def test_sides_whose_runs_are_no_seeds_do_not_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c, d = (
        write(tmp_path, f"{name}.jsonl", seed=seed, factor=factor)
        for name, seed, factor in (("a", 0.1, 1), ("b", 0.2, 1), ("c", 0.3, 1), ("d", 0.4, 4))
    )
    assert diff("--side", a, b, "--side", c, d) == 3
    told = capsys.readouterr().out
    assert "cannot be compared: of side B, loss of d.jsonl is 4" in told.splitlines()[0]
    assert "- loss: the runs of a side differ so much that" in told
    assert "over ±1000%" in told


def test_a_loss_that_is_rounding_is_not_said_to_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("a.jsonl", 1.0), ("b.jsonl", 1.7)):
        rows = [{"step": s, "loss": 1e-8 * math.sin(seed * s * s), "grad_norm": 1 + 1 / s} for s in STEPS]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    logs = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    assert diff(*logs) == 0
    assert "agree within the band in 1 metric, at 80 steps; of loss, nothing can be told." in capsys.readouterr().out
    assert diff(*logs, "--metric", "loss") == 3
    assert "cannot be compared: loss: its values are of size" in capsys.readouterr().out


def test_a_counter_of_micro_batches_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path, "a.jsonl")
    rows = [json.loads(line) for line in Path(a).read_text().splitlines()]
    for name, counted in (("b.jsonl", rows), ("c.jsonl", [{**row, "loss": 2 * row["loss"]} for row in rows])):
        text = "".join(json.dumps({**row, "step": 4 * row["step"]}) + "\n" for row in counted)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert diff(a, tmp_path / "b.jsonl") == 1
    told = capsys.readouterr().out
    assert "line for line both logs have the same loss and grad_norm: side B counts 4 per step of the other" in told
    assert diff(tmp_path / "b.jsonl", a) == 1
    assert "side A counts 4 per step of the other" in capsys.readouterr().out
    assert diff(a, tmp_path / "c.jsonl") == 1
    assert "line for line" not in capsys.readouterr().out


def test_a_constant_factor_within_the_band_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(write(tmp_path, "a.jsonl"), write(tmp_path, "b.jsonl", factor=1.03)) == 0
    note = "- loss: that of side B is 1.03 times that of side A at every step, within the band"
    assert note in capsys.readouterr().out
    assert diff(tmp_path / "a.jsonl", write(tmp_path, "c.jsonl", seed=0.1)) == 0
    assert "times that of side A" not in capsys.readouterr().out


def test_by_tokens_it_speaks_of_positions_and_keeps_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write(tmp_path, "a.jsonl")
    rows = [json.loads(line) for line in Path(a).read_text().splitlines()]
    text = "".join(json.dumps({name: row[name] for name in ("tokens", "loss")}) + "\n" for row in rows)
    (tmp_path / "b.jsonl").write_text(text, encoding="utf-8")
    assert diff(a, tmp_path / "b.jsonl", "--by", "tokens") == 0
    told = capsys.readouterr().out
    assert "±5% at every position" in told
    assert "counts no steps" not in told
    assert "--by tokens --threshold 0.01 " in told.splitlines()[-1]


def test_seeds_of_two_sides_make_the_band(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c, d = (write(tmp_path, f"{seed}.jsonl", seed=seed / 10) for seed in range(4))
    assert diff("--side", a, b, "--side", c, d) == 0
    assert "Allowed is what the spread of the 2 and 2 runs makes probable" in capsys.readouterr().out
    wrong = [write(tmp_path, f"wrong{seed}.jsonl", seed=seed / 10, factor=1.5) for seed in (2, 3)]
    assert diff("--side", a, b, "--side", *wrong) == 1
    assert "side A and side B diverge at step 1: loss" in capsys.readouterr().out


def test_only_the_chosen_metrics_count(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a.jsonl"), write(tmp_path, "b.jsonl", factor=2)
    assert diff(a, b, "--metric", "lr", "--metric", "grad_norm") == 0
    assert diff(a, b, "--metric", "loss") == 1
    with pytest.raises(
        UsageError, match=r"no metric is called los; did you mean 'loss'[?] there are loss, policy_loss"
    ):
        diff(a, b, "--metric", "los")


def test_a_metric_that_was_chosen_and_is_missing_ends_with_3_unless_another_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c = (write(tmp_path, f"{name}.jsonl", factor=factor) for name, factor in (("a", 1), ("b", 1), ("c", 2)))
    assert diff(a, b, "--metric", "loss") == 0
    assert diff(a, b, "--metric", "loss", "--metric", "kl") == 3
    told = capsys.readouterr().out.split("agree within the band")[1]
    assert "a.jsonl and b.jsonl cannot be compared: they have no kl at a common step." in told
    assert "- not compared: kl: not in a.jsonl, b.jsonl" in told
    assert diff(a, c, "--metric", "loss", "--metric", "kl") == 1


def test_agreement_without_a_loss_ends_with_3_unless_it_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (
        constant_columns(tmp_path, "a.jsonl", loss=2.5, grad_norm=1.0),
        constant_columns(tmp_path, "b.jsonl", my_loss=2.5, gnorm=1.0),
    )
    assert diff(a, b) == 3
    told = capsys.readouterr().out
    assert "cannot be compared: no loss is in all of them (a.jsonl has loss, b.jsonl has my_loss); call its" in told
    assert diff(a, b, "--metric", "grad_norm") == 0
    assert diff(constant_columns(tmp_path, "c.jsonl", gnorm=1.0), constant_columns(tmp_path, "d.jsonl", gnorm=1.0)) == 0
    assert diff(a, constant_columns(tmp_path, "e.jsonl", gnorm=2.0)) == 1


@pytest.mark.parametrize(("lines", "every", "code"), [(20, 1, 0), (20, 10, 3), (19, 1, 3)])
def test_line_numbers_are_steps_only_beside_as_many_steps(
    lines: int, every: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counted, stepped = tmp_path / "hf.log", tmp_path / "steps.jsonl"
    counted.write_text("".join(f"{{'loss': {3 - n / 50}, 'epoch': {n / 20:.2f}}}\n" for n in range(1, lines + 1)))
    stepped.write_text("".join(f'{{"step": {every * n}, "loss": {3 - n / 50}}}\n' for n in range(1, 21)))
    for logs in ([counted, stepped], [stepped, counted]):
        assert diff(*logs) == code
        told = capsys.readouterr().out
        which = f"the 20 steps of steps.jsonl ({every} to {20 * every}) its {lines} lines are; give a log that names"
        assert (f"hf.log names no steps, only epochs, and nothing tells which of {which}" in told) == bool(code)


@pytest.mark.parametrize(
    ("lines", "suffix", "code"), [(range(40), "", 0), (range(9, 60, 10), "", 3), (range(9, 60, 10), "@0", 1)]
)
def test_of_two_logs_without_steps_one_may_be_longer_if_both_begin_alike(
    lines: range, suffix: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, chosen in (("whole.jsonl", range(60)), ("part.jsonl", lines)):
        (tmp_path / name).write_text("".join(f'{{"loss": {2 + math.exp(-n / 20)}, "lr": 0.1}}\n' for n in chosen))
    logs = f"{tmp_path}/whole.jsonl{suffix}", f"{tmp_path}/part.jsonl{suffix}"
    assert diff(*logs, "--out", tmp_path / "page") == code
    told = capsys.readouterr().out
    refusal = (
        "whole.jsonl names no steps, and nothing tells which of the 6 lines of part.jsonl, which names none either,"
        " its 60 lines are; give a log that names steps, such as the Trainer's trainer_state.json."
    )
    assert (refusal in told) == (code == 3)
    assert ("whole.jsonl (JSON lines, lines 1 to 60)" in told) == (not suffix)
    page = (tmp_path / "page" / "diff.html").read_text(encoding="utf-8")
    for shown in (told, page):
        assert ("first outside" in shown) == ("Allowed is" in shown) == (code != 3)


def test_means_beside_numbers_of_single_steps_are_a_likely_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = [2 + math.exp(-n / 20) + 0.4 * math.sin(7.0 * n) for n in range(1, 121)]
    megatron, sparse, drifting = tmp_path / "meg.log", tmp_path / "sparse.jsonl", tmp_path / "drifting.jsonl"
    means = {n: sum(losses[n - 10 : n]) / 10 for n in range(10, 121, 10)}
    megatron.write_text(
        "".join(f"iteration {n:8}/ 120 | consumed samples: {n} | lm loss: {mean:.6E} |\n" for n, mean in means.items())
    )
    for file, factor in ((sparse, 0.0), (drifting, 0.004)):
        rows = (f'{{"step": {n}, "loss": {losses[n - 1] * (1 + factor * n)}}}\n' for n in range(10, 121, 10))
        file.write_text("".join(rows))
    may_be = "meg.log are means over 10 steps, those of sparse.jsonl may be of single steps"
    for logs in ((megatron, sparse), (sparse, megatron)):
        assert diff(*logs) == 1
        assert may_be in capsys.readouterr().out
    assert diff(megatron, drifting) == 1
    assert "single steps" not in capsys.readouterr().out


def test_each_answer_ends_with_a_command_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c, d = (write(tmp_path, f"{name}.jsonl", factor=n) for name, n in (("a b", 1), ("b", 1), ("c", 2), ("d", 1)))
    late = tmp_path / "late.jsonl"
    late.write_text('{"step": 900, "loss": 1.5, "tokens": 64}\n{"step": 901, "loss": 1.5, "tokens": 128}\n', "utf-8")
    for arguments in ([a, b], [a, c], [a, b, c], ["--side", a, b, "--side", c, d], [a, late], [a, b, "--metric", "kl"]):
        diff(*arguments)
        last = capsys.readouterr().out.strip().splitlines()[-1]
        assert last.startswith("Next: parity diff ")
        command, _, why = last.removeprefix("Next: parity diff ").partition("   ")
        assert why.startswith("(")
        if command == "--help":
            continue
        out = ["--out", str(tmp_path / "diff")] if "--out diff" in command else []
        assert diff(*shlex.split(command.removesuffix(" --out diff")), *out) in (0, 1)
        capsys.readouterr()


def test_logs_without_a_common_step_end_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "late.jsonl").write_text('{"step": 900, "loss": 1.5}\n{"step": 901, "loss": 1.5}\n', encoding="utf-8")
    assert diff(write(tmp_path, "a.jsonl"), tmp_path / "late.jsonl") == 3
    told = capsys.readouterr().out
    assert "a.jsonl and late.jsonl cannot be compared" in told
    assert "- not compared: loss: no step in common" in told
    assert "- not compared: grad_norm: not in late.jsonl" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs two logs or more"),
        (["a"], "needs two logs or more"),
        (["--side", "a", "b"], "needs two logs or more"),
        (["a", "--side", "b"], "either with --side or without it"),
        (["a", "b", "--threshold", "0"], "--threshold 0 must be a positive number"),
        (["--side", "a", "b", "--side", "c", "--threshold", "0.1"], "their spread is the band: leave it out"),
        (["a", "a"], "the same log is given twice"),
    ],
)
def test_wrong_usage_is_told(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        diff(*arguments)


def test_records_are_compared_with_records_alone(tmp_path: Path) -> None:
    log = write(tmp_path, "a.jsonl")
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "record.jsonl").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="records are compared with records"):
        diff(log, tmp_path / "record")
    with pytest.raises(UsageError, match="are for logs"):
        diff(tmp_path / "record", tmp_path / "record", "--by", "tokens")


def test_the_command_imports_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    """The other commands load it too; and torch takes seconds."""
    logs = [write(tmp_path, name) for name in ("a.jsonl", "b.jsonl")]
    script = (
        "import sys; from reports.logdiff.command import DIFF, compare_sides; assert 'numpy' not in sys.modules;"
        "import argparse; p = argparse.ArgumentParser(); DIFF.add_arguments(p);"
        f"assert DIFF.run(p.parse_args({logs!r})) == 0; assert not {{'torch', 'jinja2', 'pandas'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2], capture_output=True)


def test_a_page_without_jinja2_or_a_folder_is_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = [write(tmp_path, name) for name in ("a.jsonl", "b.jsonl")]
    with pytest.raises(UsageError, match=r"a.jsonl cannot be created: File exists; give another --out"):
        diff(*logs, "--out", logs[0])
    for module in ("reports.html", "reports.logdiff.page"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UsageError, match=r"--out needs jinja2; run: pip install 'backend-parity\[report\]'"):
        diff(*logs, "--out", tmp_path / "out")


def test_link_to_a_log_is_read(tmp_path: Path) -> None:
    a, b = (write(tmp_path, name) for name in ("a.jsonl", "b.jsonl"))
    (tmp_path / "latest.jsonl").symlink_to("b.jsonl")
    assert diff(a, tmp_path / "latest.jsonl") == diff(a, b) == 0


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diff")
    hostile = "<img src=x onerror=alert(1)>.jsonl"
    a, b = write(folder, "a.jsonl"), write(folder, hostile, factor=1.2, from_step=40, s60=math.nan)
    c = write(folder, "c.jsonl")
    assert diff(a, b, c, "--out", folder / "out") == 1
    return folder / "out"


def test_the_markdown_says_what_the_terminal_says(written: Path) -> None:
    text = (written / "diff.md").read_text(encoding="utf-8")
    assert text.startswith("## 1 of 2 runs diverge from the first\n")
    assert (
        "❌ a.jsonl and &lt;img src=x onerror=alert(1)&gt;.jsonl diverge at step 40: loss +20% where ±5% is allowed."
        in text
    )
    assert "✅ a.jsonl and c.jsonl agree within the band in 3 metrics, at 80 steps." in text
    assert "| loss | 80 steps | 40 | +20% | ±5% | 41 of 80 | +20% at " in text
    assert text.splitlines()[-1].startswith("Next: `parity diff ")


def test_the_page_draws_every_metric_and_its_difference(written: Path, browser: Browser) -> None:
    browser.open((written / "diff.html").as_uri())
    browser.wait("document.querySelectorAll('#curves-1 figure').length === 6")
    captions = browser.run("[...document.querySelectorAll('#curves-0 figcaption')].map((c) => c.textContent)")
    assert captions == [
        f"{metric}{text}"
        for metric in ("loss", "grad_norm", "lr")
        for text in (" per step", ": difference B \u2212 A, and the band")
    ]
    assert browser.run("document.querySelectorAll('#curves-0 polyline.b1').length") == 4  # the loss in two parts
    assert browser.run("document.querySelectorAll('#curves-0 .mark.over').length") == 1
    assert browser.run("document.querySelectorAll('#curves-0 path.nan').length") == 2
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.text(".next .command code").startswith("parity diff ")
    ticks = browser.texts("#curves-0 figure:first-child svg text[text-anchor=middle]")
    assert [text for text in ticks if int(text.removeprefix("step ")) % 2] == []
    assert browser.run("document.querySelector('h1').textContent") == "1 of 2 runs diverge from the first"
    assert browser.problems == []
