"""Maps options of TRL, verl, OpenRLHF and Megatron-LM to those of ``parity train``, for messages.

Quantities may be counted differently, so a foreign option is never accepted in silence: the message has the difference.
"""

_RESPONSES = "train_batch_size, which counts responses: that number of prompts x --n-samples-per-prompt"
_ALL_ROWS = "train_batch_size, the rows of a step: --micro-train-batch-size x accumulation x data-parallel ranks"
_LENGTH = "max_len, which counts prompt and response together"

# The end of a foreign name (dotted in verl) -> the own option (or several by commands, with |), and after a comma what
# differs. Without an own option there is only a reason. Equal names are left out.
FOREIGN = {
    # Models and data
    **dict.fromkeys(("model_name_or_path", "model_path", "model.path", "model.partial_pretrain"), "pretrain"),
    "reward_model_path": "reward, a function instead of a model",
    "critic.model.path": "critic_pretrain",
    **dict.fromkeys(("dataset_name", "data_path", "prompt_data", "train_files"), "dataset"),
    **dict.fromkeys(("val_files", "eval_data", "dataset_test_split"), "eval_dataset"),
    **dict.fromkeys(("prompt_key", "dataset_text_field"), "input_key"),
    **dict.fromkeys(("label_key", "response_key"), "output_key"),
    **dict.fromkeys(("max_length", "max_seq_length", "seq_length"), "max_len"),
    **dict.fromkeys(("max_prompt_length", "prompt_max_len"), _LENGTH),
    "packing": "packing_samples",
    # Steps
    **dict.fromkeys(
        ("per_device_train_batch_size", "ppo_micro_batch_size_per_gpu", "micro_batch_size_per_gpu", "micro_batch_size"),
        "micro_train_batch_size",
    ),
    **dict.fromkeys(("gradient_accumulation_steps", "global_batch_size"), _ALL_ROWS),
    "ppo_mini_batch_size": _RESPONSES,
    **dict.fromkeys(("num_train_epochs", "total_epochs"), "max_epochs|num_episodes"),
    **dict.fromkeys(("total_training_steps", "train_iters"), "max_steps"),
    # Optimizer
    **dict.fromkeys(("lr", "actor_learning_rate"), "learning_rate"),
    "critic.optim.lr": "learning_rate, of policy and critic",
    **dict.fromkeys(("lr_scheduler_type", "lr_decay_style"), "lr_scheduler"),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_steps_ratio", "lr_warmup_fraction"), "lr_warmup_ratio"),
    **dict.fromkeys(("warmup_steps", "lr_warmup_steps", "lr_warmup_iters"), "lr_warmup_ratio, a share of the steps"),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip_grad"), "max_norm"),
    "adam_epsilon": "adam_eps",
    **dict.fromkeys(("bf16", "fp16"), "param_dtype, with bf16 or fp16 as its value"),
    # Adapters
    **dict.fromkeys(("lora_r", "use_peft"), "lora_rank"),
    "lora_target_modules": "target_modules",
    # Ranks
    **dict.fromkeys(("n_gpus_per_node", "num_processes"), "nproc_per_node"),
    "rollout.tensor_model_parallel_size": ", every rank samples from a whole replica",
    **dict.fromkeys(("nnodes", "num_machines"), ", torchrun starts the ranks of several hosts"),
    **dict.fromkeys(("nccl_timeout", "timeout"), "ddp_timeout"),
    "distributed_timeout_minutes": "ddp_timeout, in seconds",
    "ds_tensor_parallel_size": "tensor_model_parallel_size",
    "ulysses_sequence_parallel_size": "ring_attn_size, a ring instead of Ulysses",
    "use_distributed_optimizer": "zero_stage, with 1 as its value",
    **dict.fromkeys(("enable_gradient_checkpointing", "recompute_granularity"), "gradient_checkpointing"),
    **dict.fromkeys(("adam_offload", "param_offload", "optimizer_offload"), "offload"),
    # Rollouts and objective
    "data.train_batch_size": "rollout_batch_size",
    "generation_batch_size": "rollout_batch_size, which counts prompts: that number / --n-samples-per-prompt",
    **dict.fromkeys(("num_generations", "rollout.n"), "n_samples_per_prompt"),
    **dict.fromkeys(("max_completion_length", "max_response_length", "response_length"), "generate_max_len"),
    **dict.fromkeys(("use_vllm", "rollout.name"), "rollout_engine"),
    **dict.fromkeys(
        ("reward_funcs", "remote_rm_url", "custom_reward_function.path", "custom_reward_function.name"), "reward"
    ),
    **dict.fromkeys(("teacher_model_name_or_path", "teacher_model"), "teacher_pretrain"),
    **dict.fromkeys(("ref_pretrain", "ref_model"), "pretrain, which the reference is loaded from, too"),
    "rpo_alpha": "sft_coef",
    "simpo_gamma": "target_margin, gamma / beta",
    "center_rewards_coefficient": "center_coef",
    "lmbda": ", in TRL's distillation it is the share of texts that the student samples, and here all are those of "
    "--dataset (the lambda of PPO's advantages is --lambd)",
    **dict.fromkeys(("num_iterations", "num_ppo_epochs"), "ppo_epochs"),
    **dict.fromkeys(("epsilon", "cliprange", "clip_ratio"), "eps_clip"),
    "loss_type": "loss_mode",
    "beta": "kl_loss_coef",
    "init_kl_coef": "kl_coef",
    "adv_estimator": "advantage_estimator",
    "lam": "lambd",
    "cliprange_value": "value_clip",
    # Output
    **dict.fromkeys(("output_dir", "default_local_dir"), "ckpt_path"),
    **dict.fromkeys(("resume_from_checkpoint", "resume_mode"), "load_checkpoint"),
    **dict.fromkeys(("save_freq", "save_interval"), "save_steps"),
    **dict.fromkeys(("test_freq", "eval_interval"), "eval_steps"),
    **dict.fromkeys(("save_total_limit", "max_actor_ckpt_to_keep"), "max_ckpt_num"),
    **dict.fromkeys(("report_to", "trainer.logger"), "use_wandb, or --use-tensorboard"),
    "tensorboard_dir": "use_tensorboard",
    **dict.fromkeys(("logging_steps", "log_interval"), ", every step is logged"),
}


def endings(name: str) -> list[str]:
    """Returns a dotted name and its ends, longest first: a.b.c, b.c, c."""
    parts = name.lstrip("+").split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]
