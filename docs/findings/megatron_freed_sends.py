"""megatron-core: with overlapped sends, deallocate_pipeline_outputs frees activations that are still being sent.

Two ranks, CPU, equally fast or the second one slower. Exit code 0: defect present, and right without either option.
1: gone. See megatron-freed-sends.md.
"""

import megatron_on_cpu as on_cpu

STEPS = 8


def errors(rank: int, seconds: float, *, overlap: bool, deallocate: bool) -> list[float]:
    """The errors of the gradients when the same step is run several times; rank 1 is `seconds` slower."""
    settings = {"overlap_p2p_comm": overlap, "batch_p2p_comm": False, "deallocate_pipeline_outputs": deallocate}
    return [on_cpu.pipeline_errors(rank, seconds, **settings)[1] for _ in range(STEPS)]


def present(rank: int) -> bool:
    runs = {
        "overlap, deallocate": errors(rank, 0.0, overlap=True, deallocate=True),
        "overlap, deallocate, rank 1 slower": errors(rank, 0.002, overlap=True, deallocate=True),
        "deallocate, rank 1 slower": errors(rank, 0.002, overlap=False, deallocate=True),
        "REMEDY overlap, rank 1 slower": errors(rank, 0.002, overlap=True, deallocate=False),
    }
    if rank == 0:
        print(f"gradients against one process, relative error, the same step {STEPS} times (inf: not finite):")
        for name, found in runs.items():
            print(f"{name}: {' '.join(f'{error:.0e}' for error in found)}")
    _, wrong, waits, mended = runs.values()
    return max(wrong) > 1e-3 and max(*waits, *mended) < 1e-5


if __name__ == "__main__":
    on_cpu.two_ranks(present)
