"""Makes small configurations, and runs trainings in the ranks of a pool, for the tests of training."""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from cells import ranks_of

from conformance.core.host import FIXTURES
from conformance.runtime import Outcome, Pool
from conformance.spec.layout import Layout
from conformance.spec.scenario import parse_scenario
from impl.train.command import TRAIN, read_recipe
from impl.train.config import OutputConfig, RolloutConfig, TrainConfig, to_json
from impl.train.flags import EMBEDDED, ROLLOUT, given_values, merge_values, resolve_options
from impl.train.logging import read_log
from impl.train.options import train_config

ADAMW = {"name": "adamw", "lr": 3e-3, "eps": 1e-8, "max_grad_norm": 1.0}
OF_TIME = {"timing_s/update", "timing_s/rollout", "perf/tokens_per_second", "perf/peak_memory_bytes"}


def training(folder: Path, kind: str, *, backend: str = "fsdp2", layout: str = "dp2", **changes: Any) -> TrainConfig:
    """A tiny training in float64, of three updates; ``changes`` of the scenario, its ``data`` and ``objective``."""
    model = FIXTURES / "models" / changes.pop("model", "llama")
    of_kind = {"path": EMBEDDED[kind], "max_len": 32 if kind in ROLLOUT else 96}
    data = {"rows": 8, **of_kind, **changes.pop("data", {})}
    values = {
        "name": "training",
        "model": str(model),
        "precision": "exact",
        "steps": 3,
        "optimizer": ADAMW,
        "objective": {"kind": kind, **changes.pop("objective", {})},
        "data": data,
        **changes,
    }
    scenario = parse_scenario(values)
    return TrainConfig(
        backend=backend,
        layout=Layout.parse(layout),
        device="cpu",
        scenario=scenario,
        models={role.name: model for role in scenario.objective.roles},
        rollout=RolloutConfig(prompts=2, n_samples_per_prompt=4, max_new_tokens=4) if kind in ROLLOUT else None,
        output=OutputConfig(log=folder / "log.jsonl"),
    )


@dataclass(frozen=True)
class Trainings:
    """Runs trainings on live ranks."""

    pool: Pool
    logs: Path

    def __call__(self, config: TrainConfig, *, fresh: bool = False, **options: Any) -> list[dict[str, Any]]:
        """The lines of the training's log, without what depends on the machine."""
        outcome = self.outcome(config, fresh=fresh, **options)
        assert outcome.state == "done", outcome.reason
        return lines_of(config)

    def outcome(self, config: TrainConfig, *, fresh: bool = False, **options: Any) -> Outcome:
        return self.pool.run(
            key=config.backend,
            config=ranks_of(config.backend, config.layout.world_size),
            task="train_tasks:run_training",
            kwargs={"config": to_json(config), **options},
            log_dir=self.logs,
            budget_s=240.0,
            fresh=fresh,
        )


def lines_of(config: TrainConfig) -> list[dict[str, Any]]:
    _, lines = read_log(config.output.log)
    return [{name: value for name, value in line.items() if name not in OF_TIME} for line in lines]


def writing_to(config: TrainConfig, **output: Any) -> TrainConfig:
    """The training with other outputs."""
    return replace(config, output=replace(config.output, **output))


def assert_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], bound: float) -> None:
    """All numbers of all lines, relative to their size."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        known = {name: number for name, number in one.items() if number is not None}
        assert known == pytest.approx({name: other[name] for name in known}, rel=bound, abs=bound)


TINY = ("--pretrain", "models/pangu", "--max-steps", "4", "--device", "cpu")


def config_of(command: str, backend: str, *said: str, ranks: int | None = None, dry_run: bool = False) -> TrainConfig:
    """What a command line becomes."""
    parser = argparse.ArgumentParser(prog="parity train")
    TRAIN.add_arguments(parser)
    options = parser.parse_args([command, "--backend", backend, *said])
    given = given_values(options, command)
    recipe = read_recipe(options.config, command) if options.config else {}
    resolved = resolve_options(given, recipe, command)
    return train_config(command, resolved, given=merge_values(given, recipe), ranks=ranks, dry_run=dry_run)
