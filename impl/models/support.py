"""Decides which layouts a Hugging Face model itself supports, whatever the backend; needs no ranks."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from conformance.backends.protocol import Support, Supported, Unsupported
from conformance.core.host import resolve
from conformance.models.folder_checks import Files, files_of, listed_ties, runs_code
from conformance.spec.conventions import model_config
from conformance.spec.layout import Layout
from conformance.spec.observables import MULTI_TOKEN
from conformance.spec.scenario import Scenario
from impl.models.family_quirks import quirks_of


@dataclass(frozen=True, kw_only=True)
class _Model:
    """Holds facts that transformers knows of a model.

    name: the name of its class.
    plan_styles: the styles of its tensor-parallel plan; empty without a plan.
    plan_cuts: whether this plan shards anything in the layers of a model with this configuration.
    takes_attention: whether its attention can be replaced, as far as that is known.
    recurrent: whether layers carry state from token to token.
    """

    name: str
    plan_styles: frozenset[str]
    plan_cuts: bool
    takes_attention: bool
    recurrent: bool


def model_support(scenario: Scenario, layout: Layout, *, has_plan: bool = False, without: str = "use tp1") -> Support:
    """Returns Supported, or Unsupported with the feature that the model lacks for this layout.

    ``has_plan``: the backend has its own tensor-parallel plan, so the model needs none. ``without``: advice for a model
        that has none. Whether code in the model's folder can replace attention is unknown here; a layer that the ring
        does not reach is found when it runs. Raises UsageError if that code has to be run and is not trusted, and if
        there is no causal language model.
    """
    if MULTI_TOKEN in scenario.objective.roles:
        return Unsupported(
            "transformers builds modules for multi-token prediction for drafts only: its MtpModel fails if it is given "
            "labels (docs/findings/transformers-mtp-loss.md); use megatron"
        )
    shards_sequence = layout.sp * layout.ulysses > 1
    if layout.tp == 1 and not shards_sequence:
        return Supported()
    model = _model_of(scenario)
    if model.recurrent:
        return Unsupported(
            f"layers of {model.name} carry state from token to token, which nothing here shards; use tp1 and sp1"
        )
    if layout.tp > 1 and not has_plan and not model.plan_styles:
        return Unsupported(f"{model.name} carries no tensor-parallel plan; {without}")
    if layout.tp > 1 and not has_plan and not model.plan_cuts:
        return Unsupported(f"the tensor-parallel plan of {model.name} shards nothing of this model; {without}")
    if shards_sequence and not model.takes_attention:
        return Unsupported(f"the attention of {model.name} cannot be replaced by ring attention; use sp1")
    return Supported()


def is_older(package: str, *version: int) -> bool:
    """Returns whether the installed package is older than this version, by its first numbers."""
    return tuple(map(int, re.findall(r"\d+", metadata.version(package))[: len(version)])) < version


def compile_support(scenario: Scenario, layout: Layout) -> Support:
    """Returns Supported, or Unsupported with the reason why torch.compile cannot compile the layers of this model."""
    if "compile" not in layout.options:
        return Supported()
    if layout.sp * layout.ulysses > 1:
        return Unsupported("ring attention and Ulysses communicate inside a layer, which is not compiled; use sp1")
    if quirks_of(kind := model_config(scenario).get("model_type")).has_routers:
        return Unsupported(f"the experts of {kind} run one by one, depending on the tokens; leave compile out")
    if (model := _model_of(scenario)).recurrent:
        return Unsupported(f"layers of {model.name} carry state and get documents one by one; leave compile out")
    if scenario.tier.is_exact and is_older("torch", 2, 13) and not torch.cuda.is_available():
        return Unsupported(
            "before 2.13, torch's compiled attention in float64 raises on CPUs in the backward pass "
            "(https://github.com/pytorch/pytorch/issues/185539); use torch 2.13, a GPU, fp32, or leave compile out"
        )
    return Supported()


def dropout_support(scenario: Scenario, layout: Layout) -> Support:
    """Returns Supported, or Unsupported with the reason why a Hugging Face model cannot run with dropout."""
    if "dropout" not in layout.options:
        return Supported()
    if scenario.objective.disable_dropout:
        return Unsupported(f"the objective {scenario.objective.kind} runs models without dropout; leave dropout out")
    if layout.sp * layout.ulysses > 1:
        return Unsupported("the kernels of sp and of Ulysses have no dropout; use sp1, or leave dropout out")
    if "compile" in layout.options:
        return Unsupported("masks that compiled code draws cannot be followed; leave compile or dropout out")
    config = model_config(scenario)
    if layout.tp > 1 and (scenario.lora or any(key in config for key in ("residual_dropout", "resid_pdrop"))):
        return Unsupported(
            "torch draws masks from the generator of each rank, so tensor-parallel ranks would drop other numbers of "
            "activations that all of them hold; use tp1, or megatron"
        )
    return Supported()


def plan_styles(scenario: Scenario) -> frozenset[str]:
    """Returns the styles in the model's own tensor-parallel plan; empty without a plan.

    Raises UsageError as ``model_support`` does.
    """
    return _model_of(scenario).plan_styles


def _model_of(scenario: Scenario) -> _Model:
    folder = resolve(scenario.model)
    return _read(folder, files_of(folder), trusted=scenario.trust_remote_code)


@lru_cache(maxsize=64)
def _read(folder: Path, files: Files, *, trusted: bool) -> _Model:
    """Reads the facts. ``files`` is part of the cache's key: many cells have the same model."""
    # These import transformers, which takes seconds.
    from impl.models.loading import causal_class, older_transformers, read_config, recurrent_modules

    config = read_config(folder, trusted=trusted)
    code = runs_code(folder, trusted=trusted)
    model = causal_class(config, folder, code=code)
    plan: dict[str, str] = config.get_text_config().base_model_tp_plan or {}
    with older_transformers(folder, runs_code=code), torch.device("meta"), listed_ties():
        base = model(config).base_model
    return _Model(
        name=model.__name__,
        plan_styles=frozenset(plan.values()),
        plan_cuts=bool(plan) and _cuts(base, plan),
        takes_attention=code or model._supports_attention_backend,
        recurrent=bool(recurrent_modules(base)),
    )


def _cuts(base: Any, plan: Mapping[str, str]) -> bool:
    """Tells whether a plan names a module or a parameter of the layers, other than to replicate it."""
    names = [*dict(base.named_modules()), *dict(base.named_parameters())]
    keys = [key for key, style in plan.items() if "layers." in key and not style.startswith("replicated")]
    patterns = [re.compile(r"(^|\.)" + re.escape(key).replace(r"\*", r"\d+") + "$") for key in keys]
    return any(pattern.search(name) for pattern in patterns for name in names)
