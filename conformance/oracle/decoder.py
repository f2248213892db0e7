"""Loads the weights of a model and runs its forward pass for one document, from the papers.

Run in float64, this code is the reference of every backend. Run in float32, bfloat16 or float16, it measures how much
error that precision causes.

Norms stand before attention and feed-forward (arXiv 2002.04745), after them and before the sum (OLMo 2, arXiv
2501.00656 section 3.2), or both (Gemma 2, arXiv 2408.00118 section 2). LoRA adds scale B A x to W x in every adapted
linear layer (Hu et al., arXiv 2106.09685, equation 3), with scale alpha / r (section 4.1) or alpha / sqrt(r)
(Kalajdzievski, arXiv 2312.03732, theorem 3.2).

Capital letters in names and comments are shapes: T tokens, D hidden, H heads, K kv heads, E head_dim, F intermediate,
V vocabulary. x and y are always the (T, D) activations.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from conformance.core.errors import UsageError
from conformance.models.components import (
    CORRECTION,
    Architecture,
    GatedDeltaNet,
    LatentAttention,
    Layer,
    Lora,
    Norm,
    parameter_shapes,
)
from conformance.models.folders import weight_files, weight_shapes
from conformance.oracle.attention import Mask, attention, gated_delta_net, hidden_keys, latent_attention
from conformance.oracle.feed_forward import Routing, feed_forward, stacked, stacked_shapes
from conformance.oracle.primitives import (
    HONEST,
    NO_TAP,
    Function,
    Module,
    Policy,
    Table,
    Tap,
    Variant,
    Weights,
    in_products_of,
    rms_norm,
    rotary_table,
)
from conformance.runtime.messages import mark
from conformance.spec.scenario import ADAPTER, FILE_PREFIX, PARTS, WEIGHTS_FILE, LoraConfig


def decoder_layer(
    x: Tensor,
    w: Weights,
    layer: Layer,
    norm: Norm,
    *,
    table: Table | None,
    masks: Sequence[Mask],
    policy: Policy,
    module: Module,
    routing: Routing,
) -> Tensor:
    """Computes one layer; ``x`` and the result are (T, D).

    ``w``: the layer's own weights. ``table``: None for linear attention. ``masks``: of the documents.
    """

    def normed(name: str | None, x: Tensor) -> Tensor:
        if name is None:
            return x
        return module(name, partial(rms_norm, weight=w[name + ".weight"], norm=norm, policy=policy), x)

    if isinstance(layer.attention, GatedDeltaNet):
        lengths = [len(mask.hidden) for mask in masks]
        name, attend = "linear_attn", partial(gated_delta_net, a=layer.attention, lengths=lengths)
    else:
        assert table
        name = "self_attn"
        if isinstance(layer.attention, LatentAttention):
            attend = partial(latent_attention, a=layer.attention, table=table, masks=masks)
        else:
            attend = partial(attention, a=layer.attention, norm=norm, table=table, masks=masks)
    attend = partial(attend, w=w, policy=policy, module=module)
    y = module(name, attend, normed(layer.norms.before_attention, x))
    x = x + normed(layer.norms.after_attention, y)
    feed = partial(feed_forward, w=w, part=layer.feed_forward, policy=policy, module=module, routing=routing)
    y = module("mlp", feed, normed(layer.norms.before_feed_forward, x))
    return x + normed(layer.norms.after_feed_forward, y)


def lora_of(config: LoraConfig, parameters: Mapping[str, tuple[int, ...]]) -> Lora:
    """Returns the adapters of a model with these parameters. Raises UsageError for targets that the model lacks."""
    root = math.sqrt(config.r) if config.use_rslora else config.r
    return Lora(rank=config.r, scale=config.lora_alpha / root, targets=config.targets(parameters))


def adapter_shapes(lora: Lora, parameters: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of all adapters: A (r, in) and B (out, r) of each target."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target in lora.targets:
        rows, columns = parameters[f"{target}.weight"]
        shapes |= {f"{target}.lora_A.weight": (lora.rank, columns), f"{target}.lora_B.weight": (rows, lora.rank)}
    return shapes


def load_adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Weights:
    """Reads the adapter from a model's folder. Raises UsageError if its tensors do not have these ``shapes``."""
    file = folder / ADAPTER / WEIGHTS_FILE
    if not file.is_file():
        raise UsageError(
            f"{folder} has no adapter ({ADAPTER}/{WEIGHTS_FILE}); prepare the inputs of the scenario again"
        )
    found = {name.removeprefix(FILE_PREFIX): tensor for name, tensor in load_file(file).items()}
    if {name: tuple(tensor.shape) for name, tensor in found.items()} != dict(shapes):
        raise UsageError(f"{file} holds other tensors than the scenario's lora; prepare its inputs again")
    # Copied for the reason that load_weights gives.
    return {name: found[name].to(dtype, copy=True) for name in shapes}


