"""Sums of squares for gradient norms, to the last digits on a CPU as well (docs/findings/torch-norm-on-cpus.md)."""

import torch


def sums_of_squares(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The sum of squares of each tensor, a float64 scalar."""
    if tensors[0].dtype == torch.float64:
        # torch's norm adds up one number after another on a CPU, and is 5e-15 off for a million; its sum adds up pairs.
        return [tensor.square().sum() for tensor in tensors]
    return [norm.square() for norm in torch._foreach_norm(tensors, dtype=torch.float64)]  # without copies in float64
