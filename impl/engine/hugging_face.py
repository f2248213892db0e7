"""Loads, compiles, calls and writes a Hugging Face model: what the backends that run one have in common.

A multimodal model gets the images of a micro-batch, and positions for packed rows. transformers' own positions of
images (M-RoPE, arXiv 2409.12191 section 2.1) need one document per row, so they are counted here: a text token has one
number for time, height and width; the tokens of an image count each axis from the number after the text before them,
and the text behind goes on after the largest.

`parity bisect` compares activations of the modules that a rank runs, which ``hugging_face_modules`` lists.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from conformance.backends.protocol import Cut, NamedTensors, TensorKind, Traced, TracedModule
from conformance.spec.batch import GRID, IMAGE, PIXEL
from conformance.spec.layout import DROPOUT_RATE
from conformance.spec.observables import Head
from conformance.spec.scenario import OptimizerConfig
from impl.context_parallel.ring_attention import NAME, MeshContext, forward_over_ring
from impl.engine.adapter import set_dropout
from impl.engine.optimizers import Replicas, parameter_groups, stored_optimizer, torch_optimizer, trained_parameters
from impl.interface.micro_batches import (
    Loss,
    MicroBatch,
    Outputs,
    RouterTerms,
    Wanted,
    run_micro_batches,
    token_numbers,
)
from impl.interface.trainable import Dtype
from impl.models.export import write_merged, write_model
from impl.models.family_quirks import quirks_of
from impl.models.lazy_weights import WRAPPED
from impl.models.loading import empty_model
from impl.models.lora import load_adapter, named_parameters
from impl.models.router import Routers, with_router_terms

WHOLE = Cut()
# The oracle's names inside of a layer. Outside of layers there are embed_tokens, norm and lm_head.
CUT_OUTPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
FUSED = ("self_attn.qkv_proj", "mlp.gate_up_proj")  # Phi-3 has these instead
CUT_INPUTS = ("self_attn.o_proj", "mlp.down_proj")
BETWEEN = (  # on the residual stream
    "input_layernorm",
    "self_attn",
    "linear_attn",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "mlp",
    "post_feedforward_layernorm",
)


class HuggingFaceModel:
    """Implements a part of impl.interface.trainable.Trainable, which has the contract of each method."""

    source: Path
    model: transformers.PreTrainedModel
    skipped: bool = False
    routers: Routers | None = None
    adapter: Path | None = None  # the folder of the adapter, if the model has one

    def __init__(self, context: MeshContext, head: Head) -> None:
        self.context, self.head = context, head
        self.options = context.config.layout.options

    def load_model(self, path: Path) -> transformers.PreTrainedModel:
        """Builds the model without its numbers; ``prepare`` reads those that this rank holds."""
        self.source = path
        attention = NAME if self.context.ring else None
        dtype = self.context.config.tier.kept.dtype
        trusted = self.context.config.trust_remote_code
        model = empty_model(path, dtype=dtype, attention=attention, head=self.head, trusted=trusted)
        if "dropout" in self.options:
            set_dropout(model, DROPOUT_RATE)
        return model

    def add_adapter(self, model: transformers.PreTrainedModel, folder: Path) -> None:
        load_adapter(model, folder)
        self.adapter = folder
        if "dropout" in self.options:
            set_dropout(model, DROPOUT_RATE)

    def parameter_groups(self, model: transformers.PreTrainedModel, config: OptimizerConfig) -> list[dict[str, Any]]:
        matrices = [p for name, p in named_parameters(model) if config.orthogonalizes(name, p.dim())]
        return parameter_groups(trained_parameters(model, config), config, matrices=matrices)

    def create_optimizer(self, model: transformers.PreTrainedModel, config: OptimizerConfig) -> torch.optim.Optimizer:
        groups = self.parameter_groups(model, config)
        if self.context.config.tier.stored:
            stochastic = self.context.config.tier.is_stochastic
            return stored_optimizer(groups, config, stochastic=stochastic, replicas=self.replicas())
        device = "cpu" if "offload" in self.options else self.context.config.device
        return torch_optimizer(groups, config, device=device, precision=self.context.config.precision)

    def replicas(self) -> Replicas | None:
        """Identifies parameters that several ranks hold and have to round to equal numbers; None if there are none."""
        return None

    def forward(self, inputs: MicroBatch, *, want: Wanted, temperature: float) -> Outputs:
        outputs = partial(self.own_outputs, want=want, temperature=temperature)
        return forward_over_ring(self.context.ring, inputs, outputs)

    def run(
        self,
        inputs: Sequence[MicroBatch],
        *,
        want: Wanted,
        temperature: float,
        loss: Loss | None,
        terms: RouterTerms | None,
    ) -> list[Outputs]:
        """Runs all micro-batches, and with a loss moves the routers' biases; see Trainable.forward_backward."""
        whole = with_router_terms(loss, terms, inputs)
        outputs = run_micro_batches(self, inputs, want=want, temperature=temperature, loss=whole)
        if loss is not None and self.routers:
            self.routers.move_biases(self.context, inputs, outputs)
        return outputs

    def start_micro_batch(self, index: int, count: int) -> None:
        raise NotImplementedError

    def backward(self, loss: torch.Tensor) -> None:
        raise NotImplementedError

    def own_outputs(self, inputs: MicroBatch, *, want: Wanted, temperature: float, **options: Any) -> Outputs:
        """Returns the outputs of the tokens that this rank holds, in the shape of ``inputs``."""
        raise NotImplementedError

    def gradient_scale(self) -> float:
        """Returns the factor for the loss: the number of ranks that the library averages gradients over."""
        raise NotImplementedError

    @property
    def router_loss_factor(self) -> float:
        return self.routers.loss_factor if self.routers else 0.0

    def traced(self, numbers: Sequence[MicroBatch]) -> Traced:
        tp, ring = self.context.config.layout.tp, self.context.ring
        tp_rank = self.context.mesh.get_local_rank("tp")
        vocabulary = -(-self.model.config.vocab_size // tp)  # as torch.chunk cuts it
        modules = hugging_face_modules(
            self.model,
            tp=tp,
            tp_rank=tp_rank,
            sequence="seqpar" in self.options,
            vocabulary_start=tp_rank * vocabulary if "losspar" in self.options else 0,
        )
        parts = [ring.shard(whole)[0] if ring else whole for whole in numbers]
        return Traced(
            modules=modules,
            tokens=tuple(token_numbers(part) for part in parts),
            gradient_scale=self.gradient_scale(),
        )

    def named_tensors(self, kind: TensorKind) -> NamedTensors:
        raise NotImplementedError

    def resolved_model(self, compute: torch.dtype) -> dict[str, Any]:
        """Returns the part of ``resolved`` that describes model, mesh and context parallelism."""
        mesh, ring = self.context.mesh, self.context.ring
        return {
            "model_class": type(self.model).__name__,
            "attention": self.model.config._attn_implementation,
            "mesh": dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)),
            "ring": ring.resolved(self.context.config.device, compute) if ring else None,
            "compiled": "compile" in self.options,
        }

    def save_model(self, path: Path, *, dtype: Dtype = "source") -> None:
        weights = self.named_tensors("weight")
        write_model(path, source=self.source, weights=weights, dtype=dtype, adapter=self.adapter)

    def save_merged(self, path: Path, *, dtype: Dtype = "source") -> None:
        write_merged(path, dtype=dtype, write=self.save_model, trusted=self.context.config.trust_remote_code)


