"""Trains a tiny Llama in plain loops, in this process or in ranks, for tests of parity.record."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import parity
from conformance.core.errors import UsageError
from conformance.core.host import FIXTURES
from conformance.runtime import RankContext

ONE = RankContext(rank=0, world_size=1, device="cpu", beat=lambda phase: None)


EXAMPLES = Path(__file__).parents[2] / "examples" / "record"


def script(name: str) -> ModuleType:
    """A script of examples/record, as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny(family: str = "llama") -> Any:
    torch.manual_seed(0)
    folder = FIXTURES / "models" / family
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True)


def batches() -> list[list[Tensor]]:
    """Six rows of token ids, of lengths that differ, for each of three steps."""
    generator = torch.Generator().manual_seed(1)
    lengths = [[5, 17, 9, 30, 8, 12], [24, 6, 13, 11, 5, 19], [8, 21, 7, 16, 10, 6]]
    return [[torch.randint(8, 400, (n,), generator=generator) for n in row] for row in lengths]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recorder: Any,
    *,
    context: RankContext = ONE,
    order: Callable[[Sequence[Tensor]], Sequence[Tensor]] = list,
    epochs: int = 1,
    autocast: bool = False,
) -> None:
    """Steps on the mean over all tokens; every row is a micro-batch, and ranks take rows in turn."""
    for rows in batches() * epochs:
        own = order(rows[context.rank :: context.world_size])
        total, tokens = sum(len(row) - 1 for row in rows), sum(len(row) - 1 for row in own)
        summed = 0.0
        for row in own:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                logits = model(input_ids=row[None]).logits[0, :-1].float()
            loss = nn.functional.cross_entropy(logits, row[1:], reduction="sum")
            (loss * context.world_size / total).backward()  # DDP and FSDP take the mean over ranks
            summed += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if recorder is not None:
            recorder.step(loss=summed / tokens, tokens=tokens, batch=own)


def recorded(out: Path, *, model: nn.Module | None = None, full: bool = False, **how: Any) -> Path:
    """A record of the training of a model, the tiny Llama if none is given, in this process."""
    model = model or tiny()
    optimizer = adamw(model)
    with parity.record(model, optimizer, out=out, full=full) as recorder:
        train(model, optimizer, recorder, **how)
    return out


def fsdp2(context: RankContext, *, out: str) -> None:
    """Every layer and the whole are sharded; with three ranks, unevenly."""
    model = tiny()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    _record(model, context, out)


def ddp(context: RankContext, *, out: str) -> None:
    _record(DistributedDataParallel(tiny()), context, out)


def unreduced(context: RankContext, *, out: str) -> None:
    """Each rank trains by itself, as where DDP was forgotten."""
    _record(tiny(), context, out)


def sharded_twice(context: RankContext, *, out: str) -> None:
    """Tensor parallel MLPs, on the same rows, sharded by FSDP2 in the other dimension of the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tiny()
    plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = adamw(model)
    with parity.record(model, optimizer, out=out) as recorder:
        for rows in batches():
            own = rows[context.rank // 2 :: 2]
            total, tokens = sum(len(row) - 1 for row in rows), sum(len(row) - 1 for row in own)
            summed = 0.0
            for row in own:
                logits = model(input_ids=row[None]).logits[0, :-1]
                loss = nn.functional.cross_entropy(logits, row[1:], reduction="sum")
                (loss * 2 / total).backward()
                summed += float(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            if context.rank % 2 == 0:
                recorder.step(loss=summed / tokens, tokens=tokens, batch=own)
            else:  # the other half of the same model has the same rows
                recorder.step()


def failing(context: RankContext, *, out: str) -> dict[str, str]:
    """What a rank says of errors that one rank alone runs into."""

    def said(action: Callable[[], object]) -> str:
        try:
            action()
        except (UsageError, RuntimeError, KeyError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def record(folder: str, **how: Any) -> Any:
        return parity.record(model, torch.optim.SGD(model.parameters(), lr=0.1), out=Path(out) / folder, **how)

    model, first = nn.Linear(4, 4), context.rank == 0
    if first:
        (Path(out) / "taken").mkdir(parents=True)
        (Path(out) / "taken" / "record.jsonl").write_text("{}\n", encoding="utf-8")
    found = {
        "taken": said(lambda: record("taken")),
        "names": said(lambda: record("names", names=(lambda name: name) if first else {}.__getitem__)),
        "usage": said(lambda: record("usage", names=(lambda name: name) if first else (lambda name: ""))),
    }
    with record("run") as recorder:
        found["rows"] = said(lambda: recorder.step(batch=[[1, 2]] if first else [[1.5]]))
        found["tokens"] = said(lambda: recorder.step(loss=1.0, tokens=4 if first else None))
        recorder.step(loss=1.0, batch=[[1, 2]])
        if first:
            (Path(out) / "run" / "step-000001.safetensors.unfinished").mkdir()
        next(iter(recorder._optimizers)).step()
        found["disk"] = said(recorder.step)
    return found


def _record(model: nn.Module, context: RankContext, out: str) -> None:
    optimizer = adamw(model)
    with parity.record(model, optimizer, out=out) as recorder:
        train(model, optimizer, recorder, context=context)
