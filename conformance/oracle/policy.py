"""Policy: in which dtypes the oracle computes."""

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Policy:
    """Mixed precision as transformers and the backends do it.

    compute: matrix products and activations. stable: norms, softmax, rotary tables, the loss, and also the master
    weights, gradients and optimizer. fused: attention by torch's kernel, which is what most backends run below the
    exact tier and which rounds otherwise than the plain formula. tokens: a matrix of a layer is multiplied by as many
    at least, some of them zeros (in_products_of).
    """

    compute: torch.dtype
    stable: torch.dtype
    fused: bool = False
    tokens: int = 0

    @property
    def before_updates(self) -> "Policy":
        """For the passes over a roll-out before its first update: always the kernel where there is rounding to measure.

        At the first update all ratios are 1, and the errors of old and new log-probs cancel, where both passes round
        alike. A backend may round otherwise in the one than in the other, because it computes them in other batches.
        """
        return self if self.compute == torch.float64 else replace(self, fused=True)