def resolved_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the part of ``resolved`` that describes an optimizer of torch."""
    group = optimizer.param_groups[0]
    return {
        "optimizer": type(optimizer).__name__,
        "optimizer_defaults": {k: v for k, v in group.items() if isinstance(v, (int, float, str, bool, tuple))},
    }


def layers_of(model: transformers.PreTrainedModel) -> list[torch.nn.Module]:
    """Returns the layers of a model: the modules that its class lists in ``_no_split_modules``."""
    kinds = model._no_split_modules or ()
    return [module for module in model.modules() if type(module).__name__ in kinds]


def recompute_activations(model: transformers.PreTrainedModel, options: Collection[str]) -> None:
    """Recomputes the activations of each layer in the backward pass, if the layout has the option ``ckpt``."""
    if "ckpt" in options:
        model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in options})
    if "reentrant" in options:
        model.enable_input_require_grads()  # a layer is differentiated only if its inputs are, whatever its weights


def compile_layers(model: transformers.PreTrainedModel, *, deterministic: bool, shipped: bool) -> None:
    """Marks each layer to be compiled by torch.compile at its first call, and again for other lengths.

    Each layer is compiled separately, so layers of one kind share their code. Sharding, recomputation and hooks stay
    outside of the compiled code; torch would compile hooks again for each layer of a DeepSpeed engine. Embedding, last
    norm and head run uncompiled.

    Call this function after tensor parallelism, and before anything wraps the layers.

    deterministic: several ranks compute the same numbers, as with tensor parallelism, so all take the same kernels, not
        the fastest by each rank's clock (docs/findings/inductor-ranks-choose.md).
    shipped: upstream behaviour: the embedding gets no gradient if ranks sum its output.
    """
    compiled = torch.compile(_forward, options={"deterministic": True} if deterministic else None)
    layers = layers_of(model)
    kinds = {kind: _with_compiled_forward(kind, compiled) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.__class__ = kinds[type(layer)]
    if not shipped:
        model.get_input_embeddings().register_forward_hook(_wait_for_collective)


def _with_compiled_forward(kind: type[torch.nn.Module], compiled: Callable[..., Any]) -> type[torch.nn.Module]:
    """Returns a subclass of the layers' class ``kind``; transformers recomputes a subclass in any case."""

    def forward(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return compiled(kind.forward, layer, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _forward(function: Callable[..., Any], layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return function(layer, *args, **kwargs)


def _wait_for_collective(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
    # docs/findings/compiled-collective-inputs.md: a copy waits for the collective and stays in the autograd graph.
    return output.clone() if isinstance(output, AsyncCollectiveTensor) else output


def forget_compiled() -> None:
    """Drops the code that was compiled in this process.

    Otherwise it would count for the next model of the same code, until torch stops compiling that code
    (``torch._dynamo.config.recompile_limit``) and runs it uncompiled.
    """
    torch._dynamo.reset()


def model_inputs(config: Any, inputs: MicroBatch) -> dict[str, Any]:
    """Returns what the forward pass of a model gets besides tokens."""
    columns = inputs.columns
    if IMAGE not in columns:
        return {"position_ids": inputs.positions}
    tower, marks = config.vision_config, columns[IMAGE] > 0
    pixels = columns[PIXEL][marks]
    merge = getattr(tower, "spatial_merge_size", None)
    if merge is None:
        pixels = pixels.view(-1, tower.num_channels, tower.image_size, tower.image_size)
        masks = image_masks(config.get_text_config(), inputs.positions, marks, pixels.dtype)
        return {"pixel_values": pixels, "attention_mask": masks, "position_ids": inputs.positions}
    grids = torch.stack([columns[name] for name in GRID], dim=-1).long()
    places = image_positions(inputs.positions, grids, merge)
    return {
        "pixel_values": pixels.reshape(len(pixels) * merge**2, -1),
        "image_grid_thw": grids[grids[..., 0] > 0],
        "position_ids": torch.cat([inputs.positions[None], places]),  # the first ones separate documents
    }


def image_masks(text: Any, positions: Tensor, marks: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Makes the masks of packed rows in which the tokens of an image see each other, by kind of layer.

    Gemma 3's own mask for sliding layers takes the images of the first document for those of all
    (docs/findings/gemma3-packed-images.md). An image is not longer than the window.
    """
    begins = marks & ~torch.nn.functional.pad(marks, (1, 0))[:, :-1]
    wanted = {
        "config": text,
        "inputs_embeds": torch.empty(*positions.shape, 1, dtype=dtype, device=positions.device),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": positions,
        "block_sequence_ids": torch.where(marks, begins.cumsum(1) - 1, -1),
    }
    makers = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
    return {kind: make(**wanted) for kind, make in makers.items()}


def image_positions(positions: Tensor, grids: Tensor, merge: int) -> Tensor:
    """Counts the tokens of packed rows by time, height and width, (3, rows, length).

    positions: (rows, length), from 0 in each document. grids: (rows, length, 3), the patches of an image at its first
    token. merge: patches of a token along an axis.
    """
    found = positions.expand(3, -1, -1).clone()
    for row, first in (grids[..., 0] > 0).nonzero().tolist():
        time, height, width = (int(grids[row, first, 0]), *(grids[row, first, 1:] // merge).tolist())
        count, start = time * height * width, int(found[0, row, first])
        behind = first + count
        ends = (positions[row, behind:] == 0).nonzero()
        end = behind + int(ends[0]) if len(ends) else positions.shape[1]
        found[:, row, behind:end] += max(height, width) - count
        inside = torch.cartesian_prod(*(torch.arange(size, device=positions.device) for size in (time, height, width)))
        found[:, row, first:behind] = start + inside.view(-1, 3).T
    return found


def hugging_face_modules(
    model: transformers.PreTrainedModel, *, tp: int, tp_rank: int, sequence: bool = False, vocabulary_start: int = 0
) -> tuple[TracedModule, ...]:
    """Lists the modules of a Hugging Face model under its own names, without those that another stage has.

    tp: the ranks that shard the features inside of attention and MLP, in equal and contiguous parts.
    sequence: whether the stream between blocks is sharded over them, along the length.
    vocabulary_start: the first token of this rank's logits; a value model has none.
    """
    modules: Mapping[str, torch.nn.Module] = {
        name.replace(WRAPPED, ""): module for name, module in model.named_modules()
    }
    stream = Cut(part=tp_rank, parts=tp) if sequence else WHOLE
    cuts = {"model.embed_tokens": (WHOLE, WHOLE), "model.norm": (stream, stream)}
    quirks = quirks_of(model.config.model_type)
    whole = {*quirks.whole_outputs, *quirks.recut_inputs}
    if quirks.latent_attention:
        whole |= {"self_attn.q_proj", "self_attn.o_proj"}
    head, cut = ("score", WHOLE) if "score" in modules else ("lm_head", Cut(first_feature=vocabulary_start))
    found = [
        TracedModule(name=name, module=modules[name], input=before, output=after)
        for name, (before, after) in {**cuts, head: (stream, cut)}.items()
        if name in modules and any(True for _ in modules[name].parameters())
    ]
    for number in range(model.config.num_hidden_layers):
        prefix = f"model.layers.{number}."
        for name in BETWEEN:
            if prefix + name in modules:
                found.append(
                    TracedModule(name=prefix + name, module=modules[prefix + name], input=stream, output=stream)
                )
        for name in (*CUT_OUTPUTS, *FUSED):
            if prefix + name in modules:
                first = 0 if name in whole else tp_rank * _features(model, name) // tp
                module = modules[prefix + name]
                found.append(TracedModule(name=prefix + name, module=module, output=Cut(first_feature=first)))
        for name in CUT_INPUTS:
            if prefix + name in modules:  # a mixture of experts has no down_proj of its own
                first = 0 if name in whole else tp_rank * _features(model, name) // tp
                cut, module = Cut(first_feature=first), modules[prefix + name]
                found.append(TracedModule(name=prefix + name, module=module, input=cut, output=stream))
    return tuple(found)


def _features(model: transformers.PreTrainedModel, name: str) -> int:
    """Returns the number of a projection's output features (inputs for o_proj and down_proj) in the whole model."""
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if name.startswith("mlp"):
        return int(config.intermediate_size)
    heads = config.num_attention_heads if name.endswith(("q_proj", "o_proj")) else config.num_key_value_heads
    return int(heads * head)
