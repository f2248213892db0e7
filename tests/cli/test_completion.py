"""A shell completes commands, options and names, by the script that `parity --print-completion` prints."""

import contextlib
import io
import subprocess

import pytest

from conformance.cli import main as cli
from conformance.matrix.profile import profile_names

ASK = """
COMP_WORDS=(parity {words}) COMP_CWORD={last}
_shtab_parity
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def bash() -> str:
    return printed("bash")


def printed(shell: str) -> str:
    """What is printed, by this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as ended:
        cli.main(["--print-completion", shell])
    assert ended.value.code == 0
    return out.getvalue()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("ru", "run"),
        ("run --prof", "--profile"),
        ("run --profile qui", "quick"),
        ("list --backend mega", "megatron"),
        ("run --faults inverted-c", "inverted-clip"),
        ("run --device c", "cuda"),
    ],
)
def test_bash_completes(bash: str, words: str, found: str) -> None:
    asked = bash + ASK.format(words=words, last=len(words.split()))
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=60, check=True)
    assert found in done.stdout.split()
    assert not done.stderr


def test_zsh_knows_the_same_names() -> None:
    script = printed("zsh")
    assert script.startswith("#compdef parity")
    assert f"({' '.join(profile_names())})" in script
