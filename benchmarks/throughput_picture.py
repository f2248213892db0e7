"""Draws the results of benchmarks/throughput.py: tokens per second of each backend and its plain program.

python benchmarks/throughput_picture.py OUT.json [OUT.json ...] > PICTURE.svg

Bars are medians of rounds, and ticks on them are the rounds. The factors are medians of ratios, ours by plain: of the
rounds, since a round runs both one after the other, or of the steps if both have run in turn. The picture of
docs/measurements/speed.md is drawn from PUBLISHED.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

RUNS = Path(__file__).parent.parent / "reports" / "published"
PUBLISHED = (
    RUNS / "2026-11-27-one-lease" / "1b-fsdp2-megatron.json",
    RUNS / "2026-11-27-one-lease" / "1b-zero1-zero2-megatron.json",
    RUNS / "2026-11-27-two-h200-again" / "1b-zero3.json",
)
BACKENDS = {"fsdp2": "FSDP2", "deepspeed": "DeepSpeed", "megatron": "Megatron"}
PLAIN = {
    "plain_fsdp2.py": "plain FSDP2",
    "plain_deepspeed.py": "plain DeepSpeed",
    "plain_megatron.py": "plain megatron-core",
}
WIDTH, LEFT, RIGHT, TOP, BAR, PAIR = 950, 280, 190, 58, 15, 42  # px


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="files that benchmarks/throughput.py wrote")
    print(picture(parser.parse_args().results), end="")


def picture(results: Iterable[Path]) -> str:
    """Returns an SVG picture of all pairs with a ratio, each from the rounds of all its files."""
    read = [json.loads(path.read_text(encoding="utf-8")) for path in results]
    sizes = {(*(result[key] for key in ("gpus", "seq", "rows")), result.get("in_turn", False)) for result in read}
    known = defaultdict[tuple[str, str], list[dict[str, Any]]](list)
    for pair in (pair for result in read for pair in result["pairs"] if pair["ours_by_plain"]):
        known[pair["ours"], pair["plain"]].append(pair)
    pairs = [_joined(known[names]) for names in sorted(known, key=_in_order)]
    if len(sizes) != 1 or not pairs:
        raise SystemExit("no picture: give files that have ratios, and the same --gpus, --seq, --rows and --in-turn")
    gpus, seq, rows, _ = sizes.pop()
    fastest = max(speed for pair in pairs for side in ("of_ours", "of_plain") for speed in _speeds(pair[side]))
    scale = (WIDTH - LEFT - RIGHT) / fastest
    height = TOP + PAIR * len(pairs) + 8
    subtitle = f"{gpus} GPUs, rows of {seq:,} tokens, {rows} for each data rank; bf16, float32 masters, recomputation"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="13" fill="#1f2328" role="img" aria-label="Tokens per second">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        _text(16, 24, "Tokens per second of a GPU, each backend beside a plain program of the same library", bold=True),
        _text(16, 43, subtitle, colour="#59636e"),
    ]
    for number, pair in enumerate(pairs):
        lines += _drawn(pair, y=TOP + PAIR * number, scale=scale)
    return "\n".join([*lines, "</svg>", ""])


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins the rounds of one pair from several files."""
    rounds = {side: [run for part in parts for run in part[side]] for side in ("of_ours", "of_plain")}
    speed = "of_steps" if all("of_steps" in part["ours_by_plain"] for part in parts) else "tokens_per_second"
    ratios = {
        name: median([ratio for part in parts for ratio in part["ours_by_plain"][key]["all"]])
        for name, key in (("speed", speed), ("memory", "peak_gib"))
    }
    return {**parts[0], **rounds, "ratios": ratios}


def _in_order(names: tuple[str, str]) -> tuple[int, str]:
    backend, layout = names[0].split()
    return [*BACKENDS].index(backend), layout


def _drawn(pair: dict[str, Any], *, y: int, scale: float) -> list[str]:
    backend, layout = pair["ours"].split()
    program, its_layout = pair["plain"].split()
    speed, memory = (pair["ratios"][key] for key in ("speed", "memory"))
    bars = (
        (f"{BACKENDS[backend]} {layout}", "of_ours", "#0b5fb0", "#063a6d"),
        (f"{PLAIN[program]} {its_layout}", "of_plain", "#b6bdc5", "#59636e"),
    )
    lines = [_text(WIDTH - RIGHT + 14, y + BAR + 4, f"{speed:.3f} x, memory {memory:.2f} x")]
    for index, (name, side, colour, dark) in enumerate(bars):
        top, speeds = y + index * (BAR + 1), _speeds(pair[side])
        long = median(speeds) * scale
        lines.append(_text(LEFT - 8, top + 12, name, anchor="end", colour="#1f2328" if index == 0 else "#59636e"))
        lines.append(f'<rect x="{LEFT}" y="{top}" width="{long:.1f}" height="{BAR}" fill="{colour}"/>')
        lines += [
            f'<rect x="{LEFT + one * scale - 1:.1f}" y="{top}" width="2" height="{BAR}" fill="{dark}"/>'
            for one in speeds
        ]
        inside = "#fff" if index == 0 else "#1f2328"
        lines.append(_text(LEFT + 6, top + 12, f"{median(speeds):,.0f}", colour=inside))
    return lines


def _speeds(runs: Iterable[dict[str, Any]]) -> list[float]:
    return [run["tokens_per_second"] for run in runs if "failed" not in run]


def _text(x: int, y: int, text: str, *, bold: bool = False, anchor: str = "start", colour: str = "#1f2328") -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(text)}</text>'


if __name__ == "__main__":
    main()
