"""Exports stream: no rank holds more than a file of tensors besides its own part."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from memory import give_back, peak_above
from resume_runs import Ranks

from conformance.core.host import FIXTURES
from conformance.models.folders import weight_shapes
from conformance.runtime import Pool
from impl.interface.sharded_safetensors import TensorWriter
from impl.models.export import write_folder

MIB = 2**20
MARGIN = 24 * MIB  # of batches of small tensors, buffers of collective calls, and all else that a process does
SMALL = FIXTURES / "models" / "llama"
LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 9000, "head_dim": 96}


def large_model(folder: Path) -> list[int]:
    """A Llama of random weights, in float32; returns the bytes of each."""
    shutil.copytree(SMALL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((SMALL / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | LARGE), encoding="utf-8")
    sizes = {config[key]: size for key, size in LARGE.items()}
    sizes[config["num_key_value_heads"] * config["head_dim"]] = config["num_key_value_heads"] * LARGE["head_dim"]
    generator = torch.Generator().manual_seed(0)
    with TensorWriter(folder) as writer:
        for layer in range(LARGE["num_hidden_layers"]):
            for name, shape in weight_shapes(SMALL).items():
                if ("layers." not in name and layer) or "layers.1." in name:
                    continue
                drawn = torch.randn([sizes[size] for size in shape], generator=generator) * 0.02
                writer.add(name.replace("layers.0.", f"layers.{layer}."), drawn)
    return [math.prod(shape) * 4 for shape in weight_shapes(folder).values()]


def test_of_a_folder_that_is_written_one_file_is_in_memory(tmp_path: Path) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(64):
            yield f"weight.{number}", torch.full((MIB // 4,), float(number))

    def write() -> None:
        write_folder(tmp_path / "model", source=SMALL, weights=weights(), dtype="masters", file_size=8 * MIB)

    give_back()
    assert peak_above(write) < 16 * MIB
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 8


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        *(("fsdp2", layout) for layout in ("dp2", "tp2", "dp2.tp2", "sp2")),
        *(("deepspeed", layout) for layout in ("dp2.zero0", "dp2.zero1", "dp2.zero2", "dp2.zero3", "tp2.zero0")),
        *(("megatron", layout) for layout in ("tp2", "pp2", "dp2.zero1")),
    ],
)
def test_no_rank_holds_more_than_a_file_besides_its_part(pool: Pool, tmp_path: Path, backend: str, layout: str) -> None:
    """And a tensor that is put together, with the pieces that it is put together of."""
    sizes, file_size = large_model(folder := tmp_path / "large"), 32 * MIB
    ranks = Ranks(pool=pool, folder=tmp_path, backend=backend, layout=layout)
    peaks = ranks("memory_tasks:export_large", folder=str(folder), out=str(tmp_path / "out"), file_size=file_size)
    print(backend, layout, [{what: f"{peak / MIB:.0f} MiB" for what, peak in of_rank.items()} for of_rank in peaks])
    assert sum(sizes) > 200 * MIB
    for rank, of_rank in enumerate(peaks):
        assert max(of_rank.values()) < (file_size if rank == 0 else 0) + 2 * max(sizes) + MARGIN
