"""Defines backends that do a part of the requested work and claim all of it; all their numbers are right."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from conformance.backends.protocol import StepMetrics, TensorKind
from conformance.spec.batch import Batch
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario
from impl.context_parallel import sequence_sharding
from impl.deepspeed.adapter import DeepspeedBackend
from impl.engine.hugging_face import compile_layers, forget_compiled, layers_of
from impl.fsdp2 import model as fsdp2_model
from impl.fsdp2 import model_parallel
from impl.fsdp2.adapter import Fsdp2Backend
from impl.megatron.adapter import MegatronBackend
from impl.objectives.policy_gradient import SftFunctions


class RestoresNoFrozenWeights(Fsdp2Backend):
    """What nothing trains stays as it was when the model was built."""

    def _frozen(self) -> Iterator[torch.Tensor]:
        for model in self.models.values():
            parameters = model.model.parameters()  # type: ignore[attr-defined]
            yield from (p.detach().to_local() for p in parameters if not p.requires_grad)

    def _keeping(self, load: Any, path: Path) -> None:
        kept = [tensor.clone() for tensor in self._frozen()]
        load(path)
        for tensor, before in zip(self._frozen(), kept, strict=True):
            tensor.copy_(before)

    def load(self, path: Path) -> None:
        self._keeping(super().load, path)

    def import_state(self, path: Path) -> None:
        self._keeping(super().import_state, path)


class Fsdp2RecomputesOneLayer(Fsdp2Backend):
    """All but the first layer keep their activations."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        resolved = super().setup(*arguments)
        for model in self.models.values():
            for layer in model.model.model.layers[1:]:  # type: ignore[attr-defined]
                layer.gradient_checkpointing = False
        return resolved


class CompilesOneLayer(Fsdp2Backend):
    """All but the first layer run as they are written."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        def first_only(model: Any, **options: Any) -> None:
            written = [type(layer) for layer in layers_of(model)]
            compile_layers(model, **options)
            for layer, kind in list(zip(layers_of(model), written, strict=True))[1:]:
                layer.__class__ = kind

        with patch("impl.fsdp2.model.compile_layers", first_only):
            return super().setup(*arguments)


class CompilesUnasked(Fsdp2Backend):
    """What compiles without being asked for it may be as fast as it says, but another cell shows it."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        resolved = super().setup(*arguments)
        for model in self.models.values():
            for layer in model.model.model.layers:  # type: ignore[attr-defined]
                layer.compile()
        return resolved

    def teardown(self) -> None:
        super().teardown()
        forget_compiled()


class GathersOneLayer(DeepspeedBackend):
    """Of all but the first layer, ZeRO-3 gathers the weights of each module by itself."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        from deepspeed.utils import set_z3_leaf_module  # half a second for each rank of another backend

        def first_only(model: Any, _: Any) -> None:
            set_z3_leaf_module(model.model.layers[0], True)

        with patch("impl.deepspeed.model.set_z3_leaf_modules", first_only):
            return super().setup(*arguments)


class MegatronRecomputesOneLayer(MegatronBackend):
    """All but the first layer of a rank keep their activations."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        resolved = super().setup(*arguments)
        for model in self.models.values():
            for chunk in model.chunks:  # type: ignore[attr-defined]
                chunk.config.recompute_method, chunk.config.recompute_num_layers = "block", 1
        return resolved


