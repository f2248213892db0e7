"""Ranks may live in another Python environment than oracle and judge, and only what a phase needs has to be there.

The other environment is a venv of this test. It finds the suite and torch by a .pth file; it alone has the framework.
"""

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import venv
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, ClassVar

import pytest
from plain_profile import write_profile

import conformance
from conformance.backends import query_process, registry
from conformance.backends.protocol import BackendInfo, BrokenBackend, Supported, Unsupported
from conformance.backends.query_process import EnvironmentProcess, answer_in_fork
from conformance.backends.registry import (
    AskFailed,
    InProcessAdapter,
    SubprocessAdapter,
    adapter_of,
    find_backend,
    versions_of,
)
from conformance.cli import main as cli
from conformance.core.environments import OF_RANKS
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.core.process import process_state
from conformance.judge import verdict
from conformance.runtime import preload_server
from conformance.spec.conventions import AdvantageEpsilon, DecaysAll, EntropyByMicroBatch, RoundedMasters
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario, load_scenario

ROOT = Path(__file__).parents[2]
ADAPTER = """
import only_there
from plain_backend import Plain
from conformance.backends.protocol import BackendInfo
from conformance.spec.known_defects import ExpectedDifference
from conformance.spec.conventions import AdvantageEpsilon, DecaysAll, EntropyByMicroBatch, RoundedMasters
from impl.engine import adapter

adapter.switch_off_dropout = lambda model: None  # the plain model is no torch module and has no dropout

class Pinned(Plain):
    fresh_ranks = True
    gpu_backend = "cpu:gloo,cuda:nccl"
    conventions = (DecaysAll(), EntropyByMicroBatch(), AdvantageEpsilon(value=0.25))
    expected = (ExpectedDifference(
        reason="rounds",
        link="docs",
        defects=lambda scenario, layout: (RoundedMasters(precision="bf16"),),
        precisions=("bf16",),
    ),)

    @classmethod
    def describe(cls):
        return BackendInfo(name="pinned", packages=("torch", "only-there"), default_zero=0)

    @classmethod
    def supports(cls, scenario, layout):
        print("a framework that talks")
        if layout.tp > 1:
            raise KeyError("a defect")
        return super().supports(scenario, layout)

    @classmethod
    def host_bytes(cls, scenario, layout):
        return 1000 * layout.dp
"""
SCENARIO = load_scenario(FIXTURES / "scenarios" / "sft-sgd.toml", model="models/llama", precision="exact")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The executable of the other environment."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site / "paths.pth").write_text("\n".join([str(ROOT), str(ROOT / "tests" / "support"), *here]))
    (site / "only_there.py").write_text("")
    (site / "pinned_adapter.py").write_text(ADAPTER)
    info = site / "only_there-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: only-there\nVersion: 9.9\n")
    return str(folder / "bin" / "python")


