"""Moves tensors of the CPU to the device without making the host wait for the device."""

import torch


def moved(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """``tensor``, which is on the CPU, on ``device``; the same tensor if that is the CPU.

    A copy to a GPU is made from pinned memory. From any other memory, the host would wait until everything that was
    asked of the GPU before is done.
    """
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
