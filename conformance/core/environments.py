"""Makes Python environments of requirements: by uv if it is on PATH, else by venv and pip.

An environment inherits the packages of this interpreter, torch among them, and has its own requirements in front of
them. So it is small, and made in seconds. An environment of another Python inherits nothing but the suite.

Requirements are resolved to exact versions and hashes, the lock; environments are kept by lock in the folder
``environments`` of the cache (``PARITY_CACHE``). What pip and uv read from their own variables, such as PIP_FIND_LINKS,
PIP_IGNORE_REQUIRES_PYTHON and UV_INDEX_URL, counts here, too.
"""

import hashlib
import json
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from importlib.machinery import PathFinder
from importlib.metadata import distribution
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from conformance.core.errors import STRICT, UsageError, explain
from conformance.core.host import cache_folder
from conformance.core.io import locked, read_toml, write_file
from conformance.core.packages import ROOT, canonical, package_version

OF_RANKS = ("numpy", "pydantic>=2.10", "safetensors>=0.6", "torch>=2.11")  # what ranks of every backend import
LOCK = "requirements.lock"
NAME = r"^[A-Za-z0-9][\w.+-]*$"
_VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
# The loader, the C library and Python read these before any line of Python could set them.
_TOO_EARLY = ("LD_", "PYTHON", "MALLOC_", "GLIBC_")
# The suite sets these when it starts a rank, or a process of ranks.
_OF_RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_HOSTID"}
_OF_PROCESS = {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "JE_ARROW_MALLOC_CONF", "TMPDIR", "CUDA_VISIBLE_DEVICES"}
_OF_SUITE = _OF_RANK | _OF_PROCESS | {"PYTORCH_NVML_BASED_CUDA_CHECK", "TORCH_WARM_POOL"}
_SUITE = ("conformance", "impl", "parity", "reports")
_HASH = " --hash=sha256:"
_BEST = ("--index-strategy", "unsafe-best-match")  # of all indexes, as pip does
_ERROR = re.compile("error|ERROR|\N{MULTIPLICATION SIGN}")  # pip's and uv's
_IGNORED = re.compile("ERROR: Ignored the following .*versions")
_RELEASES = re.compile(r"\(from versions: .*, ((?:[^,()]+, ){3}[^,()]+)\)")
PIN = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)
LOCKED = re.compile(r"^([\w.-]+)(?:\[[^\]]*\])?(?:==| @ )([^\s;\\]+)", re.MULTILINE)  # NAME==VERSION, or NAME @ URL
_NO_PIN = re.compile(rf"^(?!{PIN.pattern[1:]})[^\s#].*?(?= --hash| \\|$)", re.MULTILINE)  # NAME @ URL


