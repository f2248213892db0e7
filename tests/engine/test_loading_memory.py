"""No rank holds a whole model while it loads one: beside its own part, a rank has a few chunks of a file in memory.

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

from conformance.core.host import FIXTURES
from conformance.models.folders import weight_shapes
from conformance.runtime import Pool
from conformance.spec.layout import Layout
from conformance.spec.precision import PrecisionName
from impl.interface.sharded_safetensors import CHUNK, MAPPED, TensorWriter

MIB, FLOAT64 = 2**20, 8
# Mapped pages, chunks in two dtypes and what is made of them, and 24 MiB of all else that setting up a model does.
MARGIN = MAPPED + 4 * CHUNK * FLOAT64 + 24 * MIB
MIXTURE = {
    **{"hidden_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 5, "num_experts": 16},
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


# The share of a rank, in copies of the whole model's masters: FSDP2's parts; DeepSpeed's parameters (half as large in
# bf16), masters where they are others, and the gradients of masters, which it allocates when an engine is built. ZeRO-1
# in bf16 sums whole gradients, and ZeRO-0 in bf16 makes a step with all that belongs to one. With offload, ZeRO-1
# and 2 have a copy of the rank's parameters, and no whole gradients, and ZeRO-3 has two buffers of the masters'
# gradients. Megatron's parameters and the gradients that it allocates for them; in bf16 gradients are in float32, and
# there are masters. FSDP2 has nothing but masters, also in bf16. In its `ep2.tp2` each rank has half of the experts and
# a quarter of all else.
TP2 = 0.57  # AutoTP leaves the embedding whole on each rank
EXPERTS = 0.863  # the experts' part of the mixture
SHARE: dict[tuple[str, str, PrecisionName], float] = {
    ("fsdp2", "dp2", "exact"): 1 / 2,
    ("fsdp2", "tp2", "exact"): 1 / 2,
    ("fsdp2", "tp2.plan", "exact"): 1 / 2,
    ("fsdp2", "sp2", "exact"): 1 / 2,
    ("fsdp2", "sp2.zigzag", "exact"): 1 / 2,
    ("fsdp2", "dp2.offload", "exact"): 1 / 2,
    ("fsdp2", "ep2", "exact"): 1 / 2,
    ("fsdp2", "ep2.tp2", "exact"): EXPERTS * 1 / 2 + (1 - EXPERTS) * 1 / 4,
    ("fsdp2", "dp2.tp2", "exact"): 1 / 4,
    ("fsdp2", "dp2.sp2", "exact"): 1 / 4,
    ("fsdp2", "dp2.rep2", "exact"): 1,  # nothing is cut
    ("fsdp2", "dp2", "bf16"): 1 / 2,
    ("fsdp2", "dp2.ep2", "exact"): 1 / 4,
    ("fsdp2", "tp2.seqpar.losspar", "exact"): 1 / 2,
    ("deepspeed", "dp2.zero0", "exact"): 1,
    ("deepspeed", "dp2.zero0", "bf16"): 1 / 2 + 1 + 1 + 2,
    ("deepspeed", "dp2.zero1", "bf16"): 1 / 2 + 1 / 2 + 1,
    ("deepspeed", "dp2.zero2", "bf16"): 1 / 2 + 1 / 2 + 1 / 2,
    ("deepspeed", "dp4.zero3", "exact"): 3 * 1 / 4,
    ("deepspeed", "sp4.zero3", "bf16"): 1 / 8 + 1 / 4 + 1 / 4,
    ("deepspeed", "dp2.zero1", "exact"): 1 + 1 / 2 + 1 / 2,
    ("deepspeed", "dp2.zero2", "exact"): 1 + 1 / 2 + 1 / 2,
    ("deepspeed", "ulysses2.zero3", "exact"): 3 * 1 / 2,
    ("deepspeed", "sp2.zero3.ring", "exact"): 3 * 1 / 2,
    ("deepspeed", "dp2.zero3.leaf", "exact"): 3 * 1 / 2,
    ("deepspeed", "dp2.zero1.offload", "bf16"): 1 / 2 + 1 / 4 + 1 / 2 + 1 / 2,
    ("deepspeed", "dp2.zero2.offload", "exact"): 1 + 3 * 1 / 2,
    ("deepspeed", "dp2.zero3.offload", "exact"): 4 * 1 / 2,
    ("deepspeed", "dp2.zero3.offload", "bf16"): 1 / 4 + 3 * 1 / 2,
    ("deepspeed", "ulysses2.zero1", "bf16"): 1 / 2 + 1 / 2 + 1,
    ("deepspeed", "sp2.zero2", "exact"): 1 + 1 / 2 + 1 / 2,
    ("deepspeed", "tp2.zero0", "exact"): TP2,
    ("deepspeed", "tp2.zero2", "exact"): TP2 * (1 + 1 + 1),  # the only data rank has all masters and their gradients
    ("deepspeed", "dp2.tp2.zero1", "exact"): TP2 * (1 + 1 / 2 + 1 / 2),
    ("deepspeed", "dp2.tp2.zero3", "exact"): TP2 * 3 * 1 / 2,
    ("megatron", "dp2", "exact"): 2,
    ("megatron", "dp2.zero1", "exact"): 2,
    ("megatron", "dp2.zero1", "bf16"): 1 / 2 + 1 + 1 / 2,
    ("megatron", "tp2", "exact"): 2 * 1 / 2,
    ("megatron", "tp2.sp2", "exact"): 2 * 1 / 2,
    ("megatron", "pp2", "exact"): 2 * 1 / 2,
}


def beside_its_share(backend: str, layout: str, precision: PrecisionName, largest: int) -> float:
    """What a rank may hold of the largest parameter, whose master has as many bytes. DeepSpeed: at ZeRO-3 the parameter
    itself, which is about to be cut; with an offloaded optimizer of ZeRO-1 or 2 two buffers in the dtype of the
    parameters, through which gradients get to the host. Megatron in bf16: the master, of which a rank then keeps its
    stretch."""
    if backend == "megatron":
        return 0 if precision == "exact" else largest
    if "zero3" in layout:
        return largest
    return 2 * largest * (1 if precision == "exact" else 1 / 2) if "zero" in layout and "offload" in layout else 0


@pytest.mark.parametrize(
    ("backend", "layout", "precision"),
    [case if case == ("fsdp2", "dp2", "exact") else exhaustive(*case) for case in SHARE],
)
def test_no_rank_holds_more_than_its_share_while_it_loads(
    pool: Pool, tmp_path: Path, backend: str, layout: str, precision: PrecisionName
) -> None:
    make = large_mixture if Layout.parse(layout).ep > 1 else large_model
    sizes = make(folder := tmp_path / "large")
    ranks = Ranks(pool=pool, folder=tmp_path, backend=backend, layout=layout, precision=precision)
    found = ranks("memory_tasks:load_large", folder=str(folder), fresh=True)
    double = 2 if precision == "exact" else 1  # the files are in float32
    whole, largest = double * sum(sizes), double * max(sizes)
    told = [{what: f"{size / MIB:.0f} MiB" for what, size in of_rank.items()} for of_rank in found]
    print(backend, layout, precision, f"of {whole / MIB:.0f} MiB", told)
    assert whole > double * 200 * MIB
    for of_rank in found:
        share = SHARE[backend, layout, precision] * whole
        assert of_rank["peak"] < share + beside_its_share(backend, layout, precision, largest) + MARGIN
