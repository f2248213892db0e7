"""Finding backends: through entry points, lazily; what is missing is said with the command that brings it."""

import ast
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from worker_group_helpers import is_dead_soon

import conformance.core.packages
from conformance.backends.protocol import BackendEntry, BrokenBackend, MissingExtra, find_backend, registered_backends
from conformance.backends.registry import adapter_of
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.spec.layout import Layout
from conformance.spec.scenario import load_scenario
from impl.fsdp2.adapter import Fsdp2Backend

ROOT = Path(__file__).resolve().parents[2]


def test_the_built_in_backends_register_like_everybody_elses() -> None:
    assert registered_backends()["fsdp2"].target == "impl.fsdp2.adapter:Fsdp2Backend"


# Prints what a controller imports to ask all backends, then asks an adapter that never answers, and is killed.
CONTROLLER = """
import os, signal, sys
from conformance.backends.protocol import registered_backends
registered_backends()
print("impl" in sys.modules)
from conformance.backends.registry import adapter_of, forked_process
from conformance.spec.layout import Layout
from conformance.core.host import FIXTURES
from conformance.spec.scenario import load_scenario
scenario = load_scenario(FIXTURES / "scenarios/sft-packed.toml", model="models/qwen3", precision="exact")
for entry in registered_backends().values():
    adapter, layout = adapter_of(entry), Layout.parse("dp2")
    supported = type(adapter.supports(scenario, layout)).__name__
    print(entry.name, supported, adapter.host_bytes(scenario, layout) > 0)
print(*{"transformers", "torch._dynamo", "deepspeed", "megatron.core", "peft"} & sys.modules.keys())
stuck = forked_process("stuck:Adapter")
stuck.process.read_pid()
print(stuck.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Returns the lines that the controller has printed."""
    folder = tmp_path_factory.mktemp("stuck")
    (folder / "stuck.py").write_text("import time\ntime.sleep(600)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), *sys.path))}
    command = [sys.executable, "-c", CONTROLLER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout.splitlines()


def test_an_adapter_stuck_in_its_imports_ends_with_a_killed_controller(printed: list[str]) -> None:
    """It has the standard error of the controller, so whoever reads that to its end would wait for ever."""
    assert is_dead_soon(int(printed[-1])), "the adapter's process outlives the controller"


def test_an_unknown_backend_lists_the_registered_ones_and_how_to_add_one() -> None:
    with pytest.raises(
        ValueError,
        match=r"'deepsped'; did you mean 'deepspeed'[?] registered: .*fsdp2.*entry-point group 'parity.backends'",
    ):
        find_backend("deepsped")


def test_a_backend_that_is_not_installed_can_be_named_by_module_and_class() -> None:
    entry = find_backend("impl.fsdp2.adapter:Fsdp2Backend")
    assert entry.load().describe().name == "fsdp2"


def register(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> BackendEntry:
    """An adapter that an installed distribution announces as ``third-party``, with an extra of that name."""
    (folder / "third_party_adapter.py").write_text(code)
    info = folder / "third_party-1.0.dist-info"
    info.mkdir()
    declared = "Requires-Dist: plain_need\nRequires-Dist: Framework.Core (>=1) ; extra == 'third-party'\n"
    (info / "METADATA").write_text(f"Name: third-party-dist\nVersion: 1.0\nProvides-Extra: third-party\n{declared}")
    (info / "entry_points.txt").write_text("[parity.backends]\nthird-party = third_party_adapter:Adapter\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "third_party_adapter", raising=False)
    return find_backend("third-party")


@pytest.mark.parametrize(
    "code",
    [
        "import framework_core\n",
        "import framework_core.engine\n",
        "import framework\n",
        "raise ModuleNotFoundError('not installed', name='framework-core')\n",
    ],
)
def test_a_declared_package_that_is_missing_is_a_message_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    entry = register(tmp_path, monkeypatch, code)
    with pytest.raises(
        MissingExtra, match=r"^framework-core is not installed; run: pip install 'third-party-dist\[third-party\]'$"
    ):
        entry.load()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import a_package_that_is_not_there\n", r"ModuleNotFoundError at third_party_adapter.py:1: No module named"),
        (
            "import plain_need\n",
            "'plain_need'; run: .*python.* -m pip install plain_need, or set PYTHONPATH",
        ),  # no extra: the distribution itself is not installed
        ("import frame\n", "No module named 'frame'"),
        ("from json import nothing_of_it\n", "ImportError at third_party_adapter.py:1: cannot import name"),
        (
            "\nraise ZeroDivisionError('in the\\nadapter')\n",
            "ZeroDivisionError at third_party_adapter.py:2: in the adap",
        ),
        ("import sys; sys.exit(3)\n", "SystemExit at third_party_adapter.py:1: 3"),
        ("import json.no_such_part\n", "No module named 'json.no_such_part'$"),
    ],
)
def test_any_other_import_that_fails_is_a_failure_and_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    entry = register(tmp_path, monkeypatch, code)
    with pytest.raises(BrokenBackend, match=rf"^backend 'third-party' cannot be imported: .*{words}"):
        entry.load()


def test_a_module_that_an_installed_package_does_not_have_is_no_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "framework_core-1.0.dist-info").mkdir()
    (tmp_path / "framework_core-1.0.dist-info" / "METADATA").write_text("Name: framework-core\nVersion: 1.0\n")
    with pytest.raises(BrokenBackend):
        register(tmp_path, monkeypatch, "import framework_core.of_another_version\n").load()


def test_a_backend_that_nobody_registered_has_declared_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, monkeypatch, "import framework_core\n")
    with pytest.raises(BrokenBackend, match="No module named 'framework_core'"):
        find_backend("third_party_adapter:Adapter").load()


