"""Known defects below the FSDP2 backend, which cells of the layout option ``shipped`` leave as they are."""

from conformance.defect import ResummedHeadNorms
from conformance.expectation import ExpectedDifference
from impl.ring.expected import RING_DIFFERENCES

EXPECTED = (
    ExpectedDifference(
        reason="transformers sums a head norm's accumulated gradient over tp at every micro-batch",
        link="docs/findings/hf-head-norm-accumulation.md",
        defects=lambda scenario, layout: (
            ResummedHeadNorms(ranks=layout.tp, data_ranks=layout.dp, micro_batches=scenario.accumulation),
        ),
        options=("lastsync", "shipped"),
        at_least={"tp": 2, "accumulation": 2},
        architectures=("qwen3", "gemma3_text"),
    ),
    *RING_DIFFERENCES,
)
