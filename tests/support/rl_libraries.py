"""Loads functions of verl, TRL and OpenRLHF from the source files of their distributions, without their imports.

The libraries are pure Python, but importing them imports ray, vLLM and more. So a single file of theirs is executed,
with stand-ins in sys.modules for imports that the functions under test never call; or, where a formula sits in a method
of a trainer, that method is taken out of its file and called with a plain object for ``self``. Nothing that is tested
is replaced or typed anew: stand-ins are names for annotations, classes of configurations, and what gathers over ranks.

``scripts/third-opinion`` fetches the distributions; only VERSIONS are accepted, which docs/explanations/objectives.md
speaks of, and ``library==version`` of an earlier one.
"""

import __future__

import ast
import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

VERSIONS = {"verl": "0.9.1", "trl": "1.16.0", "openrlhf": "0.11.2"}
FOLDER = Path(__file__).resolve().parents[2] / ".third-opinion"
EARLIER = FOLDER / "earlier"


@cache
def root(library: str) -> Path:
    """Where the distribution lies. Skips the test that asks if it is not there."""
    name, _, version = library.partition("==")
    version = version or VERSIONS[name]
    for distribution in importlib.metadata.distributions(name=name, path=[str(FOLDER), str(EARLIER), *sys.path]):
        if distribution.version == version:
            return Path(str(distribution.locate_file("")))
    pytest.skip(f"{name} {version} is not here; scripts/third-opinion fetches it")


class _StandIn(ModuleType):
    """A module with every name that is asked for: classes that nothing can be done with."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": _refuse})


def _refuse(self: object, *arguments: object, **named: object) -> None:
    raise AssertionError(f"{type(self).__name__} is a stand-in, which no tested function may call")


class _Finder(MetaPathFinder, Loader):
    """Finds the ``real`` modules in the files of ``folder``, and stand-ins for all else below ``names``."""

    def __init__(self, folder: Path, real: Sequence[str], names: Sequence[str], given: Mapping[str, Mapping[str, Any]]):
        self.folder, self.real, self.names, self.given = folder, real, names, given

    def covers(self, name: str) -> bool:
        return name.partition(".")[0] in self.names

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname in self.real:
            return spec_from_file_location(fullname, self.folder / (fullname.replace(".", "/") + ".py"))
        return ModuleSpec(fullname, self, is_package=True) if self.covers(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.given.get(module.__name__, {}))


def load(
    library: str, real: Sequence[str], *, names: Sequence[str], given: Mapping[str, Mapping[str, Any]] | None = None
) -> list[ModuleType]:
    """The modules ``real`` of a library, executed from their files; what else they import below ``names`` stands in."""
    finder = _Finder(root(library), real, names, given or {})
    before = {name: module for name, module in sys.modules.items() if finder.covers(name)}
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        return [importlib.import_module(name) for name in real]
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if finder.covers(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def taken_out(library: str, file: str, name: str, **known: Any) -> Callable[..., Any]:
    """The function ``name`` ("Class.method" or "function") of a file, compiled alone; ``known`` are its globals."""
    path = root(library) / file
    found: Any = ast.parse(path.read_text(encoding="utf-8"))
    for part in name.split("."):
        found = next(each for each in found.body if getattr(each, "name", None) == part)
    found.decorator_list = []
    alone = ast.Module(body=[found], type_ignores=[])
    scope: dict[str, Any] = {"torch": torch, **known}
    exec(compile(alone, path, "exec", flags=__future__.annotations.compiler_flag), scope)
    function: Callable[..., Any] = scope[found.name]
    return function


@cache
def verl() -> SimpleNamespace:
    """verl's functions: ``core``, ``rollout``, ``kl_penalty_in_rewards``, ``ppo_loss`` and the class of a config."""

    class ActorConfig(SimpleNamespace):
        """The attributes of verl's class of this name; only ``get`` is its own."""

        def get(self, name: str, default: Any = None) -> Any:
            return getattr(self, name, default)

    core, rollout, functional, groups, metric, _ = load(
        "verl",
        [
            "verl.trainer.ppo.core_algos",
            "verl.trainer.ppo.rollout_corr_helper",
            "verl.utils.torch_functional",
            "verl.utils.groupwise",
            "verl.utils.metric.utils",
            "verl.utils.import_utils",
        ],
        names=["verl", "omegaconf", "tensordict", "transformers"],
        given={"verl.workers.config": {"ActorConfig": ActorConfig}},
    )
    # verl.utils, which core_algos has these from, is a stand-in.
    vars(core).update(as_torch_index=groups.as_torch_index, group_mean_std=groups.group_mean_std)
    penalty = taken_out(
        "verl",
        "verl/trainer/ppo/ray_trainer.py",
        "apply_kl_penalty",
        core_algos=core,
        masked_mean=functional.masked_mean,
    )
    ppo_loss = taken_out(
        "verl",
        "verl/workers/utils/losses.py",
        "ppo_loss",
        no_padding_2_padding=lambda tensor, data: tensor,  # everything here is padded already
        get_policy_loss_fn=core.get_policy_loss_fn,
        agg_loss=core.agg_loss,
        kl_penalty=core.kl_penalty,
        Metric=metric.Metric,
        AggregationType=metric.AggregationType,
    )
    return SimpleNamespace(
        core=core, rollout=rollout, kl_penalty_in_rewards=penalty, ppo_loss=ppo_loss, ActorConfig=ActorConfig
    )