def test_a_module_beside_the_adapter_that_is_missing_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "adapter.py").write_text("import own_package.engine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BrokenBackend, match=r"own_package\.engine"):
        BackendEntry(name="other", target="own_package.adapter:Backend").load()


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what pip has installed."""
    monkeypatch.setattr(conformance.core.packages, "is_installed", lambda name: name != package)


def test_without_deepspeed_its_cells_say_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    without("deepspeed", monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else found(name))
    monkeypatch.delitem(sys.modules, "impl.deepspeed.adapter", raising=False)
    with pytest.raises(
        MissingExtra, match=r"deepspeed is not installed; run: pip install 'backend-parity\[deepspeed\]'"
    ):
        BackendEntry(name="deepspeed", target="impl.deepspeed.adapter:DeepspeedBackend").load()


def test_without_megatron_core_its_cells_say_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    without("megatron-core", monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "megatron" in name else found(name))
    monkeypatch.delitem(sys.modules, "impl.megatron.adapter", raising=False)
    with pytest.raises(
        MissingExtra, match=r"megatron-core is not installed; run: pip install 'backend-parity\[megatron\]'"
    ):
        BackendEntry(name="megatron", target="impl.megatron.adapter:MegatronBackend").load()


@pytest.mark.parametrize(
    ("target", "message"),
    [("no_such_module:X", "there is no module 'no_such_module'"), ("impl.fsdp2.adapter:Typo", "has no 'Typo'")],
)
def test_a_wrong_target_is_named(target: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BackendEntry(name="other", target=target).load()


def test_asking_backends_what_they_support_imports_none_of_their_libraries(printed: list[str]) -> None:
    """A controller asks for every cell, and each of them takes seconds to import."""
    assert printed[:-1] == [
        "False",  # listing backends imports none of them
        "deepspeed Supported True",
        "fsdp2 Supported False",
        "megatron Supported False",
        "",
    ]


def imported(file: Path) -> set[str]:
    """Top-level packages that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("conformance/oracle", {"impl", "transformers", "deepspeed", "megatron"}),
        ("parity", {"impl", "deepspeed", "megatron"}),
    ],
)
def test_arrows_run_one_way(package: str, forbidden: set[str]) -> None:
    """What lint-imports cannot see: its contracts are about the packages of this repository alone."""
    for file in (ROOT / package).rglob("*.py"):
        # A second-class oracle is transformers' own implementation.
        allowed = {"transformers"} if file.name == "transformers_reference.py" else set[str]()
        assert not imported(file) & forbidden - allowed, file


