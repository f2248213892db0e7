"""Lists the modules of a Hugging Face model that a rank runs, and the sharding of their activations.

`parity bisect` compares these activations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from conformance.backends.protocol import Cut, TracedModule
from conformance.spec.batch import Batch, Row
from impl.interface.micro_batches import MicroBatch
from impl.models.family_quirks import quirks_of
from impl.models.lazy_weights import WRAPPED

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


def numbered(batch: Batch, rows: Sequence[Row], inputs: MicroBatch) -> MicroBatch:
    """Replaces the tokens of a micro-batch of ``rows`` by their numbers in the step, from 1.

    The result is to be sharded as the tokens are; ``token_numbers`` reads the shard.
    """
    starts = [0]
    for row in batch.rows:
        starts.append(starts[-1] + row.length)
    numbers = torch.zeros_like(inputs.tokens)
    for r, row in enumerate(rows):
        numbers[r, : row.length] = torch.arange(starts[row.index], starts[row.index + 1]) + 1
    return replace(inputs, tokens=numbers)


def token_numbers(part: MicroBatch) -> torch.Tensor:
    """Returns the numbers of tokens from 0, -1 in padding: (rows, length), for a shard from ``numbered``."""
    return part.tokens.where(part.real, 0) - 1


def hugging_face_modules(
    model: "PreTrainedModel", *, tp: int, tp_rank: int, sequence: bool = False, vocabulary_start: int = 0
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


def _features(model: "PreTrainedModel", name: str) -> int:
    """Returns the number of a projection's output features (inputs for o_proj and down_proj) in the whole model."""
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if name.startswith("mlp"):
        return int(config.intermediate_size)
    heads = config.num_attention_heads if name.endswith(("q_proj", "o_proj")) else config.num_key_value_heads
    return int(heads * head)