def adapted(module: Module, w: Weights, lora: Lora | None) -> Module:
    """Returns ``module`` with adapters applied to the modules that have them in ``w`` (weights by module name)."""
    if lora is None:
        return module
    scale = lora.scale

    def run(name: str, function: Function, x: Tensor) -> Tensor:
        a, b = (w.get(f"{name}.{part}.weight") for part in PARTS)
        if a is None or b is None:
            return module(name, function, x)
        return module(name, lambda x: function(x) + F.linear(F.linear(x, a), b) * scale, x)

    return run


def merged(weights: Weights, lora: Lora) -> Weights:
    """Adds the adapters to their weights, W + scale B A (section 4.1), and returns weights without adapters."""
    found = {name: tensor for name, tensor in weights.items() if not name.endswith(tuple(f"{p}.weight" for p in PARTS))}
    for target in lora.targets:
        a, b = (weights[f"{target}.{part}.weight"] for part in PARTS)
        found[f"{target}.weight"] = weights[f"{target}.weight"] + lora.scale * (b @ a)
    return found


def load_weights(
    model: Path, architecture: Architecture, dtype: torch.dtype, devices: Sequence[str] = ("cpu",)
) -> Weights:
    """Reads all parameters of the Hugging Face folder ``model`` in ``dtype``, spread over ``devices`` by layers.

    A tied head is left out. Tensors are copied out of the file, because the rounding of a matrix product depends on the
    alignment of its operands in memory. Raises UsageError for a missing or broken file and for names or shapes that do
    not fit the architecture.
    """
    check_shapes(weight_shapes(model), architecture, str(model))
    names = parameter_shapes(architecture)
    weights: Weights = {}
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in weight_files(model)]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        # Layer by layer, because a file may hold one matrix per expert.
        for _, layer_names in groupby(sorted(where, key=layer_of), key=layer_of):
            found = stacked({name: where[name].get_tensor(name) for name in layer_names})
            # The cast runs on the device: a host needs seconds to cast a billion numbers to float64.
            weights |= {
                name: tensor.to(device_of(name, architecture, devices)).to(dtype, copy=True)
                for name, tensor in found.items()
                if name in names
            }
    return {name: weights[name] for name in names}


@cache
def layer_of(name: str) -> str:
    """Returns the prefix of the layer that a parameter belongs to; empty for a parameter outside layers."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer[0] if layer else ""


def device_of(name: str, a: Architecture, devices: Sequence[str]) -> str:
    """Returns the device of a parameter: layer i of L is on number i * n // L of the n devices.

    Parameters before the layers and a tied head are on the first device, parameters after the layers on the last one.
    """
    if layer := re.match(r"model\.layers\.(\d+)\.", name):
        return devices[int(layer[1]) * len(devices) // (len(a.layers) + len(a.mtp))]
    return devices[0] if name == "model.embed_tokens.weight" else devices[-1]


def check_shapes(found: Mapping[str, tuple[int, ...]], architecture: Architecture, source: str) -> None:
    """Raises UsageError unless tensors, given by name and shape, are the parameters of the architecture.

    A tied head may be present or absent. Experts may be stacked or one matrix each.
    """
    expected, found = parameter_shapes(architecture), stacked_shapes(found)
    optional = {"lm_head.weight"} if architecture.tied else set()
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is not expected" for name in found if name not in expected and name not in optional]
    wrong += [
        f"{name} has shape {found[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if any(name.endswith(".eh_proj.weight") for name in found) and not architecture.mtp:
        wrong.insert(0, "it has modules for multi-token prediction; use the objective mtp, or a folder without them")
    if wrong:
        raise UsageError(f"the weights in {source} do not fit its config.json: {'; '.join(wrong[:8])}")


def is_buffer(name: str) -> bool:
    """Tells whether a tensor of a model's folder is a buffer, which is neither trained nor rounded."""
    return name.endswith(CORRECTION)


