"""Bytes of activations that a rank keeps for the backward pass: an estimate, from formulas.

The terms are those of Korthikanti et al., arXiv 2205.05198, section 4 (what each operator keeps of its inputs), for
layers with RMSNorm, grouped queries and SwiGLU instead of theirs, without dropout, and with attention by a kernel that
keeps no scores. Sections 4.2.1 and 4.2.2 say what tensor and sequence parallelism cut, section 5 what is left when
layers are computed again.
"""

from dataclasses import dataclass

from conformance.layout import Layout
from impl.megatron.shape import VOCABULARY_MULTIPLE
from impl.train.shapes import Sizes


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes. ``kept``: of all layers of a rank, at most. ``layer``: of the one that is computed again, else 0.
    ``logits``: of the loss, all copies together that there are at a time."""

    kept: int
    layer: int
    logits: int


def activations_of(
    backend: str, layout: Layout, sizes: Sizes, *, compute: int, tokens: int, micro_batches: int, entropy: bool
) -> Activations:
    """``tokens``: of a micro-batch and its rank of the ring. ``compute``: bytes of a number."""
    own = tokens // layout.tp if "seqpar" in layout.options else tokens
    # Outside of tensor parallelism: norms and what they give. Hugging Face's RMSNorm keeps its input in float32 and
    # what it has normalised, torch's its input.
    norm = max(4, compute) + compute if backend != "megatron" else compute
    outside = 2 * (norm + compute) * sizes.hidden
    # Inside: queries, keys, values, what attention gives and a float32 of each head; of SwiGLU four times its width.
    inside = compute * (2 * sizes.queries + 2 * sizes.keys + 4 * sizes.ffn) + 4 * sizes.heads
    layer = outside * own + inside * tokens // layout.tp
    at_once = min(layout.pp, micro_batches)  # of the first stage: those that have gone in, but not come back
    layers = -(-sizes.layers // layout.pp) * at_once
    again = "ckpt" in layout.options
    return Activations(
        kept=layers * (compute * sizes.hidden * own if again else layer),
        layer=layer if again else 0,
        logits=_logits(backend, layout, sizes, compute=compute, tokens=tokens, entropy=entropy),
    )


def _logits(backend: str, layout: Layout, sizes: Sizes, *, compute: int, tokens: int, entropy: bool) -> int:
    """In impl/outputs.py: the logits, the softmax in float32 or wider (twice with entropy), and the gradient, which is
    the softmax's memory where it has the same dtype."""
    width = sizes.vocab
    if backend == "megatron":
        multiple = VOCABULARY_MULTIPLE * layout.tp
        width = -(-sizes.vocab // multiple) * multiple // layout.tp
    elif "losspar" in layout.options:
        width = -(-sizes.vocab // layout.tp)
    wide = max(4, compute)
    gradient = compute if compute < 4 else 0
    return tokens * width * (compute + wide * (2 if entropy else 1) + gradient)
