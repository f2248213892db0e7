"""Writes wheels of packages that do not exist, for tests of installers."""

import zipfile
from collections.abc import Mapping
from pathlib import Path

_WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(folder: Path, name: str, version: str, files: Mapping[str, str], more: str = "") -> None:
    """Write a wheel of ``files``. more: further lines of its metadata."""
    folder.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        named = {f"{info}/METADATA": metadata, f"{info}/WHEEL": _WHEEL, f"{info}/RECORD": ""}
        for path, text in {**files, **named}.items():
            file.writestr(path, text)
