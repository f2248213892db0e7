"""Lists the formats of training logs, with a sample of each: documentation, tests and the names in reports use it.

The reader needs no entry to read a console that has steps with numbers; an entry gives it a name.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Format(NamedTuple):
    """A format: what its lines contain (a regular expression), and a sample. averaged: its losses are interval means.

    mark: empty for files, which readers.py recognises by their structure.
    """

    name: str
    mark: str
    sample: str
    averaged: bool = False


FORMATS: tuple[Format, ...] = (
    Format("JSON lines", "", '{"step": 1, "loss": 2.5, "grad_norm": "0.5", "lr": 1e-06}'),
    Format(
        "Hugging Face trainer_state.json",
        "",
        '{"log_history": [{"step": 10, "loss": 2.5, "grad_norm": 0.5, "learning_rate": 1e-06, "epoch": 0.1}]}',
        averaged=True,
    ),
    Format("wandb history", "", '{"_step": 0, "_timestamp": 1.5, "train/loss": 2.5, "train/global_step": 1}'),
    Format("LLaMA-Factory", "", '{"current_steps": 1, "total_steps": 30, "loss": 2.5, "lr": 1e-06, "epoch": 0.03}'),
    Format("ms-swift", "", '{"loss": 2.5, "grad_norm": 0.5, "global_step/max_steps": "10/30", "memory(GiB)": 16.5}'),
    Format("CSV", "", "step,loss,grad_norm\n1,2.5,0.5"),
    Format("CSV", "", "Step\tTraining Loss\tValidation Loss\n1\t2.5\t2.25"),
    Format("wandb CSV", "", '"Step","run-a - train/loss","run-a - train/loss__MIN"\n"1","2.5","2.4"'),
    Format("SwanLab CSV", "", "step,run-a-train/loss,run-a-train/grad_norm\n1,2.5,0.5"),
    Format("Lightning CSV", "", "epoch,lr-AdamW,step,train_loss_step\n0,,1,2.5\n0,1e-06,1,"),
    Format("TensorBoard CSV", "", "Wall time,Step,Value\n1700000000.5,1,2.5"),
    Format("MLflow CSV", "", "key,value,timestamp,step,is_nan\nloss,2.5,1,1,0\ngrad_norm,0.5,1,1,0"),
    Format("MLflow metric file", "", "1700000000001 2.5 1\n1700000000002 2.25 2"),
    Format(
        "verl console",
        r"step:\d+ - ",
        "(TaskRunner pid=3165) step:1 - actor/pg_loss:np.float64(-0.25) - actor/grad_norm:0.5 - actor/lr:1e-06",
    ),
    Format("verl console, a line a number", r"^step:\d+$", "step:1\n - actor/pg_loss:-0.25\n - actor/grad_norm:0.5"),
    Format(
        "torchtitan console",
        r"step:\s*\d+  +loss:",
        "[rank0]:[titan] 2026-01-05 10:00:00,123 - root - INFO - step:  1  loss:  2.5000"
        "  grad_norm:  0.5000  tps: 3,502",
    ),
    Format(
        "Megatron console",
        r"iteration +\d+/ *\d+ \|",
        " [2026-01-05 10:00:00] iteration       10/     200 | consumed samples:          160 |"
        " learning rate: 1.000000E-06 | lm loss: 2.500000E+00 | grad norm: 0.500 | number of skipped iterations:   0 |",
        averaged=True,
    ),
    Format(
        "OpenRLHF console",
        r"Global step \d+: \{",
        "(PPOTrainer pid=1) INFO 01-02 03:04:05 ppo_trainer.py:547] ✨ Global step 1:"
        " {'policy_loss': -0.25, 'actor_grad_norm': 0.5, 'actor_lr': 1e-06}",
    ),
    Format(
        "OpenRLHF console, SFT",
        r"gpt_loss=",
        "Train step of epoch 0:   1%|          | 1/60 [00:01<01:00,  1.02s/it, gpt_loss=2.5, lr=1e-06, grad_norm=0.5]",
    ),
    Format(
        "Hugging Face Trainer console",
        r"^\{.*'epoch': ",
        "{'loss': '2.5', 'grad_norm': '0.5', 'learning_rate': '1e-06', 'epoch': '0.03'}",
        averaged=True,
    ),
    Format(
        "ms-swift console",
        r"'global_step/max_steps': ",
        "{'loss': 2.5, 'grad_norm': 0.5, 'epoch': 0.03, 'global_step/max_steps': '10/300'}",
        averaged=True,
    ),
    Format(
        "slime console",
        r"(rollout|step) \d+: \{'\w+/",
        "(RolloutManager pid=7) [2026-01-05 10:00:00] rollout_metrics.py:247 - rollout 0: {'rollout/raw_reward': 0.5}\n"
        "(MegatronTrainRayActor pid=24) [2026-01-05 10:00:00] model.py:460 - step 0:"
        " {'train/loss': 2.5, 'train/grad_norm': 0.5, 'train/lr-pg_0': 1e-06, 'train/step': 0}",
    ),
    Format(
        "NeMo-RL console",
        r"^=+ Step \d+/\d+ =+$",
        "========================= Step 1/60 =========================\n  • Loss: 2.5\n  • Avg Reward: 0.5",
    ),
    Format(
        "prime-rl console",
        r"Step \d+ \|.*\| Loss ",
        "10:00:00 SUCCESS Step 1 | 12.3s | Loss 2.5000 | Entropy 0.2500 | Grad. Norm 0.5000 | LR 1.00e-06",
    ),
    Format(
        "torchtune log",
        r"^Step \d+ \| loss:",
        "Step 1 | loss:2.5 lr:1e-06 tokens_per_second_per_gpu:12.5 grad_norm:0.5",
    ),
    Format("torchtune console", r"^\d+\|\d+\|Loss: ", "1|1|Loss: 2.5: 100%|#####| 1/60 [00:01<01:00,  1.02s/it]"),
    Format(
        "xtuner console",
        r"Epoch \d+ Step \d+/\d+ ",
        "[XTuner][RANK 0][2026-01-05 10:00:00][INFO] Epoch 1 Step 1/60 lr: 1.000000e-06 time: 1.2 total_loss: 2.500000"
        " reduced_llm_loss: 2.500000 max_memory: 10.00 GB grad_norm: 0.500000",
    ),
    Format(
        "DeepSpeed console",
        r"step=\d+, skipped=|^steps: \d+ loss:",
        "[2026-01-05 10:00:00,123] [INFO] [logging.py:128:log_dist] [Rank 0] step=1, skipped=0, lr=[1e-06],"
        " mom=[(0.9, 0.95)]\n"
        "steps: 1 loss: 2.5000 iter time (s): 1.234 samples/sec: 12.9",
    ),
    Format("nanoGPT console", r"^iter \d+: loss ", "iter 0: loss 2.5000, time 193.77ms, mfu 12.00%"),
    Format(
        "flame console",
        r"step:\s*\d+  +loss:.* gnorm:",
        "[titan] 2026-01-05 10:00:00,1 - root - INFO - step:  1  loss:  2.5000"
        "  lr: 1.0000e-06 gnorm:  0.50 [00:06<01:51]",
    ),
    Format(
        "dolomite console",
        r"metrics_tag: \{",
        '[2026-01-05 10:00:00][INFO] metrics_tag: {"step": 1, "metrics": {"actor/pg_loss": -0.25, "actor/lr": 1e-06}}',
    ),
)
LONGEST = 4000  # characters of a line that are looked at
CONSOLE = Format("console", "", "")


def format_of(lines: Iterable[str]) -> Format:
    """The format whose mark most lines have, the more special one of several; CONSOLE if none has any."""
    texts = [line[:LONGEST] for line in lines][:2000]
    counts = [sum(bool(re.search(one.mark, text)) for text in texts) if one.mark else 0 for one in FORMATS]
    best = max(counts)
    return (
        next(one for one, count in reversed(list(zip(FORMATS, counts, strict=True))) if count == best)
        if best
        else CONSOLE
    )
