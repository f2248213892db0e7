"""Known defects below the FSDP2 backend, which cells of the layout option ``shipped`` leave as they are."""

from conformance.defect import LostEmbeddingGradient, ResummedHeadNorms
from conformance.expectation import ExpectedDifference, model_config
from impl.model_support import torch_is_older
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
    ExpectedDifference(
        reason="torch.compile takes the waiting result of a collective out of the graph of its gradient",
        link="docs/findings/compiled-collective-inputs.md",
        defects=lambda scenario, layout: (
            ()
            if model_config(scenario).get("tie_word_embeddings") or torch_is_older(2, 12)
            else (LostEmbeddingGradient(),)
        ),
        options=("plan", "compile", "shipped"),
        at_least={"tp": 2},
    ),
    *RING_DIFFERENCES,
)
