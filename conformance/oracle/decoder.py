"""A decoder layer: attention and feed-forward on a residual stream, with norms where the architecture places them.

Norms before (arXiv 2002.04745), after and before the sum (OLMo 2, arXiv 2501.00656 section 3.2), or both (Gemma 2,
arXiv 2408.00118 section 2).

LoRA of the oracle (Hu et al., arXiv 2106.09685, equation 3): h = W x + scale B A x, in every adapted linear layer.

The scale is alpha / r (section 4.1), or alpha / sqrt(r) (Kalajdzievski, arXiv 2312.03732, theorem 3.2).

Forward pass of one document, from the papers, and the model's weights.

Serves claim 6: the same plain code, run in float64, is the reference of every backend; run in float32, bfloat16 or
float16 it shows how much error that precision costs.

Capital letters in names and comments are shapes: T tokens, D hidden, H heads, K kv heads, E head_dim, F intermediate,
V vocabulary. x and y are always the (T, D) activations.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from conformance.core.errors import UsageError
from conformance.models.components import Architecture, LatentAttention, Layer, Lora, Norm
from conformance.models.folders import weight_files, weight_shapes
from conformance.models.parameter_shapes import CORRECTION, parameter_shapes
from conformance.oracle.attention import attention, hidden_keys, latent_attention
from conformance.oracle.feed_forward import (
    Routing,
    feed_forward,
    stacked,
    stacked_shapes,
)
from conformance.oracle.primitives import (
    NO_TAP,
    Function,
    Module,
    Policy,
    Table,
    Tap,
    in_products_of,
    rms_norm,
    rotary_table,
)
from conformance.oracle.variant import HONEST, Variant, Weights
from conformance.runtime.heartbeat import mark
from conformance.spec.lora import ADAPTER, FILE_PREFIX, PARTS, WEIGHTS_FILE, LoraConfig


def decoder_layer(
    x: Tensor,
    w: Weights,
    layer: Layer,
    norm: Norm,
    *,
    table: Table,
    hidden: Tensor,
    policy: Policy,
    module: Module,
    routing: Routing,
) -> Tensor:
    """``x`` and the result: (T, D). ``w``: the layer's own weights. ``hidden``: (T, T), the keys that are not seen."""

    def normed(name: str | None, x: Tensor) -> Tensor:
        if name is None:
            return x
        return module(name, partial(rms_norm, weight=w[name + ".weight"], norm=norm, policy=policy), x)

    if isinstance(layer.attention, LatentAttention):
        attend = partial(latent_attention, a=layer.attention)
    else:
        attend = partial(attention, a=layer.attention, norm=norm)
    attend = partial(attend, w=w, table=table, hidden=hidden, policy=policy, module=module)
    y = module("self_attn", attend, normed(layer.norms.before_attention, x))
    x = x + normed(layer.norms.after_attention, y)
    feed = partial(feed_forward, w=w, part=layer.feed_forward, policy=policy, module=module, routing=routing)
    y = module("mlp", feed, normed(layer.norms.before_feed_forward, x))
    return x + normed(layer.norms.after_feed_forward, y)


def lora_of(config: LoraConfig, parameters: Mapping[str, tuple[int, ...]]) -> Lora:
    """The part of an architecture with these parameters. Raises UsageError for targets that it does not have."""
    root = math.sqrt(config.r) if config.use_rslora else config.r
    return Lora(rank=config.r, scale=config.lora_alpha / root, targets=config.targets(parameters))


def adapter_shapes(lora: Lora, parameters: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all adapters: A (r, in) and B (out, r) of each target."""
    shapes: dict[str, tuple[int, ...]] = {}
    for target in lora.targets:
        rows, columns = parameters[f"{target}.weight"]
        shapes |= {f"{target}.lora_A.weight": (lora.rank, columns), f"{target}.lora_B.weight": (rows, lora.rank)}
    return shapes


def load_adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> Weights:
    """The adapter beside the weights in a model's folder. Raises UsageError where it is not of these ``shapes``."""
    file = folder / ADAPTER / WEIGHTS_FILE
    if not file.is_file():
        raise UsageError(
            f"{folder} has no adapter ({ADAPTER}/{WEIGHTS_FILE}); prepare the inputs of the scenario again"
        )
    found = {name.removeprefix(FILE_PREFIX): tensor for name, tensor in load_file(file).items()}
    if {name: tuple(tensor.shape) for name, tensor in found.items()} != dict(shapes):
        raise UsageError(f"{file} holds other tensors than the scenario's lora; prepare its inputs again")
    # Copied, as the weights are (forward.py).
    return {name: found[name].to(dtype, copy=True) for name in shapes}


def adapted(module: Module, w: Weights, lora: Lora | None) -> Module:
    """``module`` with the adapters of those modules that have one in ``w``, the weights by the names of the modules."""
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
    """The weights of a model without adapters that computes the same: W + scale B A (section 4.1)."""
    found = {name: tensor for name, tensor in weights.items() if not name.endswith(tuple(f"{p}.weight" for p in PARTS))}
    for target in lora.targets:
        a, b = (weights[f"{target}.{part}.weight"] for part in PARTS)
        found[f"{target}.weight"] = weights[f"{target}.weight"] + lora.scale * (b @ a)
    return found


def load_weights(
    model: Path, architecture: Architecture, dtype: torch.dtype, devices: Sequence[str] = ("cpu",)
) -> Weights:
    """All parameters of the Hugging Face folder ``model`` in ``dtype``, layer by layer over ``devices``; a tied head is
    left out. Each tensor is read by itself, and copied out of the file: a product rounds otherwise where its numbers
    begin elsewhere in memory.

    Raises UsageError for a missing or broken file and for names or shapes that do not fit the architecture.
    """
    check_shapes(weight_shapes(model), architecture, str(model))
    names = parameter_shapes(architecture)
    weights: Weights = {}
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(file, framework="pt")) for file in weight_files(model)]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        # Layer by layer, because a file may have the matrices of its experts apart.
        for _, alike in groupby(sorted(where, key=layer_of), key=layer_of):
            found = stacked({name: where[name].get_tensor(name) for name in alike})
            # What is cast is cast on the device: a host takes seconds to make float64 of a billion numbers.
            weights |= {
                name: tensor.to(device_of(name, architecture, devices)).to(dtype, copy=True)
                for name, tensor in found.items()
                if name in names
            }
    return {name: weights[name] for name in names}


