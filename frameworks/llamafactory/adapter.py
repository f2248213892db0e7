"""LLaMA-Factory's SFT on torch DDP: ``run_sft`` runs whole, with its model, processors, collator, trainer, checkpoint.

The suite's documents take the place of encoded examples, and the loop pauses where it asks for the rows of a step.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

import parity

with parity.on_cpu(stand_ins=("torchaudio",)):
    from llamafactory.data.processor import PackedSupervisedDatasetProcessor, SupervisedDatasetProcessor
    from llamafactory.hparams import get_train_args
    from llamafactory.model import loader
    from llamafactory.train.sft import workflow

BACKENDS = ("LlamaFactory",)
PACKAGES = ("torch", "transformers", "accelerate", "llamafactory")


class ObservedTrainer(workflow.CustomSeq2SeqTrainer):  # type: ignore[misc]
    backend: "LlamaFactory"

    def get_train_dataloader(self) -> Iterator[Any]:
        self.backend.trainer = self
        while True:
            micro_batches = self.backend.loop.pause()  # until train_step gives the rows
            self.logprobs: dict[int, torch.Tensor] = {}
            self.rows = list(micro_batches)
            for rows in micro_batches:
                yield self.data_collator([self.backend.processed(row) for row in rows])

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        rows = self.rows.pop(0)
        logits = torch.cat([one[self.backend.places[row.index]] for one, row in zip(outputs.logits, rows, strict=True)])
        self.logprobs |= parity.by_row(parity.target_logprobs(logits[None], parity.flatten(rows)), rows)
        return loss

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.values = {"lr": self.optimizer.param_groups[0]["lr"]}
        if num_items_in_batch is not None:  # else it divides by micro-batches
            self.values["token_count"] = float(num_items_in_batch)
        if self.accelerator.sync_gradients:  # the last micro-batch: DDP has reduced, the trainer clips next
            self.backend.on_gradients("policy")
        return loss


class LlamaFactory:
    fresh_ranks = True

    @classmethod
    def describe(cls) -> parity.BackendInfo:
        url = "https://github.com/hiyouga/LLaMA-Factory"
        return parity.BackendInfo(name="llamafactory", packages=PACKAGES, url=url, default_zero=0)

    @classmethod
    def supports(cls, scenario: parity.Scenario, layout: parity.Layout) -> parity.Support:
        o, s = scenario.optimizer, scenario.schedule
        if layout != parity.Layout(dp=layout.dp):
            return parity.Unsupported(f"this adapter runs DDP only; use dp{layout.world_size}")
        if o.frozen or scenario.lora or scenario.router_z_loss or scenario.precision == "fp16":
            return parity.Unsupported("this adapter has no frozen parameters, LoRA, z-loss or fp16; use exact or bf16")
        if s.name != "constant" and s.total_steps <= scenario.steps:
            return parity.Unsupported("its training ends with the schedule; use total_steps above steps")
        return parity.Supported()

    def setup(
        self, scenario: parity.Scenario, layout: parity.Layout, weights: Mapping[str, Path], device: str
    ) -> dict[str, Any]:
        o, s, data, k = scenario.optimizer, scenario.schedule, scenario.data, scenario.accumulation
        self.deal, folder = {"dp_size": layout.dp, "accumulation": k}, weights["policy"]
        adamw = {"optim": "adamw_torch", "adam_beta1": o.betas[0], "adam_beta2": o.betas[1], "adam_epsilon": o.eps}
        names = {"constant": "constant_with_warmup", "cosine": "cosine_with_min_lr"}
        args = {
            **{"stage": "sft", "do_train": True, "finetuning_type": "full", "disable_gradient_checkpointing": True},
            **{"model_name_or_path": str(folder), "dataset": "the suite's", "template": "empty", "report_to": "none"},
            **{"trust_remote_code": parity.runs_code(folder, trusted=scenario.trust_remote_code)},
            # A packed row is padded to cutoff_len and has a token of padding at least; the collator pads to eights.
            **{"neat_packing": data.packed, "cutoff_len": 8 * math.ceil((data.max_len + 1) / 8)},
            **({"optim": "sgd", "optim_args": f"momentum={o.momentum}"} if o.name == "sgd" else adamw),
            **{"learning_rate": o.lr, "weight_decay": o.weight_decay, "max_grad_norm": o.max_grad_norm or 0.0},
            **{"lr_scheduler_type": names.get(s.name, s.name), "warmup_steps": s.warmup_steps},
            **({"lr_scheduler_kwargs": {"min_lr_rate": s.min_factor}} if s.name == "cosine" else {}),
            # The loop does not end by itself; the suite takes as many steps as it wants.
            **{"max_steps": scenario.steps + 1 if s.name == "constant" else s.total_steps, "ignore_data_skip": True},
            **{"gradient_accumulation_steps": k, "per_device_train_batch_size": data.rows // (layout.dp * k)},
            **{"use_cpu": device == "cpu", "bf16": scenario.precision == "bf16", "logging_steps": 1},
            **{"output_dir": "llamafactory", "save_strategy": "no", "disable_tqdm": True},
        }
        self.args = get_train_args(args)
        self.start(None)
        return self.args[2].to_sanitized_dict() | {"attention": self.trainer.model.config._attn_implementation}

    def start(self, checkpoint: str | None) -> None:
        """Runs the workflow up to its first request for rows, which comes after a checkpoint is loaded."""
        model_args, data_args, training_args, finetuning_args, _ = self.args
        training_args.resume_from_checkpoint = checkpoint
        if training_args.device.type == "cpu":  # "cpu:0", which torch.load refuses and newer transformers replace
            training_args._setup_devices = torch.device("cpu")
        if (dtype := torch.get_default_dtype()) == torch.float64:  # instead of float32, for masters and for masks
            model_args.compute_dtype, finetuning_args.pure_bf16 = dtype, True
        processor = PackedSupervisedDatasetProcessor if data_args.neat_packing else SupervisedDatasetProcessor

        def config(_: Any) -> Any:  # load_model follows its dtype
            folder, code = model_args.model_name_or_path, model_args.trust_remote_code
            return transformers.AutoConfig.from_pretrained(folder, dtype=dtype, trust_remote_code=code)

        def dataset(template: Any, *_: Any, stage: str, **tokenizer_module: Any) -> dict[str, Any]:
            self.processor, self.places = processor(template, data_args=data_args, **tokenizer_module), {}
            self.processor._encode_data_example = lambda prompt, **_: prompt[0]
            return {"train_dataset": []}

        def run(pause: Any) -> None:
            trainer = type("Trainer", (ObservedTrainer,), {"backend": self})
            replaced = {"CustomSeq2SeqTrainer": trainer, "get_dataset": dataset}
            with mock.patch.multiple(workflow, **replaced), mock.patch.object(loader, "load_config", config):
                workflow.run_sft(*self.args)

        self.loop = parity.Paused(run)
        self.loop.resume()

    def processed(self, row: parity.Row) -> dict[str, Any]:
        """Lays out a row with the processor, and notes the places of its tokens: packing sorts documents by length."""
        flat, lengths = parity.flatten([row]), [len(document.tokens) for document in row.documents]
        pairs = zip(flat.tokens[0].split(lengths), flat.labels[0].split(lengths), strict=True)
        documents = [[(tokens.tolist(), labels.tolist())] for tokens, labels in pairs]
        numbers = [[number] for number in range(len(documents))]  # as images, which move with their document
        examples = defaultdict(lambda: [None] * len(documents), _prompt=documents, _response=documents, _images=numbers)
        columns = self.processor.preprocess_dataset(examples)
        (order,) = columns.pop("images")
        places = torch.arange(sum(lengths)).split([lengths[number] for number in order])
        self.places[row.index] = torch.cat([places[order.index(number)] for number in range(len(order))])
        return {key: value for key, (value,) in columns.items()}

    def train_step(self, batch: parity.Batch, on_gradients: Callable[[str], None]) -> parity.StepMetrics:
        trainer, self.on_gradients = self.trainer, on_gradients
        self.loop.resume(batch.micro_batches(dp_rank=trainer.args.process_index, **self.deal))
        logged = {key: trainer.state.log_history[-1][key] for key in ("loss", "grad_norm")}
        return parity.StepMetrics(values=trainer.values | logged, rows={"logprob": trainer.logprobs})

    def named_tensors(self, kind: parity.TensorKind, model: str) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.trainer.model.named_parameters():
            yield name, parameter if kind == "weight" else parameter.grad

    def local_shards(self, kind: parity.TensorKind, model: str) -> Iterator[parity.Shard]:
        return parity.shards(self.named_tensors(kind, model))

    def save(self, path: Path) -> None:
        self.trainer.args.output_dir = str(path)
        self.trainer._save_checkpoint(self.trainer.model_wrapped, trial=None)

    def load(self, path: Path) -> None:
        self.loop.close()
        (checkpoint,) = path.glob("checkpoint-*")
        self.start(str(checkpoint))

    def export(self, path: Path, model: str) -> None:
        self.trainer.save_model(str(path))

    def teardown(self) -> None:
        self.loop.close()