@cache
def openrlhf() -> SimpleNamespace:
    """OpenRLHF's modules ``loss`` and ``utils``, and its ``maker`` of experience, the class."""
    loss, utils, maker, _ = load(
        "openrlhf",
        [
            "openrlhf.models.loss",
            "openrlhf.models.utils",
            "openrlhf.trainer.ppo_utils.experience_maker",
            "openrlhf.trainer.ppo_utils.length_penalty",
        ],
        names=["openrlhf", "deepspeed", "ray"],
        given={"openrlhf.utils.logging_utils": {"init_logger": logging.getLogger}},
    )
    training_step = taken_out(
        "openrlhf",
        "openrlhf/trainer/ray/ppo_actor.py",
        "ActorPPOTrainer.training_step",
        compute_approx_kl=utils.compute_approx_kl,
        masked_mean=utils.masked_mean,
        aggregate_loss=loss.aggregate_loss,
        fields=lambda experience: [],  # of the numbers to log
        Experience=None,
    )
    return SimpleNamespace(loss=loss, utils=utils, maker=maker.RemoteExperienceMaker, training_step=training_step)


@cache
def trl() -> SimpleNamespace:
    """TRL's methods: ``score`` and ``loss`` of the GRPO trainer, ``rloo_score`` of the RLOO trainer."""
    import contextlib
    import math

    import numpy as np

    helpers: dict[str, Any] = {
        name: taken_out("trl", "trl/trainer/utils.py", name, np=np) for name in ("pad", "nanstd", "nanmin", "nanmax")
    }
    helpers |= {
        "math": math,
        "gather": lambda tensor: tensor,  # of one process
        "gather_object": lambda each: each,
        "disable_gradient_checkpointing": lambda model, arguments: contextlib.nullcontext(),
    }
    grpo, rloo = "trl/trainer/grpo_trainer.py", "trl/trainer/rloo_trainer.py"
    return SimpleNamespace(
        score=taken_out("trl", grpo, "GRPOTrainer._generate_and_score_completions", **helpers),
        loss=taken_out("trl", grpo, "GRPOTrainer._compute_loss", **helpers),
        rloo_score=taken_out("trl", rloo, "RLOOTrainer._generate_and_score_completions", **helpers),
        rloo_loss=taken_out("trl", rloo, "RLOOTrainer._compute_loss", **helpers),
    )


@contextmanager
def float64_by_default() -> Iterator[None]:
    """What is made without a dtype is float64: TRL divides integers, and makes tensors of lists."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class NoFloat32(TorchFunctionMode):
    """float64 for ``Tensor.float()``, in which OpenRLHF has KL estimates and whitening, and for quotients of integers,
    of which verl's whitening makes a float32 whatever the dtype of the advantages."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        if func in (torch.Tensor.div, torch.Tensor.__truediv__) and not any(
            a.is_floating_point() for a in args if isinstance(a, torch.Tensor)
        ):
            args = (args[0].double(), args[1])
        return func(*args, **(kwargs or {}))
