"""benchmarks/waits.py: where the host waits for the GPU in a step of a reference backend.

A wait empties the GPU's queue. Of ours, SFT of a dense model has one, for the gradient norm, and the step's other
numbers have arrived by then; the rest are the libraries' own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODEL = BENCHMARKS.parent / "fixtures/models/pangu"
sys.path.insert(0, str(BENCHMARKS))
from waits import places  # noqa: E402

from impl.interface.distributed import moved  # noqa: E402

# What waits in a step of one micro-batch, by what its place has to contain, and how often at most.
PACKED = {"find_packed_sequence_indices [": 1}  # of transformers
FSDP2 = {**PACKED, "impl/fsdp2/model.py: optimizer_step > impl/interface/distributed.py: numbers > ": 1}
DEEPSPEED = {**PACKED, "impl/deepspeed/model.py: optimizer_step [": 1, "deepspeed/runtime/": 8}  # overflow, norms
MEGATRON = {"clip_grads.py: get_grad_norm_fp32 [": 1}

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def function(name: str, begin: float, end: float) -> dict[str, object]:
    return {"cat": "python_function", "name": name, "ts": begin, "dur": end - begin}


def test_a_wait_is_placed_in_the_innermost_functions_around_it() -> None:
    functions = [  # in no order
        function("<built-in method to>", 20, 30),
        function("impl/interface/distributed.py(6): moved", 20, 30),
        function("impl/interface/micro_batches.py(39): to", 12, 40),
        function("impl/engine/trainer.py(90): ended before", 11, 19),
        function("impl/engine/trainer.py(91): ends meanwhile", 13, 22),
        function("impl/engine/trainer.py(98): step_inputs", 10, 40),
        function("impl/engine/trainer.py(30): train_step", 0, 100),
        function("torch/profiler/profiler.py(1): stop", 90, 100),
    ]
    call = {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 20, "dur": 5}
    of_device, of_event = {**call, "name": "cudaDeviceSynchronize"}, {**call, "name": "cudaEventSynchronize"}
    ending, launch = {**call, "ts": 95, "dur": 1}, {**call, "name": "cudaLaunchKernel"}
    kernel = {**call, "cat": "kernel"}
    inner = "impl/interface/micro_batches.py: to > impl/interface/distributed.py: moved"
    where = f"impl/engine/trainer.py: step_inputs > {inner}"
    found = places([*functions, call, launch, ending, kernel, of_device, of_event, {**call, "name": "cudaMemcpy"}])
    names = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    assert found == [f"{where} [{name}]" for name in names]


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
@pytest.mark.usefixtures("leased_gpus")
def test_tensors_get_to_a_gpu_as_they_are_whatever_their_strides() -> None:
    numbers = torch.arange(6.0)
    for tensor in (numbers, numbers.expand(3, 6), numbers.view(2, 3).T, numbers[::2], numbers[:0], numbers.cuda()):
        found = moved(tensor, "cuda")
        assert found.is_cuda
        assert torch.equal(found.cpu(), tensor.cpu())


@needs_two_gpus
@pytest.mark.parametrize(
    ("backend", "layout", "expected"),
    [
        *(("fsdp2", layout, FSDP2) for layout in ("dp2", "tp2", "sp2", "sp2.zigzag")),
        *(("deepspeed", layout, DEEPSPEED) for layout in ("dp2.zero2", "dp2.zero3", "sp2.zero1")),
        *(("megatron", layout, MEGATRON) for layout in ("dp2.zero1.overlap", "tp2.ckpt", "sp2", "pp2")),
    ],
)
def test_a_step_waits_where_numbers_are_read_and_where_the_library_does(
    backend: str, layout: str, expected: dict[str, int]
) -> None:
    program = [str(BENCHMARKS / "ours.py"), str(MODEL), "--backend", backend, "--layout", layout]
    sizes = ["--seq", "256", "--rows", "2", "--steps", "1", "--waits"]
    paths = f"{BENCHMARKS.parent}:{os.environ.get('PYTHONPATH', '')}"
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program, *sizes],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    told = [line.removeprefix("WAITS ") for line in ended.stdout.splitlines() if line.startswith("WAITS ")]
    assert told, ended.stderr[-3000:]
    waits: dict[str, int] = json.loads(told[0])
    of_each = {name: sum(count for place, count in waits.items() if name in place) for name in expected}
    assert sum(of_each.values()) == sum(waits.values()), waits
    assert all(of_each[name] <= most for name, most in expected.items()), waits
    # Ours does not wait where the GPU is the faster one; the libraries always ask.
    assert of_each[next(iter(expected))] == 1, "a count that misses this one cannot be trusted"
