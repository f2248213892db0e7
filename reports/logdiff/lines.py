"""Reads the lines of consoles: one core for all frameworks.

Colours, carriage returns and what stands before a line (Ray's ``(TaskRunner pid=1)``, torchrun's ``[default0]:``,
srun's ``0:``, pdsh's host, kubernetes' time, dates, levels) are taken off first; ranks among them tell processes apart.
A line is then a step with numbers, in one of four forms:

    a dictionary          Global step 1: {'policy_loss': 0.1}       {'loss': '2.5', 'epoch': '0.5'} has no step
    names with numbers    step: 1  loss: 2.5       iter 0: loss 2.5, time 3ms       step=1, skipped=0, lr=[1e-06]
    a bar                 1/60 [00:01<01:00, 1.02s/it, gpt_loss=3.05]
    a block               step:1, and then a line for each number

FORMATS lists the frameworks with a sample each, for documentation, tests and the names in reports. The reader needs no
entry to read a console that has steps with numbers. Patterns have bounded repetitions: a hostile line costs no time.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from conformance.core.errors import UsageError
from reports.logdiff.metrics import canonical
from reports.logdiff.rows import (
    FIXED,
    LARGEST_STEP,
    NO_STEP,
    SCALES,
    Bar,
    Fixed,
    Row,
    numbered,
    other_format,
    row_of,
    times,
)

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
NUMBER = (
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3}){1,8}|\d{1,40})(?:\.\d{0,40})?(?:[eE][-+]?\d{1,4})?(?![\d])"
    r"|(?i:nan|inf(?:inity)?)(?![A-Za-z]))"
)
VALUE = rf"(?:np\.\w{{1,12}}\(|tensor\()?\[?['\"]?({NUMBER}(?: ?%|[kKMGB](?![\w/%]))?)"
WORD = r"[A-Za-z_][\w./()@+%-]{0,120}"
PREFIX = re.compile(
    r"""\s{0,40}(?:
      \((?P<actor>[\w.:]{1,80})\s(?:rank=\d{1,6},\s)?pid=(?P<pid>\d{1,10})(?:,\s?ip=[\w.:]{1,60})?\)
    | \[(?!(?:step|iter|epoch|global|train)\b)(?P<tag>[A-Za-z][^\[\]{}'"=]{0,100})\]:?    # [default0]:
    | (?P<rank>\d{1,6}):(?=\s)    # srun -l
    | (?P<host>localhost|(?=[\w.-]{0,80}[\d.-])[A-Za-z][\w-]{0,60}(?:\.[\w-]{1,60}){0,5})(?::(?=\s)|\s{1,20}\|(?=\s))
    | [\[(]?(?:\d{2,4}[-/])?\d\d[-/]\d\d[T\s]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?[\])]?
      (?:\sstd(?:out|err)\s[FP]\s)?
    | [\[(]?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?[\])]?(?=\s)
    | [IWE]\d{4}\s\d\d:\d\d:\d\d\.\d{1,9}\s{1,8}\d{1,10}    # glog
    | \[?(?:DEBUG|INFO|WARNING|SUCCESS|NOTICE)\]?(?=[\s:|>]):?
    | [\w./]{1,120}\.py:\d{1,6}\]?
    | (?:root|mmengine|__main__)(?=\s-)
    | (?:-|>{1,3}|\|)(?=\s)
    )\s{0,40}""",
    re.VERBOSE,
)
UNIT = r"(?: ?[A-Za-z%/][\w%/]*)?(?:\(.*\))?"
IN_UNIT = r" \([A-Za-z%/]{1,20}\)"  # behind a name: iter time (s): 1.2
NAMED = re.compile(rf"\s?({WORD}(?: {WORD}){{0,5}}?(?:{IN_UNIT})?)(?:\s?[:=]\s?|\s){VALUE}['\")\]]{{0,3}}{UNIT}")
SINGLE = re.compile(rf"(?<![\w(])((?:{WORD} ){{0,4}}{WORD}{IN_UNIT}(?=\s?[:=])|{WORD})\s?[:=]\s?{VALUE}")
COUNTER = re.compile(
    r"(?i)(?<![\w/])(?:(?:global|train)[ _])?(?:steps?|iter(?:ation)?s?|update|rollout)(?:\((?:train|val)\))?"
    r"\s{0,12}[:=#]?\s{0,12}\[?\s{0,12}(?P<step>\d{1,5000})(?P<of>\s{0,8}/\s{0,8}\d{1,12})?\]?(?![\w.]\w)[:,]?"
)
BAR = re.compile(r"\|\s{0,8}(\d{1,12})/(\d{1,12}) \[([^\]]{0,2000})\]?")
TUNED = re.compile(r"\d{1,6}\|(\d{1,15})\|(Loss: [^\s:]{1,40}):\s")  # what torchtune writes before a bar
BARE = re.compile(r"[=\-*#\s]{0,200}$")
QUOTES = re.compile(r"['\"{}]")
METRIC = re.compile(r"(?i)loss|norm|reward")  # in a line that may be of another format
LM_LOSS, SKIPPED = "lm loss", "number of skipped iterations"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line without colours and prefixes. process: the ranks and hosts of its prefixes; pid: that of Ray."""

    number: int
    text: str
    process: str
    pid: str


def lines_of(text: str) -> Iterator[Line]:
    """The lines; a bar's return to the start of a line ends one. Other separators of Unicode end none."""
    for number, line in enumerate(re.split(r"\r?\n", ANSI.sub("", text)), 1):
        for part in re.split(r"\r", line):
            yield _without_prefixes(part, number)


def _without_prefixes(text: str, number: int) -> Line:
    at, names, pid = 0, [], ""
    while (found := PREFIX.match(text, at)) and found.end() > at:
        if found["actor"]:
            pid = f"{found['actor']} {found['pid']}"
        elif found["tag"] and (rank := re.search(r"(?i)(?:default|rank|trainer)\s?_?(\d+)", found["tag"])):
            names.append(f"rank {int(rank[1])}")
        elif found["rank"] or found["host"]:
            names.append(f"rank {int(found['rank'])}" if found["rank"] else found["host"])
        at = found.end()
    return Line(number=number, text=text[at:], process=" ".join(names), pid=pid)


def read_lines(lines: Sequence[Line], *, name: str) -> tuple[list[Row], tuple[str, ...]]:
    """The rows of a console, in order, and notes. What names no step is numbered by bars, epochs or lines."""
    rows: list[Row] = []
    bars: list[Bar] = []
    block: Row | None = None
    others: list[int] = []
    for line in lines:
        marks = [(found, int(found[1]), int(found[2])) for found in BAR.finditer(line.text)]
        if marks and (tuned := TUNED.search(line.text)):
            rows.append(_row(line, int(tuned[1]), pairs(tuned[2]), bar=True))
        for found, done, whole in marks:
            bars.append((len(rows), done, whole))
            values = pairs(found[3].partition(", ")[2])
            if compared(values):
                epoch = re.search(r"(?i)epoch (\d{1,6})", line.text[: found.start()])
                step = done + whole * int(epoch[1]) if epoch else done
                rows.append(_row(line, step, values, bar=True))
        text = line.text[marks[-1][0].end() :] if marks else line.text
        if marks and "{" not in text:
            continue
        row = _row_of_line(replace(line, text=text), name=name)
        item = NAMED.fullmatch(line.text.strip(" \t-•*")[:400]) if block and not row else None
        if row and not row.values:
            block = row
            rows.append(block)
        elif row:
            block = None
            rows.append(row)
        elif block and item:
            rows[-1] = block = replace(block, values={**block.values, item[1]: number_of(item[2])})
        elif METRIC.search(text) and len({*filter(canonical, pairs(QUOTES.sub("", text)))}) > 1:
            others.append(line.number)
    in_steps, notes = numbered(_megatron([row for row in rows if compared(row.values)]), bars)
    return in_steps, (*notes, other_format(len(others), others[0])) if in_steps and len(others) > 1 else notes


def _row(line: Line, step: int | None, values: Mapping[str, float], *, bar: bool = False) -> Row:
    return Row(step, values, process=line.process, pid=line.pid, replaces=bar)


def _row_of_line(line: Line, *, name: str) -> Row | None:
    """The row that a line is: without values if it begins a block; None if it is none."""
    counter = COUNTER.search(line.text)
    begin = line.text.find("{")
    if begin >= 0:
        row = _row_of_dictionary(line, begin)
        if row is not None:
            inside = counter is None or counter.start() > begin
            step = row.step if inside or row.step is not None else _step(counter, line, name=name)
            if step is None and "epoch" not in row.values:
                return None
            return replace(row, step=step) if compared(row.values) else None
    if counter is None:
        return None
    before, after = line.text[: counter.start()], line.text[counter.end() :]
    if re.match(r"\s?on (?:validation|test) set", after):
        return None
    values = pairs(before) | pairs(after)
    if re.search(r"(?i)valid|eval", before[-40:]):
        values = {f"eval/{own}": value for own, value in values.items()}
    if compared(values):
        return _row(line, _step(counter, line, name=name), values)
    if BARE.match(before) and BARE.match(after):
        return _row(line, _step(counter, line, name=name), {})
    return None


def _step(counter: re.Match[str] | None, line: Line, *, name: str) -> int:
    assert counter is not None
    if len(counter["step"]) > LARGEST_STEP:
        raise UsageError(
            f"{name}, line {line.number}: a step of {len(counter['step'])} digits is no step of a training"
        )
    return int(counter["step"])


def _row_of_dictionary(line: Line, begin: int) -> Row | None:
    end = line.text.rfind("}")
    try:
        row = row_of(json.loads(line.text[begin : end + 1]))
    except (ValueError, RecursionError):
        quoted = re.findall(
            rf"['\"]([^'\"]{{1,120}})['\"]:\s{{0,4}}(?:np\.\w{{1,12}}\(|tensor\()?\[?(['\"]?{NUMBER}(?:/\d+['\"])?)(?=['\")\],}}\s])",
            line.text[begin:],
        )
        row = row_of({own: value.strip("'\"") for own, value in quoted})
    return None if row.step == NO_STEP else replace(row, process=line.process or row.process, pid=line.pid)


def pairs(text: str) -> dict[str, float]:
    """The names with numbers in a text: ``loss: 2.5``, ``loss=2.5``, or ``loss 2.5`` between separators."""
    found: dict[str, float] = {}
    for piece in re.split(r"\s?\|\s?|[,;]\s|\s-\s|\t| {2,}", re.sub(r"([:=])\s+", r"\1 ", text[:20_000])):
        whole = NAMED.fullmatch(piece[:400])
        named = [(whole[1], whole[2])] if whole else SINGLE.findall(piece)
        found |= {own: number_of(value) for own, value in named}
    return found


def number_of(text: str) -> float:
    """The number that a text is, such as ``1,234.5``, ``12.5%`` or ``1.2M``."""
    number, scale = text.replace(",", ""), "1"
    if number[-1] in SCALES:
        number, scale = number[:-1].rstrip(), SCALES[number[-1]]
    return Fixed(number, scale) if FIXED.fullmatch(number) else times(float(number), float(scale))


def compared(values: Mapping[str, float]) -> bool:
    return any(canonical(own) for own in values)


def _megatron(rows: Sequence[Row]) -> list[Row]:
    """The rows, with NaN where Megatron prints no loss although iterations had one.

    megatron/training/training.py, ``training_log``: losses are means over the iterations of the interval that were not
    skipped, and a mean that is not above 0 is not printed, as of NaN (``if avg > 0.0``). So a missing loss is NaN,
    unless all iterations were skipped; the first line's interval is not known.
    """
    found, before, known = [], None, False
    for row in rows:
        assert row.step is not None or SKIPPED not in row.values
        if SKIPPED in row.values and row.step is not None:
            known = known or LM_LOSS in row.values  # else the model may be one that has other losses
            due = known or not any(name.endswith("loss") for name in row.values)
            if (
                LM_LOSS not in row.values
                and due
                and _has_trained(row.values, None if before is None else row.step - before)
            ):
                row = replace(row, values={**row.values, LM_LOSS: math.nan})
            before = row.step
        known = known or LM_LOSS in row.values
        found.append(row)
    return found


def _has_trained(values: Mapping[str, float], interval: int | None) -> bool:
    """Whether a line of Megatron is of iterations that had a loss, NaN or not. ``interval``: how many it is of."""
    skipped = values[SKIPPED]
    some_were_not = skipped == 0 if interval is None else skipped < interval
    return some_were_not or values.get("number of nan iterations", 0) > 0


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
