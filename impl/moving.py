"""Moves tensors between the CPU and the device without making the host wait for the device."""

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


class Reading:
    """Numbers of the device that the host will read later.

    The host then waits for what the device was asked for before this object was made, and for nothing after that, so
    that it can ask for more in the meantime, as for an update.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """``tensor``: with one dimension; nothing writes to it any more."""
        self._numbers = tensor.detach().to("cpu", non_blocking=True)  # of a GPU: into pinned memory
        self._copied = torch.cuda.Event() if tensor.is_cuda else None
        if self._copied:
            self._copied.record()

    def numbers(self) -> list[float]:
        if self._copied and not self._copied.query():
            self._copied.synchronize()
        return list(self._numbers.tolist())
