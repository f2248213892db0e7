"""ms-swift: GRPO divides its mean over tokens by the tokens of the whole rollout, and before 4.6 by micro-batches too.

One process, CPU, a tiny Llama; responses are frozen, all else is GRPOTrainer's. The rates are so small that ratios stay
1, so the loss of a token is minus its advantage. Exit code 0: defect present, and its remedy works. 1: gone. See
swift-divided-loss.md.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from swift.infer_engine.protocol import ChatCompletionResponse, ChatCompletionResponseChoice, ChatMessage, RolloutOutput
from swift.model import get_model_processor
from swift.rlhf_trainers import GRPOConfig, GRPOTrainer
from swift.template import TemplateMeta, get_template, register_template
from swift.version import __version__
from tokenizers import Tokenizer, models
from transformers import __version__ as HF

LENGTHS = [[1, 2, 3, 4], [2, 4, 6, 8]]  # of the responses of two prompts, whose first response has the reward 1
TOTAL = sum(map(sum, LENGTHS))
LOSSES = [-sum((3 / 4, -1 / 4)[place > 0] * n for place, n in enumerate(group)) for group in LENGTHS]  # sums
register_template(TemplateMeta("plain", prefix=[], prompt=["{{QUERY}}"], chat_sep=None, suffix=[]))


class Frozen(GRPOTrainer):  # type: ignore[misc]
    remedy = False

    def _engine_infer(self, *_: Any, **__: Any) -> list[Any]:
        choice = ChatCompletionResponseChoice(0, ChatMessage(role="assistant", content="w2"), "stop")
        response = ChatCompletionResponse("frozen", [choice], None)
        return [RolloutOutput(response=response, response_token_ids=[[2] * n]) for group in LENGTHS for n in group]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.used = [*getattr(self, "used", []), self.optimizer.param_groups[0]["lr"]]
        return super().training_step(*args, **kwargs)

    def _compute_loss_and_metrics(self, model: Any, model_inputs: Any, grpo_batch: Any) -> Any:
        if self.remedy:  # as TRL since huggingface/trl#6024
            window = self.args.gradient_accumulation_steps / self.args.steps_per_generation
            grpo_batch.num_items_in_batch = grpo_batch.num_items_in_batch * window  # the tensor is that of all batches
        return super()._compute_loss_and_metrics(model, model_inputs, grpo_batch)


def log_of(folder: Path, accumulation: int, *, remedy: bool = False) -> tuple[list[dict[str, float]], list[float]]:
    """Trains on one rollout of two micro-batches; returns what each step logs, and the rates that were used."""
    model, processor = get_model_processor(str(folder), torch_dtype=torch.float32, model_type="llama")
    template = get_template(processor, template_type="plain", truncation_strategy="left")
    template.set_mode("train")
    args = GRPOConfig(
        **{"output_dir": str(folder), "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True},
        **{"check_model": False, "dataloader_num_workers": 0, "max_steps": 2 // accumulation, "logging_steps": 1},
        **{"learning_rate": 1e-12, "lr_scheduler_type": "linear", "beta": 0.0, "loss_type": "dapo"},
        **{"num_generations": 4, "scale_rewards": "none", "kl_in_reward": False, "dataset_shuffle": False},
        **{"per_device_train_batch_size": 4, "steps_per_generation": 2, "gradient_accumulation_steps": accumulation},
        **{"gradient_checkpointing": False, "dataloader_persistent_workers": False},
    )
    rows = Dataset.from_list([{"messages": [{"role": "user", "content": f"w{i}"}]} for i in (3, 4)])
    rewards = [lambda completions, **_: [1.0, 0.0, 0.0, 0.0] * 2]
    trainer = Frozen(model, reward_funcs=rewards, args=args, template=template, train_dataset=rows)
    trainer.remedy = remedy
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line], trainer.used


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        words = {f"w{i}": i for i in range(32)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
        special = {"pad_token": "w0", "eos_token": "w1"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(name)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes)).save_pretrained(name)
        (two, rates), (one, _) = (log_of(Path(name), accumulation) for accumulation in (1, 2))
        mended, _ = log_of(Path(name), 1, remedy=True)
    right = sum(LOSSES) / TOTAL
    found = [sum(line["loss"] for line in log) / len(log) for log in (two, one, mended)]
    print(f"ms-swift {__version__}, transformers {HF}; mean over the rollout's tokens: {right:.4f}")
    print(f"two updates of one micro-batch: mean of their losses {found[0]:.4f}, {found[0] / right:.2f} times")
    print(f"one update of two micro-batches: loss {found[1]:.4f}, {found[1] / right:.2f} times (4.5.3: 0.50 times)")
    print(f"two updates, with the remedy: {found[2]:.4f}, {found[2] / right:.2f} times")
    print(f"learning_rate that is logged: {[line['learning_rate'] for line in two]}; used: {rates}")
    present = abs(found[0] / right - 1 / 2) < 1e-3 and abs(found[2] / right - 1) < 1e-3
    sys.exit(0 if present else 1)
