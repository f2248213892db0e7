"""DeepSpeed: with bf16 masters, gradients on a GPU are clipped by a factor that is rounded to bf16 first.

Needs a GPU. Clips as ZeRO-1, 2 and 3 do, with gradients on both devices. Exit code 0: defect present,
and with the norm in host memory each result is the nearest bf16 number. 1: gone. See deepspeed-bf16-clip.md.
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

LIMIT = 1.0


def clipped(stage: int, gradients: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    own: Any = SimpleNamespace(clip_grad=LIMIT, loss_scale=1.0, device=gradients.device)
    found = gradients.clone()
    if stage == 3:
        own.fp32_partitioned_groups_flat = [SimpleNamespace(grad=found)]
        DeepSpeedZeroOptimizer_Stage3.unscale_and_clip_grads(own, 0, norm)
    else:
        DeepSpeedZeroOptimizer.unscale_and_clip_grads(own, [found], norm)
    return found.cpu()


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    torch.manual_seed(0)
    gradients, norm = torch.randn(10_000).bfloat16(), torch.tensor(4.646)
    factor = 1 / torch.clamp((norm + 1e-6) / LIMIT, min=1.0)
    right = (gradients.double() * factor.double()).bfloat16()
    rounded = (gradients.double() * factor.bfloat16().double()).bfloat16()
    print(f"factor {factor:.6f}, in bf16 {factor.bfloat16():.6f}; numbers that are not the nearest, of {len(right)}:")
    present = True
    for stage in (2, 3):
        on_gpu = clipped(stage, gradients.cuda(), norm.cuda())
        cases = {
            "CPU": clipped(stage, gradients, norm),
            "GPU": on_gpu,
            "GPU, norm in host memory": clipped(stage, gradients.cuda(), norm),
        }
        off = {name: int((found != right).sum()) for name, found in cases.items()}
        print(f"ZeRO-{stage}: {off}; GPU as by the rounded factor: {bool((on_gpu == rounded).all())}")
        present &= off["GPU"] > len(right) / 10 and not off["CPU"] and not off["GPU, norm in host memory"]
    return 0 if present else 1


if __name__ == "__main__":
    sys.exit(main())
