"""Finds the declared package that is missing when the import of a backend fails.

A backend whose optional package is not installed is unsupported; any other import error is a failure. An adapter that
cannot be imported cannot name the packages it needs. So they are read from the metadata of its distribution: from the
extra that has the backend's name.
"""

import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, version


@dataclass(frozen=True, kw_only=True)
class MissingPackage:
    """Names a declared package that is not installed, and the extra (``DISTRIBUTION[BACKEND]``) that installs it."""

    package: str
    extra: str

    def __str__(self) -> str:
        return f"{self.package} is not installed; run: pip install '{self.extra}'"


def missing_package(entry: EntryPoint | None, module: str) -> MissingPackage | None:
    """Returns the declared package that would provide ``module`` and is not installed; None if there is none.

    ``entry``: the backend's entry point; None if no package is declared. The modules of a package that is not installed
    are unknown. So a module is matched with a package if one of the two names begins with the other, as
    ``megatron-core`` begins with ``megatron``. An adapter may also raise ModuleNotFoundError with the package's name.
    """
    if entry is None or entry.dist is None:
        return None
    wanted = _canonical(module)
    for package in _extra(entry.dist.requires or [], entry.name):
        matches = f"{wanted}-".startswith(f"{package}-") or f"{package}-".startswith(f"{wanted}-")
        if matches and not is_installed(package):
            return MissingPackage(package=package, extra=f"{entry.dist.name}[{entry.name}]")
    return None


def _extra(requirements: list[str], extra: str) -> list[str]:
    """Returns the packages of an extra, from a distribution's requirements such as ``a>=1; extra == 'b'``."""
    wanted = re.compile(rf"\bextra\s*==\s*['\"]{re.escape(extra)}['\"]")
    chosen = [requirement for requirement in requirements if wanted.search(requirement.partition(";")[2])]
    return [_canonical(re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]) for requirement in chosen]


def is_installed(package: str) -> bool:
    """Tells whether a distribution of this name is installed."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def _canonical(name: str) -> str:
    """Normalizes the name of a module or package, as package indexes compare names (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def package_version(package: str) -> str:
    """Returns the version of an installed distribution, or ``not installed``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
