"""Selects the cells for pytest, and holds one session per pytest worker.

All workers collect the same cells in the same order. Before the first cell runs, one worker writes every cell to the
output folder as not run. Then each worker writes the verdicts of the cells that it runs.
"""

import shutil
import warnings
from collections.abc import Iterator, Sequence

import pytest

from conformance.backends.registry import codes
from conformance.bisect.run import any_differs, bisect_run
from conformance.core import packages
from conformance.core.errors import UsageError
from conformance.core.host import HostResources, host_resources_of, resolve
from conformance.data.inputs import input_digests
from conformance.matrix.cell import Cell
from conformance.matrix.plan import Plan, make_plan
from conformance.runner.placement import SessionConfig
from conformance.runner.preflight import Refusals, check_device, check_resources, leased_gpus
from conformance.runner.session import Session
from conformance.runtime.gpu_leases import unleased_use
from conformance.runtime.multihost.controller import hosts_of_engine
from conformance.suite.plugin import (
    NOT_BISECTED,
    OUT,
    USAGE,
    check_of,
    demands,
    is_on_hosts,
    is_worker,
    may_bisect,
    merge,
    portion,
    ranks,
    selection,
    stop_at_signals,
)

packages.prefer()

PLAN_KEY = pytest.StashKey[Plan]()
ON_HOSTS = pytest.StashKey[Session]()  # the session that has started the cells, on several hosts


def pytest_sessionstart(session: pytest.Session) -> None:
    """Warns about GPU memory used by processes without a lease; only the controller of pytest-xdist does so."""
    config = session.config
    if is_worker(config) or config.option.collectonly or is_on_hosts(config) or ranks(config).device == "cpu":
        return
    for message in unleased_use(leased_gpus(ranks(config))):
        config.issue_config_time_warning(pytest.PytestWarning(message), stacklevel=2)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" not in metafunc.fixturenames:
        return
    cells: list[Cell] = []
    if OUT not in metafunc.config.stash:
        raise pytest.Collector.CollectError("the suite needs its pytest plugin; omit -p no:parity")
    try:
        config = metafunc.config
        where = ranks(config)
        check_device(where)
        plan = config.stash[PLAN_KEY] = make_plan(selection(config), demands(config), portion(config), ranks=where)
        cells = list(plan.cells)
        if where.device == "cuda":  # worker groups of one size at a time leave no GPU idle
            cells.sort(key=lambda cell: -cell.world_size)
    except UsageError as error:
        metafunc.config.stash[USAGE] = str(error)
    metafunc.parametrize("cell", cells, ids=str)


@pytest.hookimpl(tryfirst=True)  # before xdist learns that this worker is ready, and lets the other workers start
def pytest_collection_finish(session: pytest.Session) -> None:
    """Writes the cells that remain after options such as -k to the output folder; only the worker that creates the
    folder does this."""
    config = session.config
    calls = [getattr(item, "callspec", None) for item in session.items]
    cells = [call.params["cell"] for call in calls if call and isinstance(call.params.get("cell"), Cell)]
    if not cells or config.option.collectonly:
        return
    if is_on_hosts(config):
        _begin_on_hosts(config, cells)
        return
    try:
        _check_room(cells, config)
    except UsageError as error:
        if not is_worker(config):
            raise pytest.UsageError(str(error)) from None
        session.items.clear()
        config.workeroutput["parity_usage"] = str(error)  # type: ignore[attr-defined]
        return
    stop_at_signals(config)
    try:
        (config.stash[OUT] / "cells").mkdir(parents=True)
    except FileExistsError:
        return
    with suite_session(config) as suite:
        suite.announce(cells)


def _begin_on_hosts(config: pytest.Config, cells: Sequence[Cell]) -> None:
    """Waits for the hosts, and starts all cells. Each test waits for its cell."""
    stop_at_signals(config)
    session = suite_session(config)
    try:
        config.stash[ON_HOSTS] = session.__enter__()
        config.add_cleanup(lambda: _end_on_hosts(config))
        session.announce(cells)
        session.begin(cells)
    except UsageError as error:
        _end_on_hosts(config)
        shutil.rmtree(session.config.out, ignore_errors=True)  # nothing was run
        raise pytest.UsageError(str(error)) from None


def _end_on_hosts(config: pytest.Config) -> None:
    session = config.stash.get(ON_HOSTS, None)
    if session is not None:
        del config.stash[ON_HOSTS]
        session.__exit__()


def _check_room(cells: Sequence[Cell], config: pytest.Config) -> None:
    """Raises UsageError if memory or disk do not suffice for the cells that can run, one in every worker.

    All workers compare with the resources that their controller measured, so that all decide the same.
    """
    where = ranks(config)
    refusals = Refusals(where.device, ranks_per_gpu=where.ranks_per_gpu)
    able = [cell for cell in cells if not refusals.refusal(cell, resolve(cell.scenario.model))]

    def warn(message: str) -> None:
        warnings.warn(pytest.PytestWarning(message), stacklevel=2)

    given = getattr(config, "workerinput", {})
    resources = HostResources(**given["parity_resources"]) if given else host_resources_of(config.stash[OUT])
    check_resources(able, resources, device=where.device, warn=warn, workers=given.get("workercount", 1))


def suite_session(config: pytest.Config) -> Session:
    """Makes a session with the configuration of ``parity run``, so that a cell's reproduce command runs it again."""
    chosen, where, cells = selection(config), ranks(config), config.stash[PLAN_KEY].cells
    hosts = hosts_of_engine(ranks_per_gpu=where.ranks_per_gpu)
    config_of_all = SessionConfig(
        out=config.stash[OUT],
        device=where.device,
        profile=chosen.profile_name,
        arguments=(*chosen.arguments(without="cells"), *where.arguments()),
        gpus=() if hosts else leased_gpus(where),  # hosts lease their own
        ranks_per_gpu=where.ranks_per_gpu,
        hosts=hosts,
        budget_s=where.budget,
        floor=config.stash[PLAN_KEY].floor,
        selected=config.stash[PLAN_KEY].digest,
        selection=chosen.text(where),
        inputs=input_digests(cell.scenario for cell in cells)
        | codes(phase.backend for cell in cells for phase in cell.phases),
    )
    return Session(config_of_all, check=check_of(config))


@pytest.fixture(scope="session")
def parity_session(pytestconfig: pytest.Config) -> Iterator[Session]:
    on_hosts = pytestconfig.stash.get(ON_HOSTS, None)
    if on_hosts is not None:
        yield on_hosts
        out = on_hosts.config.out
        merge(out, compare=False)
        if may_bisect(pytestconfig) and any_differs(out):  # while there are hosts
            lines = pytestconfig.stash.setdefault(NOT_BISECTED, [])
            bisect_run(on_hosts, pytestconfig.stash[PLAN_KEY].cells, say=lines.append)
        _end_on_hosts(pytestconfig)
        return
    with suite_session(pytestconfig) as session:
        yield session
