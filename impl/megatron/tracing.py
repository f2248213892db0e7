"""Maps modules of a rank's chunks to modules of the Hugging Face model, for `parity bisect`.

Megatron-core's activations are (length, rows, hidden). Its projections to q, k and v, and to gate and up, are fused and
have no name in Hugging Face.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.identity_op import IdentityOp

from conformance.backends.protocol import Cut, Traced, TracedModule
from impl.interface.micro_batches import MicroBatch
from impl.megatron.model_config import ModelShape, Stages
from impl.models.tracing import token_numbers


def traced_chunks(
    chunks: Sequence[torch.nn.Module],
    shape: ModelShape,
    stages: Stages,
    parts: Sequence[MicroBatch],
    *,
    gradient_scale: float,
) -> Traced:
    """Returns the modules that this rank traces.

    ``parts``: this rank's part of each micro-batch, with token numbers in the place of token ids.
    """
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    found: list[TracedModule] = []
    for number, chunk in enumerate(chunks):
        found += _of_chunk(chunk, stages.chunks[number * stages.pp + pp_rank], shape)
    return Traced(modules=tuple(found), tokens=tuple(map(token_numbers, parts)), gradient_scale=gradient_scale)


def _of_chunk(chunk: Any, layers: range, shape: ModelShape) -> Iterator[TracedModule]:
    tp = parallel_state.get_tensor_model_parallel_world_size()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    # Sequence parallelism cuts the stream between blocks along the length.
    part, parts = (tp_rank, tp) if chunk.config.sequence_parallel else (0, 1)
    stream = Cut(length_first=True, part=part, parts=parts)

    def cut(features: int) -> Cut:
        return Cut(length_first=True, first_feature=tp_rank * features // tp)

    modules = dict(chunk.named_modules())
    if "embedding" in modules:
        yield TracedModule(name="model.embed_tokens", module=modules["embedding"], output=stream)
    for number, layer in enumerate(layers):
        local, prefix = f"decoder.layers.{number}.", f"model.layers.{layer}."
        attention = cut(shape.attended)
        # TransformerEngine fuses norms into linear layers.
        fused = isinstance(modules[local + "input_layernorm"], IdentityOp)
        has_experts = shape.mixture is not None and layer in shape.mixture.layers  # they are traced as one module
        for name, of, inside in (
            ("input_layernorm", "input_layernorm", stream),
            ("self_attn", "self_attention", stream),
            ("self_attn.o_proj", "self_attention.linear_proj", attention),
            ("post_attention_layernorm", "pre_mlp_layernorm", stream),
            ("mlp", "mlp", stream),
            *([] if has_experts else [("mlp.down_proj", "mlp.linear_fc2", cut(shape.ffn))]),
        ):
            if fused and not name.endswith("_proj"):  # the input is not normalised yet
                continue
            leaves = name.startswith(("self_attn", "mlp"))
            module = modules[local + of]
            yield TracedModule(name=prefix + name, module=module, input=inside, output=stream, leaves_bias=leaves)
    if "decoder.final_layernorm" in modules:
        yield TracedModule(name="model.norm", module=modules["decoder.final_layernorm"], input=stream, output=stream)
    if "output_layer" in modules:
        value = shape.head == "value"
        yield TracedModule(
            name="score" if value else "lm_head",
            module=modules["output_layer"],
            input=stream,
            output=Cut(length_first=True) if value else cut(shape.padded_vocab(tp)),
            leaves_bias=True,
        )
