"""Packages: which of its declared packages a backend lacks, when its import fails.

Serves claim 9: a backend that lacks an optional package is unsupported, and any other failing import is a failure. An
adapter that cannot be imported cannot be asked what it needs, so its distribution is: what a backend needs is declared
in the extra that has the backend's name.
"""

import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution


@dataclass(frozen=True, kw_only=True)
class MissingPackage:
    """A declared package that is not installed, and the extra that brings it."""

    package: str
    extra: str

    def __str__(self) -> str:
        return f"{self.package} is not installed; run: pip install '{self.extra}'"


def missing_package(entry: EntryPoint | None, module: str) -> MissingPackage | None:
    """The declared package that ``module`` is of and that is not installed; None where there is no such package.

    ``entry`` is the backend's entry point; without one, nothing is declared. Nobody knows the modules of a package that
    is not installed. So a module belongs to it if one of the two names begins with the other, as ``megatron-core``
    begins with ``megatron``; an adapter may raise ModuleNotFoundError with the name of the package, too.
    """
    if entry is None or entry.dist is None:
        return None
    asked = _canonical(module)
    for package in _extra(entry.dist.requires or [], entry.name):
        alike = f"{asked}-".startswith(f"{package}-") or f"{package}-".startswith(f"{asked}-")
        if alike and not _is_installed(package):
            return MissingPackage(package=package, extra=f"{entry.dist.name}[{entry.name}]")
    return None


def _extra(requirements: list[str], extra: str) -> list[str]:
    """Names of the packages of an extra, out of a distribution's requirements such as ``a>=1; extra == 'b'``."""
    wanted = re.compile(rf"\bextra\s*==\s*['\"]{re.escape(extra)}['\"]")
    chosen = [requirement for requirement in requirements if wanted.search(requirement.partition(";")[2])]
    return [_canonical(re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]) for requirement in chosen]


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def _canonical(name: str) -> str:
    """A module's or a package's name as package indexes compare them."""
    return re.sub(r"[-_.]+", "-", name).lower()