@pytest.mark.exhaustive
def test_a_backend_runs_in_an_environment_of_its_own(
    python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModuleNotFoundError):
        __import__("only_there")
    name = "pinned_adapter:Pinned"
    chosen = ["--backend", name, "--python", f"{name}={python}", "--profile", write_profile(tmp_path)]
    out = tmp_path / "out"
    assert cli.main(["run", *chosen, "--backend", "plain_backend:Plain", "--out", str(out), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert {cell["id"]: cell["state"] for cell in summary["cells"] if "/dp2/" in cell["id"]} == {
        "tiny/llama/pinned/dp2/fp32": "conforms",
        "tiny/llama/plain/dp2/fp32": "conforms",
    }
    assert summary["environment"]["only-there (pinned)"] == "9.9"
    assert "only-there" not in summary["environment"]
    (verdict,) = out.glob("cells/tiny_llama_pinned_dp2_fp32/verdict.json")
    assert f"--python {name}={python}" in json.loads(verdict.read_text())["reproduce"]


def test_an_adapter_says_the_same_from_another_environment(python: str) -> None:
    entry = find_backend("pinned_adapter:Pinned", python)
    assert (entry.name, entry.target, entry.python) == ("pinned", "pinned_adapter:Pinned", python)
    asked = adapter_of(entry)
    assert (asked.traits.fresh_ranks, asked.traits.default_zero) == (True, 0)
    assert asked.traits.gpu_backend == "cpu:gloo,cuda:nccl"
    assert asked.traits.preload[0] == "plain_backend"
    assert str(asked.supports(SCENARIO, Layout(dp=2))) == "Supported()"
    assert "data parallel; use dp2" in str(asked.supports(SCENARIO, Layout(pp=2)))
    with pytest.raises(AskFailed, match=r"KeyError at pinned_adapter.py:\d+: 'a defect'"):
        asked.supports(SCENARIO, Layout(tp=2))
    assert asked.host_bytes(SCENARIO, Layout(dp=2)) == 2000
    half = load_scenario(FIXTURES / "scenarios" / "sft-sgd.toml", model="models/llama", precision="bf16")
    (known,) = asked.known(half, Layout(dp=2))
    assert known.defects == (RoundedMasters(precision="bf16"),)
    assert asked.known(SCENARIO, Layout(dp=2)) == ()
    assert versions_of([entry])["only-there (pinned)"] == "9.9"


def test_conventions_are_asked_from_another_environment(python: str) -> None:
    asked = adapter_of(find_backend("pinned_adapter:Pinned", python))
    rl = load_scenario(FIXTURES / "scenarios" / "grpo.toml", model="models/llama", precision="exact")
    entropy = EntropyByMicroBatch(data_ranks=2, micro_batches=rl.accumulation)
    assert asked.conventions(rl, Layout(dp=2)) == (DecaysAll(), entropy, AdvantageEpsilon(value=0.25))
    assert asked.conventions(SCENARIO, Layout(dp=2)) == ()


RL = """
steps = 1
data = { path = "data/rollouts/{model}.jsonl", rows = 8 }
objective.kind = "grpo"
optimizer = { name = "sgd", lr = 0.05 }
"""


@pytest.mark.exhaustive
def test_conventions_from_another_environment_reach_the_oracle(python: str, tmp_path: Path) -> None:
    """The backend declares another epsilon than it has, which only the oracle with the declared one can tell."""
    profile, name = write_profile(tmp_path), "pinned_adapter:Pinned"
    (tmp_path / "tiny.toml").write_text(RL)
    out, chosen = tmp_path / "out", ["--backend", name, "--python", f"{name}={python}", "--profile", profile]
    assert cli.main(["run", *chosen, "--cells", "*/dp2/*", "--out", str(out), "--no-bisect"]) == 1
    (verdict,) = (json.loads(file.read_text()) for file in out.glob("cells/*/verdict.json"))
    assert verdict["reason"].startswith(
        "declares the convention another epsilon beside the standard deviation of rewards"
    )
    assert "agrees without" in verdict["reason"]
    assert {"kind": "advantage-epsilon", "value": 0.25} in [one for v in verdict["variants"] for one in v["defects"]]


def test_an_environment_that_cannot_be_used_is_one_message(
    python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match="No such file or directory; give the executable of an environment"):
        find_backend("a", str(tmp_path / "python"))
    with pytest.raises(UsageError, match=r"it does not answer; the environment needs backend-parity .* numpy, .*torch"):
        find_backend("a", "/bin/false")
    with pytest.raises(UsageError, match="unknown backend 'nobody'"):
        find_backend("nobody", python)
    for option, words in (("fsdp2", "give each once, as BACKEND=EXECUTABLE"), ("a=/b", "add --backend a")):
        assert cli.main(["list", "--backend", "fsdp2", "--python", option]) == 2
        assert words in capsys.readouterr().err


# Hides all packages but those of the arguments and what they need, and imports what a rank imports.
ONLY = """
import importlib.metadata, re, sys

allowed, left = {"backend-parity"}, sys.argv[1:]
while left:
    name = re.match("[A-Za-z0-9._-]+", left.pop())[0].replace("_", "-").lower()
    try:
        needs = importlib.metadata.requires(name) or () if name not in allowed else ()
    except importlib.metadata.PackageNotFoundError:
        continue
    allowed.add(name)
    left += [need for need in needs if "extra ==" not in need]
found = importlib.metadata.packages_distributions()
hidden = {top for top, owners in found.items() if not {o.replace("_", "-").lower() for o in owners} & allowed}

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"{name} is hidden", name=name)

sys.meta_path.insert(0, Hide())
import conformance.worker.phase, conformance.backends.registry, conformance.runtime.worker_main
print(*({owner.lower() for name in {*sys.modules} for owner in found.get(name, ())}))
"""


def imported_by_ranks(*packages: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", ONLY, *packages]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_an_adapter_that_breaks_there_is_an_entry_until_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the other backends of the run go on, and its cells say why."""
    hello = {"kind": "broken", "message": "backend 'torn' cannot be imported: OSError: no symbol"}
    process = SimpleNamespace(hello=hello, end=lambda: None)
    monkeypatch.setattr("conformance.backends.registry.EnvironmentProcess", lambda *_, **__: process)
    entry = find_backend("torn_adapter:Torn", "/v/bin/python")
    assert (entry.name, entry.target, entry.python) == ("torn", "torn_adapter:Torn", "/v/bin/python")
    with pytest.raises(BrokenBackend, match=r"^--python torn_adapter:Torn=/v/bin/python: .*OSError: no symbol"):
        adapter_of(entry)


@pytest.mark.exhaustive
def test_ranks_import_exactly_their_declared_packages() -> None:
    names = [re.split("[>=<]", one)[0] for one in OF_RANKS]
    done = imported_by_ranks(*OF_RANKS)
    assert not done.returncode, done.stderr
    assert {*names} <= {*done.stdout.split()}
    missing = imported_by_ranks(*(one for one in OF_RANKS if not one.startswith("pydantic")))
    assert "pydantic is hidden" in missing.stderr  # the check sees what is not declared


def test_versions_of_what_an_adapter_names_are_in_the_environment_of_a_run() -> None:
    assert versions_of([find_backend("deepspeed")]).keys() >= {"torch", "deepspeed"}
    assert InProcessAdapter(find_backend("fsdp2").load()).traits.packages.keys() >= {"torch", "transformers"}


class _Vague:
    @classmethod
    def describe(cls) -> BackendInfo:
        return BackendInfo(name="vague", packages=())

    @classmethod
    def supports(cls, scenario: Scenario, layout: Layout) -> Any:
        return {1: None, 2: Unsupported("")}.get(layout.dp, "yes")


@pytest.mark.parametrize("layout", ["dp1", "dp2", "dp3"])
def test_an_answer_that_is_none_is_a_defect_of_the_adapter_and_no_claim(layout: str) -> None:
    with pytest.raises(
        AskFailed, match=r"supports\(\) returned .*it has to return Supported, or Unsupported with a reason"
    ):
        InProcessAdapter(_Vague).supports(SCENARIO, Layout.parse(layout))  # type: ignore[arg-type]


def test_an_environment_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    monkeypatch.setattr("conformance.backends.registry.LIMIT_S", 0.2)
    with pytest.raises(UsageError, match=r"--python fsdp2=.* does not answer.*neither computed nor read"):
        find_backend("fsdp2", str(silent))


@pytest.mark.parametrize("environment", ["own", "other"])
def test_ending_an_adapter_that_has_ended_signals_no_other_process(
    environment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may have given its process id to another process meanwhile."""
    if environment == "own":
        ended: EnvironmentProcess = registry.forked_process("nothing:Adapter")
    else:
        hello = json.dumps({"suite": conformance.__version__, "message": "there is no module 'nothing'"})
        (tmp_path / "says_hello.py").write_text(f"print({hello!r})\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        ended = EnvironmentProcess("nothing", sys.executable, "says_hello", "nothing:Adapter", limit_s=60)
    assert "no module 'nothing'" in ended.hello["message"]
    ended.end()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        ended.process.pid = other.pid
        ended.end()
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.2)
        other.kill()


def test_an_adapter_ends_whatever_the_preload_server_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child"
    (tmp_path / "has_child.py").write_text(
        "import pathlib, subprocess\nfrom plain_backend import Plain as Adapter\n"
        f"pathlib.Path({str(child)!r}).write_text(str(subprocess.Popen(['sleep', '600']).pid))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(preload_server, "_preload_server", None)
    monkeypatch.setattr(query_process, "_REAP_S", 0.5)
    for state in ("alive", "stopped", "dead"):
        adapter = registry.forked_process("has_child:Adapter")
        assert "message" not in adapter.hello
        server = preload_server._server()._process
        if state == "stopped":
            os.kill(server.pid, signal.SIGSTOP)
        elif state == "dead":
            os.kill(server.pid, signal.SIGKILL)
            server.wait()
        adapter.end()
        deadline = time.monotonic() + 20
        while any(process_state(pid) not in ("", "Z") for pid in (adapter.process.pid, int(child.read_text()))):
            assert time.monotonic() < deadline, f"it outlives end() if the preload server is {state}"
            time.sleep(0.05)
        if server.poll() is None:
            os.kill(server.pid, signal.SIGCONT)


def test_adapter_process_knows_objective_of_later_scenario() -> None:
    class Adapter(_Vague):
        objectives: ClassVar[dict[str, object]] = {"sft": None}

    adapter: Any = InProcessAdapter(Adapter)  # type: ignore[arg-type]
    mine = SimpleNamespace(objective=SimpleNamespace(kind="mine:Own"), optimizer=SimpleNamespace(name="sgd"))
    assert adapter.supports(mine, Layout(dp=1)) == Unsupported("vague does not train the objective 'mine:Own'")
    Adapter.objectives["mine:Own"] = None
    with pytest.raises(AskFailed):  # it is asked, and its answer is none
        adapter.supports(mine, Layout(dp=1))


PATCHES = """
import sys
from conformance.backends.protocol import Supported
from plain_backend import Plain

class Patches(Plain):
    @classmethod
    def supports(cls, scenario, layout):
        import conformance.judge.verdict
        conformance.judge.verdict.measure = None
        print("this goes to no answer")
        return Supported()
"""


def test_an_adapter_reaches_no_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "patches_the_judge.py").write_text(PATCHES)
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = adapter_of(find_backend("patches_the_judge:Patches"))
    assert asked.supports(SCENARIO, Layout(pp=2)) == Supported()
    assert verdict.measure is not None
    assert "patches_the_judge" not in sys.modules


def test_an_adapter_keeps_no_pipe_of_the_controller_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for the end of a pipe, such as a forkserver, would wait for the adapter's process, too."""
    (tmp_path / "waits_for_queries.py").write_text(PATCHES)
    monkeypatch.syspath_prepend(str(tmp_path))
    reading, writing = os.pipe()
    find_backend("waits_for_queries:Patches")
    os.close(writing)
    readable, _, _ = select.select([reading], [], [], 10)
    assert readable
    os.close(reading)


TELLS_ITS_PROCESS = """
from conformance.backends import query_process, registry
from conformance.backends.protocol import Unsupported
from plain_backend import Plain

class Tells(Plain):
    @classmethod
    def supports(cls, scenario, layout):
        return Unsupported("this process" if hasattr(registry, "FORKED") else "another process")
"""


def test_an_adapter_is_asked_in_a_process_that_has_nothing_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process may have started CUDA, which does not survive a fork."""
    (tmp_path / "tells.py").write_text(TELLS_ITS_PROCESS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "FORKED", True, raising=False)
    asked = adapter_of(find_backend("tells:Tells"))
    assert asked.supports(SCENARIO, Layout(pp=2)) == Unsupported("another process")


def test_adapters_that_were_asked_long_ago_keep_no_process_and_answer_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_there", {})
    monkeypatch.setattr(registry, "MOST_PROCESSES", 1)
    names = ("plain_backend:Plain", "plain_variants:Picky")
    first, second = (adapter_of(find_backend(name)) for name in names)
    assert isinstance(first, SubprocessAdapter)
    assert isinstance(second, SubprocessAdapter)
    assert process_state(first._process.process.pid) in ("", "Z")
    assert first.supports(SCENARIO, Layout(dp=1)) == second.supports(SCENARIO, Layout(dp=1)) == Supported()
    assert adapter_of(find_backend(names[0])) is first
    assert process_state(second._process.process.pid) in ("", "Z")
    assert process_state(first._process.process.pid) not in ("", "Z")


def test_an_adapter_that_cannot_start_again_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "changes.py"
    module.write_text("from plain_backend import Plain as Changes\n")
    asked = adapter_of(find_backend("changes:Changes"))
    assert isinstance(asked, SubprocessAdapter)
    asked.rest()
    module.write_text("raise OSError('half written')\n")
    for _ in range(2):
        with pytest.raises(BrokenBackend, match="half written"):
            asked.supports(SCENARIO, Layout(dp=1))
    module.write_text("from plain_backend import Plain as Changes\n\n")
    assert asked.supports(SCENARIO, Layout(dp=1)) == Supported()


FAILS = """
from plain_backend import Plain

class Fails(Plain):
    @classmethod
    def supports(cls, scenario, layout):
        error = OSError("no symbol")
        if layout.pp > 1:
            raise ImportError("could not import") from error
        raise error from error
"""


def test_the_first_cause_of_a_failure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = adapter_of(find_backend("fails:Fails"))
    with pytest.raises(AskFailed, match=r"could not import \(because of OSError: no symbol\)"):
        asked.supports(SCENARIO, Layout(pp=2))
    with pytest.raises(AskFailed, match=r"OSError at fails.py:\d+: no symbol"):
        asked.supports(SCENARIO, Layout(dp=2))


def _answers(queries: IO[str], answers: IO[str]) -> None:
    for _ in queries:
        print("an answer", file=answers, flush=True)


def test_a_fork_whose_answer_nobody_reads_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    own, others = socket.socketpair()
    lives, held = os.pipe()
    if not (pid := os.fork()):
        own.close()
        os.close(held)
        answer_in_fork(others.detach(), lives, _answers)
    others.close()
    own.recv(64)  # its pid
    own.sendall(b"a question\n")
    select.select([own], [], [])
    own.close()
    os.waitpid(pid, 0)
    os.close(lives)
    os.close(held)
    assert capfd.readouterr().err == ""