class Unmade(Exception):
    """Says why an environment cannot be made, in the installer's words."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Environment:
    """Describes a Python environment.

    requirements: as pip reads them. python: a version such as ``3.12``, or the path of an executable; empty: the
    running interpreter. dependencies: install what the requirements need, too; without it (the default where packages
    are inherited) only the requirements themselves are installed. find_links: folders of wheels in addition to the
    index; in a file, from its folder. index: in addition to the configured one. variables: environment variables of the
    ranks, such as NCCL_ALGO, which are set when their Python starts.
    """

    requirements: tuple[str, ...]
    python: str = ""
    dependencies: bool | None = None
    find_links: tuple[str, ...] = ()
    index: str = ""
    variables: dict[Annotated[str, Field(pattern=_VARIABLE)], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.variables:
            if name.startswith(_TOO_EARLY):
                raise ValueError(f"{name} is read before a rank could set it; set it for the whole command instead")
            if name in _OF_SUITE:
                raise ValueError(f"the suite sets {name}, so that ranks are the same everywhere; leave it out")

    @property
    def inherits(self) -> bool:
        return self.executable == sys.executable

    @property
    def executable(self) -> str:
        """Returns the Python that the environment is made with. Raises Unmade if it is not installed."""
        if self.python in ("", sys.executable, "{}.{}".format(*sys.version_info)):
            return sys.executable
        found = shutil.which(self.python) or shutil.which(f"python{self.python}")
        if not found and _uv():
            return self.python  # uv finds or downloads it
        if not found:
            raise Unmade(f"there is no python{self.python} on PATH; install it, or uv, which downloads it")
        return found


@dataclass(frozen=True, kw_only=True)
class Made:
    """Holds an environment that was made. lock: its exact requirements."""

    python: str
    lock: str

    @property
    def pins(self) -> dict[str, str]:
        """Returns the exact versions of its own packages. Raises UsageError if one is not from an index."""
        if direct := _NO_PIN.search(self.lock):
            raise UsageError(f"{direct[0]!r} is not from an index, whose releases blame bisects; pin NAME==VERSION")
        return {canonical(name): version for name, version in PIN.findall(self.lock)}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _File:
    environments: dict[Annotated[str, Field(pattern=NAME)], Environment] = field(default_factory=dict)


def read_environments(path: Path) -> dict[str, Environment]:
    """Reads the table ``[environments.NAME]`` of a TOML file. Raises UsageError."""
    try:
        found = TypeAdapter(_File).validate_python(read_toml(path)).environments
    except ValidationError as error:
        raise explain(error, source=str(path), what="file of environments") from None
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}; docs/guides/versions.md shows one") from None
    if not found:
        raise UsageError(f"{path} has no environments; write a table [environments.NAME] with requirements")
    return {name: _from(path.parent, one) for name, one in found.items()}


def _from(folder: Path, one: Environment) -> Environment:
    links = (link if "://" in link else str(folder / link) for link in one.find_links)
    return replace(one, find_links=tuple(links))


def make_environment(wanted: Environment) -> Made:
    """Returns an environment with these requirements, which is made if there is none of its lock. Raises Unmade."""
    lock = _resolved(wanted)
    setting = f"import os; os.environ.update({wanted.variables!r})" if wanted.variables else ""
    inherited = _inherited() if wanted.inherits else ()
    base = "\n".join([lock, _version_of(wanted.executable), *inherited, *([setting] if setting else ())])
    folder = cache_folder() / "environments" / hashlib.sha256(base.encode()).hexdigest()[:16]
    made = Made(python=str(folder / "bin" / "python"), lock=lock)
    with locked(folder.with_suffix(".making")):
        if (folder / LOCK).is_file():
            return made
        shutil.rmtree(folder, ignore_errors=True)
        make_venv(folder, wanted.executable, pip=False)
        (packages,) = folder.glob("lib/python*/site-packages")
        _add_suite(packages)
        if inherited:
            lines = [f"import site; site.addsitedir({path!r})" for path in inherited]
            write_file(packages / "inherited.pth", "\n".join([*lines, ""]))
        if setting:
            write_file(packages / "variables.pth", f"{setting}\n")
        if lock:
            write_file(folder / "wanted.txt", lock)
            install(made.python, "--no-deps", *_sources(wanted, uv=_uv()), "-r", str(folder / "wanted.txt"))
        write_file(folder / LOCK, lock)
    return made


def make_venv(folder: Path, python: str = sys.executable, *, pip: bool = True) -> None:
    """Makes an empty environment. pip: with pip in it, unless uv makes it. Raises Unmade."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    options = [] if pip else ["--without-pip"]
    called(["uv", "venv", "--quiet", "--python", python] if _uv() else [python, "-m", "venv", *options], str(folder))


def install(python: str, *arguments: str) -> None:
    """Installs into the environment of ``python``. Raises Unmade with the installer's words."""
    uv = ["uv", "pip", "install", "--quiet", *_BEST, "--python", python]
    called(uv if _uv() else [*_pip(python), "install", "--quiet", "--no-compile"], *arguments)


def called(command: Sequence[str], *arguments: str) -> str:
    """Runs a command of an installer and returns its output. Raises Unmade with its error."""
    extra = {"UV_EXTRA_INDEX_URL": index} if (index := os.environ.get("PIP_EXTRA_INDEX_URL")) else {}
    environment = {**os.environ, **extra, "DS_BUILD_OPS": "0", "PIP_ROOT_USER_ACTION": "ignore"}
    environment.pop("PYTHONPATH", None)  # another Python cannot import what lies there
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()] or ["no output"]
        first = next((place for place, line in enumerate(lines) if _ERROR.match(line)), 0)
        reasons = [_shortened(line.removeprefix("ERROR: ")) for line in lines[first:] if not _IGNORED.match(line)]
        raise Unmade("; ".join(reasons if len(reasons) < 9 else [*reasons[:4], "...", *reasons[-4:]]))
    return done.stdout


def releases(package: str, wanted: Environment) -> list[str]:
    """Returns the releases of a package of which the index has a file for this Python, the oldest first, also those
    that refuse it (Requires-Python). Raises Unmade."""
    options = ["index", "versions", "--ignore-requires-python", *_sources(wanted, uv=False), package]
    output = called([*_pip(sys.executable if wanted.inherits else wanted.executable), *options])
    return output.partition("Available versions: ")[2].partition("\n")[0].split(", ")[::-1]


