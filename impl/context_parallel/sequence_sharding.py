"""Distributes the tokens of a micro-batch over context-parallel ranks, and restores their order.

There are three ways to split the tokens. *Slices*: the documents of all rows are laid end to end, without padding, and
split into equal slices; documents may cross their edges. *Documents*: each document is split into equal pieces, one for
each rank in order, or zigzag (rank r holds pieces r and 2 * size - 1 - r, so causal attention is equal work for all
ranks). *Rows*: each row is split in the same way as a document. A length that does not divide is padded at its end;
padding is never a target.

The adapters of all backends also find here which cells context-parallel attention supports, and its known defects; this
needs neither ranks nor an import of ring_flash_attn.
"""

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from conformance.backends.protocol import Support, Supported, Unsupported
from conformance.core.host import resolve
from conformance.core.io import read_json
from conformance.spec.conventions import model_config
from conformance.spec.known_defects import ExpectedDifference, Unmodelled, WindowPerBlock
from conformance.spec.layout import Layout
from conformance.spec.scenario import Scenario
from impl.interface.micro_batches import NO_TARGET, MicroBatch
from impl.models.family_quirks import SINKS, quirks_of, unsupported_by_kernels

SplitMode = Literal["slices", "documents", "rows"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Assigns the tokens of a micro-batch to ranks.

    source: int64 (size, rows, length), by rank: the token's index in the flattened micro-batch, or -1 for padding.
    starts: int32 (documents + 1,), the indices at which documents begin, and the total length. For ``slices`` they
        count the tokens of all ranks, for ``documents`` those of one rank (equal on all ranks); None for ``rows``.
    """

    source: Tensor
    starts: Tensor | None


def place(inputs: MicroBatch, *, split: SplitMode, size: int, zigzag: bool, multiple: int) -> Placement:
    """Distributes the tokens of a micro-batch, which is on the CPU, over ``size`` ranks.

    The number of tokens per row and rank is a multiple of ``multiple``.
    """
    rows, length = inputs.positions.shape
    pieces = 2 if zigzag else 1  # number of pieces of each document or row on each rank
    if split == "rows":
        tokens = torch.arange(rows * length).view(rows, length)
        whole = _padded(tokens, size * math.lcm(pieces, multiple))
        return Placement(source=_split(whole, size, zigzag), starts=None)
    tokens = torch.where(inputs.real.flatten())[0]
    begins = torch.where(inputs.positions.flatten()[tokens] == 0)[0]
    if split == "slices":
        whole = _padded(tokens, size * multiple)
        ends = [len(tokens)] if len(whole) == len(tokens) else [len(tokens), len(whole)]
        starts = torch.cat([begins, torch.tensor(ends)])
        return Placement(source=whole.view(size, 1, -1), starts=starts.int())
    documents = [
        _split(_padded(document, size * pieces), size, zigzag) for document in tokens.tensor_split(begins[1:])
    ]  # (size, part) each
    source = torch.cat(documents, dim=1)
    lengths = [document.shape[1] for document in documents]
    if filler := -source.shape[1] % multiple:
        source = torch.cat([source, source.new_full((size, filler), -1)], dim=1)
        lengths.append(filler)
    return Placement(source=source[:, None], starts=torch.tensor([0, *lengths]).cumsum(0).int())


def _padded(tokens: Tensor, multiple: int) -> Tensor:
    """Pads (..., length) with -1 to a multiple."""
    return torch.nn.functional.pad(tokens, (0, -tokens.shape[-1] % multiple), value=-1)


def _split(whole: Tensor, size: int, zigzag: bool) -> Tensor:
    """Splits (..., length) into (size, ..., length / size)."""
    if not zigzag:
        return torch.stack(whole.chunk(size, dim=-1))
    pieces = whole.chunk(2 * size, dim=-1)
    return torch.stack([torch.cat([pieces[r], pieces[-1 - r]], dim=-1) for r in range(size)])


def shard_inputs(inputs: MicroBatch, source: Tensor) -> MicroBatch:
    """Returns one rank's part of a micro-batch; ``source`` (rows, length): the rank's part of Placement.source.

    Labels and positions are those of the whole documents.
    """
    real = source >= 0
    at = source.clamp(min=0)
    return MicroBatch(
        tokens=inputs.tokens.flatten()[at].where(real, 0),
        labels=inputs.labels.flatten()[at].where(real, NO_TARGET),
        positions=inputs.positions.flatten()[at].where(real, 0),
        real=inputs.real.flatten()[at] & real,
        columns={name: column.flatten()[at].where(real, 0) for name, column in inputs.columns.items()},
        kept=inputs.kept,
    )


def restore(parts: Tensor, source: Tensor, *, rows: int, length: int) -> Tensor:
    """Puts the parts of all ranks back into the order of the micro-batch: (rows, length), 0 where no rank has a token.

    ``parts``, ``source``: (size, rows, length), by rank; ``parts`` and the result may have further dimensions.
    """
    tokens, further = rows * length, parts.shape[3:]
    whole = parts.new_zeros(tokens + 1, *further)  # the last element is for padding; a mask would wait for the GPU
    at = source.where(source >= 0, tokens)  # (size, rows, length)
    return whole.index_copy(0, at.flatten(), parts.flatten(0, 2))[:tokens].view(rows, length, *further)


def _unpredictable_gradients(scenario: Scenario, _: Layout) -> Unmodelled:
    """Returns the gradients that no oracle can predict.

    In every layer and micro-batch, a race between ranks decides which of two gradients of keys and values arrives. At
    the first step, only gradients that do not pass through any attention must be right.
    """
    last = model_config(scenario)["num_hidden_layers"] - 1
    below = ("model.embed_tokens.*", *(f"model.layers.{layer}.*" for layer in range(last)))
    into_attention = (f"model.layers.{last}.self_attn.[qkv]_*", f"model.layers.{last}.input_layernorm.*")
    return Unmodelled(stage="gradients", tensors=(*below, *into_attention), onward=True)


RING_DIFFERENCES = (
    *(
        ExpectedDifference(
            reason="ring_flash_attn overwrites the float32 gradients of queries, keys and values that it sums up",
            link="docs/findings/ring-attention-gradients.md",
            unmodelled=_unpredictable_gradients,
            options=(ring, "shipped"),
            precisions=("fp32",),
            objectives=("sft",),
        )
        for ring in ("ring", "zigzag")
    ),
    *(
        ExpectedDifference(
            reason="ring_flash_attn applies a sliding window to every block as if it were the query's own",
            link="docs/findings/ring-attention-window.md",
            defects=lambda _, layout: (WindowPerBlock(ranks=layout.sp, zigzag="zigzag" in layout.options),),
            options=(ring, "shipped"),
            at_most=most,
            architectures=("gemma3_text",),
            packed=True,
        )
        for ring, most in (("ring", {}), ("zigzag", {"sp": 2}))  # with more ranks, zigzag's output is NaN
    ),
)


INSTALL = "pip install 'backend-parity[ring]'"
_OPTIONS = {"ring", "zigzag", "torchcp"}  # kinds that replace the default


def available() -> bool:
    """Whether ring_flash_attn is installed."""
    return find_spec("ring_flash_attn") is not None


RING_MODULES = ("impl.context_parallel.ring_functions",) if available() else ()  # for preload


def ring_support(scenario: Scenario, layout: Layout) -> Support:
    """Returns Supported, or Unsupported with the reason and an alternative."""
    if layout.sp == layout.ulysses == 1:
        return Supported()
    lacking, options = unsupported_by_kernels(resolve(scenario.model)), _OPTIONS & set(layout.options)
    if lacking == SINKS and (options or layout.ulysses > 1):
        return Unsupported(f"{', '.join(options) or 'Ulysses'} has no {SINKS}; use default context parallelism (sp2)")
    if lacking and lacking != SINKS:
        return Unsupported(f"the kernels of sp and of Ulysses have no {lacking}; use sp1, with dp or tp")
    if layout.ulysses > 1 and quirks_of(kind := model_config(scenario).get("model_type")).latent_attention:
        return Unsupported(f"DeepSpeed's Ulysses needs heads of one size, and {kind} has several; use sp2")
    if not available():
        return Unsupported(f"attention over sequence shards needs the package ring-flash-attn; run: {INSTALL}")
    if "torchcp" in layout.options and scenario.data.packed:
        return Unsupported("PyTorch's context parallel attends over whole rows; leave torchcp out for packed documents")
    if "torchcp" in layout.options and layout.ulysses > 1:
        return Unsupported("PyTorch's context parallel attends over whole rows; leave torchcp out with Ulysses")
    if "torchcp" in layout.options and _sliding_window(scenario.model):
        return Unsupported("PyTorch's context parallel has no sliding window; leave torchcp out: the default has one")
    windowed = next((option for option in ("ring", "zigzag") if option in layout.options), None)
    # With ``shipped`` such a cell runs nevertheless, to show the defect.
    if windowed and "shipped" not in layout.options and _sliding_window(scenario.model):
        return Unsupported(
            f"{windowed} gets sliding windows wrong across ranks (docs/findings/ring-attention-window.md); leave "
            f"{windowed} out: the default is right"
        )
    return Supported()


def _sliding_window(model: str) -> bool:
    """Whether any layer of the model in a Hugging Face folder has a sliding window."""
    config = read_json(resolve(model) / "config.json")
    config = config.get("text_config", config)
    if "layer_types" in config:
        return "sliding_attention" in config["layer_types"]
    return bool(config.get("sliding_window") and config.get("use_sliding_window", True))