def forward(
    tokens: Tensor,
    weights: Weights,
    a: Architecture,
    policy: Policy,
    variant: Variant = HONEST,
    tap: Tap = NO_TAP,
    routing: Routing | None = None,
    lengths: Sequence[int] = (),
) -> Tensor:
    """Returns logits (T, V) in ``policy.compute`` of one document ``tokens`` (T,) int64; ``weights`` are the masters.
    With ``lengths``, the tokens are those of several documents, end to end, which do not attend to each other.

    A value model returns one number per token, (T, 1), without soft-capping. A model with M modules for multi-token
    prediction returns (1 + M, T, V): token i + 1 + k is predicted by the logits of module k at i (arXiv 2412.19437,
    equations 21 to 23). Beyond the end of a document modules read token 0, and what they give there is to be ignored.

    The masters are cast inside autograd, so that their gradients have the master dtype. Each layer computes on the
    device of its weights; the result is on the device of the tokens. ``variant``: a known defect to reproduce. ``tap``
    observes the modules under their Hugging Face names. ``routing``: of this document, for models with routers.
    """
    routing = routing or Routing()
    w = {name: t if is_buffer(name) else t.to(policy.compute) for name, t in weights.items()}
    of_layers: dict[str, Weights] = defaultdict(dict)  # by the layer's prefix, under the names inside of it
    for name, tensor in w.items():
        prefix = layer_of(name)
        of_layers[prefix][name.removeprefix(prefix)] = tensor
    embeddings_VD = w["model.embed_tokens.weight"]
    x = tap.module("model.embed_tokens", partial(_embed, weight=embeddings_VD, a=a, policy=policy), tokens)
    dtypes = {"compute": policy.compute, "stable": policy.stable}
    lengths = [*lengths] or [len(tokens)]
    places = torch.cat([torch.arange(length) for length in lengths])
    tables = {
        rotary: [of_place[places] for of_place in rotary_table(max(lengths), rotary, **dtypes)]
        for rotary in {layer.attention.rotary for layer in a.layers}
        if rotary
    }
    masks = {
        window: [Mask.of(variant.hidden_keys(hidden_keys(length, window), window)) for length in lengths]
        for window in {layer.attention.window for layer in a.layers}
    }

    def layer_output(x: Tensor, i: int, layer: Layer, ahead: Tensor | None = None) -> Tensor:
        """Runs layer ``i``, or with the embeddings ``ahead`` (T, D) the module for multi-token prediction there."""
        mark()
        prefix = f"model.layers.{i}."
        own = of_layers[prefix]
        x = x.to(device := next(iter(own.values())).device)
        table, own_masks = None, [mask.to(device) for mask in masks[layer.attention.window]]
        if layer.attention.rotary:
            cos, sin = tables[layer.attention.rotary]
            table = (cos.to(device), sin.to(device))
        module = in_products_of(policy.tokens, adapted(tap.inside(prefix), own, a.lora), own)
        module = variant.products(module, own, policy, layer=i, layers=len(a.layers))
        if ahead is not None:
            read, state = (
                rms_norm(numbers, weight=own[f"{name}.weight"], norm=a.norm, policy=policy)
                for name, numbers in (("enorm", ahead.to(device)), ("hnorm", x))
            )
            x = module("eh_proj", lambda both: both @ own["eh_proj.weight"].T, torch.cat([read, state], dim=-1))
        y = decoder_layer(
            x,
            own,
            layer,
            a.norm,
            table=table,
            masks=own_masks,
            policy=policy,
            module=module,
            routing=routing,
        )
        return y if ahead is None else rms_norm(y, weight=own["shared_head.norm.weight"], norm=a.norm, policy=policy)

    for i, layer in enumerate(a.layers):
        x = layer_output(x, i, layer)
    x = x.to(w["model.norm.weight"].device)
    x = tap.module("model.norm", partial(rms_norm, weight=w["model.norm.weight"], norm=a.norm, policy=policy), x)
    if a.value_head:
        return tap.module("score", lambda x: x @ w["score.weight"].T, x).to(tokens.device)
    head_VD = variant.head(embeddings_VD if a.tied else w["lm_head.weight"], w)
    further = []
    state = x
    for k, layer in enumerate(a.mtp, 1):
        of_documents = (F.pad(own[k:], (0, min(k, len(own)))) for own in tokens.split(lengths))
        ahead = _embed(torch.cat([*of_documents]), weight=embeddings_VD, a=a, policy=policy)
        state = layer_output(state, len(a.layers) - 1 + k, layer, ahead)
        further.append((state.to(head_VD.device) @ head_VD.T).to(tokens.device))
    logits_TV = tap.module("lm_head", lambda x: x @ head_VD.T, x.to(head_VD.device)).to(tokens.device)
    if a.final_softcap is not None:
        logits_TV = torch.tanh(logits_TV / a.final_softcap) * a.final_softcap
    return torch.stack([logits_TV, *further]) if further else logits_TV


def _embed(tokens: Tensor, weight: Tensor, a: Architecture, policy: Policy) -> Tensor:
    x = F.embedding(tokens, weight, padding_idx=a.padding_token)
    if a.embedding_scale != 1.0:
        # Rounded to the compute dtype first, as Gemma does.
        x = x * torch.tensor(a.embedding_scale, dtype=policy.compute)
    return x
