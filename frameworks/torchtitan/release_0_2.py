"""Makes the Trainer of torchtitan 0.2, which is configured by a JobConfig and a TrainSpec."""

import dataclasses
from pathlib import Path
from typing import Any

from torchtitan.config import JobConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.models import llama3, qwen3
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer

import parity

__all__ = ["CONVENTIONS", "dist_utils", "make_trainer", "refuses"]

CONVENTIONS = (parity.DecaysAll(),)


def refuses(scenario: parity.Scenario) -> str:
    if scenario.data.packed:
        return (
            "torchtitan 0.2 finds documents of a row by end tokens, which the suite's lack; use packed = false, or 0.3"
        )
    return ""


def model_arguments(hf: dict[str, Any]) -> Any:
    """Returns torchtitan's arguments of a Hugging Face model."""
    dim, hidden = hf["hidden_size"], hf["intermediate_size"]
    shape: dict[str, Any] = {"dim": dim, "n_layers": hf["num_hidden_layers"], "n_heads": hf["num_attention_heads"]}
    shape |= {"n_kv_heads": hf["num_key_value_heads"], "vocab_size": hf["vocab_size"], "norm_eps": hf["rms_norm_eps"]}
    shape |= {"rope_theta": hf["rope_parameters"]["rope_theta"]}
    if hf["model_type"] == "qwen3":
        tied = hf["tie_word_embeddings"]
        return qwen3.Qwen3ModelArgs(**shape, head_dim=hf["head_dim"], hidden_dim=hidden, enable_weight_tying=tied)
    factor = (hidden + 0.5) / int(8 * dim / 3)  # torchtitan rounds the product down
    arguments = llama3.TransformerModelArgs(**shape, multiple_of=1, ffn_dim_multiplier=factor)
    arguments.rope_scaling_args.scaling_factor = 1.0
    return arguments


def make_trainer(backend: Any, hf: dict[str, Any], folder: Path, layout: parity.Layout) -> Trainer:
    """Makes the trainer, and shows the backend its losses, its number of tokens and what it logs."""
    scenario, o, s = backend.scenario, backend.scenario.optimizer, backend.scenario.schedule
    family = qwen3 if hf["model_type"] == "qwen3" else llama3
    spec = dataclasses.replace(
        family.get_train_spec(), model_args={"suite": model_arguments(hf)},
        build_tokenizer_fn=None, build_dataloader_fn=lambda **_: backend.loader,
    )  # fmt: skip
    spec = dataclasses.replace(spec, build_loss_fn=lambda *_, **__: backend.cross_entropy)
    register_train_spec("suite", spec)
    job = JobConfig()
    backend.loss = family.get_train_spec().build_loss_fn(job)
    job.model.name, job.model.flavor, job.model.hf_assets_path = "suite", "suite", str(folder)
    t, c = job.training, job.checkpoint
    t.local_batch_size, t.global_batch_size = (
        scenario.data.rows // (layout.dp * scenario.accumulation),
        scenario.data.rows,
    )
    t.seq_len, t.max_norm, t.steps = backend.length, o.max_grad_norm or float("inf"), 10**6
    t.mixed_precision_param = "bfloat16" if scenario.precision == "bf16" else "float32"
    c.enable, c.folder, c.interval, c.keep_latest_k, c.initial_load_in_hf = True, "none-yet", 10**9, 0, True
    job.optimizer.lr, (job.optimizer.beta1, job.optimizer.beta2) = o.lr, o.betas
    job.optimizer.eps, job.optimizer.weight_decay, job.optimizer.implementation = o.eps, o.weight_decay, "for-loop"
    job.lr_scheduler.warmup_steps, job.lr_scheduler.total_steps = 0, s.total_steps
    if s.name == "constant":
        job.lr_scheduler.decay_ratio = 0.0
    else:
        job.lr_scheduler.decay_type = s.name
    job.activation_checkpoint.mode, job.metrics.log_freq = "none", 1
    job.parallelism.data_parallel_replicate_degree = layout.rep
    job.parallelism.data_parallel_shard_degree = layout.dp // layout.rep
    trainer = Trainer(job)
    body, log = trainer.forward_backward_step, trainer.metrics_processor.log

    def counted(*, input_dict: Any, labels: Any, global_valid_tokens: Any) -> Any:
        backend.tokens = global_valid_tokens
        return body(input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens)

    def logged(step: int, loss: float, most: float, norm: float, extra_metrics: dict[str, Any]) -> None:
        log(step, loss, most, norm, extra_metrics)
        backend.ended(loss, norm, extra_metrics["lr"])

    trainer.forward_backward_step, trainer.metrics_processor.log = counted, logged
    return trainer
