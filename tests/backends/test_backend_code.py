"""The digest of a backend's code, by which a run is resumed or not: what belongs to it, and what does not."""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from plain_backend import Plain

import impl
from conformance.backends.registry import code_of
from conformance.core import packages
from conformance.core.packages import OF_MODELS, UNKNOWN


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Callable[[], str]]]:
    """A folder with an adapter in a package without __init__.py, and what digests its code, which nobody imported."""
    modules = {*sys.modules}
    for name, text in {
        "mine/adapters/own.py": "class Own: pass",
        "mine/adapters/lazy.py": "",
        "mine/trainer/core/step.py": "",
        "elsewhere/shared/__init__.py": "",
        "elsewhere/other.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for folder in ("elsewhere", "mine"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    yield tmp_path, lambda: code_of(import_module("adapters.own").Own)
    for name in {*sys.modules} - modules:
        del sys.modules[name]


@pytest.mark.parametrize("changed", ["adapters/own.py", "adapters/lazy.py", "trainer/core/step.py", "new.py", "a.cu"])
def test_code_of_a_backend_is_what_lies_beside_it_imported_or_not(
    changed: str, project: tuple[Path, Callable[[], str]]
) -> None:
    folder, digest = project
    before = digest()
    import_module("adapters.lazy")
    assert digest() == before
    (folder / "mine" / changed).write_text("# changed")
    assert digest() != before
    moved = digest()
    (folder / "mine" / changed).rename(folder / "mine" / "trainer" / "moved.py")
    assert digest() != moved


def test_code_of_a_backend_has_the_packages_elsewhere_that_it_imports(project: tuple[Path, Callable[[], str]]) -> None:
    folder, digest = project
    import_module("shared")
    before = digest()
    (folder / "elsewhere" / "other.py").write_text("# which nobody imports")
    assert digest() == before
    (folder / "elsewhere" / "shared" / "lazy.py").write_text("# which is imported later")
    assert digest() != before


def test_code_of_an_installed_backend_is_its_package(
    project: tuple[Path, Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = project[0] / "site-packages"
    for name in ("installed_adapter", "its_library"):
        (installed / name).mkdir(parents=True)
        (installed / name / "__init__.py").write_text("class Own: pass")
    monkeypatch.syspath_prepend(installed)
    import_module("its_library")
    own = import_module("installed_adapter").Own
    before = code_of(own)
    (installed / "its_library" / "__init__.py").write_text("# whose version a run may record")
    assert code_of(own) == before
    (installed / "installed_adapter" / "lazy.py").touch()
    assert code_of(own) != before


@pytest.mark.parametrize(
    "path",
    [
        ".hidden/a.py",
        "venv/lib/a.py",
        "deps/site-packages/a.py",
        "target/a.py",
        "out/inputs/llama/a.py",
        "suite/tests/a.py",
        "impl/a.py",
        "notes.txt",
    ],
)
def test_what_is_no_code_of_a_backend(path: str, project: tuple[Path, Callable[[], str]]) -> None:
    """Environments, results and checkouts of the suite, in one of which the adapter may lie, too."""
    folder, digest = project
    mine = folder / "mine"
    for name in (
        "venv/pyvenv.cfg",
        "out/summary.json",
        "suite/conformance/backends/registry.py",
        "conformance/backends/registry.py",
    ):
        (mine / name).parent.mkdir(parents=True)
        (mine / name).touch()
    for name in ("out/cells", "target/more-1.0.dist-info"):
        (mine / name).mkdir(parents=True)
    before = digest()
    (mine / path).parent.mkdir(parents=True, exist_ok=True)
    (mine / path).write_text("# changed")
    assert digest() == before


def test_another_checkout_of_the_suite_is_no_code_of_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one is installed and another one is on the path, in which somebody works."""
    before = code_of(Plain)
    (tmp_path / "more.py").write_text("MORE = 1\n")
    monkeypatch.setattr(impl, "__path__", [*impl.__path__, str(tmp_path)])
    assert code_of(Plain) == before


def test_code_of_models_that_transformers_keeps_is_no_code_of_a_backend(
    project: tuple[Path, Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, digest = project
    (folder / "elsewhere" / OF_MODELS).mkdir()
    (folder / "elsewhere" / OF_MODELS / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, OF_MODELS, raising=False)
    before = digest()
    import_module(OF_MODELS)
    assert digest() == before


def test_too_many_folders_have_no_digest(
    project: tuple[Path, Callable[[], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, digest = project
    monkeypatch.setattr(packages, "MOST_FILES", 1000)  # of which there are fewer files
    assert not digest().startswith(UNKNOWN)
    for i in range(1000):
        (folder / "mine" / str(i)).mkdir()
    assert digest().startswith(UNKNOWN)
