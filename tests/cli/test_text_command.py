"""`parity text`: pipelines in processes of their own, exit codes, and the table. Slow; the stages have fast tests."""

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.backends.text import PipelineProcess, TextFailed
from conformance.cli import main as cli

pytestmark = pytest.mark.slow
REFERENCE = "impl.train.text_pipeline:ReferencePipeline"


def test_fault_ends_with_1_and_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--pipeline", REFERENCE, "--faults", "mask-shifted", "--out", str(tmp_path), "--json"]
    assert cli.main(["text", *arguments]) == 1
    found: list[dict[str, Any]] = json.loads((tmp_path / "text.json").read_text())
    assert found == json.loads(capsys.readouterr().out)
    assert [one["stage"] for one in found if one["state"] == "differs"] == ["mask"]


def test_templates_make_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["text", "--pipeline", REFERENCE, "--template", "phi3", "--template", "qwen3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| phi3 | text same; trains on content, end |" in lines
    assert "| qwen3 | text same; trains on scaffold, content, end |" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pipeline", "nothing"], "unknown text pipeline 'nothing'"),
        (["--pipeline", "json:JSONDecoder"], "text pipeline 'json:JSONDecoder' cannot be used, it has no describe"),
        (["--pipeline", REFERENCE, "--faults", "mask-lifted"], "unknown fault 'mask-lifted'"),
        (["--template", "qwen9"], "unknown chat template 'qwen9'"),
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["text", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_death_of_a_pipeline_is_told() -> None:
    with PipelineProcess(REFERENCE, limit_s=60) as pipeline:
        pipeline._process.process.kill()
        with pytest.raises(TextFailed, match="its process has ended"):
            pipeline.micro_batches([1], 1)
