"""torch: on a CPU, gradients of a token that occurs often in bf16 are added up in bf16, and the sum stops growing.

Exit code 0: defect present. 1: gone. See torch-embedding-bf16.md.
"""

import sys

import torch
from torch.nn import functional as F

TIMES, WIDTH = (64, 256, 1024, 4096), 64


def main() -> bool:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    largest = {"embedding": 0.0, "REMEDY: embedding in float32": 0.0}
    for times in TIMES:
        gradients = (1 + 0.5 * torch.randn(times, WIDTH, generator=generator)).bfloat16()  # (occurrences, width)
        right = gradients.double().sum(dim=0)
        for name, dtype in zip(largest, (torch.bfloat16, torch.float32), strict=True):
            matrix = torch.zeros(2, WIDTH, dtype=dtype, requires_grad=True)
            F.embedding(torch.ones(times, dtype=torch.long), matrix).backward(gradients.to(dtype))
            assert matrix.grad is not None
            found = (matrix.grad[1].double() @ right / (right @ right)).item()
            largest[name] = max(largest[name], abs(found - 1))
            print(f"a token {times:5,} times  {name:28} {found:.5f} of the sum")
    library, remedy = largest.values()
    return library > 0.5 and remedy < 1e-5


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
