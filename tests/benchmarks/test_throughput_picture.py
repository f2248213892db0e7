"""docs/images/throughput.svg: that it is what benchmarks/throughput_picture.py draws from the published numbers."""

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import throughput_picture  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
SPEEDS = {"of_ours": [110.0, 120.0, 100.0], "of_plain": [100.0, 100.0, 50.0]}


def result(folder: Path, name: str, *, ours: str = "fsdp2 dp2.ckpt", ratio: float = 1.2, **sizes: int) -> Path:
    runs = {side: [{"tokens_per_second": speed} for speed in speeds] for side, speeds in SPEEDS.items()}
    medians: dict[str, Any] = {key: {"all": [ratio] * 3} for key in ("tokens_per_second", "peak_gib")}
    pair = {"ours": ours, "plain": "plain_fsdp2.py dp2", **runs, "ours_by_plain": medians}
    unfinished = {**pair, "plain": "plain_megatron.py dp2", "of_plain": [{"failed": "no"}], "ours_by_plain": {}}
    out = folder / f"{name}.json"
    out.write_text(json.dumps({"gpus": 2, "seq": 4096, "rows": 4} | sizes | {"pairs": [pair, unfinished]}))
    return out


def test_the_picture_is_that_of_the_published_numbers() -> None:
    drawn = throughput_picture.picture(throughput_picture.PUBLISHED)
    assert (ROOT / "docs" / "images" / "throughput.svg").read_text(encoding="utf-8") == drawn


def test_bars_are_medians_and_ticks_are_rounds_of_all_files(tmp_path: Path) -> None:
    files = [
        result(tmp_path, "first", ratio=1.0),
        result(tmp_path, "second", ratio=1.4),
        result(tmp_path, "deepspeed", ours="deepspeed dp2.zero2"),
    ]
    svg = ElementTree.fromstring(throughput_picture.picture(files))
    said = [text.text or "" for text in svg.iter(f"{SVG}text")]
    assert [name for name in said if name.startswith(("FSDP2", "DeepSpeed"))] == [
        "FSDP2 dp2.ckpt",
        "DeepSpeed dp2.zero2",
    ]
    assert said.count("1.200 x, memory 1.20 x") == 2  # of two files, and of one
    bars = [float(bar.attrib["width"]) for bar in svg.iter(f"{SVG}rect")][1:]  # behind the background
    ours, *ticks = bars[:7]
    plain = bars[7]
    assert ticks == [2.0] * 6
    assert ours / plain == pytest.approx(110 / 100, rel=1e-3)


def test_the_factor_of_programs_in_turn_is_that_of_their_steps(tmp_path: Path) -> None:
    file = result(tmp_path, "one", ratio=1.4, in_turn=True)
    told = json.loads(file.read_text())
    told["pairs"][0]["ours_by_plain"]["of_steps"] = {"all": [0.9, 1.1, 1.0]}
    file.write_text(json.dumps(told))
    assert "1.000 x, memory 1.40 x" in throughput_picture.picture([file])


@pytest.mark.parametrize("sizes", [{"gpus": 1}, {"in_turn": True}])
def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, sizes: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="the same --gpus, --seq, --rows and --in-turn"):
        throughput_picture.picture([result(tmp_path, "two"), result(tmp_path, "one", **sizes)])
