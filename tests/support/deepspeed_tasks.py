"""Tasks that tests/deepspeed_backend/test_deepspeed.py runs in ranks."""

import contextlib
import gc
import importlib
import json
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo.utils as dynamo
import torch.distributed as dist
import transformers

from conformance.core.errors import UsageError
from conformance.numerics.float64_tier import exact_tier
from conformance.runtime import RankContext
from conformance.spec.batch import read_batches
from conformance.spec.layout import Layout
from conformance.spec.observables import StateKind
from conformance.spec.scenario import OptimizerConfig, Scenario, ScheduleConfig, parse_scenario
from impl.context_parallel.ring_attention import NAME, register
from impl.deepspeed.adapter import DeepspeedBackend
from impl.deepspeed.global_state import exchange_heads
from impl.deepspeed.model import DeepspeedContext, DeepspeedModel
from impl.interface.micro_batches import collate
from impl.interface.trainable import ContextConfig
from impl.models.loading import load_model
from impl.models.lora import named_parameters

PATCHED = ("torch", "torch.nn.functional", "torch.nn.modules.module.Module", "torch.Tensor", "torch.optim.Optimizer")


@contextlib.contextmanager
def set_up(
    context: RankContext, scenario: dict[str, Any], layout: str, models: dict[str, str]
) -> Iterator[DeepspeedBackend]:
    """A backend that is torn down in the end, in the exact tier if the scenario is."""
    config = parse_scenario(scenario)
    backend = DeepspeedBackend()
    with exact_tier() if config.precision == "exact" else contextlib.nullcontext():
        folders = {role: Path(folder) for role, folder in models.items()}
        backend.setup(config, Layout.parse(layout), folders, context.device)
        yield backend
        backend.teardown()


def train(context: RankContext, *, batches: str, **training: Any) -> dict[str, Any]:
    """Two steps and a teardown in a worker group that has seen no engine; says what outlives it."""
    from deepspeed.module_inject.layers import is_autotp_training_mode
    from deepspeed.utils import groups

    register()  # ours, in transformers for good
    before = {name: _attributes(name) for name in PATCHED}
    attention = dict(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS)
    with set_up(context, **training) as backend:
        for batch in read_batches(Path(batches))[:2]:
            backend.train_step(batch, lambda model: None)
        model = weakref.ref(backend.models["policy"].engine.module)  # type: ignore[attr-defined]
    gc.collect()
    held = {name: getattr(groups, name) for name in vars(groups) if name.endswith("_GROUP") or name == "mpu"}
    return {
        "changed": [f"{name}.{key}" for name in PATCHED for key in _changed(before[name], _attributes(name))],
        "attention": attention != dict(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS),
        "groups": [name for name, value in held.items() if value],
        "autotp": is_autotp_training_mode(),
        "model_alive": model() is not None,
    }


def kept_weights(context: RankContext, *, batches: str, **training: Any) -> int:
    """How many views of weights a step keeps for its backward passes. Each keeps a weight that ZeRO-3 has gathered."""
    views = 0

    def noted(kept: torch.Tensor) -> torch.Tensor:
        nonlocal views
        views += kept.ndim == 2 and not kept.is_contiguous() and kept.untyped_storage().data_ptr() in gathered()
        return kept

    with set_up(context, **training) as backend:
        module = backend.models["policy"].engine.module  # type: ignore[attr-defined]

        def gathered() -> set[int]:
            return {weight.untyped_storage().data_ptr() for weight in module.parameters() if weight.ndim == 2}

        with torch.autograd.graph.saved_tensors_hooks(noted, lambda kept: kept):
            backend.train_step(read_batches(Path(batches))[0], lambda model: None)
    return views


def compiled_code(context: RankContext, *, batches: str, **training: Any) -> list[str]:
    """The files of the functions that a step has compiled."""
    dynamo.clear_compilation_metrics()
    with set_up(context, **training) as backend:
        backend.train_step(read_batches(Path(batches))[0], lambda model: None)
    return sorted({metrics.co_filename or "" for metrics in dynamo.get_compilation_metrics()})


def holdings(context: RankContext) -> dict[str, int]:
    """What the rank holds between two tasks."""
    things = gc.get_objects()
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "models": sum(isinstance(thing, transformers.PreTrainedModel) for thing in things),
        "parameters": sum(isinstance(thing, torch.nn.Parameter) for thing in things),
    }


