"""Runs the oracle in a worker group of one rank. The module stands alone, because a forkserver imports it and forks."""

from pathlib import Path
from typing import Any

from conformance.oracle.run import run_oracle
from conformance.runtime import RankContext
from conformance.spec.batch import read_batches
from conformance.spec.known_defects import parse_defects
from conformance.spec.scenario import parse_scenario


def run(
    rank: RankContext,
    *,
    scenario: dict[str, Any],
    models: dict[str, str],
    batches: str,
    out: str,
    policy: str,
    restarts: list[int],
    merges: list[int],
    defects: list[dict[str, Any]],
    trusted: bool,
) -> None:
    """Calls ``run_oracle`` with arguments that are given as JSON values."""
    rank.beat(policy)
    run_oracle(
        scenario=parse_scenario(scenario),
        models={role: Path(folder) for role, folder in models.items()},
        batches=read_batches(Path(batches)),
        out=Path(out),
        policy_name=policy,
        restarts=restarts,
        merges=merges,
        defects=parse_defects(defects),
        device=rank.device,
        trusted=trusted,
    )
