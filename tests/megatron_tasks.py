"""Tasks that tests/test_megatron.py runs in ranks."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from conformance.batch import read_batches
from conformance.run.exact import exact_tier
from conformance.layout import Layout
from conformance.scenario import parse_scenario
from conformance.world import RankContext
from conformance.world.process import thread_count
from impl.megatron.adapter import MegatronBackend


def _backend(scenario: dict[str, Any], layout: str, weights: str, device: str) -> MegatronBackend:
    backend = MegatronBackend()
    backend.setup(parse_scenario(scenario), Layout.parse(layout), Path(weights), device)
    return backend


def train_in_turn(
    context: RankContext, *, scenario: dict[str, Any], layout: str, weights: str, batches: str, layouts: list[str]
) -> list[dict[str, Any]]:
    """One step and a teardown in each layout; says what is held after each."""
    batch = read_batches(Path(batches))[0]
    held = []
    for text in layouts:
        backend = _backend(scenario, text, weights, context.device)
        backend.train_step(batch, lambda: None)
        model = weakref.ref(backend.strategy.chunks[0])  # type: ignore[attr-defined]
        backend.teardown()
        gc.collect()
        held.append(
            {
                "groups": len(dist.distributed_c10d._world.pg_map),
                "fds": sum(1 for _ in Path("/proc/self/fd").iterdir()),
                "threads": thread_count(),
                "environment": sorted(name for name in os.environ if name.startswith("NVTE")),
                "cuda": torch.cuda.current_device.__module__,
                "model_alive": model() is not None,
            }
        )
    return held


def save(context: RankContext, *, scenario: dict[str, Any], layout: str, weights: str, batches: str, out: str) -> None:
    """Write the model as it was loaded."""
    backend = _backend(scenario, layout, weights, context.device)
    backend.strategy.save_model(Path(out))
    backend.teardown()


def optimizer_state(
    context: RankContext, *, scenario: dict[str, Any], layout: str, weights: str, batches: str
) -> dict[str, float]:
    """Largest error, by state, of AdamW's moments after one step: they follow from its clipped gradients."""
    gradients: dict[str, torch.Tensor] = {}
    config = parse_scenario(scenario)
    with exact_tier():
        backend = _backend(scenario, layout, weights, context.device)
        metrics = backend.train_step(
            read_batches(Path(batches))[0],
            lambda: gradients.update({name: g.clone() for name, g in backend.named_gradients()}),
        )
        assert metrics.grad_norm is not None
        assert config.optimizer.max_grad_norm is not None
        clip = min(1.0, config.optimizer.max_grad_norm / (metrics.grad_norm + 1e-6))
        first, second = config.optimizer.betas
        errors = {}
        for key, beta, power in (("exp_avg", first, 1), ("exp_avg_sq", second, 2)):
            state = dict(backend.strategy.named_optimizer_state(key))  # type: ignore[attr-defined]
            assert state.keys() == gradients.keys()
            wanted = {name: (1 - beta) * (clip * g) ** power for name, g in gradients.items()}
            errors[key] = max(float((state[n] - w).norm() / w.norm()) for n, w in wanted.items())
        backend.teardown()
    return errors


def go_on_elsewhere(
    context: RankContext, *, scenario: dict[str, Any], layout: str, weights: str, batches: str, other: str, out: str
) -> float:
    """Two steps, a checkpoint, two steps more: in the first layout, and in another from the checkpoint.

    Largest relative difference of a weight between the two.
    """
    steps = read_batches(Path(batches))
    with exact_tier():
        backend = _backend(scenario, layout, weights, context.device)
        for batch in steps[:2]:
            backend.train_step(batch, lambda: None)
        if context.rank == 0:
            Path(out).mkdir()
        dist.barrier()
        backend.save(Path(out))
        ends = []
        for way in (layout, other):
            if way != layout:
                backend.teardown()
                backend = _backend(scenario, way, weights, context.device)
                backend.load(Path(out))
            for batch in steps[2:4]:
                backend.train_step(batch, lambda: None)
            ends.append({name: weight.detach().clone() for name, weight in backend.named_weights()})
        backend.teardown()
    stayed, moved = ends
    assert stayed.keys() == moved.keys()
    return max(float((moved[name] - weight).norm() / weight.norm()) for name, weight in stayed.items())


def values(context: RankContext, *, scenario: dict[str, Any], layout: str, weights: str, batches: str) -> float:
    """A model with one value per token, against transformers' hidden states and the same head: largest difference."""
    from megatron.core import parallel_state

    from impl.collate import collate
    from impl.megatron.attention import Documents
    from impl.megatron.convert import HEAD
    from impl.megatron.model import build_chunk, transformer_config
    from impl.megatron.placement import placed
    from impl.megatron.process import ModelParallel
    from impl.megatron.shape import read_shape
    from impl.megatron.stages import stages
    from impl.megatron.tensors import fill, parameter_names
    from impl.ring.attention import RingAttention, RingConfig

    asked = Layout.parse(layout)
    shape = read_shape(Path(weights), head="value")
    parts = stages(layers=shape.layers, pp=1, vpp=1)
    file = load_file(Path(weights) / "model.safetensors")
    file["score.weight"] = torch.linspace(-1, 1, shape.hidden)[None]
    inputs = collate(read_batches(Path(batches))[0].rows[:2])
    with exact_tier(), placed(context.device, exact=True), torch.no_grad():
        process = ModelParallel()
        process.enter(asked)
        config = transformer_config(shape, asked, "exact", parts)
        chunk = build_chunk(config, shape, parts, 0)
        for name, parameter in chunk.named_parameters():
            whole = parameter_names(chunk)[name]
            assert whole != HEAD or parameter.shape == (1, shape.hidden)
            fill(parameter, whole, shape, lambda n, dim, start, stop: file[n].narrow(dim, start, stop - start))
        settings = RingConfig(kind="llama3", packed=True, shipped=False, head_stride=1, multiple=asked.tp)
        ring = RingAttention(parallel_state.get_context_parallel_group(), settings)
        own, placing = ring.shard(inputs)
        documents = Documents(positions=own.positions, ring=placing)
        found = chunk(own.tokens, own.positions, None, packed_seq_params=documents)[..., 0]  # (1, length)
        rows, length = inputs.tokens.shape
        found = ring.restore(found, placing, rows=rows, length=length)
        process.leave()
        model = transformers.AutoModelForCausalLM.from_pretrained(
            weights, dtype=torch.float64, attn_implementation="eager", trust_remote_code=True
        ).model
        hidden = model(input_ids=inputs.tokens, position_ids=inputs.positions, use_cache=False).last_hidden_state
        wanted = (hidden @ file["score.weight"][0].double()).where(inputs.real, 0)
    return float((found - wanted).abs().max() / wanted.abs().max())
