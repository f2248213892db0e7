"""The dtype that models compute in, by the precision of a scenario; masters have another one."""

import torch

from conformance.scenario import Precision

COMPUTE_DTYPES: dict[Precision, torch.dtype] = {
    "exact": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
