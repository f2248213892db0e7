"""Makes ``import impl`` and ``import reports`` find the packages of this distribution.

Both names are common. A folder ``impl/`` or ``reports/`` on the user's path, such as the current one with
``PYTHONPATH=.``, comes before the installed package of this name. The processes of the suite (commands, ranks, the
servers that fork ranks) call ``prefer``; a function that a user calls in a process of the user's own runs in
``preferred``, which leaves the modules of the user as they were.

``python -m conformance.core.own_packages MODULE ARGUMENTS...`` runs a module of this distribution.
"""

import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from pkgutil import extend_path
from types import ModuleType

NAMES = ("impl", "reports")
ROOT = str(Path(__file__).parents[2])


class _Finder(MetaPathFinder):
    """Finds the packages next to ``conformance``, and modules that only the user's package of the same name has.

    So an adapter that lives in a package ``impl`` of the user can be imported next to the reference backends.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in NAMES or (spec := PathFinder.find_spec(fullname, [ROOT])) is None:
            return None
        spec.submodule_search_locations = [*extend_path(spec.submodule_search_locations or [], fullname)]
        return spec


_FINDER = _Finder()
_set_aside: dict[str, ModuleType] = {}  # modules of this distribution while the user's modules have their names


def prefer() -> None:
    """Prefers the packages of this distribution from now on, in a process that belongs to the suite."""
    if _FINDER not in sys.meta_path:
        _take_out(foreign=True)
        sys.meta_path.insert(0, _FINDER)


@contextlib.contextmanager
def preferred() -> Iterator[None]:
    """Prefers the packages of this distribution inside the ``with`` statement."""
    if _FINDER in sys.meta_path or not _is_hidden():
        yield
        return
    users = _take_out(foreign=True)
    sys.modules.update(_set_aside)
    sys.meta_path.insert(0, _FINDER)
    try:
        yield
    finally:
        sys.meta_path.remove(_FINDER)
        _set_aside.update(_take_out(foreign=False))
        sys.modules.update(users)


def _is_hidden() -> bool:
    """Tells whether another package or module has, or would get, one of the names."""
    found = [PathFinder.find_spec(name) for name in NAMES]
    loaded = [sys.modules[name].__spec__ for name in NAMES if name in sys.modules]
    return any(spec is None or not _is_own(spec) for spec in (*found, *loaded))


def _is_own(spec: ModuleSpec) -> bool:
    return spec.origin == str(Path(ROOT, spec.name, "__init__.py"))


def _take_out(*, foreign: bool) -> dict[str, ModuleType]:
    """Removes packages with these names and their modules from sys.modules: the user's (``foreign``), or all."""
    packages = [
        name
        for name in NAMES
        if name in sys.modules and not (foreign and (spec := sys.modules[name].__spec__) and _is_own(spec))
    ]
    taken = [name for name in sys.modules if name.partition(".")[0] in packages]
    return {name: sys.modules.pop(name) for name in taken}


def main() -> None:
    """Runs the module that the first argument names, as ``python -m`` does."""
    prefer()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
