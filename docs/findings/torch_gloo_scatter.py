"""torch: ``scatter`` of gloo sends the memory behind a tensor, and not its numbers, if the tensor is not contiguous.

Two ranks on the CPU. Exit code 0: parts of columns arrive wrong, contiguous copies right. 1: not so.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def worker(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=rank, world_size=2)
    columns = torch.arange(8.0).view(2, 4).chunk(2, dim=1)
    found = []
    for parts in (columns, [part.contiguous() for part in columns]):
        own = torch.empty(2, 2)
        dist.scatter(own, list(parts) if rank == 0 else None, src=0)
        found.append(own)
    is_right = [torch.equal(own, columns[rank]) for own in found]
    print(
        f"rank {rank}: got {found[0].tolist()}, due {columns[rank].tolist()}; of contiguous copies right: {is_right[1]}"
    )
    dist.destroy_process_group()
    sys.exit(0 if is_right == [False, True] else 1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(worker, (folder,), 2, join=False, start_method="fork")
        for process in context.processes:
            process.join()
    sys.exit(max(process.exitcode for process in context.processes))
