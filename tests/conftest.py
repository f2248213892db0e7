"""What several test files share: one session, and so its worker groups, one cache of oracle records, and a browser."""

import gc
import os
import shutil
import signal
import time

# Before torch is imported: threads that wait for each other keep the cores busy, which workers and ranks share.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser, running
from report_sample import write_sample

from conformance.backends.protocol import BackendEntry, find_backend
from conformance.core.host import FIXTURES
from conformance.matrix.cell import Cell, Phase
from conformance.models.synthetic import with_skeleton
from conformance.runner import phases
from conformance.runner.placement import SessionConfig
from conformance.runner.session import Session
from conformance.runtime import Pool
from conformance.runtime.gpu_inventory import gpus_of_host
from conformance.runtime.gpu_leases import Ticket, lease_folder
from conformance.spec.layout import Layout
from conformance.spec.precision import PrecisionName
from conformance.spec.scenario import load_scenario
from reports.html import write_html

# Files that take long come first: a worker runs a file whole, and none is to be left over at the end.
LONG = (
    # By the processor time of the fast cases, the longest first.
    "test_cells_deepspeed",
    "test_faults",
    "test_resume",
    "test_liars",
    "test_conventions",
    "test_clips",
    "test_recording_libraries",
    "test_cells_fsdp2",
    "test_cells_stored",
    "test_foreign_packages",
    "test_weight_updates",
    "test_cells_megatron",
    "test_environments",
    "test_fsdp2_models",
    "test_reports",
    "test_at_once",
    "test_claims",
    "test_commands_in_docs",
    "test_pytest_plugin",
    "test_cli",
    "test_train",
    "test_any_model",
    "test_oracle_run",
    "test_worker_groups",
    "test_backend",
    "test_bisect",
    "test_report_causes",
    "test_leased_cells",
    "test_cells_rl",
    "test_engines",
    "test_step_cost",
    "test_deepspeed",
    "test_ring_attention",
    "test_megatron_models",
    "test_rl_unobserved",
    "test_cli_usage",
    "test_state_deepspeed",
    "test_files",
    "test_worker_group_failures",
    "test_train_launch",
    "test_worker_group_processes",
    "test_determinism",
    "test_real_size",
    "test_side_by_side",
    "test_cli_stops",
    "test_third_opinion_losses",
    "test_sampling",
    "test_belongs",
    "test_mixture",
    "test_oracle",
    "test_profile",
    "test_third_opinion_preferences",
    "test_mixture_cells",
    "test_judge_rebuild",
    "test_board",
    "test_report_page",
    "test_matrix_blame",
    "test_train_options",
    "test_precision",
    "test_oracle_cache",
    "test_checkpoint_trainers",
    "test_sketch",
    "test_runs_lines",
    "test_checkpoints",
    "test_architecture",
    "test_third_opinion_advantages",
    "test_fixtures",
    "test_frozen",
    "test_isolation",
    "test_published_code",
    "test_judge_evidence",
    "test_objective_kinds",
    "test_leased_oracles",
    "test_forms",
    "test_train_memory",
    "test_expressions",
    "test_known_differences",
    "test_mps",
    "test_folder",
    "test_map_in_forks",
    "test_recording",
    "test_fuzz_records",
    "test_judge",
    "test_replicas",
    "test_recording_bounds",
    "test_runs_command",
    "test_reports_ci",
    "test_runs_real",
    "test_frames",
    "test_step_reads",
    "test_real_data",
    # These take long with the slow cases, or with those of the nightly.
    "test_faults_rl",
    "test_faults_handover",
    "test_bisect_runs",
    "test_hosts",
    "test_report_browser",
    "test_report_controls",
    "test_expert_families",
    "test_shards",
    "test_history",
    "test_report_sides",
    "test_handover",
    "test_recording_diff",
    "test_checkpoint_files",
    "test_bisect_cells",
    "test_recipes",
    "test_wheel",
    "test_mutation_score",
    "test_worker_group_limits",
    "test_compiling",
    "test_cells_a_minute",
    "test_rl_math",
    "test_outputs",
    "test_toy_objectives",
    "test_loading_memory",
    "test_checkpoint_damage",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {stem: place for place, stem in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempts what is imported and collected from garbage collection: meanwhile it takes a sixth of the time, and later
    each full one looks at all of it for 0.3 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _draws() -> None:
    """The steps that ranks draw are the same in each run of pytest."""
    phases.DRAW = 0


@pytest.fixture(scope="session", autouse=True)
def _oracle_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The oracle's records of this run of pytest, for all its workers; nothing of an earlier run is used."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["PARITY_CACHE"] = str(shared / "oracle-cache")


@pytest.fixture
def foreground() -> Iterator[None]:
    """SIGINT as programs in the foreground of a terminal have it, here and in processes that are started: where pytest
    itself runs in the background of a shell's script, it inherits a SIGINT that is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with Session(SessionConfig(out=tmp_path_factory.mktemp("session"), budget_s=120.0)) as session:
        yield session


@pytest.fixture(scope="session")
def pool(session: Session) -> Pool:
    """The session's own, so that a worker imports each backend once, for cells and for tests of other tasks."""
    return session._pool


@pytest.fixture
def leased_gpus() -> Iterator[None]:
    """Leases all GPUs of this host, as a cell does, so that no other worker of pytest and no run fills them."""
    ticket = Ticket(gpus := gpus_of_host(), len(gpus), folder=lease_folder())
    while (lease := ticket.serve()) is None:
        time.sleep(0.1)
    yield
    lease.release()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    yield from running()


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the sample of a run. Tests write nothing but reports into it."""
    return write_sample(tmp_path_factory.mktemp("sample") / "out")


@pytest.fixture(scope="session")
def address(sample: Path) -> str:
    """Returns the address of the sample's report."""
    return write_html(sample).as_uri()


@pytest.fixture
def out(sample: Path, tmp_path: Path) -> Path:
    """Returns a copy of the sample that a test may damage."""
    return Path(shutil.copytree(sample, tmp_path / "out"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For copies of models that several tests change alike."""
    return tmp_path_factory.mktemp("models")


def make_cell(
    scenario: str,
    model: str,
    layout: str,
    precision: PrecisionName,
    *,
    faults: tuple[str, ...] = (),
    backend: BackendEntry | None = None,
    scenarios: Path = FIXTURES / "scenarios",
    rows: int | None = None,
    expected: tuple[str, ...] = ("*",),
    **overrides: Any,
) -> Cell:
    """A cell of the built-in fixtures; ``overrides`` are fields of the scenario, ``rows`` those of an optimizer step.

    The scenario ``sft-warmup`` is saved after two steps and goes on in fresh processes.
    """
    file, data = scenarios / f"{scenario}.toml", {"rows": rows} if rows else {}
    folder = with_skeleton(f"models/{model}")
    config = load_scenario(file, data_overrides=data, model=folder, precision=precision, **overrides)
    chosen, parsed = backend or find_backend("fsdp2"), Layout.parse(layout)
    if scenario == "sft-warmup":
        before = Phase(backend=chosen, layout=parsed, steps=2, save="checkpoint")
        after = Phase(backend=chosen, layout=parsed, steps=config.steps - 2)
        return Cell(scenario=config, phases=(before, after), program="resume", faults=faults, expected=expected)
    return Cell.single(scenario=config, backend=chosen, layout=parsed, faults=faults, expected=expected)
