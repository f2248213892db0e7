"""Runs the command ``parity train``, which conformance/core/packages.py finds, by its options and those of a recipe.

Under torchrun this process is a rank of the training; otherwise it starts the ranks. Slow imports happen when the
command runs.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from conformance.core.errors import UsageError, one_line, shown
from conformance.core.io import MIB, read_text, read_toml
from conformance.spec.objectives import BUILT_IN
from impl.train.flags import (
    COMMANDS,
    EMBEDDED,
    ROLLOUT,
    Parser,
    TrainOptions,
    Value,
    add_flags,
    flags_of,
    given_values,
    merge_values,
    not_trained,
    resolve_options,
    unknown_option,
    written,
)
from impl.train.rewards import ARITHMETIC, reward_name

RANK = "impl.train.launch"  # the module that runs a rank


class Train:
    help = "train with SFT, GRPO, PPO, preferences, reward models or distillation on any backend"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        commands = parser.add_subparsers(dest="train", required=True, metavar="|".join(COMMANDS), parser_class=Parser)
        commands.advice = {kind: not_trained(kind) for kind in BUILT_IN if kind not in COMMANDS}  # type: ignore[attr-defined]
        for command, about in COMMANDS.items():
            one = commands.add_parser(command, help=about, description=about)
            one.add_argument("--config", type=Path, metavar="FILE", help="recipe: TOML or YAML, the options by name")
            one.add_argument("--dry-run", action="store_true", help="print the plan and the memory it takes, and stop")
            add_flags(one, command)

    def run(self, options: argparse.Namespace) -> int:
        """Returns the exit code.

        0: done. 1: a rank failed. 2: wrong usage. 128 + a signal: stopped by the signal, with a checkpoint.
        """
        command: str = options.train
        given = given_values(options, command)
        recipe = read_recipe(options.config, command) if options.config else {}
        resolved = resolve_options(given, recipe, command)
        ranks = _torchrun_ranks()
        if ranks is not None:
            _check_requested_ranks(resolved.nproc_per_node)
        if os.environ.get("RANK", "0") == "0":
            print(summary(resolved, command), flush=True)

        from impl.train.options import train_config

        explicit = merge_values(given, recipe)
        config = train_config(command, resolved, given=explicit, ranks=ranks, dry_run=options.dry_run)
        if options.dry_run:
            from impl.train.plan import plan

            print(plan(config))
            return 0

        from impl.train.config import to_json

        with os.fdopen(os.memfd_create("config.json"), "w", encoding="utf-8") as file:  # of which a kill leaves nothing
            json.dump(to_json(config), file)
            file.flush()
            path = f"/proc/self/fd/{file.fileno()}"
            if ranks is not None:
                from impl.train.launch import main

                return main(path)

            from impl.train.launch import run_ranks
            from impl.train.setup import check_inputs

            check_inputs(config)
            start = [sys.executable, "-m", "conformance.core.packages", RANK, path]
            size, device = config.layout.world_size, config.device
            return run_ranks(start, ranks=size, device=device, inherited=[file.fileno()])


TRAIN = Train()


def read_recipe(path: Path, command: str) -> dict[str, Value]:
    """Reads the options in a TOML file, or in a YAML file if its name ends in .yaml or .yml.

    Raises UsageError for an unreadable file, an unknown option, an option of another command, and a value of another
    type.
    """
    try:
        values = _read_yaml(path) if path.suffix in (".yaml", ".yml") else read_toml(path)
    except FileNotFoundError:
        raise UsageError(f"there is no recipe {path}; give --config a TOML or YAML file") from None
    flags = flags_of(command)
    found: dict[str, Value] = {}
    for name, value in values.items():
        if (flag := flags.get(name)) is None:
            raise UsageError(f"{path}: {unknown_option(str(name), command)}")
        if not flag.in_recipe:
            raise UsageError(f"{path}: {name} is not allowed in a recipe; use the option {written(name)}")
        found[name] = flag.typed(value, source=str(path))
    return found


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(read_text(path, limit=MIB))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UsageError(f"{path} is not valid YAML: {one_line(error)}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold options (name: value), got {shown(values)}")
    return values


def summary(options: TrainOptions, command: str) -> str:
    """Describes what is trained on what; needs no slow import, so that a user sees it at once."""
    data = options.dataset or f"{EMBEDDED[command]}, embedded in the package (--dataset gives your own)"
    parts = [f"{command} of {options.pretrain} on {options.backend}", f"data: {data}"]
    if command in ROLLOUT:
        by_default = "" if options.reward else " (--reward gives another)"
        parts.append(f"reward: {reward_name(options.dataset or ARITHMETIC, options.reward)}{by_default}")
    return "; ".join(parts)


def _torchrun_ranks() -> int | None:
    """Returns the number of ranks under torchrun; None without torchrun."""
    if "RANK" not in os.environ:
        return None
    try:
        return int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        raise UsageError(
            "RANK is set in the environment, but WORLD_SIZE is not; start with torchrun, or unset RANK"
        ) from None


def _check_requested_ranks(requested: int | None) -> None:
    """Raises UsageError if torchrun has started another number of ranks on this host."""
    started = os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    if requested is not None and str(requested) != started:
        raise UsageError(
            f"--nproc-per-node {requested}: torchrun has started {started} ranks on this host; leave it out, or start "
            f"as many"
        )
