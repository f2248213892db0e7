"""No rank holds a whole model while it loads one: beside its own part, a rank has a few strips of a file in memory.

Ranks on a CPU have no other memory than the host's, so what is measured is all: the largest resident memory from before
a model is built until it can be trained, with pages of files.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from cells import exhaustive
from resume_runs import Ranks
from test_export_memory import large_model
from transformers import AutoConfig, AutoModelForCausalLM

from conformance.inputs.model import weight_shapes
from conformance.paths import FIXTURES
from conformance.world import Pool
from impl.files import MAPPED, STRIP, TensorWriter

MIB, FLOAT64 = 2**20, 8
# Mapped pages, strips in two dtypes and what is made of them, and 40 MiB of all else that setting up a model does.
MARGIN = MAPPED + 4 * STRIP * FLOAT64 + 40 * MIB
MIXTURE = {
    **{"hidden_size": 512, "moe_intermediate_size": 384, "num_hidden_layers": 4, "num_experts": 16},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 9000},
}


def large_mixture(folder: Path) -> list[int]:
    """A Qwen3-MoE of random weights, in float32, whose experts are tensors of their own in the file, as published."""
    small = FIXTURES / "models" / "qwen3-moe"
    shutil.copytree(small, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((small / "config.json").read_text(encoding="utf-8")) | MIXTURE
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    generator = torch.Generator().manual_seed(0)
    with TensorWriter(folder) as writer:
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.02
            prefix, stacked, kind = name.partition("experts.")
            for number, expert in enumerate(drawn if stacked else ()):
                parts = {"gate_proj": expert.chunk(2)[0], "up_proj": expert.chunk(2)[1]}
                for part, tensor in (parts if kind == "gate_up_proj" else {"down_proj": expert}).items():
                    writer.add(f"{prefix}experts.{number}.{part}.weight", tensor.contiguous())
            if not stacked:
                writer.add(name, drawn)
    return [math.prod(shape) * 4 for shape in weight_shapes(folder).values()]


# What a rank holds of each of the model's numbers when it can be trained: of FSDP2 its part alone. DeepSpeed has masters
# beside what is computed with, ZeRO 1 to 3 allocate the moments at once, and ZeRO-3 a buffer of gradients.
HELD = {
    ("fsdp2", "dp2"): 0.5,
    ("fsdp2", "tp2"): 0.6,  # the embedding is whole on each rank
    ("fsdp2", "tp2.plan"): 0.5,
    ("fsdp2", "sp2"): 0.5,
    ("fsdp2", "ep2"): 0.5,
    ("fsdp2", "dp2.tp2"): 0.3,
    ("deepspeed", "dp2.zero0"): 1.0,
    ("deepspeed", "dp2.zero1"): 2.5,
    ("deepspeed", "dp2.zero2"): 2.5,
    ("deepspeed", "dp2.zero3"): 2.5,
    ("deepspeed", "sp2.zero3"): 2.5,
    ("deepspeed", "tp2.zero0"): 0.6,
    ("deepspeed", "tp2.zero3"): 2.5,
}


@pytest.mark.parametrize(
    ("backend", "layout"),
    [case if case == ("fsdp2", "dp2") else exhaustive(*case) for case in HELD],
)
def test_no_rank_holds_more_than_its_part_while_it_loads(
    pool: Pool, tmp_path: Path, backend: str, layout: str
) -> None:
    """And, of ZeRO-3, a parameter that is about to be cut."""
    make = large_mixture if layout.startswith("ep") else large_model
    sizes = make(folder := tmp_path / "large")
    ranks = Ranks(pool=pool, folder=tmp_path, backend=backend, layout=layout, precision="exact")
    found = ranks("memory_tasks:load_large", folder=str(folder), fresh=True)
    whole, largest = 2 * sum(sizes), 2 * max(sizes)  # in float64
    told = [{what: f"{size / MIB:.0f} MiB" for what, size in of_rank.items()} for of_rank in found]
    print(backend, layout, f"of {whole / MIB:.0f} MiB", told)
    assert whole > 400 * MIB
    for of_rank in found:
        assert of_rank["held"] < HELD[backend, layout] * whole + 40 * MIB
        assert of_rank["peak"] < of_rank["held"] + MARGIN + (largest if "zero3" in layout else 0)
