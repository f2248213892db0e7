"""megatron-core: batch_p2p_comm, the default, swaps activations and gradients in interleaved pipelines of two ranks.

Two ranks, CPU. Exit code 0: defect present, and right without it. 1: gone. See megatron-batched-p2p.md.
"""

import megatron_on_cpu as on_cpu
import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

NAMES = ["output of rank 0", "output of rank 1", "gradient of rank 0", "gradient of rank 1"]


def received(rank: int, batch: bool) -> tuple[str, str]:
    """What a rank gets in one exchange in both directions: (as its input, as the gradient of its output)."""
    config = ModelParallelConfig(pipeline_dtype=torch.float32, batch_p2p_comm=batch, batch_p2p_sync=False)
    output, gradient = (torch.tensor([float(number)]) for number in (rank, 2 + rank))
    found = P2PCommunicator(dist.group.WORLD, config).send_forward_backward_recv_forward_backward(
        output, gradient, recv_prev=True, recv_next=True, tensor_shape=(1,)
    )
    return NAMES[int(found[0])], NAMES[int(found[1])]


def present(rank: int) -> bool:
    wrong, right = received(rank, batch=True), received(rank, batch=False)
    default, again = (on_cpu.pipeline_errors(rank) for _ in range(2))
    mended = [on_cpu.pipeline_errors(rank, batch_p2p_comm=False, overlap_p2p_comm=overlap) for overlap in (False, True)]
    if rank == 0:
        print(f"rank 0, batched: gets {wrong[0]} as its input, and {wrong[1]} as the gradient of its output")
        print(f"rank 0, one by one: gets {right[0]} and {right[1]}")
        print("the interleaved schedule against one process, relative errors:")
        runs = {"core's defaults": default, "again": again, "REMEDY": mended[0], "REMEDY, overlap": mended[1]}
        for name, (loss, gradient) in runs.items():
            print(f"{name}: loss {loss:.1e}, gradients {gradient:.1e}")
    swapped = wrong == (NAMES[3], NAMES[1]) and right == (NAMES[1], NAMES[3])
    return rank == 0 and swapped and default[1] > 1 and default == again and max(map(max, mended)) < 1e-5


if __name__ == "__main__":
    on_cpu.two_ranks(present)
