"""TransformerEngine multiplies float32 in TF32, whatever torch is told: its Linear beside torch's, and without it.

Needs TransformerEngine and a GPU. The library reads NVIDIA_TF32_OVERRIDE once, so each case has a process of its own.
"""

import os
import subprocess
import sys

CASE = """
import torch
import transformer_engine.pytorch as te

torch.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = False
x = torch.randn(64, 256, device="cuda", requires_grad=True)
theirs = te.Linear(256, 512, bias=False, params_dtype=torch.float32)
torchs = torch.nn.Linear(256, 512, bias=False, device="cuda")
torchs.weight.data.copy_(theirs.weight)


def results(layer, x):
    out = layer(x)
    out.square().sum().backward()
    found = out.detach(), x.grad, layer.weight.grad
    x.grad = layer.weight.grad = None
    return found


right = results(torchs.double(), x.double().detach().requires_grad_())
for layer in (torchs.float(), theirs):
    print(*(f"{float((one - exact).norm() / exact.norm()):.1e}" for one, exact in zip(results(layer, x), right)))
"""


def errors(**variables: str) -> list[list[float]]:
    """Relative errors of output, input gradient and weight gradient: of torch's Linear, then of TransformerEngine's."""
    done = subprocess.run([sys.executable, "-c", CASE], env=os.environ | variables, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return [[float(number) for number in line.split()] for line in done.stdout.splitlines()[-2:]]


def main() -> int:
    torchs, theirs = errors()
    _, corrected = errors(NVIDIA_TF32_OVERRIDE="0")
    print("relative errors of output, input gradient and weight gradient, in float32 with allow_tf32 = False:")
    for name, found in (
        ("torch.nn.Linear", torchs),
        ("TransformerEngine's Linear", theirs),
        ("the same with NVIDIA_TF32_OVERRIDE=0", corrected),
    ):
        print(f"  {name:40}", *(f"{error:.1e}" for error in found))
    return 0 if min(theirs) > 1e-4 and max(*torchs, *corrected) < 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