def test_another_package_that_stands_in_the_way_of_a_backend_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in_the_way").mkdir()
    (tmp_path / "in_the_way" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=r"no module 'in_the_way.adapter' \(the package .*in_the_way/__init__.py"):
        BackendEntry(name="other", target="in_the_way.adapter:Backend").load()


def test_a_method_that_an_adapter_has_set_to_none_is_one_that_it_lacks() -> None:
    """As plain_backend.Plain does with ``traced``, which its base class has: its cells are not bisected."""
    assert "traced" in adapter_of(find_backend("fsdp2")).traits.methods
    assert "traced" not in adapter_of(find_backend("plain_backend:Plain")).traits.methods


def test_package_that_is_installed_meanwhile_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "late" not in registered_backends()
    (info := tmp_path / "late-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Name: late\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[parity.backends]\nlate = late:Adapter\n")
    assert registered_backends()["late"].target == "late:Adapter"


def install_release(folder: Path, package: str, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts metadata first on the path, which say that another release of a package is installed."""
    (info := folder / f"{package}-{version}.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder))


@pytest.mark.parametrize(
    ("version", "refused"), [("0.17.6", True), ("0.19.7", True), ("0.19.8+built.here", False), ("0.20.0", False)]
)
def test_releases_of_deepspeed_that_lack_functions_are_refused_with_advice(
    tmp_path: Path, version: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    package, adapter = (importlib.import_module(f"impl.deepspeed{part}") for part in ("", ".adapter"))
    monkeypatch.setattr(package, "adapter", adapter)  # importing it again, below, replaces it in both places
    monkeypatch.delitem(sys.modules, adapter.__name__)
    install_release(tmp_path, "deepspeed", version, monkeypatch)
    entry = registered_backends()["deepspeed"]
    if refused:
        with pytest.raises(
            MissingExtra, match=f"deepspeed {version} is installed, .*install deepspeed 0.19.8 or newer"
        ):
            entry.load()
    else:
        assert entry.load().describe().name == "deepspeed"


@pytest.mark.parametrize(
    ("version", "precision", "on_gpu", "state"),
    [
        ("2.11.0+cu130", "exact", False, "Unsupported"),
        ("2.12.1", "exact", False, "Unsupported"),
        ("2.12.1", "exact", True, "Supported"),
        ("2.12.1", "fp32", False, "Supported"),
        ("2.13.0+cpu", "exact", False, "Supported"),
    ],
)
@pytest.mark.parametrize(("backend", "layout"), [("fsdp2", "dp2.compile"), ("deepspeed", "dp2.zero0.compile")])
def test_compiled_float64_attention_is_refused_on_cpus_where_torch_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    version: str, precision: str, on_gpu: bool, state: str, backend: str, layout: str,
) -> None:  # fmt: skip
    install_release(tmp_path, "torch", version, monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    file, model = FIXTURES / "scenarios" / "sft-packed.toml", FIXTURES / "models" / "pangu"
    scenario = load_scenario(file, model=str(model), precision=precision)
    answer = repr(registered_backends()[backend].load().supports(scenario, Layout.parse(layout)))
    assert answer.startswith(state), answer
    assert state == "Supported" or "use torch 2.13" in answer


@pytest.mark.parametrize(("version", "state"), [("5.16.1", "Unsupported"), ("5.17.0", "Supported")])
def test_transformers_before_it_shards_by_its_own_plan_is_refused_with_advice(
    tmp_path: Path, version: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_release(tmp_path, "transformers", version, monkeypatch)
    file, model = FIXTURES / "scenarios" / "sft-packed.toml", FIXTURES / "models" / "llama"
    scenario = load_scenario(file, model=str(model), precision="exact")
    own, *others = (
        repr(Fsdp2Backend.supports(scenario, Layout.parse(layout))) for layout in ("tp2", "tp2.plan", "dp2")
    )
    assert own.startswith(state), own
    assert state == "Supported" or "use transformers 5.17 or newer, tp1, or the option 'plan'" in own
    assert all(answer.startswith("Supported") for answer in others), others