class CutsOneLayer(Fsdp2Backend):
    """Tensor-parallel ranks hold all but the first layer whole, and all do the work of these."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        plan, given = model_parallel._layer_plan, []

        def first_only(*kind: Any, **options: Any) -> dict[str, Any]:
            given.append(kind)
            return plan(*kind, **options) if len(given) == 1 else {}

        with patch.object(model_parallel, "_layer_plan", first_only):
            return super().setup(*arguments)


class CutsExpertsOfOneLayer(Fsdp2Backend):
    """Ranks of ``ep`` share the experts of the last layer, and hold those of the others whole."""

    def setup(self, *arguments: Any) -> dict[str, Any]:
        found = model_parallel.experts_of
        with (
            patch.object(fsdp2_model, "experts_of", lambda model: found(model)[-1:]),
            patch.object(model_parallel, "experts_of", lambda model: found(model)[-1:]),
        ):
            return super().setup(*arguments)


class ComputesAttentionInFloat32(Fsdp2Backend):
    """Of a model in half precision, MLPs are in it, and all else is in float32."""

    def setup(self, scenario: Scenario, layout: Layout, *arguments: Any) -> dict[str, Any]:
        def shard(own: fsdp2_model.Fsdp2Model, model: Any) -> None:
            mesh = own.reduction_mesh()
            for layer in model.model.layers:
                half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
                fully_shard(layer.mlp, mesh=mesh, mp_policy=half)
                layer.mlp.register_forward_hook(lambda _, __, output: output.float())
            fully_shard(model, mesh=mesh)

        with patch.object(fsdp2_model.Fsdp2Model, "_shard", shard):
            return super().setup(scenario, layout, *arguments)


class ExportsOtherSettings(Fsdp2Backend):
    """What it exports has the right weights and other settings, in whose place it reads those of before."""

    def setup(self, scenario: Scenario, layout: Layout, weights: Mapping[str, Path], device: str) -> dict[str, Any]:
        for folder in weights.values():
            for kept in folder.rglob("*.kept"):
                if dist.get_rank() == 0:
                    shutil.copy(kept, kept.with_suffix(""))
        dist.barrier()
        return super().setup(scenario, layout, weights, device)

    def export(self, path: Path, model: str) -> None:
        super().export(path, model)
        dist.barrier()
        if dist.get_rank() == 0:
            for name, key in ("config.json", "rms_norm_eps"), ("adapter/adapter_config.json", "lora_alpha"):
                if (path / name).is_file():
                    shutil.copy(path / name, path / f"{name}.kept")
                    settings = json.loads((path / name).read_text())
                    (path / name).write_text(json.dumps({**settings, key: 100 * settings[key]}))


class ReusesItsMasks(Fsdp2Backend):
    """Every micro-batch of a step draws the masks of dropout that the first one drew."""

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        model: Any = self.models["policy"].model  # type: ignore[attr-defined]
        states: list[torch.Tensor] = []

        def set_back(*_: Any) -> None:
            states.append(torch.get_rng_state())
            torch.set_rng_state(states[0])

        handle = model.register_forward_pre_hook(set_back)
        try:
            return super().train_step(batch, on_gradients)
        finally:
            handle.remove()


class SkipsChunkEdges(Fsdp2Backend):
    """The last target of each chunk of 256 positions has no gradient; its log-prob, loss and count are as they should
    be."""

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        evaluate = SftFunctions.evaluate

        def skipping(functions: Any, model: str, outputs: Any, *rest: Any, **named: Any) -> Any:
            logprobs = outputs.logprobs.flatten()
            edges = torch.arange(len(logprobs), device=logprobs.device) % 256 == 255
            kept = torch.where(edges, logprobs.detach(), logprobs).view(outputs.logprobs.shape)
            return evaluate(functions, model, replace(outputs, logprobs=kept), *rest, **named)

        with patch.object(SftFunctions, "evaluate", skipping):
            return super().train_step(batch, on_gradients)


class ShowsAShadow(Fsdp2Backend):
    """One weight of a norm stays as it was in the model, and what it should have become is shown and updated."""

    kept: torch.Tensor | None = None
    shadow: torch.Tensor | None = None

    def _own(self) -> torch.Tensor:
        model: Any = self.models["policy"].model  # type: ignore[attr-defined]
        own: torch.Tensor = model.model.layers[0].input_layernorm.weight.detach().to_local()
        return own

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        if self.kept is None or self.shadow is None:
            self.kept = self.shadow = self._own().clone()
        updated = self.shadow

        def before_update(model: str) -> None:
            on_gradients(model)
            self._own().copy_(updated)

        metrics = super().train_step(batch, before_update)
        self.shadow = self._own().clone()
        self._own().copy_(self.kept)
        return metrics

    def named_tensors(self, kind: TensorKind, model: str) -> Any:
        if kind == "weight" and self.shadow is not None:
            self._own().copy_(self.shadow)
        yield from super().named_tensors(kind, model)
        if kind == "weight" and self.kept is not None:
            self._own().copy_(self.kept)


class LooksUpOtherTokens(Fsdp2Backend):
    """Looks up the tokens of zigzag parts, as requested, and those of contiguous parts, which it trains on."""

    def setup(self, scenario: Scenario, layout: Layout, *arguments: Any) -> dict[str, Any]:
        options = tuple("ring" if option == "zigzag" else option for option in layout.options)
        return super().setup(scenario, replace(layout, options=options), *arguments)

    def train_step(self, batch: Batch, on_gradients: Callable[[str], None]) -> StepMetrics:
        embedding = self.models["policy"].model.get_input_embeddings()  # type: ignore[attr-defined]
        place, shard_inputs = sequence_sharding.place, sequence_sharding.shard_inputs
        requested: list[torch.Tensor] = []

        def placed(inputs: Any, **named: Any) -> Any:
            source = place(inputs, **{**named, "zigzag": True}).source[dist.get_rank()]
            requested.append(shard_inputs(inputs, source).tokens)
            return place(inputs, **named)

        def also(module: Any, _: Any) -> None:
            torch.nn.functional.embedding(requested[-1], module.weight)

        hook = embedding.register_forward_pre_hook(also)
        with patch.object(sequence_sharding, "place", placed):
            metrics = super().train_step(batch, on_gradients)
        hook.remove()
        return metrics
