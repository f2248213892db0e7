"""Tasks that tests/test_deepspeed.py runs in ranks."""

import gc
import importlib
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers

from conformance.batch import read_batches
from conformance.run.exact import exact_tier
from conformance.layout import Layout
from conformance.scenario import parse_scenario
from conformance.world import RankContext
from impl.deepspeed.adapter import DeepspeedBackend
from impl.models import load_model
from impl.ring.attention import register

PATCHED = ("torch", "torch.nn.functional", "torch.nn.modules.module.Module", "torch.Tensor", "torch.optim.Optimizer")


def train(context: RankContext, *, scenario: dict[str, Any], layout: str, weights: str, batches: str) -> dict[str, Any]:
    """One step and a teardown in a world that has seen no engine; says what outlives it."""
    from deepspeed.module_inject.layers import is_autotp_training_mode
    from deepspeed.utils import groups

    register()  # ours, in transformers for good
    before = {name: _attributes(name) for name in PATCHED}
    attention = dict(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS)
    backend = DeepspeedBackend()
    config = parse_scenario(scenario)
    with exact_tier():
        backend.setup(config, Layout.parse(layout), Path(weights), context.device)
        backend.train_step(read_batches(Path(batches))[0], lambda: None)
        model = weakref.ref(backend.strategy.engine.module)  # type: ignore[attr-defined]
        backend.teardown()
    gc.collect()
    held = {name: getattr(groups, name) for name in vars(groups) if name.endswith("_GROUP") or name == "mpu"}
    return {
        "changed": [f"{name}.{key}" for name in PATCHED for key in _changed(before[name], _attributes(name))],
        "attention": attention != dict(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS),
        "groups": [name for name, value in held.items() if value],
        "autotp": is_autotp_training_mode(),
        "model_alive": model() is not None,
    }


def optimizer_state(
    context: RankContext, *, scenario: dict[str, Any], layout: str, weights: str, batches: str
) -> dict[str, float]:
    """Largest error, by state, of AdamW's moments after one step: they follow from its gradients."""
    backend = DeepspeedBackend()
    config = parse_scenario(scenario)
    gradients: dict[str, torch.Tensor] = {}
    with exact_tier():
        backend.setup(config, Layout.parse(layout), Path(weights), context.device)
        backend.train_step(
            read_batches(Path(batches))[0],
            lambda: gradients.update({name: g.clone() for name, g in backend.named_gradients()}),
        )
        first, second = config.optimizer.betas
        errors = {}
        for key, beta, power in (("exp_avg", first, 1), ("exp_avg_sq", second, 2)):
            state = dict(backend.strategy.named_optimizer_state(key))  # type: ignore[attr-defined]
            assert state.keys() == gradients.keys()
            wanted = {name: (1 - beta) * g**power for name, g in gradients.items()}
            errors[key] = max(float((state[n] - w).norm() / w.norm()) for n, w in wanted.items())
        backend.teardown()
    return errors


def save_model(context: RankContext, *, scenario: dict[str, Any], layout: str, weights: str, batches: str) -> list[str]:
    """Names of parameters that a saved model has, and that differ from the folder that it was loaded from."""
    backend = DeepspeedBackend()
    folder = Path(batches).with_name("saved")
    with exact_tier():
        backend.setup(parse_scenario(scenario), Layout.parse(layout), Path(weights), context.device)
        backend.strategy.save_model(folder)
        backend.teardown()
    saved, source = (
        dict(load_model(path, dtype=torch.float64, attention="eager").named_parameters())
        for path in (folder, Path(weights))
    )
    assert saved.keys() == source.keys()
    return [name for name, parameter in saved.items() if not torch.equal(parameter, source[name])]


def _attributes(path: str) -> dict[str, Any]:
    module, _, name = path.rpartition(".")
    owner = importlib.import_module(path) if path.islower() else getattr(importlib.import_module(module), name)
    return dict(vars(owner))


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    changed = (name for name in before.keys() | after.keys() if before.get(name) is not after.get(name))
    # These change nothing: imported submodules of torch, a cache of copyreg's, a helper that transformers hangs there.
    harmless = ("__slotnames__", "smart_apply")
    return sorted(n for n in changed if n not in harmless and not isinstance(after.get(n), ModuleType))
