"""Finding backends: through entry points, lazily; what is missing is said with the command that brings it."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.backend import BackendEntry, MissingExtra, find_backend, registered_backends
from conformance.validation import UsageError

ROOT = Path(__file__).resolve().parent.parent


def test_the_built_in_backends_register_like_everybody_elses() -> None:
    assert registered_backends()["fsdp2"].target == "impl.fsdp2.adapter:Fsdp2Backend"


def test_an_unknown_backend_lists_the_registered_ones_and_how_to_add_one() -> None:
    with pytest.raises(
        ValueError, match=r"unknown backend 'deepsped'; registered: .*fsdp2.*entry point 'parity.backends'"
    ):
        find_backend("deepsped")


def test_a_backend_that_is_not_installed_can_be_named_by_module_and_class() -> None:
    entry = find_backend("impl.fsdp2.adapter:Fsdp2Backend")
    assert entry.load().describe().name == "fsdp2"


def test_a_missing_extra_is_a_message_with_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_extra.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingExtra, match=r"a_package_that_is_not_there is not installed; run: pip install"):
        BackendEntry(name="other", target="needs_extra:Backend").load()


def test_without_deepspeed_its_cells_say_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else found(name))
    monkeypatch.delitem(sys.modules, "impl.deepspeed.adapter", raising=False)
    with pytest.raises(
        MissingExtra, match=r"deepspeed is not installed; run: pip install 'backend-parity\[deepspeed\]'"
    ):
        BackendEntry(name="deepspeed", target="impl.deepspeed.adapter:DeepspeedBackend").load()


def test_without_megatron_core_its_cells_say_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
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


def test_listing_backends_imports_none_of_them() -> None:
    code = "import sys, conformance.backend as b; b.registered_backends(); sys.exit('impl' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
        ("conformance", {"impl", "reports"}),
        ("reports", {"impl"}),
        ("conformance/oracle", {"impl", "transformers", "deepspeed", "megatron"}),
        ("impl", {"reports"}),
    ],
)
def test_arrows_run_one_way(package: str, forbidden: set[str]) -> None:
    for file in (ROOT / package).rglob("*.py"):
        assert not imported(file) & forbidden, file


def test_another_package_that_stands_in_the_way_of_a_backend_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in_the_way").mkdir()
    (tmp_path / "in_the_way" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=r"no module 'in_the_way.adapter' \(the package .*in_the_way/__init__.py"):
        BackendEntry(name="other", target="in_the_way.adapter:Backend").load()