def one_beside_another(
    context: RankContext, *, scenario: dict[str, Any], layout: str, models: dict[str, str], batches: str
) -> dict[str, Any]:
    """Two contexts with a model each; the first is trained and left, then the second. Both do the same.

    The second has been asked for log-probs before, without a backward pass. Says whether weights are equal bit by bit,
    and what is left of the exchange of heads when only one of them is, and when none is.
    """
    config = parse_scenario(scenario)
    register()
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    plain, weights = functions[NAME], []
    with exact_tier():
        opened = [_opened(context, config, layout, Path(models["policy"])) for _ in range(2)]
        batch = read_batches(Path(batches))[0]
        replaced = []
        for number, (inside, trainable) in enumerate(opened):
            inputs = [collate(rows) for rows in inside.setup_dataloader(batch)]
            if number == 1:
                asked = trainable.forward_backward(inputs, want=frozenset({"logprobs"}), loss=None)
                assert all(outputs.entropy is None for outputs in asked)
            trainable.forward_backward(
                inputs,
                want=frozenset({"logprobs"}),
                loss=lambda index, outputs: -torch.as_tensor(outputs.logprobs).sum() / 1000,
            )
            trainable.finish_gradients()
            trainable.optimizer_step()
            weights.append({name: tensor.clone() for name, tensor in trainable.named_tensors("weight")})
            trainable.teardown()
            inside.teardown()
            replaced.append(functions[NAME] is not plain)
    return {"equal": all(torch.equal(w, weights[1][name]) for name, w in weights[0].items()), "replaced": replaced}


def _opened(
    context: RankContext, config: Scenario, layout: str, folder: Path
) -> tuple[DeepspeedContext, DeepspeedModel]:
    inside = DeepspeedContext(_context_config(context, config, layout))
    inside.setup_distributed()
    trainable = inside.new_trainable("causal")
    trainable.prepare(trainable.load_model(folder), config.optimizer, config.schedule)
    return inside, trainable


def _context_config(context: RankContext, config: Scenario, layout: str) -> ContextConfig:
    return ContextConfig(
        layout=Layout.parse(layout),
        precision=config.precision,
        device=context.device,
        accumulation=config.accumulation,
        packed=config.data.packed,
    )


def refusals(context: RankContext, *, batches: str, **training: Any) -> list[str]:
    """What is said to a second context that cuts otherwise, and to a model with other heads; under Ulysses."""
    config = parse_scenario(training["scenario"])
    said = []
    with set_up(context, **training) as backend:
        other = DeepspeedContext(_context_config(context, config, f"tp{context.world_size}"))
        group = backend.context.mesh.get_group("ulysses")  # type: ignore[attr-defined]
        small = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=8
        )
        model = transformers.LlamaForCausalLM(small)
        for refused in (
            other.setup_distributed,
            lambda: exchange_heads(model, size=context.world_size, tp=1, group=group),
        ):
            try:
                refused()
            except UsageError as error:
                said.append(str(error))
    return said


def cut_by_tensor_parallelism(context: RankContext, *, layout: str, model: str) -> list[str]:
    """Names of the parameters of a value model that AutoTP has cut."""
    config = ContextConfig(
        layout=Layout.parse(layout), precision="fp32", device=context.device, accumulation=1, packed=True
    )
    inside = DeepspeedContext(config)
    inside.setup_distributed()
    trainable = inside.new_trainable("value")
    trainable.prepare(trainable.load_model(Path(model)), OptimizerConfig(name="sgd", lr=1), ScheduleConfig())
    cut = [shard.name for shard in trainable.local_shards("weight") if shard.region.startswith("tp")]
    trainable.teardown()
    inside.teardown()
    return cut


def half_precision(context: RankContext, *, batches: str, **training: Any) -> dict[str, Any]:
    """One step; says whether oneDNN computes in float16 here, in what the model did, and how far the weights went."""
    with set_up(context, **training) as backend:
        before = {name: weight.clone() for name, weight in backend.named_tensors("weight", "policy")}
        backend.train_step(read_batches(Path(batches))[0], lambda model: None)
        moved = [float((weight - before[name]).norm()) for name, weight in backend.named_tensors("weight", "policy")]
        computed = backend.models["policy"].resolved()["compute_dtype"]
    return {
        "onednn": torch.ops.mkldnn._is_mkldnn_fp16_supported(),
        "computed": computed,
        "moved": min(moved) > 0 and bool(torch.tensor(moved).isfinite().all()),
    }


def optimizer_state(context: RankContext, *, batches: str, **training: Any) -> dict[str, float]:
    """Largest error, by state, of AdamW's moments after one step: they follow from its gradients."""
    config = parse_scenario(training["scenario"])
    gradients: dict[str, torch.Tensor] = {}
    with set_up(context, **training) as backend:
        backend.train_step(
            read_batches(Path(batches))[0],
            lambda model: gradients.update({n: g.clone() for n, g in backend.named_tensors("gradient", model)}),
        )
        first, second = config.optimizer.betas
        errors: dict[str, float] = {}
        moments: tuple[tuple[StateKind, float, int], ...] = (("exp_avg", first, 1), ("exp_avg_sq", second, 2))
        for key, beta, power in moments:
            state = dict(backend.named_tensors(key, "policy"))
            assert state.keys() == gradients.keys()
            wanted = {name: (1 - beta) * g**power for name, g in gradients.items()}
            errors[key] = max(float((state[n] - w).norm() / w.norm()) for n, w in wanted.items())
    return errors


