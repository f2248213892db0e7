"""Moves tensors of the CPU to the device without making the host wait for the device."""

import torch


def moved(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """``tensor`` on ``device``; the same tensor if it is there.

    A copy from the CPU to a GPU is made from pinned memory. From any other memory, the host would wait until everything
    that was asked of the GPU before is done. All other copies are made when this function returns.
    """
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        # Tensors that have a number at several places, as expanded ones have, cannot be pinned.
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
