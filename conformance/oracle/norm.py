"""RMSNorm."""

import torch
from torch import Tensor

from conformance.oracle.parts import Norm
from conformance.oracle.policy import Policy


def rms_norm(x: Tensor, weight: Tensor, norm: Norm, policy: Policy) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467 equation 4).

    Llama rounds to the compute dtype before it multiplies by the weight, OLMo 2 and Gemma (weight: 1 + w) after it.
    """
    x = x.to(policy.stable)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    if not norm.rounds_last:
        assert not norm.plus_one
        return weight * x.to(policy.compute)
    weight = weight.to(policy.stable)
    return (x * (1 + weight if norm.plus_one else weight)).to(policy.compute)
