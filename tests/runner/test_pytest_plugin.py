"""The pytest plugin: an item per cell that says what its verdict says, one report per run, and nothing for others.

Runs pytest as users do, in an empty folder; in a process of its own where workers, crashes or imports matter.
"""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance.cli import main as cli
from conformance.core.host import FIXTURES
from conformance.data.tokenizer import load_tokenizer
from conformance.matrix.options import Ranks, Selection
from conformance.results.verdict import NOT_STARTED
from conformance.suite.plugin import merge
from reports.load import read_report

pytest_plugins = "pytester"
QUIET = ("-p", "no:cacheprovider", "-ra")
SUITE = ("--pyargs", "conformance.suite")
MINE = (*SUITE, "--parity-profile", "mine.toml")
SCENARIO = """
steps = 1
data.rows = 6
[optimizer]
name = "sgd"
lr = 0.05
"""
PROFILE = """
description = "small cells"
expected = { known = ["https://example.org/*"] }
[[cells]]
scenarios = ["tiny.toml"]
models = ["llama"]
layouts = ["dp1", "dp2", "dp2.rep2", "dp3"]
precisions = ["fp32"]
"""

# A backend with every answer, by layout; and one that makes a run stop half-way.
ODD = """
import dataclasses
from conformance.backends.protocol import Unsupported
from conformance.spec.known_defects import Unmodelled
from conformance.spec.known_defects import ExpectedDifference
from plain_backend import Plain

class Known(Plain):
    expected = (ExpectedDifference(
        at_most={"dp": 1},
        unmodelled=lambda *_: Unmodelled(stage="loss", tensors=("loss",)),
        reason="a known bug",
        link="https://example.org/1",
    ),)

    def train_step(self, batch, on_gradients):
        metrics = super().train_step(batch, on_gradients)
        return dataclasses.replace(metrics, values=metrics.values | {"loss": 2 * metrics.values["loss"]})

class Odd(Plain):
    @classmethod
    def supports(cls, scenario, layout):
        return Unsupported("odd has no replicas; use dp2") if layout.rep > 1 else super().supports(scenario, layout)

    def setup(self, scenario, layout, *arguments):
        if layout.dp > 2:
            raise ArithmeticError("odd cannot set this up")
        return super().setup(scenario, layout, *arguments)

class Nothing(Plain):
    @classmethod
    def supports(cls, scenario, layout):
        return Unsupported("nothing at all")
"""
STOP = """
import os

def pytest_runtest_setup(item):
    if "/dp2/" in item.name:
        if os.environ["STOP"] == "crash":
            os._exit(1)
        raise KeyboardInterrupt
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A pytest run that has ended; ``out`` is its output folder."""

    code: int
    text: str
    out: Path

    @property
    def summary(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return values

    @property
    def counts(self) -> dict[str, int]:
        return {state: count for state, count in self.summary["counts"].items() if count}


def run_pytest(folder: Path, *arguments: str) -> Run:
    """In a process of its own."""
    _fill(folder)
    command = [sys.executable, "-m", "pytest", *QUIET, *arguments]
    path = os.pathsep.join([str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    return Run(code=done.returncode, text=done.stdout + done.stderr, out=_out(folder))


@pytest.fixture(scope="module", autouse=True)
def imported_before() -> None:
    """Imports what torch registers once in a process: pytester forgets what its runs were the first to import."""
    for name in ("torch._dynamo", "torch.distributed.tensor"):
        importlib.import_module(name)


def run_pytest_here(pytester: pytest.Pytester, *arguments: str) -> Run:
    """In this process, which has torch: saves seconds. Pytester forgets modules that are first imported in it."""
    load_tokenizer(FIXTURES / "models" / "llama")
    _fill(pytester.path)
    pytester.syspathinsert()
    done = pytester.runpytest_inprocess(*QUIET, *arguments, no_reraise_ctrlc=True)
    return Run(code=done.ret, text=f"{done.stdout}{done.stderr}", out=_out(pytester.path))


def _fill(folder: Path) -> None:
    for name, text in (("tiny.toml", SCENARIO), ("mine.toml", PROFILE), ("odd.py", ODD), ("stop.py", STOP)):
        (folder / name).write_text(text)


def _out(folder: Path) -> Path:
    return next((folder / "parity-out").glob("[!.]*"), folder / "no parity-out")


# --- a run on two workers ---


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Run:
    cells = ("--parity-cells", "*/dp1/*", "--parity-cells", "*/dp2/*")
    folder = tmp_path_factory.mktemp("parallel")
    return run_pytest(folder, *MINE, "-n", "2", "--parity-backend", "plain_backend:Plain", *cells)


@pytest.mark.exhaustive
def test_cells_that_conform_pass_and_the_workers_write_one_summary_and_one_report(parallel: Run) -> None:
    assert parallel.code == 0, parallel.text
    assert "2 passed" in parallel.text
    assert [path.name for path in parallel.out.parent.iterdir()] == [parallel.out.name]
    assert parallel.counts == {"conforms": 2}
    assert parallel.summary["verdict"] == "conforms"
    assert parallel.summary["finished"]
    assert len(list(parallel.out.glob("oracle/*/float64/record.jsonl"))) == 1
    assert {"report.html", "report.md", "junit.xml", "side_by_side.json"} <= {
        path.name for path in parallel.out.iterdir()
    }
    assert read_report(parallel.out).verdict == "conforms"


@pytest.mark.exhaustive
def test_the_last_lines_tell_the_verdict_and_where_the_report_is(parallel: Run) -> None:
    lines = [line for line in parallel.text.partition("parity ===")[2].splitlines()[1:] if "===" not in line]
    assert lines[0] == "pass: 2 pass"
    assert lines[-1] == f"report: {parallel.out / 'report.html'}"


@pytest.mark.exhaustive
def test_the_reproduce_command_asks_for_the_same_cell(
    parallel: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(parallel.out.parents[1])
    for cell in parallel.summary["cells"]:
        command = json.loads((parallel.out / cell["folder"] / "verdict.json").read_text())["reproduce"]
        program, verb, *arguments = shlex.split(command)
        assert (program, verb) == ("parity", "run")
        assert cli.main(["list", "--json", *arguments]) == 0
        assert [row["id"] for row in json.loads(capsys.readouterr().out)["cells"]] == [cell["id"]]


@pytest.mark.exhaustive
def test_a_cell_without_a_verdict_makes_the_merged_summary_incomplete(parallel: Run, tmp_path: Path) -> None:
    out = Path(shutil.copytree(parallel.out, tmp_path / "out"))
    summary = json.loads((out / "summary.json").read_text())
    verdict_file = out / summary["cells"][0]["folder"] / "verdict.json"
    not_started = {"state": "not_run", "reason": NOT_STARTED}
    verdict_file.write_text(json.dumps(json.loads(verdict_file.read_text()) | not_started))
    (out / "summary.json").write_text(json.dumps(summary | {"finished": None}))
    merged = merge(out)
    assert (merged["verdict"], merged["finished"]) == ("incomplete", None)


# --- a model folder with code of its own ---


@pytest.mark.exhaustive
def test_code_of_a_model_is_run_with_the_option_only(pytester: pytest.Pytester) -> None:
    model = Path(shutil.copytree(FIXTURES / "models" / "pangu", pytester.path / "mine"))
    with (model / "configuration_openpangu_dense.py").open("a") as code:
        code.write(f"open({str(pytester.path / 'mark')!r}, 'w').close()\n")
    cells = (*MINE, "--parity-backend", "plain_backend:Plain", "--parity-cells", "*/dp1/*", "--parity-model", "mine")
    refused = run_pytest_here(pytester, *cells, "--parity-out", "refused")
    assert refused.code == 1
    assert "mine/config.json names Python code of the folder (auto_map)" in refused.text
    assert "Traceback" not in refused.text
    assert not (pytester.path / "mark").exists()
    trusted = run_pytest_here(pytester, *cells, "--parity-out", "trusted", "--parity-trust-remote-code")
    assert trusted.code == 0, trusted.text
    assert (pytester.path / "mark").exists()


# --- a run with every other verdict ---


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """Runs in this process that several tests look at; pytester itself belongs to a single test."""
    return {}


@pytest.fixture
def troubled(pytester: pytest.Pytester, runs: dict[str, Run]) -> Run:
    if "troubled" not in runs:
        chosen = (*MINE, "--parity-backend", "odd:Odd", "--parity-faults", "local-token-mean")
        runs["troubled"] = run_pytest_here(pytester, *chosen)
    return runs["troubled"]


def section(run: Run, title: str) -> str:
    """What pytest says of one item that did not pass."""
    found = re.search(rf"^_+ {re.escape(title)} _+\n(.*?)^(_{{3}}|===)", run.text, re.DOTALL | re.MULTILINE)
    assert found, run.text
    return found[1]


def test_a_fault_fails_its_item_with_stage_tensor_and_how_to_go_on(troubled: Run) -> None:
    cell = "tiny/llama/odd/dp2/fp32/fault-local-token-mean"
    text = section(troubled, f"test_cell[{cell}]")
    folder = troubled.out / "cells" / cell.replace("/", "_")
    assert re.match(r"differs: first difference at loss, step 0, \d of \d tensors; worst: loss, step 0: \S+ is ", text)
    assert re.search(r"^  loss, step 0: loss is \S+ % off, allowed \S+", text, re.MULTILINE)
    assert re.search(r"^  gradients, step 0: \S+ is \S+ (% |times its size )?off, allowed \S+", text, re.MULTILINE)
    assert re.search(r"^  and \d+ more, in verdict.json$", text, re.MULTILINE)
    assert "reproduce: parity run --profile mine.toml --backend odd:Odd --faults local-token-mean " in text
    assert f" --cells {cell}\n" in text
    assert f"record and logs: {folder}\n" in text
    assert "Traceback" not in text
    assert "test_cells.py" not in text


def test_an_infrastructure_failure_is_an_error_and_not_a_failure(troubled: Run) -> None:
    text = section(troubled, "ERROR at setup of test_cell[tiny/llama/odd/dp3/fp32/fault-local-token-mean]")
    assert text.startswith("infrastructure: rank ")
    assert "ArithmeticError: odd cannot set this up" in text
    assert "reproduce: parity run" in text


def test_what_is_unsupported_is_said_with_its_reason(troubled: Run) -> None:
    assert "unsupported: odd has no replicas; use dp2" in troubled.text


def test_what_is_expected_is_said_with_its_reason(pytester: pytest.Pytester) -> None:
    run = run_pytest_here(pytester, *MINE, "--parity-backend", "odd:Known", "--parity-cells", "*/dp1/*")
    assert run.code == 0
    assert run.counts == {"expected_difference": 1}
    assert "expected difference: a known bug (https://example.org/1)" in run.text


def test_each_verdict_has_its_own_outcome(troubled: Run) -> None:
    assert troubled.code == 1
    assert re.search(r"= 1 failed, 2 passed, 2 skipped, (\d+ warnings?, )?3 errors in ", troubled.text)
    assert troubled.counts == {"differs": 1, "unsupported": 2, "infrastructure": 3, "conforms": 2}  # with controls
    assert "fail: 1 fail, 3 infrastructure failure, 2 unsupported, 2 pass\n" in troubled.text
    assert "was planted and called, and nothing differs" in troubled.text  # of one rank
    assert re.search(rf"^report: {troubled.out}/report.html$", troubled.text, re.MULTILINE)


@pytest.mark.exhaustive
def test_what_is_demanded_and_not_judged_fails_the_run(pytester: pytest.Pytester) -> None:
    chosen = ("--parity-cells", "*/dp1/*", "--parity-cells", "*/dp2.rep2/*")
    demanded = ("--parity-require", "*/dp2.rep2/*", "--parity-min-judged", "2")
    run = run_pytest_here(pytester, *MINE, "--parity-backend", "odd:Odd", *chosen, *demanded)
    assert run.code == pytest.ExitCode.TESTS_FAILED
    assert run.counts == {"unsupported": 1, "conforms": 1}
    told = [
        "incomplete: 1 unsupported, 1 pass",
        "required: '*/dp2.rep2/*', but tiny/llama/odd/dp2.rep2/fp32 (unsupported)",
        "judged: 1 of at least 2 cells",
    ]
    assert "\n".join(told) in run.text


# --- a run that stops half-way ---


def check_incomplete(run: Run) -> None:
    assert run.code != 0
    assert run.counts == {"unsupported": 2, "not_run": 2}
    assert (run.summary["verdict"], run.summary["finished"]) == ("incomplete", None)
    assert "incomplete: 2 not run, 2 unsupported\n" in run.text
    assert "The run did not finish" in (run.out / "report.html").read_text()


def test_an_interrupted_run_is_incomplete(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOP", "interrupt")
    run = run_pytest_here(pytester, *MINE, "-p", "stop", "--parity-backend", "odd:Nothing")
    assert "KeyboardInterrupt" in run.text
    check_incomplete(run)


@pytest.mark.exhaustive
def test_a_run_whose_worker_crashed_is_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOP", "crash")
    workers = ("-n", "1", "--max-worker-restart", "0")
    run = run_pytest(tmp_path, *MINE, *workers, "-p", "stop", "--parity-backend", "odd:Nothing")
    assert "worker 'gw0' crashed while running" in run.text
    check_incomplete(run)


# --- options, and runs without the suite ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parity-backend", "nope"), "ERROR: unknown backend 'nope'; registered: "),
        (("--parity-shard", "3/2"), "ERROR: --shard 3/2: must be K/N"),
        (("--parity-out", "."), "ERROR: . exists and is not an empty folder; give another --parity-out"),
    ],
    ids=["backend", "shard", "out"],
)
def test_wrong_options_are_one_message(pytester: pytest.Pytester, arguments: tuple[str, ...], message: str) -> None:
    check_usage(run_pytest_here(pytester, *SUITE, *arguments), message)


@pytest.mark.exhaustive
def test_wrong_options_that_a_worker_finds_are_one_message(tmp_path: Path) -> None:
    run = run_pytest(tmp_path, *SUITE, "--parity-profile", "nope", "-n", "1")
    check_usage(run, "ERROR: no profile 'nope'; known: ")


def check_usage(run: Run, message: str) -> None:
    assert run.code == pytest.ExitCode.USAGE_ERROR, run.text
    assert run.text.count(message) == 1, run.text
    assert "Traceback" not in run.text
    assert not run.out.exists()


def test_a_shard_has_the_cells_that_the_command_line_lists(
    pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_pytest_here(
        pytester, *SUITE, "--collect-only", "-q", "--parity-backend", "fsdp2", "--parity-shard", "2/3"
    )
    capsys.readouterr()
    assert cli.main(["list", "--json", "--backend", "fsdp2", "--shard", "2/3"]) == 0
    rows = json.loads(capsys.readouterr().out)["cells"]
    assert re.findall(r"test_cell\[(.*)\]", run.text) == [row["id"] for row in rows]
    assert 0 < len(rows) < 10


def test_the_suite_without_its_plugin_says_so(pytester: pytest.Pytester) -> None:
    run = run_pytest_here(pytester, *SUITE, "-p", "no:parity")
    assert run.code == pytest.ExitCode.INTERRUPTED
    assert "the suite needs its pytest plugin; omit -p no:parity" in run.text
    assert "Traceback" not in run.text


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((), id="alone"),
        pytest.param(("-n", "1"), id="xdist", marks=pytest.mark.exhaustive),
        pytest.param(("-p", "no:parity"), id="no plugin"),
    ],
)
def test_a_project_without_the_suite_notices_nothing(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "import sys\n"
        "def test_theirs(request):\n"
        "    assert not {'torch', 'pydantic', 'conformance.matrix.profile', 'reports'} & set(sys.modules)\n"
    )
    run = run_pytest(tmp_path, *arguments)
    assert run.code == 0, run.text
    assert "1 passed" in run.text
    assert "parity ==" not in run.text
    assert not (tmp_path / "parity-out").exists()


def test_a_selection_survives_the_way_through_its_arguments() -> None:
    selection = Selection(profile="full", backend=("a", "b:C"), faults=("x",), model="m", data="d", max_len=7, seed=0)
    ranks = Ranks(device="cuda", ranks_per_gpu=2, budget=7.5)
    parsed = cli._parser().parse_args(["run", *selection.arguments(), *ranks.arguments()])
    assert Ranks.from_options(parsed) == ranks
    assert Selection.from_options(parsed) == selection
