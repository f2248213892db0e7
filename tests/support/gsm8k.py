"""Writes problems in the format of GSM8K's files: a question, and an answer in steps with ``<<...>>`` and ``####``."""

import json
import random
from pathlib import Path

NAMES = ("Natalia", "Weng", "Betty", "Julie", "James", "Albert", "Mark", "Ken")
THINGS = ("clips", "stickers", "apples", "marbles", "pages", "flowers")


def write_problems(file: Path, *, count: int, seed: int) -> Path:
    """Write ``count`` problems, a JSON object a line, as ``train.jsonl`` of openai/grade-school-math has them."""
    numbers = random.Random(seed)
    lines = []
    for _ in range(count):
        name, thing = numbers.choice(NAMES), numbers.choice(THINGS)
        april, times = numbers.randrange(2, 60) * 2, numbers.randrange(2, 5)
        may, total = april // 2, april // 2 * times
        question = (
            f"{name} sold {thing} to {april} of her friends in April, and then half as many in May. "
            f"In June she sold {times} times as many as in May. How many {thing} did {name} sell in June?"
        )
        answer = (
            f"{name} sold {april}/2 = <<{april}/2={may}>>{may} {thing} in May.\n"
            f"{name} sold {may}*{times} = <<{may}*{times}={total}>>{total} {thing} in June.\n#### {total}"
        )
        lines.append(json.dumps({"question": question, "answer": answer}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file
