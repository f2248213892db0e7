"""Forward pass of one document, from the papers, and the model's weights.

Serves claim 6: the same plain code, run in float64, is the reference of every backend; run in float32, bfloat16 or
float16 it shows how much error that precision costs.

Capital letters in names and comments are shapes: T tokens, D hidden, H heads, K kv heads, E head_dim, F intermediate,
V vocabulary. x and y are always the (T, D) activations.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from conformance.inputs.model import weight_files, weight_shapes
from conformance.oracle.attention import hidden_keys
from conformance.oracle.experts import stacked, stacked_shapes
from conformance.oracle.feed_forward import CORRECTION
from conformance.oracle.layer import decoder_layer, layer_shapes
from conformance.oracle.linear import in_products_of
from conformance.oracle.lora import adapted
from conformance.oracle.norm import rms_norm
from conformance.oracle.parts import Architecture
from conformance.oracle.policy import Policy as Policy
from conformance.oracle.positions import rotary_table
from conformance.oracle.routing import Routing
from conformance.oracle.tap import NO_TAP, Tap
from conformance.oracle.variant import HONEST, Variant
from conformance.oracle.variant import Weights as Weights
from conformance.validation import UsageError
from conformance.world.heartbeat import mark


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


def parameter_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all parameters and buffers, in the model's order; a Linear's weight is (out, in)."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocab_size, a.hidden_size)}
    for i, layer in enumerate(a.layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer_shapes(layer, a.hidden_size).items()}
    shapes["model.norm.weight"] = (a.hidden_size,)
    if a.value_head:
        shapes["score.weight"] = (1, a.hidden_size)
    elif not a.tied:
        shapes["lm_head.weight"] = (a.vocab_size, a.hidden_size)
    return shapes


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
