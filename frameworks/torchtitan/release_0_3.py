"""Makes the Trainer of torchtitan 0.3, which is configured by dataclasses, and whose loss is made in chunks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_mask
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer, dist_utils

import parity

__all__ = ["CONVENTIONS", "dist_utils", "make_trainer", "refuses"]

CONVENTIONS = ()


def refuses(scenario: parity.Scenario) -> str:
    return ""


def attention(q: Any, k: Any, v: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> Any:
    mask = create_mask(block_mask.mask_mod, q.shape[0], None, q.shape[2], k.shape[2], device="cpu")
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa), None


def model_spec(hf: dict[str, Any]) -> ModelSpec:
    """Returns the specification of a Hugging Face model, with the layers that torchtitan's builders make."""
    dim, head, vocabulary = hf["hidden_size"], hf["head_dim"], hf["vocab_size"]
    shape: dict[str, Any] = {"n_layers": hf["num_hidden_layers"], "dim": dim, "n_heads": hf["num_attention_heads"]}
    shape |= {"n_kv_heads": hf["num_key_value_heads"], "hidden_dim": hf["intermediate_size"]}
    shape |= {"attn_backend": "flex", "fuse_qkv": False}
    zeros = {"weight": torch.nn.init.zeros_}
    theta = hf["rope_parameters"]["rope_theta"]
    common: dict[str, Any] = {
        "vocab_size": vocabulary, "dim": dim,
        "norm": RMSNorm.Config(normalized_shape=dim, param_init={"weight": torch.nn.init.ones_}),
        "tok_embeddings": Embedding.Config(num_embeddings=vocabulary, embedding_dim=dim, param_init=zeros),
        "lm_head": Linear.Config(in_features=dim, out_features=vocabulary, param_init=zeros),
    }  # fmt: skip
    if hf["model_type"] == "qwen3":
        rope = CosSinRoPE.Config(dim=head, max_seq_len=2048, theta=theta)
        layers = qwen3._build_qwen3_layers(**shape, head_dim=head, rope=rope)
        config = qwen3.Qwen3Model.Config(**common, layers=layers, enable_weight_tying=hf["tie_word_embeddings"])
        parallelize, adapter = qwen3.parallelize_qwen3, qwen3.Qwen3StateDictAdapter
    else:
        rope = ComplexRoPE.Config(dim=head, max_seq_len=2048, theta=theta)
        config = llama3.Llama3Model.Config(**common, layers=llama3._build_llama3_layers(**shape, rope=rope))
        parallelize, adapter = llama3.parallelize_llama, llama3.Llama3StateDictAdapter
    for _, norm, _, _ in config.traverse(RMSNorm.Config):
        norm.eps = hf["rms_norm_eps"]
    return ModelSpec(hf["model_type"], "suite", config, parallelize, None, None, adapter)


def config_of(base: Any, make: Any) -> Any:
    """Returns the configuration of a component that ``make`` gives, in place of torchtitan's own."""

    @dataclass(kw_only=True, slots=True)
    class Config(base.Config):  # type: ignore[misc]
        def build(self, **_: Any) -> Any:
            return make()

    return Config()


def make_trainer(backend: Any, hf: dict[str, Any], folder: Path, layout: parity.Layout) -> Trainer:
    """Makes the trainer, and shows the backend its losses, its number of tokens and what it logs."""
    scenario, o, s = backend.scenario, backend.scenario.optimizer, backend.scenario.schedule
    if not torch.cuda.is_available():
        backend.patch(FlexAttention, "_compiled_flex_attn", staticmethod(attention))
    adamw = {"lr": o.lr, "betas": o.betas, "eps": o.eps}
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs=adamw | {"weight_decay": decay})
        for pattern, decay in (("norm", 0.0), (".*", o.weight_decay))
    ]
    schedule: dict[str, Any] = {"decay_ratio": 0.0} if s.name == "constant" else {"decay_type": s.name}
    trainer = Trainer(Trainer.Config(
        model_spec=model_spec(hf), hf_assets_path=str(folder), activation_checkpoint=None,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=hf["vocab_size"])),
        metrics=MetricsProcessor.Config(log_freq=1), tokenizer=config_of(BaseTokenizer, lambda: None),
        dataloader=config_of(BaseDataLoader, lambda: backend.loader),
        optimizer=OptimizersContainer.Config(param_groups=groups, implementation="for-loop"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, total_steps=s.total_steps, **schedule),
        checkpoint=CheckpointManager.Config(
            enable=True, folder="none-yet", interval=10**9, keep_latest_k=0, initial_load_in_hf=True
        ),
        training=TrainingConfig(
            local_batch_size=scenario.data.rows // (layout.dp * scenario.accumulation),
            global_batch_size=scenario.data.rows, seq_len=backend.length, max_norm=o.max_grad_norm or float("inf"),
            steps=10**6, disable_cuda_graphs=True,
            mixed_precision_param="bfloat16" if scenario.precision == "bf16" else "float32",
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=layout.rep, data_parallel_shard_degree=layout.dp // layout.rep,
            spmd_backend="partial_dtensor",  # spmd_types, the default, finds parameters that are no DTensors
        ),
    ))  # fmt: skip
    body, entropy, log = trainer.fwd_bwd_fn, trainer.loss_fn.loss_fn, trainer.metrics_processor.log
    backend.loss, entropy.fn = entropy.fn, backend.cross_entropy

    def counted(inputs: Any, labels: Any, tokens: Any, extra: Any) -> torch.Tensor:
        backend.tokens = tokens
        loss: torch.Tensor = body(inputs, labels, tokens, extra)
        return loss

    def logged(step: int, loss: float, most: float, norm: float, extra_metrics: dict[str, Any]) -> None:
        log(step, loss, most, norm, extra_metrics)
        backend.ended(loss, norm, next(value for key, value in extra_metrics.items() if key.startswith("lr/")))

    trainer.fwd_bwd_fn, trainer.metrics_processor.log = counted, logged
    return trainer
