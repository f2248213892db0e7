"""The workflows of this repository, and the one that authors of adapters copy: every command is one that exists, with
options that exist, and every reference leads somewhere.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import LONG

from conformance.cli import main as cli
from conformance.matrix.plan import parse_shard
from conformance.matrix.profile import load_profile

ROOT = Path(__file__).parents[2]
FILES = [*sorted((ROOT / ".github/workflows").glob("*.yml")), ROOT / "examples/workflows/parity.yml"]
OWN = FILES[:-1]
ACTION = ROOT / "action.yml"
EVERY = [*FILES, ROOT / "examples/workflows/board.yml"]
IN_SHELL = {"cat", "cp", "mkdir", "pip"}
IN_VENV = {"parity", "ruff", "mypy", "lint-imports", "python", "mkdocs"}
# What GitHub knows at each level (https://docs.github.com/actions/reference/workflows-and-actions/workflow-syntax).
WORKFLOW_KEYS = {"name", "on", "permissions", "concurrency", "env", "jobs"}
JOB_KEYS = {
    "name",
    "needs",
    "if",
    "runs-on",
    "timeout-minutes",
    "env",
    "strategy",
    "permissions",
    "environment",
    "steps",
}
STEP_KEYS = {"name", "if", "uses", "with", "run", "env", "id", "shell", "working-directory"}


def read(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # "on" is no boolean
    return values


def steps(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each step with the name of its job."""
    for name, job in read(file)["jobs"].items():
        for step in job["steps"]:
            yield name, step


def commands(file: Path) -> list[list[str]]:
    """The words of each command of a workflow: shell arrays are filled in, conditions and redirections are left out,
    and expressions of GitHub count as 1."""
    found = []
    for _, step in steps(file):
        script = re.sub(r"\$\{\{.*?\}\}", "1", step.get("run", ""))
        arrays: dict[str, str] = dict(re.findall(r"\b(\w+)=\(([^)]+)\)", script))
        for array, content in arrays.items():
            script = script.replace(f'"${{{array}[@]}}"', content)
        for line in script.splitlines():
            if line.startswith("if ") or re.match(r"\w+=", line):
                continue
            words = shlex.split(line, comments=True)
            found.append(words[1:] if words[0] == "exec" else words)
    return found


