"""Rounded masters: a model is cast to half precision, and its float32 masters are copied from that.

docs/findings/deepspeed-rounded-masters.md, docs/findings/megatron-rounded-masters.md.
"""

import torch

from conformance.defect import RoundedMasters
from conformance.oracle.architecture import Architecture
from conformance.oracle.variant import Variant, Weights

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class WithRoundedMasters(Variant):
    def __init__(self, defect: RoundedMasters) -> None:
        self._dtype = DTYPES[defect.precision]

    def loaded(self, weights: Weights, a: Architecture | None, *, trained: bool) -> Weights:
        return {name: w.to(self._dtype).to(w.dtype) if trained else w for name, w in weights.items()}
