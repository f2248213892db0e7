"""Re-summed head norms: a sum over tensor-parallel ranks, where micro-batches pile up, of the pile and not of the last.

After micro-batch i, the gradient of a head norm is ranks x (what it was before) + (that of micro-batch i), because what
it was before has been summed on all ranks already. docs/findings/hf-head-norm-accumulation.md.
"""

from collections.abc import Sequence

from conformance.batch import Batch, Row
from conformance.defect import ResummedHeadNorms
from conformance.oracle.variant import Variant, Weights

HEAD_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


class WithResummedHeadNorms(Variant):
    def __init__(self, defect: ResummedHeadNorms) -> None:
        self._defect = defect

    def micro_batches(self, parts: Sequence[Sequence[Row]], batch: Batch) -> Sequence[Sequence[Row]]:
        """Micro-batch i of all data-parallel ranks together."""
        count, ranks = self._defect.micro_batches, self._defect.data_ranks
        of_ranks = [batch.micro_batches(dp_rank=rank, dp_size=ranks, accumulation=count) for rank in range(ranks)]
        return [[row for rows in at_once for row in rows] for at_once in zip(*of_ranks, strict=True)]

    def carried(self, gradients: Weights) -> Weights:
        return {n: self._defect.ranks * g if n.endswith(HEAD_NORMS) else g for n, g in gradients.items()}