def test_every_workflow_is_one_by_githubs_schema() -> None:
    for kind, files in (("workflows", EVERY), ("actions", [ACTION])):
        command = [
            sys.executable,
            "-m",
            "check_jsonschema",
            "--builtin-schema",
            f"vendor.github-{kind}",
            *map(str, files),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", EVERY, ids=lambda file: file.name)
def test_a_workflow_has_only_keys_that_github_knows(file: Path) -> None:
    values = read(file)
    assert values.keys() <= WORKFLOW_KEYS
    assert values["permissions"] == {"contents": "read"}
    for job in values["jobs"].values():
        assert job.keys() <= JOB_KEYS
        assert {"runs-on", "timeout-minutes", "steps"} <= job.keys()
        assert set([job["needs"]] if "needs" in job else []) <= values["jobs"].keys()
    for _, step in steps(file):
        assert step.keys() <= STEP_KEYS
        assert ("run" in step) != ("uses" in step)
    for line in re.findall("uses: (.*)", file.read_text(encoding="utf-8")):  # a tag can be moved, a commit cannot
        assert re.fullmatch(r"actions/[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+(;.*)?", line), line


@pytest.mark.parametrize("file", EVERY, ids=lambda file: file.name)
def test_every_command_of_a_workflow_exists(file: Path) -> None:
    parser, ran = cli._parser(), 0
    for words in commands(file):
        program, *arguments = words
        folder, name = os.path.split(program)
        if folder == "scripts":
            assert os.access(ROOT / program, os.X_OK), words
        elif name == "parity":
            given = [argument for argument in arguments if argument not in (">>", "$GITHUB_STEP_SUMMARY")]
            options = parser.parse_args(given)  # ends the test where an option does not exist
            ran += 1
            if shard := getattr(options, "shard", None):
                assert parse_shard(shard)
            if profile := getattr(options, "profile", None):
                assert load_profile(profile)
        else:
            assert (folder, name) in {*((".venv/bin", name) for name in IN_VENV), *(("", name) for name in IN_SHELL)}
    assert ran


def test_workflows_know_when_a_command_does_not_exist(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yml"
    file.write_text(OWN[0].read_text().replace("parity run --profile", "parity run --profle"))
    with pytest.raises(SystemExit):
        test_every_command_of_a_workflow_exists(file)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_all_shards_of_a_run_are_run(file: Path) -> None:
    jobs = read(file)["jobs"]
    for name, step in steps(file):
        for total in re.findall(r"--shard \$\{\{ matrix.number \}\}/(\d+)", step.get("run", "")):
            assert jobs[name]["strategy"]["matrix"]["number"] == [str(n) for n in range(1, int(total) + 1)]
            assert jobs[name]["strategy"]["fail-fast"] == "false"  # one job must not end the others
            assert jobs["full"]["needs"] == name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_run_that_fails_still_shows_its_report(file: Path) -> None:
    outs = {words[words.index("--out") + 1] for words in commands(file) if "--out" in words}
    shown = {re.sub(r"(/\*)?/report\.md$", "", words[1]) for words in commands(file) if words[0] == "cat"}
    assert outs - {"out/shard"} == shown
    uploads = [step for _, step in steps(file) if "upload-artifact" in step.get("uses", "")]
    assert {step["with"]["path"].split()[0] for step in uploads} == outs
    for _, step in steps(file):
        if step in uploads or step.get("run", "").startswith("cat "):
            assert step["if"] == "always()"


@pytest.mark.parametrize("file", [file for file in FILES if file.name != "test.yml"], ids=lambda file: file.name)
def test_every_night_is_compared_with_the_history_and_added_to_it(file: Path) -> None:
    jobs: dict[str, list[dict[str, Any]]] = {}
    for job, step in steps(file):
        jobs.setdefault(job, []).append(step)
    keeping = {job: told for job, told in jobs.items() if any("parity history" in s.get("run", "") for s in told)}
    assert {job for job, told in jobs.items() if any("--baseline" in s.get("run", "") for s in told)} == keeping.keys()
    assert "full" in keeping
    keys = []
    for told in keeping.values():
        restored, compared, added, saved = (
            next(place for place, step in enumerate(told) if words in step.get("uses", "") + step.get("run", ""))
            for words in ("cache/restore", "(--baseline out/history)", "history out/history --add out/", "cache/save")
        )
        assert restored < compared < added < saved
        key, prefix = told[restored]["with"]["key"], told[restored]["with"]["restore-keys"]
        assert key == told[saved]["with"]["key"] == prefix + "${{ github.run_id }}"
        assert {told[place]["with"]["path"] for place in (restored, saved)} == {"out/history"}
        assert {told[place]["if"] for place in (added, saved)} == {"always()"}  # a night that differs is kept, too
        keys.append(key)
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_signal_reaches_the_run(file: Path) -> None:
    """The runner signals the shell, which passes nothing on to a child that it waits for."""
    scripts = [step["run"] for _, step in steps(file) if "parity run" in step.get("run", "")]
    assert scripts
    assert all(script.rstrip().splitlines()[-1].startswith("exec ") for script in scripts)


def run_action(folder: Path, **inputs: str) -> list[list[str]]:
    """Runs the action's scripts with programs that only write down their arguments, and returns these."""
    values = read(ACTION)
    given = {name: one.get("default", "") for name, one in values["inputs"].items()} | inputs
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in ("parity", "gh", "python"):
        (programs / name).write_text(f'#!/bin/bash\nprintf "%s\\0" {name} "$@" >> log; echo >> log\n')
        (programs / name).chmod(0o755)
    paths = {name: str(folder / name) for name in ("RUNNER_TEMP", "GITHUB_STEP_SUMMARY", "GITHUB_ACTION_PATH")}
    (folder / "RUNNER_TEMP").mkdir()
    for step in values["runs"]["steps"]:
        env = dict(step.get("env", {}))
        for name, value in given.items():
            env = {key: text.replace(f"${{{{ inputs.{name} }}}}", value) for key, text in env.items()}
        wanted = re.findall(r"inputs\.(\w+) (==|!=) '(\w*)'", step.get("if", ""))
        if "run" in step and all((given[name] == word) == (how == "==") for name, how, word in wanted):
            env = {"PATH": f"{programs}:{os.environ['PATH']}", "GITHUB_REPOSITORY": "o/r", **paths, **env}
            subprocess.run(["bash", "-e", "-o", "pipefail", "-c", step["run"]], cwd=folder, env=env, check=True)
    return [line.split("\0")[:-1] for line in (folder / "log").read_text().splitlines()]


def test_action_runs_parity_with_its_inputs(tmp_path: Path) -> None:
    out = tmp_path / "parity-out"
    out.mkdir()
    for name in ("annotations.txt", "report.md"):
        (out / name).write_text(name)
    (out / "issue.md").write_text("# Parity: a cell newly fails\n\nwhy\n")
    hostile = "'$(touch owned)'"
    words = {"cells": "sft/*\n$(touch owned)", "args": f"--faults {hostile}", "history": "kept", "site": "site"}
    install, ran, *rest = run_action(tmp_path, **words, comment="true", issue="true")
    assert install[:3] == ["python", "-m", "pip"]
    options = ["--profile", "quick", "--out", "parity-out", "--cells", "sft/*", "--cells", "$(touch owned)"]
    assert ran == ["parity", "run", *options, "--faults", "$(touch owned)"]
    assert not (tmp_path / "owned").exists()
    assert [one[:3] for one in rest] == [
        ["parity", "history", "kept"],
        ["parity", "publish", "kept"],
        ["gh", "pr", "comment"],
        ["gh", "issue", "create"],
    ]
    assert rest[-1][rest[-1].index("--title") + 1] == "Parity: a cell newly fails"
    assert (tmp_path / "GITHUB_STEP_SUMMARY").read_text() == "report.md"
    parser = cli._parser()
    for one in (ran, *rest[:2]):
        parser.parse_args(one[1:])  # ends the test where an option does not exist


def test_files_that_are_said_to_take_long_exist() -> None:
    names = {file.stem for file in ROOT.glob("tests/*/test_*.py")}
    assert [stem for stem in LONG if stem not in names] == []
    assert len(set(LONG)) == len(LONG)