def save_checkpoint(context: RankContext, *, batches: str, **training: Any) -> None:
    """One step, and DeepSpeed's own checkpoint after it."""
    with set_up(context, **training) as backend:
        backend.train_step(read_batches(Path(batches))[0], lambda model: None)
        backend.save(Path(batches).with_name("saved"))


def load_checkpoint(context: RankContext, *, batches: str, **training: Any) -> dict[str, Any]:
    """What is said to one who loads it, whether weights have changed then, and what is in its folder after all."""
    folder, said = Path(batches).with_name("saved"), ""
    with set_up(context, **training) as backend:
        before = {name: tensor.clone() for name, tensor in backend.named_tensors("weight", "policy")}
        try:
            backend.load(folder)
        except UsageError as error:
            said = str(error)
        after = dict(backend.named_tensors("weight", "policy"))
    changed = any(not torch.equal(tensor, before[name]) for name, tensor in after.items())
    return {"said": said, "changed": changed, "left": sorted(path.name for path in folder.iterdir())}


def numbered(name: str, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """A region of a tensor whose elements tell where they are."""
    places = [torch.arange(at, at + size, dtype=torch.float64) for at, size in zip(start, shape, strict=True)]
    return sum(grid * 1e-3**n / 512 for n, grid in enumerate(torch.meshgrid(*places, indexing="ij")))  # type: ignore[return-value]


def rewritten(context: RankContext, *, batches: str, **training: Any) -> dict[str, bool]:
    """Of every frozen parameter that is written after a step, whether it is what was written."""
    with set_up(context, **training) as backend:
        backend.train_step(read_batches(Path(batches))[0], lambda model: None)
        policy: Any = backend.models["policy"]
        policy.tensors.write_frozen(numbered)
        return _numbered(policy)


def save_numbered(context: RankContext, *, batches: str, **training: Any) -> None:
    """One step, and a checkpoint after it; frozen parameters are not those of the model's folder."""
    with set_up(context, **training) as backend:
        backend.models["policy"].tensors.write_frozen(numbered)  # type: ignore[attr-defined]
        backend.train_step(read_batches(Path(batches))[0], lambda model: None)
        backend.save(Path(batches).with_name("saved"))


def load_numbered(context: RankContext, *, batches: str, **training: Any) -> dict[str, bool]:
    """Of every frozen parameter, whether it is the checkpoint's."""
    with set_up(context, **training) as backend:
        backend.load(Path(batches).with_name("saved"))
        return _numbered(backend.models["policy"])


def _numbered(policy: Any) -> dict[str, bool]:
    """Of every frozen parameter, whether its elements tell where they are."""
    frozen = {name for name, p in named_parameters(policy.model) if not p.requires_grad}
    weights = {name: tensor for name, tensor in policy.named_tensors("weight") if name in frozen}
    return {name: torch.equal(t, numbered(name, [0] * t.ndim, t.shape)) for name, t in weights.items()}


def progress(context: RankContext, *, batches: str, **training: Any) -> dict[str, float]:
    """What is told of the progress after it has been set to other numbers than training begins with, and one step."""
    with set_up(context, **training) as backend:
        backend.models["policy"].set_progress({"schedule": 3.0, "loss_scale": 512.0, "good_steps": 7.0})
        backend.train_step(read_batches(Path(batches))[0], lambda model: None)
        return {name: float(number) for name, number in backend.named_tensors("progress", "policy")}


def save_model(
    context: RankContext, *, scenario: dict[str, Any], layout: str, models: dict[str, str], batches: str
) -> list[str]:
    """Names of parameters that a saved model has, and that differ from the folder that it was loaded from."""
    folder, source = Path(batches).with_name(f"saved {layout}"), Path(models["policy"])
    with set_up(context, scenario, layout, models) as backend:
        backend.export(folder, "policy")
        told, before = (json.loads((path / "config.json").read_text()) for path in (folder, source))
        assert told == before | {"dtype": "float64"}
        saved, loaded = (
            dict(load_model(path, dtype=torch.float64, attention="eager").named_parameters())
            for path in (folder, source)
        )
    assert saved.keys() == loaded.keys()
    return [name for name, parameter in saved.items() if not torch.equal(parameter, loaded[name])]


def _attributes(path: str) -> dict[str, Any]:
    module, _, name = path.rpartition(".")
    owner = importlib.import_module(path) if path.islower() else getattr(importlib.import_module(module), name)
    return dict(vars(owner))


def _changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    changed = (name for name in before.keys() | after.keys() if before.get(name) is not after.get(name))
    # These change nothing: imported submodules of torch, a cache of copyreg's, a helper that transformers hangs there.
    harmless = ("__slotnames__", "smart_apply")
    return sorted(n for n in changed if n not in harmless and not isinstance(after.get(n), ModuleType))
