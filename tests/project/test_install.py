"""Tests scripts/install with a stand-in for Python that records what it is asked to install."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "install"
PYTHON = """#!/bin/bash
[ "$1" = -V ] && { echo "Python 3.14.0"; exit; }
echo "$@" >> asked
[[ "$*" != *"$LACKING"* ]] || { echo "ERROR: No matching distribution found for x"; exit 1; }
"""


@pytest.mark.parametrize("lacking", ["megatron", "deepspeed", "none"])
def test_install_leaves_out_a_backend_without_a_wheel(tmp_path: Path, lacking: str) -> None:
    python = tmp_path / ".venv" / "bin" / "python"
    for folder in (tmp_path / "scripts", python.parent):
        folder.mkdir(parents=True)
    script = shutil.copy(SCRIPT, tmp_path / "scripts")
    python.write_text(PYTHON)
    python.chmod(0o755)
    done = subprocess.run([script], env={**os.environ, "LACKING": lacking}, capture_output=True, text=True)
    words = f"left out: {lacking}, which cannot be installed for Python 3.14.0: ERROR: No matching distribution"
    assert (words in done.stderr) == (lacking != "none")
    assert done.returncode == 0
    asked = (tmp_path / "asked").read_text()
    extras = ("data,lora,report", "deepspeed", "megatron", "ring")
    assert f"--group dev --editable .[{','.join(extras)}]\n" in asked
    assert all((f".[{extra}]\n" in asked) == (lacking != "none") for extra in extras)
    assert (tmp_path / ".venv" / ".installed").exists()
