"""The training state that all backends read: what is not as it was written is refused before anything is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.core.errors import UsageError
from impl.checkpoints.training_state import FILE, FORMAT, VERSION, import_state
from impl.interface.sharded_safetensors import SliceReader

TOLD = {"format": FORMAT, "version": VERSION, "kinds": ["weight"], "progress": {"schedule": 2.0}}


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"format": "another"}, "has format 'another'"),
        ({"version": VERSION + 1}, f"version {VERSION + 1}; this version of the suite reads"),
        ({"kinds": "weight"}, "names 'weight' as kinds of tensors"),
        ({"kinds": ["exp_avg"]}, "and weight always"),
        ({"kinds": ["weight", "../x"]}, "use some of weight, exp_avg"),
        ({"progress": [2.0]}, "progress must map names such as schedule to numbers"),
        ({"progress": {"schedule": "2"}}, "progress must map names such as schedule to numbers"),
        ({"progress": {}}, 'add it to progress, as "schedule": 100.0'),
    ],
)
def test_a_state_that_says_something_else_is_refused(tmp_path: Path, told: dict[str, Any], message: str) -> None:
    (tmp_path / FILE).write_text(json.dumps({**TOLD, **told}), encoding="utf-8")
    model: Any = None  # nothing is asked of it
    with pytest.raises(UsageError, match=message):
        import_state(tmp_path, model)


def test_a_folder_that_lacks_tensors_is_told_by_the_tensor(tmp_path: Path) -> None:
    with SliceReader(sorted(tmp_path.glob("*"))) as read, pytest.raises(UsageError, match="no tensor 'x' in an empty"):
        read.whole("x")
