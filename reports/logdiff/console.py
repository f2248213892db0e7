"""Console logs: the lines that frameworks print for a step, among whatever else they print.

Colours, Ray's ``(TaskRunner pid=1)`` and timestamps before a line do no harm. Each format is one function, from lines
to rows; recognise.py takes the one that finds most.
"""

import math
import re
from collections.abc import Callable, Iterable
from itertools import pairwise

from reports.logdiff.run import Log, Row

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
LM_LOSS = "lm loss"
NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"


def lines_of(text: str) -> list[str]:
    """The lines without colours; a progress bar's returns to the start of the line end a line."""
    return re.split(r"\r\n|\n|\r", ANSI.sub("", text))


def read_verl(lines: Iterable[str]) -> Log:
    """``step:1 - actor/pg_loss:np.float64(-0.0006) - actor/lr:1e-06 - ...``

    verl/utils/logger/aggregate_logger.py, ``concat_dict_to_str``: ``pprint.pformat`` of each number, which numpy 2
    writes with its type.
    """
    rows = []
    for line in lines:
        found = re.search(r"(?:^|\s)step:(\d+) - (.*)", line)
        if found:
            parts = [part.rpartition(":") for part in found[2].split(" - ")]
            values = {name.strip(): re.sub(r"^np\.\w+\((.*)\)$", r"\1", value.strip()) for name, _, value in parts}
            rows.append(Row(int(found[1]), _floats(values)))
    return Log(format="verl console", rows=rows)


def read_torchtitan(lines: Iterable[str]) -> Log:
    """``step:  1  loss:  8.1661  grad_norm:  3.6855  memory:  2.47GiB(3.12%)  tps: 3,502  ...``

    torchtitan/components/metrics.py, ``MetricsProcessor.log`` and ``log_validation`` (``validate step:``).
    """
    rows = []
    for line in lines:
        found = re.search(r"(?:^|\s)(validate )?step:\s*(\d+)  +(\w+:.*)", line)
        if found:
            values = dict(re.findall(rf"(\w+):\s*({NUMBER})", found[3]))
            prefix = "validation_metrics/" if found[1] else ""
            rows.append(Row(int(found[2]), _floats({f"{prefix}{name}": value for name, value in values.items()})))
    return Log(format="torchtitan console", rows=rows)


def read_megatron(lines: Iterable[str]) -> Log:
    """``iteration 10/ 200 | consumed samples: 160 | learning rate: 1.0E-06 | lm loss: 8.3E-01 | grad norm: 9.089 |``

    megatron/training/training.py, ``training_log``: losses are means over the iterations of the log interval that were
    not skipped, and a mean that is not above 0 is not printed, as of NaN (``if avg > 0.0``). So no loss is NaN, unless
    all iterations were skipped; the first line's interval is not known. Validation: ``evaluate_and_print_results``; the
    passes ``on validation set`` and ``on test set`` after the training are no part of the curve.
    """
    rows = []
    before: int | None = None
    known = False
    for line in lines:
        found = re.search(r"(?:^|\s)iteration\s+(\d+)/\s*\d+ \|(.*)", line)
        validation = re.search(rf"validation loss at iteration (\d+) \| lm loss value: ({NUMBER})", line)
        if found:
            parts = [part.rpartition(":") for part in found[2].split("|")]
            step, values = int(found[1]), _floats({name.strip(): value.strip() for name, _, value in parts})
            known = known or LM_LOSS in values  # else the model may be one that has other losses
            due = known or not any(name.endswith("loss") for name in values)
            if LM_LOSS not in values and due and _has_trained(values, None if before is None else step - before):
                values[LM_LOSS] = math.nan
            rows.append(Row(step, values))
            before = step
        elif validation:
            rows.append(Row(int(validation[1]), _floats({"lm loss validation": validation[2]})))
    return Log(format="Megatron console", rows=rows, averaged=frozenset({"loss"}))


def _has_trained(values: dict[str, float], interval: int | None) -> bool:
    """Whether a line of Megatron is of iterations that had a loss, NaN or not. ``interval``: how many it is of."""
    skipped = values.get("number of skipped iterations", 0)
    some_were_not = skipped == 0 if interval is None else skipped < interval
    return some_were_not or values.get("number of nan iterations", 0) > 0


def read_openrlhf(lines: Iterable[str]) -> Log:
    """``Global step 1: {'policy_loss': 0.0, 'actor_lr': 3.25e-06, 'response_length': 40.375, ...}``

    openrlhf/trainer/ppo_trainer.py, ``logger.info(f"✨ Global step {global_step}: {log_status}")``.
    """
    rows = []
    for line in lines:
        found = re.search(r"Global step (\d+): (\{.*)", line)
        if found:
            rows.append(Row(int(found[1]), _pairs(found[2])))
    return Log(format="OpenRLHF console", rows=rows)


def read_trainer(lines: Iterable[str]) -> Log:
    """``{'loss': '1.234', 'grad_norm': '0.5', 'learning_rate': '1e-05', 'epoch': '0.5'}``: Hugging Face and TRL.

    transformers/trainer_callback.py, ``ProgressCallback.on_log`` and ``PrinterCallback.on_log``; up to transformers 4
    the numbers are bare. Values are means since the line before. No line names its step: it is the epoch's part of the
    steps of a progress bar that reached its end, if there is one.
    """
    found, total = [], 0
    for line in lines:
        values = _pairs(line) if re.match(r"\s*\{'.*\}\s*$", line) else {}
        if "epoch" in values:
            found.append(values)
        for done, whole in re.findall(r"\| *(\d+)/(\d+) \[", line):
            total = max(total, int(whole)) if done == whole else total
    last = max((values["epoch"] for values in found), default=0.0)
    lines_of_steps = [values for values in found if "train_runtime" not in values]
    steps = [round(values["epoch"] / last * total) if last > 0 else 0 for values in lines_of_steps]
    trained = [step for step, values in zip(steps, lines_of_steps, strict=True) if "learning_rate" in values]
    counted = total > 0 and all(a < b for a, b in pairwise(trained))
    rows = [Row(step if counted else None, values) for step, values in zip(steps, lines_of_steps, strict=True)]
    return Log(format="Hugging Face Trainer console", rows=rows, averaged=frozenset({"loss"}))


CONSOLES: tuple[Callable[[Iterable[str]], Log], ...] = (
    read_verl,
    read_torchtitan,
    read_megatron,
    read_openrlhf,
    read_trainer,
)


def _pairs(text: str) -> dict[str, float]:
    """The numbers of a printed dictionary; they may be in quotes."""
    return _floats(dict(re.findall(rf"'([^']+)':\s*'?({NUMBER})(?=['\s,}}])", text)))


def _floats(values: dict[str, str]) -> dict[str, float]:
    """What of ``values`` is a number."""
    found = {}
    for name, value in values.items():
        try:
            found[name] = float(value.replace(",", ""))
        except ValueError:
            continue
    return found
