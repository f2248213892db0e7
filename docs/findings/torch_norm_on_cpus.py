"""torch: norms of float32 tensors lose digits on a CPU, more with every element.

Exit code 0: defect present. 1: gone. See torch-norm-on-cpus.md.
"""

import sys

import torch

SIZES = (10**4, 10**6, 2**24)


def main() -> bool:
    torch.set_num_threads(1)
    worst = {"torch.norm": 0.0, "foreach norm": 0.0, "REMEDY: in float64": 0.0, "REMEDY: sum of squares": 0.0}
    for size in SIZES:
        tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1e-3
        right = tensor.double().square().sum().sqrt().item()
        norms = (
            torch.norm(tensor),
            torch._foreach_norm([tensor])[0],
            torch.norm(tensor, dtype=torch.float64),
            tensor.square().sum().sqrt(),
        )
        for name, norm in zip(worst, norms, strict=True):
            ratio = norm.item() / right
            worst[name] = max(worst[name], abs(ratio - 1))
            print(f"{size:10,} elements  {name:24} {norm.item():.9f} (right: {right:.9f}), ratio - 1: {ratio - 1:.1e}")
    library, foreach, *remedies = worst.values()
    return min(library, foreach) > 1e-4 and max(remedies) < 2e-7


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
