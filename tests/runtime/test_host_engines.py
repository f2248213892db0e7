"""`parity run` on several hosts, by each of the engines. Every host is this machine.

Most cells are of the plain backend: what is shown is where their ranks are. Both engines are the real ones.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_processes import environment, host
from plain_profile import write_profile

from conformance.cli.main import main
from conformance.runtime.multihost.controller import started_by_engine
from conformance.runtime.multihost.host import free_port

PLAIN = ["--backend", "plain_backend:Plain"]


def states(out: Path) -> dict[str, str]:
    return {cell["id"]: cell["state"] for cell in json.loads((out / "summary.json").read_text())["cells"]}


@pytest.mark.slow
def test_cells_that_are_too_large_for_all_hosts_are_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = Path(write_profile(tmp_path))
    both.write_text(both.read_text().replace("pp2", "dp4"))
    chosen = [*PLAIN, "--profile", str(both), "--out", str(tmp_path / "out")]
    with host() as (one, first), host() as (other, second), started_by_engine([one, other]):
        main(["run", *chosen])
        assert (first.wait(timeout=30), second.wait(timeout=30)) == (0, 0)
    message = capsys.readouterr().err
    assert sorted(states(tmp_path / "out").values()) == ["conforms", "not_run"], message
    assert "needs 4 ranks, and the hosts start 2; add hosts" in message


def test_when_a_host_does_not_join_every_cell_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [*PLAIN, "--profile", write_profile(tmp_path), "--out", str(tmp_path / "out"), "--budget", "0.2"]
    with host(code="import time; time.sleep(60)") as (wire, _), started_by_engine([wire]):
        assert main(["run", *chosen]) == 3
    assert sorted(states(tmp_path / "out").values()) == ["infrastructure", "unsupported"]
    assert "0 of 1 hosts have joined (none)" in capsys.readouterr().err


NO_MEMORY = (
    "import conformance.core.host, socket; socket.gethostname = lambda: 'far'; "
    "conformance.core.host.available_memory = lambda: 1e6"
)


@pytest.mark.exhaustive
def test_a_host_without_room_is_refused_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [*PLAIN, "--profile", write_profile(tmp_path), "--out", str(tmp_path / "out")]
    with host(slots=2, code=NO_MEMORY) as (wire, far), started_by_engine([wire]):
        assert main(["run", *chosen]) == 2
        assert far.wait(timeout=30) == 0
    message = capsys.readouterr().err
    assert "host far: the ranks of its 2 slots, the largest of tiny/llama/plain/dp2/fp32, need about " in message
    assert not (tmp_path / "out").exists()


SUITE = """
description = "three cells"
[[cells]]
scenarios = ["{scenario}"]
models = ["llama"]
layouts = ["dp2", "dp1", "pp2", "dp4"]
precisions = ["fp32"]
"""


@pytest.mark.exhaustive
def test_the_pytest_plugin_runs_the_same_cells_on_the_same_hosts(tmp_path: Path) -> None:
    """Side by side, with a test for each."""
    (tmp_path / "all.toml").write_text(SUITE.format(scenario=Path(write_profile(tmp_path)).with_name("tiny.toml")))
    out = tmp_path / "out"
    options = {"profile": str(tmp_path / "all.toml"), "backend": "plain_backend:Plain", "out": str(out)}
    chosen = [word for name, value in options.items() for word in (f"--parity-{name}", value)]
    codes, outputs = two_nodes("pytest", *QUIET, "--pyargs", "conformance.suite", *chosen, capture="stdout")
    assert codes == [1, 0] or codes == [1, 1], outputs
    assert re.search(r"2 passed, 1 skipped, .*1 error", outputs[0] + outputs[1]), outputs
    assert sorted(states(out).values()) == ["conforms", "conforms", "not_run", "unsupported"]
    assert "needs 4 ranks, and the hosts start 2; add hosts" in outputs[0] + outputs[1]


QUIET = ("-p", "no:cacheprovider", "-n", "0")


@pytest.mark.exhaustive
def test_the_pytest_plugin_wants_no_workers_on_hosts(tmp_path: Path) -> None:
    cells = ["--parity-backend", "plain_backend:Plain", "--parity-profile", write_profile(tmp_path)]
    suite = ["pytest", "-p", "no:cacheprovider", "-n", "1", "--pyargs", "conformance.suite", *cells]
    codes, messages = two_nodes(*suite)
    assert 0 not in codes
    assert "omit -n" in messages[0] + messages[1]


def test_torchrun_is_told_apart_from_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    from conformance.cli import torchrun

    assert torchrun.main(["run"]) == 2
    assert "with torchrun --rdzv-backend c10d" in capsys.readouterr().err


def two_nodes(*command: str, capture: str = "stderr") -> tuple[list[int], list[str]]:
    """Run a job of torchrun; returns exit codes and standard errors (or outputs) of its nodes."""
    meets = f"127.0.0.1:{free_port('127.0.0.1')}"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", meets, "--rdzv-id", "parity"]
    started = [*torchrun, "-m", "conformance.cli.torchrun", *command]
    streams = {capture: subprocess.PIPE}
    nodes = [
        subprocess.Popen(started, env=environment() | {"PARITY_SLOTS": "1"}, text=True, **streams)  # type: ignore[call-overload]
        for _ in range(2)
    ]
    at = 1 if capture == "stderr" else 0
    messages = [node.communicate(timeout=600)[at] for node in nodes]  # with libraries, on a machine that does much else
    return [node.returncode for node in nodes], messages


@pytest.mark.exhaustive
def test_a_job_of_torchrun(tmp_path: Path) -> None:
    """Two nodes meet by c10d, and exit with the run's code; one rank of the cell is on each."""
    codes, said = two_nodes("run", *PLAIN, "--profile", write_profile(tmp_path), "--out", str(tmp_path / "out"))
    assert codes == [0, 0], said
    assert sorted(states(tmp_path / "out").values()) == ["conforms", "unsupported"]


