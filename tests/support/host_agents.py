"""Agents on this machine, as if each were a host: what the tests of several hosts share."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conformance.runtime.multihost.controller import Fleet, Hosts
from conformance.runtime.multihost.handshake import SECRET
from conformance.runtime.preload_server import absolute_path

A_SECRET = secrets.token_hex(32)
Process = subprocess.Popen[str]


def environment(secret: str = A_SECRET) -> dict[str, str]:
    return {**os.environ, SECRET: secret, "PYTHONPATH": os.pathsep.join(absolute_path())}


@contextmanager
def agent(address: str, *, slots: int = 1, secret: str = A_SECRET, code: str = "pass") -> Iterator[Process]:
    """`parity agent`; ``code`` is run before it in its process."""
    start = f"import sys; {code}; from conformance.cli.agent import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", start, address, "--slots", str(slots)],
        env=environment(secret),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def fleet(count: int, folder: Path) -> Iterator[Fleet]:
    os.environ[SECRET] = A_SECRET
    made = Fleet(Hosts(count=count, listen="127.0.0.1:0"), device="cpu", folder=folder)
    try:
        yield made
    finally:
        made.close()


def is_true_soon(ask: object, *, limit_s: float = 30.0) -> bool:
    assert callable(ask)
    deadline = time.monotonic() + limit_s
    while not ask() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(ask())
