"""ms-swift: a micro-batch without target tokens has the loss NaN in SFT, and the logged loss counts the others twice.

One process, CPU, a tiny Llama, Seq2SeqTrainer with accumulation over two micro-batches; the second has no targets. Exit
code 0: defect present, and its remedy works. 1: gone. See swift-empty-micro-batch.md.
"""

import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from swift.model import get_model_processor
from swift.template import get_template
from swift.trainers import Seq2SeqTrainer, Seq2SeqTrainingArguments
from swift.version import __version__
from tokenizers import Tokenizer, models
from transformers import __version__ as HF


class Seen(Seq2SeqTrainer):  # type: ignore[misc]
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss


def trained(folder: Path, *, scaled: bool, rows: int) -> tuple[float, list[float]]:
    """Makes one step on the first rows; returns the logged loss, and the losses of the micro-batches."""
    model, processor = get_model_processor(str(folder), torch_dtype=torch.float32, model_type="llama")
    template = get_template(processor, template_type="dummy")
    template.set_mode("train")
    tokens = [1, 2, 3, 4, 5]
    data: list[dict[str, Any]] = [
        {"input_ids": tokens, "labels": labels, "length": 5} for labels in ([-100, *tokens[1:]], [-100] * 5)
    ]
    if scaled:  # swift's own loss per token, as of --loss_scale with other weights than 0 and 1
        data = [row | {"loss_scale": [float(label >= 0) for label in row["labels"]]} for row in data]
    args = Seq2SeqTrainingArguments(
        **{"output_dir": str(folder), "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True},
        **{"check_model": False, "dataloader_num_workers": 0, "dataloader_persistent_workers": False, "max_steps": 1},
        **{"learning_rate": 1e-12, "train_dataloader_shuffle": False, "gradient_checkpointing": False},
        **{"gradient_accumulation_steps": rows, "remove_unused_columns": False},
    )
    trainer = Seen(model, args, template, train_dataset=data[:rows])
    trainer.train()
    return next(line["loss"] for line in trainer.state.log_history if "loss" in line), trainer.losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
        special = {"pad_token": "w0", "eos_token": "w1"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(name)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes)).save_pretrained(name)
        right, _ = trained(Path(name), scaled=False, rows=1)
        found, losses = trained(Path(name), scaled=False, rows=2)
        mended, _ = trained(Path(name), scaled=True, rows=2)
    print(f"ms-swift {__version__}, transformers {HF}; a row with targets alone: loss {right:.4f}")
    print(f"and a row without targets: micro-batches {losses}, logged {found:.4f}, {found / right:.2f} times")
    print(f"the same with a loss scale of 1: logged {mended:.4f}, {mended / right:.2f} times")
    present = math.isnan(losses[1]) and abs(found / right - 2) < 1e-3 and abs(mended / right - 1) < 1e-3
    sys.exit(0 if present else 1)