def _resolved(wanted: Environment) -> str:
    """Returns the lock of the requirements. Raises Unmade."""
    requirements = [*wanted.requirements, *(() if wanted.inherits else OF_RANKS)]
    if not requirements:
        return ""
    with_dependencies = wanted.dependencies if wanted.dependencies is not None else not wanted.inherits
    options = [*([] if with_dependencies else ["--no-deps"]), *_sources(wanted, uv=_uv())]
    if _uv():
        inputs = cache_folder() / "environments" / f"{hashlib.sha256(repr(wanted).encode()).hexdigest()[:16]}.in"
        inputs.parent.mkdir(parents=True, exist_ok=True)
        write_file(inputs, "\n".join(requirements))
        flags = ["--quiet", "--no-header", "--no-annotate", "--generate-hashes", *_BEST, "--python", wanted.executable]
        lock = called(["uv", "pip", "compile", *flags, *options, str(inputs)])
    else:
        flags = ["--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
        command = [*_pip(_bare(wanted)), "install", *flags, *options, *requirements]
        lines = sorted(map(_line, json.loads(called(command))["install"]))
        has_hashes = all(_HASH in line for line in lines)  # pip refuses a file where only some lines have one
        lock = "".join(f"{line if has_hashes else line.partition(_HASH)[0]}\n" for line in lines)
    _check_torch(lock)
    return lock


def _line(package: Mapping[str, Any]) -> str:
    """Returns the line of a lock for a package in pip's report: its version and hash, or its address."""
    about, name = package["download_info"], package["metadata"]["name"]
    hashes = about.get("archive_info", {}).get("hashes", {})
    exact = f"{name} @ {about['url']}" if package["is_direct"] else f"{name}=={package['metadata']['version']}"
    return exact + f"{_HASH}{hashes['sha256']}" if "sha256" in hashes else exact


def _check_torch(lock: str) -> None:
    """Raises Unmade if a lock has torch for CUDA where this interpreter has torch for CPUs."""
    pins = dict(PIN.findall(lock))
    cuda = [name for name in pins if name.startswith("nvidia-c") or (name == "torch" and "+cpu" not in pins[name])]
    if cuda and package_version("torch").endswith("+cpu"):
        raise Unmade(
            f"{cuda[0]} {pins[cuda[0]]} belongs to torch for CUDA, several GB, and this machine has torch for CPUs; "
            f'give index = "https://download.pytorch.org/whl/cpu", or leave torch out, which is inherited'
        )


def _bare(wanted: Environment) -> str:
    """Returns the Python of an empty environment, for which pip resolves."""
    python = wanted.executable
    folder = cache_folder() / "environments" / f"bare-{_version_of(python)}"
    with locked(folder.with_suffix(".making")):
        if not (folder / "pyvenv.cfg").is_file():
            make_venv(folder, python, pip=False)
    return str(folder / "bin" / "python")


def _add_suite(packages: Path) -> None:
    """Links the suite into an environment: its packages, and the metadata with its entry points."""
    for name in _SUITE:
        (packages / name).symlink_to(Path(ROOT) / name)
    (metadata,) = {file.parts[0] for file in distribution("backend-parity").files or () if "METADATA" in file.parts}
    (packages / metadata).symlink_to(Path(str(distribution("backend-parity").locate_file(metadata))))


def _inherited() -> list[str]:
    """Returns the folders of packages of this interpreter."""
    found = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    return [path for path in found if Path(path).is_dir()]


def _sources(wanted: Environment, *, uv: bool) -> list[str]:
    links = [word for link in wanted.find_links for word in ("--find-links", link)]
    # uv reads the indexes of ``called`` by its option --extra-index-url, which would hide them
    return [*links, *(["--index" if uv else "--extra-index-url", wanted.index] if wanted.index else [])]


def _pip(python: str) -> list[str]:
    if PathFinder.find_spec("pip") is None:  # util.find_spec would tell setuptools' finder that this process is pip
        raise Unmade(f"pip is not installed, which lists releases and resolves; run: {sys.executable} -m ensurepip")
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]


def _uv() -> bool:
    return shutil.which("uv") is not None


def _version_of(python: str) -> str:
    if python == sys.executable:
        return ".".join(map(str, sys.version_info[:3]))
    if not shutil.which(python):
        return python  # of uv
    return called([python, "-c", "import sys; print('.'.join(map(str, sys.version_info[:3])))"]).strip()


def _shortened(line: str) -> str:
    line = _RELEASES.sub(r"(the newest: \1)", line)
    return line if len(line) <= 400 else f"{line[:200]} ... {line[-200:]}"
