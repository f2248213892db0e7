"""torch.compile on several ranks: each rank times its kernels and takes the fastest, so replicas get different bits.

Two processes compile a norm and its gradients, as two ranks of tensor parallelism do that hold the same weight and the
same activations. Each has a cache of its own, as on two hosts; on one host they share one, and choose at the same time.
Needs a GPU; with two, each process has one. Exit code 0: as described, which is that gradients differ between the
processes, and do not where torch.compile is asked to be deterministic. 1: not so. See inductor-ranks-choose.md.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import torch

TOKENS = (96, 200, 384, 1000, 2048, 3000, 4096, 6000)
WIDTHS = (1536, 4096)


def norm(x: Any, weight: Any) -> Any:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype) * weight


def rank(number: int, *, deterministic: bool) -> None:
    """Print digests of the gradients, by shape."""
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    found = {}
    for width in WIDTHS:
        for tokens in TOKENS:
            torch._dynamo.reset()
            compiled = torch.compile(norm, dynamic=False, options={"deterministic": deterministic})
            generator = torch.Generator().manual_seed(tokens * width)
            x, upstream = (torch.randn(tokens, width, generator=generator).bfloat16().to(device) for _ in range(2))
            weight = torch.ones(width, dtype=torch.bfloat16, device=device)
            inputs = x.requires_grad_(), weight.requires_grad_()
            gradients = torch.autograd.grad(compiled(*inputs), inputs, upstream)
            found[f"{tokens} x {width}"] = [
                hashlib.sha256(its.float().cpu().numpy().tobytes()).hexdigest() for its in gradients
            ]
    print("FOUND " + json.dumps(found))


def both(*, deterministic: bool) -> bool:
    """Whether two processes get the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for number in range(2):
            cache = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{number}", "TRITON_CACHE_DIR": f"{folder}/{number}/triton"}
            command = [sys.executable, __file__, str(number), str(int(deterministic))]
            started.append(subprocess.Popen(command, env={**os.environ, **cache}, stdout=subprocess.PIPE, text=True))
        lines = [process.communicate()[0].splitlines() for process in started]
        assert not any(process.returncode for process in started), "a process failed"
        first, second = (json.loads(its[-1].removeprefix("FOUND ")) for its in lines)
    apart = [shape for shape in first if first[shape] != second[shape]]
    told = f"{len(apart)} of {len(first)} shapes {apart[:5]}"
    print(f"deterministic: {deterministic}; other bits on the second rank: {told}")
    return not apart


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank(int(sys.argv[1]), deterministic=sys.argv[2] == "1")
        sys.exit(0)
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    differs = any(not both(deterministic=False) for _ in range(3))  # by chance, so until it is so
    sys.exit(0 if differs and both(deterministic=True) else 1)
