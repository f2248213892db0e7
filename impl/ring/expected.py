"""Known defects of ring_flash_attn's ring and zigzag, for the adapters of all backends that have them."""

from conformance.defect import Unmodelled, WindowPerBlock
from conformance.expectation import ExpectedDifference

# Which of two numbers arrives is a race between ranks (docs/findings/ring-attention-gradients.md), so no oracle can
# have these gradients. The head, and the norm before it, lie behind all attention: they have to be right.
RACED = Unmodelled(stage="gradients", tensors=("model.embed_tokens.*", "model.layers.*"), onward=True)

RING_DIFFERENCES = (
    *(
        ExpectedDifference(
            reason="ring_flash_attn overwrites the float32 gradients of queries, keys and values that it sums up",
            link="docs/findings/ring-attention-gradients.md",
            unmodelled=RACED,
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