TWO_RANKS = """
description = "the ranks of a cell have different rows, or parts of each matrix"
[[cells]]
scenarios = ["sft-packed"]
models = ["llama"]
layouts = ["dp2", "tp2"]
precisions = ["exact"]
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "library"), [("fsdp2", "torch"), ("deepspeed", "deepspeed"), ("megatron", "megatron.core")]
)
def test_cells_of_the_libraries_conform_with_a_rank_on_each_host(tmp_path: Path, backend: str, library: str) -> None:
    """Each library makes process groups of its own, over which it sums gradients (dp2) and activations (tp2)."""
    pytest.importorskip(library)
    (tmp_path / "two-ranks.toml").write_text(TWO_RANKS)
    chosen = ["--backend", backend, "--profile", str(tmp_path / "two-ranks.toml"), "--out", str(tmp_path / "out")]
    codes, said = two_nodes("run", *chosen)
    assert codes == [0, 0], said
    names = [f"sft-packed/llama/{backend}/{layout}/exact" for layout in ("dp2", "tp2")]
    assert states(tmp_path / "out") == dict.fromkeys(names, "conforms")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--profle", "quick"], "there is no option --profle; did you mean '--profile'?"),
        (["--profile", "quik"], "no profile 'quik'; did you mean 'quick'?"),
    ],
)
def test_an_option_that_is_wrong_ends_all_nodes_of_a_job(wrong: list[str], message: str) -> None:
    """At once, and each of them says why."""
    began = time.monotonic()
    codes, said = two_nodes("run", *wrong)
    assert time.monotonic() - began < 300
    assert 0 not in codes
    assert all(message in one for one in said), said
    assert sum("the first node ended with code 2: parity" in one for one in said) == 1


@pytest.fixture
def ray_address(tmp_path: Path) -> Iterator[str]:
    """A Ray cluster of two nodes with a processor each."""
    pytest.importorskip("ray", reason="needs ray: pip install 'backend-parity[ray]'")
    port = free_port("127.0.0.1")
    small = ["--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
    head = ["--head", f"--port={port}", "--include-dashboard=false", "--temp-dir", f"/tmp/ray-{os.getpid()}"]
    with contextlib.ExitStack() as stack:
        for where in (head, [f"--address=127.0.0.1:{port}"]):
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", *where, *small]
            node = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            stack.callback(node.terminate)
            time.sleep(10)  # ray says nowhere that a node is ready
        yield f"127.0.0.1:{port}"


@pytest.mark.exhaustive
def test_a_ray_cluster(ray_address: str, tmp_path: Path) -> None:
    """Each actor is in a bundle of a placement group, on a node of its own."""
    chosen = [*PLAIN, "--profile", write_profile(tmp_path), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "conformance.cli.ray", "--nodes", "2", "--slots", "1", "run", *chosen]
    done = subprocess.run(
        command, env=environment() | {"RAY_ADDRESS": ray_address}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(states(tmp_path / "out").values()) == ["conforms", "unsupported"]
