"""Known defects of ring_flash_attn's ring and zigzag, for the adapters of all backends that have them."""

from conformance.defect import Unmodelled, WindowPerBlock
from conformance.expectation import ExpectedDifference, model_config
from conformance.layout import Layout
from conformance.scenario import Scenario


def _raced(scenario: Scenario, _: Layout) -> Unmodelled:
    """The gradients that no oracle can predict.

    In every layer and micro-batch, a race between ranks decides which of two gradients of keys and values arrives. At
    the first step, only the gradients that do not pass through any attention on their way back have to be right.
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
            unmodelled=_raced,
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
        for ring, most in (("ring", {}), ("zigzag", {"sp": 2}))  # of more ranks, zigzag's output is NaN
    ),
)
