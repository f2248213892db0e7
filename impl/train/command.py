"""The command ``parity train``; conformance/core/plugins.py finds it.

Under torchrun it is a rank of the training; else it starts the ranks. What it does is imported when it is run.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from conformance.core.errors import UsageError
from impl.train.flags import (
    COMMANDS,
    Parser,
    Value,
    add_flags,
    given_values,
    read_recipe,
    resolve_values,
    said_values,
)

RANK = "impl.train.worker"  # the module that is a rank


class Train:
    help = "train with SFT, GRPO or PPO on any backend"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        commands = parser.add_subparsers(dest="train", required=True, metavar="|".join(COMMANDS), parser_class=Parser)
        for command, about in COMMANDS.items():
            one = commands.add_parser(command, help=about, description=about)
            one.add_argument("--config", type=Path, metavar="FILE", help="recipe: TOML or YAML, the options by name")
            one.add_argument("--dry-run", action="store_true", help="print the plan and the memory it takes, and stop")
            add_flags(one, command)

    def run(self, options: argparse.Namespace) -> int:
        """0: done. 1: a rank failed. 2: wrong usage. 128 + a signal: stopped by it, with a checkpoint."""
        command: str = options.train
        given = given_values(options, command)
        recipe = read_recipe(options.config, command) if options.config else {}
        values = resolve_values(given, recipe, command)
        ranks = _ranks_there_are()
        if ranks is not None:
            _check_ranks_asked_for(values["nproc_per_node"])

        from impl.train.options import train_config

        said = said_values(given, recipe)
        config = train_config(command, values, given=said, ranks=ranks, dry_run=options.dry_run)
        if options.dry_run:
            from impl.train.plan import plan

            print(plan(config))
            return 0

        from impl.train.config import to_json

        with tempfile.TemporaryDirectory(prefix="parity-train-") as folder:
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(to_json(config)), encoding="utf-8")
            if ranks is not None:
                from impl.train.worker import main

                return main(str(file))

            from impl.train.launch import run_ranks
            from impl.train.setup import check_inputs

            check_inputs(config)
            start = [sys.executable, "-m", "conformance.core.own_packages", RANK, str(file)]
            return run_ranks(start, ranks=config.layout.world_size, device=config.device)


TRAIN = Train()


def _ranks_there_are() -> int | None:
    """The world's size, under torchrun."""
    if "RANK" not in os.environ:
        return None
    try:
        return int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise UsageError(
            "RANK is set in the environment, but no WORLD_SIZE; start it by torchrun, or unset RANK"
        ) from None


def _check_ranks_asked_for(asked: Value) -> None:
    """Raises UsageError where torchrun has started another number of ranks on this host."""
    there = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    if asked is not None and str(asked) != there:
        raise UsageError(
            f"--nproc-per-node {asked}: torchrun has started {there} ranks on this host; leave it out, or start as many"
        )
