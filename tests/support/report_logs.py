"""Provides logs of ranks for the sample of the reports (tests/support/report_sample.py)."""

from pathlib import Path


def write_logs(folder: Path) -> None:
    """The logs of two ranks, one of which raised an error in colour."""
    folder.mkdir(parents=True)
    (folder / "rank-0.log").write_text(
        "".join(f"03:13:0{i} rank 0: waiting for rank 1 in all_reduce (32 elements, tp)\n" for i in range(8))
    )
    (folder / "rank-1.log").write_text(
        "03:13:01 rank 1: setup tp2 from weights.safetensors\n"
        "Traceback (most recent call last):\n"
        '  File "conformance/runtime/worker_main.py", line 88, in run_cell\n'
        "    backend.setup(scenario, layout, weights)\n"
        '  File "impl/megatron/strategy.py", line 141, in prepare\n'
        "    torch.distributed.broadcast(parameter, src=0, group=group)\n"
        "\x1b[31mRuntimeError: NCCL communicator was aborted on rank 1.\x1b[0m\n"
    )
