"""Trains a tiny Llama in the loops of several libraries, in ranks, for tests of parity.record.

``fault`` names a parameter of which every gradient is multiplied by 3 in the backward pass.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from recording_tasks import adamw, batches, script, tiny, train
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import parity
from conformance.core.host import FIXTURES
from conformance.runtime import RankContext
from conformance.spec.layout import Layout


def plant(models: Sequence[nn.Module], fault: str) -> None:
    found = [p for model in models for name, p in model.named_parameters() if fault and name.endswith(fault)]
    for parameter in found:
        parameter.register_hook(lambda gradient: 3 * gradient)


def deepspeed(context: RankContext, *, out: str, fault: str = "", **settings: Any) -> None:
    from impl.deepspeed import global_state

    global_state.enter("cpu", Layout.parse("dp2"))
    model = tiny()
    plant([model], fault)
    script("deepspeed_loop").train(model, batches(), out, **settings)
    global_state.leave()


def megatron(
    context: RankContext, *, out: str, layout: str, folder: str, fault: str = "", precision: Any = "exact"
) -> None:
    """Megatron's DDP, schedules and optimizer, as impl.megatron sets them up on the CPU."""
    from megatron_tasks import new, opened
    from megatron_tasks import train as train_step

    with opened(context, layout, precision) as ranks:
        model = new(ranks, folder)
        plant(model.chunks, fault)
        with parity.record(list(model.chunks), model.optimizer, out=out, full=True) as recorder:
            for step in range(3):
                train_step(ranks, model, step)
                recorder.step()
        model.teardown()


def trl(context: RankContext, *, out: str, library: str, fault: str = "", zero: int | None = None) -> None:
    """The example's GRPOTrainer, with DDP over the ranks, or a stage of ZeRO."""
    sys.path.append(library)
    from datasets import Dataset
    from transformers import AutoTokenizer

    config: dict[str, Any] = {}
    if zero is not None:
        from impl.deepspeed import global_state

        global_state.enter("cpu", Layout.parse("dp2"))
        settings = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": zero}}
        config = {"deepspeed": settings | {"zero_allow_untested_optimizer": True, "gradient_clipping": "auto"}}
    model = tiny()
    plant([model], fault)
    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / "models" / "llama")
    prompts = Dataset.from_list([{"prompt": f"What is {n} + {n}?"} for n in range(8)])
    script("trl_grpo").train(model, tokenizer, prompts, out, use_cpu=True, disable_tqdm=True, **config)


def fsdp1(context: RankContext, *, out: str, originals: bool, fault: str = "") -> None:
    """Every layer and the rest are flattened and sharded."""
    model = tiny()
    plant([model], fault)
    sharded = FullyShardedDataParallel(
        model,
        use_orig_params=originals,
        device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
    )
    optimizer = adamw(sharded)
    with parity.record(sharded, optimizer, out=out, full=True) as recorder:
        train(sharded, optimizer, recorder, context=context)


def verl(context: RankContext, *, out: str, fault: str = "") -> None:
    """The example's FSDP2 engine, whose gradient is wrong when the optimizer begins its step."""
    environment = mock.patch.dict("os.environ", {"VERL_DISABLE_FLASH_ATTN_CE": "1"})  # which needs a GPU
    with environment, parity.on_cpu(stand_ins=("vllm",)):
        example = script("verl_engine")
        worker = example.build(str(FIXTURES / "models" / "llama"))
        found = [p for name, p in worker.engine.module.named_parameters() if fault and name.endswith(fault)]

        def spoil(*step: Any) -> None:
            for parameter in found:
                parameter.grad.mul_(3)

        worker.engine.optimizer.register_step_pre_hook(spoil)
        example.train(worker, batches(), out)


def openrlhf(context: RankContext, *, out: str, fault: str = "") -> None:
    """OpenRLHF's script for SFT on the example's strategy, with an optimizer that needs no CUDA."""
    folder = Path(f"{out}-data")
    folder.mkdir(exist_ok=True)
    shutil.copy(FIXTURES / "data" / "word_problems.jsonl", folder / f"{context.rank}.jsonl")
    options: dict[str, object] = {
        **{"model.model_name_or_path": FIXTURES / "models" / "llama", "ckpt.output_dir": f"{out}-checkpoint"},
        **{"data.dataset": folder / f"{context.rank}.jsonl", "data.input_key": "question", "data.output_key": "answer"},
        **{"train.micro_batch_size": 2, "train.batch_size": 8, "data.max_samples": 24, "train.max_epochs": 1},
        **{"ds.attn_implementation": "sdpa", "adam.lr": 1e-3, "max_norm": 1e6},
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with (
        parity.on_cpu(stand_ins=("vllm",)),
        mock.patch.dict("os.environ", {"RECORD": out, "DS_ACCELERATOR": "cpu"}),
        mock.patch("deepspeed.ops.__compatible_ops__", {}),
        mock.patch("sys.argv", ["train_sft", *words]),
    ):
        example = script("openrlhf_sft")
        settings, begin = example.Recording.get_ds_train_config, example.Recording._ds_init_train_model

        def on_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
            config = settings(self, *args, **kwargs)
            config.get("optimizer", {"params": {}})["params"]["torch_adam"] = True
            return config

        def planted(self: Any, model: nn.Module, config: Any) -> Any:
            plant([model], fault)
            return begin(self, model, config)

        example.Recording.get_ds_train_config, example.Recording._ds_init_train_model = on_cpu, planted
        example.main()
