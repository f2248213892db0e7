"""Times plain megatron-core: its GPTModel, schedules and distributed optimizer, in bf16.

torchrun plain_megatron.py MODEL --layout dp2.zero1, tp2, pp2, or dp2.tp2.zero1. See throughput.py. Layers are those of
the local spec, and with te, as in tp2.te, TransformerEngine's. megatron-core uses TransformerEngine's AdamW for both if
it is installed. A pipeline gets one row after the other. The model has the folder's sizes and random weights; o_proj
has no bias, because megatron-core couples it to the MLP's.
"""

import json
import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from timing import measure, parse, random_rows
from torch import Tensor


def main() -> None:
    options = parse(__doc__)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    tp = 2 if "tp2" in options.layout else 1
    pp = 2 if "pp2" in options.layout else 1
    parts = options.rows if pp > 1 else 1
    engine = "te" in options.layout.split(".")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    model_parallel_cuda_manual_seed(1)
    published = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    config = TransformerConfig(
        num_layers=published["num_hidden_layers"],
        hidden_size=published["hidden_size"],
        num_attention_heads=published["num_attention_heads"],
        num_query_groups=published["num_key_value_heads"],
        ffn_hidden_size=published["intermediate_size"],
        layernorm_epsilon=published["rms_norm_eps"],
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=published["bias"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        gradient_accumulation_fusion=False,  # needs Apex
    )
    vocabulary = -(-published["vocab_size"] // (128 * tp)) * 128 * tp
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec()
        if engine
        else get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=vocabulary,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        max_sequence_length=options.seq,
        share_embeddings_and_output_weights=published["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=published["rope_theta"],
    ).cuda()
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer="zero1" in options.layout,
        overlap_grad_reduce="overlap" in options.layout,
        overlap_param_gather="overlap" in options.layout,
    )
    wrapped = DistributedDataParallel(config, settings, Float16Module(config, model))
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-5,
            clip_grad=1.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer="zero1" in options.layout,
            overlap_param_gather="overlap" in options.layout,
        ),
        [wrapped],
    )
    config.finalize_model_grads_func = finalize_model_grads
    if "overlap" in options.layout:
        config.no_sync_func = wrapped.no_sync
    positions = torch.arange(options.seq, device="cuda").expand(options.rows // parts, -1)
    masked = (
        None if engine else torch.ones(options.seq, options.seq, dtype=torch.bool, device="cuda").triu(1)[None, None]
    )
    data_rank = parallel_state.get_data_parallel_rank()

    def run(rows: Any, chunk: Any) -> tuple[Tensor, Any]:
        tokens = next(rows)
        losses = chunk(tokens, positions, masked, labels=tokens.roll(-1, dims=1))
        return losses, partial(finish)

    def finish(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = losses[:, :-1].float().mean()
        return loss, {"loss": loss.detach()}

    def step(number: int) -> float:
        size = {"rows": options.rows, "seq": options.seq}
        rows = random_rows(published["vocab_size"], **size, step=number, rank=data_rank).cuda()
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        reported = get_forward_backward_func()(
            forward_step_func=run,
            data_iterator=iter(rows.chunk(parts)),
            model=wrapped,
            num_microbatches=parts,
            seq_length=options.seq,
            micro_batch_size=options.rows // parts,
            forward_only=False,
        )
        optimizer.step()
        return sum(float(one["loss"]) for one in reported)  # none before the last stage; parts of a mean

    measure(step, options=options, data_ranks=dist.get_world_size() // tp // pp)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