def layer_of(name: str) -> str:
    """What the names of a layer's parameters begin with; empty of what is in none."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer[0] if layer else ""


def device_of(name: str, a: Architecture, devices: Sequence[str]) -> str:
    """The device of a parameter: of layer i of L number i * n // L of the n devices. What comes before the layers is on
    the first, what comes after them on the last, and a tied head on the first."""
    if layer := re.match(r"model\.layers\.(\d+)\.", name):
        return devices[int(layer[1]) * len(devices) // len(a.layers)]
    return devices[0] if name == "model.embed_tokens.weight" else devices[-1]


def check_shapes(found: Mapping[str, tuple[int, ...]], architecture: Architecture, source: str) -> None:
    """Raises UsageError where tensors, by name and shape, are not the parameters of the architecture.

    The head of a tied pair may be there or not, and experts may be apart.
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
    if wrong:
        raise UsageError(f"the weights in {source} do not fit its config.json: {'; '.join(wrong[:8])}")


def is_buffer(name: str) -> bool:
    """Whether a tensor of a model's folder is no parameter: it is not trained, and is not rounded with the others."""
    return name.endswith(CORRECTION)


def forward(
    tokens: Tensor,
    weights: Weights,
    a: Architecture,
    policy: Policy,
    variant: Variant = HONEST,
    tap: Tap = NO_TAP,
    routing: Routing | None = None,
) -> Tensor:
    """Logits (T, V) in ``policy.compute`` of one document ``tokens`` (T,) int64; ``weights`` are the masters.

    A value model gives one number per token instead, (T, 1), without soft-capping.

    The masters are cast here, inside autograd, so that their gradients come back in the master dtype. Each layer
    computes where its weights are; the result is where the tokens are. ``variant``: a known defect, if any. ``tap``
    sees the modules, under the names that they have in the Hugging Face model. ``routing``: of this document, where
    routers choose experts.
    """
    routing = routing or Routing()
    w = {name: t if is_buffer(name) else t.to(policy.compute) for name, t in weights.items()}
    embeddings_VD = w["model.embed_tokens.weight"]
    x = tap.module("model.embed_tokens", partial(_embed, weight=embeddings_VD, a=a, policy=policy), tokens)
    dtypes = {"compute": policy.compute, "stable": policy.stable}
    tables = {
        rotary: rotary_table(len(tokens), rotary, **dtypes) for rotary in {layer.attention.rotary for layer in a.layers}
    }
    masks = {
        window: variant.hidden_keys(hidden_keys(len(tokens), window), window)
        for window in {layer.attention.window for layer in a.layers}
    }
    for i, layer in enumerate(a.layers):
        mark()
        prefix = f"model.layers.{i}."
        own = {name.removeprefix(prefix): tensor for name, tensor in w.items() if name.startswith(prefix)}
        x = x.to(device := next(iter(own.values())).device)
        cos, sin = tables[layer.attention.rotary]
        table, hidden = (cos.to(device), sin.to(device)), masks[layer.attention.window].to(device)
        module = in_products_of(policy.tokens, adapted(tap.inside(prefix), own, a.lora), own)
        x = decoder_layer(
            x,
            own,
            layer,
            a.norm,
            table=table,
            hidden=hidden,
            policy=policy,
            module=module,
            routing=routing,
        )
    x = x.to(w["model.norm.weight"].device)
    x = tap.module("model.norm", partial(rms_norm, weight=w["model.norm.weight"], norm=a.norm, policy=policy), x)
    if a.value_head:
        return tap.module("score", lambda x: x @ w["score.weight"].T, x).to(tokens.device)
    head_VD = variant.head(embeddings_VD if a.tied else w["lm_head.weight"], w)
    logits_TV = tap.module("lm_head", lambda x: x @ head_VD.T, x.to(head_VD.device)).to(tokens.device)
    if a.final_softcap is not None:
        logits_TV = torch.tanh(logits_TV / a.final_softcap) * a.final_softcap
    return logits_TV


def _embed(tokens: Tensor, weight: Tensor, a: Architecture, policy: Policy) -> Tensor:
    x = F.embedding(tokens, weight, padding_idx=a.padding_token)
    if a.embedding_scale != 1.0:
        # Rounded to the compute dtype first, as Gemma does.
        x = x * torch.tensor(a.embedding_scale, dtype=policy.compute)
    return x
